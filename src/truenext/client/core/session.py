"""Session: delivers messages to the program in order, and settles them.

    auto          a message is acknowledged when the next one is requested, or its block ends
    individual    the program settles each message
    transacted    a message is acknowledged in the transaction when it is delivered to the program
    at commit     a message is acknowledged in the transaction when that is committed

A rollback, a cancellation and a nack release the buffered messages. The next delivered message is one that was
dispatched after this release, so it is the broker's true next. Source: docs/contract.md, "Release"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from truenext.client.core.buffer import ReceiveBuffer, ReceivedMessage, ReceivedMessageState, Subscription, key_of
from truenext.client.core.client import Client
from truenext.client.core.disposition import ACKED, FAILED, CountedAttempts, Disposition, counted_attempts_for
from truenext.client.core.pending_requests import ConnectionStatus
from truenext.client.core.transaction_state import CallerNumber, Outcome, TransactionState
from truenext.client.core.transactions import SessionTransactions
from truenext.client.core.waiting import Flow, Wait
from truenext.errors import ClosedError, LocalProtocolError, copy_error

FLUSH_FRAMES = 64
"""Number of unwritten frames from which on sends of a transaction are written at once."""
DELIVERY_RECHECK_S = 0.05
"""Seconds until the broker is asked again whether a message is on its way."""
_EXPIRED_TEXT = (
    "the session has ended with the call of its handler: await all uses of the session before the handler returns, or "
    "make another session with connection.session()"
)


class SessionMode(Enum):
    AUTO = "auto"
    INDIVIDUAL = "individual"
    TRANSACTED = "transacted"
    AT_COMMIT = "at commit"


class SessionCore(msgspec.Struct, eq=False):
    # A struct, because `consume` makes a session for each message that it processes in a transaction.
    client: Client
    mode: SessionMode
    buffer: ReceiveBuffer
    is_closed: bool = False
    is_expired: bool = False
    """True if the session was made for one call of a handler, and this call has ended. Later calls of the session are
    refused."""
    _has_ended: bool = False
    transactions: SessionTransactions | None = None
    _awaiting_auto_ack: dict[object, list[ReceivedMessage]] = {}
    """Mode auto: messages that each task or thread has received last, and that are not acknowledged."""
    _pending_by_owner: dict[object, ReceivedMessage] = {}
    """Message that `try_receive` has taken for a task or thread, and that `receive` will return once all frames are
    written."""

    def __post_init__(self) -> None:
        at_commit = self.mode is SessionMode.AT_COMMIT
        if at_commit or self.mode is SessionMode.TRANSACTED:
            self.transactions = SessionTransactions(self.client, self.buffer, self.client.acquire_producer(), at_commit)

    @property
    def transaction(self) -> TransactionState | None:
        """Current transaction: it is open, its outcome is not known, or its code has not ended. None if there is
        none."""
        return None if self.transactions is None else self.transactions.transaction

    def check_open(self) -> None:
        """Check that session and connection are open. Raises: ClosedError if the program has closed one of them;
        otherwise the error that ended the connection for good
        """
        if self.is_closed:
            raise ClosedError(
                _EXPIRED_TEXT
                if self.is_expired
                else "the session or its consumer is closed: open another session, or subscribe again"
            )
        self.client.check_open()

    def has_program_closed(self, subscription: Subscription) -> bool:
        """Return whether the program itself has closed the consumer, its session or the connection. False after an
        error."""
        return (
            subscription.error is None
            and not self.is_expired
            and (subscription.is_closed or self.is_closed or self.client.is_closed_by_program)
        )

    # ---- Receiving ----

    def try_receive(self, subscription: Subscription | None, owner: object) -> ReceivedMessage | None:
        """Return the next message if it is there without waiting, otherwise None. This is the fast path of
        `receive`."""
        client = self.client
        if self.is_closed or client.error is not None or client.is_closing:
            return None
        if self.transactions is not None and not self.transactions.is_ready():
            return None
        received = self.buffer.first(subscription)
        if received is None or self.buffer.is_closed:
            return None
        subscription = received.subscription
        if subscription.pulls and subscription.requested_count:
            return None
        if self.mode is SessionMode.AUTO:
            # One frame acknowledges the last message, and reports that this one has started.
            self._auto_ack(owner, received)
        received = self._deliver(received, owner)
        if client.flush():
            if self.mode is SessionMode.AUTO:
                self._await_auto_ack([received], owner)
            return received
        # `receive` returns the message later, once the frame has been written that reports it as started.
        self._pending_by_owner[owner] = received
        return None

    def receive(
        self,
        subscription: Subscription | None,
        max_count: int,
        deadline: float | None,
        owner: object,
        *,
        no_wait: bool = False,
    ) -> Flow[list[ReceivedMessage]]:
        """Return up to `max_count` messages. Wait for the first one, until the deadline; return the others only if they
        are buffered. The list is empty at the deadline, or if the buffer is closed. With `no_wait` return messages that
        the broker can dispatch now.

        Raises: RolledBack if the session's transaction was ended by anything but its own code; InDoubt if the
        outcome of its last commit cannot be found out; Refused if the broker has ended the subscription; ClosedError if
        consumer, session or connection is closed; ConnectionLost if the connection was lost for good
        """
        # Left by `try_receive`, which cannot wait.
        pending = self._pending_by_owner.pop(owner, None)
        messages = [] if pending is None or pending.state is not ReceivedMessageState.HELD else [pending]
        try:
            yield from self._wait_until_ready()
            self._auto_ack(owner, None)
            while True:
                if not messages and not self._can_ack_wait(subscription):
                    yield from self.client.wait_until_written()
                    # Another task may have ended the transaction meanwhile, or be about to.
                    yield from self._wait_until_ready()
                self._check_consumers(subscription)
                if self.buffer.is_closed:
                    self._undo_delivery(messages)
                    return []
                if not messages:
                    messages = self._deliver_buffered(subscription, max_count, owner)
                if messages:
                    # A message of a transaction is returned without a wait, because the transaction has it already.
                    if not self.client.flush() and self.transactions is None:
                        # The broker is told that the program has the message before the program gets it.
                        rounds = [each.subscription.release_count_min for each in messages]
                        yield from self.client.wait_until_written()
                        is_same = rounds == [
                            each.subscription.release_count_min for each in messages
                        ] and self._are_held(messages)
                        if not is_same or self._is_overtaken(subscription, messages):
                            # Released meanwhile, or overtaken by a more urgent message: no longer the true next.
                            returned, messages = messages, []
                            self._undo_delivery(returned)
                            continue
                    self._await_auto_ack(messages, owner)
                    return messages
                in_time = yield from self._wait_for_messages(subscription, max_count, deadline, no_wait=no_wait)
                if not in_time:
                    return []
        except BaseException:
            self.on_receive_interrupted(subscription, messages)
            raise

    def _wait_until_ready(self) -> Flow[None]:
        """Wait until a transaction is open or can begin. A session without transactions needs no wait.

        Raises: ClosedError if the session is closed; RolledBack if the session's transaction was ended by anything but
        its own code; InDoubt if the outcome of its last commit cannot be found out
        """
        transactions = self.transactions
        if transactions is not None:
            transactions.check_not_rolled_back()
        self.check_open()
        if transactions is not None:
            yield from transactions.wait_until_ready()

    def _check_consumers(self, subscription: Subscription | None) -> None:
        """Check that there is a consumer to receive from.

        Raises: LocalProtocolError if there is no consumer; ClosedError if the consumer is closed; the error that has
        ended the consumer
        """
        self.check_open()
        if not self.buffer.subscriptions and not self.buffer.is_closed:
            if subscription is not None:
                raise ClosedError(_consumer_closed_text(subscription))
            raise LocalProtocolError("the session has no consumer to receive from: subscribe first")
        for each in self.buffer.subscriptions if subscription is None else (subscription,):
            if each.error is not None:
                raise copy_error(each.error)
            if each.is_closed:
                raise ClosedError(_consumer_closed_text(each))

    def _deliver_buffered(
        self, subscription: Subscription | None, max_count: int, owner: object
    ) -> list[ReceivedMessage]:
        messages: list[ReceivedMessage] = []
        while len(messages) < max_count:
            received = self.buffer.first(subscription)
            if received is None:
                break
            if messages and max_count > 1 and received.attempts:
                # It is returned alone, so that its next failure counts no attempt for other messages.
                break
            self._deliver(received, owner)
            messages.append(received)
            if max_count > 1 and received.attempts:
                break
        return messages

    def _deliver(self, received: ReceivedMessage, owner: object) -> ReceivedMessage:
        client = self.client
        link = client.context.link
        assert link is not None, "what is buffered is of a connection that is there"
        self.buffer.pop(received)
        subscription = received.subscription
        subscription.is_polled = True
        received.state = ReceivedMessageState.HELD
        if subscription.may_have_missed:
            subscription.may_have_missed = False
            received.may_have_missed = True
        if self.transactions is not None:
            self.transactions.deliver(received, link, owner)
            return received
        client.subscriptions.hold(received)
        return received

    def _wait_for_messages(
        self, subscription: Subscription | None, max_count: int, deadline: float | None, *, no_wait: bool
    ) -> Flow[bool]:
        """Wait for a message to arrive. Return False at the deadline; with `no_wait`, also if the broker has no
        message."""
        client = self.client
        subscriptions = [subscription] if subscription is not None else self.buffer.subscriptions
        pulled = []
        for each in subscriptions:
            each.is_polled = True
            if each.is_paused or not each.is_open:
                # The SUBSCRIBE may be refused after a reconnect, and then the broker would refuse a pull request, too.
                continue
            if each.pulls and client.link is not None and client.link.is_truenext:
                pulled.append(each)
                if not each.requested_count:
                    client.subscriptions.pull(each, min(max_count, PULLED_MAX), waits=not no_wait)
            else:
                client.subscriptions.wake(each)
        client.flush()
        if no_wait:
            if client.link is not None and client.link.is_up:
                client.link.require_truenext("receive(0)")
            return (yield from self._wait_for_available(subscription, subscriptions, pulled, deadline))
        if not (yield from self.buffer.wait_until_woken(subscription, deadline)):
            yield from self._cancel_pull(pulled)
            return bool(self.buffer.first(subscription))
        return True

    def _cancel_pull(self, pulled: Iterable[Subscription]) -> Flow[None]:
        """Withdraw pull requests for which no call waits any more. Then wait for requested messages that are on their
        way."""
        client = self.client
        for each in pulled:
            link = client.link
            if (
                each.requested_count
                and link is not None
                and each.is_subscribe_sent
                and not self.buffer.has_waiter(each)
            ):
                client.subscriptions.pull(each, 0, waits=False)
                client.flush()
                while each.requested_count and client.link is link and not len(each):
                    yield from self.buffer.wait_until_woken(each)

    def _wait_for_available(
        self,
        subscription: Subscription | None,
        subscriptions: Sequence[Subscription],
        pulled: Sequence[Subscription],
        deadline: float | None,
    ) -> Flow[bool]:
        """Wait until a message arrives, or the broker reports that it has none. Return whether the caller should check
        the buffers again."""
        client = self.client
        yield from client.wait_until_up(deadline, "request messages")
        link = client.link
        while client.link is link:
            if self.buffer.first(subscription) is not None:
                return True
            if pulled and not any(each.requested_count for each in pulled):
                # The broker had too few messages, or the pull requests ended with a release, and are to be repeated.
                return not all(each.is_exhausted for each in pulled)
            if pulled:
                if not (yield from self.buffer.wait_until_woken(subscription, deadline)):
                    return False
                continue
            if not (yield from self._is_delivery_expected(subscriptions, deadline)):
                return self.buffer.first(subscription) is not None
        return True

    def _is_delivery_expected(self, subscriptions: Sequence[Subscription], deadline: float | None) -> Flow[bool]:
        """Ask the broker whether a message is on its way to one of the subscriptions, or may soon be."""
        client = self.client
        replies: list[ConnectionStatus] = []
        signal = self.buffer.add_waiter(None)

        def on_reply(reply: ConnectionStatus) -> None:
            replies.append(reply)
            signal.set()

        link = client.link
        assert link is not None, "it is up"
        client.pending_requests.send_control_request(link, "connection", None, ConnectionStatus, on_reply)
        client.flush()
        try:
            in_time = yield Wait(signal, deadline)
        finally:
            self.buffer.remove_waiter(signal)
        if not in_time:
            return False
        if not replies:
            # The wait was ended by a message, or by the end of a consumer.
            return True
        statuses = {each.id: each for each in replies[0].subscriptions}
        is_expected = False
        for each in subscriptions:
            status = statuses.get(each.id)
            if status is None:
                continue
            is_expected |= status.held > len(each.held_by_ack_id) + len(each) + self.buffer.withheld_count
            is_expected |= status.idle in _TRANSIENT_IDLE_REASONS
        if is_expected and not any(map(len, subscriptions)):
            yield from self.buffer.wait_until_woken(None, client.clock() + DELIVERY_RECHECK_S)
        return is_expected

    def on_receive_interrupted(self, subscription: Subscription | None, messages: list[ReceivedMessage]) -> None:
        """Release the messages that an interrupted call was about to return. Also release messages that the call has
        pulled."""
        client = self.client
        self._undo_delivery(messages)
        transactions = self.transactions
        transaction = self.transaction
        if (
            transactions is not None
            and transaction is not None
            and any(each.transaction is transaction for each in messages)
        ):
            # The transaction's code has not seen this message, and must not commit it.
            transactions.mark_rollback_only(
                transaction, "a receive was interrupted after its message had joined the transaction"
            )
        pulled = [
            each
            for each in ([subscription] if subscription is not None else self.buffer.subscriptions)
            if each.pulls
            and (each.requested_count or len(each))
            and each.is_subscribe_sent
            and not self.buffer.has_waiter(each)
        ]
        if pulled:
            # Pulled messages may be on their way.
            client.subscriptions.release(pulled)
        client.flush()

    def _are_held(self, messages: Iterable[ReceivedMessage]) -> bool:
        """Return whether the program holds all these messages, and all have arrived on the current connection."""
        return all(
            each.state is ReceivedMessageState.HELD and self.client.subscriptions.is_current(each) for each in messages
        )

    def _is_overtaken(self, subscription: Subscription | None, messages: Iterable[ReceivedMessage]) -> bool:
        """Return whether a message has arrived that precedes one of these messages in the broker's order. Only
        truenext's order is known; for other brokers return False."""
        link = self.client.link
        first = self.buffer.first(subscription)
        if first is None or link is None or not link.is_truenext:
            return False
        return key_of(first) < max(map(key_of, messages))

    def _undo_delivery(self, messages: Iterable[ReceivedMessage]) -> None:
        """Release messages that the program was about to get."""
        held = [each for each in messages if each.state is ReceivedMessageState.HELD]
        for received in held:
            received.subscription.may_have_missed |= received.may_have_missed
            self._cancel_auto_ack(received)
        if held:
            self._release_all(held)
            self.buffer.on_settled([each for each in held if each.transaction is None])

    # ---- Settling ----

    def settle(self, received: ReceivedMessage, disposition: Disposition, owner: object = None) -> bool:
        """Settle a message. Return whether the socket has accepted all frames, except for an ACK that waits for the
        next receive. `owner` is the calling task or thread.

        Raises: LocalProtocolError if the message was settled already, or a transaction has acknowledged it; RolledBack
        if another task has ended its transaction
        """
        if received.state is not ReceivedMessageState.HELD:
            raise LocalProtocolError(f"{received!r} is settled already: acknowledged, nacked, rejected or released")
        if received.transaction is not None:
            self.require_transactions().check_may_settle(received, disposition)
        client = self.client
        link = client.context.link
        # Before CONNECTED the client does not know whether the broker is truenext.
        is_other = link is not None and link.is_up and not link.is_truenext
        if link is not None and is_other and not (disposition.is_acked or disposition.is_rejected):
            if disposition.delay_ms is not None:
                link.require_truenext("nack with a delay")
            # At another broker a NACK would make the message a dead letter.
            self.release(received, owner)
            return client.flush()
        if received.transaction is not None:
            self.require_transactions().settle(received, disposition, owner)
            return client.flush()
        self._cancel_auto_ack(received)
        client.subscriptions.settle(received, disposition)
        self.buffer.on_settled((received,))
        if self._can_ack_wait(received.subscription):
            client.flush_later()
            return True
        return client.flush()

    def _can_ack_wait(self, subscription: Subscription | None) -> bool:
        """Return whether an ACK is the only unwritten frame, and can be written with the report that the next message
        has started: one write for both."""
        return (
            self.transactions is None
            and self.client.subscriptions.has_waiting_ack
            and self.buffer.first(subscription) is not None
        )

    def release(self, received: ReceivedMessage, owner: object = None) -> None:
        """Release a message without an attempt, and the buffered messages of its consumer. `owner` is the calling task
        or thread."""
        if received.state is not ReceivedMessageState.HELD:
            return
        if received.transaction is not None:
            self.require_transactions().release(received, owner)
            return
        self._cancel_auto_ack(received)
        self._release_all([received])
        self.buffer.on_settled([received])
        self.client.flush()

    def on_handling_failed(self, received: ReceivedMessage, error: BaseException) -> None:
        """Settle a message whose processing has raised `error`: nack or release it, or roll back its transaction."""
        counted = counted_attempts_for(error)
        if self.transactions is not None:
            transaction = self.transactions.transaction
            if transaction is not None and transaction.outcome in (Outcome.OPEN, Outcome.ROLLBACK_ONLY):
                self.transactions.rollback(transaction.owner, counted=counted)
        elif received.state is ReceivedMessageState.HELD:
            if counted is CountedAttempts.ALL:
                self.settle(received, FAILED)
            else:
                self.release(received)

    def _release_all(self, messages: Sequence[ReceivedMessage]) -> None:
        """Release messages and the buffered messages of their consumers, in one step."""
        client = self.client
        current = [each for each in messages if client.subscriptions.is_current(each) and each.transaction is None]
        subscriptions = list(dict.fromkeys(each.subscription for each in current))
        if subscriptions:
            client.subscriptions.release(subscriptions, returning=current)
        for each in current:
            each.state = ReceivedMessageState.SETTLED
            each.subscription.held_by_ack_id.pop(each.ack_id, None)
        client.subscriptions.drop_unsettled([each for each in messages if each not in current])

    def _await_auto_ack(self, messages: Iterable[ReceivedMessage], owner: object) -> None:
        """Mode auto: record messages that `owner` is about to get. `owner` acknowledges them when it requests the next
        message. Call this last: an earlier record could let another task acknowledge them too early."""
        if self.mode is SessionMode.AUTO:
            self._awaiting_auto_ack.setdefault(owner, []).extend(messages)

    def _cancel_auto_ack(self, received: ReceivedMessage) -> None:
        """Mode auto: drop a message from the record of messages that wait for their acknowledgement."""
        for delivered in self._awaiting_auto_ack.values():
            if received in delivered:
                delivered.remove(received)

    def _auto_ack(self, owner: object, started: ReceivedMessage | None) -> None:
        """Mode auto: acknowledge the messages that `owner`, a task or thread, was given before. `started` is the
        message that `owner` gets now; its start is reported to the broker. None if `owner` gets none now. Messages of
        tasks and threads that have ended are acknowledged, too."""
        for other in [
            each for each in self._awaiting_auto_ack if each is not owner and self.client.context.has_owner_ended(each)
        ]:
            # An ended task requests nothing more, such as the one that `asyncio.wait_for` makes for each call.
            for received in self._awaiting_auto_ack.pop(other):
                self._acknowledge(received, None)
        delivered = self._awaiting_auto_ack.pop(owner, None)
        if not delivered:
            if started is not None:
                self.client.subscriptions.report_started(started)
            return
        last = delivered.pop()
        for received in delivered:
            self._acknowledge(received, None)
        self._acknowledge(last, started)

    def _acknowledge(self, received: ReceivedMessage, started: ReceivedMessage | None) -> None:
        if received.state is ReceivedMessageState.HELD:
            self.client.subscriptions.settle(received, ACKED, started)
            self.buffer.on_settled([received])
        elif started is not None:
            self.client.subscriptions.report_started(started)

    def settle_awaiting_auto_ack(self, disposition: Disposition | None) -> None:
        """Mode auto: settle all messages that wait for their acknowledgement. None releases them without an attempt."""
        delivered = [received for each in self._awaiting_auto_ack.values() for received in each]
        self._awaiting_auto_ack.clear()
        if disposition is None:
            held = [each for each in delivered if each.state is ReceivedMessageState.HELD]
            if held:
                self._release_all(held)
                self.buffer.on_settled(held)
        else:
            for received in delivered:
                if received.state is ReceivedMessageState.HELD:
                    self.settle(received, disposition)
        self.client.flush()

    # ---- In a transaction ----

    def require_transactions(self) -> SessionTransactions:
        """Return the transactions of the session.

        Raises: LocalProtocolError if the session is not transacted; ClosedError if the session was made for a handler
        that has returned
        """
        if self.transactions is None:
            raise LocalProtocolError("the session is not transacted: connection.session(transacted=True)")
        if self.is_expired:
            raise ClosedError(_EXPIRED_TEXT)
        return self.transactions

    def try_send(self, head: bytes, body: bytes, ttl_s: float | None, owner: object) -> bool:
        """Send in the transaction and return True, if that needs no wait; otherwise return False. This is the fast path
        of `send`."""
        client = self.client
        link = client.link
        transactions = self.require_transactions()
        if (
            self.is_closed
            or client.is_closing
            or link is None
            or not link.is_up
            or not transactions.is_ready()
            or (len(link.out_chunks) >= FLUSH_FRAMES and not client.flush())
        ):
            return False
        transactions.send(link, head, body, ttl_s, client.clock() if ttl_s is not None else 0.0, owner)
        client.flush_soon()
        return True

    def send(self, head: bytes, body: bytes, ttl_s: float | None, deadline: float | None, owner: object) -> Flow[None]:
        """Send a message in the transaction. The broker's answer is known only at the commit.

        Raises: RolledBack if the transaction was ended by anything but its own code; TimeoutError if the message cannot
        be written before the deadline
        """
        client = self.client
        called_at = client.clock()
        transactions = self.require_transactions()
        while True:
            yield from self._wait_until_ready()
            link = yield from client.wait_until_up(deadline, "send")
            if not (yield from client.wait_until_written(deadline)):
                raise TimeoutError("the broker has not confirmed earlier sends in time")
            if client.link is link and transactions.is_ready() and not self.is_closed:
                # Nothing has ended during the waits.
                break
        transactions.send(link, head, body, ttl_s, called_at, owner)
        client.flush_soon()

    def flush(self, deadline: float | None) -> Flow[None]:
        """Wait until the broker has processed all sends of the open transaction.

        Raises: RolledBack if a send was refused, with the refusal as its cause; TimeoutError at the deadline;
        LocalProtocolError if the session is not transacted
        """
        yield from self.require_transactions().flush(deadline)

    def commit(self, deadline: float | None, caller_number: CallerNumber | None = None) -> Flow[bool]:
        """Commit the transaction. Return True once the commit is durable. Return False if `caller_number` was used
        before; then the transaction has no effect.

        Raises: RolledBack if the transaction has no effect for another reason; InDoubt if the outcome is not known
        before the deadline; LocalProtocolError if `caller_number` is given and there is nothing to commit
        """
        transactions = self.require_transactions()
        transaction = transactions.transaction
        if transaction is None:
            self.check_open()
            if caller_number is not None:
                raise LocalProtocolError(
                    "the transaction is empty, so it cannot be committed under a number: send or receive a "
                    "message first"
                )
            return True
        return (yield from self._commit(transactions, transaction, deadline, caller_number))

    def _commit(
        self,
        transactions: SessionTransactions,
        transaction: TransactionState,
        deadline: float | None,
        caller_number: CallerNumber | None,
    ) -> Flow[bool]:
        if any(each.transaction is transaction for each in self._pending_by_owner.values()):
            transactions.mark_rollback_only(transaction, "a receive of one of the transaction's messages was cancelled")
        return (yield from transactions.commit(transaction, deadline, caller_number))

    def expire(self) -> None:
        """Refuse all later calls of this session, because it was made for one call of a handler, which has ended."""
        self.is_closed = self.is_expired = True

    def commit_and_expire(self, deadline: float | None) -> Flow[None]:
        """Commit the transaction that the handler has left open, and refuse all later calls of this session. So code
        that outlives the handler adds nothing to another message's transaction.

        Raises: RolledBack if the transaction had no effect; InDoubt if its outcome is not known
        """
        transactions = self.require_transactions()
        self.expire()
        transaction = transactions.transaction
        if transaction is None:
            # The handler has ended the transaction itself.
            self.client.check_open()
        else:
            yield from self._commit(transactions, transaction, deadline, None)

    def rollback(self, owner: object, *, counted: CountedAttempts) -> None:
        """Roll back. The messages of the transaction and the buffered messages are released in one step.

        Raises: LocalProtocolError if the session is not transacted, or a commit is under way
        """
        self.require_transactions().rollback(owner, counted=counted)

    def mark_failed(self, received: ReceivedMessage) -> None:
        """Mark a message as a cause of the transaction's failure.

        Raises: LocalProtocolError if the message does not belong to the transaction
        """
        self.require_transactions().mark_failed(received)

    # ---- The end ----

    def free_for_next_session(self) -> None:
        """Make the producer of an expired session free for the next session."""
        self._has_ended = True
        if self.transactions is not None:
            self.transactions.free_producer()

    def end(self, owner: object) -> None:
        """End the session: roll back without an attempt. Its buffer stays usable for other sessions."""
        transactions = self.transactions
        if transactions is not None:
            transactions.close(owner)
        if self._has_ended:
            return
        self.is_closed = self._has_ended = True
        self.settle_awaiting_auto_ack(None)
        if transactions is not None:
            transactions.free_producer()
        self.buffer.wake_all()
        self.client.flush()

    def close(self, owner: object) -> None:
        """End the session, and unsubscribe its consumers. A shared buffer is closed instead: then all its sessions get
        no more messages, and finish their work.

        Raises: ClosedError if the session was made for a handler that has returned
        """
        if self.is_expired:
            raise ClosedError(_EXPIRED_TEXT)
        self.end(owner)
        if self.buffer.is_shared:
            self.buffer.is_closed = True
            self.buffer.wake_all()
            return
        for subscription in list(self.buffer.subscriptions):
            self.client.subscriptions.unsubscribe(subscription)
        self.client.flush()


def _consumer_closed_text(subscription: Subscription) -> str:
    return f"the consumer of {subscription.options.destination} is closed: subscribe again"


PULLED_MAX = 1000
"""Largest number of messages that one pull request requests."""

_TRANSIENT_IDLE_REASONS = frozenset({"", "reading", "scanning", "committing", "joining", "unread"})
"""Values of `idle` after which a message may come soon: no reason, or one that ends soon. Source:
docs/reference/control.md, `idle`"""
