"""A connection of sqlite3 that one thread may close while another one uses it.

Python's driver looks at its connection and its statement again when SQLite has answered. If another thread has closed
them by then, the interpreter crashes. Here each call waits until that of another thread has ended.
"""

import sqlite3
from threading import RLock
from typing import Any


class SerializedConnection(sqlite3.Connection):
    def __init__(self, *args: Any, **options: Any) -> None:
        self.lock = RLock()
        """Of the thread whose call SQLite answers; `interrupt` alone does not wait for it."""
        super().__init__(*args, **options)

    def cursor(self, factory: Any = None) -> Any:
        return super().cursor(_SerializedCursor if factory is None else factory)

    def commit(self) -> None:
        with self.lock:
            super().commit()

    def rollback(self) -> None:
        with self.lock:
            super().rollback()

    def close(self) -> None:
        with self.lock:
            super().close()


class _SerializedCursor(sqlite3.Cursor):
    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        assert isinstance(connection, SerializedConnection)
        self._lock = connection.lock

    def execute(self, *args: Any) -> "_SerializedCursor":
        with self._lock:
            super().execute(*args)
        return self

    def executemany(self, *args: Any) -> "_SerializedCursor":
        with self._lock:
            super().executemany(*args)
        return self

    def executescript(self, *args: Any) -> "_SerializedCursor":
        with self._lock:
            super().executescript(*args)
        return self

    def fetchone(self) -> Any:
        with self._lock:
            return super().fetchone()

    def fetchmany(self, *args: Any, **options: Any) -> list[Any]:
        with self._lock:
            return super().fetchmany(*args, **options)

    def fetchall(self) -> list[Any]:
        with self._lock:
            return super().fetchall()

    def __next__(self) -> Any:
        with self._lock:
            return super().__next__()

    def close(self) -> None:
        with self._lock:
            super().close()
