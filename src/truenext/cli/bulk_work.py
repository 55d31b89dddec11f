"""Bulk work in a running broker. The work is requested in pieces (parts small enough for one turn of the broker), with
progress on standard error."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.progress import Progress

from truenext.blocking import Connection
from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, connected, control_answers, send_control_request
from truenext.cli.exit_status import CommandFailure
from truenext.cli.totals import ProgressReporter
from truenext.cli.values import ANY_TEXT, COUNT, SELECTOR
from truenext.errors import Code, Refused
from truenext.model.left_messages import LEFT_TEXTS
from truenext.model.limits import CONTROL_REQUEST_SEQUENCES_MAX as NUMBERS_MAX

selector_option = click.option(
    "--selector", type=SELECTOR, help="Only messages that this JMS selector matches, such as \"colour = 'red'\"."
)
dead_letter_selector_option = click.option(
    "--selector",
    type=SELECTOR,
    help='Only messages that this JMS selector matches, such as "truenext_original_attempts > 2". A header with '
    "hyphens is named with underscores.",
)
_GROUP_FIELDS = {
    "origin": "",
    "reason": "",
    "cause": "; words with other digits, such as ids, or a # for them, match too",
}
"""Fields of a GroupFilter, each with the end of its help."""


def group_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add options for a group of dead letters to a command. The command gets the argument `group`: the fields of a
    GroupFilter, or None if no option is used."""

    @wraps(command)
    def with_group(**values: Any) -> None:
        fields = {name: values.pop(name) for name in _GROUP_FIELDS}
        command(group=fields if set(fields.values()) != {None} else None, **values)

    for name, end in reversed(_GROUP_FIELDS.items()):
        text = f"Only dead letters with this {name}, as `truenext dead-letters` shows it{end}."
        with_group = click.option(f"--{name}", type=ANY_TEXT, help=text)(with_group)
    return with_group


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def id_option(noun: str, of: str = "`truenext-sequence`") -> Callable[..., Any]:
    return click.option(
        "--id",
        "numbers",
        type=COUNT,
        multiple=True,
        metavar="NUMBER",
        help=f"Only the {noun} with this {of}. May be repeated.",
    )


def run_in_pieces(
    connection: Connection, verb: str, request: dict[str, Any], *, total: int | None, done: str
) -> Iterator[dict[str, Any]]:
    """Request one piece of bulk work after the other, and yield the answers, until nothing is left or the caller stops.

    The caller may change `request` between two answers. Progress is shown as a number of messages of `total`, which is
    None if unknown. `done` is the participle in this text, such as "moved".

    Raises: TruenextError if the broker refuses a piece, or the connection is lost
    """
    console = Console(stderr=True)
    # A progress bar on a terminal; a line every few seconds in a file.
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(verb, total=total)
    totals = ProgressReporter(done)
    count = 0
    with bar:
        for answer in control_answers(connection, verb, request):
            count += answer["moved"]
            bar.update(task, completed=count)
            if not console.is_terminal:
                totals.report_if_due(count)
            yield answer


def queue_exists(connection: Connection, queue: str) -> bool:
    """Return whether the broker has a queue of this name.

    Raises: TruenextError if the broker refuses the request, or the connection is lost
    """
    try:
        send_control_request(connection, "purge", {"queue": queue, "dry_run": True, "limit": 1})
    except Refused as error:
        if error.code == Code.NOT_FOUND:
            return False
        raise
    return True


def queue_count(connection: Connection, queue: str, name: str) -> int | None:
    """Return a queue's number of messages from its column `name`, `waiting` or `scheduled`; None if there is no such
    queue."""
    facts = send_control_request(connection, "queues")
    return next((each[name] for each in facts if each["name"] == queue), None)


class BulkWorkKind(NamedTuple):
    verb: str
    participle: str
    noun: str = "messages"
    counted: str = "waiting"
    """Column, in the broker's answer to `queues`, that counts the messages of this work."""


