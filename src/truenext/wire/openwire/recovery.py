"""Recovery of a JMS client on `failover:`: it connects again, and repeats what it had on its earlier connection.

It repeats its sessions, producers, and consumers, these with prefetch 0; then its open transactions with their
messages, but without acknowledgements; then what was not answered. Only then comes anything new, such as a COMMIT: it
repeats none. Once its sessions know of the new connection, it gives its consumers their prefetch back.
"""

from collections.abc import Set as AbstractSet

from truenext.errors import RemoteProtocolError
from truenext.wire.openwire.structures import ProducerId

_STALLED_BEATS = 2
"""Number of keep-alives after which a client is taken to have forgotten its consumers' prefetch."""


class Recovery:
    def __init__(self) -> None:
        self._is_repeating = False
        """True from the login of a client that connects again until it sends what it does not repeat."""
        self._has_stalled_consumers = False
        """True as long as the client has repeated its consumers with prefetch 0, and sent no ConsumerControl."""
        self._stalled_beats = 0
        """Number of keep-alives meanwhile."""
        self._transactions: dict[str, _Repeated] = {}
        """Open transactions that the client has repeated and that acknowledge nothing."""
        self._producers: dict[ProducerId, int] = {}
        """Command ids of the ProducerInfos that may be of these transactions."""

    def begin(self) -> None:
        """Note the login of a client that connects again."""
        self._is_repeating = True

    # ---- Consumers (C26.19) ----

    @property
    def has_failed(self) -> bool:
        """True if the client has forgotten its consumers' prefetch."""
        return self._stalled_beats >= _STALLED_BEATS

    def note_advisory_consumer(self, prefetch: int) -> None:
        """Note a consumer of advisories. Its prefetch is 0 only if it is repeated; that of other consumers may be."""
        if self._is_repeating:
            self._has_stalled_consumers = not prefetch

    def note_prefetch(self) -> None:
        """Note that the client has given a consumer its prefetch back."""
        self._is_repeating = self._has_stalled_consumers = False

    def note_keep_alive(self) -> None:
        """Raises: RemoteProtocolError if the client has forgotten its consumers' prefetch"""
        self._stalled_beats += self._has_stalled_consumers
        if self.has_failed:
            # Threads of the client can disagree on whether it recovers, if it has lost two connections in a row.
            raise RemoteProtocolError("the client has not given its consumers their prefetch back: connect again")

    # ---- Transactions (C26.15) ----

    def note_begin(self, name: str, command_id: int) -> None:
        if self._is_repeating:
            self._transactions[name] = _Repeated(command_id)

    def note_messages(self, name: str, producer_id: ProducerId, count: int = 1) -> None:
        repeated = self._transactions.get(name)
        if repeated is not None:
            repeated.known += count
            repeated.sessions.add(producer_id.session_id)
            repeated.producers.add(producer_id)

    def note_producer(self, producer_id: ProducerId, command_id: int) -> None:
        if self._is_repeating or self._transactions:
            self._producers.setdefault(producer_id, command_id)

    def note_end_of_producer(self, producer_id: ProducerId) -> None:
        """Note the end of a producer, which the client repeats with another command id, behind the transaction."""
        info_id = self._producers.pop(producer_id, 0)
        for repeated in self._transactions.values():
            if producer_id in repeated.producers:
                repeated.producers.remove(producer_id)
                repeated.known += 2 if info_id > repeated.begin_id else 1

    def note_end_of_session(self, session_id: int) -> None:
        for producer_id in [each for each in self._producers if each.session_id == session_id]:
            del self._producers[producer_id]

    def note_commit(self) -> None:
        self._is_repeating = False

    def doubtful_sessions(self, name: str, commit_id: int) -> AbstractSet[int]:
        """Return the sessions whose acknowledgements in a transaction may be lost, as an earlier connection has got
        them. A client may send COMMIT before it notices that the connection is another one.

        There is none if each command of the client from BEGIN to COMMIT is known: ids of commands are consecutive, and
        repeated commands keep theirs.
        """
        repeated = self._transactions.get(name)
        if repeated is None:
            return frozenset()
        info_ids = [self._producers.get(each, 0) for each in repeated.producers]
        known = repeated.known + sum(repeated.begin_id < each < commit_id for each in info_ids)
        return frozenset() if repeated.begin_id + known + 1 == commit_id else repeated.sessions

    def forget(self, name: str) -> None:
        """Forget a transaction that has ended or acknowledges something."""
        self._transactions.pop(name, None)


class _Repeated:
    """Transaction that a client has repeated."""

    __slots__ = ("begin_id", "known", "producers", "sessions")

    def __init__(self, begin_id: int) -> None:
        self.begin_id = begin_id
        """Command id of its BEGIN."""
        self.known = 0
        """Number of its messages, and of the beginnings and ends of producers that have ended since they sent in it."""
        self.sessions: set[int] = set()
        """Sessions that have sent in it."""
        self.producers: set[ProducerId] = set()
        """Producers that have sent in it, and have not ended."""
