"""Causes of a message in memory: the texts that say why consumers failed with it.

An entry without causes has no `KnownCauses`. When a message's body is evicted, its stored causes are evicted, too.
"""

from __future__ import annotations

from sys import getsizeof

import msgspec

from truenext.model.batch import NO_CAUSES, Causes

_OBJECT_BYTES = 80
"""Bytes of a KnownCauses object, without its texts."""


class KnownCauses(msgspec.Struct, frozen=True, gc=False):
    first: str
    """First cause; empty if only the store has it."""
    last: str
    """Last cause; empty if only the store has the first and the last cause."""
    batch: int = 0
    """Last batch of this run that has stored causes of the message; 0 if there is none."""
    unstored: Causes = NO_CAUSES
    """Causes to be stored with the message's next mark."""

    @property
    def are_in_memory(self) -> bool:
        return self.last != ""


ONLY_IN_STORE = KnownCauses("", "")


def append_cause(before: KnownCauses | None, cause: str) -> KnownCauses:
    """Return the causes after one more failure."""
    if before is None:
        return KnownCauses(cause, cause, unstored=Causes(cause, cause))
    return KnownCauses(before.first, cause, before.batch, Causes(last=cause).merged_onto(before.unstored))


def causes_from_store(causes: Causes) -> KnownCauses | None:
    """Return the causes that a page has of a message; None if the message has none."""
    return KnownCauses(causes.first, causes.last) if causes != NO_CAUSES else None


def merge_stored_causes(known: KnownCauses, causes: Causes) -> KnownCauses:
    """Fill in causes that only the store has. Causes in memory are kept: the store may have older ones."""
    return KnownCauses(known.first or causes.first, known.last or causes.last, known.batch, known.unstored)


def causes_size(known: KnownCauses | None) -> int:
    """Return roughly the bytes of memory that a message's causes take. Messages may share texts of causes."""
    if known is None or not known.are_in_memory:
        return 0
    size = _OBJECT_BYTES + getsizeof(known.last)
    return size if known.first is known.last else size + getsizeof(known.first)
