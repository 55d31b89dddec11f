"""Columns of a source in Spark, which depend on its options."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from truenext.spark.source.bundle import ARROW_SCHEMA
from truenext.spark.source.options import SourceOptions


def spark_schema(options: SourceOptions) -> StructType:
    columns = [each for each in from_arrow_schema(ARROW_SCHEMA) if each.name != "headers" or options.has_headers]
    if options.has_text_body:
        columns[-1:] = [StructField("body", StringType()), StructField("error", StringType())]
    return StructType(columns)


def apply_options(batch: pa.RecordBatch, options: SourceOptions) -> pa.RecordBatch:
    """Return the rows of a bundle with the columns of `spark_schema`."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if not options.has_headers:
        del columns["headers"]
    if options.has_text_body:
        columns["body"], columns["error"] = _decode(columns["body"])
    return pa.RecordBatch.from_pydict(columns)


def _decode(bodies: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the bodies as text, with null where that fails. The second array has the reason for each null."""
    try:
        return bodies.cast(pa.string()), pa.nulls(len(bodies), pa.string())
    except pa.ArrowInvalid:
        pass
    texts: list[str | None] = []
    errors: list[str | None] = []
    for body in bodies:
        try:
            texts.append(body.as_py().decode())
            errors.append(None)
        except UnicodeDecodeError as error:
            texts.append(None)
            errors.append(f"the body is not UTF-8: {error.reason} at byte {error.start}")
    return pa.array(texts, pa.string()), pa.array(errors, pa.string())
