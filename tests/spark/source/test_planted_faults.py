"""Tests that the machine notices faults planted in the source.

Each fault is a few characters changed, as a programmer might write them. All must be found.

    TRUENEXT_SEED=7 pytest tests/spark/source/test_planted_faults.py      other examples than usual
"""

from __future__ import annotations

import os
from random import Random

import pytest

from tests.spark.faults import Fault, planted, to_plant
from tests.spark.source.machine import Disagreement, Machine
from truenext.errors import TruenextError
from truenext.spark.broker import latest
from truenext.spark.datasource import QueueStreamReader
from truenext.spark.source.bundle import BundleRows
from truenext.spark.source.driver import SourceDriver
from truenext.spark.source.offset import Offset
from truenext.spark.source.task import _Pull, _Task
from truenext.testing import blocking_broker

SEED = int(os.environ.get("TRUENEXT_SEED", "5"))
EXAMPLES = 1000
"""Examples at most; most faults show in ten."""


FAULTS = [
    Fault(
        "rows are given before the receipt",
        _Task,
        "_take",
        """if broker.wait(answer).headers.get("truenext-repeat") == "true":
            self._repeated = head.bundle
            raise _Repeated
        yield self._give(head, batch)""",
        """yield batch
        if broker.wait(answer).headers.get("truenext-repeat") == "true":
            self._repeated = head.bundle
            raise _Repeated
        self._give(head, batch)""",
    ),
    Fault(
        "an attempt ends without a last bundle",
        _Task,
        "_take",
        "while not self.is_done:\n",
        "while not self.is_done:\n        if not rows:\n            self.is_done = True\n            return\n",
    ),
    Fault(
        "a bundle with the last rows is not marked as the last",
        _Task,
        "_take",
        "len(rows), rows.bytes, is_last, task_rows)",
        "len(rows), rows.bytes, False, task_rows)",
    ),
    Fault(
        "bundle numbers do not contain the batch",
        Offset,
        "number",
        "self.batch << BUNDLE_BITS | bundle",
        "bundle",
    ),
    Fault(
        "bundle numbers contain the batch alone",
        Offset,
        "number",
        "self.batch << BUNDLE_BITS | bundle",
        "self.batch << BUNDLE_BITS",
    ),
    Fault(
        "a commit has no number",
        _Task,
        "_write",
        """"truenext-producer": self._end.producer(plan.partition),
            "truenext-number": str(self._end.number(head.bundle)),""",
        "",
    ),
    Fault(
        "all tasks share one producer",
        Offset,
        "producer",
        "self.id, partition",
        "self.id, 0",
    ),
    Fault(
        "a repeat is not looked up",
        _Task,
        "_take",
        """self._repeated = head.bundle
            raise _Repeated""",
        "pass",
    ),
    Fault(
        "bundles of an earlier attempt are not looked up",
        _Task,
        "_stored_bundles",
        "{self._end.batch} AND",
        "0 AND",
    ),
    Fault(
        "an attempt continues after the last bundle of another",
        _Task,
        "_give",
        "self.is_done = head.is_last",
        "self.is_done = False",
    ),
    Fault(
        "bundles of a lost connection are given again",
        _Task,
        "_stored_bundles",
        "expected = self._given",
        "expected = 0",
    ),
    Fault(
        "a zombie whose batch was cleared does not fail",
        _Task,
        "read",
        "self._repeated == self._given and not self.is_done",
        "False",
    ),
    Fault(
        "a bundle does not acknowledge its last row",
        BundleRows,
        "add",
        'self.last_acks[headers["subscription"]] = headers["ack"]',
        'self.last_acks.setdefault(headers["subscription"], headers["ack"])',
    ),
    Fault(
        "rows are given in reverse order",
        BundleRows,
        "record_batch",
        "self._rows",
        "self._rows[::-1]",
    ),
    Fault(
        "the bundle is not in the transaction",
        _Task,
        "_write",
        '"persistent": "true", **transaction, **headers}',
        '"persistent": "true", **headers}',
    ),
    Fault(
        "the messages are not acknowledged in the transaction",
        _Task,
        "_write",
        '{"id": last_ack, **transaction}',
        '{"id": last_ack}',
    ),
    Fault(
        "of several queues only one is acknowledged",
        _Task,
        "_write",
        "in last_acks.values()",
        "in list(last_acks.values())[:1]",
    ),
    Fault(
        "of several queues the probe releases only one",
        SourceDriver,
        "_is_ready",
        '{"subscriptions": self._probes, "suspend": True}',
        '{"subscriptions": self._probes[:1], "suspend": True}',
    ),
    Fault(
        "a bundle is transient",
        _Task,
        "_write",
        '"persistent": "true"',
        '"persistent": "false"',
    ),
    Fault(
        "lost transactions count attempts",
        _Task,
        "_write",
        '{**transaction, "truenext-count-attempts": "nacked"}',
        "transaction",
    ),
    Fault(
        "the bundles of a batch are cleared before it is read",
        QueueStreamReader,
        "partitions",
        "self._source_driver().check_not_cleared(offset)",
        "self._source_driver()._patiently(lambda broker: self._source_driver()._clear(broker, offset))",
    ),
    Fault(
        "the mark does not advance with the cleared batch",
        SourceDriver,
        "_clear",
        "if mark < done.batch:\n",
        "if False:\n",
    ),
    Fault(
        "only the first partition is cleared",
        SourceDriver,
        "_clear",
        "range(done.partitions)",
        "range(1)",
    ),
    Fault(
        "the previous mark is not removed",
        latest,
        "replace_latest",
        "if last_ack:\n",
        "if False:\n",
    ),
    Fault(
        "partitions are taken from the option and not from the offset",
        QueueStreamReader,
        "partitions",
        "range(offset.partitions)",
        "range(self._options.partitions)",
    ),
    Fault(
        "each run has queues of its own",
        SourceDriver,
        "_next_end",
        "secrets.token_hex(8) if start is None else start.id",
        "secrets.token_hex(8)",
    ),
    Fault(
        "options are not applied to the rows",
        QueueStreamReader,
        "read",
        "yield apply_options(batch, options)",
        "yield batch",
    ),
    Fault(
        "the selector is not sent",
        _Pull,
        "__init__",
        "options.selector",
        "None",
    ),
    Fault(
        "rows that do not fit into a bundle are lost",
        _Pull,
        "next_rows",
        "self._broker.put_back(frame)",
        "self._requested -= 1",
    ),
    Fault(
        "a mark held by a dead driver is not awaited",
        SourceDriver,
        "_read_mark",
        "monotonic() >= deadline",
        "True",
    ),
    Fault(
        "messages checked by the driver are not released",
        SourceDriver,
        "_is_ready",
        'broker.call("SEND", {"destination": "/control/release"}, body)',
        "pass",
    ),
]


def test_planting_finds_what_each_fault_replaces() -> None:
    """Plant every fault, also those that are not drawn, and run none."""
    for fault in FAULTS:
        with planted(fault):
            pass


@pytest.mark.drawn
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", to_plant(FAULTS), ids=lambda fault: fault.name)
def test_machine_notices_a_fault(fault: Fault) -> None:
    assert examples_until_noticed(fault) is not None, "nobody noticed"


def examples_until_noticed(fault: Fault) -> int | None:
    with planted(fault):
        for each in range(EXAMPLES):
            try:
                with blocking_broker() as here, pytest.MonkeyPatch.context() as others:
                    Machine(Random(SEED + each), here, others, [], "orders").run()
            except (Disagreement, TruenextError, AssertionError):
                return each + 1
    return None
