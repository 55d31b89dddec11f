"""Reply rights: which users may send to temporary queues and topics of other users. Source: contract, C23.8 to C23.11

    dispatch    gives the user the right to reply to the temporary queues and topics that the message's reply-to names
    SEND        needs this right if it goes to a temporary queue or topic of another user, or its reply-to names one

Dispatch and check use the same function, `_named_in`. So they agree on which queues a reply-to names. Ids of
connections are never used again: a queue that a message of an earlier run of the broker names no longer exists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from sys import getsizeof

from msgspec.structs import replace

from truenext.broker.access import ForbiddenError, is_private
from truenext.engine.dispatch.plain import Deliveries
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.model.commands import Send
from truenext.model.destination import (
    REMOTE_PREFIX,
    REMOTE_TEMPORARY_PREFIX,
    REMOTE_TEMPORARY_TOPIC_PREFIX,
    Destination,
    DestinationKind,
)
from truenext.model.forms import may_name_temporary, reply_to_address
from truenext.model.grants import User
from truenext.model.limits import COMPOSITE_MAX, REPLY_DESTINATIONS_MAX

_ADDRESS_BYTES = 400
"""Memory for each temporary queue or topic to which users may reply, without its address and its users."""

_USER_BYTES = 128
"""Memory for each user that may reply to a temporary queue or topic."""

_find_named = re.compile(
    rf"(?:^|,)\s*+((?:{REMOTE_TEMPORARY_PREFIX}|{REMOTE_TEMPORARY_TOPIC_PREFIX})([^/,]++)/[^,]*)"
).findall

ENDED_CONNECTIONS_MAX = 1000
"""Number of ended connections of JMS clients whose rights are kept."""
_NOWHERE = Destination(DestinationKind.TEMPORARY, "/")
"""Temporary queue of no connection: a message to it is dropped, as if its connection had ended (C25.5)."""


def _named_in(text: str) -> Iterable[tuple[str, str]]:
    r"""Return the temporary queues and topics that a reply-to names: the address of each, and the id of its connection.

    >>> _named_in("/queue/a, /remote-temp-queue/1f/b ,/remote-temp-topic/1f/c")
    [('/remote-temp-queue/1f/b', '1f'), ('/remote-temp-topic/1f/c', '1f')]
    """
    if REMOTE_PREFIX not in text or text.count(",") >= COMPOSITE_MAX:
        return ()
    found: list[tuple[str, str]] = _find_named(text)
    # Only the parts of a composite destination may have spaces around them.
    return [(address.rstrip(), session_id) for address, session_id in found] if "," in text else found


class _Repliers:
    """Rights to reply to the temporary queues and topics of one connection: names of users, by the address of the queue
    or topic."""

    __slots__ = ("others", "owner", "queues", "size")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        """User of the connection."""
        self.queues: dict[str, set[str]] = {}
        """Users that may reply to queues. These queues existed at the dispatch that gave the right."""
        self.others: dict[str, set[str]] = {}
        """Users that may reply to topics, and to queues that did not exist at the dispatch. If there are too many, the
        oldest address is forgotten first."""
        self.size = 0
        """Bytes that these rights take of the memory for queues."""

    def may_reply(self, user: str, address: str) -> bool:
        return user in self.queues.get(address, ()) or user in self.others.get(address, ())


class ReplyRights:
    def __init__(self, engine: Engine, user_name: Callable[[ConnectionState], str]) -> None:
        """`user_name` returns the name of a connection's user; "" before the login."""
        self._engine = engine
        self._sessions = engine.state.clients.sessions
        self._memory = engine.state.memory
        self._user_name = user_name
        self._repliers: dict[str, _Repliers] = {}
        """Rights to reply, by the id of the connection that owns the temporary queues and topics. A connection has an
        entry once the reply-to of a SEND has named one of its queues or topics."""
        self._ended: dict[str, _Repliers] = {}
        """Rights of JMS clients' connections that have ended, the oldest first. A JMS client that connects again has
        the same id, and the same temporary queues and topics."""

    # ---- SEND ----

    def check(self, user: User, session: ConnectionState, send: Send) -> None:
        """Require the right to reply to each temporary queue or topic of another user that a SEND goes to, or names in
        its reply-to. If such a queue or topic does not exist, the SEND goes to a queue that drops messages instead.

        Raises: ForbiddenError if the user lacks a right
        """
        if send.names_destinations:
            self._check_reply_to(user, send)
        destination = send.destination
        if not destination.parts:
            if destination.session:
                send.destination = self._target(user, session, destination)
        elif any(map(is_private, destination.parts)):
            parts = tuple(self._target(user, session, part) for part in destination.parts)
            send.destination = replace(destination, parts=parts)

    def _check_reply_to(self, user: User, send: Send) -> None:
        for address, session_id in _named_in(reply_to_address(send.message)):
            owner = self._sessions.get(session_id)
            if owner is None:
                continue
            name = self._user_name(owner)
            # Checked even if the queue does not exist now: it may exist at the dispatch, which gives the right.
            if name != user.name and not self._may_reply(user, session_id, address):
                raise _no_right_error(user, f"name {address} in reply-to", address)
            if self._repliers_of(session_id) is None:
                self._repliers[session_id] = _Repliers(name)

    def _target(self, user: User, session: ConnectionState, destination: Destination) -> Destination:
        """Return the destination for a SEND of a user: the given one, or one that drops the message if the given one is
        a temporary queue or topic that does not exist.

        Raises: ForbiddenError if the temporary queue or topic exists and the user has no right to reply to it
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
        address = destination.address
        if not self._may_reply(user, destination.session, address):
            raise _no_right_error(user, f"send to {address}", address)
        return destination

    def _is_there(self, destination: Destination) -> bool:
        if destination.kind is DestinationKind.TOPIC:
            return self._engine.queues.topics.has_subscription(destination.name)
        return self._engine.queues.has_temporary(destination.name)

    def _may_reply(self, user: User, session_id: str, address: str) -> bool:
        repliers = self._repliers_of(session_id)
        return repliers is not None and repliers.may_reply(user.name, address)

    def _repliers_of(self, session_id: str) -> _Repliers | None:
        """Return the rights to reply to a connection's queues and topics, also those of an earlier connection of the
        same id and user."""
        repliers = self._repliers.get(session_id)
        if repliers is None and session_id in self._ended:
            owner = self._sessions.get(session_id)
            if owner is None or self._user_name(owner) != self._ended[session_id].owner:
                return None
            repliers = self._repliers[session_id] = self._ended.pop(session_id)
        return repliers

    # ---- Dispatch ----

    @property
    def has_callers(self) -> bool:
        """True if the reply-to of an earlier SEND has named a temporary queue or topic of an open connection. Otherwise
        no dispatch can give a right to reply."""
        return bool(self._repliers or self._ended)

    def note_dispatched(self, deliveries: Deliveries) -> None:
        """Give the user of each consumer the right to reply to the messages that were dispatched to the consumer."""
        users_by_message: dict[int, set[str]] = {}
        for consumer, entries in deliveries.items():
            for entry in entries:
                message = entry.message
                if message is not None and may_name_temporary(message):
                    # The copies of a message to a topic are one object.
                    users = users_by_message.setdefault(id(message), set())
                    name = self._user_name(consumer.session)
                    if name not in users:
                        users.add(name)
                        self._add_rights(name, reply_to_address(message))

    def _add_rights(self, user: str, reply_to: str) -> None:
        for address, session_id in _named_in(reply_to):
            # A JMS client that has lost its connection may be about to connect again.
            repliers = self._repliers_of(session_id) or self._ended.get(session_id)
            if repliers is None or repliers.owner == user or repliers.may_reply(user, address):
                continue
            by_address = repliers.queues
            if not (
                address.startswith(REMOTE_TEMPORARY_PREFIX)
                and self._engine.queues.has_temporary(address[len(REMOTE_TEMPORARY_PREFIX) - 1 :])
            ):
                by_address = repliers.others
            users = by_address.get(address)
            if users is None:
                size = 0
                if by_address is repliers.others and len(by_address) >= REPLY_DESTINATIONS_MAX:
                    oldest = next(iter(by_address))
                    size -= _size(oldest, by_address.pop(oldest))
                users = by_address[address] = {user}
                self._count(repliers, size + _size(address, users))
            else:
                users.add(user)
                self._count(repliers, _USER_BYTES)

    def _count(self, repliers: _Repliers, size: int) -> None:
        repliers.size += size
        self._memory.queue_bytes += size

    # ---- Ends ----

    def keep_users(self, names: Container[str]) -> None:
        """Forget the rights of all users but these."""
        for repliers in (*self._repliers.values(), *self._ended.values()):
            for users in (*repliers.queues.values(), *repliers.others.values()):
                removed = {name for name in users if name not in names}
                users -= removed
                self._count(repliers, -_USER_BYTES * len(removed))

    def connection_closed(self, session: ConnectionState) -> None:
        """Forget the rights to reply to the temporary queues and topics of a closed connection. Those of a JMS client's
        connection are kept for its next one."""
        if self._sessions.get(session.id, session) is not session:
            # A newer connection of a JMS client has this id.
            return
        repliers = self._repliers.pop(session.id, None)
        if repliers is None:
            return
        if not session.is_jms_client:
            self._count(repliers, -repliers.size)
            return
        self._ended[session.id] = repliers
        if len(self._ended) > ENDED_CONNECTIONS_MAX:
            oldest = self._ended.pop(next(iter(self._ended)))
            self._count(oldest, -oldest.size)


def _size(address: str, users: set[str]) -> int:
    return _ADDRESS_BYTES + getsizeof(address) + _USER_BYTES * len(users)


def _no_right_error(user: User, what: str, address: str) -> ForbiddenError:
    noun = "queue" if address.startswith(REMOTE_TEMPORARY_PREFIX) else "topic"
    return ForbiddenError(
        user,
        f"{what}: the broker has dispatched to this user no message whose reply-to names this temporary "
        f"{noun} of another user",
    )
