"""Reader of flows: keeps the flows of folders with events in memory, as their files grow, for the console. Memory is
bounded: each kind of flow has a share of its own, so that flows without failures do not push out those that matter.

    given up    a message became a dead letter, expired or was removed
    failed      an execution failed; its message was, or will be, redelivered
    unended     a message is in progress
    ended       all messages are processed, the latest flows
    slow        flows that were ended, the slowest of them
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import chain
from pathlib import Path
from sys import getsizeof

from truenext.flows.event_files import EventFiles
from truenext.flows.events import OUTCOMES, SQL_COMMITTED, STARTED, EventLine
from truenext.flows.model import RecordedExecution, RecordedFlow, continue_execution, flow_of, start_execution

BYTES_MAX = 64 * 1024 * 1024
"""Largest number of bytes of memory for flows."""
FIRST_BYTES_MAX = 128 * 1024 * 1024
"""Largest number of bytes of events that are read at first. Flows of earlier events are found by
`truenext.flows.search`."""
READ_BYTES_MAX = 256 * 1024
"""Number of bytes that one call reads, about: some 1,000 events, in 10 ms."""
EXECUTIONS_MAX = 1000
"""Largest number of executions that are kept of one flow. Completed ones beyond are only counted."""
SLOW_MAX = 100
"""Largest number of the slowest ended flows that are kept beyond the latest."""
_EXECUTION_BYTES = 500
"""Bytes of one execution in memory, with its numbers, but without its texts."""
_FLOW_BYTES = 800
"""Bytes of one flow in memory, without its executions and texts."""
_NAMES_MAX = 10_000
"""Largest number of names that are kept once for all executions."""
_SHARES = {"given up": 4, "failed": 2, "unended": 4, "ended": 4, "slow": 2}
"""Sixteenths of the memory for each kind of flow."""


class FlowReader:
    """Flows of some folders with events. Call `read` repeatedly; all other methods tell of what was read. Not for
    several threads at once."""

    def __init__(self, folders: Sequence[Path], *, bytes_max: int = BYTES_MAX) -> None:
        self._files = EventFiles(folders, first_bytes_max=FIRST_BYTES_MAX)
        self._flows: dict[str, _KeptFlow] = {}
        self._shares = {kind: _Share(bytes_max * part // 16) for kind, part in _SHARES.items()}
        self._running: dict[tuple[str, int], RecordedExecution] = {}
        """Executions without a recorded end, by process and number."""
        self._changed: dict[str, _KeptFlow] = {}
        self._slow_seconds_min = 0.0
        """Seconds of the fastest flow of the share `slow`, when one came last."""
        self._names: dict[str, str] = {}

    # ---- Reading ----

    def read(self, bytes_max: int = READ_BYTES_MAX) -> bool:
        """Read new events of about `bytes_max` bytes. Return whether there may be more."""
        has_more = False
        for events in self._files.read(bytes_max):
            has_more = True
            for event in events:
                self._add(event)
            self._sort_in()
        return has_more

    @property
    def problems(self) -> list[str]:
        """Sentences about folders and files that cannot be read, or not completely. Empty if all is well."""
        return self._files.problems

    @property
    def skipped_bytes(self) -> int:
        """Bytes of older events that were there at first, and are not read."""
        return self._files.skipped_bytes

    # ---- Flows ----

    def __len__(self) -> int:
        return len(self._flows)

    def find(self, text: str) -> list[RecordedFlow]:
        """Return the kept flows with this trace or id, and the flows that their stages started, the latest first."""
        prefix = f"{text}|"
        found = (each.flow for each in self._flows.values())
        return _latest(each for each in found if text in (each.trace, each.id) or each.trace.startswith(prefix))

    def latest(self, limit: int) -> list[RecordedFlow]:
        """Return the flows that have started last."""
        return _latest((each.flow for each in self._flows.values()), limit)

    def slowest(self, limit: int) -> list[RecordedFlow]:
        """Return the flows that took longest, among ended ones."""
        ended = (each.flow for each in self._flows.values() if each.flow.has_ended)
        return nlargest(limit, ended, key=lambda flow: flow.seconds)

    def given_up(self, limit: int) -> list[RecordedFlow]:
        """Return flows with a message that was given up, the latest first."""
        return _latest(self._of("given up"), limit)

    def failed(self, limit: int) -> list[RecordedFlow]:
        """Return flows in which an execution failed and no message was given up, the latest first."""
        return _latest(self._of("failed"), limit)

    def unended(self, limit: int) -> list[RecordedFlow]:
        """Return flows with a message in progress, the longest first: those that have started first."""
        flows = chain(self._of("unended"), self._of("failed"), self._of("given up"))
        return nlargest(limit, (each for each in flows if not each.has_ended), key=lambda flow: -flow.started_at)

    def _of(self, kind: str) -> Iterator[RecordedFlow]:
        return (each.flow for each in self._shares[kind].flows.values())

    # ---- Memory ----

    def _add(self, event: EventLine) -> None:
        if event.kind == STARTED:
            self._start(event)
        elif event.kind == SQL_COMMITTED or event.kind in OUTCOMES:
            self._continue(event)

    def _start(self, event: EventLine) -> None:
        if (event.process, event.number) in self._running:
            # A copy: someone has copied files into another folder.
            return
        event.stage, event.sender, event.process = map(self._name, (event.stage, event.sender, event.process))
        event.queue = None if event.queue is None else self._name(event.queue)
        kept = self._flows.get(event.flow)
        if kept is None:
            execution = start_execution(event)
            kept = self._flows[event.flow] = _KeptFlow(flow_of([execution]))
        else:
            event.flow, event.trace = kept.flow.id, kept.flow.trace
            execution = start_execution(event)
            kept.added.append(execution)
        self._running[event.process, event.number] = execution
        self._changed[event.flow] = kept

    def _continue(self, event: EventLine) -> None:
        key = (event.process, event.execution)
        execution = self._running.get(key)
        if execution is None:
            # The file with its start is deleted, or was not read.
            return
        event.error = None if event.error is None else self._name(event.error)
        continue_execution(execution, event)
        if event.kind != SQL_COMMITTED:
            del self._running[key]
        self._changed[execution.flow] = self._flows[execution.flow]

    def _name(self, name: str) -> str:
        """Return the one copy of a name that all executions share."""
        if len(self._names) > _NAMES_MAX:
            self._names.clear()
        return self._names.setdefault(name, name)

    def _sort_in(self) -> None:
        """Put the changed flows into their shares, and forget flows beyond the shares."""
        for kept in self._changed.values():
            if kept.share is not None:
                kept.share.remove(kept)
            self._summarize(kept)
            self._shares[_kind(kept.flow)].add(kept)
        self._changed.clear()
        for kind, share in self._shares.items():
            while share.bytes > share.bytes_max:
                kept = share.pop_oldest()
                if kind != "ended" or not self._keep_if_slow(kept):
                    self._forget(kept)

    def _summarize(self, kept: _KeptFlow) -> None:
        flow = flow_of([*kept.flow.executions, *kept.added])
        kept.added = []
        flow.omitted = kept.flow.omitted
        if flow.runs > EXECUTIONS_MAX:
            self._omit(flow)
        kept.flow = flow
        kept.bytes = _size_of(flow)

    def _omit(self, flow: RecordedFlow) -> None:
        """Leave out executions of a large flow: the latest completed ones, and if need be the latest of all."""
        first, later = flow.executions[:EXECUTIONS_MAX], flow.executions[EXECUTIONS_MAX:]
        notable = [each for each in later if not each.is_done][:EXECUTIONS_MAX]
        kept_ids = set(map(id, notable))
        for each in later:
            if id(each) not in kept_ids:
                self._running.pop((each.process, each.execution), None)
        flow.omitted += len(later) - len(notable)
        flow.executions = first + notable

    def _keep_if_slow(self, kept: _KeptFlow) -> bool:
        """Keep an ended flow that is older than the latest, if it is one of the slowest."""
        slow = self._shares["slow"]
        if len(slow.flows) >= SLOW_MAX and kept.flow.seconds <= self._slow_seconds_min:
            return False
        slow.add(kept)
        while len(slow.flows) > SLOW_MAX or slow.bytes > slow.bytes_max:
            fastest = min(slow.flows.values(), key=lambda each: each.flow.seconds)
            slow.remove(fastest)
            if fastest is kept:
                return False
            self._forget(fastest)
        self._slow_seconds_min = min(each.flow.seconds for each in slow.flows.values())
        return True

    def _forget(self, kept: _KeptFlow) -> None:
        del self._flows[kept.flow.id]
        for each in kept.flow.executions:
            if each.outcome is None:
                self._running.pop((each.process, each.execution), None)


class _KeptFlow:
    __slots__ = ("added", "bytes", "flow", "share")

    def __init__(self, flow: RecordedFlow) -> None:
        self.flow = flow
        """The flow up to the last read; callers may still draw an older one."""
        self.added: list[RecordedExecution] = []
        """Executions that have started since."""
        self.bytes = 0
        self.share: _Share | None = None


class _Share:
    """Flows of one kind, in the order of their last events, and the memory for them."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.flows: OrderedDict[str, _KeptFlow] = OrderedDict()

    def add(self, kept: _KeptFlow) -> None:
        kept.share = self
        self.flows[kept.flow.id] = kept
        self.bytes += kept.bytes

    def remove(self, kept: _KeptFlow) -> None:
        kept.share = None
        del self.flows[kept.flow.id]
        self.bytes -= kept.bytes

    def pop_oldest(self) -> _KeptFlow:
        _, kept = self.flows.popitem(last=False)
        kept.share = None
        self.bytes -= kept.bytes
        return kept


def _kind(flow: RecordedFlow) -> str:
    if flow.given_up:
        return "given up"
    if flow.failures:
        return "failed"
    return "ended" if flow.has_ended else "unended"


def _size_of(flow: RecordedFlow) -> int:
    texts = sum(getsizeof(each.message) + getsizeof(each.parent) for each in flow.executions)
    return _FLOW_BYTES + getsizeof(flow.id) + getsizeof(flow.trace) + _EXECUTION_BYTES * len(flow.executions) + texts


def _latest(flows: Iterable[RecordedFlow], limit: int | None = None) -> list[RecordedFlow]:
    if limit is None:
        return sorted(flows, key=lambda flow: flow.started_at, reverse=True)
    return nlargest(limit, flows, key=lambda flow: flow.started_at)
