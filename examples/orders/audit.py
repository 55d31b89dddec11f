"""Audit of the orders: Spark compares what different programs have written down.

    the web application's list ──▶ what is due ──┐
    rows of the service's tables ────────────────┤
    flows, from the events of stages ────────────┼──▶ findings, each with its order
    dead letters of the broker ──────────────────┘

`truenext audit --stages` judges broker and stages (docs/audit.md, docs/stages-events.md). It makes the flows, too. What
is added here knows what an order is.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from functools import reduce
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import pandas
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from examples.orders.run import Left, Letter
from examples.orders.service import TABLES, WEB_TABLE
from examples.orders.web import Listed, read_list
from truenext.spark.audit.command import audit_all, write_page
from truenext.spark.paths import path_to_read
from truenext.spark.session import start
from truenext.spark.stages.schema import read_stage_events

T = TypeVar("T")

TITLE = "A thousand orders through a service of five stages, broker and service killed on the way"
VERDICT = "verdict.json"
SMALL = 2
"""Parts of each table in Spark: all of them are small."""

LAST_STAGE = list(TABLES)[-1]
LAST_TABLE = TABLES[LAST_STAGE]
ALL_TABLES = (WEB_TABLE, *TABLES.values())


class Told(NamedTuple):
    """What was written down, as tables of Spark."""

    orders: DataFrame
    """The web application's list, the fields of `Listed`."""
    rows: DataFrame
    """`table`, `order`: all rows of all tables."""
    flows: DataFrame
    """`flow`, `order`, `has_ended`, `is_given_up`, `last_at`."""
    letters: DataFrame
    """Dead letters: `order`, `stage`, `cause`."""
    is_cut: bool
    """A process of the service was killed, so its last events may be missing."""


class Kind(msgspec.Struct):
    """What became of one kind of orders."""

    kind: str
    committed: int
    rolled_back: int
    repeated: int
    """Ordered twice under the same key."""
    flows: int
    completed: int
    given_up: int
    not_recorded: int
    """Orders whose flow has no end in the events: its process was killed before it wrote its last ones. The rows of
    these orders say whether it ended."""
    p50: float | None
    """Seconds from the order to the last thing that a stage did, of flows that have ended."""
    p99: float | None


class RowsOf(msgspec.Struct):
    """One table of the service."""

    table: str
    due: int
    there: int
    missing: int
    """Orders that have fewer rows than are due."""
    too_many: int


class Cause(msgspec.Struct):
    """Dead letters of one stage with the same cause."""

    stage: str
    cause: str
    messages: int


class Wrong(msgspec.Struct):
    """A finding."""

    order: str
    finding: str


class Answer(msgspec.Struct):
    """What the audit has found."""

    is_right: bool
    findings: list[Wrong]
    kinds: list[Kind]
    tables: list[RowsOf]
    letters: list[Cause]
    killed_processes: int
    """Of the service."""
    contract_held: bool
    """By `truenext audit`, of broker and stages."""


def judge(left: Left, out: Path) -> Answer:
    """Audit what a run has left behind. Pages, tables and the answer are written to `out`."""
    spark = start()
    spark.conf.set("spark.sql.shuffle.partitions", SMALL)
    (audited,) = audit_all([left.data], stages=[left.events], out=out)
    killed = killed_processes(read_stage_events(spark, [left.events]))
    told = Told(
        orders_table(spark, read_list(left.orders)),
        rows_table(spark, rows_of(left.database)),
        flows_table(*(spark.read.parquet(path_to_read(out.resolve() / name)) for name in ("flows", "stage_runs"))),
        letters_table(spark, left.letters),
        killed > 0,
    )
    answer = answer_of(told, left.waiting, killed, contract_held=audited.verdict.is_held)
    (out / VERDICT).write_bytes(msgspec.json.format(msgspec.json.encode(answer)))
    write_page([audited], out, title=TITLE, sections=sections(answer, left))
    return answer


def sections(answer: Answer, left: Left) -> dict[str, pandas.DataFrame]:
    """What the page says of the orders, besides what `truenext audit` says of broker and stages."""
    kills = {
        "killed": [kill.what for kill in left.kills],
        "at (UTC)": [f"{pandas.Timestamp(kill.at, unit='s'):%H:%M:%S}" for kill in left.kills],
        "seconds since the first order": [f"{kill.seconds:.1f}" for kill in left.kills],
    }
    findings = {"Findings": pandas.DataFrame(map(msgspec.structs.asdict, answer.findings))} if answer.findings else {}
    return findings | {
        "Rows in the service's tables": pandas.DataFrame(map(msgspec.structs.asdict, answer.tables)).rename(
            columns={"missing": "orders with too few", "too_many": "orders with too many"}
        ),
        "Killed with kill -9, and started again": pandas.DataFrame(kills),
    }


