"""Tests of the destinations that a JMS client names: the one name of each temporary destination (C26.13), and the
memory of those that are kept."""

import tracemalloc
from collections.abc import Callable

import pytest

from tests.unit.openwire_client import CONNECTION, Client, refusals
from truenext.model.commands import CreateTemporary, InvalidFrame, RemoveTemporary
from truenext.wire.openwire.destinations import Destinations
from truenext.wire.openwire.structures import (
    ConnectionId,
    DestinationInfo,
    PhysicalDestination,
    QueueName,
    TemporaryQueueName,
    TemporaryTopicName,
)

OTHER_NAMES = [
    f" {CONNECTION}:1",
    f"{CONNECTION}:1 ",
    f"{CONNECTION}/1",
    f"temp-queue://{CONNECTION}:1",
    f"temp-topic://{CONNECTION}:1",
    f"{CONNECTION}:1, {CONNECTION}:2",
    f"{CONNECTION}:one",
    f"{CONNECTION}:",
    "other:1",
]


@pytest.mark.parametrize("operation", [0, 1], ids=["made", "removed"])
@pytest.mark.parametrize("make", [TemporaryQueueName, TemporaryTopicName])
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_temporary_destination_by_another_name_than_its_own_is_refused(
    name: str, make: type[PhysicalDestination], operation: int
) -> None:
    client = Client()
    client.send(DestinationInfo(5, True, ConnectionId(CONNECTION), make(name), operation))
    assert [kind for kind, _ in refusals(client.take_answers())] == ["javax.jms.InvalidDestinationException"]
    assert [type(command) for command in client.take_commands()] == [InvalidFrame]


@pytest.mark.parametrize("make", [TemporaryQueueName, TemporaryTopicName])
def test_temporary_destination_by_its_own_name_is_made_and_removed(make: type[PhysicalDestination]) -> None:
    client = Client()
    for operation in (0, 1):
        client.send(DestinationInfo(5, True, ConnectionId(CONNECTION), make(f"{CONNECTION}:1"), operation))
    assert [type(command) for command in client.take_commands()] == [CreateTemporary, RemoveTemporary]


NAMES: dict[str, Callable[[int], str]] = {
    "spaces": lambda number: " " * (60_000 + number) + "q",
    "composites": lambda number: ",".join(f"{number}.{part}" for part in range(100)),
    "short": str,
}


@pytest.mark.parametrize("what", NAMES)
def test_destinations_of_a_connection_take_bounded_memory(what: str) -> None:
    found = Destinations()
    tracemalloc.start()
    try:
        for number in range(400):
            found.target(QueueName(NAMES[what](number)))
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_destination_that_is_named_again_is_the_same_object() -> None:
    found = Destinations()
    names = [f"queue.{number}" for number in range(300)]
    targets = [found.target(QueueName(name)) for name in names]
    assert all(found.target(QueueName(name)) is target for name, target in zip(names, targets, strict=True))
