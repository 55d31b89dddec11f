"""Service whose database, events and interface are kept. The environment says where they are."""

import asyncio
import os

from sqlalchemy.ext.asyncio import AsyncSession

from truenext.stage import Flow, Service

FOLDER = os.environ.get("TRUENEXT_KEPT", ".")

app = Service(
    "kept",
    broker=os.environ.get("TRUENEXT_KEPT_BROKER") or "stomp://127.0.0.1:61613",
    database=os.environ.get("TRUENEXT_KEPT_DATABASE", f"sqlite:///{FOLDER}/service.db"),
    exactly_once=True,
    events=f"{FOLDER}/stages",
)
shipped = asyncio.Event()


@app.terminator("kept.ship", str)
async def ship(order: str) -> None:
    shipped.set()


@app.terminator("kept.place", str)
async def place(order: str, flow: Flow, sql: AsyncSession) -> None:
    flow.send(ship, order)
