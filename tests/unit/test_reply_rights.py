"""Tests of the rights to reply at the engine: when they exist, and the memory that they and dropped SENDs take."""

import pytest

from tests.unit.test_engine import started
from truenext.broker import reply_rights
from truenext.broker.access import ForbiddenError
from truenext.broker.reply_rights import ReplyRights
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.model.commands import AckMode, Begin, Commit, CreateTemporary, Send, Subscribe
from truenext.model.destination import (
    REMOTE_PREFIX,
    REMOTE_TEMPORARY_PREFIX,
    REMOTE_TEMPORARY_TOPIC_PREFIX,
    Destination,
    parse_address,
)
from truenext.model.grants import User
from truenext.model.header_lines import encode_header_lines, escape
from truenext.model.limits import REPLY_DESTINATIONS_MAX
from truenext.model.message import SentMessage


def message(reply_to: str = "") -> SentMessage:
    headers = {"reply-to": reply_to} if reply_to else {"x": "y"}
    return SentMessage(4, False, 0, encode_header_lines({"destination": "/queue/work"} | headers), b"x")


class Users:
    """Engine with rights to reply, and one connection of each user."""

    def __init__(self, *names: str) -> None:
        self.engine: Engine = started()
        self.sessions: dict[str, ConnectionState] = {}
        self.rights = ReplyRights(self.engine, self.user_name)
        for name in names:
            self.sessions[name] = self.engine.commands.connect(f"session-{name}")
        self.engine.turn.run()

    def user_name(self, session: ConnectionState) -> str:
        return next((name for name, own in self.sessions.items() if own is session), "")

    def send(self, name: str, address: str, reply_to: str = "", transaction: str | None = None) -> None:
        session = self.sessions[name]
        send = Send(
            parse_address(address, session.id), message(reply_to), transaction, names_destinations=bool(reply_to)
        )
        self.rights.check(User(name, {}), session, send)
        self.engine.commands.send(session, send)

    def subscribe(self, name: str, address: str) -> Destination:
        session = self.sessions[name]
        destination = parse_address(address, session.id)
        self.engine.commands.subscribe(session, Subscribe(address, destination, AckMode.AUTO))
        return destination

    def dispatch(self) -> int:
        """Run a turn; return the number of dispatched messages."""
        deliveries = self.engine.turn.run().deliveries
        if self.rights.has_callers:
            self.rights.note_dispatched(deliveries)
        return sum(map(len, deliveries.values()))

    @property
    def queue_bytes(self) -> int:
        return self.engine.state.memory.queue_bytes


def test_prefix_of_other_connections_addresses_is_never_escaped() -> None:
    # The header bytes of a message are searched for it before they are decoded.
    assert escape(REMOTE_PREFIX) == REMOTE_PREFIX
    assert REMOTE_TEMPORARY_PREFIX.startswith(REMOTE_PREFIX)
    assert REMOTE_TEMPORARY_TOPIC_PREFIX.startswith(REMOTE_PREFIX)


def test_dispatched_messages_are_searched_only_while_a_named_caller_is_there() -> None:
    users = Users("caller", "service")
    replies = users.subscribe("caller", "/temp-queue/replies")
    users.send("service", "/queue/work", "/queue/elsewhere")
    users.send("service", "/queue/work", "/remote-temp-queue/unknown/replies")
    found = [users.rights.has_callers]
    users.send("caller", "/queue/work", replies.address)
    found.append(users.rights.has_callers)
    users.engine.commands.disconnect(users.sessions["caller"], is_exempt=True)
    users.rights.connection_closed(users.sessions["caller"])
    found.append(users.rights.has_callers)
    assert found == [False, True, False]


def test_rights_take_memory_for_queues_once_for_each_user_and_free_it() -> None:
    # C23.11, C24.10
    users = Users("caller", "service", "helper")
    replies = users.subscribe("caller", "/temp-queue/replies")
    for name in ("service", "helper"):
        users.subscribe(name, "/topic/work")
    # A queue has its lane from its first message on.
    users.send("caller", "/topic/work")
    users.send("caller", replies.address)
    users.dispatch()
    before = users.queue_bytes
    users.send("caller", "/topic/work", replies.address)
    assert users.queue_bytes == before
    assert users.dispatch() == 2
    after = users.queue_bytes
    assert after > before
    users.send("caller", "/topic/work", replies.address)
    assert users.dispatch() == 2
    assert users.queue_bytes == after
    users.rights.keep_users(["caller", "service"])
    assert before < users.queue_bytes < after
    users.send("service", replies.address)
    with pytest.raises(ForbiddenError):
        users.send("helper", replies.address)
    users.rights.connection_closed(users.sessions["caller"])
    assert users.queue_bytes == before


