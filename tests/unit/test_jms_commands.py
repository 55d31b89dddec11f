"""Tests of the commands of JMS clients as the broker executes them. Source: docs/contract.md, "JMS clients"."""

import asyncio
from collections.abc import Iterator
from unittest import mock

import pytest

from truenext.broker.access import COMMAND_CHECKS, ForbiddenError
from truenext.broker.broker import CHECK_INTERVAL_S, Broker
from truenext.broker.drain import RESTRICTION
from truenext.broker.peer import WaitsFor
from truenext.broker.recovery import recover
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.queue import Entry
from truenext.engine.writing import producers as producers_module
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import (
    Abort,
    Ack,
    AckMode,
    Begin,
    Browse,
    Close,
    Command,
    Commit,
    CreateTemporary,
    Credit,
    Disconnect,
    ForgetProducers,
    InvalidFrame,
    Login,
    RemoveTemporary,
    Send,
    Subscribe,
)
from truenext.model.destination import Destination, DestinationKind, parse_address
from truenext.model.grants import User
from truenext.model.message import SentMessage
from truenext.model.policy import Policies
from truenext.store.memory import MemoryStore


class Connection:
    """Connection to a broker, with a client whose socket takes nothing."""

    def __init__(self, broker: Broker, login: Login) -> None:
        self.broker = broker
        self.peer = mock.Mock()
        self.peer.assign_place.return_value = None
        self.peer.cancel_unsent.return_value = ({}, [])
        self.session = broker.connect(self.peer)
        self.execute(login)

    def execute(self, *commands: Command) -> None:
        remaining = iter(commands)
        while (pending := self.broker.execute(self.session, remaining)) is not None:
            assert pending.waits_for is WaitsFor.OTHERS and pending.command is None

    def refusals(self) -> list[str]:
        """Return the texts of the refusals since the last call."""
        texts = [str(call.args[0]) for call in self.peer.send_error.call_args_list]
        self.peer.send_error.reset_mock()
        return texts


class Setup:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = MemoryStore()
        self.engine, _ = recover(self.store, Policies())
        self.broker = Broker(self.engine, self.store, self.loop)
        self.loop.run_until_complete(self.broker.start())
        self.jms = Connection(self.broker, Login(is_jms_client=True))
        self.plain = Connection(self.broker, Login())

    def send(self, count: int) -> list[Entry]:
        """Send messages to /queue/q; return those that are dispatched to the JMS client."""
        self.jms.peer.deliver.reset_mock()
        message = SentMessage(4, True, 0, b"", b"")
        self.plain.execute(*(Send(parse_address("/queue/q", ""), message) for _ in range(count)))
        entries: list[Entry] = []
        while len(entries) < count:
            self.loop.run_until_complete(asyncio.sleep(0.001))
            entries = [entry for call in self.jms.peer.deliver.call_args_list for entry in call.args[1]]
        return entries

    def consume(self, name: str = "c") -> None:
        subscribe = Subscribe(name, parse_address("/queue/q", ""), AckMode.INDIVIDUAL, is_pulling=True)
        self.jms.execute(subscribe, Credit(name, 100))


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.broker.close()
    setup.loop.close()


def test_login_of_a_jms_client_hands_out_no_secret(setup: Setup) -> None:
    # C26.2
    (login, secret), _ = setup.jms.peer.send_connected.call_args
    assert login.is_jms_client and secret == ""
    assert not setup.broker.ends.park(setup.jms.session)
    assert setup.jms.session.is_jms_client and not setup.plain.session.is_jms_client


def test_jms_client_that_connects_again_by_its_id_is_no_new_connection_during_a_drain(setup: Setup) -> None:
    # C31.3
    login = Login(is_jms_client=True, connection_id="ID:a:1")
    Connection(setup.broker, login)
    setup.engine.state.commit_state.is_draining = True
    for number, restriction in {1: None, 2: RESTRICTION}.items():
        new = Connection(setup.broker, Login(is_jms_client=True, connection_id=f"ID:a:{number}"))
        new.peer.assign_place.assert_called_once_with(may_exceed=True, restriction=restriction)


def test_browser_is_shown_what_is_requested(setup: Setup) -> None:
    # C26.17
    message = SentMessage(4, True, 0, b"", b"")
    destination = parse_address("/queue/q", "")
    setup.plain.execute(*(Send(destination, message) for _ in range(10)))
    setup.jms.execute(Browse("b", destination, is_pulling=True), Credit("b", 3))
    shown: list[list[Entry]] = []
    for requested, expected in ((0, 3), (5, 8), (40_000, 10), (1, 10)):
        if requested:
            setup.jms.execute(Credit("b", requested))
        for _ in range(10):
            setup.loop.run_until_complete(asyncio.sleep(0.001))
        slices = [call.args[0] for call in setup.jms.peer.deliver_browse_slice.call_args_list]
        shown = [each.entries for each in slices]
        assert sum(map(len, shown)) == expected
        assert [each.is_end for each in slices].count(True) == (expected == 10)


def test_refused_command_is_answered_alone_and_dooms_its_transaction(setup: Setup) -> None:
    # C23.3, C23.5
    setup.jms.execute(
        Begin("t"),
        InvalidFrame("a body of 200 MiB; at most 16 MiB", Code.LIMIT, "t"),
        Ack("missing", 7),
        Begin("other"),
        Commit("t"),
        Commit("other"),
    )
    first, second, third = setup.jms.refusals()
    assert first == "a body of 200 MiB; at most 16 MiB" and "missing" in second
    assert third == "transaction 't' can only be aborted: a frame of it was refused: a body of 200 MiB; at most 16 MiB"
    setup.jms.execute(Abort("t", counts_all=False))
    assert not setup.jms.refusals() and not setup.jms.session.transactions


