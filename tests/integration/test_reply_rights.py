"""Tests of who may send to temporary queues and topics of other users, over sockets.

Source of what is expected: docs/contract.md, C8.1, C23.8 to C23.11, C25.5; docs/security.md, "Temporary queues and
topics". `ReplyOracle` is written from these clauses.

Users: `caller` and `rival` send requests to `/queue/work.*` and own temporary queues; `service` and `helper` take them
and may send to nobody's queue but `passed.*`; `snoop` may browse them, and has a queue of its own.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broker_process import TINY_LIMITS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies, numbered
from tests.integration.test_grants import LATER, RequestRefused, UserClient, UserText
from truenext.model.limits import REPLY_DESTINATIONS_MAX
from truenext.wire.stomp.frame import Frame

USERS = {
    "caller": ["send work.>", "send /topic/work.>", "manage work.>", "send passed.*"],
    "rival": ["send work.>"],
    "service": ["take work.>", "take DLQ.work.>", "take /topic/work.>", "send passed.*"],
    "helper": ["take work.>", "take passed.*"],
    "snoop": ["browse work.>", "send own.*", "take own.*"],
    **{colour: [f"{right} shared.*" for right in ("send", "take", "browse")] for colour in ("red", "green", "blue")},
    "admin": ["send >", "take >", "admin", "monitor", "manage >", "manage DLQ.>"],
}
Connect = Callable[..., UserClient]


def write_users(file: Path, *, without: Sequence[str] = ()) -> None:
    users = UserText()
    for name, has in USERS.items():
        if name not in without:
            users.add(name, has)
    users.write(file)


class Guarded:
    """Broker with these users, and its clients."""

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        self.file = folder / "users.toml"
        write_users(self.file)
        self.broker = BrokerProcess(folder, ["--users", str(self.file), *options])
        self.clients: list[UserClient] = []

    def connect(self, user: str, prefix: str = "", **options: Any) -> UserClient:
        self.clients.append(UserClient(self.broker.port, user, prefix, **{"headers": TRUENEXT_CLIENT} | options))
        return self.clients[-1]

    def close_clients(self) -> None:
        for client in self.clients:
            client.close()
        self.clients.clear()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path_factory.mktemp("guarded"))
    try:
        guarded.broker.start()
        yield guarded
        guarded.broker.stop()
    finally:
        guarded.broker.clean_up()


@pytest.fixture
def connect(running: Guarded) -> Iterator[Connect]:
    yield running.connect
    running.close_clients()
    assert running.broker.is_running, running.broker.log
    running.broker.check_log()


# ---- Requests and replies ----


def own(client: UserClient, name: str = "replies", kind: str = "queue") -> str:
    """Subscribe to a temporary queue or topic, and return its address for others."""
    client.request("SUBSCRIBE", {"id": f"{kind} {name}", "destination": f"/temp-{kind}/{name}"})
    return address_of(client, name, kind)


def address_of(client: UserClient, name: str = "replies", kind: str = "queue") -> str:
    return f"/remote-temp-{kind}/{client.session}/{name}"


def take(client: UserClient, destination: str, *, id: str = "work") -> Frame:
    """Subscribe, and return the only message that is dispatched."""
    headers = {"id": id, "destination": destination, "ack": "client-individual", "activemq.prefetchSize": "1"}
    client.request("SUBSCRIBE", headers)
    return client.message()


def request_from(connect: Connect, caller: UserClient, reply_to: str, user: str = "service") -> UserClient:
    """Dispatch a request with this reply-to to a user, and return its client."""
    queue = f"/queue/work.asked.{caller.session}.{user}.{random.random()}"
    caller.send_to(queue, headers={"reply-to": reply_to})
    client = connect(user)
    assert take(client, queue).headers["reply-to"] == reply_to
    return client


def refusal(request: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Return the text with which a request is refused for lack of a right."""
    with pytest.raises(RequestRefused) as refused:
        request(*arguments, **options)
    assert refused.value.code == "forbidden", refused.value
    return refused.value.text


