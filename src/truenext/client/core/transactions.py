"""Transactions of a session, one after the other: begin, contents, commit, rollback."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

import msgspec

from truenext.client.core import frames
from truenext.client.core.buffer import ReceiveBuffer, ReceivedMessage, ReceivedMessageState
from truenext.client.core.client import Client
from truenext.client.core.disposition import CountedAttempts, Disposition
from truenext.client.core.link import UNANSWERED_FRAMES_MAX, AnswerHandler, Link
from truenext.client.core.pending_requests import ProducerStatus, encode_control_request
from truenext.client.core.send_buffer import NO_SPACE_RETRY_S
from truenext.client.core.send_options import ttl_line
from truenext.client.core.transaction_state import (
    ENDED_OUTCOMES,
    BeginAnswerHandler,
    CallerNumber,
    CommitAnswerHandler,
    Outcome,
    ProducerNumbers,
    TransactionState,
)
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import Code, ConnectionLost, InDoubt, LocalProtocolError, Refused, RolledBack

_QUEUE_SEND_PREFIX, _PERSISTENT_LINE = b"SEND\ndestination:/queue/", b"\npersistent:true\n"
_OUTCOME_TIMEOUT_TEXT = "the outcome of the transaction could not be found out in time"
CANCELLED_COMMIT_S = 5.0
"""Seconds that an interrupted commit waits for its outcome."""


class SessionTransactions(msgspec.Struct, eq=False):
    _client: Client
    _buffer: ReceiveBuffer
    """Receive buffer of the session. A rollback releases its messages."""
    _producer: ProducerNumbers
    _acknowledges_at_commit: bool
    """True: messages are acknowledged by the commit. False: each message is acknowledged when the program gets it."""
    transaction: TransactionState | None = None
    """Current transaction: it is open, its outcome is not known, or its code has not ended. None if there is none."""
    last_ended: TransactionState | None = None
    _block: ref[object] | None = None
    """Transaction block of the program that runs now, as a weak reference. None outside of blocks."""
    _begin_retry_at: float = 0.0
    """Time before which no transaction begins, because the broker had no space for the last transaction. 0 if the
    broker had space."""

    # ---- Begin ----

    def is_ready(self) -> bool:
        """Return whether a transaction is open, or can begin without a wait."""
        transaction = self.transaction
        if transaction is None:
            return not self._begin_retry_at and not self._is_commit_number_uncertain
        return transaction.outcome is Outcome.OPEN

    def check_not_rolled_back(self) -> None:
        """Check that the transaction is not rollback-only. Raises: RolledBack if it is"""
        transaction = self.transaction
        if transaction is not None and transaction.outcome is Outcome.ROLLBACK_ONLY:
            raise transaction.rolled_back_error()

    def wait_until_ready(self) -> Flow[None]:
        """Wait until a transaction is open or can begin.

        Raises: RolledBack if the transaction was ended by anything but its own code; InDoubt if the outcome of the
        previous commit cannot be found out
        """
        transaction = self.transaction
        if transaction is not None and transaction.outcome not in (Outcome.OPEN, Outcome.ROLLBACK_ONLY):
            # Another task commits, or a commit was cancelled or timed out: its outcome is needed first. A caller that
            # is cancelled here has not committed anything, and waits no longer.
            yield Wait(transaction.resolved)
            self._check_resolved(transaction)
            self._finish_and_clear(transaction)
        elif transaction is None and self._begin_retry_at:
            yield Wait(Signal(), self._begin_retry_at)
            self._begin_retry_at = 0.0
        while self.transaction is None and self._is_commit_number_uncertain:
            yield from self._request_commit_number()
        self.check_not_rolled_back()

    @property
    def _is_commit_number_uncertain(self) -> bool:
        """Whether a crash of the broker may have lost the last numbers, because the transactions with these numbers had
        nothing persistent.
        Source: docs/contract.md, "In doubt"
        """
        producer = self._producer
        if producer.last_number == producer.last_durable_number:
            return False
        link = self._client.link
        return (
            link is not None
            and link.is_up
            and link.number != producer.link_number
            and link.store_id == producer.store_id
        )

    def _request_commit_number(self) -> Flow[None]:
        """Ask the broker for the highest COMMIT number that it knows from this producer.

        Raises: ClosedError if the program has closed the connection; the error that ended the connection for good
        """
        client, producer = self._client, self._producer
        link = client.link
        assert link is not None, "it is asked"
        head, body = encode_control_request("producer", {"producer": producer.name})
        try:
            frame = yield from client.send_request(head, body, None)
        except ConnectionLost:
            return
        except Refused:
            # Then the broker's answer to the COMMIT says whether its number may be used.
            producer.link_number = link.number
            return
        status = msgspec.json.decode(frame.body, type=ProducerStatus)
        if client.link is link and producer.link_number != link.number and self.transaction is None:
            producer.set_last_number(status.commits, link.number)

    def _get_or_open(self, link: Link, owner: object) -> TransactionState:
        transaction = self.transaction
        if transaction is None:
            transaction = self.transaction = TransactionState(
                self._client.context.next_unique_name(), link.number, owner
            )
            self._client.transactions[transaction] = None
        return transaction

    def _begin(self, transaction: TransactionState, link: Link) -> None:
        """Send BEGIN, unless it was sent before."""
        if transaction.has_begun:
            return
        transaction.has_begun = True
        headers = {"transaction": transaction.name}
        if len(link.unanswered) > UNANSWERED_FRAMES_MAX:
            # If transactions are only rolled back, no COMMIT requests a receipt.
            headers["receipt"] = link.next_receipt_id
        link.write_tracked(frames.encode_frame("BEGIN", headers), BeginAnswerHandler(transaction))

    # ---- Blocks ----

    def enter_block(self, block: object) -> None:
        """Record that the code of a transaction block starts.

        Raises: LocalProtocolError if the session is inside another block
        """
        if self._block is not None:
            if self._block() is not None:
                raise LocalProtocolError(
                    "the session is in the block of a transaction already: use another session for this block"
                )
            # Ctrl-C interrupted the start or the end of that block, and its object is gone.
            if self.transaction is not None:
                self.close(self.transaction.owner)
        if self.transaction is not None and self.transaction.outcome in ENDED_OUTCOMES:
            # The transaction is older than the block: its code was cancelled or got InDoubt; its outcome came later.
            self._finish_and_clear(self.transaction)
        self._block = ref(block)

    def exit_block(self) -> None:
        self._block = None

    def is_in_block(self, block: object) -> bool:
        """Return whether the code of this block is running."""
        return self._block is not None and self._block() is block

    @property
    def undecided_transaction(self) -> TransactionState | None:
        """Transaction whose COMMIT was sent, and whose outcome is not known. None if there is none."""
        transaction = self.transaction
        if transaction is not None and transaction.outcome in (Outcome.COMMITTING, Outcome.IN_DOUBT):
            return transaction
        return None

    # ---- Contents ----

    def deliver(self, received: ReceivedMessage, link: Link, owner: object) -> None:
        """Add a message that the program gets now to the transaction."""
        transaction = self._get_or_open(link, owner)
        received.transaction = transaction
        transaction.delivered_messages.append(received)
        if not transaction.is_durable:
            transaction.is_durable = received.persistent and received.subscription.options.destination.startswith(
                "/queue/"
            )
        if self._acknowledges_at_commit:
            self._client.subscriptions.hold(received)
        else:
            self._begin(transaction, link)
            self._acknowledge(received, transaction, link)

    def _acknowledge(self, received: ReceivedMessage, transaction: TransactionState, link: Link) -> None:
        transaction.has_settled_messages = True
        link.write_tracked(frames.encode_ack_in_transaction(transaction.name, received.ack_id), transaction)

    def _nack(self, messages: Iterable[ReceivedMessage], transaction: TransactionState, link: Link) -> None:
        for received in messages:
            self._begin(transaction, link)
            transaction.has_settled_messages = True
            link.write_tracked(
                frames.encode_frame("NACK", {"id": received.ack_id, "transaction": transaction.name}),
                transaction,
            )

    def send(self, link: Link, head: bytes, body: bytes, ttl_s: float | None, called_at: float, owner: object) -> None:
        """Write a SEND in the transaction. The broker's answer is known only at the commit."""
        ttl = ""
        if ttl_s is not None:
            link.require_truenext("a ttl")
            ttl = ttl_line(ttl_s - (self._client.clock() - called_at))
        transaction = self._get_or_open(link, owner)
        self._begin(transaction, link)
        if not transaction.is_durable:
            transaction.is_durable = _PERSISTENT_LINE in head and head.startswith(_QUEUE_SEND_PREFIX)
        lines = f"{ttl}transaction:{transaction.name}\ncontent-length:{len(body)}\n\n".encode()
        transaction.last_send_frame = link.write_tracked(b"".join((head, lines, body, b"\0")), transaction)

    def flush(self, deadline: float | None) -> Flow[None]:
        """Wait until the broker has processed all sends of the transaction.

        Raises: RolledBack if a send was refused, with the refusal as its cause; TimeoutError at the deadline
        """
        self.check_not_rolled_back()
        transaction, link = self.transaction, self._client.link
        if (
            transaction is None
            or link is None
            or link.number != transaction.link_number
            or transaction.last_send_frame not in link.unanswered
        ):
            return
        answered = link.answer_signal(transaction.last_send_frame)
        self._client.flush()
        in_time = yield Wait(answered, deadline)
        if transaction.outcome in (Outcome.ROLLBACK_ONLY, Outcome.ROLLED_BACK):
            raise transaction.rolled_back_error()
        if not in_time:
            raise TimeoutError("the broker has not confirmed all sends of the transaction in time")

    def mark_failed(self, received: ReceivedMessage) -> None:
        """Mark a message as a cause of the transaction's failure.

        Raises: LocalProtocolError if the message does not belong to the transaction
        """
        transaction = self.transaction
        if transaction is None or received.transaction is not transaction:
            raise LocalProtocolError(f"{received!r} is not a message of this transaction")
        transaction.failed_messages[received] = None

    # ---- Commit ----

    def commit(
        self, transaction: TransactionState, deadline: float | None, caller_number: CallerNumber | None
    ) -> Flow[bool]:
        """Commit the transaction. Return True once the commit is durable. Return False if `caller_number` was used
        before; then the transaction has no effect.

        Raises: RolledBack if the transaction has no effect for another reason; InDoubt if the outcome is not known
        before the deadline
        """
        if transaction.outcome is Outcome.ROLLBACK_ONLY:
            self._finish_and_clear(transaction)
            raise transaction.rolled_back_error()
        if transaction.outcome is Outcome.OPEN:
            self._send_commit(transaction, caller_number)
        yield from self._await_outcome(transaction, deadline)
        self._finish_and_clear(transaction)
        if transaction.outcome is Outcome.ROLLED_BACK:
            raise transaction.rolled_back_error()
        if transaction.outcome is Outcome.UNKNOWN:
            raise _in_doubt_error(transaction, "the broker does not know the outcome of the transaction")
        return transaction.outcome is Outcome.COMMITTED

    def _send_commit(self, transaction: TransactionState, caller_number: CallerNumber | None) -> None:
        client = self._client
        link = client.link
        assert link is not None, "it would be doomed"
        if transaction.failed_messages:
            link.require_truenext("a commit after a message has failed")
        if caller_number is not None:
            link.require_truenext("commit(producer=..., number=...)")
        self._begin(transaction, link)
        if self._acknowledges_at_commit:
            for received in transaction.delivered_messages:
                received.subscription.held_by_ack_id.pop(received.ack_id, None)
                if received not in transaction.failed_messages:
                    self._acknowledge(received, transaction, link)
        # A failed message is nacked by the commit.
        self._nack(transaction.failed_messages, transaction, link)
        if transaction.failed_messages:
            # The transaction may contain only failed messages.
            transaction.is_durable = False
        headers = {"transaction": transaction.name}
        if link.is_truenext:
            transaction.caller_number = caller_number
            name, number = caller_number or self._next_commit_number(transaction, link)
            headers |= {
                "truenext-producer": name,
                "truenext-number": str(number),
                "truenext-gapless": "true",
                # If the COMMIT is a repeat, the work was done before: only nacked messages have failed.
                "truenext-count-attempts": "nacked",
            }
        headers["receipt"] = link.next_receipt_id
        transaction.outcome = Outcome.COMMITTING
        link.write_tracked(frames.encode_frame("COMMIT", headers), CommitAnswerHandler(transaction))
        client.flush()

    def _next_commit_number(self, transaction: TransactionState, link: Link) -> tuple[str, int]:
        producer = self._producer
        if producer.is_retired or producer.store_id not in ("", link.store_id):
            # A new producer: after a return to the first broker, numbers used here would count as repeats.
            producer = self._producer = self._client.make_producer()
        producer.store_id = link.store_id
        producer.link_number = link.number
        transaction.producer = producer
        transaction.commit_number = producer.last_number = producer.last_number + 1
        return producer.name, transaction.commit_number

    def _await_outcome(self, transaction: TransactionState, deadline: float | None) -> Flow[None]:
        try:
            in_time = yield Wait(transaction.resolved, deadline)
        except GeneratorExit:
            raise
        except BaseException:
            # The outcome is worth a short wait even though the caller was interrupted, also over a reconnect. A second
            # interruption ends the wait.
            if not transaction.resolved.is_set:
                self._finish_when_resolved(transaction)
                latest = self._client.clock() + CANCELLED_COMMIT_S
                yield Wait(transaction.resolved, latest if deadline is None else min(latest, deadline))
            if transaction.resolved.is_set:
                # The outcome may also have come before the interruption.
                self._finish_and_clear(transaction)
            raise
        if not in_time:
            self._finish_when_resolved(transaction)
            raise _in_doubt_error(transaction, _OUTCOME_TIMEOUT_TEXT)
        self._check_resolved(transaction)

    def _check_resolved(self, transaction: TransactionState) -> None:
        """Check that the outcome of a commit is known.

        Raises: InDoubt if the outcome is unknown because the connection has ended for good
        """
        if transaction.outcome is Outcome.IN_DOUBT:
            self._finish_when_resolved(transaction)
            raise _in_doubt_error(transaction, _OUTCOME_TIMEOUT_TEXT)

    # ---- Rollback ----

    def rollback(self, owner: object, *, counted: CountedAttempts) -> None:
        """Roll back. The messages of the transaction and the buffered messages are released in one step.

        Raises: LocalProtocolError if a commit is under way
        """
        transaction = self.transaction
        if transaction is None:
            self._client.subscriptions.release_buffered(self._buffer.subscriptions)
            self._client.flush()
            return
        if transaction.outcome is Outcome.OPEN:
            self._abort(transaction, counted)
            self._on_aborted(transaction, owner, "another task has rolled back or closed the session")
            return
        if transaction.outcome in (Outcome.COMMITTING, Outcome.IN_DOUBT):
            raise LocalProtocolError(
                "the transaction is being committed, and cannot be rolled back: wait for the commit"
            )
        if transaction.owner is owner or self._client.context.has_owner_ended(transaction.owner):
            self._finish_and_clear(transaction)

    def _on_aborted(self, transaction: TransactionState, owner: object, reason: str) -> None:
        """End a transaction for which ABORT was sent. If another task has aborted it, only mark it: its own code gets
        RolledBack."""
        if transaction.owner is owner or self._client.context.has_owner_ended(transaction.owner):
            transaction.outcome = Outcome.ROLLED_BACK
            self._finish_and_clear(transaction)
        else:
            # Its own code has not noticed yet.
            transaction.outcome = Outcome.ROLLBACK_ONLY
            transaction.rollback_cause = RolledBack(reason)
            self._buffer.wake_all()

    def mark_rollback_only(self, transaction: TransactionState, reason: str) -> None:
        """Abort the transaction if it is open. The code of the transaction gets RolledBack at its next call."""
        if transaction.outcome is Outcome.OPEN:
            self._abort(transaction, CountedAttempts.NONE)
            transaction.mark_rollback_only(RolledBack(reason))

    def _abort(self, transaction: TransactionState, counted: CountedAttempts, *, releases: bool = True) -> None:
        """Send ABORT, and a NACK for each message whose attempt counts.

        With `releases`, also release the other messages of the transaction, and the messages that the session has
        buffered.
        """
        client = self._client
        link = client.link
        if link is None or link.number != transaction.link_number:
            return
        counts_all = counted is CountedAttempts.ALL and not transaction.failed_messages
        if link.is_truenext and counted is not CountedAttempts.NONE:
            # Without a NACK, a message that the transaction has not acknowledged would return without an attempt.
            is_all = counts_all and self._acknowledges_at_commit
            self._nack(transaction.delivered_messages if is_all else transaction.failed_messages, transaction, link)
        subscriptions = [each for each in self._buffer.subscriptions if not each.is_closed]
        begun = transaction if transaction.has_begun and not transaction.is_begin_refused else None
        if begun is not None and not transaction.has_settled_messages:
            # The BEGIN may yet be refused for lack of space: then there is nothing to abort.
            link.write_tracked(frames.encode_frame("ABORT", {"transaction": transaction.name}), AnswerHandler())
            begun = None
        if releases and (subscriptions or transaction.delivered_messages):
            client.subscriptions.release(
                subscriptions, returning=transaction.delivered_messages, transaction=begun, counts_all=counts_all
            )
        for received in transaction.delivered_messages:
            received.subscription.held_by_ack_id.pop(received.ack_id, None)
        client.flush()

    # ---- Settling messages that are not acknowledged yet ----

    def check_may_settle(self, received: ReceivedMessage, disposition: Disposition) -> None:
        """Check that `disposition` is possible for a message of a transaction.

        Raises: LocalProtocolError if it is not possible; RolledBack if another task has ended the transaction
        """
        transaction = received.transaction
        assert isinstance(transaction, TransactionState), "a transaction has it"
        if disposition.is_acked or not self._acknowledges_at_commit:
            raise LocalProtocolError(
                f"{received!r} belongs to a transaction: commit or roll back the transaction, or nack the message"
            )
        if _was_rolled_back_by_other(transaction):
            raise transaction.rolled_back_error()
        if transaction.outcome not in (Outcome.OPEN, Outcome.ROLLBACK_ONLY):
            raise LocalProtocolError(
                f"{received!r} belongs to a transaction that is being committed, and cannot be settled now"
            )

    def settle(self, received: ReceivedMessage, disposition: Disposition, owner: object) -> None:
        """Nack or reject one message of the transaction, and roll back. The other messages count no attempt. If the
        connection was lost, the disposition applies to the message's redelivery."""
        transaction = self.transaction
        assert transaction is not None and transaction is received.transaction, "it was checked"
        transaction.delivered_messages.remove(received)
        transaction.failed_messages.pop(received, None)
        received.transaction = None
        is_open = transaction.outcome is Outcome.OPEN
        if is_open:
            # Without other messages the nack below releases the buffered messages.
            self._abort(transaction, CountedAttempts.NONE, releases=bool(transaction.delivered_messages))
        elif transaction.owner is owner:
            self._finish_and_clear(transaction)
        self._client.subscriptions.settle(received, disposition)
        self._buffer.on_settled((received,))
        if is_open:
            self._on_aborted(transaction, owner, "another task has nacked a message of the transaction")

    def release(self, received: ReceivedMessage, owner: object) -> None:
        """Roll back without an attempt. If the message is acknowledged in the transaction already, do nothing."""
        transaction = received.transaction
        assert isinstance(transaction, TransactionState), "a transaction has it"
        is_open = transaction.outcome in (Outcome.OPEN, Outcome.ROLLBACK_ONLY) and not _was_rolled_back_by_other(
            transaction
        )
        if self._acknowledges_at_commit and is_open:
            self.rollback(owner, counted=CountedAttempts.NONE)

    # ---- End ----

    def _finish_and_clear(self, transaction: TransactionState) -> None:
        self._finish(transaction)
        if self.transaction is transaction:
            self.transaction = None

    def _finish_when_resolved(self, transaction: TransactionState) -> None:
        """Finish a transaction as soon as its outcome is known. The transaction's code has stopped waiting, but the
        next call of the session waits for the outcome."""
        if transaction.outcome in ENDED_OUTCOMES:
            self._finish(transaction)
        else:
            transaction.resolved.add_callback(lambda: self._finish(transaction))

    def _finish(self, transaction: TransactionState) -> None:
        """Finish a transaction. Its messages are settled after a commit; otherwise they return to the broker."""
        client = self._client
        if transaction not in client.transactions:
            return
        if isinstance(transaction.rollback_cause, Refused) and transaction.rollback_cause.code == Code.NO_SPACE:
            self._begin_retry_at = client.clock() + NO_SPACE_RETRY_S
        if transaction.outcome is Outcome.ROLLBACK_ONLY:
            # After a lost connection the broker has its messages already.
            if (
                client.link is not None
                and client.link.number == transaction.link_number
                and not _was_rolled_back_by_other(transaction)
            ):
                self._abort(transaction, CountedAttempts.NONE)
            transaction.outcome = Outcome.ROLLED_BACK
        elif transaction.outcome is Outcome.ROLLED_BACK and transaction.is_commit_refused:
            self._abort(transaction, CountedAttempts.NONE)
        committed = transaction.outcome is Outcome.COMMITTED
        returning = []
        for received in transaction.delivered_messages:
            if committed and received not in transaction.failed_messages:
                client.subscriptions.forget_orphaned(received)
                received.state = ReceivedMessageState.SETTLED
            else:
                returning.append(received)
        client.subscriptions.drop_unsettled(returning)
        self._buffer.on_settled(transaction.delivered_messages)
        self.last_ended = transaction
        del client.transactions[transaction]
        client.flush()

    def close(self, owner: object) -> None:
        """Roll back an open transaction without an attempt."""
        transaction = self.transaction
        if transaction is not None and transaction.outcome in (Outcome.OPEN, Outcome.ROLLBACK_ONLY):
            self.rollback(owner, counted=CountedAttempts.NONE)

    def free_producer(self) -> None:
        """Make the producer free for another session, unless one of its COMMITs is in doubt."""
        if self.undecided_transaction is None:
            self._client.free_producer(self._producer)


def _was_rolled_back_by_other(transaction: TransactionState) -> bool:
    """Return whether another task has rolled the transaction back before its own code has noticed."""
    return transaction.outcome is Outcome.ROLLBACK_ONLY and isinstance(transaction.rollback_cause, RolledBack)


def _in_doubt_error(transaction: TransactionState, reason: str) -> InDoubt:
    error = InDoubt(reason, transaction.token)
    error.__cause__ = transaction.rollback_cause
    return error
