"""Options of a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from truenext.client.core.credentials import NO_CREDENTIALS, Credentials
from truenext.errors import ConfigurationError, RemoteProtocolError
from truenext.model.destination import DEAD_LETTER_PREFIX, SPARK_PREFIX, DestinationKind, parse_address, virtual_topic
from truenext.model.pattern import is_pattern, matches
from truenext.model.url import Address
from truenext.spark.broker.options import CREDENTIAL_NAMES, DEFAULT_PATIENCE_S, DEFAULT_SPACE, GivenOptions

PARTITIONS_MAX = 64


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    addresses: tuple[Address, ...]
    credentials: Credentials = NO_CREDENTIALS
    queue: str
    """Name of a queue or pattern, without `/queue/`."""
    selector: str | None = None
    partitions: int = 2
    """Number of tasks in a batch, each with a share of the rows."""
    rows_max: int = 100_000
    """Limit of rows in a batch."""
    bytes_max: int = 256 * 1024 * 1024
    """Limit of body bytes in a batch; each task may exceed its share by one message."""
    has_text_body: bool = False
    """Bodies are decoded as UTF-8; null where that fails."""
    has_headers: bool = True
    space: str = DEFAULT_SPACE
    """A word in the names of the source's own queues."""
    patience_s: float = DEFAULT_PATIENCE_S
    """Seconds without a broker, or without free disk space in it, after which a task or the driver fails."""

    @property
    def destination(self) -> str:
        return f"/queue/{self.queue}"

    def is_of(self, queue: str) -> bool:
        """Whether the source reads this queue."""
        pattern, words = self.queue.split("."), queue.split(".")
        if not is_pattern(self.queue):
            return queue == self.queue
        # docs/contract.md, "Wildcards": these are meant only by a pattern that begins with the same word.
        if is_pattern(pattern[0]) and (queue.startswith((DEAD_LETTER_PREFIX, SPARK_PREFIX)) or virtual_topic(queue)):
            return False
        return "," not in queue and matches(pattern, words)


def parse_options(options: Mapping[str, str]) -> SourceOptions:
    """Parse the options of `format("truenext")`; names in any case.

    Raises: ConfigurationError that names the option and its valid values
    """
    given = GivenOptions(options, _NAMES)
    given.require("url", "queue")
    return SourceOptions(
        addresses=given.addresses(),
        credentials=given.credentials(),
        queue=_queue(given.get("queue") or ""),
        selector=(given.get("selector") or "").strip() or None,
        partitions=given.number("partitions", 1, PARTITIONS_MAX, SourceOptions.partitions),
        rows_max=given.number("maxRowsPerTrigger", 1, 1 << 40, SourceOptions.rows_max),
        bytes_max=given.number("maxBytesPerTrigger", 1, 1 << 50, SourceOptions.bytes_max),
        has_text_body=given.choice("body", ("binary", "string")) == "string",
        has_headers=given.choice("headers", ("true", "false")) == "true",
        space=given.word("space") or DEFAULT_SPACE,
        patience_s=given.patience_s(),
    )


_NAMES = (
    *("url", *CREDENTIAL_NAMES, "queue", "selector", "partitions", "maxRowsPerTrigger", "maxBytesPerTrigger"),
    *("body", "headers", "space", "patience"),
)


def _queue(text: str) -> str:
    text = text.strip()
    try:
        destination = parse_address(text, "")
    except RemoteProtocolError as error:
        raise ConfigurationError(f"option queue: {error}") from error
    if destination.kind in (DestinationKind.TOPIC, DestinationKind.TOPIC_PATTERN):
        topic = destination.name.removeprefix("VirtualTopic.")
        raise ConfigurationError(
            f"option queue: {text} is a topic, which stores no messages. Send to the topic VirtualTopic.{topic}, and "
            f"read the queue Consumer.NAME.VirtualTopic.{topic}, with a NAME of your own"
        )
    if destination.kind not in (DestinationKind.QUEUE, DestinationKind.QUEUE_PATTERN):
        raise ConfigurationError(f"option queue: {text} is neither a queue nor a pattern of queues")
    if destination.name.startswith(SPARK_PREFIX):
        raise ConfigurationError(
            f"option queue: {text} is reserved for sources and sinks: name a queue of an application"
        )
    return destination.name
