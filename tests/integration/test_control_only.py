"""Tests that control requests work in a broker with as many connections, or queues, as there may be."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.integration.broker_here import broker_here, port_of
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from truenext.broker import control_only
from truenext.cli.files import FILES_OWN
from truenext.engine.state.memory import LANE_BYTES, QUEUE_BYTES, MemoryBudget
from truenext.model.limits import CONNECTIONS_BEFORE_LOGIN_MAX, CONNECTIONS_MAX, CONTROL_ONLY_CONNECTIONS_MAX
from truenext.server import connection

FEW = 3
FILES_FOR_FEW = FILES_OWN + FEW + 1 + CONTROL_ONLY_CONNECTIONS_MAX
"""One of these files is for a connection before its login."""
ANSWERS = "/temp-queue/answers"


@pytest.fixture(scope="module")
def full_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Broker whose unrestricted connections are all in use; 20 messages wait in `q`."""
    broker = BrokerProcess(tmp_path_factory.mktemp("full"), files_max=f"-n {FILES_FOR_FEW}")
    broker.start()
    try:
        clients = [broker.connect() for _ in range(FEW)]
        for _ in range(20):
            clients[0].send("q", b"x", persistent=True, confirmed=True)
        yield broker
        for client in clients:
            client.disconnect()
        broker.stop()
    finally:
        broker.clean_up()


def test_all_commands_with_control_requests_work_in_a_full_broker(full_broker: BrokerProcess) -> None:
    assert '"waiting":20' in full_broker.output_of("queues", "--json")
    assert "20 waiting in 1 queue" in full_broker.output_of("status")
    full_broker.output_of("pause", "q")
    assert "q (paused)" in full_broker.output_of("queues")
    full_broker.output_of("resume", "q")
    full_broker.output_of("move", "q", "r", "--count", "5")
    full_broker.output_of("purge", "q")
    assert full_broker.queues().keys() == {"q", "r"}
    assert full_broker.queues()["r"].waiting == 5
    full_broker.output_of("move", "r", "q")
    full_broker.output_of("scheduled", "q")


@pytest.mark.parametrize(
    ("command", "headers"),
    [
        ("SEND", {"destination": "/queue/q"}),
        ("SEND", {"destination": "/topic/t"}),
        ("SEND", {"destination": ANSWERS}),
        ("SUBSCRIBE", {"id": "1", "destination": "/queue/q"}),
        ("SUBSCRIBE", {"id": "1", "destination": "/queue/>"}),
        ("SUBSCRIBE", {"id": "1", "destination": "/topic/t"}),
        ("SUBSCRIBE", {"id": "1", "destination": "/topic/t", "durable": "true"}),
        ("SUBSCRIBE", {"id": "1", "destination": "/remote-temp-queue/another/answers"}),
        ("SUBSCRIBE", {"id": "1", "destination": ANSWERS, "browser": "true"}),
        ("UNSUBSCRIBE", {"id": "1", "durable": "true"}),
        ("BEGIN", {"transaction": "t"}),
        ("COMMIT", {"transaction": "t"}),
        ("ABORT", {"transaction": "t"}),
    ],
)
def test_frames_other_than_control_requests_are_refused_with_the_limit(
    full_broker: BrokerProcess, command: str, headers: dict[str, str]
) -> None:
    client = full_broker.connect(sends_connect=False)
    client.send_connect("1.2", "0,0", client_id="c")
    client.send_frame(command, headers | {"receipt": "r"})
    error = client.error()
    text = error.body.decode()
    assert text.startswith(
        f"the listener has {FEW} connections, the most that it accepts with the system's limit of open"
    )
    assert "limit of open files (ulimit -n): this connection may only send control requests (SEND to /control/)" in text
    assert error.headers["receipt-id"] == "r"


def test_an_answer_can_be_acknowledged_and_the_subscription_ended(full_broker: BrokerProcess) -> None:
    client = full_broker.connect()
    client.send_frame("SUBSCRIBE", {"id": "a", "destination": ANSWERS, "ack": "client-individual"}, confirmed=True)
    client.send_frame("SEND", {"destination": "/control/status", "reply-to": ANSWERS})
    client.ack(client.message(), confirmed=True)
    client.unsubscribe("a")
    client.disconnect()


