"""Tests of audits that are cut: each section ends with the state that is computed without the audit, and all sections
together find what the whole audit finds.

TRUENEXT_EXAMPLES=5000 pytest tests/spark/test_cuts.py   longer
TRUENEXT_SEED=7 pytest tests/spark/test_cuts.py          the same histories again
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.contract.test_history import RecordedEngine, busy
from tests.spark.cutting import STUCK_US, check, fed
from tests.spark.faults import Fault, planted
from tests.spark.histories import Event, RandomHistory
from tests.spark.plain import by_queue, rows_of
from tests.spark.policies import alternating_buckets, serve, three_classes, true_next, two_buckets
from tests.spark.test_consumers import STARTED, Story
from tests.spark.test_engine_history import GROUPS, OF_MANY, ORDERS, commit_all, events_of
from truenext.model.commands import Ack
from truenext.spark.audit import sections as sections_module
from truenext.spark.audit.cut import QueueCut
from truenext.spark.audit.lifetime import Lifetime
from truenext.spark.audit.model import MessageState
from truenext.spark.audit.queue_audit import QueueAudit
from truenext.spark.audit.sections import Subscription, queue_cuts
from truenext.store.memory import MemoryStore

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "100"))


def seeds(count: int) -> range:
    first = int(os.environ.get("TRUENEXT_SEED") or random.SystemRandom().randrange(2**31))
    print(f"TRUENEXT_SEED={first}")
    return range(first, first + count)


def check_history(events: list[Event], numbers: random.Random) -> None:
    """Cut each queue at a few random events, or at each event."""
    first, last = events[0]["event"], events[-1]["event"]
    for rows in by_queue(rows_of(events)).values():
        some = {numbers.randint(first + 1, last + 1) for _ in range(numbers.randint(1, 4))}
        check(rows, sorted(some) if numbers.random() < 0.8 else range(first + 1, last + 2))


@pytest.mark.timeout(120 + EXAMPLES)
def test_sections_of_a_random_history_end_in_the_computed_cuts_and_find_the_same() -> None:
    for seed in seeds(EXAMPLES):
        check_history(random_history(seed), random.Random(seed))


def random_history(seed: int) -> list[Event]:
    return RandomHistory(seed, 40 + seed % 60, faults=(0.1, 0.3)[seed % 2]).events


@pytest.mark.parametrize("policy", [true_next, two_buckets, alternating_buckets, three_classes])
def test_violations_of_a_policy_are_found_in_seven_sections(policy: Callable[..., Any]) -> None:
    history, _ = serve(policy, 1, messages=100)
    (rows,) = by_queue(rows_of(history)).values()
    check(rows, [len(history) * part // 7 for part in range(1, 7)])


@pytest.mark.parametrize("more", [{}, {"groups": GROUPS}, OF_MANY], ids=["one queue", "groups", "wildcards"])
def test_sections_of_a_history_of_the_engine_end_in_the_computed_cuts(more: dict[str, Any]) -> None:
    for seed in seeds(5):
        recorded = busy(
            random.Random(seed),
            120,
            more.get("groups", ("",)),
            more.get("addresses", ORDERS),
            more.get("sent_to", ORDERS),
        )
        check_history(events_of(recorded), random.Random(seed))


# ---- Cuts in the middle of something ----


def cut_everywhere(story: Story) -> dict[int, QueueCut]:
    """Check the story with a cut before each event, alone and with all others, and return the cuts."""
    (rows,) = by_queue(rows_of(story.events)).values()
    cuts = range(story.events[0]["event"] + 1, story.events[-1]["event"] + 2)
    for cut in cuts:
        check(rows, [cut])
    check(rows, cuts)
    assert story.found is not None
    return {each.event: each for each in queue_cuts(rows, cuts)}


def messages(cut: QueueCut, state: MessageState) -> list[int]:
    return [each.sequence for each in cut.messages if each.state is state]


def test_cut_in_a_transaction_has_its_messages_before_they_are_durable() -> None:
    story = Story(messages=1)
    for sequence in (2, 3):
        story.add("accepted", sequence=sequence, priority=9, persistent=True, size=1, batch=1)
    story.dispatch(1).add("committed", queue=None, batch=1).dispatch(3).acknowledge(1, 3)
    cuts = cut_everywhere(story)
    assert [kind for kind, *_ in story.found] == ["order"]
    assert [each.visible_event for each in cuts[6].messages] == [3, 7, 7]


def test_cut_while_a_consumer_holds_a_message_of_a_group() -> None:
    story = Story(messages=0, window=5)
    for sequence, group in ((1, 7), (2, 7), (3, 8)):
        story.add("accepted", sequence=sequence, priority=4, persistent=True, size=1, batch=0, group=group)
    story.dispatch(1).requeue(1).dispatch(2).start(2).acknowledge(2)
    cuts = cut_everywhere(story)
    assert story.found == [("order", 2, "")]
    assert messages(cuts[7], MessageState.HELD) == [1]


@pytest.mark.parametrize("wait", ["delayed", "blocking"])
def test_cut_while_a_delay_runs(wait: str) -> None:
    story = Story(messages=3, window=5).dispatch(1).requeue(1, reason=f"nacked and {wait}", attempts=1)
    story.dispatch(2).requeue(1, reason="due", attempts=1).dispatch(1, 3)
    cuts = cut_everywhere(story)
    assert [kind for kind, *_ in story.found] == ["order"] * (wait == "blocking")
    assert messages(cuts[9], MessageState.DELAYED) == [1]


def test_cut_while_the_queue_is_paused() -> None:
    story = Story(messages=2).add("paused").dispatch(1).add("resumed").dispatch(2)
    cuts = cut_everywhere(story)
    assert story.found == [("premature", 1, "paused")]
    assert [cuts[event].queue.is_paused for event in (5, 6, 7, 8)] == [False, True, True, False]


def test_idle_time_over_three_cuts_is_one_finding_with_its_beginning() -> None:
    story = Story(messages=2)
    for sequence in (3, 4, 5):
        story.wait(4).accept(sequence)
    story.dispatch(1)
    cut_everywhere(story)
    (rows,) = by_queue(rows_of(story.events)).values()
    cuts = [5, 6, 7]
    assert [kind for kind, *_ in story.found] == ["stuck"]
    check(rows, cuts)
    last = QueueAudit.begin(queue_cuts(rows, cuts)[-1], STUCK_US)
    fed(last, [row for row in rows if row.event >= 7])
    assert last.findings == []
    assert last.edges.carried_end is not None


def test_cut_at_a_gap_and_behind_it() -> None:
    story = Story(messages=3, window=5).dispatch(1, 2).lose_an_event().dispatch(3).requeue(1, attempts=1)
    story.dispatch(1).add("run-started", queue=None, reason="clean", run=2).add("recovered", count=1, run=2)
    gap = next(after["event"] - 1 for before, after in pairwise(story.events) if after["event"] > before["event"] + 1)
    cuts = cut_everywhere(story)
    assert messages(cuts[gap], MessageState.HELD) == [1, 2]
    assert messages(cuts[gap + 1], MessageState.DOUBTFUL) == [1, 2, 3]


def test_cut_while_batches_of_spark_wait_in_bundles() -> None:
    """Nobody consumes the bundles: the next batch acknowledges them."""
    story = Story(messages=0).unsubscribe()
    for sequence in (1, 2, 3):
        story.add("accepted", sequence=sequence, priority=4, persistent=True, size=1 << 20, batch=sequence)
        story.add("committed", queue=None, batch=sequence)
    story.add("removed", sequence=1).add("removed", sequence=2).wait(100).add("removed", sequence=3)
    for event in story.events:
        event["queue"] = event["queue"] and "Spark.main.in.0"
    cuts = cut_everywhere(story)
    assert messages(cuts[10], MessageState.WAITING) == [1, 2, 3]


def test_cut_while_the_true_next_is_unread() -> None:
    """The broker has messages in its store alone, and a consumer waits until they are read."""
    recorded, store = RecordedEngine(), MemoryStore()
    store.recover()
    engine, session = recorded.engine, recorded.session()

    for number in range(40):
        recorded.send(session, number % 3)
    commit_all(recorded, store)
    engine.state.memory.limit = 1000
    engine.evict()
    recorded.subscribe(session)
    for _ in range(5):
        commit_all(recorded, store)
        for entry in list(session.consumers["s"].held):
            engine.commands.acknowledge(session, Ack("s", entry, None))
    commit_all(recorded, store)
    events = events_of(recorded)
    assert sum(event["kind"] == "acknowledged" for event in events) == 40
    for rows in by_queue(rows_of(events)).values():
        check(rows, range(2, events[-1]["event"] + 2))


@pytest.mark.parametrize("is_told", [True, False])
def test_cut_between_a_start_and_the_end_of_its_recovery(is_told: bool) -> None:
    """Without an event `recovered` the next event of the queue shows that its messages are lost."""
    story = Story(messages=3)
    story.add("accepted", queue="another", sequence=9, priority=4, persistent=True, size=1, batch=0)
    story.add("run-started", queue=None, reason="unclean", run=2).add("recovered", queue="another", count=1, run=2)
    if is_told:
        story.add("recovered", count=2, run=2)
    story.add("subscribed", queue="another", consumer=7, mode=STARTED, window=1, run=2)
    story.add("accepted", sequence=4, priority=4, persistent=True, size=1, batch=0, run=2)
    story.add("run-started", queue=None, reason="clean", run=3).add("recovered", count=1, run=3)
    assert [(kind, sequence) for kind, sequence, _ in story.found] == [("lost", 1)]
    rows = by_queue(rows_of(story.events))["orders"]
    cuts = queue_cuts(rows, range(2, 14))
    expected = [each.queue.expected for each in cuts if each.queue.expected is not None]
    assert expected == [(3, 0)] * (2 if is_told else 3) + [(1, 3)]


# ---- Planted faults ----

FAULTS = [
    Fault("untouched messages forgotten", QueueAudit, "begin", "self.waiting = cut.untouched", "cut.untouched"),
    Fault("untouched messages forgotten at a start", QueueAudit, "on_run_started", "certain += self.untouched", "pass"),
    Fault("attempts forgotten", Lifetime, "_return", "row.number, True", "0, True"),
    Fault("hidden commit forgotten", Lifetime, "_return", "> row.event", "> row.event + 10**9"),
    Fault("gap forgotten", Lifetime, "_after_mark", "message.has_known_attempts = False", "pass"),
    Fault("doubt forgotten", Lifetime, "_after_mark", "_set_state(message, DOUBTFUL)", "pass"),
    Fault("missing run forgotten", Lifetime, "_after_start", "return None\n    if", "pass\n    if"),
    Fault("loss forgotten", sections_module, "_not_recovered", "if found == lost", "if True or found == lost"),
    Fault("gap after a start forgotten", sections_module, "is_known", "row.code != EventCode.GAP and ", ""),
    Fault("end of a consumer forgotten", Subscription, "_apply", "known[-1].has_ended = True", "pass"),
    Fault("requests forgotten", sections_module, "_change", "consumer.requested = row.number", "pass"),
    Fault("windows forgotten", sections_module, "_change", "consumer.window = row.number", "pass"),
    Fault("holds forgotten", QueueAudit, "_restore_message", "self._restore_hold(message)", "pass"),
    Fault("groups forgotten", QueueAudit, "_restore_message", "if row.group:", "if False:"),
    Fault("delays forgotten", QueueAudit, "_restore_message", "elif row.is_blocking:", "elif False:"),
    Fault(
        "commits forgotten",
        QueueAudit,
        "_restore_message",
        "if is_committing and row.visible",
        "if False and row.visible",
    ),
    Fault("idle time judged by halves", QueueAudit, "_restore_idle_time", "= CARRIED", "= None"),
    Fault("saved too early", QueueAudit, "save", "self.become_visible(event - 1)", "pass"),
]


@pytest.mark.drawn
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_in_a_cut_is_seen(fault: Fault) -> None:
    with planted(fault):
        assert any(_differs(seed) for seed in range(400))


def _differs(seed: int) -> bool:
    try:
        check_history(random_history(seed), random.Random(seed))
    except (AssertionError, LookupError):
        return True
    return False
