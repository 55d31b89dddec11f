"""Health of a broker's process: its state from the first moment of the start on, and the server that shows it.

The main thread changes the state. The thread of the server reads it, and what any thread may read of the broker.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from truenext.broker.broker import Broker
from truenext.broker.event_loop import LoopDelay
from truenext.broker.health import BrokerFacts, BrokerHealth, BrokerState, assess_health
from truenext.cli.health_server import Health, HealthThread
from truenext.model.url import parse_host_and_port

if TYPE_CHECKING:
    from prometheus_client import Metric

    from truenext.broker.metrics import BrokerMetrics


class BrokerProcess:
    def __init__(self) -> None:
        self.state = BrokerState.RESTORING
        self._server: HealthThread | None = None
        self._running: tuple[Broker, LoopDelay, BrokerMetrics] | None = None

    @property
    def health_url(self) -> str | None:
        """URL of the health server; None if there is none."""
        return None if self._server is None else self._server.url

    def serve_health(self, address: str) -> None:
        """Serve health and metrics at HOST:PORT from now on.

        Raises: ConfigurationError if the address cannot be listened on
        """
        # Imported here, because it takes 30 ms, and most brokers show no metrics. The thread would take seconds for it
        # beside a recovery.
        import_module("truenext.broker.metrics")
        self._server = HealthThread(*parse_host_and_port(address), self._health, self._metrics)

    def start(self, broker: Broker, loop: AbstractEventLoop, queues: Sequence[str]) -> None:
        """Note that clients can connect. `queues` are the patterns of the queues that have metrics of their own."""
        if self._server is not None:
            from truenext.broker.metrics import BrokerMetrics

            delay = LoopDelay(loop)
            self._running = broker, delay, BrokerMetrics(broker, loop, delay.delays, queues)
        self.state = BrokerState.RUNNING

    def set_metrics_queues(self, queues: Sequence[str]) -> None:
        """Replace the patterns of the queues that have metrics of their own."""
        if self._running is not None:
            self._running[2].patterns = queues

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()

    def _assess(self) -> BrokerHealth:
        if self.state is not BrokerState.RUNNING or self._running is None:
            return assess_health(BrokerFacts(state=self.state))
        broker, delay, _ = self._running
        return assess_health(broker.health_facts(delay.held_s()))

    def _health(self) -> Health:
        return Health.of(self._assess())

    async def _metrics(self) -> list[Metric]:
        from truenext.broker.metrics import health_metrics

        metrics = health_metrics(self._assess())
        if self.state is BrokerState.RUNNING and self._running is not None:
            metrics += await self._running[2].collect()
        return metrics
