"""Which producers are remembered, and which of them goes for a new one? By docs/contract.md, L5, alone.

Of each is kept what it was after each use, and the batch that writes that down: a crash leaves what was durable.
"""

from dataclasses import dataclass, replace

HOUR_MS = 3600 * 1000
WRITTEN_BEFORE = 0


@dataclass(frozen=True)
class Producer:
    used_ms: int
    uses: int = 1
    """Repeats as well."""
    has_committed: bool = False

    @property
    def may_be_forgotten_early(self) -> bool:
        return self.uses == 1 and not self.has_committed


@dataclass(frozen=True)
class Known:
    written_in: int | None
    """The batch that writes it down; None if none has to."""
    producer: Producer | None
    """None: forgotten."""


class Producers:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: dict[str, list[Known]] = {}

    def remembered(self) -> dict[str, Producer]:
        last = {name: known[-1].producer for name, known in self._known.items()}
        return {name: producer for name, producer in last.items() if producer is not None}

    def is_refused(self, name: str, now_ms: int) -> bool:
        """It is new, and nobody may be forgotten for it."""
        return self._is_one_too_many(name) and not self._dispensable(now_ms)

    def used(self, name: str, now_ms: int, gathering: int, *, is_stored: bool, is_commit: bool) -> str | None:
        """Not a repeat. Returns who was forgotten for it, if it is new."""
        gone = None
        if self._is_one_too_many(name):
            gone = min(self._dispensable(now_ms), key=lambda each: self.remembered()[each].used_ms)
            self._known[gone].append(Known(gathering, None))
        before = self.remembered().get(name)
        if before is None:
            producer = Producer(now_ms, has_committed=is_commit)
        else:
            producer = Producer(now_ms, before.uses + 1, before.has_committed or is_commit)
        self._known.setdefault(name, []).append(Known(gathering if is_stored else None, producer))
        return gone

    def repeated(self, name: str, now_ms: int, gathering: int) -> None:
        last = self._known[name][-1]
        assert last.producer is not None
        is_written = last.written_in is not None and last.producer.may_be_forgotten_early
        producer = replace(last.producer, used_ms=now_ms, uses=last.producer.uses + 1)
        self._known[name].append(Known(gathering if is_written else None, producer))

    def crashed(self, durable: int) -> None:
        for name, known in list(self._known.items()):
            left = [one for one in known if one.written_in is not None and one.written_in <= durable]
            self._known[name] = [Known(WRITTEN_BEFORE, left[-1].producer if left else None)]

    def stopped(self) -> None:
        self._known = {name: [Known(WRITTEN_BEFORE, known[-1].producer)] for name, known in self._known.items()}

    def _is_one_too_many(self, name: str) -> bool:
        remembered = self.remembered()
        return name not in remembered and len(remembered) >= self.limit

    def _dispensable(self, now_ms: int) -> list[str]:
        return [
            name
            for name, producer in self.remembered().items()
            if producer.may_be_forgotten_early and now_ms - producer.used_ms >= HOUR_MS
        ]
