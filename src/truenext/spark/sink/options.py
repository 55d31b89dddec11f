"""Options of a sink of Spark: parses and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from truenext.errors import ConfigurationError, RemoteProtocolError
from truenext.model.destination import SPARK_PREFIX, DestinationKind, parse_address
from truenext.model.spark_queues import CLOSED_BATCH
from truenext.spark.broker.options import CREDENTIAL_NAMES, GivenOptions, QueryOptions

_NAMES = ("url", *CREDENTIAL_NAMES, "queue", "space", "patience")
_BATCH_NAMES = ("txnAppId", "txnVersion")
_NAMES_OF_SPARK = ("checkpointLocation", "queryName")
"""Options of a streaming query that Spark also passes to its sink."""


@dataclass(frozen=True, kw_only=True)
class SinkOptions(QueryOptions):
    destination: str | None = None
    """Address for all rows. None if the column `queue` has the address of each row."""
    app: str | None = None
    """Name of a batch job. All runs of the job use the same name."""
    version: int = 0
    """Number of the batch job's output. A run with new output has a higher number."""


def parse_options(options: Mapping[str, str], *, is_streaming: bool) -> SinkOptions:
    """Parse the options of `format("truenext")`. Names of options are case-insensitive.

    Raises: ConfigurationError if an option is invalid; its text names the option and its valid values
    """
    names = (*_NAMES, *(_NAMES_OF_SPARK if is_streaming else _BATCH_NAMES))
    given = GivenOptions(options, names)
    given.require("url")
    queue = (given.get("queue") or "").strip()
    try:
        destination = sink_destination(queue) if queue else None
    except ValueError as error:
        raise ConfigurationError(f"option queue: {error}") from error
    if not is_streaming and (given.get("txnAppId") is None) != (given.get("txnVersion") is None):
        raise ConfigurationError(
            "options txnAppId and txnVersion must be set together: a name of the job, and a number that is higher each "
            "time the job has new rows to write"
        )
    return SinkOptions(
        **given.of_query(),
        destination=destination,
        app=None if is_streaming else given.word("txnAppId"),
        version=0 if is_streaming else given.number("txnVersion", 0, CLOSED_BATCH - 1, 0),
    )


@lru_cache(maxsize=1000)
def sink_destination(text: str) -> str:
    """Return the address of a queue, of a topic, or of several destinations separated by commas.

    Raises: ValueError if a Spark job may not send there
    """
    try:
        parts = [parse_address(part.strip(), "") for part in text.split(",")]
        address = ",".join(part.address for part in parts)
        for part in parts:
            if part.kind not in (DestinationKind.QUEUE, DestinationKind.TOPIC) or part.session:
                raise ValueError(f"{text} is neither a queue nor a topic")
            if part.kind is DestinationKind.QUEUE and part.name.startswith(SPARK_PREFIX):
                raise ValueError(f"{text}: queues {SPARK_PREFIX}* are reserved for sources and sinks")
        # There may be too many.
        parse_address(address, "")
    except RemoteProtocolError as error:
        raise ValueError(str(error)) from error
    return address
