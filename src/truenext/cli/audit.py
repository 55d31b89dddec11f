"""`truenext audit`: check a broker's history against the contract."""

import traceback
from pathlib import Path
from typing import Any

import click

from truenext.cli.exit_status import NO_ANSWER, NoAnswerFailure
from truenext.cli.values import SPARK_MASTER, TEXT, LocationParam, seconds_option
from truenext.errors import ConfigurationError, TruenextError


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=LocationParam(exists=True, file_okay=False))
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
@click.option("--out", type=LocationParam(file_okay=False), help="Write the tables and a page into this folder.")
def audit(folders: tuple[Path, ...], **options: Any) -> None:
    """Prove from the history in DIR whether the contract held.

    DIR is a broker's data folder, a copy of its history, a folder that `truenext record` wrote, or a folder or address
    (hdfs://, s3a://) with several of them below. The brokers may be running. All are audited in one job, and shown side
    by side on one page. Folders of one broker, such as those of an active broker and its standby, are one history.
    Exits 0 if the contract held at all brokers, 1 if not, 2 if the audit failed.
    """
    try:
        from truenext.spark.audit.command import run_audit
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("pyspark", "pyarrow", "pandas", "numpy", "py4j"):
            raise
        raise NoAnswerFailure(
            ConfigurationError(f"an audit needs Spark ({error.name} is missing): pip install 'truenext[spark]'")
        ) from error
    try:
        verdicts = run_audit(folders, **options)
    except TruenextError as error:
        raise NoAnswerFailure(error) from error
    except Exception as error:
        # An error of Spark, such as a file that was deleted meanwhile. Python's status 1 would be a verdict.
        traceback.print_exc()
        raise SystemExit(NO_ANSWER) from error
    raise SystemExit(0 if all(verdict.has_contract_held for verdict in verdicts) else 1)
