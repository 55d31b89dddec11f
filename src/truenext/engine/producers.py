"""Which numbered sends were accepted already (guarantee L5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from truenext.batch import ProducerState
from truenext.errors import RemoteProtocolError
from truenext.limits import PRODUCER_MEMORY_MS, PRODUCERS_MAX


class Producer(msgspec.Struct, gc=False):
    number: int
    """The highest number accepted."""
    used_ms: int
    batch: int
    """The batch that makes `number` durable; a repeat is answered once it is."""


class Producers:
    """The last number of every producer, in order of last use."""

    __slots__ = ("_producers", "_unstored")

    def __init__(self) -> None:
        self._producers: dict[str, Producer] = {}
        self._unstored: set[str] = set()
        """Used since the store was last told of them."""

    def restore(self, states: Iterable[tuple[str, ProducerState]]) -> None:
        """Take over what the store recovered, in order of last use."""
        for name, state in states:
            self._producers[name] = Producer(state.number, state.used_ms, 0)

    def repeated(self, name: str, number: int, now_ms: int) -> Producer | None:
        """The producer, if it has sent this number before."""
        producer = self._producers.get(name)
        if producer is None:
            if len(self._producers) >= PRODUCERS_MAX:
                raise RemoteProtocolError(f"more than {PRODUCERS_MAX} producers with numbered sends")
            return None
        if number > producer.number:
            return None
        self._use(name, producer, now_ms)
        self._unstored.add(name)
        return producer

    def record(self, name: str, number: int, batch: int, now_ms: int) -> None:
        """Remember that a number was accepted; it is durable with `batch`."""
        producer = self._producers.get(name)
        if producer is None:
            producer = self._producers[name] = Producer(number, now_ms, batch)
        producer.number = number
        (self._unstored.discard if batch else self._unstored.add)(name)
        # A transient one (batch 0) must not hide that an earlier number is not durable yet.
        producer.batch = max(producer.batch, batch)
        self._use(name, producer, now_ms)

    def forget_old(self, now_ms: int) -> list[str]:
        """Drop those not used for PRODUCER_MEMORY_MS and return their names."""
        forgotten = []
        for name, producer in self._producers.items():
            if producer.used_ms + PRODUCER_MEMORY_MS > now_ms:
                break
            forgotten.append(name)
        for name in forgotten:
            del self._producers[name]
            self._unstored.discard(name)
        return forgotten

    def unstored(self) -> Iterator[tuple[str, ProducerState]]:
        """What the store does not know of yet: a clean stop writes it down."""
        for name in self._unstored:
            producer = self._producers[name]
            yield name, ProducerState(producer.number, producer.used_ms)

    def _use(self, name: str, producer: Producer, now_ms: int) -> None:
        producer.used_ms = now_ms
        # To the end: forgetting looks at the front alone.
        self._producers[name] = self._producers.pop(name)
