"""PostgresqlLog: the log of a store in PostgreSQL.

    append      one statement: inserts row N if row N - 1 has the epoch and the digest that this broker knows
    look        one statement, each 0.2 s while the broker stands by (lookout.py, standing_by.py)
    takeover    one transaction under a lock: reads the last row, and inserts a row with the next epoch (takeover.py)

One room each reads (log_reader.py), stands by and takes over (log_standby.py), and appends (log_appender.py). All share
the database (database.py), and what is known of the log's end (log_end.py). Partitions, compaction and sizes are the
work of a thread (background.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial

import psycopg

from truenext.errors import StoreError
from truenext.model.disk_level import DiskLevel
from truenext.store.checkpoint_format import NUMBER
from truenext.store.log import Frames, LogPosition, LogStatus, MemberSettings, Relation, Snapshot
from truenext.store.postgresql import kept, layout, log_rows, takeover
from truenext.store.postgresql.background import Background
from truenext.store.postgresql.connection import Connection, opening_error, parse_url
from truenext.store.postgresql.database import Database
from truenext.store.postgresql.forgotten import choose_heir
from truenext.store.postgresql.log_appender import LogAppender
from truenext.store.postgresql.log_end import LogEnd
from truenext.store.postgresql.log_reader import LogReader
from truenext.store.postgresql.log_standby import LogStandby, LogTakeover
from truenext.store.postgresql.member import OwnMember
from truenext.store.store import Pending

logger = logging.getLogger(__name__)

HAND_OVER_PATIENCE_S = 2.0


class PostgresqlLog:
    def __init__(
        self,
        url: str,
        schema: str,
        *,
        take_over: bool,
        is_replicated: bool,
        database_limit: int,
        patience_s: float,
        member: MemberSettings,
    ) -> None:
        """Connect to the log in `schema` of the database at `url`, `postgresql://...` without a password.

        With `take_over` this broker, which is `member`, becomes active at once, also if another one is. With
        `is_replicated` a row is durable only when a synchronous standby has it, too. The schema may have
        `database_limit` bytes, from which `disk_level` follows. Reading and appending wait up to `patience_s` seconds
        for a database that is not available.

        Raises: ConfigurationError if an option or the database must be changed, or another broker has this member
        name; StoreError if the database cannot be reached
        """
        parameters = parse_url(url)
        layout.check_schema_name(schema)
        self._end = end = LogEnd(schema, member)
        self._database = database = Database(parameters, end, is_replicated=is_replicated, patience_s=patience_s)
        self._background = background = Background(parameters, schema, database_limit, member)
        self._own_member = OwnMember(schema, member)
        self._reader = LogReader(end, database)
        self._standby = LogStandby(end, database, self._own_member, takes_over=take_over)
        self._takeover = LogTakeover(end, database, background, self._standby)
        self._appender = LogAppender(end, database, background)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    # ---- Opening ----

    def _open(self) -> None:
        try:
            connection = self._database.open()
            layout.check_layout(connection, self._end.schema)
            layout.upgrade_layout(connection, self._end.schema)
            facts = kept.read_facts(connection, self._end.schema)
            self._background.position = kept.read_position(connection, self._end.schema).number
            last = log_rows.last_row(connection, self._end.schema)
            if last is None:
                raise takeover.empty_log_error(self._end.schema)
            self._end.origin, self._end.was_replicated = facts.origin, facts.active.is_replicated
            self._end.check_is_no_copy(connection)
            if connection.origin is None:
                logger.warning(
                    "PostgreSQL does not tell its system identifier and timeline: neither a copied database nor lost "
                    "rows that no folder has are noticed",
                    extra={"schema": self._end.schema},
                )
        except psycopg.Error as error:
            raise opening_error(error, "cannot open the log in PostgreSQL") from error
        self.identity = facts.recovered.identity
        self._end.identify(self.identity)
        self.earlier_identities: Mapping[str, int] = facts.earlier
        self._end.note(last, facts.origin)

    # ---- The rooms ----

    @property
    def next_history(self) -> tuple[int, int]:
        return self._reader.next_history

    def relation(self, position: LogPosition, frames: Frames | None = None) -> Relation:
        return self._reader.relation(position, frames)

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        return self._reader.snapshot()

    def rows_after(self, position: LogPosition) -> Iterator[bytes]:
        return self._reader.rows_after(position)

    def stands_by(self, position: LogPosition) -> bool:
        return self._standby.stands_by(position)

    def take_over(self, position: LogPosition) -> bool:
        return self._takeover.take_over(position)

    def append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> bool:
        return self._appender.append(number, before, digest, parts)

    def begin_append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> Pending | None:
        return self._appender.begin_append(number, before, digest, parts)

    @property
    def frames(self) -> Frames:
        return self._end.frames

    @frames.setter
    def frames(self, frames: Frames) -> None:
        self._end.frames = frames

    @property
    def silent_from(self) -> float:
        return self._end.silent_from

    # ---- A clean stop ----

    def choose_heir(self, to: str | None) -> str:
        numbers = self._background.number_before, self._end.number
        return choose_heir(self._background.members, to, self._end.member.name, numbers)

    def hand_over(self, heir: str) -> None:
        self._background.close()
        # Without the hint, another broker waits longer. Meanwhile, clients of this one wait.
        self._database.patience_s = min(self._database.patience_s, HAND_OVER_PATIENCE_S)
        self._database.call(partial(self._hand_over, heir=heir))

    def _hand_over(self, connection: Connection, heir: str) -> None:
        with connection.transaction():
            stop = NUMBER.pack(self._end.number) + heir.encode()
            kept.write_fact(connection, self._end.schema, "stop", stop)
            self._own_member.end(connection, self._end.epoch, self._end.number)

    def leave(self) -> None:
        if not self._database.is_active:
            self._own_member.leave(self._database.parameters)

    # ---- Background ----

    def start(self) -> None:
        self._background.start(self._end.epoch)

    def begin_stop(self) -> None:
        self._database.is_stopping = True

    @property
    def failure(self) -> StoreError | None:
        return self._background.failure

    @property
    def disk_level(self) -> DiskLevel:
        return max(self._background.level, DiskLevel.NONE) if self._database.is_full else self._background.level

    @property
    def disk_level_bytes(self) -> Mapping[str, int]:
        return self._background.bytes

    @property
    def status(self) -> LogStatus:
        return LogStatus(
            server=self._database.server,
            wait=self._database.wait or self._background.wait,
            epoch=self._end.epoch,
            number=self._end.number,
            position=self._background.position,
            is_replicated=self._database.is_replicated,
            members=self._background.members_now,
        )

    def close(self) -> None:
        self._background.close()
        self._database.close()
