"""Messages of a flow by truenext's client alone: three times `consume`, whose handlers send what the stages send."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bench.client.work import Done, Stopwatch
from bench.flows.shop import messages
from bench.flows.work import CONCURRENCY, Ended, Order, run
from bench.workers import Gate
from truenext import Message, Session, connect
from truenext.flows.envelope import CONTENT_TYPE
from truenext.stage.core.output import OutputMessage

Handler = Callable[[Message, Session], Awaitable[None]]


def relay(gate: Gate, order: Order) -> Done:
    """Send from queue to queue until the last flow has ended and all is confirmed."""

    async def program() -> Done:
        watch, ended = Stopwatch(gate), Ended(order.flows)
        sent = await messages(order.name)
        async with connect(f"stomp://127.0.0.1:{order.port}") as connection:
            watch.start()
            handlers = [*map(_sending, sent[1:]), _ending(ended)]
            consuming = [
                asyncio.ensure_future(
                    connection.consume(each.destination, handler, transacted=True, concurrency=CONCURRENCY)
                )
                for each, handler in zip(sent, handlers, strict=True)
            ]
            await ended.wait()
            for each in consuming:
                each.cancel()
            await asyncio.wait(consuming)
        return watch.stop()

    return run(program())


def _sending(outgoing: OutputMessage) -> Handler:
    message = outgoing.encode({})

    async def handle(_: Message, session: Session) -> None:
        await session.send(
            message.destination,
            message.body,
            priority=message.priority,
            persistent=True,
            content_type=CONTENT_TYPE,
            correlation_id=message.id,
        )

    return handle


def _ending(ended: Ended) -> Handler:
    async def handle(message: Message, session: Session) -> None:
        ended.one()

    return handle
