"""Access: what a user needs for each command and control verb. Source: docs/security.md, "What a request needs"

A check only requires rights. The one exception: a check makes a producer name a name of the user. A check runs right
before the action of its command, and before any queue is looked up, so that a refusal does not reveal which queues
exist. A command or verb without a check is refused. `UserSessions.guard` puts the checks before the actions. Its
shortcut `send_as_user` leaves the check of a SEND out if the connection's last SEND went to the same destination, and
no header names another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from truenext.broker import (
    backup_request,
    connection_list,
    connection_request,
    drain,
    failover_request,
    history_request,
    producer_request,
    queue_details,
    security_log,
)
from truenext.broker.control import QUEUE_CHANGES, decode_queue_name
from truenext.engine.background import bulk
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.producer import user_producer
from truenext.engine.state.queue import Queue
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import (
    Abort,
    Ack,
    AckRun,
    Begin,
    Browse,
    Close,
    Commit,
    ControlRequest,
    CreateTemporary,
    Credit,
    Disconnect,
    ForgetProducers,
    InvalidFrame,
    Nack,
    OpenProducer,
    Pause,
    ReceiptRequest,
    Release,
    RemoveTemporary,
    Send,
    Started,
    Subscribe,
    Unsubscribe,
    Wake,
    decode_client_json,
)
from truenext.model.destination import (
    SUBSCRIPTION_PREFIX,
    Destination,
    DestinationKind,
    parse_stored_address,
)
from truenext.model.failure_headers import ON_FAILURE, REPORT_TO
from truenext.model.grants import Pattern, Right, User, subscription_topic

SENDABLE_QUEUES_MAX = 10_000
"""Maximum number of queues for which the broker remembers that a user may send there."""

_TOPIC_KINDS = (DestinationKind.TOPIC, DestinationKind.TOPIC_PATTERN)


class ForbiddenError(RemoteProtocolError):
    """A user lacks a right that its command needs."""

    def __init__(self, user: User, what: str) -> None:
        super().__init__(f"user {user.name!r} may not {what}", Code.FORBIDDEN)


# ---- Destinations ----


def _named(destination: Destination) -> Pattern:
    """Return the pattern of names that a grant must cover for a queue, a topic, or a pattern of queues or topics."""
    return Pattern(destination.kind in _TOPIC_KINDS, tuple(destination.name.split(".")))


def _named_by_queue(name: str) -> Pattern:
    """Return the pattern of names that a grant must cover for a queue. For the queue of a durable subscription that is
    the subscription's topic."""
    if name.startswith(SUBSCRIPTION_PREFIX):
        return subscription_topic(name)
    return Pattern(False, tuple(name.split(".")))


def _require(user: User, right: Right, named: Pattern) -> None:
    if not user.may(right, named):
        raise ForbiddenError(user, f"{right.value} {_SENTENCES[right]}{named}")


_SENTENCES = {Right.SEND: "to ", Right.TAKE: "from ", Right.BROWSE: "", Right.MANAGE: ""}
"""Words of an error text between a right and the destination."""


def is_private(destination: Destination) -> bool:
    """Return whether a destination is a temporary queue or topic of a connection."""
    return destination.kind is DestinationKind.TEMPORARY or (
        destination.kind is DestinationKind.TOPIC and bool(destination.session)
    )


def _require_send(user: User, destination: Destination) -> None:
    if destination.kind is DestinationKind.COMPOSITE:
        for part in destination.parts:
            _require_send(user, part)
    elif not is_private(destination):
        _require(user, Right.SEND, _named(destination))


def _require_reading(user: User, session: ConnectionState, right: Right, destination: Destination) -> None:
    """Require the right to take or browse messages of a destination. Only the connection that owns a temporary queue or
    topic may read its messages.

    Raises: ForbiddenError if the user lacks the right
    """
    if not is_private(destination):
        _require(user, right, _named(destination))
    elif destination.session != session.id:
        raise ForbiddenError(
            user, f"{right.value} {_SENTENCES[right]}{destination.address}: it belongs to another connection"
        )


