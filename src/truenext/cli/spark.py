"""The commands of `truenext spark`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from rich.table import Table

from truenext.cli import terminal
from truenext.cli.connection import url_option
from truenext.cli.exit_status import CommandFailure
from truenext.cli.values import NUMBER_MAX, QueryIdParam
from truenext.errors import ConfigurationError, TruenextError
from truenext.model.url import parse_url

if TYPE_CHECKING:
    from truenext.spark.source.connection import BrokerConnection


@click.group()
def spark() -> None:
    """Look after what Spark's queries have taken from queues.

    A query keeps the rows of a batch in queues of its own until the batch is done. See docs/spark.md.
    """


@spark.command("list")
@url_option
def list_(url: str) -> None:
    """Show each query: what it reads, its batch, and what it has not cleared."""
    with _connected(url) as broker:
        from truenext.spark.source.admin import list_queries

        queries = list_queries(broker)
    table = Table("space", "id", "queue", "batch", "rows", "bytes", "since", box=None)
    for each in queries:
        since = datetime.fromtimestamp(each.since_ms / 1000, UTC).isoformat(" ", "seconds") if each.since_ms else ""
        batch = "abandoned" if each.is_abandoned else f"{each.batch:,}"
        table.add_row(each.space, each.id, each.source, batch, f"{each.rows:,}", f"{each.bytes:,}", since)
    terminal.print_drawn(table)


@spark.command()
@click.argument("query_id", metavar="ID", type=QueryIdParam())
@url_option
def abandon(query_id: str, url: str) -> None:
    """Close the query ID for ever, and return its rows to their queues.

    They are new arrivals there. If its last batch was written but not cleared, its rows come twice: see docs/spark.md.
    A query that still runs fails.
    """
    with _connected(url) as broker:
        from truenext.spark.source.admin import abandon as abandon_query
        from truenext.spark.source.admin import find_query

        rows = 0
        for count in abandon_query(broker, find_query(broker, query_id)):
            rows += count
            terminal.echo(f"{rows:,} rows returned", err=True)
    terminal.echo(f"closed; {rows:,} rows returned")


@spark.command()
@click.argument("query_id", metavar="ID", type=QueryIdParam())
@click.argument("sequence", type=click.IntRange(1, NUMBER_MAX))
@url_option
def reject(query_id: str, sequence: int, url: str) -> None:
    """Move one row of the query ID to its dead-letter queue: one that Spark cannot process.

    Stop the query first, and start it again behind this.
    """
    with _connected(url) as broker:
        from truenext.spark.source.admin import find_query
        from truenext.spark.source.admin import reject as reject_row

        target = reject_row(broker, find_query(broker, query_id), sequence)
    terminal.echo(f"message {sequence} is in {target}")


@contextmanager
def _connected(url: str) -> Iterator[BrokerConnection]:
    """Raises: CommandFailure"""
    try:
        from truenext.spark.source import admin  # noqa: F401
        from truenext.spark.source.connection import BrokerConnection
    except ModuleNotFoundError as error:
        raise CommandFailure(ConfigurationError(f"this needs {error.name}: pip install 'truenext[spark]'")) from error
    try:
        with BrokerConnection([parse_url(url)]) as broker:
            yield broker
    except TruenextError as error:
        raise CommandFailure(error) from error
