"""Oracle of producers and of their forgetting, by docs/contract.md (C18.5 to C18.9, chapter 19, C26.11) alone.

It keeps the state of each producer after each use, and the batch that writes it: a crash leaves the durable state.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

HOUR_MS = 3600 * 1000
WRITTEN_BEFORE = 0


class Kind(Enum):
    SEND = "SEND"
    COMMIT = "COMMIT"


class NumberStatus(Enum):
    """Status of a number that a producer uses."""

    NEW = "it is accepted"
    REPEAT = "it is a repeat"
    UNKNOWN = "it is a repeat, and may have been left out"
    REFUSED = "it is refused"


@dataclass(frozen=True)
class Producer:
    used_ms: int
    uses: int = 1
    """Repeats as well (C18.8)."""
    has_committed: bool = False
    """Or a COMMIT was resolved."""
    is_gapless: bool | None = None
    """None: it has had no SEND and no COMMIT, and may still say so (C19.1, C19.5)."""
    used: dict[tuple[Kind, int], int] = field(default_factory=dict)
    """Accepted numbers, and the batch that a repeat waits for."""
    resolved: tuple[int, ...] = ()
    """Resolved numbers, in order."""
    known_in: int | None = None
    """The batch with which its numbers are durable; None if they need not be."""

    @property
    def may_be_forgotten_early(self) -> bool:
        """C18.8."""
        return self.uses == 1 and not self.has_committed

    def highest(self, kind: Kind) -> int:
        """C18.5: SENDs and COMMITs have numbers of their own. C19.3: resolved numbers count as used. 0 is none."""
        used = [number for one, number in self.used if one is kind]
        return max(used + list(self.resolved if kind is Kind.COMMIT else ()), default=0)

    def is_lost(self, kind: Kind, number: int, resolved_max: int) -> bool:
        """True if the number is at or below the highest resolved one that was forgotten: its outcome is unknown
        (C19.4)."""
        return kind is Kind.COMMIT and any(number <= one for one in self.resolved[:-resolved_max])


@dataclass(frozen=True)
class Known:
    written_in: int | None
    """The batch that writes it down; None if none has to."""
    producer: Producer | None
    """None: forgotten."""


class Producers:
    def __init__(self, limit: int, resolved_max: int) -> None:
        self.limit = limit
        self.resolved_max = resolved_max
        self._known: dict[str, list[Known]] = {}

    def remembered(self) -> dict[str, Producer]:
        last = {name: known[-1].producer for name, known in self._known.items()}
        return {name: producer for name, producer in last.items() if producer is not None}

    def is_refused(self, name: str, now_ms: int) -> bool:
        """True if the producer is new, and no other may be forgotten for it (C18.8)."""
        return self._is_one_too_many(name) and not self._dispensable(now_ms)

    # ---- Numbers ----

    def status_of(self, name: str, kind: Kind, number: int, *, declares_gapless: bool) -> NumberStatus:
        """C18.5, C19.1, C19.3, C19.7, but for the limit of producers, and that a transaction may not be open."""
        producer = self.remembered().get(name, Producer(0))
        if kind is Kind.COMMIT and number in producer.resolved[-self.resolved_max :]:
            return NumberStatus.REFUSED
        if declares_gapless and producer.is_gapless is False:
            return NumberStatus.REFUSED
        is_gapless = producer.is_gapless or declares_gapless
        highest = producer.highest(kind)
        if number > highest:
            return NumberStatus.REFUSED if is_gapless and number > highest + 1 else NumberStatus.NEW
        may_be_left_out = not is_gapless and number < highest
        if may_be_left_out or producer.is_lost(kind, number, self.resolved_max):
            return NumberStatus.UNKNOWN
        return NumberStatus.REPEAT

    def first_use_in(self, name: str, kind: Kind, number: int) -> int:
        """The batch that the receipt of a repeat waits for (C18.6)."""
        return self.remembered()[name].used.get((kind, number), WRITTEN_BEFORE)

    def used(
        self,
        name: str,
        kind: Kind,
        number: int,
        now_ms: int,
        gathering: int,
        *,
        is_stored: bool,
        has_made: bool,
        declares_gapless: bool,
    ) -> None:
        """Use a new number. A repeat waits for the batch that stores the message, or the queue it created
        (`has_made`)."""
        before = self._before(name, now_ms, gathering)
        producer = replace(
            before,
            used_ms=now_ms,
            uses=before.uses + 1,
            has_committed=before.has_committed or kind is Kind.COMMIT,
            is_gapless=declares_gapless if before.is_gapless is None else before.is_gapless,
            used=before.used | {(kind, number): gathering if is_stored or has_made else WRITTEN_BEFORE},
            known_in=gathering if is_stored else None,
        )
        self._known.setdefault(name, []).append(Known(gathering if is_stored else None, producer))

    def repeated(self, name: str, now_ms: int, gathering: int) -> None:
        last = self._known[name][-1]
        assert last.producer is not None
        is_written = last.written_in is not None and last.producer.may_be_forgotten_early
        producer = replace(last.producer, used_ms=now_ms, uses=last.producer.uses + 1)
        self._known[name].append(Known(gathering if is_written else None, producer))

    # ---- Questions ----

    def outcome(self, name: str, number: int) -> str:
        """Return the outcome of a COMMIT (C19.2)."""
        producer = self.remembered().get(name)
        if producer is None:
            return "not so far" if number == 1 else "unknown"
        if number in producer.resolved[-self.resolved_max :]:
            return "rolled back"
        if producer.is_lost(Kind.COMMIT, number, self.resolved_max):
            return "unknown"
        highest = producer.highest(Kind.COMMIT)
        if number > highest:
            return "not so far"
        return "committed" if number == highest or producer.is_gapless else "unknown"

    def resolve(self, name: str, number: int, now_ms: int, gathering: int) -> None:
        """Resolve a COMMIT if it is `not so far`, and, unless the producer has gaps, the next one (C19.3, C19.5)."""
        if self.outcome(name, number) != "not so far" or self.is_refused(name, now_ms):
            return
        before = self.remembered().get(name, Producer(0))
        if before.is_gapless is not False and number != before.highest(Kind.COMMIT) + 1:
            return
        before = self._before(name, now_ms, gathering)
        producer = replace(
            before,
            used_ms=now_ms,
            uses=before.uses + 1,
            has_committed=True,
            resolved=(*before.resolved, number),
            known_in=gathering,
        )
        self._known.setdefault(name, []).append(Known(gathering, producer))

    def query(self, name: str, gathering: int) -> int:
        """The batch that the answer waits for: all that it says is durable then (C19.2, C19.6)."""
        known = self._known.get(name)
        if known is None:
            return WRITTEN_BEFORE
        last = known[-1]
        if last.producer is None:
            assert last.written_in is not None, "forgotten durably"
            return last.written_in
        if last.written_in is None:
            # It has to be written now, if it does not stand in a batch already.
            known_in = gathering if last.producer.known_in is None else last.producer.known_in
            known.append(Known(gathering, replace(last.producer, known_in=known_in)))
            return known_in
        assert last.producer.known_in is not None, "with what is written its numbers are"
        return last.producer.known_in

    # ---- Forgetting ----

    def forget(self, name: str, gathering: int) -> int:
        """Forget a producer on request (C18.9). Returns the batch that the receipt waits for."""
        known = self._known.get(name)
        if known is None:
            return WRITTEN_BEFORE
        if known[-1].producer is not None:
            known.append(Known(gathering, None))
        written_in = known[-1].written_in
        assert written_in is not None, "forgotten durably"
        return written_in

    def crashed(self, durable: int) -> None:
        """C19.8: producers whose use was not written are forgotten."""
        for name, known in list(self._known.items()):
            remaining = [one for one in known if one.written_in is not None and one.written_in <= durable]
            self._known[name] = [Known(WRITTEN_BEFORE, remaining[-1].producer if remaining else None)]

    def stopped(self) -> None:
        for name, known in list(self._known.items()):
            producer = known[-1].producer
            producer = producer and replace(producer, known_in=WRITTEN_BEFORE)
            self._known[name] = [Known(WRITTEN_BEFORE, producer)]

    def written_in(self, gathering: int) -> list[str]:
        """Return the producers that the gathering batch must write."""
        return [name for name, known in self._known.items() if any(one.written_in == gathering for one in known)]

    def _before(self, name: str, now_ms: int, gathering: int) -> Producer:
        """Return the producer before its use; another one may be forgotten for it (C18.8)."""
        if self._is_one_too_many(name):
            evicted = min(self._dispensable(now_ms), key=lambda each: self.remembered()[each].used_ms)
            self._known[evicted].append(Known(gathering, None))
        return self.remembered().get(name, Producer(now_ms, uses=0))

    def _is_one_too_many(self, name: str) -> bool:
        remembered = self.remembered()
        return name not in remembered and len(remembered) >= self.limit

    def _dispensable(self, now_ms: int) -> list[str]:
        return [
            name
            for name, producer in self.remembered().items()
            if producer.may_be_forgotten_early and now_ms - producer.used_ms >= HOUR_MS
        ]


class JmsProducers(Producers):
    """C26.11: of too many the longest unused goes, and none is refused."""

    def _dispensable(self, now_ms: int) -> list[str]:
        return list(self.remembered())
