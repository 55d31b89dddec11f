"""Consumers and browsers of one JMS client: what they hold, and how many messages the broker requests for them.

    prefetch of a consumer                 messages that it may hold
    + messages reported as delivered       which it still holds
    - messages that it holds
    - messages that are requested for it
    = messages to request, after each read of the socket (C26.3)

An acknowledgement in a transaction only marks its messages as kept (transactions.py). A browser holds what its client
was shown and has neither acknowledged nor reported as delivered.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import takewhile

from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import (
    Ack,
    AckMode,
    AckRun,
    Browse,
    Close,
    Command,
    Credit,
    Nack,
    Pause,
    Subscribe,
)
from truenext.model.limits import CAUSE_BYTES_MAX, WINDOW_MAX
from truenext.model.loose_fields import to_utf8
from truenext.model.selector import Selector, compile_selector
from truenext.wire.openwire import destinations
from truenext.wire.openwire.deliveries import DispatchEncoder
from truenext.wire.openwire.refusals import not_supported
from truenext.wire.openwire.structures import (
    ConsumerControl,
    ConsumerId,
    ConsumerInfo,
    MessageAck,
    MessageId,
    MessagePull,
    PhysicalDestination,
    QueueName,
    Throwable,
)
from truenext.wire.openwire.verdict import Verdict

DELIVERED, POISON, STANDARD, REDELIVERED, INDIVIDUAL, UNMATCHED, EXPIRED = range(7)
"""Types of acknowledgements."""
PULL = "pull"
"""Correlation of a request that a client has made itself. The client gets an empty dispatch when the request ends."""
_CONSUMER_PRIORITY_MIN = -127
_SETTLED_MIN = 256
"""Least number of settled messages that are removed from the order of dispatch at a time."""
_LARGE_RETRY_MS = 60_000
"""Time until a message that is too large for its consumer's client is due again, if it cannot become a dead letter."""


class Consumer:
    """Consumer or browser."""

    __slots__ = (
        "_reported",
        "delivered",
        "destination",
        "encoder",
        "has_received",
        "held",
        "id",
        "is_browser",
        "kept",
        "order",
        "prefetch",
        "requested",
        "subscription",
    )

    def __init__(
        self, info: ConsumerInfo, consumer_id: ConsumerId, destination: PhysicalDestination, encoder: DispatchEncoder
    ) -> None:
        self.id = consumer_id
        self.destination = destination
        self.subscription = subscription_of(consumer_id)
        self.encoder = encoder
        self.is_browser = info.is_browser
        self.prefetch = _prefetch(info.prefetch_size)
        self.requested = 0
        """Number of messages that are requested and have not come."""
        self.held: dict[int, int] = {}
        """Sequences of the messages that the consumer holds, in order of dispatch, with their places in `order`."""
        self.order: list[int] = []
        """Sequences in order of dispatch. Those of settled messages are removed later."""
        self.delivered: dict[int, None] = {}
        """Sequences of the held messages that the client has reported as delivered."""
        self._reported = 0
        """Place in `order` up to which all held messages are reported as delivered."""
        self.kept: dict[int, str] = {}
        """Transaction that has acknowledged a held message, by sequence."""
        self.has_received = False
        """True once a message was dispatched to the consumer."""

    def on_dispatched(self, count: int) -> None:
        """Note that messages are dispatched, which the caller adds to `held` and `order`."""
        self.requested -= count
        self.has_received |= count > 0
        if len(self.order) > _SETTLED_MIN + 4 * len(self.held):
            self._remove_settled()

    def _remove_settled(self) -> None:
        """Remove settled messages from `order`."""
        self._reported = sum(place < self._reported for place in self.held.values())
        self.order[:] = self.held
        self.held.update(zip(self.order, range(len(self.order)), strict=True))

    def remove(self, sequence: int) -> None:
        """Forget a message that is settled, or is just being settled: the broker may dispatch it again before it takes
        the next command."""
        self.remove_all((sequence,))

    def remove_all(self, sequences: Iterable[int]) -> None:
        """Forget messages that are settled."""
        held, delivered, kept = self.held, self.delivered, self.kept
        for sequence in sequences:
            del held[sequence]
            if delivered:
                delivered.pop(sequence, None)
            if kept:
                kept.pop(sequence, None)

    def holds(self, sequences: Iterable[int]) -> bool:
        """Return whether the consumer holds all these messages."""
        return all(map(self.held.__contains__, sequences))

    def mark_delivered(self, last: int) -> None:
        """Mark a message and all dispatched before it as delivered."""
        end = self.held[last] + 1
        for place in range(self._reported, end):
            sequence = self.order[place]
            if self.held.get(sequence) == place:
                self.delivered[sequence] = None
        self._reported = max(self._reported, end)

    def mark_one_delivered(self, sequence: int) -> None:
        self.delivered[sequence] = None

    def covered(self, ack: MessageAck) -> list[int]:
        """Return the held messages that a range covers, in order of dispatch; empty if it matches nothing."""
        held, last = self.held, _sequence(ack.last_message_id)
        first = None if ack.first_message_id is None else _sequence(ack.first_message_id)
        if last not in held or (first is not None and first not in held):
            return []
        if first == last:
            return [last]
        if first is None:
            return [*takewhile(last.__ne__, held), last]
        places = range(held[first], held[last] + 1)
        return [sequence for place in places if held.get(sequence := self.order[place]) == place]

    @property
    def lacking(self) -> int:
        """Number of messages to request."""
        # No client requests messages for a browser.
        prefetch = self.prefetch or int(self.is_browser)
        lacking = prefetch + len(self.delivered) - len(self.held) - self.requested
        if self.is_browser and 2 * lacking < prefetch:
            # Each request may read a page, and a client that has taken all has reported more than half.
            return 0
        return min(lacking, WINDOW_MAX - self.requested) if prefetch else 0


