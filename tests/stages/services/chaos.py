"""A flow through stages of all three demarcations. Its tables have no keys: an effect that happens twice leaves two
rows.

order.place   exactly once, inserts into placed
order.note    best-effort 1PC, inserts into noted: twice, if a process or the broker dies in the commit gap
order.pass    messaging alone
order.ship    exactly once, inserts into shipped, and sends to the queue `told`, which has no consumer
"""

import os

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from tests.stages.services.job import Job
from truenext.stage import Flow, Service

app = Service("chaos", database=os.environ["CHAOS_DATABASE"], exactly_once=True, concurrency=4)
told = app.remote("told", Job)


@app.terminator("order.ship", Job)
def ship(job: Job, flow: Flow, sql: Session) -> None:
    sql.execute(text("INSERT INTO shipped VALUES (:number)"), {"number": job.number})
    flow.send(told, job)


@app.terminator("order.pass", Job, exactly_once=False)
async def hand_on(job: Job, flow: Flow) -> None:
    flow.send(ship, job)


@app.terminator("order.note", Job, exactly_once=False)
async def note(job: Job, flow: Flow, sql: AsyncSession) -> None:
    await sql.execute(text("INSERT INTO noted VALUES (:number)"), {"number": job.number})
    flow.send(hand_on, job)


@app.terminator("order.place", Job)
async def place(job: Job, flow: Flow, sql: AsyncSession) -> None:
    await sql.execute(text("INSERT INTO placed VALUES (:number)"), {"number": job.number})
    flow.send(note, job)
