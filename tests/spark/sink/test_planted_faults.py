"""Tests that the machine, or the orders of two processes, notice faults planted in the sink.

Each fault is a few characters changed, as a programmer might write them. All must be found.

    TRUENEXT_SEED=7 pytest tests/spark/sink/test_planted_faults.py      other examples than usual
"""

from __future__ import annotations

import os
from random import Random

import pytest

from tests.spark.faults import Fault, planted, to_plant
from tests.spark.sink.machine import Machine
from tests.spark.sink.oracle import Disagreement
from tests.spark.sink.orders import SCENARIOS, Orders, orders
from tests.spark.sink.test_orders import count_writes
from truenext.engine.background.bulk_work import BulkPieceExecutor
from truenext.errors import TruenextError
from truenext.spark.broker import latest
from truenext.spark.datasource import QueueStreamWriter
from truenext.spark.sink import admin, decision, driver, publish
from truenext.spark.sink.draft import _DraftWriter
from truenext.testing import blocking_broker

SEED = int(os.environ.get("TRUENEXT_SEED", "5"))
EXAMPLES = 1000
"""Examples at most; most faults show in ten."""
ORDERS_OF_EXAMPLE = 3
"""Orders of two processes in each example; a machine meets the rare ones rarely."""


_COMMIT_DECISION = """if decide(broker, queues, decision, last, is_forgotten=is_forgotten):
"""
_NEWEST = """newest = {}
    with connect() as broker:
        for queue in (each["name"] for each in broker.ask("queues")):
            if queue.startswith(f"{queues.decisions}."):
                found = [frame.headers for frame in broker.browse(f"/queue/{queue}")]
                own = [each for each in found if each["spark_draft"] == found[-1]["spark_draft"]]
                if own:
                    newest[queue] = Draft(int(queue.rpartition(".")[2]), own[0]["spark_draft"], len(own), 0)
    drafts = tuple(newest[each] for each in sorted(newest))
"""

