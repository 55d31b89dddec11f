"""Page of the limits, docs/reference/limits.md, from src/truenext/model/limits.py and the text below each limit."""

import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple

from tools.reference.markdown import code, joined, table, wrapped
from tools.reference.members import text_below
from truenext.model import limits
from truenext.model.numerals import format_size

_HEAD = """\
# Reference of limits

Look up each limit of the broker here, and the error that a client gets when it exceeds one. Most limits are fixed: the
broker was tested with them. [settings.md](settings.md) describes those that you can set, with their ranges.

Everything that a client can make the broker keep has a limit. A client that exceeds one gets an ERROR that names it,
and its connection ends, unless it is a truenext client's. All earlier frames of the connection stay in effect. Each
ERROR also has a code for programs. [protocol.md](../protocol.md) describes both. `…` stands for a value of the
individual case.

[stages.md](../stages.md) has the limits of a flow of stages.

This page is made from [limits.py](../../src/truenext/model/limits.py): `make reference`. Constants in the last part of
that file only tune the broker, and are not here.
"""
_SECTION = re.compile(r"# ---- (.+) ----")
TUNING = "Tuning: no client is refused because of these"
"""Section with constants that are no limits."""
_UNITS = ((24 * 3600 * 1000, "day"), (3600 * 1000, "hour"))


class Limit(NamedTuple):
    name: str
    value: float
    meaning: str
    notes: str
    """Further paragraphs."""
    setting: str
    """Setting that changes it; "" if it is fixed."""
    exceeded: str
    """Errors, each in backquotes with names of limits in braces, or a sentence."""


def sections() -> dict[str, list[str]]:
    """Return the names of the constants by section.

    Raises: ValueError if a constant is in none
    """
    found: dict[str, list[str]] = {}
    for line in inspect.getsource(limits).split("\n"):
        if heading := _SECTION.fullmatch(line):
            found[heading[1]] = []
        elif constant := re.match(r"([A-Z_]+) = ", line):
            if not found:
                raise ValueError(f"{constant[1]} in limits.py is in no section")
            list(found.values())[-1].append(constant[1])
    return found


def limits_by_name() -> dict[str, Limit]:
    """Return all limits, without constants that only tune the broker.

    Raises: ValueError if one has no text, or none on what happens when it is exceeded
    """
    names = [name for section, names in sections().items() if section != TUNING for name in names]
    return {name: _limit(name, inspect.cleandoc(text_below(limits, name))) for name in names}


def _limit(name: str, text: str) -> Limit:
    meaning, *notes, fields = text.split("\n\n")
    found = dict(re.findall(r"^(Setting|Exceeded): (.+)$", fields, re.MULTILINE))
    if "Exceeded" not in found:
        raise ValueError(f"{name} in limits.py has no text, or none with `Exceeded:`")
    value = getattr(limits, name)
    return Limit(name, value, meaning, " ".join(notes), found.get("Setting", ""), found["Exceeded"])


def with_values(text: str) -> str:
    """Replace names of limits in braces by their values, as an f-string does."""
    return re.sub(r"\{([A-Z_]+)\}", lambda match: _number(getattr(limits, match[1])), text)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def page() -> str:
    return joined(_parts())


def _parts() -> Iterator[str]:
    yield _HEAD
    known = limits_by_name()
    for section, names in sections().items():
        if section != TUNING:
            yield f"## {section}"
            yield table(("limit", "value", "of what", "setting", "if exceeded"), [_row(known[name]) for name in names])
            for name in names:
                if known[name].notes:
                    yield wrapped(f"`{name}`: {known[name].notes}")


def _row(limit: Limit) -> tuple[str, str, str, str, str]:
    # Names of other limits are code; so is the name itself.
    meaning = re.sub(r"\b[A-Z]+_[A-Z_]+\b", lambda match: code(match[0]), limit.meaning)
    setting = re.sub("^`[a-z_]+`", lambda match: f"[{match[0]}](settings.md)", limit.setting)
    return code(limit.name), _value(limit), meaning, setting or "fixed", with_values(limit.exceeded)


def _value(limit: Limit) -> str:
    value = _number(limit.value)
    if ("BYTES" in limit.name and limit.value >= 1024) or limit.name.startswith(("MEMORY", "DISK")):
        return f"{value} ({format_size(int(limit.value))})"
    if "_MS" in limit.name:
        for size, unit in _UNITS:
            count, rest = divmod(int(limit.value), size)
            if not rest and count < 1000:
                return f"{value} ({count} {unit}{'s' if count > 1 else ''})"
    return value
