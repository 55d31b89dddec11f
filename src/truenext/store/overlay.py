"""What the journal says over the checkpoint: which messages it holds, and what of the checkpoint is no longer true.

The store is the checkpoint, with the journal's segments laid over it one by one, oldest first. When the oldest is to
go, what it still says moves into the checkpoint. This file does the book-keeping and knows no disk; see embedded.py
for who calls what on which thread.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from truenext.batch import ProducerState
from truenext.record import LANE_KEY_SIZE, message_key, sequence_of
from truenext.store.changes import BEFORE_RECORD, PUTS_AT, producers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from truenext.store.changes import Changes, Rest


class Place(NamedTuple):
    """Where the journal has a record."""

    segment: int
    offset: int
    length: int
    is_transient: bool


class Layer:
    """What one segment says, but for the messages that it holds."""

    __slots__ = (
        "clean_stop",
        "forgotten_producers",
        "gone",
        "marks",
        "producers",
        "queues",
        "records",
        "segment",
        "sequence_limit",
    )

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.records = 0
        """Puts and removes in the segment: what it costs to replay it."""
        self.gone: dict[bytes, bool] = {}
        """Keys that the checkpoint may have and that were removed since, and whether they are transient."""
        self.marks: dict[bytes, tuple[int, int]] = {}
        self.queues: dict[int, str] = {}
        self.producers: dict[str, ProducerState] = {}
        self.forgotten_producers: set[str] = set()
        self.sequence_limit = 0
        self.clean_stop: bool | None = None


class _Lane:
    __slots__ = ("places", "sequences")

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        """Sequence to place, packed into one number; in the order in which they were written, so of segments too."""
        self.sequences: list[int] | None = None
        """All of `places`, and some that are there no longer, in order; None until somebody reads."""

    def put(self, sequence: int, place: int) -> None:
        self.places[sequence] = place
        sequences = self.sequences
        if sequences is not None:
            if (sequences and sequences[-1] >= sequence) or len(sequences) > 2 * len(self.places) + 1000:
                self.sequences = None
            else:
                sequences.append(sequence)

    def behind(self, after_sequence: int, limit: int) -> list[tuple[int, int]]:
        """Up to `limit` pairs of sequence and packed place, in order."""
        if self.sequences is None:
            self.sequences = sorted(self.places)
        found: list[tuple[int, int]] = []
        places = self.places
        for at in range(bisect_right(self.sequences, after_sequence), len(self.sequences)):
            if len(found) == limit:
                break
            sequence = self.sequences[at]
            place = places.get(sequence)
            if place is not None:
                found.append((sequence, place))
        return found


class Overlay:
    """Not for two threads at once."""

    def __init__(self) -> None:
        self._lanes: dict[bytes, _Lane] = {}
        self.layers: tuple[Layer, ...] = ()
        """Oldest first. Replaced, never changed, so that a reader can keep the one it began with."""
        self.moving = 0
        """The checkpoint has, or is being given, messages of segments up to this one."""

    # ---- What a batch does ----

    def add(self, changes: Changes, segment: int, offset: int) -> None:
        """A batch that stands at `offset` in `segment` is in force."""
        layers = self.layers
        layer = layers[-1] if layers and layers[-1].segment == segment else self._new_layer(segment)
        layer.records += (
            len(changes.puts) + len(changes.transient_puts) + len(changes.removes) + len(changes.transient_removes)
        )
        rest = changes.rest
        if rest is not None and rest.drops_transients:
            self._drop_transients()
        # Removes before puts: in a broker no key comes back, and here it may then do so within one batch.
        if changes.removes:
            self._remove(changes.removes, layer, is_transient=False)
        if changes.transient_removes:
            self._remove(changes.transient_removes, layer, is_transient=True)
        at = offset + PUTS_AT
        if changes.puts:
            at = self._put(changes.puts, segment, at, is_transient=False)
        if changes.transient_puts:
            self._put(changes.transient_puts, segment, at, is_transient=True)
        if rest is not None:
            self._add_rest(rest, layer)

    def _put(self, puts: Iterable[tuple[bytes, int]], segment: int, at: int, *, is_transient: bool) -> int:
        lanes = self._lanes
        constant = segment << 64 | is_transient
        for key, length in puts:
            lane = lanes.get(key[:LANE_KEY_SIZE])
            if lane is None:
                lane = lanes[key[:LANE_KEY_SIZE]] = _Lane()
            lane.put(sequence_of(key), constant | (at + BEFORE_RECORD) << 32 | length << 1)
            at += BEFORE_RECORD + length
        return at

    def _remove(self, keys: Iterable[bytes], layer: Layer, *, is_transient: bool) -> None:
        for key in keys:
            place = self._forget(key)
            if place >> 64 <= self.moving:
                layer.gone[key] = is_transient

    def _forget(self, key: bytes) -> int:
        """Take the message out; its packed place, 0 if the journal has none."""
        lane = self._lanes.get(key[:LANE_KEY_SIZE])
        if lane is None:
            return 0
        place = lane.places.pop(sequence_of(key), 0)
        if not lane.places:
            del self._lanes[key[:LANE_KEY_SIZE]]
        return place

    def _add_rest(self, rest: Rest, layer: Layer) -> None:
        layer.marks.update(rest.marks)
        for key in rest.unmarks:
            for one in self.layers:
                one.marks.pop(key, None)
        layer.queues.update(rest.queues)
        for name in rest.forgotten_producers:
            layer.producers.pop(name, None)
            layer.forgotten_producers.add(name)
        layer.producers.update(producers_of(rest))
        layer.sequence_limit = rest.sequence_limit or layer.sequence_limit
        if rest.clean_stop is not None:
            layer.clean_stop = rest.clean_stop

    def _drop_transients(self) -> None:
        for key, place in list(self.messages()):
            if place.is_transient:
                self._forget(key)
                for layer in self.layers:
                    layer.marks.pop(key, None)

    def _new_layer(self, segment: int) -> Layer:
        layer = Layer(segment)
        self.layers = (*self.layers, layer)
        return layer

    # ---- Reading ----

    def place(self, key: bytes) -> Place | None:
        """Where the message of this key is, if the journal has it."""
        lane = self._lanes.get(key[:LANE_KEY_SIZE])
        place = lane.places.get(sequence_of(key)) if lane is not None else None
        return None if place is None else _unpack(place)

    def page(self, lane: bytes, after_sequence: int, limit: int) -> list[tuple[bytes, Place]]:
        """The next messages of a lane that the journal has."""
        found = self._lanes.get(lane)
        if found is None:
            return []
        return [(message_key(lane, sequence), _unpack(at)) for sequence, at in found.behind(after_sequence, limit)]

    def messages(self, up_to_segment: int | None = None) -> Iterator[tuple[bytes, Place]]:
        """All messages of the oldest segments, lane by lane."""
        for lane_key, lane in self._lanes.items():
            for sequence, place in lane.places.items():
                if up_to_segment is not None and place >> 64 > up_to_segment:
                    break
                yield message_key(lane_key, sequence), _unpack(place)

    def counts(self) -> dict[bytes, int]:
        """Messages of each lane that the journal has."""
        return {key: len(lane.places) for key, lane in self._lanes.items()}

    # ---- The checkpoint ----

    def leave_to_checkpoint(self, keys: Iterable[bytes], up_to_segment: int) -> None:
        """The checkpoint has these messages; of those that came back since (none, in a broker) nothing is known."""
        for key in keys:
            lane = self._lanes.get(key[:LANE_KEY_SIZE])
            if lane is not None and lane.places.get(sequence_of(key), up_to_segment + 1 << 64) >> 64 <= up_to_segment:
                self._forget(key)

    def drop_layers(self, up_to_segment: int) -> None:
        """The checkpoint says what these segments said."""
        self.layers = tuple(layer for layer in self.layers if layer.segment > up_to_segment)


def is_gone(key: bytes, layers: tuple[Layer, ...]) -> bool:
    """A message of the checkpoint was removed since."""
    return any(key in layer.gone for layer in layers)


def mark_of(key: bytes, layers: tuple[Layer, ...]) -> tuple[int, int] | None:
    """Attempts and deliveries, if the journal says anything about them."""
    for layer in reversed(layers):
        mark = layer.marks.get(key)
        if mark is not None:
            return mark
    return None


def _unpack(place: int) -> Place:
    return Place(place >> 64, place >> 32 & 0xFFFFFFFF, place >> 1 & 0x7FFFFFFF, bool(place & 1))
