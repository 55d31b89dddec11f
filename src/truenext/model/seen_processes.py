"""Processes of stages that a requester has seen: their latest reports, and which of them are silent.

A requester calls `request_sent` for each request, and `add_report` for each answer. A process is **silent** if it has
not answered a request for SILENT_AFTER_S seconds. A process that stops in order says so in its last report, and is not
silent. All times are seconds of one clock of the requester that never goes back.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from truenext.model.process_report import REPORT_BYTES_MAX, ProcessReport
from truenext.model.service_graph import ServiceGraph

SILENT_AFTER_S = 10.0
"""Seconds that a process has to answer a request before it counts as silent."""
ENDED_KEPT_S = 60.0
"""Seconds for which a process that has stopped in order is kept."""
SILENT_KEPT_S = 3600.0
"""Seconds for which a silent process is kept after its last report."""
PROCESSES_MAX = 2_000
"""Largest number of processes that are kept. A further one replaces the silent or ended one that was seen longest ago,
or is left out."""
GRAPHS_MAX = 100
BYTES_MAX = 8 * 1024 * 1024
"""Largest number of bytes of all reports that are kept, as they came."""

ProcessState = Literal["answers", "silent", "ended"]

_decode = msgspec.json.Decoder(ProcessReport).decode


class SeenProcess(msgspec.Struct, frozen=True):
    """Process that has answered at least once."""

    report: ProcessReport
    """Latest report of the process."""
    state: ProcessState
    """`answers`, `silent`, or `ended` if the process has stopped in order."""
    seen_s: float
    """Seconds since the latest report came."""


class _Seen(msgspec.Struct, eq=False):
    report: ProcessReport
    size: int
    seen_at: float
    unanswered_since: float | None = None
    """Time of the first request after the latest report; None if there is none."""
    was_silent: bool = False
    """True once the process was shown as silent. It stays so until its next report."""

    def answers(self, now: float) -> bool:
        return self.judge(now) == "answers"

    def judge(self, now: float) -> ProcessState:
        """Return the state of the process, and note if it is silent."""
        if self.report.has_ended:
            return "ended"
        since = self.unanswered_since
        self.was_silent |= since is not None and now - since >= SILENT_AFTER_S
        return "silent" if self.was_silent else "answers"


class SeenProcesses:
    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        """Processes by the ids of their runs, the one that was seen longest ago first."""
        self._size = 0
        self._graphs: dict[str, ServiceGraph] = {}
        """Graph of each service, which the reports of its processes share; at most GRAPHS_MAX."""
        self.ignored_count = 0
        """Number of answers that were no reports, or for which there was no space."""

    def request_sent(self, now: float) -> None:
        """Note that a request was sent to all processes."""
        for each in self._seen.values():
            if each.unanswered_since is None:
                each.unanswered_since = now

    def connection_lost(self) -> None:
        """Note that the connection was lost, so that no answer can come to earlier requests. A process that was shown
        as silent stays silent."""
        for each in self._seen.values():
            each.unanswered_since = None

    def add_report(self, body: bytes, now: float) -> bool:
        """Add an answer. Return False if it is no report, or there is no space for it."""
        if len(body) > REPORT_BYTES_MAX:
            self.ignored_count += 1
            return False
        try:
            report = _decode(body)
        except (msgspec.MsgspecError, RecursionError):
            self.ignored_count += 1
            return False
        report = self._with_shared_graph(report)
        self._remove(report.run)
        if not self._make_space(len(body), now):
            self.ignored_count += 1
            return False
        self._seen[report.run] = _Seen(report, len(body), now)
        self._size += len(body)
        return True

    def dismiss(self, run: str, now: float) -> bool:
        """Forget a silent or ended process, until it answers. Return False if there is none."""
        each = self._seen.get(run)
        if each is None or each.answers(now):
            return False
        self._remove(run)
        return True

    def processes(self, now: float) -> list[SeenProcess]:
        """Return all processes, sorted by service, instance and run, without those that have been silent or ended for
        long."""
        for run in [run for run, each in self._seen.items() if self._is_outdated(each, now)]:
            self._remove(run)
        found = [SeenProcess(each.report, each.judge(now), now - each.seen_at) for each in self._seen.values()]
        return sorted(found, key=lambda each: (each.report.service, each.report.instance, each.report.run))

    def _with_shared_graph(self, report: ProcessReport) -> ProcessReport:
        graph = self._graphs.get(report.service)
        if report.graph is None:
            return report
        if graph == report.graph:
            return replace(report, graph=graph)
        if len(self._graphs) >= GRAPHS_MAX:
            self._graphs.clear()
        self._graphs[report.service] = report.graph
        return report

    def _is_outdated(self, each: _Seen, now: float) -> bool:
        state, seen_s = each.judge(now), now - each.seen_at
        return (state == "ended" and seen_s > ENDED_KEPT_S) or (state == "silent" and seen_s > SILENT_KEPT_S)

    def _make_space(self, size: int, now: float) -> bool:
        """Return whether there is space for one more report, after removing processes that do not answer."""
        while len(self._seen) >= PROCESSES_MAX or self._size + size > BYTES_MAX:
            run = next((run for run, each in self._seen.items() if not each.answers(now)), None)
            if run is None:
                return False
            self._remove(run)
        return True

    def _remove(self, run: str) -> None:
        removed = self._seen.pop(run, None)
        if removed is not None:
            self._size -= removed.size
