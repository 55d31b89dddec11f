"""Subscriptions of a client: their frames on the current connection, and the messages that arrive.

A message of a lost connection that the program still holds is *orphaned*. The broker redelivers such a message, to this
client or to another. If it arrives while the program still holds the earlier dispatch, it is not delivered again: the
program's settlement applies to the new dispatch. If a disposition may not have reached the broker, the client keeps it
until the message is redelivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import TypedDict

import msgspec

from truenext.client.core import frames
from truenext.client.core.buffer import (
    ReceiveBuffer,
    ReceivedMessage,
    ReceivedMessageState,
    Subscription,
    SubscriptionOptions,
)
from truenext.client.core.context import ClientContext
from truenext.client.core.disposition import Disposition
from truenext.client.core.link import UNANSWERED_FRAMES_MAX, AnswerHandler, Link
from truenext.client.core.transaction_state import TransactionState
from truenext.errors import ClosedError, ConnectionLost, Refused
from truenext.model.limits import CONSUMER_PRIORITY_MAX, WINDOW_MAX
from truenext.model.pattern import is_pattern
from truenext.wire.stomp.frame import Frame

UNCONFIRMED_DISPOSITIONS_MAX = 100_000
"""Maximum number of dispositions kept because they may not have reached the broker."""


class Subscriptions:
    def __init__(self, context: ClientContext, make_message: type[ReceivedMessage]) -> None:
        """Make an empty set of subscriptions. `make_message` is the class of received messages."""
        self.by_id: dict[str, Subscription] = {}
        self.orphaned_messages: dict[str, ReceivedMessage] = {}
        """Messages of lost connections that the program still holds, by message id."""
        self.unconfirmed_dispositions: dict[str, tuple[Disposition, int]] = {}
        """Dispositions that may not have reached the broker, by message id, each with the number of attempts of the
        message at that time."""
        self._context = context
        self._make_message = make_message
        self._arrivals = count(1)
        self._settled_count = 0
        """Number of ACKs and NACKs sent."""
        self._last_ack = b""
        """ACK that was made last. While it is the end of the unwritten bytes, it can report the next message as
        started."""

    # ---- Requests ----

    def add(self, options: SubscriptionOptions, buffer: ReceiveBuffer) -> Subscription:
        """Add a subscription. SUBSCRIBE is sent on the current connection and on each later one."""
        subscription = Subscription(self._context.next_unique_name(), options, buffer)
        self.by_id[subscription.id] = subscription
        buffer.subscriptions.append(subscription)
        link = self._context.link
        if link is not None and link.is_up:
            self.send_subscribe(subscription)
            self._context.flush_soon()
        return subscription

    def send_subscribe(self, subscription: Subscription) -> None:
        link = self._context.link
        assert link is not None, "it is up"
        options = subscription.options
        headers = {"id": subscription.id, "destination": options.destination, "ack": "client-individual"}
        is_truenext = link.is_truenext
        if options.prefetch == 0:
            if is_truenext:
                headers["truenext-pull"] = "true"
            else:
                # The smallest prefetch that other brokers know.
                headers["activemq.prefetchSize"] = "1"
        elif options.prefetch is not None:
            headers["activemq.prefetchSize"] = str(options.prefetch)
        if is_truenext and options.prefetch != 0 and _allows_express(options.destination):
            headers["truenext-express"] = "true"
        if options.selector is not None:
            headers["selector"] = options.selector
        if options.priority:
            headers["activemq.priority"] = str(options.priority)
        if options.exclusive:
            headers["activemq.exclusive"] = "true"
        if options.durable is not None:
            headers["activemq.subscriptionName"] = options.durable
        headers |= options.headers
        headers["receipt"] = link.next_receipt_id
        link.write_tracked(frames.encode_frame("SUBSCRIBE", headers), _PendingSubscribe(self, subscription))
        subscription.is_subscribe_sent = True
        # A caller that waits for any message of the session pulls from this subscription, too.
        subscription.buffer.wake_all()
        if subscription.is_paused and is_truenext:
            self.release([subscription], suspend=True)

    def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription. All its messages, also those that the program holds, return to the broker without an
        attempt."""
        if self.by_id.pop(subscription.id, None) is None:
            return
        subscription.end(None)
        subscription.buffer.subscriptions.remove(subscription)
        link = self._context.link
        if link is not None and link.is_up and subscription.is_subscribe_sent:
            frame = frames.encode_frame("UNSUBSCRIBE", {"id": subscription.id})
            if subscription.is_open:
                link.write(frame)
            else:
                # SUBSCRIBE may yet be refused: then there is nothing to end.
                link.write_tracked(frame, AnswerHandler())
            for received in subscription.held_by_ack_id.values():
                received.state = ReceivedMessageState.SETTLED
                if isinstance(received.transaction, TransactionState):
                    # The message was to be acknowledged by the commit, and returns now.
                    received.transaction.mark_rollback_only(
                        ClosedError("a consumer was closed while the transaction had messages of this consumer")
                    )
            self._context.flush_soon()
        subscription.reset_for_connection()
        subscription.buffer.on_cleared()
        orphaned = [each for each in self.orphaned_messages.values() if each.subscription is subscription]
        self.orphaned_messages = {
            key: each for key, each in self.orphaned_messages.items() if each.subscription is not subscription
        }
        for received in orphaned:
            # Its transaction may not have noticed yet that the message was lost.
            received.state = ReceivedMessageState.SETTLED
        # Another consumer of this client may have received their redeliveries.
        self.drop_unsettled([each for each in orphaned if each.transaction is None])
        subscription.buffer.wake_all()

    def pause(self, subscription: Subscription) -> None:
        subscription.is_paused = True
        link = self._context.link
        if link is None or not link.is_truenext:
            # Another broker would also redeliver the messages that the program holds.
            return
        if subscription.is_subscribe_sent and (len(subscription) or not subscription.is_suspended):
            self.release([subscription], suspend=True)

    def resume(self, subscription: Subscription) -> None:
        subscription.is_paused = False
        self.wake(subscription)
        # Callers must repeat their pull requests. Messages of another broker may be buffered.
        subscription.buffer.wake_all()

    def wake(self, subscription: Subscription) -> None:
        """Ask the broker to send messages to a suspended subscription again."""
        link = self._context.link
        if subscription.is_suspended and link is not None and not subscription.is_paused:
            subscription.is_suspended = False
            if not subscription.pulls:
                link.write(frames.encode_wake(subscription.id))
                self._context.flush_soon()

    def pull(self, subscription: Subscription, messages: int, *, waits: bool) -> None:
        """Send a pull request for a number of messages. With 0 messages, withdraw an earlier pull request."""
        link = self._context.link
        assert link is not None, "it is up"
        # The answer to an earlier request may still be on its way.
        subscription.pull_id = str(link.frame_count)
        link.write(frames.encode_credit(subscription.id, messages, subscription.pull_id, waits=waits))
        subscription.is_suspended = subscription.is_suspended and not messages
        subscription.is_exhausted = False
        if messages:
            subscription.requested_count += messages

    def release(
        self,
        subscriptions: Sequence[Subscription],
        *,
        returning: Iterable[ReceivedMessage] = (),
        suspend: bool = False,
        transaction: TransactionState | None = None,
        counts_all: bool = True,
    ) -> None:
        """Release the buffered messages of these subscriptions, and the held messages in `returning`. `transaction` is
        aborted in the same step. With `suspend` the broker sends nothing until `wake`."""
        link = self._context.link
        if link is None or not link.is_up:
            return
        if not link.is_truenext:
            self._release_by_resubscribing(link, subscriptions, set(returning), transaction)
            return
        for subscription in subscriptions:
            # An unconfirmed subscription may yet be refused, so the release does not name it. It delivers nothing
            # before it is confirmed.
            subscription.is_release_due = not subscription.is_open
        subscriptions = [each for each in subscriptions if each.is_open]
        if not (subscriptions or transaction):
            return
        to_release = set(returning)
        keep = []
        for subscription in subscriptions:
            keep += [ack_id for ack_id, received in subscription.held_by_ack_id.items() if received not in to_release]
            subscription.clear()
            subscription.buffer.on_cleared()
            subscription.requested_count = 0
            subscription.is_suspended = suspend or subscription.is_paused
        link.release_count += 1
        # Paused subscriptions stay suspended, so a separate release request names them.
        awake = [each.id for each in subscriptions if not each.is_suspended]
        suspended = [each.id for each in subscriptions if each.is_suspended]
        abort = None if transaction is None else transaction.name
        if suspended and awake:
            link.write(frames.encode_release(suspended, keep=keep, suspend=True))
            link.release_count += 1
            suspended = []
        link.write(
            frames.encode_release(
                awake or suspended, keep=keep, suspend=bool(suspended), abort=abort, counts_all=counts_all
            )
        )
        for subscription in subscriptions:
            subscription.release_count_min = link.release_count
            if subscription.pulls:
                # Callers must repeat their pull requests.
                subscription.buffer.wake_all()
        self._context.flush_soon()

    def release_buffered(self, subscriptions: Iterable[Subscription]) -> None:
        """Release buffered messages, which may no longer be the true next. Subscriptions that cannot have any are
        skipped."""
        returned = [
            each
            for each in subscriptions
            if not each.is_closed
            and not (each.options.prefetch == 1 or (each.pulls and not each.requested_count and not len(each)))
        ]
        if returned:
            self.release(returned)

    def _release_by_resubscribing(
        self,
        link: Link,
        subscriptions: Sequence[Subscription],
        to_release: set[ReceivedMessage],
        transaction: TransactionState | None,
    ) -> None:
        """Release messages at a broker that has no `release` request: end the subscriptions, and subscribe again under
        new names."""
        if transaction is not None:
            link.write(frames.encode_frame("ABORT", {"transaction": transaction.name}))
        for subscription in subscriptions:
            link.write(frames.encode_frame("UNSUBSCRIBE", {"id": subscription.id}))
            del self.by_id[subscription.id]
            for received in subscription.held_by_ack_id.values():
                if received not in to_release:
                    # The message that the program holds is redelivered; this dispatch can no longer be acknowledged.
                    received.link_number = 0
                    self._add_orphaned(received)
            subscription.reset_for_connection()
            subscription.buffer.on_cleared()
            subscription.id = self._context.next_unique_name()
            self.by_id[subscription.id] = subscription
            self.send_subscribe(subscription)
        self._context.flush_soon()

    # ---- Received messages ----

    def on_message(self, frame: Frame) -> bool:
        """Handle a MESSAGE. Return whether it belongs to one of the subscriptions."""
        headers = frame.headers
        link = self._context.link
        assert link is not None, "it has just spoken"
        subscription = self.by_id.get(headers.get("subscription", ""))
        if subscription is None:
            return False
        if "truenext-unused" in headers:
            if headers.get("correlation-id") == subscription.pull_id:
                subscription.requested_count = 0
                subscription.is_exhausted = True
                subscription.buffer.wake_all()
            return True
        try:
            received = self._make_message(headers, frame.body, next(self._arrivals), subscription, link.number)
            if link.is_truenext and int(headers["truenext-round"]) < subscription.release_count_min:
                return True
        except (KeyError, ValueError) as error:
            subscription.requested_count = max(0, subscription.requested_count - 1)
            self._reject_unreadable(link, headers, error)
            self._on_not_delivered(subscription)
            return True
        if subscription.requested_count:
            subscription.requested_count -= 1
        if self.orphaned_messages or self.unconfirmed_dispositions:
            message_id = received.message_id
            known = self.unconfirmed_dispositions.pop(message_id, None)
            if known is not None and not (link.is_truenext or known[0].is_acked or known[0].is_rejected):
                # At another broker a NACK would make the message a dead letter.
                known = None
            # If the attempts have risen since, the failure was counted.
            if known is not None and (known[0].is_acked or known[0].is_rejected or received.attempts == known[1]):
                self._send_settlement(link, received, known[0])
                self._on_not_delivered(subscription)
                return True
            earlier = self.orphaned_messages.get(message_id)
            if earlier is not None:
                # The program still holds an earlier dispatch.
                earlier.redelivery = received
                subscription.held_by_ack_id[received.ack_id] = received
                received.state = ReceivedMessageState.HELD
                self.report_started(received)
                self._on_not_delivered(subscription)
                return True
        subscription.buffer.push(received)
        return True

    def _on_not_delivered(self, subscription: Subscription) -> None:
        """Wake callers that pull, because a requested message is not delivered to the program. These callers then
        request another message."""
        if subscription.pulls:
            subscription.buffer.wake_all()
        self._context.flush_soon()

    def _reject_unreadable(self, link: Link, headers: dict[str, str], error: Exception) -> None:
        message_id, destination = headers.get("message-id", ""), headers.get("destination", "")
        self._context.report(
            "cannot read message %(message_id)s of %(destination)s: %(error)s",
            {"message_id": message_id, "destination": destination, "error": repr(error)},
        )
        ack_id = headers.get("ack")
        if ack_id is not None:
            link.write(frames.encode_frame("NACK", {"id": ack_id, "truenext-reject": "true"}))

    # ---- Settling ----

    def report_started(self, received: ReceivedMessage) -> None:
        """Report to the broker that the program has a message, unless this was reported before."""
        link = self._context.link
        if link is not None and link.is_truenext and not received.is_started:
            received.is_started = True
            out = link.out_chunks
            if out and out[-1] is self._last_ack:
                out[-1] = frames.add_started_header(self._last_ack, received.ack_id)
            else:
                link.write(frames.encode_started(received.ack_id))

    def hold(self, received: ReceivedMessage) -> None:
        """Record that the program holds a message, and report that to the broker."""
        received.subscription.held_by_ack_id[received.ack_id] = received
        self.report_started(received)

    def is_current(self, received: ReceivedMessage) -> bool:
        """Return whether a message arrived on the current connection."""
        return self._context.link is not None and received.link_number == self._context.link.number

    def settle(
        self, received: ReceivedMessage, disposition: Disposition, started: ReceivedMessage | None = None
    ) -> None:
        """Settle a message. `started` is the message that the program gets next; the same frame may report its
        start."""
        received.state = ReceivedMessageState.SETTLED
        received.subscription.held_by_ack_id.pop(received.ack_id, None)
        link = self._context.link
        if link is not None and received.link_number == link.number:
            self._send_settlement(link, received, disposition, started)
            return
        self.forget_orphaned(received)
        redelivery = self._take_redelivery(received)
        if redelivery is not None:
            assert link is not None, "it is current"
            self._send_settlement(link, redelivery, disposition)
        elif not received.subscription.is_closed:
            self.remember_disposition(received, disposition)
        if started is not None:
            self.report_started(started)

    def _take_redelivery(self, received: ReceivedMessage) -> ReceivedMessage | None:
        """Return the redelivery of a message, and record it as settled. None if the message was not redelivered on this
        connection."""
        redelivery = received.redelivery
        if redelivery is None or redelivery.state is not ReceivedMessageState.HELD or not self.is_current(redelivery):
            return None
        redelivery.state = ReceivedMessageState.SETTLED
        redelivery.subscription.held_by_ack_id.pop(redelivery.ack_id, None)
        return redelivery

    def _send_settlement(
        self, link: Link, received: ReceivedMessage, disposition: Disposition, started: ReceivedMessage | None = None
    ) -> None:
        self._settled_count += 1
        if disposition.is_acked:
            ack_id = received.ack_id
            next_started = None if started is None or started.is_started or not link.is_truenext else started
            if next_started is not None:
                next_started.is_started = True
            if self._settled_count % UNANSWERED_FRAMES_MAX == 0:
                data = frames.encode_ack_with_receipt(
                    ack_id, link.next_receipt_id, None if next_started is None else next_started.ack_id
                )
            elif next_started is not None:
                data = frames.encode_ack_and_started(ack_id, next_started.ack_id)
            else:
                data = frames.encode_ack(ack_id)
            if next_started is None:
                self._last_ack = data
        else:
            headers = _nack_headers(received, disposition, link)
            if self._settled_count % UNANSWERED_FRAMES_MAX == 0:
                headers["receipt"] = link.next_receipt_id
            data = frames.encode_frame("NACK", headers)
        link.write_tracked(data, PendingSettlement(self, received, disposition))
        if not (disposition.is_acked or disposition.is_rejected):
            self.release_buffered([received.subscription])

    @property
    def has_waiting_ack(self) -> bool:
        """Whether one ACK and nothing else is unwritten. This ACK can report the next message as started."""
        link = self._context.link
        return (
            link is not None and link.is_truenext and len(link.out_chunks) == 1 and link.out_chunks[0] is self._last_ack
        )

    def remember_disposition(self, received: ReceivedMessage, disposition: Disposition) -> None:
        """Keep a disposition, to be sent when the message is redelivered."""
        self.unconfirmed_dispositions[received.message_id] = disposition, received.attempts
        if len(self.unconfirmed_dispositions) > UNCONFIRMED_DISPOSITIONS_MAX:
            del self.unconfirmed_dispositions[next(iter(self.unconfirmed_dispositions))]

    def _add_orphaned(self, received: ReceivedMessage) -> None:
        """Record a message of a lost connection that the program still holds, unless it is the redelivery of a recorded
        message."""
        earlier = self.orphaned_messages.get(received.message_id)
        if earlier is None or earlier.redelivery is not received:
            self.orphaned_messages[received.message_id] = received

    def forget_orphaned(self, received: ReceivedMessage) -> None:
        """Drop the record of an orphaned dispatch, which the program no longer holds. A later dispatch of the same
        message stays recorded."""
        if self.orphaned_messages.get(received.message_id) is received:
            del self.orphaned_messages[received.message_id]

    def drop_unsettled(self, messages: Iterable[ReceivedMessage]) -> None:
        """Drop messages that the program no longer holds and has not settled. If such a message was redelivered, the
        redelivery is released, and with it the buffered messages: the broker may have a more urgent message by now."""
        returning: dict[Subscription, None] = {}
        for received in messages:
            received.state = ReceivedMessageState.SETTLED
            self.forget_orphaned(received)
            redelivery = self._take_redelivery(received)
            received.redelivery = None
            if redelivery is not None:
                returning[redelivery.subscription] = None
        if returning:
            self.release(list(returning))

    # ---- Connections ----

    def on_connection_lost(self, link: Link, transactions: Iterable[TransactionState], *, was_up: bool) -> None:
        """Record as orphaned all messages of the lost connection that the program holds. Reset the subscriptions."""
        # Held messages are recorded last: after a rollback by another task, another consumer may hold the message.
        for transaction in transactions:
            for received in transaction.delivered_messages:
                if received.link_number == link.number:
                    self._add_orphaned(received)
        for subscription in self.by_id.values():
            for received in subscription.held_by_ack_id.values():
                self._add_orphaned(received)
            subscription.reset_for_connection()
            subscription.may_have_missed |= was_up and subscription.options.is_lossy
            subscription.buffer.on_cleared()

    def on_connected(self) -> None:
        """Send all SUBSCRIBE frames on a new connection. Orphaned messages stay recorded even if the broker has another
        store, because they may be redelivered when the first store is back."""
        for subscription in self.by_id.values():
            if not subscription.is_closed:
                self.send_subscribe(subscription)


