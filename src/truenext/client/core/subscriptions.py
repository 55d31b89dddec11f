"""The subscriptions of a client: what is said of them on the connection that is there, and what comes.

What a program has of a connection that was lost is *foreign*: it comes again, here or elsewhere. If it comes here while
the program still has it, it is not handed out a second time: what the program says of it counts for the new dispatch.
What the program has said of a message and the broker may not know is a verdict that waits for the message to come
again.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from truenext.client.core import frames
from truenext.client.core.holding import Buffer, Received, ReceivedState, Subscription, Wanted
from truenext.client.core.link import UNANSWERED_MAX, Ignored
from truenext.client.core.transaction_state import TransactionState
from truenext.errors import ClosedError, ConnectionLost, Refused
from truenext.pattern import is_pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from truenext.client.core.context import ClientContext
    from truenext.client.core.disposition import Disposition
    from truenext.client.core.link import Link
    from truenext.wire.stomp.frame import Frame

VERDICTS_MAX = 100_000
"""Messages that the program has settled and the broker may not know of."""


class Subscriptions:
    def __init__(self, context: ClientContext, make: type[Received]) -> None:
        """`make` makes messages."""
        self.by_id: dict[str, Subscription] = {}
        self.foreign: dict[str, Received] = {}
        """Messages that the program still has, of connections that were lost, by message id."""
        self.verdicts: dict[str, tuple[Disposition, int]] = {}
        """What the program has said and the broker may not know, with the attempts that the message had then."""
        self._context = context
        self._make = make
        self._arrivals = count(1)
        self._told = 0
        """Acknowledgements and refusals."""

    # ---- What is said of them ----

    def add(self, wanted: Wanted, buffer: Buffer) -> Subscription:
        """A new one; the broker is told of it if there is a connection, and at each that comes."""
        subscription = Subscription(self._context.name(), wanted, buffer)
        self.by_id[subscription.id] = subscription
        buffer.subscriptions.append(subscription)
        link = self._context.link
        if link is not None and link.is_up:
            self.say(subscription)
            self._context.flush_soon()
        return subscription

    def say(self, subscription: Subscription) -> None:
        link = self._context.link
        assert link is not None, "it is up"
        wanted = subscription.wanted
        headers = {"id": subscription.id, "destination": wanted.destination, "ack": "client-individual"}
        is_truenext = link.is_truenext
        if wanted.prefetch == 0:
            if is_truenext:
                headers["truenext-pull"] = "true"
            else:
                # The least that others know.
                headers["activemq.prefetchSize"] = "1"
        elif wanted.prefetch is not None:
            headers["activemq.prefetchSize"] = str(wanted.prefetch)
        if is_truenext and wanted.prefetch != 0 and _may_be_express(wanted.destination):
            headers["truenext-express"] = "true"
        if wanted.selector is not None:
            headers["selector"] = wanted.selector
        if wanted.priority:
            headers["activemq.priority"] = str(wanted.priority)
        if wanted.exclusive:
            headers["activemq.exclusive"] = "true"
        if wanted.durable is not None:
            headers["activemq.subscriptionName"] = wanted.durable
        headers |= wanted.headers
        headers["receipt"] = link.receipt
        link.ask(frames.frame("SUBSCRIBE", headers), _Subscribing(self, subscription))
        subscription.is_known = True
        # Who waits for any of the session asks this one, too, if it pulls.
        subscription.buffer.wake_all()
        if subscription.is_paused and is_truenext:
            self.release([subscription], suspend=True)

    def unsubscribe(self, subscription: Subscription) -> None:
        """What it has goes back, without an attempt; what the program has of it, too."""
        if self.by_id.pop(subscription.id, None) is None:
            return
        subscription.end(None)
        subscription.buffer.subscriptions.remove(subscription)
        link = self._context.link
        if link is not None and link.is_up and subscription.is_known:
            end = frames.frame("UNSUBSCRIBE", {"id": subscription.id})
            if subscription.is_open:
                link.write(end)
            else:
                # It may yet be refused: then there is none to end.
                link.ask(end, Ignored())
            for received in subscription.held.values():
                received.state = ReceivedState.DONE
                if isinstance(received.transaction, TransactionState):
                    # It was to be acknowledged with the commit, and returns now.
                    received.transaction.doom(
                        ClosedError("a consumer was closed, from which the transaction has messages")
                    )
            self._context.flush_soon()
        subscription.reset_for_connection()
        subscription.buffer.cleared()
        foreign = [each for each in self.foreign.values() if each.subscription is subscription]
        self.foreign = {key: each for key, each in self.foreign.items() if each.subscription is not subscription}
        for received in foreign:
            # Nothing is to be said of it any more, though its transaction has not noticed yet that it was lost.
            received.state = ReceivedState.DONE
        # It may have come again to another consumer of ours.
        self.put_back([each for each in foreign if each.transaction is None])
        subscription.buffer.wake_all()

    def pause(self, subscription: Subscription) -> None:
        subscription.is_paused = True
        link = self._context.link
        if link is None or not link.is_truenext:
            # Another broker would dispatch again what the program has.
            return
        if subscription.is_known and (len(subscription) or not subscription.is_suspended):
            self.release([subscription], suspend=True)

    def resume(self, subscription: Subscription) -> None:
        subscription.is_paused = False
        self.wake(subscription)
        # Those that pull ask anew, and from another broker something may be here.
        subscription.buffer.wake_all()

    def wake(self, subscription: Subscription) -> None:
        """The program asks for messages."""
        link = self._context.link
        if subscription.is_suspended and link is not None and not subscription.is_paused:
            subscription.is_suspended = False
            if not subscription.pulls:
                link.write(frames.wake(subscription.id))
                self._context.flush_soon()

    def pull(self, subscription: Subscription, messages: int, *, waits: bool) -> None:
        """Ask for messages; 0 withdraws what has not come."""
        link = self._context.link
        assert link is not None, "it is up"
        # What is said of an earlier wish may still be on its way.
        subscription.pull_id = str(link.frames)
        link.write(frames.credit(subscription.id, messages, subscription.pull_id, waits=waits))
        subscription.is_suspended = subscription.is_suspended and not messages
        subscription.is_dry = False
        if messages:
            subscription.requested += messages

    def release(
        self,
        subscriptions: Sequence[Subscription],
        *,
        returning: Iterable[Received] = (),
        suspend: bool = False,
        transaction: TransactionState | None = None,
        counts_all: bool = True,
    ) -> None:
        """What subscriptions hold returns in one step, but for what the program has, and not `returning`."""
        link = self._context.link
        if link is None or not link.is_up:
            return
        if not link.is_truenext:
            self._resubscribe(link, subscriptions, set(returning), transaction)
            return
        for subscription in subscriptions:
            # One that may yet be refused is not named: nothing is handed out of it before it is confirmed.
            subscription.returns = not subscription.is_open
        subscriptions = [each for each in subscriptions if each.is_open]
        if not (subscriptions or transaction):
            return
        going = set(returning)
        keep = []
        for subscription in subscriptions:
            keep += [ack_id for ack_id, received in subscription.held.items() if received not in going]
            subscription.clear()
            subscription.buffer.cleared()
            subscription.requested = 0
            subscription.is_suspended = suspend or subscription.is_paused
        link.rounds += 1
        # Those that are paused stay so; they are named in a request of their own.
        awake = [each.id for each in subscriptions if not each.is_suspended]
        suspended = [each.id for each in subscriptions if each.is_suspended]
        abort = None if transaction is None else transaction.name
        if suspended and awake:
            link.write(frames.release(suspended, keep=keep, suspend=True))
            link.rounds += 1
            suspended = []
        link.write(
            frames.release(awake or suspended, keep=keep, suspend=bool(suspended), abort=abort, counts_all=counts_all)
        )
        for subscription in subscriptions:
            subscription.round_min = link.rounds
            if subscription.pulls:
                # Nothing that was asked for comes any more.
                subscription.buffer.wake_all()
        self._context.flush_soon()

    def release_buffered(self, subscriptions: Iterable[Subscription]) -> None:
        """What was dispatched before is not the true next any more, unless nothing can have been."""
        returned = [
            each
            for each in subscriptions
            if not each.is_closed
            and not (each.wanted.prefetch == 1 or (each.pulls and not each.requested and not len(each)))
        ]
        if returned:
            self.release(returned)

    def _resubscribe(
        self,
        link: Link,
        subscriptions: Sequence[Subscription],
        going: set[Received],
        transaction: TransactionState | None,
    ) -> None:
        """The same where a broker knows no giving back: the subscriptions begin anew, under other names."""
        if transaction is not None:
            link.write(frames.frame("ABORT", {"transaction": transaction.name}))
        for subscription in subscriptions:
            link.write(frames.frame("UNSUBSCRIBE", {"id": subscription.id}))
            del self.by_id[subscription.id]
            for received in subscription.held.values():
                if received not in going:
                    # What the program has comes again; this dispatch cannot be acknowledged any more.
                    received.link = 0
                    self._is_foreign(received)
            subscription.reset_for_connection()
            subscription.buffer.cleared()
            subscription.id = self._context.name()
            self.by_id[subscription.id] = subscription
            self.say(subscription)
        self._context.flush_soon()

    # ---- What comes ----

    def on_message(self, frame: Frame) -> bool:
        """Whether it is for one of them."""
        headers = frame.headers
        link = self._context.link
        assert link is not None, "it has just spoken"
        subscription = self.by_id.get(headers.get("subscription", ""))
        if subscription is None:
            return False
        if "truenext-unused" in headers:
            if headers.get("correlation-id") == subscription.pull_id:
                subscription.requested = 0
                subscription.is_dry = True
                subscription.buffer.wake_all()
            return True
        try:
            received = self._make(headers, frame.body, next(self._arrivals), subscription, link.number)
            if link.is_truenext and int(headers["truenext-round"]) < subscription.round_min:
                return True
        except (KeyError, ValueError) as error:
            subscription.requested = max(0, subscription.requested - 1)
            self._reject_unreadable(link, headers, error)
            self._was_not_handed_out(subscription)
            return True
        if subscription.requested:
            subscription.requested -= 1
        if self.foreign or self.verdicts:
            key = received.key
            said = self.verdicts.pop(key, None)
            if said is not None and not (link.is_truenext or said[0].is_done or said[0].is_rejected):
                # To say that it has failed would make it a dead letter there.
                said = None
            # If it has failed once more since, that was counted.
            if said is not None and (said[0].is_done or said[0].is_rejected or received.attempts == said[1]):
                self._tell(link, received, said[0])
                self._was_not_handed_out(subscription)
                return True
            earlier = self.foreign.get(key)
            if earlier is not None:
                # The program still has it.
                earlier.again = received
                subscription.held[received.ack_id] = received
                received.state = ReceivedState.HELD
                self.report_started(received)
                self._was_not_handed_out(subscription)
                return True
        subscription.buffer.push(received)
        return True

    def _was_not_handed_out(self, subscription: Subscription) -> None:
        """What has come was asked for, and is not for whoever waits: that one asks anew."""
        if subscription.pulls:
            subscription.buffer.wake_all()
        self._context.flush_soon()

    def _reject_unreadable(self, link: Link, headers: dict[str, str], error: Exception) -> None:
        self._context.report(
            "cannot read message %(message_id)s of %(destination)s: %(error)s",
            {
                "message_id": headers.get("message-id", ""),
                "destination": headers.get("destination", ""),
                "error": repr(error),
            },
        )
        ack_id = headers.get("ack")
        if ack_id is not None:
            link.write(frames.frame("NACK", {"id": ack_id, "truenext-reject": "true"}))

    # ---- What the program says of it ----

    def report_started(self, received: Received) -> None:
        """Say that the program has it."""
        link = self._context.link
        if link is not None and link.is_truenext and not received.is_started:
            received.is_started = True
            link.write(frames.started(received.ack_id))

    def hold(self, received: Received) -> None:
        """The program gets it, and says later what became of it."""
        received.subscription.held[received.ack_id] = received
        self.report_started(received)

    def is_current(self, received: Received) -> bool:
        """Its connection is there."""
        return self._context.link is not None and received.link == self._context.link.number

    def settle(self, received: Received, disposition: Disposition, started: Received | None = None) -> None:
        """The program has said what became of a message; `started` is the one that it gets instead."""
        received.state = ReceivedState.DONE
        received.subscription.held.pop(received.ack_id, None)
        link = self._context.link
        if link is not None and received.link == link.number:
            self._tell(link, received, disposition, started)
            return
        self.forget(received)
        again = received.again
        if again is not None and self.is_current(again) and again.state is ReceivedState.HELD:
            again.state = ReceivedState.DONE
            again.subscription.held.pop(again.ack_id, None)
            assert link is not None, "it is current"
            self._tell(link, again, disposition)
        elif not received.subscription.is_closed:
            self.remember(received, disposition)
        if started is not None:
            self.report_started(started)

    def _tell(self, link: Link, received: Received, disposition: Disposition, started: Received | None = None) -> None:
        self._told += 1
        if disposition.is_done:
            ack_id = received.ack_id
            next_started = None if started is None or started.is_started or not link.is_truenext else started
            if next_started is not None:
                next_started.is_started = True
            if self._told % UNANSWERED_MAX == 0:
                data = frames.ack_confirmed(ack_id, link.receipt, None if next_started is None else next_started.ack_id)
            elif next_started is not None:
                data = frames.ack_and_start(ack_id, next_started.ack_id)
            else:
                data = frames.ack(ack_id)
        else:
            headers = _nack_headers(received, disposition, link)
            if self._told % UNANSWERED_MAX == 0:
                headers["receipt"] = link.receipt
            data = frames.frame("NACK", headers)
        link.ask(data, Answered(self, received, disposition))
        if not (disposition.is_done or disposition.is_rejected):
            self.release_buffered([received.subscription])

    def remember(self, received: Received, disposition: Disposition) -> None:
        """If the message comes again, that is what is said of it."""
        self.verdicts[received.key] = disposition, received.attempts
        if len(self.verdicts) > VERDICTS_MAX:
            del self.verdicts[next(iter(self.verdicts))]

    def _is_foreign(self, received: Received) -> None:
        """The program has it, and its connection has gone. What came again while the program still had the message is
        known by what the program has."""
        earlier = self.foreign.get(received.key)
        if earlier is None or earlier.again is not received:
            self.foreign[received.key] = received

    def forget(self, received: Received) -> None:
        """The program has this dispatch no more. It may have a later one of the same message."""
        if self.foreign.get(received.key) is received:
            del self.foreign[received.key]

    def put_back(self, messages: Iterable[Received]) -> None:
        """The program does not have messages any more, and nothing was said of them. What has come again meanwhile
        returns, and what is buffered with it: the broker may have something more urgent by now."""
        returning: dict[Subscription, None] = {}
        for received in messages:
            received.state = ReceivedState.DONE
            self.forget(received)
            again, received.again = received.again, None
            if again is not None and self.is_current(again) and again.state is ReceivedState.HELD:
                again.state = ReceivedState.DONE
                again.subscription.held.pop(again.ack_id, None)
                returning[again.subscription] = None
        if returning:
            self.release(list(returning))

    # ---- Connections ----

    def lost(self, link: Link, transactions: Iterable[TransactionState], *, was_up: bool) -> None:
        """The connection has gone. What the program has comes again, and may do so here while the program has it."""
        # What was rolled back from elsewhere may be somebody else's here by now.
        for transaction in transactions:
            for received in transaction.given:
                if received.link == link.number:
                    self._is_foreign(received)
        for subscription in self.by_id.values():
            for received in subscription.held.values():
                self._is_foreign(received)
            subscription.reset_for_connection()
            subscription.has_missed |= was_up and subscription.wanted.is_lossy
            subscription.buffer.cleared()

    def connected(self) -> None:
        """There is a new one. If it is to another store, what the program has of the first one stays known: it may come
        again when that is back."""
        for subscription in self.by_id.values():
            if not subscription.is_closed:
                self.say(subscription)


class Answered:
    """An acknowledgement that is under way."""

    __slots__ = ("_received", "_subscriptions", "_verdict")

    def __init__(self, subscriptions: Subscriptions, received: Received, disposition: Disposition) -> None:
        self._subscriptions = subscriptions
        self._received = received
        self._verdict = disposition

    def confirmed(self, frame: Frame) -> None:
        pass

    def refused(self, error: Refused) -> None:
        raise ConnectionLost(f"the broker refused an acknowledgement: {error}") from error

    def lost(self) -> None:
        if self._received.key not in self._subscriptions.foreign:
            # Else the program was handed it again since: the broker has heard what was said of it before.
            self._subscriptions.remember(self._received, self._verdict)


class _Subscribing:
    __slots__ = ("_subscription", "_subscriptions")

    def __init__(self, subscriptions: Subscriptions, subscription: Subscription) -> None:
        self._subscriptions = subscriptions
        self._subscription = subscription

    def confirmed(self, frame: Frame) -> None:
        self._subscription.is_open = True
        self._subscription.opened.set()
        if self._subscription.returns:
            self._subscriptions.release([self._subscription])
        # Those that pull ask anew.
        self._subscription.buffer.wake_all()

    def refused(self, error: Refused) -> None:
        """Of a subscription that came back after a reconnect, too: then its consumer ends with that."""
        self._subscription.is_known = False
        self._subscription.end(error)
        self._subscription.buffer.wake_all()

    def lost(self) -> None:
        pass


def _nack_headers(received: Received, disposition: Disposition, link: Link) -> dict[str, str]:
    headers = {"id": received.ack_id}
    if disposition.delay_ms is not None:
        headers["truenext-delay"] = str(disposition.delay_ms)
    if disposition.is_rejected:
        headers["truenext-reject"] = "true"
    if disposition.cause and link.is_truenext:
        headers["truenext-cause"] = disposition.cause
    return headers


def _may_be_express(destination: str) -> bool:
    """A pattern of queues has no express lane."""
    name = destination.partition("?")[0]
    return name.startswith(("/topic/", "/temp-topic/")) or not is_pattern(name)
