"""What a client has said inside a transaction and not yet committed.

It has no effect before COMMIT, but for one: a message that is acknowledged or refused here has left its consumer's
window at once, and is the transaction's until that ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.engine.state.holder import Holder
from truenext.errors import Code, RemoteProtocolError
from truenext.limits import TRANSACTION_BYTES_MAX, TRANSACTION_MESSAGES_MAX, TRANSACTIONS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from truenext.commands import Nack, Send
    from truenext.engine.state.queue import Entry


class Transaction(Holder):
    __slots__ = ("held", "is_doomed", "refusals", "sends", "size")

    def __init__(self) -> None:
        self.sends: list[Send] = []
        self.held = {}
        """What was acknowledged or refused."""
        self.refusals: dict[int, Nack] = {}
        """By sequence, the NACK of those that were refused."""
        self.size = 0
        """Bytes of the messages in `sends`."""
        self.is_doomed = False
        """A frame of it was refused, on a connection that goes on: it can only be aborted."""

    def __len__(self) -> int:
        return len(self.sends) + len(self.held)

    def acknowledge(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.held[entry.sequence] = entry

    def refuse(self, entries: list[Entry], nack: Nack) -> None:
        for entry in entries:
            self.held[entry.sequence] = entry
            self.refusals[entry.sequence] = nack

    def acknowledges(self, sequence: int, dispatch: int) -> bool:
        """It has acknowledged this message, and not refused it since; of `dispatch` see commands.Nack."""
        entry = self.held.get(sequence)
        return entry is not None and sequence not in self.refusals and dispatch in (0, entry.deliveries)

    def acknowledged(self) -> list[Entry]:
        return [entry for sequence, entry in self.held.items() if sequence not in self.refusals]

    def refused(self) -> list[Entry]:
        return [self.held[sequence] for sequence in self.refusals if sequence in self.held]

    def acknowledges_stored(self) -> bool:
        """It takes something persistent away: its COMMIT is visible once durable, whatever it sends."""
        return any(entry.persistent and entry.stored is not None for entry in self.acknowledged())


def begin(transactions: dict[str, Transaction], name: str) -> None:
    """Open a transaction among those of one connection.

    Raises: RemoteProtocolError if the name is taken or there are too many.
    """
    if name in transactions:
        raise RemoteProtocolError(f"transaction {name!r} is open already", Code.TAKEN)
    if len(transactions) >= TRANSACTIONS_MAX:
        raise RemoteProtocolError(f"more than {TRANSACTIONS_MAX} open transactions on one connection", Code.LIMIT)
    transactions[name] = Transaction()


def doomed(name: str) -> RemoteProtocolError:
    """Why nothing more may be said in a transaction."""
    return RemoteProtocolError(f"transaction {name!r} can only be aborted: a frame of it was refused", Code.DOOMED)


def check_limits(transactions: Mapping[str, Transaction], *, count: int = 1, size: int = 0) -> None:
    """Check that `count` more messages, with `size` bytes, fit in what one connection may keep open.

    The limits are on all open transactions of a connection together.

    Raises: RemoteProtocolError if they do not.
    """
    if sum(map(len, transactions.values())) + count > TRANSACTION_MESSAGES_MAX:
        raise RemoteProtocolError(
            f"more than {TRANSACTION_MESSAGES_MAX} sends and acknowledgements in open transactions; commit more often",
            Code.LIMIT,
        )
    held = sum(transaction.size for transaction in transactions.values())
    if held and held + size > TRANSACTION_BYTES_MAX:
        raise RemoteProtocolError(
            f"more than {TRANSACTION_BYTES_MAX} bytes in open transactions; commit more often", Code.LIMIT
        )
