"""Redelivery policies of the stages' queues, as the broker reports them: after how many attempts a message becomes a
dead letter, and when a failed message is tried again.

The broker applies the policies. A service needs them for its log and its metrics only.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NoReturn

import msgspec

from truenext.errors import TruenextError
from truenext.stage.core.retry import RedeliveryPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from truenext.client.tasks.connection import Connection
    from truenext.stage.core.definitions import Stage

_logger = logging.getLogger("truenext.stage")

PERIOD_S = 60.0
"""Seconds between two requests for the policies. A reload of the broker may change a policy."""
RETRY_S = 0.05
"""Seconds until the next request while the policy of a queue is unknown, such as before its subscription. Each further
pause is twice as long, up to PERIOD_S."""


class _SubscriptionFacts(msgspec.Struct):
    destination: str
    redelivery: RedeliveryPolicy | None = None
    """Redelivery policy of the queue; None if the broker is too old to report it."""


class _ConnectionFacts(msgspec.Struct):
    subscriptions: list[_SubscriptionFacts]


class QueuePolicies:
    def __init__(self, stages: Mapping[str, Stage]) -> None:
        """Start without any policy. `stages` are the stages of the service, by queue; more may be defined later."""
        self._stages = stages
        self._by_destination: dict[str, RedeliveryPolicy] = {}
        self._warned: set[tuple[str, int]] = set()
        """Warnings that were logged: the queue of the stage, and the `attempts_max` of that queue."""

    def of(self, stage: Stage) -> RedeliveryPolicy | None:
        """Return the policy of the stage's queue; None while it is not known."""
        return self._by_destination.get(stage.destination)

    async def refresh_for_ever(self, connection: Connection) -> NoReturn:
        """Request the policies again and again, over the connection that is subscribed to the queues."""
        pause_s = RETRY_S
        while True:
            try:
                await self._refresh(connection)
            except (TruenextError, TimeoutError) as error:
                _logger.info("the policies of queues cannot be requested", extra={"error": str(error)})
            is_complete = all(self.of(stage) is not None for stage in self._stages.values())
            pause_s = PERIOD_S if is_complete else min(pause_s, PERIOD_S)
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def _refresh(self, connection: Connection) -> None:
        facts = msgspec.json.decode(await connection.control_request("connection"), type=_ConnectionFacts)
        for each in facts.subscriptions:
            if each.redelivery is not None:
                self._by_destination[each.destination] = each.redelivery
        for stage in self._stages.values():
            self._warn_of_unreachable_attempts(stage)

    def _warn_of_unreachable_attempts(self, stage: Stage) -> None:
        policy, attempts = self.of(stage), stage.settings.attempts
        attempts_max = None if policy is None else policy.attempts_max
        if attempts is None or attempts_max is None or attempts <= attempts_max:
            return
        if (stage.queue, attempts_max) not in self._warned:
            self._warned.add((stage.queue, attempts_max))
            _logger.warning(
                "the broker gives up messages of a stage before its `attempts`: raise `attempts_max` of the queue's "
                "policy, or lower `attempts`",
                extra={"stage": stage.queue, "attempts": attempts, "attempts_max": attempts_max},
            )
