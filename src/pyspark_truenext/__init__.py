"""Registers `format("truenext")` with Spark, which imports every module whose name begins with `pyspark_`."""

from truenext.spark.datasource import TruenextDataSource as DefaultSource

__all__ = ["DefaultSource"]
