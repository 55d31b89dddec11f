"""Descriptions of the settings in the configuration file. Parsing, validation and documentation use the same
description.

    class Policy:                                       a dataclass; each field is a setting
        page_size: int = setting(1000, "Messages ...", unit="messages", least=1, reason="...")

    settings_of(Policy)                                 the descriptions, by name of the setting

The annotation of a field says which values are valid: bool, int, float, str, a path, an Enum of strings, or a tuple of
strings. `| None` is for a setting that may be left out.
"""

from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_KEY = "setting"

NO_NONE_VALUE: Any = ...
"""Value of `Setting.none` for settings that do not accept the text "none"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    name: str
    kind: type
    default: Any
    meaning: str
    """Description in one or more sentences."""
    reason: str
    """Reason for the default."""
    unit: str
    """Unit of a number; "" if it has none. A number of "bytes" may be written as 64MiB."""
    least: float | None
    most: float | None
    """Highest valid number; None is no limit."""
    none: Any
    """Value of the setting if the file has the text "none"."""
    fixed: str
    """Reason why a change needs a restart of the broker; "" if a reload applies the change."""


def setting(
    default: T,
    meaning: str,
    *,
    reason: str,
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
    none: Any = NO_NONE_VALUE,
    fixed: str = "",
) -> T:
    """Return the dataclass field for a setting. `Setting` describes the arguments."""
    description = {
        "meaning": meaning,
        "reason": reason,
        "unit": unit,
        "least": least,
        "most": most,
        "none": none,
        "fixed": fixed,
    }
    return field(default=default, metadata={_KEY: description})


@cache
def settings_of(described: type) -> dict[str, Setting]:
    """Return the settings of a dataclass, by name.

    Raises: TypeError if a field was not made by `setting`: such a field could not be configured and would not be
    documented.
    """
    hints = get_type_hints(described)
    settings = {}
    for each in fields(described):
        if _KEY not in each.metadata or each.default is MISSING:
            raise TypeError(f"{described.__name__}.{each.name} is not described: give it a `setting(...)`")
        kind = _without_none(hints[each.name])
        settings[each.name] = Setting(name=each.name, kind=kind, default=each.default, **each.metadata[_KEY])
    return settings


def _without_none(hint: Any) -> type:
    """Return the type of a setting's values without None; `tuple` for a tuple of texts."""
    if isinstance(hint, UnionType):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    return cast(type, get_origin(hint) or hint)
