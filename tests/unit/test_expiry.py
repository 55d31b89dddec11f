"""Tests of the expiry of messages: its timers and reads, and what happens to expired messages."""

from typing import Any

import pytest

from truenext.engine.background.expiry import EXPIRED_PER_STEP_MAX, ExpiryBlockRead
from truenext.engine.engine import Engine
from truenext.engine.memory.timers import TimersResult
from truenext.engine.state.pages import PageMessage, PageResult
from truenext.errors import NoSpaceError
from truenext.model.commands import AckMode, Begin, Commit, Send, Subscribe, Unsubscribe
from truenext.model.destination import parse_address
from truenext.model.header_lines import decode_header_lines
from truenext.model.limits import STORE_TRANSACTION_BYTES_MAX
from truenext.model.message import SentMessage
from truenext.model.policy import ExpiryAction, Policies, Policy
from truenext.model.record import BLOCK_BITS, split_timer

NOW_MS = 1_000_000


def started(**policy: Any) -> Engine:
    engine = Engine(policies=Policies(Policy(**policy)))
    engine.state.commit_state.now_ms = NOW_MS
    engine.lifespan.start()
    commit(engine)
    read = engine.turn.run().timer_reads[0]
    engine.store_results.on_timers_read(read, TimersResult([], 1, is_end=True))
    return engine


def commit(engine: Engine) -> None:
    batch = engine.take_batch()
    assert batch is not None
    engine.store_results.on_committed(batch)


def send(engine: Engine, count: int, expires_ms: int, address: str = "/queue/a", *, persistent: bool = False) -> None:
    session = engine.commands.connect("s")
    for _ in range(count):
        message = SentMessage(4, persistent, expires_ms, b"content-length:0\nexpires:%d\n" % expires_ms, b"")
        engine.commands.send(session, Send(parse_address(address, "s"), message))


def waiting(engine: Engine) -> dict[str, int]:
    return {queue.name: queue.waiting_count() for queue in engine.queues.by_name.values()}


def test_message_without_expiry_sets_no_timer() -> None:
    engine = started()
    send(engine, 10, 0, persistent=True)
    batch = engine.take_batch()
    assert batch is not None
    assert not batch.timers
    assert engine.tasks.next_due_ms is None


def test_messages_of_one_block_that_expire_in_one_second_share_a_timer() -> None:
    engine = started()
    for milliseconds in (1, 500, 1000):
        send(engine, 100, NOW_MS + milliseconds)
    batch = engine.take_batch()
    assert batch is not None
    assert [split_timer(one)[0] for one in batch.timers] == [NOW_MS + 1000]
    assert engine.tasks.next_due_ms == NOW_MS + 1000


def test_a_temporary_queue_sets_no_timer() -> None:
    # C15.5
    engine = started()
    send(engine, 1, NOW_MS + 1, "/temp-queue/a")
    assert engine.tasks.next_due_ms is None


def test_copies_of_a_send_have_the_same_expiry_time_in_their_headers() -> None:
    engine = started()
    session = engine.commands.connect("s")
    message = SentMessage(4, True, 0, b"content-length:0\n", b"")
    engine.commands.send(session, Send(parse_address("/queue/a,/queue/b", "s"), message, ttl_ms=500))
    entries = [entry for queue in engine.queues.by_name.values() for entry in queue.lane(5).arrived]
    assert [entry.lane.queue.name for entry in entries] == ["a", "b"]
    for entry in entries:
        assert entry.message is not None
        assert entry.message.expires_ms == NOW_MS + 500 == entry.message.arrived_ms + 500
        assert decode_header_lines(entry.message.header) == {"expires": str(NOW_MS + 500), "content-length": "0"}


def test_a_time_to_live_inside_a_transaction_begins_with_the_last_attempt_to_commit() -> None:
    engine = started()
    session = engine.commands.connect("s")
    engine.commands.begin(session, Begin("t"))
    for ttl_ms in (500, 0):
        message = SentMessage(4, True, 0, b"content-length:0\n", b"")
        engine.commands.send(session, Send(parse_address("/queue/a", "s"), message, "t", ttl_ms=ttl_ms))
    engine.state.commit_state.now_ms = NOW_MS + 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "truenext.engine.queues.queues.Queues.queues_for", lambda *_: (_ for _ in ()).throw(NoSpaceError(""))
        )
        with pytest.raises(NoSpaceError):
            engine.commands.commit(session, Commit("t"))
    engine.state.commit_state.now_ms = NOW_MS + 1000
    engine.commands.commit(session, Commit("t"))
    (queue,) = engine.queues.by_name.values()
    messages = [entry.message for entry in queue.lane(5).arrived if entry.message is not None]
    assert [message.expires_ms for message in messages] == [NOW_MS + 1500, 0]
    assert messages[0].header == b"expires:%d\ncontent-length:0\n" % (NOW_MS + 1500)


@pytest.mark.parametrize("persistent", [False, True])
def test_message_is_dropped_when_its_time_to_live_is_over(persistent: bool) -> None:
    engine = started()
    session = engine.commands.connect("s")
    message = SentMessage(4, persistent, 0, b"content-length:0\n", b"")
    engine.commands.send(session, Send(parse_address("/queue/a", "s"), message, ttl_ms=500))
    engine.turn.run()
    commit(engine)
    assert waiting(engine) == {"a": 1}
    engine.state.commit_state.now_ms = NOW_MS + 1000
    engine.turn.run()
    assert waiting(engine) == {"a": 0}


