"""When a content goes that several messages refer to: with the last of them.

A content (record.py) is a message of a lane that no queue has, and how many references it has is a mark of it. So
journal, overlay, move and recovery know nothing of contents. What a batch does to them is worked out here, once, before
the batch is written: the journal says how many references are left, never how many have gone, so that it can be laid
over any state of the checkpoint. Persistent references have a persistent content, transient ones a transient content:
an unclean stop drops these together.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import TYPE_CHECKING

from truenext.model.batch import Batch, Mark
from truenext.model.record import sequence_of
from truenext.store.store_errors import disagreement_error

if TYPE_CHECKING:
    from collections.abc import Callable


def dereference_contents(batch: Batch, mark_of: Callable[[bytes], Mark]) -> Batch:
    """The same batch, with what becomes of the contents that it has released; `mark_of` says what the store has.

    Raises: StoreError if one has fewer references than were released
    """
    if not (batch.dereferenced or batch.transient_dereferenced):
        return batch
    changed = copy(batch)
    changed.dereferenced, changed.transient_dereferenced = [], []
    changed.removes, changed.transient_removes = batch.removes[:], batch.transient_removes[:]
    changed.marks, changed.unmarks = batch.marks.copy(), batch.unmarks[:]
    for keys, removes in (
        (batch.dereferenced, changed.removes),
        (batch.transient_dereferenced, changed.transient_removes),
    ):
        for key, dereferenced in Counter(keys).items():
            left = mark_of(key).attempts - dereferenced
            if left < 0:
                raise disagreement_error(
                    batch.number, f"dereferences content {sequence_of(key)} more often than it has references"
                )
            if left:
                changed.marks[key] = Mark(left, 0)
            else:
                removes.append(key)
                changed.unmarks.append(key)
    return changed
