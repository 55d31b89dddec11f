"""Kept replies: callers that wait for the reply or failure of a flow that was started under a key.

The database has the reply, so any process may ask for it, any number of times. A topic announces each new row. A caller
also reads its row once a second, since a message of the topic may be lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from truenext.errors import ClosedError, TruenextError
from truenext.flows.envelope import NotDecoded, decode_envelope
from truenext.stage.core.definitions import Endpoint
from truenext.stage.core.errors import FlowError, FlowFailed
from truenext.stage.core.failure import Failure
from truenext.stage.core.names import kept_topic
from truenext.stage.sql.errors import OutboxBusy

if TYPE_CHECKING:
    from truenext.client.tasks.connection import Connection, Message
    from truenext.stage.sql.reply_table import KeptReply, ReplyStore

_logger = logging.getLogger("truenext.stage")

POLL_S = 1.0
"""Seconds after which a waiting caller reads its row again."""
RETRY_S = 5.0
"""Seconds until a failed subscription is tried again."""
BUSY_MAX = 5
"""Largest number of tries of a transaction that conflicts with other transactions."""


class KeptReplies:
    def __init__(self, service: str, connection: Connection, open_store: Callable[[], Awaitable[ReplyStore]]) -> None:
        self._topic = f"/topic/{kept_topic(service)}"
        self._connection = connection
        self._open_store = open_store
        self._waiting: dict[str, set[asyncio.Event]] = {}
        """Events of waiting callers, by the id of their key."""
        self._task: asyncio.Task[None] | None = None

    async def run_in_transaction(self, start: Callable[[Any], Awaitable[object]]) -> None:
        """Call `start` with an AsyncSession, and commit. After a conflict, `start` may be called again.

        Raises: the errors of `start`; DatabaseUnavailable, after which the transaction may have been committed
        """
        store = await self._open_store()
        for tries_left in reversed(range(BUSY_MAX)):
            try:
                async with store.transaction() as session:
                    await start(session)
                return
            except OutboxBusy:
                if not tries_left:
                    raise

    async def wait(self, to: Endpoint[Any, Any], key: str, id: str, deadline: float) -> object:
        """Return the reply that is kept under a key, whose id is `id`. Read the row at least once, and again until
        `deadline`, by the clock of the event loop.

        Raises: TimeoutError at the deadline; FlowFailed if the flow has failed; FlowError if the key is unknown, or its
        flow has asked another endpoint; NotDecoded if the reply has another type; DatabaseUnavailable
        """
        store, loop = await self._open_store(), asyncio.get_running_loop()
        if deadline > loop.time():
            self._ensure_subscribed()
        event = asyncio.Event()
        self._waiting.setdefault(id, set()).add(event)
        try:
            while True:
                event.clear()
                reply = _reply_of(to, key, await store.find(id))
                if reply is not None:
                    return reply
                left_s = deadline - loop.time()
                if left_s <= 0:
                    raise TimeoutError(
                        f"{to.name} has not replied under the key {key!r} yet; the reply may still come. If it does "
                        "not, look for the request in the dead-letter queues: truenext queues"
                    )
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, POLL_S)):
                        await event.wait()
        finally:
            events = self._waiting[id]
            events.discard(event)
            if not events:
                del self._waiting[id]

    def _ensure_subscribed(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._receive_all(), name="truenext kept replies")

    async def _receive_all(self) -> None:
        while True:
            try:
                async for message in await self._connection.consumer(self._topic):
                    self._on_kept(message)
                return
            except ClosedError:
                return
            except (TruenextError, TimeoutError) as error:
                # Meanwhile callers read their rows once a second.
                facts = {"topic": self._topic, "error": str(error), "next_s": RETRY_S}
                _logger.warning("cannot subscribe to news of kept replies", extra=facts)
            await asyncio.sleep(RETRY_S)

    def _on_kept(self, message: Message) -> None:
        try:
            id = msgspec.json.decode(decode_envelope(message.body).message, type=str)
        except (NotDecoded, msgspec.MsgspecError) as error:
            facts = {"topic": self._topic, "message_id": message.message_id, "error": str(error)}
            _logger.warning("message on the topic of kept replies names no reply", extra=facts)
            return
        for event in self._waiting.get(id, ()):
            event.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


def _reply_of(to: Endpoint[Any, Any], key: str, kept: KeptReply | None) -> object:
    """Return the decoded reply; None if there is none yet. Raises: the errors of `KeptReplies.wait`"""
    if kept is None:
        raise FlowError(
            f"no flow with keep_reply was started under the key {key!r} in the last 7 days: start one with "
            "ask(key=...), or with keep_reply in initiate(session, key=...)"
        )
    if kept.endpoint != to.name:
        raise FlowError(f"the flow under the key {key!r} has asked {kept.endpoint}, not {to.name}")
    assert to.replies is not None, "it was checked at the start"
    if kept.reply is not None:
        return to.replies.decode(kept.reply)
    if kept.failure is not None:
        raise FlowFailed(*msgspec.structs.astuple(msgspec.json.decode(kept.failure, type=Failure)))
    return None