def test_the_eleventh_connection_beyond_the_limit_is_refused_until_others_have_left(
    full_broker: BrokerProcess,
) -> None:
    beyond = [full_broker.connect() for _ in range(CONTROL_ONLY_CONNECTIONS_MAX)]
    rejected_client = full_broker.connect(sends_connect=False)
    rejected_client.send_frame("CONNECT", {"accept-version": "1.2", "host": "h"})
    text = rejected_client.next_frame()
    assert text.command == "ERROR"
    assert f"the listener has {FEW} connections" in text.body.decode()
    assert f"and {CONTROL_ONLY_CONNECTIONS_MAX} more for control requests alone" in text.body.decode()
    rejected_client.await_end()
    logged = "connection refused: connections_max is reached, also for control requests"
    assert f"{logged} client='127.0.0.1:{rejected_client.local_port}'" in full_broker.log
    full_broker._log_checked = len(full_broker.log)
    beyond[0].disconnect()
    deadline = time.monotonic() + PATIENCE_SECONDS
    # No command: on a busy machine its start takes longer than the others may be idle.
    while not _is_let_in(full_broker):
        assert time.monotonic() < deadline, "no other client is let in"
    full_broker._log_checked = len(full_broker.log)
    for client in beyond[1:]:
        client.close()


def _is_let_in(broker: BrokerProcess) -> bool:
    """Return whether one more client can log in, which then leaves."""
    client = broker.connect(sends_connect=False)
    client.send_frame("CONNECT", {"accept-version": "1.2", "host": "h"})
    is_let_in = client.next_frame().command == "CONNECTED"
    client.close()
    return is_let_in


def test_users_without_a_right_take_no_place_of_operators(tmp_path: Path) -> None:
    """Refused connections stay open for a while: they must not be counted among those beyond the limit."""
    users = tmp_path / "users.toml"
    users.write_text(
        '[user.root]\npassword_file = "word"\nmonitor = true\n'
        '[user.shop]\npassword_file = "word"\nsend = [">"]\ntake = [">"]\n'
    )
    (tmp_path / "word").write_text("word")
    for file in (users, tmp_path / "word"):
        file.chmod(0o600)
    broker = BrokerProcess(tmp_path, ["--users", str(users)], files_max=f"-n {FILES_FOR_FEW + 20}")
    broker.start()
    try:
        shop = {"login": "shop", "passcode": "word"}
        # Files for few clients and 20 more, of which a quarter is for connections before their login.
        clients = [broker.connect(headers=shop) for _ in range(FEW + 15)]
        refused = []
        for _ in range(CONTROL_ONLY_CONNECTIONS_MAX + 5):
            client = broker.connect(sends_connect=False)
            client.send_frame("CONNECT", {"accept-version": "1.2", "host": "h"} | shop)
            error = client.next_frame()
            assert "only users with the right monitor or admin may exceed it" in error.body.decode()
            refused.append(client)
            root = broker.connect(headers={"login": "root", "passcode": "word"})
            root.disconnect()
        for client in (*clients, *refused):
            client.close()
        broker._log_checked = len(broker.log)
        broker.stop()
    finally:
        broker.clean_up()


# ---- In the test's own process ----


def run(use: Callable[[int], None], *, connections_max: int = FEW, before_login_max: int = 200) -> None:
    async def here() -> None:
        async with broker_here(connections_max=connections_max, before_login_max=before_login_max) as listener:
            await asyncio.get_running_loop().run_in_executor(None, use, port_of(listener))

    asyncio.run(here())


def hello(port: int) -> RawClient:
    client = RawClient(port)
    client.send_connect("1.2", "0,0")
    return client


def control_request(client: RawClient) -> None:
    client.send_frame("SEND", {"destination": "/control/queues", "reply-to": ANSWERS})
    client.message()