class Consumers:
    """Consumers and browsers of one connection."""

    def __init__(self, identity: str, verdict: Verdict) -> None:
        self._identity = identity
        self._verdict = verdict
        self.by_subscription: dict[str, Consumer] = {}
        self._changed: dict[Consumer, None] = {}
        """Consumers for which messages may have to be requested."""
        self._too_large: list[tuple[Consumer, int, str]] = []
        """Messages to reject, as the client cannot take their frames, with the reason."""

    def find(self, consumer_id: ConsumerId | None) -> Consumer | None:
        """Return the consumer with an id of this connection; None if there is none."""
        if consumer_id is None:
            return None
        consumer = self.by_subscription.get(subscription_of(consumer_id))
        return consumer if consumer is not None and consumer.id == consumer_id else None

    def of_session(self, session_id: int) -> list[Consumer]:
        return [each for each in self.by_subscription.values() if each.id.session_id == session_id]

    def are_in(self, sessions: AbstractSet[int]) -> bool:
        """Return whether one of these sessions has a consumer that is no browser."""
        return any(each.id.session_id in sessions and not each.is_browser for each in self.by_subscription.values())

    def add(self, info: ConsumerInfo) -> Iterator[Command]:
        """Make a consumer or browser. Nothing happens if there is one with this id.

        Raises: RemoteProtocolError if it asks for something that the broker does not offer
        """
        assert info.consumer_id is not None, "the session checks ids"
        if self.find(info.consumer_id) is not None:
            return
        _check_offered(info)
        destination = destinations.source(info.destination)
        selector = _selector(info.selector)
        assert info.destination is not None, "it has a source"
        encoder = DispatchEncoder(info.consumer_id, info.destination, self._identity)
        consumer = Consumer(info, info.consumer_id, info.destination, encoder)
        subscription = consumer.subscription
        # At once, as a browser gets messages before the next command is taken.
        self.by_subscription[subscription] = consumer
        if info.is_browser:
            yield Browse(subscription, destination, selector, is_pulling=True)
        else:
            yield Subscribe(
                subscription,
                destination,
                AckMode.INDIVIDUAL,
                priority=max(info.priority, _CONSUMER_PRIORITY_MIN),
                is_exclusive=info.is_exclusive,
                is_pulling=True,
                selector=selector,
            )
        if self._verdict.is_refused:
            del self.by_subscription[subscription]
        else:
            self._changed[consumer] = None

    def close(self, consumers: list[Consumer], last_delivered: int) -> Iterator[Command]:
        """End consumers and browsers in one step. `last_delivered` is -1 if the client names no message, and -2 if it
        does not know."""
        if not consumers:
            return
        yield Close([each.subscription for each in consumers], last_delivered if last_delivered >= 0 else None)
        for consumer in consumers:
            del self.by_subscription[consumer.subscription]
            self._changed.pop(consumer, None)

    def forget_all(self) -> None:
        """Forget all consumers, as the connection has ended."""
        self.by_subscription.clear()
        self._changed.clear()

    # ---- Requests ----

    def request(self) -> Iterator[Command]:
        """Reject what the client cannot take, and request messages for all consumers that may hold more."""
        while self._too_large or self._changed:
            if self._too_large:
                yield from self._settle_too_large(*self._too_large.pop())
                continue
            consumer, _ = self._changed.popitem()
            lacking = consumer.lacking
            if lacking > 0:
                consumer.requested += lacking
                yield Credit(consumer.subscription, lacking)

    def pull(self, pull: MessagePull) -> Iterator[Command]:
        """Request one message for a consumer of prefetch 0."""
        consumer = self.find(pull.consumer_id)
        if consumer is None or consumer.is_browser or consumer.prefetch:
            return
        yield Credit(consumer.subscription, 1, waits=pull.timeout >= 0, correlation=PULL, wait_ms=max(pull.timeout, 0))
        if not self._verdict.is_refused:
            consumer.requested += 1

    def control(self, control: ConsumerControl) -> Iterator[Command]:
        """Change the prefetch of a consumer."""
        consumer = self.find(control.consumer_id)
        if consumer is None or control.is_close or control.is_flush or control.is_start or control.is_stop:
            return
        prefetch = _prefetch(control.prefetch)
        if prefetch < consumer.prefetch and consumer.requested and not consumer.is_browser:
            # The unused part is subtracted when the broker tells the end of this request.
            yield Credit(consumer.subscription, 0)
        consumer.prefetch = prefetch
        self._changed[consumer] = None

    def on_changed(self, consumer: Consumer) -> None:
        """Note that messages may have to be requested for a consumer, unless it has ended."""
        if self.by_subscription.get(consumer.subscription) is consumer:
            self._changed[consumer] = None

    def reject(self, consumer: Consumer, sequence: int, reason: str) -> None:
        """Note that a message that was just dispatched cannot be sent. Its consumer does not hold it."""
        consumer.remove(sequence)
        self._changed[consumer] = None
        if not consumer.is_browser:
            self._too_large.append((consumer, sequence, reason))

    def _settle_too_large(self, consumer: Consumer, sequence: int, reason: str) -> Iterator[Command]:
        if self.by_subscription.get(consumer.subscription) is not consumer:
            # It has ended, and holds nothing.
            return
        if isinstance(consumer.destination, QueueName):
            # In a dead-letter queue the message stays at its place.
            yield Nack(consumer.subscription, sequence, delay_ms=_LARGE_RETRY_MS, is_rejected=True, cause=reason)
        else:
            # No other consumer gets it.
            yield Ack(consumer.subscription, sequence)

    def settle_shown(self, ack: MessageAck, browser: Consumer) -> None:
        """Forget the messages of a browser that an acknowledgement of any type covers."""
        last = _sequence(ack.last_message_id)
        if last not in browser.held:
            return
        settled = [last] if ack.ack_type == INDIVIDUAL else [*takewhile(last.__ne__, browser.held), last]
        for sequence in settled:
            browser.remove(sequence)
        self._changed[browser] = None

    # ---- Acknowledgements outside transactions ----

    def acknowledge(self, ack: MessageAck, consumer: Consumer) -> Iterator[Command]:
        """Settle messages.

        Raises: RemoteProtocolError if the acknowledgement matches no message of the consumer
        """
        self._changed[consumer] = None
        kind = ack.ack_type
        if kind == INDIVIDUAL:
            sequence = _sequence(ack.last_message_id)
            if sequence in consumer.held:
                consumer.remove(sequence)
                yield Ack(consumer.subscription, sequence)
            else:
                yield Pause()
            return
        covered = self.require_covered(ack, consumer)
        if kind == DELIVERED:
            consumer.mark_delivered(covered[-1])
            yield Pause()
        elif kind == STANDARD:
            if len(covered) != ack.message_count:
                raise _unmatched(ack, f"it covers {len(covered)} messages, and says {ack.message_count}")
            yield from self._acknowledge(consumer, covered)
        elif kind == POISON:
            cause = _cause(ack.poison_cause)
            for sequence in covered:
                consumer.remove(sequence)
                yield Nack(consumer.subscription, sequence, is_rejected=True, cause=cause)
                if self._verdict.is_refused:
                    return
        elif kind == EXPIRED:
            for sequence in covered:
                consumer.remove(sequence)
                # If the message has expired by the broker's clock, too, the queue's policy says what happens to it.
                yield Nack(consumer.subscription, sequence, cause="expired at the client")
                if self._verdict.is_refused:
                    return
        elif kind == REDELIVERED:
            yield Pause()
        else:
            raise not_supported(f"acknowledgements of type {kind}", "they are for networks of brokers")

    def acknowledge_run(self, sequences: list[int], consumer: Consumer) -> AckRun:
        """Return the command that acknowledges messages which a consumer holds, one by one."""
        self._changed[consumer] = None
        subscription = consumer.subscription
        return AckRun(subscription, [Ack(subscription, sequence) for sequence in sequences])

    def _acknowledge(self, consumer: Consumer, covered: list[int]) -> Iterator[Command]:
        if len(covered) == 1:
            consumer.remove(covered[0])
            yield Ack(consumer.subscription, covered[0])
            return
        run = self.acknowledge_run(covered, consumer)
        yield run
        consumer.remove_all(covered[: run.executed])
        for number in range(run.executed, len(run)):
            consumer.remove(covered[number])
            yield run[number]
            if self._verdict.is_refused:
                return

    @staticmethod
    def require_covered(ack: MessageAck, consumer: Consumer) -> list[int]:
        """Return the messages that a range covers.

        Raises: RemoteProtocolError if there is none
        """
        if ack.ack_type == DELIVERED:
            last = _sequence(ack.last_message_id)
            covered = [last] if last in consumer.held else []
        else:
            covered = consumer.covered(ack)
        if not covered:
            raise _unmatched(ack, "the consumer does not hold its messages in this order")
        return covered


