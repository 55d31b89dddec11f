"""Service whose database, events and interface are kept. `FOLDER` is where it has them."""

import os
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from truenext.stage import Flow, Service

FOLDER = Path(os.environ.get("TRUENEXT_KEPT", "."))

app = Service("kept", database=f"sqlite:///{FOLDER}/service.db", exactly_once=True, events=FOLDER / "stages")


@app.terminator("kept.ship", str)
async def ship(order: str) -> None:
    pass


@app.terminator("kept.place", str)
async def place(order: str, flow: Flow, sql: AsyncSession) -> None:
    flow.send(ship, order)
