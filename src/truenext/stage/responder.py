"""Responder: sends the report of this process to clients that request it on the topic of all processes of stages.

    requester ──request──▶ /topic/truenext.stages ──▶ _receive ──▶ Requesters ──▶ _answer ──report──▶ temporary queue

It disturbs nothing: a request is a transient message that expires, and so is a report. Without the right to consume
from the topic the service runs without a responder, until the right is granted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from truenext.clock import monotonic
from truenext.errors import ClosedError, TruenextError
from truenext.model.grants import Right, parse_pattern
from truenext.model.process_report import REPORT_TTL_S, STAGES_TOPIC
from truenext.stage.core.requesters import REPORT_PERIOD_S, Requester, Requesters, request_fault
from truenext.stage.user_code import cancel_all
from truenext.stage.user_grants import request_user

if TYPE_CHECKING:
    from truenext.client.core.send_options import SendOptions
    from truenext.client.tasks.connection import Connection, Message

_logger = logging.getLogger("truenext.stage")

RETRY_S = 30.0
"""Seconds between two checks whether the user may consume from the topic, and between two tries after an error."""
SEND_TIMEOUT_S = 2.0
"""Seconds in which the broker must accept a report."""
LAST_REPORT_S = 1.0
"""Seconds for the last report, when the service stops."""
PREFETCH = 10
LOG_PERIOD_S = 60.0
"""Least time in seconds between two log records about ignored requests, and about reports that cannot be sent."""

MakeReport = Callable[[bool], Awaitable[bytes]]
"""Function that returns the report of this process. Its argument is True for the last report."""


class Responder:
    def __init__(self, connection: Connection, make_report: MakeReport) -> None:
        self._connection = connection
        self._make_report = make_report
        self._requesters = Requesters()
        self._has_requests = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._has_warned = False
        self._ignored = _RareWarning("ignored a request to the processes of stages")
        self._unsent = _RareWarning("cannot answer a request to the processes of stages")

    def start(self) -> None:
        create_task = asyncio.get_running_loop().create_task
        self._tasks = [
            create_task(self._receive_for_ever(), name="truenext requests for reports"),
            create_task(self._answer_for_ever(), name="truenext reports"),
        ]

    # ---- Requests ----

    async def _receive_for_ever(self) -> None:
        while True:
            try:
                if await self._may_subscribe():
                    await self._receive()
            except ClosedError:
                return
            except (TruenextError, TimeoutError) as error:
                _logger.info("cannot receive requests to the processes of stages", extra={"error": str(error)})
            except Exception as error:
                # A newer broker may give an answer that this version cannot read.
                _logger.warning("cannot receive requests to the processes of stages", extra={"error": repr(error)})
            await asyncio.sleep(RETRY_S)

    async def _may_subscribe(self) -> bool:
        """Return whether the user may consume from the topic. The broker logs a refused SUBSCRIBE, so a process does
        not try it."""
        user = await request_user(self._connection)
        if user is None or user.may(Right.TAKE, parse_pattern(STAGES_TOPIC)):
            return True
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "the user may not take from the topic of processes: `truenext stages ps` does not show this process; "
                "add the grant with `truenext user grant`, and reload",
                extra={"user": user.name, "take": STAGES_TOPIC},
            )
        return False

    async def _receive(self) -> None:
        async with self._connection.consumer(STAGES_TOPIC, prefetch=PREFETCH) as requests:
            async for message in requests:
                self._on_request(message)

    def _on_request(self, message: Message) -> None:
        reply_to, correlation_id = message.reply_to, message.correlation_id
        fault = request_fault(reply_to, correlation_id, message.body)
        if not fault and not self._requesters.add(Requester(reply_to, correlation_id, monotonic())):
            fault = "too many clients wait for a report"
        if fault:
            self._ignored.log(reason=fault, reply_to=reply_to[:100])
        else:
            self._has_requests.set()

    # ---- Reports ----

    async def _answer_for_ever(self) -> None:
        while True:
            if self._requesters.is_empty:
                self._has_requests.clear()
                await self._has_requests.wait()
            try:
                await self._answer()
            except ClosedError:
                return
            except Exception as error:
                # The service goes on, whatever is wrong with its report.
                self._unsent.log(error=repr(error))
                await asyncio.sleep(REPORT_PERIOD_S)

    async def _answer(self) -> None:
        """Make one report, and send it to all clients that request it in REPORT_PERIOD_S seconds."""
        until = monotonic() + REPORT_PERIOD_S
        body = await self._make_report(False)
        self._requesters.start_report(len(body))
        while (left_s := until - monotonic()) > 0:
            requester = self._requesters.next_requester(monotonic())
            if requester is not None:
                await self._send(requester, body)
                continue
            self._has_requests.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._has_requests.wait()

    async def _send(self, requester: Requester, body: bytes) -> None:
        options: SendOptions = {"persistent": False, "ttl": REPORT_TTL_S, "content_type": "application/json"}
        if requester.correlation_id:
            options["correlation_id"] = requester.correlation_id
        try:
            await self._connection.send(requester.reply_to, body, timeout=SEND_TIMEOUT_S, **options)
        except ClosedError:
            raise
        except (TruenextError, TimeoutError, ValueError) as error:
            self._unsent.log(error=str(error), reply_to=requester.reply_to)

    # ---- Stop ----

    async def stop(self) -> None:
        """Unsubscribe, and tell recent requesters that this process stops. Call this before the connection is
        closed."""
        await cancel_all(self._tasks)
        requesters = self._requesters.recent_requesters(monotonic())
        if not requesters or self._connection.health().state != "connected":
            return
        try:
            async with asyncio.timeout(LAST_REPORT_S):
                body = await self._make_report(True)
                for requester in requesters:
                    await self._send(requester, body)
        except (TruenextError, TimeoutError):
            # A requester finds out by itself.
            pass
        except Exception as error:
            # The rest of the stop goes on.
            self._unsent.log(error=repr(error))


@dataclass(eq=False)
class _RareWarning:
    """Warning that is logged at most once in LOG_PERIOD_S seconds."""

    _text: str
    _logged_at: float = field(default=float("-inf"))
    _suppressed_count: int = 0

    def log(self, **fields: str) -> None:
        now = monotonic()
        if now - self._logged_at < LOG_PERIOD_S:
            self._suppressed_count += 1
            return
        _logger.warning(self._text, extra={**fields, "more": self._suppressed_count})
        self._logged_at, self._suppressed_count = now, 0
