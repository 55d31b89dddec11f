"""The configuration file, truenext.toml: what may stand in it, and what is wrong with one.

    [broker]                    BrokerSettings (settings.py)
    [policy]                    Policy, of every queue
    [policy."orders.>"]         the same for queues of this pattern; what it does not name is that of [policy]

A file is taken as a whole or not at all, and all of its faults are said at once. What may stand where is not said here:
it is read from the descriptions of the settings (truenext.setting).
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any

from truenext.broker import toml_lines
from truenext.broker.settings import BrokerSettings, fault_of_server_name
from truenext.destination import parse_queue_name
from truenext.errors import ConfigurationError, FaultyFileError, RemoteProtocolError
from truenext.pattern import fault_of_pattern
from truenext.policy import Policies, Policy
from truenext.setting import NO_NONE_VALUE, Setting, settings_of
from truenext.size import format_size, parse_size
from truenext.url import parse_url

BROKER = "broker"
POLICY = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a broker is started with, or goes on with: of a file, of the command line, of both."""

    broker: BrokerSettings = field(default_factory=BrokerSettings)
    policies: Policies = field(default_factory=Policies)
    file: Path | None = None
    tables: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """What each table of the file names, by its header."""

    def source(self, queue: str, name: str) -> str:
        """Which table the policy of a queue has the setting `name` from, or "default"."""
        pattern = self.policies.pattern_of(queue)
        headers = [toml_header(POLICY)] if pattern is None else [toml_header(POLICY, pattern), toml_header(POLICY)]
        return next((each for each in headers if name in self.tables.get(each, ())), "default")


def configure(
    file: Path | None, *, broker: Mapping[str, Any] | None = None, policy: Mapping[str, Any] | None = None
) -> Configuration:
    """What a file says (None: nothing) and, where they say something else, the options of the command line.

    `broker` are values of BrokerSettings, `policy` of the policy that every queue has; patterns go before those.

    Raises: FaultyFileError, ConfigurationError if the file cannot be read
    """
    tables = _ConfigurationFileReader(file).read() if file is not None else {}
    broker_values = tables.get(toml_header(BROKER), {})
    if broker and ("data" in broker or "memory" in broker):
        # One or the other: what is said on the command line is instead of both.
        broker_values = {name: value for name, value in broker_values.items() if name not in ("data", "memory")}
        if broker.get("memory"):
            broker_values.pop("disk_limit", None)
            broker_values.pop("history", None)
    default = Policy(**{**tables.get(toml_header(POLICY), {}), **(policy or {})})
    patterns = {each: values for each, values in tables.items() if isinstance(each, PatternHeader)}
    return Configuration(
        broker=BrokerSettings(**{**broker_values, **(broker or {})}),
        policies=Policies(default, {each.pattern: replace(default, **values) for each, values in patterns.items()}),
        file=file,
        tables={each: frozenset(values) for each, values in tables.items()},
    )


class PatternHeader(str):
    """The header of a pattern's table."""

    __slots__ = ("pattern",)
    pattern: str


def toml_header(section: str, pattern: str | None = None) -> str:
    """As it stands in the file.

    >>> toml_header("policy", "orders.>")
    '[policy."orders.>"]'
    """
    if pattern is None:
        return f"[{section}]"
    quoted = pattern.replace("\\", "\\\\").replace('"', '\\"')
    found = PatternHeader(f'[{section}."{quoted}"]')
    found.pattern = pattern
    return found


