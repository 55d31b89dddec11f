"""Transaction of the broker that sends the messages of a stage or an initiation, and the classification of its
errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from truenext.client.core.send_options import SendOptions, encode_send, is_plain_value
from truenext.client.tasks.connection import Session
from truenext.client.tasks.encoded_sends import send_encoded
from truenext.errors import ClosedError, Code, ConnectionLost, Refused, RolledBack, TruenextError
from truenext.flows.envelope import CONTENT_TYPE
from truenext.model.limits import TRANSACTION_QUEUE_COUNT, TRANSACTION_QUEUES_UNCOUNTED
from truenext.stage.core.outbox_unit import Delay, EncodedMessage
from truenext.stage.core.output import OutputMessage
from truenext.stage.interceptors.chain import InterceptorChain
from truenext.stage.interceptors.interceptor import Execution, MessageToSend

FRAME_BYTES = 1024
"""Estimated bytes of a message in a transaction besides its body; the true number is usually lower."""


def encode_messages(
    outgoing: Sequence[OutputMessage], chain: InterceptorChain, execution: Execution | None
) -> list[EncodedMessage]:
    """Encode messages for the broker. Interceptors may add values, such as a trace id, to each message.

    Raises: FlowError if a message is too large, or cannot be encoded as JSON
    """
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
    return sum(len(each.body) for each in messages) + FRAME_BYTES * len(messages)


def transaction_count(messages: Sequence[EncodedMessage]) -> int:
    """Return how many messages the broker counts in a transaction. A message with an expiry or a delay counts as two
    messages. Each queue after the first 100 queues adds ten messages."""
    costly = sum(bool(each.expires_ms or each.delay or each.ttl_s is not None) for each in messages)
    queues = len({each.destination for each in messages}) - TRANSACTION_QUEUES_UNCOUNTED
    return len(messages) + costly + TRANSACTION_QUEUE_COUNT * max(0, queues)


def remaining_s(deadline: float) -> float:
    """Return the seconds until `deadline`, by the clock of the event loop, and at least 0.001."""
    return max(deadline - asyncio.get_running_loop().time(), 0.001)


async def send_messages(session: Session, messages: Sequence[EncodedMessage], deadline: float) -> None:
    """Send messages in the open transaction of `session`, before `deadline` by the clock of the event loop.

    Raises: RolledBack if the broker has refused the transaction; TimeoutError after `deadline`
    """
    await send_encoded(session, encode_heads(messages), deadline)


def encode_heads(messages: Sequence[EncodedMessage]) -> Iterator[tuple[bytes, bytes, float | None]]:
    """Yield for each message the head of its frame, its body, and its time to live in seconds."""
    # Most messages of a unit differ only in id and body: the rest of their heads is encoded once.
    shared: dict[tuple[str, int, bool], bytes] = {}
    for each in messages:
        if not each.is_plain or not is_plain_value(each.id):
            encoded = encode_send(each.destination, _options_of(each))
            yield encoded.head, each.body, encoded.ttl_s
            continue
        key = (each.destination, each.priority, each.persistent)
        head = shared.get(key)
        if head is None:
            head = shared[key] = encode_send(each.destination, _common_options(each)).head
        yield b"%bcorrelation-id:%b\n" % (head, each.id.encode()), each.body, None


def _common_options(message: EncodedMessage) -> SendOptions:
    return {"priority": message.priority, "persistent": message.persistent, "content_type": CONTENT_TYPE}


def _options_of(message: EncodedMessage) -> SendOptions:
    options: SendOptions = {**_common_options(message), "correlation_id": message.id}
    if message.refused:
        options["headers"] = {"refused": message.refused}
    elif message.expires_ms:
        options["headers"] = {"expires": str(message.expires_ms)}
    elif message.ttl_s is not None:
        options["ttl"] = message.ttl_s
    if message.report_to:
        options["report_to"], options["report_id"] = message.report_to, message.report_id
    if message.on_failure:
        options["on_failure"] = message.on_failure
    if message.delay is not None:
        _add_delay(options, message.delay)
    return options


def _add_delay(options: SendOptions, delay: Delay) -> None:
    if delay.at_ms:
        options["headers"] = {**options.get("headers", {}), "AMQ_SCHEDULED_TIME": str(delay.at_ms)}
    else:
        options["delay"] = delay.ms / 1000


class BrokerUnavailable(TruenextError):
    """The broker was not available in time. No message was sent, and the stage's message counts no attempt."""


class OutputRefused(TruenextError):
    """The broker has refused the output of a stage at a flush, before the COMMIT. The stage's message can still be
    nacked or rejected."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(str(refused))
        self.refused = refused


class MapToBrokerUnavailable:
    """Context manager that raises BrokerUnavailable in place of a timeout, ConnectionLost or ClosedError."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError | ConnectionLost | ClosedError):
            raise BrokerUnavailable(f"the broker was not available: {error}") from error


def sender_error(error: RolledBack) -> Refused | None:
    """Return the broker's refusal of a transaction if the sender caused it: the transaction is too large, has too many
    messages, or is not allowed. Return None for other reasons, such as a full disk."""
    cause = error.__cause__
    return cause if isinstance(cause, Refused) and cause.code not in (Code.NO_SPACE, Code.ROLLED_BACK) else None


def is_disk_full(error: RolledBack) -> bool:
    cause = error.__cause__
    return isinstance(cause, Refused) and cause.code == Code.NO_SPACE
