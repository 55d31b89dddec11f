"""Worker processes of the load generator: start, common release and end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Any, NamedTuple

_CONTEXT = multiprocessing.get_context("spawn")

_PREPARATION = 120.0
_PROGRESS = 0.5

# Progress of the consumer: a bare shared integer, since one process writes it and one reads it.
Counter = Any


class Timing(NamedTuple):
    """Clock readings (``time.monotonic``, the same clock in every process) and processor seconds of one worker."""

    started: float
    ended: float
    processor: float = 0.0
    latency: tuple[float, float] | None = None
    """Seconds from a SEND to its receipt, median and 99th percentile; None if producers do not wait for each."""


class WorkerError(RuntimeError):
    """A worker failed or stopped answering."""


class Gate:
    """Worker's end of its pipe to the bench: it reports that it is ready, and waits for the start."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def announce(self, port: int) -> None:
        self._pipe.send(("port", port))

    def ready(self) -> None:
        self._pipe.send(("ready", None))
        self._pipe.recv()


Job = Callable[..., object]


def _main(job: Job, pipe: Connection, *args: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the bench's to handle; it ends its workers itself
    gc.disable()  # nothing here makes cycles, and a collection over a million objects would show in the figures
    try:
        pipe.send(("done", job(Gate(pipe), *args)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc(limit=4)))


class Worker:
    """Process that does one job."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe

    def await_port(self) -> int:
        return int(self._receive("port", _PREPARATION))

    def await_ready(self) -> None:
        self._receive("ready", _PREPARATION)

    def start(self) -> None:
        self.pipe.send("go")

    def receive_result(self) -> Any:
        """Return the result of the job."""
        return self._receive("done", 0.0)

    def _receive(self, expected: str, seconds: float) -> Any:
        if not self.pipe.poll(seconds):
            raise WorkerError(f"{self.process.name} did not answer in {seconds:.0f} s")
        try:
            kind, value = self.pipe.recv()
        except EOFError as end:
            raise WorkerError(f"{self.process.name} died") from end
        if kind != expected:
            raise WorkerError(f"{self.process.name}: {value}")
        return value


class Crew:
    """Workers of one run; none of them outlives the ``with`` block."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for worker in self._workers:
            if kind is not None:
                worker.process.kill()
            worker.process.join(10)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()

    def hire(self, job: Job, *args: object) -> Worker:
        parent_end, child_end = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_main, args=(job, child_end, *args), name=job.__name__, daemon=True)
        worker = Worker(process, parent_end)
        process.start()
        self._workers.append(worker)
        child_end.close()
        return worker

    def finish(self, seconds: float, progress: Callable[[], None] | None = None) -> list[Any]:
        """Return the results of the jobs, in the order in which they were hired; the first failure ends the wait.

        `progress` is called about twice a second meanwhile.
        """
        deadline = time.monotonic() + seconds
        results: dict[int, Any] = {}
        while len(results) < len(self._workers):
            open_pipes = [worker.pipe for index, worker in enumerate(self._workers) if index not in results]
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise WorkerError(f"no result in {seconds:.0f} s")
            answered = wait(open_pipes, remaining if progress is None else min(remaining, _PROGRESS))
            if progress is not None:
                progress()
            for index, worker in enumerate(self._workers):
                if worker.pipe in answered:
                    results[index] = worker.receive_result()
        return [results[index] for index in sorted(results)]


def end_in_order() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that no broker and no worker stays behind."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def counter() -> Counter:
    return _CONTEXT.RawValue("q", 0)


def processor_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system