def temporary_queues(admin: UserClient) -> set[str]:
    """Return the names of the temporary queues of all connections; there must be few."""
    return {each["name"] for each in admin.ask("status")["temporary"]["largest"]}


def is_refused(client: UserClient, address: str, **options: Any) -> None:
    """Check that a SEND of a client without the right to reply is refused with the reason."""
    text = refusal(client.send_to, address, b"intruded", **options)
    assert "the broker has dispatched to this user no message whose reply-to names this temporary" in text
    assert text.endswith("of another user")


def arrived(client: UserClient) -> list[str]:
    return bodies(client.arrived())


# ---- SEND to another user's temporary queue (C23.8, C23.9) ----


def test_request_that_only_a_browser_was_shown_gives_no_right_to_reply(connect: Connect) -> None:
    # C23.8
    caller, snoop = connect("caller"), connect("snoop", headers={})
    address = own(caller)
    caller.send_to("/queue/work.shown", headers={"reply-to": address})
    snoop.request("SUBSCRIBE", {"id": "b", "destination": "/queue/work.shown", "browser": "true"})
    assert snoop.message().headers["reply-to"] == address
    is_refused(snoop, address)
    assert not arrived(caller)


@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_user_that_was_dispatched_a_request_may_reply_on_any_of_its_connections(connect: Connect, kind: str) -> None:
    # C23.8, C23.9
    caller = connect("caller")
    address = own(caller, kind=kind)
    service = connect("service")
    is_refused(service, address)
    replier = request_from(connect, caller, address)
    service.send_to(address, b"on an earlier connection")
    replier.send_to(address, b"on its own")
    replier.disconnect()
    connect("service").send_to(address, b"on a later connection")
    is_refused(connect("helper"), address)
    assert arrived(caller) == ["on an earlier connection", "on its own", "on a later connection"]


def test_queue_and_topic_of_one_name_have_rights_of_their_own(connect: Connect) -> None:
    # C23.8
    caller = connect("caller")
    queue, topic = own(caller, "both"), own(caller, "both", "topic")
    service = request_from(connect, caller, topic)
    is_refused(service, queue)
    helper = request_from(connect, caller, queue, "helper")
    is_refused(helper, topic)
    is_refused(helper, own(caller, "both and more"))


def _released(client: UserClient, request: Frame) -> None:
    client.request("SEND", {"destination": "/control/release"}, b'{"subscriptions": ["work"]}')


def _nacked(client: UserClient, request: Frame) -> None:
    client.nack(request, confirmed=True)


def _rejected(client: UserClient, request: Frame) -> None:
    client.nack(request, headers={"truenext-reject": "true"}, confirmed=True)


def _unsubscribed(client: UserClient, request: Frame) -> None:
    client.request("UNSUBSCRIBE", {"id": "work"})


def _aborted(client: UserClient, request: Frame) -> None:
    client.send_frame("BEGIN", {"transaction": "t"})
    client.ack(request, transaction="t")
    client.request("ABORT", {"transaction": "t"})


@pytest.mark.parametrize("end", [_released, _nacked, _rejected, _unsubscribed, _aborted])
def test_right_to_reply_outlives_the_end_of_the_dispatch(
    connect: Connect, end: Callable[[UserClient, Frame], None]
) -> None:
    # C23.8
    caller, service = connect("caller"), connect("service")
    address = own(caller)
    queue = f"/queue/work.ended.{end.__name__}"
    caller.send_to(queue, headers={"reply-to": "/temp-queue/replies"})
    end(service, take(service, queue))
    service.send_to(address, b"reply")
    assert arrived(caller) == ["reply"]


def _scheduled(caller: UserClient, queue: str, headers: dict[str, str]) -> str:
    caller.send_to(queue, headers={"AMQ_SCHEDULED_DELAY": "1", **headers})
    return queue


def _in_a_transaction(caller: UserClient, queue: str, headers: dict[str, str]) -> str:
    caller.send_frame("BEGIN", {"transaction": "t"})
    caller.send_to(queue, headers={"transaction": "t", **headers})
    caller.request("COMMIT", {"transaction": "t"})
    return queue


