"""BEGIN, COMMIT and ABORT: opens and ends transactions. Source: docs/contract.md."""

from __future__ import annotations

from truenext.engine.commands.acknowledging import Acknowledging
from truenext.engine.commands.sending import Sending
from truenext.engine.lifecycle.arrivals import Arrivals
from truenext.engine.lifecycle.settlement import Settlement, by_queue
from truenext.engine.queues.queues import Queues
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.queue import Queue, RequeueReason
from truenext.engine.state.transaction import (
    BrokerTransaction,
    TransactionLimits,
    are_any_stored,
    rollback_only_error,
    send_count,
)
from truenext.engine.writing.engine_state import EngineState
from truenext.engine.writing.entries import NO_CONTENTS
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Abort, Begin, Commit, Send
from truenext.model.schedule import Schedule


class Transactions:
    def __init__(
        self,
        state: EngineState,
        queues: Queues,
        arrivals: Arrivals,
        settlement: Settlement,
        sending: Sending,
        acknowledging: Acknowledging,
        limits: TransactionLimits,
    ) -> None:
        self._commit_state = state.commit_state
        self._memory = state.memory
        self._queues = queues
        self._arrivals = arrivals
        self._settlement = settlement
        self._producers_of = state.producers_of
        self._sending = sending
        self._acknowledging = acknowledging
        self._limits = limits

    def begin(self, session: ConnectionState, command: Begin) -> None:
        """Open a transaction.

        Raises: RemoteProtocolError if the name is in use, or the connection has too many open transactions.
        """
        session.transactions.begin(command.transaction, self._limits, counts_all=command.counts_all)

    def commit(self, session: ConnectionState, commit: Commit) -> None:
        """Commit a transaction. If the COMMIT is a repeat and the transaction is open, the transaction is aborted
        instead.

        Raises: RemoteProtocolError if the transaction is rollback-only, the COMMIT's number may not be used, the COMMIT
        would make too many copies, or a consumer does not hold a message of `commit.acks`; also if the transaction is
        not open, unless the COMMIT is a repeat.
        """
        transaction = session.transactions.get(commit.transaction)
        if transaction is not None and transaction.is_rollback_only:
            raise rollback_only_error(commit.transaction, transaction)
        if commit.producer is not None and self._sending.is_repeat(session, commit):
            if transaction is not None:
                self.abort_open(session, commit.transaction, counts_all=commit.counts_all)
            return
        if transaction is None:
            raise RemoteProtocolError(
                f"transaction {commit.transaction!r} is not open: "
                "it was rolled back, or committed under another number",
                Code.NO_TRANSACTION if commit.producer is None else Code.ROLLED_BACK,
            )
        # All that can raise comes first: from here on the COMMIT is executed as a whole.
        kept = self._acknowledging.find_kept(session, commit.acks) if commit.acks else []
        queues = self._queues
        sends = [self._sending.with_ttl(send) if send.ttl_ms else send for send in transaction.sends]
        queues_of_sends: list[list[Queue]] = []
        copies = 0
        # Found once for all sends to one queue.
        by_name: dict[str, list[Queue]] = {}
        for send in sends:
            if send.schedule is not None:
                queues.create_for_schedule(send.destination, queues.ensure_if_connected)
                queues_of_sends.append([])
                continue
            destination = send.destination
            if destination.is_multi_queue:
                found = queues.queues_for(send, queues.ensure_if_connected)
                copies += len(found) * send_count(send)
                self._sending.check_copies(copies)
            elif destination.name in by_name:
                found = by_name[destination.name]
            else:
                found = by_name[destination.name] = queues.queues_for(send, queues.ensure_if_connected)
            queues_of_sends.append(found)
        self._end(session, commit.transaction)
        acknowledged = transaction.acknowledged()
        if kept:
            acknowledged += self._acknowledging.take_kept(kept)
        is_stored = are_any_stored(acknowledged) or any(
            send.message.persistent and (send.schedule is not None or not all(queue.is_temporary for queue in each))
            for each, send in zip(queues_of_sends, sends, strict=True)
        )
        batch = self._commit_state.batch.number if is_stored else 0
        scheduled: list[tuple[Send, Schedule]] = []
        for each, send in zip(queues_of_sends, sends, strict=True):
            if send.schedule is not None:
                scheduled.append((send, send.schedule))
                continue
            contents = NO_CONTENTS if len(each) < 2 else self._arrivals.share_content(send.message, each)
            for queue in each:
                self._arrivals.accept(queue, send.message, batch, contents)
        # After the others, whose sequences are one block.
        for send, schedule in scheduled:
            self._sending.schedule(send.destination, send.message, schedule)
        for entry in acknowledged:
            self._settlement.acknowledge(entry)
            if entry.group:
                # The group of a suspended consumer may be free now.
                self._commit_state.touched_queues[entry.lane.queue] = None
        nacked = transaction.nacked()
        for entry in by_queue(nacked):
            self._settlement.fail(entry, RequeueReason.NACKED, transaction.nacks[entry.sequence])
        if commit.producer is not None:
            self._producers_of(session).record_use(commit, is_stored=is_stored)
        if is_stored or nacked:
            session.last_batch = max(session.last_batch, self._commit_state.latest_batch)
        else:
            for send in sends:
                queues.await_introduction(session, send.destination)

    def abort(self, session: ConnectionState, abort: Abort) -> None:
        """Abort an open transaction.

        Raises: RemoteProtocolError if the transaction is not open.
        """
        session.transaction_to_abort(abort.transaction)
        self.abort_open(session, abort.transaction, counts_all=abort.counts_all)

    def abort_open(self, session: ConnectionState, name: str, *, counts_all: bool) -> None:
        """Abort an open transaction, and requeue the messages that the transaction holds. An attempt counts for nacked
        messages. For acknowledged messages it counts if both `counts_all` and the transaction's BEGIN say so."""
        transaction = self._end(session, name)
        counts_all = counts_all and transaction.counts_all
        for entry in by_queue(transaction.acknowledged()):
            if counts_all:
                self._settlement.fail(entry, RequeueReason.ABORTED)
            else:
                self._settlement.requeue(entry, RequeueReason.RELEASED)
        for entry in by_queue(transaction.nacked()):
            self._settlement.fail(entry, RequeueReason.ABORTED)
        if transaction.held:
            session.last_batch = max(session.last_batch, self._commit_state.latest_batch)

    def _end(self, session: ConnectionState, name: str) -> BrokerTransaction:
        transaction = session.transactions.end(name)
        self._memory.transaction_bytes -= transaction.total_bytes
        if transaction.reserved_queues:
            self._queues.free_reserved(transaction.reserved_queues)
        return transaction

    def abort_uncounted(self, session: ConnectionState) -> None:
        """Abort the connection's transactions that would count no attempt if the connection were lost."""
        for name, transaction in list(session.transactions.items()):
            if not transaction.counts_any():
                self.abort_open(session, name, counts_all=False)

    def mark_rollback_only(
        self, session: ConnectionState, name: str, refusal: RemoteProtocolError | None = None
    ) -> None:
        """Mark a transaction as rollback-only, because one of its frames was refused. Does nothing if it is not
        open."""
        transaction = session.transactions.get(name)
        if transaction is not None:
            transaction.is_rollback_only = True
            if session.is_jms_client and refusal is not None:
                # A send in a transaction is not answered: its COMMIT is the first to say what was wrong.
                transaction.refusal = transaction.refusal or str(refusal)
                transaction.refusal_code = transaction.refusal_code or refusal.code

    def abort_all(self, session: ConnectionState, reason: RequeueReason) -> None:
        """End all transactions of a connection that ends, and requeue their messages. Nacked messages are requeued for
        `reason`, and so are acknowledged messages of a transaction with `counts_all`. All others are released."""
        for name in list(session.transactions):
            transaction = self._end(session, name)
            for entry in transaction.acknowledged():
                if reason is RequeueReason.LOST and not entry.attempts:
                    entry.was_lost = True
                self._settlement.requeue(entry, reason if transaction.counts_all else RequeueReason.RELEASED)
            for entry in transaction.nacked():
                self._settlement.requeue(entry, reason)
