"""Task: reads its part of a batch.

    browse its own queue    bundles of this batch from an earlier attempt; their rows come first
    pull                    further messages up to the task's share, while any is ready
    one transaction         acknowledges the messages, and sends them as a bundle to the task's own queue
    receipt                 only then does Spark see the rows

The last bundle of a task is marked as the last, and may be empty. An attempt that finds this bundle takes no more
messages, so a repeated batch has the same rows. If two attempts run at the same time, one COMMIT counts, and the other
is a repeat of its number. The attempt with the repeat releases the messages that it has pulled, and browses again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from truenext.errors import ConfigurationError, TruenextError
from truenext.model.spark_queues import (
    SOURCE_PREFIX,
    BundleHead,
    BundleOrigin,
    bundle_headers,
    parse_bundle_head,
    parse_bundle_origin,
)
from truenext.spark.broker.connection import ANSWER_SECONDS, Answer, BrokerConnection
from truenext.spark.broker.patience import Patience
from truenext.spark.source.bundle import BUNDLE_BYTES, BUNDLE_ROWS, BundleRows, decode_bundle, encode_bundle
from truenext.spark.source.offset import Offset
from truenext.spark.source.options import SourceOptions

_AHEAD_FIRST = 256
"""Number of messages that are requested while the size of a message is unknown."""


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """Work of one task. Spark sends it to an executor."""

    options: SourceOptions
    end: Offset
    partition: int
    query: str = ""
    query_batch: str = ""
    """Spark's id of the batch. `query` is Spark's id of the query."""

    def with_query(self, query: str, query_batch: str) -> TaskPlan:
        return replace(self, query=query, query_batch=query_batch)

    @property
    def origin(self) -> BundleOrigin:
        return BundleOrigin(self.end.queue, self.options.selector or "", self.query, self.query_batch)


class Superseded(TruenextError):
    """Error of an outdated run. Another run of the query has continued, with this checkpoint or another one."""


def check_store(broker: BrokerConnection, offset: Offset) -> None:
    """Check that the offset belongs to this broker.

    Raises: Superseded if it belongs to another broker
    """
    if broker.store_id != offset.store:
        raise Superseded(
            f"the checkpoint was made with a broker whose data has the name {offset.store}, and the broker at this url "
            f"has {broker.store_id}: correct the option url, or start the query with a new checkpoint"
        )


class _Repeated(Exception):
    """Error that is raised when another attempt of the task has committed the same bundle."""


def read_task(plan: TaskPlan, connect: Callable[[], BrokerConnection], patience: Patience) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task, bundle by bundle. After a lost connection the task connects again.

    Raises: Superseded if another run has continued; TruenextError if the broker refuses a request or stays unavailable
    """
    task = _Task(plan)
    while not task.is_done:
        try:
            with connect() as broker:
                check_store(broker, plan.end)
                for batch in task.read(broker):
                    patience.on_success()
                    yield batch
        except _Repeated:
            continue
        except TruenextError as error:
            patience.wait(error)


