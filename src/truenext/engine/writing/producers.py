"""Registries of producers and their numbers (C18.5): remember producers, and forget some if there are too many.

A producer is remembered for PRODUCER_RETENTION_MS after its last use. If there are PRODUCERS_MAX producers, a new one
replaces a producer that had a single SEND long ago. Such a producer is most likely a process that sent one message and
ended. A producer with more SENDs, or with a COMMIT, is kept. Source:
docs/decisions/0036-producers-that-are-forgotten.md
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.producer import CommitOutcome, Producer, check_gap, producer_name
from truenext.engine.writing.commit_state import CommitState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.batch import ProducerState
from truenext.model.commands import Commit, Send
from truenext.model.limits import PRODUCER_RETENTION_MS, PRODUCER_RETENTION_MS_MIN, PRODUCERS_MAX, RESOLVED_TOTAL_MAX

_JMS_PREFIX = "\0"
"""Prefix of the names of JMS clients' producers in the store. No name of another producer begins so."""
_RESOLVED_BYTES = 9
"""Bytes of one resolved COMMIT in the store."""


class ProducerInfo(NamedTuple):
    producer: Producer | None
    """Producer with its numbers; None if the producer is not remembered."""
    outcome: CommitOutcome | None
    """Outcome of the COMMIT that the query names; None if the query names no COMMIT."""
    batch: int
    """Batch with which the producer's numbers and the outcome are durable."""


