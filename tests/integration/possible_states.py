"""Possible contents of a broker's queues, as far as a client can know them whose connections freeze.

Written from docs/contract.md alone (chapters 9, 10, 20 and 22, C18.1 to C18.7). The
broker has carried out a first part of what a connection has sent, and never carries out the rest. The client does not
know how long that part is, so each length is a world of its own. Later answers of the broker rule worlds out; when none
is left the broker has broken its contract.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Seen:
    """Dispatch that the client knows of."""

    ack: str
    """Name of the dispatch."""
    letter: str
    subscription: str
    round: int


@dataclass
class PossibleState:
    """Contents of the broker while no client holds a message."""

    waiting: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """Attempts by letter, and whether the last one was a lost connection."""
    out: frozenset[str] = frozenset()
    """Letters in the other queue."""
    sends: int = 0
    """Highest number of a SEND, and in `commits` of a COMMIT."""
    commits: int = 0

    def copy(self) -> "PossibleState":
        return PossibleState(dict(self.waiting), self.out, self.sends, self.commits)

    def identity(self) -> object:
        return frozenset(self.waiting.items()), self.out, self.sends, self.commits

    def fail(self, letter: str, *, lost: bool = False) -> None:
        self.waiting[letter] = (self.waiting[letter][0] + 1, lost)

    def expects(self, letter: str, attempts: int, *, lost: bool, others: int = 0) -> bool:
        """Return whether the letter may have come with `attempts`, `others` of which were added on this connection."""
        if letter not in self.waiting:
            return False
        known, known_lost = self.waiting[letter]
        return attempts - others == known and lost == (known_lost and not others)


@dataclass
class Transaction:
    counts_all: bool = True
    """Whether its end counts all its letters, not its NACKs alone."""
    acknowledged: list[str] = field(default_factory=list)
    nacked: list[str] = field(default_factory=list)
    sent: list[tuple[str, bool]] = field(default_factory=list)
    """Letters, and whether they go to the other queue."""

    def failed(self) -> list[str]:
        """Return the letters that count an attempt when the transaction ends without COMMIT, and without a request to
        count less."""
        return self.nacked + (self.acknowledged if self.counts_all else [])


@dataclass
class Life:
    """State of one world, and one connection in it."""

    state: PossibleState
    seen: list[Seen]
    """Dispatches, in order for each subscription."""
    ended: set[str] = field(default_factory=set)
    """Names of dispatches that the client no longer holds."""
    started: list[str] = field(default_factory=list)
    transactions: dict[str, Transaction] = field(default_factory=dict)

    def letter(self, ack: str) -> str:
        return next(seen.letter for seen in self.seen if seen.ack == ack)

    def held(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.ack not in self.ended]

    def abort(self, name: str, counted: str) -> None:
        transaction = self.transactions.pop(name)
        for letter in transaction.failed() if counted == "all" else transaction.nacked:
            self.state.fail(letter)

    def lose(self, *, is_exempt: bool) -> PossibleState:
        """Return the state after the loss of the connection."""
        state = self.state
        if is_exempt:
            return state
        for transaction in self.transactions.values():
            for letter in transaction.failed():
                state.fail(letter, lost=True)
        for seen in self.held():
            if seen.ack in self.started:
                state.fail(seen.letter, lost=True)
        return state


class Operation:
    """Operation of a client, without control requests that only ask."""

    def do(self, life: Life) -> None:
        raise NotImplementedError


@dataclass
class Send(Operation):
    letter: str
    number: int | None = None
    to_other: bool = False
    transaction: str | None = None

    def do(self, life: Life) -> None:
        state = life.state
        if self.transaction is not None:
            life.transactions[self.transaction].sent.append((self.letter, self.to_other))
            return
        if self.number is not None:
            if self.number <= state.sends:
                return
            state.sends = self.number
        arrive(state, self.letter, to_other=self.to_other)


@dataclass
class Acknowledge(Operation):
    """ACK or NACK."""

    acks: list[str]
    """Dispatches that it covers."""
    is_nack: bool = False
    transaction: str | None = None
    started: str | None = None
    """Dispatch that the program starts next."""

    def do(self, life: Life) -> None:
        letters = [life.letter(ack) for ack in self.acks]
        life.ended.update(self.acks)
        if self.started is not None:
            life.started.append(self.started)
        if self.transaction is not None:
            transaction = life.transactions[self.transaction]
            (transaction.nacked if self.is_nack else transaction.acknowledged).extend(letters)
            return
        for letter in letters:
            if self.is_nack:
                life.state.fail(letter)
            else:
                del life.state.waiting[letter]


@dataclass
class NackAfterAll(Operation):
    """NACK of a message that its transaction has acknowledged."""

    letter: str
    transaction: str

    def do(self, life: Life) -> None:
        transaction = life.transactions[self.transaction]
        transaction.acknowledged.remove(self.letter)
        transaction.nacked.append(self.letter)


@dataclass
class Begin(Operation):
    transaction: str
    counts_all: bool

    def do(self, life: Life) -> None:
        life.transactions[self.transaction] = Transaction(self.counts_all)


@dataclass
class Commit(Operation):
    transaction: str
    number: int | None

    def do(self, life: Life) -> None:
        transaction = life.transactions.pop(self.transaction)
        state = life.state
        if self.number is not None:
            state.commits = self.number
        for letter in transaction.acknowledged:
            del state.waiting[letter]
        for letter in transaction.nacked:
            state.fail(letter)
        for letter, to_other in transaction.sent:
            arrive(state, letter, to_other=to_other)


@dataclass
class Abort(Operation):
    transaction: str
    counted: str

    def do(self, life: Life) -> None:
        life.abort(self.transaction, self.counted)


@dataclass
class Started(Operation):
    ack: str

    def do(self, life: Life) -> None:
        life.started.append(self.ack)


@dataclass
class Release(Operation):
    round: int
    """Round that begins with the release."""
    subscriptions: list[str]
    keep: list[str]
    abort: str | None
    counted: str

    def do(self, life: Life) -> None:
        for seen in life.seen:
            if seen.subscription in self.subscriptions and seen.round < self.round and seen.ack not in self.keep:
                life.ended.add(seen.ack)
        if self.abort is not None:
            life.abort(self.abort, self.counted)


@dataclass
class NoOp(Operation):
    """Operation that changes no message."""

    def do(self, life: Life) -> None:
        pass


def arrive(state: PossibleState, letter: str, *, to_other: bool) -> None:
    if to_other:
        assert letter not in state.out, f"{letter} is sent twice"
        state.out |= {letter}
    else:
        state.waiting[letter] = (0, False)
