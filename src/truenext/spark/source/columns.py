"""Columns of a source in Spark, depending on its options."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from truenext.spark.source.options import SourceOptions

_COLUMNS = [
    StructField("queue", StringType()),
    StructField("sequence", LongType()),
    StructField("priority", IntegerType()),
    StructField("persistent", BooleanType()),
    StructField("group", StringType()),
    StructField("correlation_id", StringType()),
    StructField("reply_to", StringType()),
    StructField("content_type", StringType()),
    StructField("deliveries", IntegerType()),
    StructField("attempts", IntegerType()),
    StructField("timestamp", TimestampType()),
    StructField("expires", TimestampType()),
]


def spark_schema(options: SourceOptions) -> StructType:
    columns = list(_COLUMNS)
    if options.has_headers:
        columns.append(StructField("headers", MapType(StringType(), StringType())))
    columns.append(StructField("body", StringType() if options.has_text_body else BinaryType()))
    if options.has_text_body:
        columns.append(StructField("error", StringType()))
    return StructType(columns)


def apply_options(batch: pa.RecordBatch, options: SourceOptions) -> pa.RecordBatch:
    """Return the rows of a bundle in `spark_schema`."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if not options.has_headers:
        del columns["headers"]
    if options.has_text_body:
        columns["body"], columns["error"] = _decode(columns["body"])
    return pa.RecordBatch.from_pydict(columns)


def _decode(bodies: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the bodies as text, and for each null the reason."""
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
