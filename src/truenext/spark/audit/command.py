"""What one audit does from its start to its end, for `truenext audit` and for spark-submit."""

import sys
from datetime import UTC, datetime
from pathlib import Path

from truenext.spark.audit.audit import STUCK_SECONDS, Results, audit
from truenext.spark.audit.verdict import Verdict
from truenext.spark.schema import read_events
from truenext.spark.session import start


def run(
    folder: Path | str,
    *,
    master: str | None = None,
    since: datetime | None = None,
    queue: str | None = None,
    stuck_seconds: float = STUCK_SECONDS,
    out: Path | None = None,
) -> Verdict:
    """Audit `folder`, print progress and verdict, write the tables below `out`. `since` without a zone is UTC.

    Raises: ConfigurationError
    """
    if since is not None and since.tzinfo is None:
        since = since.replace(tzinfo=UTC)
    spark = start(master)
    results = audit(read_events(spark, folder), since=since, queue=queue, stuck_seconds=stuck_seconds, progress=_tell)
    if out is not None:
        write(results, out)
    results.release()
    print(results.verdict, flush=True)
    return results.verdict


def write(results: Results, out: Path) -> None:
    """One folder of Parquet files per table, and the page once there is one."""
    for name, table in results.tables.items():
        table.write.mode("overwrite").parquet(str(out.resolve() / name))
    # The page goes here:
    # write_report({name: table.toPandas() for ...}, results.verdict, out / "report.html")


def _tell(step: str, seconds: float) -> None:
    """On stderr, as it is for people only."""
    print(f"{seconds:6.1f} s  {step}", file=sys.stderr, flush=True)
