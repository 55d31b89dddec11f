"""Source in Spark's driver: asks the broker whether a message is ready, and clears batches that are done."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from truenext.clock import monotonic
from truenext.errors import ConnectionLost, Refused, TruenextError
from truenext.model.spark_queues import parse_bundle_head
from truenext.spark.broker.connection import ANSWER_SECONDS, BrokerConnection
from truenext.spark.broker.latest import purge
from truenext.spark.broker.patience import Patience
from truenext.spark.source.admin import list_queries
from truenext.spark.source.mark import mark_producer, read_mark, replace_mark
from truenext.spark.source.offset import Offset
from truenext.spark.source.options import SourceOptions
from truenext.spark.source.task import Superseded, check_store
from truenext.wire.stomp.frame import Frame

_log = logging.getLogger(__name__)

READY_SECONDS = 0.5
"""Seconds for which a probe waits for a message. So an idle query asks the broker twice a second."""

RETURN_SECONDS = 30.0
"""Longest time in seconds until the broker notices a connection without heart-beats, and requeues its messages."""

T = TypeVar("T")


class SourceDriver:
    """Part of a source that runs in Spark's driver, for one run of a query. It plans batches, and clears batches that
    are done."""

    def __init__(self, options: SourceOptions, connect: Callable[[], BrokerConnection]) -> None:
        self._options = options
        self._connect = connect
        self._broker: BrokerConnection | None = None
        self._has_warned = False
        self._probe_count = 0
        """Number of probes on this connection. Each probe ends with a release, so this number is also the connection's
        release count for the next probe."""
        self._probes = tuple(f"probe{number}" for number in range(len(options.queues)))
        """Names of the probe's subscriptions, one for each queue."""
        self._delayed_until = 0.0
        """Time until which the next batch waits for `rows_min` messages."""
        self.waited_ms: int | None = None
        """Longest time in milliseconds for which a message found by the last probe had waited; None if no message was
        ready."""

    def close(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.__exit__(None)

    def next_end(self, start: Offset | None, rows: int | None, *, waits: bool) -> Offset | None:
        """Return the end of the next batch; None if no message is ready. The batch has at most `rows` rows; if `rows`
        is None, one for each waiting message. With `waits` the call waits at most READY_SECONDS for a message, and
        returns None while fewer than `rows_min` messages wait and `delay_max_s` is not over.

        The batch that ends with `start` is done. Its bundles are cleared first, even if `rows` is 0.

        Raises: Superseded if the checkpoint is outdated; TruenextError if the broker refuses a request or stays
        unavailable
        """
        return self._patiently(lambda broker: self._next_end(broker, start, rows, waits=waits))

    def rows_read(self, end: Offset) -> int:
        """Return the number of rows in a batch that is not cleared. A task that was not read to its end counts with its
        whole share.

        Raises: TruenextError if the broker refuses a request or stays unavailable
        """
        return self._patiently(lambda broker: self._rows_read(broker, end))

    def check_not_cleared(self, end: Offset) -> None:
        """Check that the broker still has the bundles of this batch.

        Raises: Superseded if they are cleared already; TruenextError if the broker refuses a request or stays
        unavailable
        """
        self._patiently(lambda broker: self._check_not_cleared(broker, end))

    def waiting_count(self) -> int:
        """Return the number of waiting messages in all queues of the source. The selector is not applied.

        Raises: TruenextError if the broker refuses a request or stays unavailable
        """
        return self._patiently(self._waiting_count)

    def waiting_count_now(self) -> int | None:
        """Return the number of waiting messages as `waiting_count` does; None if the broker cannot be asked now."""
        try:
            return self._once(self._waiting_count)
        except (ConnectionLost, Refused):
            return None

    def _patiently(self, action: Callable[[BrokerConnection], T]) -> T:
        patience = Patience(self._options.patience_s)
        while True:
            try:
                return self._once(action)
            except TruenextError as error:
                patience.wait(error)

    def _once(self, action: Callable[[BrokerConnection], T]) -> T:
        """Call `action` with the connection, after connecting if there is none. If the action fails, drop the
        connection."""
        if self._broker is None:
            self._broker = self._connect()
            self._probe_count = 0
        try:
            return action(self._broker)
        except TruenextError:
            self._broker.close()
            self._broker = None
            raise

    def _next_end(
        self, broker: BrokerConnection, start: Offset | None, rows: int | None, *, waits: bool
    ) -> Offset | None:
        if start is None and not self._has_warned:
            self._has_warned = True
            self._warn_of_others(broker)
        if start is not None:
            self._clear(broker, start)
        if rows == 0 and start is not None:
            return None
        options = self._options
        if (
            waits
            and rows is not None
            and monotonic() < self._delayed_until
            and self._waiting_count(broker) < options.rows_min
        ):
            time.sleep(READY_SECONDS)
            return None
        # The first probe also creates the queue of a virtual topic, which gets copies only from then on.
        is_ready = self._is_ready(broker, waits=waits)
        if options.rows_min:
            # Even if no message is ready, as in Spark's source for Kafka.
            self._delayed_until = monotonic() + options.delay_max_s
        if not is_ready or rows == 0:
            return None
        return Offset(
            store=broker.store_id,
            queue=options.queue,
            space=options.space if start is None else start.space,
            id=secrets.token_hex(8) if start is None else start.id,
            batch=1 if start is None else start.batch + 1,
            partitions=options.partitions,
            rows=max(1, self._waiting_count(broker)) if rows is None else rows,
            bytes=options.bytes_max if rows is not None else 1 << 60,
        )

    # ---- Probes for ready messages ----

    def _is_ready(self, broker: BrokerConnection, *, waits: bool) -> bool:
        """Return whether a message is ready: pull one message from each queue, and release them. This counts a delivery
        for each message, but no attempt."""
        options = self._options
        if not self._probe_count:
            for probe, destination in zip(self._probes, options.destinations, strict=True):
                broker.subscribe_to_pull(probe, destination, "client-individual", options.selector)
        round_ = str(self._probe_count)
        self._probe_count += 1
        for probe in self._probes:
            broker.pull(probe, 1, waits=waits, correlation=round_)
        answers: dict[str, Frame] = {}
        for frame in self._probe_answers(broker, round_, READY_SECONDS if waits else ANSWER_SECONDS):
            answers[frame.headers["subscription"]] = frame
            if waits or len(answers) == len(self._probes):
                break
        if waits and (unanswered := [probe for probe in self._probes if probe not in answers]):
            # Withdraws the open requests. No message follows the broker's answer to this.
            for probe in unanswered:
                broker.pull(probe, 0, correlation=round_)
            for frame in self._probe_answers(broker, round_, ANSWER_SECONDS):
                answers.setdefault(frame.headers["subscription"], frame)
                if len(answers) == len(self._probes):
                    break
        if len(answers) < len(self._probes):
            raise ConnectionLost(f"the broker {broker.url} does not answer within {ANSWER_SECONDS:g} seconds")
        # Suspended, so that the driver owns no group.
        body = json.dumps({"subscriptions": self._probes, "suspend": True}).encode()
        broker.call("SEND", {"destination": "/control/release"}, body)
        messages = [frame for frame in answers.values() if "truenext-unused" not in frame.headers]
        arrived_ms = min((int(frame.headers["timestamp"]) for frame in messages), default=None)
        self.waited_ms = None if arrived_ms is None else max(0, round(time.time() * 1000) - arrived_ms)
        return bool(messages)

    def _probe_answers(self, broker: BrokerConnection, round_: str, seconds: float) -> Iterator[Frame]:
        """Yield the answers to the probes with the number `round_` that arrive within `seconds`. An answer is a
        message, or the notice that none is ready. Answers to earlier probes are skipped."""
        deadline = monotonic() + seconds
        while (frame := broker.next_message(self._probes, deadline - monotonic())) is not None:
            answered_round = frame.headers.get(
                "correlation-id" if "truenext-unused" in frame.headers else "truenext-round"
            )
            if answered_round == round_:
                yield frame

    def _warn_of_others(self, broker: BrokerConnection) -> None:
        """Log a warning for each other query that has rows of this query's queues and has not cleared them. Such a
        query may be a predecessor of this one."""
        for query in list_queries(broker, self._options.space, with_rows=False):
            if not query.is_abandoned and set(query.source.split(",")) & set(self._options.queues):
                _log.warning(
                    "another query still has rows of this queue: if that query is not used any more, "
                    "`truenext spark abandon` returns the rows",
                    extra={"query": query.id, "queue": query.source},
                )

    def _waiting_count(self, broker: BrokerConnection) -> int:
        queues: list[dict[str, Any]] = broker.ask("queues")
        return sum(each["waiting"] for each in queues if self._options.is_of(each["name"]))

    @staticmethod
    def _rows_read(broker: BrokerConnection, end: Offset) -> int:
        rows = 0
        selector = f"spark_batch = {end.batch} AND spark_last = 'true'"
        for partition in range(end.partitions):
            last = list(broker.browse(f"/queue/{end.bundle_queue(partition)}", selector))
            rows += parse_bundle_head(last[0].headers).task_rows if last else end.share(partition)[0]
        return rows

    # ---- The mark, and clearing of batches ----

    def _check_not_cleared(self, broker: BrokerConnection, end: Offset) -> None:
        mark = self._read_mark(broker, end)
        if mark >= end.batch:
            raise _older_checkpoint(end, mark)

    def _clear(self, broker: BrokerConnection, done: Offset) -> None:
        """Mark this batch as done, and remove its bundles. The call may be repeated."""
        mark = self._read_mark(broker, done)
        if mark > done.batch:
            raise _older_checkpoint(done, mark)
        if mark < done.batch:
            replace_mark(broker, done.mark_queue, done.batch, mark_producer(done.id), done.batch)
        for partition in range(done.partitions):
            purge(broker, done.bundle_queue(partition), f"spark_batch <= {done.batch}")

    def _read_mark(self, broker: BrokerConnection, offset: Offset) -> int:
        """Return the number of the last batch of the query that is done. By Spark's checkpoint, this is the batch
        before `offset`, or a later one.

        Raises: Superseded if the offset belongs to another queue or broker, or to a state that this broker has lost
        """
        check_store(broker, offset)
        if offset.queue != self._options.queue:
            raise Superseded(
                f"the checkpoint belongs to the queue {offset.queue}, and option queue is {self._options.queue}: use "
                f"another checkpoint for another queue"
            )
        deadline = monotonic() + RETURN_SECONDS
        while (mark := read_mark(broker, offset.mark_queue)) < offset.batch - 1:
            # A dead driver may still hold the mark in a transaction.
            if monotonic() >= deadline:
                raise Superseded(
                    f"the broker knows this query up to batch {mark}, and the checkpoint is at batch {offset.batch}: "
                    f"the query was forgotten, or the broker restored from an older copy, so that rows may be lost or "
                    f"come twice; start the query with a new checkpoint"
                )
            time.sleep(0.5)
        return mark


def _older_checkpoint(offset: Offset, mark: int) -> Superseded:
    return Superseded(
        f"batch {offset.batch} of this query was cleared, like all up to {mark}: the checkpoint is older than the "
        f"query's progress, or two runs use it. Start the query with the newest checkpoint, or with a new one"
    )
