"""`truenext dead-letters`: shows which queues have dead letters, and why messages became dead letters."""

import click
import msgspec

from truenext.blocking import Connection
from truenext.cli import terminal
from truenext.cli.bulk_work import dead_letter_selector_option, json_option, queue_count, run_in_pieces
from truenext.cli.connection import BrokerOptions, broker_options, connected, send_control_request
from truenext.cli.terminal import format_age, format_utc
from truenext.cli.values import QueueNameParam
from truenext.model.dead_letters import DeadLetterGroup, DeadLetterGroups
from truenext.model.left_messages import HELD
from truenext.model.limits import DEAD_LETTER_GROUPS_MAX
from truenext.model.numerals import count_noun


@click.command("dead-letters")
@click.argument("queue", type=QueueNameParam(), required=False)
@dead_letter_selector_option
@json_option
@broker_options
def dead_letters(queue: str | None, selector: str | None, as_json: bool, broker: BrokerOptions) -> None:
    """Count the dead letters in QUEUE by cause.

    QUEUE is a dead-letter queue, such as DLQ.orders. Shows groups of messages that came from the same queue, for the
    same reason, and whose last cause has the same first line, but for words with digits, such as numbers and ids; the
    largest first. The cause of its first message stands for each group. `truenext redrive`, `move` and `purge` take a
    group by --origin, --reason and --cause.

    Without QUEUE: lists the dead-letter queues that have messages, and prints nothing if there are none.
    """
    if queue is None:
        if selector is not None:
            raise click.UsageError("--selector needs QUEUE")
        _list_queues(broker, as_json=as_json)
        return
    request = {"queue": queue} if selector is None else {"queue": queue, "selector": selector}
    with connected(broker) as connection:
        groups, left = _count(connection, request)
    if as_json:
        facts = {"queue": queue, "groups": list(groups), "others": groups.others, "left": left}
        terminal.write_json_text(msgspec.json.encode(facts))
    else:
        _print(queue, groups, left)


def _list_queues(broker: BrokerOptions, *, as_json: bool) -> None:
    with connected(broker) as connection:
        answer = send_control_request(connection, "queues", {"dead_letters": True, "order": "waiting"})
    found = [row for row in answer["queues"] if row["waiting"]]
    if as_json:
        terminal.write_json(found)
    elif found:
        rows = [(row["waiting"], format_age(row["oldest_s"] or 0), row["name"]) for row in found]
        terminal.print_columns(("waiting", "oldest", "queue"), rows)


def _count(connection: Connection, request: dict[str, str]) -> tuple[DeadLetterGroups, int]:
    groups, left = DeadLetterGroups(), 0
    total = queue_count(connection, request["queue"], "waiting")
    for answer in run_in_pieces(connection, "dead-letters", dict(request), total=total, done="counted"):
        groups.add(msgspec.convert(answer["groups"], list[DeadLetterGroup]))
        left += answer["left"]
    return groups, left


def _print(queue: str, groups: DeadLetterGroups, left: int) -> None:
    rows = [(group.count, *_times(group), group.origin, group.reason, group.example or group.cause) for group in groups]
    count = sum(row[0] for row in rows)
    if groups.others is not None:
        others = f"others, of more than {DEAD_LETTER_GROUPS_MAX:,} groups"
        rows.append((groups.others.count, *_times(groups.others), others, "", ""))
        count += groups.others.count
    terminal.echo(f"{count_noun(count, 'message')} in {queue}")
    if rows:
        terminal.print_columns(("count", "first", "last", "origin", "reason", "cause"), rows)
    if left:
        terminal.echo(f"{left:,} not counted: {HELD}")


def _times(group: DeadLetterGroup) -> tuple[str, str]:
    return format_utc(group.first), format_utc(group.last)
