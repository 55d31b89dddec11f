"""What does the journal lack at its end?

A crash tears the last frame, which nobody was told of; so the end of a journal looks the same whether a crash tore that
frame or a disk lost a hundred of them. What was written down elsewhere tells them apart. Each of these is a lower
bound, which stays true whatever is written later:

    checkpoint     "durable frame" names a frame that was durable: the last one of a clean stop, the first one of a run,
                   one that reserved sequences, the last one when a segment had been checkpointed
    history        A chunk of a batch is in the history's own files only once the frame of that batch is durable. Events
                   are numbered over all runs; the history does not know batches and frames. So it says something only
                   of the run that the journal ends with: it may have been switched off, deleted, or restored from a
                   copy.

Source: docs/decisions/0019-damage.md
"""

from __future__ import annotations

from truenext.model.events import chunk_position


def describe_lost_tail(
    last: int, durable_frame: int, journal_chunk: bytes, last_history_chunk: tuple[int, int] | None
) -> str:
    """What is missing after the frame `last`, in words; empty if nothing proves that anything is.

    `durable_frame` is what the checkpoint says, `journal_chunk` the last chunk that the journal has of it, and
    `last_history_chunk` run and first event of the last chunk of a batch that the history's own files have.
    """
    if last < durable_frame:
        first = last + 1
        missing = f"frame {first} is" if first == durable_frame else f"frames {first} to {durable_frame} are"
        return f"{missing} missing at its end; the checkpoint says that frame {durable_frame} was durable"
    if journal_chunk and last_history_chunk is not None:
        run, event = chunk_position(journal_chunk)
        if run == last_history_chunk[0] and event < last_history_chunk[1]:
            return (
                f"frames are missing at its end, after frame {last}: the history has a batch of run {run} that begins "
                f"with event {last_history_chunk[1]}, and the last batch of the journal begins with event {event} "
                "(a store that was restored from a copy needs the history of that copy, or none)"
            )
    return ""
