"""Places from which a query reads a history: a folder, or a running broker. Both give it in pieces, in order."""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc

from truenext.errors import ConfigurationError, HistoryError, TruenextError
from truenext.history.export import EVENTS_FOLDER
from truenext.history.files import chunks_of, history_files
from truenext.history.parquet_piece import parquet_piece
from truenext.history.pieces import Piece, PieceReader
from truenext.history.table import arrow_table_of, with_all_columns
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.broker.patience import Patience

WRITE_PAUSE_S = 0.05
"""Seconds until the next look for events that have happened and are not in the files yet."""
WRITE_SECONDS = 60.0
"""Seconds after which such events are given up: another broker has taken over, without them."""
ROWS_PER_BATCH = 65_536


class Extent(NamedTuple):
    """How far a history goes."""

    store: str
    """Identity of the broker's data; "" if it is not known."""
    first: int
    """Number of the first event; 0 if there is none."""
    next: int
    """Number of the event that happens next; 0 if that is not known."""


class EventPiece(NamedTuple):
    """Events of a history in order, without gaps that are not in the history."""

    first: int
    """Number of the first event that the history has."""
    end: int
    """Number of the event behind the piece."""
    events: pa.Table | None
    """Events with the columns of the history; None if there are none yet."""


class History(Protocol):
    """History that may still grow. An object is used by one thread, and may be closed more than once."""

    def extent(self) -> Extent:
        """Return how far the history goes.

        Raises: ConfigurationError if there is no history; TruenextError if it cannot be read
        """

    def piece(self, after: int) -> EventPiece:
        """Return the first events behind an event, and perhaps some before.

        Raises: TruenextError if they cannot be read
        """

    def shares(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return ranges of events that together are those from `start` to before `end`, and that several tasks may
        read at once."""

    def close(self) -> None:
        """Close what is open."""


def check_kept(start: int, end: int, first: int) -> None:
    """Check that a history which has events from `first` on still has those from `start` to before `end`.

    Raises: HistoryError if it has not
    """
    if start < first:
        raise HistoryError(
            f"events {start:,} to {min(first, end) - 1:,} were deleted before the query has read them. Keep more "
            "history (history_days_max, history_bytes_max), and set failOnDataLoss to false to go on without these "
            "events"
        )


def read_events(history: History, start: int, end: int, *, fails_on_loss: bool) -> Iterator[pa.RecordBatch]:
    """Yield the events from `start` to before `end`, in order. Events that have happened and are not written yet are
    waited for. Without `fails_on_loss` deleted events are missing.

    Raises: TruenextError if they cannot be read; HistoryError if they do not come, or were deleted meanwhile
    """
    gives_up_at = time.monotonic() + WRITE_SECONDS
    while start < end:
        piece = history.piece(start - 1)
        if fails_on_loss:
            check_kept(start, end, piece.first)
        if piece.events is not None:
            event = piece.events["event"]
            found = piece.events.filter(pc.and_(pc.greater_equal(event, start), pc.less(event, end)))
            yield from found.to_batches(max_chunksize=ROWS_PER_BATCH)
            start = piece.end
            gives_up_at = time.monotonic() + WRITE_SECONDS
        elif time.monotonic() >= gives_up_at:
            raise HistoryError(f"events {start:,} to {end - 1:,} have happened, but are not in the history's files")
        else:
            time.sleep(WRITE_PAUSE_S)


class FolderHistory:
    """History in a folder of this machine, or of one that is mounted."""

    def __init__(self, folder: Path) -> None:
        self._named = folder.resolve()
        self._reader: PieceReader | None = None
        self._end_of_parquet = 0, 0
        """Without history files: number of the last Parquet file, and of the event behind it."""

    def extent(self) -> Extent:
        reader = self._open()
        numbers = reader.first_events()
        next_event = reader.next_event()
        if not next_event and numbers:
            if self._end_of_parquet[0] != numbers[-1]:
                self._end_of_parquet = numbers[-1], self._find_end(numbers[-1])
            next_event = self._end_of_parquet[1]
        return Extent("", numbers[0] if numbers else 0, next_event)

    def _find_end(self, number: int) -> int:
        """Return the event behind the last one of a file, the last of those that are there."""
        while (piece := self.piece(number - 1)).events is not None:
            number = piece.end
        return number

    def piece(self, after: int) -> EventPiece:
        found = _read(self._open(), after)
        return EventPiece(found.first, found.end, _decode(found.content, found.is_arrow, str(self._named)))

    def shares(self, start: int, end: int) -> list[tuple[int, int]]:
        inner = [number for number in self._open().first_events() if start < number < end]
        return list(zip([start, *inner], [*inner, end], strict=True))

    def close(self) -> None:
        pass

    def _open(self) -> PieceReader:
        if self._reader is None:
            for folder in (self._named / "history", self._named):
                if history_files(folder) or (folder / EVENTS_FOLDER).is_dir():
                    self._reader = PieceReader(folder, parquet_piece)
                    break
            else:
                raise ConfigurationError(
                    f"no history in {self._named}: neither it nor {self._named / 'history'} has *.history files or the "
                    "folder events. The broker writes them unless it runs with --no-history"
                )
        return self._reader


def _read(reader: PieceReader, after: int) -> Piece:
    try:
        return reader.read(after, with_causes=True)
    except (OSError, pa.ArrowException) as error:
        # Arrow says so of a damaged Parquet file.
        raise HistoryError(f"the history cannot be read: {error}") from error


class BrokerHistory:
    """History of a running broker, by its control requests."""

    def __init__(self, connect: Callable[[], BrokerConnection], patience_s: float) -> None:
        self._connect = connect
        self._patience = Patience(patience_s)
        self._broker: BrokerConnection | None = None

    def extent(self) -> Extent:
        found = self._ask(None)
        return Extent(found["store"], found["first"], found["next"])

    def piece(self, after: int) -> EventPiece:
        found = self._ask(after)
        content = b64decode(found["content"])
        return EventPiece(found["first"], found["end"], _decode(content, found["arrow"], "the broker's history"))

    def shares(self, start: int, end: int) -> list[tuple[int, int]]:
        # The broker reads on from where it has ended a piece.
        return [(start, end)]

    def close(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.close()

    def _ask(self, after: int | None) -> dict[str, Any]:
        while True:
            try:
                if self._broker is None:
                    self._broker = self._connect()
                found: dict[str, Any] = self._broker.ask("history", {"after": after})
                self._patience.on_success()
                break
            except TruenextError as error:
                self.close()
                self._patience.wait(error)
        if found["error"]:
            raise HistoryError(f"the broker cannot read its history: {found['error']}")
        return found


def _decode(content: bytes, is_arrow: bool, name: str) -> pa.Table | None:
    """Return the events of a piece, with the columns of the history; None if there are none."""
    if not content:
        return None
    if not is_arrow:
        return arrow_table_of(chunks_of(content, name))
    return with_all_columns(ipc.open_stream(content).read_all())
