"""Tests of configuration files: the settings they give, and the errors in them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from truenext.broker.config import Configuration, configure, format_value, toml_header
from truenext.broker.settings import BrokerSettings, LogLevel
from truenext.errors import ConfigurationError, FaultyFileError
from truenext.model.limits import (
    CONFIGURATION_BYTES_MAX,
    DATABASE_PATIENCE_MS,
    DATABASE_PATIENCE_MS_MIN,
    FAILOVER_AFTER_MS_MIN,
)
from truenext.model.policy import Policies, Policy, WhenFull
from truenext.model.setting import NO_NONE_VALUE, Setting, settings_of


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "truenext.toml"


def read(file: Path, text: str, **options: dict[str, Any]) -> Configuration:
    file.write_bytes(text.encode())
    return configure(file, **options)


def faults(file: Path, text: str | bytes) -> list[str]:
    """Return the text of each fault, without the name of the file."""
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(FaultyFileError) as raised:
        configure(file)
    assert str(raised.value) == "\n".join(raised.value.faults)
    assert all(fault.startswith(f"{file}: ") for fault in raised.value.faults)
    return [fault.removeprefix(f"{file}: ") for fault in raised.value.faults]


IN_POSTGRESQL = 'store = "postgresql://db.example/truenext"\nschema = "main"\ndatabase_limit = "9GiB"'


# ---- What it says ----


def test_empty_file_means_the_same_as_no_file(file: Path) -> None:
    found = read(file, "")
    assert found.broker == configure(None).broker == BrokerSettings()
    assert found.policies.default == Policy()
    assert found.policies.by_pattern == {}


def test_values_of_each_kind_are_read(file: Path) -> None:
    found = read(
        file,
        """
        [broker]
        listen = ["stomp://127.0.0.1:1", "openwire://localhost"]
        server_name = "ActiveMQ/5.18.3"
        data = "sub/folder"
        memory_limit = "1.5GiB"
        disk_limit = 5000000000
        when_full = "refuse"
        history = false
        history_bytes_max = "1 GB"
        history_days_max = 7
        allow_anonymous = true
        log_level = "debug"
        [policy]
        memory_limit = "none"
        """,
    )
    assert found.broker == BrokerSettings(
        listen=("stomp://127.0.0.1:1", "openwire://localhost"),
        server_name="ActiveMQ/5.18.3",
        data=file.parent / "sub/folder",
        memory_limit=3 << 29,
        disk_limit=5_000_000_000,
        when_full=WhenFull.REFUSE,
        history=False,
        history_bytes_max=10**9,
        history_days_max=7,
        allow_anonymous=True,
        log_level=LogLevel.DEBUG,
    )
    assert found.policies.default == Policy()


def test_a_pattern_inherits_from_the_default_and_from_no_other_pattern(file: Path) -> None:
    text = """
        [policy."orders.>"]
        page_size = 5
        [policy."orders.eu.>"]
        memory_limit = 77
        [policy]
        attempts_max = 3
        """
    policies = read(file, text).policies
    assert policies.for_queue("orders.eu.new") == Policy(attempts_max=3, memory_limit=77)
    assert policies.for_queue("orders.us") == Policy(attempts_max=3, page_size=5)
    assert policies.for_queue("other") == Policy(attempts_max=3)


def test_policy_values_have_a_source(file: Path) -> None:
    found = read(file, '[policy]\nattempts_max = 3\npage_size = 4\n[policy."a.*"]\npage_size = 5\n')
    sources = {name: [found.source(queue, name) for queue in ("a.b", "c")] for name in settings_of(Policy)}
    assert sources["page_size"] == ['[policy."a.*"]', "[policy]"]
    assert sources["attempts_max"] == ["[policy]", "[policy]"]
    assert sources["store_and_dispatch"] == ["default", "default"]


def test_options_go_before_the_file(file: Path) -> None:
    text = """
        [broker]
        memory_limit = "200MiB"
        history_days_max = 3
        [policy]
        page_size = 5
        attempts_max = 6
        [policy.a]
        page_size = 7
        """
    found = read(file, text, broker={"memory_limit": 1 << 30}, policy={"page_size": 9})
    assert (found.broker.memory_limit, found.broker.history_days_max) == (1 << 30, 3)
    assert (found.policies.for_queue("b").page_size, found.policies.for_queue("b").attempts_max) == (9, 6)
    assert found.policies.for_queue("a").page_size == 7


def test_a_place_that_an_option_says_is_instead_of_both_that_the_file_may_say(file: Path) -> None:
    on_disk = read(file, "[broker]\nmemory = true", broker={"data": Path("d")}).broker
    assert (on_disk.data, on_disk.memory) == (Path("d"), False)
    content = '[broker]\ndata = "d"\ndisk_limit = "9GiB"\nhistory = true\n' + IN_POSTGRESQL
    in_memory = read(file, f'{content}\nmember = "a"', broker={"memory": True}).broker
    assert in_memory == BrokerSettings(memory=True)
    in_postgresql = read(file, f"[broker]\n{IN_POSTGRESQL}", broker={"data": Path("d")}).broker
    assert (in_postgresql.data, in_postgresql.schema) == (Path("d"), "main")


# ---- What is wrong ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[broker]\nhistory = yes", ["Invalid value (at line 2, column 11)"]),
        ("[broker", ["Expected ']' at the end of a table declaration (at end of document)"]),
        ("[policy]\npage_size = 1\n\npage_size = 2\n", ["Cannot overwrite a value (at line 4, column 14)"]),
        (b"[policy]\n\npage_size = \xff", ["byte 0xff is not UTF-8 (at line 3)"]),
        ("x = " + "[" * 5000 + "]" * 5000, ["tables or arrays are nested too deeply"]),
        ("[brokr]\nx = 1", ["there is no section [brokr]; is 'broker' meant?"]),
        ("page_size = 1", ["there is no section [page_size]; known: broker, policy"]),
        ("broker = 1\n[[policy]]", ["broker must be a table: [broker]", "policy must be a table: [policy]"]),
        ("[policy]\npage_sise = 1", ["[policy]: there is no setting 'page_sise'; is 'page_size' meant?"]),
        (
            "[policy.a]\ncolour = 1",
            ["[policy.\"a\"]: there is no setting 'colour'; known: " + ", ".join(settings_of(Policy))],
        ),
        ("[policy]\npage_size = true", ["[policy] page_size must be a whole number, not true"]),
        ("[policy]\npage_size = 1.0", ["[policy] page_size must be a whole number, not 1.0"]),
        ('[policy]\npage_size = "1"', ['[policy] page_size must be a whole number, not "1"']),
        ("[policy]\npage_size = 0", ["[policy] page_size must be 1 to 100,000 messages, not 0"]),
        ("[policy]\npage_size = 100001", ["[policy] page_size must be 1 to 100,000 messages, not 100,001"]),
        (
            '[policy."orders.>"]\nattempts_max = 0',
            ['[policy."orders.>"] attempts_max must be 1 to 1,000,000 attempts, not 0'],
        ),
        (
            '[policy]\nmemory_limit = "much"',
            ['[policy] memory_limit must be a number of bytes, such as "64MiB" or 65536 or "none", not "much"'],
        ),
        (
            '[broker]\nmemory_limit = "none"',
            ['[broker] memory_limit must be a number of bytes, such as "64MiB" or 65536, not "none"'],
        ),
        ('[broker]\nmemory_limit = "127MiB"', ["[broker] memory_limit must be at least 128MiB, not 127MiB"]),
        ("[broker]\nmemory_limit = -1", ["[broker] memory_limit must be at least 128MiB, not -1"]),
        ('[broker]\nwhen_full = "wait"', ['[broker] when_full must be "slow" or "refuse", not "wait"']),
        ("[broker]\nwhen_full = []", ['[broker] when_full must be "slow" or "refuse", not []']),
        (
            "[broker]\nlog_level = {a = 1}",
            ['[broker] log_level must be "debug", "info", "warning" or "error", not a table'],
        ),
        ('[broker]\nhistory = "on"', ['[broker] history must be true or false, not "on"']),
        ('[broker]\ndata = ""', ['[broker] data must be a text, not empty, not ""']),
        (
            '[broker]\nlisten = "stomp://localhost"',
            ['[broker] listen must be a list with at least one text, such as ["..."], not "stomp://localhost"'],
        ),
        (
            "[broker]\nlisten = []",
            ['[broker] listen must be a list with at least one text, such as ["..."], not []'],
        ),
        (
            '[policy]\ndead_letters = "/queue/failed"',
            [
                "[policy] dead_letters is not the name of a queue (without /queue/): destination "
                "'/queue//queue/failed' has no name, or its name begins with /"
            ],
        ),
        (
            '[broker]\nhealth = "http://localhost"',
            ["[broker] health 'http://localhost' is not HOST:PORT, such as 0.0.0.0:8080, or a port"],
        ),
        (
            '[broker]\nhealth = "a:70000"',
            ["[broker] health 'a:70000' is not HOST:PORT, such as 0.0.0.0:8080, or a port"],
        ),
        (
            '[broker]\nmetrics_queues = ["orders.>.new", "/queue/orders"]',
            [
                "[broker] metrics_queues has 'orders.>.new', which is no pattern of queue names: "
                "> is allowed only as the last word"
            ],
        ),
        (
            '[broker]\nmetrics_queues = ["/queue/orders"]',
            ["[broker] metrics_queues has '/queue/orders', which is no pattern of queue names: leave /queue/ out"],
        ),
        ('[broker]\nlog_format = "xml"', ['[broker] log_format must be "text" or "json", not "xml"']),
        (
            '[broker]\nlisten = ["http://x"]',
            [
                "[broker] listen has an address that cannot be listened on: 'http://x' is not the address of a broker: "
                "it must be stomp://HOST:PORT or openwire://HOST:PORT, or with TLS stomp+ssl://HOST:PORT or "
                "openwire+ssl://HOST:PORT"
            ],
        ),
        (
            '[broker]\ndata = "d"\nmemory = true\ndisk_limit = "5GiB"\nhistory = true',
            [
                "[broker] data cannot be set with memory = true, which stores nothing on disk",
                "[broker] disk_limit cannot be set with memory = true, which stores nothing on disk",
                "[broker] history cannot be set with memory = true, which stores nothing on disk",
            ],
        ),
        (
            f"[broker]\nmemory = true\n{IN_POSTGRESQL}",
            [
                "[broker] store cannot be set with memory = true, which stores nothing on disk",
                "[broker] schema cannot be set with memory = true, which stores nothing on disk",
                "[broker] database_limit cannot be set with memory = true, which stores nothing on disk",
            ],
        ),
        (
            '[broker]\nstore = "mysql://db.example/main"',
            ["[broker] store must begin with postgresql:// or postgres://"],
        ),
        (
            '[broker]\nstore = "postgresql:///main"',
            ["[broker] store needs schema, too", "[broker] store needs database_limit, too"],
        ),
        (
            '[broker]\nstore = "postgresql://me:s3cret@db.example/main"',
            [
                "[broker] store must have no password: put the password into a passfile (~/.pgpass, or the file that "
                "PGPASSFILE names) or into a service file"
            ],
        ),
        (
            '[broker]\nschema = "Main"',
            ["[broker] schema must have 1 to 63 characters: a to z, 0 to 9 and _, no digit first"],
        ),
        ('[broker]\ndurability = "sync"', ['[broker] durability must be "replicated" or "local", not "sync"']),
        ('[broker]\ndatabase_limit = "1MiB"', ["[broker] database_limit must be at least 1GiB, not 1MiB"]),
        (
            '[broker]\ndatabase_limit = "none"',
            ['[broker] database_limit must be a number of bytes, such as "64MiB" or 65536, not "none"'],
        ),
        (
            "[broker]\ndatabase_patience_ms = 100",
            ["[broker] database_patience_ms must be 5,000 to 3,600,000 milliseconds, not 100"],
        ),
        (
            "[broker]\nfailover_after_ms = 1999",
            ["[broker] failover_after_ms must be at least 2,000 milliseconds, not 1,999"],
        ),
        (
            "[broker]\nfailover_after_ms = 30001",
            ["[broker] failover_after_ms must be at most database_patience_ms, 30,000 milliseconds, not 30,001"],
        ),
        (
            "[broker]\ndatabase_patience_ms = 5000\nfailover_after_ms = 5001",
            ["[broker] failover_after_ms must be at most database_patience_ms, 5,000 milliseconds, not 5,001"],
        ),
        (
            '[broker]\nmember = "a@b"',
            ["[broker] member must have 1 to 63 characters: letters, digits, _, . and -, the last two not first"],
        ),
        ('[policy."a..b"]', ['[policy."a..b"] is not a pattern of queue names: it has an empty word']),
        ('[policy.""]', ['[policy.""] is not a pattern of queue names: it has an empty word']),
        (
            '[policy."a.>.b"]',
            ['[policy."a.>.b"] is not a pattern of queue names: > is allowed only as the last word'],
        ),
        (
            '[policy."a*.b"]',
            ["[policy.\"a*.b\"] is not a pattern of queue names: 'a*': * and > are whole words, not parts of one"],
        ),
        ('[policy."/queue/a"]', ['[policy."/queue/a"]: a pattern of queue names has no /queue/: leave it out']),
        (
            "[policy.a.b]\npage_size = 2",
            ['a.b has dots and no quotes: write a pattern with dots in quotes, as in [policy."a.b"]'],
        ),
    ],
)
def test_a_fault_of_a_file_names_the_table_and_the_key(file: Path, text: str | bytes, expected: list[str]) -> None:
    assert faults(file, text) == expected


def test_the_faults_of_a_file_come_all_at_once_and_in_its_order(file: Path) -> None:
    text = (
        '[policy.">.a"]\npage_size = 0\n[policy]\nattempts_max = """\nx"""\nnew = 1\n[policy.b]\nc = 1\n[policy.b.d]\n'
        "[broker]\nhistory = true\nmemory = true\ndata = 1\n[x]\n"
    )
    named = [
        '[policy.">.a"] is not a pattern',
        '[policy.">.a"] page_size',
        "[policy] attempts_max",
        "[policy]: there is no setting 'new'",
        "[policy.\"b\"]: there is no setting 'c'",
        "b.d has dots and no quotes",
        "[broker] history cannot be",
        "[broker] data must be",
        "there is no section [x]",
    ]
    for line_end in ("\n", "\r\n"):
        found = faults(file, text.replace("\n", line_end))
        assert [fault[: len(start)] for fault, start in zip(found, named, strict=True)] == named


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (" ", "must be a printable text, not empty"),
        (" x", "must not begin or end with a blank, which STOMP 1.0 removes"),
        ("x" * 256, "has 256 characters; at most 255"),
    ],
)
def test_a_server_name_that_cannot_stand_in_a_header_is_refused(file: Path, name: str, why: str) -> None:
    assert faults(file, f'[broker]\nserver_name = "{name}"') == [f"[broker] server_name {why}"]
    assert len(faults(file, '[broker]\nserver_name = "two\\nlines"')) == 1
    assert read(file, f'[broker]\nserver_name = "{"x" * 255}"').broker.server_name == "x" * 255


def test_a_number_that_python_does_not_read_is_refused(file: Path) -> None:
    (fault,) = faults(file, "[policy]\npage_size = " + "9" * 5000)
    assert fault.startswith("Exceeds the limit")


def test_error_about_a_long_value_is_short(file: Path) -> None:
    (fault,) = faults(file, f'[policy]\npage_size = "{"x" * 1000}"')
    assert len(fault) < 150


def test_a_file_that_is_not_there_is_no_faulty_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*nothing: No such file or directory") as raised:
        configure(tmp_path / "nothing")
    assert not isinstance(raised.value, FaultyFileError)


@contextmanager
def released_after_a_while(fifo: Path) -> Iterator[None]:
    """Release a reader of the fifo after ten seconds, so that the test fails instead of hanging."""

    def release() -> None:
        with suppress(OSError):
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))

    timer = threading.Timer(10, release)
    timer.start()
    try:
        yield
        assert timer.is_alive(), "the FIFO was waited for"
    finally:
        timer.cancel()


def test_configuration_file_that_is_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    fifo = tmp_path / "truenext.toml"
    os.mkfifo(fifo)
    with released_after_a_while(fifo), pytest.raises(ConfigurationError) as raised:
        configure(fifo)
    assert str(raised.value) == (f"cannot read {fifo}: it is a FIFO, not a regular file: copy its content to one")
    assert not isinstance(raised.value, FaultyFileError)


def test_configuration_file_that_becomes_a_fifo_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regular, fifo = tmp_path / "regular", tmp_path / "truenext.toml"
    regular.touch()
    os.mkfifo(fifo)
    status = regular.stat()
    monkeypatch.setattr(Path, "stat", lambda self, **_: status)
    with released_after_a_while(fifo), pytest.raises(ConfigurationError, match="it is a FIFO"):
        configure(fifo)


def test_configuration_file_that_is_a_link_to_a_device_is_refused_and_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "truenext.toml"
    link.symlink_to("/dev/zero")
    monkeypatch.delattr(os, "open")
    with pytest.raises(ConfigurationError, match="it is a device, not a regular file"):
        configure(link)


def test_configuration_file_that_is_too_large_is_refused_and_the_largest_is_read(file: Path) -> None:
    content = "[policy]\nattempts_max = 3\n"
    file.write_text(content.ljust(CONFIGURATION_BYTES_MAX, "\n"))
    assert configure(file).policies.default.attempts_max == 3
    file.write_text(content.ljust(CONFIGURATION_BYTES_MAX + 1, "\n"))
    with pytest.raises(ConfigurationError) as raised:
        configure(file)
    assert str(raised.value) == (f"cannot read {file}: a configuration file has at most 1048576 bytes")


# ---- Any file ----


def values(setting: Setting) -> st.SearchStrategy[Any]:
    """Return a strategy for the valid values of a setting."""
    kind = setting.kind
    strategy: st.SearchStrategy[Any]
    if kind is bool:
        return st.booleans()
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if setting.name == "metrics_queues":
        return st.lists(PATTERNS, min_size=1).map(tuple) | st.just(setting.none)
    if kind is tuple:
        return st.lists(st.sampled_from(["stomp://127.0.0.1:0", "stomp://a.b:61613"]), min_size=1).map(tuple)
    if kind is Path:
        return st.text("ab/. \"'\\é", min_size=1, max_size=9).map(Path).filter(lambda path: str(path) != ".")
    if setting.name == "failover_after_ms":
        # No more than the lowest `database_patience_ms`.
        return st.integers(FAILOVER_AFTER_MS_MIN, DATABASE_PATIENCE_MS_MIN)
    if kind is int:
        least, most = (None if end is None else int(end) for end in (setting.least, setting.most))
        strategy = st.integers(least, most if most is not None else 1 << 62)
    elif setting.name == "store":
        strategy = st.sampled_from(["postgresql://db.example/main", "postgres:///main?host=/run"])
    elif setting.name == "member":
        strategy = st.from_regex("[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}", fullmatch=True)
    elif setting.name == "health":
        strategy = st.sampled_from(["8080", "0.0.0.0:8080", "[::1]:0", "broker.example:9"])
    elif setting.name == "schema":
        strategy = st.from_regex("[a-oq-z_][a-z0-9_]{0,62}", fullmatch=True)
    else:
        assert kind in (float, str), f"{setting.name}: say here how to make a {kind}"
        strategy = st.floats(setting.least, setting.most) if kind is float else st.text("ab.", min_size=1)
    return strategy if setting.none is NO_NONE_VALUE else strategy | st.just(setting.none)


def tables(described: type) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: values(each) for name, each in settings_of(described).items()})


PATTERNS = st.builds(
    lambda words, end: ".".join([*words, *end]),
    st.lists(st.sampled_from(["a", "*", "b c", 'd"e', "f\\g", "é"]), min_size=1, max_size=3),
    st.sampled_from([[], [">"]]),
)


ON_DISK = {"data", "disk_limit", "backup_dir", "store", "schema", "database_limit", "member"}


def is_possible(of_broker: dict[str, Any]) -> bool:
    kept_on_disk = ON_DISK & of_broker.keys() or of_broker.get("history")
    is_complete = not of_broker.get("store") or {"schema", "database_limit"} <= of_broker.keys()
    patience = of_broker.get("database_patience_ms", DATABASE_PATIENCE_MS)
    is_patient = of_broker.get("failover_after_ms", 0) <= patience
    return is_complete and is_patient and (not of_broker.get("memory") or not kept_on_disk)


def written(of_broker: dict[str, Any], default: dict[str, Any], patterns: dict[str, dict[str, Any]]) -> str:
    sections: list[tuple[str, type, dict[str, Any]]] = [(toml_header("broker"), BrokerSettings, of_broker)]
    sections += [(toml_header("policy"), Policy, default)]
    sections += [(toml_header("policy", pattern), Policy, each) for pattern, each in patterns.items()]
    lines = []
    for head, described, table in sections:
        lines.append(head)
        lines += [f"{name} = {format_value(settings_of(described)[name], value)}" for name, value in table.items()]
    return "\n".join(lines)


FILES = st.tuples(
    tables(BrokerSettings).filter(is_possible),
    tables(Policy),
    st.dictionaries(PATTERNS, tables(Policy), max_size=3),
)
QUICKLY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@QUICKLY
@given(FILES)
def test_a_configuration_that_is_written_is_read_as_the_same(
    file: Path, content: tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]
) -> None:
    of_broker, default, patterns = content
    found = read(file, written(*content))
    expected = BrokerSettings(**of_broker)
    paths = {
        name: getattr(expected, name) for name, setting in settings_of(BrokerSettings).items() if setting.kind is Path
    }
    expected = replace(expected, **{name: file.parent / path for name, path in paths.items() if path is not None})
    assert found.broker == expected
    assert found.policies.default == Policy(**default)
    assert found.policies.by_pattern == {pattern: Policy(**{**default, **each}) for pattern, each in patterns.items()}


DAMAGE = st.lists(
    st.tuples(
        st.integers(0, 1000),
        st.integers(0, 3),
        st.binary(max_size=3) | st.sampled_from([b"[", b"]", b'"', b".", b"\n"]),
    ),
    min_size=1,
    max_size=4,
)


@QUICKLY
@given(FILES, DAMAGE)
@example(({}, {}, {}), [(0, 0, b"\xef\xbb\xbf")])
@example(({}, {}, {}), [(0, 9, b"[policy]\na = [{'x' = 1}]\n")])
def test_damage_to_a_file_is_a_fault_or_none_and_never_a_crash(
    file: Path,
    content: tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]],
    damage: list[tuple[int, int, bytes]],
) -> None:
    text = written(*content).encode()
    for at, left_out, more in damage:
        at %= len(text) + 1
        text = text[:at] + more + text[at + left_out :]
    file.write_bytes(text)
    try:
        found = configure(file)
    except FaultyFileError as error:
        assert error.faults
        assert all(fault.startswith(f"{file}: ") for fault in error.faults)
    else:
        assert isinstance(found.policies, Policies)


@dataclass(frozen=True)
class Undescribed:
    size: int = 7


def test_a_setting_that_is_not_described_is_noticed() -> None:
    with pytest.raises(TypeError, match=r"Undescribed\.size is not described"):
        settings_of(Undescribed)
