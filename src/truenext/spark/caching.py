"""Tables that Spark keeps."""

from __future__ import annotations

from pyspark import StorageLevel
from pyspark.sql import DataFrame


def cache_rows(table: DataFrame) -> DataFrame:
    """Return a table that Spark keeps on disk, with a plan of one node. All but the last step of the table is computed
    at once.

    Spark describes each query with the plans of all cached tables that it reads, and of those that they were computed
    from. With a few cached tables on top of each other that took two seconds a query. With Spark Connect the plan stays
    as it is. On disk, because in memory a large table takes the heap that the next step needs.

    Compute the table, such as by a count, before you join it, as Spark broadcasts only tables whose size it knows; and
    before you free what it was computed from, as Spark would compute that again.
    """
    plan = getattr(table, "_jdf", None)
    if plan is None:
        return table.persist(StorageLevel.DISK_ONLY)
    rows = plan.queryExecution().toRdd()
    short = plan.sparkSession().internalCreateDataFrame(rows, plan.schema(), False)
    return DataFrame(short, table.sparkSession).persist(StorageLevel.DISK_ONLY)