def _moved(caller: UserClient, queue: str, headers: dict[str, str]) -> str:
    caller.send_to(f"{queue}.from", headers=headers)
    name = queue.removeprefix("/queue/")
    assert caller.ask("move", {"queue": f"{name}.from", "to": name})["moved"] == 1
    return queue


def _from_a_pattern(caller: UserClient, queue: str, headers: dict[str, str]) -> str:
    caller.send_to(queue, headers=headers)
    return f"{queue}.>".replace(".way.", ".*.").removesuffix(".>")


def _with_a_time_to_live(caller: UserClient, queue: str, headers: dict[str, str]) -> str:
    caller.send_to(queue, headers={"truenext-ttl": "3600000", "x-reply-to": "/queue/other", **headers})
    return queue


def _persistent(caller: UserClient, queue: str, headers: dict[str, str]) -> str:
    caller.send_to(queue, headers={"persistent": "true", **numbered(f"p {random.random()}", 1), **headers})
    return queue


def _of_a_group(caller: UserClient, queue: str, headers: dict[str, str]) -> str:
    caller.send_to(queue, headers={"JMSXGroupID": "g", **headers})
    return queue


WAYS = [_scheduled, _in_a_transaction, _moved, _from_a_pattern, _with_a_time_to_live, _persistent, _of_a_group]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["replies", "a:b\\c"], ids=["plain", "escaped"])
def test_request_gives_the_right_whatever_way_it_came(connect: Connect, way: Callable[..., str], name: str) -> None:
    # C23.8
    caller, service = connect("caller"), connect("service")
    address = own(caller, name)
    source = way(caller, f"/queue/work.way.{way.__name__}{len(name)}", {"reply-to": f"/temp-queue/{name}"})
    is_refused(service, address)
    assert take(service, source).headers["reply-to"] == address
    service.send_to(address, b"reply")
    assert arrived(caller) == ["reply"]


@pytest.mark.parametrize("destination", ["/topic/work.news", "/queue/work.express"])
@pytest.mark.parametrize("headers", [{}, {"ack": "auto"}, {"selector": "colour = 'red'"}], ids=str)
def test_request_gives_the_right_to_each_kind_of_subscriber(
    connect: Connect, destination: str, headers: dict[str, str]
) -> None:
    # C23.8: a copy of a topic, a subscription in auto mode, a selector.
    caller, service = connect("caller"), connect("service")
    address = own(caller)
    destination += str(len(str(headers)))
    service.request("SUBSCRIBE", {"id": "s", "destination": destination, "ack": "client", **headers})
    caller.send_to(destination, headers={"reply-to": address, "colour": "red"})
    assert service.message().headers["reply-to"] == address
    service.send_to(address, b"reply")
    assert arrived(caller) == ["reply"]


def test_dead_letter_and_a_redriven_one_give_the_right(connect: Connect) -> None:
    # C23.8
    caller, service, helper, admin = (connect(user) for user in ("caller", "service", "helper", "admin"))
    address = own(caller)
    caller.send_to("/queue/work.dead", headers={"reply-to": address})
    _rejected(admin, take(admin, "/queue/work.dead"))
    admin.request("UNSUBSCRIBE", {"id": "work"})
    _released(service, take(service, "/queue/DLQ.work.dead"))
    service.request("UNSUBSCRIBE", {"id": "work"})
    service.send_to(address, b"of a dead letter")
    assert admin.ask("redrive", {"queue": "DLQ.work.dead"})["moved"] == 1
    take(helper, "/queue/work.dead")
    helper.send_to(address, b"of a redriven one")
    assert arrived(caller) == ["of a dead letter", "of a redriven one"]


def test_repeated_reply_to_counts_by_its_first(connect: Connect) -> None:
    # C23.8: STOMP 1.2, "Repeated Header Entries"
    caller, service = connect("caller"), connect("service")
    first, second = own(caller, "first"), own(caller, "second")
    caller.write(f"SEND\ndestination:/queue/work.twice\nreply-to:{first}\nreply-to:{second}\n\n\0".encode())
    caller.barrier()
    take(service, "/queue/work.twice")
    is_refused(service, second)
    service.send_to(first, b"reply")
    assert arrived(caller) == ["reply"]


