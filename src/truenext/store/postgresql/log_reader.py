"""LogReader: reads the rows of a log, and their relation to a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psycopg

from truenext.errors import StoreError
from truenext.store.checkpoint_format import LOG_FORMAT
from truenext.store.log import Frames, LogPosition, Relation, Snapshot
from truenext.store.postgresql import kept, log_rows, takeover
from truenext.store.postgresql.connection import Connection, describe
from truenext.store.postgresql.database import Database
from truenext.store.postgresql.log_end import LogEnd, is_other_way
from truenext.store.postgresql.outcome import Row, RowChain, relate

SNAPSHOT_SILENCE_S = 60.0


class LogReader:
    def __init__(self, end: LogEnd, database: Database) -> None:
        self._end = end
        self._parameters = database.parameters
        self._call = database.call

    @property
    def next_history(self) -> tuple[int, int]:
        # Not as of the opening: until it is taken over, another broker may go on, and compact its rows.
        return self._call(lambda connection: kept.read_facts(connection, self._end.schema)).next_history

    def relation(self, position: LogPosition, frames: Frames | None = None) -> Relation:
        found = self._call(lambda connection: log_rows.read_relation(connection, self._end.schema, position.number))
        if found is None:
            raise takeover.empty_log_error(self._end.schema)
        digest, compacted, last = found
        relation = relate(position, digest, compacted, last)
        if relation is None:
            raise kept.DamagedLogError(self._end.schema, f"row {position.number} is missing or changed")
        if relation is Relation.AHEAD and frames is not None:
            row = self._last_row()
            if row is not None and is_other_way(row, position, frames):
                relation = Relation.OTHER_WAY
        if relation is Relation.OTHER_WAY:
            self._call(partial(self._end.check_is_no_former_primary, last=last))
        return relation

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        try:
            with Connection.open(self._parameters) as connection:
                connection.silence_s = SNAPSHOT_SILENCE_S
                with kept.open_snapshot(connection, self._end.schema) as snapshot:
                    yield snapshot
        except psycopg.Error as error:
            raise StoreError(f"cannot read the compacted rows of the log: {describe(error)}") from error

    def rows_after(self, position: LogPosition) -> Iterator[bytes]:
        end = self._last_row()
        chain = RowChain(position)
        is_gap = False
        while end is not None and chain.last.number < end.number:
            piece = self._call(
                partial(log_rows.read_piece, schema=self._end.schema, first=chain.next_part, last=end.number)
            )
            if piece:
                yield from self._checked(chain, piece)
            elif is_gap:
                raise self._missing(chain, f"row {chain.last.number + 1} is missing or changed")
            else:
                # The database may have forgotten rows since it has named the last one. They may be back already.
                end = self._last_row()
            is_gap = not piece

    def _last_row(self) -> Row | None:
        return self._call(lambda connection: log_rows.last_row(connection, self._end.schema))

    def _checked(self, chain: RowChain, piece: list[tuple[int, int, int | None, bytes, bytes]]) -> Iterator[bytes]:
        for number, part, format_version, digest, payload in piece:
            if format_version is not None and format_version > LOG_FORMAT:
                raise takeover.format_error(self._end.schema, format_version)
            try:
                whole = chain.add(number, part, digest, payload)
            except ValueError as error:
                raise self._missing(chain, str(error)) from None
            if whole is not None:
                yield whole

    def _missing(self, chain: RowChain, problem: str) -> StoreError:
        """Return the error for the row after the chain, which the log does not have."""
        number = chain.last.number + 1
        if self.relation(chain.last) is Relation.OTHER_WAY:
            return self._end.behind_error("this broker's folder went another way")
        position = self._call(lambda connection: kept.read_position(connection, self._end.schema)).number
        if position < number:
            return kept.DamagedLogError(self._end.schema, problem)
        return self._end.behind_error(f"the rows from {number} on, which this broker's folder lacks, are compacted")
