"""Tests that lists which are cut say so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from truenext.console.answers import BulkAnswer
from truenext.console.rights import Rights
from truenext.console.views import others
from truenext.model.control_answers import OpenConnection, QueueReport, QueuesReport, QueueSums


def visit(answers: dict[str, Any]) -> Any:
    """Return a visit without users whose broker answers so."""

    async def ask(verb: str, body: object, type: object) -> Any:
        return answers[verb]

    return SimpleNamespace(ask=ask, text=lambda name, default="": default, rights=Rights(None))


def queues(prefix: str, count: int, next: str | None) -> QueuesReport:
    reports = [QueueReport(f"{prefix}{number}", 0, 0, 0, 1, paused=False) for number in range(count)]
    return QueuesReport(queues=reports, next=next, sums=QueueSums(scheduled=count))


def test_scheduled_sends_of_a_part_of_the_queues_are_a_part() -> None:
    for next in (None, "cursor"):
        answers = {"queues": queues("q", 150, next), "scheduled": BulkAnswer(moved=1)}
        page = asyncio.run(others.scheduled(visit(answers)))
        assert (page.total, page.is_part) == (151, next is not None)


def test_connections_that_are_not_counted_are_told() -> None:
    connection = OpenConnection(
        connection="1-1",
        address="",
        user="anna",
        tls=None,
        client_id="",
        since=0,
        protocol="STOMP",
        consumers=0,
        held=0,
    )
    for count in (999, 1000):
        answers = {"security": [], "connections": [connection] * count}
        page = asyncio.run(others.security(visit(answers)))
        assert ("among the first 1,000" in page.note) is (count == 1000)


def test_queues_of_spark_that_are_not_shown_are_told() -> None:
    for next in (None, "cursor"):
        page = asyncio.run(others.spark(visit({"queues": queues("Spark.x", 3, next)})))
        assert ("the first 1,000 queues" in page.note) is (next is not None)
