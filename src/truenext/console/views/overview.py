"""View of the overview."""

from __future__ import annotations

import asyncio
import time

from msgspec import UNSET

from truenext.console.charts import Charts
from truenext.console.gathering import Gathered
from truenext.console.pages.attention import ATTENTION_MAX, find_attention
from truenext.console.pages.links import address
from truenext.console.pages.overview import Attention, Chart, Figure, Overview
from truenext.console.shared import scope_of
from truenext.console.views.stages import gathered_processes
from truenext.console.visit import Visit
from truenext.errors import ConnectionLost
from truenext.model.control_answers import QueueReport

GROWTH_S = 600.0
"""Time within which the growth of dead-letter queues, and repeated failures, are looked at."""
GIVEN_UP_S = 3600.0


async def overview(visit: Visit) -> Overview:
    gathering = visit.gathering()
    (processes, error), _ = await asyncio.gather(gathered_processes(visit), gathering.ready())
    gathered, scope, charts = gathering.latest, scope_of(visit.rights), visit.shared.charts
    if gathered.oldest is None or gathered.dead_letters is None:
        raise ConnectionLost(gathered.error or "no answer within some seconds")
    now = time.time()
    dead = gathered.dead_letters.queues
    queues = gathered.queues
    given_up = await visit.shared.flows.count_given_up(now - GIVEN_UP_S) if visit.may_see_flows else 0
    found = find_attention(
        gathered.status,
        queues,
        dead,
        {each.name: growth for each in dead if (growth := _growth(charts, scope, each, now)) > 0},
        {
            each.name: count
            for each in queues
            if each.failed_again and (count := _failures(charts, scope, each.name, now))
        },
        processes,
        given_up,
        error,
    )
    if gathered.error:
        found.insert(0, Attention(level="bad", what="What follows is old", why=gathered.error))
    return Overview(
        attention=found[:ATTENTION_MAX],
        attention_count=len(found),
        figures=_figures(gathered, visit),
        broker=broker_figures(gathered),
        charts=overview_charts(charts, scope, now),
        covers="all queues" if visit.rights.is_monitor else "the queues on which you have a right",
    )


def _growth(charts: Charts, scope: str, queue: QueueReport, now: float) -> float:
    """Return how many more dead letters wait in the queue than GROWTH_S ago. If the charts do not know how many there
    were, all have come since then if the oldest has, and otherwise none is known to have."""
    before = charts.ago((scope, queue.name, "waiting"), GROWTH_S, now)
    if before is None:
        before = 0 if queue.oldest_s is not None and queue.oldest_s < GROWTH_S else queue.waiting
    return queue.waiting - before


def _failures(charts: Charts, scope: str, queue: str, now: float) -> int:
    """Return how often messages of the queue have failed again within GROWTH_S, as far as the charts know."""
    return int(charts.increase_since((scope, queue, "failed again"), GROWTH_S, now))


def _figures(gathered: Gathered, visit: Visit) -> list[Figure]:
    assert gathered.oldest is not None and gathered.dead_letters is not None, "the caller has checked that"
    sums, dead = gathered.oldest.sums, gathered.dead_letters.sums
    status = gathered.status
    return [
        Figure("queues", sums.queues, "", "", "/queues"),
        Figure("waiting", sums.waiting, "messages", "", address("/queues", order="waiting")),
        Figure("held", sums.held, "messages", "", address("/queues", order="held")),
        Figure("oldest", sums.oldest_s, "seconds", "", address("/queues", order="oldest")),
        Figure("acknowledged", sums.rate, "messages/s", "", address("/queues", order="rate")),
        Figure("dead letters", dead.waiting, "messages", "warn" if dead.waiting else "", "/dead-letters"),
        Figure("scheduled", sums.scheduled if status is None else status.scheduled, "messages", "", "/scheduled"),
    ]


def broker_figures(gathered: Gathered) -> list[Figure]:
    """Return the state of the broker; nothing without the right `monitor`."""
    status = gathered.status
    if status is None:
        return []
    level = "" if status.disk_level in ("", "plenty") else "warn" if status.disk_level == "little" else "bad"
    figures = [
        Figure("version", status.version),
        Figure("up for", status.uptime_s, "seconds"),
        Figure("connections", status.connections, "", "", "/connections"),
        Figure("disk level", status.disk_level, "", level),
        *(Figure(f"disk: {name.replace('_', ' ')}", size, "bytes") for name, size in status.disk_bytes.items()),
        Figure("memory: used", status.memory.used, "bytes"),
    ]
    if status.memory.limit is not None:
        figures.append(Figure("memory: limit", status.memory.limit, "bytes"))
    if status.journal is not None:
        figures.append(Figure("journal", status.journal.bytes, "bytes"))
    if status.history is not None:
        figures.append(Figure("history since the start", status.history.bytes, "bytes"))
    if batches := status.commits.batches:
        figures.append(Figure("time of a commit", status.commits.seconds / batches, "seconds"))
    if status.log is not UNSET:
        figures.append(Figure("log in PostgreSQL", status.log.server, "", "" if status.log.replicated else "warn"))
    return figures


def overview_charts(charts: Charts, scope: str, now: float) -> list[Chart]:
    return [
        _chart(charts, scope, "", "Messages", "messages/s", ("accepted", "acknowledged", "dead letters"), now),
        _chart(charts, scope, "", "Waiting", "messages", ("waiting", "held"), now),
        _chart(charts, scope, "", "Oldest message", "seconds", ("oldest",), now),
    ]


def queue_charts(charts: Charts, scope: str, queue: str, now: float) -> list[Chart]:
    return [
        _chart(charts, scope, queue, "Messages", "messages/s", ("accepted", "acknowledged"), now),
        _chart(charts, scope, queue, "Waiting", "messages", ("waiting",), now),
        _chart(charts, scope, queue, "Oldest message", "seconds", ("oldest",), now),
    ]


def _chart(charts: Charts, scope: str, queue: str, title: str, unit: str, names: tuple[str, ...], now: float) -> Chart:
    at, series = charts.read([(scope, queue, name) for name in names], now)
    first = next((index for index, values in enumerate(zip(*series, strict=True)) if _is_any_known(values)), len(at))
    rounded = [[None if value is None else float(f"{value:.4g}") for value in each[first:]] for each in series]
    return Chart(title, unit, at[first:], dict(zip(names, rounded, strict=True)))


def _is_any_known(values: tuple[float | None, ...]) -> bool:
    return any(value is not None for value in values)
