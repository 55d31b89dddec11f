"""A service some of whose messages never succeed. It notes each run in a file."""

import os

from tests.stages.services.job import Job
from truenext.stage import Flow, Service

EACH = 20
"""Every message whose number is a multiple of this is poison."""
app = Service("poisoned", retry={ValueError: "10ms"}, attempts=3)
done = app.remote("poisoned.done", Job)


@app.terminator("poisoned.work", Job)
async def work(job: Job, flow: Flow) -> None:
    file = os.open(os.environ["RUNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b"%d\n" % job.number)
    os.close(file)
    if job.number % EACH == 0:
        raise ValueError("poison")
    flow.send(done, job)
