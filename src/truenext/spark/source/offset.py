"""How far a query is: the number of its last batch, and how much that batch may be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from truenext.errors import ConfigurationError
from truenext.model.destination import SPARK_PREFIX

OFFSET_VERSION = 1
START: dict[str, Any] = {"v": OFFSET_VERSION, "batch": 0}
"""Before the first batch: the same for every query, since Spark asks for it more than once."""

QUEUES_PREFIX = f"{SPARK_PREFIX}source."
"""How the names of the queues begin in which sources keep marks and bundles; then come space, id and partition."""

BUNDLE_BITS = 20
"""Of a producer's number: bundles of one task in one batch."""


@dataclass(frozen=True, kw_only=True)
class Offset:
    """The end of a batch. Which messages are in it is settled by its tasks, and kept by the broker as bundles."""

    store: str
    """The broker's store, as CONNECTED names it."""
    queue: str
    space: str
    id: str
    """Of the query's own queues, random; made with the first batch."""
    batch: int
    """1 is the first."""
    partitions: int
    rows: int
    """At most, over all partitions."""
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {"v": OFFSET_VERSION, **asdict(self)}

    @property
    def mark_queue(self) -> str:
        """Where the source keeps how far it has cleared its bundles."""
        return mark_queue(self.space, self.id)

    def bundle_queue(self, partition: int) -> str:
        return f"{self.mark_queue}.{partition}"

    def producer(self, partition: int) -> str:
        """By which the broker knows a repeated COMMIT of a task."""
        return task_producer(self.id, partition)

    def number(self, bundle: int) -> int:
        """Of the COMMIT of a bundle, the first is 0; rises from batch to batch.

        Raises: OverflowError if a task has made too many bundles
        """
        if bundle >> BUNDLE_BITS:
            raise OverflowError(f"a task has made {bundle} bundles in one batch: lower maxRowsPerTrigger")
        return self.batch << BUNDLE_BITS | bundle

    def share(self, partition: int) -> tuple[int, int]:
        """Rows and bytes at most of one task; together no more rows than the batch may have."""
        rows = self.rows // self.partitions + (partition < self.rows % self.partitions)
        return rows, max(1, self.bytes // self.partitions)


def mark_queue(space: str, query_id: str) -> str:
    return f"{QUEUES_PREFIX}{space}.{query_id}"


def task_producer(query_id: str, partition: int) -> str:
    return f"spark/{query_id}/{partition}"


def parse_offset(found: dict[str, Any]) -> Offset | None:
    """Read what the checkpoint says; None is the start.

    Raises: ConfigurationError if another version of truenext has written it
    """
    if found.get("v") != OFFSET_VERSION:
        raise ConfigurationError(
            f"the checkpoint has offsets of version {found.get('v')!r}, and this truenext reads version "
            f"{OFFSET_VERSION}: run the query with the truenext that wrote it, or with a new checkpoint"
        )
    if not found.get("batch"):
        return None
    return Offset(**{name: value for name, value in found.items() if name != "v"})