def test_an_idle_control_only_connection_is_ended_and_a_busy_one_is_not() -> None:
    def use(port: int) -> None:
        others = [hello(port) for _ in range(FEW)]
        silent, asking_client = hello(port), hello(port)
        asking_client.send_frame("SUBSCRIBE", {"id": "a", "destination": ANSWERS}, confirmed=True)
        started = time.monotonic()
        while time.monotonic() - started < 3:
            control_request(asking_client)
            time.sleep(0.1)
        assert "may only send control requests, and has sent none for 1 seconds" in silent.error().body.decode()
        control_request(asking_client)
        assert "has sent none for 1 seconds" in asking_client.error().body.decode()
        for client in others:
            client.disconnect()

    with (
        mock.patch.object(control_only, "CONTROL_ONLY_IDLE_S", 1.0),
        mock.patch.object(connection, "CONTROL_ONLY_IDLE_S", 1.0),
    ):
        run(use)


@pytest.mark.parametrize("is_cut", [False, True], ids=["frozen", "cut"])
def test_a_takeover_in_a_full_broker_gives_the_client_its_place_without_restrictions(is_cut: bool) -> None:
    def use(port: int) -> None:
        def numbered(number: int, secret: str = "") -> RawClient:
            client = RawClient(port)
            text = {"truenext-client": str(number)} | ({"truenext-secret": secret} if secret else {})
            client.send_connect("1.2", "0,0", headers=text)
            return client

        ghost, *others = (numbered(1) for _ in range(FEW))
        if is_cut:
            ghost.subscribe("q")
            ghost.send("q", b"begun")
            ghost.started(ghost.message())
            ghost.close()
        back = numbered(2, ghost.connected.headers["truenext-secret"])
        assert back.connected.headers["truenext-taken-over"] == "true"
        if not is_cut:
            ghost.await_silent_end()
        back.send("q", b"all is allowed", confirmed=True)
        time.sleep(1.5)
        back.send("q", b"and for as long as it likes", confirmed=True)
        # The place of the ghost is taken: whoever comes now may only ask.
        beyond = hello(port)
        beyond.send("q", b"x")
        assert "may only send control requests" in beyond.error().body.decode()
        for client in (back, *others):
            client.disconnect()

    with (
        mock.patch.object(control_only, "CONTROL_ONLY_IDLE_S", 1.0),
        mock.patch.object(connection, "CONTROL_ONLY_IDLE_S", 1.0),
    ):
        run(use)


def test_a_control_request_that_came_while_the_broker_was_suspended_is_answered() -> None:
    async def here() -> None:
        loop = asyncio.get_running_loop()

        def use(port: int) -> None:
            other, asking_client = hello(port), hello(port)
            asking_client.send_frame("SUBSCRIBE", {"id": "a", "destination": ANSWERS}, confirmed=True)
            loop.call_soon_threadsafe(time.sleep, 1.5)
            time.sleep(0.2)
            control_request(asking_client)
            asking_client.disconnect()
            other.disconnect()

        async with broker_here(connections_max=1) as listener:
            await loop.run_in_executor(None, use, port_of(listener))

    with (
        mock.patch.object(control_only, "CONTROL_ONLY_IDLE_S", 1.0),
        mock.patch.object(connection, "CONTROL_ONLY_IDLE_S", 1.0),
    ):
        asyncio.run(here())


def test_a_new_connection_is_unrestricted_once_others_left_though_a_control_only_one_stays() -> None:
    def use(port: int) -> None:
        others = [hello(port) for _ in range(FEW)]
        asking_client = hello(port)
        asking_client.send_frame("SUBSCRIBE", {"id": "a", "destination": ANSWERS}, confirmed=True)
        others.pop().disconnect()
        client = None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while client is None:
            assert time.monotonic() < deadline, "it is still taken for one too many"
            control_request(asking_client)
            client = hello(port)
            client.send_frame("SEND", {"destination": "/queue/q", "receipt": "r"}, b"x")
            if client.next_frame().command == "ERROR":
                client.close()
                client = None
        asking_client.send_frame("SEND", {"destination": "/queue/q"}, b"y")
        assert "may only send control requests" in asking_client.error().body.decode()
        client.subscribe("q")
        assert bodies(client.arrived()) == ["x"]
        for each in (*others, client):
            each.disconnect()

    run(use)


