"""Configuration file, truenext.toml: reads, checks and merges settings.

    [broker]                    BrokerSettings (settings.py)
    [policy]                    Policy of all queues
    [policy."orders.>"]         Policy of the queues that match this pattern; [policy] has the settings missing here

A file is applied as a whole or not at all, and all of its faults are reported at once. Which settings are valid is read
from their descriptions (truenext.model.setting).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any

from truenext.broker.certificates import Certificates, read_certificates
from truenext.broker.regular_file import parse_toml, read_regular_file
from truenext.broker.settings import BrokerSettings, fault_of_server_name
from truenext.broker.users import Users, read_users, suggest_name
from truenext.errors import ConfigurationError, FaultyFileError, RemoteProtocolError
from truenext.model.database import fault_of_database_url, fault_of_member, fault_of_schema
from truenext.model.destination import parse_queue_name
from truenext.model.limits import DATABASE_PATIENCE_MS
from truenext.model.numerals import format_size, parse_size
from truenext.model.pattern import fault_of_pattern
from truenext.model.policy import Policies, Policy
from truenext.model.setting import NO_NONE_VALUE, Setting, settings_of
from truenext.model.url import fault_of_host_and_port, parse_listener_url

BROKER = "broker"
POLICY = "policy"

_FAULT_OF: dict[str, Callable[[str], str | None]] = {
    "server_name": fault_of_server_name,
    "store": fault_of_database_url,
    "schema": fault_of_schema,
    "member": fault_of_member,
    "health": fault_of_host_and_port,
}
"""Functions that check settings which are texts; they return a fault, or None or ""."""

_ON_DISK = {"data", "disk_limit", "backup_dir", "history", "store", "schema", "database_limit", "member"}
"""Settings that cannot be set together with memory = true."""

_WITH_STORE = ("schema", "database_limit")
"""Settings that a file with `store` must have, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Settings of a broker, from the file and the command line."""

    broker: BrokerSettings = field(default_factory=BrokerSettings)
    policies: Policies = field(default_factory=Policies)
    file: Path | None = None
    certificates: Certificates | None = None
    """Content of the certificate files that `broker` names; None if it names none, or `with_files` was not called."""
    users: Users | None = None
    """Content of the users file that `broker` names; None if it names none, or `with_files` was not called."""
    tables: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names of the settings in each table of the file, by the table's header."""

    def source(self, queue: str, name: str) -> str:
        """Return the header of the table that sets `name` in the policy of a queue, or "default"."""
        pattern = self.policies.pattern_of(queue)
        headers = [toml_header(POLICY)] if pattern is None else [toml_header(POLICY, pattern), toml_header(POLICY)]
        return next((each for each in headers if name in self.tables.get(each, ())), "default")


def configure(
    file: Path | None, *, broker: Mapping[str, Any] | None = None, policy: Mapping[str, Any] | None = None
) -> Configuration:
    """Read a configuration file (None: no file), and replace its settings by those of the command line.

    `broker` and `policy` are the settings of the command line, by name: those of BrokerSettings, and those of the
    policy of all queues. A pattern in the file overrides `policy`.

    Raises: FaultyFileError if the file has faults; ConfigurationError if it cannot be read
    """
    tables = _ConfigurationFileReader(file).read() if file is not None else {}
    broker_values = tables.get(toml_header(BROKER), {})
    if broker and ("data" in broker or "memory" in broker):
        # `data` and `memory` exclude one another: the command line replaces both.
        broker_values = {name: value for name, value in broker_values.items() if name not in ("data", "memory")}
        if broker.get("memory"):
            broker_values = {name: value for name, value in broker_values.items() if name not in _ON_DISK}
    default = Policy(**{**tables.get(toml_header(POLICY), {}), **(policy or {})})
    patterns = {each: values for each, values in tables.items() if isinstance(each, PatternHeader)}
    return Configuration(
        broker=BrokerSettings(**{**broker_values, **(broker or {})}),
        policies=Policies(default, {each.pattern: replace(default, **values) for each, values in patterns.items()}),
        file=file,
        tables={each: frozenset(values) for each, values in tables.items()},
    )


def with_files(configuration: Configuration) -> Configuration:
    """Return the configuration with the users and certificates from the files that its settings name.

    Raises: FaultyFileError if the users file has faults; ConfigurationError if a file cannot be read or used
    """
    settings = configuration.broker
    users = None if settings.users is None else read_users(settings.users)
    return replace(configuration, users=users, certificates=read_certificates(settings))


