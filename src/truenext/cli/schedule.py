"""`truenext scheduled` and `unschedule`: show and cancel scheduled sends."""

from collections.abc import Iterator
from datetime import UTC, datetime
from heapq import nsmallest
from typing import Any

import click
from rich.table import Table

from truenext.blocking import Connection
from truenext.cli import terminal
from truenext.cli.bulk_work import BulkWork, BulkWorkKind, id_option, json_option, run_in_pieces, selector_option
from truenext.cli.connection import BrokerOptions, broker_options, connected, send_control_request
from truenext.cli.values import COUNT, DestinationParam
from truenext.model.destination import DestinationKind, parse_stored_address
from truenext.model.left_messages import LEFT_TEXTS
from truenext.model.schedule import FOR_EVER

WIDTH = 40
"""Largest number of characters of a body in a table."""


@click.command()
@click.argument("destination", type=DestinationParam(), required=False)
@selector_option
@click.option("--count", type=COUNT, default=100, show_default=True, help="Largest number of sends to show.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object a line, for programs; times are in milliseconds."
)
@broker_options
def scheduled(destination: str | None, selector: str | None, count: int, as_json: bool, broker: BrokerOptions) -> None:
    """Show scheduled sends, soonest first.

    Shows the scheduled sends to DESTINATION, or all. Changes nothing.

    DESTINATION is a queue or /topic/NAME. For a send to several destinations it is the list in the SEND, with commas.
    The table has the first 40 characters of each body, --json its first 1000 bytes.
    """
    shown: list[dict[str, Any]] = []
    total = damaged = 0
    with connected(broker) as connection:
        for piece in _pieces(connection, destination, selector):
            total += piece["moved"]
            damaged += piece["left"]
            shown += piece["sends"]
            if len(shown) >= 2 * count:
                shown = nsmallest(count, shown, key=_due)
    shown = nsmallest(count, shown, key=_due)
    if as_json:
        for send in shown:
            terminal.write_json(send)
    else:
        _print_table(shown)
    if total > count:
        terminal.echo(f"{count:,} of {total:,}; --count shows more", err=True)
    if damaged:
        terminal.echo(f"{damaged:,} not shown: {LEFT_TEXTS['unschedule']}", err=True)


@click.command()
@click.argument("destination", type=DestinationParam())
@id_option("send", "number, as `truenext scheduled` shows it")
@selector_option
@click.option("--dry-run", is_flag=True, help="Print the number of sends, and cancel none.")
@json_option
@broker_options
def unschedule(destination: str, as_json: bool, broker: BrokerOptions, **options: Any) -> None:
    """Cancel scheduled sends to DESTINATION.

    Cancels all of them, or only the sends that --id or --selector names. Messages that were sent already are not
    affected.

    Write DESTINATION as `truenext scheduled` shows it. Exits 1 if the send of an --id was not cancelled.
    """
    kind = BulkWorkKind("unschedule", "cancelled", noun="sends", counted="scheduled")
    BulkWork(kind, _request_target(destination), **options).run(broker, as_json=as_json)


def _request_target(destination: str) -> dict[str, str]:
    """Return the part of a control request that names the destination whose scheduled sends are meant.

    Raises: click.UsageError if nothing can be scheduled for this destination
    """
    parsed = parse_stored_address(destination)
    if parsed.kind is DestinationKind.QUEUE:
        return {"queue": parsed.name}
    if parsed.is_multi_queue and not parsed.session:
        return {"queue": "", "to": parsed.address}
    raise click.UsageError(f"{destination!r} cannot have scheduled sends: name a queue or /topic/NAME")


def _pieces(connection: Connection, destination: str | None, selector: str | None) -> Iterator[dict[str, Any]]:
    facts = send_control_request(connection, "queues")
    counts = {each["name"]: each["scheduled"] for each in facts}
    if destination is not None:
        targets = [_request_target(destination)]
    else:
        targets = [{"queue": name} for name, count in counts.items() if count] + [{"queue": ""}]
    for target in targets:
        request = target if selector is None else target | {"selector": selector}
        for piece in run_in_pieces(connection, "scheduled", request, total=counts.get(target["queue"]), done="read"):
            for send in piece["sends"]:
                # The broker leaves `to` empty for a send to one queue.
                send["to"] = send["to"] or f"/queue/{target['queue']}"
            yield piece


def _due(send: dict[str, Any]) -> tuple[int, int]:
    return send["due_ms"], send["number"]


def _print_table(sends: list[dict[str, Any]]) -> None:
    table = Table("due (UTC)", "id", "to", "priority", "again", "body", box=None)
    for column in table.columns[:2]:
        column.no_wrap = True
    for send in sends:
        due = datetime.fromtimestamp(send["due_ms"] / 1000, UTC).isoformat(" ", "milliseconds").removesuffix("+00:00")
        texts = (
            terminal.table_cell(send["to"]),
            str(send["priority"]),
            terminal.table_cell(_repetition_text(send)),
            terminal.table_cell(_preview(send["body"])),
        )
        table.add_row(due, str(send["number"]), *texts)
    terminal.print_drawn(table)


def _preview(body: str) -> str:
    return body if len(body) <= WIDTH else f"{body[:WIDTH]}..."


def _repetition_text(send: dict[str, Any]) -> str:
    """Return a text on the sends that follow the next one."""
    words = [send["cron"]] if send["cron"] else []
    if send.get("zone"):
        words.append(send["zone"])
    if send["delay_ms"]:
        words.append(f"+ {send['delay_ms']} ms")
    if send["repeat"]:
        times = "without end" if send["repeat"] == FOR_EVER else f"{send['repeat']} times"
        words.append(f"every {send['period_ms']} ms {times}")
    return ", ".join(words)
