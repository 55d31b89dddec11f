"""What a user may say of a source, and what each error says instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from truenext.errors import ConfigurationError, RemoteProtocolError
from truenext.model.destination import DEAD_LETTER_PREFIX, SPARK_PREFIX, DestinationKind, parse_address, virtual_topic
from truenext.model.pattern import is_pattern, matches
from truenext.model.url import Address, parse_url

PARTITIONS_MAX = 64
_SPACE_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    addresses: tuple[Address, ...]
    queue: str
    """A queue, or a pattern of queues, without `/queue/`."""
    selector: str | None = None
    partitions: int = 2
    """Tasks of a batch, each with a share of the rows."""
    rows_max: int = 100_000
    """Rows of a batch."""
    bytes_max: int = 256 * 1024 * 1024
    """Bytes of bodies of a batch, exceeded by one message of each task at most."""
    has_text_body: bool = False
    """The body is text; null where the bytes are no UTF-8."""
    has_headers: bool = True
    space: str = "main"
    """A word in the names of the source's own queues."""
    patience_s: float = 600.0
    """How long a task or the driver does without a broker, or without room in the broker."""

    @property
    def destination(self) -> str:
        return f"/queue/{self.queue}"

    def is_of(self, queue: str) -> bool:
        """Messages of this queue come to the source."""
        pattern, words = self.queue.split("."), queue.split(".")
        if not is_pattern(self.queue):
            return queue == self.queue
        # docs/contract.md, "Wildcards": these are meant only by a pattern that begins with the same word.
        if is_pattern(pattern[0]) and (queue.startswith((DEAD_LETTER_PREFIX, SPARK_PREFIX)) or virtual_topic(queue)):
            return False
        return "," not in queue and matches(pattern, words)


def parse_options(options: Mapping[str, str]) -> SourceOptions:
    """Read the options of `format("truenext")`; names in any case.

    Raises: ConfigurationError that names the option, and what may be said instead
    """
    given = {name.lower(): value for name, value in options.items()}
    for name in ("user", "password"):
        if name in given:
            raise ConfigurationError(f"option {name}: a truenext broker has no users yet; leave it out")
    unknown = sorted(name for name in options if name.lower() not in _NAMES)
    if unknown:
        raise ConfigurationError(f"option {unknown[0]}: there is none; there are {', '.join(_NAMES.values())}")
    for name in ("url", "queue"):
        if not given.get(name, "").strip(", "):
            raise ConfigurationError(f'option {name} is missing: .option("{name}", "{_EXAMPLES[name]}")')
    return SourceOptions(
        addresses=_addresses(given["url"]),
        queue=_queue(given["queue"]),
        selector=given.get("selector", "").strip() or None,
        partitions=_number(given, "partitions", 1, PARTITIONS_MAX, SourceOptions.partitions),
        rows_max=_number(given, "maxrowspertrigger", 1, 1 << 40, SourceOptions.rows_max),
        bytes_max=_number(given, "maxbytespertrigger", 1, 1 << 50, SourceOptions.bytes_max),
        has_text_body=_choice(given, "body", ("binary", "string")) == "string",
        has_headers=_choice(given, "headers", ("true", "false")) == "true",
        space=_space(given.get("space", SourceOptions.space)),
        patience_s=float(_number(given, "patience", 0, 365 * 86_400, int(SourceOptions.patience_s))),
    )


_NAMES = {
    name.lower(): name
    for name in (
        *("url", "queue", "selector", "partitions", "maxRowsPerTrigger", "maxBytesPerTrigger", "body", "headers"),
        *("space", "patience"),
    )
}
"""As a user writes them, by their names in small letters."""
_EXAMPLES = {"url": "stomp://127.0.0.1:61613", "queue": "orders"}


def _addresses(text: str) -> tuple[Address, ...]:
    try:
        return tuple(parse_url(url.strip()) for url in text.split(",") if url.strip())
    except ConfigurationError as error:
        raise ConfigurationError(f"option url: {error}") from error


def _queue(text: str) -> str:
    text = text.strip()
    try:
        destination = parse_address(text, "")
    except RemoteProtocolError as error:
        raise ConfigurationError(f"option queue: {error}") from error
    if destination.kind in (DestinationKind.TOPIC, DestinationKind.TOPIC_PATTERN):
        topic = destination.name.removeprefix("VirtualTopic.")
        raise ConfigurationError(
            f"option queue: {text} is a topic, in which nothing waits. Send to the topic VirtualTopic.{topic}, and "
            f"read the queue Consumer.NAME.VirtualTopic.{topic}, with a NAME of your own"
        )
    if destination.kind not in (DestinationKind.QUEUE, DestinationKind.QUEUE_PATTERN):
        raise ConfigurationError(f"option queue: {text} is no queue, nor a pattern of queues")
    if destination.name.startswith(SPARK_PREFIX):
        raise ConfigurationError(f"option queue: {text} is one of the queues in which sources keep what they have read")
    return destination.name


def _number(given: Mapping[str, str], name: str, least: int, most: int, default: int) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not text.strip().isdecimal() or not least <= int(text) <= most:
        raise ConfigurationError(f"option {_NAMES[name]} is {text!r}, and must be a whole number, {least} to {most}")
    return int(text)


def _choice(given: Mapping[str, str], name: str, choices: tuple[str, str]) -> str:
    """The first of `choices` is the default."""
    text = given.get(name, choices[0]).strip().lower()
    if text not in choices:
        raise ConfigurationError(f"option {_NAMES[name]} is {text!r}, and must be {choices[0]} or {choices[1]}")
    return text


def _space(text: str) -> str:
    if not 0 < len(text) <= 64 or not _SPACE_CHARACTERS.issuperset(text):
        raise ConfigurationError(f"option space is {text!r}, and must be a word of letters, digits, _ and -")
    return text
