"""Who waits for which reply: `Service.ask`, the end of a flow in the program that began it.

Replies come to a topic that this process alone subscribes to. Nothing waits in a topic, so a reply for which nobody
waits any more is gone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from truenext.stage.core.beginning import check_endpoint
from truenext.stage.core.definitions import Topic
from truenext.stage.core.envelope import decode
from truenext.stage.core.errors import FlowError, NotDecoded

if TYPE_CHECKING:
    from truenext.client.tasks.connection import Connection, Message
    from truenext.stage.core.codec import Codec
    from truenext.stage.core.definitions import Endpoint

R = TypeVar("R")

_logger = logging.getLogger("truenext.stage")


class Asking:
    def __init__(self, service: str) -> None:
        self._name = f"replies.{service}.{secrets.token_hex(8)}"
        self._topics: dict[Endpoint[Any, Any], Topic[Any]] = {}
        """By who is asked."""
        self._waiting: dict[int, tuple[Codec[Any], asyncio.Future[Any]]] = {}
        self._number = 0
        self._task: asyncio.Task[None] | None = None
        self._subscribing = asyncio.Lock()

    async def subscribe(self, connection: Connection) -> None:
        """Before the first question. Raises: Refused, TimeoutError"""
        async with self._subscribing:
            if self._task is None:
                consumer = await connection.consumer(f"/topic/{self._name}")

                async def take() -> None:
                    async for message in consumer:
                        self._take(message)

                self._task = asyncio.get_running_loop().create_task(take(), name="truenext replies")

    def question(self, to: Endpoint[Any, R]) -> tuple[Topic[R], int, asyncio.Future[R]]:
        """Where the reply goes, what it must bring along as its state, and what it is put into; to be forgotten.

        Raises: FlowError if nothing is replied
        """
        check_endpoint(to)
        if to.replies is None:
            raise FlowError(f"{to.name} replies nothing: send to it instead")
        topic = self._topics.get(to)
        if topic is None:
            topic = self._topics[to] = Topic(self._name, to.replies.type)
        self._number += 1
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = topic.takes, future
        return topic, self._number, future

    def forget(self, number: int) -> None:
        del self._waiting[number]

    def _take(self, message: Message) -> None:
        try:
            envelope = decode(message.body)
            number = msgspec.json.decode(envelope.state, type=int)
        except (NotDecoded, msgspec.MsgspecError) as error:
            _logger.warning("what came as a reply is none", extra={"error": str(error)})
            return
        codec, future = self._waiting.get(number, (None, None))
        if codec is None or future is None or future.done():
            _logger.info("a reply has come too late", extra={"trace": envelope.flow.trace})
            return
        try:
            future.set_result(codec.decode(envelope.message))
        except NotDecoded as error:
            future.set_exception(error)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