def test_caller_sends_to_its_queue_from_all_its_connections(connect: Connect) -> None:
    # C23.9 is about other users: of a user's own a queue is made, as ever.
    caller, other = connect("caller"), connect("caller")
    address = own(caller)
    other.send_to(address, b"from another connection")
    other.send_to(address_of(caller, "new"), b"to a new queue")
    caller.request("SUBSCRIBE", {"id": "new", "destination": "/temp-queue/new"})
    assert arrived(caller) == ["from another connection", "to a new queue"]


def test_answer_of_the_broker_needs_no_right(connect: Connect) -> None:
    # C23.9
    assert connect("snoop").ask("queues") is not None


# ---- What is not there (C8.1, C25.5) ----


@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_send_to_what_is_not_there_is_dropped_and_makes_no_queue(connect: Connect, kind: str) -> None:
    # C8.1, C23.9, C25.5
    caller, snoop, admin = connect("caller"), connect("snoop"), connect("admin")
    gone = connect("caller")
    addresses = [address_of(caller, "new", kind), own(gone, "replies", kind), f"/remote-temp-{kind}/unknown/new"]
    gone.disconnect()
    before = temporary_queues(admin)
    for number, address in enumerate(addresses):
        snoop.send_to(address, b"dropped")
        snoop.send_to(address, b"dropped", numbered(f"n {kind}", number + 1))
        snoop.send_to(f"{address},/queue/own.{kind}", b"%d" % number)
        snoop.send_frame("BEGIN", {"transaction": "t"})
        snoop.send_to(address, b"dropped", {"transaction": "t"})
        snoop.send_to(f"/queue/own.{kind},{address}", b"%d in a transaction" % number, {"transaction": "t"})
        snoop.request("COMMIT", {"transaction": "t"})
    assert temporary_queues(admin) == before
    caller.request("SUBSCRIBE", {"id": "new", "destination": f"/temp-{kind}/new"})
    assert not arrived(caller)
    snoop.request("SUBSCRIBE", {"id": "own", "destination": f"/queue/own.{kind}"})
    texts = [f"{number}{end}" for number in range(3) for end in ("", " in a transaction")]
    assert bodies(snoop.only(len(texts))) == texts


@pytest.mark.parametrize("kind", ["queue", "topic"])
def test_send_that_was_dropped_in_a_transaction_is_not_in_what_comes_before_the_commit(
    connect: Connect, kind: str
) -> None:
    # C23.9: the SEND decides, not COMMIT.
    caller, snoop = connect("caller"), connect("snoop")
    snoop.send_frame("BEGIN", {"transaction": "t"})
    for address in (address_of(caller, "late", kind), f"{address_of(caller, 'late', kind)},/queue/own.late"):
        snoop.send_to(address, b"intruded", {"transaction": "t"})
    own(caller, "late", kind)
    snoop.request("COMMIT", {"transaction": "t"})
    assert not arrived(caller)


def test_caller_that_has_given_up_fails_no_transaction(connect: Connect) -> None:
    # C23.9, C23.10, C25.5: nor does it fail who passes the request on.
    caller, service = connect("caller"), connect("service")
    address = own(caller)
    caller.send_to("/queue/work.given.up", headers={"reply-to": address})
    request = take(service, "/queue/work.given.up")
    caller.disconnect()
    service.send_frame("BEGIN", {"transaction": "t"})
    service.ack(request, transaction="t")
    service.send_to(address, headers={"transaction": "t"})
    service.send_to("/queue/passed.on", headers={"transaction": "t", "reply-to": address})
    service.request("COMMIT", {"transaction": "t"})
    assert take(connect("helper"), "/queue/passed.on").headers["reply-to"] == address


# ---- Several destinations, transactions, the last destination ----