def test_answers_to_control_requests_have_a_queue_though_the_limit_of_queues_is_reached() -> None:
    def use(port: int) -> None:
        sender = hello(port)
        sender.send("a", b"")
        sender.send("b", b"", confirmed=True)
        asking_client = hello(port)
        asking_client.send_frame("SUBSCRIBE", {"id": "a", "destination": ANSWERS}, confirmed=True)
        control_request(asking_client)
        asking_client.send_frame("SUBSCRIBE", {"id": "b", "destination": "/temp-queue/another"})
        assert "queues" in asking_client.error().body.decode()
        # Without a subscription the question itself makes it.
        asking_client = hello(port)
        asking_client.send_frame("SEND", {"destination": "/control/queues", "reply-to": ANSWERS}, confirmed=True)
        asking_client.send_frame("SUBSCRIBE", {"id": "a", "destination": ANSWERS})
        assert b'"name":"b"' in asking_client.message().body
        asking_client.disconnect()
        listens = hello(port)
        listens.send_frame("SUBSCRIBE", {"id": "a", "destination": "/topic/t"})
        assert "queues" in listens.error().body.decode(), "nothing is answered there"
        sender.send("c", b"")
        assert "queues" in sender.error().body.decode()

    of_two = 2 * (QUEUE_BYTES + LANE_BYTES)
    with mock.patch.object(MemoryBudget, "has_space_for_queue", property(lambda memory: memory.queue_bytes < of_two)):
        run(use)


# ---- Connections before their login ----


def test_connections_without_connect_take_no_place_of_clients_and_the_oldest_goes_for_the_next() -> None:
    def use(port: int) -> None:
        silent = [RawClient(port) for _ in range(5)]
        time.sleep(0.4)
        clients = [hello(port) for _ in range(FEW - 1)]
        # The place of the first silent one was enough for these, one after the other.
        error = silent[0].next_frame()
        assert error.headers["truenext-code"] == "limit"
        assert "no CONNECT yet, and 5 newer connections wait to log in" in error.body.decode()
        silent[0].await_end()
        late = silent[1]
        late.send_connect("1.2", "0,0")
        late.send("q", b"x", confirmed=True)
        for client in (late, *clients):
            client.disconnect()
        for each in silent[2:]:
            each.close()

    run(use, before_login_max=5)


def test_many_clients_that_connect_at_once_all_log_in_though_few_places_are_before_login() -> None:
    def use(port: int) -> None:
        clients = [RawClient(port) for _ in range(40)]
        for client in clients:
            client.send_connect("1.2", "0,0")
        for client in clients:
            client.disconnect()

    run(use, connections_max=40, before_login_max=3)


# ---- Files ----


def files_of(broker: BrokerProcess) -> list[str]:
    """Return the soft and the hard limit of open files."""
    (line,) = (line for line in Path(f"/proc/{broker.pid}/limits").read_text().splitlines() if "open files" in line)
    return line.split()[3:5]


def test_the_broker_asks_for_as_many_files_as_its_connections_may_need(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, files_max="-S -n 200")
    broker.start()
    try:
        files_needed = FILES_OWN + CONNECTIONS_MAX + CONNECTIONS_BEFORE_LOGIN_MAX + CONTROL_ONLY_CONNECTIONS_MAX
        soft, hard = files_of(broker)
        assert int(soft) == files_needed if hard == "unlimited" else int(soft) == min(files_needed, int(hard))
        broker.stop()
    finally:
        broker.clean_up()


def test_a_broker_with_too_few_files_says_how_many_it_needs(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, files_max=f"-n {FILES_FOR_FEW - FEW}")
    with pytest.raises(AssertionError, match="broker said ''"):
        broker.start()
    assert broker.wait_for_end() != 0
    assert f"the broker needs at least {FILES_FOR_FEW - FEW + 1}: raise the limit" in broker.log
    assert "ulimit -n" in broker.log