def answer_of(told: Told, waiting: Mapping[str, int], killed: int, *, contract_held: bool) -> Answer:
    """`waiting` are messages that still wait somewhere, `killed` how many processes of the service were killed."""
    kept = Told(told.orders.persist(), told.rows.persist(), told.flows.persist(), told.letters.persist(), told.is_cut)
    found = _rows(findings(kept), Wrong)
    found += [Wrong("", f"{count} still wait in {name}") for name, count in waiting.items()]
    answer = Answer(
        is_right=contract_held and not found,
        findings=found,
        kinds=_rows(kinds(kept), Kind),
        tables=_rows(tables(kept), RowsOf),
        letters=_rows(letter_counts(kept.letters), Cause),
        killed_processes=killed,
        contract_held=contract_held,
    )
    for each in (kept.orders, kept.rows, kept.flows, kept.letters):
        each.unpersist()
    return answer


def _rows(table: DataFrame, kind: type[T]) -> list[T]:
    return [msgspec.convert(row.asDict(), kind) for row in table.collect()]


# ---- What was written down ----


def orders_table(spark: SparkSession, listed: Iterable[Listed]) -> DataFrame:
    schema = "order string, kind string, ordered_at double, rejected_by string, is_rolled_back boolean, times int"
    return spark.createDataFrame([msgspec.structs.astuple(each) for each in listed], schema)


def rows_of(database: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(database)) as connection:
        return [(table, order) for table in ALL_TABLES for (order,) in connection.execute(f"SELECT id FROM {table}")]


def rows_table(spark: SparkSession, rows: Sequence[tuple[str, str]]) -> DataFrame:
    return spark.createDataFrame(rows, "table string, order string")


def letters_table(spark: SparkSession, letters: Iterable[Letter]) -> DataFrame:
    return spark.createDataFrame(
        [msgspec.structs.astuple(each) for each in letters], "order string, stage string, cause string"
    )


def flows_table(flows: DataFrame, stage_runs: DataFrame) -> DataFrame:
    """From the tables of `truenext audit`. A flow has ended once its last stage has, by the events or by the history:
    that the broker has the acknowledgement says the same."""
    is_over = (F.col("outcome") == "completed") | (F.col("end_kind") == "acknowledged")
    ends = stage_runs.groupBy("flow").agg(
        F.coalesce(F.max(is_over & (F.col("stage") == LAST_STAGE)), F.lit(False)).alias("has_ended")
    )
    last_at = F.unix_micros("started_at") / 1e6 + F.col("seconds")
    return flows.join(ends, "flow").select(
        "flow",
        F.col("trace").alias("order"),
        "has_ended",
        (F.col("given_up") > 0).alias("is_given_up"),
        last_at.alias("last_at"),
    )


def killed_processes(events: DataFrame) -> int:
    """Those that have not closed their events in order."""
    closed = events.groupBy("process").agg(F.max(F.col("kind") == "closed").alias("is_closed"))
    return closed.where("not is_closed").count()


# ---- What is due ----


def due(orders: DataFrame) -> DataFrame:
    """`table`, `order`, `due`: how many rows there must be, 1 or 0. A stage that refuses an order, and all that follow,
    leave none; nobody leaves any of an order that was rolled back."""
    places = {stage: place for place, stage in enumerate(TABLES)}
    numbers = F.create_map(*(F.lit(each) for pair in places.items() for each in pair))
    passed = F.coalesce(numbers[F.col("rejected_by")], F.lit(len(TABLES)))
    all_tables = [(WEB_TABLE, -1), *((table, places[stage]) for stage, table in TABLES.items())]
    table_list = orders.sparkSession.createDataFrame(all_tables, "table string, place int")
    is_due = F.when(F.col("place") < 0, F.col("kind") == "customer").otherwise(F.col("place") < passed)
    return orders.crossJoin(F.broadcast(table_list)).select(
        "table", "order", "kind", (is_due & ~F.col("is_rolled_back")).cast("int").alias("due")
    )


# ---- Findings ----


def findings(told: Told) -> DataFrame:
    """`order`, `finding`: what is missing, or there twice, or should not be."""
    parts = (_wrong_rows(told), _wrong_flows(told), _wrong_letters(told))
    return reduce(DataFrame.unionByName, parts).orderBy("order", "finding")


def _wrong_rows(told: Told) -> DataFrame:
    there = told.rows.groupBy("table", "order").agg(F.count("*").alias("there"))
    both = due(told.orders).join(there, ["table", "order"], "full").na.fill(0, ["due", "there"])
    return both.where("due <> there").select("order", _said("{} rows in {} instead of {}", "there", "table", "due"))


