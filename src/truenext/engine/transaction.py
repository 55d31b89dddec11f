"""What a client has said inside a transaction and not yet committed.

Nothing of it has happened, but for one thing: a message acknowledged or refused here has left its consumer's window,
and is the transaction's until that ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.errors import RemoteProtocolError
from truenext.limits import TRANSACTION_BYTES_MAX, TRANSACTION_MESSAGES_MAX, TRANSACTIONS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from truenext.commands import Nack, Send
    from truenext.engine.lane import Entry
    from truenext.engine.queue import Queue


class Transaction:
    __slots__ = ("acknowledged", "refused", "sends", "size", "wishes")

    def __init__(self) -> None:
        self.sends: list[Send] = []
        self.acknowledged: list[Entry] = []
        self.refused: list[Entry] = []
        """NACKed."""
        self.wishes: dict[int, Nack] = {}
        """By sequence, the NACK of those that are to be treated otherwise than the policy says."""
        self.size = 0
        """Bytes of the messages in `sends`."""

    def __len__(self) -> int:
        return len(self.sends) + len(self.acknowledged) + len(self.refused)

    def leave_out(self, queue: Queue) -> list[Entry]:
        """Forget what is of a queue that has ended. Returns it."""
        gone = [entry for entry in self.acknowledged + self.refused if entry.lane.queue is queue]
        self.acknowledged = [entry for entry in self.acknowledged if entry.lane.queue is not queue]
        self.refused = [entry for entry in self.refused if entry.lane.queue is not queue]
        return gone

    def acknowledges_stored(self) -> bool:
        """It takes something persistent away: its COMMIT is visible once durable, whatever it sends."""
        return any(entry.persistent and entry.stored is not None for entry in self.acknowledged)


def begin(transactions: dict[str, Transaction], name: str) -> None:
    """Open a transaction among those of one connection.

    Raises: RemoteProtocolError if the name is taken or there are too many.
    """
    if name in transactions:
        raise RemoteProtocolError(f"transaction {name!r} is open already")
    if len(transactions) >= TRANSACTIONS_MAX:
        raise RemoteProtocolError(f"more than {TRANSACTIONS_MAX} open transactions on one connection")
    transactions[name] = Transaction()


def make_room(transactions: Mapping[str, Transaction], *, count: int = 1, size: int = 0) -> None:
    """Check that `count` more messages, with `size` bytes, fit in what one connection may keep open.

    The limits are on all open transactions of a connection together.

    Raises: RemoteProtocolError if they do not.
    """
    if sum(map(len, transactions.values())) + count > TRANSACTION_MESSAGES_MAX:
        raise RemoteProtocolError(
            f"more than {TRANSACTION_MESSAGES_MAX} sends and acknowledgements in open transactions; commit more often"
        )
    held = sum(transaction.size for transaction in transactions.values())
    if held and held + size > TRANSACTION_BYTES_MAX:
        raise RemoteProtocolError(f"more than {TRANSACTION_BYTES_MAX} bytes in open transactions; commit more often")
