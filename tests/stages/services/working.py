"""A service with slow stages, and one stage that never ends; it prints its progress to standard output."""

import asyncio
import contextlib
import threading
import time

from tests.stages.services.job import Job
from truenext.stage import Flow, Service
from truenext.stage.interceptors.metrics import Metrics

app = Service("work", concurrency=2, interceptors=[Metrics()])


def print_line(what: str, job: Job, flow: Flow) -> None:
    # Not flushed: `truenext stages run` writes each line when it is printed.
    print(f"{what} {job.number} {flow.attempt}")


slow = app.endpoint("work.slow", Job)


@slow.stage
async def sleep(job: Job, flow: Flow) -> None:
    print_line("begun", job, flow)
    await asyncio.sleep(1)
    print_line("slept", job, flow)
    flow.next(job)


@slow.stage
async def finish(job: Job, flow: Flow) -> None:
    print_line("done", job, flow)


@app.terminator("work.never", Job)
def never(job: Job, flow: Flow) -> None:
    print_line("begun", job, flow)
    threading.Event().wait()


@app.terminator("work.stubborn", Job)
async def stubborn(job: Job, flow: Flow) -> None:
    print_line("begun", job, flow)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)


@app.terminator("work.blocking", Job)
async def blocking(job: Job, flow: Flow) -> None:
    print_line("begun", job, flow)
    time.sleep(1000)
