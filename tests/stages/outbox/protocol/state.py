"""State of the protocol as one flat tuple of small values, so that a million of them fit into memory.

A unit is the output of one message, or of one transaction of a program. Units are numbered, messages first, and so are
producers. A unit has at most one row in the database. A set of units is the bits of a number.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

State = tuple[Any, ...]
Draft = list[Any]
"""State that is being changed."""
Numbered = tuple[int, int]
"""Producer and number."""

PROCESSES: Final = (0, 1)

# A message, as the broker has it. Else: the process that has it.
READY, DONE = 2, 3
LATE = 4
"""Held by a connection that was given up. A COMMIT on its way may still acknowledge the message."""

# A row of the outbox. Else: what it is numbered.
NO_ROW, UNNUMBERED = 0, 1

# An output, as the broker has it.
NOT_SENT, SENT = 0, 1
FORGOTTEN = 2
"""Sent, and lost with the restore of the broker: the unit may be sent again, and need not be."""

# A producer's owner. Else: a process.
NO_OWNER = 2
"""The producer is not in the table: not yet, or not any more."""

# What a process knows of a producer. Else: FREE, or USED, and the number.
UNKNOWN, DOUBT = -2, -1
FREE, USED = 0, 100

# What a worker does with a message, with a producer and a number.
IDLE: Final = ()
RAN = 1
"""The last statement before SQL's COMMIT has returned. The transaction has locks on the row of its message in the
inbox, and on that of its producer."""
COMMITTED = 2
"""The SQL transaction is committed."""
FOUND = 3
"""The message was already processed, and this unit is still to be sent."""
HANDLED = 4
"""The message was already processed, and nothing is left to be sent."""

# What a relay does with a producer. The values are (step, producer, number, units, highest number the broker knows).
CHECKED = 1
"""Only with a fault planted: the relay reads the units by the statement that waits for the lock."""
CLAIMED = 2
READ = 3
SENDS = 4
DELETES = 5
"""The first of the units is known to be sent."""
MOVES = 6
RESOLVES = 10
"""The broker lacks numbers before the number of the first unit."""
# With what programs have begun: (step, producer, number, units).
NUMBERED = 7
SENDS_OWN = 8
DELETES_OWN = 9
GIVES_UP = 11
"""The unit is too large for the broker: its number is to be used up, so that the unit is not sent under it any more."""
SPLITS = 12
"""The number is used up: its units are to lose it."""


class Bounds(NamedTuple):
    """Size of the search, and how often each failure may happen."""

    messages: int = 1
    started: int = 0
    """Units that programs initiate."""
    cuts: int = 0
    """Connections to the broker that are lost in a transaction."""
    losses: int = 0
    """Answers of the database that are lost."""
    deaths: int = 0
    claims: int = 0
    """Claims of producers whose process is alive."""
    restores: int = 0
    """Restores of the broker to its state at the beginning, without any numbers."""
    refusals: int = 0
    """Refusals of program units that are too large together."""
    resolved: int = 0
    """Longest gap of numbers of a restored broker that the relay resolves. Units after a longer one are renumbered."""
    producers: int = 2
    """Names of producers at a time. An unused name stands for a new one."""

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._asdict().items() if value)


class Layout:
    """Positions of the values in a state."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.messages = range(bounds.messages)
        self.units = range(bounds.messages + bounds.started)
        self.started = range(bounds.messages, bounds.messages + bounds.started)
        self.producers = range(bounds.producers)
        self._size = 0
        # The broker.
        self.message = self._allocate(bounds.messages)
        self.output = self._allocate(len(self.units))
        self.highest = self._allocate(bounds.producers)
        self.given_up = self._allocate(bounds.producers)
        """Numbers that were used up without a unit."""
        self.late = self._allocate(1)
        """COMMITs on their way from connections that were given up: (producer, number, units, message or -1)."""
        # The database.
        self.inbox = self._allocate(bounds.messages)
        """True if the inbox has the message. The effect of the message is there exactly then."""
        self.row = self._allocate(len(self.units))
        self.owner = self._allocate(bounds.producers)
        self.number = self._allocate(bounds.producers)
        self.pending = self._allocate(bounds.messages)
        """A transaction of the message without a waiting process. The database will commit it, or roll it back."""
        # Processes.
        self.is_alive = self._allocate(2)
        self.worker = tuple(self._allocate(bounds.messages) for _ in PROCESSES)
        self.memory = tuple(self._allocate(bounds.producers) for _ in PROCESSES)
        self.relay = self._allocate(2)
        self.sent = self._allocate(2)
        """Units that are known to be sent. Their rows are to be deleted."""
        # What may still go wrong.
        self.cuts, self.losses, self.deaths, self.claims = (self._allocate(1) for _ in range(4))
        self.restores, self.refusals = (self._allocate(1) for _ in range(2))

    def _allocate(self, count: int) -> int:
        at, self._size = self._size, self._size + count
        return at

    def initial_state(self) -> State:
        """Return the initial state, in which each process has a producer."""
        bounds = self.bounds
        first: Draft = [0] * self._size
        for message in self.messages:
            first[self.message + message] = READY
        for unit in self.started:
            first[self.row + unit] = UNNUMBERED
        # A broker that knows a producer no more shows only when that was used before.
        used = 1 if bounds.restores else 0
        for producer in self.producers:
            is_there = producer in PROCESSES
            first[self.given_up + producer] = ()
            first[self.owner + producer] = producer if is_there else NO_OWNER
            first[self.number + producer] = first[self.highest + producer] = used if is_there else 0
            for process in PROCESSES:
                first[self.memory[process] + producer] = FREE + used if producer == process else UNKNOWN
        for process in PROCESSES:
            first[self.is_alive + process] = 1
            first[self.relay + process] = IDLE
            for message in self.messages:
                first[self.worker[process] + message] = IDLE
        first[self.late] = ()
        first[self.cuts], first[self.losses], first[self.deaths] = bounds.cuts, bounds.losses, bounds.deaths
        first[self.claims], first[self.restores] = bounds.claims, bounds.restores
        first[self.refusals] = bounds.refusals
        return tuple(first)

    def is_good(self, state: State) -> bool:
        """True if everything is over, and was done and sent once."""
        return (
            all(each == DONE for each in state[self.message : self.message + len(self.messages)])
            and all(state[self.inbox : self.inbox + len(self.messages)])
            and NOT_SENT not in state[self.output : self.output + len(self.units)]
            and not any(state[self.row : self.row + len(self.units)])
            and not any(state[self.pending : self.pending + len(self.messages)])
        )

    def unfinished(self, state: State) -> str:
        """Describe all that keeps the state from being good."""
        remaining = [
            f"message {each} is not acknowledged" for each in self.messages if state[self.message + each] != DONE
        ]
        for unit in self.units:
            if state[self.output + unit] == NOT_SENT:
                remaining.append(f"unit {unit} is not sent")
            row = state[self.row + unit]
            if row:
                under = "no number" if row == UNNUMBERED else "{}:{}".format(*row)
                remaining.append(f"unit {unit} is in the outbox, under {under}")
        return ", ".join(remaining) or "a transaction is under way"

    def was_restored(self, state: State | Draft) -> bool:
        """True if the broker was restored."""
        return bool(state[self.restores] < self.bounds.restores)
