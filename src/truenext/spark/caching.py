"""Cached tables."""

from __future__ import annotations

from pyspark.sql import DataFrame


def cache_rows(table: DataFrame) -> DataFrame:
    """Return a table that Spark keeps once it is computed, with a plan of one node.

    Spark describes each query with the plans of all cached tables that it reads, and of those that they were computed
    from. With a few cached tables on top of each other that took two seconds a query. With Spark Connect the plan stays
    as it is.
    """
    plan = getattr(table, "_jdf", None)
    if plan is None:
        return table.persist()
    session = table.sparkSession
    rows = plan.queryExecution().toRdd()
    short = session._jsparkSession.internalCreateDataFrame(rows, plan.schema(), False)
    return DataFrame(short, session).persist()