@pytest.mark.parametrize("persistent", [False, True])
def test_expired_message_is_dropped_with_its_timer(persistent: bool) -> None:
    engine = started()
    send(engine, 10, NOW_MS + 1000, persistent=persistent)
    commit(engine)
    engine.state.commit_state.now_ms += 999
    engine.turn.run()
    assert waiting(engine) == {"a": 10}
    engine.state.commit_state.now_ms += 1
    engine.turn.run()
    assert waiting(engine) == {"a": 0}
    batch = engine.take_batch()
    assert batch is not None
    assert len(batch.removes) == (10 if persistent else 0)
    assert len(batch.cleared_timers) == 1
    assert engine.state.memory.message_bytes == 0


def test_expired_message_moves_to_the_dead_letter_queue_by_policy_and_says_why() -> None:
    # C15.1
    engine = started(expired=ExpiryAction.DEAD_LETTER)
    send(engine, 2, NOW_MS + 1000)
    engine.state.commit_state.now_ms += 1000
    engine.turn.run()
    commit(engine)
    assert waiting(engine) == {"a": 0, "DLQ.a": 2}
    letter = next(iter(next(queue for queue in engine.queues.by_name.values() if queue.name == "DLQ.a").lane(5)))
    assert letter.message is not None
    assert (letter.message.expires_ms, letter.message.persistent) == (0, True)
    headers = decode_header_lines(letter.message.header)
    assert headers["truenext-dead-letter-cause"] == "expired"
    assert headers["truenext-original-expires"] == str(NOW_MS + 1000)


def test_message_that_expires_in_a_dead_letter_queue_is_dropped_whatever_the_policy() -> None:
    # C15.1
    engine = started(expired=ExpiryAction.DEAD_LETTER)
    send(engine, 1, NOW_MS + 1000, "/queue/DLQ.a")
    engine.state.commit_state.now_ms += 1000
    engine.turn.run()
    assert waiting(engine) == {"DLQ.a": 0}


def test_much_that_expires_at_once_goes_in_several_turns() -> None:
    engine = started()
    count = 10 * EXPIRED_PER_STEP_MAX
    send(engine, count, NOW_MS + 1000)
    engine.state.commit_state.now_ms += 1000
    turns = 0
    while engine.has_work:
        before = sum(waiting(engine).values())
        engine.turn.run()
        assert before - sum(waiting(engine).values()) <= EXPIRED_PER_STEP_MAX + (1 << BLOCK_BITS)
        turns += 1
    assert waiting(engine) == {"a": 0}
    assert turns >= 5


def test_messages_do_not_expire_while_the_last_batches_are_written() -> None:
    """Writing the last batches iterates over the waiting messages, which must not change meanwhile."""
    engine = started()
    session = engine.commands.connect("s")
    for _ in range(12):
        message = SentMessage(4, False, NOW_MS + 1000, b"content-length:0\n", bytes(STORE_TRANSACTION_BYTES_MAX // 4))
        engine.commands.send(session, Send(parse_address("/queue/a", "s"), message))
    engine.commands.connecting.stop()
    commit(engine)
    stored = 0
    for batch in engine.lifespan.final_batches():
        stored += len(batch.transient_puts)
        engine.store_results.on_committed(batch)
        engine.state.commit_state.now_ms += 1000
        engine.turn.run()
    assert stored == 12


def test_largest_expiry_time_is_accepted() -> None:
    engine = started()
    send(engine, 1, 2**64 - 1, persistent=True)
    commit(engine)
    assert waiting(engine) == {"a": 1}


# ---- Looks ----


def side_read(engine: Engine) -> ExpiryBlockRead:
    """The page of a block that the next turn wants."""
    (read,) = (read for read in engine.turn.run().reads if isinstance(read, ExpiryBlockRead))
    return read


def show(engine: Engine, read: ExpiryBlockRead, *sequences: int) -> None:
    """Give the engine this page, as of the last durable batch."""
    engine.store_results.on_page_read(read, page(*sequences, as_of=engine.state.commit_state.last_committed))


def page(*sequences: int, as_of: int) -> PageResult:
    found = [PageMessage(each, SentMessage(4, True, NOW_MS + 1000, b"content-length:0\n", b"")) for each in sequences]
    return PageResult(found, as_of, is_end=True)


def evict(engine: Engine) -> None:
    engine.state.memory.limit = 0
    engine.evict()
    engine.state.memory.limit = 1 << 30


def test_expired_message_requeued_behind_a_side_read_is_found_by_the_next() -> None:
    engine = started()
    send(engine, 2, NOW_MS + 1000, persistent=True)
    commit(engine)
    reader = engine.commands.connect("reader")
    engine.commands.subscribe(reader, Subscribe("0", parse_address("/queue/a", "reader"), AckMode.INDIVIDUAL, 1))
    engine.turn.run()
    evict(engine)
    engine.state.commit_state.now_ms += 1000
    first = side_read(engine)
    assert first.after_sequence == 1
    engine.commands.unsubscribe(reader, Unsubscribe("0"))
    show(engine, first, 2)
    assert waiting(engine) == {"a": 1}
    commit(engine)
    engine.state.commit_state.now_ms += 60_000
    show(engine, side_read(engine), 1)
    assert waiting(engine) == {"a": 0}


def test_expired_message_committed_and_evicted_behind_a_side_read_is_found_by_the_next() -> None:
    engine = started()
    send(engine, 1, NOW_MS + 1000, persistent=True)
    commit(engine)
    evict(engine)
    send(engine, 1, NOW_MS + 1000, persistent=True)
    engine.state.commit_state.now_ms += 1000
    first = side_read(engine)
    early = page(1, as_of=engine.state.commit_state.last_committed)
    commit(engine)
    assert engine.state.memory.message_bytes == 0
    engine.store_results.on_page_read(first, early)
    assert waiting(engine) == {"a": 1}
    show(engine, side_read(engine), 2)
    assert waiting(engine) == {"a": 0}
