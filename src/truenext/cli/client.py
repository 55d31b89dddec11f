"""The commands that talk to a running broker, as any client does: over STOMP."""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import click
import msgspec
from rich.table import Table

from truenext.cli import terminal
from truenext.cli.ending import Failure, Unasked
from truenext.cli.terminal import counted
from truenext.cli.values import COUNT, SELECTOR, URL, Address, Body, Header, Seconds
from truenext.client.connection import Connection
from truenext.errors import TruenextError
from truenext.url import DEFAULT_URL
from truenext.wire.stomp.frame import Frame

COUNTS = ("waiting", "unacknowledged", "consumers", "scheduled")
CONFIRM_EVERY = 500
"""Messages between two receipts when many are sent."""

url_option = click.option("--url", type=URL, default=DEFAULT_URL, show_default=True, help="Where the broker listens.")


@click.command()
@click.argument("queue", type=Address())
@click.argument("body", type=Body(), required=False)
@click.option("--lines", is_flag=True, help="Read standard input and send each line as a message.")
@click.option("--priority", type=click.IntRange(0, 9), default=4, show_default=True, help="9 is served first.")
@click.option("--transient", is_flag=True, help="Do not write it to disk; a crash of the broker loses it.")
@click.option(
    "--header", "headers", type=Header(), multiple=True, metavar="NAME=VALUE", help="One of your own. May be repeated."
)
@url_option
def send(
    queue: str,
    body: bytes | None,
    lines: bool,
    priority: int,
    transient: bool,
    headers: tuple[tuple[str, str], ...],
    url: str,
) -> None:
    """Send BODY, or what comes on standard input, to QUEUE. Returns once the broker has it safe."""
    if lines and body is not None:
        raise click.UsageError("either BODY or --lines")
    fields = {"priority": str(priority), "persistent": "false" if transient else "true"}
    fields |= dict(headers)
    count = 0
    try:
        with Connection(url) as connection:
            for count, each in enumerate(_standard_input(lines=lines) if body is None else [body], 1):
                connection.send(queue, each, fields, is_confirmed=count % CONFIRM_EVERY == 0)
                if count % 50_000 == 0:
                    terminal.say(f"{count} sent", err=True)
            # The receipt of the DISCONNECT confirms what is left.
    except TruenextError as error:
        raise Failure(error) from error
    if lines:
        terminal.say(f"{count} sent", err=True)


def _standard_input(*, lines: bool) -> Iterator[bytes]:
    """All of it, or its lines. Raises: TruenextError"""
    if sys.stdin is None:
        raise TruenextError("cannot read standard input: it is closed")
    try:
        if lines:
            yield from (line.removesuffix(b"\n") for line in sys.stdin.buffer)
        else:
            yield sys.stdin.buffer.read()
    except OSError as error:
        raise TruenextError(f"cannot read standard input: {error.strerror}") from error


@click.command()
@click.argument("queue", type=Address())
@click.option("--count", type=COUNT, show_default="1", help="Messages to take.")
@click.option("--all", "takes_all", is_flag=True, help="Take what is there, until none comes within the timeout.")
@click.option("--timeout", type=Seconds(), default=2.0, show_default=True, help="Seconds to wait for a message.")
@click.option("--headers", "with_headers", is_flag=True, help="One JSON object a line: headers and body.")
@url_option
def receive(queue: str, count: int | None, takes_all: bool, timeout: float, with_headers: bool, url: str) -> None:
    """Take messages from QUEUE, the true next first, and print their bodies.

    A message is acknowledged once it is printed. Exits 1 if fewer than --count came.
    """
    if takes_all and count is not None:
        raise click.UsageError("either --count or --all")
    wanted = count or 1
    taken = 0
    try:
        with Connection(url) as connection:
            connection.subscribe(queue)
            while takes_all or taken < wanted:
                message = connection.receive(timeout)
                if message is None:
                    break
                taken += 1
                _print_message(message, with_headers=with_headers)
                sys.stdout.buffer.flush()
                connection.acknowledge(message)
    except TruenextError as error:
        raise Failure(error) from error
    if not takes_all and taken < wanted:
        terminal.say(f"truenext: {taken} of {wanted} messages came within {timeout:g} seconds", err=True)
        raise SystemExit(1)


