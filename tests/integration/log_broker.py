"""Broker process with a log in PostgreSQL, which may be compacted at once, and may have a planted fault."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from unittest import mock

import psycopg

from tests.contract.postgresql.log_writer import make_log, url_of
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import Forked, completed_text
from tests.integration.log_process import SMALL_PARTITION_ROWS, serve
from tests.stages.postgres import Server
from truenext.store.postgresql import layout


class LogBroker(BrokerProcess):
    def __init__(
        self,
        folder: Path,
        server: Server,
        schema: str,
        options: Sequence[str] = (),
        *,
        patience_ms: int = 30_000,
        failover_after_ms: int = 5_000,
        durability: str = "local",
        is_small: bool = False,
        fault: str = "",
    ) -> None:
        """Prepare a broker in `folder`, which is made, for the log in `schema`. With `is_small` the log is compacted at
        once. `fault` is the name of a planted fault."""
        folder.mkdir(parents=True)
        config = folder / "broker.toml"
        config.write_text(f"[broker]\ndatabase_patience_ms = {patience_ms}\nfailover_after_ms = {failover_after_ms}\n")
        self._where = (url_of(server), "--schema", schema)
        options = (
            "--store",
            *self._where,
            "--durability",
            durability,
            "--database-limit",
            "10GiB",
            "--config",
            str(config),
            *options,
        )
        super().__init__(folder, options)
        self._conditions = ["small" if is_small else "", fault]

    def _started(self, command: list[str]) -> Forked:
        return Forked([*self._conditions, *command], stdout=self._out, stderr=self._log, run=serve)

    def await_standing_by(self) -> None:
        """Wait until a broker that was started stands by: until then it ends if PostgreSQL does not answer."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (self._out.exists() and "standing by" in self._out.read_text()):
            assert self.is_running and time.monotonic() < deadline, f"the broker does not stand by, log:\n{self.log}"
            time.sleep(0.02)

    def check_database(self) -> None:
        """Check that `truenext store check` finds no damage in the log."""
        done = completed_text("store", "check", *self._where)
        assert done.returncode == 0, done.stdout + done.stderr


def make_schema(server: Server, name: str, *, is_small: bool = False) -> None:
    """Make an empty log in a new schema, for brokers with the same `is_small`."""
    rows = SMALL_PARTITION_ROWS if is_small else layout.PARTITION_ROWS
    with server.connect() as connection, mock.patch.object(layout, "PARTITION_ROWS", rows):
        make_log(connection, schema=name)


def copy_folder(data: Path, to: Path) -> None:
    """Copy the data folder of a broker that does not run, in place of an earlier copy."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(data, to, ignore=shutil.ignore_patterns("ballast", "lock"))


def delete_folder(data: Path) -> None:
    """Delete the data folder of a broker that does not run, if there is one. A process that exports the history may
    have outlived the broker, and writes for another moment."""
    if data.exists():
        deleted = data.with_name(f"{data.name}-deleted-{secrets.token_hex(4)}")
        data.rename(deleted)
        shutil.rmtree(deleted, ignore_errors=True)


def await_server(server: Server) -> None:
    """Wait until PostgreSQL accepts connections, for example after a crash of a session."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with suppress(psycopg.OperationalError), server.connect():
            return
        assert time.monotonic() < deadline, f"PostgreSQL does not come back, log:\n{server.log}"
        time.sleep(0.01)


def sessions_of_brokers(server: Server) -> list[int]:
    """Return the process ids of all sessions of brokers."""
    with server.connect() as connection:
        found = connection.execute("SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'truenext%'")
        return [int(str(number)) for (number,) in found]
