"""Unread answers: ends a connection when the answers that clients have not read take too much memory together.

a socket does not take an answer              `update` counts the bytes
all unread answers together pass the limit    the connection with the most bytes ends
a connection has up to UNREAD_ANSWER_BYTES    it does not end for that reason
"""

from asyncio import AbstractEventLoop
from typing import Protocol

from truenext.engine.state.memory import MemoryBudget
from truenext.model.limits import UNREAD_ANSWER_BYTES


class AnswerReader(Protocol):
    """Connection that may have unread answers. `Ending` implements this, and tests do."""

    def on_answers_unread(self, reason: str) -> None:
        """End the connection, unless it has ended already."""


class UnreadAnswers:
    def __init__(self, memory: MemoryBudget, loop: AbstractEventLoop) -> None:
        self._memory = memory
        self._loop = loop
        self._sizes: dict[AnswerReader, int] = {}
        """Bytes of unread answers by connection, without connections that are about to end."""

    def update(self, reader: AnswerReader, size: int) -> None:
        """Note that the unread answers of a connection have `size` bytes now. End the connection with the most bytes if
        all together have too many."""
        memory = self._memory
        before = self._sizes.pop(reader, 0)
        memory.answer_bytes += size - before
        if size:
            self._sizes[reader] = size
        is_too_much = memory.answer_bytes > memory.answer_bytes_max
        # A connection with few unread bytes starts no search, because each search ends a connection.
        if is_too_much and size > before and size > UNREAD_ANSWER_BYTES:
            slowest = max(self._sizes, key=self._sizes.__getitem__)
            size = self._sizes.pop(slowest)
            # Its bytes are as good as freed.
            memory.answer_bytes -= size
            # Not at once: a turn that writes to many connections must not find one closed meanwhile.
            self._loop.call_soon(
                slowest.on_answers_unread,
                f"the client has {size} bytes of unread answers, the most of all, and those of all clients take more "
                f"than {memory.answer_bytes_max} bytes (--memory-limit): read them",
            )
