"""Audit of the orders: Spark compares the records of different programs.

    the web application's list ──▶ rows that are due ──┐
    rows of the service's tables ──────────────────────┤
    flows, from the events of stages ──────────────────┼──▶ findings, each with its order
    dead letters of the broker ────────────────────────┘

`truenext audit --stages` judges broker and stages (docs/spark.md, docs/stages-running.md), and makes the table of
flows. The part here adds what an order is.
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

from examples.orders.run import DeadLetter, RunResult
from examples.orders.service import TABLES, WEB_TABLE
from examples.orders.web import Listed, read_list
from truenext.spark.audit.command import audit_histories, write_page
from truenext.spark.paths import path_to_read
from truenext.spark.session import start
from truenext.spark.stages.schema import read_stage_events

T = TypeVar("T")

TITLE = "A thousand orders through a service of five stages, broker and service killed on the way"
VERDICT_FILE = "verdict.json"
SMALL = 2
"""Partitions of each table in Spark: all tables are small."""

LAST_STAGE = list(TABLES)[-1]
LAST_TABLE = TABLES[LAST_STAGE]
ALL_TABLES = (WEB_TABLE, *TABLES.values())


class RunRecords(NamedTuple):
    """Records of a run, as tables of Spark."""

    orders: DataFrame
    """List of the web application, with the fields of `Listed`."""
    rows: DataFrame
    """Rows of all tables: `table`, `order`."""
    flows: DataFrame
    """Flows: `flow`, `order`, `has_ended`, `is_given_up`, `last_at`."""
    dead_letters: DataFrame
    """Dead letters: `order`, `stage`, `cause`."""
    is_cut: bool
    """A process of the service was killed, so its last events may be missing."""


class KindSummary(msgspec.Struct):
    """Results of one kind of orders."""

    kind: str
    committed: int
    rolled_back: int
    repeated: int
    """Number of orders that were placed twice under the same key."""
    flows: int
    completed: int
    given_up: int
    not_recorded: int
    """Orders whose flow has no end in the events: its process was killed before it wrote its last ones. Whether the
    flow ended is seen from its rows."""
    p50: float | None
    """Seconds from the order to the end of its last stage, of flows that have ended."""
    p99: float | None


class TableSummary(msgspec.Struct):
    """Rows of one table of the service."""

    table: str
    due: int
    there: int
    missing: int
    """Number of orders with fewer rows than are due."""
    too_many: int


class Cause(msgspec.Struct):
    """Dead letters of one stage with the same cause."""

    stage: str
    cause: str
    messages: int


class OrderFinding(msgspec.Struct):
    """Difference between the records of one order; for all orders if `order` is empty."""

    order: str
    finding: str


class OrdersVerdict(msgspec.Struct):
    """Result of the audit."""

    is_right: bool
    findings: list[OrderFinding]
    kinds: list[KindSummary]
    tables: list[TableSummary]
    dead_letters: list[Cause]
    killed_processes: int
    """Number of killed processes of the service."""
    contract_held: bool
    """Verdict of `truenext audit` on broker and stages."""


def judge(result: RunResult, out: Path) -> OrdersVerdict:
    """Audit the records of a run. Pages, tables and the verdict are written to `out`."""
    spark = start()
    spark.conf.set("spark.sql.shuffle.partitions", SMALL)
    (audited,) = audit_histories([result.data], stages=[result.events], out=out)
    killed = killed_processes(read_stage_events(spark, [result.events]))
    records = RunRecords(
        orders_table(spark, read_list(result.orders)),
        rows_table(spark, rows_of(result.database)),
        flows_table(*(spark.read.parquet(path_to_read(out.resolve() / name)) for name in ("flows", "stage_runs"))),
        dead_letters_table(spark, result.dead_letters),
        killed > 0,
    )
    verdict = evaluate(records, result.waiting, killed, contract_held=audited.verdict.has_contract_held)
    (out / VERDICT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(verdict)))
    write_page([audited], out, title=TITLE, sections=sections(verdict, result))
    return verdict


def sections(verdict: OrdersVerdict, result: RunResult) -> dict[str, pandas.DataFrame]:
    """Return the sections of the page on orders, besides those of `truenext audit` on broker and stages."""
    kills = {
        "killed": [kill.name for kill in result.kills],
        "at (UTC)": [f"{pandas.Timestamp(kill.at, unit='s'):%H:%M:%S}" for kill in result.kills],
        "seconds since the first order": [f"{kill.seconds:.1f}" for kill in result.kills],
    }
    findings = {"Findings": pandas.DataFrame(map(msgspec.structs.asdict, verdict.findings))} if verdict.findings else {}
    return findings | {
        "Rows in the service's tables": pandas.DataFrame(map(msgspec.structs.asdict, verdict.tables)).rename(
            columns={"missing": "orders with too few", "too_many": "orders with too many"}
        ),
        "Killed with kill -9, and started again": pandas.DataFrame(kills),
    }


def evaluate(records: RunRecords, waiting: Mapping[str, int], killed: int, *, contract_held: bool) -> OrdersVerdict:
    """Judge the records. `waiting` has numbers of messages by queue, `killed` is the number of killed processes."""
    cached = RunRecords(
        records.orders.persist(),
        records.rows.persist(),
        records.flows.persist(),
        records.dead_letters.persist(),
        records.is_cut,
    )
    found = _rows(findings(cached), OrderFinding)
    found += [OrderFinding("", f"{count} still wait in {name}") for name, count in waiting.items()]
    verdict = OrdersVerdict(
        is_right=contract_held and not found,
        findings=found,
        kinds=_rows(kinds(cached), KindSummary),
        tables=_rows(tables(cached), TableSummary),
        dead_letters=_rows(dead_letter_counts(cached.dead_letters), Cause),
        killed_processes=killed,
        contract_held=contract_held,
    )
    for each in (cached.orders, cached.rows, cached.flows, cached.dead_letters):
        each.unpersist()
    return verdict


def _rows(table: DataFrame, kind: type[T]) -> list[T]:
    return [msgspec.convert(row.asDict(), kind) for row in table.collect()]


# ---- Records ----


def orders_table(spark: SparkSession, listed: Iterable[Listed]) -> DataFrame:
    schema = "order string, kind string, ordered_at double, rejected_by string, is_rolled_back boolean, times int"
    return spark.createDataFrame([msgspec.structs.astuple(each) for each in listed], schema)


def rows_of(database: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(database)) as connection:
        return [(table, order) for table in ALL_TABLES for (order,) in connection.execute(f"SELECT id FROM {table}")]


def rows_table(spark: SparkSession, rows: Sequence[tuple[str, str]]) -> DataFrame:
    return spark.createDataFrame(rows, "table string, order string")


def dead_letters_table(spark: SparkSession, dead_letters: Iterable[DeadLetter]) -> DataFrame:
    return spark.createDataFrame(
        [msgspec.structs.astuple(each) for each in dead_letters], "order string, stage string, cause string"
    )


def flows_table(flows: DataFrame, stage_runs: DataFrame) -> DataFrame:
    """Return the flows from the tables of `truenext audit`. A flow has ended if its last stage has, by the events or
    by the history: the acknowledgement at the broker says the same."""
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
    """Return the number of processes that have not closed their events in order."""
    closed = events.groupBy("process").agg(F.max(F.col("kind") == "closed").alias("is_closed"))
    return closed.where("not is_closed").count()


# ---- Due rows ----


def due(orders: DataFrame) -> DataFrame:
    """Return `table`, `order`, `due`, the number of rows that there must be: 1 or 0. A stage that rejects an order,
    and all stages after it, write no row. An order that was rolled back has none at all."""
    positions = {stage: position for position, stage in enumerate(TABLES)}
    numbers = F.create_map(*(F.lit(each) for pair in positions.items() for each in pair))
    stages_passed = F.coalesce(numbers[F.col("rejected_by")], F.lit(len(TABLES)))
    all_tables = [(WEB_TABLE, -1), *((table, positions[stage]) for stage, table in TABLES.items())]
    table_list = orders.sparkSession.createDataFrame(all_tables, "table string, position int")
    is_due = F.when(F.col("position") < 0, F.col("kind") == "customer").otherwise(F.col("position") < stages_passed)
    return orders.crossJoin(F.broadcast(table_list)).select(
        "table", "order", "kind", (is_due & ~F.col("is_rolled_back")).cast("int").alias("due")
    )


# ---- Findings ----


def findings(records: RunRecords) -> DataFrame:
    """Return `order`, `finding`: rows, flows and dead letters that are missing, repeated, or should not be there."""
    parts = (_row_findings(records), _flow_findings(records), _dead_letter_findings(records))
    return reduce(DataFrame.unionByName, parts).orderBy("order", "finding")


def _row_findings(records: RunRecords) -> DataFrame:
    counted = records.rows.groupBy("table", "order").agg(F.count("*").alias("there"))
    both = due(records.orders).join(counted, ["table", "order"], "full").na.fill(0, ["due", "there"])
    return both.where("due <> there").select(
        "order", _finding_text("{} rows in {} instead of {}", "there", "table", "due")
    )


def _flow_findings(records: RunRecords) -> DataFrame:
    """Compare flows with orders. If a killed process may have had the last events of a flow, the row of its last
    stage counts as its end; rows are judged by themselves."""
    started = records.flows.groupBy("order").agg(
        F.count("*").alias("flows"), F.max("has_ended").alias("has_ended"), F.max("is_given_up").alias("is_given_up")
    )
    has_row = (
        records.rows.where(F.col("table") == LAST_TABLE).select("order").distinct().withColumn("has_row", F.lit(True))
    )
    all_orders = (
        records.orders.join(started, "order", "full")
        .join(has_row, "order", "left")
        .na.fill(0, ["flows"])
        .na.fill(False, ["has_ended", "is_given_up", "has_row"])
    )
    is_excused = F.lit(records.is_cut) & F.col("has_row")
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


def _dead_letter_findings(records: RunRecords) -> DataFrame:
    expected = records.orders.where("rejected_by is not null and not is_rolled_back").select(
        "order", F.col("rejected_by").alias("stage"), F.lit(1).alias("due")
    )
    dead_letters = records.dead_letters.groupBy("order", "stage").agg(
        F.count("*").alias("there"), F.max("cause").alias("cause")
    )
    both = expected.join(dead_letters, ["order", "stage"], "full").na.fill(0, ["due", "there"])
    counted = both.where("due <> there").select(
        "order", _finding_text("{} dead letters of {} instead of {}", "there", "stage", "due")
    )
    silent = both.where("there > 0 and coalesce(cause, '') = ''").select(
        "order", _finding_text("its dead letter of {} says no cause", "stage")
    )
    return counted.unionByName(silent)


def _finding_text(sentence: str, *columns: str) -> Column:
    return F.format_string(sentence.replace("{}", "%s"), *columns).alias("finding")


# ---- Figures ----


def kinds(records: RunRecords) -> DataFrame:
    """Return one row per kind of order: number, results, and seconds from the order to the end of the last stage, of
    flows that have ended."""
    is_recorded = F.coalesce(F.col("has_ended") | F.col("is_given_up"), F.lit(False))
    duration = F.when(F.col("has_ended"), F.col("last_at") - F.col("ordered_at"))
    return (
        records.orders.join(records.flows, "order", "left")
        .groupBy("kind")
        .agg(
            F.countDistinct(F.when(~F.col("is_rolled_back"), F.col("order"))).alias("committed"),
            F.countDistinct(F.when(F.col("is_rolled_back"), F.col("order"))).alias("rolled_back"),
            F.countDistinct(F.when(F.col("times") > 1, F.col("order"))).alias("repeated"),
            F.count("flow").alias("flows"),
            F.count_if("has_ended").alias("completed"),
            F.count_if("is_given_up").alias("given_up"),
            F.count_if(~F.col("is_rolled_back") & ~is_recorded).alias("not_recorded"),
            F.percentile(duration, 0.5).alias("p50"),
            F.percentile(duration, 0.99).alias("p99"),
        )
        .orderBy("kind")
    )


def tables(records: RunRecords) -> DataFrame:
    """Return one row per table, in the order of the stages: rows that are due, rows that are there, and the number
    of orders with fewer (`missing`) or more (`too_many`)."""
    counted = records.rows.groupBy("table", "order").agg(F.count("*").alias("there"))
    position = F.array_position(F.array(*map(F.lit, ALL_TABLES)), F.col("table"))
    return (
        due(records.orders)
        .join(counted, ["table", "order"], "full")
        .na.fill(0, ["due", "there"])
        .groupBy("table")
        .agg(
            F.sum("due").alias("due"),
            F.sum("there").alias("there"),
            F.count_if(F.col("there") < F.col("due")).alias("missing"),
            F.count_if(F.col("there") > F.col("due")).alias("too_many"),
        )
        .orderBy(position)
    )


def dead_letter_counts(dead_letters: DataFrame) -> DataFrame:
    return dead_letters.groupBy("stage", "cause").agg(F.count("*").alias("messages")).orderBy("stage", "cause")
