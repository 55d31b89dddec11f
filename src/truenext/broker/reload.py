"""Reload: a running broker reads its configuration file again, and applies all changes or none."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from truenext.broker.config import BROKER, POLICY, Configuration, format_value, toml_header
from truenext.broker.settings import BrokerSettings
from truenext.broker.users import UserEntry
from truenext.errors import ConfigurationError, FaultyFileError
from truenext.model.policy import Policy
from truenext.model.setting import NO_NONE_VALUE, Setting, settings_of

logger = logging.getLogger(__name__)


class ReloadResult(msgspec.Struct, frozen=True):
    """Result of a reload. If `errors` is not empty, nothing was changed."""

    file: str | None
    """Path of the file; null if the broker has no file."""
    changed: list[str]
    """One line for each changed setting, with the value before and the value now; and for each changed user."""
    errors: list[str]
    """Reasons why the file was not applied."""


NO_FILE = ReloadResult(None, [], ["this broker was started without --config and --users: it has no file to reload"])


class Reloader:
    def __init__(
        self,
        current: Configuration,
        read_again: Callable[[], Configuration],
        *,
        apply: Callable[[Configuration], None],
    ) -> None:
        """`read_again` reads the file; it raises ConfigurationError if the file has faults or cannot be read. `apply`
        makes all changes in one step."""
        self.current = current
        """Configuration that was applied last."""
        self._started_with = current
        self._read_again = read_again
        self._appliers = [apply]

    def also_apply(self, apply: Callable[[Configuration], None]) -> None:
        """Let `apply` make the changes of each later reload, too, and now those of earlier reloads."""
        if self.current is not self._started_with:
            apply(self.current)
        self._appliers.append(apply)

    def reload(self) -> ReloadResult:
        """Read the file, apply its settings, and log the result. Must be called on the thread that serves: a file of
        usual length is read in a few milliseconds."""
        file = self._file
        result = self._reload()
        if result.errors:
            # A warning, as the broker goes on as before.
            logger.warning("configuration not reloaded", extra={"file": str(file), "reasons": result.errors})
        else:
            logger.info("configuration reloaded", extra={"file": str(file), "changed": result.changed})
        return result

    @property
    def _file(self) -> Path | None:
        """Configuration file; without a configuration file, the users file or certificate. None if there is none."""
        settings = self.current.broker
        return self.current.file or settings.users or settings.certificate

    def _reload(self) -> ReloadResult:
        current = self.current
        name = str(self._file)
        try:
            new = self._read_again()
        except FaultyFileError as error:
            return ReloadResult(name, [], list(error.faults))
        except ConfigurationError as error:
            return ReloadResult(name, [], [str(error)])
        errors = list(_fixed_changes(current, new))
        if errors:
            return ReloadResult(name, [], errors)
        for apply in self._appliers:
            apply(new)
        self.current = new
        return ReloadResult(name, list(_changes(current, new)), [])


def _fixed_changes(before: Configuration, now: Configuration) -> Iterator[str]:
    settings = settings_of(BrokerSettings)
    for name, was, is_now in _differences(before.broker, now.broker):
        setting = settings[name]
        if setting.fixed:
            yield (
                f"{BROKER}.{name} cannot change from {_display(setting, was)} to {_display(setting, is_now)} "
                f"while the broker runs: {setting.fixed}; restart the broker"
            )
    if before.certificates is not None and now.certificates is None:
        yield f"{BROKER}.certificate cannot be left out while the broker runs: listeners need it; restart the broker"


def _fingerprint(configuration: Configuration) -> str:
    return "" if configuration.certificates is None else configuration.certificates.fingerprint


def _changes(before: Configuration, now: Configuration) -> Iterator[str]:
    settings = settings_of(BrokerSettings)
    for name, was, is_now in _differences(before.broker, now.broker):
        yield f"{toml_header(BROKER)} {_change(settings[name], was, is_now)}"
    if _fingerprint(before) != _fingerprint(now):
        yield "certificates: changed files"
    for pattern in (None, *sorted({*before.policies.by_pattern, *now.policies.by_pattern})):
        # A pattern that the old or the new file lacks has the default policy there.
        was, is_now = (
            each.default if pattern is None else each.by_pattern.get(pattern, each.default)
            for each in (before.policies, now.policies)
        )
        for name, one, other in _differences(was, is_now):
            yield f"{toml_header(POLICY, pattern)} {_change(settings_of(Policy)[name], one, other)}"
    yield from _user_changes(before.users or {}, now.users or {})


def _user_changes(before: Mapping[str, UserEntry], now: Mapping[str, UserEntry]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        if name not in before:
            yield f"user {name}: added"
        elif name not in now:
            yield f"user {name}: removed"
        else:
            if before[name].credentials != now[name].credentials:
                yield f"user {name}: passwords or certificates changed"
            if not (before[name].user.has_all_of(now[name].user) and now[name].user.has_all_of(before[name].user)):
                yield f"user {name}: grants changed"


def _differences(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    for each in fields(one):
        was, is_now = getattr(one, each.name), getattr(other, each.name)
        if was != is_now:
            yield each.name, was, is_now


def _change(setting: Setting, was: Any, is_now: Any) -> str:
    return f"{setting.name}: {_display(setting, was)} -> {_display(setting, is_now)}"


def _display(setting: Setting, value: Any) -> str:
    return "nothing" if value is None and setting.none is NO_NONE_VALUE else format_value(setting, value)
