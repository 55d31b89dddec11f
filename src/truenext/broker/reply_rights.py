"""Reply rights: which users may send to temporary queues and topics of other users. Source: contract, C23.8 to C23.11

    dispatch    gives the user the right to reply to the temporary queues and topics that the message's reply-to names
    SEND        to one of another user, or with a reply-to that names one, needs this right

Both read `SentMessage.header` by `_named_in_reply_to`, so a SEND cannot name what is not checked. Ids of connections
are never used again: what a message of an earlier run of the broker names is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from sys import getsizeof

from msgspec.structs import replace

from truenext.broker.access import ForbiddenError, is_private
from truenext.engine.dispatch.plain import Deliveries
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import RemoteProtocolError
from truenext.model.commands import Send
from truenext.model.destination import (
    REMOTE_PREFIX,
    Destination,
    DestinationKind,
    parse_address,
)
from truenext.model.grants import User
from truenext.model.header_lines import reply_to_of
from truenext.model.limits import REPLY_DESTINATIONS_MAX

_DESTINATION_BYTES = 400
"""Bytes of a temporary queue or topic to which users may reply, without its name and theirs."""

_USER_BYTES = 128
"""Bytes of each user that may reply to it."""

_REMOTE_PREFIX = REMOTE_PREFIX.encode()
"""The prefix in header lines, which escape none of its characters."""

_NOWHERE = Destination(DestinationKind.TEMPORARY, "/")
"""Temporary queue of no connection: what is sent there is dropped, as if its connection had ended (C25.5)."""


def _named_in_reply_to(header: bytes) -> tuple[Destination, ...]:
    r"""Return the temporary queues and topics that the reply-to of a message names.

    >>> [one.name for one in _named_in_reply_to(b"reply-to:/queue/a,/remote-temp-queue/1f/b\n")]
    ['/1f/b']
    """
    address = reply_to_of(header)
    if REMOTE_PREFIX not in address:
        return ()
    try:
        destination = parse_address(address, "")
    except RemoteProtocolError:
        # No SEND can go there.
        return ()
    return tuple(part for part in destination.parts or (destination,) if part.session)


class _Repliers:
    """Names of the users that may reply to the temporary queues and topics of one connection."""

    __slots__ = ("others", "queues", "size")

    def __init__(self) -> None:
        self.queues: dict[Destination, set[str]] = {}
        """Users that may reply to queues that existed."""
        self.others: dict[Destination, set[str]] = {}
        """Users that may reply to topics, and to queues that did not exist; the first are forgotten first."""
        self.size = 0
        """Bytes of memory for queues that this takes."""


class ReplyRights:
    def __init__(self, engine: Engine, user_name: Callable[[ConnectionState], str]) -> None:
        """`user_name` returns the name of a connection's user, "" before its login."""
        self._sessions = engine.clients.sessions
        self._is_there = engine.is_there
        self._memory = engine.memory
        self._user_name = user_name
        self._repliers: dict[ConnectionState, _Repliers] = {}
        """Users that may reply, by the connection that owns the queues and topics, if a reply-to has named it."""

    # ---- SEND ----

    def check(self, user: User, session: ConnectionState, send: Send) -> None:
        """Check the temporary queues and topics that a SEND goes to or names in its reply-to. Those of other users that
        are not there become one that drops what is sent to it.

        Raises: ForbiddenError if the user lacks a right
        """
        if send.has_reply_to:
            self._check_reply_to(user, send)
        destination = send.destination
        if not destination.parts:
            if destination.session:
                send.destination = self._target(user, session, destination)
        elif any(map(is_private, destination.parts)):
            parts = tuple(self._target(user, session, part) for part in destination.parts)
            send.destination = replace(destination, parts=parts)

    def _check_reply_to(self, user: User, send: Send) -> None:
        for named in _named_in_reply_to(send.message.header):
            owner = self._sessions.get(named.session)
            if owner is None:
                continue
            # There or not: it may be there at the dispatch, which gives the right.
            if self._user_name(owner) != user.name and not self._may_reply(user, owner, named):
                raise _no_right_error(user, f"name {named.address} in reply-to", named)
            self._repliers.setdefault(owner, _Repliers())

    def _target(self, user: User, session: ConnectionState, destination: Destination) -> Destination:
        """Return the destination, or another that drops the message; the user may send to it.

        Raises: ForbiddenError if the user may not
        """
        if not destination.session:
            return destination
        owner = self._sessions.get(destination.session)
        if owner is None:
            return _NOWHERE
        if owner is session or self._user_name(owner) == user.name:
            return destination
        if not self._is_there(destination):
            return _NOWHERE
        if not self._may_reply(user, owner, destination):
            raise _no_right_error(user, f"send to {destination.address}", destination)
        return destination

    def _may_reply(self, user: User, owner: ConnectionState, destination: Destination) -> bool:
        repliers = self._repliers.get(owner)
        return repliers is not None and (
            user.name in repliers.queues.get(destination, ()) or user.name in repliers.others.get(destination, ())
        )

    # ---- Dispatch ----

    @property
    def has_callers(self) -> bool:
        """A reply-to may name a temporary queue or topic of a connection that is there."""
        return bool(self._repliers)

    def note_dispatched(self, deliveries: Deliveries) -> None:
        """Give the users of these consumers the right to reply to these messages."""
        for consumer, entries in deliveries.items():
            for entry in entries:
                message = entry.message
                if message is not None and _REMOTE_PREFIX in message.header:
                    self._give_right(consumer.session, _named_in_reply_to(message.header))

    def _give_right(self, session: ConnectionState, named: tuple[Destination, ...]) -> None:
        name = self._user_name(session)
        for destination in named:
            owner = self._sessions.get(destination.session)
            repliers = None if owner is None else self._repliers.get(owner)
            if owner is None or repliers is None or self._user_name(owner) == name:
                continue
            is_queue = destination.kind is DestinationKind.TEMPORARY and self._is_there(destination)
            by_destination = repliers.queues if is_queue else repliers.others
            users = by_destination.get(destination)
            if users is None:
                if not is_queue and len(by_destination) >= REPLY_DESTINATIONS_MAX:
                    oldest = next(iter(by_destination))
                    self._count(repliers, -_size(oldest, by_destination.pop(oldest)))
                users = by_destination[destination] = set()
                self._count(repliers, _size(destination, users))
            if name not in users:
                users.add(name)
                self._count(repliers, _USER_BYTES)

    def _count(self, repliers: _Repliers, size: int) -> None:
        repliers.size += size
        self._memory.queue_bytes += size

    # ---- Ends ----

    def keep_users(self, names: Container[str]) -> None:
        """Forget all users but these."""
        for repliers in self._repliers.values():
            for users in (*repliers.queues.values(), *repliers.others.values()):
                removed = {name for name in users if name not in names}
                users -= removed
                self._count(repliers, -_USER_BYTES * len(removed))

    def connection_closed(self, session: ConnectionState) -> None:
        """Forget the users that may reply to a connection's temporary queues and topics."""
        repliers = self._repliers.pop(session, None)
        if repliers is not None:
            self._count(repliers, -repliers.size)


def _size(destination: Destination, users: set[str]) -> int:
    return _DESTINATION_BYTES + getsizeof(destination.name) + _USER_BYTES * len(users)


def _no_right_error(user: User, what: str, destination: Destination) -> ForbiddenError:
    noun = "queue" if destination.kind is DestinationKind.TEMPORARY else "topic"
    return ForbiddenError(
        user, f"{what}: no message whose reply-to names this temporary {noun} of another user was dispatched to it"
    )
