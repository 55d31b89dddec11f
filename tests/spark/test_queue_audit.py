"""Tests of the audit of a queue against the naive judge: both find the same in random histories.

TRUENEXT_EXAMPLES=5000 pytest tests/spark/test_queue_audit.py       longer
TRUENEXT_SEED=7 pytest tests/spark/test_queue_audit.py              the same histories again
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from tests.spark.faults import Fault, planted
from tests.spark.histories import Event, RandomHistory
from tests.spark.judge import Judge
from tests.spark.plain import counted, outcomes_of, witnessed
from tests.spark.policies import alternating_buckets, serve, three_classes, true_next, two_buckets
from truenext.spark.audit import after_end
from truenext.spark.audit.cut import DEPTHS_MAX
from truenext.spark.audit.lifetime import Lifetime
from truenext.spark.audit.model import SELECTOR_WINDOW, AuditedMessage, EventCode, StartFlag
from truenext.spark.audit.queue_audit import QueueAudit

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "200"))
STUCK_SECONDS = 10.0


def disagreement(seed: int) -> str | None:
    """Return the difference between audit and judge for one history."""
    history = RandomHistory(seed, 40 + seed % 60, faults=(0.1, 0.3)[seed % 2]).events
    judge = Judge(history, STUCK_SECONDS).judge()
    findings = [each for each in outcomes_of(history, STUCK_SECONDS) if each["row"] == "finding"]
    if counted(findings) == judge.found and witnessed(findings) == judge.witnesses:
        return None
    return f"seed {seed}: audit {counted(findings)}, judge {judge.found}, {witnessed(findings) ^ judge.witnesses}"


@pytest.mark.timeout(120 + EXAMPLES // 2)
def test_queue_audit_never_differs_from_the_judge() -> None:
    first = int(os.environ.get("TRUENEXT_SEED") or random.SystemRandom().randrange(2**31))
    print(f"TRUENEXT_SEED={first} TRUENEXT_EXAMPLES={EXAMPLES}")
    for seed in range(first, first + EXAMPLES):
        assert disagreement(seed) is None


def test_events_hidden_by_a_gap_cause_no_finding() -> None:
    first = int(os.environ.get("TRUENEXT_SEED") or random.SystemRandom().randrange(2**31))
    print(f"TRUENEXT_SEED={first}")
    for seed in range(first, first + 1000):
        history = RandomHistory(seed, 80, faults=0.0)
        accused = _accused(history, history.events) - _accused(history, history.before_gaps)
        assert not accused, seed


def _accused(history: RandomHistory, events: list[Event]) -> set[tuple[str, str, int]]:
    """Return kind, queue and event of wrong dispatches, lost messages and the like. Consumers whose selector a gap
    hides are left out."""
    kinds = ("order", "inversion", "premature", "duplicate", "lost", "resurrected", "uncredited")
    return {
        (each["kind"], each["queue"], each["event"])
        for each in outcomes_of(events, STUCK_SECONDS)
        if each["row"] == "finding"
        and each["kind"] in kinds
        and "selector" not in history.modes.get(each["consumer"], "")
    }


def test_a_message_whose_commit_a_gap_hides_may_be_dispatched_again() -> None:
    account = QueueAudit(10)
    account.on_accepted(1, 1, AuditedMessage(1, 4, True, 9, 9))
    account.on_gap(2)
    account.on_dispatched(5, 5, 1, 1)
    account.on_returned(6, 6, 1, 1)
    account.on_dispatched(7, 7, 1, 1)
    account.on_returned(8, 8, 1, 2)
    account.become_visible(9)
    assert (account.findings, account.waiting) == ([], 1)


def test_a_message_that_was_being_committed_at_a_gap_holds_back_its_equals_until_it_is_durable() -> None:
    account = QueueAudit(10)
    account.on_accepted(1, 1, AuditedMessage(1, 5, True, 9, 9))
    account.on_gap(2)
    account.on_accepted(4, 4, AuditedMessage(2, 5, False, 4, 4))
    for event, sequence in ((5, 3), (6, 4)):
        account.on_accepted(event, event, AuditedMessage(sequence, 4, False, event, event))
    account.on_dispatched(7, 7, 3, 1)
    assert account.findings == []
    account.become_visible(9)
    account.on_dispatched(10, 10, 4, 1)
    assert [(each.kind, each.overtaken_sequence) for each in account.findings] == [("inversion", 2)]


@pytest.mark.parametrize("policy", [true_next, two_buckets, alternating_buckets, three_classes])
def test_a_policy_gets_the_findings_that_a_naive_count_gives(policy: Callable[..., Any]) -> None:
    for seed in range(5):
        history, wrong = serve(policy, seed)
        findings = [each for each in outcomes_of(history, STUCK_SECONDS) if each["row"] == "finding"]
        assert {kind: count for (kind, _), count in counted(findings).items()} == wrong, f"seed {seed}"
        assert bool(wrong) is (policy is not true_next)


def _blind_to_commits(self: QueueAudit, event: int) -> None:
    """Never make messages visible."""


def _forget_nothing(self: QueueAudit, event: int) -> None:
    """Ignore a gap."""


def _no_check(self: QueueAudit, event: int, at: int) -> None:
    """Never start idle time."""


def _forget_what_ended(self: QueueAudit, event: int, at: int) -> None:
    """Forget the messages of an ended subscription, which a start then does not expect."""
    self.messages.clear()
    self.clear_lanes()


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "commits ignored": (QueueAudit, "become_visible", _blind_to_commits),
    "gaps ignored": (QueueAudit, "on_gap", _forget_nothing),
    "idle time ignored": (QueueAudit, "start_idle_time", _no_check),
    "ends of messages ignored": (Lifetime, "end_codes", lambda self, rows, marks: iter(())),
    "order ignored": (QueueAudit, "judge_dispatch", lambda self, event, at, message, consumer: None),
    "recovered ignored": (QueueAudit, "on_recovered", lambda self, event, at, count: None),
    "drained ignored": (QueueAudit, "on_drained", lambda self, event, at: None),
    "returned ignored": (QueueAudit, "on_returned", lambda self, event, at, sequence, attempts, back: None),
    "pauses ignored": (QueueAudit, "on_paused", lambda self, event, at, is_paused: None),
    "unsubscribed ignored": (QueueAudit, "on_unsubscribed", lambda self, event, at, consumer: None),
    "credit ignored": (QueueAudit, "judge_credit", lambda self, event, at, sequence, consumer, receiver: None),
    "changed windows ignored": (QueueAudit, "on_window_changed", lambda self, event, at, consumer, window: None),
    "pull requests ignored": (QueueAudit, "on_requested", lambda self, event, at, consumer, count: None),
    "started messages ignored": (QueueAudit, "on_started", lambda self, event, at, sequence, consumer, end_code: None),
    "exclusive consumers ignored": (QueueAudit, "choose_owner", lambda self: None),
    "miscounts ignored": (QueueAudit, "judge_return", lambda self, event, at, message, attempts, back: None),
    "the end of a subscription ignored": (QueueAudit, "on_queue_ended", lambda self, event, at: None),
    "messages of an ended subscription ignored": (
        QueueAudit,
        "end_after_queue_ended",
        lambda self, event, at, sequence, code, end_code: None,
    ),
    "ended subscriptions forgotten at once": (QueueAudit, "on_queue_ended", _forget_what_ended),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, instead = FAULTS[fault]
    monkeypatch.setattr(where, name, instead)
    assert any(_differs_or_fails(seed) for seed in range(300))


@pytest.mark.parametrize(
    "fault",
    [
        Fault("crash forgotten", Lifetime, "_after_start", "self.end_code = EventCode.RUN_STARTED", "pass"),
        Fault("end of a subscription forgotten", Lifetime, "_after_mark", "True, EventCode.ENDED", "True, 0"),
        Fault("report forgotten", Lifetime, "apply", "self.end_code = EventCode.REPORTED", "pass"),
        Fault("later end forgotten", Lifetime, "apply", "self.row, self.end_code = None, code", "self.row = None"),
    ],
    ids=lambda fault: fault.name,
)
def test_planted_fault_in_the_end_of_a_message_is_seen(fault: Fault) -> None:
    with planted(fault):
        assert any(_differs_or_fails(seed) for seed in range(300))


def test_events_after_ends_are_handed_on_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_end, "ROWS_PER_BATCH", 2)
    codes = [EventCode.ACCEPTED, EventCode.ACKNOWLEDGED, EventCode.DISPATCHED]
    names = ["queue", "sequence", "event", "code", "number", "persistent", "payload"]
    rows = [("a", 1 + n // 3, n, int(codes[n % 3]), 4, True, None) for n in range(15)]
    batch = pa.RecordBatch.from_pylist([dict(zip(names, row, strict=True)) for row in rows])
    found = [each.to_pydict() for each in after_end._follow([batch], [], {})]
    assert [each["event"] for each in found] == [[2, 5], [8, 11], [14]]
    assert {code for each in found for code in each["end_code"]} == {EventCode.ACKNOWLEDGED}


@pytest.mark.parametrize("guard", [StartFlag.CLEAN, StartFlag.CONTINUED, StartFlag.COMPLETE])
def test_start_flags_all_count(guard: StartFlag, monkeypatch: pytest.MonkeyPatch) -> None:
    started = QueueAudit.on_run_started
    always = lambda self, event, at, flags, previous: started(self, event, at, flags | guard, previous)  # noqa: E731
    monkeypatch.setattr(QueueAudit, "on_run_started", always)
    assert any(_differs_or_fails(seed) for seed in range(1500))


def _differs_or_fails(seed: int) -> bool:
    try:
        return disagreement(seed) is not None
    except (AssertionError, IndexError):
        return True


def test_depths_are_thinned_out_evenly() -> None:
    history, _ = serve(true_next, 1, messages=3000)
    points = [each for each in outcomes_of(history, STUCK_SECONDS) if each["row"] == "depth"]
    assert DEPTHS_MAX / 2 <= len(points) <= DEPTHS_MAX + 1
    assert points[-1]["waiting"] == 0
    steps = {after["event"] - before["event"] for before, after in pairwise(points)}
    assert max(steps) < 40


def test_dispatches_to_a_consumer_with_a_selector_are_no_evidence_and_to_others_are() -> None:
    account = QueueAudit(10)
    for sequence in (1, 2, 3):
        account.on_accepted(sequence, sequence, AuditedMessage(sequence, 4, True, sequence, sequence))
    account.on_subscribed(4, 4, 1, SELECTOR_WINDOW)
    account.on_dispatched(5, 5, 3, 1)
    assert account.free_consumers == 0 and account.findings == []
    account.on_subscribed(6, 6, 2, 10)
    account.on_dispatched(7, 7, 2, 2)
    (finding,) = account.findings
    assert (finding.kind, finding.sequence, finding.overtaken_sequence) == ("order", 2, 1)
    account.on_returned(8, 8, 3, 0)
    account.on_unsubscribed(9, 9, 1)
    assert account.free_consumers == 1


def test_message_with_a_group_is_evidence_for_its_group_and_one_without_for_all() -> None:
    account = QueueAudit(10)
    for sequence, group in ((1, 7), (2, 0), (3, 8), (4, 7), (5, 0), (6, 8)):
        account.on_accepted(sequence, sequence, AuditedMessage(sequence, 4, True, sequence, sequence, group))
    account.on_subscribed(7, 7, 1, 10)
    account.on_dispatched(8, 8, 2, 1)
    assert account.findings == []
    for event, sequence, overtaken in ((9, 4, 1), (10, 6, 5)):
        account.on_dispatched(event, event, sequence, 1)
        finding = account.findings.pop()
        assert (finding.kind, finding.sequence, finding.overtaken_sequence) == ("order", sequence, overtaken)
    account.on_returned(11, 11, 6, 1)
    account.on_dispatched(12, 12, 3, 1)
    assert account.findings == []
    account.on_delayed(13, 13, 3, 1, is_blocking=False)
    account.on_dispatched(14, 14, 5, 1)
    assert account.findings == []
    account.on_dispatched(15, 15, 6, 1)
    assert account.findings.pop().overtaken_sequence == 3


def test_messages_after_one_being_committed_are_no_evidence_until_that_is_durable() -> None:
    for group in (7, 0):
        account = QueueAudit(10)
        account.on_accepted(1, 1, AuditedMessage(1, 5, True, 6, 6, 8))
        account.on_accepted(2, 2, AuditedMessage(2, 5, False, 2, 2, group))
        for sequence in (3, 4):
            account.on_accepted(sequence, sequence, AuditedMessage(sequence, 4, False, sequence, sequence, group))
        account.on_subscribed(5, 5, 1, 10)
        account.on_dispatched(5, 5, 3, 1)
        assert account.findings == []
        account.become_visible(6)
        account.on_dispatched(7, 7, 4, 1)
        assert [finding.overtaken_sequence for finding in account.findings] == [2]


def ended(*, was_reset: bool = True) -> QueueAudit:
    """Return the audit of a durable subscription that ended with two messages, 1 and 2, and began anew with 3."""
    account = QueueAudit(10)
    account.on_subscribed(1, 1, 1, 10)
    for sequence in (1, 2):
        account.on_accepted(1 + sequence, 1 + sequence, AuditedMessage(sequence, 4, True, 1 + sequence, 1 + sequence))
    account.on_dispatched(4, 4, 1, 1)
    account.on_returned(5, 5, 1, 0)
    account.on_unsubscribed(6, 6, 1)
    account.on_queue_ended(7, 7)
    if was_reset:
        account.on_subscribed(8, 8, 2, 10)
        account.on_accepted(9, 9, AuditedMessage(3, 4, True, 9, 9))
    return account


def test_messages_of_an_ended_subscription_are_not_overtaken_by_those_of_the_next() -> None:
    account = ended()
    assert (account.waiting, account.held) == (1, 0)
    account.on_dispatched(10, 10, 3, 2)
    assert (account.waiting, account.held) == (0, 1)
    account.on_drained(11, 11)
    account.finish(2000, 2000)
    assert account.findings == []
    assert Counter(each.end_reason for each in account.finished) == {"ended": 2, "held": 1}
    assert [each.wait is None for each in account.finished if each.sequence == 2] == [True]


def test_messages_of_an_ended_subscription_expire_at_any_time_and_in_any_order() -> None:
    account = ended()
    for event, sequence in ((10, 2), (2000, 1)):
        account.end_message(event, event, sequence, EventCode.EXPIRED)
        assert account.waiting == 1
    account.on_dispatched(2001, 2001, 3, 2)
    assert [finding.kind for finding in account.findings] == ["stuck"]
    assert [(each.sequence, each.end_reason) for each in account.finished] == [(2, "expired"), (1, "expired")]
    assert account.expiring == {}


def test_dispatch_and_ack_of_messages_of_an_ended_subscription_are_found() -> None:
    account = ended()
    account.on_dispatched(10, 10, 1, 2, EventCode.ENDED)
    account.end_message(11, 11, 2, EventCode.ACKNOWLEDGED, EventCode.ENDED)
    assert [(each.kind, each.sequence, each.detail) for each in account.findings] == [
        ("duplicate", 1, "ended"),
        ("duplicate", 2, "acknowledged although ended"),
    ]


@pytest.mark.parametrize(("count", "kinds"), [(2, ["lost"]), (3, []), (4, ["resurrected"])])
def test_start_must_recover_unexpired_messages_of_an_ended_subscription(count: int, kinds: list[str]) -> None:
    account = ended()
    account.on_run_started(10, 10, StartFlag.CONTINUED | StartFlag.RECOVERED | StartFlag.COMPLETE, 9)
    account.on_recovered(11, 11, count)
    assert [finding.kind for finding in account.findings] == kinds


def test_message_of_an_ended_subscription_that_a_start_does_not_recover_is_lost() -> None:
    account = ended(was_reset=False)
    account.end_message(8, 8, 2, EventCode.EXPIRED)
    account.on_run_started(10, 10, StartFlag.CONTINUED | StartFlag.RECOVERED, 9)
    account.resolve_recovered(11)
    assert [(each.kind, each.sequence, each.count) for each in account.findings] == [("lost", 1, 1)]
    account.on_run_started(12, 12, StartFlag.CONTINUED | StartFlag.RECOVERED, 11)
    account.resolve_recovered(13)
    assert len(account.findings) == 1


def test_wait_over_a_takeover_to_a_broker_whose_clock_is_behind_is_zero() -> None:
    """Until its dispatch, and until the end of the history."""
    account = QueueAudit(10)
    messages = [AuditedMessage(sequence, 4, True, sequence, 1000) for sequence in (1, 2)]
    for message in messages:
        account.on_accepted(message.sequence, 1000, message)
    account.on_run_started(10, 500, StartFlag.CONTINUED | StartFlag.RECOVERED, 1000)
    account.on_recovered(11, 500, 2)
    account.on_dispatched(12, 510, 1, 1)
    account.finish(13, 520)
    assert [message.wait for message in messages] == [0, 0]
