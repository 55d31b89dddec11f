"""Open transactions: sends, acknowledgements and NACKs before COMMIT; and the base class of all holders of messages.

Only one effect comes before COMMIT: a message that is settled in a transaction leaves its consumer's window at once.
The transaction holds the message until the transaction ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from truenext.engine.state.balance import DiskBalance
from truenext.engine.state.queue import Entry, Queue
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Nack, Send
from truenext.model.limits import (
    TRANSACTION_BYTES_MAX,
    TRANSACTION_MESSAGES_MAX,
    TRANSACTION_QUEUE_COUNT,
    TRANSACTION_QUEUES_UNCOUNTED,
    TRANSACTIONS_MAX,
)

# ---- Holders of messages that wait in no lane: consumers and open transactions ----
# To find what is held of a queue, use `ClientRegistry.held_entries`.


class EntryHolder:
    __slots__ = ()

    held: dict[int, Entry]
    """Entries by sequence, in the order in which the holder got them."""

    def drop_queue(self, queue: Queue) -> list[Entry]:
        """Forget the entries of a queue that has ended, and return them."""
        dropped = [entry for entry in self.held.values() if entry.lane.queue is queue]
        for entry in dropped:
            del self.held[entry.sequence]
        return dropped


# ---- Transactions ----


@dataclass(frozen=True, slots=True)
class TransactionLimits:
    """Limits of all open transactions of one connection together."""

    transactions: int = TRANSACTIONS_MAX
    size: int = TRANSACTION_BYTES_MAX
    """Maximum bytes of sends and causes; a first send may be larger."""
    messages: int = TRANSACTION_MESSAGES_MAX
    """Maximum number of sends, acknowledgements and NACKs. Some count twice, and further queues count, too."""


def send_count(send: Send) -> int:
    """Return how often a send, or each of its copies, counts towards the limits of a COMMIT: twice if its group, expiry
    or schedule makes it take about twice as long."""
    message = send.message
    is_costly = message.group or message.expires_ms or send.ttl_ms or send.schedule is not None
    return 2 if is_costly else 1


def nack_count(nack: Nack) -> int:
    """Return how often each message of a NACK in a transaction counts: once more with a cause, and with a delay."""
    return 1 + bool(nack.cause) + bool(nack.delay_ms)


class BrokerTransaction(EntryHolder):
    __slots__ = (
        *("balance", "counts_all", "cron_count", "held", "is_rollback_only", "message_count"),
        *("nacks", "refusal", "refusal_code", "reserved_queues", "sends", "sends_of_copies", "total_bytes"),
    )

    def __init__(self, *, counts_all: bool = True) -> None:
        self.counts_all = counts_all
        """Whether a rollback counts an attempt for acknowledged messages, too. If not, only for nacked messages."""
        self.sends: list[Send] = []
        self.sends_of_copies: list[Send] = []
        """Elements of `sends` that go to topics or to several destinations at COMMIT."""
        self.cron_count = 0
        """Number of sends with a cron expression. COMMIT computes the times of each."""
        self.held = {}
        """Messages that the transaction has acknowledged or nacked, by sequence."""
        self.nacks: dict[int, Nack] = {}
        """NACKs of the nacked messages, by sequence."""
        self.reserved_queues: set[str] = set()
        """Names of the queues to which messages are sent. Until the transaction ends these queues are not removed, and
        memory is reserved for those that are missing (queues/unused.py)."""
        self.message_count = 0
        """Number of sends, acknowledgements and NACKs (`send_count`, `nack_count`), including messages of queues that
        have ended since."""
        self.total_bytes = 0
        """Bytes of the messages in `sends`, and of causes in NACKs."""
        self.is_rollback_only = False
        """True if a frame of the transaction was refused on a connection that stays open. Then only ABORT is
        possible."""
        self.refusal = ""
        """Error text of the frame that was refused first, if the client is a JMS client; else ""."""
        self.refusal_code: Code | None = None
        """Code of that error."""
        self.balance: DiskBalance | None = None
        """Bytes that the transaction frees and needs on disk; None while these bytes are not counted."""

    def acknowledge(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.held[entry.sequence] = entry
        if self.balance is not None:
            self.balance.acknowledge(entries)

    def counted_balance(self) -> DiskBalance:
        """Return the balance of all sends and acknowledgements so far, counted anew if there is none."""
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
        """Nack one message that the transaction has acknowledged."""
        self.nacks[nack.sequence] = nack
        # Counted anew if it is needed again.
        self.balance = None

    def drop_queue(self, queue: Queue) -> list[Entry]:
        self.balance = None
        return super().drop_queue(queue)

    def acknowledges(self, sequence: int, dispatch: int) -> bool:
        """Return whether the transaction has acknowledged a message and not nacked it since. `dispatch` is the number
        of the message's deliveries, or 0 for any."""
        entry = self.held.get(sequence)
        return entry is not None and sequence not in self.nacks and dispatch in (0, entry.deliveries)

    def acknowledged(self) -> list[Entry]:
        return [entry for sequence, entry in self.held.items() if sequence not in self.nacks]

    def nacked(self) -> list[Entry]:
        return [self.held[sequence] for sequence in self.nacks if sequence in self.held]

    def counts_any(self) -> bool:
        """Return whether a rollback would count an attempt for any message."""
        return bool(self.held if self.counts_all else self.nacked())


