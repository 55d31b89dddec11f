"""Data of the overview: what wants an operator's attention, rates, and charts of the last hour."""

import msgspec


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that wants attention."""

    level: str
    """`bad` (messages are not processed, or may soon be refused) or `warn`."""
    what: str
    """Sentence that says what is the case."""
    why: str = ""
    """Likely cause, or effect; may be empty."""
    link: str = ""
    """Address of the page on which to look or act; may be empty."""
    action: str = ""
    """Text of the link."""


class Chart(msgspec.Struct, frozen=True):
    """Series over time, for one chart."""

    title: str
    unit: str
    """Unit of all values: `messages`, `messages/s`, `seconds`, `bytes`."""
    at: list[int]
    """Times in seconds since 1970."""
    series: dict[str, list[float | None]]
    """Values at these times, by name; None where nothing was gathered."""


class Figure(msgspec.Struct, frozen=True):
    """One number with its name, such as "waiting"."""

    name: str
    value: float | int | str | None
    unit: str = ""
    """`messages`, `messages/s`, `seconds`, `bytes`, or "" for a plain number or text."""
    level: str = ""
    """`bad`, `warn` or ""."""
    link: str = ""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    attention: list[Attention]
    """Things that want attention, the worst first; at most ATTENTION_MAX."""
    attention_count: int
    """Number of all such things."""
    figures: list[Figure]
    broker: list[Figure]
    """State of the broker; empty without the right `monitor`."""
    charts: list[Chart]
    covers: str
    """Which queues the figures cover: "all queues" or "the queues on which you have a right"."""
