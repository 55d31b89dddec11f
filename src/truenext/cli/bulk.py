"""`truenext redrive`, `move` and `purge`: bulk work on the messages of a queue."""

import sys
from collections.abc import Mapping
from typing import Any

import click

from truenext.cli import terminal
from truenext.cli.bulk_work import (
    BulkWork,
    BulkWorkKind,
    dead_letter_selector_option,
    group_options,
    id_option,
    json_option,
    queue_count,
    selector_option,
)
from truenext.cli.connection import BrokerOptions, broker_options, connected
from truenext.cli.values import COUNT, QueueNameParam
from truenext.model.numerals import count_noun

count_option = click.option(
    "--count", type=COUNT, help="Largest number of messages to move; the true next comes first."
)


@click.command()
@click.argument("queue", type=QueueNameParam())
@id_option("dead letter")
@dead_letter_selector_option
@group_options
@count_option
@click.option("--dry-run", is_flag=True, help="Print the number of messages, and move none.")
@json_option
@broker_options
def redrive(queue: str, as_json: bool, broker: BrokerOptions, **options: Any) -> None:
    """Move dead letters back to the queues that they came from.

    Moves the dead letters of QUEUE, such as DLQ.orders, each once.

    Messages that consumers hold stay, and their number is printed. Messages also stay if they failed in a durable
    subscription that does not exist any more: `truenext move` can move them to a queue. If the command is interrupted,
    a second call continues. Exits 1 if the message of an --id was not moved.
    """
    kind = BulkWorkKind("redrive", "moved")
    BulkWork(kind, {"queue": queue}, **options).run(broker, as_json=as_json)


@click.command()
@click.argument("queue", type=QueueNameParam())
@click.argument("to", type=QueueNameParam(is_creatable=True))
@id_option("message")
@selector_option
@group_options
@count_option
@click.option("--dry-run", is_flag=True, help="Print the number of messages, and move none.")
@json_option
@broker_options
def move(queue: str, to: str, as_json: bool, broker: BrokerOptions, **options: Any) -> None:
    """Move the messages that wait in QUEUE to the queue TO.

    Each message is moved once, and is a new arrival there.

    Messages that consumers hold stay, and their number is printed. Messages that are sent meanwhile may stay, too. If
    the command is interrupted, a second call continues. Exits 1 if the message of an --id was not moved.
    """
    kind = BulkWorkKind("move", "moved")
    BulkWork(kind, {"queue": queue, "to": to}, **options).run(broker, as_json=as_json)


@click.command()
@click.argument("queue", type=QueueNameParam())
@selector_option
@group_options
@click.option("--dry-run", is_flag=True, help="Print the number of messages, and remove none.")
@click.option("--yes", "is_confirmed", is_flag=True, help="Do not ask for the name of the queue.")
@json_option
@broker_options
def purge(queue: str, is_confirmed: bool, as_json: bool, broker: BrokerOptions, **options: Any) -> None:
    """Remove the messages that wait in QUEUE.

    Messages that consumers hold stay, and their number is printed. Messages that are sent meanwhile may stay, too. If
    standard input is a terminal, says how many wait, and asks for the name of the queue first. Otherwise nothing is
    asked: use --dry-run before.
    """
    if not (is_confirmed or options["dry_run"]) and sys.stdin is not None and sys.stdin.isatty():
        terminal.require_typed("queue", queue, f"remove {_describe_purged(queue, broker, options)} for ever")
    kind = BulkWorkKind("purge", "removed")
    BulkWork(kind, {"queue": queue}, **options).run(broker, as_json=as_json)


def _describe_purged(queue: str, broker: BrokerOptions, options: Mapping[str, Any]) -> str:
    if options["selector"] is not None or options["group"] is not None:
        return "its messages that match (their number is not known; --dry-run counts them)"
    with connected(broker) as connection:
        count = queue_count(connection, queue, "waiting") or 0
    return f"the {count_noun(count, 'message')} that {'waits' if count == 1 else 'wait'} in it"
