"""How all that was said is sent in one transaction of the broker: what part of it is known when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from truenext.client.core.send_options import SendOptions
from truenext.client.tasks.connection import Session
from truenext.errors import ClosedError, Code, ConnectionLost, Refused, RolledBack, TruenextError
from truenext.stage.core.outbox_unit import EncodedMessage
from truenext.stage.core.output import OutputMessage
from truenext.stage.interceptors.chain import InterceptorChain
from truenext.stage.interceptors.interceptor import Execution, MessageToSend

CONTENT_TYPE = "application/json"
FRAME_BYTES = 1024
"""What a message takes of a transaction besides its body, amply."""


def encode_messages(
    outgoing: Sequence[OutputMessage], chain: InterceptorChain, execution: Execution | None
) -> list[EncodedMessage]:
    """Raises: FlowError if one is too large, or cannot be JSON"""
    if not chain.has_sending:
        return [each.encode({}) for each in outgoing]
    messages = []
    for each in outgoing:
        envelope = each.envelope
        send = MessageToSend(
            destination=each.destination.rpartition("/")[2],
            message_id=envelope.id,
            flow_id=envelope.flow.id,
            trace=envelope.flow.trace,
            size=len(envelope.message),
            carrier={},
        )
        chain.sending(execution, send)
        messages.append(each.encode(send.carrier))
    return messages


def transaction_size(messages: Sequence[EncodedMessage]) -> int:
    """Bytes that they take of an open transaction."""
    return sum(len(each.body) for each in messages) + FRAME_BYTES * len(messages)


def remaining_s(deadline: float) -> float:
    """Seconds until then, by the clock of the event loop; more than 0, for it may be just so."""
    return max(deadline - asyncio.get_running_loop().time(), 0.001)


async def send_messages(session: Session, messages: Sequence[EncodedMessage], deadline: float) -> None:
    """Raises: RolledBack, TimeoutError"""
    for each in messages:
        options: SendOptions = {
            "priority": each.priority,
            "persistent": each.persistent,
            "content_type": CONTENT_TYPE,
            "correlation_id": each.id,
        }
        if each.refused:
            options["headers"] = {"refused": each.refused}
        elif each.expires_ms:
            options["headers"] = {"expires": str(each.expires_ms)}
        elif each.ttl_s is not None:
            options["ttl"] = each.ttl_s
        await session.send(each.destination, each.body, timeout=remaining_s(deadline), **options)


class BrokerUnavailable(TruenextError):
    """The broker was not there in time, so nothing has happened: nobody's failure."""


class MapToBrokerUnavailable:
    """`with MapToBrokerUnavailable():` raises BrokerUnavailable where the broker has not been there in time."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, TimeoutError | ConnectionLost | ClosedError):
            raise BrokerUnavailable(f"the broker was not there: {error}") from error


def sender_error(error: RolledBack) -> Refused | None:
    """What the broker has refused of a transaction, if that is whoever's fault has said it: too large, too many, not
    allowed. Want of room on the disk is nobody's."""
    cause = error.__cause__
    return cause if isinstance(cause, Refused) and cause.code not in (Code.NO_SPACE, Code.ROLLED_BACK) else None


def is_disk_full(error: RolledBack) -> bool:
    """The broker's disk is full."""
    cause = error.__cause__
    return isinstance(cause, Refused) and cause.code == Code.NO_SPACE
