"""Tests of JMS clients: acknowledgements that wait for COMMIT, ends of consumers that name the message delivered last,
redelivery counters, producers and temporary destinations. Source: docs/contract.md, "JMS clients"."""

from collections.abc import Iterator

import pytest

from truenext.engine.engine import Engine
from truenext.engine.lifecycle import pull_requests
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.memory import LANE_BYTES, queue_size
from truenext.engine.state.queue import Entry
from truenext.engine.state.transaction import TransactionLimits
from truenext.engine.writing import producers as producers_module
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import EventLog
from truenext.errors import Code, NoSpaceError, RemoteProtocolError
from truenext.model.answers import Receipt
from truenext.model.commands import (
    Abort,
    Ack,
    AckMode,
    Begin,
    Browse,
    Close,
    Commit,
    CreateTemporary,
    Credit,
    Login,
    Nack,
    Release,
    RemoveTemporary,
    Send,
    Started,
    Subscribe,
)
from truenext.model.destination import Destination, DestinationKind, parse_address
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import (
    PRODUCER_RETENTION_MS,
    PRODUCER_RETENTION_MS_MIN,
    SUBSCRIPTIONS_MAX,
    TRANSACTIONS_MAX,
    WINDOW_MAX,
)
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy
from truenext.model.selector import compile_selector
from truenext.wire.stomp.frame import Version
from truenext.wire.stomp.protocol import Side, StompProtocol
from truenext.wire.stomp.replies import ReplyEncoder
from truenext.wire.stomp.request_shapes import REQUEST_SHAPES

JMS = Login(is_jms_client=True)


class Client:
    """JMS client with one consumer of /queue/q, and a producer that is a plain client."""

    def __init__(self, limits: TransactionLimits | None = None, policy: Policy | None = None) -> None:
        self.engine = engine = Engine(
            CommitState(EventLog()), policies=Policies(policy or Policy()), transaction_limits=limits
        )
        engine.lifespan.start()
        self.write()
        self.other = engine.commands.connect("other")
        self.session = self.connect("jms")

    def connect(self, name: str, login: Login = JMS) -> ConnectionState:
        session = self.engine.commands.connect(name)
        self.engine.commands.log_in(session, login)
        return session

    def write(self) -> None:
        """Make all batches durable."""
        while (batch := self.engine.take_batch()) is not None:
            self.engine.store_results.on_committed(batch)

    def send(self, count: int = 1, priority: int = 4, *, address: str = "/queue/q", persistent: bool = True) -> None:
        for _ in range(count):
            message = SentMessage(priority, persistent, 0, b"destination:%b\n" % address.encode(), b"body")
            self.engine.commands.send(self.other, Send(parse_address(address, ""), message))
        self.write()

    def consume(self, name: str = "c", credit: int = 10, address: str = "/queue/q", **options: object) -> None:
        destination = parse_address(address, self.session.id)
        subscribe = Subscribe(name, destination, AckMode.INDIVIDUAL, is_pulling=True, **options)  # type: ignore[arg-type]
        self.engine.commands.subscribe(self.session, subscribe)
        self.engine.commands.pull(self.session, Credit(name, credit))

    def dispatch(self) -> list[Entry]:
        """Run a turn; return what it dispatches, over all consumers."""
        return [entry for entries in self.engine.turn.run().deliveries.values() for entry in entries]

    def held(self, name: str = "c") -> list[int]:
        return list(self.session.consumers[name].held)

    def commit(self, *acks: Ack, name: str = "t") -> None:
        self.engine.commands.commit(self.session, Commit(name, acks=list(acks)))

    def is_answered(self) -> bool:
        """Return whether a receipt that is requested now is sent before anything is written."""
        self.engine.state.commit_state.answer(self.session, Receipt("r"))
        return bool(self.engine.turn.run().answers)


def refused(code: Code) -> pytest.RaisesExc[RemoteProtocolError]:
    return pytest.raises(RemoteProtocolError, check=lambda error: error.code is code)


# ---- The third kind of client (C26.1, C26.2) ----


