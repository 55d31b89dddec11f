"""A service whose flows fail in the innermost of three endpoints, and are handled there or further out, or not.

    failing.outer ── requests ── failing.middle ── requests ── failing.leaf

The `on_failure` of `failing.middle` handles flows of the kind "middle", that of `failing.outer` those of the kind
"outer". Each reply says where the flow has been. With a database, `failing.tick` writes a row for each occurrence of a
cron flow.
"""

import asyncio
import os
import signal
import time
from typing import Literal

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from truenext.stage import Failure, Flow, Reject, Service

Kind = Literal["ok", "middle", "outer", "none", "kills"]
KINDS: tuple[Kind, ...] = ("ok", "middle", "outer", "none")
LEAF = "failing.leaf"


class Job(msgspec.Struct):
    number: int
    kind: Kind
    due: float = 0.0
    """Time in seconds since 1970 before which the flow must not begin."""
    delay: float = 0.0
    """Seconds from the start of the flow before which its first stage must not run."""


class Ended(msgspec.Struct):
    number: int
    path: list[str]


class Memo(msgspec.Struct):
    number: int = -1
    kind: Kind = "ok"
    place: str = ""


DATABASE = os.environ.get("FAILING_DATABASE")
"""Database in which the service keeps replies; None without exactly-once processing."""
app = Service("failing", concurrency=10, database=DATABASE, exactly_once=DATABASE is not None)
outer = app.endpoint("failing.outer", Job, Ended, state=Memo)
middle = app.endpoint("failing.middle", Job, Ended, state=Memo)


@app.single(LEAF, Job, Ended, attempts=int(os.environ.get("LEAF_ATTEMPTS", "7")))
async def leaf(job: Job, flow: Flow) -> Ended:
    await asyncio.sleep(0.005)
    if job.kind == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    if job.kind != "ok":
        raise Reject(f"number {job.number}")
    return Ended(job.number, ["leaf"])


def begin(job: Job, memo: Memo, place: str) -> None:
    memo.number, memo.kind, memo.place = job.number, job.kind, place


def handle(failure: Failure, memo: Memo, flow: Flow, place: str) -> None:
    """Continue with the next stage, or fail, too. A state or a failure of another flow or place is seen in the path."""
    if memo.kind != place:
        raise Reject(f"not by {place}")
    is_its_own = failure.stage == LEAF and f"number {memo.number}\n" in failure.first_cause
    flow.next(Ended(memo.number, [f"{memo.place} handled" if is_its_own else f"{memo.place} handled another failure"]))


@outer.stage
async def begin_outer(job: Job, memo: Memo, flow: Flow) -> None:
    due = max(job.due, flow._envelope.flow.started_ms / 1000 + job.delay)
    begin(job, memo, "outer" if time.time() >= due else "outer too early")
    flow.request(middle, job)


@outer.stage
async def end_outer(ended: Ended, memo: Memo) -> Ended:
    return Ended(memo.number, [*ended.path, memo.place])


@outer.on_failure
async def outer_failed(failure: Failure, memo: Memo, flow: Flow) -> None:
    handle(failure, memo, flow, "outer")


@middle.stage
async def begin_middle(job: Job, memo: Memo, flow: Flow) -> None:
    begin(job, memo, "middle")
    flow.request(leaf, job)


@middle.stage
async def end_middle(ended: Ended, memo: Memo) -> Ended:
    return Ended(ended.number, [*ended.path, memo.place])


@middle.on_failure
async def middle_failed(failure: Failure, memo: Memo, flow: Flow) -> None:
    handle(failure, memo, flow, "middle")


class Tick(msgspec.Struct):
    pass


if DATABASE is not None:

    @app.terminator("failing.tick", Tick)
    async def tick(tick: Tick, flow: Flow, sql: AsyncSession) -> None:
        await sql.execute(text("INSERT INTO ticks VALUES (:id)"), {"id": flow.message_id})

    app.cron("tick", os.environ.get("FAILING_CRON", "* * * * *"), tick, Tick())
