"""Visit: one request of a login, with its parameters and the rights of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from truenext.console.gathering import QueueGathering
from truenext.console.link import Link
from truenext.console.logins import Login
from truenext.console.rights import Rights
from truenext.console.shared import Shared
from truenext.errors import TruenextError

T = TypeVar("T")


class NotFound(TruenextError):
    """What a page is about is not there (any more)."""


class NotAllowed(TruenextError):
    """The user lacks a right."""


class InvalidRequest(TruenextError):
    """A parameter is missing or has a wrong value."""


@dataclass(frozen=True)
class Visit:
    shared: Shared
    login: Login
    rights: Rights
    parameters: Mapping[str, Sequence[str]]
    """Values of each parameter of the address, or field of the posted form."""
    at_ms: int
    is_open: Callable[[Login], bool]
    """Function that tells whether a login still lasts."""

    @property
    def link(self) -> Link:
        return self.login.link

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter, or the default if it is missing."""
        values = self.parameters.get(name)
        return values[-1] if values else default

    def required(self, name: str) -> str:
        """Return a parameter. Raises: InvalidRequest if it is missing or empty"""
        value = self.text(name)
        if not value:
            raise InvalidRequest(f"the address lacks the parameter {name!r}: begin at the overview")
        return value

    def number(self, name: str, default: int, highest: int = 2**63 - 1) -> int:
        """Return a number of 0 to `highest`. Raises: InvalidRequest if it is none"""
        value = self.text(name)
        if not value:
            return default
        if not (value.isascii() and value.isdigit() and len(value) < 20 and int(value) <= highest):
            raise InvalidRequest(f"the parameter {name!r} is not a number of 0 to {highest:,}: {value[:50]!r}")
        return int(value)

    def numbers(self, name: str) -> list[int]:
        """Return all values of a parameter as numbers. Raises: InvalidRequest if one is none"""
        values = self.parameters.get(name, ())
        if any(not (each.isascii() and each.isdigit() and len(each) < 20) for each in values):
            raise InvalidRequest(f"the parameter {name!r} has a value that is not a number")
        return sorted({int(each) for each in values})

    @property
    def may_see_flows(self) -> bool:
        """True if the user may see flows: they tell of all queues."""
        return self.rights.is_monitor

    @property
    def has_flows(self) -> bool:
        """True if the console reads events, and the user may see flows."""
        return self.may_see_flows and bool(self.shared.flows.folders)

    def gathering(self) -> QueueGathering:
        """Return the gathering of all that may see the same as this user."""
        return self.shared.gathering(self.login, self.rights, self.is_open)

    async def ask(self, verb: str, body: object, type: type[T]) -> T:
        """Send a control request as the user, and return the decoded answer. Raises: the errors of `Link.ask`"""
        return await self.link.ask(verb, body, type)
