"""The commands of `truenext spark`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import ModuleType
from typing import TYPE_CHECKING

import click
from rich.table import Table

from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, broker_options, with_login_hint
from truenext.cli.values import NUMBER_MAX, QUERY_ID
from truenext.errors import ConfigurationError, TruenextError
from truenext.model.url import parse_url

if TYPE_CHECKING:
    from truenext.spark.broker.connection import BrokerConnection

_id_argument = click.argument("query_id", metavar="ID", type=QUERY_ID)


@click.group()
def spark() -> None:
    """Look after queues that Spark's queries have in the broker.

    A query that reads queues keeps the rows of a batch in its own queues until the batch is done. A query that writes
    to queues keeps rows in its own queues until they are published. See docs/spark.md.
    """


@spark.command("list")
@broker_options
def list_(broker: BrokerOptions) -> None:
    """Show queries, with source, batch and unfinished work."""
    with _connected(broker) as (connection, admin):
        sources = admin.list_queries(connection)
        sinks = admin.list_sinks(connection)
    table = Table("space", "id", "reads", "batch", "rows", "bytes", "since", box=None)
    for source in sources:
        batch = "abandoned" if source.is_abandoned else f"{source.batch:,}"
        since = _time(source.since_ms)
        table.add_row(source.space, source.id, source.source, batch, f"{source.rows:,}", f"{source.bytes:,}", since)
    terminal.print_drawn(table)
    table = Table("space", "id", "writes", "batch", "rows", "bytes", "since", box=None)
    for sink in sinks:
        decision = sink.decision
        batch = "none" if decision is None else "abandoned" if decision.is_closed else f"{decision.batch:,}"
        state = "to publish" if sink.rows else "drafts" if sink.bytes else ""
        since = _time(sink.since_ms)
        table.add_row(sink.queues.space, sink.queues.id, state, batch, f"{sink.rows:,}", f"{sink.bytes:,}", since)
    if sinks:
        terminal.print_drawn(table)


def _time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(" ", "seconds") if time_ms else ""


@spark.command()
@_id_argument
@broker_options
def publish(query_id: str, broker: BrokerOptions) -> None:
    """Publish the rest of the output that the query ID has decided.

    The query does the same when it is restarted.
    """
    with _connected(broker) as (connection, admin):
        batch = admin.publish_decision(connection, admin.find_sink(connection, query_id).queues)
    terminal.echo(f"batch {batch} is published")


@spark.command()
@_id_argument
@broker_options
def abandon(query_id: str, broker: BrokerOptions) -> None:
    """Close the query ID for good, and return its rows.

    Rows that the query has read return to their queues, as new arrivals. If the query writes to queues of the same
    broker, output that it has decided is published, and the rows of these batches are dropped. Otherwise the rows of
    its last batch may be processed twice: see docs/spark.md. If the query still runs, it fails.
    """
    with _connected(broker) as (connection, admin):
        returned = dropped = 0
        for returned_now, dropped_now in admin.abandon(connection, admin.find(connection, query_id)):
            returned, dropped = returned + returned_now, dropped + dropped_now
            terminal.echo(f"{returned:,} rows returned", err=True)
    reason = ", as their output is published" if dropped else ""
    terminal.echo(f"closed; {returned:,} rows returned, {dropped:,} dropped{reason}")


@spark.command()
@_id_argument
@click.argument("sequence", type=click.IntRange(1, NUMBER_MAX))
@broker_options
def reject(query_id: str, sequence: int, broker: BrokerOptions) -> None:
    """Make one row of the query ID a dead letter of its queue.

    This is for a row that Spark cannot process. Stop the query first, and restart it afterwards.
    """
    with _connected(broker) as (connection, admin):
        queue = admin.reject(connection, admin.find_source(connection, query_id), sequence)
    terminal.echo(f"message {sequence} of {queue} is rejected")


@spark.command()
@_id_argument
@broker_options
def forget(query_id: str, broker: BrokerOptions) -> None:
    """Remove all that the broker stores for the query ID.

    End the query for good first: a query that runs on fails. For 7 days nothing can be written under ID.
    """
    with _connected(broker) as (connection, admin):
        admin.forget(connection, admin.find(connection, query_id))
    terminal.echo("forgotten")


@contextmanager
def _connected(broker: BrokerOptions) -> Iterator[tuple[BrokerConnection, ModuleType]]:
    """Connect to a broker, and import the module `truenext.spark.admin`.

    Raises: TruenextError if Spark is not installed, or the connection fails
    """
    try:
        from truenext.spark import admin
        from truenext.spark.broker.connection import BrokerConnection
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"this command needs {error.name}: pip install 'truenext[spark]'") from error
    try:
        addresses = [parse_url(each) for each in broker.urls]
        with BrokerConnection(addresses, broker.credentials, broker.timeout_s) as connection:
            yield connection, admin
    except TruenextError as error:
        raise with_login_hint(error, broker.credentials) from error
