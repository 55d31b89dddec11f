"""Flows (waiting.py) of sends outside transactions. They wait for space in the send buffer, and for confirmations."""

from __future__ import annotations

from typing import cast

from truenext.client.core.client import Client
from truenext.client.core.frames import escape_value
from truenext.client.core.send_buffer import HEAD_BYTES_ESTIMATE, BatchWaiter, PendingSend, SendBatch
from truenext.client.core.send_options import Outgoing, SendOptions, encode_body, encode_send
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import ClosedError, ConnectionLost


def prepare_send(client: Client, destination: str, body: bytes | str, options: SendOptions) -> PendingSend:
    """Check the options of a message, and make the send.

    Raises: ValueError, TypeError for invalid options; ClosedError if the program has closed the connection; the error
    that ended the connection for good
    """
    client.check_open()
    encoded = encode_send(destination, options)
    expires_at = None if encoded.ttl_s is None else client.clock() + encoded.ttl_s
    producer_lines = ""
    if encoded.producer is not None:
        producer_lines = f"truenext-producer:{escape_value(encoded.producer)}\ntruenext-number:{encoded.number}\n"
    encoded_body = encode_body(body)
    size = len(encoded_body) + HEAD_BYTES_ESTIMATE
    return PendingSend(encoded.head, encoded_body, size, expires_at, producer_lines)


def prepare_message(
    client: Client, destination: str, message: bytes | str | Outgoing, options: SendOptions
) -> PendingSend:
    """Make the send of one message of many. An `Outgoing` may override options.

    Raises: the errors of `prepare_send`
    """
    if isinstance(message, Outgoing):
        return prepare_send(client, destination, message.body, cast("SendOptions", {**options, **message.options}))
    return prepare_send(client, destination, message, options)


def try_enqueue(client: Client, batch: SendBatch, send: PendingSend) -> bool:
    """Add a send to the send buffer and to the batch. Return False if the buffer is full.

    Raises: the errors of `enqueue`
    """
    if not client.send_buffer.has_capacity:
        return False
    enqueue(client, send)
    batch.add(send)
    return True


def send(client: Client, send: PendingSend, deadline: float | None) -> Flow[None]:
    """Send a message, and wait until the broker has accepted it; a persistent message is durable then.

    Raises: Refused if the broker refuses the message; TimeoutError without a confirmation in time; ConnectionLost if no
    confirmation can come any more
    """
    yield from _await_capacity(client, deadline)
    send.completed = Signal()
    is_alone = not client.send_buffer.unconfirmed_count
    enqueue(client, send)
    if is_alone:
        # The only sender waits for this message, so there are no others to write together with it.
        client.flush()
    try:
        in_time = yield Wait(send.completed, deadline)
    except BaseException:
        client.send_buffer.abandon(send)
        raise
    if not in_time:
        refused = client.send_buffer.abandon(send)
        if refused is not None:
            raise TimeoutError(f"the broker has not accepted the message: {refused}") from refused
        refused = client.passing_refusal
        if refused is not None:
            raise TimeoutError(f"the message is not confirmed and may have arrived: {refused}") from refused
        raise TimeoutError("the broker has not confirmed the message in time; it may have arrived")
    if send.error is not None:
        raise send.error


def enqueue(client: Client, send: PendingSend) -> None:
    """Add a send to the send buffer.

    Raises: ClosedError if the program has closed the connection; the error that ended the connection for good
    """
    client.check_open()
    client.send_buffer.add(send)
    client.pump_soon()
    if client.send_buffer.is_flush_due:
        client.flush()


def await_capacity(client: Client, batch: SendBatch, deadline: float | None) -> Flow[None]:
    """Wait for space in the send buffer.

    Raises: TimeoutError at the deadline; then unsettled messages of the batch are not repeated
    """
    try:
        yield from _await_capacity(client, deadline)
    except TimeoutError as error:
        raise _abandon_batch(client, batch, str(error)) from client.passing_refusal


def _await_capacity(client: Client, deadline: float | None) -> Flow[None]:
    while not client.send_buffer.has_capacity:
        in_time = yield Wait(client.send_buffer.capacity_signal(), deadline)
        if not in_time:
            count = client.send_buffer.unconfirmed_count
            raise TimeoutError(
                f"{count:,} messages are not confirmed yet, and the broker has confirmed none in time: send fewer at "
                "once, or wait longer"
            )
        client.check_open()


def check_confirmed(batch: SendBatch) -> None:
    """Raise the error of the batch's sends, if no caller has got it yet. Called when the connection has ended.

    Raises: the error of a send; TimeoutError instead if the message was not confirmed before the end
    """
    error, batch.error = batch.error, None
    if isinstance(error, ClosedError | ConnectionLost):
        raise TimeoutError(
            "messages were not confirmed before the connection was closed; they may have arrived"
        ) from error
    if error is not None:
        raise error


def await_confirmed(client: Client, batch: SendBatch, deadline: float | None) -> Flow[None]:
    """Wait until all sends of a batch are confirmed.

    Raises: the first error of a send; TimeoutError at the deadline
    """
    client.flush()
    if batch.unsettled_count:
        awaited = BatchWaiter()
        batch.waiters.append(awaited)
        try:
            in_time = yield Wait(awaited.completed, deadline)
        finally:
            if not awaited.completed.is_set:
                batch.waiters.remove(awaited)
        if not in_time:
            default_text = (
                f"the broker has not confirmed {batch.unsettled_count} messages in time; they may have arrived"
            )
            raise _abandon_batch(client, batch, default_text) from client.passing_refusal
        error = awaited.error
    else:
        error, batch.error = batch.error, None
    if error is not None:
        raise error


def _abandon_batch(client: Client, batch: SendBatch, default_text: str) -> TimeoutError:
    """Give up the unsettled sends of a batch, and make their error. The error's text is `default_text`, unless the
    broker has no space or is being drained."""
    count, confirmed = batch.unsettled_count, batch.confirmed_count
    is_none_accepted = client.send_buffer.abandon_batch(batch) is not None
    refused = client.passing_refusal
    if refused is None:
        return TimeoutError(default_text)
    summary = "1 message was" if count == 1 else f"{count:,} messages were"
    summary += " not accepted" if is_none_accepted else " not confirmed and may have arrived"
    after_confirmed = f", after {confirmed:,} that {'is' if confirmed == 1 else 'are'} confirmed" if confirmed else ""
    return TimeoutError(f"{summary}{after_confirmed}: {refused}")
