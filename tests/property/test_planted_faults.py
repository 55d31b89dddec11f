"""Tests that the state machines notice every planted fault of the engine.

A property test that never fails may be one that sees nothing. Every fault of planted_faults.py must be caught.

    TRUENEXT_SEED=7 pytest tests/property/test_planted_faults.py              other examples than usual
    TRUENEXT_FAULTS=all pytest tests/property/test_planted_faults.py          also those that show rarely
"""

import os
from collections.abc import Callable, Iterable, Sequence
from random import Random

import pytest

from tests.property import planted_faults, targets
from tests.property.broker_machine import MACHINES, BrokerMachine
from tests.property.oracle import Disagreement
from tests.property.targets import AnyTarget
from truenext.engine.commands.sending import Sending
from truenext.engine.lifecycle import settlement
from truenext.engine.state.queue import Lane
from truenext.engine.writing import entries as writing
from truenext.engine.writing.entries import remove
from truenext.engine.writing.producers import ProducerRegistry
from truenext.model.record import DamagedRecord

ALL = os.environ.get("TRUENEXT_FAULTS") == "all"
SEED = int(os.environ.get("TRUENEXT_SEED", "5"))
ROUNDS = 40
"""Number of rounds of 50 examples, in the machine in which a fault shows soonest."""
FOUND = r"^(?!.*object has no attribute)|'(NoneType|tuple)' object has no attribute"
"""Errors as which a fault may show; an error in the fault's own code is none."""

ROUNDS_OF_ALL = 40
"""Number of rounds of 50 examples of each machine, after that. Some faults need three things at once, and show in one
example of a thousand."""

EXAMPLES_TO_BE_CALLED = 1000
"""Number of examples in which all replaced functions must be called once. Some need 200, most a handful."""


def run_machines(rounds: Iterable[int], machines: Sequence[type[BrokerMachine]], steps: list[str]) -> None:
    """Run examples up to the first that fails. Without Hypothesis: failures need not shrink, and more examples fit into
    the time."""
    for each in rounds:
        for machine in machines:
            random = Random(SEED + 1000 * each)
            for _ in range(50):
                machine.run_plainly(random, steps)


def test_planting_finds_the_targets_of_each_fault_with_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants every fault, also the ones that are not drawn, and runs none."""
    monkeypatch.setattr(targets.Target, "replace", lambda target, _, replacement: target.check_arguments(replacement))
    for plant in planted_faults.faults():
        with monkeypatch.context() as patch:
            plant(patch)


@pytest.mark.drawn
@pytest.mark.timeout(1800 if ALL else 900)
@pytest.mark.parametrize(
    "plant",
    [each for each in planted_faults.faults() if ALL or not planted_faults.is_rare(each)],
    ids=lambda plant: plant.__name__,
)
def test_the_machines_notice_when(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    plant(monkeypatch)
    # The engine may come upon what is wrong before the oracle does: a record or a message is missing.
    with pytest.raises((Disagreement, DamagedRecord, AttributeError), match=FOUND):
        first = planted_faults.first_round_of(plant)
        run_machines([first, *range(ROUNDS)], [planted_faults.machine_of(plant)], steps)
        run_machines(range(ROUNDS_OF_ALL), MACHINES, steps)


@pytest.mark.drawn
@pytest.mark.parametrize("machine", [each for each in MACHINES if planted_faults.faults_of(each)])
def test_functions_that_faults_replace_are_called(
    machine: type[BrokerMachine], monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    """Replacing a function that the engine no longer calls would be no fault. The faults of a machine are checked
    together."""
    targets = {each: planted_faults.targets_of(each) for each in planted_faults.faults_of(machine)}
    together = {name: target for its in targets.values() for name, target in its.items()}
    never = never_called(machine, together.values(), monkeypatch, steps)
    wrong = [
        f"{fault.__name__}: {name}, which is {label}"
        for fault, its in targets.items()
        for name, target in its.items()
        for label in target.labels
        if label in never
    ]
    assert not wrong


def never_called(
    machine: type[BrokerMachine],
    targets: Iterable[AnyTarget],
    patch: pytest.MonkeyPatch,
    steps: list[str],
    *,
    examples: int = EXAMPLES_TO_BE_CALLED,
) -> set[str]:
    """Return the places of targets not called after this number of examples."""
    never = {label for target in targets for label in target.labels}
    for target in targets:
        target.watch(patch, never.discard)
    random = Random(SEED)
    for _ in range(examples):
        if not never:
            break
        machine.run_plainly(random, steps)
    return never


def test_target_that_is_never_called_is_noticed(monkeypatch: pytest.MonkeyPatch, steps: list[str]) -> None:
    method = targets.Target(ProducerRegistry.take_forgotten, ProducerRegistry)
    never = never_called(BrokerMachine, [targets.SEND, method], monkeypatch, steps, examples=5)
    assert never == {"ProducerRegistry.take_forgotten"}


def test_target_called_in_only_one_of_two_modules_is_noticed(monkeypatch: pytest.MonkeyPatch, steps: list[str]) -> None:
    function = targets.Target(remove, settlement, writing)
    never = never_called(BrokerMachine, [function], monkeypatch, steps, examples=5)
    assert never == {"truenext.engine.writing.entries.remove"}


def test_a_line_of_the_table_that_is_wrong_is_refused() -> None:
    with pytest.raises(LookupError, match="Lane has no such send"):
        targets.Target(Sending.send, Lane)
    with pytest.raises(LookupError, match="Lane has no is_awake"):
        targets.Attribute("is_awake", Lane)


@pytest.mark.drawn
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_plain_dispatch_that_carries_the_faults_is_not_itself_one(
    machine: type[BrokerMachine], monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    planted_faults.plain_dispatch_without_a_fault(monkeypatch)
    run_machines([0], [machine], steps)
