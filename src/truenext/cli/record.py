"""`truenext record`: run a workload against any STOMP broker, and write a history that `truenext audit` can check."""

import random
import secrets
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, broker_options, with_login_hint
from truenext.cli.values import TEXT, PathParam
from truenext.errors import TruenextError
from truenext.model.limits import WINDOW_MAX
from truenext.spark.recorder import MESSAGES_MAX, WORKLOADS, Recorder
from truenext.spark.recording import check_folder, write_recording


@click.command()
@click.option(
    "--case",
    "case",
    type=click.Choice(list(WORKLOADS)),
    default="production",
    show_default=True,
    help="Messages to send: three quarters persistent with priority 4, then the rest non-persistent with priority 9; "
    "persistent and non-persistent in turn; or random priorities, persistent or not.",
)
@click.option(
    "--count",
    type=click.IntRange(1, MESSAGES_MAX),
    default=4000,
    show_default=True,
    help="Number of messages to send and receive.",
)
@click.option(
    "--prefetch",
    type=click.IntRange(1, WINDOW_MAX),
    default=1,
    show_default=True,
    help="Largest number of messages that the consumer may hold.",
)
@click.option(
    "--seed", type=int, help="Only with --case mix: the seed that an earlier recording printed, to repeat its workload."
)
@click.option("--queue", type=TEXT, help="An empty queue that no other client uses; by default a new queue.")
@click.option("--out", "folder", type=PathParam(file_okay=False), required=True, help="A new folder for the recording.")
@click.option("--remote", is_flag=True, help="Allow a broker on another machine; the recording loads it.")
@broker_options
def record(
    case: str,
    count: int,
    prefetch: int,
    seed: int | None,
    queue: str | None,
    folder: Path,
    remote: bool,
    broker: BrokerOptions,
) -> None:
    """Record a workload on any STOMP broker, for `audit`.

    Runs the workload, and writes the events that its client sees as Parquet files.

    All messages are confirmed before the consumer subscribes. So they should be dispatched in the order of the queue.
    The files have the columns of docs/reference/history.md.
    """
    if seed is not None and case != "mix":
        raise click.UsageError(f"--seed is for --case mix: --case {case} is not random")
    if len(broker.urls) > 1:
        raise click.UsageError("a recording is of one broker: give its address alone, with --url")
    seed = random.randrange(2**32) if seed is None else seed
    queue = queue or f"truenext.record.{case}.{secrets.token_hex(4)}"
    workload = WORKLOADS[case](count, random.Random(seed))
    console = Console(stderr=True)
    try:
        recorder = Recorder(
            broker.urls[0], credentials=broker.credentials, timeout_s=broker.timeout_s, may_be_remote=remote
        )
        check_folder(folder)
        terminal.echo(f"{case}, {count} messages, prefetch {prefetch}, queue {queue}, seed {seed}", err=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            tasks = {done: progress.add_task(done, total=count) for done in ("sent", "received")}
            events = recorder.record(
                workload,
                queue=queue,
                window=prefetch,
                report=lambda done, totals: progress.update(tasks[done], completed=totals),
            )
        for path in write_recording(events, folder):
            terminal.echo(str(path))
    except TruenextError as error:
        raise with_login_hint(error, broker.credentials) from error
    arrived = len({event["sequence"] for event in events if event["kind"] == "dispatched"})
    terminal.echo(f"{len(events)} events; {arrived} of {count} messages came", err=True)