class PatternHeader(str):
    """Header of the table of one pattern in the configuration file, such as `[policy."orders.>"]`. `pattern` is the
    pattern in it."""

    __slots__ = ("pattern",)
    pattern: str


def toml_header(section: str, pattern: str | None = None) -> str:
    """Return the header of a table in TOML syntax."""
    if pattern is None:
        return f"[{section}]"
    quoted = pattern.replace("\\", "\\\\").replace('"', '\\"')
    found = PatternHeader(f'[{section}."{quoted}"]')
    found.pattern = pattern
    return found


class _ConfigurationFileReader:
    """Reader of one configuration file, used once, which raises all faults of the file together."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._faults: list[str] = []
        """Faults found so far, roughly in the order of the file: tomllib joins a table whose parts are in several
        places of the file."""

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the settings in the file: name and value, by the header of their table.

        Raises: FaultyFileError if the file has faults; ConfigurationError if it cannot be read
        """
        tables: dict[str, dict[str, Any]] = {}
        for section, table in self._parse().items():
            if section not in (BROKER, POLICY):
                self._faults.append(f"there is no section [{section}]" + suggest_name(section, (BROKER, POLICY)))
            elif not isinstance(table, dict):
                self._faults.append(f"{section} must be a table: [{section}]")
            elif section == BROKER:
                tables[toml_header(BROKER)] = self._broker_settings(table)
            else:
                tables |= self._policies(table)
        if self._faults:
            raise self._faulty_file(self._faults)
        return tables

    def _parse(self) -> dict[str, Any]:
        try:
            content = read_regular_file(self._file)
        except OSError as error:
            raise ConfigurationError(f"cannot read {self._file}: {error.strerror or error}") from error
        try:
            return parse_toml(content)
        except ValueError as error:
            raise self._faulty_file([str(error)]) from error

    def _faulty_file(self, faults: list[str]) -> FaultyFileError:
        return FaultyFileError(tuple(f"{self._file}: {fault}" for fault in faults))

    # ---- Tables ----

    def _broker_settings(self, table: dict[str, Any]) -> dict[str, Any]:
        header = toml_header(BROKER)
        values: dict[str, Any] = {}
        for name, raw in table.items():
            self._read_setting(BrokerSettings, header, name, raw, values)
            if table.get("memory") is True and name in _ON_DISK and values.get(name):
                self._faults.append(f"{header} {name} cannot be set with memory = true, which stores nothing on disk")
        if values.get("store"):
            self._faults += [f"{header} store needs {name}, too" for name in _WITH_STORE if name not in table]
        patience = values.get("database_patience_ms", DATABASE_PATIENCE_MS)
        if (after := values.get("failover_after_ms", 0)) > patience:
            limit = f"database_patience_ms, {patience:,} milliseconds"
            self._faults.append(f"{header} failover_after_ms must be at most {limit}, not {after:,}")
        return values

    def _policies(self, table: dict[str, Any]) -> dict[str, dict[str, Any]]:
        header = toml_header(POLICY)
        tables: dict[str, dict[str, Any]] = {header: {}}
        for name, raw in table.items():
            if isinstance(raw, dict):
                tables[toml_header(POLICY, name)] = self._pattern_settings(name, raw)
            else:
                self._read_setting(Policy, header, name, raw, tables[header])
        return tables

    def _pattern_settings(self, pattern: str, table: dict[str, Any]) -> dict[str, Any]:
        header = toml_header(POLICY, pattern)
        fault = fault_of_pattern(pattern)
        if fault is not None:
            self._faults.append(f"{header} is not a pattern of queue names: {fault}")
        elif pattern.startswith("/"):
            self._faults.append(f"{header}: a pattern of queue names has no /queue/: leave it out")
        values: dict[str, Any] = {}
        for name, raw in table.items():
            if isinstance(raw, dict):
                self._faults.append(
                    f"{pattern}.{name} has dots and no quotes: write a pattern with dots "
                    f"in quotes, as in {toml_header(POLICY, f'{pattern}.{name}')}"
                )
            else:
                self._read_setting(Policy, header, name, raw, values)
        return values

    def _read_setting(self, described: type, header: str, name: str, raw: Any, values: dict[str, Any]) -> None:
        """Add the value of a setting to `values`; if the setting is unknown or its value invalid, add a fault to
        `_faults`."""
        known = settings_of(described)
        if name not in known:
            self._faults.append(f"{header}: there is no setting {name!r}" + suggest_name(name, known))
            return
        try:
            values[name] = self._value(known[name], raw)
        except ValueError as error:
            self._faults.append(f"{header} {name} {error}")

    def _value(self, setting: Setting, raw: Any) -> Any:
        value = _read(setting, raw)
        if value is None or value == setting.none:
            return value
        if setting.name == "listen":
            for url in value:
                try:
                    parse_listener_url(url)
                except ConfigurationError as error:
                    raise ValueError(f"has an address that cannot be listened on: {error}") from error
        for pattern in value if setting.name == "metrics_queues" else ():
            if fault := "leave /queue/ out" if pattern.startswith("/") else fault_of_pattern(pattern):
                raise ValueError(f"has {pattern!r}, which is no pattern of queue names: {fault}")
        if setting.name == "dead_letters":
            try:
                parse_queue_name(value)
            except RemoteProtocolError as error:
                raise ValueError(f"is not the name of a queue (without /queue/): {error}") from error
        if setting.name in _FAULT_OF and (fault := _FAULT_OF[setting.name](value)):
            raise ValueError(fault)
        return self._file.parent / value if setting.kind is Path else value