def test_jms_client_stays_after_a_refusal_and_reports_nothing_as_started() -> None:
    client = Client()
    client.consume()
    client.send()
    (entry,) = client.dispatch()
    assert client.session.stays_after_refusal and not client.session.is_truenext_client
    assert not client.other.stays_after_refusal
    with refused(Code.NOT_SUPPORTED):
        client.engine.commands.mark_started(client.session, Started("c", entry.sequence, 1))
    with refused(Code.NOT_SUPPORTED):
        client.engine.commands.release(client.session, Release(["c"], []))


def test_end_that_is_reported_again_leaves_the_next_connection_of_the_same_id() -> None:
    # A lost connection still writes its answers, and its socket may break meanwhile.
    client = Client()
    login = Login(is_jms_client=True, connection_id="ID:a:1")
    lost = client.connect("1", login)
    client.engine.commands.disconnect(lost, is_exempt=False)
    again = client.connect("2", login)
    assert not client.engine.commands.connecting.is_connected(lost)
    client.engine.commands.disconnect(lost, is_exempt=False)
    assert client.engine.commands.connecting.is_connected(again)
    client.engine.commands.disconnect(again, is_exempt=False)
    assert not client.engine.commands.connecting.is_connected(again)


def test_send_of_a_jms_client_that_would_wait_for_the_disk_is_refused() -> None:
    client = Client()
    client.session.has_sent = True
    client.engine.state.commit_state.disk_level = DiskLevel.LITTLE
    send = Send(parse_address("/queue/q", ""), SentMessage(4, True, 0, b"", b""))
    with pytest.raises(NoSpaceError):
        client.engine.commands.sending.waits_while_disk_short(client.session, send)
    with pytest.raises(NoSpaceError):
        client.engine.commands.send(client.session, send)


NO_MEMORY = RemoteProtocolError("no memory for another queue", Code.LIMIT)


def test_commit_of_a_refused_transaction_says_why_the_command_was_refused() -> None:
    client = Client()
    transactions = client.engine.commands.transactions
    client.engine.commands.begin(client.session, Begin("t"))
    transactions.mark_rollback_only(client.session, "t", NO_MEMORY)
    transactions.mark_rollback_only(client.session, "t", RemoteProtocolError("a later reason"))
    with pytest.raises(RemoteProtocolError, match=r"was refused: no memory for another queue$") as caught:
        client.commit()
    assert (caught.value.code, caught.value.cause) == (Code.ROLLBACK_ONLY, Code.LIMIT)
    client.engine.commands.abort(client.session, Abort("t", counts_all=False))


def test_error_of_a_refused_transaction_of_another_client_is_as_before() -> None:
    client = Client()
    client.engine.commands.begin(client.other, Begin("t"))
    client.engine.commands.transactions.mark_rollback_only(client.other, "t", NO_MEMORY)
    with pytest.raises(RemoteProtocolError, match=r"a frame of it was refused$"):
        client.engine.commands.commit(client.other, Commit("t"))


def test_a_jms_connection_may_have_a_thousand_open_transactions() -> None:
    client = Client()
    for number in range(TRANSACTIONS_MAX):
        client.engine.commands.begin(client.session, Begin(str(number)))
    with refused(Code.LIMIT):
        client.engine.commands.begin(client.session, Begin("one more"))
    assert TRANSACTIONS_MAX == 1000


# ---- Credit (C26.3, C26.4) ----


def test_consumer_gets_the_largest_prefetch_and_one_more_request_is_refused() -> None:
    client = Client()
    client.consume(credit=1)
    client.engine.commands.pull(client.session, Credit("c", WINDOW_MAX - 1))
    with refused(Code.LIMIT):
        client.engine.commands.pull(client.session, Credit("c", 1))
    client.send(3)
    assert len(client.dispatch()) == 3
    # What the client has reported as delivered: it may hold more, and the request is filled up again.
    client.engine.commands.pull(client.session, Credit("c", 3))
    with refused(Code.LIMIT):
        client.engine.commands.pull(client.session, Credit("c", 1))


def test_rollback_and_acknowledgements_give_no_credit() -> None:
    client = Client()
    client.consume(credit=2)
    client.send(5)
    first, second = client.dispatch()
    client.engine.commands.begin(client.session, Begin("t"))
    client.engine.commands.abort(client.session, Abort("t", counts_all=False))
    assert client.dispatch() == []
    client.engine.commands.acknowledge(client.session, Ack("c", first.sequence))
    client.engine.commands.begin(client.session, Begin("t"))
    client.commit(Ack("c", second.sequence))
    client.write()
    assert client.dispatch() == [] and client.held() == []


