"""Tests that a cut, a silence and a delay at any message between a broker and PostgreSQL break no promise.

A script of a dozen appends, a compaction and a takeover runs through a proxy (proxy.py), again and again, each time
with one harm to one message:

    broker A    starts, appends 6 rows; rows are compacted; appends 6 rows
    broker B    takes over, appends a row
    broker A    finds that it is fenced

Another one is of a broker that stands by:

    broker A    starts, appends a row between any two looks of broker B, and stops doing so
    broker B    stands by, takes over, appends a row; rows are deleted; it puts them back and appends a row
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from sys import maxsize
from typing import Any, Final

import psycopg
import pytest

from tests.contract.disk import LANE, begin_and_apply, key, put
from tests.contract.postgresql.log_writer import DATABASE_LIMIT, DURABLE, make_log, member_settings, url_of
from tests.contract.postgresql.proxy import Harm, Plan, ProtocolProxy
from tests.contract.postgresql.test_log import Standby, set_globally
from tests.drawing import one_of
from tests.stages.postgres import PostgresServer, own_server
from truenext.errors import StoreError, StoreFencedError
from truenext.model.batch import Batch
from truenext.store.changes import decode_changes
from truenext.store.embedded import EmbeddedStore
from truenext.store.log import LogPosition
from truenext.store.postgresql import database as database_module
from truenext.store.postgresql import kept, log_appender, log_standby
from truenext.store.postgresql.compaction import compact
from truenext.store.postgresql.connection import Connection, parse_url
from truenext.store.postgresql.database import Database
from truenext.store.postgresql.log import PostgresqlLog
from truenext.store.postgresql.outcome import RowChain

PHASES: Final = ("first broker starts", "it appends", "second broker starts", "both append")
PHASES_OF_STANDBY: Final = ("first broker starts", "second broker stands by", "both append", "rows are put back")
IS_ALL: Final = "TRUENEXT_PROXY" in os.environ
RANDOM: Final = Random(os.environ.get("TRUENEXT_DRAW"))

SILENCE_S: Final = 0.3
"""Silence after which a connection counts as lost. By itself that takes 2 seconds."""
FREEZE_S: Final = 1.0
START_S: Final = 20.0
FAILOVER_AFTER_S: Final = 2.0


class QuietLog(PostgresqlLog):
    """Log without background work: its messages would come at random."""

    def start(self) -> None:
        pass


class Script:
    """Two brokers, and what was confirmed to their clients."""

    def __init__(self, url: str, schema: str, folder: Path, *, is_replicated: bool) -> None:
        self.on_phase: Callable[[], object] = lambda: None
        """Called at the end of each of PHASES."""
        self._url = url
        self._schema = schema
        self._folder = folder
        self._is_replicated = is_replicated
        self._stores: list[EmbeddedStore] = []
        self._batches = 0
        self.confirmed: list[int] = []
        self.direct_url = url
        """URL of the database without a proxy."""

    def run(self) -> None:
        first = self._start("first")
        self.on_phase()
        for _ in range(6):
            self._append(first)
        self._compact()
        for _ in range(6):
            self._append(first)
        self.on_phase()
        second = self._start("second")
        self.on_phase()
        self._append(second)
        with pytest.raises(StoreFencedError):
            self._append(first)
        self.on_phase()

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def open(self, name: str, kind: type[PostgresqlLog] = QuietLog, *, take_over: bool = True) -> EmbeddedStore:
        log = kind(
            self._url,
            self._schema,
            take_over=take_over,
            is_replicated=self._is_replicated,
            database_limit=DATABASE_LIMIT,
            patience_s=20.0,
            member=member_settings(name, self._folder / name, FAILOVER_AFTER_S),
        )
        return EmbeddedStore(self._folder / name, segment_bytes=1 << 20, log=log)

    def _start(self, name: str, kind: type[PostgresqlLog] = QuietLog, *, take_over: bool = True) -> EmbeddedStore:
        store = self._open_at_last(name, kind, take_over=take_over)
        self._stores.append(store)
        store.recover()
        return store

    def _open_at_last(self, name: str, kind: type[PostgresqlLog], *, take_over: bool) -> EmbeddedStore:
        """Open a store. A broker that cannot read its log does not start; its unit starts it again, more than once if
        a busy machine is silent for SILENCE_S."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return self.open(name, kind, take_over=take_over)
            except StoreError as error:
                assert type(error) is StoreError and time.monotonic() < deadline, error

    def _append(self, store: EmbeddedStore) -> None:
        self._batches += 1
        batch = Batch(self._batches)
        batch.puts = put(self._batches)
        if self._batches % 2:
            begin_and_apply(store, batch)
        else:
            store.apply(batch)
        self.confirmed.append(self._batches)

    def _compact(self) -> None:
        while True:
            # A late transaction may be in the way.
            try:
                with Connection.open(parse_url(self._url)) as connection:
                    if compact(connection, self._schema, maxsize) or self._position(connection):
                        return
            except psycopg.Error as error:
                assert error.sqlstate is None, error
            time.sleep(0.05)

    def _position(self, connection: Connection) -> int:
        row = connection.execute(f"SELECT number FROM {self._schema}.position").fetchone()
        assert row is not None
        position: int = row[0]
        return position