def test_refused_command_of_a_plain_client_ends_its_connection(setup: Setup) -> None:
    with pytest.raises(RemoteProtocolError):
        setup.plain.execute(Ack("missing", 7))


def test_refused_commit_is_answered_and_its_messages_stay_held(setup: Setup) -> None:
    # C26.5
    setup.consume()
    entries = setup.send(2)
    acks = [Ack("c", entries[0].sequence), Ack("c", 10_000)]
    setup.jms.execute(Begin("t"), Commit("t", acks=acks), Abort("t", counts_all=False))
    (refusal,) = setup.jms.refusals()
    assert "message 10000 is not held" in refusal
    assert list(setup.jms.session.consumers["c"].held) == [entry.sequence for entry in entries]


def test_commit_with_kept_messages_is_one_command_in_one_batch(setup: Setup) -> None:
    # C26.5
    setup.consume()
    entries = setup.send(3)
    copy = SentMessage(4, True, 0, b"", b"")
    setup.jms.execute(Begin("t"), Send(parse_address("/queue/to", ""), copy, "t"))
    setup.jms.execute(Commit("t", acks=[Ack("c", entry.sequence) for entry in entries]))
    batch = setup.engine.state.commit_state.batch
    assert (len(batch.puts), len(batch.removes)) == (1, 3)


@pytest.mark.parametrize("ends_connection", [False, True])
def test_unsent_messages_of_ended_subscriptions_are_dropped_before_the_attempt_counts(
    setup: Setup, ends_connection: bool
) -> None:
    # C26.7
    setup.consume()
    first, second = setup.send(2)
    setup.jms.peer.cancel_unsent.reset_mock()
    consumers = list(setup.jms.session.consumers.values())
    command = Disconnect(last_delivered=first.sequence) if ends_connection else Close(["c"], first.sequence)
    setup.jms.execute(command)
    assert setup.jms.peer.cancel_unsent.call_args.args == (None if ends_connection else consumers,)
    assert (first.attempts, second.attempts) == (1, 0) and not first.was_lost
    # C10.6
    assert setup.jms.session.last_batch == setup.engine.state.commit_state.batch.number


def test_close_of_a_missing_subscription_is_refused_alone(setup: Setup) -> None:
    setup.consume()
    setup.jms.execute(Close(["c", "missing"]))
    assert len(setup.jms.refusals()) == 1 and "c" in setup.jms.session.consumers


@pytest.mark.parametrize("ends_connection", [False, True])
def test_producers_are_forgotten_by_command_and_with_their_connection(setup: Setup, ends_connection: bool) -> None:
    # C26.11
    send = Send(parse_address("/queue/q", ""), SentMessage(4, True, 0, b"", b""), producer="p", number=7)
    plain = Send(parse_address("/queue/q", ""), SentMessage(4, True, 0, b"", b""), producer="p", number=7)
    setup.jms.execute(send)
    setup.plain.execute(plain)
    setup.jms.execute(Disconnect(["p"]) if ends_connection else ForgetProducers(["p"]))
    again = Connection(setup.broker, Login(is_jms_client=True))
    again.execute(send)
    setup.plain.execute(plain)
    assert not send.is_repeat and plain.is_repeat


def test_numbers_of_jms_producers_outlive_a_restart(setup: Setup) -> None:
    # C26.10
    send = Send(parse_address("/queue/q", ""), SentMessage(4, True, 0, b"", b""), producer="p", number=7)
    setup.jms.execute(send)
    setup.loop.run_until_complete(setup.broker.stop())
    engine, _ = recover(setup.store, Policies())
    session = engine.commands.connect("again")
    engine.commands.log_in(session, Login(is_jms_client=True))
    engine.commands.send(session, send)
    assert send.is_repeat


def test_old_jms_producers_are_forgotten_by_the_check_of_each_second(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C18.5
    monkeypatch.setattr(producers_module, "PRODUCER_RETENTION_MS", -1)
    send = Send(parse_address("/queue/q", ""), SentMessage(4, True, 0, b"", b""), producer="p", number=7)
    setup.jms.execute(send)
    setup.loop.run_until_complete(asyncio.sleep(CHECK_INTERVAL_S + 0.1))
    setup.jms.execute(send)
    assert not send.is_repeat


def test_temporary_queue_is_made_and_removed(setup: Setup) -> None:
    # C26.13, C26.14
    replies = Destination(DestinationKind.TEMPORARY, f"/{setup.jms.session.id}/1", setup.jms.session.id)
    setup.jms.execute(CreateTemporary(replies))
    assert replies.name in setup.engine.queues.by_name
    setup.jms.execute(RemoveTemporary(replies))
    assert replies.name not in setup.engine.queues.by_name


# ---- What a user needs ----


@pytest.mark.parametrize("kind", [CreateTemporary, RemoveTemporary])
@pytest.mark.parametrize("name", ["other", ""])
def test_user_makes_and_removes_no_temporary_destination_of_another_connection(
    kind: type[CreateTemporary | RemoveTemporary], name: str
) -> None:
    user, session = User("shop", {}), ConnectionState("own")
    own = Destination(DestinationKind.TEMPORARY, "/own/1", "own")
    COMMAND_CHECKS[kind](user, session, kind(own))
    with pytest.raises(ForbiddenError):
        COMMAND_CHECKS[kind](user, session, kind(Destination(DestinationKind.TEMPORARY, f"/{name}/1", name)))


def test_producers_that_are_forgotten_are_those_of_the_user() -> None:
    command = ForgetProducers(["p", "q"])
    COMMAND_CHECKS[ForgetProducers](User("shop", {}), ConnectionState("own"), command)
    assert command.names == ["shop\0p", "shop\0q"]
