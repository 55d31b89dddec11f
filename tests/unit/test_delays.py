"""Tests of the delay before a failed message is retried, and of the messages that wait meanwhile."""

import pytest

from tests.contract import naive_history
from tests.property import targets
from tests.unit.inspection import run_stuck_audit
from truenext.engine.engine import Engine
from truenext.engine.lifecycle.redelivery import REJECTED, make_dead_letter, redirect, restore_original, retry_delay_ms
from truenext.engine.memory.horizon import remove_entries
from truenext.engine.memory.reading import PageReader
from truenext.engine.memory.timers import TimersResult
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.pages import PageMessage, PageResult, StoreRead
from truenext.engine.state.queue import Entry, Lane
from truenext.engine.stuck import STUCK_MS, StuckQueueDetector
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import EventLog, NoEventLog
from truenext.model.batch import DUE_NEVER, Batch, Causes, Mark
from truenext.model.commands import Ack, AckMode, Nack, Send, Subscribe
from truenext.model.destination import Destination, DestinationKind, parse_address
from truenext.model.header_lines import DEAD_LETTER_HEADERS, decode_header_lines
from truenext.model.limits import DELAY_MS_MAX
from truenext.model.message import SentMessage
from truenext.model.policy import Policies, Policy, WhileWaiting

WALL_MS = 1_800_000_000_000
LARGE = 1 << 30


@pytest.mark.parametrize(
    ("policy", "delays"),
    [
        (Policy(), [0, 1000, 1000, 1000, 1000, 1000]),
        (Policy(first_delay_ms=50, delay_ms=100, backoff=3.0, delay_max_ms=1000), [50, 100, 300, 900, 1000, 1000]),
        (Policy(delay_ms=10, backoff=1.5), [0, 10, 15, 22, 34, 51]),
        (Policy(first_delay_ms=5000, delay_max_ms=1000), [1000] * 6),
    ],
)
def test_retry_delay_follows_the_policy(policy: Policy, delays: list[int]) -> None:
    # C9.5
    assert [retry_delay_ms(policy, attempts, lambda: 0.5) for attempts in range(1, 7)] == delays


def test_a_message_that_has_failed_a_million_times_waits_for_the_longest_delay() -> None:
    assert retry_delay_ms(Policy(backoff=10.0, attempts_max=10**9), 10**6, lambda: 0.5) == 300_000


def test_jitter_makes_a_delay_longer_or_shorter_by_its_share() -> None:
    # C9.5
    policy = Policy(jitter=0.25, backoff=2.0, delay_max_ms=2000)
    assert [retry_delay_ms(policy, 2, lambda number=number: number) for number in (0.0, 0.5, 1.0)] == [750, 1000, 1250]  # type: ignore[misc]
    # Those at the limit are spread as well.
    assert [retry_delay_ms(policy, 9, lambda number=number: number) for number in (0.0, 1.0)] == [1500, 2500]  # type: ignore[misc]
    assert retry_delay_ms(policy, 1, lambda: 1.0) == 0


# ---- In the engine ----


