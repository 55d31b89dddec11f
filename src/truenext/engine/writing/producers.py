"""Which numbered sends were accepted already (guarantee L5), and which producers are forgotten when they are too many.

A producer is remembered for PRODUCER_MEMORY_MS after its last use. If there are PRODUCERS_MAX, a new one takes the
place of one that had one SEND alone, and long ago: most likely a process that sent one message and ended. One that had
more, or a COMMIT, keeps its place. Source: docs/decisions/0036-producers-that-are-forgotten.md
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from truenext.batch import ProducerState
from truenext.errors import Code, RemoteProtocolError
from truenext.limits import PRODUCER_MEMORY_MS, PRODUCER_MEMORY_MS_MIN, PRODUCERS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from truenext.engine.writing.ledger import Ledger


class Producer(msgspec.Struct, gc=False):
    number: int
    """The highest number accepted."""
    used_ms: int
    batch: int
    """The batch that makes `number` durable; a repeat is answered once it is."""


class Producers:
    """The last number of every producer, in order of last use."""

    __slots__ = ("_forgotten", "_last_forgotten", "_ledger", "_once", "_producers", "_unstored")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Not plain dictionaries: to look for the first of one takes long where many before it were deleted.
        self._producers: OrderedDict[str, Producer] = OrderedDict()
        self._once: OrderedDict[str, None] = OrderedDict()
        """Those of them that had one SEND, and nothing since; in the same order."""
        self._unstored: set[str] = set()
        """Used since the store was last told of them."""
        self._forgotten = 0
        self._last_forgotten = ""

    def restore(self, states: Iterable[tuple[str, ProducerState]]) -> None:
        """Take over what the store recovered, in order of last use."""
        for name, state in states:
            self._producers[name] = Producer(state.number, state.used_ms, 0)
            if state.is_once:
                self._once[name] = None

    def repeated(self, name: str, number: int) -> Producer | None:
        """The producer, if it has sent this number before.

        Raises: RemoteProtocolError if there are too many, and none that may be forgotten for a new one
        """
        producer = self._producers.get(name)
        if producer is None:
            if len(self._producers) >= PRODUCERS_MAX and self._dispensable() is None:
                raise RemoteProtocolError(
                    f"there are {PRODUCERS_MAX} producers with numbers, the most there may be, and none of them had "
                    "one SEND alone, an hour ago or longer, and can be forgotten: no new one can be remembered. Let "
                    "fewer producers send more each, under names that last",
                    Code.LIMIT,
                )
            return None
        if number > producer.number:
            return None
        self._use(name, producer)
        if name in self._once:
            del self._once[name]
            if name not in self._unstored:
                # After a crash it must not be taken for one that never came back.
                self._store(name, producer)
                return producer
        self._unstored.add(name)
        return producer

    def record(self, name: str, number: int, *, is_stored: bool, is_send: bool = True) -> None:
        """Remember that a number was accepted, of a SEND or of a COMMIT; if `is_stored`, durably with the gathering
        batch."""
        producer = self._producers.get(name)
        if producer is None:
            if len(self._producers) >= PRODUCERS_MAX:
                self._forget_early()
            producer = self._producers[name] = Producer(number, self._ledger.now_ms, 0)
            if is_send:
                self._once[name] = None
        else:
            self._once.pop(name, None)
        producer.number = number
        self._use(name, producer)
        if is_stored:
            producer.batch = self._ledger.batch.number
            self._store(name, producer)
        else:
            # What its batch was stays: a transient one must not hide that an earlier number is not durable yet.
            self._unstored.add(name)

    def forget_old(self) -> None:
        """Drop those not used for PRODUCER_MEMORY_MS."""
        producers = self._producers
        while producers:
            name = next(iter(producers))
            if producers[name].used_ms + PRODUCER_MEMORY_MS > self._ledger.now_ms:
                break
            self._forget(name)

    def take_forgotten(self) -> tuple[int, str]:
        """How many were forgotten before their time since the last call, and the last of them."""
        forgotten, self._forgotten = self._forgotten, 0
        return forgotten, self._last_forgotten

    def unstored(self) -> Iterator[tuple[str, ProducerState]]:
        """What the store does not know of yet: a clean stop writes it down."""
        for name in self._unstored:
            yield name, self._state(name, self._producers[name])

    def _dispensable(self) -> str | None:
        """Who may be forgotten before its time, and has not been used for longest."""
        name = next(iter(self._once), None)
        if name is None or self._producers[name].used_ms + PRODUCER_MEMORY_MS_MIN > self._ledger.now_ms:
            return None
        return name

    def _forget_early(self) -> None:
        name = self._dispensable()
        assert name is not None, "`repeated` has refused the new one"
        self._forget(name)
        self._forgotten += 1
        self._last_forgotten = name

    def _forget(self, name: str) -> None:
        batch = self._ledger.batch
        del self._producers[name]
        self._once.pop(name, None)
        self._unstored.discard(name)
        # It may be in the same batch, if the clock was set forward.
        batch.producers.pop(name, None)
        batch.forgotten_producers.append(name)
        batch.size += len(name)

    def _use(self, name: str, producer: Producer) -> None:
        producer.used_ms = self._ledger.now_ms
        # To the end: forgetting looks at the front alone.
        self._producers.move_to_end(name)

    def _store(self, name: str, producer: Producer) -> None:
        batch = self._ledger.batch
        self._unstored.discard(name)
        batch.producers[name] = self._state(name, producer)
        batch.size += len(name)

    def _state(self, name: str, producer: Producer) -> ProducerState:
        return ProducerState(producer.number, producer.used_ms, name in self._once)