FAULTS = [
    Fault(
        "a batch before the decided one is committed", driver, "_check_not_later", "if last.batch > batch:", "if False:"
    ),
    Fault(
        "the newest drafts are decided",
        driver,
        "commit_batch",
        "drafts = tuple(sorted((each for each in drafts if each.bundles), key=lambda draft: draft.partition))\n",
        _NEWEST,
    ),
    Fault(
        "drafts of later batches are dropped",
        driver,
        "drop_drafts",
        "spark_batch <= {batch}",
        "spark_batch >= 0",
    ),
    Fault(
        "drafts are dropped before they are published",
        driver,
        "decide_next",
        _COMMIT_DECISION,
        f"{_COMMIT_DECISION}            drop_drafts(broker, queues, decision.batch)\n",
    ),
    Fault(
        "an abort drops drafts",
        QueueStreamWriter,
        "abort",
        "-> None:",
        """-> None:
    from truenext.spark.sink.driver import drop_drafts
    for each in messages:
        if each is not None:
            with self._options.connect() as broker:
                drop_drafts(broker, SinkQueues(self._options.space, each.id), batchId)""",
    ),
    Fault(
        "a bundle is acknowledged outside its transaction",
        publish,
        "_commit_bundle",
        '{"id": bundle.headers["ack"], **transaction}',
        '{"id": bundle.headers["ack"]}',
    ),
    Fault(
        "lost transactions count attempts",
        publish,
        "_commit_bundle",
        '{**transaction, "truenext-count-attempts": "nacked"}',
        "transaction",
        is_rare=True,
    ),
    Fault(
        "bundles count before they are confirmed",
        _DraftWriter,
        "_confirm",
        "if answer.receipt is not None:",
        "if True:",
    ),
    Fault(
        "bundles are sent again under the same name",
        _DraftWriter,
        "write",
        "secrets.token_hex(6)",
        "self.drafts[0].name if self.drafts else secrets.token_hex(6)",
    ),
    Fault(
        "unconfirmed bundles are not sent again",
        _DraftWriter,
        "write",
        "again = deque(self._unconfirmed)",
        "again = deque()",
    ),
    Fault("a bundle is transient", _DraftWriter, "_send", '"persistent": "true"', '"persistent": "false"'),
    Fault(
        "close_sink does not close",
        admin,
        "close_sink",
        "last = decide_next(broker, queues, CLOSED_BATCH, _closed_after, _IMPATIENT)\n",
        "last = finish_decision(broker, queues, _IMPATIENT) or Decision(-1)\n",
    ),
    Fault(
        "held bundles count as published",
        publish,
        "_publish_draft",
        "if not waiting and not held:",
        "if not waiting:",
    ),
    Fault(
        "bundles that are not ready count as published",
        publish,
        "_publish_draft",
        "while published < draft.bundles:",
        "while False:",
    ),
    Fault(
        "unconfirmed bundles are published",
        publish,
        "_publish_draft",
        " AND spark_bundle < {draft.bundles}",
        "",
    ),
    Fault(
        "a decision has no number",
        latest,
        "replace_latest",
        ', "truenext-producer": producer, "truenext-number": str(number)',
        "",
    ),
    Fault(
        "first decisions have the numbers of their batches",
        decision,
        "decide",
        "_FIRST_NUMBER if last is None and not is_forgotten else _FIRST_NUMBER + 1 + decision.batch",
        "decision.batch + 1",
    ),
    Fault(
        "a decision replaces any other",
        latest,
        "replace_latest",
        "is_replaced = replaces(last_batch)",
        "is_replaced = True",
    ),
    Fault(
        "a decision does not replace the last one",
        latest,
        "replace_latest",
        "if last_ack:",
        "if False:",
    ),
    Fault(
        "a decision that was not made is published",
        driver,
        "decide_next",
        _COMMIT_DECISION,
        "if decide(broker, queues, decision, last, is_forgotten=is_forgotten) or True:\n",
    ),
    Fault(
        "the last decision is not finished",
        driver,
        "decide_next",
        "finish_decision(broker, queues, patience, check)",
        "read_decision(broker, queues)",
    ),
    Fault(
        "the last decision is purged",
        driver,
        "_commit_batch",
        "    drop_drafts(broker, queues, decision.batch)",
        "    drop_drafts(broker, queues, decision.batch)\n    purge(broker, queues.decisions)",
    ),
    Fault(
        "failed drafts are not dropped",
        driver,
        "_commit_batch",
        "    drop_drafts(broker, queues, decision.batch)",
        "    pass",
    ),
    Fault(
        "held messages count at the end of a purge",
        BulkPieceExecutor,
        "execute",
        "result.left += bulk.count_held(held, request, read.until, result.next)",
        "pass",
    ),
]


def test_planting_finds_what_each_fault_replaces() -> None:
    """Plant every fault, also those that are not drawn, and run none."""
    for fault in FAULTS:
        with planted(fault):
            pass


@pytest.mark.drawn
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", to_plant(FAULTS), ids=lambda fault: fault.name)
def test_machine_notices_a_fault(fault: Fault) -> None:
    assert examples_until_noticed(fault) is not None, "nobody noticed"


def examples_until_noticed(fault: Fault) -> int | None:
    # With the fault they may be others.
    possible = {scenario.name: list(orders(count_writes(scenario))) for scenario in SCENARIOS}
    with planted(fault):
        for each in range(EXAMPLES):
            random = Random(SEED + each)
            scenario = random.choice(SCENARIOS)
            try:
                with blocking_broker() as here, pytest.MonkeyPatch.context() as others:
                    Machine(random, here, others, []).run()
                for order in random.sample(possible[scenario.name], ORDERS_OF_EXAMPLE):
                    with blocking_broker() as here, pytest.MonkeyPatch.context() as others:
                        Orders(scenario, here, others, []).run(order)
            except (Disagreement, TruenextError):
                return each + 1
    return None
