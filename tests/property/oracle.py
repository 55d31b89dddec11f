"""Who should get which message next, by docs/contract.md alone?

Written from the contract and never from the engine. Naive on purpose: one list of messages, searched and sorted again
for each question. Section names in comments are those of docs/contract.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from truenext.commands import AckMode

ROOM_BYTES = 1024 * 1024
"""A connection has room for more bytes while fewer than these are unsent (limits.UNSENT_BYTES_MAX)."""

DEAD_LETTER_PREFIX = "DLQ."
AT_ONCE = 0

# Where the contract is silent or can be read in two ways, the oracle follows one of them. Each is a question to the
# contract; none of them may hide a mistake of the engine.

NACKED_STAYS_WITH_TRANSACTION = True
"""Return says "a NACK inside a transaction takes effect at COMMIT". Until then the message either counts as one that
the transaction acknowledged (it has left the window, an UNSUBSCRIBE does not return it, a lost connection charges it:
True), or as unacknowledged (False)."""
DEAD_LETTERS_EXPIRE = False
"""Attempts says what a dead-lettered message keeps, and does not name its expiry."""
EXPIRED_COMMIT_HOLDS_BACK = True
"""Ready says that an earlier message in commit "which this consumer could take" holds back. Nobody could take an
expired one; on the other hand nothing but its removal would wake the queue before the commit does."""


class Disagreement(AssertionError):
    """The broker did something that the contract does not allow."""


@dataclass(frozen=True)
class Parcel:
    """What a producer hands over."""

    label: str
    priority: int
    persistent: bool
    expires_ms: int
    size: int


@dataclass(eq=False)
class Peer:
    """One connection."""

    name: str
    transactions: dict[str, "Work"] = field(default_factory=dict)
    receipts: list["Pending"] = field(default_factory=list)
    unsent: int = 0
    must_wait_for: int = AT_ONCE
    """The batch that L1, L3 and L5 make a receipt asked for now wait for."""
    may_wait_for: int = AT_ONCE
    """The last batch that anything of this connection went to: no receipt asked for now has a reason to wait longer."""


@dataclass(frozen=True)
class Pending:
    """A receipt that was asked for."""

    receipt: str
    must_wait_for: int
    may_wait_for: int


@dataclass(eq=False)
class Reader:
    """One subscription."""

    peer: Peer
    subscription: str
    queue: str
    mode: AckMode
    window: int | None
    waiting_since: int
    """The step of its last dispatch, or of its SUBSCRIBE."""

    def __repr__(self) -> str:
        return f"{self.peer.name}/{self.subscription}({self.queue},{self.mode.value},{self.window})"


@dataclass(eq=False)
class Letter:
    """A message after its acceptance."""

    parcel: Parcel
    queue: str
    persistent: bool
    order: int
    """Sequences in the oracle's own counting; only their order means something."""
    event: int
    """Which command accepted it."""
    block: int
    """The transaction that accepted it, 0 if none: its sequences are unbroken."""
    visible_from: int
    """The batch that makes it visible."""
    stored_in: int | None
    """The batch that writes it."""
    is_dead_letter: bool = False
    removed_in: int | None = None
    is_gone: bool = False
    holder: Reader | None = None
    acknowledged_by: "Work | None" = None
    refused_by: "Work | None" = None
    dispatched_at: int = 0
    deliveries: int = 0
    attempts: int = 0
    written_attempts: list[tuple[int, int]] = field(default_factory=list)
    """(batch, attempts as of that batch)"""

    @property
    def key(self) -> tuple[int, int]:
        """The key: K(m) = (9 - priority, sequence)."""
        return (9 - self.parcel.priority, self.order)

    def __repr__(self) -> str:
        return f"{self.queue}:{self.parcel.label}(p{self.parcel.priority})"


