"""Schema of the history for Spark, made from history/schema.py."""

from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from truenext.history import schema

_TYPES = (LongType(), IntegerType(), ByteType(), BooleanType(), StringType(), TimestampType())
_SPARK_TYPES = {each.simpleString(): each for each in _TYPES}
EVENTS = StructType(
    [
        *(StructField(each.name, _SPARK_TYPES[each.type], each.name not in schema.REQUIRED) for each in schema.COLUMNS),
        StructField(schema.DATE, DateType()),
    ]
)
