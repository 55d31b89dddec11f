"""What is in memory of why consumers failed with a message.

An entry whose message no consumer has said this of has none of it. What the store has leaves memory with the message's
body, and comes back with it.
"""

from __future__ import annotations

from sys import getsizeof

import msgspec

from truenext.model.batch import NO_CAUSES, Causes

_OBJECT_BYTES = 80
"""Of the object."""


class KnownCauses(msgspec.Struct, frozen=True, gc=False):
    first: str
    """Empty if only the store has it."""
    last: str
    """Empty if only the store has both."""
    batch: int = 0
    """Which told the store last, in this run."""
    unstored: Causes = NO_CAUSES
    """What the store is to be told with the message's next mark."""

    @property
    def are_in_memory(self) -> bool:
        """Something of them is in memory."""
        return self.last != ""


ONLY_IN_STORE = KnownCauses("", "")
"""Only the store has them."""


def append_cause(before: KnownCauses | None, cause: str) -> KnownCauses:
    """After one more failure, whose consumer has said this."""
    if before is None:
        return KnownCauses(cause, cause, unstored=Causes(cause, cause))
    return KnownCauses(before.first, cause, before.batch, Causes(last=cause).merged_onto(before.unstored))


def causes_from_store(causes: Causes) -> KnownCauses | None:
    """Of a message that only the store had until now."""
    return KnownCauses(causes.first, causes.last) if causes != NO_CAUSES else None


def merge_stored_causes(known: KnownCauses, causes: Causes) -> KnownCauses:
    """With what the store has: it is not told yet of what is in memory and not there."""
    return KnownCauses(known.first or causes.first, known.last or causes.last, known.batch, known.unstored)


def causes_size(known: KnownCauses | None) -> int:
    """Bytes of memory that they take, roughly: they may share their texts with others."""
    if known is None or not known.are_in_memory:
        return 0
    size = _OBJECT_BYTES + getsizeof(known.last)
    return size if known.first is known.last else size + getsizeof(known.first)
