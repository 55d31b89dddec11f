"""Tests that each refusal carries its code, and that each code is tested."""

import asyncio
from collections.abc import Callable
from contextlib import closing

import pytest

from tests.integration.broker_here import broker_here, port_of
from tests.integration.raw_client import RawClient
from truenext import testing
from truenext.engine.queues.queues import Queues
from truenext.engine.queues.unused import no_memory_error
from truenext.errors import Code
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import COMPOSITE_MAX, HEADERS_MAX, LOGIN_BYTES_MAX, SUBSCRIPTIONS_MAX, TRANSACTIONS_MAX
from truenext.store.memory import MemoryStore
from truenext.testing import BlockingBroker
from truenext.wire.stomp.server import STOMP_RULES, StompSession

TESTED_ELSEWHERE = {
    Code.TOO_SLOW: "test_pressure.py",
    Code.BUSY: "test_logins.py",
    Code.FORBIDDEN: "test_grants.py",
    Code.CLOSED: "test_inspection.py",
    Code.DRAINING: "test_drain.py",
}


def lines(*of: str) -> bytes:
    """Encode a frame without a body."""
    return "\n".join([*of, "", ""]).encode() + b"\0"


SUBSCRIBE = lines("SUBSCRIBE", "id:s", "destination:/queue/q", "ack:client-individual")
SEND = lines("SEND", "destination:/queue/q")
BEGIN = lines("BEGIN", "transaction:t")
TEMPORARY = "reply-to:/temp-queue/a"

BEFORE_CONNECT: dict[str, tuple[Code, bytes]] = {
    "bytes that are no frame": (Code.MALFORMED_FRAME, b"CONNECT\nhost\n\n\0"),
    "a login that is too large": (Code.MALFORMED_FRAME, b"CONNECT\nx:%b\n\n\0" % (b"x" * LOGIN_BYTES_MAX)),
    "a command that there is not": (Code.COMMAND, b"HELLO\nhost:a\n\n\0"),
    "a frame before CONNECT": (Code.COMMAND, SEND),
    "a version that there is not": (Code.LOGIN, lines("CONNECT", "accept-version:9")),
    "heart-beats that are none": (Code.LOGIN, lines("CONNECT", "accept-version:1.2", "heart-beat:x")),
    "a CONNECT with a receipt": (Code.LOGIN, lines("CONNECT", "accept-version:1.2", "receipt:r")),
    "a header of ours that CONNECT does not have": (Code.LOGIN, lines("CONNECT", "truenext-no:1")),
}

