"""Tests of the consumers of an OpenWire session: requests for messages, acknowledgements, transactions. The engine is
one of the test."""

from collections.abc import Callable
from random import Random
from time import process_time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from tests.unit.openwire_client import CONNECTION, QUEUE, Client, Delivered, message_id, refusals
from truenext.errors import RemoteProtocolError
from truenext.model.commands import (
    Abort,
    Ack,
    AckMode,
    AckRun,
    Begin,
    Browse,
    Close,
    Command,
    Commit,
    Credit,
    InvalidFrame,
    Nack,
    Send,
    Subscribe,
)
from truenext.model.destination import parse_address
from truenext.model.limits import CAUSE_BYTES_MAX, WINDOW_MAX
from truenext.wire.openwire import consumers
from truenext.wire.openwire.consumers import (
    DELIVERED,
    EXPIRED,
    INDIVIDUAL,
    POISON,
    REDELIVERED,
    STANDARD,
    UNMATCHED,
)
from truenext.wire.openwire.fields import encode_frame
from truenext.wire.openwire.structures import (
    ConnectionId,
    ConsumerControl,
    ConsumerInfo,
    KeepAliveInfo,
    MessageAck,
    MessageDispatch,
    MessageId,
    MessagePull,
    ProducerId,
    ProducerInfo,
    RemoveInfo,
    Response,
    SessionId,
    Structure,
    TextMessage,
    Throwable,
    TopicName,
    TransactionInfo,
)
from truenext.wire.openwire.transactions import BEGIN, COMMIT_ONE_PHASE, ROLLBACK


def consuming(prefetch: int = 10, *sequences: int) -> Client:
    client = Client()
    client.consume(prefetch)
    client.deliver(*sequences)
    client.take_answers()
    return client


DESTINATION = parse_address("/queue/q", "")


# ---- Consumers ----


def test_consumer_pulls_and_gets_its_prefetch_requested() -> None:
    client = Client()
    client.send(
        ConsumerInfo(
            5,
            True,
            client.consumer_id(),
            destination=QUEUE,
            prefetch_size=7,
            priority=3,
            is_exclusive=True,
            selector="a = 'b'",
        )
    )
    subscribe, credit = client.take_commands()
    assert isinstance(subscribe, Subscribe)
    assert (subscribe.subscription, subscribe.mode, subscribe.is_pulling) == ("1:1", AckMode.INDIVIDUAL, True)
    assert (subscribe.priority, subscribe.is_exclusive) == (3, True)
    assert subscribe.selector is not None and subscribe.selector.text == "a = 'b'"
    assert credit == Credit("1:1", 7)
    assert client.take_answers() == [Response(correlation_id=5)]


def test_consumer_that_is_there_is_not_made_again() -> None:
    client = consuming()
    client.send(ConsumerInfo(5, True, client.consumer_id(), destination=QUEUE, prefetch_size=7))
    assert client.take_commands() == [] and client.take_answers() == [Response(correlation_id=5)]


def test_refused_consumer_gets_no_messages_and_can_be_made_again() -> None:
    client = Client()
    client.refuses = lambda command: isinstance(command, Subscribe)
    client.send(ConsumerInfo(5, True, client.consumer_id(), destination=QUEUE, prefetch_size=7))
    assert client.take_commands() == [] and len(refusals(client.take_answers())) == 1
    client.refuses = lambda _: False
    client.send(ConsumerInfo(5, True, client.consumer_id(), destination=QUEUE, prefetch_size=7))
    assert [type(command) for command in client.take_commands()] == [Subscribe, Credit]


def browsing(client: Client, prefetch: int, *shown: int) -> None:
    client.send(ConsumerInfo(5, True, client.consumer_id(), True, QUEUE, prefetch))
    assert client.take_commands() == [Browse("1:1", DESTINATION, is_pulling=True), Credit("1:1", prefetch or 1)]
    client.take_answers()
    client.deliver(*shown)
    assert len(client.take_answers()) == len(shown)


def test_browser_is_shown_its_prefetch_and_more_when_its_client_has_taken_that() -> None:
    # C26.17
    client = Client()
    browsing(client, 4, 1, 2, 3, 4)
    client.ack(STANDARD, 1, 1)
    assert client.credit() == 0, "less than half"
    client.ack(STANDARD, 2, 2)
    assert client.credit() == 2
    client.deliver(5, 6)
    client.ack(DELIVERED, None, 5, 3, transaction=1)
    assert client.credit() == 3
    client.ack(STANDARD, 1, 6, 6, transaction=1)
    client.ack(DELIVERED, None, 6)
    assert client.credit() == 0, "one is requested already"
    client.deliver(7, 8, 9)
    client.ack(DELIVERED, None, 9)
    assert client.credit() == 4


def test_browser_of_prefetch_0_is_shown_messages_one_by_one() -> None:
    # C26.17
    client = Client()
    browsing(client, 0, 1)
    client.send(MessagePull(6, False, client.consumer_id(), QUEUE, -1))
    assert client.credit() == 0
    client.ack(INDIVIDUAL, None, 1)
    assert client.credit() == 1


