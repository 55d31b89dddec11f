"""What a client has said inside a transaction and not yet committed; and what all have in common that hold messages.

It has no effect before COMMIT, but for one: a message that is acknowledged or refused here has left its consumer's
window at once, and is the transaction's until that ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from truenext.engine.state.balance import DiskBalance
from truenext.engine.state.queue import Entry, Queue
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Nack, Send
from truenext.model.limits import TRANSACTION_BYTES_MAX, TRANSACTION_MESSAGES_MAX, TRANSACTIONS_MAX

# ---- Who has messages that wait in no lane: consumers, and open transactions ----
#
# Whatever asks who has what of a queue asks for holders: `ClientRegistry.held_entries`.


class EntryHolder:
    __slots__ = ()

    held: dict[int, Entry]
    """By sequence, in the order in which it got them."""

    def drop_queue(self, queue: Queue) -> list[Entry]:
        """Forget what is of a queue that has ended. Returns it."""
        dropped = [entry for entry in self.held.values() if entry.lane.queue is queue]
        for entry in dropped:
            del self.held[entry.sequence]
        return dropped


# ---- Transactions ----


@dataclass(frozen=True, slots=True)
class TransactionLimits:
    """How much one connection may have in all its open transactions together."""

    transactions: int = TRANSACTIONS_MAX
    size: int = TRANSACTION_BYTES_MAX
    """Bytes of what they send, unless that is a single message, and of the causes that they say."""
    messages: int = TRANSACTION_MESSAGES_MAX
    """What they send, acknowledge and refuse."""


class BrokerTransaction(EntryHolder):
    __slots__ = (
        *("balance", "counts_all", "held", "is_rollback_only", "message_count"),
        *("nacks", "reserved_queues", "sends", "total_bytes"),
    )

    def __init__(self, *, counts_all: bool = True) -> None:
        self.counts_all = counts_all
        """As of a Begin."""
        self.sends: list[Send] = []
        self.held = {}
        """What was acknowledged or refused."""
        self.nacks: dict[int, Nack] = {}
        """By sequence, the NACK of those that were refused."""
        self.reserved_queues: set[str] = set()
        """Names of the queues that it sends to, which stay or for which room is kept (unused.py)."""
        self.message_count = 0
        """How much was sent, acknowledged and refused; also of what has ended since."""
        self.total_bytes = 0
        """Bytes of the messages in `sends`, and of what was said of why others failed."""
        self.is_rollback_only = False
        """A frame of it was refused, on a connection that goes on: it can only be aborted."""
        self.balance: DiskBalance | None = None
        """What it takes from the disk and gives to it, once that was asked for."""

    def acknowledge(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.held[entry.sequence] = entry
        if self.balance is not None:
            self.balance.acknowledge(entries)

    def counted_balance(self) -> DiskBalance:
        """The balance, of all that was said in the transaction so far."""
        balance = self.balance
        if balance is None:
            balance = self.balance = DiskBalance()
            balance.acknowledge(self.acknowledged())
            for send in self.sends:
                balance.send(send)
        return balance

    def nack(self, entries: list[Entry], nack: Nack) -> None:
        for entry in entries:
            self.held[entry.sequence] = entry
            self.nacks[entry.sequence] = nack

    def nack_acknowledged(self, nack: Nack) -> None:
        """Refuse one message that it has acknowledged."""
        self.nacks[nack.sequence] = nack
        # Counted anew, if it is asked for again.
        self.balance = None

    def drop_queue(self, queue: Queue) -> list[Entry]:
        self.balance = None
        return super().drop_queue(queue)

    def acknowledges(self, sequence: int, dispatch: int) -> bool:
        """It has acknowledged this message, and not refused it since; of `dispatch` see commands.Nack."""
        entry = self.held.get(sequence)
        return entry is not None and sequence not in self.nacks and dispatch in (0, entry.deliveries)

    def acknowledged(self) -> list[Entry]:
        return [entry for sequence, entry in self.held.items() if sequence not in self.nacks]

    def nacked(self) -> list[Entry]:
        return [self.held[sequence] for sequence in self.nacks if sequence in self.held]

    def counts_any(self) -> bool:
        """Its end counts an attempt for something, if that is no COMMIT."""
        return bool(self.held if self.counts_all else self.nacked())

    def acknowledges_persistent(self) -> bool:
        """It takes something persistent away: its COMMIT is visible once durable, whatever it sends."""
        return any(entry.persistent and entry.store_batch is not None for entry in self.acknowledged())


class OpenTransactions(dict[str, BrokerTransaction]):
    """Those of one connection, by the client's name for them.

    There may be thousands, so nothing that comes with each message goes through all of them: what is said in them is
    counted here, and `settling_transactions` has those that have messages.
    """

    __slots__ = ("ended_count", "message_count", "settling_transactions", "total_bytes")

    def __init__(self) -> None:
        super().__init__()
        self.settling_transactions: dict[BrokerTransaction, None] = {}
        """Those that have acknowledged or refused anything."""
        self.message_count = 0
        """How much was sent, acknowledged and refused in all of them."""
        self.total_bytes = 0
        """Bytes of what was sent in them, and of causes."""
        self.ended_count = 0
        """How many there were that have ended, by COMMIT or ABORT."""

    def begin(self, name: str, limits: TransactionLimits, *, counts_all: bool = True) -> None:
        """Open a transaction.

        Raises: RemoteProtocolError if the name is taken or there are too many.
        """
        if name in self:
            raise RemoteProtocolError(f"transaction {name!r} is open already", Code.IN_USE)
        if len(self) >= limits.transactions:
            raise RemoteProtocolError(
                f"more than {limits.transactions} open transactions on one connection (transactions_max)", Code.LIMIT
            )
        self[name] = BrokerTransaction(counts_all=counts_all)

    def end(self, name: str) -> BrokerTransaction:
        """It is open no more."""
        transaction = self.pop(name)
        self.ended_count += 1
        self.settling_transactions.pop(transaction, None)
        self.message_count -= transaction.message_count
        self.total_bytes -= transaction.total_bytes
        return transaction

    def check_limits(self, limits: TransactionLimits, *, count: int = 1, size: int = 0) -> None:
        """Check that `count` more messages, with `size` bytes, are not too much.

        Raises: RemoteProtocolError if they are.
        """
        if self.message_count + count > limits.messages:
            raise RemoteProtocolError(
                f"more than {limits.messages} sends and acknowledgements in open transactions "
                "(transaction_messages_max); commit more often",
                Code.LIMIT,
            )
        if self.total_bytes and self.total_bytes + size > limits.size:
            raise RemoteProtocolError(
                f"more than {limits.size} bytes in open transactions (transaction_bytes_max); commit more often",
                Code.LIMIT,
            )

    def add_usage(self, transaction: BrokerTransaction, *, count: int = 1, size: int = 0) -> None:
        """So much is said in one of them."""
        transaction.message_count += count
        transaction.total_bytes += size
        self.message_count += count
        self.total_bytes += size


def rollback_only_error(name: str) -> RemoteProtocolError:
    """Why nothing more may be said in a transaction."""
    return RemoteProtocolError(
        f"transaction {name!r} can only be aborted: a frame of it was refused", Code.ROLLBACK_ONLY
    )