AFTER_CONNECT: dict[str, tuple[Code, bytes]] = {
    "a header line without a colon": (Code.MALFORMED_FRAME, lines("SEND", "destination")),
    "an undefined escape": (Code.MALFORMED_FRAME, lines("SEND", r"a:\x")),
    "too many headers": (Code.MALFORMED_FRAME, lines("SEND", *(f"a{number}:" for number in range(HEADERS_MAX + 1)))),
    "a body that no frame may have": (Code.MALFORMED_FRAME, b"ACK\nid:1@s\n\nbody\0"),
    "an unknown command": (Code.COMMAND, lines("PUBLISH")),
    "an unknown command with a body": (Code.MALFORMED_FRAME, b"PUBLISH\n\nbody\0"),
    "CONNECT once more": (Code.COMMAND, lines("CONNECT", "accept-version:1.2")),
    "a SEND without a destination": (Code.HEADER, lines("SEND")),
    "a number that is none": (Code.HEADER, lines("SEND", "destination:/queue/q", "expires:soon")),
    "a header of ours that the frame does not have": (Code.HEADER, lines("BEGIN", "transaction:t", "truenext-no:1")),
    "a name that is too long": (Code.HEADER, lines("BEGIN", f"transaction:{'t' * 256}")),
    "a number inside a transaction": (
        Code.HEADER,
        BEGIN + lines("SEND", "destination:/queue/q", "transaction:t", "truenext-producer:p", "truenext-number:1"),
    ),
    "a schedule that is none": (Code.HEADER, lines("SEND", "destination:/queue/q", "AMQ_SCHEDULED_CRON:never")),
    "a durable subscription without a client-id": (
        Code.HEADER,
        lines("SUBSCRIBE", "id:s", "destination:/topic/t", "durable:true"),
    ),
    "a window of 0": (
        Code.NOT_SUPPORTED,
        lines("SUBSCRIBE", "id:s", "destination:/queue/q", "activemq.prefetchSize:0"),
    ),
    "no-local": (Code.NOT_SUPPORTED, lines("SUBSCRIBE", "id:s", "destination:/queue/q", "no-local:true")),
    "a destination that there is not": (Code.DESTINATION, lines("SEND", "destination:/nothing/q")),
    "a destination that is too long": (Code.DESTINATION, lines("SEND", f"destination:/queue/{'q' * 300}")),
    "too many destinations in one": (
        Code.DESTINATION,
        lines("SEND", "destination:" + ",".join(["/queue/q"] * (COMPOSITE_MAX + 1))),
    ),
    "a SEND to a pattern": (Code.DESTINATION, lines("SEND", "destination:/queue/>")),
    "an option that is none": (Code.DESTINATION, lines("SUBSCRIBE", "id:s", "destination:/queue/q?a")),
    "the temporary queue of another connection": (
        Code.DESTINATION,
        lines("SUBSCRIBE", "id:s", "destination:/remote-temp-queue/another/q"),
    ),
    "a selector that is none": (
        Code.SELECTOR,
        lines("SUBSCRIBE", "id:s", "destination:/queue/q", "selector:a b"),
    ),
    "a question that is none": (Code.CONTROL_REQUEST, lines("SEND", "destination:/control/nothing", TEMPORARY)),
    "a question without what it is of": (Code.CONTROL_REQUEST, lines("SEND", "destination:/control/pause", TEMPORARY)),
    "a question for work that is none": (Code.CONTROL_REQUEST, lines("SEND", "destination:/control/purge", TEMPORARY)),
    "an UNSUBSCRIBE of nothing": (Code.NOT_FOUND, lines("UNSUBSCRIBE", "id:s")),
    "an ACK for a subscription that there is not": (Code.NOT_FOUND, lines("ACK", "id:1@s")),
    "a question for a queue that there is not": (
        Code.NOT_FOUND,
        b'SEND\ndestination:/control/purge\nreply-to:/temp-queue/a\n\n{"queue":"nobody"}\0',
    ),
    "a subscription that is there": (Code.IN_USE, SUBSCRIBE + SUBSCRIBE),
    "a transaction that is open": (Code.IN_USE, BEGIN + BEGIN),
    "an ACK of what is not held": (Code.NOT_HELD, SUBSCRIBE + lines("ACK", "id:1@s")),
    "an ACK in auto mode": (
        Code.NOT_HELD,
        lines("SUBSCRIBE", "id:s", "destination:/queue/q") + lines("ACK", "id:1@s"),
    ),
    "a SEND in a transaction that is not open": (
        Code.NO_TRANSACTION,
        lines("SEND", "destination:/queue/q", "transaction:t"),
    ),
    "an ABORT of a transaction that is not open": (Code.NO_TRANSACTION, lines("ABORT", "transaction:t")),
    "a COMMIT of a transaction that is not open": (Code.NO_TRANSACTION, lines("COMMIT", "transaction:t")),
    "a numbered COMMIT of a transaction that is gone": (
        Code.ROLLED_BACK,
        lines("COMMIT", "transaction:t", "truenext-producer:p", "truenext-number:1"),
    ),
    "a number that is too far on": (
        Code.GAP,
        lines("SEND", "destination:/queue/q", "truenext-producer:p", "truenext-number:2", "truenext-gapless:true"),
    ),
    "a question about a producer without its name": (
        Code.CONTROL_REQUEST,
        lines("SEND", "destination:/control/producer", TEMPORARY),
    ),
    "too many transactions": (
        Code.LIMIT,
        b"".join(lines("BEGIN", f"transaction:{number}") for number in range(TRANSACTIONS_MAX + 1)),
    ),
    "too many subscriptions": (
        Code.LIMIT,
        b"".join(lines("SUBSCRIBE", f"id:{number}", "destination:/queue/q") for number in range(SUBSCRIPTIONS_MAX + 1)),
    ),
}

CONNECT = lines("CONNECT", "accept-version:1.2", "host:h")


def run(use: Callable[[int], None], *, connections_max: int = 10) -> None:
    async def here() -> None:
        async with broker_here(connections_max=connections_max) as listener:
            await asyncio.get_running_loop().run_in_executor(None, use, port_of(listener))

    asyncio.run(here())


def code_of(port: int, data: bytes, *, is_connected: bool = True) -> str:
    client = RawClient(port)
    if is_connected:
        client.send_connect("1.2", "0,0")
    client.write(data)
    code = client.error().headers["truenext-code"]
    client.close()
    return code


