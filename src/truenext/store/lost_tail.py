"""What does the journal lack at its end?

A crash tears the last frame, which nobody was told of; so the end of a journal looks the same whether a crash tore that
frame or a disk lost a hundred of them. What was written down elsewhere tells them apart. Each of these is a lower
bound, which stays true whatever is written later:

    checkpoint     "written" names a frame that was durable: the last one of a clean stop, the first one of a run, one
                   that reserved sequences, the last one when a segment had moved
    history        a chunk of a batch is in its own files only once the frame of that batch is durable. Events are
                   numbered over all runs, batches and frames are not known to it. So it speaks of the run that the
                   journal ends with, and of no other: it may have been switched off, deleted, or put back from a copy.

Source: docs/decisions/0019-damage.md
"""

from __future__ import annotations

from truenext.events import chunk_position


def lost_tail(last: int, written: int, journal_chunk: bytes, last_history_chunk: tuple[int, int] | None) -> str:
    """What is missing behind the frame `last`, in words; empty if nothing proves that anything is.

    `written` is what the checkpoint says, `journal_chunk` the last chunk that the journal has of it, and
    `last_history_chunk` run and first event of the last chunk of a batch that the history's own files have.
    """
    if last < written:
        frames = f"frame {written} is" if last == written - 1 else f"frames {last + 1} to {written} are"
        return f"{frames} missing at its end; the checkpoint says that frame {written} was written"
    if journal_chunk and last_history_chunk is not None:
        run, event = chunk_position(journal_chunk)
        if run == last_history_chunk[0] and event < last_history_chunk[1]:
            return (
                f"frames are missing at its end, behind frame {last}: the history tells of a batch of run {run} that "
                f"begins with event {last_history_chunk[1]}, and the last one here begins with event {event} "
                "(a store that was put back from a copy needs the history of that copy, or none)"
            )
    return ""
