"""`truenext queues`: lists the queues of a running broker."""

import sys
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from truenext.blocking import Connection
from truenext.broker.control_answers import QueueOrder
from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, broker_options, connected
from truenext.cli.exit_status import CommandFailure
from truenext.cli.terminal import count_noun, format_age
from truenext.cli.values import TEXT, EnumParam
from truenext.cli.watch import rows_that_fit, show_repeatedly, watch_option
from truenext.errors import RemoteProtocolError

COUNTS = ("waiting", "unacknowledged", "consumers", "scheduled")
NAME_WIDTH_MAX = 60
"""Largest width of the column of names. A longer name moves the rest of its line to the right."""

WATCHED_ROWS = 50
"""Number of queues that `--watch` shows where there is no terminal."""

_OTHER_LINES = 3
"""Lines of a terminal that have no queue: the head, the sums, and the cursor's."""


class _Row(msgspec.Struct):
    """Fields of a QueueReport that the list shows. Those with a default are missing in answers of older brokers."""

    name: str
    waiting: int
    unacknowledged: int
    consumers: int
    scheduled: int
    paused: bool
    dead_lettered: dict[str, int] = {}
    oldest_s: float | None = None
    rate: float = 0.0


class _Answer(msgspec.Struct):
    """Answer to a request with a body."""

    queues: list[_Row]
    next: str | None
    sums: dict[str, Any]


@click.command()
@click.argument("name", type=TEXT, required=False)
@click.option(
    "--order",
    type=EnumParam(QueueOrder),
    default=QueueOrder.NAME.value,
    show_default=True,
    help="Order of the queues: by name, most waiting messages, oldest waiting message, or most acknowledged in a "
    "second first.",
)
@click.option("--limit", type=click.IntRange(min=0), help="Largest number of queues to list; 0 for the sums alone.")
@click.option(
    "--after", type=TEXT, help="List the queues behind this place: `next` of an answer with --json and --limit."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@watch_option
@broker_options
def queues(
    name: str | None,
    order: QueueOrder,
    limit: int | None,
    after: str | None,
    as_json: bool,
    is_watched: bool,
    broker: BrokerOptions,
) -> None:
    """List the queues whose names have NAME in them, or match the pattern NAME, such as 'orders.>'; without NAME all.

    Shows for each queue the number of waiting messages, of messages that consumers hold, of consumers, of scheduled
    messages, and of messages that have become dead letters since the broker started; the age of the oldest waiting
    message; and how many messages are acknowledged in a second.

    Temporary queues, and subscriptions to topics that are not durable, are in `truenext status`.
    """
    request = {"name": name or "", "order": order.value, "limit": limit, "after": after}
    if is_watched and limit is None:
        request["limit"] = rows_that_fit(_OTHER_LINES) if sys.stdout.isatty() else WATCHED_ROWS
    is_plain = request == {"name": "", "order": "name", "limit": None, "after": None}
    with connected(broker) as connection:
        if is_watched:
            _watch(connection, request, as_json=as_json)
        answer = connection.control_request("queues", None if is_plain else request)
    _print(answer, as_json=as_json, is_plain=is_plain)


def _watch(connection: Connection, request: dict[str, Any], *, as_json: bool) -> None:
    show_repeatedly(lambda: _print(connection.control_request("queues", request), as_json=as_json, is_plain=False))


def _print(answer: bytes, *, as_json: bool, is_plain: bool) -> None:
    if not is_plain and answer.startswith(b"["):
        raise CommandFailure(
            RemoteProtocolError(
                "the broker is of an earlier version, and lists only all queues: leave NAME and the options away"
            )
        )
    if as_json:
        terminal.write_json_text(answer)
    elif is_plain:
        _write(_lines(msgspec.json.decode(answer, type=list[_Row])))
    else:
        found = msgspec.json.decode(answer, type=_Answer)
        _write(_lines(found.queues))
        _write(_sums(found))


def _write(lines: Iterator[str]) -> None:
    click.echo("\n".join(lines))


def _lines(rows: list[_Row]) -> Iterator[str]:
    """Yield the lines of a table. Made without rich, which takes 17 seconds for 50,000 queues."""
    names = [terminal.escape_line(row.name) + (" (paused)" if row.paused else "") for row in rows]
    width = min(max(map(len, names), default=0), NAME_WIDTH_MAX)
    yield f"{'queue':{width}}  waiting  unacknowledged  consumers  scheduled     dead  oldest      rate"
    for name, row in zip(names, rows, strict=True):
        dead = sum(row.dead_lettered.values()) if row.dead_lettered else 0
        oldest = "" if row.oldest_s is None else format_age(row.oldest_s)
        rate = f"{row.rate:.1f}" if row.rate else ""
        yield (
            f"{name:{width}}  {row.waiting:7}  {row.unacknowledged:14}  {row.consumers:9}  {row.scheduled:9}  "
            f"{dead:7}  {oldest:>6}  {rate:>8}"
        ).rstrip()


def _sums(found: _Answer) -> Iterator[str]:
    sums = found.sums
    shown = f"{len(found.queues):,} of " if len(found.queues) != sums["queues"] else ""
    oldest = "" if sums["oldest_s"] is None else f", the oldest for {format_age(sums['oldest_s'])}"
    yield (
        f"{shown}{count_noun(sums['queues'], 'queue')}: {sums['waiting']:,} waiting{oldest}, {sums['held']:,} "
        f"unacknowledged, {sum(sums['dead_lettered'].values()):,} dead, {sums['rate']:,.1f} acknowledged a second"
    )
