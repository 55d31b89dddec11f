"""Tests of the limits of open transactions on one connection, and of the cost of idle ones."""

import gc
import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from msgspec.structs import replace

from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.transaction import TransactionLimits
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import EventLog
from truenext.errors import Code, NoSpaceError, RemoteProtocolError
from truenext.model.commands import (
    Abort,
    Ack,
    AckMode,
    Begin,
    Commit,
    Nack,
    Release,
    Send,
    Started,
    Subscribe,
    Unsubscribe,
)
from truenext.model.destination import parse_address
from truenext.model.disk_level import DISK_FULL, DiskLevel
from truenext.model.limits import TRANSACTIONS_CEILING
from truenext.model.message import SentMessage
from truenext.model.schedule import Schedule

MANY = 1000


def started(limits: TransactionLimits) -> Engine:
    engine = Engine(transaction_limits=limits)
    engine.lifespan.start()
    commit(engine)
    return engine


def commit(engine: Engine) -> None:
    while (batch := engine.take_batch()) is not None:
        engine.store_results.on_committed(batch)


def connected(engine: Engine, name: str = "s") -> ConnectionState:
    session = engine.commands.connect(name)
    engine.commands.subscribe(session, Subscribe("0", parse_address("/queue/a", name), AckMode.INDIVIDUAL, 1000))
    return session


def send(
    engine: Engine, session: ConnectionState, transaction: str | None = None, body: bytes = b"", group: str = ""
) -> None:
    message = SentMessage(4, True, 0, b"content-length:%d\n" % len(body), body, group=group)
    engine.commands.send(session, Send(parse_address("/queue/a", "s"), message, transaction))


def dispatched(engine: Engine) -> list[int]:
    commit(engine)
    return [entry.sequence for entries in engine.turn.run().deliveries.values() for entry in entries]


