"""Queues in which Spark's queries keep their progress, and what their messages say, as far as it can be told without
Spark.

    Spark.source.SPACE.ID               mark: which batch of a reading query is done
    Spark.source.SPACE.ID.PARTITION     bundles: rows of a batch under way
    Spark.sink.SPACE.ID                 decision: which drafts are the output of a batch
    Spark.sink.SPACE.ID.PARTITION       drafts: rows that are not published yet, in bundles

Only headers and small bodies are read here. The rows themselves are Arrow data (`spark/source/bundle.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from truenext.errors import RemoteProtocolError
from truenext.model.destination import SPARK_PREFIX

SOURCE_PREFIX = f"{SPARK_PREFIX}source."
"""Prefix of the names of queues with marks and bundles. Space, id and partition follow it."""

SINK_PREFIX = f"{SPARK_PREFIX}sink."
"""Prefix of the names of queues with decisions and drafts. Space, id and partition follow it."""

BUNDLE_FORMAT = 1

Latest = dict[str, Any]
"""Content of the message that records a query's progress. One of its fields is always `batch`, the number of a batch of
the query; this number never falls."""

CLOSED_BATCH = (1 << 43) - 1
"""Number of the batch of an abandoned query. It is higher than the number of any real batch."""


def queues_by_query(queues: Iterable[Mapping[str, Any]], prefix: str) -> dict[tuple[str, str], list[str]]:
    """Return for each query, by its space and id, its queues `prefix`SPACE.ID.PARTITION that have messages. The list is
    empty if only the queue `prefix`SPACE.ID exists. `queues` are reports of the control request `queues`."""
    found: dict[tuple[str, str], list[str]] = {}
    for queue in queues:
        name = queue["name"]
        words = name.removeprefix(prefix).split(".")
        if name.startswith(prefix) and len(words) in (2, 3):
            of_query = found.setdefault((words[0], words[1]), [])
            if len(words) == 3 and queue["waiting"]:
                of_query.append(name)
    return dict(sorted(found.items()))


def parse_latest(bodies: Iterable[bytes]) -> Latest | None:
    """Return the content with the highest batch, of the messages in a query's own queue; None if there is none."""
    return max((json.loads(body) for body in bodies), key=lambda latest: latest["batch"], default=None)


# ---- Queries that read ----


def mark_queue(space: str, query_id: str) -> str:
    return f"{SOURCE_PREFIX}{space}.{query_id}"


class BundleHead(NamedTuple):
    """Headers of a bundle: its position in its batch, and the number and size of its rows."""

    batch: int
    bundle: int
    """Number of the bundle within its task and batch, from 0."""
    rows: int
    bytes: int
    is_last: bool
    """True if the task takes no more messages in this batch."""
    task_rows: int
    """Number of rows of the task so far, this bundle included."""


_NUMBERS = ("batch", "bundle", "rows", "bytes", "task_rows")


class BundleOrigin(NamedTuple):
    """Headers of a bundle: the query that has taken its rows, and from which queues."""

    source: str
    """Queues and patterns of the source, separated by commas."""
    selector: str
    """Selector of the source; empty if it has none."""
    query: str
    """Spark's id of the query. From this id and `query_batch` an operator can find out whether a sink has published the
    rows."""
    query_batch: str


def bundle_headers(head: BundleHead, origin: BundleOrigin) -> dict[str, str]:
    # Selectors cannot name headers with hyphens.
    values = {"format": BUNDLE_FORMAT, **head._asdict(), **origin._asdict()}
    values["last"] = "true" if values.pop("is_last") else "false"
    return {f"spark_{name}": str(value) for name, value in values.items()}


def parse_bundle_origin(headers: Mapping[str, str]) -> BundleOrigin:
    # Bundles of earlier versions do not name their selector.
    return BundleOrigin(*(headers.get(f"spark_{name}", "") for name in BundleOrigin._fields))


def parse_bundle_head(headers: Mapping[str, str]) -> BundleHead:
    """Parse the headers of a bundle: its position in its batch, and the number and size of its rows.

    Raises: RemoteProtocolError if the message is not a bundle, or has an unknown format
    """
    try:
        if int(headers["spark_format"]) != BUNDLE_FORMAT:
            raise RemoteProtocolError(
                f"a bundle has format {headers['spark_format']}, and this truenext reads {BUNDLE_FORMAT}: run the "
                f"query with the truenext that wrote it until its batch is done"
            )
        batch, bundle, rows, size, task_rows = (int(headers[f"spark_{name}"]) for name in _NUMBERS)
        return BundleHead(batch, bundle, rows, size, headers["spark_last"] == "true", task_rows)
    except (KeyError, ValueError) as error:
        raise RemoteProtocolError(
            f"a message in a queue of the source is not a bundle ({error!r}): no other client may send there"
        ) from error