class _ConfigurationFileReader:
    """One reading of one file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lines: dict[toml_lines.KeyPath, int] = {}
        self._faults: list[tuple[int, str]] = []

    def read(self) -> dict[str, dict[str, Any]]:
        """The settings that are named, by header.

        Raises: as `configure`
        """
        content = self._parse()
        tables: dict[str, dict[str, Any]] = {}
        for section, table in content.items():
            path = (section,)
            if section not in (BROKER, POLICY):
                self._add_fault(path, f"there is no section [{section}]" + _suggestion(section, (BROKER, POLICY)))
            elif not isinstance(table, dict):
                self._add_fault(path, f"{section} must be a table: [{section}]")
            elif section == BROKER:
                tables[toml_header(BROKER)] = self._settings(BrokerSettings, path, table)
            else:
                patterns = {name: value for name, value in table.items() if isinstance(value, dict)}
                own = {name: value for name, value in table.items() if name not in patterns}
                tables[toml_header(POLICY)] = self._settings(Policy, path, own)
                for pattern, values in patterns.items():
                    tables[toml_header(POLICY, pattern)] = self._pattern_settings(pattern, values)
        self._check_broker_conflicts(tables.get(toml_header(BROKER), {}))
        self._raise_if_faulty()
        return tables

    # ---- The file ----

    def _parse(self) -> dict[str, Any]:
        try:
            content = self._file.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"cannot read {self._file}: {error.strerror or error}") from error
        try:
            text = content.decode().replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise self._faulty_file([(line, f"byte {content[error.start]:#04x} is not UTF-8")]) from error
        try:
            parsed = tomllib.loads(text)
            self._lines = toml_lines.lines_of(text)
        except tomllib.TOMLDecodeError as error:
            raise self._faulty_file([_line_and_reason(str(error), text)]) from error
        except RecursionError as error:
            raise self._faulty_file([(1, "tables or arrays stand too deep in one another")]) from error
        except ValueError as error:
            # A number of thousands of digits.
            raise self._faulty_file([(1, str(error))]) from error
        return parsed

    # ---- Tables ----

    def _pattern_settings(self, pattern: str, values: dict[str, Any]) -> dict[str, Any]:
        path = (POLICY, pattern)
        fault = fault_of_pattern(pattern)
        if fault is not None:
            self._add_fault(path, f"{pattern!r} is no pattern of names: {fault}")
        elif pattern.startswith("/"):
            self._add_fault(path, f"{pattern!r}: a pattern is of names, without /queue/")
        tables = [name for name, value in values.items() if isinstance(value, dict)]
        for name in tables:
            self._add_fault(
                (*path, name),
                f"{pattern}.{name} is not in quotes: a pattern with dots in it must be, "
                f"as in {toml_header(POLICY, f'{pattern}.{name}')}",
            )
        return self._settings(Policy, path, {name: values[name] for name in values if name not in tables})

    def _settings(self, described: type, path: toml_lines.KeyPath, table: dict[str, Any]) -> dict[str, Any]:
        known = settings_of(described)
        values = {}
        for name, raw in table.items():
            if name not in known:
                where = toml_header(path[0], *path[1:])
                self._add_fault((*path, name), f"there is no setting {name!r} in {where}" + _suggestion(name, known))
                continue
            try:
                values[name] = self._value(known[name], raw)
            except ValueError as error:
                self._add_fault((*path, name), f"{name} {error}")
        return values

    def _value(self, setting: Setting, raw: Any) -> Any:
        value = _read(setting, raw)
        if value is None or value == setting.none:
            return value
        if setting.name == "listen":
            for url in value:
                try:
                    parse_url(url)
                except ConfigurationError as error:
                    raise ValueError(f"names what cannot be listened on: {error}") from error
        if setting.name == "dead_letters":
            try:
                parse_queue_name(value)
            except RemoteProtocolError as error:
                raise ValueError(f"is no name of a queue, without /queue/: {error}") from error
        if setting.name == "server_name" and (fault := fault_of_server_name(value)):
            raise ValueError(fault)
        return self._file.parent / value if setting.kind is Path else value

    def _check_broker_conflicts(self, values: dict[str, Any]) -> None:
        """What is wrong only beside another setting."""
        if not values.get("memory"):
            return
        for name in ("data", "disk_limit", "history"):
            if values.get(name) not in (None, False):
                self._add_fault((BROKER, name), f"{name} cannot be with memory = true: then nothing is kept on disk")

    # ---- Faults ----

    def _add_fault(self, path: toml_lines.KeyPath, reason: str) -> None:
        self._faults.append((self._lines[path], reason))

    def _raise_if_faulty(self) -> None:
        if self._faults:
            raise self._faulty_file(self._faults)

    def _faulty_file(self, faults: list[tuple[int, str]]) -> FaultyFileError:
        return FaultyFileError(tuple(f"{self._file}:{line}: {reason}" for line, reason in sorted(faults)))


def _read(setting: Setting, raw: Any) -> Any:
    """The value that stands in the file, as the broker has it.

    Raises: ValueError, what of the value; the name of the setting goes before it.
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
        return tuple(_check(raw, is_list, 'must be a list of texts with one at least, such as ["..."]'))
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
    text: str = _check(raw, is_text, "must be a text that is not empty")
    return Path(text) if kind is Path else text


def describe_range(setting: Setting) -> str:
    """Which numbers a setting may be, in words; "" for all, or if it is no number.

    >>> describe_range(settings_of(Policy)["page_size"])
    '1 to 100,000'
    """
    least, most = (None if end is None else _format_number(setting, end) for end in (setting.least, setting.most))
    if least is None:
        return "" if most is None else f"at most {most}"
    return f"at least {least}" if most is None else f"{least} to {most}"


def format_value(setting: Setting, value: Any) -> str:
    """A value as it may stand in the file.

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


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = get_close_matches(name, names, n=1)
    return f"; is {close[0]!r} meant?" if close else f"; there are {', '.join(names)}"


def _line_and_reason(message: str, text: str) -> tuple[int, str]:
    """Line and reason of what is said as `REASON (at line 3, column 4)`, or `REASON (at end of document)`."""
    reason, _, position = message.rpartition(" (at ")
    words = position.replace(",", "").replace(")", "").split()
    if words[:1] == ["line"]:
        return int(words[1]), f"{reason}, at column {words[3]}"
    return max(1, len(text.splitlines())), f"{reason}, at the end of the file"
