"""`truenext queues`: lists the queues of a running broker."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
import msgspec

from truenext.blocking import Connection
from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, broker_options, connected
from truenext.cli.exit_status import CommandFailure
from truenext.cli.terminal import format_age
from truenext.cli.values import COUNT, TEXT, EnumParam
from truenext.cli.watch import rows_that_fit, show_repeatedly, watch_option
from truenext.errors import RemoteProtocolError
from truenext.model.control_answers import QueueOrder, QueueReport, QueuesReport
from truenext.model.numerals import count_noun

COUNTS = ("waiting", "unacknowledged", "consumers", "scheduled")
NAME_WIDTH_MAX = 60
"""Largest width of the column of names. A longer name moves the rest of its line to the right."""

WATCHED_ROWS = 50
"""Number of queues that `--watch` shows where there is no terminal."""

_OTHER_LINES = 3
"""Lines of a terminal that have no queue: the head, the sums, and the cursor's."""


@click.command()
@click.argument("name", type=TEXT, required=False)
@click.option(
    "--order",
    type=EnumParam(QueueOrder),
    default=QueueOrder.NAME.value,
    show_default=True,
    help="Order of the queues: by name, most waiting messages, oldest waiting message, message that a consumer has "
    "held longest, most repeated failures, or most acknowledged in a second first.",
)
@click.option("--count", type=COUNT, help="Largest number of queues to list.")
@click.option(
    "--after", type=TEXT, help="List the queues behind this place: `next` of an answer with --json and --count."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@watch_option
@broker_options
def queues(
    name: str | None,
    order: QueueOrder,
    count: int | None,
    after: str | None,
    as_json: bool,
    is_watched: bool,
    broker: BrokerOptions,
) -> None:
    """List the queues.

    Lists those whose names have NAME in them or match the pattern NAME, such as 'orders.>', and without NAME all. Shows
    for each queue the number of waiting messages, of messages that consumers hold (unacknowledged), of consumers, and
    of scheduled messages. With NAME or an option also shows the number of messages that have become dead letters since
    the broker started, the age of the oldest waiting message, for how long a consumer has held one (held for), how
    often messages have failed that had failed before (again), how many are acknowledged in a second, and the sums.

    Temporary queues, and subscriptions to topics that are not durable, are in `truenext status`.
    """
    request = {"name": name or "", "order": order.value, "limit": count, "after": after}
    if is_watched and count is None:
        request["limit"] = rows_that_fit(_OTHER_LINES) if sys.stdout.isatty() else WATCHED_ROWS
    is_plain = request == {"name": "", "order": "name", "limit": None, "after": None}
    with connected(broker) as connection:
        if is_watched:
            show_repeatedly(
                lambda: connection.control_request("queues", request),
                lambda answer: _print(answer, as_json=as_json, is_plain=False),
            )
        if is_plain or as_json or count is not None:
            answer = connection.control_request("queues", None if is_plain else request)
            _print(answer, as_json=as_json, is_plain=is_plain)
        else:
            _print_found(_all_found(connection, request))


def _print(answer: bytes, *, as_json: bool, is_plain: bool) -> None:
    if as_json:
        if not is_plain:
            _decode(answer)
        terminal.write_json_text(answer)
    elif is_plain:
        _write(_lines(msgspec.json.decode(answer, type=list[QueueReport]), with_times=False))
    else:
        _print_found(_decode(answer))


def _all_found(connection: Connection, request: dict[str, Any]) -> QueuesReport:
    """Request all queues, in as many answers as needed."""
    found = answer = _decode(connection.control_request("queues", request))
    while answer.next is not None:
        answer = _decode(connection.control_request("queues", request | {"after": answer.next}))
        found.queues += answer.queues
    return found


def _decode(answer: bytes) -> QueuesReport:
    if answer.startswith(b"["):
        text = "the broker is of an earlier version, and only lists all queues: leave NAME and the options out"
        raise CommandFailure(RemoteProtocolError(text))
    return msgspec.json.decode(answer, type=QueuesReport)


def _print_found(found: QueuesReport) -> None:
    _write(_lines(found.queues, with_times=True))
    _write(_sums(found))


def _write(lines: Iterator[str]) -> None:
    click.echo("\n".join(lines))


def _lines(rows: list[QueueReport], *, with_times: bool) -> Iterator[str]:
    """Yield the lines of a table. Made without rich, which takes 17 seconds for 50,000 queues."""
    names = [terminal.escape_line(row.name) + (" (paused)" if row.paused else "") for row in rows]
    columns = [_column(count, [getattr(row, count) for row in rows]) for count in COUNTS]
    if with_times:
        columns.append(_column("dead", [sum(row.dead_lettered.values()) for row in rows]))
        columns.append(_column("oldest", [_age(row.oldest_s) for row in rows]))
        columns.append(_column("held for", [_age(row.held_s) for row in rows]))
        columns.append(_column("again", [row.failed_again or "" for row in rows]))
        columns.append(_column("rate", [f"{row.rate:.1f}" if row.rate else "" for row in rows]))
    width = min(max(map(len, names), default=0), NAME_WIDTH_MAX)
    for name, *cells in zip(("queue", *names), *columns, strict=True):
        yield f" {name:{max(width, 5)}}  {'  '.join(cells)}".rstrip()


def _age(seconds: float | None) -> str:
    return "" if seconds is None else format_age(seconds)


def _column(head: str, values: Sequence[object]) -> list[str]:
    """Return the cells of a column, aligned to the right."""
    cells = [head, *map(str, values)]
    width = max(map(len, cells))
    return [cell.rjust(width) for cell in cells]


def _sums(found: QueuesReport) -> Iterator[str]:
    sums = found.sums
    shown = f"{len(found.queues):,} of " if len(found.queues) != sums.queues else ""
    oldest = "" if sums.oldest_s is None else f", the oldest for {format_age(sums.oldest_s)}"
    yield (
        f"{shown}{count_noun(sums.queues, 'queue')}: {sums.waiting:,} waiting{oldest}, {sums.held:,} "
        f"unacknowledged, {sum(sums.dead_lettered.values()):,} dead, {sums.rate:,.1f} acknowledged a second"
    )
