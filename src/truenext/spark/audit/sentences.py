"""Verdict on a broker in words: sentences for findings, and notes on what was not judged."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Row

from truenext.model.events import GAP_EVENTS
from truenext.spark.audit.brokers import AuditedBroker
from truenext.spark.audit.model import EventCode, StartFlag, TimelineRow
from truenext.spark.verdict import FindingSummary


def difference_finding(count: int) -> tuple[FindingSummary, ...]:
    """Return the finding that `count` events differ between folders, if any do."""
    if not count:
        return ()
    sentence = f"{count:,} events are not the same in all folders of this broker, or are missing in one."
    return (FindingSummary("difference", count, sentence),)


def findings_of(counts: dict[str, Row], stuck_seconds: float) -> tuple[FindingSummary, ...]:
    """Return a summary of each kind of finding. `counts` has numbers of findings and messages by kind."""

    def number(kind: str, column: str = "messages") -> int:
        return int(counts[kind][column]) if kind in counts else 0

    longest = number("stuck", "duration") / 1e6
    sentences = {
        "inversion": "{:,} dispatches overtook a ready message of higher priority",
        "order": "{:,} dispatches overtook a message of the same priority that had arrived earlier",
        "premature": "{:,} dispatches were of messages that were not visible yet",
        "lost": "{:,} messages were lost: they were not in their queue, and nothing had removed them",
        "duplicate": "{:,} dispatches or acknowledgements were of messages that another consumer held, "
        "or that were removed already",
        "resurrected": "{:,} messages too many were recovered",
        "uncredited": "{:,} dispatches were to suspended consumers, or to others than an exclusive consumer, or beyond "
        "the window or the credit",
        "miscount": "{:,} returns counted an attempt although no consumer had failed",
        "stale": "{:,} times a consumer that had ended, or did not hold the message, got, started or acknowledged it",
        "lost-failure": "{:,} messages had fewer attempts than before, or were dead letters without a cause "
        "although a consumer had named one",
        "stuck": f"{{:,}} times messages waited for more than {stuck_seconds:g} s although a consumer could have "
        f"taken them; the longest was {longest:,.1f} s",
    }
    found = []
    for kind, sentence in sentences.items():
        count = number(kind, "findings" if kind == "stuck" else "messages")
        if count:
            found.append(FindingSummary(kind, count, sentence.format(count) + "."))
    return tuple(found)


def notes_on(
    run_rows: Sequence[Row],
    first_event: int,
    gap_count: int,
    broker: AuditedBroker,
    mark_rows: Sequence[TimelineRow],
    *,
    has_state: bool,
) -> tuple[str, ...]:
    """Return a sentence for each thing that was not judged, or not as usual. `has_state` is true if the audit goes on
    from a state, `mark_rows` are the broker's starts and gaps."""
    notes = []
    earlier = broker.earlier
    if len(broker.histories) > 1:
        notes.append(f"{' and '.join(broker.histories)} are one history; each event was judged once.")
    if earlier is not None:
        notes.append(
            f"Up to run {earlier.next_run - 1:,} the history is that of a broker with another identity, "
            f"{earlier.store}; only later runs were judged."
        )
    elif not has_state and first_event > 1:
        notes.append(f"The history begins with event {first_event:,}; older messages were not judged.")
    numbers = {row["run"] for row in run_rows}
    absent = max(numbers) - min(numbers) + 1 - len(numbers)
    if absent:
        notes.append(f"{absent:,} runs of the broker have no history; messages that waited then were not judged.")
    deleted = _deleted(mark_rows) if has_state and mark_rows else None
    if deleted is not None and deleted.event == first_event:
        gap_count -= 1
        notes.append(
            f"Events {deleted.event:,} to {deleted.number:,}, after the last audit, are no longer in the history; "
            "what happened there was not judged: audit more often, or keep more history."
        )
    if gap_count:
        gaps_left = "A crash left a gap" if gap_count == 1 else f"Crashes left {gap_count:,} gaps"
        notes.append(f"{gaps_left} in the history; what happened there was not judged.")
    return tuple(notes)


def _deleted(mark_rows: Sequence[TimelineRow]) -> TimelineRow | None:
    """Return the first row if it is a gap that no crash has left."""
    gap, *others = mark_rows
    if gap.code != EventCode.GAP:
        return None
    after = others[0] if others and others[0].event == gap.number + 1 else None
    is_crash = after is not None and after.code == EventCode.RUN_STARTED and not after.number & StartFlag.CLEAN
    return None if is_crash and gap.number - gap.event < GAP_EVENTS else gap
