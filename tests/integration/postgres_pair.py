"""PostgreSQL with a standby, which changes places with it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.contract.postgresql.log_writer import DURABLE
from tests.integration.broker_process import PATIENCE_SECONDS
from tests.stages.postgres import PostgresServer

SETTINGS = DURABLE | {"wal_level": "replica", "max_wal_senders": "5", "hot_standby": "on"}
NAME = "other"


class PostgresPair:
    """Primary and standby. Its `folder` names the sockets of both."""

    def __init__(self, folder: Path, *, is_synchronous: bool) -> None:
        """`folder` exists, in a place that any user can reach."""
        names = NAME if is_synchronous else ""
        folders = [folder / "one", folder / "two"]
        for each in folders:
            each.mkdir()
        self.primary, self.standby = (
            PostgresServer(each, **SETTINGS, synchronous_standby_names=names) for each in folders
        )
        self.folder = ",".join(map(str, folders))
        self.primary.start()
        self.follow()

    @property
    def log(self) -> str:
        return self.primary.log

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        """Connect to the primary."""
        return self.primary.connect(database)

    def follow(self) -> None:
        """Make the standby anew, from a copy of the primary."""
        self.standby.follow(self.primary, NAME)
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self.primary.connect() as connection:
            while not connection.execute("SELECT FROM pg_stat_replication WHERE state = 'streaming'").fetchall():
                assert time.monotonic() < deadline, f"the standby does not follow:\n{self.standby.log}"
                time.sleep(0.02)

    def fail_over(self) -> None:
        """Kill the primary, and let the standby take its place. The pair is without a standby then."""
        self.primary.kill()
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary

    def clean_up(self) -> None:
        self.standby.clean_up()
        self.primary.clean_up()


@contextmanager
def own_pair(*, is_synchronous: bool) -> Iterator[PostgresPair]:
    with tempfile.TemporaryDirectory(prefix="truenext-postgres-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        pair = PostgresPair(Path(folder), is_synchronous=is_synchronous)
        try:
            yield pair
        finally:
            pair.clean_up()