def test_browser_holds_no_message_and_is_told_the_end() -> None:
    client = Client()
    browsing(client, 500, 1)
    client.ack(STANDARD, 1, 1)
    client.take_commands()
    client.read(client.session.replies.encode_end_of_browse("1:1", DESTINATION))
    assert client.take_answers() == [MessageDispatch(consumer_id=client.consumer_id())]


# ---- Frames that are too large for the client ----


def large(client: Client, consumer: ConsumerInfo) -> tuple[list[Structure], list[Command]]:
    """Deliver a small message, a large one and a small one to a consumer; return what the client gets, and the commands
    of the session after that."""
    client.send(consumer)
    client.take_commands()
    client.take_answers()
    parts: list[bytes] = []
    message = Delivered(2).message
    delivered = [Delivered(1), Delivered(2, replace(message, body=bytes(2000))), Delivered(3)]
    client.session.replies.encode_deliveries("1:1", delivered, parts, is_browse=consumer.is_browser)
    assert len(parts) == 3
    client.read(b"".join(parts))
    assert len(client.reports) == 1 and "increase wireFormat.maxFrameSize" in client.reports[0]
    client.write(b"")
    return client.take_answers(), client.take_commands()


@pytest.mark.parametrize("prefetch", [5, 0])
def test_message_that_is_too_large_for_the_client_is_rejected_and_the_others_are_sent(prefetch: int) -> None:
    # C26.18
    client = Client(frame_bytes_max=1000)
    consumer = ConsumerInfo(5, True, client.consumer_id(), destination=QUEUE, prefetch_size=prefetch)
    answers, commands = large(client, consumer)
    sequences = [
        each.message.message_id.broker_sequence_id if each.message is not None and each.message.message_id else None
        for each in answers
        if isinstance(each, MessageDispatch)
    ]
    assert sequences == ([1, 3] if prefetch else [1, None, 3])
    nack = Nack("1:1", 2, delay_ms=60_000, is_rejected=True, cause=client.reports[0])
    assert commands == [nack, Credit("1:1", 1)][: 2 if prefetch else 1]
    client.write(b"")
    assert client.take_commands() == [], "once"


def test_message_to_a_topic_that_is_too_large_for_the_client_is_acknowledged() -> None:
    # C26.18
    client = Client(frame_bytes_max=1000)
    consumer = ConsumerInfo(5, True, client.consumer_id(), destination=TopicName("t"), prefetch_size=5)
    answers, commands = large(client, consumer)
    assert len(answers) == 2 and commands == [Ack("1:1", 2), Credit("1:1", 1)]


def test_browser_is_not_shown_a_message_that_is_too_large_for_its_client() -> None:
    # C26.18
    client = Client(frame_bytes_max=1000)
    answers, commands = large(client, ConsumerInfo(5, True, client.consumer_id(), True, QUEUE, 6))
    assert len(answers) == 2 and commands == []


def test_consumer_that_has_ended_rejects_nothing() -> None:
    client = Client(frame_bytes_max=1000)
    client.consume()
    client.deliver(1, message=replace(Delivered(1).message, body=bytes(2000)))
    client.send(RemoveInfo(7, True, client.consumer_id(), -1))
    assert client.take_commands() == [Close(["1:1"], None)]


def test_frame_of_the_largest_size_is_sent() -> None:
    client = Client(frame_bytes_max=1000)
    client.consume()
    client.deliver(1)
    size = len(encode_frame(client.take_answers()[0])) - 4
    for space in (0, 1):
        body = b"body" + bytes(1000 - size + space)
        client.deliver(2 + space, message=replace(Delivered(1).message, body=body))
        assert len(client.take_answers()) == 1 - space


# ---- Requests ----


def test_messages_are_requested_once_for_each_read() -> None:
    client = consuming(4, 1, 2, 3, 4)
    client.send(*[standard(client, sequence) for sequence in (1, 2, 3)])
    run = AckRun("1:1", [Ack("1:1", 2), Ack("1:1", 3)], 2)
    assert client.take_commands() == [Ack("1:1", 1), run, Credit("1:1", 3)]


def standard(client: Client, sequence: int) -> MessageAck:
    each = message_id(sequence)
    return MessageAck(9, False, QUEUE, None, client.consumer_id(), STANDARD, each, each, 1)


def test_acknowledgements_of_one_read_are_refused_alone() -> None:
    client = consuming(6, 1, 2, 3, 4, 5)
    client.send(*[standard(client, sequence) for sequence in (1, 2, 9, 2, 4)])
    first, second, wrong, repeated, last, credit = client.take_commands()
    assert (first, second, last) == (Ack("1:1", 1), Ack("1:1", 2), Ack("1:1", 4))
    assert isinstance(wrong, InvalidFrame) and isinstance(repeated, InvalidFrame)
    assert credit == Credit("1:1", 3)


