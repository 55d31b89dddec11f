"""Message broker that always hands out the true next message, and its client.

`connect` opens a connection for asyncio. `truenext.blocking` has the client for threads. docs/client.md describes both.
"""

import importlib

from truenext.version import VERSION

TYPE_CHECKING = False
"""Constant that type checkers take for True, like `typing.TYPE_CHECKING`. Importing `typing` would delay the first line
of the `truenext` command by 9 ms."""

if TYPE_CHECKING:
    from truenext.client.core.health import ConsumerHealth, Health
    from truenext.client.core.message import Content
    from truenext.client.core.send_options import Outgoing
    from truenext.client.core.transaction_state import Outcome
    from truenext.client.tasks.connection import (
        Connection,
        Consumer,
        Message,
        Processing,
        Sent,
        Session,
        Transaction,
        connect,
    )
    from truenext.errors import (
        ClosedError,
        Code,
        ConfigurationError,
        ConnectionLost,
        InDoubt,
        LocalProtocolError,
        Refused,
        RolledBack,
        TruenextError,
    )

__version__ = VERSION

__all__ = [
    "ClosedError",
    "Code",
    "ConfigurationError",
    "Connection",
    "ConnectionLost",
    "Consumer",
    "ConsumerHealth",
    "Content",
    "Health",
    "InDoubt",
    "LocalProtocolError",
    "Message",
    "Outcome",
    "Outgoing",
    "Processing",
    "Refused",
    "RolledBack",
    "Sent",
    "Session",
    "Transaction",
    "TruenextError",
    "__version__",
    "connect",
]

_HOMES = {
    "truenext.client.core.health": ("ConsumerHealth", "Health"),
    "truenext.client.core.message": ("Content",),
    "truenext.client.core.send_options": ("Outgoing",),
    "truenext.client.core.transaction_state": ("Outcome",),
    "truenext.client.tasks.connection": (
        *("Connection", "Consumer", "Message", "Processing", "Sent", "Session", "Transaction", "connect"),
    ),
    "truenext.errors": (
        *("ClosedError", "Code", "ConfigurationError", "ConnectionLost", "InDoubt", "LocalProtocolError", "Refused"),
        *("RolledBack", "TruenextError"),
    ),
}
"""Public names by the module that defines them. A module is imported when one of its names is first used, so that a
broker does not load the client."""


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            found: object = getattr(importlib.import_module(home), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
