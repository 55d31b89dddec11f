"""A service with a message that kills its process."""

import asyncio
import os
import signal

import msgspec

from truenext.stage import Flow, Service


class Job(msgspec.Struct):
    number: int
    kills: bool = False


class Done(msgspec.Struct):
    number: int


ATTEMPTS = int(os.environ.get("TRUENEXT_KILLS", "3"))
"""Processes that one message kills; the policy of the queue allows 7 attempts."""
app = Service("killing", concurrency=10, attempts=ATTEMPTS)
done = app.remote("killing.done", Done)


@app.terminator("killing.work", Job)
async def work(job: Job, flow: Flow) -> None:
    await asyncio.sleep(0.005)
    if job.kills:
        os.kill(os.getpid(), signal.SIGKILL)
    flow.send(done, Done(job.number))