class PendingSettlement(AnswerHandler, msgspec.Struct, eq=False):
    """Answer handler of an ACK or NACK. If the connection is lost before the answer, the handler keeps the disposition
    for the message's redelivery."""

    _subscriptions: Subscriptions
    _received: ReceivedMessage
    _disposition: Disposition

    def on_refused(self, error: Refused) -> None:
        raise ConnectionLost(f"the broker refused an acknowledgement: {error}") from error

    def on_connection_lost(self) -> None:
        if self._received.message_id not in self._subscriptions.orphaned_messages:
            # Otherwise the program has got the message again, and the broker knows the earlier disposition.
            self._subscriptions.remember_disposition(self._received, self._disposition)


class _PendingSubscribe(AnswerHandler, msgspec.Struct, eq=False):
    _subscriptions: Subscriptions
    _subscription: Subscription

    def on_confirmed(self, frame: Frame) -> None:
        self._subscription.is_open = True
        self._subscription.opened.set()
        if self._subscription.is_release_due:
            self._subscriptions.release([self._subscription])
        # Callers must repeat their pull requests.
        self._subscription.buffer.wake_all()

    def on_refused(self, error: Refused) -> None:
        """End the subscription with the refusal. SUBSCRIBE may have been accepted before on an earlier connection."""
        self._subscription.is_subscribe_sent = False
        self._subscription.end(error)
        self._subscription.buffer.wake_all()


