"""Recorder: runs a workload on any STOMP broker, and records the events that its client sees, in the form of a history.

A client sees when a message arrives, but not when it was dispatched. So all messages are sent and confirmed before the
only consumer subscribes. Then no message is added in between, and messages arrive in the order of dispatch. The
recorder uses the order of arrival, even if a client would deliver the messages to a program in another order.
"""

import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
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
"""In the production case, one of PRODUCTION_SHARE messages is interactive."""


class WorkloadMessage(NamedTuple):
    """Message that the recorder sends. Its sequence is its position in the list, from 1."""

    priority: int
    persistent: bool


def make_production(count: int, _: random.Random) -> list[WorkloadMessage]:
    """Return ordinary messages (persistent, priority 4), then interactive ones (non-persistent, priority 9), in the
    ratio 3 to 1."""
    interactive = count // PRODUCTION_SHARE
    return [WorkloadMessage(4, True)] * (count - interactive) + [WorkloadMessage(9, False)] * interactive


def make_persistence_alternation(count: int, _: random.Random) -> list[WorkloadMessage]:
    """Return persistent and non-persistent messages alternately. All have priority 4, so only the order of arrival
    decides."""
    return [WorkloadMessage(4, number % 2 == 0) for number in range(count)]


def make_mix(count: int, rng: random.Random) -> list[WorkloadMessage]:
    """Return messages with random priorities, persistent or not."""
    return [WorkloadMessage(rng.randrange(10), rng.random() < 0.5) for _ in range(count)]


WORKLOADS: dict[str, Callable[[int, random.Random], list[WorkloadMessage]]] = {
    "production": make_production,
    "alternation": make_persistence_alternation,
    "mix": make_mix,
}


# ---- The recording ----

CONFIRM_EVERY_MESSAGES = 500
"""Number of messages between two receipts."""
ARRIVAL_TIMEOUT_S = 10.0
"""Seconds to wait after the last message while messages are missing. Messages that come later count as lost."""
QUIET_TIMEOUT_S = 0.5
"""Seconds to wait after the last message once all have come. A message that is delivered twice comes in this time."""
MESSAGES_MAX = 1_000_000
"""Largest number of messages in one recording. The events are in memory until the recording is complete, about half a
kilobyte for each message."""
IDENTITY_HEADER = "recorded-as"
"""Header that names the recording, and the sequence of the message."""

ReportProgress = Callable[[str, int], None]
"""Function that is called with `sent` or `received`, and the number of messages so far."""


HistoryRow = dict[str, Any]
"""Event as a row of docs/reference/history.md. Columns that this kind of event does not have are left out."""


@dataclass(eq=False)
class Recorder:
    """Recorder for one broker. It runs workloads, and returns the events that a client sees."""

    url: str
    _: KW_ONLY
    credentials: Credentials = NO_CREDENTIALS
    timeout_s: float = CLOSE_TIMEOUT_S
    """Seconds within which the broker must accept a login."""
    may_be_remote: bool = False

    def __post_init__(self) -> None:
        """Check the URL.

        Raises: ConfigurationError if the broker is on another machine without `may_be_remote`, or the URL is invalid
        """
        if not (self.may_be_remote or (address := parse_url(self.url)).is_loopback):
            raise ConfigurationError(
                f"{address.host} is another machine, and a recording loads its broker: allow that with --remote"
            )
        self._name = secrets.token_hex(4)
        self._events: list[HistoryRow] = []

    def record(
        self, messages: Sequence[WorkloadMessage], *, queue: str, window: int, report: ReportProgress
    ) -> list[HistoryRow]:
        """Send `messages` to `queue`, receive and acknowledge each, and return the events in order.

        The queue must be empty, and no other client may use it. Missing messages are not an error here: the audit of
        the events reports them as lost.

        Raises: ConfigurationError if there are too many messages, or `window` is invalid; RemoteProtocolError if the
        queue is not empty; Refused if the broker refuses a frame; ConnectionLost if the connection is lost
        """
        if not 1 <= len(messages) <= MESSAGES_MAX:
            raise ConfigurationError(f"a recording must have 1 to {MESSAGES_MAX} messages, not {len(messages)}")
        if not 1 <= window <= WINDOW_MAX:
            raise ConfigurationError(f"a window must be 1 to {WINDOW_MAX} messages, not {window}")
        self._events = []
        self._add_event("run-started", reason="clean")
        self._send(messages, queue, report)
        self._receive(len(messages), queue, window, report)
        return self._events

    def _connect(self) -> Connection:
        return connect(self.url, **self.credentials.arguments(), reconnect=False, timeout=self.timeout_s)

    def _send(self, messages: Sequence[WorkloadMessage], queue: str, report: ReportProgress) -> None:
        with self._connect() as connection:
            for first in range(0, len(messages), CONFIRM_EVERY_MESSAGES):
                chunk = messages[first : first + CONFIRM_EVERY_MESSAGES]
                connection.send_many(
                    f"/queue/{queue}", map(self._make_outgoing, chunk, range(first + 1, len(messages) + 1))
                )
                for sequence, message in enumerate(chunk, first + 1):
                    size = len(_make_body(sequence))
                    self._add_event("accepted", queue=queue, sequence=sequence, **message._asdict(), size=size, batch=0)
                report("sent", first + len(chunk))

    def _make_outgoing(self, message: WorkloadMessage, sequence: int) -> Outgoing:
        headers = {IDENTITY_HEADER: f"{self._name}-{sequence}"}
        return Outgoing(_make_body(sequence), **message._asdict(), headers=headers)

    def _receive(self, count: int, queue: str, window: int, report: ReportProgress) -> None:
        deliveries: dict[int, int] = {}
        received = 0
        with self._connect() as connection:
            # Recorded before, since the first messages may arrive before the subscription is confirmed.
            self._add_event("subscribed", queue=queue, consumer=1, mode="client-individual", window=window)
            with connection.consumer(f"/queue/{queue}", ack="individual", prefetch=window) as consumer:
                # All messages that have arrived are taken at once, to be recorded in the order of arrival.
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
                            raise RemoteProtocolError(f"{self.url} delivers acknowledged messages again and again")
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