def test_refusals_carry_their_codes() -> None:
    # C23.2
    codes: dict[str, str] = {}

    def use(port: int) -> None:
        for name, (_, frames) in BEFORE_CONNECT.items():
            codes[name] = code_of(port, frames, is_connected=False)
        for name, (_, frames) in AFTER_CONNECT.items():
            codes[name] = code_of(port, frames)

    run(use)
    assert codes == {name: code.value for name, (code, _) in (BEFORE_CONNECT | AFTER_CONNECT).items()}


def test_a_send_without_disk_space_is_refused_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a setter: what __init__ sets would hide it.
    monkeypatch.setattr(
        MemoryStore, "disk_level", property(lambda _: DiskLevel.NONE, lambda _, level: None), raising=False
    )
    codes: list[str] = []
    run(lambda port: codes.append(code_of(port, SEND)))
    assert codes == [Code.NO_SPACE.value]


def test_a_connection_without_a_login_is_ended_with_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StompSession, "rules", STOMP_RULES._replace(opening_seconds_max=0.01))
    codes: list[str] = []
    run(lambda port: codes.append(code_of(port, b"", is_connected=False)))
    assert codes == [Code.LOGIN.value]


def test_connections_beyond_the_limit_are_refused_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.server.listener.CONTROL_ONLY_CONNECTIONS_MAX", 1)
    monkeypatch.setattr("truenext.server.connection.CONTROL_ONLY_IDLE_S", 0.3)
    monkeypatch.setattr("truenext.broker.control_only.CONTROL_ONLY_IDLE_S", 0.3)
    codes: list[str] = []

    def use(port: int) -> None:
        codes.append(code_of(port, SEND))
        requester = RawClient(port)
        requester.send_connect("1.2", "0,0")
        codes.append(code_of(port, CONNECT, is_connected=False))
        codes.append(requester.error().headers["truenext-code"])
        requester.close()

    run(use, connections_max=0)
    assert codes == [Code.LIMIT.value] * 3


def connected(port: int, *codes: str) -> RawClient:
    """Send a CONNECT with further headers, and leave its CONNECTED unread."""
    client = RawClient(port)
    client.write(lines("CONNECT", "accept-version:1.2", "host:h", *codes))
    return client


def test_an_outdated_connection_is_refused_with_the_code_stale() -> None:
    codes: list[str] = []

    def use(port: int) -> None:
        second = connected(port, "truenext-client:2")
        secret = second.await_connected().headers["truenext-secret"]
        first = connected(port, "truenext-client:1", f"truenext-secret:{secret}")
        codes.append(first.error().headers["truenext-code"])
        second.close()

    run(use)
    assert codes == [Code.STALE.value]


def test_a_transaction_of_which_a_frame_was_refused_is_doomed() -> None:
    codes: list[str] = []

    def use(port: int) -> None:
        client = connected(port, "truenext-client:1")
        client.await_connected()
        client.write(BEGIN + lines("ACK", "id:1@s", "transaction:t") + lines("COMMIT", "transaction:t"))
        codes.extend(client.next_frame().headers["truenext-code"] for _ in range(2))
        client.close()

    run(use)
    assert codes == [Code.NOT_FOUND.value, Code.ROLLBACK_ONLY.value]


def test_all_codes_are_tested() -> None:
    codes = {code for code, _ in (BEFORE_CONNECT | AFTER_CONNECT).values()} | {
        Code.NO_SPACE,
        Code.STALE,
        Code.ROLLBACK_ONLY,
    }
    assert codes | TESTED_ELSEWHERE.keys() == set(Code)


def test_plain_client_refused_for_lack_of_memory_for_queues_counts_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    # C8.6, C10.2
    def refuse(queues: Queues) -> None:
        raise no_memory_error(1, queues._memory)

    def connect(broker: BlockingBroker) -> RawClient:
        client = RawClient(int(broker.url.rpartition(":")[2]))
        client.send_connect("1.2", "0,0")
        return client

    with testing.blocking_broker() as broker:
        with closing(connect(broker)) as client:
            client.send("q", b"held", confirmed=True)
            client.subscribe("q")
            assert client.message().headers["truenext-deliveries"] == "1"
            monkeypatch.setattr(Queues, "check_queue_memory", refuse)
            client.send("another", b"")
            assert client.error().headers["truenext-code"] == "no-space"
        with closing(connect(broker)) as client:
            client.subscribe("q")
            again = client.message()
    assert (again.headers["truenext-attempts"], again.headers["truenext-deliveries"]) == ("0", "2")
