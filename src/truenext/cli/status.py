"""`truenext queues` and `truenext status`: show the queues and the state of a running broker."""

from typing import Any

import click
import msgspec
from rich.table import Table

from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, broker_options, connected, send_control_request
from truenext.cli.exit_status import NoAnswerFailure
from truenext.cli.members import print_members
from truenext.cli.terminal import count_noun

COUNTS = ("waiting", "unacknowledged", "consumers", "scheduled")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@broker_options
def queues(as_json: bool, broker: BrokerOptions) -> None:
    """List the queues.

    Shows for each queue the number of waiting messages, of messages that consumers hold, of consumers, and of scheduled
    messages.

    Temporary queues, and subscriptions to topics that are not durable, are in `truenext status`.
    """
    with connected(broker) as connection:
        answer = connection.control_request("queues")
    if as_json:
        terminal.write_json_text(answer)
        return
    table = Table("queue", *COUNTS, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for queue in msgspec.json.decode(answer):
        name = f"{queue['name']} (paused)" if queue["paused"] else queue["name"]
        table.add_row(terminal.table_cell(name), *(str(queue[name]) for name in COUNTS))
    terminal.print_drawn(table)


_LEVEL_EFFECTS = {
    "little": ", connections that only send wait or are refused",
    "none": ", sends are refused, except in transactions that free as much as they send",
    "full": ", all sends are refused",
}


def _disk_level(facts: dict[str, Any]) -> str:
    """Return a text on the free space of a broker. `facts` is the answer to its `status` request."""
    sizes, level = facts["disk_bytes"], facts["disk_level"]
    text = f"level: {level}{_LEVEL_EFFECTS.get(level, '')}"
    if "free" in sizes:
        text += f"; {sizes['free']:,} bytes free, {sizes['needed']:,} needed"
    if "limit" in sizes:
        text += f"; {sizes['used']:,} of {sizes['limit']:,} bytes used"
    if "backup" in sizes:
        text += f"; {sizes['backup']:,} bytes needed by a backup"
    if "database_limit" in sizes:
        text += f"; {sizes['database_used']:,} of {sizes['database_limit']:,} bytes used in the database"
    return text


def _log_text(log: dict[str, Any]) -> str:
    replicated = "replicated" if log["replicated"] else "not replicated: messages are on one database alone"
    rows = f"epoch {log['epoch']:,}, row {log['number']:,}, compacted up to row {log['position']:,}"
    return f"{rows}; {replicated}"


_AWAITED = {"database": "PostgreSQL", "standby": "the standby of PostgreSQL", "space": "space in PostgreSQL"}


def _server_text(log: dict[str, Any]) -> str:
    if log["awaited"] is None:
        return f"on {log['server']}"
    awaited = f"waiting for {_AWAITED[log['awaited']]} since {terminal.format_utc(log['waiting_since_ms'])}"
    return f"on {log['server']}; {awaited}, nothing is confirmed meanwhile"


def _counts_text(facts: dict[str, Any]) -> str:
    return f"{facts['waiting']:,} waiting, {facts['unacknowledged']:,} unacknowledged, {facts['bytes']:,} bytes"


@click.command()
@broker_options
def status(broker: BrokerOptions) -> None:
    """Show the state of the broker.

    Shows the numbers of messages, subscriptions and scheduled sends, memory, and disk space. If messages are in
    PostgreSQL, shows the log with all its brokers, and since when it waits for PostgreSQL or its standby. Also shows
    which clients have most messages in temporary queues, and in topic subscriptions that are not durable. A queue is
    stuck if a message is ready, a consumer has credit for it, and nothing is dispatched, which is a fault of the
    broker.

    Exits 0 if no queue is stuck, 1 if one is, 2 if the broker could not be asked.
    """
    with connected(broker, failure=NoAnswerFailure) as connection:
        facts = send_control_request(connection, "status")
    memory = facts["memory"]
    usage = ", ".join(f"{memory[name]:,} {name}" for name in ("leaving", "unsent", "open", "incomplete"))
    of_queues = count_noun(facts["queues"], "queue")
    terminal.echo(f"messages   {facts['waiting']:,} waiting in {of_queues}, {facts['in_memory']:,} in memory")
    subscriptions = facts["subscriptions"]
    durable = count_noun(subscriptions["durable"], "durable subscription")
    terminal.echo(f"topics     {durable}, {count_noun(subscriptions['non_durable'], 'other')}")
    terminal.echo(
        f"temporary  {_counts_text(facts['temporary'])}, in queues and subscriptions that end with their connection"
    )
    for each in facts["temporary"]["largest"]:
        client_id = f" ({terminal.escape_line(each['client_id'])})" if each["client_id"] else ""
        owner = f"{terminal.escape_line(each['destination'])} of {each['client']}{client_id}"
        terminal.echo(f"           {owner}: {_counts_text(each)}")
    scheduled = count_noun(facts["scheduled"], "send")
    terminal.echo(
        f"scheduled  {scheduled}, {facts['scheduled_for_topics']:,} of them for topics or several destinations"
    )
    limit = "" if memory["limit"] is None else f" of {memory['limit']:,}"
    terminal.echo(f"memory     {memory['used']:,}{limit} bytes used; {usage}")
    terminal.echo(f"disk       {_disk_level(facts)}; {count_noun(facts['page_reads'], 'page read')} under way")
    if "log" in facts:
        terminal.echo(f"log        {_log_text(facts['log'])}")
        terminal.echo(f"           {_server_text(facts['log'])}")
        print_members("members    ", facts["log"]["members"], facts["log"]["epoch"], facts["log"]["number"])
    terminal.echo(f"codec      in {facts['codec']}")
    for stuck in facts["stuck"]:
        terminal.echo(f"stuck      {stuck['queue']}, for {stuck['waiting_ms'] / 1000:.1f} seconds")
    if facts["stuck"]:
        raise SystemExit(1)
    terminal.echo("stuck      none")
