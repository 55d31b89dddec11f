"""Queues as a sink of Spark: `writeStream.format("truenext")`. docs/spark.md shows how to use it."""
