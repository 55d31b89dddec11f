"""Tests of the orders of `make demo`: a short run is judged to be right, and anything wrong with an order is found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from examples.orders.audit import (
    ALL_TABLES,
    LAST_TABLE,
    VERDICT_FILE,
    OrdersVerdict,
    RunRecords,
    dead_letters_table,
    due,
    evaluate,
    findings,
    judge,
    orders_table,
    rows_table,
)
from examples.orders.run import Counts, DeadLetter, run
from examples.orders.web import Listed, read_list

pytestmark = pytest.mark.timeout(600)

FLOWS = "flow string, order string, has_ended boolean, is_given_up boolean, last_at double"

LISTED = [
    *(Listed(f"good-{number}", "customer", 10.0) for number in range(7)),
    Listed("refused", "batch", 10.0, rejected_by="stock.reserve"),
    Listed("declined", "customer", 10.0, rejected_by="payment.charge"),
    Listed("left", "customer", 10.0, is_rolled_back=True),
]


class Story:
    """Records of a right run with these orders, to be changed."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.listed = list(LISTED)
        self.rows = [
            (row["table"], row["order"]) for row in due(orders_table(spark, LISTED)).where("due = 1").collect()
        ]
        self.flows = [
            (f"flow of {each.order}", each.order, each.rejected_by is None, each.rejected_by is not None, 11.0)
            for each in LISTED
            if not each.is_rolled_back
        ]
        self.letters = [DeadLetter(each.order, each.rejected_by, "Reject: no") for each in LISTED if each.rejected_by]

    def forget_flow(self, order: str) -> None:
        self.flows = [each for each in self.flows if each[1] != order]

    def cut_flow(self, order: str) -> None:
        """Remove the end of the order's flow from the records."""
        self.forget_flow(order)
        self.flows.append((f"flow of {order}", order, False, False, 11.0))

    def records(self, *, is_cut: bool = False) -> RunRecords:
        spark = self._spark
        return RunRecords(
            orders_table(spark, self.listed),
            rows_table(spark, self.rows),
            spark.createDataFrame(self.flows, FLOWS),
            dead_letters_table(spark, self.letters),
            is_cut,
        )

    def findings(self, *, is_cut: bool = False) -> set[tuple[str, str]]:
        return {(row["order"], row["finding"]) for row in findings(self.records(is_cut=is_cut)).collect()}


@pytest.fixture
def story(spark: SparkSession) -> Story:
    return Story(spark)


def test_right_story_has_no_finding(story: Story) -> None:
    assert Counter(table for table, _ in story.rows) == {
        "orders": 8,
        "placed": 9,
        "reserved": 8,
        "billed": 8,
        "charged": 7,
        "shipped": 7,
    }
    assert not story.findings()


def test_wrong_rows_are_found_with_their_orders(story: Story) -> None:
    story.rows.append(("charged", "good-0"))
    for table in ALL_TABLES:
        story.rows.remove((table, "good-1"))
    story.rows.append(("placed", "left"))
    story.rows.append(("reserved", "refused"))
    story.rows.append(("shipped", "nobody's"))
    assert story.findings() == {
        ("good-0", "2 rows in charged instead of 1"),
        *(("good-1", f"0 rows in {table} instead of 1") for table in ALL_TABLES),
        ("left", "1 rows in placed instead of 0"),
        ("refused", "1 rows in reserved instead of 0"),
        ("nobody's", "1 rows in shipped instead of 0"),
    }


def test_wrong_flows_and_dead_letters_are_found_with_their_orders(story: Story) -> None:
    story.cut_flow("good-0")
    story.forget_flow("good-1")
    story.forget_flow("good-2")
    story.flows += [
        ("flow of good-2", "good-2", True, True, 11.0),
        ("another of good-3", "good-3", True, False, 11.0),
        ("flow of left", "left", False, False, 11.0),
        ("a flow", "nobody's", True, False, 11.0),
    ]
    story.forget_flow("declined")
    story.flows.append(("flow of declined", "declined", True, False, 11.0))
    story.letters[:] = [
        DeadLetter("refused", "stock.reserve", ""),
        DeadLetter("good-4", "order.place", "ValueError: no"),
    ]
    assert story.findings() == {
        ("good-0", "its flow did not end"),
        ("good-1", "its flow did not end"),
        ("good-2", "its flow was given up"),
        ("good-3", "2 flows have begun instead of 1"),
        ("left", "it was rolled back, and its flow has begun"),
        ("nobody's", "a flow has begun of which the web application knows nothing"),
        ("declined", "its flow has ended and should have been given up"),
        ("declined", "0 dead letters of payment.charge instead of 1"),
        ("refused", "its dead letter of stock.reserve says no cause"),
        ("good-4", "1 dead letters of order.place instead of 0"),
    }


def test_a_flow_whose_last_events_went_with_their_process_has_ended_by_its_row(story: Story) -> None:
    story.cut_flow("good-0")
    story.forget_flow("good-1")
    assert not story.findings(is_cut=True)
    verdict = evaluate(story.records(is_cut=True), {}, 1, contract_held=True)
    assert verdict.is_right
    assert {each.kind: each.not_recorded for each in verdict.kinds} == {"customer": 2, "batch": 0}
    story.rows.remove((LAST_TABLE, "good-1"))
    assert story.findings(is_cut=True) == {
        ("good-1", "its flow did not end"),
        ("good-1", "0 rows in shipped instead of 1"),
    }


def test_waiting_messages_and_a_broken_contract_are_not_right(story: Story) -> None:
    verdict = evaluate(story.records(), {"order.place": 3}, 0, contract_held=True)
    assert not verdict.is_right
    assert [each.finding for each in verdict.findings] == ["3 still wait in order.place"]
    assert not evaluate(story.records(), {}, 0, contract_held=False).is_right


@pytest.mark.alternates("stories")
def test_a_short_run_with_both_kills_is_right(tmp_path: Path, spark: SparkSession) -> None:
    counts = Counts(customer=24, asked=8, batch=60)
    printed: list[str] = []
    result = run(tmp_path, counts, printed.append)
    out = tmp_path / "report"
    verdict = judge(result, out)
    assert verdict.is_right, verdict.findings
    assert verdict == msgspec.json.decode((out / VERDICT_FILE).read_bytes(), type=OrdersVerdict)
    assert len([line for line in printed if "kill -9" in line]) == 2
    assert verdict.killed_processes == 1
    listed = read_list(result.orders)
    assert Counter(each.kind for each in listed) == counts._asdict()
    assert sum(each.is_rolled_back for each in listed) == sum(each.rolled_back for each in verdict.kinds) == 3
    assert sum(each.repeated for each in verdict.kinds) == 4
    # An attempt that a kill has ended is one of the three of a card that is declined, and another cause.
    letters: Counter[str] = Counter()
    for each in verdict.dead_letters:
        letters[each.stage] += each.messages
    assert letters == {"stock.reserve": 4, "payment.charge": 4}
