"""Plugin of pytest: runs tests in several processes that are forked when all tests are collected.

    python -m pytest -p tests.forked_workers --workers 6 tests

Each process of pytest-xdist collects all tests for itself: 15,000 of them take 6 s of processor time, and 16 s if they
are not compiled. Here they are collected once, and another process costs nothing.

The tests of a file run in one process, one after the other, so that fixtures of a module are made once. A process gets
the next file in the order of collection; when no file is left, it gets the last half of the file with the most tests
left. So name folders whose tests wait for disks and clocks before those whose tests compute: these use the processors
to the end.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

AHEAD = 2
"""Number of tests that a process has at once: it runs one, and sets up and tears down fixtures for the next one."""

SHARED_MIN = 4
"""Smallest number of tests of which another process gets half: it makes fixtures of the module once more."""

INTERRUPTED_S = 10.0
"""Seconds in which the processes may tear down fixtures after Ctrl-C."""

_context = get_context("fork")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="number of processes that run the collected tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.option.workers
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    # All of them make their folders in it.
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    _Pool(session, count).run()
    return True


# ---- The process that has collected the tests ----


class _Worker:
    """Process that runs tests, as seen by the one that has collected them."""

    def __init__(self, session: pytest.Session, number: int, others: Sequence[_Worker]) -> None:
        self.left: deque[int] = deque()
        """Tests of its file that it has not got yet."""
        self.given: deque[int] = deque()
        """Tests that it has got and not ended."""
        self.is_told_the_end = False
        self.connection, theirs = _context.Pipe()
        # It sees the end of this process only if it has no copies of this process's ends.
        not_its_own = [self.connection, *(each.connection for each in others)]
        self.process = _context.Process(target=_work, args=(session, number, theirs, not_its_own))
        self.process.start()
        theirs.close()

    def send(self, test: int | None) -> None:
        # The end of a process is handled when its connection has been read to its end.
        with suppress(OSError):
            self.connection.send(test)


class _Pool:
    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session = session
        files: dict[object, deque[int]] = {}
        for index, item in enumerate(session.items):
            files.setdefault(item.path, deque()).append(index)
        self._files = deque(files.values())
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()
        for _ in range(min(count, len(session.items))):
            self._start()

    def _start(self) -> _Worker:
        worker = _Worker(self._session, next(self._numbers), self._workers)
        self._workers.append(worker)
        return worker

    def run(self) -> None:
        """Raises: Session.Failed or Session.Interrupted if the run is to end early"""
        try:
            for worker in self._workers:
                self._give(worker)
            while self._workers:
                ready = wait([worker.connection for worker in self._workers])
                for worker in [each for each in self._workers if each.connection in ready]:
                    self._read(worker)
        finally:
            # After Ctrl-C: they got it, too.
            for worker in self._workers:
                worker.process.join(INTERRUPTED_S)
                worker.process.kill()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _end_early(self) -> None:
        """Let each process end after the tests that it has got, so that fixtures are torn down."""
        self._files.clear()
        for worker in self._workers:
            worker.left.clear()

    def _read(self, worker: _Worker) -> None:
        try:
            report = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._on_ended(worker)
            return
        if report is not None:
            self._report(report)
            return
        worker.given.popleft()
        self._give(worker)

    def _give(self, worker: _Worker) -> None:
        """Give the process its next tests, and None after the last one."""
        while len(worker.given) < AHEAD and not worker.is_told_the_end:
            worker.left = worker.left or self._next_tests()
            if not worker.left:
                worker.is_told_the_end = True
                worker.send(None)
                return
            worker.given.append(worker.left.popleft())
            worker.send(worker.given[-1])

    def _next_tests(self) -> deque[int]:
        if self._files:
            return self._files.popleft()
        left = max((each.left for each in self._workers), key=len)
        count = len(left) // 2 if len(left) >= SHARED_MIN else 0
        return deque(reversed([left.pop() for _ in range(count)]))

    def _report(self, serialized: dict[str, object]) -> None:
        hook = self._session.config.hook
        report = hook.pytest_report_from_serializable(config=self._session.config, data=serialized)
        hook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail or self._session.shouldstop:
            self._end_early()

    def _on_ended(self, worker: _Worker) -> None:
        """Report the test that has ended its process, if one has, and let another process run the others."""
        self._workers.remove(worker)
        worker.connection.close()
        worker.process.join()
        if not worker.given:
            return
        item = self._session.items[worker.given.popleft()]
        reason = f"the process of the test has ended with status {worker.process.exitcode}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
        item.ihook.pytest_runtest_logreport(report=report)
        self._files.appendleft(worker.given + worker.left)
        self._give(self._start())


# ---- A process that runs tests ----


class _Reporter:
    """Plugin that sends reports, and None at the end of each test."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._connection.send(hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self) -> None:
        self._connection.send(None)


def _work(session: pytest.Session, number: int, connection: Connection, not_its_own: Sequence[Connection]) -> None:
    for each in not_its_own:
        each.close()
    config, plugins = session.config, session.config.pluginmanager
    # Fixtures ask for it, as they do with pytest-xdist: the folder of the run is the one above.
    config.workerinput = {"workerid": f"w{number}"}  # type: ignore[attr-defined]
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"w{number}"
    factory._basetemp.mkdir()
    # Each process would draw the same.
    random.seed()
    reporter, capture = plugins.getplugin("terminalreporter"), plugins.getplugin("capturemanager")
    assert reporter is not None and capture is not None
    reporter._tw._file = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the process lives
    plugins.register(_Reporter(config, connection))
    # The files that have the captured output are the parent's, and so are their positions.
    capture.stop_global_capturing()
    capture.start_global_capturing()
    try:
        _run(session, connection)
    finally:
        session._setupstate.teardown_exact(None)
        capture.suspend_global_capture()


def _run(session: pytest.Session, connection: Connection) -> None:
    numbers = _received(connection)
    number = next(numbers, None)
    while number is not None:
        following = next(numbers, None)
        item = session.items[number]
        after = None if following is None else session.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        number = following


def _received(connection: Connection) -> Iterator[int]:
    """Yield the numbers of tests, until None comes or the parent has ended."""
    with suppress(EOFError, KeyboardInterrupt):
        while (number := connection.recv()) is not None:
            yield number
