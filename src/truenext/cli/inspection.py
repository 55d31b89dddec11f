"""`truenext consumers`, `policy`, `connections`: show the clients of a running broker, and the settings of a queue."""

from typing import Any

import click
import msgspec

from truenext.cli import terminal
from truenext.cli.bulk_work import json_option
from truenext.cli.connection import BrokerOptions, broker_options, connected
from truenext.cli.values import TEXT, QueueNameParam

_Row = dict[str, Any]


@click.command()
@click.argument("queue", type=QueueNameParam())
@json_option
@broker_options
def consumers(queue: str, as_json: bool, broker: BrokerOptions) -> None:
    """List the consumers of QUEUE.

    Shows for each consumer its window (how many messages it may hold), how many messages of QUEUE it holds, for how
    long it has held the first of them, the seconds since its last ACK or NACK, and its connection, which `truenext
    connections` shows, too. Consumers of patterns that match QUEUE are among them.

    Without the right `monitor`, users and addresses of others are left out.
    """
    answer = _ask(broker, "consumers", {"queue": queue})
    if as_json:
        terminal.write_json_text(answer)
        return
    rows: list[_Row] = msgspec.json.decode(answer)
    terminal.print_columns(
        (
            "subscription",
            "window",
            "held",
            "held for",
            "last ack",
            "connection",
            "user",
            "address",
            "client id",
            "destination",
        ),
        [_consumer_cells(row) for row in rows],
    )


def _consumer_cells(row: _Row) -> tuple[str, ...]:
    window = "none" if row["window"] is None else f"{row['window']:,}"
    if row["automatic"]:
        window += " (automatic)"
    if row["suspended"]:
        window += " (suspended)"
    # Missing in answers of older brokers.
    held_s = row.get("held_s")
    held_for = "" if held_s is None else terminal.format_age(held_s)
    last_s = row["last_acknowledgement_s"]
    last = "never" if last_s is None else f"{last_s:,.1f} s ago"
    destination = row["destination"]
    if row["selector"] is not None:
        destination += f" where {row['selector']}"
    identity = (row[name] or "" for name in ("user", "address", "client_id"))
    return row["id"], window, f"{row['held']:,}", held_for, last, row["connection"], *identity, destination


@click.command()
@click.argument("queue", type=QueueNameParam())
@json_option
@broker_options
def policy(queue: str, as_json: bool, broker: BrokerOptions) -> None:
    """Print the settings of QUEUE, and what sets each of them.

    Asks a running broker. Each setting has its origin: a table of the broker's configuration file, its command line, or
    nothing (default). `truenext config check FILE --queue NAME` prints the same of a file.
    """
    answer = _ask(broker, "policy", {"queue": queue})
    if as_json:
        terminal.write_json_text(answer)
        return
    settings: dict[str, _Row] = msgspec.json.decode(answer)["settings"]
    terminal.print_columns(
        (f"policy of {queue}", "value", "from"),
        [(name, _value_text(row["value"]), row["source"]) for name, row in settings.items()],
    )


def _value_text(value: object) -> str:
    return "none" if value is None else f"{value:,}" if isinstance(value, int | float) else str(value)


@click.command()
@click.option(
    "--close",
    "closed",
    type=TEXT,
    metavar="CONNECTION",
    help="Close this connection, as the list names it. Its client may connect again; no attempt is counted.",
)
@json_option
@broker_options
def connections(closed: str | None, as_json: bool, broker: BrokerOptions) -> None:
    """List the open connections of the broker, or close one.

    Shows for each connection its user and address, client id, protocol, version of TLS, the time of its login, and how
    many consumers it has and messages they hold. Needs the right `monitor`, and --close the right `admin`.
    """
    request = None if closed is None else {"connection": closed}
    answer = _ask(broker, "connections" if closed is None else "close", request)
    if as_json:
        terminal.write_json_text(answer)
    elif closed is not None:
        row: _Row = msgspec.json.decode(answer)
        user = f" of user {row['user']!r}" if row["user"] else ""
        terminal.echo(f"closed the connection{user} from {row['address']}")
    else:
        terminal.print_columns(
            ("connection", "user", "address", "client id", "protocol", "since", "consumers", "held"),
            [_connection_cells(row) for row in msgspec.json.decode(answer)],
        )


def _connection_cells(row: _Row) -> tuple[str, ...]:
    protocol = f"{row['protocol']}, {row['tls'] or 'no TLS'}"
    counts = (f"{row['consumers']:,}", f"{row['held']:,}")
    since = terminal.format_utc(row["since"])
    return row["connection"], row["user"], row["address"], row["client_id"], protocol, since, *counts


def _ask(broker: BrokerOptions, verb: str, request: object) -> bytes:
    with connected(broker) as connection:
        return connection.control_request(verb, request)
