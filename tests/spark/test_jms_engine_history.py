"""Tests that the audit finds nothing in the history of JMS clients, whose consumers keep messages for transactions, and
end with the message that was delivered last.

Without Spark: the naive judge and the audit of each queue read the events.
"""

import random
from collections import Counter
from datetime import UTC, datetime

from tests.contract.naive_history import read
from tests.property.broker_without_threads import RecordedHistory
from tests.property.jms_machine import run_example
from tests.spark.test_engine_history import judged
from truenext.history.table import SCHEMA

EXAMPLES = 25


def findings(seed: int, seen: Counter[str]) -> Counter[str]:
    """Return the findings in the history of an example, and count the kinds and reasons of its events."""
    history = RecordedHistory()
    run_example(seed, history=history)
    events = list(read(b"".join(history.chunks)))
    seen.update(event.get("reason") or event["kind"] for event in events)
    nothing = dict.fromkeys(SCHEMA.names)
    return judged([nothing | event | {"at": datetime.fromtimestamp(event["at"] / 1e6, UTC)} for event in events])


def test_history_of_jms_clients_is_judged_right() -> None:
    first = random.randrange(1 << 30)
    print("first seed", first)
    seen: Counter[str] = Counter()
    for seed in range(first, first + EXAMPLES):
        assert not findings(seed, seen), seed
    assert {"closed", "lost", "acknowledged", "dead-lettered", "requested"} <= set(seen)
