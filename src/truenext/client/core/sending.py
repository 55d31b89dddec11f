"""What a program waits for when it sends outside transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from truenext.client.core.frames import value
from truenext.client.core.send_buffer import BatchWaiter, PendingSend, SendBatch
from truenext.client.core.sends import Outgoing, SendOptions, body_of, spoken
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import ClosedError, ConnectionLost

if TYPE_CHECKING:
    from truenext.client.core.client import Client


def prepare(client: Client, destination: str, body: bytes | str, options: SendOptions) -> PendingSend:
    """Raises: ValueError, TypeError if it cannot be said so; ClosedError, or what ended the connection"""
    client.check_open()
    said = spoken(destination, options)
    expires_at = None if said.ttl_s is None else client.clock() + said.ttl_s
    own = ""
    if said.producer is not None:
        own = f"truenext-producer:{value(said.producer)}\ntruenext-number:{said.number}\n"
    return PendingSend(said.head, body_of(body), expires_at, own)


def prepare_one(client: Client, destination: str, message: bytes | str | Outgoing, options: SendOptions) -> PendingSend:
    """One of many, which may say itself how it differs from the others. Raises: as `prepare`"""
    if isinstance(message, Outgoing):
        return prepare(client, destination, message.body, cast("SendOptions", {**options, **message.options}))
    return prepare(client, destination, message, options)


def enqueue_if_room(client: Client, batch: SendBatch, made: PendingSend) -> bool:
    """False if too many wait for their confirmation. Raises: as `enqueue`"""
    if not client.send_buffer.has_room:
        return False
    enqueue(client, made)
    batch.add(made)
    return True


def send(client: Client, send: PendingSend, deadline: float | None) -> Flow[None]:
    """Returns once the broker has the message as safe as it will be: durable, if it is persistent.

    Raises: Refused, TimeoutError if that is not known in time, ConnectionLost if it never will be
    """
    yield from _await_room(client, deadline)
    send.completed = Signal()
    is_alone = not client.send_buffer.open
    enqueue(client, send)
    if is_alone:
        # It waits for no others that may be sent in this pass of the loop: who waits for it is the only one that sends.
        client.flush()
    try:
        came = yield Wait(send.completed, deadline)
    except BaseException:
        client.send_buffer.abandon(send)
        raise
    if not came:
        refused = client.send_buffer.abandon(send)
        if refused is not None:
            raise TimeoutError(f"the message was not taken: {refused}") from refused
        if client.send_buffer.no_room is not None:
            refused = client.send_buffer.no_room
            raise TimeoutError(f"the message is not confirmed and may have arrived: {refused}") from refused
        raise TimeoutError("the broker has not confirmed the message in time; it may have arrived")
    if send.error is not None:
        raise send.error


def enqueue(client: Client, send: PendingSend) -> None:
    """Raises: ClosedError, or what has ended the connection meanwhile: another thread may have"""
    client.check_open()
    client.send_buffer.add(send)
    client.pump_soon()
    if client.send_buffer.is_much:
        client.flush()


def await_room(client: Client, batch: SendBatch, deadline: float | None) -> Flow[None]:
    """Until one more of a batch may be under way. Raises: TimeoutError; then none of the batch is repeated"""
    try:
        yield from _await_room(client, deadline)
    except TimeoutError as error:
        raise _given_up(client, batch, str(error)) from client.send_buffer.no_room


def _await_room(client: Client, deadline: float | None) -> Flow[None]:
    """Until one more may be under way."""
    while not client.send_buffer.has_room:
        came = yield Wait(client.send_buffer.room(), deadline)
        if not came:
            raise TimeoutError("too many messages wait for their confirmation, and none was confirmed in time")
        client.check_open()


def check_confirmed(batch: SendBatch) -> None:
    """At the end of a connection: was something lost of which nobody was told?

    Raises: the first error; TimeoutError for what was not confirmed
    """
    error, batch.error = batch.error, None
    if isinstance(error, ClosedError | ConnectionLost):
        raise TimeoutError(
            "messages were not confirmed before the connection was closed; they may have arrived"
        ) from error
    if error is not None:
        raise error


def await_confirmed(client: Client, batch: SendBatch, deadline: float | None) -> Flow[None]:
    """Until all of a batch are confirmed. Raises: the first error; TimeoutError"""
    if batch.open:
        awaited = BatchWaiter()
        batch.waiting.append(awaited)
        try:
            came = yield Wait(awaited.completed, deadline)
        finally:
            if not awaited.completed.is_set:
                batch.waiting.remove(awaited)
        if not came:
            otherwise = f"the broker has not confirmed {batch.open} messages in time; they may have arrived"
            raise _given_up(client, batch, otherwise) from client.send_buffer.no_room
        error = awaited.error
    else:
        error, batch.error = batch.error, None
    if error is not None:
        raise error


def _given_up(client: Client, batch: SendBatch, otherwise: str) -> TimeoutError:
    """Give up those of a batch that are not confirmed; the error says why, and what `otherwise` says if the broker has
    not said that it has no room."""
    count, confirmed = batch.open, batch.confirmed
    was_none_taken = client.send_buffer.abandon_all(batch) is not None
    if client.send_buffer.no_room is None:
        return TimeoutError(otherwise)
    what = "1 message was" if count == 1 else f"{count:,} messages were"
    what += " not taken" if was_none_taken else " not confirmed and may have arrived"
    behind = f", behind {confirmed:,} that {'is' if confirmed == 1 else 'are'} confirmed" if confirmed else ""
    return TimeoutError(f"{what}{behind}: {client.send_buffer.no_room}")