def steps_of(action: Callable[[], object]) -> int:
    """Count the calls of Python and C functions, and resumed generators."""
    count = 0

    def step(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection calls back into hypothesis, if another test of this process has loaded it
    sys.setprofile(step)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def steps_with_others(others: int) -> dict[str, int]:
    """Return the steps of each operation on a message while `others` idle transactions are open."""
    engine = started(TransactionLimits(transactions=TRANSACTIONS_CEILING))
    session = connected(engine)
    for number in range(others):
        engine.commands.begin(session, Begin(f"idle {number}"))
    for _ in range(6):
        send(engine, session)
    held = dispatched(engine)
    queue = session.consumers["0"].queue
    assert len(held) == 6 and queue is not None
    engine.commands.begin(session, Begin("t"))
    return {
        "SEND": steps_of(lambda: send(engine, session, "t")),
        "ACK": steps_of(lambda: engine.commands.acknowledge(session, Ack("0", held[0], "t"))),
        "NACK": steps_of(lambda: engine.commands.nack(session, Nack("0", held[1], "t"))),
        "who has what": steps_of(lambda: list(engine.state.clients.held_entries(queue))),
        "COMMIT": steps_of(lambda: engine.commands.commit(session, Commit("t"))),
        "BEGIN": steps_of(lambda: engine.commands.begin(session, Begin("t"))),
        "ABORT": steps_of(lambda: engine.commands.abort(session, Abort("t"))),
        "SEND alone": steps_of(lambda: send(engine, session)),
        "ACK alone": steps_of(lambda: engine.commands.acknowledge(session, Ack("0", held[2]))),
        "the rest": steps_of(lambda: dispatched(engine)),
    }


def test_idle_open_transactions_cost_no_step() -> None:
    steps_with_others(1)
    assert steps_with_others(MANY) == steps_with_others(1)


def test_commands_in_a_transaction_are_counted_until_it_ends() -> None:
    engine = started(TransactionLimits())
    session = connected(engine)
    for _ in range(3):
        send(engine, session)
    held = dispatched(engine)
    for name in ("t", "u"):
        engine.commands.begin(session, Begin(name))
    for name, body in (("t", b"12345"), ("u", b"")):
        send(engine, session, name, body)
    engine.commands.acknowledge(session, Ack("0", held[0], "t"))
    engine.commands.nack(session, Nack("0", held[1], "u"))
    size = 2 * len("content-length:0\n") + 5
    assert (session.transactions.message_count, session.transactions.total_bytes) == (4, size)
    assert len(session.transactions.settling_transactions) == 2
    engine.commands.commit(session, Commit("t"))
    assert (session.transactions.message_count, session.transactions.total_bytes) == (2, len("content-length:0\n"))
    engine.commands.abort(session, Abort("u"))
    assert (
        session.transactions.message_count,
        session.transactions.total_bytes,
        session.transactions.settling_transactions,
    ) == (0, 0, {})


def test_nack_of_a_message_that_the_transaction_acknowledged_is_counted_once() -> None:
    engine = started(TransactionLimits())
    session = connected(engine)
    send(engine, session)
    (sequence,) = dispatched(engine)
    engine.commands.begin(session, Begin("t"))
    engine.commands.acknowledge(session, Ack("0", sequence, "t"))
    engine.commands.nack(session, Nack("0", sequence, "t"))
    assert session.transactions.message_count == 1


def test_limits_are_those_of_the_settings_and_the_refusal_names_them_and_counts_nothing() -> None:
    engine = started(TransactionLimits(transactions=2, size=100, messages=3))
    session = connected(engine)
    for name in ("t", "u"):
        engine.commands.begin(session, Begin(name))
    assert error_of(lambda: engine.commands.begin(session, Begin("v"))) == (
        "more than 2 open transactions on one connection (transactions_max)"
    )
    send(engine, session, "t", bytes(50))
    assert error_of(lambda: send(engine, session, "u", bytes(50))) == (
        "more than 100 bytes in open transactions of one connection (transaction_bytes_max); commit more often"
    )
    send(engine, session, "t")
    engine.commands.abort(session, Abort("u"))
    send(engine, session)
    (sequence,) = dispatched(engine)
    engine.commands.acknowledge(session, Ack("0", sequence, "t"))
    why = (
        "more than 3 sends and acknowledgements in open transactions of one connection (transaction_messages_max), "
        "where sends with a group, an expiry or a schedule count twice, NACKs once more for a cause and for a "
        "delay, and each queue beyond the first 100 of a transaction counts 10; commit more often"
    )
    assert error_of(lambda: send(engine, session, "t")) == why
    assert session.transactions.message_count == 3
    engine.commands.commit(session, Commit("t"))
    engine.commands.begin(session, Begin("t"))
    # One alone may be as large as a body may be.
    send(engine, session, "t", bytes(1000))


COSTLY = {
    "group": ({"group": "g"}, {}),
    "expiry": ({"expires_ms": 1 << 42}, {}),
    "time to live": ({}, {"ttl_ms": 1000}),
    "delay": ({}, {"schedule": Schedule(due_ms=1 << 42)}),
}


@pytest.mark.parametrize(("of_message", "of_send"), COSTLY.values(), ids=COSTLY)
def test_sends_that_take_long_to_accept_count_twice_until_the_transaction_ends(
    of_message: dict[str, Any], of_send: dict[str, Any]
) -> None:
    engine = started(TransactionLimits(messages=5))
    session = connected(engine)
    engine.commands.begin(session, Begin("t"))
    costly = Send(parse_address("/queue/a", "s"), SentMessage(4, True, 0, b"", b""), "t")
    costly = replace(costly, message=replace(costly.message, **of_message), **of_send)
    send(engine, session, "t")
    for _ in range(2):
        engine.commands.send(session, replace(costly))
    assert session.transactions.message_count == 5
    assert error_of(lambda: send(engine, session, "t")).startswith("more than 5 sends and acknowledgements")
    engine.commands.commit(session, Commit("t"))
    assert session.transactions.message_count == 0


@pytest.mark.parametrize("more", [{"cause": "c"}, {"delay_ms": 1}])
@pytest.mark.parametrize("is_acknowledged", [False, True])
def test_nacks_with_a_cause_or_a_delay_count_twice(more: dict[str, Any], is_acknowledged: bool) -> None:
    engine = started(TransactionLimits(messages=3))
    session = connected(engine)
    for _ in range(2):
        send(engine, session)
    held = dispatched(engine)
    engine.commands.begin(session, Begin("t"))
    if is_acknowledged:
        for sequence in held:
            engine.commands.acknowledge(session, Ack("0", sequence, "t"))
    engine.commands.nack(session, Nack("0", held[0], "t", **more))
    assert session.transactions.message_count == 2 + is_acknowledged
    refusal = error_of(lambda: engine.commands.nack(session, Nack("0", held[1], "t", **more)))
    assert refusal.startswith("more than 3 sends and acknowledgements")
    engine.commands.abort(session, Abort("t"))
    assert session.transactions.message_count == 0


def test_commit_of_grouped_sends_to_queues_in_turn_takes_few_steps_more_than_to_one_queue() -> None:
    def steps(queues: int) -> int:
        engine = Engine(CommitState(EventLog()))
        engine.lifespan.start()
        session = engine.commands.connect("s")
        for _ in range(2):
            engine.commands.begin(session, Begin("t"))
            for number in range(100):
                message = SentMessage(4, True, 0, b"", b"", group=f"g{number}")
                destination = parse_address(f"/queue/q{number % queues}", "s")
                engine.commands.send(session, Send(destination, message, "t"))
            count = steps_of(lambda: engine.commands.commit(session, Commit("t")))
        return count

    # Each message is an event block of its own, which no array is made for.
    assert steps(10) - steps(1) < 100 * 18


def test_commit_sends_to_a_topic_and_a_queue_of_the_same_name_each_where_it_belongs() -> None:
    engine = started(TransactionLimits())
    session = connected(engine)
    engine.commands.subscribe(session, Subscribe("t", parse_address("/topic/a", "s"), AckMode.INDIVIDUAL, 1000))
    engine.commands.begin(session, Begin("t"))
    for address in ("/queue/a", "/topic/a", "/queue/a,/topic/a", "/queue/a", "/topic/a"):
        message = SentMessage(4, True, 0, b"", address.encode())
        engine.commands.send(session, Send(parse_address(address, "s"), message, "t"))
    engine.commands.commit(session, Commit("t"))
    commit(engine)
    engine.turn.run()
    bodies = {
        name: [entry.message.body.decode() for entry in consumer.held.values() if entry.message is not None]
        for name, consumer in session.consumers.items()
    }
    assert bodies == {
        "0": ["/queue/a", "/queue/a,/topic/a", "/queue/a"],
        "t": ["/topic/a", "/queue/a,/topic/a", "/topic/a"],
    }


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        action()
    assert caught.value.code is Code.LIMIT
    return str(caught.value)


# ---- What the end of a transaction counts an attempt for (docs/contract.md, C10.2 to C10.4) ----


class Bundle:
    """Three messages: a transaction that counts its NACKs alone acknowledges two of them, and NACKs one of these."""

    def __init__(self, *, is_truenext_client: bool = True, nacks: bool = True) -> None:
        self.engine = engine = started(TransactionLimits())
        self.session = session = connected(engine)
        session.is_truenext_client = is_truenext_client
        engine.commands.begin(session, Begin("first"))
        engine.commands.commit(session, Commit("first", "p", 1))
        for _ in range(3):
            send(engine, session)
        commit(engine)
        ((*entries,),) = engine.turn.run().deliveries.values()
        self.entries = entries
        engine.commands.begin(session, Begin("t", counts_all=False))
        for entry in entries[:2]:
            if is_truenext_client:
                engine.commands.mark_started(session, Started("0", entry.sequence, 1))
            engine.commands.acknowledge(session, Ack("0", entry.sequence, "t"))
        if nacks:
            engine.commands.nack(session, Nack("0", entries[1].sequence, "t"))

    def attempts(self) -> list[int]:
        return [entry.attempts for entry in self.entries]


@pytest.mark.parametrize("counts_all", [True, False])
def test_abort_of_a_transaction_that_counts_nacks_counts_nothing_else(counts_all: bool) -> None:
    bundle = Bundle()
    bundle.engine.commands.abort(bundle.session, Abort("t", counts_all))
    assert bundle.attempts() == [0, 1, 0]


@pytest.mark.parametrize("counts_all", [True, False])
def test_repeated_commit_of_a_transaction_that_counts_nacks_counts_nothing_else(counts_all: bool) -> None:
    bundle = Bundle()
    repeat = Commit("t", "p", 1, counts_all=counts_all)
    bundle.engine.commands.commit(bundle.session, repeat)
    assert repeat.is_repeat and bundle.attempts() == [0, 1, 0]


@pytest.mark.parametrize("counts_all", [True, False])
def test_release_that_names_a_transaction_that_counts_nacks_counts_nothing_else(counts_all: bool) -> None:
    bundle = Bundle()
    bundle.engine.commands.release(bundle.session, Release(["0"], [], transaction="t", counts_all=counts_all))
    assert bundle.attempts() == [0, 1, 0]


def test_abort_of_a_refused_transaction_that_counts_nacks_counts_nothing_else() -> None:
    bundle = Bundle()
    bundle.engine.commands.transactions.mark_rollback_only(bundle.session, "t")
    bundle.engine.commands.abort(bundle.session, Abort("t"))
    assert bundle.attempts() == [0, 1, 0]


def test_lost_connection_counts_messages_nacked_in_such_a_transaction_and_the_first_outside_it() -> None:
    bundle = Bundle(is_truenext_client=False)
    bundle.engine.commands.disconnect(bundle.session, is_exempt=False)
    assert bundle.attempts() == [0, 1, 1]
    assert [entry.was_lost and entry.attempts > 0 for entry in bundle.entries] == [False, True, True]
    # C26.8
    assert [entry.redelivery_count for entry in bundle.entries] == [1, 1, 1]


def test_lost_connection_of_a_truenext_client_counts_no_acknowledged_message() -> None:
    bundle = Bundle()
    bundle.engine.commands.disconnect(bundle.session, is_exempt=False)
    assert bundle.attempts() == [0, 1, 0]


@pytest.mark.parametrize("is_truenext_client", [False, True])
def test_lost_connection_counts_nothing_of_a_client_that_acknowledges_all_in_such_transactions(
    is_truenext_client: bool,
) -> None:
    # C10.4
    bundle = Bundle(is_truenext_client=is_truenext_client, nacks=False)
    bundle.engine.commands.acknowledge(bundle.session, Ack("0", bundle.entries[2].sequence, "t"))
    bundle.engine.commands.disconnect(bundle.session, is_exempt=False)
    assert bundle.attempts() == [0, 0, 0]


def test_second_begin_of_the_name_does_not_change_what_counts() -> None:
    bundle = Bundle()
    with pytest.raises(RemoteProtocolError, match="transaction 't' is open already"):
        bundle.engine.commands.begin(bundle.session, Begin("t"))
    bundle.engine.commands.abort(bundle.session, Abort("t"))
    assert bundle.attempts() == [0, 1, 0]


def test_cut_connection_has_nothing_left_if_its_transactions_count_nothing() -> None:
    bundle = Bundle(nacks=False)
    send(bundle.engine, bundle.session, "t")
    assert not bundle.engine.commands.connecting.park(bundle.session)
    assert not bundle.session.transactions and bundle.attempts() == [0, 0, 0]


def test_cut_connection_keeps_the_transactions_that_count_something() -> None:
    bundle = Bundle()
    bundle.engine.commands.begin(bundle.session, Begin("of sends"))
    send(bundle.engine, bundle.session, "of sends")
    assert bundle.engine.commands.connecting.park(bundle.session)
    assert list(bundle.session.transactions) == ["t"]
    bundle.engine.commands.disconnect(bundle.session, is_exempt=False)
    assert bundle.attempts() == [0, 1, 0]


# ---- Where there is no room on the disk: any order of events is in tests/property ----


def taking(engine: Engine, count: int) -> ConnectionState:
    """Return a connection whose transaction t has acknowledged `count` messages of 1000 bytes; then the disk is
    full."""
    session = connected(engine)
    for _ in range(count):
        send(engine, session, body=b"a" * 1000)
    engine.commands.begin(session, Begin("t"))
    for sequence in dispatched(engine):
        engine.commands.acknowledge(session, Ack("0", sequence, "t"))
    engine.state.commit_state.disk_level = DiskLevel.NONE
    return session


def test_send_larger_than_its_transaction_frees_is_refused_with_what_to_do() -> None:
    engine = started(TransactionLimits())
    session = taking(engine, 2)
    send(engine, session, "t", b"b" * 1000)
    send(engine, session, "t", b"b" * 1000)
    with pytest.raises(NoSpaceError) as refused:
        send(engine, session, "t")
    assert str(refused.value) == (
        f"{DISK_FULL}: free disk space, or try again when messages were consumed; or use a "
        "transaction that first acknowledges messages, of at least as many bytes as it sends "
        "(except 16384 bytes to queues Spark.*)"
    )


def test_acknowledged_messages_allow_no_send_outside_the_transaction_or_on_a_full_disk() -> None:
    engine = started(TransactionLimits())
    session = taking(engine, 2)
    plain = f"{DISK_FULL}: free disk space, or try again when messages were consumed"
    with pytest.raises(NoSpaceError) as refused:
        send(engine, session)
    assert str(refused.value) == plain
    engine.state.commit_state.disk_level = DiskLevel.FULL
    with pytest.raises(NoSpaceError) as refused:
        send(engine, session, "t")
    assert str(refused.value) == plain


def test_message_nacked_after_its_transaction_was_counted_frees_nothing() -> None:
    engine = started(TransactionLimits())
    session = taking(engine, 2)
    send(engine, session, "t", b"b" * 1000)
    engine.commands.nack(session, Nack("0", 1, "t"))
    with pytest.raises(NoSpaceError):
        send(engine, session, "t")


def test_acknowledgements_and_sends_after_a_transaction_was_counted_count_as_well() -> None:
    engine = started(TransactionLimits())
    session = taking(engine, 1)
    send(engine, session, "t", b"b" * 1000)
    engine.state.commit_state.disk_level = DiskLevel.PLENTY
    send(engine, session, body=b"a" * 1000)
    for sequence in dispatched(engine):
        engine.commands.acknowledge(session, Ack("0", sequence, "t"))
    engine.state.commit_state.disk_level = DiskLevel.NONE
    send(engine, session, "t", b"b" * 1000)
    with pytest.raises(NoSpaceError):
        send(engine, session, "t")


def test_consumer_may_begin_without_room_and_a_mere_sender_may_not() -> None:
    engine = started(TransactionLimits())
    consumer, producer = connected(engine), engine.commands.connect("p")
    producer.is_truenext_client = consumer.is_truenext_client = True
    send(engine, consumer)
    send(engine, producer)
    engine.state.commit_state.disk_level = DiskLevel.NONE
    assert not engine.commands.sending.waits_while_disk_short(consumer, Begin("t"))
    with pytest.raises(NoSpaceError):
        engine.commands.sending.waits_while_disk_short(producer, Begin("t"))


# ---- Messages of many queues ----


def steps_to_requeue(action: str, *, queue_count: int = 10, cause: str = "") -> int:
    """Return the steps in which 100 messages, dispatched from queues in turns, leave their wildcard consumer."""
    engine = Engine(CommitState(EventLog()))
    engine.lifespan.start()
    session = engine.commands.connect("s")
    session.is_truenext_client = True
    for number in range(100):
        destination = parse_address(f"/queue/q.{number % queue_count}", "s")
        engine.commands.send(session, Send(destination, SentMessage(4, True, 0, b"", b"")))
    engine.commands.subscribe(session, Subscribe("0", parse_address("/queue/q.*", "s"), AckMode.CLIENT, 1000))
    commit(engine)
    while engine.has_work:
        engine.turn.run()
        commit(engine)
    held = list(session.consumers["0"].held.values())
    assert len(held) == 100
    assert queue_count == 1 or all(one.lane.queue is not next_one.lane.queue for one, next_one in pairwise(held))
    engine.commands.begin(session, Begin("t"))
    last = held[-1].sequence
    if action == "COMMIT":
        engine.commands.nack(session, Nack("0", last, "t", cause=cause))
    elif action == "ABORT":
        engine.commands.acknowledge(session, Ack("0", last, "t"))
    actions: dict[str, Callable[[], object]] = {
        "NACK": lambda: engine.commands.nack(session, Nack("0", last, cause=cause)),
        "COMMIT": lambda: engine.commands.commit(session, Commit("t")),
        "ABORT": lambda: engine.commands.abort(session, Abort("t")),
        "release": lambda: engine.commands.release(session, Release(["0"], [])),
        "UNSUBSCRIBE": lambda: engine.commands.unsubscribe(session, Unsubscribe("0")),
    }
    return steps_of(actions[action])


@pytest.mark.parametrize("action", ["NACK", "COMMIT", "ABORT", "release", "UNSUBSCRIBE"])
def test_messages_of_many_queues_are_requeued_in_hardly_more_steps_than_those_of_one(action: str) -> None:
    # In the order of dispatch, each message ended a block of the history.
    assert steps_to_requeue(action) < steps_to_requeue(action, queue_count=1) + 600


@pytest.mark.parametrize("action", ["NACK", "COMMIT"])
def test_messages_of_one_nack_share_their_cause(action: str) -> None:
    assert steps_to_requeue(action, cause="c") < steps_to_requeue(action) + 1300
