"""Job: makes of a transform the function for `foreachBatch`, which answers the requests of each batch once.

    source ─▶ requests ─▶ transform ─▶ answers ─┐
                 └─────────────────────────────▶ full join by sequence ─▶ results ─▶ sink, and events

The transform gets a part of each request, and cannot touch the rest: envelope, state and addresses for replies stay in
the other branch. The join finds requests without an answer, and rows that have lost or doubled their flow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructType

from truenext.clock import time_ns
from truenext.errors import ConfigurationError
from truenext.flows.names import FAILURE_STAGE, is_word
from truenext.spark.sink.options import parse_options
from truenext.spark.stage_job.answers import EXECUTION_COLUMNS, SINK_COLUMNS
from truenext.spark.stage_job.events import write_events
from truenext.spark.stage_job.tasks import REQUEST_COLUMNS, RESULT_COLUMNS, SOURCE_COLUMNS, add_requests, make_results

Transform = Callable[[DataFrame], DataFrame]

FLOW = "flow"
"""Column of a request that its answer keeps."""
_SOURCE = ("queue", "priority", "persistent", "group", "correlation_id", "reply_to", "content_type", "deliveries")
_UNREADABLE = "_truenext_unreadable"
"""Column with the text of a message that is not of its type."""


def stage_job(
    transform: Transform,
    message: str | StructType,
    *,
    next_stage: str = "",
    events: Path | str | None = None,
    **options: str,
) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` that makes a transform of DataFrames a stage.

    Args:
        transform: Function of a batch's requests that returns their answers. A request has the fields of its message
            as columns, and the column `flow`, which the answer keeps. The other columns of an answer are the fields of
            its message. A request without an answer becomes a dead letter.
        message: Fields of a request's message, as Spark declares columns: `"item string, count int"`.
        next_stage: Name of the stage of the same endpoint that gets the answers. By default they are the replies.
        events: Folder for the events of the stage, which `truenext stages flow` and the audit read.
        **options: Options of the sink: `url`, those of the login, `space`, `patience`; and `txnAppId`, by default the
            id of the query, which Spark Connect does not tell.

    Raises: ConfigurationError if an argument is invalid
    """
    fields = StructType.fromDDL(message) if isinstance(message, str) else message
    assert isinstance(fields, StructType), "columns are a struct"
    if FLOW in map(str.lower, fields.names):
        raise ConfigurationError(f"a field of the message is called {FLOW}, as the column that the job adds: rename it")
    if next_stage and (not is_word(next_stage) or next_stage == FAILURE_STAGE):
        raise ConfigurationError(f"next_stage is {next_stage!r}, and must be the name of a stage, such as reserve")
    app = options.pop("txnAppId", "")
    if parse_options(options, is_streaming=True).destination is not None:
        raise ConfigurationError("option queue: the answers go to where their flows name; leave it out")

    def answer_batch(batch: DataFrame, batch_id: int) -> None:
        began_ns, id = time_ns(), app or _query_id(batch.sparkSession)
        job = f"spark query {id} batch {batch_id}"
        requests = _requests(batch, fields).persist()
        results = _results(requests, transform, fields, next_stage, job)
        if events is not None:
            results = results.persist()
        try:
            writer = _rows(results).write.format("truenext").options(**options, txnAppId=id, txnVersion=batch_id)
            writer.mode("append").save()
            if events is not None:
                rows = results.select(*EXECUTION_COLUMNS, F.col("reject").isNotNull().alias("is_rejected"))
                write_events(Path(events), job, rows.toLocalIterator(), began_ns // 1000, time_ns() // 1000)
        finally:
            results.unpersist()
            requests.unpersist()

    return answer_batch


def _query_id(spark: SparkSession) -> str:
    try:
        return str(spark.sparkContext.getLocalProperty("sql.streaming.queryId"))
    except AttributeError as error:
        raise ConfigurationError(
            "Spark Connect does not tell the query's id: name the job with txnAppId=..., the same for each run"
        ) from error


def _requests(batch: DataFrame, fields: StructType) -> DataFrame:
    """Return the rows of a batch with the columns of `Request`, and `typed`, the decoded message."""
    headers = F.col("headers") if "headers" in batch.columns else F.lit(None).cast("map<string,string>")
    rows = batch.select(
        "sequence",
        *_SOURCE,
        "attempts",
        F.coalesce(F.unix_millis("timestamp"), F.lit(0)).alias("accepted_ms"),
        F.unix_millis("expires").alias("expires_ms"),
        headers.alias("headers"),
        F.col("body").cast("binary"),
    )
    read = rows.mapInArrow(add_requests, f"{SOURCE_COLUMNS}, {REQUEST_COLUMNS}")
    schema = StructType([*fields.fields]).add(_UNREADABLE, StringType())
    typed = F.from_json("message", schema, {"columnNameOfCorruptRecord": _UNREADABLE})
    named = fields.simpleString().removeprefix("struct")
    unreadable = F.lit(f"the message is not an object with the fields {named[:500]}")
    is_typed = F.col("typed").isNotNull() & F.col(f"typed.{_UNREADABLE}").isNull()
    return read.withColumn("typed", typed).withColumn("refused", F.coalesce("refused", F.when(~is_typed, unreadable)))


def _results(requests: DataFrame, transform: Transform, fields: StructType, next_stage: str, job: str) -> DataFrame:
    """Return the `Result` of each request."""
    flow = F.struct(
        F.col("flow_id").alias("id"), "trace", "message_id", "sequence", "interactive", "state", "properties"
    )
    readable = requests.where("refused is null")
    given = readable.select(flow.alias(FLOW), *(F.col("typed")[name].alias(name) for name in fields.names))
    answers = transform(given)
    _check_answers(answers, given)
    values = [F.col(f"`{name}`") for name in answers.columns if name != FLOW]
    message = F.to_json(F.struct(*values)) if values else F.lit("{}")
    partitions = _partitions(requests.sparkSession)
    counted = (
        answers.select(F.col(f"{FLOW}.sequence").alias("answered"), message.alias("answer"))
        .repartition(partitions, "answered")
        .groupBy("answered")
        .agg(F.count("*").alias("answers"), F.first("answer").alias("answer"))
    )
    rows = requests.drop("typed", "message").repartition(partitions, "sequence")
    both = rows.join(counted, F.col("sequence") == F.col("answered"), "full_outer")
    return both.mapInArrow(partial(make_results, next_stage, job), RESULT_COLUMNS)


def _check_answers(answers: DataFrame, given: DataFrame) -> None:
    """Check the columns that a transform has returned. Raises: ConfigurationError if it has not kept the flow,
    or these are no DataFrame"""
    if not hasattr(answers, "mapInArrow"):
        raise ConfigurationError(
            f"the transform has returned no DataFrame, but {type(answers).__name__}: is a return missing?"
        )
    count = answers.columns.count(FLOW)
    if count != 1 or answers.schema[FLOW].dataType != given.schema[FLOW].dataType:
        fault = "dropped" if not count else "doubled" if count > 1 else "changed"
        raise ConfigurationError(
            f"the transform has {fault} the column {FLOW}: keep it, once and as it is, in each select, join and groupBy"
        )


def _rows(results: DataFrame) -> DataFrame:
    """Return the rows for the sink."""
    expires: Column = F.timestamp_millis("expires_ms").alias("expires")
    return results.where("queue is not null").select(*SINK_COLUMNS, expires)


def _partitions(spark: SparkSession) -> int:
    """Return the number of tasks. In foreachBatch Spark does not adapt it to the number of rows."""
    try:
        return spark.sparkContext.defaultParallelism
    except AttributeError:
        return int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