def test_each_part_of_a_composite_destination_needs_the_right(connect: Connect) -> None:
    # C23.9
    caller, rival = connect("caller"), connect("rival")
    known, unknown = own(caller), own(rival)
    service = request_from(connect, caller, known)
    service.request("SUBSCRIBE", {"id": "own", "destination": "/temp-queue/own"})
    for several in (f"{known},{unknown}", f"/queue/passed.x,{unknown}", f"/temp-queue/own,{unknown},{known}"):
        is_refused(service, several)
        is_refused(service, several)
    service.send_to(f"{known},/temp-queue/own", b"both")
    assert (arrived(caller), arrived(rival), arrived(service)) == (["both"], [], ["both"])


def test_each_part_of_a_composite_reply_to_gives_the_right(connect: Connect) -> None:
    # C23.8, C23.10
    caller = connect("caller")
    first, second, third = own(caller, "1"), own(caller, "2"), own(caller, "3", "topic")
    service = request_from(connect, caller, f"/queue/passed.replies,{first} , {third}")
    service.send_to(f"{first},{third}", b"reply")
    is_refused(service, second)
    refusal(service.send_to, "/queue/passed.x", headers={"reply-to": f"{first},{second}"})
    assert arrived(caller) == ["reply", "reply"]


def test_transaction_of_a_refused_reply_can_only_be_aborted(connect: Connect) -> None:
    # C23.5, C23.9
    caller, snoop = connect("caller"), connect("snoop")
    address = own(caller)
    snoop.send_frame("BEGIN", {"transaction": "t"})
    is_refused(snoop, address, headers={"transaction": "t"})
    with pytest.raises(RequestRefused):
        snoop.request("COMMIT", {"transaction": "t"})
    assert not arrived(caller)


def test_last_destination_of_a_connection_is_checked_again(connect: Connect) -> None:
    """Sends to the last destination skip other checks: `UserSessions._last_targets`."""
    # C23.9
    caller, snoop = connect("caller"), connect("snoop")
    address = address_of(caller, "later")
    several = f"{address},/queue/own.last"
    for _ in range(2):
        snoop.send_to(address, b"dropped")
        snoop.send_to(several, b"dropped")
    own(caller, "later")
    for _ in range(2):
        is_refused(snoop, address)
        is_refused(snoop, several)
    # A reply-to is checked though the queue is the last destination.
    for _ in range(2):
        snoop.send_to("/queue/own.last")
        refusal(snoop.send_to, "/queue/own.last", headers={"reply-to": address})
    assert not arrived(caller)


# ---- reply-to (C23.10) ----


@pytest.mark.parametrize("headers", [{}, LATER, numbered("p", 1), {"truenext-ttl": "1000"}], ids=str)
def test_user_cannot_give_itself_the_right(connect: Connect, headers: dict[str, str]) -> None:
    # C23.10
    caller, snoop = connect("caller"), connect("snoop")
    address = own(caller)
    for reply_to in (address, address_of(caller, "future"), address_of(caller, "future", "topic")):
        text = refusal(snoop.send_to, "/queue/own.x", headers={"reply-to": reply_to, **headers})
        assert (
            f"name {reply_to} in reply-to: the broker has dispatched to this user no message whose reply-to names this "
            "temporary" in text
        )
    snoop.send_frame("BEGIN", {"transaction": "t"})
    refusal(snoop.send_to, "/queue/own.x", headers={"reply-to": address, "transaction": "t"})
    # More parts than a SEND may have name none.
    snoop.send_to("/queue/own.x", headers={"reply-to": ",".join([address] * 101)})
    take(snoop, "/queue/own.x")
    is_refused(snoop, address)


def test_request_that_is_passed_on_gives_the_right(connect: Connect) -> None:
    # C23.8, C23.10
    caller, helper = connect("caller"), connect("helper")
    address = own(caller)
    service = request_from(connect, caller, address)
    service.send_to("/queue/passed.further", headers={"reply-to": address})
    is_refused(helper, address)
    take(helper, "/queue/passed.further")
    helper.send_to(address, b"reply")
    assert arrived(caller) == ["reply"]