def test_acknowledgements_that_the_engine_does_not_execute_as_a_run_follow_one_by_one() -> None:
    client = consuming(5, 1, 2, 3, 4)
    client.executes_runs = False
    client.refuses = lambda command: command == Ack("1:1", 3)
    client.send(*[standard(client, sequence) for sequence in (1, 2, 3, 4)])
    _, run, second, last, credit = client.take_commands()
    assert isinstance(run, AckRun) and (second, last) == (Ack("1:1", 2), Ack("1:1", 4))
    assert credit == Credit("1:1", 4), "the engine holds none of the four"


def test_acknowledgements_of_a_consumer_that_has_ended_are_refused_one_by_one() -> None:
    client = consuming(5, 1, 2, 3)
    acks = [standard(client, sequence) for sequence in (1, 2, 3)]
    client.send(acks[0], RemoveInfo(5, False, client.consumer_id(), 0), *acks[1:])
    assert [type(command) for command in client.take_commands()] == [Ack, Close, InvalidFrame, InvalidFrame, Credit][:4]


def test_delivered_messages_widen_the_window_until_they_are_acknowledged() -> None:
    client = consuming(2, 1, 2)
    client.ack(DELIVERED, 1, 2, 2)
    assert client.credit() == 2
    client.ack(DELIVERED, 1, 2, 2)
    assert client.credit() == 0
    client.deliver(3, 4)
    client.ack(STANDARD, 1, 2, 2)
    assert client.take_commands() == [AckRun("1:1", [Ack("1:1", 1), Ack("1:1", 2)], 2)]
    client.ack(STANDARD, 3, 3)
    assert client.take_commands() == [Ack("1:1", 3), Credit("1:1", 1)]


@pytest.mark.parametrize("seed", range(5))
def test_order_of_dispatch_is_known_while_messages_are_settled_and_come_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "_SETTLED_MIN", 2)
    random = Random(seed)
    client = Client()
    client.consume(1000)
    (consumer,) = client.session._consumers.by_subscription.values()
    held: list[int] = []
    delivered: set[int] = set()
    for _ in range(300):
        choice = random.random()
        if choice < 0.5 or not held:
            new = [each for each in random.sample(range(1, 60), random.randint(1, 4)) if each not in held]
            client.deliver(*new)
            held += new
        elif choice < 0.8:
            sequence = random.choice(held)
            consumer.remove(sequence)
            held.remove(sequence)
            delivered.discard(sequence)
        elif choice < 0.9:
            last = random.choice(held)
            consumer.mark_delivered(last)
            delivered.update(held[: held.index(last) + 1])
        else:
            consumer.mark_one_delivered(sequence := random.choice(held))
            delivered.add(sequence)
        assert list(consumer.held) == held and set(consumer.delivered) == delivered
        assert len(consumer.order) <= 2 + 4 * 60 + 4
        for first in (None, *held):
            for last in held[::3]:
                ack = MessageAck(
                    first_message_id=None if first is None else message_id(first), last_message_id=message_id(last)
                )
                assert consumer.covered(ack) == held[held.index(first) if first else 0 : held.index(last) + 1]


def test_reports_of_delivery_and_kept_ranges_take_no_time_for_what_else_is_held() -> None:
    client = Client()
    client.consume(WINDOW_MAX)
    client.deliver(*range(1, 20_001))
    client.control(BEGIN)
    frames = []
    for number in range(1, 1001):
        frames.append(replace(standard(client, number), ack_type=DELIVERED))
        last, before = message_id(20_000 - 2 * number), message_id(20_000 - 2 * number - 1)
        kept = replace(standard(client, 1), first_message_id=before, last_message_id=last, message_count=2)
        frames.append(replace(kept, transaction_id=client.transaction()))
    began = process_time()
    client.send(*frames)
    # Walks through all that is held would take ten times as long.
    assert process_time() - began < 0.5
    assert len(client.session._consumers.by_subscription["1:1"].kept) == 2000


def test_prefetch_is_limited() -> None:
    client = Client()
    client.send(ConsumerInfo(5, True, client.consumer_id(), destination=QUEUE, prefetch_size=2**31 - 1))
    assert client.take_commands()[1:] == [Credit("1:1", WINDOW_MAX)]


def test_prefetch_0_requests_what_the_client_pulls() -> None:
    client = consuming(0)
    for timeout, credit in [
        (0, Credit("1:1", 1, True, "pull")),
        (-1, Credit("1:1", 1, False, "pull")),
        (250, Credit("1:1", 1, True, "pull", 250)),
    ]:
        client.send(MessagePull(6, False, client.consumer_id(), QUEUE, timeout))
        assert client.take_commands() == [credit]
        frame = client.session.replies.encode_end_of_pull_request("1:1", DESTINATION, 1, "pull")
        client.read(frame)
        assert client.take_answers() == [MessageDispatch(consumer_id=client.consumer_id())]


def test_prefetch_that_changes_is_requested_anew() -> None:
    client = consuming(4, 1)
    client.send(ConsumerControl(6, False, QUEUE, consumer_id=client.consumer_id(), prefetch=0))
    assert client.take_commands() == [Credit("1:1", 0)]
    client.read(client.session.replies.encode_end_of_pull_request("1:1", DESTINATION, 3, None))
    assert client.take_answers() == []
    client.send(ConsumerControl(6, False, QUEUE, consumer_id=client.consumer_id(), prefetch=2))
    assert client.credit() == 1


