"""Options of a source of Spark: parses and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from truenext.errors import ConfigurationError, RemoteProtocolError
from truenext.model.destination import DEAD_LETTER_PREFIX, SPARK_PREFIX, DestinationKind, parse_address, virtual_topic
from truenext.model.pattern import is_pattern, matches
from truenext.spark.broker.options import CREDENTIAL_NAMES, GivenOptions, QueryOptions

PARTITIONS_MAX = 64
DELAY_MAX_S = 900.0
"""Default of maxTriggerDelay, in seconds. Spark's source for Kafka has the same default."""


@dataclass(frozen=True, kw_only=True)
class SourceOptions(QueryOptions):
    queues: tuple[str, ...]
    """Names of queues, and patterns, without `/queue/`. The names are sorted, without duplicates."""
    selector: str | None = None
    partitions: int = 2
    """Number of tasks in a batch. Each task has a share of the rows."""
    rows_max: int = 100_000
    """Largest number of rows in a batch."""
    rows_min: int = 0
    """Number of waiting messages at which a batch begins. After `delay_max_s` a batch begins with fewer messages."""
    delay_max_s: float = DELAY_MAX_S
    """Seconds after the beginning of a batch after which the next batch begins even with fewer messages than
    `rows_min`."""
    bytes_max: int = 256 * 1024 * 1024
    """Largest number of body bytes in a batch. Each task may exceed its share by one message."""
    has_text_body: bool = False
    """True: bodies are decoded as UTF-8. A body that is not UTF-8 becomes null."""
    has_headers: bool = True

    @property
    def queue(self) -> str:
        """Queues and patterns as one text. The checkpoint and the bundles name the source by this text."""
        return ",".join(self.queues)

    @property
    def destinations(self) -> tuple[str, ...]:
        return tuple(f"/queue/{each}" for each in self.queues)

    def is_of(self, queue: str) -> bool:
        """Return whether the source reads this queue."""
        return any(_is_of(each, queue) for each in self.queues)


def _is_of(name: str, queue: str) -> bool:
    if not is_pattern(name):
        return queue == name
    pattern, words = name.split("."), queue.split(".")
    # docs/contract.md, "Wildcards": these are meant only by a pattern that begins with the same word.
    if is_pattern(pattern[0]) and (queue.startswith((DEAD_LETTER_PREFIX, SPARK_PREFIX)) or virtual_topic(queue)):
        return False
    return "," not in queue and matches(pattern, words)


def parse_options(options: Mapping[str, str]) -> SourceOptions:
    """Parse the options of `format("truenext")`. Names of options are case-insensitive.

    Raises: ConfigurationError if an option is invalid; its text names the option and its valid values
    """
    given = GivenOptions(options, _NAMES)
    given.require("url", "queue")
    found = SourceOptions(
        **given.of_query(),
        queues=_queues(given.get("queue") or ""),
        selector=(given.get("selector") or "").strip() or None,
        partitions=given.number("partitions", 1, PARTITIONS_MAX, SourceOptions.partitions),
        rows_max=given.number("maxRowsPerTrigger", 1, 1 << 40, SourceOptions.rows_max),
        rows_min=given.number("minRowsPerTrigger", 1, 1 << 40, SourceOptions.rows_min),
        delay_max_s=given.seconds("maxTriggerDelay", SourceOptions.delay_max_s),
        bytes_max=given.number("maxBytesPerTrigger", 1, 1 << 50, SourceOptions.bytes_max),
        has_text_body=given.choice("body", ("binary", "string")) == "string",
        has_headers=given.choice("headers", ("true", "false")) == "true",
    )
    if found.rows_min > found.rows_max:
        raise ConfigurationError(
            f"option minRowsPerTrigger is {found.rows_min}, and must not be above maxRowsPerTrigger, which is "
            f"{found.rows_max}"
        )
    if found.rows_min and found.selector is not None:
        raise ConfigurationError(
            "options minRowsPerTrigger and selector are both set, and the broker counts waiting messages regardless of "
            "a selector: leave one out, or let the trigger's processingTime collect messages"
        )
    return found


_NAMES = (
    *("url", *CREDENTIAL_NAMES, "queue", "selector", "partitions", "maxRowsPerTrigger", "maxBytesPerTrigger"),
    *("minRowsPerTrigger", "maxTriggerDelay", "body", "headers", "space", "patience"),
)


def _queues(text: str) -> tuple[str, ...]:
    return tuple(sorted({_queue(each) for each in text.split(",") if each.strip()}))


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