def test_pull_without_a_message_is_withdrawn_with_the_unused_count() -> None:
    client = Client()
    client.consume(credit=1)
    assert client.dispatch() == []
    ended = client.engine.commands.pull(client.session, Credit("c", 0))
    assert ended is not None and ended.unused == 1
    client.engine.commands.pull(client.session, Credit("c", 1, waits=False))
    (ended,) = client.engine.turn.run().ended_pull_requests
    assert ended.unused == 1
    client.send()
    assert client.dispatch() == []


# ---- Kept acknowledgements (C26.5, C26.6) ----


def test_kept_messages_are_held_until_the_commit_and_gone_with_it() -> None:
    client = Client()
    client.consume()
    client.send(3)
    first, second, third = client.dispatch()
    client.engine.commands.begin(client.session, Begin("t"))
    assert client.held() == [first.sequence, second.sequence, third.sequence]
    target = SentMessage(4, True, 0, b"", b"copy")
    client.engine.commands.send(client.session, Send(parse_address("/queue/to", ""), target, "t"))
    client.commit(Ack("c", first.sequence), Ack("c", third.sequence))
    batch = client.engine.state.commit_state.batch
    assert len(batch.puts) == 1 and len(batch.removes) == 2
    assert client.held() == [second.sequence]
    assert client.engine.queues.by_name["to"].waiting_count() == 1
    assert not client.is_answered()


@pytest.mark.parametrize("persistent", [False, True])
def test_sends_of_a_commit_with_kept_persistent_messages_are_visible_with_its_batch(persistent: bool) -> None:
    client = Client()
    client.consume()
    client.consume("to", address="/queue/to")
    client.send(persistent=persistent)
    (entry,) = client.dispatch()
    client.engine.commands.begin(client.session, Begin("t"))
    copy = SentMessage(4, False, 0, b"", b"copy")
    client.engine.commands.send(client.session, Send(parse_address("/queue/to", ""), copy, "t"))
    client.commit(Ack("c", entry.sequence))
    assert len(client.dispatch()) == (not persistent)
    client.write()
    assert len(client.dispatch()) == persistent


def test_rollback_requeues_and_counts_nothing_of_kept_messages() -> None:
    client = Client()
    client.consume()
    client.send(2)
    entries = client.dispatch()
    client.engine.commands.begin(client.session, Begin("t"))
    client.engine.commands.abort(client.session, Abort("t", counts_all=False))
    assert client.held() == [entry.sequence for entry in entries]
    assert [entry.attempts for entry in entries] == [0, 0] and client.dispatch() == []


@pytest.mark.parametrize("acks", [[0, 7], [0, 0, 7]])
def test_refused_commit_changes_nothing_of_its_kept_messages(acks: list[int]) -> None:
    client = Client()
    client.consume()
    client.send(2)
    entries = client.dispatch()
    sequences = {0: entries[0].sequence, 7: 10_000}
    client.engine.commands.begin(client.session, Begin("t"))
    with refused(Code.NOT_HELD):
        client.commit(*(Ack("c", sequences[number]) for number in acks))
    assert client.held() == [entry.sequence for entry in entries]
    assert "t" in client.session.transactions and client.engine.state.commit_state.batch.is_empty()


def test_kept_messages_count_towards_the_limit_of_messages() -> None:
    client = Client(TransactionLimits(messages=2))
    client.consume()
    client.send(3)
    entries = client.dispatch()
    client.engine.commands.begin(client.session, Begin("t"))
    with refused(Code.LIMIT):
        client.commit(*(Ack("c", entry.sequence) for entry in entries))
    assert len(client.held()) == 3
    client.commit(*(Ack("c", entry.sequence) for entry in entries[:2]), Ack("c", entries[1].sequence))
    assert client.held() == [entries[2].sequence]


def test_kept_messages_of_a_consumer_that_ends_are_of_the_transaction() -> None:
    client = Client()
    client.consume()
    client.send(2)
    first, second = client.dispatch()
    client.engine.commands.begin(client.session, Begin("t"))
    client.engine.commands.acknowledge(client.session, Ack("c", first.sequence, "t"))
    client.engine.commands.close(client.session, Close(["c"]))
    client.consume("d")
    assert client.dispatch() == [second]
    client.engine.commands.abort(client.session, Abort("t", counts_all=False))
    assert client.dispatch() == [first] and first.attempts == 0