def _cause(exception: Throwable | None) -> str:
    """Return what a client says about a message that it rejects, as Java prints an exception, shortened to the size of
    a cause."""
    if exception is None:
        return "rejected by the client"
    name = exception.class_name or "java.lang.Throwable"
    text = name if exception.message is None else f"{name}: {exception.message}"
    return to_utf8(text.replace("\0", "\ufffd"))[:CAUSE_BYTES_MAX].decode(errors="ignore")


def subscription_of(consumer_id: ConsumerId) -> str:
    """Return the name of a consumer's subscription."""
    return f"{consumer_id.session_id}:{consumer_id.value}"


def _check_offered(info: ConsumerInfo) -> None:
    if info.is_network_subscription or info.broker_path or info.additional_predicate is not None:
        raise not_supported("networks of brokers", "connect clients only")
    if info.subscription_name is not None:
        raise not_supported(f"the durable subscription {info.subscription_name[:100]!r}", "consume from a queue")
    if info.is_no_local and info.destination is not None and destinations.is_for_topics(info.destination):
        raise not_supported("noLocal", "leave it out, or skip own messages by a selector")


def _selector(text: str | None) -> Selector | None:
    return compile_selector(text) if text is not None and text.strip() else None


def _prefetch(number: int) -> int:
    return max(0, min(number, WINDOW_MAX))


def _sequence(message_id: MessageId | None) -> int:
    """Return the sequence of a message that the client names; -1 if it names none."""
    return -1 if message_id is None else message_id.broker_sequence_id


def _unmatched(ack: MessageAck, reason: str) -> RemoteProtocolError:
    last = _sequence(ack.last_message_id)
    return RemoteProtocolError(f"acknowledgement up to message {last}: {reason}", Code.NOT_HELD)
