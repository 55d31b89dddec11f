"""Tests of wrong dispatches, starts and attempts of consumers: they are found, and nothing is found where the history
does not tell.

Each history is judged by the audit of its queue, whole and cut before each event, and by the naive judge.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.spark.cutting import check
from tests.spark.histories import EPOCH, Event
from tests.spark.judge import Judge
from tests.spark.plain import by_queue, counted, outcomes_of, rows_of, witnessed
from truenext.spark.schema import EVENTS

STUCK_SECONDS = 10.0
STARTED = "client-individual with started"
SUSPENDED, BEYOND, UNASKED = "while it was suspended", "beyond its window of 2", "more than it had requested"
MISCOUNTS = ("released", "not started")


class Story:
    """Events in one queue since the start of the broker and the arrival of consumer 1."""

    def __init__(self, mode: str = STARTED, window: int | None = 2, messages: int = 9) -> None:
        self.events: list[Event] = []
        self.seconds = 0.0
        self.add("run-started", queue=None, reason="clean")
        self.subscribe(1, mode, window)
        self.accept(*range(1, messages + 1))

    def add(self, kind: str, **columns: Any) -> Story:
        self.seconds += 0.001
        event = len(self.events) + 1 if not self.events else self.events[-1]["event"] + 1
        at = EPOCH + timedelta(seconds=self.seconds)
        known = {"event": event, "run": 1, "at": at, "kind": kind, "queue": "orders", "date": at.date()}
        self.events.append(dict.fromkeys(EVENTS.names) | known | columns)
        return self

    def wait(self, seconds: float) -> Story:
        self.seconds += seconds
        return self

    def lose_an_event(self) -> Story:
        self.add("drained")
        self.events[-1]["event"] += 1
        return self

    def subscribe(
        self, consumer: int, mode: str = STARTED, window: int | None = 2, priority: int | None = None
    ) -> Story:
        return self.add("subscribed", consumer=consumer, mode=mode, window=window, priority=priority)

    def unsubscribe(self, consumer: int = 1) -> Story:
        return self.add("unsubscribed", consumer=consumer)

    def accept(self, *sequences: int) -> Story:
        for sequence in sequences:
            self.add("accepted", sequence=sequence, priority=4, persistent=True, size=1, batch=0)
        return self

    def dispatch(self, *sequences: int, to: int = 1) -> Story:
        for sequence in sequences:
            self.add("dispatched", sequence=sequence, consumer=to, deliveries=1)
        return self

    def start(self, *sequences: int, by: int = 1) -> Story:
        for sequence in sequences:
            self.add("started", sequence=sequence, consumer=by)
        return self

    def acknowledge(self, *sequences: int) -> Story:
        for sequence in sequences:
            self.add("acknowledged", sequence=sequence)
        return self

    def requeue(self, *sequences: int, reason: str = "released", attempts: int = 0) -> Story:
        for sequence in sequences:
            self.add("returned", sequence=sequence, attempts=attempts, reason=reason)
        return self

    def window(self, window: int | None, of: int = 1) -> Story:
        return self.add("window", consumer=of, window=window)

    def request(self, count: int, of: int = 1) -> Story:
        return self.add("requested", consumer=of, count=count)

    @property
    def found(self) -> list[tuple[str, int | None, str]]:
        """Kind, message and detail of each finding."""
        findings = [each for each in outcomes_of(self.events, STUCK_SECONDS) if each["row"] == "finding"]
        judge = Judge(self.events, STUCK_SECONDS).judge()
        for rows in by_queue(rows_of(self.events)).values():
            check(rows, range(self.events[0]["event"] + 1, self.events[-1]["event"] + 2))
        assert (counted(findings), witnessed(findings)) == (judge.found, judge.witnesses)
        return [(each["kind"], each["sequence"], each["detail"]) for each in findings]


# Windows


def test_dispatch_to_a_suspended_consumer_is_found() -> None:
    story = Story().dispatch(1).requeue(1).window(0).dispatch(1)
    assert story.found == [("uncredited", 1, SUSPENDED)]


@pytest.mark.parametrize("mode", ["client", "client-individual with selector", "client with selector with express"])
def test_dispatch_to_a_suspended_consumer_is_found_in_other_modes(mode: str) -> None:
    assert Story(mode, 5).window(0).dispatch(1).found == [("uncredited", 1, SUSPENDED)]
    assert Story(mode, 5).window(0).window(5).dispatch(1).found == []


def test_dispatch_beyond_the_window_of_a_consumer_is_found() -> None:
    assert Story().dispatch(1, 2).found == []
    assert Story().dispatch(1, 2, 3).found == [("uncredited", 3, BEYOND)]


def test_messages_acknowledged_in_a_transaction_are_not_in_the_window() -> None:
    assert Story().dispatch(1, 2).start(1).dispatch(3).found == []
    assert Story().dispatch(1, 2).start(1, 1).dispatch(3, 4).found == [("uncredited", 4, BEYOND)]


@pytest.mark.parametrize("mode", ["client-individual", "auto with started", STARTED + " with express"])
def test_dispatch_beyond_a_window_of_unknown_use_is_no_finding(mode: str) -> None:
    assert Story(mode, None if mode.startswith("auto") else 2).dispatch(1, 2, 3).found == []
    assert Story("client with selector with started", 2).dispatch(1, 2, 3).found == []


def test_a_window_holds_from_where_it_changes() -> None:
    assert Story(window=1).dispatch(1).window(2).dispatch(2).found == []
    assert Story(window=5).dispatch(1, 2).window(2).dispatch(3).found == [("uncredited", 3, BEYOND)]
    assert Story(window=5).dispatch(1, 2).window(2).acknowledge(1).dispatch(3).found == []
    assert Story().dispatch(1).requeue(1).window(0).window(2).dispatch(1, 2).found == []


def test_windows_that_change_untold_in_an_older_history_are_no_finding() -> None:
    assert Story("client-individual", 10, 30).dispatch(*range(1, 31)).found == []


# Pulling


def test_dispatch_beyond_the_pull_requests_of_a_consumer_is_found() -> None:
    pulling = STARTED + " pulling"
    assert Story(pulling, None).dispatch(1).found == [("uncredited", 1, UNASKED)]
    assert Story(pulling, None).request(2).dispatch(1, 2).found == []
    assert Story(pulling, None).request(2).dispatch(1, 2, 3).found == [("uncredited", 3, UNASKED)]
    assert Story(pulling, None).request(2).dispatch(1).request(3).dispatch(2, 3, 4).found == []
    assert Story(pulling, None).request(2).dispatch(1).request(0).dispatch(2).found == [("uncredited", 2, UNASKED)]


def test_ack_and_release_are_no_pull_requests() -> None:
    story = Story("client pulling", None).request(2).dispatch(1, 2).acknowledge(1).requeue(2).dispatch(2)
    assert story.found == [("uncredited", 2, UNASKED)]


def test_pull_request_of_a_consumer_with_a_selector_counts_once_recorded() -> None:
    """The pull requests of a wildcard consumer are never recorded."""
    pulling = "client with selector pulling"
    assert Story(pulling, None).dispatch(3, 1).found == []
    assert Story(pulling, None).request(1).dispatch(3, 1).found == [("uncredited", 1, UNASKED)]


# Exclusive consumers

EXCLUSIVE = STARTED + " exclusive"


def kept_from(number: int) -> str:
    return f"although consumer {number} is exclusive"


def test_dispatch_to_another_than_the_exclusive_consumer_is_found() -> None:
    story = Story().dispatch(1).subscribe(2, EXCLUSIVE, priority=0)
    assert story.dispatch(2, to=2).found == []
    # Whether the exclusive one has credit or not.
    assert story.dispatch(3, to=2).dispatch(4).found == [("uncredited", 4, kept_from(2))]
    assert Story().subscribe(2, EXCLUSIVE, priority=0).dispatch(1, to=2).unsubscribe(2).dispatch(2).found == []


def test_dispatch_to_another_than_the_exclusive_consumer_is_found_with_selectors() -> None:
    selective = "client with selector exclusive"
    assert Story().subscribe(2, selective, priority=0).dispatch(1).found == [("uncredited", 1, kept_from(2))]
    story = Story("client with selector", 5).subscribe(2, EXCLUSIVE, priority=0)
    assert story.dispatch(2).found == [("uncredited", 2, kept_from(2))]


def test_exclusive_consumer_of_the_highest_priority_and_then_the_first_has_the_queue() -> None:
    def story(*priorities: int) -> Story:
        story = Story()
        for number, priority in enumerate(priorities, 2):
            story.subscribe(number, EXCLUSIVE, priority=priority)
        return story

    assert story(0, 0).dispatch(1, to=2).found == []
    assert story(0, 0).dispatch(1, to=3).found == [("uncredited", 1, kept_from(2))]
    assert story(-1, 0, -127).dispatch(1, to=3).found == []
    assert story(-1, 0, -127).dispatch(1, to=2).found == [("uncredited", 1, kept_from(3))]
    assert (
        story(-1, 0, -127)
        .unsubscribe(3)
        .dispatch(1, to=2)
        .unsubscribe(2)
        .dispatch(2, to=4)
        .unsubscribe(4)
        .dispatch(3)
        .found
        == []
    )
    # One of a pattern may have come first and join the queue later.
    late = Story().subscribe(3, EXCLUSIVE, priority=0).subscribe(2, "client with selector exclusive", priority=0)
    assert late.dispatch(1, to=2).found == []
    assert late.dispatch(2, to=3).found == [("uncredited", 2, kept_from(2))]


@pytest.mark.parametrize(
    ("story", "is_stuck"),
    [
        (Story(messages=3).dispatch(1).subscribe(2, EXCLUSIVE, 1, 0).dispatch(2, to=2), False),
        (Story(messages=3).dispatch(1).subscribe(2, EXCLUSIVE, 2, 0).dispatch(2, to=2), True),
        (Story(messages=3).dispatch(1).subscribe(2, EXCLUSIVE, 1, 0).dispatch(2, to=2).unsubscribe(2), True),
        (Story(messages=3).dispatch(1).subscribe(2, EXCLUSIVE, 1, 0).dispatch(2, to=2).acknowledge(1), False),
        (Story(messages=3).subscribe(2, EXCLUSIVE, 1, 0).dispatch(1, to=2).subscribe(3, EXCLUSIVE, 1, 0), False),
        (Story(messages=3).subscribe(2, EXCLUSIVE, 1, 0).dispatch(1, to=2).subscribe(3, EXCLUSIVE, 1, 1), True),
        (Story(messages=3).subscribe(2, "client with selector exclusive", 5, 0), False),
    ],
)
def test_stuck_queue_is_found_by_the_credit_of_its_exclusive_consumer(story: Story, *, is_stuck: bool) -> None:
    story.wait(STUCK_SECONDS + 1).add("paused")
    assert [kind for kind, *_ in story.found] == ["stuck"] * is_stuck


def test_consumers_are_not_idle_while_an_unknown_exclusive_consumer_may_exist() -> None:
    def story(mode: str = STARTED) -> Story:
        return Story().lose_an_event().subscribe(2, mode, 5, 0 if mode == EXCLUSIVE else None).accept(20, 21, 22)

    def idle(story: Story) -> list[str]:
        return [kind for kind, *_ in story.wait(STUCK_SECONDS + 1).add("paused").found if kind != "lost"]

    assert idle(story()) == idle(story(EXCLUSIVE)) == []
    # That one gets something says that none is exclusive, if it is not itself.
    assert idle(story().dispatch(20, to=2)) == ["stuck"]
    assert idle(story(EXCLUSIVE).dispatch(20, to=2)) == []
    assert idle(story(EXCLUSIVE).dispatch(20, to=2).unsubscribe(2).subscribe(3)) == []


# Miscounts


def test_an_attempt_that_a_release_counts_is_found() -> None:
    assert Story().dispatch(1).requeue(1, attempts=1).found == [("miscount", 1, "released")]
    story = Story().dispatch(1).requeue(1, reason="nacked", attempts=1)
    assert story.dispatch(1).requeue(1, attempts=1).found == []
    assert story.dispatch(1).requeue(1, attempts=2).found == [("miscount", 1, "released")]


def test_attempt_of_a_message_that_was_not_started_is_found() -> None:
    for reason in ("lost", "aborted", "lost and delayed", "aborted and blocking"):
        story = Story().dispatch(1, 2).start(2).requeue(1, 2, reason=reason, attempts=1)
        assert story.found == [("miscount", 1, "not started")]
        # Of clients that do not name it, the first is charged, begun or not.
        assert Story("client-individual").dispatch(1).requeue(1, reason=reason, attempts=1).found == []
    assert Story().dispatch(1).requeue(1, reason="nacked", attempts=1).found == []


@pytest.mark.parametrize("reason", ["released", "nacked", "lost and delayed"])
def test_a_return_with_fewer_attempts_than_before_is_found_over_a_crash_too(reason: str) -> None:
    for story in (Story(), Story().lose_an_event()):
        story.dispatch(1).requeue(1, reason="nacked", attempts=2).lose_an_event().dispatch(1).start(1)
        story.requeue(1, reason=reason, attempts=1)
        assert ("lost-failure", 1, "an attempt had been counted") in story.found


def test_a_dead_letter_that_forgets_why_a_consumer_failed_is_found() -> None:
    def dead_letter(cause: str | None, written: str | None) -> list[tuple[str, int | None, str]]:
        story = Story().dispatch(1).add("returned", sequence=1, attempts=1, reason="nacked", cause=written)
        return story.dispatch(1).add("dead-lettered", sequence=1, cause=cause).found

    assert dead_letter(None, "it broke") == [("lost-failure", 1, "a consumer had named a cause")]
    assert dead_letter("it broke", "it broke") == dead_letter("something else", "it broke") == []
    assert dead_letter(None, None) == dead_letter("the last word", None) == []


def test_started_applies_to_one_dispatch() -> None:
    story = Story().dispatch(1).start(1).requeue(1).dispatch(1).requeue(1, reason="lost", attempts=1)
    assert story.found == [("miscount", 1, "not started")]


def test_redelivery_of_a_held_message_is_a_duplicate() -> None:
    assert Story(window=5).dispatch(1, 2).requeue(2).dispatch(1).found == [("duplicate", 1, "held by consumer 1")]


# Consumers that have ended


def taken_over() -> Story:
    """A history in which consumer 1 has ended with its messages, and consumer 2 has subscribed."""
    return Story().dispatch(1, 2).requeue(1, 2).unsubscribe().subscribe(2)


def test_dispatch_to_an_ended_consumer_is_found() -> None:
    assert taken_over().dispatch(1, to=2).found == []
    assert taken_over().dispatch(1).found == [("stale", 1, "dispatched to a consumer that had ended")]


def test_start_by_an_ended_consumer_is_found() -> None:
    late = "started by a consumer that had ended"
    assert taken_over().start(1).found == [("stale", 1, late)]
    assert taken_over().dispatch(1, to=2).start(1).found == [("stale", 1, late)]
    # In a transaction, it is said.
    assert Story().dispatch(1).unsubscribe().start(1).found == [("stale", 1, late)]


def test_start_of_a_message_that_its_consumer_does_not_hold_is_found() -> None:
    wrong = "started although it did not hold it"
    assert Story().start(1).found == [("stale", 1, wrong)]
    assert Story().dispatch(1).requeue(1).start(1).found == [("stale", 1, wrong)]
    assert Story().subscribe(2).dispatch(1, to=2).start(1).found == [("stale", 1, wrong)]
    assert Story().dispatch(1).acknowledge(1).start(1).found == [("stale", 1, "started although acknowledged")]
    delayed = Story().dispatch(1).requeue(1, reason="nacked and delayed", attempts=1)
    assert delayed.start(1).found == [("stale", 1, wrong)]


def test_ack_after_the_end_of_the_consumer_is_found() -> None:
    assert taken_over().acknowledge(1).found == [("stale", 1, "acknowledged although no consumer held it")]
    delayed = Story().dispatch(1).requeue(1, reason="nacked and delayed", attempts=1)
    assert delayed.acknowledge(1).found == [("stale", 1, "acknowledged although no consumer held it")]
    late = Story().dispatch(1).unsubscribe().acknowledge(1)
    assert late.found == [("stale", 1, "acknowledged by a consumer that had ended")]


def test_release_of_a_started_message_without_an_attempt_is_no_finding() -> None:
    """A transaction that counts its NACKs alone releases messages it has only acknowledged without an attempt."""
    lost = Story().dispatch(1, 2).start(1, 2).requeue(1).requeue(2, reason="lost", attempts=1)
    assert lost.unsubscribe().found == []
    counted = Story().dispatch(1).start(1).requeue(1, attempts=1)
    assert counted.found == [("miscount", 1, "released")]


def test_ack_nack_and_loss_in_a_transaction_after_the_subscription_are_no_findings() -> None:
    assert Story().dispatch(1, 2).start(1, 2).unsubscribe().acknowledge(1, 2).found == []
    started_again = Story().dispatch(1).start(1).unsubscribe().start(1)
    assert started_again.requeue(1, reason="nacked", attempts=1).found == []
    lost = Story().dispatch(1).start(1).unsubscribe().requeue(1, reason="lost", attempts=1)
    assert lost.found == []
    # Of others it is not known, and the rest of a frame that is half sent may be taken after the end.
    for mode in ("client-individual", "auto with started"):
        assert Story(mode).dispatch(1).unsubscribe().acknowledge(1).found == []


# Who could have taken a message


@pytest.mark.parametrize(
    ("story", "is_stuck"),
    [
        (Story(messages=1).window(0), False),
        (Story(messages=1).window(0).window(1), True),
        (Story(messages=2).dispatch(1).window(1), False),
        (Story(messages=3).dispatch(1, 2).window(3), True),
        (Story(messages=2).window(1).dispatch(1).acknowledge(1), True),
        (Story(STARTED + " pulling", None, 1), False),
        (Story(STARTED + " pulling", None, 1).request(1), True),
        (Story(STARTED + " pulling", None, 1).request(1).request(0), False),
        (Story(STARTED + " pulling", None, 2).request(1).dispatch(1), False),
        (Story(STARTED + " pulling", None, 2).request(1).dispatch(1).acknowledge(1), False),
        (Story(STARTED + " pulling", None, 2).request(2).dispatch(1), True),
        (Story("client with selector pulling", None, 1).request(1), False),
    ],
)
def test_stuck_queue_is_found_only_while_its_consumer_has_credit(story: Story, *, is_stuck: bool) -> None:
    story.wait(STUCK_SECONDS + 1).add("paused")
    assert [kind for kind, *_ in story.found] == ["stuck"] * is_stuck


def test_credit_that_ends_before_the_stuck_time_is_no_finding() -> None:
    for end in ("window", "requested"):
        story = Story(messages=1) if end == "window" else Story(STARTED + " pulling", None, 1).request(1)
        story.wait(STUCK_SECONDS - 1)
        story = story.window(0) if end == "window" else story.request(0)
        assert story.wait(STUCK_SECONDS).add("paused").found == []


# What a gap hides


@pytest.mark.parametrize(
    "story",
    [
        Story().window(0).lose_an_event().dispatch(1),
        Story().dispatch(1, 2).lose_an_event().dispatch(3),
        Story(STARTED + " pulling", None).lose_an_event().dispatch(1),
        Story().dispatch(1).lose_an_event().requeue(1, attempts=1),
        Story().dispatch(1).lose_an_event().requeue(1, reason="lost", attempts=1),
        taken_over().lose_an_event().dispatch(1),
        taken_over().lose_an_event().start(1),
        taken_over().lose_an_event().acknowledge(1),
        Story().dispatch(1).unsubscribe().lose_an_event().acknowledge(1),
        Story().lose_an_event().request(0).window(0).dispatch(1),
    ],
)
def test_violations_that_a_gap_may_explain_are_no_findings(story: Story) -> None:
    assert [finding for finding in story.found if finding[0] != "lost"] == []


def test_history_from_the_middle_of_a_run_judges_no_earlier_consumers() -> None:
    story = Story(messages=1).dispatch(1).start(1).window(0).acknowledge(1)
    for first in range(2, len(story.events)):
        middle = Story()
        middle.events = story.events[first:]
        assert middle.accept(2).dispatch(2).start(2).acknowledge(2).found == []
    restarted = Story().dispatch(1)
    restarted.add("run-started", queue=None, reason="clean", run=2)
    restarted.add("recovered", count=9, run=2).add("dispatched", sequence=1, consumer=1, deliveries=2, run=2)
    assert restarted.found == [("stale", 1, "dispatched to a consumer that had ended")]