def test_request_before_its_queue_or_topic_is_there_gives_the_right(connect: Connect) -> None:
    # C23.8, C23.11
    caller = connect("caller")
    service = request_from(connect, caller, address_of(caller, "late"))
    request_from(connect, caller, address_of(caller, "late", "topic"))
    service.send_to(address_of(caller, "late"), b"dropped")
    queue, topic = own(caller, "late"), own(caller, "late", "topic")
    service.send_to(queue, b"to the queue")
    service.send_to(topic, b"to the topic")
    assert arrived(caller) == ["to the queue", "to the topic"]


# ---- Ends (C23.11) ----


def test_topic_named_longest_ago_is_forgotten_and_existing_queue_is_not(connect: Connect) -> None:
    # C23.11
    caller, service = connect("caller"), connect("service")
    queue, first, second = own(caller), own(caller, "0", "topic"), own(caller, "1", "topic")
    service.request("SUBSCRIBE", {"id": "many", "destination": "/queue/work.many", "ack": "auto"})

    def call(*addresses: str) -> None:
        for address in addresses:
            caller.send_frame("SEND", {"destination": "/queue/work.many", "reply-to": address})
        service.messages(len(addresses))

    call(queue, *(address_of(caller, str(number), "topic") for number in range(REPLY_DESTINATIONS_MAX)))
    service.send_to(first, b"first")
    call(address_of(caller, "one more", "topic"))
    is_refused(service, first)
    service.send_to(second, b"second")
    service.send_to(queue, b"queue")
    call(first)
    service.send_to(first, b"again")
    assert arrived(caller) == ["first", "second", "queue", "again"]


def test_users_that_a_reload_removes_are_forgotten_and_others_are_not(tmp_path: Path) -> None:
    # C23.11
    guarded = Guarded(tmp_path)
    try:
        guarded.broker.start()
        caller, admin = guarded.connect("caller"), guarded.connect("admin")
        address = own(caller)
        request_from(guarded.connect, caller, address, "service")
        helper = request_from(guarded.connect, caller, address, "helper")
        for without in (["service"], []):
            write_users(guarded.file, without=without)
            admin.ask("reload")
        is_refused(guarded.connect("service"), address)
        helper.send_to(address, b"still there")
        assert arrived(caller) == ["still there"]
        guarded.close_clients()
        guarded.broker.stop()
    finally:
        guarded.broker.clean_up()


def test_reply_to_a_lost_caller_that_is_taken_over_is_never_refused(connect: Connect) -> None:
    # C22.6, C23.9, C25.5: the lost connection waits for its client with its queues, then they end.
    caller, service = connect("green"), connect("blue")
    address = own(caller)
    caller.send_to("/queue/shared.taken", headers={"reply-to": address})
    take(service, "/queue/shared.taken")
    caller.send_to("/queue/shared.held")
    held = take(caller, "/queue/shared.held")
    caller.request("SEND", {"destination": "/control/started", "id": held.headers["ack"]})
    secret = caller.connected.headers["truenext-secret"]
    caller.reset()
    service.send_to(address, b"to the lost connection")
    later = connect("green", headers={"truenext-client": "2", "truenext-secret": secret})
    assert later.connected.headers["truenext-taken-over"] == "true"
    own(later)
    service.send_to(address, b"to a connection that has ended")
    is_refused(service, address_of(later))
    assert not arrived(later)


def test_requests_from_the_store_give_the_right(tmp_path: Path) -> None:
    # C23.8: most messages leave memory, and are read from the store before they are dispatched.
    guarded = Guarded(tmp_path, TINY_LIMITS)
    try:
        guarded.broker.start()
        caller, service = guarded.connect("caller"), guarded.connect("service")
        addresses = [own(caller, str(number)) for number in range(20)]
        for address in addresses:
            headers = {"destination": "/queue/work.stored", "persistent": "true", "reply-to": address}
            caller.send_frame("SEND", headers, b"x" * 1000, confirmed=True)
        service.request("SUBSCRIBE", {"id": "s", "destination": "/queue/work.stored", "ack": "client-individual"})
        for address in addresses:
            request = service.message()
            assert request.headers["reply-to"] == address
            service.ack(request)
            service.send_to(address, address.encode())
        assert sorted(arrived(caller)) == sorted(addresses)
        guarded.close_clients()
        guarded.broker.stop()
    finally:
        guarded.broker.clean_up()


