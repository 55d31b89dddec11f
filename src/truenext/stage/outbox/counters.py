"""Counters of exactly-once processing in one process, since its start, and their metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.stage.interceptors.exposition import Sample, format_metric

if TYPE_CHECKING:
    from truenext.stage.sql.outbox_table import UnsentCounts


class ExactlyOnceCounters:
    def __init__(self) -> None:
        self.already_processed = 0
        """Number of messages that were already processed when they came: inbox hits."""
        self.in_doubt = 0
        """Number of producers of this process that were claimed again, because an answer was missing."""
        self.claimed = 0
        """Number of producers that were claimed from dead processes."""
        self.renumbered = 0
        """Number of units that got new numbers, because the broker did not know theirs."""
        self.refused = 0
        """Number of messages that the broker refused: they are in the queue `SERVICE.refused`."""


def format_metrics(counters: ExactlyOnceCounters, unsent: UnsentCounts | None) -> str:
    """Return the metrics for Prometheus; without the figures of the database if it did not answer in time."""
    totals = {
        "truenext_inbox_already_processed_total": (
            "Messages that were already processed.",
            counters.already_processed,
        ),
        "truenext_outbox_in_doubt_total": ("Producers claimed again, as an answer was missing.", counters.in_doubt),
        "truenext_outbox_claimed_total": ("Producers claimed from processes that have ended.", counters.claimed),
        "truenext_outbox_renumbered_total": (
            "Units sent under new numbers, as the broker did not know theirs.",
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
