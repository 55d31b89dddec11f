"""Tests of the initialization of a log in PostgreSQL, empty or with all of a data folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.disk import LANE, NEXT_QUEUE, OTHER_LANE, Disk, all_timers, key, timers
from tests.contract.postgresql.log_writer import open_log, url_of
from tests.contract.postgresql.rows import SCHEMA, read_state
from tests.contract.postgresql.test_compaction import history
from tests.contract.test_store import Model, draw_batch, share
from tests.stages.postgres import PostgresServer
from truenext.errors import ConfigurationError, StoreError, StoreInUseError
from truenext.model.batch import DUE_NEVER, Mark, ProducerState
from truenext.model.message import SentMessage
from truenext.model.record import CONTENTS_LANE_KEY, encode_record
from truenext.store.copying import become_copy, copy_position
from truenext.store.embedded import EmbeddedStore
from truenext.store.postgresql import initialization
from truenext.store.postgresql import layout as layout_module
from truenext.store.postgresql.check import check_log
from truenext.store.postgresql.initialization import initialize
from truenext.store.postgresql.kept import read_facts
from truenext.store.postgresql.layout import LAYOUT_VERSION, Connection, check_layout, partitions_in, schema_exists
from truenext.store.postgresql.takeover import check_fsync


def ignore(*_: object) -> None:
    pass


@pytest.fixture(autouse=True)
def fsync_check() -> Iterator[Any]:
    """The check of the server, replaced: the tests' server is fast, and has fsync = off."""
    with mock.patch.object(initialization, "check_fsync", ignore):
        yield check_fsync


@pytest.fixture
def url(postgres: PostgresServer, postgres_database: str) -> str:
    return url_of(postgres, postgres_database)


