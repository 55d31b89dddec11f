"""Metrics of a broker for Prometheus: read when they are scraped, on another thread than the event loop's.

    scrape (thread)  ──collect──▶ event loop: the answers to `status` and `queues`, in steps between its turns
                     ◀──bytes────

A scrape waits for the event loop for COLLECT_S at most. Then it shows the queues as they were at the last scrape, with
their age, and all else as it is now. docs/monitoring.md has the meaning of each metric.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import UNSET
from prometheus_client import Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from truenext.broker.broker import Broker
from truenext.broker.control_commands import Figures
from truenext.broker.health import BrokerHealth, BrokerState
from truenext.clock import monotonic
from truenext.engine.lifecycle.redelivery import EXHAUSTED, EXPIRED, REJECTED
from truenext.model.control_answers import LogReport, QueueReport, StatusReport
from truenext.model.disk_level import DiskLevel
from truenext.model.histogram import HistogramCounter, cumulative_buckets
from truenext.model.limits import METRICS_QUEUES_MAX
from truenext.store.log import Awaited, Role

COLLECT_S = 1.0
"""Longest time in seconds for which a scrape waits for the event loop."""

POLL_S = 0.01
"""Interval at which a scrape looks whether the event loop has answered. A future would let the event loop of the broker
call this thread, whose end could fail it."""

SEEN_S = 10.0
"""Age in seconds up to which the description of a broker that stands by counts: it writes one each second."""

logger = logging.getLogger(__name__)

_decode_status = msgspec.json.Decoder(StatusReport).decode
_decode_queues = msgspec.json.Decoder(list[QueueReport]).decode

Counts = Mapping[str, int]
Samples = Iterable[tuple[tuple[str, ...], float]]
_Family = GaugeMetricFamily | CounterMetricFamily


def health_metrics(health: BrokerHealth) -> list[Metric]:
    """Return the metrics that a process has at any time, also while it restores or stands by."""
    facts = health.facts
    return [
        _gauge("ready", "1 while new clients can work with the broker, else 0.", health.ready),
        _gauge(
            "state",
            "1 for the present state of the process, 0 for the others.",
            (((each.value,), each is facts.state) for each in BrokerState),
            "state",
        ),
        _gauge("silent", "1 while another broker may have taken over, so that this one does nothing.", facts.silent),
        _gauge("draining", "1 while the broker is drained.", facts.draining),
        *ProcessCollector(registry=None).collect(),
    ]


class BrokerMetrics:
    """Metrics of a running broker. All methods but `__init__` are called on the thread of the scrapes."""

    def __init__(
        self,
        broker: Broker,
        loop: AbstractEventLoop,
        loop_delays: HistogramCounter,
        patterns: Sequence[str],
    ) -> None:
        """`loop` is the event loop of the broker. `patterns` are those of the queues that have metrics of their own."""
        self._broker = broker
        self._loop = loop
        self._loop_delays = loop_delays
        self.patterns = patterns
        """Patterns of the queues that have metrics of their own, from the next scrape on."""
        self._is_requested = False
        self._figures: Figures | None = None
        self._collected_at = 0.0
        self._has_warned = False

    async def collect(self) -> list[Metric]:
        await self._refresh()
        metrics = [
            _histogram("event_loop_delay_seconds", "Delay of a timer of the event loop.", self._loop_delays),
            _histogram("commit_seconds", "Time until a batch was durable.", self._broker.committer.totals.times),
            *_security_metrics(self._broker.users.event_totals),
        ]
        if self._figures is not None:
            age = monotonic() - self._collected_at
            metrics.append(_gauge("figures_age_seconds", "Age of the figures of queues and messages.", age))
            metrics += _status_metrics(_decode_status(self._figures.status))
            if self.patterns:
                metrics += self._named_queues(self._figures)
        return metrics

    def _named_queues(self, figures: Figures) -> Iterator[Metric]:
        reports = _decode_queues(figures.queues)
        left_out = figures.matching - len(reports)
        if left_out and not self._has_warned:
            logger.warning(
                "metrics_queues matches too many queues: the first ones by name have metrics",
                extra={"patterns": list(self.patterns), "queues": figures.matching, "most": METRICS_QUEUES_MAX},
            )
        self._has_warned = bool(left_out)
        yield _gauge("queues_left_out", "Queues that metrics_queues matches beyond the first ones.", left_out)
        yield from _queue_metrics(reports)

    async def _refresh(self) -> None:
        """Let the event loop collect the figures, and wait until it has, or COLLECT_S are over."""
        until = monotonic() + COLLECT_S
        if not self._is_requested:
            self._is_requested = True
            self._loop.call_soon_threadsafe(self._broker.control.collect, self.patterns, self._on_collected)
        while self._is_requested and monotonic() < until:
            await asyncio.sleep(POLL_S)

    def _on_collected(self, figures: Figures) -> None:
        """Note the figures; called on the event loop of the broker."""
        self._figures, self._collected_at = figures, monotonic()
        self._is_requested = False


def _security_metrics(events: Counts) -> Iterator[Metric]:
    yield _counter(
        "logins_total",
        "Logins of clients, in a broker with users.",
        ((("accepted",), events.get("login", 0)), (("failed",), events.get("login failed", 0))),
        "result",
    )
    yield _counter(
        "refusals_total",
        "Requests refused because the user lacks a right, and failed TLS handshakes.",
        ((("right",), events.get("request refused", 0)), (("tls",), events.get("TLS failed", 0))),
        "reason",
    )


def _status_metrics(status: StatusReport) -> Iterator[Metric]:
    memory = {name: size for name, size in msgspec.structs.asdict(status.memory).items() if size is not None}
    yield _gauge("connections", "Open connections of clients.", status.connections)
    yield _gauge("queues", "Queues and durable subscriptions.", status.queues)
    subscriptions = {"durable": status.subscriptions.durable, "non_durable": status.subscriptions.non_durable}
    yield _gauge("subscriptions", "Subscriptions to topics.", _by(subscriptions), "kind")
    messages = {"waiting": status.waiting, "held": status.held, "scheduled": status.scheduled}
    yield _gauge("messages", "Messages of queues and durable subscriptions.", _by(messages), "state")
    temporary = {"waiting": status.temporary.waiting, "held": status.temporary.unacknowledged}
    yield _gauge("temporary_messages", "Messages of queues that end with their connection.", _by(temporary), "state")
    yield _gauge("temporary_bytes", "Bytes of these messages, in memory and on disk.", status.temporary.bytes)
    yield _gauge("messages_in_memory", "Messages of queues and durable subscriptions in memory.", status.in_memory)
    yield _gauge("oldest_message_seconds", _OLDEST, status.oldest_s or 0)
    yield _gauge("held_message_seconds", _HELD, status.held_s or 0)
    yield _gauge("dead_letters", "Messages in dead-letter queues.", status.dead_letters)
    yield _gauge("stuck_queues", "Queues with a ready message and a free consumer, but no dispatch.", len(status.stuck))
    for name, about in _COUNTS.items():
        yield _counter(f"messages_{name}_total", about, getattr(status.counts, name))
    yield _counter("messages_dead_lettered_total", _DEAD_LETTERED, _by_reason(status.counts.dead_lettered), "reason")
    yield _gauge("memory_bytes", "Bytes of messages in memory, and the limit of `used`.", _by(memory), "kind")
    yield _gauge("disk_level", _DISK_LEVEL, DiskLevel[status.disk_level.upper()])
    yield _gauge("disk_bytes", "Sizes that decide the disk level.", _by(status.disk_bytes), "kind")
    yield _gauge("page_reads", "Pages that are being read from the store.", status.page_reads)
    yield _counter("commit_bytes_total", "Bytes of batches made durable.", status.commits.bytes)
    if status.journal is not None:
        yield _gauge("journal_bytes", "Bytes of the journal, unused ones included.", status.journal.bytes)
    if status.history is not None:
        yield _counter("history_bytes_total", "Bytes of events recorded.", status.history.bytes)
    if status.log is not UNSET:
        yield from _log_metrics(status.log)


def _queue_metrics(reports: list[QueueReport]) -> Iterator[Metric]:
    def gauge(name: str, about: str, value: Callable[[QueueReport], float]) -> Metric:
        return _with_samples(
            GaugeMetricFamily(f"truenext_queue_{name}", about, labels=("queue",)),
            (((each.name,), value(each)) for each in reports),
        )

    messages = GaugeMetricFamily("truenext_queue_messages", "Messages of the queue.", labels=("queue", "state"))
    dead = CounterMetricFamily(
        "truenext_queue_messages_dead_lettered_total", _DEAD_LETTERED, labels=("queue", "reason")
    )
    for each in reports:
        messages.add_metric((each.name, "waiting"), each.waiting)
        messages.add_metric((each.name, "held"), each.unacknowledged)
        messages.add_metric((each.name, "scheduled"), each.scheduled)
        for (reason,), count in _by_reason(each.dead_lettered):
            dead.add_metric((each.name, reason), count)
    yield messages
    yield gauge("consumers", "Consumers of the queue.", lambda each: each.consumers)
    yield gauge("paused", "1 if the queue is paused, else 0.", lambda each: each.paused)
    yield gauge(
        "oldest_message_seconds", "Age of the oldest message that waits; 0 if none.", lambda each: each.oldest_s or 0
    )
    yield gauge(
        "held_message_seconds",
        "Time since the dispatch of the message that consumers have held longest; 0 if none.",
        lambda each: each.held_s or 0,
    )
    for name in ("accepted", "acknowledged", "returned", "failed_again", "expired"):
        counter = CounterMetricFamily(f"truenext_queue_messages_{name}_total", _COUNTS[name], labels=("queue",))
        yield _with_samples(counter, (((each.name,), getattr(each, name)) for each in reports))
    yield dead


def _log_metrics(log: LogReport) -> Iterator[Metric]:
    yield _gauge("log_row", "Number of the last row of the log in PostgreSQL.", log.number)
    waits = (((each.value,), each.value == log.awaited) for each in Awaited)
    yield _gauge("log_waits", "1 while nothing is confirmed for this cause, else 0.", waits, "for")
    seen = [each for each in log.members if each.role == Role.STANDING_BY and each.age_ms <= SEEN_S * 1000]
    yield _gauge("log_standing_by", "Brokers that stand by on the log.", len(seen))


_COUNTS = {
    "accepted": "Messages that came into a queue.",
    "acknowledged": "Messages that were acknowledged.",
    "returned": "Times that a dispatched message was requeued.",
    "failed_again": "Times that a message failed which had failed before, and was requeued.",
    "expired": "Messages removed because they had expired.",
    "handled": "Failed messages that went to their next handler.",
    "moved": "Messages that a request has moved or re-driven.",
    "purged": "Messages that a request has removed.",
}
"""Meaning of each counter of MessageCounts, but for dead letters."""

_OLDEST = "Age of the oldest message that waits, without dead letters and messages of Spark; 0 if none."
_HELD = "Time since the dispatch of the message that consumers have held longest, without those of Spark; 0 if none."
_DEAD_LETTERED = "Messages that have become dead letters, by reason."
_DISK_LEVEL = "Free space for new messages: 0 plenty, 1 little, 2 none, 3 full."


def _gauge(name: str, about: str, value: float | Samples, *labels: str) -> Metric:
    return _with_samples(GaugeMetricFamily(f"truenext_broker_{name}", about, labels=labels), value)


def _counter(name: str, about: str, value: float | Samples, *labels: str) -> Metric:
    return _with_samples(CounterMetricFamily(f"truenext_broker_{name}", about, labels=labels), value)


def _with_samples(metric: _Family, value: float | Samples) -> Metric:
    for labels, number in (((), value),) if isinstance(value, int | float) else value:
        metric.add_metric(labels, number)
    return metric


def _histogram(name: str, about: str, counter: HistogramCounter) -> Metric:
    buckets = cumulative_buckets(counter.bounds, counter.buckets)
    return HistogramMetricFamily(f"truenext_broker_{name}", about, buckets=buckets, sum_value=counter.sum)


def _by_reason(dead_lettered: Counts) -> Samples:
    """Yield the dead letters by reason. Also reasons without one: Prometheus does not see the first increase of a
    counter that was missing before."""
    return _by({**dict.fromkeys((EXHAUSTED, EXPIRED, REJECTED), 0), **dead_lettered})


def _by(numbers: Mapping[str, float]) -> Samples:
    return (((name,), number) for name, number in numbers.items())