@dataclass(eq=False)
class Work:
    """An open transaction."""

    name: str
    sends: list[tuple[str, Parcel]] = field(default_factory=list)
    acknowledged: list[Letter] = field(default_factory=list)
    refused: list[Letter] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """One dispatch as the broker made it."""

    label: str
    queue: str
    sequence: int
    priority: int
    persistent: bool
    expires_ms: int
    deliveries: int
    attempts: int


class Oracle:
    def __init__(self, attempts_max: int) -> None:
        self.attempts_max = attempts_max
        self.now_ms = 0
        self.letters: list[Letter] = []
        self.readers: list[Reader] = []
        self.peers: list[Peer] = []
        self.ended: list[Peer] = []
        self.sequences: dict[Letter, int] = {}
        """The broker's sequence of each message that was seen."""
        self.used_numbers: dict[tuple[str, int], int] = {}
        """Producer and number to the batch that makes its first use durable."""
        self.gathering = 1
        self.in_flight: int | None = None
        self.durable = 0
        self.must_be_written: set[int] = set()
        """Batches that cannot be empty."""
        self._order = 0
        self._step = 0
        self._event = 0

    # What the world asks ----------------------------------------------------------------------------------------------

    def connect(self, name: str) -> Peer:
        peer = Peer(name)
        self.peers.append(peer)
        return peer

    def subscribe(self, peer: Peer, subscription: str, queue: str, mode: AckMode, window: int | None) -> Reader:
        reader = Reader(peer, subscription, queue, mode, window, self._next_step())
        self.readers.append(reader)
        return reader

    def send(self, peer: Peer, queue: str, parcel: Parcel, transaction: str | None = None) -> None:
        if transaction is not None:
            # L4; Guarantees, L1: inside a transaction a receipt says only that the frame was taken.
            peer.transactions[transaction].sends.append((queue, parcel))
            return
        self._event += 1
        self._accept(peer, queue, parcel)

    def send_numbered(self, peer: Peer, queue: str, parcel: Parcel, producer: str, number: int) -> None:
        # L5: accepted once; the receipt of a repeat waits until the first is durable.
        first = self.used_numbers.get((producer, number))
        if first is not None:
            self._wait(peer, must=first, may=first)
            peer.may_wait_for = max(peer.may_wait_for, self.gathering)
            return
        self.send(peer, queue, parcel)
        self.used_numbers[producer, number] = self.gathering if parcel.persistent else AT_ONCE
        self._wait(peer, may=self.gathering)

    def acknowledge(self, peer: Peer, letter: Letter, transaction: str | None = None) -> None:
        covered = self.covered(letter)
        if transaction is not None:
            work = peer.transactions[transaction]
            for each in covered:
                each.acknowledged_by = work
            work.acknowledged.extend(covered)
            return
        for each in covered:
            self._remove(each)
            if each.persistent:
                self._wait(peer, must=self.gathering)  # L3

    def refuse(self, peer: Peer, letter: Letter, transaction: str | None = None) -> None:
        covered = self.covered(letter)
        if transaction is not None:
            # Return: a NACK inside a transaction takes effect at COMMIT.
            work = peer.transactions[transaction]
            for each in covered:
                each.refused_by = work
            work.refused.extend(covered)
            return
        self._event += 1
        self._wait(peer, may=self.gathering)
        self._give_back(covered, charged=covered)

    def begin(self, peer: Peer, transaction: str) -> None:
        peer.transactions[transaction] = Work(transaction)

    def commit(self, peer: Peer, transaction: str, producer: str | None = None, number: int = 0) -> None:
        self._event += 1
        work = peer.transactions.pop(transaction, None)
        if producer is not None:
            first = self.used_numbers.get((producer, number))
            if first is not None:
                assert work is None or not (work.acknowledged or work.refused), "not told by the contract"
                self._wait(peer, must=first, may=self.gathering)
                return
        assert work is not None
        # Ready: visible when the batch is durable, at once if it neither sends nor acknowledges anything persistent.
        is_lasting = any(parcel.persistent for _, parcel in work.sends)
        is_lasting = is_lasting or any(letter.persistent for letter in work.acknowledged)
        visible_from = self.gathering if is_lasting else AT_ONCE
        for queue, parcel in work.sends:
            self._accept(peer, queue, parcel, visible_from=visible_from, block=self._event)
        for letter in work.acknowledged:
            self._remove(letter)
        if is_lasting:
            self._wait(peer, must=self.gathering)  # L1, L3
        if work.refused or producer is not None:
            self._wait(peer, may=self.gathering)
        self._give_back(work.refused, charged=work.refused)
        if producer is not None:
            self.used_numbers[producer, number] = self.gathering if is_lasting else AT_ONCE

    def abort(self, peer: Peer, transaction: str) -> None:
        # Deliveries and attempts, ABORT: every message the transaction acknowledged or NACKed.
        self._event += 1
        work = peer.transactions.pop(transaction)
        returned = work.acknowledged + work.refused
        if returned:
            self._wait(peer, may=self.gathering)
        self._give_back(returned, charged=returned)

    def unsubscribe(self, reader: Reader) -> None:
        # Return: the end of its subscription; attempts: none. What a transaction acknowledged stays with it.
        self._event += 1
        self.readers.remove(reader)
        self._wait(reader.peer, may=self.gathering)
        self._give_back(self.unacknowledged(reader), charged=[])

    def disconnect(self, peer: Peer, is_clean: bool) -> None:
        self._event += 1
        returned = [letter for work in peer.transactions.values() for letter in work.acknowledged]
        if NACKED_STAYS_WITH_TRANSACTION:
            returned += [letter for work in peer.transactions.values() for letter in work.refused]
        charged = list(returned)
        for reader in [reader for reader in self.readers if reader.peer is peer]:
            held = self.unacknowledged(reader)
            returned += held
            if held and reader.mode is not AckMode.AUTO:
                charged.append(held[0])
            self.readers.remove(reader)
        self.peers.remove(peer)
        self.ended.append(peer)
        self._give_back(returned, charged=[] if is_clean else charged)

    def taken(self, peer: Peer) -> None:
        """The socket took every byte: there is room again, and auto mode counts it as acknowledged."""
        peer.unsent = 0
        for reader in self.readers:
            if reader.peer is peer and reader.mode is AckMode.AUTO:
                self.taken_before_loss(reader, len(self.unacknowledged(reader)))

    def taken_before_loss(self, reader: Reader, count: int) -> None:
        for letter in self.unacknowledged(reader)[:count]:
            self._remove(letter)
            if letter.persistent:
                self._wait(reader.peer, may=self.gathering)

    def ask_receipt(self, peer: Peer, receipt: str) -> None:
        peer.receipts.append(Pending(receipt, peer.must_wait_for, peer.may_wait_for))

    def take_batch(self, is_empty: bool) -> None:
        if is_empty:
            if self.gathering in self.must_be_written:
                raise Disagreement("take_batch() is None though something persistent happened")
            self.durable = self.gathering
        else:
            self.in_flight = self.gathering
        self.gathering += 1

    def committed(self) -> None:
        assert self.in_flight is not None
        self.durable = self.in_flight
        self.in_flight = None

    # What is asked of the oracle --------------------------------------------------------------------------------------

    def unacknowledged(self, reader: Reader) -> list[Letter]:
        """What a consumer holds unacknowledged, in order of dispatch."""
        held = [each for each in self.letters if each.holder is reader and each.acknowledged_by is None]
        if NACKED_STAYS_WITH_TRANSACTION:
            held = [each for each in held if each.refused_by is None]
        return sorted(held, key=lambda each: each.dispatched_at)

    def answerable(self, reader: Reader) -> list[Letter]:
        """What a consumer may still acknowledge or refuse, in order of dispatch."""
        return [each for each in self.unacknowledged(reader) if each.refused_by is None]

    def covered(self, letter: Letter) -> list[Letter]:
        """Return: a NACK is cumulative in `client` mode, as the ACK is."""
        reader = letter.holder
        assert reader is not None
        assert letter in self.answerable(reader)
        if reader.mode is not AckMode.CLIENT:
            return [letter]
        return [each for each in self.answerable(reader) if each.dispatched_at <= letter.dispatched_at]

    def has_credit(self, reader: Reader) -> bool:
        # True next: fewer unacknowledged messages than its window, and its connection has room for more bytes.
        if reader.peer.unsent >= ROOM_BYTES:
            return False
        return reader.window is None or len(self.unacknowledged(reader)) < reader.window

    def is_expired(self, letter: Letter) -> bool:
        # Expiry: its time has come.
        return 0 < letter.parcel.expires_ms <= self.now_ms

    def is_visible(self, letter: Letter) -> bool:
        return letter.visible_from <= self.durable

    def is_ready_for(self, letter: Letter, reader: Reader) -> bool:
        """Ready, as a whole section."""
        if letter.queue != reader.queue or letter.is_gone or letter.holder is not None:
            return False
        if not self.is_visible(letter) or self.is_expired(letter):
            return False
        return not any(
            other.queue == letter.queue
            and other.parcel.priority == letter.parcel.priority
            and other.order < letter.order
            and not self.is_visible(other)
            and (EXPIRED_COMMIT_HOLDS_BACK or not self.is_expired(other))
            for other in self.letters
        )

    def true_next(self, reader: Reader) -> Letter | None:
        """TN(c): the message of smallest K that is ready for c."""
        ready = [letter for letter in self.letters if self.is_ready_for(letter, reader)]
        return min(ready, key=lambda letter: letter.key) if ready else None

    def next_dispatch(self, queue: str) -> tuple[Letter, Reader] | None:
        """The only legal next dispatch of one queue, None if there must not be any."""
        offers = []
        for reader in self.readers:
            if reader.queue == queue and self.has_credit(reader):
                letter = self.true_next(reader)
                if letter is not None:
                    # True next: the fewest unacknowledged messages, then the longest waiting.
                    rank = (letter.key, len(self.unacknowledged(reader)), reader.waiting_since)
                    offers.append((rank, letter, reader))
        if not offers:
            return None
        _, letter, reader = min(offers, key=lambda offer: offer[0])
        return letter, reader

    def check_turn(self, dispatched: dict[Reader, list[Seen]], answered: list[tuple[str, str]]) -> None:
        """Compare a turn of the broker with the contract, and follow it.

        Raises: Disagreement
        """
        self._check_receipts(answered)
        self._check_dispatches(dispatched)

    def saw_batch(self, stored: list[tuple[Letter, int]]) -> None:
        """Learn the sequences of new stored messages.

        Which of the messages that one event dead-letters is the first arrival, the contract does not say. None of them
        is visible before its batch is durable, so the oracle can learn it here, before it matters.
        """
        for letter, _ in stored:
            together = [
                (theirs, other)
                for other, theirs in stored
                if other.is_dead_letter and (other.event, other.queue) == (letter.event, letter.queue)
            ]
            if letter.is_dead_letter and together[0][1] is letter:
                orders = sorted(other.order for _, other in together)
                for order, (_, other) in zip(orders, sorted(together, key=lambda pair: pair[0]), strict=True):
                    other.order = order
        for letter, sequence in stored:
            self.saw_sequence(letter, sequence)

    def saw_sequence(self, letter: Letter, sequence: int) -> None:
        """The key: given at acceptance, in order; unbroken within a transaction; never changed, never given twice."""
        known = self.sequences.get(letter)
        if known is not None:
            if known != sequence:
                raise Disagreement(f"{letter} changed its sequence from {known} to {sequence}")
            return
        for other, theirs in self.sequences.items():
            if letter.block and other.block == letter.block:
                is_right = sequence - theirs == letter.order - other.order
            elif letter.event != other.event or letter.queue == other.queue:
                is_right = sequence != theirs and (sequence < theirs) == (letter.order < other.order)
            else:
                is_right = sequence != theirs
            if not is_right:
                raise Disagreement(f"{letter} has sequence {sequence}, {other} has {theirs}: not as accepted")
        self.sequences[letter] = sequence

    def letter(self, label: str, queue: str) -> Letter:
        found = [each for each in self.letters if each.parcel.label == label and each.queue == queue]
        if len(found) != 1:
            raise Disagreement(f"the broker knows a message {label} in {queue}; it should not be there")
        return found[0]

    def stored(self) -> tuple[list[Letter], list[Letter]]:
        """The messages that must be found after a crash now, and those that may."""
        must: list[Letter] = []
        may: list[Letter] = []
        for letter in self.letters:
            if letter.stored_in is None or letter.stored_in > self.durable:
                continue
            if letter.removed_in is not None and letter.removed_in <= self.durable:
                continue
            # Expiry: removed when dispatch comes upon it; nobody can see when that was.
            is_optional = self.is_expired(letter) and not letter.is_gone and letter.holder is None
            (may if is_optional else must).append(letter)
        return must, may

    def stored_attempts(self, letter: Letter) -> int:
        """Restart: attempts of a persistent message survive a crash."""
        return max((attempts for batch, attempts in letter.written_attempts if batch <= self.durable), default=0)

    # How things change ------------------------------------------------------------------------------------------------

    def _accept(
        self,
        peer: Peer | None,
        queue: str,
        parcel: Parcel,
        *,
        visible_from: int | None = None,
        block: int = 0,
        is_dead_letter: bool = False,
    ) -> None:
        persistent = parcel.persistent or is_dead_letter
        if persistent:
            self.must_be_written.add(self.gathering)
            if peer is not None:
                self._wait(peer, must=self.gathering)  # L1
        if visible_from is None:
            visible_from = self.gathering if persistent else AT_ONCE
        self._order += 1
        self.letters.append(
            Letter(
                parcel,
                queue,
                persistent,
                self._order,
                self._event,
                block,
                visible_from,
                stored_in=self.gathering if persistent else None,
                is_dead_letter=is_dead_letter,
            )
        )

    def _remove(self, letter: Letter) -> None:
        letter.is_gone = True
        letter.holder = letter.acknowledged_by = letter.refused_by = None
        if letter.persistent:
            letter.removed_in = self.gathering
            self.must_be_written.add(self.gathering)

    def _give_back(self, returned: Iterable[Letter], charged: Iterable[Letter]) -> None:
        """Return: at its exact place again, all in one step."""
        charged = list(charged)
        for letter in sorted(returned, key=lambda each: each.key):
            for work in (letter.acknowledged_by, letter.refused_by):
                if work is not None:
                    work.acknowledged = [each for each in work.acknowledged if each is not letter]
                    work.refused = [each for each in work.refused if each is not letter]
            letter.holder = letter.acknowledged_by = letter.refused_by = None
            if letter in charged:
                self._charge(letter)

    def _charge(self, letter: Letter) -> None:
        letter.attempts += 1
        if letter.persistent:
            letter.written_attempts.append((self.gathering, letter.attempts))
            self.must_be_written.add(self.gathering)
        if letter.attempts >= self.attempts_max and not letter.queue.startswith(DEAD_LETTER_PREFIX):
            # Attempts: dead-lettered in the same step that removes it, a new arrival, persistent whatever it was.
            self._remove(letter)
            parcel = letter.parcel if DEAD_LETTERS_EXPIRE else replace(letter.parcel, expires_ms=0)
            self._accept(None, DEAD_LETTER_PREFIX + letter.queue, parcel, is_dead_letter=True)

    def _wait(self, peer: Peer, *, must: int = AT_ONCE, may: int = AT_ONCE) -> None:
        peer.must_wait_for = max(peer.must_wait_for, must)
        peer.may_wait_for = max(peer.may_wait_for, peer.must_wait_for, may)

    def _next_step(self) -> int:
        self._step += 1
        return self._step

    # Comparing --------------------------------------------------------------------------------------------------------

    def _check_receipts(self, answered: list[tuple[str, str]]) -> None:
        # What is said to a connection that has ended is lost; it must not be a lie either.
        for peer in self.peers + self.ended:
            answers = [receipt for name, receipt in answered if name == peer.name]
            due, peer.receipts = peer.receipts[: len(answers)], peer.receipts[len(answers) :]
            if answers != [pending.receipt for pending in due]:
                raise Disagreement(f"{peer.name} got the receipts {answers}, asked for were {due}")
            for pending in due:
                if pending.must_wait_for > self.durable:
                    raise Disagreement(f"{peer.name} got {pending}, but only batch {self.durable} is durable")
            for pending in peer.receipts:
                if pending.may_wait_for <= self.durable and peer in self.peers:
                    raise Disagreement(f"{peer.name} did not get {pending}, though batch {self.durable} is durable")

    def _check_dispatches(self, dispatched: dict[Reader, list[Seen]]) -> None:
        for reader in dispatched:
            if reader not in self.readers:
                raise Disagreement(f"a dispatch to {reader}, which is not there")
        labels = {reader: [seen.label for seen in dispatched.get(reader, [])] for reader in self.readers}
        # Not promised: order across queues. Only queues that share a connection's room can tell the difference.
        queues = sorted({reader.queue for reader in self.readers})
        if not self._explain(queues, labels, dict.fromkeys(self.readers, 0), dict.fromkeys(queues, 0), set()):
            expected: dict[Reader, list[Letter]] = {}
            for queue in queues:
                while (step := self.next_dispatch(queue)) is not None:
                    self._dispatch(*step)
                    expected.setdefault(step[1], []).append(step[0])
            raise Disagreement(
                f"dispatched, by the contract: {expected}; by the broker: "
                f"{ {reader: seen for reader, seen in dispatched.items() if seen} }"
            )
        for reader, all_seen in dispatched.items():
            for seen in all_seen:
                letter = self.letter(seen.label, reader.queue)
                self.saw_sequence(letter, seen.sequence)
                right = Seen(
                    letter.parcel.label,
                    letter.queue,
                    seen.sequence,
                    letter.parcel.priority,
                    letter.persistent,
                    letter.parcel.expires_ms,
                    letter.deliveries,
                    letter.attempts,
                )
                if seen != right:
                    raise Disagreement(f"{reader} got {seen}; by the contract {right}")

    def _explain(
        self,
        queues: list[str],
        labels: dict[Reader, list[str]],
        done: dict[Reader, int],
        progress: dict[str, int],
        failed: set[tuple[int, ...]],
    ) -> bool:
        """Find an order of the queues' steps that makes what the broker did legal, and take them.

        `done` and `progress` count the steps taken so far, `failed` remembers what led nowhere.
        Returns: False, with nothing changed, if there is no such order.
        """
        state = tuple(progress[queue] for queue in queues)
        if state in failed:
            return False
        steps = [step for queue in queues if (step := self.next_dispatch(queue)) is not None]
        if not steps and all(done[reader] == len(labels[reader]) for reader in done):
            return True
        for letter, reader in steps:
            at = done[reader]
            if at < len(labels[reader]) and labels[reader][at] == letter.parcel.label:
                undo = (letter.dispatched_at, reader.waiting_since)
                self._dispatch(letter, reader)
                done[reader] += 1
                progress[reader.queue] += 1
                if self._explain(queues, labels, done, progress, failed):
                    return True
                progress[reader.queue] -= 1
                done[reader] -= 1
                letter.holder = None
                letter.deliveries -= 1
                letter.dispatched_at, reader.waiting_since = undo
                reader.peer.unsent -= letter.parcel.size
        failed.add(state)
        return False

    def _dispatch(self, letter: Letter, reader: Reader) -> None:
        letter.holder = reader
        letter.deliveries += 1
        letter.dispatched_at = reader.waiting_since = self._next_step()
        reader.peer.unsent += letter.parcel.size
