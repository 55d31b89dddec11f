"""Can anything happen twice, or be lost, in any order of steps? A search of all states of the protocol of inbox, outbox
and numbers.

Two processes handle messages. Each message has one effect in the database and one output. What may go wrong, each so
often as a search allows: an answer of the database or of the broker is lost, whatever was asked for having happened or
not; a process dies; a producer of a process that is alive is taken over. Any step may be delayed for as long as one
likes, so a process that stands still needs no fault of its own.

It is written from docs/decisions/0067-once.md, and knows nothing of the code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Row = tuple[int, int, int]
"""In the outbox: producer, number, message."""
READY, DONE = -1, 9
"""Of a message that waits, and of one that is acknowledged; else it is the process that has it."""


class Transaction(NamedTuple):
    """Of the database, not ended: it has a lock on its message's row of the inbox, and on its producer's."""

    process: int
    message: int
    producer: int
    number: int
    state: str
    """`open`; `sent`: its COMMIT was sent and nobody waits for the answer; `left`: without a COMMIT."""


class State(NamedTuple):
    # The broker.
    messages: tuple[int, ...]
    outputs: tuple[int, ...]
    """How often each is in the queue."""
    highest: tuple[int, ...]
    # The database.
    inbox: tuple[bool, ...]
    effects: tuple[int, ...]
    rows: frozenset[Row]
    producers: tuple[tuple[int, int], ...]
    """Owner and number."""
    transactions: frozenset[Transaction]
    # Each process: None if it is dead.
    workers: tuple[tuple[tuple[str, int, int] | None, ...], ...]
    """Of each message: `ran` or `committed`, with producer and number."""
    memory: tuple[tuple[tuple[str, int] | None, ...] | None, ...]
    """Of each producer: `free`, `used` or `doubt`, and the number."""
    relays: tuple[tuple[Any, ...] | None, ...]
    sent: tuple[frozenset[Row], ...]
    """Rows that are known to be sent, and are to go."""
    # What may still go wrong.
    losses: int
    crashes: int
    takeovers: int


class Bounds(NamedTuple):
    messages: int
    losses: int
    crashes: int
    takeovers: int


FAULTS = (
    "deleted before the answer",
    "two units under way in a producer",
    "neither owner nor number is looked at",
    "units read by the locking statement",
    "used on in doubt",
    "a new number at the second try",
    "the inbox is not asked",
    "taken for sent without an answer",
    "taken while it is used here",
)


class Violation(Exception):
    pass


def beginning(bounds: Bounds) -> State:
    return State(
        messages=(READY,) * bounds.messages,
        outputs=(0,) * bounds.messages,
        highest=(0, 0),
        inbox=(False,) * bounds.messages,
        effects=(0,) * bounds.messages,
        rows=frozenset(),
        producers=((0, 0), (1, 0)),
        transactions=frozenset(),
        workers=((None,) * bounds.messages,) * 2,
        memory=((("free", 0), None), (None, ("free", 0))),
        relays=(None, None),
        sent=(frozenset(), frozenset()),
        losses=bounds.losses,
        crashes=bounds.crashes,
        takeovers=bounds.takeovers,
    )


def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def is_good(state: State) -> bool:
    """All is over, and was done and sent once."""
    return (
        all(each == DONE for each in state.messages)
        and all(each == 1 for each in (*state.outputs, *state.effects))
        and not state.rows
        and not state.transactions
    )


class Protocol:
    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """What may happen next. Raises: Violation"""
        yield from self._of_the_database(state)
        for process in range(2):
            memory = state.memory[process]
            if memory is None:
                continue
            for message in range(len(state.messages)):
                yield from self._of_a_worker(state, process, message, memory)
            yield from self._of_a_relay(state, process, memory)
            for row in state.sent[process]:
                gone = state._replace(
                    rows=state.rows - {row}, sent=put(state.sent, process, state.sent[process] - {row})
                )
                yield f"{process} deletes {row}", gone
            if state.crashes:
                yield f"{process} dies", self._died(state, process)

    # ---- The database ----

    def _of_the_database(self, state: State) -> Iterator[tuple[str, State]]:
        for each in state.transactions:
            if each.state != "open":
                yield f"{each} is rolled back", state._replace(transactions=state.transactions - {each})
            if each.state == "sent":
                yield f"{each} is committed", self._committed(state, each)

    def _committed(self, state: State, ended: Transaction) -> State:
        message, producer, number = ended.message, ended.producer, ended.number
        effects = put(state.effects, message, state.effects[message] + 1)
        if effects[message] > 1:
            raise Violation(f"the effect of {message} happens twice")
        return state._replace(
            effects=effects,
            inbox=put(state.inbox, message, True),
            rows=state.rows | {(producer, number, message)},
            producers=put(state.producers, producer, (state.producers[producer][0], number)),
            transactions=state.transactions - {ended},
        )

    @staticmethod
    def _is_locked(state: State, producer: int) -> bool:
        return any(each.producer == producer for each in state.transactions)

    # ---- The broker ----

    def _commit(self, state: State, row: Row, acknowledged: int | None) -> State:
        """COMMIT under the row's number; with the acknowledgement of its message, or without.

        Raises: Violation
        """
        producer, number, message = row
        highest = state.highest[producer]
        if number > highest + 1:
            raise Violation(f"number {number} of {producer} leaves one out")
        if number <= highest:
            # A repeat: what it acknowledged comes back.
            if acknowledged is None:
                return state
            return state._replace(messages=put(state.messages, acknowledged, READY))
        outputs = put(state.outputs, message, state.outputs[message] + 1)
        if outputs[message] > 1:
            raise Violation(f"the output of {message} is sent twice")
        after = state._replace(outputs=outputs, highest=put(state.highest, producer, number))
        return after if acknowledged is None else after._replace(messages=put(after.messages, acknowledged, DONE))

    def _lost(self, state: State, process: int, producer: int, number: int) -> State:
        """An answer was: the producer is in doubt."""
        said = ("free", number) if self.fault == "used on in doubt" else ("doubt", number)
        memory = put(state.memory[process] or (), producer, said)
        return state._replace(losses=state.losses - 1, memory=put(state.memory, process, memory))

    # ---- Workers ----

    def _of_a_worker(
        self, state: State, process: int, message: int, memory: tuple[tuple[str, int] | None, ...]
    ) -> Iterator[tuple[str, State]]:
        doing = state.workers[process][message]
        has_it = state.messages[message] == process
        if doing is None and state.messages[message] == READY:
            yield f"{process} receives {message}", state._replace(messages=put(state.messages, message, process))
        elif doing is None and has_it and state.inbox[message] and self.fault != "the inbox is not asked":
            yield from self._done_before(state, process, message)
        elif doing is None and has_it:
            yield from self._run(state, process, message, memory)
        elif doing is not None and doing[0] == "ran":
            yield from self._commit_sql(state, process, message, doing)
        elif doing is not None:
            yield from self._commit_both(state, process, message, doing)

    def _idle(self, state: State, process: int, message: int) -> State:
        workers = put(state.workers[process], message, None)
        return state._replace(workers=put(state.workers, process, workers))

    def _done_before(self, state: State, process: int, message: int) -> Iterator[tuple[str, State]]:
        row = next((row for row in state.rows if row[2] == message), None)
        if row is None:
            yield f"{process} acknowledges {message}", state._replace(messages=put(state.messages, message, DONE))
            return
        sent = self._commit(state, row, None)
        known = sent._replace(
            messages=put(sent.messages, message, DONE), sent=put(sent.sent, process, sent.sent[process] | {row})
        )
        yield f"{process} sends {row} before it acknowledges {message}", known
        if state.losses:
            back = put(state.messages, message, READY)
            yield f"{process} sends {row}, in doubt", sent._replace(losses=state.losses - 1, messages=back)
            yield f"{process} does not send {row}, in doubt", state._replace(losses=state.losses - 1, messages=back)

    def _run(
        self, state: State, process: int, message: int, memory: tuple[tuple[str, int] | None, ...]
    ) -> Iterator[tuple[str, State]]:
        if any(each.message == message for each in state.transactions):
            # It waits for the other's row of the inbox.
            return
        if not any(memory):
            # It would make a new producer. Here there are two, and the other process has both.
            back = put(state.messages, message, READY)
            yield f"{process} gives {message} back", state._replace(messages=back)
        for producer, known in enumerate(memory):
            may = ("free", "used") if self.fault == "two units under way in a producer" else ("free",)
            if known is None or known[0] not in may or self._is_locked(state, producer):
                continue
            number = known[1] + 1
            is_own = state.producers[producer][0] == process or self.fault == "owner unchecked"
            is_next = state.producers[producer][1] == number - 1
            if self.fault == "neither owner nor number is looked at":
                is_own = is_next = True
            if not (is_own and is_next):
                lost = put(state.memory, process, put(memory, producer, ("doubt", known[1])))
                yield f"{process} has lost {producer}", state._replace(memory=lost)
                continue
            workers = put(state.workers[process], message, ("ran", producer, number))
            yield (
                f"{process} runs {message} under {producer}:{number}",
                state._replace(
                    transactions=state.transactions | {Transaction(process, message, producer, number, "open")},
                    workers=put(state.workers, process, workers),
                    memory=put(state.memory, process, put(memory, producer, ("used", number))),
                ),
            )

    def _commit_sql(
        self, state: State, process: int, message: int, doing: tuple[str, int, int]
    ) -> Iterator[tuple[str, State]]:
        _, producer, number = doing
        own = Transaction(process, message, producer, number, "open")
        committed = self._committed(state, own)
        workers = put(state.workers[process], message, ("committed", producer, number))
        yield f"{process} commits SQL of {message}", committed._replace(workers=put(state.workers, process, workers))
        if state.losses:
            for left in ("sent", "left"):
                after = self._lost(self._idle(state, process, message), process, producer, number)
                yield (
                    f"{process} loses the database, {left}, with {message}",
                    after._replace(
                        transactions=state.transactions - {own} | {own._replace(state=left)},
                        messages=put(state.messages, message, READY),
                    ),
                )

    def _commit_both(
        self, state: State, process: int, message: int, doing: tuple[str, int, int]
    ) -> Iterator[tuple[str, State]]:
        _, producer, number = doing
        row = (producer, number, message)
        idle = self._idle(state, process, message)
        if self.fault == "deleted before the answer":
            idle = idle._replace(rows=idle.rows - {row})
        sent = self._commit(idle, row, message)
        memory = put(sent.memory[process] or (), producer, ("free", number))
        yield (
            f"{process} commits {row}",
            sent._replace(
                memory=put(sent.memory, process, memory), sent=put(sent.sent, process, sent.sent[process] | {row})
            ),
        )
        if state.losses:
            yield f"{process} commits {row}, in doubt", self._lost(sent, process, producer, number)
            not_sent = idle._replace(messages=put(idle.messages, message, READY))
            yield f"{process} does not commit {row}, in doubt", self._lost(not_sent, process, producer, number)

    # ---- Relays ----

    def _of_a_relay(
        self, state: State, process: int, memory: tuple[tuple[str, int] | None, ...]
    ) -> Iterator[tuple[str, State]]:
        doing = state.relays[process]
        if doing is None:
            for producer in range(2):
                yield from self._take(state, process, memory, producer)
        elif doing[0] == "looks":
            yield from self._lock(state, process, doing[1], doing[2])
        elif doing[0] == "took":
            _, producer, seen = doing
            rows = state.rows if seen is None else seen
            units = tuple(sorted(row for row in rows if row[0] == producer))
            has = ("has", producer, state.producers[producer][1], units)
            yield f"{process} reads {units}", state._replace(relays=put(state.relays, process, has))
        else:
            yield from self._send(state, process, memory, *doing[1:])

    def _take(
        self, state: State, process: int, memory: tuple[tuple[str, int] | None, ...], producer: int
    ) -> Iterator[tuple[str, State]]:
        owner = state.producers[producer][0]
        known = memory[producer]
        is_in_doubt = known is not None and known[0] == "doubt"
        if is_in_doubt and owner != process and not self._is_locked(state, producer):
            yield (
                f"{process} finds that {producer} is another's",
                state._replace(memory=put(state.memory, process, put(memory, producer, None))),
            )
        if known is not None and known[0] == "used" and self.fault != "taken while it is used here":
            # Another process has taken it, and has died. Whoever uses it here finds that out first.
            return
        is_dead = state.memory[owner] is None
        if not (is_in_doubt and owner == process) and not (owner != process and (is_dead or state.takeovers)):
            return
        is_false = owner != process and not is_dead
        before = state._replace(takeovers=state.takeovers - is_false)
        if known is not None and self.fault != "taken while it is used here":
            doubt = put(memory, producer, ("doubt", known[1]))
            before = before._replace(memory=put(before.memory, process, doubt))
        seen = state.rows if self.fault == "units read by the locking statement" else None
        looks = ("looks", producer, seen)
        yield f"{process} looks at {producer}", before._replace(relays=put(state.relays, process, looks))

    def _lock(
        self, state: State, process: int, producer: int, seen: frozenset[Row] | None
    ) -> Iterator[tuple[str, State]]:
        if not self._is_locked(state, producer):
            yield (
                f"{process} takes {producer}",
                state._replace(
                    producers=put(state.producers, producer, (process, state.producers[producer][1])),
                    relays=put(state.relays, process, ("took", producer, seen)),
                ),
            )

    def _send(
        self,
        state: State,
        process: int,
        memory: tuple[tuple[str, int] | None, ...],
        producer: int,
        number: int,
        units: tuple[Row, ...],
    ) -> Iterator[tuple[str, State]]:
        idle = state._replace(relays=put(state.relays, process, None))
        if not units:
            free = put(memory, producer, ("free", number))
            yield f"{process} may use {producer}", idle._replace(memory=put(state.memory, process, free))
            return
        row, rest = units[0], units[1:]
        under = (producer, state.highest[producer] + 1, row[2]) if self.fault.startswith("a new number") else row
        sent = state if self.fault.startswith("taken for sent") else self._commit(state, under, None)
        then = ("has", producer, number, rest)
        yield (
            f"{process} sends {row}",
            sent._replace(rows=sent.rows - {row}, relays=put(state.relays, process, then)),
        )
        if state.losses:
            for happened in (True, False):
                after = self._commit(idle, under, None) if happened else idle
                yield (
                    f"{process} sends {row} in doubt: {happened}",
                    self._lost(after, process, producer, number),
                )

    # ---- Dying ----

    def _died(self, state: State, process: int) -> State:
        left = frozenset(
            each._replace(state="left") if each.process == process and each.state == "open" else each
            for each in state.transactions
        )
        return state._replace(
            crashes=state.crashes - 1,
            messages=tuple(READY if each == process else each for each in state.messages),
            transactions=left,
            workers=put(state.workers, process, (None,) * len(state.messages)),
            memory=put(state.memory, process, None),
            relays=put(state.relays, process, None),
            sent=put(state.sent, process, frozenset()),
        )


def search(bounds: Bounds, fault: str = "") -> int:
    """How many states there are. Raises: Violation, with the steps that lead to it"""
    protocol = Protocol(fault)
    first = beginning(bounds)
    came: dict[State, tuple[State, str] | None] = {first: None}
    before: dict[State, list[State]] = {}
    rest = deque([first])
    good = []
    while rest:
        state = rest.popleft()
        if is_good(state):
            good.append(state)
        try:
            following = list(protocol.steps(state))
        except Violation as violation:
            raise Violation(f"{violation}:\n" + _way(came, state)) from violation
        for step, after in following:
            before.setdefault(after, []).append(state)
            if after not in came:
                came[after] = (state, step)
                rest.append(after)
    _check_that_all_can_end_well(came, before, good)
    return len(came)


def _check_that_all_can_end_well(
    came: Mapping[State, tuple[State, str] | None], before: Mapping[State, list[State]], good: list[State]
) -> None:
    """Raises: Violation if something is lost, or stands still for ever"""
    can = set(good)
    rest = list(good)
    while rest:
        for each in before.get(rest.pop(), ()):
            if each not in can:
                can.add(each)
                rest.append(each)
    for state in came:
        if state not in can:
            raise Violation("it cannot end well any more:\n" + _way(came, state))


def _way(came: Mapping[State, tuple[State, str] | None], state: State) -> str:
    steps = []
    at: State = state
    while (how := came[at]) is not None:
        at, step = how
        steps.append(step)
    return "\n".join(reversed(steps))
