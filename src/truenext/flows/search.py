"""Search for the flows of one trace in files with events. Only lines that have the trace, and the ends of their
executions, are decoded: a flow among a million events is found in about a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from heapq import nlargest
from pathlib import Path
from typing import NamedTuple

import msgspec

from truenext.flows.event_files import (
    escape_paths,
    incomplete,
    list_files,
    no_events,
    problem_of_start,
    process_of,
    read_start,
    unreadable,
)
from truenext.flows.events import OUTCOMES, STARTED, TRACE_MAX, EventLine, decode_line
from truenext.flows.model import RecordedExecution, RecordedFlow, continue_execution, flows_of, start_execution

FLOWS_MAX = 100
"""Largest number of flows that are found: the latest ones."""
EXECUTIONS_MAX = 100_000
"""Largest number of executions that are found."""
SIMILAR_MAX = 3
"""Largest number of similar traces that are named if there is no flow of a trace."""
BLOCK_BYTES = 1024 * 1024
"""Bytes that are read at once. Some times as many are in memory for a moment."""
_TRACES_MAX = 100_000
"""Largest number of traces that are compared to find similar ones."""
_CANDIDATES_MAX = 200
_SIMILARITY_MIN = 0.6

_EXECUTION = re.compile(rb'"execution": ?(\d+)')
_TRACE = re.compile(rb'"trace": ?("(?:[^"\\]|\\.)*")')


class FoundFlows(NamedTuple):
    flows: list[RecordedFlow]
    """Flows in the order of their starts."""
    omitted: int
    """Number of earlier flows that were found beyond FLOWS_MAX or EXECUTIONS_MAX."""
    problems: list[str]
    """Sentences about folders and files that cannot be read, or not completely."""


def find_flows(folders: Sequence[Path], text: str, executions_max: int | None = None) -> FoundFlows:
    """Return the flows whose trace or id is `text`, and those that their stages have started: their traces begin with
    `text` and `|`. Folders and files that cannot be read are told as problems. With `executions_max` no more executions
    are found, and a flow that has more is cut, which is told as a problem; without it the latest flow is whole."""
    problems: list[str] = []
    search = _Search(text, executions_max)
    for paths in _paths_by_process(folders, problems):
        for path in paths:
            bad_lines = search.bad_lines
            for block in _blocks(path, problems):
                search.scan(block)
            if search.bad_lines > bad_lines:
                problems.append(no_events(path, search.bad_lines - bad_lines))
        search.end_process()
    search.omit_earliest()
    if search.is_cut:
        problems.append(
            f"a flow of this trace has more than {executions_max:,} executions, and later ones are left out"
        )
    return FoundFlows(flows_of(search.executions()), search.omitted, list(map(escape_paths, problems)))


def similar_traces(folders: Sequence[Path], text: str) -> list[str]:
    """Return traces that contain `text` or are similar to it, the most similar first."""
    traces: dict[str, None] = {}
    for paths in _paths_by_process(folders, []):
        for path in paths:
            for block in _blocks(path, []):
                traces.update(dict.fromkeys(_traces_in(block)))
                if len(traces) > _TRACES_MAX:
                    traces = dict.fromkeys(list(traces)[-_TRACES_MAX:])
    folded = text.casefold()
    # A typing error leaves most of the beginning and of the end. The better measure takes a hundred times as long.
    candidates = nlargest(_CANDIDATES_MAX, traces, key=lambda trace: _common_ends(folded, trace.casefold()))
    best = nlargest(SIMILAR_MAX, ((_similarity(folded, trace.casefold()), trace) for trace in candidates))
    return [trace for similarity, trace in best if similarity > _SIMILARITY_MIN]


def _common_ends(text: str, other: str) -> float:
    """Return which part of the longer text both have at their beginnings or ends; more than 1 if one has the other."""
    longer = max(len(text), len(other), 1)
    if text in other:
        return 1 + len(text) / longer
    return (_common_prefix(text, other) + _common_prefix(text[::-1], other[::-1])) / longer


def _common_prefix(text: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    different = (index for index, (one, two) in enumerate(zip(text, other, strict=False)) if one != two)
    return next(different, min(len(text), len(other)))


def _similarity(text: str, other: str) -> float:
    return max(_common_ends(text, other), SequenceMatcher(None, text, other).ratio())


class _Search:
    """Executions of the wanted flows, found block by block."""

    def __init__(self, text: str, executions_max: int | None) -> None:
        self._text = text
        self._executions_max = EXECUTIONS_MAX if executions_max is None else executions_max
        self._cuts = executions_max is not None
        self.is_cut = False
        """True if executions of a flow were left out."""
        self.bad_lines = 0
        """Number of lines that looked like wanted events, and are none."""
        self._trace = text[:TRACE_MAX]
        self._prefix = f"{text}|"[:TRACE_MAX]
        # The text as it is in a line, without the quotation mark at its end.
        self._needle = msgspec.json.encode(self._trace)[:-1]
        self._flows: dict[str, list[RecordedExecution]] = {}
        self._count = 0
        self._omitted_flows: set[str] = set()
        self._running: dict[tuple[str, int], RecordedExecution] = {}

    @property
    def omitted(self) -> int:
        return len(self._omitted_flows)

    def executions(self) -> Iterator[RecordedExecution]:
        for executions in self._flows.values():
            yield from executions

    def scan(self, block: bytes) -> None:
        """Find starts of wanted executions in whole lines, and the later events of those that run."""
        first = 0
        while first < len(block):
            # Between two starts only the ends of running executions matter.
            at = block.find(self._needle, first)
            end = len(block) if at < 0 else block.find(b"\n", at) + 1
            self._continue(block, first, end)
            if at >= 0:
                self._start(block[block.rfind(b"\n", 0, at) + 1 : end])
            first = end

    def end_process(self) -> None:
        """Forget executions that run: no further file has events of their process."""
        self._running.clear()

    def _start(self, line: bytes) -> None:
        """Add the execution that starts in this line, if it is wanted."""
        event = self._decode(line)
        if event is not None and event.kind == STARTED and self._is_wanted(event):
            key = (event.process, event.number)
            # A copy that follows: files were copied into another folder.
            if key not in self._running:
                self._running[key] = execution = start_execution(event)
                self._add(execution)

    def _decode(self, line: bytes) -> EventLine | None:
        event = decode_line(line)
        self.bad_lines += event is None
        return event

    def _is_wanted(self, event: EventLine) -> bool:
        is_found = self._trace == event.trace or self._text == event.flow or event.trace.startswith(self._prefix)
        if not is_found or event.flow in self._omitted_flows:
            return False
        is_full = self._cuts and len(self._flows.get(event.flow, ())) >= self._executions_max
        self.is_cut |= is_full
        return not is_full

    def _add(self, execution: RecordedExecution) -> None:
        self._flows.setdefault(execution.flow, []).append(execution)
        self._count += 1
        if len(self._flows) > 2 * FLOWS_MAX or self._count > self._executions_max:
            self.omit_earliest()

    def omit_earliest(self) -> None:
        """Leave out the earliest flows beyond FLOWS_MAX and the largest number of executions; the latest flow stays."""
        for flow in sorted(self._flows, key=lambda each: self._flows[each][0].started_at)[:-1]:
            if len(self._flows) <= FLOWS_MAX and self._count <= self._executions_max:
                return
            self._omitted_flows.add(flow)
            self._count -= len(self._flows.pop(flow))

    def _continue(self, block: bytes, first: int, end: int) -> None:
        """Add the later events of running executions that are between `first` and `end`."""
        numbers = {number for _, number in self._running}
        if not numbers:
            return
        for match in _EXECUTION.finditer(block, first, end):
            if int(match[1]) not in numbers:
                continue
            event = self._decode(block[block.rfind(b"\n", 0, match.start()) + 1 : block.find(b"\n", match.end())])
            execution = None if event is None else self._running.get((event.process, event.execution))
            if event is None or execution is None:
                continue
            continue_execution(execution, event)
            if event.kind in OUTCOMES:
                del self._running[event.process, event.execution]
                if not self._running:
                    return


def _paths_by_process(folders: Sequence[Path], problems: list[str]) -> Iterator[list[Path]]:
    """Yield the files of each process, in the order in which it has begun them. A file that is in two folders comes
    once."""
    found: dict[str, dict[str, Path]] = {}
    for folder in dict.fromkeys(each.absolute() for each in folders):
        entries, problem = list_files(folder)
        if problem:
            problems.append(problem)
        for entry in entries:
            found.setdefault(process_of(entry.name), {}).setdefault(entry.name, Path(entry.path))
    for _, files in sorted(found.items()):
        yield [path for _, path in sorted(files.items())]


def _blocks(path: Path, problems: list[str]) -> Iterator[bytes]:
    """Yield the lines of a file, in blocks of whole lines."""
    try:
        first = read_start(path)
        if first is None:
            return
        if problem := problem_of_start(path, first):
            problems.append(problem)
            return
        with path.open("rb", buffering=0) as file:
            rest = b""
            while chunk := file.read(BLOCK_BYTES):
                block, newline, after = (rest + chunk).rpartition(b"\n")
                rest = after
                yield block + newline
        if rest:
            problems.append(incomplete(path))
    except FileNotFoundError:
        # Old files may be deleted at any time.
        return
    except OSError as error:
        problems.append(unreadable(path, error))


def _traces_in(block: bytes) -> Iterator[str]:
    for encoded in set(_TRACE.findall(block)):
        try:
            yield msgspec.json.decode(encoded, type=str)
        except msgspec.MsgspecError:
            continue