# ---- Acknowledgements ----


@pytest.mark.parametrize(
    ("first", "last", "count"), [(4, 4, 1), (1, 4, 3), (3, 2, 2), (1, 2, 2), (None, 3, 2), (1, 1, 2)]
)
def test_range_that_matches_nothing_in_order_of_dispatch_is_refused(first: int | None, last: int, count: int) -> None:
    client = consuming(5, 2, 1, 3)
    client.ack(STANDARD, first, last, count, response_required=True)
    ((name, _),) = refusals(client.take_answers())
    assert name == "javax.jms.JMSException"
    (command,) = client.take_commands()
    assert isinstance(command, InvalidFrame)


def test_range_without_a_first_message_begins_with_the_first_dispatched() -> None:
    client = consuming(5, 2, 1, 3)
    client.ack(STANDARD, None, 1, 2)
    assert client.take_commands()[0] == AckRun("1:1", [Ack("1:1", 2), Ack("1:1", 1)], 2)


def test_run_that_the_engine_does_not_execute_follows_as_single_commands() -> None:
    client = consuming(5, 1, 2, 3)
    client.executes_runs = False
    client.refuses = lambda command: command == Ack("1:1", 2)
    client.ack(STANDARD, 1, 3, 3)
    run, first, credit = client.take_commands()
    assert isinstance(run, AckRun) and first == Ack("1:1", 1)
    assert credit == Credit("1:1", 2), "the engine does not hold the second, and the third stays"


@pytest.mark.parametrize("kind", [DELIVERED, STANDARD, POISON, REDELIVERED, EXPIRED])
def test_acknowledgement_of_a_consumer_that_got_nothing_is_ignored(kind: int) -> None:
    client = consuming(5)
    client.ack(kind, 1, 1, response_required=True)
    assert client.take_commands() == [] and client.take_answers() == [Response(correlation_id=9)]


def test_individual_acknowledgement_of_what_is_not_held_is_ignored() -> None:
    client = consuming(5, 1)
    client.ack(INDIVIDUAL, None, 4, response_required=True)
    assert client.take_commands() == [] and client.take_answers() == [Response(correlation_id=9)]
    client.ack(INDIVIDUAL, None, 1)
    assert client.take_commands() == [Ack("1:1", 1), Credit("1:1", 1)]


def test_poison_rejects_its_range_with_its_cause() -> None:
    client = consuming(5, 1, 2, 3)
    client.ack(POISON, 1, 2, 2, poison_cause=Throwable("java.lang.Throwable", "too often"))
    nacks, credit = client.take_commands()[:2], client.take_commands()
    cause = "java.lang.Throwable: too often"
    assert nacks == [Nack("1:1", each, is_rejected=True, cause=cause) for each in (1, 2)] and credit == []


