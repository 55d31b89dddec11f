"""Parsing of the options that a user gives to a source or a sink."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from truenext.client.core.credentials import NO_CREDENTIALS, Credentials
from truenext.errors import ConfigurationError
from truenext.model.url import Address, parse_url
from truenext.spark.broker.connection import BrokerConnection

CREDENTIAL_NAMES = ("user", "passwordFile", "ca", "certificate", "key")
"""Names of the options for the login and for TLS. The files must be on the machines of the driver and of all
executors."""
DEFAULT_SPACE = "main"
DEFAULT_PATIENCE_S = 600.0
EXAMPLES = {"url": "stomp://127.0.0.1:61613", "queue": "orders"}
WORD_LENGTH_MAX = 64
_TIME_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_TIME = re.compile(rf"([0-9]{{1,12}})\s*({'|'.join(_TIME_UNITS_S)})?")
_WORD_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


@dataclass(frozen=True, kw_only=True)
class QueryOptions:
    """Options that a source and a sink have in common."""

    addresses: tuple[Address, ...]
    credentials: Credentials = NO_CREDENTIALS
    space: str = DEFAULT_SPACE
    """Word in the names of the own queues of the source or sink."""
    patience_s: float = DEFAULT_PATIENCE_S
    """Longest time in seconds for which a task or the driver waits for the broker, or for disk space in it. After that
    time the task or driver fails."""

    def connect(self) -> BrokerConnection:
        return BrokerConnection(self.addresses, self.credentials)


class GivenOptions:
    """Options that a user has given to a source or a sink, and parsers of their values. Names of options are
    case-insensitive."""

    def __init__(self, options: Mapping[str, str], names: Iterable[str]) -> None:
        """Check the names of the options.

        Raises: ConfigurationError if one of them is not in `names`
        """
        names = tuple(names)
        self._given = {name.lower(): value for name, value in options.items()}
        known = {name.lower() for name in names}
        if "password" in self._given:
            # The error does not repeat the password.
            raise ConfigurationError(
                "option password: Spark shows options in its plans of queries; put the password into the first line of "
                "a file, and set the option passwordFile"
            )
        if "option.url" in self._given:
            # Spark passes this name only for CREATE TABLE, in addition to `url`.
            raise ConfigurationError(
                "CREATE TABLE cannot use truenext: Spark would give its options neither to SELECT nor to INSERT. Use "
                "CREATE TEMPORARY VIEW name USING truenext OPTIONS (...)"
            )
        unknown = sorted(name for name in options if name.lower() not in known)
        if unknown:
            raise ConfigurationError(f"option {unknown[0]} is unknown; the options are {', '.join(names)}")

    def get(self, name: str) -> str | None:
        return self._given.get(name.lower())

    def require(self, *names: str) -> None:
        """Check that these options are given.

        Raises: ConfigurationError for the first option that is missing
        """
        for name in names:
            if not (self.get(name) or "").strip(", "):
                raise ConfigurationError(f'option {name} is missing: .option("{name}", "{EXAMPLES[name]}")')

    def addresses(self) -> tuple[Address, ...]:
        """Return the addresses in the option `url`."""
        try:
            return tuple(parse_url(url.strip()) for url in (self.get("url") or "").split(",") if url.strip())
        except ConfigurationError as error:
            raise ConfigurationError(f"option url: {error}") from error

    def credentials(self) -> Credentials:
        """Return the credentials from the options in CREDENTIAL_NAMES."""
        user, file, ca, certificate, key = ((self.get(name) or "").strip() or None for name in CREDENTIAL_NAMES)
        # A broker may know a user by its certificate.
        if (user is None) != (file is None) and not (user and certificate):
            raise ConfigurationError("options user and passwordFile must be set together")
        if key and not certificate:
            raise ConfigurationError("option key is set without option certificate: set both")
        try:
            return Credentials(user=user, password_file=file, ca=ca, certificate=certificate, key=key)
        except ValueError as error:
            raise ConfigurationError(f"option user: {error}") from error

    def number(self, name: str, least: int, most: int, default: int) -> int:
        text = self.get(name)
        if text is None:
            return default
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise ConfigurationError(f"option {name} is {text!r}, and must be a whole number, {least} to {most}")
        return int(text)

    def seconds(self, name: str, default: float) -> float:
        """Return the seconds of an option whose value is a time in Spark's notation, such as `15m`. A value without a
        unit is in milliseconds."""
        text = self.get(name)
        if text is None:
            return default
        found = _TIME.fullmatch(text.strip().lower())
        if found is None:
            raise ConfigurationError(
                f"option {name} is {text!r}, and must be a whole number and a unit: {', '.join(_TIME_UNITS_S)}"
            )
        return int(found[1]) * _TIME_UNITS_S[found[2] or "ms"]

    def choice(self, name: str, choices: tuple[str, str]) -> str:
        """Return the value of an option, which must be one of `choices`. The first choice is the default."""
        text = (self.get(name) or choices[0]).strip().lower()
        if text not in choices:
            raise ConfigurationError(f"option {name} is {text!r}, and must be {choices[0]} or {choices[1]}")
        return text

    def word(self, name: str) -> str | None:
        """Return the value of an option that becomes a word in queue names; None if the option is not given."""
        text = self.get(name)
        if text is not None and (not 0 < len(text) <= WORD_LENGTH_MAX or not _WORD_CHARACTERS.issuperset(text)):
            raise ConfigurationError(
                f"option {name} is {text!r}, and must be a word of 1 to {WORD_LENGTH_MAX} letters, digits, _ and -"
            )
        return text

    def of_query(self) -> dict[str, Any]:
        """Return the fields of `QueryOptions`."""
        return {
            "addresses": self.addresses(),
            "credentials": self.credentials(),
            "space": self.word("space") or DEFAULT_SPACE,
            "patience_s": float(self.number("patience", 0, 365 * 86_400, int(DEFAULT_PATIENCE_S))),
        }