class DelayDriver:
    """An engine with one queue, `a`, and one consumer."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        window: int = 1,
        in_store: dict[int, Mark] | None = None,
        event_log: EventLog | None = None,
        **policy: object,
    ) -> None:
        self.in_store = in_store or {}
        policies = Policies(Policy(page_size=page_size, **policy))  # type: ignore[arg-type]
        self.engine = Engine(
            CommitState(event_log or NoEventLog(), sequence_limit=1000), memory=MemoryBudget(LARGE), policies=policies
        )
        self.queue = self.engine.lifespan.restore_queue(1, "a")
        if self.in_store:
            self.engine.lifespan.restore_lane(self.queue, 5, len(self.in_store))
        self.steady_us = 5
        self.wall_ms = WALL_MS
        self.advance(0)
        self.engine.lifespan.start()
        self.commit()
        self.audit = StuckQueueDetector()
        self.session: ConnectionState = self.engine.commands.connect("s")
        self.engine.commands.subscribe(
            self.session, Subscribe("0", parse_address("/queue/a", "s"), AckMode.INDIVIDUAL, window)
        )

    def advance(self, milliseconds: int) -> None:
        self.steady_us += milliseconds * 1000
        self.wall_ms += milliseconds
        self.engine.state.commit_state.tick(self.wall_ms * 1000, self.steady_us)

    def commit(self) -> Batch:
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.store_results.on_committed(batch)
        return batch

    def send(self, *, persistent: bool = False, expires_ms: int = 0) -> None:
        message = SentMessage(4, persistent, expires_ms, b"content-length:0\n", b"")
        self.engine.commands.send(self.session, Send(parse_address("/queue/a", "s"), message))

    def turn(self) -> list[int]:
        """Run turns until nothing is dispatched or read any more; return the dispatched sequences."""
        order: list[int] = []
        while True:
            effects = self.engine.turn.run()
            self.engine.commands.on_all_sent(self.session)
            order += [entry.sequence for entries in effects.deliveries.values() for entry in entries]
            for timer_read in effects.timer_reads:
                self.engine.store_results.on_timers_read(timer_read, TimersResult([], 0, True))
            for read in effects.reads:
                self.engine.store_results.on_page_read(read, self.page(read))
            if not (effects.reads or effects.deliveries):
                return order

    def page(self, read: StoreRead) -> PageResult:
        after = [sequence for sequence in self.in_store if sequence > read.after_sequence]
        message = [SentMessage(4, True, 0, b"content-length:0\n", b"") for _ in after]
        found = [PageMessage(*pair, self.in_store[pair[0]]) for pair in zip(after, message, strict=True)][: read.limit]
        return PageResult(found, 0, len(found) == len(after))

    def nack(self, sequence: int, **options: int) -> None:
        self.engine.commands.nack(self.session, Nack("0", sequence, **options))  # type: ignore[arg-type]

    def acknowledge(self, sequence: int) -> None:
        self.engine.commands.acknowledge(self.session, Ack("0", sequence))

    def stuck_within(self, milliseconds: int) -> list[str]:
        """Return the queues that the stuck audit reports within this time, one step a second."""
        stuck = []
        for _ in range(milliseconds // 1000):
            self.advance(1000)
            self.turn()
            stuck += [queue.name for queue in run_stuck_audit(self.audit, self.engine)]
        return stuck


def test_the_next_due_time_is_that_of_the_clock_that_does_not_jump() -> None:
    # C9.7
    driver = DelayDriver(first_delay_ms=300)
    driver.send()
    (sequence,) = driver.turn()
    driver.nack(sequence)
    assert targets.next_retry_us(driver.engine) == driver.steady_us + 300_000
    driver.wall_ms -= 10**9
    driver.advance(299)
    assert driver.turn() == []
    driver.advance(1)
    assert driver.turn() == [sequence]
    assert targets.next_retry_us(driver.engine) is None


def test_due_time_is_stored_by_the_wall_clock_and_a_clean_stop_stores_the_remaining_delay() -> None:
    # C9.7
    driver = DelayDriver(first_delay_ms=300)
    driver.send(persistent=True)
    driver.commit()
    (sequence,) = driver.turn()
    driver.nack(sequence)
    assert [*driver.commit().marks.values()] == [Mark(1, 1, WALL_MS + 300)]
    driver.wall_ms += 5000
    driver.advance(100)
    driver.engine.commands.connecting.stop()
    (batch,) = driver.engine.lifespan.final_batches()
    assert [*batch.marks.values()] == [Mark(1, 1, WALL_MS + 5000 + 300)]


@pytest.mark.parametrize("while_waiting", WhileWaiting)
def test_no_message_waits_longer_than_the_longest_delay_if_the_wall_clock_was_set_back(
    while_waiting: WhileWaiting,
) -> None:
    # C9.7
    driver = DelayDriver(in_store={7: Mark(1, 1, WALL_MS + 1000 * DELAY_MS_MAX)}, while_waiting=while_waiting)
    assert driver.turn() == []
    driver.advance(DELAY_MS_MAX - 1)
    assert driver.turn() == []
    driver.advance(1)
    assert driver.turn() == [7]


def test_message_due_at_the_start_is_due_although_the_clock_is_set_back_before_it_is_read() -> None:
    driver = DelayDriver(in_store={7: Mark(1, 1, WALL_MS - 1000)})
    driver.wall_ms -= 3_600_000
    driver.advance(0)
    assert driver.turn() == [7]


def test_delay_from_before_the_start_is_not_prolonged_by_a_clock_set_back_before_it_is_read() -> None:
    driver = DelayDriver(in_store={7: Mark(1, 1, WALL_MS + 1000)})
    driver.wall_ms -= 3_600_000
    driver.advance(999)
    assert driver.turn() == []
    driver.advance(1)
    assert driver.turn() == [7]


def with_one_that_waits_behind_others() -> list[int]:
    """Memory is short while the fourth message of four that a page has brought waits for its next try."""
    in_store = {1: Mark(0, 0), 2: Mark(0, 0), 3: Mark(0, 0), 4: Mark(1, 1, WALL_MS + 50), 5: Mark(0, 0)}
    driver = DelayDriver(in_store=in_store, page_size=4)
    order = driver.turn()
    assert order == [1]
    driver.engine.state.memory.limit = 0
    driver.engine.evict()
    driver.engine.state.memory.limit = LARGE
    driver.advance(100)
    while driver.session.consumers["0"].held:
        driver.acknowledge(order[-1])
        del driver.in_store[order[-1]]
        driver.commit()
        order += driver.turn()
    assert driver.queue.waiting_count() == 0
    return order


def test_a_page_brings_no_message_again_that_waits_for_its_next_try() -> None:
    assert with_one_that_waits_behind_others() == [1, 2, 3, 4, 5]


def test_page_would_bring_a_delayed_message_again_if_the_horizon_went_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_aside = PageReader._delay_without_body

    def faulty(reading: PageReader, entry: Entry) -> None:
        set_aside(reading, entry)
        entry.lane.horizon_min = 0

    monkeypatch.setattr(PageReader, "_delay_without_body", faulty)
    with pytest.raises(Exception, match=r"."):
        assert with_one_that_waits_behind_others() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("while_waiting", WhileWaiting)
def test_history_tells_when_a_message_of_a_page_is_due_also_if_memory_was_short_meanwhile(
    while_waiting: WhileWaiting,
) -> None:
    log = EventLog(run=1, first_event=1)
    in_store = {7: Mark(1, 1, WALL_MS + 50), 8: Mark(0, 0)}
    driver = DelayDriver(in_store=in_store, event_log=log, while_waiting=while_waiting, window=2)
    driver.turn()
    driver.engine.state.memory.limit = 0
    driver.engine.evict()
    driver.engine.state.memory.limit = LARGE
    driver.advance(100)
    assert 7 in driver.turn()
    told = [
        (each["kind"], each.get("reason"))
        for each in naive_history.read(log.close_chunk())
        if each.get("sequence") == 7
    ]
    wait = {WhileWaiting.SKIP: "delayed", WhileWaiting.BLOCK: "blocking"}[while_waiting]
    assert told == [("returned", wait), ("returned", "due"), ("dispatched", None)]


@pytest.mark.parametrize("while_waiting", WhileWaiting)
def test_a_transient_that_was_stored_after_it_failed_is_given_up_with_a_mark_of_that(
    while_waiting: WhileWaiting,
) -> None:
    driver = DelayDriver(first_delay_ms=5000, while_waiting=while_waiting)
    driver.send()
    (sequence,) = driver.turn()
    driver.nack(sequence)
    driver.engine.state.memory.limit = 0
    driver.engine.evict()
    assert len(driver.commit().transient_puts) == 1
    driver.engine.evict()
    assert driver.engine.state.memory.message_bytes == 0
    driver.engine.commands.administering.change_policies(Policies(Policy(attempts_max=1)))
    assert [mark.attempts for mark in driver.commit().marks.values()] == [1]


def test_poison_that_had_to_be_read_is_moved_after_a_crash_too() -> None:
    driver = DelayDriver(in_store={7: Mark(1, 1, DUE_NEVER)})
    assert driver.turn() == []
    assert [*driver.commit().queues.values()] == ["DLQ.a"]


def test_delayed_message_counts_as_waiting_without_its_body_after_a_restart() -> None:
    driver = DelayDriver(in_store={7: Mark(1, 1, WALL_MS + 50)})
    driver.turn()
    assert (driver.queue.waiting_count(), driver.queue.resident_bytes) == (1, 0)


# ---- Stuck, or rightly waiting? ----


@pytest.mark.parametrize("while_waiting", WhileWaiting)
def test_a_queue_whose_messages_wait_for_their_next_try_is_not_stuck(while_waiting: WhileWaiting) -> None:
    driver = DelayDriver(first_delay_ms=10 * STUCK_MS, while_waiting=while_waiting)
    driver.send()
    (sequence,) = driver.turn()
    driver.nack(sequence)
    if while_waiting is WhileWaiting.BLOCK:
        driver.send()
    assert driver.stuck_within(5 * STUCK_MS) == []


@pytest.mark.parametrize("while_waiting", WhileWaiting)
def test_a_message_that_is_due_and_not_tried_is_found(
    while_waiting: WhileWaiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = DelayDriver(first_delay_ms=1000, while_waiting=while_waiting)
    driver.send()
    (sequence,) = driver.turn()
    driver.nack(sequence)
    monkeypatch.setattr("truenext.engine.memory.delays.DelayedEntries.pop_due", lambda delays: [])
    assert driver.stuck_within(3 * STUCK_MS) == ["a"]


# ---- Dead letters ----


@pytest.mark.parametrize(
    "header", [b"", b"truenext-original-destination:/temp-queue/a\n", b"truenext-original-destination:/queue/\n"]
)
def test_message_without_a_valid_original_destination_is_no_dead_letter(header: bytes) -> None:
    assert restore_original(SentMessage(4, True, 0, header + b"content-length:0\n", b""), WALL_MS) is None


@pytest.mark.parametrize("origin", ["a", "subscription,me,n,news,colour = 'red'"])
def test_dead_letter_has_exactly_the_reserved_headers_in_addition(origin: str) -> None:
    # C11.3, C11.4
    message = SentMessage(7, False, 0, b"destination:/topic/news\ncolour:red\ncontent-length:0\npriority:7\n", b"")
    letter = make_dead_letter(
        message, origin, Policy(), attempts=1, causes=Causes("a", "b"), reason=REJECTED, now_ms=WALL_MS
    ).message
    said = decode_header_lines(letter.header)
    added = DEAD_LETTER_HEADERS - {"truenext-failure"} | {"persistent"}
    assert said.keys() - decode_header_lines(message.header).keys() == added
    assert (said["truenext-original-destination"], letter.redrive_queue) == (
        ("/queue/a", "") if origin == "a" else ("/topic/news", origin)
    )
    _, there = redirect(letter, Destination(DestinationKind.QUEUE, "DLQ.other"))
    assert there.redrive_queue == letter.redrive_queue
    back = restore_original(there, WALL_MS)
    assert back is not None and back[0].name == origin
    assert decode_header_lines(back[1].header) == decode_header_lines(message.header) | {
        "persistent": "false",
        "destination": said["truenext-original-destination"],
    }
    assert back[1].redrive_queue == ""


def test_a_letter_of_a_subscription_from_before_still_finds_its_way_back() -> None:
    header = b"truenext-original-destination:/queue/subscription,me,n,news\ncontent-length:0\n"
    back = restore_original(SentMessage(4, True, 0, header, b""), WALL_MS)
    assert back is not None and back[0].name == "subscription,me,n,news"


@pytest.mark.parametrize("names", [{}, {"a.>": Policy(dead_letters="shared")}])
def test_dead_letter_queues_are_known_by_prefix_or_policy(names: dict[str, Policy]) -> None:
    policies = Policies(by_pattern=names)
    assert [policies.holds_dead_letters(name) for name in ("DLQ.x", "shared", "a.b")] == [True, bool(names), False]


def test_lane_remembers_removed_messages_until_no_page_can_show_them() -> None:
    driver = DelayDriver(in_store={1: Mark(0, 0), 2: Mark(0, 0), 3: Mark(0, 0)})
    lane: Lane = driver.queue.lane(5)
    targets.REQUEST_PAGE.of(driver.engine)(lane)
    entry = Entry(2, None, lane, 0, True, 0)
    remove_entries(lane, [entry], 5)
    lane.forget_durable_removals(5)
    assert lane.removed == {2: 5}, "a page is being read"
    assert driver.turn() == [1]
    lane.forget_durable_removals(4)
    assert lane.removed == {2: 5}, "its removal is not durable"
    lane.forget_durable_removals(5)
    assert lane.removed == {}
    driver.acknowledge(1)
    assert driver.turn() == [3]


@pytest.mark.parametrize("while_waiting", WhileWaiting)
def test_delayed_message_expires_in_time_and_blocks_no_message_afterwards(
    while_waiting: WhileWaiting,
) -> None:
    driver = DelayDriver(first_delay_ms=60_000, while_waiting=while_waiting)
    driver.send(expires_ms=WALL_MS + 5000)
    (first,) = driver.turn()
    driver.nack(first)
    if while_waiting is WhileWaiting.BLOCK:
        driver.send()
        assert driver.turn() == []
        driver.advance(4999)
        assert driver.turn() == []
        driver.advance(1)
        assert driver.turn() == [first + 1]
    else:
        driver.advance(5000)
        assert driver.turn() == []
        assert driver.queue.waiting_count() == 0
