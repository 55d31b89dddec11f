"""Counters of exactly-once processing in one process, since its start, and their metrics for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

    from truenext.stage.sql.outbox_table import UnsentCounts


class ExactlyOnceCounters:
    def __init__(self) -> None:
        self.already_processed = 0
        """Number of messages that were found in the inbox, since they were already processed."""
        self.in_doubt = 0
        """Number of times that this process has claimed one of its own producers again, after a missing answer."""
        self.claimed = 0
        """Number of producers of dead processes that this process has claimed."""
        self.renumbered = 0
        """Number of units that got new numbers, because the broker did not know the old numbers."""
        self.refused = 0
        """Number of messages that the broker refused, and that were sent to the queue `SERVICE.refused` instead."""


_TOTALS = {
    "already_processed": ("truenext_inbox_already_processed_total", "Messages that were already processed."),
    "in_doubt": (
        "truenext_outbox_in_doubt_total",
        "Producers that this process claimed again, because an answer about them was missing.",
    ),
    "claimed": ("truenext_outbox_claimed_total", "Producers claimed from processes that have ended."),
    "renumbered": (
        "truenext_outbox_renumbered_total",
        "Units sent under new numbers, because the broker did not know their old numbers.",
    ),
    "refused": ("truenext_outbox_refused_total", "Messages in the queue SERVICE.refused."),
}
"""Name and meaning of each counter, by its field of `ExactlyOnceCounters`."""


def collect(counters: ExactlyOnceCounters, unsent: UnsentCounts | None) -> list[Metric]:
    """Return the metrics for Prometheus. If `unsent` is None, the metrics of unsent messages are left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    metrics: list[Metric] = [
        CounterMetricFamily(name, about, value=getattr(counters, field)) for field, (name, about) in _TOTALS.items()
    ]
    if unsent is not None:
        messages = GaugeMetricFamily(
            "truenext_outbox_messages", "Messages that are not known to be sent.", labels=("numbered",)
        )
        messages.add_metric(("yes",), unsent.numbered)
        messages.add_metric(("no",), unsent.unnumbered)
        about = "Age of the oldest unsent message."
        metrics += messages, GaugeMetricFamily("truenext_outbox_oldest_seconds", about, value=unsent.oldest_s)
    return metrics