class _Task:
    def __init__(self, plan: TaskPlan) -> None:
        self._plan = plan
        self._end = plan.end
        self._queue = f"/queue/{plan.end.bundle_queue(plan.partition)}"
        self._given = 0
        """Number of bundles that Spark has got."""
        self._repeated = -1
        """Number of the bundle whose COMMIT the broker answered as a repeat, because another attempt of the task had
        committed the bundle; -1 if there was none."""
        self._rows_max, self._bytes_left = plan.end.share(plan.partition)
        self._rows_left = self._rows_max
        self.is_done = False

    def read(self, broker: BrokerConnection) -> Iterator[pa.RecordBatch]:
        """Yield the rows that Spark has not got yet: at first the rows of stored bundles, then new rows."""
        for head, body in self._stored_bundles(broker):
            yield self._give(head, decode_bundle(body))
        if self._repeated == self._given and not self.is_done:
            raise Superseded(
                f"batch {self._end.batch} was read and cleared by another run of this query: run only one query at a "
                f"time with one checkpoint"
            )
        if not self.is_done:
            yield from self._take(broker)
        # One task of each source is enough: each source writes a bundle before it searches for bundles of the other.
        if self._plan.partition == 0 and self._plan.query:
            self._check_only_source(broker)

    def _check_only_source(self, broker: BrokerConnection) -> None:
        """Check that no other source of the same query reads the same queue with the same selector.

        Raises: ConfigurationError if there is such a source
        """
        own, origin = self._end.bundle_queue(0), self._plan.origin
        for queue in broker.ask("queues"):
            name = queue["name"]
            is_source = name.startswith(f"{SOURCE_PREFIX}{self._end.space}.") and name.endswith(".0")
            if not is_source or name == own or not queue["waiting"]:
                continue
            for frame in list(broker.browse(f"/queue/{name}", f"spark_query = '{origin.query}' AND spark_bundle = 0")):
                other = parse_bundle_origin(frame.headers)
                both = sorted(set(origin.source.split(",")) & set(other.source.split(",")))
                if both and other.selector == origin.selector:
                    raise ConfigurationError(
                        f"the query reads {both[0]} with two sources, {self._end.id} and {name.split('.')[3]}, as in "
                        f"a join of a stream with itself: each message would be in one of them only. Join each batch "
                        f"with itself in foreachBatch. Run `truenext spark abandon` for each of the two: it returns "
                        f"their rows"
                    )

    def _give(self, head: BundleHead, rows: pa.RecordBatch) -> pa.RecordBatch:
        self._given = head.bundle + 1
        self._rows_left -= head.rows
        self._bytes_left -= head.bytes
        self.is_done = head.is_last
        return rows

    def _stored_bundles(self, broker: BrokerConnection) -> Iterator[tuple[BundleHead, bytes]]:
        """Yield the stored bundles of this batch that Spark has not got yet, in their order.

        Raises: Superseded if a bundle is missing
        """
        expected = self._given
        selector = f"spark_batch = {self._end.batch} AND spark_bundle >= {expected}"
        early: dict[int, tuple[BundleHead, bytes]] = {}
        """Bundles that have arrived before a bundle with a lower number. The bundle with the lower number comes later
        if an operator has rejected one of its rows, because it was then sent again."""
        for frame in broker.browse(self._queue, selector):
            head = parse_bundle_head(frame.headers)
            early[head.bundle] = (head, frame.body)
            while expected in early:
                yield early.pop(expected)
                expected += 1
        if early:
            raise Superseded(
                f"batch {self._end.batch} lacks bundle {expected} of {self._queue}: another run of this query has "
                f"cleared it; run only one at a time"
            )

    # ---- New bundles ----

    def _take(self, broker: BrokerConnection) -> Iterator[pa.RecordBatch]:
        # Another queue is the first in each task and batch, so that small batches read all of them.
        pull = _Pull(broker, self._plan.options, self._rows_left, self._end.batch + self._plan.partition)
        rows = pull.next_rows(self._bytes_left)
        while not self.is_done:
            batch = rows.record_batch()
            is_last = pull.is_exhausted or rows.bytes >= self._bytes_left or len(rows) >= self._rows_left
            task_rows = self._rows_max - self._rows_left + len(rows)
            head = BundleHead(self._end.batch, self._given, len(rows), rows.bytes, is_last, task_rows)
            answer = self._write(broker, head, batch, rows.last_acks)
            # The next messages arrive while the broker writes this bundle.
            ahead = None if is_last else pull.next_rows(self._bytes_left - rows.bytes)
            if broker.wait(answer).headers.get("truenext-repeat") == "true":
                self._repeated = head.bundle
                raise _Repeated
            yield self._give(head, batch)
            if ahead is not None:
                rows = ahead

    def _write(
        self, broker: BrokerConnection, head: BundleHead, batch: pa.RecordBatch, last_acks: Mapping[str, str]
    ) -> Answer:
        """Send the transaction that acknowledges the rows and stores them as a bundle. Return the Answer, which is
        still to come."""
        plan, transaction = self._plan, {"transaction": "bundle"}
        # No outcome counts an attempt for a message.
        broker.post("BEGIN", {**transaction, "truenext-count-attempts": "nacked"})
        for last_ack in last_acks.values():
            broker.post("ACK", {"id": last_ack, **transaction})
        headers = bundle_headers(head, plan.origin)
        broker.post(
            "SEND",
            {"destination": self._queue, "persistent": "true", **transaction, **headers},
            encode_bundle(batch),
        )
        return broker.start_call(
            "COMMIT",
            {
                **transaction,
                "truenext-producer": self._end.producer(plan.partition),
                "truenext-number": str(self._end.number(head.bundle)),
            },
        )


