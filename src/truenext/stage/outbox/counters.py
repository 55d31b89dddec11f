"""Counters of exactly-once processing in one process, since its start, and their metrics for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.stage.interceptors.exposition import Sample, format_metric

if TYPE_CHECKING:
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


def format_metrics(counters: ExactlyOnceCounters, unsent: UnsentCounts | None) -> str:
    """Return the metrics as text for Prometheus. If `unsent` is None, the metrics of unsent messages are left out."""
    totals = {
        "truenext_inbox_already_processed_total": (
            "Messages that were already processed.",
            counters.already_processed,
        ),
        "truenext_outbox_in_doubt_total": (
            "Producers that this process claimed again, because an answer about them was missing.",
            counters.in_doubt,
        ),
        "truenext_outbox_claimed_total": ("Producers claimed from processes that have ended.", counters.claimed),
        "truenext_outbox_renumbered_total": (
            "Units sent under new numbers, because the broker did not know their old numbers.",
            counters.renumbered,
        ),
        "truenext_outbox_refused_total": ("Messages in the queue SERVICE.refused.", counters.refused),
    }
    parts = [format_metric(name, "counter", about, [Sample({}, count)]) for name, (about, count) in totals.items()]
    if unsent is not None:
        messages = [Sample({"numbered": "yes"}, unsent.numbered), Sample({"numbered": "no"}, unsent.unnumbered)]
        parts += (
            format_metric("truenext_outbox_messages", "gauge", "Messages that are not known to be sent.", messages),
            format_metric(
                "truenext_outbox_oldest_seconds",
                "gauge",
                "Age of the oldest unsent message.",
                [Sample({}, unsent.oldest_s)],
            ),
        )
    return "".join(parts)
