"""Tests of tables that Spark keeps."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from truenext.spark.caching import cache_rows


def test_cached_table_has_the_same_rows_and_columns_and_a_plan_of_one_node(spark: SparkSession) -> None:
    table = spark.range(100).withColumns({"even": F.col("id") % 2 == 0, "text": F.when(F.col("id") > 5, F.lit("a"))})
    sums = table.groupBy("even", "text").agg(F.sum("id").alias("sum"), F.lit(b"b").alias("bytes"))
    cached = cache_rows(sums)
    assert cached.schema == sums.schema
    for _ in range(2):
        assert sorted(map(repr, cached.collect())) == sorted(map(repr, sums.collect()))
    assert cached.storageLevel.useDisk and not cached.storageLevel.useMemory
    (plan,) = str(cached._jdf.queryExecution().analyzed()).splitlines()
    assert plan.startswith("LogicalRDD")
    assert cached.unpersist().count() == sums.count()
