"""SQL of the outbox that differs between PostgreSQL and SQLite."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import CursorResult
from sqlalchemy.ext.asyncio import AsyncConnection

from truenext.stage.sql.exactly_once_writer import CLOCK

_NAME = re.compile(r"(?<!:):([a-z_]+)")


class SqlSyntax:
    def __init__(self, kind: str) -> None:
        """Create the syntax for a kind of database: "postgresql" or "sqlite"."""
        self.is_sqlite = kind == "sqlite"
        self.now_ms = CLOCK[kind]
        """SQL expression for the time in milliseconds since the epoch, by the clock of the database."""
        self.id_parameter = ":id" if self.is_sqlite else "CAST(:id AS uuid)"
        self.has_replies = (
            "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'truenext_replies'"
            if self.is_sqlite
            else "SELECT to_regclass('truenext_replies') IS NOT NULL"
        )
        """SQL statement that returns whether the database has the table of kept replies."""
        self.skip_locked = "" if self.is_sqlite else " FOR UPDATE SKIP LOCKED"

    def one_of_ids_in_order(self, table: str) -> str:
        """Return an SQL condition for the rows whose id is in `:ids`. PostgreSQL locks them in the order of their ids,
        which avoids deadlocks."""
        if self.is_sqlite:
            return "id IN (SELECT value FROM json_each(:ids))"
        return f"id IN (SELECT id FROM {table} WHERE id = ANY(CAST(:ids AS uuid[])) ORDER BY id FOR UPDATE)"

    def ids(self, ids: Collection[str]) -> str | list[str]:
        return json.dumps(list(ids)) if self.is_sqlite else list(ids)

    async def execute(
        self, connection: AsyncConnection, statement: str, parameters: Mapping[str, object]
    ) -> CursorResult[Any]:
        """Execute a statement. Its parameters are written as a colon and a name."""
        if not self.is_sqlite:
            statement = _NAME.sub(r"%(\1)s", statement)
        return await connection.exec_driver_sql(statement, dict(parameters))


def plain_id(id: object) -> str:
    """Return an id as 32 hexadecimal digits. Some drivers return another type, such as UUID."""
    return str(id).replace("-", "")
