"""Types of the values on the command line. Each type makes the errors for its invalid values, for which click exits
with status 2."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from truenext.broker.settings import fault_of_server_name
from truenext.client.core.send_options import SendOptions, is_reserved
from truenext.errors import TruenextError
from truenext.model.database import fault_of_database_url, fault_of_member, fault_of_schema
from truenext.model.destination import (
    DURABLE_ADDRESS_PREFIX,
    SUBSCRIPTION_PREFIX,
    parse_queue_name,
    parse_stored_address,
)
from truenext.model.limits import DESTINATION_LENGTH_MAX, SCHEDULE_MS_MAX
from truenext.model.numerals import format_size, parse_delay, parse_size
from truenext.model.pattern import fault_of_uri
from truenext.model.selector import compile_selector
from truenext.model.url import fault_of_host_and_port, parse_listener_url, parse_url

USERS_VARIABLE = "TRUENEXT_USERS"
"""Environment variable with the path of a users file."""

SECONDS_MIN, SECONDS_MAX = 0.001, 7 * 24 * 3600.0
"""Limits of a time in seconds. A socket's timeout must not be too large, and a week is enough for any wait."""

NUMBER_MAX = 2**63 - 1
"""Highest sequence, which is also the highest number of messages that can be given."""

REPR_LENGTH_MAX = 100

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Character that stands for a byte that is not UTF-8."""


class CheckedTextParam(click.ParamType[str]):
    """Text that is used exactly as it was given, unless it has a fault."""

    def __init__(self, name: str, fault_of: Callable[[str], str | None]) -> None:
        """Make the type. `fault_of` returns the fault of a text; None or "" if it has none."""
        self.name = name
        self._fault_of = fault_of

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if fault := self._fault_of(value):
            self.fail(fault, param, ctx)
        return value


class EnumParam(click.Choice[Any]):
    """Member of an enum of strings, given on the command line by its value."""

    def __init__(self, kind: type[Enum]) -> None:
        super().__init__([each.value for each in kind])
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, self._kind) else self._kind(super().convert(value, param, ctx))


class BodyParam(click.ParamType[bytes]):
    """Body as bytes. An argument may contain bytes that are not UTF-8."""

    name = "text"

    def convert(self, value: str | bytes, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        return value if isinstance(value, bytes) else os.fsencode(value)


_HEADER_OPTIONS = {"priority": "--priority", "persistent": "--transient"}
"""Options of the command that set reserved headers, by header."""


class HeaderParam(click.ParamType[tuple[str, str]]):
    """Header of the user's own, given as NAME=VALUE."""

    name = "header"

    def convert(
        self, value: str | tuple[str, str], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, content = value.partition("=")
        if not equals or not name:
            self.fail(f"{_shortened_repr(value)} is not NAME=VALUE", param, ctx)
        if _SURROGATE.search(value):
            self.fail(f"{_shortened_repr(value)} is not UTF-8", param, ctx)
        if is_reserved(name):
            self.fail(f"{name} is reserved: {_reserved_hint(name)}", param, ctx)
        return name, content


def _reserved_hint(header: str) -> str:
    """Return what to do instead of setting a reserved header with --header."""
    if header in _HEADER_OPTIONS:
        return f"use {_HEADER_OPTIONS[header]}"
    option = header.removeprefix("truenext-").replace("-", "_")
    if option in SendOptions.__annotations__:
        return f"this command has no option for it; send with the Python client and its option {option}="
    return "leave it out, the command sets what is needed"


class DestinationParam(click.ParamType[str]):
    """Name of a queue, or a destination with its prefix. The value is the destination's address."""

    name = "destination"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        # The broker checks options of a destination, and names that only earlier rules have allowed.
        address = destination_address(value)
        if fault := _fault_of_uri(value) or _error_of(parse_stored_address, address):
            self.fail(fault, param, ctx)
        return address


class QueueNameParam(click.ParamType[str]):
    """Name of a queue as `truenext queues` shows it, or the same name after /queue/."""

    name = "queue"

    def __init__(self, *, is_creatable: bool = False) -> None:
        """Make the type. With `is_creatable` only names that clients may create are valid; otherwise the broker
        decides."""
        self._is_creatable = is_creatable

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if fault := _fault_of_uri(value):
            self.fail(fault, param, ctx)
        name = value.removeprefix("/queue/")
        is_new = self._is_creatable and not name.startswith(SUBSCRIPTION_PREFIX)
        if is_new and (fault := _error_of(parse_queue_name, name)):
            self.fail(fault, param, ctx)
        if not name or not name.isprintable():
            self.fail(f"{_shortened_repr(value)} is not the name of a queue", param, ctx)
        if len(name) > DESTINATION_LENGTH_MAX and not name.startswith(SUBSCRIPTION_PREFIX):
            self.fail(f"the name has {len(name)} characters: at most {DESTINATION_LENGTH_MAX} are allowed", param, ctx)
        return name


class VariableOption(click.Option):
    """Option with an environment variable. A blank value of the variable counts as unset."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the environment variable; None if it is unset or blank."""
        value = super().resolve_envvar_value(ctx)
        return None if value is None or not value.strip() else value

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the name of the option for an error: the option's environment variable, if the value comes from
        there."""
        if self.is_from_environment(ctx):
            return super().get_error_hint(ctx)
        return click.Parameter.get_error_hint(self, ctx)

    def is_from_environment(self, ctx: click.Context | None) -> bool:
        return ctx is not None and ctx.get_parameter_source(self.name) is ParameterSource.ENVIRONMENT


class UrlOption(VariableOption):
    """Option `--url`, which may be repeated, with its environment variable, which may have several addresses."""

    _BETWEEN = re.compile(r"[\s,]")

    def __init__(self, declared: Sequence[str], **options: Any) -> None:
        super().__init__(declared, multiple=True, **options)

    def type_cast_value(self, ctx: click.Context, value: Any) -> tuple[str, ...]:
        """Convert the addresses.

        Raises: BadParameter if an address is rejected
        """
        if any(self._BETWEEN.search(each.strip()) for each in value):
            instead = "put spaces between them" if self.is_from_environment(ctx) else "repeat --url for each"
            raise click.BadParameter(f"one value has several addresses; {instead}", ctx, self)
        urls: tuple[str, ...] = super().type_cast_value(ctx, value)
        return urls


class SecondsParam(click.ParamType[float]):
    """Number of seconds, with a unit such as 5m or without."""

    name = "seconds"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = parse_delay(str(value)) or -1.0
        if not SECONDS_MIN <= seconds <= SECONDS_MAX:
            self.fail(f"{_shortened_repr(value)} is not {SECONDS_MIN} to {SECONDS_MAX:,.0f} seconds", param, ctx)
        return seconds


def seconds_option(*names: str, default: float, help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(*names, type=SecondsParam(), default=default, show_default=True, help=help)


class DelayParam(click.ParamType[float]):
    """Number of seconds, given with its unit, such as 500ms, 90s, 2h or 3d."""

    name = "time"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        seconds = parse_delay(value)
        if seconds is None:
            self.fail(f"{_shortened_repr(value)} is not a number with ms, s, m, h or d, such as 90s or 3d", param, ctx)
        if seconds * 1000 > SCHEDULE_MS_MAX:
            self.fail(f"{value} is too long: at most {SCHEDULE_MS_MAX // 86_400_000:,} days (100 years)", param, ctx)
        return seconds


class TimeParam(click.ParamType[datetime]):
    """Time with a time zone, in ISO 8601."""

    name = "time"

    def convert(self, value: str | datetime, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            time = None
        if time is None or time.utcoffset() is None:
            self.fail(
                f"{_shortened_repr(value)} is not a time with a time zone, such as 2027-01-31T08:00+01:00 or "
                "2027-01-31T07:00Z",
                param,
                ctx,
            )
        return time


class SizeParam(click.ParamType[int]):
    """Number of bytes, given as 256MiB, 50KB, 1.5 GB or plain digits."""

    name = "size"

    def __init__(self, minimum: int = 1) -> None:
        self._minimum = minimum

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        size = parse_size(value)
        if size is None:
            self.fail(f"{_shortened_repr(value)} is not a number of bytes, such as 256MiB, 50KB or 1000", param, ctx)
        if size < self._minimum:
            self.fail(f"{value} is too little: at least {format_size(self._minimum)}", param, ctx)
        return size


class PathParam(click.Path):
    """Path of a file or folder, which need not exist. The empty text, which would mean the current folder, is
    rejected."""

    def __init__(
        self,
        *,
        exists: bool = False,
        file_okay: bool = True,
        dir_okay: bool = True,
        may_be_dash: bool = False,
        readable: bool = True,
    ) -> None:
        """Make the type. With `may_be_dash` the path - means standard input. Without `readable` the command itself
        says what to do about a path for which its user lacks a permission."""
        super().__init__(exists=exists, file_okay=file_okay, dir_okay=dir_okay, readable=readable, path_type=Path)
        self._may_be_dash = may_be_dash

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self._may_be_dash and os.fspath(value) == "-":
            return Path("-")
        if not os.fspath(value):
            self.fail("must not be empty", param, ctx)
        try:
            os.lstat(value)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            if isinstance(error, PermissionError) and not self.readable:
                return Path(value)
            # A file in place of a folder on the way, a name too long, or a NUL in it.
            reason = error.strerror if isinstance(error, OSError) else error
            self.fail(f"{_shortened_repr(os.fspath(value))}: {reason}", param, ctx)
        return super().convert(value, param, ctx)


class LocationParam(PathParam):
    """Path of a folder, or address with a scheme."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, str) and "://" in value else super().convert(value, param, ctx)


class StorePlaceParam(PathParam):
    """Path of a data folder, or URL of a database."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value:
            if fault := fault_of_database_url(value):
                self.fail(f"the URL of a database {fault}", param, ctx)
            return value
        return super().convert(value, param, ctx)


class DataFolderParam(PathParam):
    """Path of a data folder. The URL of a database is rejected with a text that says how its messages get into a
    folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value:
            # Without the value: it may have a password.
            self.fail(
                "a database is no data folder: start a broker with --store and a new folder, stop it, and name that "
                "folder",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


def destination_address(queue: str) -> str:
    """Return the address of a destination. `orders` becomes /queue/orders. A text that begins with / is an address
    already."""
    if queue.startswith(SUBSCRIPTION_PREFIX):
        # `truenext queues` shows durable subscriptions like this.
        _, client, name, *_ = [*queue.split(",", 3), "", ""]
        return f"{DURABLE_ADDRESS_PREFIX}{client},{name}"
    return queue if queue.startswith("/") else f"/queue/{queue}"


def _fault_of_uri(value: str) -> str | None:
    fault = fault_of_uri(value)
    return fault and f"{_shortened_repr(value)} {fault}"


def _error_of(check: Callable[[str], object], value: str) -> str | None:
    try:
        check(value)
    except TruenextError as error:
        return str(error)
    return None


def _shortened_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= REPR_LENGTH_MAX else f"{text[:REPR_LENGTH_MAX]}..."


def _fault_of_text(value: str) -> str | None:
    # Without the value: it may be a passcode.
    return None if value and value.isprintable() else "must be a printable text, not empty"


def _fault_of_selector(value: str) -> str | None:
    if _SURROGATE.search(value):
        return f"{_shortened_repr(value)} is not UTF-8"
    return _error_of(compile_selector, value)


def _fault_of_any_text(value: str) -> str | None:
    return f"{_shortened_repr(value)} is not UTF-8" if _SURROGATE.search(value) else None


def _fault_of_database_url(value: str) -> str | None:
    # Without the value: it may have a password.
    if value.isprintable() and re.fullmatch(r"[A-Za-z0-9_]+(\+[A-Za-z0-9_]+)?://.*", value):
        return None
    return "is not the URL of a database, such as postgresql+psycopg:///shop"


def _pattern_check(pattern: str, meaning: str) -> Callable[[str], str | None]:
    """Return a check that a text matches a pattern. `meaning` describes valid texts in the check's error."""
    matches = re.compile(pattern).fullmatch
    return lambda value: None if matches(value) else f"{_shortened_repr(value)} is not {meaning}"


COUNT = click.IntRange(1, NUMBER_MAX)
TEXT = CheckedTextParam("text", _fault_of_text)
ANY_TEXT = CheckedTextParam("text", _fault_of_any_text)
"""Text that may be empty, such as a text that a client has sent."""
SERVER_NAME = CheckedTextParam("text", fault_of_server_name)
SELECTOR = CheckedTextParam("selector", _fault_of_selector)
URL = CheckedTextParam("url", partial(_error_of, parse_url))
HOST_AND_PORT = CheckedTextParam("host:port", fault_of_host_and_port)
LISTENER_URL = CheckedTextParam("url", partial(_error_of, parse_listener_url))
DATABASE_URL = CheckedTextParam("url", _fault_of_database_url)
STORE_URL = CheckedTextParam("url", fault_of_database_url)
SCHEMA = CheckedTextParam("name", fault_of_schema)
MEMBER = CheckedTextParam("name", fault_of_member)
QUERY_ID = CheckedTextParam("id", _pattern_check("[0-9A-Za-z_-]{1,64}", "an id of `truenext spark list`"))
"""Id of a query of Spark; its first characters are enough."""
SERVICE = CheckedTextParam(
    "module:name",
    _pattern_check(
        r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*",
        "MODULE:NAME, such as shop:app for `app = Service(...)` in shop.py",
    ),
)
SPARK_MASTER = CheckedTextParam(
    "master",
    _pattern_check(
        r"local(\[(\*|[1-9]\d{0,4})(,\d{1,4})?\])?|local-cluster(\[\d{1,4},\d{1,4},\d{1,7}\])|yarn|(spark|k8s)://[!-~]+",
        "a master of Spark, such as local[2], yarn or spark://HOST:7077",
    ),
)
"""Master URL of Spark. Source: Spark, "Submitting Applications", "Master URLs"."""
