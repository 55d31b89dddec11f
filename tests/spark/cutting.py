"""An audit in sections: each begins from the cut that is computed without it, and all find what the whole one finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from operator import attrgetter

import msgspec
from msgspec import structs

from truenext.spark.audit.cut import QueueCut, depth_mask, join_idle_times
from truenext.spark.audit.model import TimelineRow
from truenext.spark.audit.queue_audit import QueueAudit
from truenext.spark.audit.sections import queue_cuts
from truenext.spark.audit.sweep import MESSAGE_COLUMNS, process

STUCK_US = 10_000_000


def fed(audit: QueueAudit, rows: Sequence[TimelineRow]) -> QueueAudit:
    if rows:
        process([audit] * len(rows), [list(column) for column in zip(*rows, strict=True)])
    return audit


class Outcome:
    """Results of the audits of a queue's sections, joined."""

    def __init__(self, audits: Sequence[QueueAudit]) -> None:
        findings = [*chain.from_iterable(each.findings for each in audits)]
        findings += join_idle_times([each.edges for each in audits], STUCK_US)[0]
        self.findings = sorted(map(structs.astuple, findings), key=repr)
        self.finished = sorted((_reported(message) for each in audits for message in each.finished), key=repr)
        mask = depth_mask(audits[-1].tick)
        points = chain.from_iterable(each.depth_points for each in audits)
        self.depths = [point for point in points if not point[0] & mask]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outcome) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return "\n".join(f"{name} {value}" for name, value in vars(self).items())


_reported = attrgetter(*MESSAGE_COLUMNS.values())
"""Fields of a message that are in the audit's tables."""


def split(rows: Sequence[TimelineRow], cuts: Sequence[int]) -> Iterator[tuple[int, list[TimelineRow]]]:
    """Yield the first event and the rows of each section but the first."""
    for first, after in pairwise([0, *cuts, rows[-1].event + 1]):
        yield first, [row for row in rows if first <= row.event < after]


def check(rows: Sequence[TimelineRow], cuts: Sequence[int]) -> None:
    """Audit a queue in sections, each from the cut that is computed, and again one after the other."""
    whole = Outcome([fed(QueueAudit(STUCK_US), rows)])
    computed = queue_cuts(rows, cuts)
    parallel: list[QueueAudit] = []
    saved: QueueCut | None = None
    serial: list[QueueAudit] = []
    for number, (first, some) in enumerate(split(rows, cuts)):
        if number:
            at_end = parallel[-1].save(first)
            assert structs.replace(at_end, idle=None) == computed[number - 1]
            saved = msgspec.json.decode(msgspec.json.encode(serial[-1].save(first)), type=QueueCut)
            assert structs.replace(saved, idle=None) == computed[number - 1]
        assert saved is None or saved.event == first
        begun = QueueAudit(STUCK_US) if not number else QueueAudit.begin(computed[number - 1], STUCK_US)
        follower = QueueAudit(STUCK_US) if saved is None else QueueAudit.begin(saved, STUCK_US)
        if saved is not None:
            assert (begun.idle_message is None) is (saved.idle is None)
        parallel.append(fed(begun, some))
        serial.append(fed(follower, some))
    assert Outcome(parallel) == whole
    assert Outcome(serial) == whole
