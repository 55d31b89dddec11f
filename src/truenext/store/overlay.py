"""What the journal says over the checkpoint: which messages it holds, and what of the checkpoint is no longer true.

The store is the checkpoint, with the journal's segments laid over it one by one, oldest first. When the oldest is to
go, what it still says moves into the checkpoint. This file does the book-keeping and knows no disk; see embedded.py
for who calls what on which thread.

A message costs 16 bytes here, in two arrays that each lane has of each segment; half a gigabyte of journal must not
cost memory by the number of its messages.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import replace
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from truenext.batch import Mark, ProducerState
from truenext.record import CONTENTS, LANE_KEY_SIZE, message_key, sequence_of
from truenext.store.changes import BEFORE_RECORD, PUTS_AT, producers_of, with_changes, with_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from truenext.store.changes import Changes, Rest
    from truenext.store.store import Recovered

_PUT_BYTES = 20
_CHUNK_BYTES = 1000
"""The first message of a lane in a segment."""
_KEY_BYTES = 200
"""A key in a dictionary."""
_MARK_BYTES = 400
_TIMER_BYTES = 200
_NAME_BYTES = 400
"""A producer or a queue, besides its name; a character of that has up to four bytes."""

_SPARSE = 64
"""Places, gone ones too, from which on it is worth to look for those that are gone."""


class Place(NamedTuple):
    """Where the journal has a record."""

    segment: int
    offset: int
    length: int
    is_transient: bool


class _Chunk:
    """The messages of one lane in one segment."""

    __slots__ = ("alive", "lane", "places", "segment", "sequences")

    def __init__(self, segment: int, lane: _Lane) -> None:
        self.segment = segment
        self.lane = lane
        self.sequences = array("Q")
        """In order."""
        self.places = array("Q")
        """Offset, length and kind of each, packed into one number; 0 for one that is gone."""
        self.alive = 0

    def insert(self, sequence: int, place: int) -> None:
        """In front of others, as it is not in a broker; else it is appended."""
        at = bisect_left(self.sequences, sequence)
        if self.sequences[at] == sequence:
            self.places[at] = place
        else:
            self.sequences.insert(at, sequence)
            self.places.insert(at, place)

    def forget(self, at: int) -> None:
        places = self.places
        places[at] = 0
        self.alive -= 1
        if self.alive * 4 < len(places) > _SPARSE:
            # So that neither memory nor a page has to do with more than a few that are gone for each that is not.
            alive = [n for n, place in enumerate(places) if place]
            self.sequences = array("Q", [self.sequences[n] for n in alive])
            self.places = array("Q", [places[n] for n in alive])


class Layer:
    """What one segment says."""

    __slots__ = (
        "chunks",
        "clean_stop",
        "forgotten_producers",
        "gone",
        "marks",
        "memory",
        "paused",
        "producers",
        "queues",
        "records",
        "redelivered_below",
        "segment",
        "sequence_limit",
        "timers",
        "timers_in_order",
    )

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.records = 0
        """Everything that its batches name: what it costs to replay it."""
        self.memory = 0
        """Bytes that all of this takes, at the most and roughly."""
        self.chunks: dict[bytes, _Chunk] = {}
        """Lane key to the messages that the segment holds."""
        self.gone: dict[bytes, bool] = {}
        """Keys that the checkpoint may have and that were removed since, and whether they are transient."""
        self.marks: dict[bytes, Mark] = {}
        self.queues: dict[int, str] = {}
        self.paused: dict[int, bool] = {}
        self.producers: dict[str, ProducerState] = {}
        self.forgotten_producers: set[str] = set()
        self.timers: dict[bytes, bool] = {}
        """Those that were set (True) or cleared: what the checkpoint says of them does not count."""
        self.timers_in_order: list[bytes] | None = None
        """All of them, once there is a newer layer, so that they change no more, and somebody has asked."""
        self.sequence_limit = 0
        self.redelivered_below = 0
        self.clean_stop: bool | None = None


class _Lane:
    __slots__ = ("chunks", "last")

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        """Oldest segment first."""
        self.last = 0
        """No sequence behind this one was ever put."""

    def find(self, sequence: int) -> tuple[_Chunk, int] | None:
        """Where a message is."""
        if sequence > self.last:
            return None
        for chunk in self.chunks:
            if chunk.alive:
                sequences = chunk.sequences
                if sequences[0] <= sequence <= sequences[-1]:
                    at = bisect_left(sequences, sequence)
                    if sequences[at] == sequence and chunk.places[at]:
                        return chunk, at
        return None

    def behind(self, after_sequence: int, limit: int) -> list[tuple[int, int, int]]:
        """Up to `limit` triples of sequence, segment and packed place, in order."""
        found: list[tuple[int, int, int]] = []
        for chunk in self.chunks:
            if not chunk.alive or (len(found) >= limit and found[limit - 1][0] < chunk.sequences[0]):
                continue
            segment, known = chunk.segment, len(found)
            begin = bisect_right(chunk.sequences, after_sequence)
            while begin < len(chunk.sequences) and len(found) - known < limit:
                end = begin + limit
                pairs = zip(chunk.sequences[begin:end], chunk.places[begin:end], strict=True)
                found += [(sequence, segment, place) for sequence, place in pairs if place]
                begin = end
            if known and len(found) > known and found[known] < found[known - 1]:
                # Not in a broker, which puts the messages of a lane in their order.
                found.sort()
        return found[:limit]


class View:
    """What the overlay says of one lane, or of some messages, at one moment, while it goes on to change; see
    `Overlay.view`.

    Read without a lock, but for contents. Whatever changes is noted here before it is changed there, so that it is here
    once it is seen.
    """

    def __init__(
        self,
        lanes: tuple[bytes, ...],
        places: list[tuple[int, int, int]],
        layers: tuple[Layer, ...],
        contents: list[_Chunk],
        *,
        keys: list[bytes] | None = None,
    ) -> None:
        """`keys` are those of `places`; None if these are all of one lane."""
        self._lanes = lanes
        self._places = places
        self._keys = keys
        # Once they have moved the overlay has these no more.
        self._contents = contents
        self._contents_gone: dict[bytes, Place] = {}
        # What a layer gets later is not of this moment.
        self._gone = [layer.gone for layer in layers if layer.gone]
        self._marks = [layer.marks for layer in reversed(layers) if layer.marks]
        self._gone_since: set[bytes] = set()
        self._marks_before: dict[bytes, Mark | None] = {}

    def keys(self) -> list[bytes]:
        """Of the first messages that the journal has, in order."""
        if self._keys is not None:
            return self._keys
        (lane,) = self._lanes
        return [message_key(lane, sequence) for sequence, _, _ in self._places]

    def spans(self) -> list[tuple[int, int, int]]:
        """Where they are: segment, offset and length."""
        return [_span(segment, place) for _, segment, place in self._places]

    def is_gone(self, key: bytes) -> bool:
        """A message of the checkpoint was removed since."""
        return any(key in gone for gone in self._gone) and key not in self._gone_since

    def mark(self, key: bytes) -> Mark | None:
        """What the journal says of the message, if anything."""
        if not self._marks:
            return None
        mark = mark_of(key, self._marks)
        return self._marks_before.get(key, mark)

    def content(self, key: bytes) -> Place | None:
        """Where the journal has, or had, a content. Not while the overlay changes."""
        place = self._contents_gone.get(key)
        return place if place is not None else self._content(key)

    def _content(self, key: bytes) -> Place | None:
        sequence = sequence_of(key)
        for chunk in self._contents:
            at = bisect_left(chunk.sequences, sequence)
            if at < len(chunk.sequences) and chunk.sequences[at] == sequence and chunk.places[at]:
                return _unpack(chunk.segment, chunk.places[at])
        return None

    def keep(self, changes: Changes) -> None:
        """These are about to happen."""
        for keys in (changes.removes, changes.transient_removes):
            for key in keys:
                if key.startswith(CONTENTS) and (place := self._content(key)) is not None:
                    self._contents_gone[key] = place
            self._gone_since.update(key for key in keys if key.startswith(self._lanes) and not self.is_gone(key))
        rest = changes.rest
        if rest is not None and self._marks:
            for key in (*rest.marks, *rest.unmarks):
                if key.startswith(self._lanes):
                    self._marks_before.setdefault(key, mark_of(key, self._marks))


class TimerView:
    """What the overlay says of timers at one moment, while it goes on to change. Read without a lock: only the newest
    layer's timers change, and of those this has a copy.
    """

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        self._older = [layer for layer in layers[:-1] if layer.timers]
        self._newest = dict(layers[-1].timers) if layers else {}

    def knows(self, timer: bytes) -> bool:
        """What the checkpoint says of it does not count."""
        return timer in self._newest or any(timer in layer.timers for layer in self._older)

    def behind(self, after: bytes, of_checkpoint: Iterator[bytes]) -> Iterator[bytes]:
        """Those that are set, in order, laid over what the checkpoint has."""
        said = [_behind(sorted(self._newest), self._newest, after, 0)]
        for age, layer in enumerate(reversed(self._older), 1):
            if layer.timers_in_order is None:
                layer.timers_in_order = sorted(layer.timers)
            said.append(_behind(layer.timers_in_order, layer.timers, after, age))
        last = b""
        for timer, _, is_set in merge(*said, ((timer, len(said), True) for timer in of_checkpoint)):
            if timer != last:
                last = timer
                if is_set:
                    yield timer


def _behind(
    in_order: list[bytes], timers: dict[bytes, bool], after: bytes, age: int
) -> Iterator[tuple[bytes, int, bool]]:
    for timer in islice(in_order, bisect_right(in_order, after), None):
        yield timer, age, timers[timer]


class Overlay:
    """Not for two threads at once, but for the views it gives away."""

    def __init__(self) -> None:
        self._lanes: dict[bytes, _Lane] = {}
        self.layers: tuple[Layer, ...] = ()
        """Oldest first. Replaced, never changed, so that a reader can keep the one it began with."""
        self.views: set[View] = set()
        """What is being read; it is told of every change. Whoever has read takes his out."""
        self.moving = 0
        """The checkpoint has, or is being given, messages of segments up to this one."""

    # ---- What a batch does ----

    @property
    def memory(self) -> int:
        """Bytes that all layers take, at the most and roughly."""
        return sum(layer.memory for layer in self.layers)

    def add(self, changes: Changes, segment: int, offset: int) -> None:
        """A batch that stands at `offset` in `segment` is in force."""
        for view in self.views:
            view.keep(changes)
        layers = self.layers
        layer = layers[-1] if layers and layers[-1].segment == segment else self._new_layer(segment)
        layer.records += changes.count
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
            at = self._put(changes.puts, layer, at, is_transient=False)
        if changes.transient_puts:
            self._put(changes.transient_puts, layer, at, is_transient=True)
        if rest is not None:
            self._add_rest(rest, layer)

    def _put(self, puts: list[tuple[bytes, int]], layer: Layer, at: int, *, is_transient: bool) -> int:
        chunks = layer.chunks
        layer.memory += _PUT_BYTES * len(puts)
        for key, length in puts:
            at += BEFORE_RECORD
            chunk = chunks.get(key[:LANE_KEY_SIZE]) or self._new_chunk(key[:LANE_KEY_SIZE], layer)
            sequence = sequence_of(key)
            place = at << 32 | length << 1 | is_transient
            sequences, lane = chunk.sequences, chunk.lane
            if sequence > lane.last:
                lane.last = sequence
            if not sequences or sequence > sequences[-1]:
                sequences.append(sequence)
                chunk.places.append(place)
            else:
                chunk.insert(sequence, place)
            chunk.alive += 1
            at += length
        return at

    def _new_chunk(self, lane_key: bytes, layer: Layer) -> _Chunk:
        lane = self._lanes.get(lane_key)
        if lane is None:
            lane = self._lanes[lane_key] = _Lane()
        chunk = layer.chunks[lane_key] = _Chunk(layer.segment, lane)
        layer.memory += _CHUNK_BYTES
        lane.chunks.append(chunk)
        return chunk

    def _remove(self, keys: Iterable[bytes], layer: Layer, *, is_transient: bool) -> None:
        for key in keys:
            if self._forget(key) <= self.moving:
                layer.gone[key] = is_transient
                layer.memory += _KEY_BYTES

    def _forget(self, key: bytes) -> int:
        """Take the message out; the segment that it was in, 0 if the journal has none."""
        lane_key = key[:LANE_KEY_SIZE]
        lane = self._lanes.get(lane_key)
        found = lane.find(sequence_of(key)) if lane is not None else None
        if found is None:
            return 0
        chunk, at = found
        chunk.forget(at)
        # The newest layer keeps what may be used again at once.
        if not chunk.alive and chunk.segment != self.layers[-1].segment:
            layer = next(layer for layer in self.layers if layer.segment == chunk.segment)
            self._drop_chunk(lane_key, layer)
        return chunk.segment

    def _drop_chunk(self, lane_key: bytes, layer: Layer) -> None:
        lane = self._lanes[lane_key]
        lane.chunks.remove(layer.chunks.pop(lane_key))
        if not lane.chunks:
            del self._lanes[lane_key]

    def _add_rest(self, rest: Rest, layer: Layer) -> None:
        marks = len(layer.marks)
        layer.marks.update(rest.marks)
        # The mark of a content changes as often as it has references.
        layer.memory += _MARK_BYTES * (len(layer.marks) - marks)
        for key in rest.unmarks:
            for one in self.layers:
                one.marks.pop(key, None)
        layer.queues.update(rest.queues)
        layer.paused.update(rest.paused)
        for name in rest.forgotten_producers:
            layer.producers.pop(name, None)
            layer.forgotten_producers.add(name)
        layer.producers.update(producers_of(rest))
        # One that is set again in the batch that clears it is set.
        layer.timers.update(dict.fromkeys(rest.cleared_timers, False))
        layer.timers.update(dict.fromkeys(rest.timers, True))
        layer.memory += _TIMER_BYTES * (len(rest.cleared_timers) + len(rest.timers))
        layer.sequence_limit = rest.sequence_limit or layer.sequence_limit
        layer.redelivered_below = rest.redelivered_below or layer.redelivered_below
        if rest.clean_stop is not None:
            layer.clean_stop = rest.clean_stop
        layer.memory += sum(
            _NAME_BYTES + 4 * len(name) for name in (*rest.queues.values(), *rest.producers, *rest.forgotten_producers)
        )

    def _drop_transients(self) -> None:
        for key, place in list(self.messages()):
            if place.is_transient:
                self._forget(key)
                for layer in self.layers:
                    layer.marks.pop(key, None)

    def _new_layer(self, segment: int) -> Layer:
        if self.layers:
            before = self.layers[-1]
            for lane_key in [lane_key for lane_key, chunk in before.chunks.items() if not chunk.alive]:
                self._drop_chunk(lane_key, before)
        layer = Layer(segment)
        self.layers = (*self.layers, layer)
        return layer

    # ---- Reading ----

    def kind(self, key: bytes) -> bool | None:
        """Whether the message of this key is transient, None if the journal does not have it."""
        lane = self._lanes.get(key[:LANE_KEY_SIZE])
        found = lane.find(sequence_of(key)) if lane is not None else None
        return None if found is None else bool(found[0].places[found[1]] & 1)

    def view(self, lane: bytes, after_sequence: int, limit: int) -> View:
        """As of now: the next messages of a lane that the journal has, and what it says of those that it has not."""
        found = self._lanes.get(lane)
        places = found.behind(after_sequence, limit) if found is not None else []
        return self._begin(View((lane,), places, self.layers, self._contents()))

    def view_of(self, keys: list[bytes]) -> View:
        """The same of the messages with these keys."""
        here: list[bytes] = []
        places: list[tuple[int, int, int]] = []
        for key in keys:
            lane, sequence = self._lanes.get(key[:LANE_KEY_SIZE]), sequence_of(key)
            found = lane.find(sequence) if lane is not None else None
            if found is not None:
                chunk, at = found
                here.append(key)
                places.append((sequence, chunk.segment, chunk.places[at]))
        lanes = tuple({key[:LANE_KEY_SIZE] for key in keys})
        return self._begin(View(lanes, places, self.layers, self._contents(), keys=here))

    def _begin(self, view: View) -> View:
        self.views.add(view)
        return view

    def _contents(self) -> list[_Chunk]:
        contents = self._lanes.get(CONTENTS)
        return contents.chunks[:] if contents is not None else []

    def timer_view(self) -> TimerView:
        """As of now: what the journal says of timers."""
        return TimerView(self.layers)

    def messages(self, up_to_segment: int | None = None) -> Iterator[tuple[bytes, Place]]:
        """All messages of the oldest segments, lane by lane within each, in the order of their keys."""
        for layer in self.layers:
            if up_to_segment is not None and layer.segment > up_to_segment:
                return
            for lane_key in sorted(layer.chunks):
                chunk = layer.chunks[lane_key]
                for sequence, place in zip(chunk.sequences[:], chunk.places[:], strict=True):
                    if place:
                        yield message_key(lane_key, sequence), _unpack(layer.segment, place)

    def held(self, segment: int) -> list[tuple[bytes, array[int], array[int]]]:
        """The messages of a segment for `alive`: a copy, of 16 bytes for each."""
        return [
            (lane_key, layer.chunks[lane_key].sequences[:], layer.chunks[lane_key].places[:])
            for layer in self.layers
            if layer.segment == segment
            for lane_key in sorted(layer.chunks)
        ]

    def has_messages(self, segment: int) -> bool:
        return any(chunk.alive for layer in self.layers if layer.segment == segment for chunk in layer.chunks.values())

    def counts(self) -> dict[bytes, int]:
        """Messages of each lane that the journal has."""
        return {key: sum(chunk.alive for chunk in lane.chunks) for key, lane in self._lanes.items()}

    # ---- The checkpoint ----

    def leave_to_checkpoint(self, keys: Iterable[bytes]) -> None:
        """The checkpoint has these messages."""
        for key in keys:
            self._forget(key)

    def drop_layers(self, up_to_segment: int) -> None:
        """The checkpoint says what these segments said, and has their messages."""
        for layer in self.layers:
            if layer.segment <= up_to_segment:
                for lane_key in list(layer.chunks):
                    self._drop_chunk(lane_key, layer)
        self.layers = tuple(layer for layer in self.layers if layer.segment > up_to_segment)


def alive(segment: int, held: list[tuple[bytes, array[int], array[int]]]) -> Iterator[tuple[bytes, Place]]:
    """Keys and places of what `Overlay.held` gave, in the order of the keys."""
    for lane_key, sequences, places in held:
        for sequence, place in zip(sequences, places, strict=True):
            if place:
                yield message_key(lane_key, sequence), _unpack(segment, place)


def is_gone(key: bytes, layers: tuple[Layer, ...]) -> bool:
    """A message of the checkpoint was removed since."""
    return any(key in layer.gone for layer in layers)


def laid_over(recovered: Recovered, layers: tuple[Layer, ...]) -> Recovered:
    """What the checkpoint says by itself, with what the layers say over it; of messages nothing."""
    queues, producers = recovered.queues, dict(recovered.producers)
    paused = set(recovered.paused)
    for layer in layers:
        queues = with_names(queues, layer.queues)
        paused = with_changes(paused, layer.paused)
        for name in layer.forgotten_producers:
            producers.pop(name, None)
        producers.update(layer.producers)
        recovered = replace(
            recovered,
            sequence_limit=max(layer.sequence_limit, recovered.sequence_limit),
            redelivered_below=layer.redelivered_below or recovered.redelivered_below,
            clean_stop=recovered.clean_stop if layer.clean_stop is None else layer.clean_stop,
        )
    by_use = sorted(producers.items(), key=lambda item: (item[1].used_ms, item[0]))
    return replace(recovered, queues=queues, paused=paused, producers=dict(by_use))


def mark_of(key: bytes, marks: Iterable[dict[bytes, Mark]]) -> Mark | None:
    """What the first of `marks` says that says anything."""
    for one in marks:
        mark = one.get(key)
        if mark is not None:
            return mark
    return None


def _unpack(segment: int, place: int) -> Place:
    return Place(*_span(segment, place), bool(place & 1))


def _span(segment: int, place: int) -> tuple[int, int, int]:
    """Segment, offset and length."""
    return segment, place >> 32, place >> 1 & 0x7FFFFFFF
