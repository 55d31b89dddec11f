"""Recorder: runs a workload on any STOMP broker, and records what its client sees as events of the history.

A client sees when a message arrives, not when it was dispatched. So all messages are sent and confirmed before the
one consumer subscribes: then nothing arrives in between, and the order of arrival is that of dispatch. Messages are
recorded in that order, whatever the order in which the client would hand them out.
"""

import random
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, NamedTuple

from truenext.client.core.credentials import NO_CREDENTIALS, Credentials
from truenext.client.core.flows import CLOSE_TIMEOUT_S
from truenext.client.core.send_options import Outgoing
from truenext.client.threads.connection import Connection, connect
from truenext.errors import ConfigurationError, RemoteProtocolError
from truenext.history.schema import DRAINED
from truenext.model.limits import WINDOW_MAX
from truenext.model.url import parse_url

# ---- Messages of a recording: the cases in which a broker with two buckets breaks the order ----

PRODUCTION_SHARE = 4
"""Messages per interactive message in the production case."""


class WorkloadMessage(NamedTuple):
    """Message to send; its sequence is its position in the list, from 1."""

    priority: int
    persistent: bool


def make_production(count: int, _: random.Random) -> list[WorkloadMessage]:
    """Return ordinary messages (persistent, priority 4), then interactive ones (non-persistent, priority 9), 3 to 1."""
    interactive = count // PRODUCTION_SHARE
    return [WorkloadMessage(4, True)] * (count - interactive) + [WorkloadMessage(9, False)] * interactive


def make_persistence_alternation(count: int, _: random.Random) -> list[WorkloadMessage]:
    """Return persistent and non-persistent messages in turn, all of priority 4: order of arrival alone decides."""
    return [WorkloadMessage(4, number % 2 == 0) for number in range(count)]


def make_mix(count: int, rng: random.Random) -> list[WorkloadMessage]:
    """Return messages of random priority, persistent or not."""
    return [WorkloadMessage(rng.randrange(10), rng.random() < 0.5) for _ in range(count)]


WORKLOADS: dict[str, Callable[[int, random.Random], list[WorkloadMessage]]] = {
    "production": make_production,
    "alternation": make_persistence_alternation,
    "mix": make_mix,
}


# ---- The recording ----

CONFIRM_EVERY_MESSAGES = 500
"""Messages between two receipts."""
ARRIVAL_TIMEOUT_S = 10.0
"""Seconds after the last message, while messages are missing: later ones count as lost."""
QUIET_TIMEOUT_S = 0.5
"""Seconds after the last message, once all have come: time for messages that are delivered twice."""
MESSAGES_MAX = 1_000_000
"""Messages in one recording: its events stay in memory until it is complete, about half a kilobyte each."""
IDENTITY_HEADER = "recorded-as"
"""Header with the recording and the sequence of a message."""

ReportProgress = Callable[[str, int], None]
"""Called with `sent` or `received`, and the number of messages so far."""


HistoryRow = dict[str, Any]
"""Row of docs/reference/history.md, without the columns that its kind does not have."""