def are_any_stored(acknowledged: Iterable[Entry]) -> bool:
    """Return whether a COMMIT that acknowledges these messages removes a persistent one from the store. If so, the
    transaction becomes visible when it is durable, even if all its sends are transient."""
    return any(entry.persistent and entry.store_batch is not None for entry in acknowledged)


class OpenTransactions(dict[str, BrokerTransaction]):
    """Open transactions of one connection, by the client's names for them.

    A connection may have thousands of transactions, so work for a single message must not go through all of them. This
    class counts the usage of all transactions, and has those that hold messages in `settling_transactions`.
    """

    __slots__ = ("ended_count", "message_count", "settling_transactions", "total_bytes")

    def __init__(self) -> None:
        super().__init__()
        self.settling_transactions: dict[BrokerTransaction, None] = {}
        """Transactions that have acknowledged or nacked messages."""
        self.message_count = 0
        """Number of sends, acknowledgements and NACKs in all open transactions, some counted twice."""
        self.total_bytes = 0
        """Bytes of the sends and causes in all open transactions."""
        self.ended_count = 0
        """Number of transactions that have ended, by COMMIT or ABORT."""

    def begin(self, name: str, limits: TransactionLimits, *, counts_all: bool = True) -> None:
        """Open a transaction.

        Raises: RemoteProtocolError if the name is in use, or the connection has too many open transactions.
        """
        if name in self:
            raise RemoteProtocolError(f"transaction {name!r} is open already", Code.IN_USE)
        if len(self) >= limits.transactions:
            raise RemoteProtocolError(
                f"more than {limits.transactions} open transactions on one connection (transactions_max)", Code.LIMIT
            )
        self[name] = BrokerTransaction(counts_all=counts_all)

    def end(self, name: str) -> BrokerTransaction:
        """Remove a transaction from the open ones of the connection, and from their totals, and return it. The caller
        commits or aborts it."""
        transaction = self.pop(name)
        self.ended_count += 1
        self.settling_transactions.pop(transaction, None)
        self.message_count -= transaction.message_count
        self.total_bytes -= transaction.total_bytes
        return transaction

    def check_limits(self, limits: TransactionLimits, *, count: int = 1, size: int = 0) -> None:
        """Check that `count` more messages, with `size` bytes, keep the limits.

        Raises: RemoteProtocolError if a limit would be passed.
        """
        if self.message_count + count > limits.messages:
            raise RemoteProtocolError(
                f"more than {limits.messages} sends and acknowledgements in open transactions of one connection "
                "(transaction_messages_max), where sends with a group, an expiry or a schedule count twice, NACKs once "
                f"more for a cause and for a delay, and each queue beyond the first {TRANSACTION_QUEUES_UNCOUNTED} of "
                f"a transaction counts {TRANSACTION_QUEUE_COUNT}; commit more often",
                Code.LIMIT,
            )
        if self.total_bytes and self.total_bytes + size > limits.size:
            raise RemoteProtocolError(
                f"more than {limits.size} bytes in open transactions of one connection (transaction_bytes_max); "
                "commit more often",
                Code.LIMIT,
            )

    def add_usage(self, transaction: BrokerTransaction, *, count: int = 1, size: int = 0) -> None:
        """Count messages and bytes of one transaction."""
        transaction.message_count += count
        transaction.total_bytes += size
        self.message_count += count
        self.total_bytes += size


def rollback_only_error(name: str, transaction: BrokerTransaction) -> RemoteProtocolError:
    """Return the error for a frame in a transaction that can only be aborted."""
    refusal = f": {transaction.refusal}" if transaction.refusal else ""
    return RemoteProtocolError(
        f"transaction {name!r} can only be aborted: a frame of it was refused{refusal}",
        Code.ROLLBACK_ONLY,
        transaction.refusal_code,
    )