def test_memory_of_rights_to_topics_is_bounded_and_freed() -> None:
    # C23.11
    users = Users("caller", "service")
    users.subscribe("service", "/queue/work")
    users.send("caller", "/queue/work")
    users.dispatch()
    before = users.queue_bytes
    sizes = []
    for number in range(REPLY_DESTINATIONS_MAX + 20):
        users.send("caller", "/queue/work", f"/remote-temp-topic/session-caller/{number:5}")
        users.dispatch()
        sizes.append(users.queue_bytes)
    assert len(set(sizes)) == REPLY_DESTINATIONS_MAX
    assert sizes[-1] == max(sizes)
    users.rights.connection_closed(users.sessions["caller"])
    assert users.queue_bytes == before


def test_send_to_what_is_not_there_takes_no_memory_for_queues_in_a_transaction_either() -> None:
    # C8.1, C8.7, C23.9
    users = Users("caller", "service")
    missing = "/remote-temp-queue/session-caller/missing"
    session = users.sessions["service"]
    before = users.queue_bytes
    users.send("service", missing)
    users.engine.commands.begin(session, Begin("t"))
    users.send("service", missing, transaction="t")
    users.send("service", f"{missing},/remote-temp-topic/session-caller/missing", transaction="t")
    assert users.queue_bytes == before
    users.subscribe("caller", "/temp-queue/missing")
    users.engine.commands.commit(session, Commit("t"))
    assert users.dispatch() == 0
    # The caller's own user makes the queue, as ever.
    users.send("caller", "/temp-queue/other")
    assert len(users.sessions["caller"].temporary_queues) == 2


# ---- JMS clients, which come back with the same id ----

REPLIES = "/remote-temp-queue/session-caller/r"


def connect_caller(users: Users, name: str = "caller") -> None:
    """Connect a user, as the JMS client whose id is `session-caller`, and create its temporary queue."""
    session = users.sessions[name] = users.engine.commands.connect("session-caller")
    session.is_jms_client = True
    users.engine.commands.create_temporary(session, CreateTemporary(parse_address(REPLIES, "")))


def disconnect_caller(users: Users) -> None:
    session = users.sessions["caller"]
    users.engine.commands.disconnect(session, is_exempt=True)
    users.rights.connection_closed(session)


@pytest.mark.parametrize("is_dispatched_between", [False, True])
def test_right_to_reply_to_a_jms_client_outlives_its_connection(is_dispatched_between: bool) -> None:
    users = Users("service", "stranger")
    connect_caller(users)
    users.send("caller", "/queue/work", reply_to=REPLIES)
    if not is_dispatched_between:
        users.subscribe("service", "/queue/work")
        assert users.dispatch() == 1
    disconnect_caller(users)
    if is_dispatched_between:
        users.subscribe("service", "/queue/work")
        assert users.dispatch() == 1
    connect_caller(users)
    users.send("service", REPLIES)
    with pytest.raises(ForbiddenError):
        users.send("stranger", REPLIES)


def test_right_to_reply_is_not_inherited_by_another_user_of_the_same_id() -> None:
    users = Users("service")
    connect_caller(users)
    users.subscribe("service", "/queue/work")
    users.send("caller", "/queue/work", reply_to=REPLIES)
    users.dispatch()
    disconnect_caller(users)
    connect_caller(users, "impostor")
    with pytest.raises(ForbiddenError):
        users.send("service", REPLIES)


def test_rights_of_a_limited_number_of_ended_jms_connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_rights, "ENDED_CONNECTIONS_MAX", 1)
    users = Users("service")
    users.subscribe("service", "/queue/work")
    before = users.queue_bytes
    kept = 0
    for number in range(3):
        session = users.sessions["caller"] = users.engine.commands.connect(f"session-{number}")
        session.is_jms_client = True
        users.send("caller", "/queue/work", reply_to=f"/remote-temp-queue/session-{number}/r")
        users.dispatch()
        disconnect_caller(users)
        kept = kept or users.queue_bytes - before
        assert users.queue_bytes - before == kept > 0