@pytest.fixture
def synced_url(log_server: PostgresServer) -> Iterator[str]:
    """URL of a database whose server may be used by a broker."""
    yield url_of(log_server)
    with log_server.connect() as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Data folder of a stopped broker."""
    return fill(tmp_path / "data", kind="checkpointing")


def record(number: int, lane: bytes = LANE, *, persistent: bool = True) -> dict[bytes, bytes]:
    """Return a message that a check finds undamaged."""
    message = SentMessage(
        priority=4, persistent=persistent, expires_ms=0, header=b"", body=b"%d" % number, arrived_ms=1
    )
    return {key(number, lane): encode_record(key(number, lane), message)}


def fill(folder: Path, *, kind: str, clean_stop: bool = True) -> Path:
    disk = Disk(kind, folder)
    disk.apply(
        puts=record(1) | record(2) | record(3),
        transient_puts=record(4, persistent=False) | record(5, persistent=False),
        queues={1: "orders", 2: "ü"},
        paused={2: True},
        producers={"a": ProducerState(1, 2, resolved=(1, 2))},
        timers=timers(5, 6),
        sequence_limit=1000,
        clean_stop=False,
    )
    disk.apply(marks={key(1): (1, 2, 3), key(4): (5, 6, DUE_NEVER)}, causes={key(1): ("a", "b")})
    disk.apply(**share_of(7, key(11), key(12, NEXT_QUEUE)))
    disk.apply(removes=[key(2)], redelivered_below=900, history=history(3, 50, 7))
    if clean_stop:
        disk.apply(clean_stop=True)
    disk.store.close()
    return folder


def share_of(number: int, *copies: bytes) -> dict[str, Any]:
    message = SentMessage(priority=4, persistent=True, expires_ms=0, header=b"", body=b"shared", arrived_ms=1)
    content = CONTENTS_LANE_KEY + number.to_bytes(8)
    return share(number, *copies, record=encode_record(content, message))


def content_of(store: EmbeddedStore) -> tuple[Any, ...]:
    """Return all that a store has."""
    recovered = store.recover()
    recovered.history.clear()
    pages = [
        [(each.key, each.record, each.mark, tuple(each.causes)) for each in store.read_page(lane, 0, 10_000).messages]
        for lane in (CONTENTS_LANE_KEY, LANE, OTHER_LANE, NEXT_QUEUE)
    ]
    return recovered, pages, all_timers(store)


def read_content(folder: Path, **options: Any) -> tuple[Any, ...]:
    store = EmbeddedStore(folder, **options)
    try:
        return content_of(store)
    finally:
        store.close()


# ---- Without a folder ----


def test_empty_log_is_ready_for_a_broker(connection: Connection, url: str) -> None:
    initialize(url, SCHEMA, None, ignore)
    check_layout(connection, SCHEMA)
    state = read_state(connection)
    assert (state.kept, state.set_timers, state.position.number) == ([], [], 0)
    assert len(state.position.digest) == 16
    assert state.recovered.clean_stop and state.recovered.sequence_limit == 1
    assert len(bytes.fromhex(state.recovered.identity)) == 4
    assert connection.execute("SELECT number, part, epoch, format, digest FROM main.log").fetchall() == [
        (0, 0, 0, None, state.position.digest)
    ]
    assert partitions_in(connection, SCHEMA)[:2] == [0, 1]
    assert check_log(url, SCHEMA, lambda damage: pytest.fail(str(damage)), ignore).queues == {}


def test_server_without_fsync_is_refused(
    connection: Connection, url: str, fsync_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initialization, "check_fsync", fsync_check)
    with pytest.raises(ConfigurationError, match="has fsync = off, and may lose what it has confirmed: set fsync = on"):
        initialize(url, SCHEMA, None, ignore)
    assert not schema_exists(connection, SCHEMA)


def test_two_logs_never_agree(connection: Connection, url: str) -> None:
    initialize(url, SCHEMA, None, ignore)
    initialize(url, "other", None, ignore)
    one, other = read_state(connection), read_state(connection, "other")
    assert one.position.digest != other.position.digest
    assert one.recovered.identity != other.recovered.identity


def test_existing_log_is_refused(connection: Connection, url: str, data: Path) -> None:
    initialize(url, SCHEMA, None, ignore)
    before = read_state(connection)
    for folder in (None, data):
        with pytest.raises(ConfigurationError, match=r'has a log already: start a broker.*DROP SCHEMA "main" CASCADE'):
            initialize(url, SCHEMA, folder, ignore)
    assert read_state(connection) == before
    assert read_content(data)[0].sequence_limit == 1000


def test_schema_with_other_tables_is_refused(connection: Connection, url: str) -> None:
    connection.execute("CREATE SCHEMA main; CREATE TABLE main.log (number int)")
    with pytest.raises(ConfigurationError, match="has tables of another program: name another schema"):
        initialize(url, SCHEMA, None, ignore)


@pytest.mark.parametrize("name", ["Main", "a b", ""])
def test_schema_name_with_other_characters_is_refused(url: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be the schema of a log"):
        initialize(url, name, None, ignore)


def test_role_needs_rights_in_the_schema_alone(
    connection: Connection, postgres: PostgresServer, postgres_database: str
) -> None:
    role = f"app_{postgres_database}"
    connection.execute(f"CREATE ROLE {role} LOGIN")
    url = f"postgresql://{role}@/{postgres_database}?host={postgres.folder}"
    try:
        text = f'an administrator of the database runs CREATE SCHEMA "main" AUTHORIZATION "{role}"'
        with pytest.raises(ConfigurationError, match=text):
            initialize(url, SCHEMA, None, ignore)
        connection.execute("CREATE SCHEMA main")
        with pytest.raises(
            ConfigurationError, match=f'its owner runs GRANT USAGE, CREATE ON SCHEMA "main" TO "{role}"'
        ):
            initialize(url, SCHEMA, None, ignore)
        connection.execute(f"GRANT USAGE, CREATE ON SCHEMA main TO {role}")
        initialize(url, SCHEMA, None, ignore)
        with psycopg.connect(host=str(postgres.folder), user=role, dbname=postgres_database) as app:
            check_layout(app, SCHEMA)
    finally:
        connection.execute(f"DROP OWNED BY {role} CASCADE")
        connection.execute(f"DROP ROLE {role}")


def test_two_initializations_at_once_make_one_log(url: str, connection: Connection, data: Path) -> None:
    def second(*_: object) -> None:
        with pytest.raises(ConfigurationError, match="is in use: another initialization is active"):
            initialize(url, SCHEMA, None, ignore)

    # The first one reports its progress often.
    reported = iter([second])
    initialize(url, SCHEMA, data, lambda *_: next(reported, ignore)())
    assert len(read_state(connection).kept) == 7


def test_database_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot connect to PostgreSQL at .*: No such file"):
        initialize(f"postgresql:///x?host={tmp_path}", SCHEMA, None, ignore)


# ---- With a folder ----


def test_log_has_all_of_a_folder(connection: Connection, url: str, tmp_path: Path) -> None:
    data = fill(tmp_path / "data", kind="embedded")
    expected = read_content(data)
    initialize(url, SCHEMA, data, ignore, next_history=(2, 60))
    state = read_state(connection)
    assert state.recovered == type(state.recovered)(
        identity=expected[0].identity,
        clean_stop=True,
        sequence_limit=1000,
        redelivered_below=900,
        queues={1: "orders", 2: "ü"},
        paused={2},
        producers={"a": ProducerState(1, 2, resolved=(1, 2))},
    )
    assert [(each.key, each.mark, tuple(each.causes), each.is_transient) for each in state.kept] == [
        (CONTENTS_LANE_KEY + (7).to_bytes(8), Mark(2, 0), ("", ""), False),
        (key(1), Mark(1, 2, 3), ("a", "b"), False),
        (key(3), Mark(0, 0), ("", ""), False),
        (key(4), Mark(5, 6, DUE_NEVER), ("", ""), True),
        (key(5), Mark(0, 0), ("", ""), True),
        (key(11), Mark(0, 0), ("", ""), False),
        (key(12, NEXT_QUEUE), Mark(0, 0), ("", ""), False),
    ]
    assert state.set_timers == [*timers(5, 6)]
    # The journal has a later run, and the history's own files a later event.
    assert read_facts(connection, SCHEMA).next_history == (4, 60)
    assert copy_position(data) == (state.recovered.identity, state.position)
    summary = check_log(url, SCHEMA, lambda damage: pytest.fail(str(damage)), ignore)
    assert (summary.timers, summary.contents) == (2, 1)
    assert {number: (each.persistent, each.transient) for number, each in summary.queues.items()} == {
        1: (3, 2),
        2: (1, 0),
    }


@pytest.mark.parametrize("clean_stop", [True, False])
@pytest.mark.parametrize("is_deleted", [True, False])
def test_broker_goes_on_with_the_log_of_a_folder(
    synced_url: str, tmp_path: Path, is_deleted: bool, clean_stop: bool
) -> None:
    data = fill(tmp_path / "data", kind="embedded", clean_stop=clean_stop)
    shutil.copytree(data, tmp_path / "before")
    initialize(synced_url, SCHEMA, data, ignore)
    if is_deleted:
        shutil.rmtree(data)
    log = open_log(synced_url)
    try:
        assert read_content(data, log=log) == read_content(tmp_path / "before")
        assert not list(data.glob("aside-*"))
    finally:
        log.close()


def test_folder_of_a_log_is_used_by_no_broker_alone(url: str, data: Path) -> None:
    initialize(url, SCHEMA, data, ignore)
    with pytest.raises(ConfigurationError, match="is a copy of a log in a database"):
        EmbeddedStore(data)
    with pytest.raises(ConfigurationError, match="is a copy of a log in a database"):
        initialize(url, "other", data, ignore)


def test_folder_in_use_is_refused(connection: Connection, url: str, data: Path) -> None:
    store = EmbeddedStore(data)
    with pytest.raises(StoreInUseError):
        initialize(url, SCHEMA, data, ignore)
    store.close()
    assert connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'main'").fetchone() == (0,)


@pytest.mark.parametrize("place", ["journal", "lmdb"])
def test_damaged_folder_is_refused(connection: Connection, url: str, data: Path, place: str) -> None:
    path = max((data / place).glob("*.journal")) if place == "journal" else data / "lmdb/data.mdb"
    content = bytearray(path.read_bytes())
    at = 30 if place == "journal" else content.rindex(b"orders") + 1
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match=f"{data} is damaged, and nothing was written: .*truenext store export"):
        initialize(url, SCHEMA, data, ignore)
    assert connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'main'").fetchone() == (0,)


def test_folder_whose_journal_has_lost_its_end_is_refused(url: str, tmp_path: Path) -> None:
    data = fill(tmp_path / "data", kind="embedded")
    with pytest.raises(StoreError, match="nothing was written"):
        initialize(url, SCHEMA, data, ignore, last_history_chunk=(3, 51))


def test_folder_that_is_none_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a data folder"):
        initialize(url, SCHEMA, tmp_path, ignore)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("step", ["begin", "write", "commit", "copy", "copied", "finish"])
def test_interrupted_initialization_leaves_the_folder_or_the_log(
    connection: Connection, url: str, data: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    expected = read_content(shutil.copytree(data, data.with_name("before")))

    def interrupt(*_: object, **__: object) -> None:
        raise Interrupted

    def copy_and_interrupt(*arguments: Any) -> None:
        become_copy(*arguments)
        raise Interrupted

    mark = layout_module.mark_layout

    def mark_or_interrupt(connection: Any, schema: str, layout: int) -> None:
        if layout == (0 if step == "commit" else LAYOUT_VERSION):
            raise Interrupted
        mark(connection, schema, layout)

    with monkeypatch.context() as patch:
        if step == "begin":
            patch.setattr(initialization, "first_position", interrupt)
        elif step == "write":
            patch.setattr(initialization, "write_snapshot", interrupt)
        elif step in ("commit", "finish"):
            patch.setattr(initialization, "mark_layout", mark_or_interrupt)
        else:
            patch.setattr(initialization, "become_copy", interrupt if step == "copy" else copy_and_interrupt)
        with pytest.raises(Interrupted):
            initialize(url, SCHEMA, data, ignore)
    with pytest.raises(ConfigurationError, match=r"has no schema|is unfinished, because `truenext store init` was"):
        check_layout(connection, SCHEMA)
    if step in ("copied", "finish"):
        with pytest.raises(ConfigurationError, match="is a copy of a log"):
            EmbeddedStore(data)
        identity, position = copy_position(data)
        initialize(url, SCHEMA, data, ignore)
        assert read_state(connection).position == position
    else:
        assert read_content(data) == expected
        identity = expected[0].identity
        initialize(url, SCHEMA, data, ignore)
    check_layout(connection, SCHEMA)
    state = read_state(connection)
    assert copy_position(data) == (identity, state.position)
    assert (state.recovered.identity, len(state.kept)) == (identity, 7)
    check_log(url, SCHEMA, lambda damage: pytest.fail(str(damage)), ignore)


def test_unfinished_log_is_finished_with_its_own_folder_only(
    connection: Connection, url: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Disk("embedded", tmp_path / "other")
    other.apply(puts=record(8), queues={1: "orders"}, sequence_limit=10)
    other.stop()
    other.store.close()
    mark = layout_module.mark_layout

    def interrupted(connection: Any, schema: str, layout: int) -> None:
        if layout:
            raise ZeroDivisionError
        mark(connection, schema, layout)

    with monkeypatch.context() as patch:
        patch.setattr(initialization, "mark_layout", interrupted)
        with pytest.raises(ZeroDivisionError):
            initialize(url, SCHEMA, data, ignore)
    # The first folder is a copy of this log: without the log nothing else would have its messages.
    for folder in (tmp_path / "other", None):
        with pytest.raises(
            ConfigurationError, match=r"has the unfinished log of the store .* run the same command again"
        ):
            initialize(url, SCHEMA, folder, ignore)
    initialize(url, SCHEMA, data, ignore)
    assert read_state(connection).kept


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.data())
def test_snapshot_of_any_folder_is_the_state_of_the_folder(
    connection: Connection, url: str, random: st.DataObject
) -> None:
    """The records are random bytes, so that the salvage must not verify them."""
    folder = Path(tempfile.mkdtemp())
    kind = random.draw(st.sampled_from(["embedded", "checkpointing"]), label="kind")
    disk = Disk(kind, folder / "data")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("truenext.store.salvage.folder.find_record_damage", lambda *_: "")
            # Each message is in a queue that has a name.
            patch.setattr(Model, "empty_queues", lambda *_: [])
            model = Model()
            # All sequences are below this.
            disk.apply(sequence_limit=1 << 40, queues={n: f"queue {n}" for n in (1, 2)})
            model.sequence_limit = 1 << 40
            model.queues = {n: f"queue {n}" for n in (1, 2)}
            for _ in range(random.draw(st.integers(1, 5), label="steps")):
                draw_batch(random, disk, model)
            disk.stop() if random.draw(st.booleans(), label="clean") else disk.crash()
            expected = content_of_open(disk)
            disk.store.close()
            connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
            initialize(url, SCHEMA, disk.folder, ignore)
        state = read_state(connection)
        found = [(each.key, each.record, each.mark, tuple(each.causes)) for each in state.kept]
        assert (sorted(found), state.set_timers) == expected
        transients = {each.key for each in state.kept if each.is_transient} - {
            each.key for each in state.kept if each.key.startswith(CONTENTS_LANE_KEY)
        }
        assert transients == {one for one, (_, persistent) in model.messages.items() if not persistent}
        assert state.recovered.producers == model.producers
        assert state.recovered.queues == model.queues
    finally:
        disk.store.close()
        shutil.rmtree(folder)


def content_of_open(disk: Disk) -> tuple[Any, ...]:
    messages = [
        (each.key, each.record, each.mark, tuple(each.causes))
        for lane in (CONTENTS_LANE_KEY, LANE, OTHER_LANE, NEXT_QUEUE)
        for each in disk.store.read_page(lane, 0, 10_000).messages
    ]
    return sorted(messages), all_timers(disk.store)
