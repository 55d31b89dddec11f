"""Drafts: the unpublished rows of one task, as bundles in a queue of its partition. A draft has a random name, and ends
with its connection. After a lost connection, unconfirmed bundles may be in the queue or not. So the task sends the
unconfirmed bundles again in a new draft, and those of the old draft are never published.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pyspark.sql.datasource import WriterCommitMessage

from truenext.errors import TruenextError
from truenext.model.spark_queues import Draft, SinkQueues
from truenext.spark.broker.connection import Answer, BrokerConnection
from truenext.spark.broker.patience import Patience
from truenext.spark.sink.rows import SinkBundle

DRAFT_FORMAT = 1
_UNCONFIRMED_MAX = 2
"""Largest number of bundles that are sent and not confirmed. The broker writes one bundle while the task makes the next
one."""


@dataclass
class WrittenDrafts(WriterCommitMessage):
    """Message from a task to the driver: the drafts that the task has written. A task without rows sends this message,
    too."""

    id: str
    """Id of the query or batch write (`SinkQueues.id`)."""
    drafts: tuple[Draft, ...]


def write_drafts(
    bundles: Iterator[SinkBundle],
    queues: SinkQueues,
    batch: int,
    partition: int,
    connect: Callable[[], BrokerConnection],
    patience: Patience,
) -> WrittenDrafts:
    """Send the bundles, and return their drafts once all are durable. After a lost connection the task connects again.

    Raises: UnsendableRow if a row cannot become a message; TruenextError if the broker refuses a bundle or stays
    unavailable
    """
    writer = _DraftWriter(bundles, queues, batch, partition, patience)
    while writer.has_more:
        try:
            with connect() as broker:
                writer.write(broker)
        except TruenextError as error:
            patience.wait(error)
    return WrittenDrafts(queues.id, tuple(writer.drafts))


@dataclass(slots=True, eq=False)
class _DraftWriter:
    _bundles: Iterator[SinkBundle]
    _queues: SinkQueues
    _batch: int
    _partition: int
    _patience: Patience
    drafts: list[Draft] = field(default_factory=list)
    _unconfirmed: deque[SinkBundle] = field(default_factory=deque)

    @property
    def has_more(self) -> bool:
        if not self._unconfirmed:
            self._make_next()
        return bool(self._unconfirmed)

    def _make_next(self) -> SinkBundle | None:
        bundle = next(self._bundles, None)
        if bundle is not None:
            self._unconfirmed.append(bundle)
        return bundle

    def write(self, broker: BrokerConnection) -> None:
        """Send all unconfirmed and further bundles as a new draft."""
        draft = Draft(self._partition, secrets.token_hex(6), 0, 0)
        self.drafts.append(draft)
        answers: deque[Answer] = deque()
        again = deque(self._unconfirmed)
        number = 0
        while (bundle := again.popleft() if again else self._make_next()) is not None:
            answers.append(self._send(broker, draft.name, number, bundle))
            number += 1
            if len(answers) == _UNCONFIRMED_MAX:
                self._confirm(broker, answers)
        while answers:
            self._confirm(broker, answers)

    def _send(self, broker: BrokerConnection, name: str, number: int, bundle: SinkBundle) -> Answer:
        headers = {
            "destination": f"/queue/{self._queues.drafts(self._partition)}",
            "persistent": "true",
            # Selectors cannot name headers with hyphens.
            "spark_format": str(DRAFT_FORMAT),
            "spark_batch": str(self._batch),
            "spark_draft": name,
            "spark_bundle": str(number),
            "spark_rows": str(bundle.rows),
        }
        return broker.start_call("SEND", headers, bundle.frames)

    def _confirm(self, broker: BrokerConnection, answers: deque[Answer]) -> None:
        broker.wait(answers.popleft())
        rows = self._unconfirmed.popleft().rows
        draft = self.drafts[-1]
        self.drafts[-1] = Draft(draft.partition, draft.name, draft.bundles + 1, draft.rows + rows)
        self._patience.on_success()
