"""What a consumer can ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from truenext.client.core import frames
from truenext.client.core.buffer import SubscriptionOptions
from truenext.model.limits import CONSUMER_PRIORITY_MAX, WINDOW_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping


class ConsumerOptions(TypedDict, total=False):
    """What a consumer takes, and before whom."""

    prefetch: int | None
    """Messages that the broker may send ahead of those that the program has taken; 0 is none. None, as unless told,
    leaves it to the broker, which fits it to what the program handles."""
    selector: str
    """Only what this JMS selector wants, such as "region = 'eu' AND JMSPriority > 6"."""
    priority: int
    """-127 to 127: of several consumers that could take a message the highest gets it. 0 unless told."""
    exclusive: bool
    """This consumer alone gets the messages of its queue."""
    durable: str
    """The name of a durable subscription to a topic, which collects while nobody is there; needs `client_id`."""
    headers: Mapping[str, str]
    """Other headers of the SUBSCRIBE."""


_RESERVED = frozenset({"id", "destination", "ack", "receipt", "selector", "browser"})


def parse_consumer_options(destination: str, options: ConsumerOptions) -> SubscriptionOptions:
    """Raises: ValueError, TypeError"""
    unknown = options.keys() - ConsumerOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"a consumer has no option {', '.join(sorted(unknown))}")
    prefetch = options.get("prefetch")
    if prefetch is not None and not (isinstance(prefetch, int) and 0 <= prefetch <= WINDOW_MAX):
        raise ValueError(f"prefetch is a whole number, 0 to {WINDOW_MAX}, not {prefetch!r}")
    priority = options.get("priority", 0)
    if not -CONSUMER_PRIORITY_MAX <= priority <= CONSUMER_PRIORITY_MAX:
        raise ValueError(f"priority is {-CONSUMER_PRIORITY_MAX} to {CONSUMER_PRIORITY_MAX}, not {priority}")
    headers = dict(options.get("headers", {}))
    for name in headers:
        if name in _RESERVED or name.startswith("truenext-"):
            raise ValueError(f"{name} is no header for a program to set; there may be an option for it")
    frames.check_headers({"destination": destination, "selector": options.get("selector", "")} | headers)
    durable = options.get("durable")
    if durable is not None:
        frames.check_headers({"durable": durable})
    return SubscriptionOptions(
        destination=destination,
        prefetch=prefetch,
        selector=options.get("selector"),
        priority=priority,
        exclusive=options.get("exclusive", False),
        durable=durable,
        headers=headers,
    )
