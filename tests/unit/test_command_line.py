"""Tests that invalid arguments are refused in one sentence, with status 2, by each command that click knows."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import click
import pytest
from click.testing import CliRunner, Result

from truenext.broker.settings import BrokerSettings, Durability
from truenext.cli import logs, serve_command, terminal
from truenext.cli.audit import audit
from truenext.cli.bulk_work import BulkWork
from truenext.cli.connection import BrokerOptions
from truenext.cli.exit_status import MESSAGE_LENGTH_MAX, _print_error
from truenext.cli.main import main
from truenext.cli.queues import COUNTS
from truenext.cli.stages import run, service_broker
from truenext.cli.user import CLIENT_ID, NAME, PATTERN
from truenext.cli.values import (
    ANY_TEXT,
    DATABASE_URL,
    HOST_AND_PORT,
    LISTENER_URL,
    MEMBER,
    QUERY_ID,
    SCHEMA,
    SELECTOR,
    SERVER_NAME,
    SERVICE,
    SPARK_MASTER,
    STORE_URL,
    TEXT,
    URL,
    BodyParam,
    DelayParam,
    DestinationParam,
    EnumParam,
    HeaderParam,
    PathParam,
    QueueNameParam,
    SecondsParam,
    SizeParam,
    TimeParam,
)
from truenext.client.core.credentials import NO_CREDENTIALS, Credentials
from truenext.errors import (
    ConfigurationError,
    HistoryError,
    StoreError,
    StoreFencedError,
    StoreForgottenError,
    StoreInUseError,
    TruenextError,
)
from truenext.model.url import DEFAULT_URL

NO_UTF_8 = os.fsdecode(b"a\xff")
"""Text that Python makes of an argument in another encoding."""

NO_NUMBERS = ["", "x", "nan", "inf", "-inf", "1e10", "\x1b[31m1", "1 2", NO_UTF_8]
NO_TEXTS = ["", "a\x1b[31m", "a\n", NO_UTF_8]
LONG = "x" * 100_000
SECRET = "s3cret"
WITH_PASSWORD = f"postgresql://me:{SECRET}@db.example/truenext"
NO_BROKER_URL = "stomp://127.0.0.1:1"


def of_range(kind: click.IntRange) -> list[str]:
    assert kind.min is not None and kind.max is not None
    return [*NO_NUMBERS, "9" * 5000, str(int(kind.min) - 1), str(int(kind.max) + 1)]


def of_size(kind: SizeParam) -> list[str]:
    return [*NO_NUMBERS, "-1", "1 parsec", "9" * 5000, str(kind._minimum - 1)]


NO_URLS = [*NO_TEXTS, "nan", "127.0.0.1:1", "stomp://h:99999", "stomp://h:x", "stomp://h\n:1", "http://h:1"]
NONSENSE: dict[object, Callable[[Any], list[str]]] = {
    click.IntRange: of_range,
    type(click.INT): lambda kind: [*NO_NUMBERS, "9" * 5000],
    click.Choice: lambda kind: [*NO_NUMBERS, LONG],
    click.DateTime: lambda kind: [*NO_NUMBERS, "2026-13-01", LONG],
    SecondsParam: lambda kind: [*NO_NUMBERS, "-1", "0", "604801", "1e400", "9" * 5000],
    DelayParam: lambda kind: [*NO_NUMBERS, "3", "-3d", "3 w", "40000d", f"{'9' * 5000}d", NO_UTF_8],
    TimeParam: lambda kind: [*NO_NUMBERS, "2026-13-01T00:00Z", "2026-12-01", "2026-12-01T08:00", LONG, NO_UTF_8],
    SizeParam: of_size,
    URL: lambda kind: [*NO_URLS, "openwire://h:1"],
    LISTENER_URL: lambda kind: NO_URLS,
    DestinationParam: lambda kind: [
        *NO_TEXTS,
        LONG,
        "/nowhere/q",
        "/queue/",
        "a\u202eb",
        "subscription,",
        "/queue/a.>.b",
        "queue://q",
    ],
    QueueNameParam: lambda kind: [*NO_TEXTS, LONG, "/queue/", "a\u202eb", "queue://q"],
    SELECTOR: lambda kind: ["", "a =", "\x1b", LONG, NO_UTF_8, "a = 'x"],
    HeaderParam: lambda kind: ["", "a", "=", "=b", "priority=4", NO_UTF_8, f"a={NO_UTF_8}", LONG],
    TEXT: lambda kind: NO_TEXTS,
    ANY_TEXT: lambda kind: [NO_UTF_8],
    QUERY_ID: lambda kind: [*NO_TEXTS, LONG, "x.y", "a b"],
    SERVER_NAME: lambda kind: [*NO_TEXTS, LONG, " a", "a "],
    SPARK_MASTER: lambda kind: [*NO_NUMBERS, LONG, "local[x]", "local[0]", "spark:// ", "http://h"],
    SERVICE: lambda kind: [*NO_TEXTS, "shop", "shop:", ":app", "shop.py:app:x", "shop:a-b", "a/b:c", LONG],
    HOST_AND_PORT: lambda kind: [*NO_NUMBERS, ":1", "h:", "h\n:1", "h:65536", "h:x", "70000", LONG],
    STORE_URL: lambda kind: [*NO_TEXTS, LONG, "data", "mysql:///shop", WITH_PASSWORD, "postgresql://h/?password=p"],
    SCHEMA: lambda kind: [*NO_TEXTS, LONG, "Main", "2", "pg_x", "a-b", "a" * 64],
    MEMBER: lambda kind: [*NO_TEXTS, LONG, "-a", ".a", "a b", "a@b", "a" * 64],
    DATABASE_URL: lambda kind: [*NO_TEXTS, LONG, "shop", "://shop", "a b://shop", "sqlite:///a\n"],
    NAME: lambda kind: [*NO_TEXTS, LONG, "a b", "a/b", "ä", "a" * 65],
    PATTERN: lambda kind: [*NO_TEXTS, "/queue/", "/nowhere/q", "a.>.b", "a,b", "a..*", "topic://q"],
    CLIENT_ID: lambda kind: [*NO_TEXTS, "a,b", "a*", ">"],
    EnumParam: lambda kind: [*NO_NUMBERS, LONG, "monitor"],
    BodyParam: lambda kind: [],
}
"""Invalid values by type, or by its class. A new one needs a row here, an empty one if it accepts any text."""

SENSE: dict[object, str] = {
    QUERY_ID: "ab",
    click.IntRange: "1",
    DestinationParam: "q",
    SERVICE: "nowhere:app",
    TEXT: "order.place",
    ANY_TEXT: "x",
    QueueNameParam: "q",
    BodyParam: "b",
    click.Choice: "mix",
    NAME: "shop",
    STORE_URL: "postgresql:///truenext",
    SCHEMA: "main",
    PATTERN: "q",
    EnumParam: "send",
}


def key_of(kind: click.ParamType[Any]) -> object:
    return kind if kind in NONSENSE else type(kind)


def walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            each = command.get_command(context, name)
            assert each is not None
            yield from walk(each, (*path, name))
    else:
        yield path, command


ALL = [(path, command, param) for path, command in walk(main) for param in command.params]
READ = {("config", "check"), ("store", "check"), ("store", "export"), ("history", "export"), ("audit",)}
"""The first argument of these must be there."""


def name_of(case: object) -> str:
    match case:
        case click.Parameter():
            return case.opts[-1]
        case tuple():
            return " ".join(case)
    return "-"


def bad_paths(folder: Path, path: tuple[str, ...], param: click.Parameter) -> list[str]:
    file = folder / "file"
    file.touch()
    assert isinstance(param.type, PathParam)
    found = ["", str(folder / LONG), str(file / "below"), "a\0b"]
    is_read = path in READ and param is main_argument(path)
    if param.type.exists or is_read:
        found.append(str(folder / "missing"))
    if not param.type.file_okay or (is_read and path[0] == "store"):
        found.append(str(file))
    if not param.type.dir_okay or path == ("config", "check"):
        found.append(str(folder))
    return found


def main_argument(path: tuple[str, ...]) -> click.Parameter:
    (command,) = (command for other, command in walk(main) if other == path)
    return next(param for param in command.params if isinstance(param, click.Argument))


def sense(param: click.Parameter, folder: Path) -> str:
    if isinstance(param.type, PathParam):
        return str(folder if param.type.dir_okay and param.name != "new" else folder / "new")
    return SENSE[key_of(param.type)]


def call(path: tuple[str, ...], command: click.Command, values: dict[click.Parameter, str], folder: Path) -> Result:
    """With these values, and sensible ones where something must be said."""
    options: list[str] = []
    arguments: list[str] = []
    for param in command.params:
        if param in values or param.required:
            value = values[param] if param in values else sense(param, folder)
            if isinstance(param, click.Argument):
                arguments.append(value)
            else:
                options += [param.opts[0], value]
        elif param.name == "url":
            options += ["--url", NO_BROKER_URL]
    return CliRunner().invoke(main, [*path, *options, "--", *arguments])


def check_usage_error(result: Result) -> str:
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("truenext: ") and result.stderr.count("\n") == 1
    assert terminal.escape_line(result.stderr[:-1]) == result.stderr[:-1]
    assert len(result.stderr) < MESSAGE_LENGTH_MAX + 100
    return result.stderr


@pytest.mark.parametrize(("path", "command", "param"), ALL, ids=name_of)
def test_nonsense_is_refused_in_one_sentence(
    path: tuple[str, ...], command: click.Command, param: click.Parameter, tmp_path: Path
) -> None:
    if isinstance(param, click.Option) and param.is_flag:
        result = CliRunner().invoke(main, [*path, f"{param.opts[0]}=nan"])
        assert param.opts[0] in check_usage_error(result)
        return
    is_path = isinstance(param.type, PathParam)
    values = bad_paths(tmp_path, path, param) if is_path else NONSENSE[key_of(param.type)](param.type)
    before = sorted(tmp_path.rglob("*"))
    for value in values:
        message = check_usage_error(call(path, command, {param: value}, tmp_path))
        # Nothing else was wrong, or said to be.
        assert param.get_error_hint(click.Context(command)) in message or (is_path and value in message), (
            value,
            message,
        )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("path", "command"), list(walk(main)), ids=name_of)
def test_an_option_that_there_is_not_and_an_argument_too_many_are_refused(
    path: tuple[str, ...], command: click.Command, tmp_path: Path
) -> None:
    check_usage_error(CliRunner().invoke(main, [*path, "--nonsense"]))
    check_usage_error(CliRunner().invoke(main, [*path, "--\x1b[31m"]))
    if not any(param.nargs == -1 for param in command.params):
        arguments = [str(tmp_path) for param in command.params if isinstance(param, click.Argument)]
        check_usage_error(CliRunner().invoke(main, [*path, *arguments, "one too many"]))


def test_a_command_that_there_is_not_is_refused() -> None:
    for words in (["nonsense"], ["config", "nonsense"], ["\x1b[31m"], ["--nonsense"]):
        check_usage_error(CliRunner().invoke(main, words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["recieve", "q"], "No such command 'recieve'. Did you mean 'receive'? See truenext --help"),
        (["stages", "rnu"], "No such command 'rnu'. Did you mean 'run'? See truenext stages --help"),
        (["store", "xport"], "No such command 'xport'. Did you mean 'export'? See truenext store --help"),
        (["queues", "--jsno"], "No such option '--jsno'. Did you mean '--json'? See truenext queues --help"),
    ],
)
def test_misspelt_command_or_option_is_answered_with_the_one_that_is_like_it(words: list[str], expected: str) -> None:
    assert check_usage_error(CliRunner().invoke(main, words, prog_name="truenext")) == f"truenext: {expected}\n"


@pytest.mark.parametrize(
    ("option", "name", "table"),
    [("--failover-after-ms", "failover_after_ms", "broker"), ("--attempts-max", "attempts_max", "policy")],
)
def test_option_with_the_name_of_a_setting_is_answered_with_the_place_of_the_setting(
    option: str, name: str, table: str
) -> None:
    expected = f"No such option '{option}': set {name} in [{table}] of the file of --config; see truenext serve --help"
    result = CliRunner().invoke(main, ["serve", "--memory", option, "5"], prog_name="truenext")
    assert check_usage_error(result) == f"truenext: {expected}\n"


IN_POSTGRESQL = ["--store", "postgresql:///truenext", "--schema", "main", "--database-limit", "2GiB"]


@pytest.mark.parametrize(
    "words",
    [
        ["receive", "q", "--all", "--count", "1"],
        ["receive", "q", "--all", "--follow"],
        ["receive", "q", "--count", "1", "--follow"],
        ["send", "q", "body", "--lines"],
        ["send", "q", "body", "--file", "-"],
        ["serve", "--memory", "--disk-limit", "10GiB"],
        ["serve", "--memory", "--history"],
        ["serve", "--memory", "--data", "somewhere"],
        ["serve", "--memory", *IN_POSTGRESQL],
        ["serve", "--data", "somewhere", "--schema", "main"],
        ["serve", "--data", "somewhere", "--database-limit", "2GiB"],
        ["serve", "--data", "somewhere", "--member", "host1"],
        ["serve", "--data", "somewhere", "--take-over"],
        ["serve", "--data", "somewhere", *IN_POSTGRESQL[:4]],
        ["serve", "--data", "somewhere", *IN_POSTGRESQL[:2], *IN_POSTGRESQL[4:]],
        ["record", "--out", "somewhere", "--seed", "1"],
        ["record", "--out", "somewhere", "--seed", "1", "--case", "alternation"],
    ],
    ids=" ".join,
)
def test_options_that_contradict_one_another_are_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_usage_error(CliRunner().invoke(main, words))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StoreFencedError("another broker has taken over"), 3),
        (StoreForgottenError("rows are lost"), 4),
        (StoreInUseError("the folder is in use"), 2),
        (StoreError("the disk fails"), 1),
        (HistoryError("the disk fails"), 1),
        (ConfigurationError("another broker is active"), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_broker_that_fails_exits_with_the_status_of_its_error(
    error: TruenextError, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_command, "run_broker", mock.Mock(side_effect=error))
    monkeypatch.setattr(logs, "configure_logging", mock.Mock())
    done = CliRunner().invoke(main, ["serve", "--memory"])
    assert (done.exit_code, done.output) == (status, f"truenext: {error}\n")


def test_options_of_a_broker_with_postgresql_are_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_broker = mock.Mock()
    monkeypatch.setattr(serve_command, "run_broker", run_broker)
    monkeypatch.setattr(logs, "configure_logging", mock.Mock())
    words = ["serve", "--data", str(tmp_path), *IN_POSTGRESQL]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert CliRunner().invoke(main, [*words, "--durability", "local", "--take-over"]).exit_code == 0
    settings = BrokerSettings(data=tmp_path, store="postgresql:///truenext", schema="main", database_limit=2 << 30)
    (first, second) = run_broker.call_args_list
    assert (first.args[0].broker, first.kwargs) == (settings, {"take_over": False})
    assert second.args[0].broker == replace(settings, durability=Durability.LOCAL)
    assert second.kwargs == {"take_over": True}


def test_folder_on_a_network_disk_is_refused_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C28.19"""
    refuse = mock.Mock(side_effect=ConfigurationError("on a network file system"))
    monkeypatch.setattr("truenext.cli.serve.check_is_local", refuse)
    monkeypatch.setattr("truenext.cli.serve.EmbeddedStore", mock.Mock(side_effect=StoreError("opened")))
    words = ["serve", "--data", str(tmp_path / "data")]
    refused = CliRunner().invoke(main, words)
    assert (refused.exit_code, refused.stderr) == (2, "truenext: on a network file system\n")
    allowed = CliRunner().invoke(main, [*words, "--allow-network-disk"])
    assert (allowed.exit_code, allowed.stderr) == (1, "truenext: opened\n")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["serve", "--data", "somewhere", "--store", WITH_PASSWORD], "must have no password"),
        (["store", "init", WITH_PASSWORD, "--schema", "main"], "must have no password"),
        (["store", "check", WITH_PASSWORD, "--schema", "main"], "must have no password"),
        (["store", "check", f"mysql://me:{SECRET}@db.example/truenext"], "must begin with postgresql://"),
        (["store", "check", f"postgresql://db.example/truenext?password={SECRET}"], "must have no password"),
    ],
    ids=str,
)
def test_a_password_in_a_url_of_a_database_is_refused_and_not_shown(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = check_usage_error(CliRunner().invoke(main, words))
    assert reason in message
    assert SECRET not in message


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["somewhere", "--schema", "main"], "--schema is for a database"),
        (["postgresql:///truenext"], "name the broker's with --schema NAME"),
    ],
    ids=str,
)
def test_check_of_a_store_needs_a_schema_for_a_database_and_none_for_a_folder(words: list[str], reason: str) -> None:
    assert reason in check_usage_error(CliRunner().invoke(main, ["store", "check", *words]))