# ---- Attempts (C26.7) ----


def names(entries: list[Entry]) -> list[tuple[int, int]]:
    return [(entry.attempts, entry.redelivery_count) for entry in entries]


def test_end_that_names_the_last_delivered_message_counts_up_to_it_in_order_of_dispatch() -> None:
    client = Client()
    client.consume()
    client.send(2)
    first, second = client.dispatch()
    client.send(1, priority=9)
    (urgent,) = client.dispatch()
    client.send(1)
    (last,) = client.dispatch()
    # By sequence `urgent` comes after `second`, and before `last`.
    client.engine.commands.acknowledge(client.session, Ack("c", first.sequence))
    client.engine.commands.close(client.session, Close(["c"], urgent.sequence))
    assert names([second, urgent, last]) == [(1, 1), (1, 1), (0, 0)]
    assert not client.is_answered()
    client.consume()
    assert client.dispatch() == [urgent, second, last]


@pytest.mark.parametrize("last_delivered", [None, 10_000])
def test_end_that_names_no_held_message_counts_no_attempt(last_delivered: int | None) -> None:
    client = Client()
    client.consume()
    client.send(2)
    entries = client.dispatch()
    client.engine.commands.close(client.session, Close(["c"], last_delivered))
    assert names(entries) == [(0, 0), (0, 0)] and client.is_answered()


def test_end_of_a_session_counts_for_the_consumer_that_holds_the_message_alone() -> None:
    client = Client(policy=Policy(delay_ms=5000, first_delay_ms=5000))
    client.consume("a", 1)
    client.consume("b", 2)
    client.consume("c", 1)
    client.send(4)
    client.dispatch()
    of_b = list(client.session.consumers["b"].held.values())
    others = [entry for name in "ac" for entry in client.session.consumers[name].held.values()]
    client.engine.commands.close(client.session, Close(["a", "b"], of_b[0].sequence))
    assert names(of_b) == [(1, 1), (0, 0)] and names(others) == [(0, 0), (0, 0)]
    assert list(client.session.consumers) == ["c"]
    client.consume("d")
    # Due at once, in spite of the policy.
    assert len(client.dispatch()) == 3


def test_close_of_a_subscription_that_is_not_there_ends_none() -> None:
    client = Client()
    client.consume()
    client.send()
    (entry,) = client.dispatch()
    with refused(Code.NOT_FOUND):
        client.engine.commands.close(client.session, Close(["c", "missing"], entry.sequence))
    assert client.held() == [entry.sequence] and entry.attempts == 0


def test_close_ends_browsers_and_topic_subscriptions() -> None:
    client = Client()
    client.consume("t", address="/topic/t")
    client.engine.commands.browse(client.session, Browse("b", parse_address("/queue/q", "")))
    client.engine.commands.close(client.session, Close(["b", "t", "t"]))
    assert not client.session.browsers and not client.session.consumers and not client.session.temporary_queues


def test_message_that_fails_too_often_by_closed_consumers_is_dead_lettered() -> None:
    client = Client(policy=Policy(attempts_max=2))
    client.send()
    for _ in range(2):
        client.consume()
        (entry,) = client.dispatch()
        client.engine.commands.close(client.session, Close(["c"], entry.sequence))
    assert client.engine.queues.by_name["DLQ.q"].waiting_count() == 1


# ---- Redelivery counter (C26.8) ----


def test_lost_connection_raises_the_counter_of_all_that_it_held() -> None:
    client = Client()
    client.consume()
    client.send(3)
    entries = client.dispatch()
    client.engine.commands.begin(client.session, Begin("t", counts_all=False))
    client.engine.commands.acknowledge(client.session, Ack("c", entries[2].sequence, "t"))
    client.engine.commands.disconnect(client.session, is_exempt=False)
    assert names(entries) == [(1, 1), (0, 1), (0, 1)]
    client.session = client.connect("next")
    client.consume()
    assert client.dispatch() == entries
    client.engine.commands.nack(client.session, Nack("c", entries[1].sequence))
    assert names(entries[1:2]) == [(1, 1)] and not entries[1].was_lost


