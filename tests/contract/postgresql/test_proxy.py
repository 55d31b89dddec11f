"""Tests that a cut, a silence and a delay at any message between a broker and PostgreSQL break no promise.

TRUENEXT_PROXY=n pytest tests/contract/postgresql/test_proxy.py     each harm to a message of each class, not a few

A script of a dozen appends, a compaction and a takeover runs through a proxy (proxy.py), again and again, each time
with one harm to one message:

    broker A    starts, appends 6 rows; rows are compacted; appends 6 rows
    broker B    takes over, appends a row
    broker A    finds that it is fenced

Another one is of a broker that stands by:

    broker A    starts, appends a row between any two looks of broker B, and stops doing so
    broker B    stands by, takes over, appends a row; rows are deleted; it puts them back and appends a row

Each script has some 2,000 messages; both together have 1,150 classes, which proxy.py defines, and a run without harm
counts. The seed TRUENEXT_PROXY, or else TRUENEXT_DRAW, draws the message of a class, and whether the script asks for
rows on a synchronous standby, too. A class that no run hits is a failure.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from sys import maxsize
from typing import Any, Final
from zlib import crc32

import psycopg
import pytest

from tests.contract.disk import LANE, begin_and_apply, key, put
from tests.contract.postgresql.log_writer import DATABASE_LIMIT, DURABLE, make_log, member_settings, url_of
from tests.contract.postgresql.proxy import Harm, MessageClass, Plan, ProtocolProxy
from tests.contract.postgresql.test_log import Standby, set_globally
from tests.stages.postgres import PostgresServer, own_server
from truenext.errors import StoreError, StoreFencedError
from truenext.model.batch import Batch
from truenext.store.changes import decode_changes
from truenext.store.embedded import EmbeddedStore
from truenext.store.log import LogPosition
from truenext.store.postgresql import database as database_module
from truenext.store.postgresql import kept, log_appender, log_standby, lookout
from truenext.store.postgresql.compaction import compact
from truenext.store.postgresql.connection import Connection, parse_url
from truenext.store.postgresql.database import Database
from truenext.store.postgresql.log import PostgresqlLog
from truenext.store.postgresql.outcome import RowChain

IS_ALL: Final = "TRUENEXT_PROXY" in os.environ
SEED: Final = os.environ.get("TRUENEXT_PROXY") or os.environ.get("TRUENEXT_DRAW")
SHARES: Final = 16 if IS_ALL else 1
"""Number of tests that have the classes of one script and one harm among them, so that processes share the work."""
TRIES: Final = 10
"""Number of runs in which a class may be missing, on a busy machine."""

SILENCE_S: Final = 0.3
"""Silence after which a connection counts as lost. By itself that takes 2 seconds."""
FREEZE_S: Final = 0.8
START_S: Final = 20.0
FAILOVER_AFTER_S: Final = 0.6
LOOK_S: Final = 0.1
DESCRIPTION_INTERVAL_S: Final = 0.2
SLOW_S: Final = 0.25
"""Duration after which an append is checked again: so that delayed appends are, and others seldom."""

_NUMBERS: Final = count(1)


class QuietLog(PostgresqlLog):
    """Log without background work: its messages would come at random."""

    def start(self) -> None:
        pass


class FollowedLog(QuietLog):
    """Log that only folders follow: it is neither taken over nor written."""

    def stands_by(self, position: LogPosition) -> bool:
        return False

    def take_over(self, position: LogPosition) -> bool:
        return True

    def append(self, number: int, before: bytes, digest: bytes, parts: list[bytes]) -> bool:
        return True


class Script:
    """Two brokers, and what was confirmed to their clients."""

    def __init__(
        self, url: str, schema: str, folder: Path, *, is_replicated: bool, proxy: ProtocolProxy | None = None
    ) -> None:
        self._proxy = proxy
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
        self._begin("the first broker starts")
        first = self.start("first")
        self._begin("it appends")
        for _ in range(6):
            self._append(first)
        self._compact()
        for _ in range(6):
            self._append(first)
        self._begin("the second broker starts")
        second = self.start("second")
        self._begin("both append")
        self._append(second)
        with pytest.raises(StoreFencedError):
            self._append(first)
        self._begin("both stop")

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def _begin(self, phase: str) -> None:
        assert self._proxy is not None
        self._proxy.phase = phase

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

    def start(self, name: str, kind: type[PostgresqlLog] = QuietLog, *, take_over: bool = True) -> EmbeddedStore:
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
        self._begin("the first broker starts")
        first = self.start("first")
        self._begin("the second broker stands by")
        append, beats = partial(self._append, first), iter(range(3))

        class WatchedLog(QuietLog):
            def stands_by(self, position: LogPosition) -> bool:
                stands_by = super().stands_by(position)
                if stands_by and next(beats, None) is not None:
                    append()
                return stands_by

        second = self.start("second", WatchedLog, take_over=False)
        self._begin("both append after a failover")
        self._append(second)
        with pytest.raises(StoreFencedError):
            self._append(first)
        self._forget()
        self._begin("rows are put back")
        self._append(second)
        self._begin("both stop after a failover")

    def _forget(self) -> None:
        """Delete the last two rows, as if the database had lost them."""
        assert self._proxy is not None
        if self._proxy.is_harmed:
            # A database that loses rows loses its connections, too: no message comes from one of before.
            assert self._proxy.is_over.wait(10)
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
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, SILENCE_S, SLOW_S)


def set_times(patch: pytest.MonkeyPatch, silence_s: float, slow_s: float) -> None:
    patch.setattr(Database.call, "__defaults__", (silence_s, None))
    patch.setattr(database_module, "SILENCE_S", silence_s)
    patch.setattr(log_appender, "SILENCE_S", silence_s)
    patch.setattr(log_appender, "SLOW_S", slow_s)
    patch.setattr(log_standby, "TAKEOVER_SILENCE_S", silence_s)
    patch.setattr(log_standby, "DESCRIPTION_INTERVAL_S", DESCRIPTION_INTERVAL_S)
    patch.setattr(lookout, "LOOK_S", LOOK_S)
    patch.setattr(Connection, "silence_s", silence_s)


def run_script(
    server: PostgresServer, folder: Path, kind: type[Script], plan: Plan | None = None, *, is_replicated: bool = False
) -> ProtocolProxy:
    """Run the script in a log of its own, and judge what has become of it. Return its proxy."""
    schema = f"s{os.getpid()}_{next(_NUMBERS)}"
    data = folder / schema
    with server.connect() as admin:
        make_log(admin, schema=schema)
        with ProtocolProxy(server.folder, plan) as proxy:
            url = url_of(server, host="127.0.0.1", port=proxy.port)
            script = kind(url, schema, data, is_replicated=is_replicated, proxy=proxy)
            script.direct_url = url_of(server)
            try:
                script.run()
            finally:
                script.close()
            if proxy.is_harmed:
                assert proxy.is_over.wait(10)
        judge(admin, schema, script.confirmed)
        judge_folders(server, schema, data, script.confirmed)
        admin.execute(f"DROP SCHEMA {schema} CASCADE")
        shutil.rmtree(data)
    return proxy


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
    try:
        for name in ("first", "second", "third"):
            page = script.start(name, FollowedLog).read_page(LANE, 0, 100)
            assert [message.key for message in page.messages] == [key(each) for each in confirmed], name
    finally:
        script.close()
    assert not list(folder.glob("*/aside-*"))


@pytest.fixture(scope="module", autouse=True)
def _any_records() -> Iterator[None]:
    """Messages of this test are no records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept._PostgresqlSnapshot, "_raise_damage", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def classes(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Counter[MessageClass]:
    """Number of messages of each class."""
    return count_messages(server, tmp_path_factory.mktemp("harmless"), Script)


@pytest.fixture(scope="module")
def classes_of_standby(
    server: PostgresServer, tmp_path_factory: pytest.TempPathFactory, classes: Counter[MessageClass]
) -> Counter[MessageClass]:
    """Number of messages of each class that only the script with a broker that stands by has."""
    counts = count_messages(server, tmp_path_factory.mktemp("harmless"), StandbyScript)
    return Counter({each: number for each, number in counts.items() if each not in classes})


def count_messages(server: PostgresServer, folder: Path, kind: type[Script]) -> Counter[MessageClass]:
    """Run the script without harm, and without a step that only a busy machine has."""
    with pytest.MonkeyPatch.context() as patch:
        set_times(patch, silence_s=60.0, slow_s=60.0)
        return run_script(server, folder, kind).counts


@pytest.mark.timeout(7200 if IS_ALL else 120)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize(
    "harm",
    [pytest.param(harm, marks=pytest.mark.alternates(f"{harm.value.split()[0]} at a message")) for harm in Harm],
    ids=lambda harm: harm.value,
)
def test_harm_to_any_message_loses_and_repeats_nothing(
    server: PostgresServer, classes: Counter[MessageClass], tmp_path: Path, harm: Harm, share: int
) -> None:
    """C27.2, C27.4, C27.6 to C27.8"""
    harm_and_judge(server, classes, tmp_path, harm, share, Script)


@pytest.mark.timeout(7200 if IS_ALL else 120)
@pytest.mark.alternates("harm to a broker that stands by")
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("harm", Harm, ids=lambda harm: harm.value)
def test_harm_to_a_broker_that_stands_by_loses_and_repeats_nothing(
    server: PostgresServer, classes_of_standby: Counter[MessageClass], tmp_path: Path, harm: Harm, share: int
) -> None:
    """C28.4, C28.8, C28.12"""
    harm_and_judge(server, classes_of_standby, tmp_path, harm, share, StandbyScript)


def harm_and_judge(
    server: PostgresServer, classes: Counter[MessageClass], folder: Path, harm: Harm, share: int, kind: type[Script]
) -> None:
    """Run a script once for each class of this share, or for one class, with harm to a message of that class."""
    chosen = sorted((each for each in classes if harm in each.step.harms), key=repr)
    if IS_ALL:
        chosen = [each for each in chosen if crc32(repr(each).encode()) % SHARES == share]
    else:
        chosen = [Random(f"{SEED} {harm}").choice(chosen)]
    faults = []
    for each in chosen:
        random = Random(f"{SEED} {harm} {each}")
        plan = Plan(harm, each, random.randrange(classes[each]), FREEZE_S)
        is_replicated = random.random() < 0.5
        described = f"{plan.harm.value} at message {plan.number} of {classes[each]}, {each}, {is_replicated=}"
        try:
            hits = run_until_harmed(server, folder, kind, plan, is_replicated=is_replicated)
            print(f"{described}: run {hits} hit it", flush=True)
        except Exception as error:
            error.add_note(described)
            faults.append(error)
    if faults:
        raise ExceptionGroup(f"{len(faults)} of {len(chosen)} classes, seed {SEED}", faults)


def run_until_harmed(
    server: PostgresServer, folder: Path, kind: type[Script], plan: Plan, *, is_replicated: bool
) -> int:
    """Run the script until its plan was carried out, and return the number of runs. A busy machine may have fewer
    messages of a class."""
    for number in range(1, TRIES + 1):
        if run_script(server, folder, kind, plan, is_replicated=is_replicated).is_harmed:
            return number
        plan = plan._replace(number=0)
    raise AssertionError("no run has had a message of this class")
