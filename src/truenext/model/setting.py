"""How a setting of the configuration file is described: once, for whoever reads it, checks it and documents it.

    class Policy:                                       a dataclass; each field is a setting
        page_size: int = setting(1000, "Messages ...", unit="messages", least=1, reason="...")

    settings_of(Policy)                                 what is known of each, by its name

The kind of a value is the field's annotation: bool, int, float, str, a path, an Enum of strings, or a tuple of strings;
or None, for a setting that may be left away.
"""

from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_KEY = "setting"

NO_NONE_VALUE: Any = ...
"""`Setting.none`, where the word "none" is no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    name: str
    kind: type
    default: Any
    meaning: str
    """One or more sentences."""
    reason: str
    """Why the default is what it is."""
    unit: str
    """Of a number; "bytes" may be written with a unit (truenext.model.numerals)."""
    least: float | None
    most: float | None
    """None is no limit."""
    none: Any
    """What "none" stands for."""
    fixed: str
    """Why a broker must be started again for a change of it; "" if it need not."""


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
    """The field of a dataclass that is a setting; see Setting of the arguments."""
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
    """What is known of each field of a dataclass, by its name.

    Raises: TypeError if one is not described; it could be said nowhere and would be documented nowhere.
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
    """The kind in `KIND | None`; that of a tuple's elements is always str."""
    if isinstance(hint, UnionType):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    return cast(type, get_origin(hint) or hint)