def test_ends_that_are_no_loss_do_not_raise_the_counter() -> None:
    client = Client()
    for is_requested in (True, False):
        client.consume()
        client.send()
        entries = client.dispatch()
        client.engine.commands.disconnect(client.session, is_exempt=True, is_requested=is_requested)
        assert {entry.redelivery_count for entry in entries} == {0}
        client.session = client.connect(f"next {is_requested}")
    client.consume()
    entries = client.dispatch()
    client.engine.commands.connecting.stop()
    assert {entry.redelivery_count for entry in entries} == {0} and all(entry.deliveries > 1 for entry in entries[:1])


def test_stomp_client_is_told_of_lost_attempts_alone() -> None:
    # C10.10
    client = Client()
    client.consume()
    client.send(2)
    entries = client.dispatch()
    client.engine.commands.disconnect(client.session, is_exempt=False)
    replies = ReplyEncoder(StompProtocol(Side.SERVER, REQUEST_SHAPES), "")
    replies.on_connected(Version.V1_2, Login(number=1))
    replies.add_subscription("c", AckMode.INDIVIDUAL, has_id=True, has_pattern=False)
    parts: list[bytes] = []
    replies.encode_deliveries("c", entries, parts)
    frames = b"".join(parts).split(b"MESSAGE\n")[1:]
    assert [b"truenext-lost:true\n" in frame for frame in frames] == [True, False]
    assert [entry.was_lost for entry in entries] == [True, True]


def test_lost_connection_in_auto_mode_does_not_raise_the_counter() -> None:
    client = Client()
    destination = parse_address("/queue/q", "")
    client.engine.commands.subscribe(client.session, Subscribe("auto", destination, AckMode.AUTO))
    client.send()
    (entry,) = client.dispatch()
    client.engine.commands.disconnect(client.session, is_exempt=False)
    assert entry.redelivery_count == 0


# ---- Poison (C26.9) ----


def test_rejected_message_is_dead_lettered_with_its_cause() -> None:
    client = Client()
    client.consume()
    client.send()
    (entry,) = client.dispatch()
    client.engine.commands.nack(client.session, Nack("c", entry.sequence, is_rejected=True, cause="six times"))
    client.write()
    client.consume("dlq", address="/queue/DLQ.q")
    (letter,) = client.dispatch()
    assert letter.message is not None and b"truenext-original-last-cause:six times\n" in letter.message.header


# ---- Pull requests with a time (C26.4) ----


def test_pull_request_is_withdrawn_when_its_time_is_over() -> None:
    client = Client()
    client.consume(credit=1)
    state, tasks = client.engine.state.commit_state, client.engine.tasks
    state.tick(5_000_000, 1_000_000)
    client.engine.commands.pull(client.session, Credit("c", 2, correlation="pull", wait_ms=250))
    assert client.engine.turn.run().ended_pull_requests == []
    assert tasks.next_due_ms == 5_250
    state.tick(5_249_000, 1_249_000)
    assert not tasks.can_step
    state.tick(5_250_000, 1_250_000)
    (ended,) = client.engine.turn.run().ended_pull_requests
    assert (ended.unused, ended.correlation) == (3, "pull")
    assert client.engine.tasks.next_due_ms is None
    client.send()
    assert client.dispatch() == []


def test_pull_request_whose_message_comes_in_time_is_not_withdrawn() -> None:
    client = Client()
    client.consume(credit=1)
    state = client.engine.state.commit_state
    client.send()
    client.dispatch()
    client.engine.commands.pull(client.session, Credit("c", 1, wait_ms=250))
    client.send()
    assert len(client.dispatch()) == 1
    state.tick(900_000, 900_000)
    assert client.engine.turn.run().ended_pull_requests == []
    assert client.engine.tasks.next_due_ms is None


def test_later_pull_request_without_a_time_stays() -> None:
    client = Client()
    client.consume(credit=1)
    client.engine.commands.pull(client.session, Credit("c", 1, wait_ms=250))
    client.engine.commands.pull(client.session, Credit("c", 1))
    client.engine.state.commit_state.tick(900_000, 900_000)
    assert client.engine.turn.run().ended_pull_requests == []


def pull_for(client: Client, name: str, wait_ms: int) -> None:
    if name not in client.session.consumers:
        client.consume(name, credit=1)
    client.engine.commands.pull(client.session, Credit(name, 1, wait_ms=wait_ms))