def _wrong_flows(told: Told) -> DataFrame:
    """A flow of which the last events are missing has ended by its row, if a process was killed that may have had
    them; its row is judged like any other."""
    started = told.flows.groupBy("order").agg(
        F.count("*").alias("flows"), F.max("has_ended").alias("has_ended"), F.max("is_given_up").alias("is_given_up")
    )
    has_row = (
        told.rows.where(F.col("table") == LAST_TABLE).select("order").distinct().withColumn("has_row", F.lit(True))
    )
    all_orders = (
        told.orders.join(started, "order", "full")
        .join(has_row, "order", "left")
        .na.fill(0, ["flows"])
        .na.fill(False, ["has_ended", "is_given_up", "has_row"])
    )
    is_excused = F.lit(told.is_cut) & F.col("has_row")
    is_committed = F.col("kind").isNotNull() & ~F.col("is_rolled_back")
    is_rejected = F.col("rejected_by").isNotNull()
    wrong = (
        F.when(F.col("kind").isNull(), F.lit("a flow has begun of which the web application knows nothing"))
        .when(F.col("is_rolled_back") & (F.col("flows") > 0), F.lit("it was rolled back, and its flow has begun"))
        .when(F.col("flows") > 1, F.format_string("%d flows have begun instead of 1", "flows"))
        .when(
            is_committed & is_rejected & F.col("has_ended"), F.lit("its flow has ended and should have been given up")
        )
        .when(is_committed & ~is_rejected & F.col("is_given_up"), F.lit("its flow was given up"))
        .when(is_committed & ~is_rejected & ~F.col("has_ended") & ~is_excused, F.lit("its flow did not end"))
    )
    return all_orders.select("order", wrong.alias("finding")).where("finding is not null")


def _wrong_letters(told: Told) -> DataFrame:
    expected = told.orders.where("rejected_by is not null and not is_rolled_back").select(
        "order", F.col("rejected_by").alias("stage"), F.lit(1).alias("due")
    )
    there = told.letters.groupBy("order", "stage").agg(F.count("*").alias("there"), F.max("cause").alias("cause"))
    both = expected.join(there, ["order", "stage"], "full").na.fill(0, ["due", "there"])
    counted = both.where("due <> there").select(
        "order", _said("{} dead letters of {} instead of {}", "there", "stage", "due")
    )
    silent = both.where("there > 0 and coalesce(cause, '') = ''").select(
        "order", _said("its dead letter of {} says no cause", "stage")
    )
    return counted.unionByName(silent)


def _said(sentence: str, *columns: str) -> Column:
    return F.format_string(sentence.replace("{}", "%s"), *columns).alias("finding")


# ---- Figures ----


def kinds(told: Told) -> DataFrame:
    """One row per kind of order: how many, what became of them, and how many seconds it took from the order to the last
    thing that a stage did, of those whose flow has ended."""
    is_told = F.coalesce(F.col("has_ended") | F.col("is_given_up"), F.lit(False))
    took = F.when(F.col("has_ended"), F.col("last_at") - F.col("ordered_at"))
    return (
        told.orders.join(told.flows, "order", "left")
        .groupBy("kind")
        .agg(
            F.countDistinct(F.when(~F.col("is_rolled_back"), F.col("order"))).alias("committed"),
            F.countDistinct(F.when(F.col("is_rolled_back"), F.col("order"))).alias("rolled_back"),
            F.countDistinct(F.when(F.col("times") > 1, F.col("order"))).alias("repeated"),
            F.count("flow").alias("flows"),
            F.count_if("has_ended").alias("completed"),
            F.count_if("is_given_up").alias("given_up"),
            F.count_if(~F.col("is_rolled_back") & ~is_told).alias("not_recorded"),
            F.percentile(took, 0.5).alias("p50"),
            F.percentile(took, 0.99).alias("p99"),
        )
        .orderBy("kind")
    )


def tables(told: Told) -> DataFrame:
    """One row per table, in the order of the stages: rows that are due, that are there, and how many orders have fewer
    (`missing`) or more (`too_many`)."""
    there = told.rows.groupBy("table", "order").agg(F.count("*").alias("there"))
    place = F.array_position(F.array(*map(F.lit, ALL_TABLES)), F.col("table"))
    return (
        due(told.orders)
        .join(there, ["table", "order"], "full")
        .na.fill(0, ["due", "there"])
        .groupBy("table")
        .agg(
            F.sum("due").alias("due"),
            F.sum("there").alias("there"),
            F.count_if(F.col("there") < F.col("due")).alias("missing"),
            F.count_if(F.col("there") > F.col("due")).alias("too_many"),
        )
        .orderBy(place)
    )


def letter_counts(letters: DataFrame) -> DataFrame:
    return letters.groupBy("stage", "cause").agg(F.count("*").alias("messages")).orderBy("stage", "cause")
