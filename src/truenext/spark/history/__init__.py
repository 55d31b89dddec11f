"""Queues as a source of Spark: `spark.readStream.format("truenext")`. docs/spark.md shows how to use it."""