def test_broker_without_users_lets_all_reply(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path)
    try:
        broker.start()
        owner, other = RawClient(broker.port), RawClient(broker.port)
        for client in (owner, other):
            client.send_connect("1.2", "0,0")
        session = owner.connected.headers["session"]
        address = f"/remote-temp-queue/{session}/new"
        other.send_frame("SEND", {"destination": address, "reply-to": address}, b"reply", confirmed=True)
        owner.send_frame("SUBSCRIBE", {"id": "new", "destination": "/temp-queue/new"})
        assert owner.message().body == b"reply"
        owner.close()
        other.close()
        broker.stop()
    finally:
        broker.clean_up()


# ---- Random requests beside an oracle ----

Address = tuple[int, str, str]
"""Number of a connection, kind and name of its temporary queue or topic."""


class ReplyOracle:
    """Rights to reply, written from C8.1, C23.8 to C23.10 and C25.5."""

    def __init__(self) -> None:
        self.users: dict[int, str] = {}
        """User of each live connection."""
        self.there: set[Address] = set()
        self.rights: set[tuple[str, Address]] = set()

    def may_send(self, user: str, address: Address) -> bool:
        return self.users.get(address[0]) in (user, None) or (user, address) in self.rights

    def refuses(self, user: str, targets: Sequence[Address], replies: Sequence[Address]) -> bool:
        """C23.9, C23.10: whether a SEND is refused."""
        intruded = any(each in self.there and not self.may_send(user, each) for each in targets)
        return intruded or not all(self.may_send(user, each) for each in replies)

    def accept(self, user: str, targets: Sequence[Address]) -> set[Address]:
        """Return where the message of an accepted SEND is delivered or waits: once in each (C8.1, C23.9, C25.5)."""
        for address in targets:
            if address[1] == "queue" and self.users.get(address[0]) == user:
                # A user's own connection: the SEND makes the queue.
                self.there.add(address)
        return {each for each in targets if each in self.there and self.may_send(user, each)}

    def dispatch(self, user: str, replies: Sequence[Address]) -> None:
        """C23.8"""
        self.rights |= {(user, each) for each in replies if each[0] in self.users}

    def end(self, connection: int) -> None:
        del self.users[connection]
        self.there = {each for each in self.there if each[0] != connection}


