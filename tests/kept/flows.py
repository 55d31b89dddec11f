"""Flows of service.py, in a process of one version.

python -m tests.kept.flows initiate DATABASE URL     leaves a flow in the outbox
python -m tests.kept.flows run DATABASE URL          runs the stages until a flow has ended
"""

import asyncio
import os
import sys
from tempfile import mkdtemp
from uuid import uuid4

from sqlalchemy import create_engine
from sqlalchemy.orm import Session


def main(action: str, database: str, url: str) -> None:
    os.environ.setdefault("TRUENEXT_KEPT", mkdtemp())
    os.environ["TRUENEXT_KEPT_DATABASE"] = database
    os.environ["TRUENEXT_KEPT_BROKER"] = url
    from tests.kept import service

    if action == "initiate":
        engine = create_engine(database)
        with Session(engine) as session, session.begin(), service.app.initiate(session, key=uuid4().hex) as initiation:
            initiation.send(service.place, "an order", trace="kept")
        engine.dispose()
        return
    asyncio.run(asyncio.wait_for(run(service), 60))


async def run(service: object) -> None:
    async with service.app.running():  # type: ignore[attr-defined]
        await service.shipped.wait()  # type: ignore[attr-defined]
    print("an order was shipped", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
