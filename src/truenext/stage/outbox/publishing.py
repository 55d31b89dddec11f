"""Publishing: sends one unit of the outbox under its number. Any process may send any unit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from truenext.errors import Code, RolledBack
from truenext.stage.broker_transaction import (
    MapToBrokerUnavailable,
    is_disk_full,
    remaining_s,
    send_messages,
    sender_error,
    transaction_size,
)
from truenext.stage.core.failure import describe_error
from truenext.stage.core.outbox_unit import EncodedMessage, decode_unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from truenext.client.tasks.connection import Session
    from truenext.stage.outbox.counters import ExactlyOnceCounters
    from truenext.stage.pool import PriorityPool
    from truenext.stage.sql.outbox_table import StoredUnit

TIMEOUT_S = 30.0
"""Seconds in which one unit must be sent."""


async def send_unit(pool: PriorityPool, unit: StoredUnit, service: str, counters: ExactlyOnceCounters) -> bool:
    """Send all messages of one unit of the outbox, in one COMMIT under the unit's number. Return True if the unit was
    sent now or before. Return False if the broker does not know the preceding number: then it is another broker, or has
    lost data. If the broker refuses a message, for example because it is too large, that message goes to the queue
    `SERVICE.refused` with the reason. This happens in the same COMMIT, so that the number is used and the next number
    can follow.

    Raises: BrokerUnavailable or RolledBack if nothing was sent; InDoubt if the client cannot know whether the unit was
    sent; UnreadableUnit
    """
    messages = decode_unit(unit.unit, unit.age_ms)
    # Wait for permits first: if the connection's limit refused the unit, the unit would be taken for too large.
    async with (
        pool.transaction_permits.acquired(1),
        pool.transaction_byte_permits.acquired(transaction_size(messages)),
        pool.connection.session(transacted=True) as session,
    ):
        try:
            return await _send(session, messages, unit)
        except RolledBack as error:
            refused = sender_error(error)
            if refused is None or (refused.code == Code.LIMIT and len(messages) > 1):
                # The broker may take each message by itself.
                raise
        await session.rollback(failed=False)
        # Only a trial of each message shows which of them are refused.
        replacements = [await _accepted_or_replaced(session, each, service) for each in messages]
        is_sent = await _send(session, replacements, unit)
        counters.refused += sum(
            each.refused != before.refused for each, before in zip(replacements, messages, strict=True)
        )
        return is_sent


async def _send(session: Session, messages: Sequence[EncodedMessage], unit: StoredUnit) -> bool:
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    try:
        await _send_and_flush(session, messages, deadline)
        await session.commit(timeout=remaining_s(deadline), producer=unit.producer, number=unit.number)
    except RolledBack as error:
        refused = sender_error(error)
        if refused is not None and refused.code == Code.GAP:
            return False
        raise
    return True


async def _send_and_flush(session: Session, messages: Sequence[EncodedMessage], deadline: float) -> None:
    """Send messages, and wait until the broker has accepted all of them into the transaction.

    Raises: RolledBack if the broker refuses a message; BrokerUnavailable
    """
    with MapToBrokerUnavailable():
        await send_messages(session, messages, deadline)
        await session.flush(timeout=remaining_s(deadline))


async def _accepted_or_replaced(session: Session, message: EncodedMessage, service: str) -> EncodedMessage:
    """Return the message if the broker accepts it, otherwise a message to the queue `SERVICE.refused`. The trial is
    rolled back."""
    try:
        await _send_and_flush(session, [message], asyncio.get_running_loop().time() + TIMEOUT_S)
    except RolledBack as error:
        refused = sender_error(error)
        if refused is None or is_disk_full(error):
            raise
        return msgspec.structs.replace(
            message,
            destination=f"/queue/{service}.refused",
            expires_ms=0,
            ttl_s=None,
            delay=None,
            report_to="",
            report_id="",
            on_failure=(),
            refused=f"{message.destination}: {describe_error(refused)}",
        )
    finally:
        await session.rollback(failed=False)
    return message
