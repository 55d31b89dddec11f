"""Commands ACK, NACK and Started: settle messages that a consumer holds, and mark dispatches as started. Source:
docs/contract.md."""

from __future__ import annotations

from collections.abc import Iterable

from truenext.engine.lifecycle.settlement import Settlement, by_queue
from truenext.engine.queues.queues import Queues
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.queue import STARTED, Entry, RequeueReason
from truenext.engine.state.transaction import BrokerTransaction, TransactionLimits, nack_count
from truenext.engine.writing.engine_state import EngineState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Ack, AckMode, AckRun, Nack, Started

_INDIVIDUAL = AckMode.INDIVIDUAL


class Acknowledging:
    def __init__(
        self,
        state: EngineState,
        queues: Queues,
        settlement: Settlement,
        limits: TransactionLimits,
    ) -> None:
        self._commit_state = state.commit_state
        self._memory = state.memory
        self._events = state.commit_state.events
        self._clients = state.clients
        self._queues = queues
        self._settlement = settlement
        self._limits = limits

    def acknowledge(self, session: ConnectionState, ack: Ack) -> None:
        """Acknowledge the messages that an ACK covers, at once or in a transaction.

        Raises: RemoteProtocolError if the consumer does not hold the message, or the transaction is not open, is
        rollback-only or reaches a limit.
        """
        consumer = session.consumer_of(ack.subscription, ack.sequence, ack.dispatch)
        started = ack.started
        if started is not None:
            is_the_same = started.subscription == ack.subscription and session.is_truenext_client
            next_one = consumer.held.get(started.sequence) if is_the_same else None
            if next_one is not None and started.dispatch in (0, next_one.deliveries):
                # The usual case: the same subscription, so the consumer need not be looked up again.
                next_one.start_state = STARTED
                self._events.started(next_one, consumer)
            else:
                self.mark_started(session, started)
        queue = consumer.queue
        if queue is not None:
            self._commit_state.touched_queues[queue] = None
        else:
            self._touch(consumer)
        if consumer.auto_window is not None:
            consumer.auto_window.settled_count += 1
        if consumer.has_express:
            self._clients.express_ack_count += 1
            consumer.last_ack_number = self._clients.express_ack_count
        if ack.transaction is None and consumer.mode is _INDIVIDUAL:
            # A shortcut for the usual case: the general way below would build lists.
            entry = consumer.held.pop(ack.sequence)
            entry.lane.queue.counts.acknowledged += 1
            events = self._events
            if queue is not None and events.acknowledging_queue is queue:
                events.block_entries.append(entry)
            else:
                events.acknowledged(entry)
            if self._settlement.complete(entry):
                session.last_batch = self._commit_state.batch.number
            return
        covered = consumer.covered_sequences(ack.sequence)
        if ack.transaction is not None:
            transaction = self._extend_transaction(session, ack.transaction, len(covered))
            transaction.acknowledge(self._move_to_transaction(session, consumer, covered))
            return
        for sequence in covered:
            if self._settlement.acknowledge(consumer.held.pop(sequence)):
                session.last_batch = self._commit_state.batch.number

    def acknowledge_run(self, session: ConnectionState, run: AckRun) -> None:
        """Execute consecutive ACKs (a run) fast, with the same effect as one call of `acknowledge` for each. Stops at
        the first ACK that only `acknowledge` can execute. Adds the number of executed ACKs to `run.executed`."""
        consumer = session.consumers.get(run.subscription)
        if consumer is None or consumer.mode is not _INDIVIDUAL or consumer.queue is None:
            return
        queue, held, events = consumer.queue, consumer.held, self._events
        complete = self._settlement.complete
        is_stored = False
        for ack in run.acks:
            entry = held.get(ack.sequence)
            if entry is None or ack.dispatch not in (0, entry.deliveries):
                break
            started = ack.started
            if started is not None:
                next_one = held.get(started.sequence)
                if (
                    next_one is None
                    or started.dispatch not in (0, next_one.deliveries)
                    or started.subscription != run.subscription
                    or not session.is_truenext_client
                ):
                    break
                next_one.start_state = STARTED
                events.started(next_one, consumer)
            del held[ack.sequence]
            if events.acknowledging_queue is queue:
                events.block_entries.append(entry)
            else:
                events.acknowledged(entry)
            is_stored |= complete(entry)
            run.executed += 1
        if run.executed:
            queue.counts.acknowledged += run.executed
            self._commit_state.touched_queues[queue] = None
            if is_stored:
                session.last_batch = self._commit_state.batch.number
            if consumer.auto_window is not None:
                consumer.auto_window.settled_count += run.executed
            if consumer.has_express:
                self._clients.express_ack_count += run.executed
                consumer.last_ack_number = self._clients.express_ack_count

    def nack(self, session: ConnectionState, nack: Nack) -> None:
        """Requeue or dead-letter the messages that a NACK covers, at once or with the COMMIT of a transaction.

        Raises: RemoteProtocolError if the consumer does not hold the message, or the transaction is not open, is
        rollback-only or reaches a limit.
        """
        if nack.transaction is not None:
            transaction = session.transaction(nack.transaction)
            if transaction.acknowledges(nack.sequence, nack.dispatch):
                self._count_nack_of_acknowledged(session, transaction, nack)
                transaction.nack_acknowledged(nack)
                return
        consumer = session.consumer_of(nack.subscription, nack.sequence, nack.dispatch)
        self._touch(consumer)
        if consumer.auto_window is not None:
            consumer.auto_window.settled_count += 1
        covered = consumer.covered_sequences(nack.sequence)
        if nack.transaction is not None:
            count = len(covered) * nack_count(nack)
            transaction = self._extend_transaction(session, nack.transaction, count, len(nack.cause))
            self._memory.transaction_bytes += len(nack.cause)
            transaction.nack(self._move_to_transaction(session, consumer, covered), nack)
            return
        entries = [consumer.held.pop(sequence) for sequence in covered]
        reports_started = consumer.reports_started
        for entry in entries if consumer.queue is not None else by_queue(entries):
            self._settlement.fail(entry, RequeueReason.NACKED, nack, reports_started=reports_started)
        session.last_batch = max(session.last_batch, self._commit_state.latest_batch)

    def _count_nack_of_acknowledged(self, session: ConnectionState, transaction: BrokerTransaction, nack: Nack) -> None:
        """Add a NACK to the usage of its transaction, which has acknowledged the message before. The acknowledgement
        counts as one already, so one is subtracted from the NACK's count."""
        count, size = nack_count(nack) - 1, len(nack.cause)
        if count:
            session.transactions.check_limits(self._limits, count=count, size=size)
            session.transactions.add_usage(transaction, count=count, size=size)
            self._memory.transaction_bytes += size

    # ---- Acknowledgements that wait for COMMIT ----

    def find_kept(self, session: ConnectionState, acks: Iterable[Ack]) -> list[tuple[BrokerConsumer, int]]:
        """Return the consumer and the sequence of each message that these acknowledgements of a COMMIT name. Changes
        nothing.

        Raises: RemoteProtocolError if a consumer does not hold its message, or if the limit of messages in open
            transactions would be passed.
        """
        kept = dict.fromkeys(
            (session.consumer_of(ack.subscription, ack.sequence, ack.dispatch), ack.sequence) for ack in acks
        )
        session.transactions.check_limits(self._limits, count=len(kept))
        return list(kept)

    def take_kept(self, kept: Iterable[tuple[BrokerConsumer, int]]) -> list[Entry]:
        """Take these messages from their consumers, for the COMMIT that acknowledges them."""
        for consumer in dict.fromkeys(consumer for consumer, _ in kept):
            self._touch(consumer)
        return [consumer.held.pop(sequence) for consumer, sequence in kept]

    def _extend_transaction(self, session: ConnectionState, name: str, count: int, size: int = 0) -> BrokerTransaction:
        """Return an open transaction, after counting `count` more messages and `size` more bytes of causes in it.

        Raises: RemoteProtocolError if the transaction is not open or is rollback-only, or if a limit would be passed.
        """
        transaction = session.transaction(name)
        open_transactions = session.transactions
        open_transactions.check_limits(self._limits, count=count, size=size)
        open_transactions.add_usage(transaction, count=count, size=size)
        open_transactions.settling_transactions[transaction] = None
        return transaction

    def _touch(self, consumer: BrokerConsumer) -> None:
        self._commit_state.touch(consumer)
        if consumer.is_suspended:
            # Groups of a suspended consumer may become free for other consumers.
            self._commit_state.touched_queues.update((entry.lane.queue, None) for entry in consumer.held.values())

    def mark_started(self, session: ConnectionState, started: Started) -> None:
        """Mark a dispatch as started, as the client reports.

        Raises: RemoteProtocolError if the consumer does not hold the message, or the client is no truenext client.
        """
        if not session.is_truenext_client:
            raise RemoteProtocolError(
                "SEND to /control/started is only for a connection whose CONNECT had truenext-client",
                Code.NOT_SUPPORTED,
            )
        consumer = session.consumer_of(started.subscription, started.sequence, started.dispatch)
        entry = consumer.held[started.sequence]
        entry.start_state = STARTED
        self._events.started(entry, consumer)

    def _move_to_transaction(
        self, session: ConnectionState, consumer: BrokerConsumer, covered: list[int]
    ) -> list[Entry]:
        """Take messages from their consumer for a transaction. If the client is a truenext client, the history records
        these messages as started."""
        entries = [consumer.held.pop(sequence) for sequence in covered]
        if session.is_truenext_client:
            for entry in entries:
                self._events.started(entry, consumer)
        return entries

    # ---- Auto mode: messages that the socket has taken ----

    def acknowledge_all(self, consumer: BrokerConsumer) -> None:
        """Acknowledge all messages that the consumer holds."""
        held = consumer.held
        if consumer.queue is not None:
            consumer.queue.counts.acknowledged += len(held)
            self._events.acknowledged_all(consumer.queue, held.values())
            for entry in held.values():
                self._settlement.complete(entry)
        else:
            for entry in held.values():
                self._settlement.acknowledge(entry)
        held.clear()

    def acknowledge_first(self, consumer: BrokerConsumer, count: int) -> None:
        """Acknowledge the first `count` messages that the consumer holds, in order of dispatch."""
        for sequence in list(consumer.held)[:count]:
            self._settlement.acknowledge(consumer.held.pop(sequence))

    def hold_partially_sent(self, consumer: BrokerConsumer) -> Entry:
        """Take the first held message from its consumer, because the socket has taken only a part of the message. The
        caller holds the message until it calls `resolve_partially_sent`."""
        return consumer.held.pop(next(iter(consumer.held)))

    def resolve_partially_sent(self, entry: Entry, *, is_sent: bool) -> None:
        """Acknowledge a partially sent message if the socket has taken all of it; else release the message."""
        if is_sent and self._queues.exists(entry.lane.queue):
            self._settlement.acknowledge(entry)
        else:
            self._settlement.requeue(entry, RequeueReason.RELEASED)
