"""Checks of the arguments in a test's calls. With a wrong argument, a fault might never happen, and the test would
prove nothing."""

from collections.abc import Iterable
from difflib import get_close_matches
from math import isfinite
from typing import Any

from truenext.errors import RemoteProtocolError
from truenext.model.destination import parse_queue_name

_DESTINATION_PREFIXES = ("/queue/", "/topic/", "queue://", "topic://", "queue/", "topic/")


def checked_seconds(seconds: float, name: str, *, may_be_zero: bool = True) -> float:
    """Return `seconds`, if it is a valid time. Raises: ValueError if it is not a finite number, is negative, or is 0
    and `may_be_zero` is False"""
    # bool is a subclass of int.
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool) and isfinite(seconds)
    if not is_number or seconds < 0 or (seconds == 0 and not may_be_zero):
        raise ValueError(
            f"{name} must be a number of seconds, {'0 or more' if may_be_zero else 'more than 0'}, not {seconds!r}"
        )
    return seconds


def checked_count(count: int, name: str, minimum: int) -> int:
    """Return `count`, if it is a valid number. Raises: ValueError if it is not a whole number, or is less than
    `minimum`"""
    if type(count) is not int or count < minimum:
        raise ValueError(f"{name} must be a whole number, {minimum} or more, not {count!r}")
    return count


def checked_flag(flag: bool, name: str) -> bool:
    """Return `flag`, if it is True or False. Raises: ValueError if it is neither True nor False"""
    if not isinstance(flag, bool):
        raise ValueError(f"{name} must be True or False, not {flag!r}")
    return flag


def checked_queue(name: str) -> str:
    """Return `name`, if it is the name of a queue. Raises: ValueError if it is not a valid name of a queue"""
    if not isinstance(name, str):
        raise ValueError(f"the name of a queue must be a text, not {name!r}")
    for prefix in _DESTINATION_PREFIXES:
        if name.startswith(prefix):
            raise ValueError(
                f"{name!r} is a destination: use the name of the queue alone, {name.removeprefix(prefix)!r}"
            )
    try:
        parse_queue_name(name)
    except RemoteProtocolError as error:
        raise ValueError(f"{name!r} is not the name of a queue: {error}") from error
    return name


def known_names_hint(value: Any, known: Iterable[str]) -> str:
    """Return the end of an error text that rejects `value`. It lists the `known` names, and suggests the most similar
    one."""
    names = list(known)
    listed = f"there are {', '.join(map(repr, names))}" if names else "there are none"
    close = []
    if isinstance(value, str):
        # Wrong capitals are the most frequent mistake.
        by_casefold = {each.casefold(): each for each in names}
        close = [by_casefold[each] for each in get_close_matches(value.casefold(), by_casefold, n=1)]
    return f"{listed}; is {close[0]!r} meant?" if close else listed