class RandomRun:
    """Random steps of clients of three users, who all may send to, take from and browse one queue of requests."""

    def __init__(self, connect: Connect, seed: int) -> None:
        self.connect = connect
        self.random = random.Random(seed)
        self.oracle = ReplyOracle()
        self.clients: dict[int, UserClient] = {}
        self.sessions: list[str] = []
        self.subscribed: set[Address] = set()
        self.expected: dict[Address, list[str]] = {}
        """Bodies of what was accepted for each temporary queue and topic."""
        self.waiting: list[list[Address]] = []
        """What the reply-to of each waiting request names, in order."""
        self.queue = f"/queue/shared.{seed}"
        self.count = 0
        self.refused = 0

    def run(self, steps: int) -> None:
        for _ in range(4):
            self.open()
        actions = [self.call] * 5 + [self.reply] * 8 + [self.take] * 5 + [self.subscribe] * 4 + [self.browse] * 2
        for step in range(steps):
            self.random.choice(actions)()
            if step % 20 == 19:
                self.close(self.random.choice(list(self.clients)))
                self.open()
        for number in list(self.clients):
            self.close(number)

    def open(self) -> None:
        number = len(self.sessions)
        user = self.oracle.users[number] = self.random.choice(["red", "green", "blue"])
        self.clients[number] = self.connect(user)
        self.sessions.append(self.clients[number].session)

    def close(self, number: int) -> None:
        """End a connection, once it has got what it must, and nothing else."""
        client = self.clients.pop(number)
        got = [f"{frame.headers['subscription']}: {frame.body.decode()}" for frame in client.arrived()]
        own = [each for each in self.subscribed if each[0] == number]
        expected = [f"{kind} {name}: {body}" for _, kind, name in own for body in self.expected[number, kind, name]]
        assert sorted(got) == sorted(expected)
        client.disconnect()
        self.oracle.end(number)

    def draw_client(self) -> tuple[UserClient, str]:
        number = self.random.choice(list(self.clients))
        return self.clients[number], self.oracle.users[number]

    def draw_addresses(self) -> list[Address]:
        recent = range(max(0, len(self.sessions) - 5), len(self.sessions))
        count = self.random.choice([1, 1, 1, 2, 3])
        kinds = ["queue", "queue", "topic"]
        return [(self.random.choice(recent), self.random.choice(kinds), self.random.choice("ab")) for _ in range(count)]

    def text_of(self, addresses: Sequence[Address]) -> str:
        return ",".join(f"/remote-temp-{kind}/{self.sessions[number]}/{name}" for number, kind, name in addresses)

    def subscribe(self) -> None:
        number = self.random.choice(list(self.clients))
        address = (number, self.random.choice(["queue", "topic"]), self.random.choice("ab"))
        if address not in self.subscribed:
            self.subscribed.add(address)
            own(self.clients[number], address[2], address[1])
            self.oracle.there.add(address)
            self.expected.setdefault(address, [])

    def call(self) -> None:
        replies = self.draw_addresses()
        if self.send([], replies, {"destination": self.queue, "reply-to": self.text_of(replies)}):
            self.waiting.append(replies)

    def reply(self) -> None:
        targets = self.draw_addresses()
        self.send(targets, [], {"destination": self.text_of(targets)})

    def send(self, targets: list[Address], replies: list[Address], headers: dict[str, str]) -> bool:
        """Send to temporary queues and topics, or a request; return whether the SEND is accepted."""
        client, user = self.draw_client()
        self.count += 1
        body = f"{self.count} of {user}"
        way = self.random.choice(["alone", "numbered", "in a transaction"])
        if way == "numbered":
            headers = headers | numbered(f"{client.session} {self.queue}", self.count)
        elif way == "in a transaction":
            client.send_frame("BEGIN", {"transaction": "t"})
            headers = headers | {"transaction": "t"}
        is_refused = self.oracle.refuses(user, targets, replies)
        if is_refused:
            self.refused += 1
            refusal(client.request, "SEND", headers, body.encode())
        else:
            client.request("SEND", headers, body.encode())
            for address in self.oracle.accept(user, targets):
                self.expected.setdefault(address, []).append(body)
        if way == "in a transaction":
            client.request("ABORT" if is_refused else "COMMIT", {"transaction": "t"})
        return not is_refused

    def take(self) -> None:
        if not self.waiting:
            return
        client, user = self.draw_client()
        headers = {"id": "w", "destination": self.queue, "ack": "client-individual", "truenext-pull": "true"}
        client.request("SUBSCRIBE", headers)
        client.request("SEND", {"destination": "/control/credit", "id": "w", "messages": "1"})
        message = self.next_of(client, "w")
        self.oracle.dispatch(user, self.waiting[0])
        if self.random.random() < 0.7:
            client.ack(message, confirmed=True)
            self.waiting.pop(0)
        client.request("UNSUBSCRIBE", {"id": "w"})

    def browse(self) -> None:
        """C23.8: a browser gives no right."""
        client, _ = self.draw_client()
        client.request("SUBSCRIBE", {"id": "b", "destination": self.queue, "browser": "true"})
        shown = [self.next_of(client, "b") for _ in range(len(self.waiting) + 1)]
        assert shown[-1].headers["browser"] == "end"
        client.request("UNSUBSCRIBE", {"id": "b"})

    def next_of(self, client: UserClient, subscription: str) -> Frame:
        """Return the next message of a subscription; keep those of others."""
        others = []
        while (message := client.message()).headers["subscription"] != subscription:
            others.append(message)
        client._messages.extendleft(reversed(others))
        return message


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_and_replies_are_as_the_oracle_says(connect: Connect, seed: int) -> None:
    # C8.1, C23.8, C23.9, C23.10, C25.5
    run = RandomRun(connect, seed)
    run.run(300)
    assert run.refused > 20
    assert sum(map(len, run.expected.values())) > 20