def withdrawn_at(client: Client, now_ms: int) -> list[str]:
    client.engine.state.commit_state.tick(1000 * now_ms, 1000 * now_ms)
    return [ended.consumer.subscription for ended in client.engine.turn.run().ended_pull_requests]


def test_pull_request_is_withdrawn_at_the_time_that_was_said_last() -> None:
    client = Client()
    for name, wait_ms in (("a", 500), ("b", 250), ("c", 100), ("a", 100), ("c", 500)):
        pull_for(client, name, wait_ms)
    assert [withdrawn_at(client, now_ms) for now_ms in (99, 100, 249, 250, 499, 500)] == [
        [],
        ["a"],
        [],
        ["b"],
        [],
        ["c"],
    ]
    assert client.engine.tasks.next_due_ms is None


def test_pull_requests_that_end_together_are_withdrawn_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_requests, "PULL_ENDS_PER_TURN", 2)
    client = Client()
    for name in "abc":
        pull_for(client, name, 250)
    assert [withdrawn_at(client, 250), withdrawn_at(client, 250), withdrawn_at(client, 250)] == [["a", "b"], ["c"], []]


def test_times_of_pull_requests_that_have_ended_take_bounded_memory() -> None:
    client = Client()
    times = client.engine.tasks.pull_times._pull_requests._end_heap
    for number in range(300):
        pull_for(client, str(number % 3), 10**9)
    assert len(times) < 100
    names = [str(number) for number in range(300)]
    for name in names:
        pull_for(client, name, 10**9)
    assert len(times) >= 300
    for name in names:
        client.engine.commands.pull(client.session, Credit(name, 0))
    assert len(times) < 100


# ---- Numbered sends (C26.10, C26.11) ----


class Producers:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int = 3) -> None:
        monkeypatch.setattr(producers_module, "PRODUCERS_MAX", limit)
        self.client = client = Client()
        self.commit_state = client.engine.state.commit_state
        self.commit_state.tick(0, 0)

    def send(self, session: ConnectionState, name: str, number: int = 1) -> bool:
        """Send a numbered message a millisecond later; return whether it is a repeat."""
        self.commit_state.tick((self.commit_state.now_ms + 1) * 1000, self.commit_state.now_us)
        message = SentMessage(4, True, 0, b"", b"")
        send = Send(parse_address("/queue/q", ""), message, producer=name, number=number)
        self.client.engine.commands.send(session, send)
        return send.is_repeat


def test_the_longest_unused_jms_producer_goes_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    producers = Producers(monkeypatch)
    jms, other = producers.client.session, producers.client.other
    for name in ("a", "b", "c"):
        producers.send(other, name)
    producers.commit_state.tick(PRODUCER_RETENTION_MS_MIN * 2000, 0)
    for name in ("a", "b", "c"):
        producers.send(jms, name)
        producers.send(jms, name, 2)
    assert producers.send(jms, "a", 2)
    # "b" has not been used for longest now.
    assert not producers.send(jms, "d")
    assert producers.send(jms, "a", 1) and producers.send(jms, "c", 2) and not producers.send(jms, "b", 1)
    assert all(producers.send(other, name) for name in ("a", "b", "c"))
    assert producers.client.engine.state.producers.take_forgotten()[0] == 0


def test_jms_producers_are_other_ones_than_those_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    producers = Producers(monkeypatch)
    jms, other = producers.client.session, producers.client.other
    assert not producers.send(jms, "p", 5) and not producers.send(other, "p", 1)
    assert producers.send(jms, "p", 4) and not producers.send(other, "p", 4)
    state = producers.client.engine.state
    state.producers_of(jms).forget(jms, ["p"])
    assert not producers.send(jms, "p", 1) and producers.send(other, "p", 1)


def test_jms_producers_are_restored_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    producers = Producers(monkeypatch)
    jms, other = producers.client.session, producers.client.other
    producers.send(jms, "p", 5)
    producers.send(other, "p", 1)
    producers.send(other, "shop\0p", 2)
    producers.send(jms, "shop\0p", 7)
    states = list(producers.commit_state.batch.producers.items())
    again = Producers(monkeypatch)
    again.client.engine.state.producers.restore(states)
    again.client.engine.state.jms_producers.restore(states)
    jms, other = again.client.session, again.client.other
    assert again.send(jms, "p", 5) and not again.send(other, "p", 2) and again.send(other, "shop\0p", 2)
    assert again.send(jms, "shop\0p", 7)
    # No copy of the numbers that a name had before there were users.
    assert not again.send(jms, "mill\0p", 1)


