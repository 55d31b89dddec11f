"""Initiator: sends the flows that programs start with `Service.initiate` and `Service.ask`, and returns the replies to
`ask`."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from truenext.client.tasks.connection import Connection, Session
from truenext.errors import ClosedError, InDoubt, RolledBack
from truenext.stage.broker_transaction import (
    encode_messages,
    remaining_s,
    send_messages,
    sender_error,
    transaction_size,
)
from truenext.stage.context import ServiceContext
from truenext.stage.core.definitions import Endpoint
from truenext.stage.core.flow_start import FlowOptions, encode_first_message, new_flow_context, start_flow
from truenext.stage.core.initiation import Initiation
from truenext.stage.core.outbox_unit import EncodedMessage
from truenext.stage.core.output import Output
from truenext.stage.pending_replies import PendingReplies
from truenext.stage.pool import PriorityPool
from truenext.stage.user_code import call_after_commit, call_after_commit_sync

PAUSE_S = 0.05
"""Seconds until a transaction that was rolled back is sent again. Each further pause is twice as long, up to
PAUSE_MAX_S."""
PAUSE_MAX_S = 1.0
EXPIRY_GRACE_S = 1.0
"""Seconds that `ask` waits after the ttl of its flow: a report may come that an expired message became a dead
letter."""


class Initiator:
    def __init__(self, context: ServiceContext, interactive: PriorityPool, others: PriorityPool) -> None:
        """Create an initiator. The pool `interactive` sends interactive flows, and `others` sends all other flows."""
        self._context = context
        self.loop = context.loop
        self._pools = {True: interactive, False: others}
        self._sessions = {
            is_interactive: BrokerSessionPool(pool.connection) for is_interactive, pool in self._pools.items()
        }
        self._pending_replies = PendingReplies(context.service, interactive.connection)

    def check_loop(self) -> None:
        """Check that the caller is in the event loop of the service. Raises: ClosedError if the caller is in another
        loop"""
        if asyncio.get_running_loop() is not self.loop:
            service = self._context.service
            raise ClosedError(
                f"the service {service} belongs to the event loop in which it was connected: make and connect another "
                f"Service here, or run this in that loop. A thread without an event loop may use `with "
                f"{service}.initiate()`"
            )

    def new_initiation(self) -> tuple[Output, Initiation]:
        output = Output(self._context.new_id(), self._context.service)
        return output, Initiation(output, self._context.now_ms(), self._context.stages)

    async def send_output(self, output: Output, deadline: float) -> None:
        """Send an output in one transaction, and then call its `after_commit` functions. `deadline` is by the clock of
        the event loop.

        Raises: RolledBack if nothing was sent; InDoubt if the client cannot know whether the output was sent; FlowError
        if a message is too large
        """
        await self._send_all(output, deadline)
        await call_after_commit(output, {"service": self._context.service}, None)

    def send_output_in_thread(self, output: Output, deadline: float) -> None:
        """Send an output, and call its `after_commit` functions in this thread, which may block. Raises the errors of
        `send_output`."""
        asyncio.run_coroutine_threadsafe(self._send_all(output, deadline), self.loop).result()
        call_after_commit_sync(output, {"service": self._context.service}, self.loop)

    async def _send_all(self, output: Output, deadline: float) -> None:
        if output.outgoing:
            is_interactive = any(each.envelope.flow.interactive for each in output.outgoing)
            await self._send(output, is_interactive, deadline)

    async def _send(self, output: Output, is_interactive: bool, deadline: float) -> None:
        messages = encode_messages(output.outgoing, self._context.chain, None)
        if self._context.counters is not None:
            self._context.counters.add_sent_outside(len(messages))
        pause_s = PAUSE_S
        while True:
            try:
                await self._try_send(messages, is_interactive, deadline)
                return
            except TimeoutError as error:
                raise RolledBack(
                    f"nothing was sent: the broker of service {self._context.service} was not available in time: "
                    "check whether it runs, or raise the timeout"
                ) from error
            except ClosedError as error:
                raise RolledBack(f"nothing was sent: service {self._context.service} was stopped") from error
            except RolledBack as error:
                # Nothing was sent, so the transaction is repeated unless the broker refuses its content. Enough time
                # must be left for the broker's answer: without one, the transaction would be in doubt.
                if sender_error(error) is not None or self._context.loop.time() + 2 * pause_s >= deadline:
                    raise
            # Spares a broker whose disk is full.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _try_send(self, messages: Sequence[EncodedMessage], is_interactive: bool, deadline: float) -> None:
        """Send the messages and commit, in one try.

        Raises: TimeoutError, ClosedError or RolledBack if nothing was committed; InDoubt if the outcome of the commit
        is not known
        """
        pool = self._pools[is_interactive]
        async with AsyncExitStack() as stack:
            async with asyncio.timeout_at(deadline):
                await stack.enter_async_context(pool.transaction_permits.acquired(1))
                await stack.enter_async_context(pool.transaction_byte_permits.acquired(transaction_size(messages)))
            session = await stack.enter_async_context(self._sessions[is_interactive].acquired())
            await send_messages(session, messages, deadline)
            await session.commit(timeout=remaining_s(deadline))

    async def ask(
        self, to: Endpoint[Any, Any], message: object, trace: str, timeout: float, options: FlowOptions
    ) -> object:
        """Send a request, and return its reply.

        Raises: TimeoutError without a reply in time; FlowFailed if the flow has failed; RolledBack if the request was
        not sent; InDoubt if the client cannot know whether it was sent; NotDecoded if the reply has another type;
        ClosedError in another event loop; ValueError if `timeout` is not more than 0; FlowError if the request is
        invalid
        """
        self.check_loop()
        deadline = self._context.loop.time() + checked_timeout(timeout)
        try:
            async with asyncio.timeout_at(deadline):
                await self._pending_replies.ensure_subscribed()
        except TimeoutError:
            raise RolledBack(
                f"no request was sent to {to}: the broker was not available within {timeout:g} s"
            ) from None
        reply_to, number, reply = self._pending_replies.expect_reply(to)
        flow_id, ttl = "", options.get("ttl")
        try:
            output = Output(self._context.new_id(), self._context.service)
            context = new_flow_context(output, self._context.now_ms(), trace, None, options)
            first = encode_first_message(
                to, message, reply_to=reply_to, reply_state=number, report_to=reply_to.destination
            )
            flow_id = start_flow(output, context, first, options)
            self._pending_replies.expect_report(number, flow_id)
            # Sent over the connection that receives the reply: after a loss, it subscribes again before it sends.
            await self._send(output, True, deadline)
            if ttl is not None:
                # After the ttl no stage of the flow starts, so no reply comes.
                deadline = min(deadline, self._context.loop.time() + ttl + EXPIRY_GRACE_S)
            async with asyncio.timeout_at(deadline):
                return await reply
        except TimeoutError:
            if ttl is not None and ttl < timeout:
                raise TimeoutError(f"{to.name} has not replied within the ttl of the flow, {ttl:g} s") from None
            raise TimeoutError(
                f"{to.name} has not replied within {timeout:g} s; the reply may still come. If it does not, look "
                "for the request in the dead-letter queues: truenext queues"
            ) from None
        finally:
            self._pending_replies.forget_reply(number, flow_id)

    async def outcome(self, doubt: InDoubt | str, timeout: float) -> str:
        """Return the outcome of an initiation in doubt: "committed", "rolled back" or "unknown".

        Raises: TimeoutError or ConnectionLost if the broker has not answered; ValueError if the text is not a token;
        ClosedError in another event loop
        """
        self.check_loop()
        return await self._pools[True].connection.outcome(doubt, timeout=timeout)

    async def stop(self) -> None:
        await self._pending_replies.stop()


def checked_timeout(timeout: float) -> float:
    """Return `timeout`, in seconds, if it is valid. Raises: ValueError if it is not finite, or not more than 0"""
    if isinstance(timeout, bool) or not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        raise ValueError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    return timeout


# ---- Transacted sessions for initiations: as many as are in use at once, then reused ----


class BrokerSessionPool:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[Session] = []

    @asynccontextmanager
    async def acquired(self) -> AsyncIterator[Session]:
        """Lend a transacted session to one caller. If the block raises, the session is closed."""
        session = self._idle.pop() if self._idle else await self._connection.session(transacted=True)
        try:
            yield session
        except BaseException:
            await session.close()
            raise
        self._idle.append(session)