class StandbyScript(Script):
    """Two brokers, the second of which stands by, and takes over once the first one appends no more."""

    def run(self) -> None:
        first = self._start("first")
        self.on_phase()
        append, beats = partial(self._append, first), iter(range(3))

        class WatchedLog(QuietLog):
            def stands_by(self, position: LogPosition) -> bool:
                stands_by = super().stands_by(position)
                if stands_by and next(beats, None) is not None:
                    append()
                return stands_by

        second = self._start("second", WatchedLog, take_over=False)
        self.on_phase()
        self._append(second)
        with pytest.raises(StoreFencedError):
            self._append(first)
        self.on_phase()
        self._forget()
        self._append(second)
        self.on_phase()

    def _forget(self) -> None:
        """Delete the last two rows, as if the database had lost them."""
        with psycopg.connect(self.direct_url, autocommit=True) as admin:
            log = f"{self._schema}.log"
            admin.execute(f"DELETE FROM {log} WHERE number > (SELECT max(number) - 2 FROM {log})")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """PostgreSQL with a synchronous standby."""
    with own_server(**DURABLE, wal_level="replica", max_wal_senders="5") as server:
        folder = server.folder / "standby"
        folder.mkdir()
        folder.chmod(0o777)
        standby = Standby(server, folder)
        with server.connect() as admin:
            set_globally(admin, "synchronous_standby_names", "pg_receivewal")
        standby.start()
        yield server
        standby.stop()


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Database.call, "__defaults__", (SILENCE_S, None))
    monkeypatch.setattr(database_module, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(log_appender, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(log_standby, "TAKEOVER_SILENCE_S", SILENCE_S)
    monkeypatch.setattr(Connection, "silence_s", SILENCE_S)


def run_script(
    server: PostgresServer,
    schema: str,
    folder: Path,
    plan: Plan | None = None,
    *,
    kind: type[Script] = Script,
    is_replicated: bool = False,
) -> tuple[str, list[int]]:
    """Run the script in a log of its own, and judge what has become of it. Return the harmed message, and the number of
    messages up to the end of each phase."""
    ends = list[int]()
    with server.connect() as admin:
        make_log(admin, schema=schema)
        with ProtocolProxy(server.folder, plan) as proxy:
            url = url_of(server, host="127.0.0.1", port=proxy.port)
            script = kind(url, schema, folder, is_replicated=is_replicated)
            script.direct_url = url_of(server)
            script.on_phase = lambda: ends.append(proxy.count)
            try:
                script.run()
                if plan is not None and proxy.harmed:
                    assert proxy.is_over.wait(10)
            finally:
                script.close()
        judge(admin, schema, script.confirmed)
        judge_folders(server, schema, folder, script.confirmed)
        admin.execute(f"DROP SCHEMA {schema} CASCADE")
        shutil.rmtree(folder)
    return proxy.harmed, ends


def judge(admin: psycopg.Connection[Any], schema: str, confirmed: list[int]) -> None:
    """Check that the rows have what was confirmed, once and in order, and nothing else."""
    rows = admin.execute(
        f"SELECT number, part, epoch, digest, payload FROM {schema}.log ORDER BY number, part"
    ).fetchall()
    chain = RowChain(LogPosition(0, bytes(16)))
    found, epochs = [], []
    for number, part, epoch, digest, payload in rows[1:]:
        whole = chain.add(number, part, digest, payload)
        assert whole is not None, f"row {number} does not stand on the row before it"
        found += [one for one, _ in decode_changes(memoryview(whole)).puts]
        epochs.append(epoch)
    assert found == [key(each) for each in confirmed]
    assert epochs == sorted(epochs)


def judge_folders(server: PostgresServer, schema: str, folder: Path, confirmed: list[int]) -> None:
    """Check that the folders of both brokers, and one made from the log alone, have the same messages."""
    script = Script(url_of(server), schema, folder, is_replicated=False)
    for name in ("first", "second", "third"):
        store = script.open(name)
        try:
            store.recover()
            page = store.read_page(LANE, 0, 100)
            assert [message.key for message in page.messages] == [key(each) for each in confirmed], name
        finally:
            store.close()
    assert not list(folder.glob("*/aside-*"))


@pytest.fixture(scope="module", autouse=True)
def _any_records() -> Iterator[None]:
    """Messages of this test are no records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept._PostgresqlSnapshot, "_raise_damage", lambda *_: None)
        yield


Phases = dict[str, range]
"""Numbers of the messages of each phase."""


@pytest.fixture(scope="module")
def phases(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Phases:
    _, ends = run_script(server, f"dry_{os.getpid()}", tmp_path_factory.mktemp("dry") / "data")
    return {phase: range(*each) for phase, each in zip(PHASES, pairwise([0, *ends]), strict=True)}


@pytest.fixture(scope="module")
def phases_of_standby(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Phases:
    folder = tmp_path_factory.mktemp("dry") / "data"
    _, ends = run_script(server, f"standby_{os.getpid()}", folder, kind=StandbyScript)
    return {phase: range(*each) for phase, each in zip(PHASES_OF_STANDBY, pairwise([0, *ends]), strict=True)}


@pytest.mark.timeout(7200 if IS_ALL else 120)
@one_of("phase", PHASES, PHASES)
@pytest.mark.parametrize("harm", Harm, ids=lambda harm: harm.value)
def test_harm_to_any_message_loses_and_repeats_nothing(
    server: PostgresServer, phases: Phases, tmp_path: Path, harm: Harm, phase: str
) -> None:
    """C27.2, C27.4, C27.6 to C27.8"""
    harm_and_judge(server, phases[phase], tmp_path, harm, Script)


@pytest.mark.timeout(7200 if IS_ALL else 120)
@pytest.mark.alternates("harm to a broker that stands by")
@pytest.mark.parametrize("phase", PHASES_OF_STANDBY[1:])
@pytest.mark.parametrize("harm", Harm, ids=lambda harm: harm.value)
def test_harm_to_a_broker_that_stands_by_loses_and_repeats_nothing(
    server: PostgresServer, phases_of_standby: Phases, tmp_path: Path, harm: Harm, phase: str
) -> None:
    """C28.4, C28.8, C28.12"""
    harm_and_judge(server, phases_of_standby[phase], tmp_path, harm, StandbyScript)


def harm_and_judge(server: PostgresServer, numbers: range, folder: Path, harm: Harm, kind: type[Script]) -> None:
    """Run a script once for each number, or for one of them, with harm to the message with that number."""
    for number in numbers if IS_ALL else [RANDOM.choice(numbers)]:
        is_replicated = RANDOM.random() < 0.5
        schema = f"s{os.getpid()}_{harm.value}_{number}"
        plan = Plan(harm, number, FREEZE_S)
        harmed, _ = run_script(server, schema, folder / str(number), plan, kind=kind, is_replicated=is_replicated)
        durability = "replicated" if is_replicated else "local"
        print(f"{harm.value} at message {harmed or number} of {numbers}, {durability}", flush=True)