class Recorder:
    """Recorder that runs workloads on one broker and returns the events that a client sees."""

    def __init__(
        self,
        url: str,
        *,
        credentials: Credentials = NO_CREDENTIALS,
        timeout_s: float = CLOSE_TIMEOUT_S,
        may_be_remote: bool = False,
    ) -> None:
        """Record at `url`, which must accept a login within `timeout_s` seconds; a broker on another machine needs
        `may_be_remote`.

        Raises: ConfigurationError
        """
        if not (may_be_remote or (address := parse_url(url)).is_loopback):
            raise ConfigurationError(
                f"{address.host} is another machine, and a recording loads its broker: allow that with --remote"
            )
        self._url = url
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._name = secrets.token_hex(4)
        self._events: list[HistoryRow] = []

    def record(
        self, messages: Sequence[WorkloadMessage], *, queue: str, window: int, report: ReportProgress
    ) -> list[HistoryRow]:
        """Send `messages` to `queue`, receive and acknowledge each, and return the events in order.

        The queue must be empty and used by no other client. Messages that never come are no error: the audit shows
        them as waiting when the queue was found empty.

        Raises: ConfigurationError, ConnectionLost, Refused, RemoteProtocolError
        """
        if not 1 <= len(messages) <= MESSAGES_MAX:
            raise ConfigurationError(f"a recording has 1 to {MESSAGES_MAX} messages, not {len(messages)}")
        if not 1 <= window <= WINDOW_MAX:
            raise ConfigurationError(f"a window is 1 to {WINDOW_MAX} messages, not {window}")
        self._events = []
        self._add_event("run-started", reason="clean")
        self._send(messages, queue, report)
        self._receive(len(messages), queue, window, report)
        return self._events

    def _connect(self) -> Connection:
        return connect(self._url, **self._credentials.arguments(), reconnect=False, timeout=self._timeout_s)

    def _send(self, messages: Sequence[WorkloadMessage], queue: str, report: ReportProgress) -> None:
        with self._connect() as connection:
            for first in range(0, len(messages), CONFIRM_EVERY_MESSAGES):
                chunk = messages[first : first + CONFIRM_EVERY_MESSAGES]
                connection.send_many(
                    f"/queue/{queue}", map(self._make_outgoing, chunk, range(first + 1, len(messages) + 1))
                )
                for sequence, message in enumerate(chunk, first + 1):
                    self._add_event(
                        "accepted",
                        queue=queue,
                        sequence=sequence,
                        priority=message.priority,
                        persistent=message.persistent,
                        size=len(_make_body(sequence)),
                        batch=0,
                    )
                report("sent", first + len(chunk))

    def _make_outgoing(self, message: WorkloadMessage, sequence: int) -> Outgoing:
        return Outgoing(
            _make_body(sequence),
            priority=message.priority,
            persistent=message.persistent,
            headers={IDENTITY_HEADER: f"{self._name}-{sequence}"},
        )

    def _receive(self, count: int, queue: str, window: int, report: ReportProgress) -> None:
        deliveries: dict[int, int] = {}
        received = 0
        with self._connect() as connection:
            # Recorded before, since the first messages may arrive before the subscription is confirmed.
            self._add_event("subscribed", queue=queue, consumer=1, mode="client-individual", window=window)
            with connection.consumer(f"/queue/{queue}", ack="individual", prefetch=window) as consumer:
                # All messages that are here, so that none is recorded after one that arrived later.
                while messages := consumer.receive_many(
                    window, ARRIVAL_TIMEOUT_S if len(deliveries) < count else QUIET_TIMEOUT_S
                ):
                    for message in sorted(messages, key=attrgetter("arrival")):
                        sequence = self._parse_identity(message.headers.get(IDENTITY_HEADER, ""), count, queue)
                        deliveries[sequence] = deliveries.get(sequence, 0) + 1
                        count_now = deliveries[sequence]
                        self._add_event("dispatched", queue=queue, sequence=sequence, consumer=1, deliveries=count_now)
                        received += 1
                        message.ack()
                        self._add_event("acknowledged", queue=queue, sequence=sequence, consumer=1)
                        report("received", received)
                        if received > 2 * count:
                            raise RemoteProtocolError(f"{self._url} delivers acknowledged messages again and again")
            self._add_event(DRAINED, queue=queue)

    def _parse_identity(self, identity: str, count: int, queue: str) -> int:
        name, _, number = identity.rpartition("-")
        if name != self._name or not number.isdecimal() or not 1 <= int(number) <= count:
            raise RemoteProtocolError(f"{queue} has messages that this recording did not send; name an empty queue")
        return int(number)

    def _add_event(self, kind: str, **columns: str | int | bool) -> None:
        row = {"event": len(self._events) + 1, "run": 1, "at": datetime.now(UTC), "kind": kind}
        self._events.append(row | columns)


def _make_body(sequence: int) -> bytes:
    return f"message {sequence}".encode()
