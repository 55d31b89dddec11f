"""Local transactions of one JMS client. Acknowledgements in a transaction wait here for its COMMIT, and their messages
stay with their consumers (C26.5)."""

from collections.abc import Iterator

from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Abort, Ack, Begin, Command, Commit, InvalidFrame
from truenext.wire.openwire.consumers import INDIVIDUAL, STANDARD, Consumer, Consumers
from truenext.wire.openwire.recovery import Recovery
from truenext.wire.openwire.refusals import foreign_id, xa_refusal
from truenext.wire.openwire.structures import (
    LocalTransactionId,
    MessageAck,
    TransactionId,
    TransactionInfo,
)
from truenext.wire.openwire.verdict import Verdict

BEGIN, PREPARE, COMMIT_ONE_PHASE, COMMIT_TWO_PHASE, ROLLBACK, RECOVER, FORGET, END = range(8)
"""Operations of a TransactionInfo."""


class Transactions:
    """Open transactions of one connection."""

    def __init__(self, consumers: Consumers, recovery: Recovery, verdict: Verdict) -> None:
        self._consumers = consumers
        self._recovery = recovery
        self._verdict = verdict
        self.connection_id = ""
        """Id of the connection. Ids of transactions contain it."""
        self._open: dict[str, dict[Consumer, None]] = {}
        """Consumers with kept messages, of each open transaction."""
        self._unmatched: set[str] = set()
        """Open transactions with an acknowledgement that matches nothing that its consumer holds."""
        self._doomed: set[str] = set()
        """Open transactions of which a command was refused."""

    def name_of(self, transaction_id: TransactionId | None) -> str | None:
        """Return the name of the transaction in which a command is; None if it is in none.

        Raises: RemoteProtocolError if the transaction is an XA transaction, or of another connection
        """
        if transaction_id is None:
            return None
        if not isinstance(transaction_id, LocalTransactionId):
            raise xa_refusal()
        owner = transaction_id.connection_id
        if owner is None or owner.value != self.connection_id:
            raise foreign_id("transaction")
        return str(transaction_id.value)

    def control(self, info: TransactionInfo) -> Iterator[Command]:
        """Begin or end a transaction.

        Raises: RemoteProtocolError if that is not possible
        """
        if info.operation not in (BEGIN, COMMIT_ONE_PHASE, ROLLBACK):
            raise xa_refusal()
        name = self.name_of(info.transaction_id)
        if name is None:
            raise RemoteProtocolError("a TransactionInfo without a transaction", Code.COMMAND)
        if info.operation == BEGIN:
            if name not in self._open:
                # A lost connection counts an attempt for what an ended consumer has left to the transaction.
                yield Begin(name)
                if not self._verdict.is_refused:
                    self._open[name] = {}
                    self._recovery.note_begin(name, info.command_id)
        elif info.operation == COMMIT_ONE_PHASE:
            self._recovery.note_commit()
            yield from self._commit(name, info.command_id)
        elif name in self._open:
            yield from self._abort(name)

    def _commit(self, name: str, command_id: int) -> Iterator[Command]:
        if self._has_lost_acknowledgements(name, command_id):
            yield InvalidFrame(
                f"transaction {name} is rolled back: what it acknowledges was delivered to an earlier connection",
                Code.ROLLED_BACK,
                None,
            )
        else:
            kept = self._kept(name)
            acks = [Ack(each.subscription, sequence) for each, sequences in kept.items() for sequence in sequences]
            yield Commit(name, acks=acks)
            if not self._verdict.is_refused:
                for consumer, sequences in kept.items():
                    consumer.remove_all(sequences)
                self._forget(name)
        if name in self._open:
            # The client takes the transaction for rolled back, and does not say so.
            yield from self._abort(name)

    def _has_lost_acknowledgements(self, name: str, commit_id: int) -> bool:
        """Return whether an earlier connection may have got acknowledgements of a transaction (C26.15)."""
        doubtful = self._recovery.doubtful_sessions(name, commit_id)
        return name in self._unmatched or (bool(doubtful) and self._consumers.are_in(doubtful))

    def _abort(self, name: str) -> Iterator[Command]:
        self._forget(name)
        yield Abort(name, counts_all=False)

    def take_over(self, consumers: list[Consumer]) -> Iterator[Command]:
        """Acknowledge what consumers that end have kept, in its transactions: these have it from now on (C26.6). The
        consumers end in any case."""
        for consumer in consumers:
            for sequence, name in consumer.kept.items():
                # After a refusal nothing more is kept for a transaction.
                if sequence in consumer.kept:
                    yield Ack(consumer.subscription, sequence, name)
                    if self._verdict.is_refused:
                        self.note_refusal(name)

    def note_refusal(self, name: str) -> None:
        """Note that a command of a transaction was refused: nothing is kept for it any more."""
        touched = self._open.get(name)
        if touched is not None:
            self._doomed.add(name)
            for consumer in touched:
                _stop_keeping(consumer, name)

    def keep(self, ack: MessageAck, name: str, consumer: Consumer) -> None:
        """Keep the messages that an acknowledgement in a transaction covers.

        If the acknowledgement matches nothing, because the messages went to an earlier connection, the transaction
        cannot be committed: else what it sends would come from messages that are delivered again.

        Raises: RemoteProtocolError if the transaction is not open, or another one keeps one of the messages
        """
        if ack.ack_type not in (STANDARD, INDIVIDUAL):
            raise RemoteProtocolError(
                f"acknowledgement of type {ack.ack_type} in a transaction: it is for outside", Code.COMMAND
            )
        touched = self._open.get(name)
        if touched is None:
            raise RemoteProtocolError(f"transaction {name} is not open", Code.NO_TRANSACTION)
        if ack.ack_type == STANDARD:
            covered = consumer.covered(ack)
            is_matched = len(covered) == ack.message_count
        else:
            last = ack.last_message_id
            covered = [] if last is None or last.broker_sequence_id not in consumer.held else [last.broker_sequence_id]
            is_matched = covered != []
        if not is_matched:
            self._unmatched.add(name)
            return
        if any(consumer.kept.get(sequence, name) != name for sequence in covered):
            raise RemoteProtocolError(
                f"transaction {name} acknowledges a message that another open transaction has acknowledged",
                Code.NOT_HELD,
            )
        self._recovery.forget(name)
        touched[consumer] = None
        for sequence in covered:
            if name not in self._doomed:
                consumer.kept.setdefault(sequence, name)
            consumer.mark_one_delivered(sequence)
        self._consumers.on_changed(consumer)

    def _kept(self, name: str) -> dict[Consumer, list[int]]:
        """Return what is kept for a transaction. A consumer that has ended holds nothing."""
        return {
            consumer: [sequence for sequence, transaction in consumer.kept.items() if transaction == name]
            for consumer in self._open.get(name, ())
            if self._consumers.by_subscription.get(consumer.subscription) is consumer
        }

    def _forget(self, name: str) -> None:
        """Forget an ended transaction. What it has kept stays with the consumers."""
        self._unmatched.discard(name)
        self._doomed.discard(name)
        self._recovery.forget(name)
        for consumer in self._open.pop(name, ()):
            _stop_keeping(consumer, name)
            self._consumers.on_changed(consumer)


def _stop_keeping(consumer: Consumer, name: str) -> None:
    consumer.kept = {sequence: other for sequence, other in consumer.kept.items() if other != name}