def _read(setting: Setting, raw: Any) -> Any:
    """Convert the value in the file to the value of the setting.

    Raises: ValueError if the value is invalid; its text continues a sentence that begins with the setting's name.
    """
    kind = setting.kind
    if raw == "none" and setting.none is not NO_NONE_VALUE:
        return setting.none
    if kind is bool:
        return _check(raw, isinstance(raw, bool), "must be true or false")
    if issubclass(kind, Enum):
        choices = [each.value for each in kind]
        return kind(_check(raw, raw in choices, f"must be {_join_choices(choices)}"))
    if kind is tuple:
        is_list = isinstance(raw, list) and bool(raw) and all(isinstance(each, str) for each in raw)
        return tuple(_check(raw, is_list, 'must be a list with at least one text, such as ["..."]'))
    if kind is int and setting.unit == "bytes":
        size = parse_size(raw) if isinstance(raw, str) else raw
        or_none = "" if setting.none is NO_NONE_VALUE else ' or "none"'
        what = f'must be a number of bytes, such as "64MiB" or 65536{or_none}'
        return _in_range(setting, _check(raw, type(size) is int, what) and size)
    if kind is int:
        return _in_range(setting, _check(raw, type(raw) is int, "must be a whole number"))
    if kind is float:
        is_number = type(raw) in (int, float) and isfinite(raw)
        return float(_in_range(setting, _check(raw, is_number, "must be a number")))
    is_text = isinstance(raw, str) and raw.isprintable() and bool(raw)
    text: str = _check(raw, is_text, "must be a text, not empty")
    return Path(text) if kind is Path else text


def describe_range(setting: Setting) -> str:
    """Describe which numbers a setting may have; "" if all, or if the setting is no number.

    >>> describe_range(settings_of(Policy)["page_size"])
    '1 to 100,000'
    """
    least, most = (None if end is None else _format_number(setting, end) for end in (setting.least, setting.most))
    if least is None:
        return "" if most is None else f"at most {most}"
    return f"at least {least}" if most is None else f"{least} to {most}"


def format_value(setting: Setting, value: Any) -> str:
    """Format the value of a setting as it is written in the file.

    >>> format_value(settings_of(Policy)["memory_limit"], 1 << 20)
    '"1MiB"'
    """
    if value is None or (setting.none is not NO_NONE_VALUE and value == setting.none):
        return '"none"'
    if setting.unit == "bytes":
        size = format_size(value)
        return size if size.isdigit() else f'"{size}"'
    return _to_toml(value)


def _to_toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case Enum():
            return f'"{value.value}"'
        case str() | Path():
            text = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{text}"'
        case list() | tuple():
            return "[" + ", ".join(map(_to_toml, value)) + "]"
        case dict():
            return "a table"
    return str(value)


def _format_number(setting: Setting, number: float) -> str:
    return format_size(int(number)) if setting.unit == "bytes" else f"{number:,}"


def _check(raw: Any, is_valid: bool, what: str) -> Any:
    if not is_valid:
        found = _to_toml(raw)
        raise ValueError(f"{what}, not {found if len(found) < 80 else found[:80] + '...'}")
    return raw


def _in_range(setting: Setting, number: Any) -> Any:
    too_small = setting.least is not None and number < setting.least
    if too_small or (setting.most is not None and number > setting.most):
        unit = "" if setting.unit in ("", "bytes") else f" {setting.unit}"
        raise ValueError(f"must be {describe_range(setting)}{unit}, not {_format_number(setting, number)}")
    return number


def _join_choices(choices: Iterable[str]) -> str:
    *others, last = (f'"{choice}"' for choice in choices)
    return f"{', '.join(others)} or {last}"