def test_jms_producers_are_forgotten_after_a_week(monkeypatch: pytest.MonkeyPatch) -> None:
    producers = Producers(monkeypatch)
    jms = producers.client.session
    producers.send(jms, "p", 5)
    producers.commit_state.tick(PRODUCER_RETENTION_MS * 1000, 0)
    producers.client.engine.state.jms_producers.forget_old()
    assert producers.send(jms, "p", 5)
    producers.commit_state.tick(2 * PRODUCER_RETENTION_MS * 1000 + 1000, 0)
    producers.client.engine.state.jms_producers.forget_old()
    assert not producers.send(jms, "p", 5)


def test_clean_stop_stores_jms_producers_of_transient_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    producers = Producers(monkeypatch)
    jms, engine = producers.client.session, producers.client.engine
    message = SentMessage(4, False, 0, b"", b"")
    engine.commands.send(jms, Send(parse_address("/queue/q", ""), message, producer="p", number=5))
    engine.commands.connecting.stop()
    stored = [name for batch in engine.lifespan.final_batches() for name in batch.producers]
    assert stored == ["\0p"]


# ---- Selectors (C26.12) ----


def test_selector_converts_the_header_of_a_stomp_message() -> None:
    message = SentMessage(4, True, 0, b"weight:3\n", b"")
    assert compile_selector("weight > 2.5").matches(message) and compile_selector("weight = '3'").matches(message)


# ---- Temporary destinations (C26.13, C26.14) ----


def temporary(session: ConnectionState, name: str = "ID:1", *, is_topic: bool = False) -> Destination:
    kind = DestinationKind.TOPIC if is_topic else DestinationKind.TEMPORARY
    return Destination(kind, f"/{session.id}/{name}", session.id)


@pytest.fixture
def client() -> Iterator[Client]:
    """Client whose connection must leave the memory for queues as it was, but for queues that are there."""
    client = Client()
    yield client
    client.engine.commands.disconnect(client.session, is_exempt=True)
    there = [
        queue_size(queue.destination) + LANE_BYTES * len(list(queue.lanes))
        for queue in client.engine.queues.by_name.values()
    ]
    assert client.engine.state.memory.queue_bytes == sum(there)


def send_to(client: Client, destination: Destination, transaction: str | None = None) -> None:
    message = SentMessage(4, False, 0, b"", b"reply")
    client.engine.commands.send(client.other, Send(destination, message, transaction))


def subscribe(client: Client, destination: Destination, name: str = "reply") -> BrokerConsumer:
    client.engine.commands.subscribe(client.session, Subscribe(name, destination, AckMode.INDIVIDUAL, is_pulling=True))
    client.engine.commands.pull(client.session, Credit(name, 10))
    return client.session.consumers[name]


def test_send_makes_no_temporary_queue_of_a_jms_client(client: Client) -> None:
    replies = temporary(client.session)
    send_to(client, replies)
    assert replies.name not in client.engine.queues.by_name
    with refused(Code.NOT_FOUND):
        subscribe(client, replies)
    client.engine.commands.create_temporary(client.session, CreateTemporary(replies))
    client.engine.commands.create_temporary(client.session, CreateTemporary(replies))
    send_to(client, replies)
    subscribe(client, replies)
    assert len(client.dispatch()) == 1


@pytest.mark.parametrize("is_removed_before", [False, True])
def test_send_to_a_removed_temporary_queue_is_dropped_and_never_makes_it_again(
    client: Client, is_removed_before: bool
) -> None:
    replies = temporary(client.session)
    client.engine.commands.create_temporary(client.session, CreateTemporary(replies))
    send_to(client, replies)
    if is_removed_before:
        client.engine.commands.remove_temporary(client.session, RemoveTemporary(replies))
    client.engine.commands.begin(client.other, Begin("t"))
    send_to(client, replies, "t")
    if not is_removed_before:
        client.engine.commands.remove_temporary(client.session, RemoveTemporary(replies))
    client.engine.commands.commit(client.other, Commit("t"))
    send_to(client, replies)
    assert replies.name not in client.engine.queues.by_name and client.session.temporary_queues == []
    client.engine.commands.remove_temporary(client.session, RemoveTemporary(replies))


