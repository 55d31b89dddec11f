"""Tests that the engine does what docs/contract.md says, with random clients, sockets and disks.

TRUENEXT_EXAMPLES=5000 pytest tests/property/test_against_oracle.py       longer
TRUENEXT_SEED=7 pytest tests/property/test_against_oracle.py              the same run again
"""

import os
from random import Random, SystemRandom

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property import broker_machine
from tests.property.broker_machine import MACHINES, NO_LIMIT, PLAIN, ROOMY, STEPS, BrokerMachine, PerTurn
from tests.property.oracle import Retries
from truenext.model.commands import AckMode
from truenext.model.policy import ExpiryAction, StoreAndDispatch

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "10"))
"""Number of examples of each machine: a tenth by Hypothesis, which shrinks failures, the rest plainly, at a third of
the cost."""


@pytest.mark.timeout(300 + EXAMPLES)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_engine_never_differs_from_the_oracle_in(machine: type[BrokerMachine]) -> None:
    run_state_machine_as_test(
        seed(_seed())(type("BrokerMachine", (machine,), {})),
        settings=settings(
            max_examples=max(1, EXAMPLES // 10),
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )


@pytest.mark.timeout(300 + EXAMPLES)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_engine_never_differs_from_the_oracle_in_plain_examples_of(
    machine: type[BrokerMachine], steps: list[str]
) -> None:
    random = Random(_seed())
    for _ in range(EXAMPLES - EXAMPLES // 10):
        machine.run_plainly(random, steps)


def _seed() -> int:
    seed_of_run = int(os.environ.get("TRUENEXT_SEED") or SystemRandom().randrange(2**32))
    print(f"TRUENEXT_SEED={seed_of_run} TRUENEXT_EXAMPLES={EXAMPLES}")  # pytest shows it if the test fails
    return seed_of_run


def test_a_browse_may_show_a_message_as_it_was_before_it_was_dispatched_and_came_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oracle took it for one to which nothing had happened: after a crash and a clean stop its first dispatch is
    counted as one for the second time."""
    monkeypatch.setattr(broker_machine, "note", print)
    machine = BrokerMachine()
    machine.start(
        {
            "memory_limits": (ROOMY, NO_LIMIT),
            "page_size": 4,
            "store_and_dispatch": StoreAndDispatch.CONCURRENT,
            "expired": ExpiryAction.DROP,
            "retries": Retries(),
            "per_turn": PerTurn(),
        },
        evicts=False,
        is_narrow=True,
        attempts_max=3,
        never=set(),
        readers=[{"peer_index": 0, "queue": "a", "mode": AckMode.CLIENT, "window": 2} | PLAIN],
    )
    is_sent = {"has_receipt": False, "expires_in": None, "is_big": False, "count": 1}
    steps: list[tuple[str, dict[str, object]]] = [
        ("send", {"peer_index": 1, "queue": "a", "priority": 4, "persistent": True} | is_sent),
        ("all_becomes_durable", {}),
        ("turn_and_send", {}),
        ("crash", {}),
        ("restart", {}),
        ("browse", {"peer_index": 1, "queue": "a", "selector": "TRUE"}),
        ("turn", {}),
        # The browser's page and the consumer's, both as they are now.
        *[("read_page", {})] * 2,
        ("deliver_page", {}),
        ("turn_and_send", {}),
        ("disconnect", {"peer_index": 0, "is_clean": True, "sent_count": 0}),
        ("deliver_page", {}),
        ("turn", {}),
    ]
    for step in steps:
        machine.happens(action=step)
    (browse,) = machine.oracle.browses
    assert [letter.deliveries for letter in browse.shown] == [2]
