"""`truenext status`: shows the state of a running broker."""

from typing import Any

import click
import msgspec

from truenext.cli import terminal
from truenext.cli.bulk_work import json_option
from truenext.cli.connection import BrokerOptions, broker_options, connected
from truenext.cli.exit_status import NoAnswerFailure
from truenext.cli.members import print_members
from truenext.cli.terminal import format_age
from truenext.cli.watch import show_repeatedly, watch_option
from truenext.model.database import AWAITED_TEXTS
from truenext.model.numerals import count_noun

_NOT_READY = "no: the broker is being drained; connections that only send wait, new ones may only send control requests"

_LONGEST_QUEUES = "see what waits: `truenext queues --order waiting`, and the temporary ones above"

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


def _server_text(log: dict[str, Any]) -> str:
    if log["awaited"] is None:
        return f"on {log['server']}"
    awaited = f"waiting for {AWAITED_TEXTS[log['awaited']]} since {terminal.format_utc(log['waiting_since_ms'])}"
    return f"on {log['server']}; {awaited}, nothing is confirmed meanwhile"


def _counts_text(facts: dict[str, Any]) -> str:
    return f"{facts['waiting']:,} waiting, {facts['unacknowledged']:,} unacknowledged, {facts['bytes']:,} bytes"


@click.command()
@json_option
@watch_option
@broker_options
def status(as_json: bool, is_watched: bool, broker: BrokerOptions) -> None:
    """Show the state of the broker.

    Shows whether the broker is ready for clients (a broker that is being drained is not), its version and time of
    running, the numbers of messages, subscriptions and scheduled sends, what became of messages since the start,
    memory, and disk space. If messages are in PostgreSQL, shows the log with all its brokers, and since when it waits
    for PostgreSQL or its standby. Also shows which clients have most messages in temporary queues, and in topic
    subscriptions that are not durable. A queue is stuck if a message is ready, a consumer has credit for it, and
    nothing is dispatched, which is a fault of the broker.

    Exits 0 if no queue is stuck, 1 if one is, 2 if the broker could not be asked.
    """
    with connected(broker, failure=NoAnswerFailure) as connection:
        show = terminal.write_json_text if as_json else _show
        if is_watched:
            show_repeatedly(lambda: connection.control_request("status"), show)
        answer = connection.control_request("status")
    show(answer)
    if msgspec.json.decode(answer)["stuck"]:
        raise SystemExit(1)


def _show(answer: bytes) -> None:
    _print(msgspec.json.decode(answer))


def _print(facts: dict[str, Any]) -> None:
    terminal.echo(f"ready      {'yes' if facts['ready'] else _NOT_READY}")
    if "version" in facts:
        # Missing in answers of older brokers.
        _print_broker(facts)
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
    if facts["disk_level"] in _LEVEL_EFFECTS:
        terminal.echo(f"           {_LONGEST_QUEUES}")
    if "log" in facts:
        terminal.echo(f"log        {_log_text(facts['log'])}")
        terminal.echo(f"           {_server_text(facts['log'])}")
        print_members("members    ", facts["log"]["members"], facts["log"]["epoch"], facts["log"]["number"])
    terminal.echo(f"codec      in {facts['codec']}")
    for stuck in facts["stuck"]:
        terminal.echo(f"stuck      {stuck['queue']}, for {stuck['waiting_ms'] / 1000:.1f} seconds")
    if not facts["stuck"]:
        terminal.echo("stuck      none")


def _print_broker(facts: dict[str, Any]) -> None:
    uptime, connections = format_age(facts["uptime_s"]), count_noun(facts["connections"], "connection")
    terminal.echo(f"broker     version {facts['version']}, running for {uptime}, {connections}")
    oldest = "" if facts["oldest_s"] is None else f", the oldest waits for {format_age(facts['oldest_s'])}"
    # Missing in answers of older brokers.
    held_s = facts.get("held_s")
    held = f"{facts['held']:,} unacknowledged" + ("" if held_s is None else f", one of them for {format_age(held_s)}")
    terminal.echo(f"now        {facts['rate']:,.1f} acknowledged a second{oldest}; {held}")
    terminal.echo(f"since      {_became_text(facts['counts'])}")
    terminal.echo(f"           of temporary ones: {_became_text(facts['temporary_counts'])}")
    commits = facts["commits"]
    written = f"{count_noun(commits['batches'], 'commit')} of {commits['bytes']:,} bytes in {commits['seconds']:,.1f} s"
    if facts["journal"] is not None:
        written += f"; journal {facts['journal']['bytes']:,} bytes"
    if facts["history"] is not None:
        written += f"; history {facts['history']['bytes']:,} bytes"
    terminal.echo(f"written    {written}")


_BECAME = ("accepted", "acknowledged", "returned", "failed_again", "expired", "handled", "moved", "purged")


def _became_text(counts: dict[str, Any]) -> str:
    parts = [
        f"{counts[name]:,} {name.replace('_', ' ')}" for name in _BECAME if counts.get(name) or name in _BECAME[:2]
    ]
    dead = [f"{count:,} dead ({reason})" for reason, count in sorted(counts["dead_lettered"].items())]
    return ", ".join(parts + dead)
