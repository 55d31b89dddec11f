"""An audit in sections: each begins from the cut that is computed without it, and all find what the whole one finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from operator import attrgetter

import msgspec
from msgspec import structs

from truenext.spark.audit import sections
from truenext.spark.audit.cut import MessageRow, QueueCut, depth_mask, join_idle_times
from truenext.spark.audit.lifetime import MARKS, MESSAGE_CODES
from truenext.spark.audit.model import EventCode, MessageState, StartFlag, TimelineRow
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


class UntouchedRule:
    """Untouched messages of a queue behind a cut, found without bits and stretches."""

    def __init__(self, rows: Sequence[TimelineRow]) -> None:
        marks = [row for row in rows if row.code in MARKS]
        by_message = sections._by(attrgetter("sequence"), rows, MESSAGE_CODES)
        self._marks = sections.ordered(marks, sections._not_recovered(by_message, marks, sections._recoveries(rows)))
        self._events = {sequence: [row.event for row in own] for sequence, own in by_message.items()}

    def reduced(self, cut: QueueCut, end: int) -> tuple[QueueCut, list[MessageRow]]:
        """Return the cut with the messages that the section up to `end` needs, and the others."""
        known, others = [], []
        lanes = set()
        for message in cut.messages:
            lane = message.state, message.priority, message.group
            is_waiting = message.state is MessageState.WAITING
            if not self._is_untouched(message, cut.event, end) or (is_waiting and lane not in lanes):
                known.append(message)
                lanes |= {lane} if self._is_untouched(message, cut.event, end) else set()
            else:
                others.append(message)
        untouched = sum(each.state is MessageState.WAITING for each in others)
        return structs.replace(cut, messages=known, untouched=untouched), others

    def _is_untouched(self, message: MessageRow, cut: int, end: int) -> bool:
        if any(cut <= event < end for event in self._events[message.sequence]) or message.visible_event >= cut:
            return False
        marks = [mark for mark in self._marks if cut <= mark.event < end]
        if message.state is MessageState.WAITING:
            return all(_is_kept(message, mark) for mark in marks)
        holds_back = message.is_blocking or (message.state is MessageState.DELAYED and message.group)
        return not marks and message.state is not MessageState.HELD and not holds_back


def _is_kept(message: MessageRow, mark: TimelineRow) -> bool:
    if mark.code == EventCode.GAP:
        return message.is_persistent
    if mark.code == EventCode.NOT_RECOVERED:
        return True
    is_continued = mark.code == EventCode.RUN_STARTED and bool(mark.number & StartFlag.CONTINUED)
    return is_continued and (message.is_persistent or bool(mark.number & StartFlag.CLEAN))


def check_untouched(rows: Sequence[TimelineRow], cuts: Sequence[int]) -> None:
    """Audit a queue in sections that do not know the untouched messages."""
    whole = Outcome([fed(QueueAudit(STUCK_US), rows)])
    computed = [*queue_cuts(rows, cuts), None]
    rule = UntouchedRule(rows)
    audits = []
    others: list[MessageRow] = []
    following = [*cuts[1:], rows[-1].event + 1]
    for (_, some), cut, end in zip(split(rows, cuts), [None, *computed], [cuts[0], *following], strict=False):
        if cut is None:
            audits.append(fed(QueueAudit(STUCK_US), some))
        else:
            reduced, others = rule.reduced(cut, end)
            audits.append(fed(QueueAudit.begin(reduced, STUCK_US), some))
        if end <= rows[-1].event:
            (at_end,) = (each for each in computed if each is not None and each.event == end)
            known = {each.sequence for each in others}
            expected = [each for each in at_end.messages if each.sequence not in known]
            saved = audits[-1].save(end)
            assert structs.replace(saved, idle=None) == structs.replace(at_end, messages=expected)
    # Messages that are left are not known to the last audit.
    names = sorted(each.sequence for each in others if each.priority >= 0)
    left = [each for each in whole.finished if each[3] in names]
    found = Outcome(audits)
    assert len(left) == len(names)
    found.finished = sorted([*found.finished, *left], key=repr)
    assert found == whole


def check(rows: Sequence[TimelineRow], cuts: Sequence[int]) -> None:
    """Audit a queue in sections, each from the cut that is computed, without untouched messages, and again one after
    the other."""
    check_untouched(rows, cuts)
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