def _require_client_id(user: User, durable_key: str) -> None:
    client_id = durable_key.partition(",")[0]
    if not user.owns_client_id(client_id):
        raise ForbiddenError(user, f"use the client-id {client_id!r}: it is not in the user's client_ids")


def _require_name(user: User, act: str, name: str) -> None:
    """Require that clients can name a queue, to `act` on it.

    Raises: ForbiddenError if they cannot
    """
    if not name.startswith(SUBSCRIPTION_PREFIX) and (name.startswith("/") or "," in name):
        # A queue that no client can name otherwise: of a connection, of scheduled sends, of an ended subscription.
        raise ForbiddenError(user, f"{act} {name[:100]!r}: clients cannot name this queue")


def _require_on_queue(user: User, right: Right, name: str) -> None:
    """Require a right on a queue by its name in the store, also on the queue of a durable subscription.

    Raises: ForbiddenError if the user lacks the right, or clients cannot name such a queue
    """
    _require_name(user, right.value, name)
    _require(user, right, _named_by_queue(name))


def _require_producers(user: User) -> None:
    """Require that a user may use producer names. The right is limited because the broker remembers only a limited
    number of producers.

    Raises: ForbiddenError if the user may neither send nor take
    """
    if not (user.grants[Right.SEND] or user.grants[Right.TAKE]):
        raise ForbiddenError(user, "use producer names: this needs a grant to send or to take")


def _own_producer(user: User, name: str) -> str:
    """Return the key of a user's producer: each user has names of its own.

    Raises: ForbiddenError if the user may use no producer names
    """
    _require_producers(user)
    return user_producer(user.name, name)


# ---- Commands ----

Check = Callable[[User, ConnectionState, Any], None]


def check_nothing(user: User, session: ConnectionState, command: object) -> None:
    """Allow a command that needs no right, because it reaches only messages of its own connection."""


def require_send_rights(user: User, send: Send) -> None:
    """Require all rights that a SEND needs.

    Raises: ForbiddenError for the first right that the user lacks
    """
    destination = send.destination
    is_queue = destination.kind is DestinationKind.QUEUE
    if not (is_queue and destination.name in user.sendable_queues):
        _require_send(user, destination)
        if is_queue and len(user.sendable_queues) < SENDABLE_QUEUES_MAX:
            user.sendable_queues.add(destination.name)
    for named in send.failure_destinations:
        if not user.may(Right.SEND, _named(named)):
            raise ForbiddenError(user, f"send to {_named(named)}, which {REPORT_TO} or {ON_FAILURE} names")
    if send.producer is not None:
        _require_producers(user)


def _check_send(user: User, session: ConnectionState, send: Send) -> None:
    require_send_rights(user, send)
    if send.producer is not None:
        send.producer = user_producer(user.name, send.producer)


def _check_open_producer(user: User, session: ConnectionState, producer: OpenProducer) -> None:
    _require_send(user, producer.destination)


def _check_commit(user: User, session: ConnectionState, commit: Commit) -> None:
    if commit.producer is not None:
        commit.producer = _own_producer(user, commit.producer)


def _check_disconnect(user: User, session: ConnectionState, disconnect: Disconnect) -> None:
    disconnect.forgotten_producers = [user_producer(user.name, name) for name in disconnect.forgotten_producers]


def _check_forget_producers(user: User, session: ConnectionState, command: ForgetProducers) -> None:
    command.names = [user_producer(user.name, name) for name in command.names]


def _check_temporary(user: User, session: ConnectionState, command: CreateTemporary | RemoveTemporary) -> None:
    destination = command.destination
    if destination.session != session.id:
        raise ForbiddenError(user, f"create or remove {destination.address}: it is not of this connection")


