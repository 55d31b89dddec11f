"""Audits in pieces, in plain Python. Each knows the history up to its end, and goes on from the cut of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec import structs

from tests.spark.cutting import STUCK_US, fed
from tests.spark.histories import Event
from tests.spark.plain import by_queue, rows_of
from truenext.spark.audit.cut import QueueCut
from truenext.spark.audit.model import NEVER, EventCode, Finding, StartFlag, TimelineRow
from truenext.spark.audit.queue_audit import QueueAudit

Found = tuple[str, Finding]
"""Queue, and finding."""


def pieces(events: Sequence[Event], cuts: Sequence[int]) -> list[list[Event]]:
    """Return the events up to the end of each piece. `cuts` are the first events of all pieces but the first."""
    ends = [*cuts, events[-1]["event"] + 1]
    return [[each for each in events if each["event"] < end] for end in ends]


def judge_in_pieces(events: Sequence[Event], cuts: Sequence[int]) -> list[list[Found]]:
    """Return the findings of each piece."""
    known = [[], *pieces(events, cuts)]
    saved: dict[str, QueueCut] = {}
    found: list[list[Found]] = []
    for earlier, events_up_to_end in pairwise(known):
        last = events_up_to_end[-1]
        first = earlier[-1]["event"] + 1 if earlier else 0
        found.append([])
        for queue, rows in by_queue(rows_of(events_up_to_end)).items():
            rows = [each for each in rows if each.code != EventCode.FINISHED]
            before, after = (
                [each for each in rows if (each.event < first) is is_before] for is_before in (True, False)
            )
            if queue in saved:
                audit = QueueAudit.begin(_with_later_knowledge(saved[queue], before), STUCK_US)
            else:
                audit = fed(QueueAudit(STUCK_US), before)
                assert not audit.findings
            fed(audit, after)
            audit.stop(last["event"] + 1, round(last["at"].timestamp() * 1e6))
            found[-1] += ((queue, each) for each in audit.findings)
            saved[queue] = audit.save(last["event"] + 1)
    return found


def _with_later_knowledge(cut: QueueCut, before: Sequence[TimelineRow]) -> QueueCut:
    """Return the cut with what is known now of the rows before it: when messages became durable, and whether a run has
    finished its recovery."""
    durable = {each.sequence: each for each in before if each.code == EventCode.ACCEPTED}
    flags = {each.event: each.number for each in before if each.code == EventCode.RUN_STARTED}
    messages = []
    for message in cut.messages:
        row = durable.get(message.sequence)
        # A later start shows that a message was durable, but not at the cut.
        if row is not None and message.visible_event == NEVER and row.visible_event >= cut.event:
            message = structs.replace(message, visible_event=row.visible_event, visible_at=row.visible_at)
        messages.append(message)
    queue = cut.queue
    if queue.expected is not None:
        recovered = flags[queue.start_event] & StartFlag.RECOVERED
        queue = structs.replace(queue, start_flags=queue.start_flags | recovered)
    return structs.replace(cut, messages=messages, queue=queue)


def keys(found: Sequence[Found]) -> list[tuple[object, ...]]:
    """Return the findings in order, without the durations of idle times and the times at which losses are seen: a piece
    tells both at its end, and the whole history perhaps later."""
    return sorted((queue, *structs.astuple(_comparable(each))) for queue, each in found)


def _comparable(finding: Finding) -> Finding:
    if finding.kind == "stuck":
        return structs.replace(finding, duration=0, count=0)
    return structs.replace(finding, at=0) if finding.kind == "lost" else finding