class ProducerRegistry:
    """Producers with their highest numbers, in order of last use."""

    _key_prefix = ""
    """Prefix of the producers' names in the store."""

    def __init__(self, commit_state: CommitState) -> None:
        self._commit_state = commit_state
        # Not plain dicts: finding the first key of one takes long after many deletions at its front.
        self._producers: OrderedDict[str, Producer] = OrderedDict()
        self._used_once: OrderedDict[str, None] = OrderedDict()
        """Names of producers that had one SEND and no other use, in order of use."""
        self._unstored: set[str] = set()
        """Names of producers that were used since their state was last stored."""
        self._forgotten_count = 0
        self._last_forgotten = ""
        self._last_forgetting_batch = 0
        self._resolved_count = 0
        """Number of resolved COMMITs that are remembered, of all producers."""

    def restore(self, states: Iterable[tuple[str, ProducerState]]) -> None:
        """Restore the producers that the store has recovered, in order of last use. Producers of the other registry are
        left out."""
        for key, state in states:
            if key.startswith(_JMS_PREFIX) != (self._key_prefix != ""):
                continue
            name = key.removeprefix(self._key_prefix)
            self._producers[name] = Producer.from_state(state)
            self._resolved_count += len(state.resolved)
            if state.is_used_once:
                self._used_once[name] = None

    # ---- SENDs and COMMITs ----

    def find_repeat(self, command: Send | Commit) -> Producer | None:
        """Return the producer if the command is a repeat, else None. Sets `is_repeat` and `is_unknown` of a repeat.

        Raises: RemoteProtocolError if the number may not be used, or if a new producer finds no space because none may
        be forgotten.
        """
        name, number = command.producer, command.number
        assert name is not None, "it has a number"
        producer = self._find(name)
        if producer is None:
            if command.is_gapless:
                check_gap(name, number, 0)
            self._check_space()
            return None
        is_commit = type(command) is Commit
        if not producer.has_used(name, number, is_commit=is_commit, declares_gapless=command.is_gapless):
            return None
        command.is_repeat = True
        command.is_unknown = producer.is_use_unknown(number, is_commit=is_commit)
        self._use(name, producer)
        if name in self._used_once:
            del self._used_once[name]
            if name not in self._unstored:
                # After a crash it must not count as a producer that was used once.
                self._store(name, producer)
                return producer
        self._unstored.add(name)
        return producer

    def record_use(self, command: Send | Commit, *, is_stored: bool) -> None:
        """Record the number of an accepted SEND or COMMIT. With `is_stored` it is durable with the gathering batch."""
        name = command.producer
        assert name is not None, "it has a number"
        is_commit = type(command) is Commit
        producer = self._producers.get(name)
        if producer is None:
            producer = self._add_producer(name)
            if not is_commit:
                self._used_once[name] = None
        else:
            self._used_once.pop(name, None)
        producer.record_use(command.number, is_commit=is_commit, declares_gapless=command.is_gapless)
        self._use(name, producer)
        if is_stored:
            producer.batch = self._commit_state.batch.number
            self._store(name, producer)
        else:
            # `batch` stays: a use that is not stored must not hide that an earlier number is not durable yet.
            self._unstored.add(name)

    # ---- Queries ----

    def query(self, name: str, commit: int | None, *, resolves: bool) -> ProducerInfo:
        """Return a producer with its numbers, and the outcome of its COMMIT of number `commit`.

        With `resolves`, a COMMIT that was not accepted so far is resolved as rolled back. Nothing is resolved if
        `Producer.resolve` refuses the number, or if there is no space for one more producer or resolved COMMIT.

        Raises: RemoteProtocolError if there is no space for a copy of the producer that had this name before there were
            users.
        """
        producer = self._find(name)
        resolves = resolves and self._resolved_count < RESOLVED_TOTAL_MAX
        if producer is None:
            is_first = commit == 1
            if not (is_first and resolves and self._has_space):
                outcome = CommitOutcome.NOT_YET_COMMITTED if is_first else CommitOutcome.UNKNOWN
                return ProducerInfo(None, None if commit is None else outcome, self._last_forgetting_batch)
            producer = self._add_producer(name)
        batch = self._commit_state.batch.number
        remembered = len(producer.resolved)
        if commit is not None and resolves and producer.resolve(commit):
            self._resolved_count += len(producer.resolved) - remembered
            self._used_once.pop(name, None)
            self._use(name, producer)
            producer.batch = batch
            self._store(name, producer)
        elif name in self._unstored:
            # The reply must be durable, also for numbers of transient messages.
            producer.batch = batch
            self._store(name, producer)
        return ProducerInfo(producer, None if commit is None else producer.outcome(commit), producer.batch)

    # ---- Forgetting ----

    def forget(self, session: ConnectionState, names: Iterable[str]) -> None:
        """Forget producers that a client does not need any more. Unknown names are ignored."""
        for name in names:
            if name in self._producers:
                self._forget_producer(name)
            if self._former(name) is not None and self._has_space:
                # An unused producer, so that the next use begins anew, not with a copy.
                self._store(name, self._add_producer(name))
        session.last_batch = max(session.last_batch, self._last_forgetting_batch)

    def forget_old(self) -> None:
        """Forget producers that were not used for PRODUCER_RETENTION_MS."""
        producers = self._producers
        while producers:
            name = next(iter(producers))
            if producers[name].used_ms + PRODUCER_RETENTION_MS > self._commit_state.now_ms:
                break
            self._forget_producer(name)

    def take_forgotten(self) -> tuple[int, str]:
        """Return how many producers were forgotten early since the last call, and the name of the producer that was
        forgotten last."""
        forgotten, self._forgotten_count = self._forgotten_count, 0
        return forgotten, self._last_forgotten

    def unstored_states(self) -> Iterator[tuple[str, ProducerState]]:
        """Yield the names and states of producers that the store does not know yet. A clean stop stores these."""
        for name in self._unstored:
            yield self._key_prefix + name, self._state(name, self._producers[name])

    def _find(self, name: str) -> Producer | None:
        """Return a producer; None if no number of it is known. A user's producer begins with a copy of the numbers that
        the name had before there were users.

        Raises: RemoteProtocolError if there is no space for that copy.
        """
        producer = self._producers.get(name)
        if producer is not None:
            return None if producer.is_unused else producer
        former = self._former(name)
        if former is None:
            return None
        self._check_space()
        state, batch = former.state(is_used_once=False), former.batch
        self._add_producer(name)
        producer = self._producers[name] = Producer.from_state(state)
        producer.batch = batch
        self._resolved_count += len(producer.resolved)
        self._use(name, producer)
        self._unstored.add(name)
        return producer

    def _former(self, name: str) -> Producer | None:
        """Return the producer that had the name of this user's producer before there were users; None if there is
        none."""
        former = producer_name(name)
        return None if former == name else self._producers.get(former)

    def _check_space(self) -> None:
        if not self._has_space:
            raise RemoteProtocolError(
                f"there are {PRODUCERS_MAX} producers with numbers, the most allowed, and the broker may forget "
                f"none of them (only producers that sent a single SEND, at least an hour ago): use fewer producer "
                f"names, and each for more messages",
                Code.LIMIT,
            )

    @property
    def _has_space(self) -> bool:
        """Whether one more producer can be remembered, if need be in place of one that may be forgotten early."""
        return len(self._producers) < PRODUCERS_MAX or self._oldest_dispensable() is not None

    def _add_producer(self, name: str) -> Producer:
        if len(self._producers) >= PRODUCERS_MAX:
            self._forget_early()
        producer = self._producers[name] = Producer(self._commit_state.now_ms)
        return producer

    def _oldest_dispensable(self) -> str | None:
        """Return the name of the producer that may be forgotten early and has not been used for longest; None if there
        is none."""
        name = next(iter(self._used_once), None)
        if name is None or self._producers[name].used_ms + PRODUCER_RETENTION_MS_MIN > self._commit_state.now_ms:
            return None
        return name

    def _forget_early(self) -> None:
        name = self._oldest_dispensable()
        assert name is not None, "`_has_space` was checked"
        self._forget_producer(name)
        self._forgotten_count += 1
        self._last_forgotten = producer_name(name)

    def _forget_producer(self, name: str) -> None:
        batch = self._commit_state.batch
        self._resolved_count -= len(self._producers.pop(name).resolved)
        self._used_once.pop(name, None)
        self._unstored.discard(name)
        key = self._key_prefix + name
        # The same batch may store it, if the clock was set forward.
        batch.producers.pop(key, None)
        batch.forgotten_producers.append(key)
        batch.size += len(key)
        self._last_forgetting_batch = batch.number

    # ---- The store ----

    def _use(self, name: str, producer: Producer) -> None:
        producer.used_ms = self._commit_state.now_ms
        # `forget_old` checks only the front.
        self._producers.move_to_end(name)

    def _store(self, name: str, producer: Producer) -> None:
        batch, prefix = self._commit_state.batch, self._key_prefix
        self._unstored.discard(name)
        batch.producers[prefix + name if prefix else name] = self._state(name, producer)
        batch.size += len(name) + _RESOLVED_BYTES * len(producer.resolved)

    def _state(self, name: str, producer: Producer) -> ProducerState:
        return producer.state(is_used_once=name in self._used_once)


class JmsProducerRegistry(ProducerRegistry):
    """Producers of JMS clients. If there are too many, the one that was not used for longest is forgotten, whatever it
    has sent: a JMS client has a new producer for each session, and reports the end of most (C26.11)."""

    _key_prefix = _JMS_PREFIX

    @property
    def _has_space(self) -> bool:
        return True

    def _oldest_dispensable(self) -> str | None:
        return next(iter(self._producers), None)

    def _former(self, name: str) -> Producer | None:
        return None