def _nack_headers(received: ReceivedMessage, disposition: Disposition, link: Link) -> dict[str, str]:
    headers = {"id": received.ack_id}
    if disposition.delay_ms is not None:
        headers["truenext-delay"] = str(disposition.delay_ms)
    if disposition.is_rejected:
        headers["truenext-reject"] = "true"
    if disposition.cause and link.is_truenext:
        headers["truenext-cause"] = disposition.cause
    return headers


def _allows_express(destination: str) -> bool:
    """Return whether a consumer may request express dispatch (docs/contract.md, C4.13): not for a pattern of queues."""
    name = destination.partition("?")[0]
    return name.startswith(("/topic/", "/temp-topic/")) or not is_pattern(name)


# ---- Options ----


class ConsumerOptions(TypedDict, total=False):
    """Options of a consumer."""

    prefetch: int | None
    """Largest number of messages that the consumer may hold, buffered or unacknowledged. With 0 each message is
    requested. With None, the default, the broker fits the number to the speed of the program."""
    selector: str
    """JMS selector that messages must match, such as "region = 'eu' AND JMSPriority > 6"."""
    priority: int
    """Priority from -127 to 127; 0 is the default. If several consumers could take a message, the one with the highest
    priority gets it."""
    exclusive: bool
    """True: no other consumer gets messages of the queue while this consumer is subscribed."""
    durable: str
    """Name of a durable subscription to a topic. Such a subscription collects messages also while the client has no
    connection. Requires `client_id` of `connect`."""
    headers: Mapping[str, str]
    """Additional headers of the SUBSCRIBE frame."""


