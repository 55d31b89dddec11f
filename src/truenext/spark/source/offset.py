"""Offset of a query: the number of its last batch, and the limits of this batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from truenext.errors import ConfigurationError
from truenext.model.spark_queues import mark_queue

OFFSET_VERSION = 1
START: dict[str, Any] = {"v": OFFSET_VERSION, "batch": 0}
"""Offset before the first batch. This is a constant, because Spark asks for the first offset more than once."""

BUNDLE_BITS = 20
"""Number of bits of a producer number that hold the number of a bundle."""


@dataclass(frozen=True, kw_only=True)
class Offset:
    """End of a batch, as Spark stores it in its checkpoint. The tasks of the batch decide which messages belong to it,
    and store these messages as bundles."""

    store: str
    """Id of the broker's store, from CONNECTED."""
    queue: str
    space: str
    id: str
    """Random id in the names of the query's queues. The first batch makes this id."""
    batch: int
    """Number of the batch, from 1."""
    partitions: int
    rows: int
    """Largest number of rows in the batch, over all partitions."""
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {"v": OFFSET_VERSION, **asdict(self)}

    @property
    def mark_queue(self) -> str:
        return mark_queue(self.space, self.id)

    def bundle_queue(self, partition: int) -> str:
        return f"{self.mark_queue}.{partition}"

    def producer(self, partition: int) -> str:
        """Return the producer name of a task. By this name the broker recognizes a repeated COMMIT."""
        return task_producer(self.id, partition)

    def number(self, bundle: int) -> int:
        """Return the producer number for the COMMIT of a bundle. Bundles are counted from 0, and the number rises from
        batch to batch.

        Raises: OverflowError if a task has made too many bundles
        """
        if bundle >> BUNDLE_BITS:
            raise OverflowError(f"a task has made {bundle} bundles in one batch: lower maxRowsPerTrigger")
        return self.batch << BUNDLE_BITS | bundle

    def share(self, partition: int) -> tuple[int, int]:
        """Return the largest numbers of rows and bytes for one task. The rows of all tasks add up to those of the
        batch."""
        rows = self.rows // self.partitions + (partition < self.rows % self.partitions)
        return rows, max(1, self.bytes // self.partitions)


def task_producer(query_id: str, partition: int) -> str:
    return f"spark/{query_id}/{partition}"


def parse_offset(found: dict[str, Any]) -> Offset | None:
    """Parse an offset of the checkpoint. An offset None means that the query has no batch yet.

    Raises: ConfigurationError if another version of truenext wrote it
    """
    if found.get("v") != OFFSET_VERSION:
        raise ConfigurationError(
            f"the checkpoint has offsets of version {found.get('v')!r}, and this truenext reads version "
            f"{OFFSET_VERSION}: run the query with the truenext that wrote it, or with a new checkpoint"
        )
    if not found.get("batch"):
        return None
    return Offset(**{name: value for name, value in found.items() if name != "v"})