def _check_subscribe(user: User, session: ConnectionState, subscribe: Subscribe) -> None:
    _require_reading(user, session, Right.TAKE, subscribe.destination)
    if subscribe.durable_key:
        _require_client_id(user, subscribe.durable_key)


def _check_unsubscribe(user: User, session: ConnectionState, unsubscribe: Unsubscribe) -> None:
    if unsubscribe.durable_key:
        _require_client_id(user, unsubscribe.durable_key)


def _check_browse(user: User, session: ConnectionState, browse: Browse) -> None:
    if browse.destination.kind is DestinationKind.DURABLE:
        _require_client_id(user, browse.destination.name)
    else:
        _require_reading(user, session, Right.BROWSE, browse.destination)


def check_browsed_subscription(user: User, queue: Queue) -> None:
    """Require the right to browse the topic of a durable subscription. The topic is known only once the subscription
    was found, so `_check_browse`, which runs earlier, checks only the client id.

    Raises: ForbiddenError if the user lacks the right
    """
    _require(user, Right.BROWSE, subscription_topic(queue.name))


def _check_control_request(user: User, session: ConnectionState, request: ControlRequest) -> None:
    _require_send(user, request.reply_to)
    check_verb(request.verb)
    VERB_CHECKS[request.verb](user, request)


COMMAND_CHECKS: dict[type[Any], Check] = {
    **dict.fromkeys((InvalidFrame, Ack, AckRun, Nack, ReceiptRequest, Pause), check_nothing),
    **dict.fromkeys((Started, Credit, Wake, Begin, Abort, Release, Close), check_nothing),
    Send: _check_send,
    OpenProducer: _check_open_producer,
    Subscribe: _check_subscribe,
    Browse: _check_browse,
    Unsubscribe: _check_unsubscribe,
    Commit: _check_commit,
    Disconnect: _check_disconnect,
    ForgetProducers: _check_forget_producers,
    **dict.fromkeys((CreateTemporary, RemoveTemporary), _check_temporary),
    ControlRequest: _check_control_request,
}
"""Check of each command. A Login has no check: before the login the connection has no user."""


# ---- Control verbs ----

VerbCheck = Callable[[User, ControlRequest], None]


def _allow_verb(user: User, request: ControlRequest) -> None:
    """Allow a verb whose answer shows only the connection's own state, or queues that the user may see."""


def _check_producer_request(user: User, request: ControlRequest) -> None:
    _require_producers(user)


def _check_details(user: User, request: ControlRequest) -> None:
    """Require any right on the queue, or the right monitor. The answer shows other users only with the latter."""
    name = decode_queue_name(request.verb, request.body)
    _require_name(user, "inspect", name)
    if not _may_see_name(user, name):
        raise ForbiddenError(user, f"inspect {_named_by_queue(name)}: this needs a right on it, or the right monitor")


def _require_monitor(user: User, request: ControlRequest) -> None:
    if not user.is_monitor:
        raise ForbiddenError(user, f"request {request.verb!r}: this needs the right monitor")


def _require_admin(user: User, request: ControlRequest) -> None:
    if not user.is_admin:
        raise ForbiddenError(user, f"request {request.verb!r}: this needs the right admin")


def _check_queue_change(user: User, request: ControlRequest) -> None:
    _require_on_queue(user, Right.MANAGE, decode_queue_name(request.verb, request.body))


def _check_bulk(user: User, request: ControlRequest) -> None:
    bulk_request = decode_client_json(request.verb, request.body, bulk.VERBS[request.verb])
    rights = [Right.BROWSE] if request.verb in ("scheduled", "dead-letters") else [Right.MANAGE]
    is_chosen = bulk_request.selector is not None or bulk.group_of(bulk_request) is not None
    if is_chosen and Right.BROWSE not in rights:
        # The number of matching messages tells what they contain.
        rights.append(Right.BROWSE)
    for right in rights:
        if isinstance(bulk_request, bulk.ScheduledRequest) and not bulk_request.queue:
            _require_on_scheduled(user, right, bulk_request.to)
        else:
            _require_on_queue(user, right, bulk_request.queue)
    if isinstance(bulk_request, bulk.Move):
        _require_on_queue(user, Right.SEND, bulk_request.to)