_RESERVED = frozenset({"id", "destination", "ack", "receipt", "selector", "browser"})


def parse_consumer_options(destination: str, options: ConsumerOptions) -> SubscriptionOptions:
    """Check the options of a consumer. Raises: ValueError, TypeError for an invalid option"""
    unknown = options.keys() - ConsumerOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"a consumer has no option {', '.join(sorted(unknown))}")
    for name, text in (("destination", destination), ("selector", options.get("selector", ""))):
        if not isinstance(text, str):
            raise TypeError(f"{name} must be text, not {text!r}")
    prefetch = options.get("prefetch")
    if prefetch is not None and (type(prefetch) is not int or not 0 <= prefetch <= WINDOW_MAX):
        raise ValueError(f"prefetch must be a whole number, 0 to {WINDOW_MAX}, not {prefetch!r}")
    priority = options.get("priority", 0)
    if not -CONSUMER_PRIORITY_MAX <= priority <= CONSUMER_PRIORITY_MAX:
        raise ValueError(f"priority must be {-CONSUMER_PRIORITY_MAX} to {CONSUMER_PRIORITY_MAX}, not {priority}")
    headers = dict(options.get("headers", {}))
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"header {name!r} is {value!r}: name and value of a header must be text")
        if name in _RESERVED or name.startswith("truenext-"):
            raise ValueError(f"header {name} cannot be set by a program; there may be an option for it")
    frames.check_headers({"destination": destination, "selector": options.get("selector", "")} | headers)
    durable = options.get("durable")
    if durable is not None:
        frames.check_headers({"durable": durable})
    checked: ConsumerOptions = {**options, "headers": headers}
    return SubscriptionOptions(destination=destination, **checked)