@pytest.mark.parametrize(
    ("exception", "cause"),
    [
        (None, "rejected by the client"),
        (Throwable(None, None), "java.lang.Throwable"),
        (Throwable("a.B", None), "a.B"),
        (Throwable("a.B", "x\0y\ud800z"), "a.B: x\ufffdy?z"),
        (Throwable("a.B", 40_000 * "\u00fc"), "a.B: " + (CAUSE_BYTES_MAX - 5) // 2 * "\u00fc"),
    ],
)
def test_cause_of_a_rejection_is_a_header_of_limited_size(exception: Throwable | None, cause: str) -> None:
    client = consuming(5, 1)
    client.ack(POISON, 1, 1, 1, poison_cause=exception)
    assert client.take_commands()[0] == Nack("1:1", 1, is_rejected=True, cause=cause)


def test_expired_messages_fail_without_rejection() -> None:
    client = consuming(5, 1, 2)
    client.ack(EXPIRED, 1, 1)
    nack, _ = client.take_commands()
    assert isinstance(nack, Nack) and (nack.sequence, nack.is_rejected) == (1, False)


@pytest.mark.parametrize("kind", [POISON, EXPIRED])
def test_message_that_comes_again_before_its_rejection_returns_is_held(kind: int) -> None:
    client = consuming(5, 1)
    commands = client.session.receive(encode_frame(replace(standard(client, 1), ack_type=kind)))
    assert isinstance(next(commands), Nack)
    # The slice of this connection is over, and a turn dispatches the message to the same consumer.
    client.deliver(1, redelivery_count=1)
    list(commands)
    client.ack(STANDARD, 1, 1)
    assert Ack("1:1", 1) in client.take_commands()


def test_redelivered_changes_nothing() -> None:
    client = consuming(5, 1, 2)
    client.ack(REDELIVERED, 1, 2, 2)
    assert client.take_commands() == []


def test_unmatched_is_refused() -> None:
    client = consuming(5, 1)
    client.ack(UNMATCHED, 1, 1)
    assert [type(command) for command in client.take_commands()] == [InvalidFrame]


# ---- Transactions ----


def test_acknowledgements_wait_for_commit_and_their_messages_stay() -> None:
    client = consuming(3, 1, 2, 3)
    client.control(BEGIN)
    client.ack(STANDARD, 1, 2, 2, transaction=1)
    assert client.take_commands() == [Begin("1"), Credit("1:1", 2)], "what is delivered widens the window"
    client.deliver(4, 5)
    client.take_answers()
    client.control(COMMIT_ONE_PHASE)
    (commit,) = client.take_commands()
    assert commit == Commit("1", acks=[Ack("1:1", 1), Ack("1:1", 2)])
    assert client.take_answers() == [Response(correlation_id=8)]
    client.ack(STANDARD, 3, 3)
    assert client.take_commands() == [Ack("1:1", 3), Credit("1:1", 1)]


@pytest.mark.parametrize("kind", [STANDARD, INDIVIDUAL, POISON])
def test_kept_message_that_is_settled_outside_its_transaction_is_not_committed(kind: int) -> None:
    client = consuming(3, 1, 2)
    client.control(BEGIN)
    client.ack(STANDARD, 1, 2, 2, transaction=1)
    client.ack(kind, 1, 1)
    client.take_commands()
    client.control(COMMIT_ONE_PHASE)
    assert client.take_commands()[0] == Commit("1", acks=[Ack("1:1", 2)])


def test_begin_of_an_open_transaction_does_nothing() -> None:
    client = consuming(3)
    client.control(BEGIN)
    client.control(BEGIN)
    assert client.take_commands() == [Begin("1")]


def test_rollback_leaves_messages_with_their_consumer_and_does_not_widen_its_window() -> None:
    client = consuming(2, 1, 2)
    client.ack(DELIVERED, 1, 2, 2)
    client.deliver(3, 4)
    client.take_commands()
    for value in range(1, 4):
        client.control(BEGIN, value)
        client.ack(STANDARD, 1, 2, 2, transaction=value)
        client.control(ROLLBACK, value)
        client.ack(DELIVERED, 1, 2, 2)
        assert client.take_commands() == [Begin(str(value)), Abort(str(value), counts_all=False)]
    client.control(BEGIN, 9)
    client.ack(STANDARD, 1, 2, 2, transaction=9)
    client.control(COMMIT_ONE_PHASE, 9)
    assert Commit("9", acks=[Ack("1:1", 1), Ack("1:1", 2)]) in client.take_commands()


def test_message_that_a_transaction_keeps_cannot_be_acknowledged_in_another_one() -> None:
    # C18.3
    client = consuming(5, 1, 2, 3)
    client.control(BEGIN, 1)
    client.control(BEGIN, 2)
    client.ack(STANDARD, 1, 2, 2, transaction=1)
    client.ack(STANDARD, 1, 1, transaction=1)
    client.take_commands()
    client.ack(STANDARD, 2, 3, 2, transaction=2)
    refused = client.take_commands()[0]
    assert isinstance(refused, InvalidFrame) and refused.transaction == "2" and "another open" in refused.reason
    client.control(COMMIT_ONE_PHASE, 1)
    assert client.take_commands()[0] == Commit("1", acks=[Ack("1:1", 1), Ack("1:1", 2)])


def test_refused_commit_ends_the_transaction_and_its_messages_stay() -> None:
    client = consuming(3, 1)
    client.control(BEGIN)
    client.ack(STANDARD, 1, 1, transaction=1)
    client.take_commands()
    client.take_answers()
    client.refuses = lambda command: isinstance(command, Commit)
    client.control(COMMIT_ONE_PHASE)
    assert client.take_commands()[0] == Abort("1", counts_all=False)
    assert len(client.take_answers()) == 1
    client.refuses = lambda _: False
    client.control(BEGIN, 2)
    client.ack(STANDARD, 1, 1, transaction=2)
    client.control(COMMIT_ONE_PHASE, 2)
    assert Commit("2", acks=[Ack("1:1", 1)]) in client.take_commands()


def test_commit_of_a_transaction_that_is_not_open_is_left_to_the_engine() -> None:
    client = consuming(3)
    client.control(COMMIT_ONE_PHASE, 5)
    assert client.take_commands() == [Commit("5", acks=[])]


def test_rollback_of_a_transaction_that_is_not_open_is_answered() -> None:
    client = consuming(3)
    client.control(ROLLBACK, 5)
    assert client.take_commands() == [] and client.take_answers() == [Response(correlation_id=8)]


@pytest.mark.parametrize("kind", [POISON, REDELIVERED, EXPIRED])
def test_other_acknowledgements_in_a_transaction_are_refused(kind: int) -> None:
    client = consuming(3, 1)
    client.control(BEGIN)
    client.take_commands()
    client.ack(kind, 1, 1, transaction=1)
    (command,) = client.take_commands()
    assert isinstance(command, InvalidFrame) and command.transaction == "1"


def test_kept_messages_of_a_consumer_that_ends_are_the_transactions() -> None:
    client = consuming(3, 1, 2)
    client.control(BEGIN)
    client.ack(STANDARD, 1, 1, transaction=1)
    client.take_commands()
    client.send(RemoveInfo(7, False, client.consumer_id(), 2))
    assert client.take_commands() == [Ack("1:1", 1, "1"), Close(["1:1"], 2)]
    client.control(COMMIT_ONE_PHASE)
    assert client.take_commands() == [Commit("1", acks=[])]


def test_consumer_that_has_ended_requests_nothing_at_the_commit_of_its_transaction() -> None:
    client = consuming(3, 1, 2)
    client.control(BEGIN)
    client.send(
        MessageAck(9, False, QUEUE, client.transaction(), client.consumer_id(), STANDARD, None, message_id(1), 1),
        RemoveInfo(7, False, client.consumer_id(), 2),
    )
    client.take_commands()
    client.control(COMMIT_ONE_PHASE)
    assert client.take_commands() == [Commit("1", acks=[])]


@pytest.mark.parametrize("acknowledges_later", [False, True])
@pytest.mark.parametrize("is_refused_by_engine", [False, True])
def test_end_of_a_consumer_is_not_refused_with_its_transaction(
    acknowledges_later: bool, is_refused_by_engine: bool
) -> None:
    # C26.6
    client = consuming(3, 1, 2)
    client.control(BEGIN)
    client.ack(STANDARD, 1, 1, transaction=1)
    client.take_commands()
    if is_refused_by_engine:
        client.refuses = lambda command: isinstance(command, Send | Ack)
        client.send(message_in_transaction(client, 1))
    else:
        client.ack(POISON, 1, 1, transaction=1)
    if acknowledges_later:
        client.ack(STANDARD, 1, 2, 2, transaction=1)
    client.take_commands()
    client.take_answers()
    client.send(RemoveInfo(7, True, client.consumer_id(), 2))
    assert client.take_commands() == [Close(["1:1"], 2)]
    assert client.take_answers() == [Response(correlation_id=7)]


def begin(client: Client, command_id: int) -> TransactionInfo:
    return TransactionInfo(command_id, False, ConnectionId(client.connection), client.transaction(), BEGIN)


def commit_is_refused(client: Client, command_id: int = 8) -> bool:
    """Commit transaction 1, and return whether that is refused and the transaction aborted."""
    client.take_commands()
    client.take_answers()
    client.send(replace(begin(client, command_id), response_required=True, operation=COMMIT_ONE_PHASE))
    commands = [command for command in client.take_commands() if not isinstance(command, Credit)]
    found = refusals(client.take_answers())
    if not found:
        assert [type(command) for command in commands] == [Commit]
        return False
    assert [name for name, _ in found] == ["javax.jms.TransactionRolledBackException"]
    assert isinstance(commands[0], InvalidFrame) and commands[1:] == [Abort("1", counts_all=False)]
    return True


@pytest.mark.parametrize("kind", [STANDARD, INDIVIDUAL])
@pytest.mark.parametrize("got", [(), (7,)])
def test_transaction_that_acknowledges_what_an_earlier_connection_got_is_rolled_back(
    kind: int, got: tuple[int, ...]
) -> None:
    # C26.15
    client = consuming(3, *got)
    client.control(BEGIN)
    client.ack(kind, 1, 1, transaction=1)
    assert refusals(client.take_answers()) == []
    assert commit_is_refused(client)


def test_transaction_whose_range_has_lost_a_message_is_rolled_back() -> None:
    client = consuming(3, 1, 3)
    client.control(BEGIN)
    client.ack(STANDARD, 1, 3, 3, transaction=1)
    assert commit_is_refused(client)


@pytest.mark.parametrize("session", [1, 2])
@pytest.mark.parametrize("is_acknowledging", [False, True])
def test_repeated_transaction_without_acknowledgements_is_rolled_back_if_its_session_consumes(
    session: int, is_acknowledging: bool
) -> None:
    # C26.15
    client = Client(is_reconnect=True)
    client.consume(0)
    client.control(BEGIN)
    client.send(message_in_transaction(client, session))
    client.send(ConsumerControl(6, False, QUEUE, consumer_id=client.consumer_id(), prefetch=2))
    client.deliver(1)
    if is_acknowledging:
        client.ack(STANDARD, 1, 1, transaction=1)
    assert commit_is_refused(client) == (session == 1 and not is_acknowledging)


OF_FIRST = ProducerId(CONNECTION, 1, 1)
OF_SECOND = ProducerId(CONNECTION, 2, 1)


@pytest.mark.parametrize(
    ("commit_id", "frames"),
    [
        (12, lambda client: [begin(client, 10), message_in_transaction(client, 1, 11)]),
        (13, lambda client: [begin(client, 10), *(message_in_transaction(client, 1, each) for each in (11, 12))]),
        # A producer that has ended is repeated before, and its end behind, with another id.
        (14, lambda client: [
            ProducerInfo(9, True, OF_FIRST, QUEUE), ProducerInfo(12, True, OF_SECOND, QUEUE), begin(client, 10),
            message_in_transaction(client, 1, 11), message_in_transaction(client, 1, 13, producer=2)]),
        (14, lambda client: [
            ProducerInfo(11, True, OF_FIRST, QUEUE), begin(client, 10), message_in_transaction(client, 1, 12),
            RemoveInfo(0, False, OF_FIRST)]),
        (13, lambda client: [
            ProducerInfo(9, True, OF_FIRST, QUEUE), begin(client, 10), message_in_transaction(client, 1, 11),
            RemoveInfo(0, False, OF_FIRST)]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("missing", [0, 1])
def test_repeated_transaction_whose_command_ids_leave_no_room_for_acknowledgements_is_committed(
    commit_id: int, frames: Callable[[Client], list[Structure]], missing: int
) -> None:
    # C26.15
    client = Client(is_reconnect=True)
    client.consume(0)
    client.send(*frames(client))
    client.send(ConsumerControl(0, False, QUEUE, consumer_id=client.consumer_id(), prefetch=2))
    assert commit_is_refused(client, commit_id + missing) == (missing == 1)


def test_producers_of_a_session_that_has_ended_take_no_memory_of_a_recovery() -> None:
    client = Client(is_reconnect=True)
    client.send(*(ProducerInfo(11, True, ProducerId(CONNECTION, 1, each), QUEUE) for each in (1, 2, 3)))
    client.send(RemoveInfo(12, False, SessionId(CONNECTION, 1)), RemoveInfo(12, False, ProducerId(CONNECTION, 1, 2)))
    assert list(client.session._recovery._producers) == [ProducerId(CONNECTION, 1, 3)]


@pytest.mark.parametrize("has_acknowledged", [False, True])
def test_transaction_after_the_first_commit_of_a_client_that_connects_again_is_its_own(has_acknowledged: bool) -> None:
    # C26.15: without consumers to repeat, no ConsumerControl comes.
    client = Client(is_reconnect=True)
    client.consume(10)
    client.control(BEGIN)
    client.send(message_in_transaction(client, 1))
    if has_acknowledged:
        client.deliver(1)
        client.ack(STANDARD, 1, 1, transaction=1)
    assert commit_is_refused(client) == (not has_acknowledged)
    client.control(BEGIN)
    client.send(message_in_transaction(client, 1))
    assert not commit_is_refused(client)


def test_client_that_has_committed_must_give_its_consumers_their_prefetch_back() -> None:
    # C26.19
    client = stalled()
    client.control(BEGIN)
    client.control(COMMIT_ONE_PHASE)
    client.send(ALIVE)
    with pytest.raises(RemoteProtocolError, match="connect again"):
        client.send(ALIVE)


def test_repeated_transaction_whose_session_only_browses_is_committed() -> None:
    # C26.15
    client = Client(is_reconnect=True)
    client.consume(500, is_browser=True)
    client.control(BEGIN)
    client.send(message_in_transaction(client, 1))
    assert not commit_is_refused(client)


def test_repeated_transaction_with_acknowledgements_of_a_consumer_that_has_ended_is_committed() -> None:
    # C26.15
    client = Client(is_reconnect=True)
    client.consume(3)
    client.consume(3, value=2)
    client.control(BEGIN)
    client.send(message_in_transaction(client, 1))
    client.deliver(1)
    client.ack(STANDARD, 1, 1, transaction=1)
    client.send(RemoveInfo(7, False, client.consumer_id(), 1))
    assert not commit_is_refused(client)


@pytest.mark.parametrize("is_reconnect", [False, True])
def test_transaction_that_is_begun_on_this_connection_needs_no_acknowledgements(is_reconnect: bool) -> None:
    client = Client(is_reconnect=is_reconnect)
    client.consume(0)
    client.send(ConsumerControl(6, False, QUEUE, consumer_id=client.consumer_id(), prefetch=2))
    client.control(BEGIN)
    client.send(message_in_transaction(client, 1))
    assert not commit_is_refused(client)


ADVISORIES = TopicName("ActiveMQ.Advisory.TempQueue,ActiveMQ.Advisory.TempTopic")
ALIVE = KeepAliveInfo(9, False)


def stalled(*, is_reconnect: bool = True, prefetch: int = 0) -> Client:
    """Return a client that has made its consumers, perhaps not for the first time."""
    client = Client(is_reconnect=is_reconnect)
    client.send(ConsumerInfo(5, True, client.consumer_id(session=-1), False, ADVISORIES, prefetch))
    client.consume(0)
    return client


def test_client_that_forgets_to_give_its_consumers_their_prefetch_back_must_connect_again() -> None:
    # C26.19
    client = stalled()
    client.send(ALIVE)
    with pytest.raises(RemoteProtocolError, match="connect again"):
        client.send(ALIVE)


@pytest.mark.parametrize(("is_reconnect", "prefetch"), [(False, 0), (True, 1000)])
def test_consumer_of_prefetch_0_may_be_silent(is_reconnect: bool, prefetch: int) -> None:
    # C26.19
    client = stalled(is_reconnect=is_reconnect, prefetch=prefetch)
    client.send(*3 * [ALIVE])


def test_client_that_has_given_its_consumers_their_prefetch_back_may_be_silent() -> None:
    # C26.19
    client = stalled()
    client.send(ALIVE)
    client.send(ConsumerControl(6, False, QUEUE, consumer_id=client.consumer_id(), prefetch=2))
    client.send(*3 * [ALIVE])


def message_in_transaction(client: Client, session: int, command_id: int = 7, *, producer: int = 1) -> TextMessage:
    producer_id = ProducerId(client.connection, producer, session)
    return TextMessage(
        command_id,
        producer_id=producer_id,
        destination=QUEUE,
        transaction_id=client.transaction(),
        message_id=MessageId(None, producer_id, 1),
    )


def test_consumer_ends_even_if_its_transaction_takes_no_acknowledgements() -> None:
    client = consuming(3, 1, 2)
    client.control(BEGIN)
    client.ack(STANDARD, 1, 2, 2, transaction=1)
    client.take_commands()
    client.take_answers()
    client.control(BEGIN, 2)
    client.deliver(3, 4)
    client.ack(STANDARD, 3, 4, 2, transaction=2)
    client.take_commands()
    client.take_answers()
    client.refuses = lambda command: isinstance(command, Ack)
    client.send(RemoveInfo(7, True, client.consumer_id(), 2))
    assert client.take_commands() == [Close(["1:1"], 2)]
    answers = client.take_answers()
    assert [each.correlation_id for each in answers if isinstance(each, Response)] == [7]
    assert len(answers) == 2, "one refusal of each transaction"
    client.refuses = lambda _: False
    client.send(ConsumerInfo(5, True, client.consumer_id(), destination=QUEUE, prefetch_size=3))
    assert [type(command) for command in client.take_commands()] == [Subscribe, Credit], "the consumer has ended"


@pytest.mark.parametrize(("named", "last"), [(-2, None), (-1, None), (0, 0), (5, 5)])
def test_end_of_a_consumer_names_what_was_delivered_last(named: int, last: int | None) -> None:
    client = consuming(3)
    client.send(RemoveInfo(7, True, client.consumer_id(), named))
    assert client.take_commands() == [Close(["1:1"], last)]
    client.send(RemoveInfo(7, True, client.consumer_id(), named))
    assert client.take_commands() == []


# ---- The window, whatever the client does ----


class Window(RuleBasedStateMachine):
    """A transacted client of one consumer, and a broker that delivers what was requested."""

    def __init__(self) -> None:
        super().__init__()
        self.prefetch = 3
        self.client = consuming(self.prefetch)
        self.requested = self.prefetch
        self.held: list[int] = []
        self.reported: set[int] = set()
        self.kept: list[int] = []
        self.sequence = 0
        self.transaction = 0
        self.is_open = False

    def note(self) -> None:
        for command in self.client.take_commands():
            if isinstance(command, Credit):
                self.requested += command.messages

    @precondition(lambda self: self.requested)
    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, self.requested)):
            self.sequence += 1
            self.held.append(self.sequence)
            self.requested -= 1
            self.client.deliver(self.sequence)

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 5))
    def report(self, at: int) -> None:
        last = self.held[min(at, len(self.held) - 1)]
        self.client.ack(DELIVERED, self.held[0], last, self.held.index(last) + 1)
        self.reported |= set(self.held[: self.held.index(last) + 1])
        self.note()

    @rule()
    def begin(self) -> None:
        if not self.is_open:
            self.transaction += 1
            self.client.control(BEGIN, self.transaction)
            self.is_open = True

    @precondition(lambda self: self.is_open and self.held)
    @rule(at=st.integers(0, 5))
    def keep(self, at: int) -> None:
        last = self.held[min(at, len(self.held) - 1)]
        covered = self.held[: self.held.index(last) + 1]
        self.client.ack(STANDARD, self.held[0], last, len(covered), transaction=self.transaction)
        self.kept = [*self.kept, *covered]
        self.reported |= set(covered)
        self.note()

    @precondition(lambda self: self.is_open and self.held)
    @rule(at=st.integers(0, 5))
    def keep_one(self, at: int) -> None:
        one = self.held[min(at, len(self.held) - 1)]
        self.client.ack(INDIVIDUAL, None, one, transaction=self.transaction)
        self.kept = [*self.kept, one]
        self.reported.add(one)
        self.note()

    @precondition(lambda self: self.is_open)
    @rule(commits=st.booleans())
    def end(self, commits: bool) -> None:
        self.client.control(COMMIT_ONE_PHASE if commits else ROLLBACK, self.transaction)
        if commits:
            self.held = [each for each in self.held if each not in self.kept]
        self.kept, self.is_open = [], False
        self.note()

    @precondition(lambda self: self.held and not self.is_open)
    @rule(count=st.integers(1, 3), is_poison=st.booleans())
    def settle(self, count: int, is_poison: bool) -> None:
        covered = self.held[:count]
        self.client.ack(POISON if is_poison else STANDARD, covered[0], covered[-1], len(covered))
        self.held = self.held[len(covered) :]
        self.note()

    @invariant()
    def consumer_may_always_hold_its_prefetch_and_what_was_reported(self) -> None:
        assert len(self.held) + self.requested == self.prefetch + len(self.reported & set(self.held))


TestWindow = Window.TestCase