def _require_on_scheduled(user: User, right: Right, to: str | None) -> None:
    """Require a right on scheduled sends that do not go to a single queue: on each destination in the address `to`.
    `to` None stands for all such sends, and requires the right admin.

    Raises: ForbiddenError if the user lacks a right
    """
    if to is None:
        if not user.is_admin:
            raise ForbiddenError(user, f"{right.value} all scheduled sends: this needs the right admin")
        return
    destination = parse_stored_address(to)
    for part in destination.parts or (destination,):
        _require(user, right, _named(part))


VERB_CHECKS: dict[str, VerbCheck] = {
    "queues": _allow_verb,
    "status": _require_monitor,
    history_request.VERB: _require_monitor,
    "reload": _require_admin,
    failover_request.VERB: _require_admin,
    backup_request.VERB: _require_admin,
    drain.VERB: _require_admin,
    "pause": _check_queue_change,
    "resume": _check_queue_change,
    **dict.fromkeys(bulk.VERBS, _check_bulk),
    **dict.fromkeys((queue_details.CONSUMERS_VERB, queue_details.POLICY_VERB), _check_details),
    connection_list.LIST_VERB: _require_monitor,
    connection_list.CLOSE_VERB: _require_admin,
    security_log.VERB: _require_admin,
    producer_request.VERB: _check_producer_request,
    connection_request.VERB: _allow_verb,
}


def check_verb(verb: str) -> None:
    """Check that there is a control verb.

    Raises: RemoteProtocolError with the known verbs, if there is none
    """
    if verb not in VERB_CHECKS:
        known = ", ".join(sorted(VERB_CHECKS))
        raise RemoteProtocolError(f"there is no control verb {verb!r}; known: {known}", Code.CONTROL_REQUEST)


def may_see(user: User, queue: Queue) -> bool:
    """Return whether the answer to `queues` shows a queue to a user. Any right on the queue is enough, and so is the
    right monitor."""
    return _may_see_name(user, queue.name)


def _may_see_name(user: User, name: str) -> bool:
    if user.is_monitor:
        return True
    named = _named_by_queue(name)
    return any(user.may(right, named) for right in Right)


_READING = {
    "queues",
    "status",
    history_request.VERB,
    "dead-letters",
    "scheduled",
    queue_details.CONSUMERS_VERB,
    queue_details.POLICY_VERB,
    connection_list.LIST_VERB,
    security_log.VERB,
}
"""Verbs that change nothing."""


def only_reads(request: ControlRequest) -> bool:
    """Return whether a control request that was executed has changed nothing."""
    return request.verb in _READING


def is_poll(request: ControlRequest) -> bool:
    """Return whether a control request that was executed only asks how far a backup or drain is: commands do so several
    times a second."""
    if request.verb == backup_request.VERB:
        return backup_request.is_poll(request.body)
    return request.verb == drain.VERB and not request.body


def target_of(request: ControlRequest) -> dict[str, str]:
    """Return what the body of a control request that was executed names: the queue, or the connection; the queue "" if
    it names none."""
    if request.verb in bulk.VERBS:
        return {"queue": decode_client_json(request.verb, request.body, bulk.VERBS[request.verb]).queue}
    if request.verb in (*QUEUE_CHANGES, queue_details.CONSUMERS_VERB, queue_details.POLICY_VERB):
        return {"queue": decode_queue_name(request.verb, request.body)}
    if request.verb == connection_list.CLOSE_VERB:
        body = decode_client_json(request.verb, request.body, connection_list.CloseRequest)
        return {"connection": body.connection}
    return {"queue": ""}
