"""Pending replies: the calls of `Service.ask` that wait for a reply, and the topic that receives the replies and the
reports of failed flows.

Each process has a topic of its own for replies. A topic stores no messages, so a reply is lost if it comes after its
caller has stopped waiting.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any, TypeVar

import msgspec

from truenext.client.tasks.connection import Connection, Message
from truenext.errors import ClosedError, TruenextError
from truenext.flows.envelope import NotDecoded, decode_envelope
from truenext.stage.core.codec import Codec
from truenext.stage.core.definitions import Endpoint, Topic
from truenext.stage.core.errors import FlowError, FlowFailed
from truenext.stage.core.failure import FAILURE, REPORT, failure_of
from truenext.stage.core.flow_start import check_endpoint

R = TypeVar("R")

_logger = logging.getLogger("truenext.stage")

PAUSE_S = 1.0
"""Seconds until a failed subscription is tried again, while callers wait for replies."""


class PendingReplies:
    def __init__(self, service: str, connection: Connection) -> None:
        self._service = service
        self._name = f"replies.{service}.{secrets.token_hex(8)}"
        self._connection = connection
        self._topics: dict[Endpoint[Any, Any], Topic[Any]] = {}
        """This process's reply topic, for each requested endpoint: the topic's type is the type of that endpoint's
        reply."""
        self._waiting: dict[int, tuple[Codec[Any], asyncio.Future[Any]]] = {}
        """Codec and future of each reply, by the number of the request."""
        self._numbers: dict[str, int] = {}
        """Number of each request, by the id of its flow. A report names the flow, not the number."""
        self._number = 0
        self._task: asyncio.Task[None] | None = None
        self._subscribed: asyncio.Future[None] | None = None

    async def ensure_subscribed(self) -> None:
        """Subscribe to the reply topic, unless the subscription exists. Call this before each request.

        Raises: Refused if the broker refuses the subscription; ClosedError if the connection is closed
        """
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done():
            self._subscribed = loop.create_future()
            self._task = loop.create_task(self._receive_all(), name="truenext replies")
        assert self._subscribed is not None, "the task has begun"
        # Other callers wait for it, too.
        await asyncio.shield(self._subscribed)

    async def _receive_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            assert self._subscribed is not None, "it was made before"
            try:
                consumer = await self._connection.consumer(f"/topic/{self._name}")
                self._subscribed.set_result(None)
                async for message in consumer:
                    self._on_reply(message)
                return
            except (TruenextError, TimeoutError) as error:
                self._subscribing_failed(error)
                if isinstance(error, ClosedError):
                    return
                self._subscribed = loop.create_future()
                _logger.warning(
                    "cannot subscribe to replies, and will try again", extra={"topic": self._name, "error": str(error)}
                )
                if not self._waiting:
                    # The next request subscribes again.
                    return
                await asyncio.sleep(PAUSE_S)

    def _subscribing_failed(self, error: Exception) -> None:
        """Raise `error` in each caller that waits for the subscription. Does nothing if the subscription had
        succeeded."""
        if self._subscribed is not None and not self._subscribed.done():
            self._subscribed.set_exception(error)
            # Marks the error as retrieved, since there may be no caller.
            self._subscribed.exception()

    def expect_reply(self, to: Endpoint[Any, R]) -> tuple[Topic[R], int, asyncio.Future[R]]:
        """Register a request. Return the reply topic, the number of the request, and the future of the reply. The
        request carries the number as `reply_state`, so that the reply has the number, too. Call `forget_reply` in the
        end.

        Raises: FlowError if the endpoint does not reply
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

    def expect_report(self, number: int, flow_id: str) -> None:
        """Let a report that the flow has failed end the request with FlowFailed. Call this before the request is
        sent."""
        self._numbers[flow_id] = number

    def forget_reply(self, number: int, flow_id: str) -> None:
        del self._waiting[number]
        self._numbers.pop(flow_id, None)

    def _on_report(self, message: Message) -> None:
        _, future = self._waiting.get(self._numbers.get(message.correlation_id, 0), (None, None))
        if future is None or future.done():
            _logger.info("a report came after its request had ended", extra={"flow_id": message.correlation_id})
            return
        future.set_exception(FlowFailed(*msgspec.structs.astuple(failure_of(message.headers))))

    def _on_reply(self, message: Message) -> None:
        if message.headers.get(FAILURE) == REPORT:
            self._on_report(message)
            return
        try:
            envelope = decode_envelope(message.body)
            number = msgspec.json.decode(envelope.state, type=int)
        except (NotDecoded, msgspec.MsgspecError) as error:
            facts = {"topic": self._name, "message_id": message.message_id, "error": str(error)}
            _logger.warning("message on the reply topic is not a reply", extra=facts)
            return
        codec, future = self._waiting.get(number, (None, None))
        if codec is None or future is None or future.done():
            _logger.info("a reply came after its request had ended", extra={"trace": envelope.flow.trace})
            return
        try:
            future.set_result(codec.decode(envelope.message))
        except NotDecoded as error:
            future.set_exception(error)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._subscribing_failed(ClosedError(f"service {self._service} was stopped"))
