"""Where a message is sent to, and the names it may have.

Addresses as clients write them:

    /queue/NAME                        a queue, made on first use
    /temp-queue/NAME                   a reply queue of the connection that says it
    /remote-temp-queue/SESSION/NAME    the same queue, as everybody else must say it
    /control/VERB                      a question to the broker itself
"""

from enum import Enum
from functools import lru_cache

import msgspec

from truenext.errors import RemoteProtocolError
from truenext.limits import DESTINATION_LENGTH_MAX

DEAD_LETTER_PREFIX = "DLQ."
"""A queue of this prefix holds what could not be handled; what fails there stays there."""

TEMPORARY_PREFIX = "/temp-queue/"
REMOTE_TEMPORARY_PREFIX = "/remote-temp-queue/"

_LATER = {
    "/topic/": "topics",
    "/temp-topic/": "temporary topics",
    "/dsub/": "durable subscriptions",
    "/exchange/": "exchanges",
}
_LATER_CHARACTERS = {"*": "wildcard destinations", ">": "wildcard destinations", ",": "composite destinations"}


class Kind(Enum):
    QUEUE = "queue"
    TEMPORARY = "temporary queue"
    CONTROL = "control"


class Destination(msgspec.Struct, frozen=True, gc=False):
    """A parsed address. `name` is unique among queues and temporary queues together: only the latter begin with /."""

    kind: Kind
    name: str
    session: str = ""
    """The connection that owns a temporary queue."""

    @property
    def address(self) -> str:
        """How any client may write it."""
        if self.kind is Kind.TEMPORARY:
            return f"/remote-temp-queue{self.name}"
        return f"/{self.kind.value}/{self.name}"


@lru_cache(maxsize=4096)
def parse(address: str, session: str) -> Destination:
    """The destination a client of `session` means.

    >>> parse("/queue/orders", "s1").name
    'orders'
    >>> parse("/temp-queue/replies", "s1").address
    '/remote-temp-queue/s1/replies'

    Raises: RemoteProtocolError if there is no such destination, or none yet.
    """
    if address.startswith("/queue/"):
        return Destination(Kind.QUEUE, _checked(address[7:], address))
    if address.startswith(TEMPORARY_PREFIX):
        name = _checked(address[len(TEMPORARY_PREFIX) :], address)
        return Destination(Kind.TEMPORARY, f"/{session}/{name}", session)
    if address.startswith(REMOTE_TEMPORARY_PREFIX):
        owner, _, name = address[len(REMOTE_TEMPORARY_PREFIX) :].partition("/")
        return Destination(Kind.TEMPORARY, f"/{_checked(owner, address)}/{_checked(name, address)}", owner)
    if address.startswith("/control/"):
        return Destination(Kind.CONTROL, _checked(address[9:], address))
    for prefix, feature in _LATER.items():
        if address.startswith(prefix):
            raise RemoteProtocolError(f"{feature} are not supported yet: {address!r}")
    raise RemoteProtocolError(
        f"unknown destination {address!r}: it must begin with /queue/, /temp-queue/, /remote-temp-queue/ or /control/"
    )


def dead_letter_name(queue: str) -> str:
    """The queue that takes what could not be handled in this one."""
    return DEAD_LETTER_PREFIX + queue


def _checked(name: str, address: str) -> str:
    if not name or name.startswith("/"):
        raise RemoteProtocolError(f"destination {address!r} has no name, or one that begins with /")
    length_max = DESTINATION_LENGTH_MAX
    if not name.startswith(DEAD_LETTER_PREFIX):
        # The name of its dead-letter queue must be one too.
        length_max -= len(DEAD_LETTER_PREFIX)
    if len(name) > length_max:
        raise RemoteProtocolError(f"destination name of {len(name)} characters; at most {length_max}")
    for character, feature in _LATER_CHARACTERS.items():
        if character in name:
            raise RemoteProtocolError(f"{feature} are not supported yet: {address!r}")
    if not name.isprintable():
        raise RemoteProtocolError(f"destination {address!r} has characters that cannot be printed")
    return name
