"""Control request `history`: shows a piece of the history. Source: docs/decisions/0118-a-history-that-is-followed.md

A thread reads the files, and makes the whole answer. The event loop begins that after all other work of a turn, and
sends the answer.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec

from truenext.errors import Code, RemoteProtocolError
from truenext.history.pieces import PieceReader
from truenext.model.commands import decode_client_json
from truenext.model.events import EVENT_MAX

VERB = "history"


class HistoryRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a control request `history`, in JSON."""

    after: Annotated[int, msgspec.Meta(ge=0, le=EVENT_MAX)] | None = None
    """Number of the event behind which the piece begins. 0 stands for the beginning of the history, null for no piece:
    the answer tells only how far the history goes."""


class HistoryPiece(msgspec.Struct):
    """Body of the answer to a control request `history`, in JSON."""

    store: str
    """Identity of the broker's data."""
    first: int
    """Number of the first event that the history still has; 0 if it has none. Earlier events were deleted."""
    end: int
    """Number of the event behind the piece. Repeat the request with `after` set to the number before it. Earlier events
    that the piece does not have are in no file: a crash has lost them, or they were deleted."""
    next: int
    """Number of the event that happens next: so far does the history go."""
    arrow: bool
    """True if `content` is a stream of Arrow with the columns of the history; false if it has the bytes of a history
    file. The latter may begin with events up to `after`."""
    content: bytes
    """Events, in base64; empty if there are none behind `after` yet."""
    error: str = ""
    """Reason why the history cannot be read, else "". Then the other fields say nothing."""


def parse_history_request(body: bytes) -> HistoryRequest:
    """Return the body of a request. An empty body stands for one without fields.

    Raises: RemoteProtocolError if the body is invalid
    """
    return decode_client_json(VERB, body, HistoryRequest) if body else HistoryRequest()


class HistoryRequests:
    """Answers to requests `history`. All methods are called on the event loop."""

    def __init__(self, folder: Path | None, loop: AbstractEventLoop, next_event: Callable[[], int]) -> None:
        """`folder` is that of the history; None if the broker has none. `next_event` returns the number of the event
        that happens next."""
        self._loop = loop
        self._next_event = next_event
        self._reader = None if folder is None else PieceReader(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="truenext-history")
        self.identity = ""
        """Identity of the broker's data."""

    def require(self) -> None:
        """Check that the broker has a history.

        Raises: RemoteProtocolError if it has none
        """
        if self._reader is None:
            raise RemoteProtocolError(
                "this broker has no history, as it was started with --no-history or --memory: start it without",
                Code.CONTROL_REQUEST,
            )

    def make_piece(self, after: int | None, next_event: int, *, with_causes: bool) -> HistoryPiece:
        """Show the events behind an event, in a piece of some hundred KiB or more. Without the right `admin` each cause
        of a failure is an empty text."""
        reader = self._reader
        assert reader is not None, "`require` was called"
        try:
            if after is None:
                first = next(iter(reader.first_events()), 0)
                return HistoryPiece(self.identity, first, next_event, next_event, False, b"")
            piece = reader.read(after, with_causes=with_causes)
        except Exception as error:
            # Whatever an operator has put there: the client needs an answer, and others wait for theirs.
            return HistoryPiece(self.identity, 0, 0, next_event, False, b"", str(error) or repr(error))
        # The piece may have events that happened after `next_event` was read. Without events its end says nothing.
        next_event = max(next_event, piece.end) if piece.content else next_event
        return HistoryPiece(self.identity, piece.first, piece.end, next_event, piece.is_arrow, piece.content)

    def begin(self, after: int | None, on_made: Callable[[bytes], object], *, with_causes: bool) -> None:
        """Make the answer on the thread, and then call `on_made` with it."""
        # The thread could see the log of events between two steps, and a number that was passed before.
        next_event = self._next_event()

        def make_answer() -> bytes:
            return msgspec.json.encode(self.make_piece(after, next_event, with_causes=with_causes))

        def on_done(done: Future[bytes]) -> None:
            if not done.cancelled():
                on_made(done.result())

        self._loop.run_in_executor(self._thread, make_answer).add_done_callback(on_done)

    def close(self) -> None:
        """End the thread, and a process that it has started."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._reader is not None:
            self._reader.close()
        self._thread.shutdown()