@dataclass
class QueryStatus:
    """State, in the broker, of one query that reads queues."""

    space: str
    id: str
    source: str = ""
    """Queues or patterns that the query reads; empty if it has no bundle."""
    batch: int = 0
    """Number of the last batch that is done or has a bundle."""
    rows: int = 0
    """Number of rows in bundles that are not cleared."""
    bytes: int = 0
    since_ms: int = 0
    """Time of the first bundle that is not cleared, in milliseconds since the epoch; 0 if there is none."""
    is_abandoned: bool = False
    bundle_queues: list[str] = field(default_factory=list)

    def add_mark(self, mark: int) -> None:
        """Set the batch from the mark: the last batch that is done, or CLOSED_BATCH."""
        self.is_abandoned = mark == CLOSED_BATCH
        self.batch = 0 if self.is_abandoned else mark

    def add_bundle(self, headers: Mapping[str, str]) -> None:
        """Count a bundle, by its headers. Raises: RemoteProtocolError if the message is not a bundle"""
        head = parse_bundle_head(headers)
        self.source = parse_bundle_origin(headers).source
        self.batch = max(self.batch, head.batch)
        self.rows += head.rows
        self.bytes += head.bytes
        self.since_ms = _earlier(self.since_ms, headers)


# ---- Queries that write ----


@dataclass(frozen=True)
class Draft:
    """Confirmed bundles of one partition. These bundles carry the name of this draft, and a bundle number below
    `bundles`."""

    partition: int
    name: str
    bundles: int
    rows: int


@dataclass(frozen=True)
class Decision:
    """Content of a decision: the drafts that are the output of one batch."""

    batch: int
    """Number of the batch. CLOSED_BATCH for an abandoned query, which publishes nothing more."""
    drafts: tuple[Draft, ...] = ()
    last_batch: int = -1
    """For a closed query: its last published batch; -1 if there is none."""
    store: str = ""
    """Identity of the broker where the decision was made (`truenext-store`); empty if an earlier version made it."""

    @property
    def is_closed(self) -> bool:
        return self.batch == CLOSED_BATCH

    @property
    def published_batch(self) -> int:
        """Number of the last batch whose output counts; -1 if there is none."""
        return self.last_batch if self.is_closed else self.batch


@dataclass(frozen=True)
class SinkQueues:
    """Names of the queues in the broker that the sink of one query uses."""

    space: str
    id: str
    """Spark's id of the query. For a batch write it is txnAppId, or a random word."""

    @property
    def decisions(self) -> str:
        return f"{SINK_PREFIX}{self.space}.{self.id}"

    def drafts(self, partition: int) -> str:
        return f"{self.decisions}.{partition}"

    @property
    def producer(self) -> str:
        return f"spark/{self.space}/{self.id}"


def parse_decision(latest: Latest) -> Decision:
    drafts = tuple(Draft(*draft) for draft in latest.get("drafts", ()))
    return Decision(latest["batch"], drafts, latest.get("last", -1), latest.get("store", ""))


@dataclass
class SinkStatus:
    """Decision and drafts of one sink, which belongs to a query or to a batch write."""

    queues: SinkQueues
    decision: Decision | None = None
    rows: int = 0
    """Number of rows that are decided, and not published yet."""
    bytes: int = 0
    """Bytes of all drafts, whether or not they are decided."""
    since_ms: int = 0
    """Time at which the first draft was sent, in milliseconds since the epoch; 0 if there are no drafts."""
    draft_queues: list[str] = field(default_factory=list)

    def add_draft(self, headers: Mapping[str, str], size: int) -> None:
        """Count a bundle of a draft, by its headers and the size of its body. `decision` must be set before."""
        drafts = self.decision.drafts if self.decision else ()
        bundles = next((each.bundles for each in drafts if each.name == headers["spark_draft"]), 0)
        if int(headers["spark_bundle"]) < bundles:
            self.rows += int(headers["spark_rows"])
        self.bytes += size
        self.since_ms = _earlier(self.since_ms, headers)


def _earlier(since_ms: int, headers: Mapping[str, str]) -> int:
    """Return the earlier time of `since_ms`, unless it is 0, and the message."""
    written_ms = int(headers["timestamp"])
    return min(since_ms or written_ms, written_ms)
