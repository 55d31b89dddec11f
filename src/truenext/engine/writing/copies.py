"""How the copies of one message are written: what is the same in all of them once, if there is enough of it.

The content of persistent copies is persistent, that of transient ones transient: after a crash the one is there with
all its references, and the other is gone with them. So a message may have two, and their numbers must differ: a
persistent one has the sequence of the first copy, a transient one that of the last of those that refer to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from truenext.engine.state.queue import UNBOUNDED
from truenext.engine.writing.entries import put, put_content
from truenext.model.limits import CONTENT_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from truenext.engine.state.queue import Entry, Queue
    from truenext.model.batch import Batch
    from truenext.model.message import SentMessage


class ContentNumbers(NamedTuple):
    """Numbers of the contents of one message; 0 if every record has its own."""

    persistent: int
    transient: int


NO_CONTENTS = ContentNumbers(0, 0)


def put_shared_content(batch: Batch, message: SentMessage, queues: Sequence[Queue], first: int) -> ContentNumbers:
    """The content of a message that is about to be accepted in all these queues, with sequences from `first` on, is
    written with this batch, as is every copy that has to be stored at once.
    """
    if len(queues) < 2 or not _is_large(message):
        return NO_CONTENTS
    persistent = 0
    transient = 0
    last = 0
    for index, queue in enumerate(queues):
        if message.persistent and not queue.is_temporary:
            persistent += 1
        elif queue.lane_of(message).horizon != UNBOUNDED:
            transient += 1
            last = first + index
    if persistent > 1:
        put_content(batch, first, message, persistent, persistent=True)
    if transient > 1:
        put_content(batch, last, message, transient, persistent=False)
    return ContentNumbers(first if persistent > 1 else 0, last if transient > 1 else 0)


def put_copies(batch: Batch, copies: Sequence[Entry]) -> None:
    """Copies of one message, which the store does not have and which are all transient, are to be stored."""
    message = copies[0].message
    assert message is not None, "what has left memory is in the store already"
    if len(copies) > 1 and _is_large(message):
        number = max(entry.sequence for entry in copies)
        put_content(batch, number, message, len(copies), persistent=False)
        for entry in copies:
            entry.content_number = number
    for entry in copies:
        put(batch, entry)


def _is_large(message: SentMessage) -> bool:
    return len(message.body) + len(message.header) >= CONTENT_BYTES_MIN