def test_temporary_queue_with_a_consumer_or_browser_is_not_removed(client: Client) -> None:
    replies = temporary(client.session)
    client.engine.commands.create_temporary(client.session, CreateTemporary(replies))
    subscribe(client, replies)
    with refused(Code.IN_USE):
        client.engine.commands.remove_temporary(client.session, RemoveTemporary(replies))
    client.engine.commands.close(client.session, Close(["reply"]))
    client.engine.commands.browse(client.session, Browse("b", replies))
    with refused(Code.IN_USE):
        client.engine.commands.remove_temporary(client.session, RemoveTemporary(replies))
    client.engine.commands.close(client.session, Close(["b"]))
    client.engine.commands.remove_temporary(client.session, RemoveTemporary(replies))
    assert replies.name not in client.engine.queues.by_name


def test_messages_of_a_removed_queue_leave_open_transactions(client: Client) -> None:
    replies = temporary(client.session)
    client.engine.commands.create_temporary(client.session, CreateTemporary(replies))
    subscribe(client, replies)
    send_to(client, replies)
    (entry,) = client.dispatch()
    client.engine.commands.begin(client.session, Begin("t"))
    client.engine.commands.acknowledge(client.session, Ack("reply", entry.sequence, "t"))
    client.engine.commands.close(client.session, Close(["reply"]))
    client.engine.commands.remove_temporary(client.session, RemoveTemporary(replies))
    client.engine.commands.abort(client.session, Abort("t", counts_all=False))
    assert client.engine.state.memory.message_bytes == 0


def test_temporary_topic_is_made_and_removed_by_commands(client: Client) -> None:
    topic = temporary(client.session, is_topic=True)
    with refused(Code.NOT_FOUND):
        subscribe(client, topic)
    client.engine.commands.create_temporary(client.session, CreateTemporary(topic))
    subscribe(client, topic)
    with refused(Code.IN_USE):
        client.engine.commands.remove_temporary(client.session, RemoveTemporary(topic))
    send_to(client, topic)
    assert len(client.dispatch()) == 1
    client.engine.commands.close(client.session, Close(["reply"]))
    client.engine.commands.remove_temporary(client.session, RemoveTemporary(topic))
    client.engine.commands.remove_temporary(client.session, RemoveTemporary(topic))
    send_to(client, topic)
    with refused(Code.NOT_FOUND):
        subscribe(client, topic)
    client.engine.commands.create_temporary(client.session, CreateTemporary(topic))


@pytest.mark.parametrize("is_topic", [False, True])
def test_connection_has_a_thousand_temporary_destinations_at_once(client: Client, is_topic: bool) -> None:
    for number in range(SUBSCRIPTIONS_MAX):
        destination = temporary(client.session, str(number), is_topic=is_topic)
        client.engine.commands.create_temporary(client.session, CreateTemporary(destination))
    one_more = temporary(client.session, "more", is_topic=not is_topic)
    with pytest.raises(RemoteProtocolError, match=r"has 1000 temporary queues and topics, the most allowed: use fewer"):
        client.engine.commands.create_temporary(client.session, CreateTemporary(one_more))
    # Requests whose reply queue is removed can be as many as they like.
    client.engine.commands.remove_temporary(client.session, RemoveTemporary(destination))
    client.engine.commands.create_temporary(client.session, CreateTemporary(one_more))


def test_destinations_of_others_are_neither_made_nor_removed(client: Client) -> None:
    others = temporary(client.other)
    for destination in (others, temporary(client.other, is_topic=True), parse_address("/queue/q", "")):
        with refused(Code.DESTINATION):
            client.engine.commands.create_temporary(client.session, CreateTemporary(destination))
        with refused(Code.DESTINATION):
            client.engine.commands.remove_temporary(client.session, RemoveTemporary(destination))
    # A STOMP client's are made by the first send, as before.
    client.engine.commands.send(client.other, Send(others, SentMessage(4, False, 0, b"", b"")))
    assert others.name in client.engine.queues.by_name
    client.engine.commands.disconnect(client.other, is_exempt=True)
