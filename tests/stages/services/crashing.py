"""A service of which one part dies at a named point of one message's way, once.

CRASH_AT        the point; those of the relay are named in RELAY
CRASH_FILE      created just before, so that nothing dies a second time
CRASH_PID       the process to be killed; without it this process
CRASH_DATABASE  the URL; without it the stage uses no SQL
CRASH_ONCE      the service is exactly-once
CRASH_ATTEMPTS  number of attempts of a message
CRASH_STANDS    the process does not die, but is stopped until it is continued
"""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from tests.stages.services.job import Job
from truenext.stage import Flow, Service, context
from truenext.stage.core.definitions import Stage
from truenext.stage.outbox.relay import OutboxRelay
from truenext.stage.sql.outbox_table import Outbox

database = os.environ.get("CRASH_DATABASE")
app = Service(
    "crashing",
    database=database,
    concurrency=1,
    attempts=int(os.environ.get("CRASH_ATTEMPTS", "7")),
    exactly_once="CRASH_ONCE" in os.environ,
)
done = app.remote("crashing.done", Job)

if database is None:

    @app.terminator("crashing.work", Job)
    async def work(job: Job, flow: Flow) -> None:
        flow.send(done, job)

else:

    @app.terminator("crashing.work", Job)
    async def work(job: Job, flow: Flow, sql: AsyncSession) -> None:
        await sql.execute(text("INSERT INTO runs VALUES (:number)"), {"number": job.number})
        flow.send(done, job)


RELAY: dict[str, tuple[Any, str]] = {
    "numbered": (Outbox, "number_units"),
    "sent": (OutboxRelay, "_send_unit"),
    "deleted": (Outbox, "confirm_rows"),
}
"""Points after each step of the relay: initiations are numbered, sent, and deleted."""


def _reach(point: str, stage: Stage | None = None) -> None:
    happened = Path(os.environ["CRASH_FILE"])
    if point != os.environ["CRASH_AT"] or happened.exists():
        return
    happened.touch()
    victim = int(os.environ.get("CRASH_PID", "0")) or os.getpid()
    # A database is several processes, of which each could still answer.
    for pid in (victim, *_children(victim)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if "CRASH_STANDS" in os.environ else signal.SIGKILL)
    time.sleep(0.05)


def _children(pid: int) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(file.parent.name))
    return found


def _reaching(point: str, step: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(step)
    async def reaching(*arguments: Any) -> Any:
        found = await step(*arguments)
        # What finds nothing to do has come to no point.
        if found != []:
            _reach(point)
        return found

    return reaching


context._do_nothing = _reach
for point, (owner, name) in RELAY.items():
    setattr(owner, name, _reaching(f"relay {point}", getattr(owner, name)))
