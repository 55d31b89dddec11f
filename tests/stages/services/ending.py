"""A service with a message that ends its process, by `sys.exit` in a task that is not awaited."""

import asyncio
import sys

from tests.stages.services.job import Job
from truenext.stage import Service

app = Service("ending", attempts=2)
remaining: set[asyncio.Task[None]] = set()


@app.terminator("ending.work", Job)
async def work(job: Job) -> None:
    async def end() -> None:
        sys.exit(0)

    remaining.add(asyncio.create_task(end()))
    await asyncio.sleep(3600)