class _Pull:
    """Puller of a task's messages, about one bundle in advance, by requests that do not wait. The requests go to the
    queues that are not empty, one after the other."""

    def __init__(self, broker: BrokerConnection, options: SourceOptions, rows_max: int, first: int) -> None:
        """Subscribe to all queues. `rows_max` messages may be requested. `first` is the number of the first queue,
        modulo the number of queues."""
        self._broker = broker
        self._unrequested = rows_max
        """Number of messages that may still be requested."""
        self._requested = 0
        self._request_count = 0
        self._ahead = _AHEAD_FIRST
        self._last_requests = {f"rows{number}": "" for number in range(len(options.destinations))}
        """Correlation id of the last request of each subscription. There is one subscription for each queue or
        pattern."""
        self._subscriptions = tuple(self._last_requests)
        for subscription, destination in zip(self._subscriptions, options.destinations, strict=True):
            broker.subscribe_to_pull(subscription, destination, "client", options.selector)
        self._in_turn = deque(self._subscriptions)
        """Subscriptions whose queues are not known to be empty, in the order of their next requests."""
        self._in_turn.rotate(-first)

    @property
    def is_exhausted(self) -> bool:
        """True if no more messages come: none was ready, or the task has received all that it may request."""
        return self._requested == 0 and not (self._unrequested and self._in_turn)

    def next_rows(self, bytes_max: int) -> BundleRows:
        """Return the messages for one bundle: up to `bytes_max` bytes, or fewer if no more messages are ready.

        Raises: TooLargeForBundle if a body is too large; Refused if the broker refuses a request; ConnectionLost if the
        connection is lost
        """
        rows = BundleRows()
        while not rows.is_full and rows.bytes < bytes_max and not self.is_exhausted:
            if self._requested <= self._ahead // 2 and self._unrequested and self._in_turn:
                self._request(min(self._ahead, self._unrequested))
            frame = self._broker.next_message(self._subscriptions, ANSWER_SECONDS)
            if frame is None:
                continue
            if "truenext-unused" in frame.headers:
                self._on_unused(frame.headers)
                continue
            if not rows.add(frame):
                self._broker.put_back(frame)
                break
            self._requested -= 1
        if rows:
            self._ahead = max(1, min(BUNDLE_ROWS, BUNDLE_BYTES // max(1, rows.bytes // len(rows))))
        return rows

    def _request(self, count: int) -> None:
        self._request_count += 1
        self._requested += count
        self._unrequested -= count
        subscription = self._in_turn[0]
        self._in_turn.rotate(-1)
        self._last_requests[subscription] = str(self._request_count)
        self._broker.pull(subscription, count, correlation=str(self._request_count))
        self._broker.flush()

    def _on_unused(self, headers: dict[str, str]) -> None:
        """Handle the broker's notice that a request has ended with messages missing. Later requests may still bring
        messages."""
        unused = int(headers["truenext-unused"])
        self._requested -= unused
        self._unrequested += unused
        subscription = headers["subscription"]
        if headers.get("correlation-id") == self._last_requests[subscription]:
            self._in_turn.remove(subscription)
