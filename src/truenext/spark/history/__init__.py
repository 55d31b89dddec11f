"""A history as a source of Spark: `format("truenext")` with `kind=history`. docs/spark.md shows how to use it."""