@click.command()
@click.argument("queue", type=Address())
@click.option(
    "--selector",
    type=SELECTOR,
    help="Only what this JMS selector wants, such as \"colour = 'red' AND JMSPriority > 6\".",
)
@click.option("--limit", type=COUNT, help="Messages to show at most.")
@click.option("--headers", "with_headers", is_flag=True, help="One JSON object a line: headers and body.")
@url_option
def browse(queue: str, selector: str | None, limit: int | None, with_headers: bool, url: str) -> None:
    """Print the bodies of what waits in QUEUE, the true next first. Everything stays where it is."""
    try:
        with Connection(url) as connection:
            for message in islice(connection.browse(queue, selector), limit):
                _print_message(message, with_headers=with_headers)
    except TruenextError as error:
        raise Failure(error) from error


def _print_message(message: Frame, *, with_headers: bool) -> None:
    if with_headers:
        terminal.write_json({"headers": message.headers, "body": message.body.decode(errors="replace")})
    else:
        terminal.write_body(message.body)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
@url_option
def queues(as_json: bool, url: str) -> None:
    """List the queues: what waits, what consumers hold, who consumes.

    What ends with its connection, as a subscription to a topic that is not durable, is in `truenext status`.
    """
    try:
        with Connection(url) as connection:
            answer = connection.ask("queues")
    except TruenextError as error:
        raise Failure(error) from error
    if as_json:
        terminal.write_json_text(answer)
        return
    table = Table("queue", *COUNTS, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for queue in msgspec.json.decode(answer):
        name = f"{queue['name']} (paused)" if queue["paused"] else queue["name"]
        table.add_row(terminal.cell(name), *(str(queue[name]) for name in COUNTS))
    terminal.show(table)


def _held_for(facts: dict[str, Any]) -> str:
    return f"{facts['waiting']:,} waiting, {facts['unacknowledged']:,} unacknowledged, {facts['bytes']:,} bytes"


@click.command()
@url_option
def status(url: str) -> None:
    """Say how the broker is: whether a queue is stuck, what its memory and disk are used for, and for which clients it
    keeps what ends with their connections.

    A queue is stuck if a message is ready, a consumer has credit for it, and nothing happens: a fault of the broker's.
    Exits 0 if none is, 1 if one is, 2 if the broker could not be asked.
    """
    try:
        with Connection(url) as connection:
            facts = msgspec.json.decode(connection.ask("status"))
    except TruenextError as error:
        raise Unasked(error) from error
    memory = facts["memory"]
    held_in = ", ".join(f"{memory[name]:,} {name}" for name in ("leaving", "unsent", "open"))
    of_queues = counted(facts["queues"], "queue")
    terminal.say(f"messages   {facts['waiting']:,} waiting in {of_queues}, {facts['in_memory']:,} in memory")
    subscriptions = facts["subscriptions"]
    durable = counted(subscriptions["durable"], "durable subscription")
    terminal.say(f"topics     {durable}, {counted(subscriptions['others'], 'other')}")
    terminal.say(f"temporary  {_held_for(facts['temporary'])}, in what ends with its connection")
    for each in facts["temporary"]["largest"]:
        called = f" ({terminal.line(each['client_id'])})" if each["client_id"] else ""
        of_whom = f"{terminal.line(each['destination'])} of {each['client']}{called}"
        terminal.say(f"           {of_whom}: {_held_for(each)}")
    scheduled = counted(facts["scheduled"], "send")
    terminal.say(
        f"scheduled  {scheduled}, {facts['scheduled_for_topics']:,} of them for topics or several destinations"
    )
    limit = "" if memory["limit"] is None else f" of {memory['limit']:,}"
    terminal.say(f"memory     {memory['used']:,}{limit} bytes used; {held_in}")
    terminal.say(f"disk       room: {facts['room']}; {counted(facts['page_reads'], 'page read')} under way")
    for stuck in facts["stuck"]:
        terminal.say(f"stuck      {stuck['queue']}, for {stuck['waiting_ms'] / 1000:.1f} seconds")
    if facts["stuck"]:
        raise SystemExit(1)
    terminal.say("stuck      none")
