"""Which producers are forgotten when there are too many, and what is the store told of it?"""

import pytest

from truenext.batch import Batch, ProducerState
from truenext.engine.writing.event_log import NoEventLog
from truenext.engine.writing.ledger import Ledger
from truenext.engine.writing.producers import Producers
from truenext.errors import RemoteProtocolError
from truenext.limits import PRODUCER_MEMORY_MS, PRODUCER_MEMORY_MS_MIN, PRODUCERS_MAX

LATER_MS = PRODUCERS_MAX + PRODUCER_MEMORY_MS_MIN


class World:
    """All producers there may be, in order of last use, each of which had one SEND a millisecond after the other."""

    def __init__(self) -> None:
        self.ledger = Ledger(NoEventLog())
        self.producers = Producers(self.ledger)
        for number in range(PRODUCERS_MAX):
            self.send(str(number))

    @property
    def batch(self) -> Batch:
        return self.ledger.batch

    def send(self, name: str, number: int = 1) -> bool:
        """True if it is a repeat."""
        self.ledger.now_ms += 1
        if self.producers.repeated(name, number) is not None:
            return True
        self.producers.record(name, number, is_stored=True)
        return False

    def commit(self, name: str, number: int) -> None:
        self.ledger.now_ms += 1
        assert self.producers.repeated(name, number) is None
        self.producers.record(name, number, is_stored=True, is_send=False)

    def restart(self) -> None:
        states = self.batch.producers.items()
        self.producers = Producers(self.ledger)
        self.producers.restore(sorted(states, key=lambda item: item[1].used_ms))

    def gone(self) -> list[str]:
        """Since the last call."""
        gone, self.batch.forgotten_producers = self.batch.forgotten_producers, []
        assert self.producers.take_forgotten()[0] == len(gone)
        return gone


@pytest.fixture
def world() -> World:
    return World()


def test_a_new_producer_takes_the_place_of_the_one_that_was_not_used_for_longest(world: World) -> None:
    world.ledger.now_ms = LATER_MS
    assert not world.send("new")
    assert world.gone() == ["0"]
    assert not world.send("newer")
    assert world.gone() == ["1"]
    assert world.send("new")
    assert not world.send("0"), "it was forgotten"
    assert world.gone() == ["2"]
    assert "2" not in world.batch.producers


def test_within_the_hour_none_goes_and_the_refusal_says_how_many_there_are(world: World) -> None:
    world.ledger.now_ms = 1 + PRODUCER_MEMORY_MS_MIN - 2
    with pytest.raises(RemoteProtocolError, match=f"there are {PRODUCERS_MAX} producers"):
        world.send("new")
    assert not world.send("new"), "a millisecond later"
    assert world.gone() == ["0"]


@pytest.mark.parametrize("is_restarted", [False, True], ids=["same run", "after a restart"])
def test_one_that_committed_or_sent_or_repeated_more_than_once_never_goes(world: World, is_restarted: bool) -> None:
    world.send("0", 2)
    world.commit("1", 2)
    assert world.send("2")
    if is_restarted:
        world.restart()
    world.ledger.now_ms = LATER_MS
    assert not world.send("new")
    assert world.gone() == ["3"]


def test_a_producer_whose_first_use_is_a_commit_never_goes() -> None:
    ledger = Ledger(NoEventLog())
    producers, batch = Producers(ledger), ledger.batch
    for number in range(PRODUCERS_MAX):
        producers.record(str(number), 1, is_stored=True, is_send=False)
    with pytest.raises(RemoteProtocolError, match="none of them had one SEND alone"):
        ledger.now_ms = LATER_MS
        producers.repeated("new", 1)
    ledger.now_ms = PRODUCER_MEMORY_MS
    producers.forget_old()
    assert producers.repeated("new", 1) is None
    assert len(batch.forgotten_producers) == PRODUCERS_MAX
    assert producers.take_forgotten()[0] == 0, "it was their time"


def test_a_repeat_is_told_to_the_store_the_first_time_and_only_if_that_knows_of_the_send() -> None:
    ledger = Ledger(NoEventLog())
    producers = Producers(ledger)
    ledger.now_ms = 10
    producers.record("stored", 1, is_stored=True)
    producers.record("transient", 1, is_stored=False)
    ledger.hand_over()
    batch = ledger.batch
    for ledger.now_ms in (20, 30):
        for name in ("stored", "transient"):
            assert producers.repeated(name, 1) is not None
    assert batch.producers == {"stored": ProducerState(1, 20, is_once=False)}
    assert dict(producers.unstored()) == {name: ProducerState(1, 30, is_once=False) for name in ("stored", "transient")}


def test_one_that_was_forgotten_and_comes_back_in_the_same_batch_is_there(world: World) -> None:
    world.ledger.now_ms = LATER_MS
    world.send("new")
    world.send("0", 7)
    assert world.batch.producers["0"] == ProducerState(7, LATER_MS + 2, is_once=True)
    assert world.gone() == ["0", "1"]
