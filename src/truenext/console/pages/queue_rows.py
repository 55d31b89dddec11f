"""Rows about queues, from the broker's reports. Pure."""

from __future__ import annotations

from msgspec import UNSET

from truenext.console.pages.attention import judge_queue
from truenext.console.pages.links import queue_link
from truenext.console.pages.overview import Figure
from truenext.console.pages.queues import QueueRow
from truenext.model.control_answers import QueueReport, QueueSums
from truenext.model.destination import SPARK_PREFIX


def kind_of(report: QueueReport) -> str:
    """Return the kind of a queue.

    >>> [kind_of(QueueReport(name, 0, 0, 0, 0, False)) for name in ("Consumer.a.VirtualTopic.b", "Spark.a", "orders")]
    ['virtual topic', 'Spark', 'queue']
    """
    if report.topic is not UNSET:
        return "durable subscription"
    if report.dead_letters:
        return "dead letters"
    if report.name.startswith(SPARK_PREFIX):
        return "Spark"
    words = report.name.split(".")
    return "virtual topic" if len(words) > 3 and (words[0], words[2]) == ("Consumer", "VirtualTopic") else "queue"


def queue_row(report: QueueReport) -> QueueRow:
    judged = judge_queue(report)
    return QueueRow(
        name=report.name,
        link=queue_link(report.name),
        kind=kind_of(report),
        waiting=report.waiting,
        held=report.unacknowledged,
        consumers=report.consumers,
        scheduled=report.scheduled,
        paused=report.paused,
        oldest_s=report.oldest_s,
        held_s=report.held_s,
        rate=report.rate,
        accepted=report.accepted,
        acknowledged=report.acknowledged,
        returned=report.returned,
        failed_again=report.failed_again,
        expired=report.expired,
        dead_lettered=sum(report.dead_lettered.values()),
        level=judged.level,
        why=judged.why,
        subject=judged.subject,
    )


def sum_figures(sums: QueueSums) -> list[Figure]:
    return [
        Figure("queues", sums.queues),
        Figure("waiting", sums.waiting, "messages"),
        Figure("held", sums.held, "messages"),
        Figure("oldest", sums.oldest_s, "seconds"),
        Figure("acknowledged", sums.rate, "messages/s"),
    ]
