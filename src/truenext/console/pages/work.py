"""Data of the pages on which an operator acts: what would happen, and how far the work is."""

import msgspec


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What would happen, before anything does."""

    verb: str
    """`redrive`, `move`, `purge`, `unschedule` or `close`."""
    title: str
    queue: str = ""
    selection: str = ""
    """Words for the chosen messages, such as "the 3 chosen messages", "messages that match ..."."""
    sentences: list[str]
    """What would happen, one sentence each."""
    count: int | None = None
    """Number of messages; None for `close`, or if not counted yet."""
    is_part: bool = False
    """True if there are more messages than were counted."""
    to: dict[str, int] = {}
    """Number of messages, by the queue to which they would go."""
    left: int = 0
    ended: dict[str, int] = {}
    needs_target: bool = False
    """True if a field `to` must be filled in and the page asked for again, before the number is known."""
    target: str = ""
    typed_name: str = ""
    """Name that the operator has to type into the field `typed`; "" if none."""
    error: str = ""
    """Reason why nothing has happened yet, after another name was typed; else ""."""
    fields: list[tuple[str, str]]
    """Hidden fields of the form that is posted to `post`."""
    post: str = ""
    """Address to which the form is posted; "" if nothing can be done, as the sentences say."""
    button: str
    back: str


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a piece of bulk work is."""

    id: str
    verb: str
    title: str
    queue: str
    state: str
    """`running`, `stopping`, `done`, `stopped` or `failed`."""
    count: int
    total: int | None
    """Number of messages, about; None if it is not known."""
    to: dict[str, int]
    left: int
    """Number of chosen messages that stay: consumers hold them, or they cannot go back."""
    ended: dict[str, int]
    error: str
    sentences: list[str]
    started_ms: int
    elapsed_s: float
    back: str
    others: list[tuple[str, str]]
    """Other work of this login: title and link."""
