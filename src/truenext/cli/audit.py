"""`truenext audit`: check a broker's history against the contract."""

import errno
import os
import traceback
from pathlib import Path
from typing import Any

import click

from truenext.cli.connection import BrokerOptions, address_options
from truenext.cli.exit_status import NO_ANSWER, NoAnswerFailure
from truenext.cli.values import SPARK_MASTER, TEXT, DestinationParam, LocationParam, PathParam, seconds_option
from truenext.errors import ConfigurationError, TruenextError


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, type=LocationParam(exists=True, file_okay=False))
@click.option(
    "--master",
    type=SPARK_MASTER,
    help="Where Spark runs, such as local[2]; all cores of this machine by default.",
)
@click.option("--since", type=click.DateTime(), help="Ignore events before this time, UTC.")
@click.option("--queue", type=TEXT, help="Audit only this queue.")
@seconds_option(
    "--stuck",
    "stuck_seconds",
    default=10.0,
    help="Seconds without a dispatch after which a ready message with a free consumer counts as stuck.",
)
@click.option(
    "--stages",
    metavar="DIR",
    multiple=True,
    type=LocationParam(exists=True, file_okay=False),
    help="Folder into which a service of stages wrote its events (truenext stages run --events). May be repeated.",
)
@click.option(
    "--state",
    metavar="DIR",
    type=PathParam(file_okay=False),
    help="Keep the end of this audit in this folder. The next audit with it begins there: each event is judged once.",
)
@click.option("--out", type=LocationParam(file_okay=False), help="Write the tables and a page into this folder.")
@click.option(
    "--follow",
    is_flag=True,
    help="Go on with the history while it grows, until Ctrl-C: that of DIR, or without DIR that of the broker. Needs "
    "--state and --out. Each finding is a row of a table, and a line on standard error.",
)
@click.option(
    "--report-to",
    metavar="QUEUE",
    type=DestinationParam(),
    help="With --follow: send each finding to this queue of the broker, once, as JSON.",
)
@address_options
def audit(
    folders: tuple[Path, ...], *, broker: BrokerOptions, follow: bool, report_to: str | None, **options: Any
) -> None:
    """Prove from the history in DIR whether the contract held.

    DIR is a broker's data folder, a copy of its history, a folder that `truenext record` wrote, or a folder or address
    (hdfs://, s3a://) with several of them below. The brokers may be running. All are audited in one job, and shown side
    by side on one page. Folders of one broker, such as those of an active broker and its standby, are one history.
    Exits 0 if the contract held at all brokers, 1 if not, 2 if the audit failed.
    """
    if follow:
        options = _options_of_follow(folders, options) | {
            "urls": broker.urls,
            "credentials": broker.credentials,
            "report_to": report_to,
        }
    elif report_to is not None:
        raise click.UsageError("--report-to needs --follow")
    elif not folders:
        raise click.UsageError("name a folder with a history, or follow that of a running broker: --follow --url URL")
    try:
        if follow:
            from truenext.spark.audit.follow import run_follow
        else:
            from truenext.spark.audit.command import run_audit
        from truenext.spark.session import one_error_if_java_ends
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("pyspark", "pyarrow", "pandas", "numpy", "py4j"):
            raise
        raise NoAnswerFailure(
            ConfigurationError(f"an audit needs Spark ({error.name} is missing): pip install 'truenext[spark]'")
        ) from error
    try:
        with one_error_if_java_ends():
            verdicts = [run_follow(folders, **options)] if follow else run_audit(folders, **options)
    except TruenextError as error:
        raise NoAnswerFailure(error) from error
    except Exception as error:
        if os.strerror(errno.ENOSPC) in str(error):
            raise NoAnswerFailure(
                ConfigurationError(
                    "a disk is full: free disk space for --out, --state and Spark's own files, which are in /tmp or in "
                    "SPARK_LOCAL_DIRS. Then start the command again"
                )
            ) from error
        # An error of Spark, such as a file that was deleted meanwhile. Python's status 1 would be a verdict.
        traceback.print_exc()
        raise SystemExit(NO_ANSWER) from error
    raise SystemExit(0 if all(verdict.has_contract_held for verdict in verdicts) else 1)


def _options_of_follow(folders: tuple[Path, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that an audit has which follows a history.

    Raises: click.UsageError if one is missing or cannot be used
    """
    if len(folders) > 1:
        raise click.UsageError("--follow needs the history of exactly one broker: name one folder, or none and --url")
    if options["since"] is not None or options["stages"]:
        raise click.UsageError("--follow judges all new events, and no stages: leave out --since and --stages")
    if options["state"] is None or options["out"] is None:
        raise click.UsageError("--follow needs two folders: --state for its progress, --out for the tables of findings")
    if any(isinstance(each, str) for each in (*folders, options["out"])):
        raise click.UsageError("--follow reads and writes folders, not addresses: name a folder, or --url for a broker")
    return {name: value for name, value in options.items() if name not in ("since", "stages")}
