"""Tests of scheduled sends: due times, repetitions, and the sends that wait. More are in tests/property."""

import random
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec
import pytest
from cronsim import CronSim, CronSimError
from msgspec.structs import replace

from tests.property.disk import found_of
from truenext.broker.pager import read_page
from truenext.engine.background.bulk import (
    ListScheduled,
    ScheduledRequest,
    ScheduledResult,
    Unschedule,
    parse_request,
)
from truenext.engine.engine import Engine
from truenext.engine.memory.timers import TimersResult
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.pages import PageResult
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import NoEventLog
from truenext.errors import Code, RemoteProtocolError
from truenext.model.batch import Batch
from truenext.model.commands import Abort, Begin, Commit, Send
from truenext.model.control_answers import ScheduledSendInfo
from truenext.model.destination import parse_address
from truenext.model.disk_level import DiskLevel
from truenext.model.header_lines import decode_header_lines
from truenext.model.limits import DUE_COPIES_PER_STEP, SCHEDULE_TIME_MAX, TRANSACTION_CRON_SENDS_MAX
from truenext.model.message import SentMessage
from truenext.model.record import split_lane_key
from truenext.model.schedule import FOR_EVER, Schedule, check_schedule, fire_schedule, start_schedule
from truenext.store.memory import MemoryStore

NOON_MS = int(datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp() * 1000)
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS


class Run:
    """An engine and its store, where everything is done at once."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.start_engine()

    def start_engine(self) -> None:
        recovered = self.store.recover()
        self.engine = Engine(CommitState(NoEventLog(), sequence_limit=recovered.sequence_limit))
        self.now_ms = getattr(self, "now_ms", NOON_MS)
        self.engine.state.commit_state.tick(self.now_ms * 1000, 0)
        queues = {number: self.engine.lifespan.restore_queue(number, name) for number, name in recovered.queues.items()}
        for lane, count in recovered.counts.items():
            number, rank = split_lane_key(lane)
            self.engine.lifespan.restore_lane(queues[number], rank, count)
        self.engine.lifespan.start()
        self.session: ConnectionState = self.engine.commands.connect("s")
        self.settle()

    def at(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.engine.state.commit_state.tick(now_ms * 1000, 0)
        self.settle()

    def settle(self) -> None:
        engine = self.engine
        while True:
            effects = engine.turn.run()
            for read in effects.reads:
                page = read_page(self.store, read)
                found = [found_of(one) for one in page.messages]
                engine.store_results.on_page_read(read, PageResult(found, page.as_of, page.is_end))
            for timer_read in effects.timer_reads:
                timers = self.store.read_timers(timer_read.after, timer_read.limit)
                engine.store_results.on_timers_read(
                    timer_read, TimersResult(timers.timers, timers.as_of, timers.is_end)
                )
            batch = engine.take_batch()
            if batch is not None:
                self.apply(batch)
            elif not (effects.reads or effects.timer_reads or engine.has_work):
                return

    def apply(self, batch: Batch) -> None:
        if not batch.is_empty():
            self.store.apply(batch)
        self.engine.store_results.on_committed(batch)

    def send(self, body: str, schedule: Schedule | None, *, queue: str = "q", transaction: str | None = None) -> None:
        sent = body.encode()
        message = SentMessage(4, True, 0, b"content-length:%d\n" % len(sent), sent)
        self.engine.commands.send(
            self.session, Send(parse_address(f"/queue/{queue}", "s"), message, transaction, schedule=schedule)
        )

    def request(
        self, command: ScheduledRequest, while_it_is_read: Callable[[], object] | None = None
    ) -> ScheduledResult:
        """Run all pieces of the request; return one result."""
        self.engine.tasks.bulk_pieces.check_request(command)
        whole = ScheduledResult(0, {}, 0, None, 0)
        after: tuple[int, int] | None = (0, 0)
        while after is not None:
            piece = replace(command, after=after, until=whole.until or None)
            if not self.engine.tasks.bulk_pieces.freeze_scheduled():
                self.settle()
            assert self.engine.tasks.bulk_pieces.can_execute and self.engine.tasks.bulk_pieces.freeze_scheduled()
            read = self.engine.tasks.bulk_pieces.next_read(piece)
            if read is None:
                break
            page = read_page(self.store, read)
            if while_it_is_read is not None:
                while_it_is_read()
            found = [found_of(one) for one in page.messages]
            answer = self.engine.tasks.bulk_pieces.execute(piece, read, PageResult(found, page.as_of, page.is_end))
            assert isinstance(answer, ScheduledResult)
            whole.count, whole.until = whole.count + answer.count, answer.until
            whole.sends += answer.sends
            whole.sequences += answer.sequences
            after = None if whole.count == command.limit else answer.next
            self.settle()
        return whole

    def shown(self, queue: str = "q") -> list[ScheduledSendInfo]:
        return self.request(ListScheduled(queue)).sends

    def waiting(self) -> dict[str, tuple[int, int]]:
        """Messages, and those that are still to be."""
        return {
            each.name: (each.waiting_count(), self.engine.queues.scheduled_count(each.name))
            for each in self.engine.queues.by_name.values()
        }

    def bodies(self) -> list[str]:
        (queue,) = (each for each in self.engine.queues.by_name.values() if each.name == "q")
        entries = sorted(queue.lane(5).arrived, key=lambda entry: entry.sequence)
        return [entry.message.body.decode() for entry in entries if entry.message is not None]


def test_scheduled_send_is_counted_and_becomes_a_message_when_it_is_due() -> None:
    run = Run()
    run.send("later", Schedule(delay_ms=1000))
    run.at(NOON_MS + 999)
    assert run.waiting() == {"q": (0, 1)}
    assert run.engine.tasks.next_due_ms == NOON_MS + 1000
    run.at(NOON_MS + 1000)
    assert run.waiting() == {"q": (1, 0)}
    assert run.engine.tasks.next_due_ms is None


def test_scheduled_sends_come_in_the_order_of_due_time_and_arrival() -> None:
    # C14.4
    run = Run()
    for number, delay_ms in enumerate([30, 10, 20, 10, 30, 10]):
        run.send(str(number), Schedule(delay_ms=delay_ms))
        run.send("other", Schedule(delay_ms=delay_ms), queue="other")
    run.at(NOON_MS + 100)
    assert run.bodies() == ["1", "3", "5", "2", "0", "4"]


def test_earliest_due_send_comes_first_although_it_is_beyond_what_one_read_holds() -> None:
    """One read holds three of the eight messages, in the order of their acceptance."""
    run = Run()
    for number in range(8):
        run.send(str(number) * 300_000, Schedule(delay_ms=100 - number))
        run.send("other" * 60_000, Schedule(delay_ms=50), queue="other")
    run.at(NOON_MS + 200)
    assert [body[0] for body in run.bodies()] == ["7", "6", "5", "4", "3", "2", "1", "0"]
    assert run.waiting() == {"q": (8, 0), "other": (8, 0)}


def test_a_thousand_come_due_in_order_though_only_some_are_read_together() -> None:
    run = Run()
    for number in range(1000):
        run.send(str(number), Schedule(delay_ms=1 + number % 7))
    run.settle()
    run.at(NOON_MS + 100)
    assert run.bodies() == [str(number) for rest in range(7) for number in range(rest, 1000, 7)]


def test_scheduled_send_is_not_sent_twice_when_the_clock_is_set_back_and_forward() -> None:
    # C14.2
    run = Run()
    run.send("soon", Schedule(delay_ms=10))
    run.send("later", Schedule(delay_ms=HOUR_MS))
    run.at(NOON_MS + 20)
    run.at(NOON_MS - HOUR_MS)
    run.at(NOON_MS + 20)
    assert run.bodies() == ["soon"]
    run.at(NOON_MS + 2 * HOUR_MS)
    assert run.bodies() == ["soon", "later"]


def test_a_repetition_keeps_its_beat_and_makes_up_for_nothing() -> None:
    # C14.1, C14.5
    run = Run()
    run.send("tick", Schedule(delay_ms=5, period_ms=10, repeat=3))
    for at, count in ((4, 0), (5, 1), (15, 2), (48, 3), (54, 3), (55, 4), (1000, 4)):
        run.at(NOON_MS + at)
        assert len(run.bodies()) == count, at
    assert run.waiting() == {"q": (4, 0)}


def test_each_occurrence_says_when_it_was_due_and_a_late_one_says_the_first_time() -> None:
    # C14.12, C14.5
    run = Run()
    run.send("tick", Schedule(delay_ms=5, period_ms=10, repeat=FOR_EVER))
    for at in (5, 17, 48):
        run.at(NOON_MS + at)
    (queue,) = (each for each in run.engine.queues.by_name.values() if each.name == "q")
    headers = [decode_header_lines(entry.message.header) for entry in queue.lane(5).arrived if entry.message]
    assert [int(each["truenext-due"]) - NOON_MS for each in headers] == [5, 15, 25]


def test_delay_of_a_cron_hit_is_part_of_the_due_time() -> None:
    # C14.12
    run = Run()
    run.send("hourly", Schedule(delay_ms=1000, period_ms=1000, repeat=1, cron="0 * * * *"))
    for seconds in (0, 1, 2):
        run.at(NOON_MS + HOUR_MS + seconds * 1000)
    (queue,) = (each for each in run.engine.queues.by_name.values() if each.name == "q")
    headers = [decode_header_lines(entry.message.header) for entry in queue.lane(5).arrived if entry.message]
    assert [int(each["truenext-due"]) - NOON_MS - HOUR_MS for each in headers] == [1000, 2000]


def test_endless_repetition_continues_after_a_restart() -> None:
    run = Run()
    run.send("tick", Schedule(period_ms=10, repeat=FOR_EVER))
    run.at(NOON_MS + 20)
    before = run.waiting()["q"][0]
    run.start_engine()
    run.at(NOON_MS + 30)
    assert run.waiting() == {"q": (before + 1, 1)}


def test_repetitions_have_their_own_time_to_live_also_after_a_restart() -> None:
    run = Run()
    run.send("tick", Schedule(delay_ms=5, period_ms=10, repeat=2, ttl_ms=7000))
    run.settle()
    run.start_engine()
    for at in (5, 16, 30):
        run.at(NOON_MS + at)
    (queue,) = (each for each in run.engine.queues.by_name.values() if each.name == "q")
    messages = [entry.message for entry in queue.lane(5).arrived if entry.message is not None]
    expires = [NOON_MS + at + 7000 for at in (5, 16, 30)]
    assert [message.expires_ms for message in messages] == expires
    dues = [NOON_MS + at for at in (5, 15, 25)]
    assert [message.header for message in messages] == [
        b"expires:%d\ntruenext-due:%d\ncontent-length:4\n" % each for each in zip(expires, dues, strict=True)
    ]


def test_scheduled_send_that_is_due_after_its_expiry_time_expires_at_once() -> None:
    # C14.9
    run = Run()
    for body, expires_ms in ((b"late", NOON_MS + 5), (b"in time", NOON_MS + HOUR_MS)):
        message = SentMessage(4, True, expires_ms, b"", body)
        run.engine.commands.send(
            run.session, Send(parse_address("/queue/q", "s"), message, schedule=Schedule(delay_ms=10))
        )
    run.at(NOON_MS + 9)
    assert run.waiting() == {"q": (0, 2)}
    run.at(NOON_MS + 10)
    run.at(NOON_MS + 1000)
    assert run.waiting() == {"q": (1, 0)}
    assert run.bodies() == ["in time"]


def test_cron_hits_have_their_own_time_to_live_before_and_after_their_delay() -> None:
    schedule = start_schedule(Schedule(delay_ms=1000, period_ms=1000, repeat=1, cron="0 * * * *", ttl_ms=7), NOON_MS)
    assert schedule is not None
    is_sent, (own, hit) = fire_schedule(schedule, NOON_MS + HOUR_MS)
    assert (is_sent, own.ttl_ms, hit.ttl_ms) == (False, 7, 7)
    is_sent, (again,) = fire_schedule(own, own.due_ms)
    assert (is_sent, again) == (True, Schedule(period_ms=1000, ttl_ms=7, due_ms=own.due_ms + 1000))


def test_a_schedule_that_was_stored_before_there_were_times_to_live_has_none() -> None:
    written = b'{"delay_ms":5,"period_ms":10,"repeat":2,"due_ms":100}'
    schedule = msgspec.json.decode(written, type=Schedule)
    assert schedule == Schedule(delay_ms=5, period_ms=10, repeat=2, due_ms=100)
    assert schedule.ttl_ms == 0
    # Nor does one without say so.
    assert msgspec.json.encode(schedule) == written


def test_cron_hits_start_their_delay_and_their_repetitions() -> None:
    # C14.1
    run = Run()
    run.send("hourly", Schedule(delay_ms=1000, period_ms=1000, repeat=1, cron="0 * * * *"))
    for hour in (1, 2):
        for seconds, count in ((0, 0), (1, 1), (2, 2), (3, 2)):
            run.at(NOON_MS + hour * HOUR_MS + seconds * 1000)
            assert len(run.bodies()) == 2 * (hour - 1) + count
    assert run.waiting() == {"q": (4, 1)}


def test_a_send_with_a_time_is_due_at_that_time_and_then_after_each_period() -> None:
    # C14.1
    run = Run()
    run.send("later", Schedule(due_ms=NOON_MS + 1000, period_ms=100, repeat=1))
    run.send("past", Schedule(due_ms=NOON_MS - HOUR_MS, period_ms=HOUR_MS, repeat=1))
    run.send("latest", Schedule(due_ms=SCHEDULE_TIME_MAX))
    run.settle()
    assert run.bodies() == ["past"]
    for milliseconds, count in ((999, 1), (1000, 2), (1099, 2), (1100, 3), (1200, 3), (HOUR_MS, 4)):
        run.at(NOON_MS + milliseconds)
        assert len(run.bodies()) == count
    assert run.bodies() == ["past", "later", "later", "past"]


def test_send_scheduled_for_a_past_time_comes_after_sends_due_before_it() -> None:
    run = Run()
    for name, schedule in (("first", Schedule(delay_ms=0)), ("second", Schedule(due_ms=1)), ("third", Schedule())):
        run.send(name, schedule)
    run.settle()
    assert run.bodies() == ["first", "second", "third"]


def test_send_scheduled_in_a_transaction_comes_after_its_immediate_sends() -> None:
    # C14.1
    run = Run()
    run.engine.commands.begin(run.session, Begin("t"))
    run.send("first", None, transaction="t")
    run.send("later", Schedule(delay_ms=0), transaction="t")
    run.send("second", None, transaction="t")
    run.settle()
    assert run.waiting() == {}
    run.engine.commands.commit(run.session, Commit("t"))
    run.settle()
    assert run.bodies() == ["first", "second", "later"]


def test_scheduled_send_waits_while_the_disk_is_full() -> None:
    # C14.10
    run = Run()
    run.send("later", Schedule(delay_ms=10))
    run.settle()
    run.engine.state.commit_state.disk_level = DiskLevel.NONE
    run.at(NOON_MS + 20)
    assert run.waiting() == {"q": (0, 1)}
    run.engine.state.commit_state.disk_level = DiskLevel.PLENTY
    run.settle()
    assert run.waiting() == {"q": (1, 0)}


def test_hidden_queue_of_scheduled_sends_cannot_be_sent_to() -> None:
    run = Run()
    run.send("later", Schedule(delay_ms=10))
    hidden = parse_address("/remote-temp-queue/scheduled/q", "s")
    assert hidden.name == "/scheduled/q"
    run.engine.commands.send(run.session, Send(hidden, SentMessage(4, False, 0, b"", b"")))
    run.settle()
    assert run.waiting() == {"q": (0, 1)}


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (Schedule(delay_ms=10**15), "100 years"),
        (Schedule(repeat=1), "needs AMQ_SCHEDULED_PERIOD"),
        (Schedule(period_ms=1, repeat=FOR_EVER, cron="* * * * *"), "REPEAT:-1"),
        (Schedule(cron="* * * *"), "five fields"),
        (Schedule(cron="* * * * * *"), "five fields"),
        (Schedule(cron="@daily"), "'@daily' is not five fields .*, such as 0 8"),
        (Schedule(cron="0 0 30 2 *"), "'0 0 30 2 \\*' has no next time: .*; change its day of the month"),
        (Schedule(cron="0 0 31 2,4,6,9,11 *"), "has no next time"),
        (Schedule(cron="*" * 101), "five fields"),
        (Schedule(due_ms=1, delay_ms=1), "AMQ_SCHEDULED_TIME and AMQ_SCHEDULED_DELAY both"),
        (Schedule(due_ms=1, cron="* * * * *"), "AMQ_SCHEDULED_TIME and AMQ_SCHEDULED_CRON both"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(schedule: Schedule, why: str) -> None:
    # C14.1
    with pytest.raises(RemoteProtocolError, match=why):
        check_schedule(schedule)


def test_cron_expression_counts_in_utc_and_skips_missed_hits() -> None:
    # C14.1, C14.5
    schedule = Schedule(cron="30 12 * * *")
    first = start_schedule(schedule, NOON_MS)
    assert first is not None
    assert first.due_ms == NOON_MS + 30 * MINUTE_MS
    is_sent, rest = fire_schedule(first, first.due_ms + 50 * HOUR_MS)
    assert is_sent
    assert [each.due_ms for each in rest] == [first.due_ms + 72 * HOUR_MS]


# ---- What waits is shown and cancelled ----


@pytest.mark.parametrize("is_restarted", [False, True])
def test_scheduled_send_is_listed_with_its_whole_schedule(is_restarted: bool) -> None:
    run = Run()
    run.send("once", Schedule(delay_ms=MINUTE_MS))
    run.send("thrice", Schedule(delay_ms=5, period_ms=7, repeat=2))
    run.send("nightly", Schedule(cron="0 3 * * *", delay_ms=9))
    run.settle()
    if is_restarted:
        run.start_engine()
    once, thrice, nightly = run.shown()
    assert (once.body, once.due_ms, once.repeat, once.cron) == ("once", NOON_MS + MINUTE_MS, 0, "")
    assert (thrice.body, thrice.due_ms, thrice.period_ms, thrice.repeat) == ("thrice", NOON_MS + 5, 7, 2)
    assert (nightly.due_ms, nightly.cron, nightly.delay_ms) == (NOON_MS + 15 * HOUR_MS, "0 3 * * *", 9)
    assert (once.priority, once.persistent, once.size, once.headers) == (4, True, 4, {"content-length": "4"})
    assert once.number < thrice.number < nightly.number
    assert run.waiting() == {"q": (0, 3)}


def test_scheduled_send_is_listed_once_it_is_durable() -> None:
    run = Run()
    run.send("later", Schedule(delay_ms=MINUTE_MS))
    assert not run.engine.tasks.bulk_pieces.freeze_scheduled()
    run.settle()
    assert run.engine.tasks.bulk_pieces.freeze_scheduled()
    assert [each.body for each in run.shown()] == ["later"]


def test_cancelled_send_never_becomes_a_message_and_leaves_nothing_behind() -> None:
    # C14.7
    run = Run()
    for number in range(3):
        run.send(str(number), Schedule(delay_ms=MINUTE_MS, period_ms=5, repeat=FOR_EVER))
    assert run.request(Unschedule("q", dry_run=True)).count == 3
    assert run.waiting() == {"q": (0, 3)}
    assert run.request(Unschedule("q")).count == 3
    assert run.waiting() == {"q": (0, 0)}
    assert run.store.read_timers(b"", 10).timers == []
    run.at(NOON_MS + HOUR_MS)
    run.start_engine()
    run.at(NOON_MS + 2 * HOUR_MS)
    assert run.waiting() == {}


def test_scheduled_sends_are_cancelled_by_numbers_selector_and_limit() -> None:
    run = Run()
    for number in range(5):
        run.send(str(number), Schedule(delay_ms=MINUTE_MS))
    first, second, *_ = run.shown()
    answer = run.request(Unschedule("q", sequences=(first.number, second.number, 10**6)))
    assert answer.sequences == [first.number, second.number]
    assert run.request(Unschedule("q", selector="JMSPriority > 4")).count == 0
    assert run.request(Unschedule("q", limit=1)).count == 1
    assert [each.body for each in run.shown()] == ["3", "4"]


def test_scheduled_sends_to_topics_or_several_destinations_are_distinguished_by_address() -> None:
    run = Run()
    for address in ("/topic/a", "/queue/q,/topic/a"):
        send = Send(
            parse_address(address, "s"), SentMessage(4, True, 0, b"", b""), schedule=Schedule(delay_ms=MINUTE_MS)
        )
        run.engine.commands.send(run.session, send)
    assert [each.to for each in run.shown("")] == ["/topic/a", "/queue/q,/topic/a"]
    assert run.request(Unschedule("", to="/topic/a")).count == 1
    assert [each.to for each in run.shown("")] == ["/queue/q,/topic/a"]


def test_listing_the_scheduled_sends_of_a_missing_queue_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="there is no queue 'q'"):
        Run().engine.tasks.bulk_pieces.check_request(ListScheduled("q"))
    assert Run().shown("") == []


def test_repeated_send_keeps_its_number() -> None:
    # C14.7
    run = Run()
    run.send("tick", Schedule(delay_ms=MINUTE_MS, period_ms=MINUTE_MS, repeat=FOR_EVER))
    (before,) = run.shown()
    for minutes in (1, 2):
        run.at(NOON_MS + minutes * MINUTE_MS)
        (after,) = run.shown()
        assert after.number == before.number
        assert after.due_ms == before.due_ms + minutes * MINUTE_MS
    assert run.request(Unschedule("q", sequences=(before.number,))).sequences == [before.number]
    run.at(NOON_MS + HOUR_MS)
    assert run.waiting() == {"q": (2, 0)}


@pytest.mark.parametrize("others", [0, 300])
def test_cancelling_covers_all_sends_although_some_repeat_meanwhile(others: int) -> None:
    run = Run()
    for tick in ("tick", "tock"):
        run.send(tick, Schedule(delay_ms=1, period_ms=1, repeat=FOR_EVER))
        for number in range(others):
            run.send(str(number), Schedule(delay_ms=HOUR_MS))
    run.settle()
    run.request(Unschedule("q"), while_it_is_read=lambda: run.at(run.now_ms + 1))
    assert run.waiting()["q"][1] == 0


def test_scheduled_send_becomes_due_only_after_the_listing_has_ended() -> None:
    # C14.7
    run = Run()
    run.send("soon", Schedule(delay_ms=MINUTE_MS))
    shown = run.request(ListScheduled("q"), while_it_is_read=lambda: run.at(NOON_MS + MINUTE_MS))
    assert [each.body for each in shown.sends] == ["soon"]
    assert run.waiting() == {"q": (1, 0)}


def test_a_selector_sees_when_a_scheduled_send_was_accepted() -> None:
    run = Run()
    run.send("now", Schedule(delay_ms=MINUTE_MS))
    assert run.request(Unschedule("q", selector=f"JMSTimestamp < {NOON_MS}", dry_run=True)).count == 0
    assert run.request(ListScheduled("q", selector=f"JMSTimestamp = {NOON_MS}")).count == 1


def test_a_body_that_is_text_is_shown_without_half_a_character() -> None:
    run = Run()
    for body in ("a" * 999 + "\u00e9", "b" * 998 + "\u00e9", "\u00e9"):
        run.send(body, Schedule(delay_ms=MINUTE_MS))
    assert [each.body for each in run.shown()] == ["a" * 999, "b" * 998 + "\u00e9", "\u00e9"]


@pytest.mark.parametrize("verb", ["scheduled", "unschedule", "purge"])
@pytest.mark.parametrize(
    "arguments",
    [
        b'"after":[0,18446744073709551615]',
        b'"after":[0,-1]',
        b'"after":[10,0]',
        b'"sequences":[9223372036854775808]',
        b'"sequences":[-1]',
        b'"sequences":[' + b"1," * 1000 + b"1]",
        b'"until":-1',
        b'"limit":0',
        b'"selector":"' + b" " * 65536 + b'"',
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(verb: str, arguments: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_request(verb, b'{"queue":"q",' + arguments + b"}")


@pytest.mark.parametrize(
    ("cron", "field"),
    [
        ("61 * * * *", "minute is '61'; use * or 0 to 59"),
        ("*/0 * * * *", "minute is '*/0'"),
        ("0 24 * * *", "hour is '24'; use * or 0 to 23"),
        ("0 0 0 * *", "day of the month is '0'; use * or 1 to 31"),
        ("0 0 * jam *", "month is 'jam'; use * or 1 to 12"),
        ("0 0 30 2 8", "day of the week is '8'; use * or 0 to 7"),
        ("0 5-3 * 13 *", "hour is '5-3'"),
    ],
)
def test_invalid_cron_expression_is_refused_with_its_field(cron: str, field: str) -> None:
    # C14.1
    with pytest.raises(RemoteProtocolError) as raised:
        check_schedule(Schedule(cron=cron))
    assert f"{cron!r} is not a cron expression: its {field}" in str(raised.value)
    assert "next time" not in str(raised.value)


@pytest.mark.parametrize("cron", ["0 0 31 4 MON", "0 0 29 2 *", "0 0 * 2 MON#5", "0 0 L * *", "0 0 * jan SUN"])
def test_rare_cron_expression_is_accepted(cron: str) -> None:
    # C14.1
    assert check_schedule(Schedule(cron=cron)).cron == cron


# ---- The cost of cron expressions ----


def test_transaction_with_too_many_cron_sends_is_refused_at_the_send() -> None:
    run = Run()
    for _ in range(2):
        run.engine.commands.begin(run.session, Begin("t"))
        for _ in range(TRANSACTION_CRON_SENDS_MAX):
            run.send("x", Schedule(cron="* * * * *"), transaction="t")
        with pytest.raises(
            RemoteProtocolError, match=f"more than {TRANSACTION_CRON_SENDS_MAX} sends with AMQ_SCHEDULED_CRON in one"
        ) as refused:
            run.send("x", Schedule(cron="* * * * *"), transaction="t")
        assert refused.value.code is Code.LIMIT
        run.send("x", Schedule(delay_ms=1), transaction="t")
        run.engine.commands.abort(run.session, Abort("t"))


def test_cron_sends_that_are_due_at_once_are_sent_over_several_turns() -> None:
    run = Run()
    count = 100
    for _ in range(count):
        run.send("x", Schedule(cron="* * * * *"))
    run.settle()
    run.now_ms += MINUTE_MS
    run.engine.state.commit_state.tick(run.now_ms * 1000, 0)
    (read,) = run.engine.turn.run().reads
    page = read_page(run.store, read)
    found = [found_of(one) for one in page.messages]
    run.engine.store_results.on_page_read(read, PageResult(found, page.as_of, page.is_end))
    sent = [run.engine.queues.by_name["q"].waiting_count()]
    while sent[-1] < count:
        run.engine.turn.run()
        sent.append(run.engine.queues.by_name["q"].waiting_count())
        assert sent[-1] > sent[-2]
    # Each computes its next time, which takes as long as 50 copies.
    assert max(after - before for before, after in zip([0, *sent], sent, strict=False)) <= DUE_COPIES_PER_STEP // 50 + 1


CRON_FIELDS = (
    ("*", "0", "30", "59", "*/7", "5-9", "1,2,58", "10/20"),
    ("*", "0", "12", "23", "*/5", "22-23", "0,23"),
    ("*", "1", "15", "29", "30", "31", "L", "LW", "*/31", "1-7", "28,31"),
    ("*", "1", "2", "12", "feb", "4,6,9,11", "*/5"),
    ("*", "0", "7", "MON", "*/7", "1-5", "5L", "MON#5", "0#2", "SUN#1,3"),
)


@pytest.mark.parametrize("seed", range(20))
def test_next_time_of_a_cron_expression_is_that_of_cronsim(seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(50):
        cron = " ".join(map(drawn.choice, CRON_FIELDS))
        now_ms = drawn.choice([NOON_MS, NOON_MS - 1, NOON_MS + 59_999, drawn.randrange(SCHEDULE_TIME_MAX)])
        expected: int | None
        try:
            hit = next(CronSim(cron, datetime.fromtimestamp(now_ms // 1000, UTC)))
            expected = int(hit.timestamp()) * 1000
        except (CronSimError, StopIteration):
            expected = None
        schedule = start_schedule(Schedule(cron=cron), now_ms)
        assert (None if schedule is None else schedule.due_ms) == expected, (cron, now_ms)


@pytest.mark.parametrize(
    "cron",
    [
        pytest.param("0 0 */31 * 0#2", id="never"),
        pytest.param("0 0 29 2 */7", id="every 28 years"),
    ],
)
def test_search_of_a_rare_cron_time_looks_at_few_days(cron: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    match_day = CronSim.match_day

    def counted(self: CronSim, day: datetime) -> bool:
        nonlocal looks
        looks += 1
        return match_day(self, day)

    monkeypatch.setattr(CronSim, "match_day", counted)
    start_schedule(Schedule(cron=cron), NOON_MS)
    # There are 28 kinds of months.
    assert 0 < looks <= 28 * 31


# ---- Memory ----


def test_due_sends_wait_until_eviction_has_caught_up() -> None:
    run = Run()
    run.send("x", Schedule(delay_ms=MINUTE_MS))
    run.settle()
    run.engine.state.commit_state.is_eviction_behind = True
    # With work that it cannot do, this would go on for ever.
    run.at(NOON_MS + MINUTE_MS)
    assert not run.engine.queues.by_name["q"].waiting_count()
    run.engine.state.commit_state.is_eviction_behind = False
    run.settle()
    assert run.engine.queues.by_name["q"].waiting_count() == 1
