"""Client and broker of truenext in the process of a test."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from truenext import testing
from truenext.client.tasks.connection import Connection, connect
from truenext.testing.local import LocalBroker

Work = Callable[[LocalBroker, Connection], Awaitable[None]]


def on_a_connection(work: Work, *, heart_beat: float = 10.0, waiting: Sequence[str] = ()) -> None:
    """Run `work` with a broker and a connection; `waiting` are the bodies that the queue "q" has at first."""

    async def main() -> None:
        async with testing.broker() as broker, connect(broker.url, heart_beat=heart_beat) as connection:
            if waiting:
                await connection.send_many("/queue/q", list(waiting))
            await work(broker, connection)

    asyncio.run(asyncio.wait_for(main(), 30))


async def remaining(broker: LocalBroker, queue: str = "q") -> list[tuple[str, int]]:
    """Return bodies and attempts of the waiting messages; no consumer may hold one."""
    contents = await broker.queue(queue)
    assert contents.unacknowledged == 0
    return [(each.body.decode(), int(each.headers["truenext-attempts"])) for each in contents.messages]
