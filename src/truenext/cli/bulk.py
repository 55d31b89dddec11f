"""`truenext redrive`, `move` and `purge`: what is done to many messages of a queue, a piece at a time."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import Progress

from truenext.cli.client import Failure, url_option
from truenext.client.connection import Connection
from truenext.errors import TruenextError

PROGRESS_SECONDS = 2.0
"""Time between two lines of progress."""

ANSWER_SECONDS = 60.0
"""A piece is durable when it is answered, and the disk may be busy."""

HELD = "consumers hold them, or they are still being committed"


def _id_option(what: str) -> Callable[..., Any]:
    return click.option(
        "--id",
        "sequences",
        type=click.IntRange(1),
        multiple=True,
        metavar="SEQUENCE",
        help=f"Only the {what} of this `truenext-sequence`. May be repeated.",
    )


selector_option = click.option("--selector", help="Only what this JMS selector wants, such as \"colour = 'red'\".")
limit_option = click.option("--limit", type=click.IntRange(1), help="Move so many at most, the true next first.")
json_option = click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")


@click.command()
@click.argument("queue")
@_id_option("dead letter")
@selector_option
@limit_option
@click.option("--dry-run", is_flag=True, help="Say what would be moved, and move nothing.")
@json_option
@url_option
def redrive(
    queue: str,
    sequences: tuple[int, ...],
    selector: str | None,
    limit: int | None,
    dry_run: bool,
    as_json: bool,
    url: str,
) -> None:
    """Move the dead letters of QUEUE (DLQ.orders) back to where they came from, each once.

    What consumers hold is left alone. Whatever ends it, a second call goes on where it ended. Exits 1 if one of --id
    was not moved.
    """
    why_left = "consumers hold them, or they do not say where they came from"
    work = _Work("redrive", "moved", queue, why_left, sequences, selector, limit, is_dry=dry_run)
    work.run(url, as_json=as_json)


@click.command()
@click.argument("queue")
@click.argument("to")
@_id_option("message")
@selector_option
@limit_option
@click.option("--dry-run", is_flag=True, help="Say what would be moved, and move nothing.")
@json_option
@url_option
def move(
    queue: str,
    to: str,
    sequences: tuple[int, ...],
    selector: str | None,
    limit: int | None,
    dry_run: bool,
    as_json: bool,
    url: str,
) -> None:
    """Move what waits in QUEUE to the queue TO, each message once; there it is a new arrival.

    What consumers hold is left alone, and so is what is sent meanwhile. Whatever ends it, a second call goes on where
    it ended. Exits 1 if one of --id was not moved.
    """
    work = _Work("move", "moved", queue, HELD, sequences, selector, limit, is_dry=dry_run)
    work.question["to"] = _name(to)
    work.run(url, as_json=as_json)


@click.command()
@click.argument("queue")
@selector_option
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@json_option
@url_option
def purge(queue: str, selector: str | None, dry_run: bool, as_json: bool, url: str) -> None:
    """Remove what waits in QUEUE.

    What consumers hold is left alone, and so is what is sent meanwhile.
    """
    _Work("purge", "removed", queue, HELD, (), selector, None, is_dry=dry_run).run(url, as_json=as_json)


def _name(queue: str) -> str:
    return queue.removeprefix("/queue/")


class _Work:
    """Pieces of one kind of work until nothing is left."""

    def __init__(
        self,
        verb: str,
        done: str,
        queue: str,
        why_left: str,
        sequences: tuple[int, ...],
        selector: str | None,
        limit: int | None,
        *,
        is_dry: bool,
    ) -> None:
        self._verb = verb
        self._done = f"would be {done}" if is_dry else done
        self._why_left = why_left
        self._limit = limit
        self._is_dry = is_dry
        self.question: dict[str, Any] = {"queue": _name(queue), "dry_run": is_dry}
        if sequences:
            self.question["sequences"] = sorted(set(sequences))
        if selector is not None:
            self.question["selector"] = selector
        self._missing = set(sequences)
        self._count = 0
        self._to = Counter[str]()
        self._left = 0
        self._refused = ""

    def run(self, url: str, *, as_json: bool) -> None:
        """Exits 1 if a message that was named was not moved, or there is no such queue any more."""
        try:
            with Connection(url) as connection:
                self._do(connection)
        except TruenextError as error:
            if self._count and not self._is_dry:
                click.echo(f"{self._count:,} {self._done}; the same command goes on", err=True)
            raise Failure(error) from error
        if as_json:
            facts = {"count": self._count, "to": dict(self._to), "left": self._left, "dry_run": self._is_dry}
            sys.stdout.buffer.write(msgspec.json.encode(facts) + b"\n")
        else:
            self._say()
        if self._refused:
            click.echo(f"truenext: {self._refused}", err=True)
            raise SystemExit(1)
        if self._missing:
            click.echo(f"truenext: not moved: {', '.join(map(str, sorted(self._missing)))}", err=True)
            raise SystemExit(1)

    def _do(self, connection: Connection) -> None:
        console = Console(stderr=True)
        total = self._limit or _waiting(connection, self.question["queue"])
        said_at = time.monotonic()
        # For people a bar; a line now and then where it goes into a file.
        bar = Progress(console=console, transient=True) if console.is_terminal else None
        task = None if bar is None else bar.add_task(self._verb, total=total)
        after: list[int] | None = [0, 0]
        until: dict[str, int] = {}
        with bar or nullcontext():
            while after is not None and (self._limit is None or self._count < self._limit):
                rest = {} if self._limit is None else {"limit": self._limit - self._count}
                body = msgspec.json.encode(self.question | rest | until | {"after": after})
                answer = msgspec.json.decode(connection.ask(self._verb, body, timeout=ANSWER_SECONDS))
                self._count += answer["moved"]
                self._to.update(answer["to"])
                self._left += answer["left"]
                self._missing -= set(answer["sequences"])
                self._refused = answer["refused"]
                after, until = answer["next"], {"until": answer["until"]}
                if bar is not None and task is not None:
                    bar.update(task, completed=self._count)
                elif time.monotonic() - said_at > PROGRESS_SECONDS:
                    said_at = time.monotonic()
                    click.echo(f"{self._count:,} {self._done} so far", err=True)

    def _say(self) -> None:
        for name, count in sorted(self._to.items()):
            click.echo(f"{count:,} {self._done} to {name}")
        if not self._to:
            click.echo(f"{self._count:,} {self._done}")
        if self._left:
            click.echo(f"{self._left:,} left: {self._why_left}")


def _waiting(connection: Connection, queue: str) -> int | None:
    facts = msgspec.json.decode(connection.ask("queues"))
    return next((each["waiting"] for each in facts if each["name"] == queue), None)
