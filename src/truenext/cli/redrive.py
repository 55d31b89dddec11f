"""`truenext redrive`: dead letters go back to where they came from."""

import time
from collections import Counter
from typing import Any

import click
import msgspec

from truenext.cli.client import Failure, url_option
from truenext.client.connection import Connection
from truenext.errors import TruenextError

PROGRESS_SECONDS = 2.0
"""Time between two lines of progress."""

ANSWER_SECONDS = 60.0
"""A piece is durable when it is answered, and the disk may be busy."""


@click.command()
@click.argument("queue")
@click.option(
    "--id",
    "sequences",
    type=click.IntRange(1),
    multiple=True,
    metavar="SEQUENCE",
    help="Only the dead letter of this `truenext-sequence`. May be repeated.",
)
@click.option("--limit", type=click.IntRange(1), help="Move so many at most, the true next first.")
@click.option("--dry-run", is_flag=True, help="Say what would be moved, and move nothing.")
@url_option
def redrive(queue: str, sequences: tuple[int, ...], limit: int | None, dry_run: bool, url: str) -> None:
    """Move the dead letters of QUEUE (DLQ.orders) back to where they came from, each once.

    What consumers hold is left alone. Whatever ends it, a second call goes on where it ended. Exits 1 if one of --id
    was not moved.
    """
    done = Counter[str]()
    left = 0
    missing = set(sequences)
    is_moved = "would be moved" if dry_run else "moved"
    said_at = time.monotonic()
    question: dict[str, Any] = {"queue": queue.removeprefix("/queue/"), "dry_run": dry_run}
    if sequences:
        question["sequences"] = sorted(missing)
    try:
        with Connection(url) as connection:
            after = [0, 0]
            while after is not None and (limit is None or done.total() < limit):
                rest = {} if limit is None else {"limit": limit - done.total()}
                body = msgspec.json.encode(question | rest | {"after": after})
                answer = msgspec.json.decode(connection.ask("redrive", body, timeout=ANSWER_SECONDS))
                done.update(answer["to"])
                left += answer["left"]
                missing -= set(answer["sequences"])
                after = answer["next"]
                if time.monotonic() - said_at > PROGRESS_SECONDS:
                    said_at = time.monotonic()
                    click.echo(f"{done.total():,} {is_moved} so far", err=True)
    except TruenextError as error:
        if done and not dry_run:
            click.echo(f"{done.total():,} {is_moved}; the same command goes on", err=True)
        raise Failure(error) from error
    for name, count in sorted(done.items()):
        click.echo(f"{count:,} {is_moved} to {name}")
    if not done:
        click.echo(f"0 {is_moved}")
    if left:
        click.echo(f"{left:,} left: consumers hold them, or they do not say where they came from")
    if missing:
        click.echo(f"truenext: not moved: {', '.join(map(str, sorted(missing)))}", err=True)
        raise SystemExit(1)