@pytest.mark.parametrize(
    "words",
    [
        ["export", "postgresql:///messages", "new"],
        ["export", WITH_PASSWORD, "new"],
        ["detach", "postgresql:///messages"],
    ],
    ids=str,
)
def test_database_in_place_of_a_data_folder_is_refused_with_the_way_into_a_folder(words: list[str]) -> None:
    message = check_usage_error(CliRunner().invoke(main, ["store", *words]))
    assert "a database is no data folder: start a broker with --store and a new folder" in message
    assert SECRET not in message
    assert not Path("new").exists()


def test_detach_of_a_missing_folder_says_that_there_is_none() -> None:
    message = check_usage_error(CliRunner().invoke(main, ["store", "detach", "nowhere"]))
    assert "'nowhere' does not exist" in message


def test_help_names_all_options_and_exits_0() -> None:
    for path, command in walk(main):
        result = CliRunner().invoke(main, [*path, "--help"])
        assert result.exit_code == 0
        assert all(param.opts[-1] in result.output for param in command.params if isinstance(param, click.Option))


@pytest.mark.parametrize("command", ["send", "receive", "queues", "stages"])
def test_client_commands_load_no_module_of_the_broker(command: str) -> None:
    """Loading the broker's modules would double the start time."""
    code = (
        "import sys; from truenext.cli.main import main; "
        f"main(['{command}', '--help'], standalone_mode=False); "
        "print([name for name in sys.modules if name.startswith(('truenext.engine', 'truenext.store'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


OTHER_WORDS = {"--broker", "--address", "--server", "--limit", "--max", "--messages", "--number"}
"""Wrong names for `--url` and `--count`."""


def test_options_for_the_broker_and_for_a_number_of_messages_have_one_name_everywhere() -> None:
    options = [(path, param) for path, _, param in ALL if isinstance(param, click.Option)]
    # The console has an address of its own, too: `--broker` is not `--listen`.
    assert {param.opts[-1] for path, param in options if param.type is URL and path != ("console",)} == {"--url"}
    assert [(*path, param.opts[-1]) for path, param in options if param.type is LISTENER_URL] == [("serve", "--listen")]
    wrong = [(path, param.opts) for path, param in options if OTHER_WORDS.intersection(param.opts)]
    assert wrong == [(("console",), ["--broker"])]


def test_url_of_openwire_is_refused_by_a_command_that_connects() -> None:
    result = CliRunner().invoke(main, ["queues", "--url", "openwire://127.0.0.1:61616"])
    assert result.exit_code == 2
    assert "truenext's clients speak STOMP: use stomp://HOST:PORT or stomp+ssl://HOST:PORT" in result.output


def test_broker_addresses_are_taken_from_the_environment_except_for_describe() -> None:
    urls = {path: param for path, _, param in ALL if param.opts[-1] == "--url"}
    described = urls.pop(("stages", "describe"))
    assert described.envvar is None
    assert {param.envvar for param in urls.values()} == {"TRUENEXT_URL"}
    for path in urls:
        assert "TRUENEXT_URL" in CliRunner().invoke(main, [*path, "--help"]).output


@pytest.mark.parametrize(
    ("options", "variable", "used"),
    [
        ([], "stomp://127.0.0.1:2", "stomp://127.0.0.1:2"),
        ([], "", DEFAULT_URL),
        ([], "  ", DEFAULT_URL),
        (["--url", NO_BROKER_URL], "stomp://127.0.0.1:2", NO_BROKER_URL),
    ],
)
def test_url_option_overrides_the_variable_and_a_blank_variable_is_unset(
    options: list[str], variable: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, _ = broker_of_queues(options, {"TRUENEXT_URL": variable}, monkeypatch)
    assert broker is not None and broker.urls == (used,)


def broker_of_queues(
    options: list[str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> tuple[BrokerOptions | None, Result]:
    """Return the broker to which `truenext queues` would connect; None if it refuses its command line."""
    brokers = []

    def not_connected(broker: BrokerOptions, **_: object) -> NoReturn:
        brokers.append(broker)
        raise SystemExit

    monkeypatch.setattr("truenext.cli.queues.connected", not_connected)
    result = CliRunner().invoke(main, ["queues", *options], env=variables)
    return (brokers[0] if brokers else None), result


def test_a_variable_that_is_no_address_is_named_in_the_error() -> None:
    message = check_usage_error(CliRunner().invoke(main, ["queues"], env={"TRUENEXT_URL": "localhost"}))
    assert "TRUENEXT_URL" in message and "'localhost'" in message


def test_bad_address_on_the_command_line_is_not_attributed_to_the_variable() -> None:
    message = check_usage_error(
        CliRunner().invoke(main, ["queues", "--url", "localhost"], env={"TRUENEXT_URL": NO_BROKER_URL})
    )
    assert "TRUENEXT_URL" not in message and "'localhost'" in message


WITH_URL = [(path, param) for path, _, param in ALL if param.opts[-1] == "--url"]
SEVERAL = (NO_BROKER_URL, DEFAULT_URL)


@pytest.mark.parametrize(("path", "param"), WITH_URL, ids=name_of)
def test_url_option_is_repeated_for_several_addresses(path: tuple[str, ...], param: click.Parameter) -> None:
    assert param.multiple
    message = check_usage_error(CliRunner().invoke(main, [*path, "--url", ", ".join(SEVERAL)]))
    assert "TRUENEXT_URL" not in message and "repeat --url for each" in message


def test_variable_with_commas_between_its_addresses_is_refused() -> None:
    message = check_usage_error(CliRunner().invoke(main, ["queues"], env={"TRUENEXT_URL": ",".join(SEVERAL)}))
    assert "TRUENEXT_URL" in message and "put spaces between them" in message


@pytest.mark.parametrize(
    ("options", "variable"), [(["--url", SEVERAL[0], "--url", SEVERAL[1]], ""), ([], " ".join(SEVERAL))]
)
def test_several_addresses_are_all_tried(options: list[str], variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, _ = broker_of_queues(options, {"TRUENEXT_URL": variable}, monkeypatch)
    assert broker is not None and broker.urls == SEVERAL


def test_recording_of_several_brokers_is_refused(tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "new"), "--url", SEVERAL[0], "--url", SEVERAL[1]]
    message = check_usage_error(CliRunner().invoke(main, ["record", *options]))
    assert "a recording is of one broker" in message


@pytest.mark.parametrize("variable", ["", " "])
def test_stages_run_has_no_address_without_the_variable(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[object] = []
    monkeypatch.setattr(run.run, "callback", lambda **values: passed.append(values["urls"]))
    CliRunner().invoke(main, ["stages", "run", "a:b"], env={"TRUENEXT_URL": variable})
    assert passed == [()]


BY_USER = {"TRUENEXT_USER": "shop"}
BY_PASSWORD = {"TRUENEXT_PASSWORD": "secret"}
BY_FILE = {"TRUENEXT_PASSWORD_FILE": "file"}
BY_CA = {"TRUENEXT_CA": "ca"}


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        ([], {}, NO_CREDENTIALS),
        ([], BY_USER | BY_PASSWORD, Credentials(user="shop", password="secret")),
        ([], BY_USER | {"TRUENEXT_PASSWORD": " a b "}, Credentials(user="shop", password=" a b ")),
        ([], BY_USER | BY_FILE, Credentials(user="shop", password_file="file")),
        (["--user", "till", "--password-file", "other"], {}, Credentials(user="till", password_file="other")),
        (["--user", "till"], BY_USER | BY_PASSWORD, Credentials(user="till", password="secret")),
        (["--password-file", "other"], BY_USER | BY_FILE, Credentials(user="shop", password_file="other")),
        (["--password-file", "other"], BY_USER | BY_PASSWORD, Credentials(user="shop", password_file="other")),
        (
            ["--password-file", "other"],
            BY_USER | BY_PASSWORD | BY_FILE,
            Credentials(user="shop", password_file="other"),
        ),
        *(
            ([], dict.fromkeys(["TRUENEXT_USER", "TRUENEXT_PASSWORD", "TRUENEXT_PASSWORD_FILE"], blank), NO_CREDENTIALS)
            for blank in ("", " ", "\t ")
        ),
        ([], BY_PASSWORD | {"TRUENEXT_PASSWORD_FILE": " "}, Credentials(password="secret")),
        ([], BY_FILE | {"TRUENEXT_PASSWORD": " "}, Credentials(password_file="file")),
        ([], BY_CA, Credentials(ca="ca")),
        ([], {"TRUENEXT_CA": " "}, NO_CREDENTIALS),
        (["--ca", "other"], BY_CA, Credentials(ca="other")),
        (["--certificate", "c"], BY_USER, Credentials(user="shop", certificate="c")),
        (["--certificate", "c", "--key", "k"], BY_CA, Credentials(ca="ca", certificate="c", key="k")),
    ],
)
def test_credentials_of_options_override_variables_and_blank_variables_are_unset(
    options: list[str], variables: dict[str, str], expected: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, result = broker_of_queues(options, variables, monkeypatch)
    assert broker is not None, result.output
    assert broker.credentials == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (BY_PASSWORD | BY_FILE, "TRUENEXT_PASSWORD excludes TRUENEXT_PASSWORD_FILE: unset one of them"),
        ({"TRUENEXT_PASSWORD": "secret\n"}, "password has a line feed"),
        ({"TRUENEXT_PASSWORD": f"secret{NO_UTF_8}"}, "password has a line feed"),
        ({"TRUENEXT_PASSWORD": "secret" * 1000}, "password has a line feed"),
        ({"TRUENEXT_USER": "u" * 3000}, "user has a line feed"),
        ({"TRUENEXT_USER": "a\n"}, "TRUENEXT_USER"),
        ({"TRUENEXT_PASSWORD_FILE": "/"}, "TRUENEXT_PASSWORD_FILE"),
        ({"TRUENEXT_CA": "/"}, "TRUENEXT_CA"),
    ],
)
def test_variables_that_are_no_credentials_are_refused_without_the_password(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, result = broker_of_queues([], variables, monkeypatch)
    assert broker is None
    output = check_usage_error(result)
    assert message in output and "secret" not in output


def test_key_without_a_certificate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, result = broker_of_queues(["--key", "k"], {}, monkeypatch)
    assert broker is None
    assert "--key needs --certificate" in check_usage_error(result)


def test_commands_with_a_broker_have_a_user_and_a_password_file_but_no_password() -> None:
    options = {path: {param.opts[-1]: param for param in command.params} for path, command in walk(main)}
    of_brokers = {path: params for path, params in options.items() if "--url" in params}
    assert of_brokers
    for path, params in of_brokers.items():
        assert params["--user"].envvar == "TRUENEXT_USER", path
        assert params["--password-file"].envvar == "TRUENEXT_PASSWORD_FILE", path
        assert "--password" not in params, path
        assert params["--ca"].envvar == "TRUENEXT_CA", path
        # There `--key` will be the key of a flow.
        assert "--certificate" in params and ("--key" in params or path == ("stages", "send")), path
        assert "TRUENEXT_PASSWORD " in " ".join(CliRunner().invoke(main, [*path, "--help"]).output.split()), path


OWN = Credentials(user="shop", password="own", ca="own", certificate="own", key="own")
"""Credentials in the code of a service."""
UNUSED = "; TRUENEXT_USER is unused"


@pytest.mark.parametrize(
    ("line", "own", "environment", "merged", "note"),
    [
        (NO_CREDENTIALS, NO_CREDENTIALS, NO_CREDENTIALS, NO_CREDENTIALS, ""),
        (NO_CREDENTIALS, OWN, NO_CREDENTIALS, OWN, " as user 'shop' (from its code)"),
        (
            Credentials(user="till", password_file="new"),
            OWN,
            Credentials(user="ops", password="other"),
            replace(OWN, user="till", password=None, password_file="new"),
            f" as user 'till' (from --user){UNUSED}",
        ),
        (
            Credentials(user="till"),
            OWN,
            Credentials(user="ops", password="other"),
            replace(OWN, user="till", password=None),
            f" as user 'till' (from --user){UNUSED}",
        ),
        (
            Credentials(user="till"),
            OWN,
            Credentials(password="new"),
            replace(OWN, user="till", password="new"),
            " as user 'till' (from --user)",
        ),
        (NO_CREDENTIALS, OWN, Credentials(user="ops", password="new"), OWN, f" as user 'shop' (from its code){UNUSED}"),
        (NO_CREDENTIALS, OWN, Credentials(user="shop", password="new"), OWN, " as user 'shop' (from its code)"),
        (
            NO_CREDENTIALS,
            OWN,
            Credentials(password="new"),
            replace(OWN, password="new"),
            " as user 'shop' (from its code)",
        ),
        (
            Credentials(password_file="line"),
            OWN,
            Credentials(user="ops"),
            replace(OWN, password=None, password_file="line"),
            f" as user 'shop' (from its code){UNUSED}",
        ),
        (
            NO_CREDENTIALS,
            Credentials(ca="own"),
            Credentials(user="ops", password_file="new"),
            Credentials(user="ops", password_file="new", ca="own"),
            " as user 'ops' (from TRUENEXT_USER)",
        ),
        (
            NO_CREDENTIALS,
            Credentials(certificate="own"),
            Credentials(user="ops", password="new"),
            Credentials(certificate="own"),
            "; TRUENEXT_USER is unused",
        ),
        (
            Credentials(ca="new", certificate="new"),
            OWN,
            NO_CREDENTIALS,
            replace(OWN, ca="new", certificate="new", key=None),
            " as user 'shop' (from its code)",
        ),
    ],
)
def test_credentials_of_stages_run_are_a_pair_of_the_first_that_names_a_user(
    line: Credentials, own: Credentials, environment: Credentials, merged: Credentials, note: str
) -> None:
    assert service_broker.merge_credentials(line, own, environment) == (merged, note)


GROUPS = [(), ("stages",), ("store",), ("config",), ("history",), ("user",)]


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_help_of_a_group_says_each_command_whole(group: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*group, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert "..." not in done.output.partition("Commands:")[2]


def test_help_of_queues_names_its_counts() -> None:
    message = CliRunner().invoke(main, ["queues", "--help"]).stdout
    words = {"waiting": "wait", "unacknowledged": "hold"}
    assert [count for count in COUNTS if words.get(count, count) not in message] == []
    assert "who consumes" not in message


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("priority", "use --priority"),
        ("truenext-report-to", "send with the Python client and its option report_to="),
        ("receipt", "leave it out"),
    ],
)
def test_reserved_header_of_a_send_names_the_option_that_sets_it(header: str, hint: str) -> None:
    result = CliRunner().invoke(main, ["send", "q", "body", "--header", f"{header}=1"])
    assert result.exit_code == 2
    assert f"{header} is reserved: " in result.output
    assert hint in result.output


def test_error_that_ends_with_a_parenthesis_is_separated_from_the_command_that_helps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = click.UsageError("JSON is malformed (byte 1)", click.Context(main, info_name="truenext"))
    _print_error(error)
    assert capsys.readouterr().err == "truenext: JSON is malformed (byte 1); see truenext --help\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["send", "queue://orders", "x"], "'queue://orders' is a URI of ActiveMQ: write orders"),
        (["receive", "topic://news"], "'topic://news' is a URI of ActiveMQ: write /topic/news"),
        (["purge", "queue://orders"], "'queue://orders' is a URI of ActiveMQ: write orders"),
        (["user", "add", "shop", "--users", "none", "--send", "topic://news"], "write /topic/news"),
    ],
    ids=lambda each: each[0],
)
def test_name_that_is_a_uri_of_activemq_is_refused_with_the_name_to_write(words: list[str], text: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and text in result.output


def test_folder_that_may_not_be_read_is_left_to_the_command_that_says_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "access", lambda path, mode: False)
    data = next(param for path, command, param in ALL if path == ("serve",) and param.name == "data").type
    assert isinstance(data, PathParam)
    assert data.convert(str(tmp_path), None, None) == tmp_path
    monkeypatch.setattr(os, "lstat", denied)
    assert data.convert(str(tmp_path), None, None) == tmp_path
    with pytest.raises(click.BadParameter, match="Permission denied"):
        PathParam().convert(str(tmp_path), None, None)


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), ("0.1", 0.1), ("90s", 90.0), ("5m", 300.0), ("100ms", 0.1)])
def test_seconds_may_have_a_unit(text: str, seconds: float) -> None:
    assert SecondsParam().convert(text, None, None) == seconds


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("a file does not exist", "RuntimeError: a file does not exist"),
        ("Caused by: java.io.IOException: No space left on device", "truenext: a disk is full: free disk space for"),
    ],
)
def test_audit_that_spark_cannot_end_exits_with_status_2(
    error: str, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Status 1 would say that the contract did not hold."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(error)

    monkeypatch.setitem(sys.modules, "truenext.spark.audit.command", SimpleNamespace(run_audit=fail))
    session = SimpleNamespace(one_error_if_java_ends=nullcontext)
    monkeypatch.setitem(sys.modules, "truenext.spark.session", session)
    result = CliRunner().invoke(audit, [str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert shown in result.output


# ---- purge ----


@pytest.mark.parametrize(
    ("is_terminal", "options", "typed", "asks", "is_done"),
    [
        (True, [], "orders", True, True),
        (True, [], " orders\t", True, True),
        (True, [], "order", True, False),
        (True, [], "", True, False),
        (True, ["--selector", "a = 1"], "y", True, False),
        (True, ["--yes"], "", False, True),
        (True, ["--dry-run"], "", False, True),
        (False, [], "", False, True),
    ],
)
def test_purge_on_a_terminal_asks_for_the_name_of_the_queue(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, options: list[str], typed: str, asks: bool, is_done: bool
) -> None:
    run_work = mock.Mock()
    monkeypatch.setattr(BulkWork, "run", run_work)
    monkeypatch.setattr("truenext.cli.bulk.connected", mock.MagicMock())
    monkeypatch.setattr("truenext.cli.bulk.queue_count", lambda *_: 1234)
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: is_terminal, raising=False)
    done = CliRunner().invoke(main, ["purge", "orders", *options], input=f"{typed}\n")
    which = (
        "messages that match (their number is not known" if options else "the 1,234 messages that wait in it for ever:"
    )
    assert (which in done.stderr) is asks
    assert ("Type the name of the queue, orders, to remove " in done.stderr) is asks
    assert run_work.called is is_done
    if not is_done:
        assert done.exit_code == 2 and "that is not the name of the queue: nothing was changed" in done.stderr
