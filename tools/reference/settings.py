"""Page of the settings, docs/reference/settings.md, from the descriptions of the settings in the code."""

from collections.abc import Iterator
from enum import Enum

from tools.reference.markdown import joined, wrapped
from truenext.broker.config import describe_range, format_value
from truenext.broker.settings import BrokerSettings
from truenext.model.policy import Policy
from truenext.model.setting import NO_NONE_VALUE, Setting, settings_of

_HEAD = """\
# Settings

Look up each setting of a broker and of its queues here: its meaning, its default, its valid values, and whether a
reload changes it. `truenext serve --config truenext.toml` reads them from a file in TOML:

```toml
[broker]                    # of the broker
data = "./data"
memory_limit = "512MiB"

[policy]                    # of every queue
attempts_max = 5

[policy."orders.>"]         # of queues with these names
memory_limit = "64MiB"
```

**Sizes** are texts with a unit (`"64MiB"`, `"50KB"`, `"1.5 GB"`) or plain numbers of bytes. `"none"` means no limit.
A setting that the file does not name has its default. [operations.md](../operations.md) describes patterns, options of
the command line that take precedence, checks of the file, and reloads. [security.md](../security.md) describes users
and TLS, [postgresql.md](../postgresql.md) messages in PostgreSQL.

This page is made from the code: `make reference`.
"""
_SECTIONS: dict[str, tuple[str, type]] = {
    "policy": ("a queue", Policy),
    "broker": ("the broker", BrokerSettings),
}
_IN_BOTH = set(settings_of(Policy)) & set(settings_of(BrokerSettings))


def page() -> str:
    return joined(_parts())


def _parts() -> Iterator[str]:
    yield _HEAD
    for section, (owner, described) in _SECTIONS.items():
        yield f"## `[{section}]`: settings of {owner}"
        for setting in settings_of(described).values():
            yield f"### `{setting.name}`{f' of {owner}' if setting.name in _IN_BOTH else ''}"
            yield wrapped(setting.meaning)
            yield wrapped(f"{_default(setting)} {setting.reason}")
            yield wrapped(". ".join([*_values(setting), _change(setting)]) + ".")


def _default(setting: Setting) -> str:
    if setting.default is None and setting.none is NO_NONE_VALUE:
        return "**Not set** by default."
    return f"**Default `{format_value(setting, setting.default)}`.**"


def _values(setting: Setting) -> Iterator[str]:
    none = [] if setting.none is NO_NONE_VALUE else ['`"none"`']
    if issubclass(setting.kind, Enum):
        values = [f'`"{each.value}"`' for each in setting.kind] + none
    elif setting.kind is bool:
        values = ["`true`", "`false`"]
    elif limits := describe_range(setting):
        unit = "" if setting.unit in ("", "bytes") else f" {setting.unit}"
        values = [f"{limits}{unit}", *none]
    else:
        return
    yield f"Values: {', '.join(values[:-1])}{' or ' if values[1:] else ''}{values[-1]}"


def _change(setting: Setting) -> str:
    return f"A change needs a restart: {setting.fixed}" if setting.fixed else "A reload changes it"