class BulkWork:
    """Bulk work that one command requests, piece after piece."""

    def __init__(
        self,
        kind: BulkWorkKind,
        target: dict[str, str],
        *,
        dry_run: bool,
        selector: str | None,
        group: dict[str, str | None] | None = None,
        count: int | None = None,
        numbers: Iterable[int] = (),
    ) -> None:
        """Prepare the work for the messages of `target`. The further arguments are the values of the command's options:
        `numbers`, `selector`, `group` and `count` restrict the work to some of these messages."""
        self._kind = kind
        self._done = f"would be {kind.participle}" if dry_run else kind.participle
        self._limit = count
        self._is_dry = dry_run
        options = {"dry_run": dry_run, "selector": selector, "group": group, "limit": count}
        self._request: dict[str, Any] = target | {name: each for name, each in options.items() if each is not None}
        self._missing = set(numbers)
        self._count = 0
        self._moved_to = Counter[str]()
        self._transient_count = 0
        self._left_count = 0
        self._left_of_ended = Counter[str]()
        self._error = ""

    def run(self, broker: BrokerOptions, *, as_json: bool) -> None:
        """Do the work, and print the result. Exit with 1 if the message of one of `numbers` was not moved, or the queue
        no longer exists."""
        try:
            with connected(broker) as connection:
                self._run_all_pieces(connection)
        except CommandFailure:
            if self._count and not self._is_dry:
                terminal.echo(
                    f"{self._count:,} {self._done} before this error; run the same command again for the rest", err=True
                )
            raise
        if as_json:
            facts = {"count": self._count, "to": dict(self._moved_to), "left": self._left_count}
            facts |= {"transient": self._transient_count, "ended": dict(self._left_of_ended), "dry_run": self._is_dry}
            terminal.write_json(facts)
        else:
            self._print_result()
        if self._error:
            terminal.echo(f"truenext: {self._error}", err=True)
            raise SystemExit(1)
        if self._missing:
            ids = ", ".join(f"id {number}" for number in sorted(self._missing))
            # What stays was found.
            what = f"{self._kind.noun} not {self._kind.participle}" if self._left_count else "not found"
            terminal.echo(f"truenext: {what}: {ids}", err=True)
            raise SystemExit(1)

    def _run_all_pieces(self, connection: Connection) -> None:
        total = self._limit or queue_count(connection, self._request["queue"], self._kind.counted)
        numbers = sorted(self._missing)
        # One request takes NUMBERS_MAX numbers at most.
        for first in range(0, max(1, len(numbers)), NUMBERS_MAX):
            if numbers:
                self._request["sequences"] = numbers[first : first + NUMBERS_MAX]
            for answer in run_in_pieces(connection, self._kind.verb, self._request, total=total, done=self._done):
                self._count += answer["moved"]
                self._moved_to.update(answer["to"])
                # Missing in answers of older brokers.
                self._transient_count += answer.get("transient", 0)
                self._left_count += answer["left"]
                self._left_of_ended.update(answer["ended"])
                self._missing -= set(answer["sequences"])
                self._error = answer["error"]
                if self._limit is not None:
                    if self._count >= self._limit:
                        return
                    self._request["limit"] = self._limit - self._count

    def _print_result(self) -> None:
        for name, count in sorted(self._moved_to.items()):
            terminal.echo(f"{count:,} {self._done} to {name}")
        if not self._moved_to:
            terminal.echo(f"{self._count:,} {self._done}")
        if "group" in self._request and not (self._count or self._left_count):
            terminal.echo(
                "no message of such a group was found: `truenext dead-letters "
                f"{terminal.escape_line(self._request['queue'])}` shows the groups"
            )
        if self._transient_count:
            terminal.echo(
                f"{self._transient_count:,} of these as transient messages, as they were sent: a crash of the broker "
                "loses them"
            )
        for name, count in sorted(self._left_of_ended.items()):
            why = f"they failed in {terminal.escape_line(name)}, which does not exist any more"
            terminal.echo(f"{count:,} left: {why}; `truenext move` moves them to a queue")
        if left := self._left_count - self._left_of_ended.total():
            terminal.echo(f"{left:,} left: {LEFT_TEXTS[self._kind.verb]}")
