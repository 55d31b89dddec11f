"""Oracle that decides which consumer gets which message next, by docs/contract.md alone.

Written from the contract and never from the engine. Naive on purpose: one list of messages, searched and sorted again
for each question. Numbers such as C4.1 in comments are clauses of docs/contract.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from tests.property.producers_oracle import JmsProducers, Kind, NumberStatus, Producers
from truenext.model.commands import AckMode

UNSENT_BYTES_MAX = 1024 * 1024
"""A connection has room for more bytes while fewer than these are unsent (limits.UNSENT_BYTES_MAX)."""

SOCKETS_BYTES_MIN = 4 * 1024 * 1024
"""Bytes that all sockets together may have unsent, however little memory there is."""

DEAD_LETTER_PREFIX = "DLQ."
SPARK_PREFIX = "Spark."
SPARK_SURPLUS = 16_384
"""C24.8: bytes that a transaction may send there beyond what it frees."""
CONTENT_BYTES_MIN = 1024
REFERENCE_BYTES = 34
"""C6.13, C24.6, C24.7: bytes of a reference to a content, which copies share from CONTENT_BYTES_MIN on."""
MESSAGE_BYTES = 26
"""C24.5: what a message takes more than its headers and body."""
REPORT_LABEL = "r"
"""A report has no body: its label is this, its sequence, a colon and the id."""
TOPIC = "/topic/"
AT_ONCE = 0

Filter = Callable[["Parcel"], bool]
SELECTORS: dict[str, Filter] = {
    "colour = 'red'": lambda parcel: parcel.colour == "red",
    "colour IS NOT NULL": lambda parcel: parcel.colour != "",
    "JMSPriority > 6": lambda parcel: parcel.priority > 6,
    "colour <> 'red' AND JMSPriority < 9": lambda parcel: parcel.colour == "blue" and parcel.priority < 9,
}
"""Selectors of consumers, and what each of them wants."""

# Where the contract is silent or can be read in two ways, the oracle follows one of them. Each is a question to the
# contract; none of them may hide a mistake of the engine.

NACKED_STAYS_WITH_TRANSACTION = True
"""C9.3 says "a NACK inside a transaction takes effect at COMMIT". Until then the message either counts as one that
the transaction acknowledged (it has left the window, an UNSUBSCRIBE does not return it, a lost connection charges it:
True), or as unacknowledged (False)."""
DEAD_LETTERS_EXPIRE = False
"""C11.2 says that a dead letter has no expiry (False)."""
EXPIRED_COMMIT_BLOCKS = True
"""C3.5 says that an earlier message in commit "that this consumer could take" holds back. No consumer could take an
expired one; on the other hand only its removal would wake the queue before the commit does."""
DEAD_LETTERS_WAIT_FOR_THEIR_BATCH = True
"""C3.1 lets a persistent message be visible when it is accepted, with `--store-and-dispatch concurrent`, unless it was
sent in a transaction. A dead letter is persistent, and was sent by nobody: it waits for its batch either way (True)."""
LATE_NACK_IS_CUMULATIVE = False
"""C9.3 says that a NACK inside a transaction may name a message that this transaction has acknowledged, and that the
transaction then NACKs *it*: also in `client` mode that one, and none before it (False)."""
WITHDRAWING_WAKES = False
"""C21.4 says that withdrawing a pull request does not wake a suspended subscription (False)."""
REQUESTED_MAX = 32_767
"""C21.1: maximal number of messages requested in all."""


class Disagreement(AssertionError):
    """The broker did something that the contract does not allow."""


@dataclass(frozen=True)
class Retries:
    """Delays before a failed message is retried (C9.5), in milliseconds."""

    first_delay: int = 0
    delay: int = 1000
    backoff: float = 1.0
    delay_max: int = 300_000
    holds: bool = False
    """The rest of the queue waits as well (`block` of C3.6)."""

    def after(self, attempts: int) -> int:
        if attempts == 1:
            return self.first_delay
        delay = float(self.delay)
        for _ in range(attempts - 2):
            delay *= self.backoff
        return int(min(delay, self.delay_max))


@dataclass(frozen=True)
class NackOptions:
    """Options of a NACK for the next attempt."""

    delay: int | None = None
    is_rejected: bool = False
    cause: str = ""


NO_CAUSES = ("", "")
"""The first and the last (C10.11)."""


@dataclass(frozen=True)
class Written:
    """Failures of a message as the store knows them from this batch on."""

    batch: int
    attempts: int
    due_ms: int
    """Due time by the wall clock, in ms; 0 if the message does not wait."""
    is_rejected: bool
    was_lost: bool = False
    causes: tuple[str, str] = NO_CAUSES


@dataclass(frozen=True)
class Parcel:
    """Message as a producer sends it."""

    label: str
    priority: int
    persistent: bool
    expires_ms: int
    size: int
    colour: str = ""
    """A property, which selectors ask for."""
    group: str = ""
    """C5.1: empty is none."""
    closes_group: bool = False
    ttl_ms: int = 0
    """C15.4: time to live from the acceptance on, in ms; 0 if the message has an `expires` of its own."""
    report_to: str = ""
    """C11.7: queue that gets the reports; empty if the message asks for none."""
    handlers: tuple[str, ...] = ()
    """C11.8: queues that handle the message if it fails."""
    due_ms: int = 0
    """C14.12: time at which the scheduled send was due; 0 of any other message."""

    @property
    def unsent(self) -> int:
        """Bytes that a socket has to take, roughly, and never 0."""
        return self.size + 1


@dataclass(eq=False)
class Peer:
    """One connection."""

    name: str
    transactions: dict[str, "Work"] = field(default_factory=dict)
    receipts: list["Pending"] = field(default_factory=list)
    unsent: int = 0
    must_wait_for: int = AT_ONCE
    """The batch that C18.1, C18.3 and C18.6 make a receipt asked for now wait for."""
    may_wait_for: int = AT_ONCE
    """The last batch that anything of this connection went to: no receipt asked for now has a reason to wait longer."""
    is_truenext_client: bool = False
    """True if the client said so (C22.1)."""
    is_jms_client: bool = False
    """C26.1."""
    is_cut: bool = False
    """C22.5; the machine may go on with it all the same."""
    round: int = 0
    """C20.7: number of releases carried out."""

    def causes_in_transactions(self) -> list[str]:
        return [cause for work in self.transactions.values() for cause in work.causes]

    def parcels_in_transactions(self) -> list[Parcel]:
        return [parcel for work in self.transactions.values() for _, parcel in work.sends]


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
    priority: int = 0
    is_exclusive: bool = False
    has_express: bool = False
    is_stretched: bool = False
    """True if the automatic window has doubled since the last message came; told by the broker, as is the window."""
    selector: str | None = None
    acknowledged_at: int = 0
    """The step of its last acknowledgement."""
    joined: set[str] | None = None
    """C7.2: the queues that it has joined so far, told by the broker; None once these are all."""
    is_suspended: bool = False
    """C20.4: True if the subscription gets nothing until it is woken."""
    is_pulling: bool = False
    requested: int = 0
    """C21.1: number of messages requested and not received yet."""
    waits: bool = False
    """True if the pull request stays until all its messages have come (C21.2)."""
    correlation: str | None = None
    """Correlation of the last pull request."""
    pull_ends_ms: int | None = None
    """C26.4: time at which the pull request is withdrawn, by the clock that does not jump."""

    @property
    def is_of_many(self) -> bool:
        """C7.1."""
        return _is_of_many(self.queue)

    def is_for(self, queue: str) -> bool:
        return _is_for(self.queue, queue) and (self.joined is None or queue in self.joined)

    def matches(self, letter: "Letter") -> bool:
        # C3.4: one without a selector wants any.
        return self.selector is None or SELECTORS[self.selector](letter.parcel)

    def __repr__(self) -> str:
        where = f" WHERE {self.selector}" if self.selector else ""
        return f"{self.peer.name}/{self.subscription}({self.queue},{self.mode.value},{self.window}{where})"


@dataclass(frozen=True)
class Ended:
    """Notice to a pulling subscription that a pull request has ended (C21.3)."""

    unused: int
    correlation: str | None


@dataclass(eq=False)
class OpenBrowse:
    """One browse (chapter 17), and what of its queue was as it is when it began."""

    peer: Peer
    subscription: str
    queue: str
    priorities: range
    """Priorities that the selector matches."""
    started_ms: int
    hidden: set["Letter"]
    """Messages that were held or gone during the whole browse."""
    waiting: dict["Letter", int]
    """Messages that must be shown unless their state changes, with their `dispatched_at`. The number of deliveries
    would be no sign of a change: after a crash and a clean stop it may be smaller again."""
    shown: list["Letter"] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"{self.peer.name}/{self.subscription}(browses {self.queue})"


@dataclass(eq=False)
class Letter:
    """A message after its acceptance."""

    parcel: Parcel
    queue: str
    persistent: bool
    order: int
    """Sequences in the oracle's own counting; only their order means something."""
    event: int
    """Number of the command that accepted the message."""
    block: int
    """The transaction or the send to many queues that accepted it, 0 if none: its sequences are unbroken."""
    visible_from: int
    """The batch that makes it visible."""
    stored_in: int | None
    """The batch that writes it; of a transient one that left memory, once that was seen."""
    copies: range = range(0)
    """`order` of all copies of the send; which copy has which is not known."""
    is_dead_letter: bool = False
    """It arrived here by a failure: a dead letter, a handled message or a report."""
    origin: "Letter | None" = None
    """Message that became this dead letter, or that it reports."""
    handlers: tuple[str, ...] = ()
    """C11.8: handlers that are left."""
    failure: str = ""
    """C11.7, C11.8: `handled` or `report`."""
    failed_in: str = ""
    """C11.10: queue of the first failure, of a handled message or a report."""
    least_deliveries: int | None = None
    """An unclean stop has come over it, and it was not dispatched since: its next dispatch is counted as this one at
    least, and as `deliveries` at most."""
    removed_in: int | None = None
    is_removed: bool = False
    holder: Reader | None = None
    kept_by: "Work | None" = None
    """C26.5: transaction that acknowledges it with its COMMIT."""
    acknowledged_by: "Work | None" = None
    nacked_by: "Work | None" = None
    is_first_of_group: bool = False
    """True if its last dispatch made its consumer the owner of its group (C5.2)."""
    dispatched_at: int = 0
    deliveries: int = 0
    attempts: int = 0
    freed_ms: int | None = None
    """Time at which it was held last, in ms."""
    is_started: bool = False
    """True if its consumer has reported this dispatch as started."""
    is_flagged: bool = False
    """True if the next dispatch is `redelivered` (C10.1, C10.14)."""
    was_lost: bool = False
    """True if its last attempt was a lost connection."""
    was_held_when_lost: bool | None = False
    """C26.8: True if a connection that held it was lost; None if a crash may have forgotten that."""
    causes: tuple[str, str] = NO_CAUSES
    original_causes: tuple[str, str] = NO_CAUSES
    """Causes in a dead letter, those of the original message."""
    due: int = 0
    """Time of the next retry, by the clock that does not jump."""
    is_rejected: bool = False
    nack_options: NackOptions = field(default_factory=NackOptions)
    """Options of the NACK in the transaction that nacked it."""
    may_move_as: tuple[int, int] | None = None
    """Order and event of its move if the broker had not removed it yet: it had expired when a new policy gave it up."""
    is_restored: bool = False
    """True if it failed before the restart, and not since. The wall clock decides when it is due, so that must not
    jump: a page may not have shown the message yet, nor before the next restart."""
    written: list[Written] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        """C2.1: K(m) = (9 - priority, sequence)."""
        return (9 - self.parcel.priority, self.order)

    def __repr__(self) -> str:
        return f"{self.queue}:{self.parcel.label}(p{self.parcel.priority})"


@dataclass(eq=False)
class Planned:
    """A scheduled send (chapter 14)."""

    parcel: Parcel
    queue: str
    due_ms: int
    arrival: int
    """In the oracle's own counting."""
    stored_in: int
    removed_in: int | None = None

    def __repr__(self) -> str:
        return f"{self.queue}:{self.parcel.label} due {self.due_ms}"


@dataclass(eq=False)
class Work:
    """An open transaction."""

    name: str
    sends: list[tuple[str, Parcel]] = field(default_factory=list)
    acknowledged: list[Letter] = field(default_factory=list)
    nacked: list[Letter] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    """Causes of NACKs in the transaction; they count like sends."""
    is_rollback_only: bool = False
    """A frame of it was refused: it can only be aborted (C23.5)."""
    counts_all: bool = True
    """C10.3: its BEGIN has not said that it counts what it NACKs and nothing else."""

    def failed(self) -> list[Letter]:
        """C10.2, C10.3: what an end of it counts an attempt for, if the frame that ends it asks for no less."""
        return self.acknowledged + self.nacked if self.counts_all else list(self.nacked)

    def add_cause(self, options: NackOptions | None) -> None:
        if options is not None and options.cause:
            self.causes.append(options.cause)


@dataclass(frozen=True)
class Move:
    """A message that is to be dead-lettered, and was not seen in its new queue yet."""

    origin: Letter
    order: int
    event: int
    since: int
    """The batch that gathered when it failed."""
    report_order: int = 0
    """Order of its report, if it sends one."""


@dataclass(eq=False)
class Durable:
    """A durable subscription, from the batch that makes it to that which ends it."""

    queue: str
    topic: str
    selector: str | None
    made_in: int
    ended_in: int | None = None

    @property
    def dead_letters(self) -> str:
        """C11.4: `DLQ.` + name, which is that of client and subscription."""
        return DEAD_LETTER_PREFIX + ".".join(self.queue.split(",")[:3])


@dataclass(frozen=True)
class Numbered:
    """A SEND or COMMIT that may be repeated."""

    producer: str
    kind: Kind
    number: int
    declares_gapless: bool = False


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
    is_first_of_group: bool = False
    was_lost: bool = False
    causes: tuple[str, str] = NO_CAUSES
    original_causes: tuple[str, str] = NO_CAUSES
    is_redelivered: bool = False
    failure: str = ""
    handlers: tuple[str, ...] = ()
    failed_in: str = ""
    due_ms: int = 0
    """C14.12: what the MESSAGE says."""
    redeliveries: int = 0
    """C26.8: what a JMS client is told."""


@dataclass(frozen=True)
class Report:
    """A report that the gathering batch must have (C11.7)."""

    origin: Letter
    order: int
    event: int
    original_causes: tuple[str, str]
    failed_in: str


class Oracle:
    def __init__(
        self,
        attempts_max: int,
        *,
        is_concurrent: bool = False,
        expired_move: bool = False,
        retries: Retries | None = None,
        producers_max: int = 100_000,
        resolved_max: int = 100,
    ) -> None:
        self.attempts_max = attempts_max
        self.retries = retries or Retries()
        self.expired_move = expired_move
        """True if expired messages move to the dead-letter queue (C15.1), or have at some time."""
        self.is_concurrent = self.was_concurrent = is_concurrent
        """Persistent messages are visible when they are accepted (C3.1)."""
        self.may_evict = False
        """Messages may have left memory, or have never been there in this run: what needs one may have to wait for a
        page, and a receipt for the removal of a transient one."""
        self.moves_later = False
        """One event may give up more messages than become dead letters at once (C10.5)."""
        self.sockets_max: int | None = None
        """Bytes that all sockets together may have to take (C4.5)."""
        self.now_ms = 0
        self.steady_ms = 0
        """Time of a clock that does not jump, in ms."""
        self.letters: list[Letter] = []
        self.readers: list[Reader] = []
        self.owners: dict[tuple[str, str], Reader] = {}
        """Owner of each owned group of a queue (C5.2, C7.8); the others are free."""
        self.scanning_for: dict[str, dict[Reader, int]] = {}
        """Queues with groups, and for each waiting consumer the rank up to which it waits for a comparison or a read;
        told by the broker."""
        self.topics: dict[str, str] = {}
        """Topic or pattern of each subscription to a topic, by its queue."""
        self.selectors: dict[str, str] = {}
        """Selector of each subscription to a topic that has one."""
        self.durables: list[Durable] = []
        """Durable subscriptions that a crash may leave."""
        self.queues: set[str] = set()
        """Ordinary ones that are known to exist."""
        self.made_in: dict[str, int] = {}
        """Queues of virtual topics, with the batch that creates each."""
        self.peers: list[Peer] = []
        self.ended: list[Peer] = []
        self.sequences: dict[Letter, int] = {}
        """The broker's sequence of each message that was seen."""
        self.producers = Producers(producers_max, resolved_max)
        self.jms_producers = JmsProducers(producers_max, resolved_max)
        self.planned: list[Planned] = []
        self.paused: frozenset[str] = frozenset()
        self.pauses: list[tuple[int, str, bool]] = []
        """With the batch that writes each."""
        self.moves: list[Move] = []
        self.reports: list[Report] = []
        """Reports of dead letters of the gathering batch that were not seen in it yet."""
        self.browses: list[OpenBrowse] = []
        """Browses that were not told yet that this was all."""
        self.gathering = 1
        self.in_flight: int | None = None
        self.durable = 0
        self.attempt_counted_in = 0
        """The last batch with an attempt of a persistent message."""
        self._is_roomy = False
        """No connection's room shuts in this turn, so that any order of the queues will do, or none."""
        self._reading: dict[str, int] = {}
        self.unfinished: set[Reader | None] = set()
        """Consumers that may get more in the next turn, because the last one has reached its limit (C4.3)."""
        self.held_max = 25_000
        """Messages that a connection holds before it has no credit (C4.14)."""
        self._full_peers: set[Peer] = set()
        """Connections that held so many messages when the turn began."""
        """Queues for which pages are being read, with the smallest rank among those."""
        self.scanning: dict[tuple[str, str], int] = {}
        """Rank, by queue and selector, up to which older messages are not compared yet, or one must be read; told by
        the broker."""
        self._order = 0
        self._step = 0
        self._event = 0

    # What the world asks ----------------------------------------------------------------------------------------------

    def connect(self, name: str, *, is_truenext_client: bool = False, is_jms_client: bool = False) -> Peer:
        peer = Peer(name, is_truenext_client=is_truenext_client, is_jms_client=is_jms_client)
        self.peers.append(peer)
        return peer

    def subscribe(
        self,
        peer: Peer,
        subscription: str,
        queue: str,
        mode: AckMode,
        window: int | None,
        *,
        priority: int = 0,
        is_exclusive: bool = False,
        has_express: bool = False,
        is_pulling: bool = False,
        selector: str | None = None,
        spelling: str | None = None,
    ) -> Reader:
        """`spelling` is how the SUBSCRIBE spells the selector, if otherwise than SELECTORS does."""
        step = self._next_step()
        if "#" in queue:
            topic, _, name = queue.removeprefix(TOPIC).partition("#")
            queue = self._ensure_durable(peer, name, topic, selector, spelling or selector)
            selector = None
        elif queue.startswith(TOPIC):
            topic = queue.removeprefix(TOPIC)
            queue = f"/{peer.name}//{subscription}"
            self._add_subscription(queue, topic, selector)
            # C6.8: what its selector does not want is not copied; from there on it has none.
            selector = None
        elif "*" not in queue and ">" not in queue:
            self._name(peer, queue)
            # C6.10: so does the receipt of any SUBSCRIBE to it.
            self._wait(peer, must=self.made_in.get(queue, AT_ONCE))
        reader = Reader(peer, subscription, queue, mode, window, step, priority, is_exclusive, has_express)
        reader.selector = selector
        reader.is_pulling = is_pulling
        self.readers.append(reader)
        return reader

    def send(self, peer: Peer, queue: str, parcel: Parcel, transaction: str | None = None) -> None:
        if transaction is not None:
            # C18.4; C18.1: inside a transaction a receipt says only that the frame was taken.
            peer.transactions[transaction].sends.append((queue, parcel))
            return
        self._event += 1
        parcel = self._with_ttl(parcel)
        self._accept(peer, self.copied_to(queue, parcel, peer), parcel, block=self._event)

    def send_numbered(self, peer: Peer, queue: str, parcel: Parcel, numbered: Numbered) -> NumberStatus:
        """Send a message with a number; return the status in its receipt. It is not refused."""
        # C18.5, C18.6: accepted once; the receipt of a repeat waits until the first is durable.
        status = self.status_of(numbered)
        if status is not NumberStatus.NEW:
            self._repeated(peer, numbered)
            return status
        made = len(self.made_in)
        self.send(peer, queue, parcel)
        self._use(numbered, is_stored=self._is_stored(queue, parcel), has_made=len(self.made_in) > made)
        self._wait(peer, may=self.gathering)
        return status

    def _repeated(self, peer: Peer, numbered: Numbered) -> None:
        first = self.producers.first_use_in(numbered.producer, numbered.kind, numbered.number)
        self.producers.repeated(numbered.producer, self.now_ms, self.gathering)
        self._wait(peer, must=first, may=self.gathering)

    def status_of(self, numbered: Numbered) -> NumberStatus:
        return self.producers.status_of(
            numbered.producer, numbered.kind, numbered.number, declares_gapless=numbered.declares_gapless
        )

    def acknowledge(self, peer: Peer, letter: Letter, transaction: str | None = None) -> None:
        covered = self.covered(letter)
        assert letter.holder is not None
        letter.holder.acknowledged_at = self._next_step()
        if transaction is not None:
            work = peer.transactions[transaction]
            for each in covered:
                each.acknowledged_by = work
            work.acknowledged.extend(covered)
            return
        for each in covered:
            self._acknowledged(peer, each)
        self._free_groups_of_suspended()

    def nack(
        self, peer: Peer, letter: Letter, transaction: str | None = None, options: NackOptions | None = None
    ) -> None:
        covered = self.covered(letter)
        for each in covered:
            each.nack_options = options or NackOptions()
        if transaction is not None:
            # C9.3: a NACK inside a transaction takes effect at COMMIT.
            work = peer.transactions[transaction]
            for each in covered:
                each.nacked_by = work
            work.nacked.extend(covered)
            work.add_cause(options)
            return
        self._event += 1
        self._wait_for_return(peer, failed=covered)
        self._requeue(covered, failed=covered, is_tried_later=True, is_by_frame=True)
        self._free_groups_of_suspended()

    def keep(self, peer: Peer, letter: Letter, transaction: str) -> None:
        """C26.5: a JMS client acknowledges a message in a transaction: until COMMIT its consumer holds it."""
        letter.kept_by = peer.transactions[transaction]

    def kept(self, work: Work) -> list[Letter]:
        return [letter for letter in self.letters if letter.kept_by is work]

    def take_kept(self, peer: Peer, reader: Reader) -> None:
        """C26.6: what a consumer that ends has kept is the transaction's from then on."""
        for work in peer.transactions.values():
            for letter in [each for each in self.kept(work) if each.holder is reader]:
                letter.kept_by = None
                if not work.is_rollback_only:
                    self.acknowledge(peer, letter, work.name)

    def nack_acknowledged(self, letter: Letter, options: NackOptions) -> None:
        """C9.3: a NACK inside a transaction may name a message that this transaction has acknowledged."""
        work = letter.acknowledged_by
        assert work is not None
        work.add_cause(options)
        nacked = [letter]
        if LATE_NACK_IS_CUMULATIVE and letter.holder is not None and letter.holder.mode is AckMode.CLIENT:
            nacked = [each for each in work.acknowledged if each.holder is letter.holder]
            nacked = [each for each in nacked if each.dispatched_at <= letter.dispatched_at]
        for each in nacked:
            each.nack_options = options
            each.acknowledged_by, each.nacked_by = None, work
            work.acknowledged.remove(each)
            work.nacked.append(each)

    def mark_started(self, letter: Letter) -> None:
        """C10.9: it is said of one dispatch, costs no sync, and nothing else follows from it."""
        assert letter.holder is not None and letter in self.unacknowledged(letter.holder)
        letter.is_started = True

    def begin(self, peer: Peer, transaction: str, *, counts_all: bool = True) -> None:
        peer.transactions[transaction] = Work(transaction, counts_all=counts_all)

    def mark_rollback_only(self, peer: Peer, transaction: str) -> None:
        """C23.5: a transaction of which a frame was refused can only be aborted."""
        if transaction in peer.transactions:
            peer.transactions[transaction].is_rollback_only = True

    def commit(
        self, peer: Peer, transaction: str, numbered: Numbered | None = None, *, counts_all: bool = True
    ) -> NumberStatus:
        """Commit a transaction; return the status in its receipt. It is not refused."""
        status = NumberStatus.NEW if numbered is None else self.status_of(numbered)
        if numbered is not None and status is not NumberStatus.NEW:
            # C18.6, C18.7: a transaction that is open ends as by ABORT; the receipt waits until the first is durable.
            if transaction in peer.transactions:
                self.abort(peer, transaction, counts_all=counts_all)
            self._repeated(peer, numbered)
            return status
        self._event += 1
        work = peer.transactions.pop(transaction)
        # C26.5: in one step.
        work.acknowledged += self.kept(work)
        # C3.2: visible when the batch is durable, at once if it neither sends nor acknowledges anything persistent.
        made = len(self.made_in)
        spread = [self.copied_to(queue, parcel, peer) for queue, parcel in work.sends]
        parcels = [self._with_ttl(parcel) for _, parcel in work.sends]
        is_lasting = any(_is_stored(parcel, queues) for parcel, queues in zip(parcels, spread, strict=True))
        is_lasting |= any(letter.persistent and not _is_temporary(letter.queue) for letter in work.acknowledged)
        visible_from = self.gathering if is_lasting else AT_ONCE
        for parcel, queues in zip(parcels, spread, strict=True):
            self._accept(peer, queues, parcel, visible_from=visible_from, block=self._event)
        for letter in work.acknowledged:
            self._acknowledged(peer, letter)
        if is_lasting or work.nacked or numbered is not None:
            self._wait_for_return(peer, failed=work.nacked)
        self._requeue(work.nacked, failed=work.nacked, is_tried_later=True)
        self._free_groups_of_suspended()
        if numbered is not None:
            self._use(numbered, is_stored=is_lasting, has_made=len(self.made_in) > made)
        return status

    # Where there is no room -------------------------------------------------------------------------------------------

    def takes_as_much(self, sends: Iterable[tuple[str, Parcel, int]], freed: int) -> bool:
        """C24.5, C24.7, C24.8: true if a transaction that frees these bytes may send these messages, each with its size
        in bytes."""
        elsewhere = to_spark = 0
        for address, parcel, size in sends:
            if address.startswith(SPARK_PREFIX):
                to_spark += size + MESSAGE_BYTES
            else:
                elsewhere += self._bytes_of_copies(address, parcel, size)
        return elsewhere <= freed and elsewhere + to_spark <= freed + SPARK_SURPLUS

    def _bytes_of_copies(self, address: str, parcel: Parcel, size: int) -> int:
        if "," not in address and not address.startswith(TOPIC):
            return size + MESSAGE_BYTES
        # C8.1: inside a transaction they are made at COMMIT.
        queues, made_in = set(self.queues), dict(self.made_in)
        count = len(self.copied_to(address, parcel))
        self.queues, self.made_in = queues, made_in
        if count < 2 or size < CONTENT_BYTES_MIN:
            return count * (size + MESSAGE_BYTES)
        return size + MESSAGE_BYTES + count * REFERENCE_BYTES

    # In doubt ---------------------------------------------------------------------------------------------------------

    def query_producer(self, producer: str, number: int | None, *, resolves: bool) -> tuple[str | None, int]:
        """Return the outcome of a COMMIT, and the earliest batch that the answer waits for (C19.2, C19.3)."""
        if resolves and number is not None:
            self.producers.resolve(producer, number, self.now_ms, self.gathering)
        outcome = None if number is None else self.producers.outcome(producer, number)
        return outcome, self.producers.query(producer, self.gathering)

    def forget_producers(self, peer: Peer, names: Iterable[str]) -> None:
        # C18.9
        for name in names:
            self._wait(peer, must=self.producers.forget(name, self.gathering), may=self.gathering)

    def abort(self, peer: Peer, transaction: str, *, counts_all: bool = True) -> None:
        self._event += 1
        returned, failed = self._roll_back(peer, transaction, counts_all=counts_all)
        if returned:
            self._wait_for_return(peer, failed=failed)
        self._requeue(returned, failed, is_tried_later=True)
        self._free_groups_of_suspended()

    def _roll_back(self, peer: Peer, transaction: str, *, counts_all: bool) -> tuple[list[Letter], list[Letter]]:
        """End a transaction; return the messages requeued, and those of them that count an attempt."""
        # C10.2: every message the transaction acknowledged or NACKed, or what it NACKed if the frame or its BEGIN says
        # so.
        work = peer.transactions.pop(transaction)
        # C26.5: nothing happens to what its consumers hold.
        for letter in self.kept(work):
            letter.kept_by = None
        returned = work.acknowledged + work.nacked
        for letter in returned:
            letter.nack_options = NackOptions()
        return returned, work.failed() if counts_all else list(work.nacked)

    def release(
        self,
        peer: Peer,
        readers: list[Reader],
        kept: list[tuple[str, int, int]],
        *,
        suspends: bool = False,
        transaction: str | None = None,
        counts_all: bool = True,
    ) -> None:
        """`kept` are names of subscriptions, sequences of the broker, and which dispatches.

        C20.1, C20.3: without an attempt, in one step; reports of started messages and pull requests end.
        """
        self._event += 1
        returned: list[Letter] = []
        failed: list[Letter] = []
        for reader in readers:
            returned += [each for each in self.unacknowledged(reader) if self._name_of(each) not in kept]
        if transaction is not None:
            # C20.2; C20.1: its name is of what is not held any more, and passed over: all of it comes back.
            of_transaction, failed = self._roll_back(peer, transaction, counts_all=counts_all)
            returned += of_transaction
        if returned:
            self._wait_for_return(peer, failed=failed)
        self._requeue(returned, failed, is_tried_later=True, is_by_frame=True)
        # C20.3, C20.4, C20.7
        for reader in readers:
            reader.requested = 0
            reader.is_suspended = suspends
        peer.round += 1
        self._free_groups_of_suspended()

    def _name_of(self, letter: Letter) -> tuple[str, int, int]:
        """Return the name by which a client keeps a held message."""
        assert letter.holder is not None
        return (letter.holder.subscription, self.sequences[letter], letter.deliveries)

    def wake(self, reader: Reader) -> None:
        reader.is_suspended = False

    def pull(self, reader: Reader, messages: int, *, waits: bool, correlation: str | None, wait_ms: int = 0) -> None:
        """C21.6: a pull request that comes while another is open adds to it; whether it waits is what the last one
        says. C21.4: it wakes a suspended subscription."""
        assert reader.requested + messages <= REQUESTED_MAX
        reader.requested += messages
        reader.waits = waits
        reader.correlation = correlation
        reader.pull_ends_ms = self.steady_ms + wait_ms if wait_ms else None
        reader.is_suspended = False

    def _is_pull_over(self, reader: Reader) -> bool:
        """C26.4."""
        return reader.requested > 0 and reader.pull_ends_ms is not None and reader.pull_ends_ms <= self.steady_ms

    def withdraw(self, reader: Reader, correlation: str | None, answer: Ended | None) -> None:
        """C21.5: answered at once, with how many have not come, and nothing comes behind the answer."""
        expected = Ended(reader.requested, correlation)
        if answer != expected:
            raise Disagreement(f"{reader} has withdrawn {expected}, and is told {answer}")
        reader.requested = 0
        reader.is_suspended &= not WITHDRAWING_WAKES

    def _free_groups_of_suspended(self) -> None:
        """C5.3, C20.5: free are those of which a suspended consumer has no message, nor an open transaction of its
        connection."""
        for (queue, group), owner in list(self.owners.items()):
            if owner.is_suspended and not any(
                letter.queue == queue
                and letter.parcel.group == group
                and not letter.is_removed
                and (letter.holder is owner or self._is_in_transaction_of(owner.peer, letter))
                for letter in self.letters
            ):
                del self.owners[queue, group]

    def _is_in_transaction_of(self, peer: Peer, letter: Letter) -> bool:
        work = letter.acknowledged_by or letter.nacked_by
        return work is not None and work in peer.transactions.values()

    def unsubscribe(self, reader: Reader) -> None:
        # C9.2: the end of its subscription; C10.2: no attempt. What a transaction acknowledged stays with it.
        self._event += 1
        self._end(reader)
        self._wait(reader.peer, may=self.gathering)
        self._requeue(self.unacknowledged(reader), failed=[], is_by_frame=True)
        self._end_subscription(reader)
        self._free_groups_of_suspended()

    def close(self, readers: list[Reader], last_delivered: Letter | None) -> None:
        """C26.7: all in one step; an attempt counts for what the consumer that holds the message holds up to it, in
        order of dispatch."""
        self._event += 1
        returned: list[Letter] = []
        for reader in readers:
            self._end(reader)
            self._wait(reader.peer, may=self.gathering)
            returned += self.unacknowledged(reader)
        failed: list[Letter] = []
        if last_delivered is not None and last_delivered in returned:
            failed = [
                each
                for each in returned
                if each.holder is last_delivered.holder and each.dispatched_at <= last_delivered.dispatched_at
            ]
            self._wait_for_return(readers[0].peer, failed=failed)
        self._requeue(returned, failed, is_closed=True)
        for reader in readers:
            self._end_subscription(reader)
        self._free_groups_of_suspended()

    def durable_of(self, name: str) -> Durable | None:
        """The durable subscription of this name that is there."""
        found = [one for one in self.durables if one.queue.split(",")[2] == name and one.ended_in is None]
        return found[0] if found else None

    def _ensure_durable(self, peer: Peer, name: str, topic: str, selector: str | None, spelling: str | None) -> str:
        # C6.6: two selectors are the same if they are parsed to the same condition.
        durable = self.durable_of(name)
        if durable is not None and (durable.topic, durable.selector) != (topic, selector):
            self.end_durable(peer, name)
            durable = None
        if durable is None:
            queue = ",".join(filter(None, ("subscription,c", name, topic, spelling)))
            durable = Durable(queue, topic, selector, self.gathering)
            self.durables.append(durable)
            self._add_subscription(queue, topic, selector)
        # C6.4: durably with that batch, which its receipt waits for.
        self._wait(peer, must=durable.made_in)
        return durable.queue

    def _add_subscription(self, queue: str, topic: str, selector: str | None) -> None:
        self.topics[queue] = topic
        if selector is not None:
            self.selectors[queue] = selector

    def end_durable(self, peer: Peer, name: str) -> None:
        """C6.5: all that is in it goes, what open transactions have of it too, in one step."""
        self._event += 1
        durable = self.durable_of(name)
        assert durable is not None
        for reader in [reader for reader in self.readers if reader.queue == durable.queue]:
            self.unsubscribe(reader)
        durable.ended_in = self.gathering
        del self.topics[durable.queue]
        self.selectors.pop(durable.queue, None)
        self.pause(durable.queue, is_paused=False)
        self._wait(peer, must=self.gathering)
        there = [each for each in self.letters if each.queue == durable.queue and not each.is_removed]
        # Of what has expired nobody can see whether it is gone already.
        for letter in [each for each in there if not self._may_be_removed(each)]:
            for work in (letter.acknowledged_by, letter.nacked_by):
                if work is not None:
                    work.acknowledged = [each for each in work.acknowledged if each is not letter]
                    work.nacked = [each for each in work.nacked if each is not letter]
            self._remove(letter)
        self._forget_commits(durable.queue)
        if self._may_move_later:
            # What was still to be moved is gone before.
            for move in self.moves:
                if move.origin.queue == durable.queue:
                    self._remove(move.origin)
            self.moves = [move for move in self.moves if move.origin.queue != durable.queue]
        self._free_groups_of_suspended()

    def _forget_commits(self, queue: str) -> None:
        """Let commits of an ended queue hold back no message: a later queue of its name is another one."""
        for letter in self.letters:
            if letter.queue == queue:
                letter.visible_from = AT_ONCE

    def _end_subscription(self, reader: Reader) -> None:
        # C6.3: it ends with UNSUBSCRIBE or its connection, and what is in it goes, what transactions have of it too.
        if _is_temporary(reader.queue) and self.topics.pop(reader.queue, None) is not None:
            self.selectors.pop(reader.queue, None)
            for letter in self.letters:
                if letter.queue == reader.queue:
                    for work in (letter.acknowledged_by, letter.nacked_by):
                        if work is not None:
                            work.acknowledged = [each for each in work.acknowledged if each is not letter]
                            work.nacked = [each for each in work.nacked if each is not letter]
                    letter.holder = letter.acknowledged_by = letter.nacked_by = letter.kept_by = None
                    letter.is_removed = True
            self._forget_commits(reader.queue)

    def disconnect(
        self, peer: Peer, is_clean: bool, *, is_by_frame: bool = False, last_delivered: Letter | None = None
    ) -> None:
        """`is_by_frame` if the client has sent DISCONNECT. A takeover counts no attempt, either (`is_clean`)."""
        if last_delivered is not None:
            # C26.7: all its consumers end.
            self.close([reader for reader in self.readers if reader.peer is peer], last_delivered)
        self._event += 1
        returned = [letter for work in peer.transactions.values() for letter in work.acknowledged]
        if NACKED_STAYS_WITH_TRANSACTION:
            returned += [letter for work in peer.transactions.values() for letter in work.nacked]
        # C10.2 to C10.4: of one whose BEGIN says so what it NACKed, and nothing that it has only acknowledged, started
        # or not.
        failed = [letter for work in peer.transactions.values() for letter in work.failed() if letter in returned]
        lost = [] if is_clean else list(returned)
        ended: list[Reader] = []
        for reader in [reader for reader in self.readers if reader.peer is peer]:
            held = self.unacknowledged(reader)
            returned += held
            if peer.is_truenext_client:
                # C10.2: of a truenext client what it has started.
                failed += [each for each in held if each.is_started]
            elif held and reader.mode is not AckMode.AUTO:
                failed.append(held[0])
            if not is_clean and reader.mode is not AckMode.AUTO:
                lost += held
            self._end(reader)
            ended.append(reader)
        self.browses = [browse for browse in self.browses if browse.peer is not peer]
        self.peers.remove(peer)
        self.ended.append(peer)
        for letter in lost:
            letter.was_held_when_lost = True
        self._requeue(returned, failed=[] if is_clean else failed, is_by_frame=is_by_frame)
        for reader in ended:
            self._end_subscription(reader)

    def park(self, peer: Peer) -> None:
        """C22.6, C22.7: of a connection that was cut stays what would be charged, and the rest is as if it had
        ended."""
        peer.is_cut = True
        for reader in [reader for reader in self.readers if reader.peer is peer]:
            held = self.unacknowledged(reader)
            started = [each for each in held if each.is_started]
            if started and reader.mode is not AckMode.AUTO and not _is_temporary(reader.queue):
                kept = [self._name_of(each) for each in started]
                self.release(peer, [reader], kept, suspends=True)
                peer.round -= 1
            else:
                self.unsubscribe(reader)
        for name, work in list(peer.transactions.items()):
            if not work.failed():
                self.abort(peer, name)
        self.browses = [browse for browse in self.browses if browse.peer is not peer]
        peer.unsent = 0

    def all_sent(self, peer: Peer) -> None:
        """The socket took every byte: there is room again, and auto mode counts it as acknowledged (C10.13)."""
        peer.unsent = 0
        for reader in self.readers:
            if reader.peer is peer and reader.mode is AckMode.AUTO:
                self.sent_before_loss(reader, len(self.unacknowledged(reader)))

    def sent_before_loss(self, reader: Reader, count: int) -> None:
        for letter in self.unacknowledged(reader)[:count]:
            self._remove(letter)
            self._wait(reader.peer, may=self.gathering)

    def browse(self, peer: Peer, subscription: str, queue: str, priorities: range) -> OpenBrowse:
        here = [letter for letter in self.letters if letter.queue == queue]
        hidden = {each for each in here if each.is_removed or each.holder is not None}
        waiting = {
            each: each.dispatched_at
            for each in here
            if each not in hidden
            and self.is_visible(each)
            and not self.is_expired(each)
            and not self.must_be_dead_lettered(each)
            and each.parcel.priority in priorities
        }
        browse = OpenBrowse(peer, subscription, queue, priorities, self.now_ms, hidden, waiting)
        self.browses.append(browse)
        return browse

    def end_browse(self, browse: OpenBrowse) -> None:
        if browse in self.browses:
            self.browses.remove(browse)

    def change_policies(self, attempts_max: int, *, is_concurrent: bool, expired_move: bool) -> None:
        """C13.1, C13.2: of all queues in one step. C13.3: messages that were accepted before keep their visibility.
        C13.5: all else stays as it is."""
        self.expired_move |= expired_move
        self.attempts_max = attempts_max
        self.is_concurrent = is_concurrent
        self.was_concurrent |= is_concurrent
        self._event += 1
        if self._may_move_later:
            # Those in memory move now, the others when they are read: `arrived` shows when.
            return
        for letter in sorted(self._awaiting_dead_letter(), key=lambda each: each.key):
            if self.is_expired(letter):
                # C15.2: removed when dispatch comes upon it, nobody can see when. If it is still there it moves.
                self._order += 1
                letter.may_move_as = (self._order, self._event)
            else:
                self._move(letter)

    @property
    def _may_move_later(self) -> bool:
        """True if messages that were given up may become dead letters after others, in a later batch: they must be
        read, or one event gave up many (C10.5)."""
        return self.may_evict or self.moves_later

    @property
    def can_be_spared(self) -> bool:
        """True if more attempts would save no message that is given up already, as far as can be seen from here."""
        return not self._awaiting_dead_letter()

    def _awaiting_dead_letter(self) -> list[Letter]:
        return [
            each
            for each in self.letters
            if self.must_be_dead_lettered(each)
            and not each.is_removed
            and (each.holder, each.acknowledged_by, each.nacked_by) == (None, None, None)
        ]

    def request_receipt(self, peer: Peer, receipt: str) -> None:
        peer.receipts.append(Pending(receipt, peer.must_wait_for, peer.may_wait_for))

    def take_batch(self, *, is_there: bool, is_empty: bool) -> None:
        """The gathering batch is handed over, or is not there; `is_empty` if nothing of it is to be written."""
        if self.moves and not self._may_move_later:
            raise Disagreement(f"{self.moves} should have been dead-lettered")
        if self.reports:
            raise Disagreement(f"not reported in the batch of the dead letter are {self.reports}")
        if is_empty and (reasons := self._must_be_written()):
            raise Disagreement(f"nothing is written though something persistent happened: {reasons}")
        if is_there:
            self.in_flight = self.gathering
        else:
            self.durable = self.gathering
            for peer in self.peers:
                # It may have had something that need not be written any more: the broker goes on with that batch.
                if peer.may_wait_for == self.gathering and (self.may_evict or self.was_concurrent):
                    peer.may_wait_for += 1
        self.gathering += 1

    def committed(self) -> None:
        assert self.in_flight is not None
        self.durable = self.in_flight
        self.in_flight = None

    def crash(self, *, has_written: bool) -> None:
        """The broker ends at once; `has_written` if the store has the batch in flight.

        C16.1: K and attempts of a persistent message survive. C25.4: transient ones do not. C10.2: no end of the broker
        is an attempt; C10.7: a crash adds none.
        """
        if has_written and self.in_flight is not None:
            self.durable = self.in_flight
        self.paused = self._paused_after_crash()
        self._plans_after_stop(is_crash=True)
        must, may = self.stored()
        stored = {letter for letter in must + may if letter.persistent}
        self.letters = [letter for letter in self.letters if letter in stored]
        for letter in self.letters:
            written = self.stored_state(letter)
            letter.attempts, letter.is_rejected = written.attempts, written.is_rejected
            letter.was_lost = written.was_lost
            if letter.was_held_when_lost:
                letter.was_held_when_lost = None
            letter.causes = written.causes
            # C9.7: after a restart delays are measured by the wall clock.
            letter.due = self.steady_ms + max(0, written.due_ms - self.now_ms)
            # What was acknowledged without a trace comes back: it was held until then (C15.3).
            if letter.is_removed:
                letter.freed_ms = self.now_ms
            letter.is_removed = False
            letter.least_deliveries = 2
            letter.is_flagged = True
        # C18.5: for transient messages it holds until a crash.
        self.producers.crashed(self.durable)
        self.jms_producers.crashed(self.durable)
        self._reset()

    def restart(self) -> None:
        """Restart the broker after a clean stop, with which all connections have ended.

        C16.2, C18.2: the waiting transients survive, too. C10.8: so do their attempts.
        """
        self._plans_after_stop(is_crash=False)
        self.letters = [letter for letter in self.letters if not letter.is_removed or self.is_moving(letter)]
        for letter in self.letters:
            letter.is_removed = False
            letter.stored_in = self.durable
            # C10.14: after any end of the broker the deliveries decide.
            letter.is_flagged |= letter.deliveries > 0
        self.producers.stopped()
        self.jms_producers.stopped()
        self._reset()

    def recovered(self, found: list[Letter]) -> None:
        """Compare the messages that the store had at the restart (C16.1, C18.1).

        Raises: Disagreement
        """
        lost = [letter for letter in self.letters if letter not in found and not self.is_expired(letter)]
        undead = [letter for letter in found if letter not in self.letters]
        if lost or undead:
            raise Disagreement(f"recovered were not {lost}, but {undead}")
        self.letters = found

    def recovered_queues(self, found: set[str]) -> None:
        """Ordinary queues that the store knew of when the broker began again.

        Raises: Disagreement
        """
        # C6.10: that of a virtual topic survives every end of the broker.
        of_topics = {queue for queue in found if _topic_of(queue)}
        if of_topics != self.made_in.keys():
            raise Disagreement(f"of virtual topics there are {of_topics}, not {list(self.made_in)}")
        self.queues = found

    def _reset(self) -> None:
        for letter in self.letters:
            self._free(letter)
            letter.removed_in = None
            letter.visible_from = AT_ONCE
            is_waiting = self.is_waiting_for_next_try(letter)
            # Also if it is due by now: the store is not told of that, nor of a try that changed nothing.
            letter.is_restored |= letter.attempts > 0
            due_ms = self.now_ms + letter.due - self.steady_ms if is_waiting else 0
            letter.written = [
                Written(AT_ONCE, letter.attempts, due_ms, letter.is_rejected, letter.was_lost, letter.causes)
            ]
        self.peers, self.ended, self.readers, self.moves, self.browses = [], [], [], [], []
        self.owners = {}  # C5.3: after a restart all groups are free.
        # C6.4: it survives every end of the broker; C6.5: durably ended it has.
        kept = [one for one in self.durables if one.made_in <= self.durable]
        self.durables = [one for one in kept if one.ended_in is None or one.ended_in > self.durable]
        for one in self.durables:
            one.made_in, one.ended_in = AT_ONCE, None
        self.made_in = {queue: AT_ONCE for queue, batch in self.made_in.items() if batch <= self.durable}
        self.topics, self.selectors = {}, {}
        for one in self.durables:
            self._add_subscription(one.queue, one.topic, one.selector)
        self.in_flight = None
        self.durable = self.gathering
        self.gathering += 1
        self.pauses = [(AT_ONCE, queue, True) for queue in self.paused]  # C12.7
        self.may_evict = True

    def redriven(self, shown: list[int], moved: list[int]) -> None:
        """Compare the messages moved back with the page of a dead-letter queue that showed these sequences.

        C12.2, C12.3: a new arrival of its original priority and persistence; its expiry comes back unless it is past.
        What a consumer holds is left alone.

        Raises: Disagreement
        """
        there = {self.sequences[each]: each for each in self.letters if each.is_dead_letter and each in self.sequences}
        can_move = [
            sequence
            for sequence in shown
            if sequence in there
            and not there[sequence].is_removed
            and there[sequence].holder is None
            and self.is_visible(there[sequence])
        ]
        if moved != can_move:
            raise Disagreement(f"{can_move} should be moved back, and {moved} are")
        self._event += 1
        for sequence in moved:
            letter = there[sequence]
            assert letter.origin is not None
            self._remove(letter)
            parcel = letter.origin.parcel
            if parcel.expires_ms <= self.now_ms:
                parcel = replace(parcel, expires_ms=0)
            self._order += 1
            self.letters.append(
                Letter(
                    parcel,
                    letter.origin.queue,
                    parcel.persistent,
                    self._order,
                    self._event,
                    0,
                    self.gathering,
                    stored_in=self.gathering if parcel.persistent else None,
                    # C11.10: what was handled keeps the facts of its first failure.
                    failure=letter.failure,
                    failed_in=letter.failed_in,
                    original_causes=letter.original_causes if letter.failure else NO_CAUSES,
                )
            )

    def schedule(self, peer: Peer, queue: str, parcel: Parcel, delay_ms: int) -> None:
        self._event += 1
        if parcel.persistent:
            self._wait(peer, must=self.gathering)  # C14.8
        # C8.1: whatever queue is named is there from now on.
        self.copied_to(queue, parcel, peer)
        self._order += 1
        self.planned.append(Planned(parcel, queue, self.now_ms + delay_ms, self._order, self.gathering))

    def became_due(self, label: str, queue: str) -> None:
        """The broker has made a message of a scheduled send (C14.2, C14.3, C14.4).

        Raises: Disagreement if it is not the first by (due, arrival), not due, or not durable.
        """
        waiting = [each for each in self.planned if each.removed_in is None]
        if not waiting:
            raise Disagreement(f"{queue}:{label} becomes a message, and nothing is scheduled")
        first = min(waiting, key=lambda each: (each.due_ms, each.arrival))
        if (first.parcel.label, first.queue) != (label, queue):
            raise Disagreement(f"{queue}:{label} becomes a message before {first}")
        if first.due_ms > self.now_ms or first.stored_in > self.durable:
            raise Disagreement(f"{first} becomes a message at {self.now_ms}, when batch {self.durable} is durable")
        self._event += 1
        first.removed_in = self.gathering
        # C14.6: it is sent now, to the subscriptions that are there now. C14.9: `expires` may be past already.
        parcel = replace(self._with_ttl(first.parcel), due_ms=first.due_ms)
        queues = self.copied_to(queue, parcel)
        self._accept(None, queues, parcel, visible_from=self.gathering, block=self._event)

    def _with_ttl(self, parcel: Parcel) -> Parcel:
        """C15.4: its time to live begins when it is accepted, inside a transaction with the COMMIT, and each time that
        a scheduled send becomes a message."""
        return replace(parcel, expires_ms=self.now_ms + parcel.ttl_ms) if parcel.ttl_ms else parcel

    def planned_of(self, queue: str, labels: list[str], priorities: set[int]) -> list[Planned]:
        """Return the scheduled sends of the queue with these labels and priorities, in this order."""
        here = {each.parcel.label: each for each in self.planned if each.queue == queue and each.removed_in is None}
        found = [here[label] for label in labels if label in here]
        return [each for each in found if each.parcel.priority in priorities]

    def cancelled(self, here: list[Planned], count: int) -> None:
        """Compare the number of cancelled sends with those that the piece had to cancel.

        C14.7: none of them becomes a message any more.

        Raises: Disagreement
        """
        if count != len(here):
            raise Disagreement(f"{count} are cancelled; by the contract {here}")
        self._event += 1
        for each in here:
            each.removed_in = self.gathering

    def check_shown_plans(self, queue: str, shown: list[tuple[str, int]]) -> None:
        """Labels and due times of all that is said to wait for a queue.

        Raises: Disagreement if it is not what is durable and waits (C14.7), in the order of K; what is not durable may
        be there
        """
        waiting = [each for each in self.planned if each.queue == queue and each.removed_in is None]
        waiting.sort(key=lambda each: (9 - each.parcel.priority, each.arrival))
        labels = {label for label, _ in shown}
        here = [each for each in waiting if each.stored_in <= self.durable or each.parcel.label in labels]
        if shown != [(each.parcel.label, each.due_ms) for each in here]:
            raise Disagreement(f"shown as scheduled are {shown}; by the contract {here}")

    def count_planned(self, queue: str) -> int:
        """Return the number of scheduled sends for a queue; "" counts those to topics and several destinations."""
        waiting = [each.queue for each in self.planned if each.removed_in is None]
        return sum(each == queue or (not queue and ("/" in each)) for each in waiting)

    def is_any_overdue(self) -> bool:
        return any(each.removed_in is None and each.due_ms <= self.now_ms for each in self.planned)

    def _plans_after_stop(self, *, is_crash: bool) -> None:
        if is_crash:
            self.planned = [each for each in self.stored_plans() if each.parcel.persistent]
        else:
            self.planned = [each for each in self.planned if each.removed_in is None]
        for each in self.planned:
            each.stored_in, each.removed_in = AT_ONCE, None

    def stored_plans(self) -> list[Planned]:
        """Return the scheduled sends that the store must have now (C14.8)."""
        return [
            each
            for each in self.planned
            if each.stored_in <= self.durable and (each.removed_in is None or each.removed_in > self.durable)
        ]

    def is_any_on_its_way_to(self, queue: str) -> bool:
        """Some message may be in a dead-letter queue already that is not known to be there: that is learnt with the
        batch."""
        origin = queue.removeprefix(DEAD_LETTER_PREFIX)
        if origin == queue:
            return bool(self.moves)
        here = [each for each in self.letters if each.queue == origin and not each.is_removed]
        return bool(self.moves) or any(self.is_expired(each) or self.must_be_dead_lettered(each) for each in here)

    def bulk_candidates(self, queue: str, priorities: Iterable[int]) -> list[Letter]:
        """C12.3, C12.5: what waits and is visible, in order. What has expired is left to expire, what has failed too
        often to be dead-lettered, and what a consumer or a transaction has is left to it."""
        return sorted(
            (
                each
                for each in self.letters
                if each.queue == queue
                and each.parcel.priority in priorities
                and not each.is_removed
                and each.holder is None
                and self.is_visible(each)
                and not self.is_expired(each)
                and not self.must_be_dead_lettered(each)
            ),
            key=lambda each: each.key,
        )

    def bulk_done(self, here: list[Letter], moved: int, to: str | None) -> None:
        """Compare the number of messages that a piece moved to a queue (None: removed) with those it had to take
        (C12.1, C12.3).

        Raises: Disagreement
        """
        if moved != len(here):
            raise Disagreement(f"{moved} are taken; by the contract {here}")
        self._event += 1
        if here and to is not None:
            self._name(None, to)
        for letter in here:
            self._remove(letter)
            if to is None:
                continue
            parcel = letter.parcel
            self._order += 1
            stored_in = self.gathering if letter.persistent else None
            event = self._event
            self.letters.append(
                Letter(
                    parcel,
                    to,
                    letter.persistent,
                    self._order,
                    event,
                    0,
                    self.gathering,
                    stored_in=stored_in,
                    original_causes=letter.original_causes,
                    # C11.11
                    handlers=letter.handlers,
                    failure=letter.failure,
                    failed_in=letter.failed_in,
                )
            )

    def needs(self, queue: str) -> str:
        """Return the reason why a queue cannot be removed (C8.3, C8.4); empty if it can."""
        if any(reader.queue == queue for reader in self.readers):
            return "it has a consumer"
        if any(letter.queue == queue and self._is_there(letter) for letter in self.letters):
            return "somebody has a message of it, or one waits"
        if any(browse.queue == queue for browse in self.browses):
            return "it is browsed"
        works = [work for peer in self.peers for work in peer.transactions.values()]
        if any(queue in _queues_of(address) for work in works for address, _ in work.sends):
            return "an open transaction sends to it"
        if self.count_planned(queue):
            return "something is scheduled for it"
        if "," in queue or queue.startswith("Consumer."):
            return "it is a subscription"
        return "it is paused" if queue in self.paused else ""

    def _is_there(self, letter: Letter) -> bool:
        is_held = letter.holder or letter.acknowledged_by or letter.nacked_by
        # C13.2: one that has failed too often may have moved already; `arrived` shows it later.
        return not letter.is_removed and (
            is_held is not None or not (self.is_expired(letter) or self.must_be_dead_lettered(letter))
        )

    def queue_removed(self, queue: str) -> None:
        """A queue is there no more (C8.2)."""
        why_not = self.needs(queue)
        if why_not:
            raise Disagreement(f"{queue} has gone, though {why_not}")
        self.queues.discard(queue)
        # C5.7, C8.4: they are free.
        self.owners = {key: owner for key, owner in self.owners.items() if key[0] != queue}
        self.scanning_for.pop(queue, None)
        if all(batch == self.gathering for batch, name, _ in self.pauses if name == queue):
            # It was paused and resumed, and nothing of that has to be written.
            self.pauses = [each for each in self.pauses if each[1] != queue]

    def pause(self, queue: str, *, is_paused: bool) -> None:
        """C12.7: nothing is dispatched from a paused queue; durable with the gathering batch."""
        if is_paused and "," not in queue:
            self._name(None, queue)
        if (queue in self.paused) == is_paused:
            return
        self.pauses.append((self.gathering, queue, is_paused))
        self.paused = self.paused ^ {queue}

    def _paused_after_crash(self) -> frozenset[str]:
        paused: set[str] = set()
        for batch, queue, is_paused in self.pauses:
            if batch <= self.durable:
                (paused.add if is_paused else paused.discard)(queue)
        return frozenset(paused)

    # What is asked of the oracle --------------------------------------------------------------------------------------

    def stored_for_subscriptions(self, peer: Peer) -> dict[str, list[Letter]]:
        """Return the messages in each of the connection's subscriptions to topics, in memory or not (C24.15).
        Expired messages may be removed already."""
        queues = [each.queue for each in self.readers if each.peer is peer and _is_temporary(each.queue)]
        return {
            queue: [letter for letter in self.letters if letter.queue == queue and not letter.is_removed]
            for queue in queues
        }

    def unacknowledged(self, reader: Reader) -> list[Letter]:
        """Return the messages a consumer holds unacknowledged, in order of dispatch (C9.4)."""
        held = [each for each in self.letters if each.holder is reader and each.acknowledged_by is None]
        if NACKED_STAYS_WITH_TRANSACTION:
            held = [each for each in held if each.nacked_by is None]
        return sorted(held, key=lambda each: each.dispatched_at)

    def answerable(self, reader: Reader) -> list[Letter]:
        """Return the messages a consumer may still acknowledge or nack, in order of dispatch."""
        return [each for each in self.unacknowledged(reader) if each.nacked_by is None and each.kept_by is None]

    def covered(self, letter: Letter) -> list[Letter]:
        """C9.2, C7.7: a NACK is cumulative in `client` mode, as the ACK is."""
        reader = letter.holder
        assert reader is not None
        assert letter in self.answerable(reader)
        if reader.mode is not AckMode.CLIENT:
            return [letter]
        return [each for each in self.answerable(reader) if each.dispatched_at <= letter.dispatched_at]

    def has_credit(self, reader: Reader) -> bool:
        # C4.4: fewer unacknowledged messages than its window, and its connection has room for more bytes.
        # C7.2: none before it has joined all its queues.
        # C4.7: a suspended subscription has none.
        # C4.14: none while its connection holds too much.
        if reader.joined is not None or reader.is_suspended or not self._has_capacity(reader.peer):
            return False
        if reader.peer in self._full_peers:
            return False
        if reader.is_pulling:
            # C4.7: for as many as it has asked for and not got, whatever it holds.
            return reader.requested > 0
        return reader.window is None or len(self.unacknowledged(reader)) < reader.window

    def is_expired(self, letter: Letter) -> bool:
        # C15.1: its time has come.
        return 0 < letter.parcel.expires_ms <= self.now_ms

    def is_overdue(self, letter: Letter) -> bool:
        # C15.2, C15.3: at the latest when the whole second after its time begins, and the broker comes to it; not while
        # a consumer or an open transaction has it, and within a minute if it is requeued after its time.
        due_ms = -(-letter.parcel.expires_ms // 1000) * 1000
        if letter.freed_ms is not None and letter.freed_ms >= letter.parcel.expires_ms:
            due_ms = letter.freed_ms + 61_000
        if self.must_be_dead_lettered(letter):
            # It was about to be dead-lettered when the broker ended; whatever comes first.
            return False
        return self.is_expired(letter) and letter.holder is None and due_ms <= self.now_ms

    def is_visible(self, letter: Letter) -> bool:
        return letter.visible_from <= self.durable

    def must_be_dead_lettered(self, letter: Letter) -> bool:
        """C11.1, C13.2: it is dead-lettered; only a restart or a change of policies may leave that
        still to come."""
        has_failed = letter.attempts >= self.attempts_max or letter.is_rejected
        return has_failed and not _keeps_failures(letter.queue)

    def is_waiting_for_next_try(self, letter: Letter) -> bool:
        # Definition of "due".
        return letter.due > self.steady_ms and not letter.is_removed and letter.holder is None

    def can_receive(self, reader: Reader, letter: Letter) -> bool:
        # C3.4: its selector wants it, and its group is free or the consumer's, and does not wait.
        owner = self.owners.get((letter.queue, letter.parcel.group), reader)
        return reader.matches(letter) and owner is reader and not self._does_group_wait(letter)

    def _does_group_wait(self, letter: Letter) -> bool:
        # C3.7: while one of them waits for its next try, none with a greater K is ready.
        return letter.parcel.group != "" and any(
            other.queue == letter.queue
            and other.parcel.group == letter.parcel.group
            and other.key < letter.key
            and self.is_waiting_for_next_try(other)
            and not self.must_be_dead_lettered(other)
            for other in self.letters
        )

    def is_held_back(self, letter: Letter, reader: Reader) -> bool:
        # C3.6, `block`: no message of its queue with a greater K is ready for a consumer that could take it until it is
        # due, or given up (C13.2). C3.7: one of a group holds back nothing but its group.
        return self.retries.holds and any(
            other.queue == letter.queue
            and other.key < letter.key
            and self.is_waiting_for_next_try(other)
            and other.parcel.group == ""
            and self.can_receive(reader, other)
            and not self.must_be_dead_lettered(other)
            for other in self.letters
        )

    def is_moving(self, letter: Letter) -> bool:
        """True if the message has left its queue, and was not seen in its dead-letter queue yet."""
        return any(move.origin is letter for move in self.moves)

    def is_ready_for(self, letter: Letter, reader: Reader) -> bool:
        """C3.3, with C3.5 to C3.7."""
        if reader not in self.receivers(letter.queue) or letter.is_removed or letter.holder is not None:
            return False
        if letter.queue in self.paused:
            return False
        if not self.is_visible(letter) or self.is_expired(letter) or self.must_be_dead_lettered(letter):
            return False
        if self.is_waiting_for_next_try(letter) or self.is_held_back(letter, reader):
            return False
        # C3.5: what is being committed and it could take holds it back, so not of groups of others (C5.6); C7.5: in
        # another of its queues as well.
        return not any(
            other.parcel.priority == letter.parcel.priority
            and other.order < letter.order
            and not self.is_visible(other)
            and (other.queue == letter.queue or self._is_open(other.queue, reader))
            and self.can_receive(reader, other)
            and (EXPIRED_COMMIT_BLOCKS or not self.is_expired(other))
            for other in self.letters
        )

    def _is_open(self, queue: str, reader: Reader) -> bool:
        """C7.6: one that is paused, or another's alone, is none of its queues."""
        return reader.is_for(queue) and queue not in self.paused and reader in self.receivers(queue)

    def true_next(self, reader: Reader) -> Letter | None:
        """C4.1, C7.4: the message of smallest K that is ready for c, in any of its queues; C25.1: however long the
        others have waited."""
        here = [each for each in self.letters if reader.is_for(each.queue) and not each.is_removed]
        for letter in sorted(here, key=lambda each: each.key):
            if self.is_ready_for(letter, reader) and self.can_receive(reader, letter):
                return letter
        return None

    def next_dispatches(self, queue: str) -> list[tuple[Letter, Reader]]:
        """The legal next dispatches of one queue: the only one that must be, behind those that may have to wait.

        Consumers with the same selector wait for the same things; in queues with groups each waits for itself.
        """
        if queue in self.paused:
            return []
        steps: list[tuple[Letter, Reader]] = []
        seen: set[object] = set()
        for letter, reader in self._offers(queue):
            alike: object = (reader.queue, reader.selector)
            if queue in self.scanning_for or reader.is_of_many:
                alike = reader
            if alike not in seen:
                steps.append((letter, reader))
                seen.add(alike)
                if not self._may_wait(letter, reader):
                    break
        return steps

    def _offers(self, queue: str) -> list[tuple[Letter, Reader]]:
        """Return the possible dispatches of a queue, the right one first."""
        receivers = self.receivers(queue)
        offers: list[tuple[tuple[Any, ...], Letter, Reader]] = []
        for reader in receivers:
            letter = self.true_next(reader) if self.has_credit(reader) else None
            if letter is not None and letter.queue == queue:
                # C4.11: consumer priority, no doubling, the fewest unacknowledged messages, the longest waiting.
                held = len(self.unacknowledged(reader))
                offers.append(
                    ((letter.key, -reader.priority, reader.is_stretched, held, reader.waiting_since), letter, reader)
                )
        if not any(map(self.has_credit, receivers)):
            # C4.13: express dispatch.
            for reader in receivers:
                letter = self.true_next(reader)
                if letter is not None and self.has_express_credit(reader, letter):
                    offers.append(((letter.key, -reader.acknowledged_at), letter, reader))
        return [(letter, reader) for _, letter, reader in sorted(offers, key=lambda offer: offer[0])]

    def receivers(self, queue: str) -> list[Reader]:
        """Return the consumers of a queue. C4.12, C7.9: if there are exclusive ones, only the best of them."""
        readers = [reader for reader in self.readers if reader.is_for(queue)]
        exclusive = [reader for reader in readers if reader.is_exclusive]
        return sorted(exclusive, key=lambda reader: -reader.priority)[:1] or readers

    def has_express_credit(self, reader: Reader, letter: Letter) -> bool:
        """C4.13."""
        held = self.unacknowledged(reader)
        return (
            reader.has_express
            and not reader.is_suspended
            and reader.window is not None
            and reader.window > 1
            and len(held) < reader.window + 10
            and self._has_capacity(reader.peer)
            and reader.peer not in self._full_peers
            and sum(each.parcel.priority < letter.parcel.priority for each in held) >= reader.window
        )

    def check_turn(
        self,
        dispatched: dict[Reader, list[Seen]],
        answered: list[tuple[str, str]],
        reading: dict[str, int],
        ended: list[tuple[Reader, Ended]],
    ) -> None:
        """Compare a turn of the broker with the contract, and follow it.

        `reading` says for which queues pages are being read, with the smallest rank among those. `ended` are wishes of
        which was said, behind what was dispatched, that they are over.

        Raises: Disagreement
        """
        self._reading = reading
        self._find_full_peers()
        self._check_receipts(answered)
        self._check_dispatches(dispatched)
        self._check_pull_requests(ended)

    def _find_full_peers(self) -> None:
        """Find the connections that hold too much (C4.14); messages acknowledged in open transactions count, and those
        that a subscription to a pattern of queues holds count twice."""
        counts: Counter[Peer] = Counter()
        for each in self.letters:
            if each.holder is not None:
                is_in_transaction = (each.acknowledged_by, each.nacked_by) != (None, None)
                counts[each.holder.peer] += 2 if each.holder.is_of_many and not is_in_transaction else 1
        self._full_peers = {peer for peer, count in counts.items() if count >= self.held_max}

    def is_full(self, peer: Peer) -> bool:
        """Return whether the connection held too much for credit when the last turn began (C4.14)."""
        return peer in self._full_peers

    def check_idle(self) -> None:
        """Check the state while no batch gathers or is in flight, no page is read, and all sockets have taken all: no
        message stays ready for a consumer that has credit (C4.3), and pull requests that do not wait have ended
        (C21.3).

        Raises: Disagreement
        """
        self._find_full_peers()
        if self.moves:
            # C11.5: none is dropped.
            raise Disagreement(f"never dead-lettered: {self.moves}")
        if self.is_any_overdue():
            raise Disagreement(f"never due: {self.planned}")
        for reader in self.readers:
            late = [
                letter
                for letter in self.letters
                if reader in self.receivers(letter.queue) and self._is_late(letter, reader)
            ]
            if late and self.has_credit(reader):
                raise Disagreement(f"{reader} waits, but neither dispatched nor dead-lettered are {late}")
            if self._is_pull_over(reader) or (reader.requested and not reader.waits and not self.is_full(reader.peer)):
                raise Disagreement(f"{reader} is never told that {reader.requested} messages do not come")

    def _is_late(self, letter: Letter, reader: Reader) -> bool:
        if letter.is_removed or letter.holder is not None or self.is_expired(letter):
            return False
        if not self.can_receive(reader, letter):
            return False
        if letter.queue in self.paused:
            return False
        if self.is_held_back(letter, reader) or self.is_waiting_for_next_try(letter):
            # What is doomed may be unread behind the one that holds it back.
            return False
        return self.must_be_dead_lettered(letter) or self.is_visible(letter)

    def waiting(self, queue: str) -> tuple[int, int]:
        """Return the least and the most messages of a queue that no consumer holds, once the broker has done its
        work."""
        here = [each for each in self.letters if each.queue == queue and not each.is_removed and each.holder is None]
        # C15.2: removed when dispatch comes upon it, too; nobody can see when that was.
        at_most = sum(not self.is_overdue(letter) for letter in here)
        if _is_temporary(queue):
            # C15.5: there only dispatch comes upon it.
            at_most = len(here)
        return sum(not self.is_expired(letter) for letter in here), at_most

    def left(self, queue: str, *, is_at_rest: bool) -> dict[str, tuple[int, int]]:
        """C31.4: return the least and the most messages of a queue that are dead, paused, delayed, or left because they
        wait or are held. At rest the broker has done its work."""
        counts = {kind: [0, 0] for kind in ("dead", "paused", "delayed", "waiting", "held")}
        for letter in self.letters:
            if letter.queue == queue and not letter.is_removed:
                kinds = self._left_as(letter, is_at_rest=is_at_rest)
                # It may have been removed (C15.2), or be removed a little later.
                is_sure = len(kinds) == 1 and (letter.holder is not None or not self.is_expired(letter))
                is_there = letter.holder is not None or not self.is_overdue(letter) or _is_temporary(queue)
                for kind in kinds:
                    counts[kind][0] += is_sure
                    counts[kind][1] += is_there or not is_at_rest
        return {kind: (least, most) for kind, (least, most) in counts.items()}

    def _left_as(self, letter: Letter, *, is_at_rest: bool) -> set[str]:
        if letter.queue.startswith(DEAD_LETTER_PREFIX):
            return {"dead"}
        if letter.holder is not None:
            return {"held"}
        if letter.queue in self.paused:
            # What has failed too often may be on its way into its dead-letter queue, even so.
            return {"paused", "waiting"} if self.must_be_dead_lettered(letter) else {"paused"}
        is_delayed = self.is_waiting_for_next_try(letter)
        if not is_at_rest and letter.due and not is_delayed:
            # Its time has come, and the broker may not have noticed.
            return {"delayed", "waiting"}
        if not is_delayed or self.must_be_dead_lettered(letter):
            return {"waiting"}
        # What has failed before the broker started counts as delayed once it was read.
        return {"delayed", "waiting"} if letter.is_restored else {"delayed"}

    def arrived(self, label: str, queue: str) -> Letter:
        """A message that the gathering batch puts: the broker's first word about some dead letters.

        C11.1, C11.2: dead letters are removed from their queue in the same step, and are new arrivals. If their
        messages have left memory they are read before that, so that their sequences are of that time.
        """
        at_home = queue.removeprefix(DEAD_LETTER_PREFIX)
        for durable in self.durables:
            if durable.dead_letters == queue and self._has_been(label, durable.queue):
                at_home = durable.queue
        known = [each for each in self.letters if each.parcel.label == label and each.queue == queue]
        if any(not each.is_removed for each in known):
            return self.letter(label, queue)
        handled = self._given_up_for(label, queue)
        if handled is None and at_home == queue:
            return self._reported(label, queue) if label.startswith(REPORT_LABEL) else self.letter(label, queue)
        origin = handled or self.letter(label, at_home)
        if handled is None and origin.handlers:
            # C11.8
            raise Disagreement(f"{origin} is dead-lettered, and not handled by {origin.handlers[0]}")
        move = next((move for move in self.moves if move.origin is origin), None)
        if move is not None:
            self.moves.remove(move)
        elif not (self.must_be_dead_lettered(origin) or (self.expired_move and self._may_be_removed(origin))):
            raise Disagreement(f"{origin} is dead-lettered after {origin.attempts} attempts")
        self._remove(origin)
        parcel = origin.parcel if DEAD_LETTERS_EXPIRE else replace(origin.parcel, expires_ms=0)
        if handled is not None:
            # C11.9, C11.10: where it fails next it was persistent and without expiry.
            parcel = replace(parcel, persistent=True, ttl_ms=0)
        self._order += 1
        order, event = self._order, self._event
        if not self._may_move_later:
            if move is not None:
                order, event = move.order, move.event
            elif origin.may_move_as is not None:
                order, event = origin.may_move_as
        # C11.10: the facts of the first failure stay.
        causes, failed_in = origin.causes, origin.queue
        if origin.failure:
            causes, failed_in = origin.original_causes, origin.failed_in
        failure = origin.failure if handled is None else "handled"
        if handled is None and parcel.report_to and origin.failure != "report":
            self._order += 1
            report_order = self._order if move is None or self._may_move_later else move.report_order
            self.reports.append(Report(origin, report_order, event, causes, failed_in))
        letter = Letter(
            parcel,
            queue,
            True,
            order,
            event,
            0,
            self.gathering,
            stored_in=self.gathering,
            is_dead_letter=True,
            origin=origin,
            original_causes=causes,
            handlers=() if handled is None else origin.handlers[1:],
            failure=failure,
            failed_in=failed_in if failure else "",
        )
        self.letters.append(letter)
        return letter

    def _given_up_for(self, label: str, queue: str) -> Letter | None:
        """Return the message that the queue handles now (C11.8); None if there is none."""
        found = [each for each in self.letters if each.parcel.label == label and each.handlers[:1] == (queue,)]
        there = [each for each in found if not each.is_removed or self.is_moving(each)]
        return there[-1] if there else None

    def _reported(self, label: str, queue: str) -> Letter:
        """C11.7: a report, in the batch of its dead letter, with the id that the message had."""
        report_id = label.partition(":")[2]
        report = next((each for each in self.reports if each.origin.parcel.label == report_id), None)
        if report is None or report.origin.parcel.report_to != queue:
            raise Disagreement(f"{queue} gets the report {label}, which no dead letter of this batch sends")
        self.reports.remove(report)
        origin = report.origin
        letter = Letter(
            # C11.7, C11.9: the headers of the dead letter, no body, no expiry, always persistent.
            replace(origin.parcel, label=label, persistent=True, expires_ms=0, ttl_ms=0, size=0, report_to=""),
            queue,
            True,
            report.order,
            report.event,
            0,
            self.gathering,
            stored_in=self.gathering,
            is_dead_letter=True,
            origin=origin,
            original_causes=report.original_causes,
            failure="report",
            failed_in=report.failed_in,
        )
        self.letters.append(letter)
        return letter

    def _has_been(self, label: str, queue: str) -> bool:
        return any(each.parcel.label == label and each.queue == queue for each in self.letters)

    def saw_batch(self, stored: list[tuple[Letter, int]]) -> None:
        """Learn the sequences of new stored messages.

        C25.3: the contract does not say which of the messages that one event dead-letters is the first arrival. None is
        visible before its batch is durable, so the oracle can learn it here, before it matters.
        """
        for letter, _ in stored:
            together = [
                (other_sequence, other)
                for other, other_sequence in stored
                if other.is_dead_letter and (other.event == letter.event or self._may_move_later)
            ]
            if letter.is_dead_letter and together[0][1] is letter:
                orders = sorted(other.order for _, other in together)
                for order, (_, other) in zip(orders, sorted(together, key=lambda pair: pair[0]), strict=True):
                    other.order = order
        for letter, sequence in stored:
            self.saw_sequence(letter, sequence)
            # C10.5: eviction may have added to the batch what was given up and moves later.
            if letter.is_removed and not (self.moves_later and self.is_moving(letter)):
                raise Disagreement(f"{letter} is written, though it is gone")
            if letter.stored_in not in (None, self.gathering):
                raise Disagreement(f"{letter} is written again")
            letter.stored_in = self.gathering

    def _had_expired(self, letter: Letter) -> bool:
        """C15.1: one that had also failed too often is dead-lettered when dispatch comes upon it, or at once."""
        return letter.origin is not None and self.is_expired(letter.origin)

    def saw_sequence(self, letter: Letter, sequence: int) -> None:
        """C2.3, C16.1: given at acceptance, in order; never changed, never given twice. C2.4, C6.12: unbroken within a
        transaction, and among copies."""
        known = self.sequences.get(letter)
        if known is not None:
            if known != sequence:
                raise Disagreement(f"{letter} changed its sequence from {known} to {sequence}")
            return
        for other, other_sequence in self.sequences.items():
            moved_at_any_time = any(
                each.is_dead_letter and (self._may_move_later or self._had_expired(each)) for each in (letter, other)
            )
            if moved_at_any_time and letter.queue != other.queue:
                is_right = sequence != other_sequence
            elif letter.block and other.block == letter.block:
                apart = sequence - other_sequence
                least = letter.copies.start - other.copies.stop + 1
                is_right = apart != 0 and least <= apart <= letter.copies.stop - other.copies.start - 1
            elif letter.event != other.event or letter.queue == other.queue:
                is_right = sequence != other_sequence and (sequence < other_sequence) == (letter.order < other.order)
            else:
                is_right = sequence != other_sequence
            if not is_right:
                raise Disagreement(f"{letter} has sequence {sequence}, {other} has {other_sequence}: not as accepted")
        self.sequences[letter] = sequence

    def letter(self, label: str, queue: str) -> Letter:
        found = [each for each in self.letters if each.parcel.label == label and each.queue == queue]
        # One that was dead-lettered and moved back is there once more; only the last of them can be spoken of.
        if not found or any(not each.is_removed for each in found[:-1]):
            raise Disagreement(f"the broker knows a message {label} in {queue}; it should not be there")
        return found[-1]

    def stored(self) -> tuple[list[Letter], list[Letter]]:
        """The messages that must be found after a crash now, and those that may."""
        must: list[Letter] = []
        may: list[Letter] = []
        for letter in self.letters:
            if letter.stored_in is None or letter.stored_in > self.durable:
                continue
            if letter.removed_in is not None and letter.removed_in <= self.durable:
                continue
            (may if self._may_be_removed(letter) else must).append(letter)
        return must, may

    def _may_be_removed(self, letter: Letter) -> bool:
        # C15.2: removed when dispatch or the broker comes upon it; nobody can see when that was.
        return self.is_expired(letter) and not letter.is_removed and letter.holder is None

    def stored_state(self, letter: Letter) -> Written:
        """C16.1: attempts and due time of a persistent message survive a crash."""
        written = [each for each in letter.written if each.batch <= self.durable]
        return written[-1] if written else Written(AT_ONCE, 0, 0, False)

    # How things change ------------------------------------------------------------------------------------------------

    def _accept(
        self,
        peer: Peer | None,
        queues: list[str],
        parcel: Parcel,
        *,
        visible_from: int | None = None,
        block: int = 0,
    ) -> None:
        copies = range(self._order + 1, self._order + 1 + len(queues))
        for each in queues:
            is_stored = parcel.persistent and not _is_temporary(each)
            if is_stored and peer is not None:
                self._wait(peer, must=self.gathering)  # C18.1
            of_itself = self.gathering if is_stored and not self.is_concurrent else AT_ONCE
            self._order += 1
            self.letters.append(
                Letter(
                    parcel,
                    each,
                    # C6.2: in a subscription that ends with its connection the copy is transient.
                    parcel.persistent and not _is_temporary(each),
                    self._order,
                    self._event,
                    block,
                    of_itself if visible_from is None else visible_from,
                    stored_in=self.gathering if is_stored else None,
                    copies=copies,
                    handlers=parcel.handlers,
                )
            )

    def copied_to(self, address: str, parcel: Parcel, peer: Peer | None = None) -> list[str]:
        """C6.1, C6.7 to C6.9, C6.11: which queues what is sent to an address, or to a queue, is copied to now; by this
        connection."""
        queues: dict[str, None] = {}
        for part in address.split(","):
            if part.startswith(TOPIC):
                topic = part.removeprefix(TOPIC)
                queues |= {
                    queue: None
                    for queue, to in self.topics.items()
                    if _is_meant(to, topic)
                    and (queue not in self.selectors or SELECTORS[self.selectors[queue]](parcel))
                }
                queues |= {queue: None for queue in sorted(self.queues) if _consumes(queue, topic)}
            else:
                queue = part.removeprefix("/queue/")
                self._name(peer, queue)
                queues[queue] = None
        return list(queues)

    def _name(self, peer: Peer | None, queue: str) -> None:
        """C8.1: create a queue that is named for the first time."""
        if queue in self.queues:
            if peer is not None:
                # Somebody else may have made it, and what is sent to several may wait until that is durable.
                self._wait(peer, may=self.made_in.get(queue, AT_ONCE))
            return
        self.queues.add(queue)
        if _topic_of(queue):
            # C6.10: it is durable with the batch in which it is made, which the receipt of what made it waits for.
            self.made_in[queue] = self.gathering
            if peer is not None:
                self._wait(peer, must=self.gathering)

    def _is_stored(self, address: str, parcel: Parcel) -> bool:
        return _is_stored(parcel, self.copied_to(address, parcel))

    def _remove(self, letter: Letter) -> None:
        letter.is_removed = True
        letter.holder = letter.acknowledged_by = letter.nacked_by = letter.kept_by = None
        if letter.stored_in == self.gathering:
            letter.stored_in = None  # C3.1: one that is consumed first is never written.
        if letter.stored_in is not None:
            letter.removed_in = self.gathering

    def _acknowledged(self, peer: Peer, letter: Letter) -> None:
        self._remove(letter)
        if letter.removed_in is not None and letter.persistent:
            self._wait(peer, must=self.gathering)  # C18.3
        elif letter.persistent or self.may_evict:
            self._wait(peer, may=self.gathering)

    def send_numbered_by_jms(self, peer: Peer, queue: str, parcel: Parcel, producer: str, number: int) -> NumberStatus:
        """C26.10: as any numbered SEND; C26.11: its producers are others."""
        everyone, self.producers = self.producers, self.jms_producers
        status = self.send_numbered(peer, queue, parcel, Numbered(producer, Kind.SEND, number))
        self.producers = everyone
        return status

    def forget_jms_producers(self, peer: Peer, names: Iterable[str]) -> None:
        # C26.11
        for name in names:
            self._wait(peer, must=self.jms_producers.forget(name, self.gathering), may=self.gathering)

    def _use(self, numbered: Numbered, *, is_stored: bool, has_made: bool) -> None:
        self.producers.used(
            numbered.producer,
            numbered.kind,
            numbered.number,
            self.now_ms,
            self.gathering,
            is_stored=is_stored,
            has_made=has_made,
            declares_gapless=numbered.declares_gapless,
        )

    def _must_be_written(self) -> list[object]:
        """Return the reasons why the gathering batch cannot be empty."""
        now = self.gathering
        reasons: list[object] = [each for each in self.letters if each.removed_in == now]
        reasons += [
            each
            for each in self.letters
            if each.stored_in is not None
            and now in (each.stored_in, *(written.batch for written in each.written))
            and not self._may_be_removed(each)
        ]
        if not self.moves_later:
            reasons += [move for move in self.moves if move.since == now]
        reasons += [one for one in self.durables if now in (one.made_in, one.ended_in)]
        reasons += [queue for queue, batch in self.made_in.items() if batch == now]
        reasons += [each for each in self.planned if now in (each.stored_in, each.removed_in)]
        reasons += [pause for pause in self.pauses if pause[0] == now]
        reasons += self.producers.written_in(now) + self.jms_producers.written_in(now)
        return reasons

    def _wait_for_return(self, peer: Peer, *, failed: Iterable[Letter]) -> None:
        """C10.6: a receipt says that the attempts of persistent messages are durable."""
        is_written = any(letter.persistent for letter in failed)
        self._wait(peer, must=self.gathering if is_written else AT_ONCE, may=self.gathering)

    def _requeue(
        self,
        returned: Iterable[Letter],
        failed: Iterable[Letter],
        *,
        is_tried_later: bool = False,
        is_by_frame: bool = False,
        is_closed: bool = False,
    ) -> None:
        """C9.1: at its exact place again, all in one step, if not `is_tried_later`. `is_by_frame` if a NACK, a
        release, an UNSUBSCRIBE or a DISCONNECT ends the dispatches (C10.14). `is_closed` if a consumer's end counts
        the attempt (C26.7)."""
        failed = list(failed)
        for letter in sorted(returned, key=lambda each: each.key):
            letter.is_flagged |= not (is_by_frame and self._is_unseen(letter))
            for work in (letter.acknowledged_by, letter.nacked_by):
                if work is not None:
                    work.acknowledged = [each for each in work.acknowledged if each is not letter]
                    work.nacked = [each for each in work.nacked if each is not letter]
            self._free(letter)
            if letter in failed:
                self._count_attempt(letter, is_tried_later, is_closed=is_closed)
            # C13.2: whatever gives it back.
            if self.must_be_dead_lettered(letter):
                self._move(letter)

    def _is_unseen(self, letter: Letter) -> bool:
        """C10.14: a truenext client that was not cut had it, not in `auto` mode, has not started it, and no transaction
        has it."""
        reader = letter.holder
        return (
            reader is not None
            and reader.peer.is_truenext_client
            and not reader.peer.is_cut
            and reader.mode is not AckMode.AUTO
            and not letter.is_started
            and (letter.acknowledged_by, letter.nacked_by) == (None, None)
        )

    def _free(self, letter: Letter) -> None:
        if letter.holder is not None:
            letter.freed_ms = self.now_ms
            for browse in self.browses:
                # From now on it waits, if only for a moment.
                browse.hidden.discard(letter)
        letter.holder = letter.acknowledged_by = letter.nacked_by = letter.kept_by = None
        letter.is_started = False

    def _count_attempt(self, letter: Letter, is_tried_later: bool, *, is_closed: bool) -> None:
        letter.attempts += 1
        # Only a connection that was lost, or a consumer that a JMS client has ended, counts an attempt of what is due
        # at once (C9.5, C9.6, C10.10).
        letter.was_lost = not (is_tried_later or is_closed)
        letter.due = 0
        letter.is_restored = False
        delay = 0
        if is_tried_later:
            # C10.11: an attempt without a cause leaves the causes as they are.
            if letter.nack_options.cause:
                letter.causes = (letter.causes[0] or letter.nack_options.cause, letter.nack_options.cause)
            letter.is_rejected = letter.nack_options.is_rejected and not _keeps_failures(letter.queue)
            # C9.5
            delay = (
                self.retries.after(letter.attempts) if letter.nack_options.delay is None else letter.nack_options.delay
            )
            if not self.must_be_dead_lettered(letter):
                letter.due = self.steady_ms + delay
        if letter.persistent:
            # C10.5
            self.attempt_counted_in = self.gathering
            due_ms = self.now_ms + delay if letter.due > self.steady_ms else 0
            letter.written.append(
                Written(self.gathering, letter.attempts, due_ms, letter.is_rejected, letter.was_lost, letter.causes)
            )

    def _move(self, letter: Letter) -> None:
        # C11.1, C11.2: dead-lettered in the same step that removes it, a new arrival, persistent whatever it was. See
        # `arrived` for that step; here it leaves its queue for everybody who looks.
        letter.is_removed = True
        self._order += 2
        # The second is that of a report, if there is one.
        self.moves.append(Move(letter, self._order - 1, self._event, self.gathering, self._order))

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
        labels = {reader: [(seen.label, seen.queue) for seen in dispatched.get(reader, [])] for reader in self.readers}
        # C25.2: order across queues is not promised. Only queues that share a connection's room can tell the
        # difference.
        unsent = {
            peer: peer.unsent
            + sum(
                self.letter(seen.label, seen.queue).parcel.unsent
                for reader, all_seen in dispatched.items()
                if reader.peer is peer
                for seen in all_seen
            )
            for peer in self.peers
        }
        all_unsent = sum(unsent.values())
        self._is_roomy = (
            all_unsent < (self.sockets_max or all_unsent + 1) and max(unsent.values(), default=0) < UNSENT_BYTES_MAX
        )
        if any(reader.is_of_many for reader in self.readers):
            # Queues that share a window cannot be checked one after the other.
            self._is_roomy = False
        queues = sorted({each.queue for each in self.letters if not each.is_removed})
        if not self._explain(queues, labels, dict.fromkeys(self.readers, 0), dict.fromkeys(queues, 0), set()):
            expected: dict[Reader, list[Letter]] = {}
            for queue in queues:
                while steps := self.next_dispatches(queue):
                    self._dispatch(*steps[-1])
                    expected.setdefault(steps[-1][1], []).append(steps[-1][0])
            raise Disagreement(
                f"dispatched, by the contract: {expected}; by the broker: "
                f"{ {reader: seen for reader, seen in dispatched.items() if seen} }"
            )
        for reader, all_seen in dispatched.items():
            for seen in all_seen:
                letter = self.letter(seen.label, seen.queue)
                self.saw_sequence(letter, seen.sequence)
                if letter.least_deliveries is not None:
                    # C10.1: after a crash every recovered message is flagged; the number
                    # itself is of what was written.
                    if letter.least_deliveries <= seen.deliveries <= max(2, letter.deliveries):
                        letter.deliveries = seen.deliveries
                    letter.least_deliveries = None
                if letter.was_held_when_lost is None:
                    letter.was_held_when_lost = seen.redeliveries > letter.attempts
                expected_seen = Seen(
                    letter.parcel.label,
                    letter.queue,
                    seen.sequence,
                    letter.parcel.priority,
                    letter.persistent,
                    letter.parcel.expires_ms,
                    letter.deliveries,
                    letter.attempts,
                    letter.is_first_of_group,
                    letter.was_lost,
                    letter.causes,
                    letter.original_causes,
                    letter.is_flagged,
                    letter.failure,
                    letter.handlers,
                    letter.failed_in,
                    letter.parcel.due_ms,
                    max(letter.attempts, int(letter.was_held_when_lost)),
                )
                if seen != expected_seen:
                    raise Disagreement(f"{reader} got {seen}; by the contract {expected_seen}")

    def _check_pull_requests(self, ended: list[tuple[Reader, Ended]]) -> None:
        answers: dict[Reader, list[Ended]] = {}
        for reader, one in ended:
            answers.setdefault(reader, []).append(one)
        for reader in list(dict.fromkeys([*self.readers, *answers])):
            rest = answers.get(reader, [])
            if reader not in self.readers:
                if rest:
                    raise Disagreement(f"{reader}, which has ended, is told {rest}")
                continue
            expected = Ended(reader.requested, reader.correlation)
            is_over = self._is_pull_over(reader)
            can_end = is_over or (reader.requested > 0 and not reader.waits and not self._is_any_ready(reader))
            if rest and (not can_end or rest != [expected]):
                raise Disagreement(
                    f"{reader} is told {rest}; by the contract it has asked for {expected}, it "
                    f"{'waits' if reader.waits else 'does not wait'}, and ready for it is {self.true_next(reader)}"
                )
            if rest:
                reader.requested = 0
            elif is_over or (can_end and self._must_end(reader)):
                raise Disagreement(f"nothing is ready for {reader}, and it is not told that {expected} is over")

    def _is_any_ready(self, reader: Reader) -> bool:
        """C21.3: wherever it is, also in queues that it has not joined yet."""
        joined, reader.joined = reader.joined, None
        found = self.true_next(reader)
        reader.joined = joined
        return found is not None

    def _must_end(self, reader: Reader) -> bool:
        """True if no read, comparison or lack of room delays the end of a no-wait pull request."""
        if reader.joined is not None or not self._has_capacity(reader.peer) or reader in self.unfinished:
            return False
        if reader.peer in self._full_peers:
            return False
        queues = {*self._reading, *(queue for queue, selector in self.scanning if selector == reader.selector)}
        queues |= {queue for queue, waiting in self.scanning_for.items() if reader in waiting}
        return not any(reader.is_for(queue) for queue in queues)

    def check_browses(self, shown: dict[OpenBrowse, list[Seen]], ended: list[OpenBrowse]) -> None:
        """Compare what a turn of the broker showed with the contract (C17.3, C17.5), and follow it. A turn dispatches
        before it shows.

        Raises: Disagreement
        """
        for browse, all_seen in shown.items():
            if browse not in self.browses:
                raise Disagreement(f"{browse}, which is over, is shown {all_seen}")
            for seen in all_seen:
                if not self._has_capacity(browse.peer):
                    raise Disagreement(f"{browse} is shown {all_seen}, and its connection has no room")
                self._check_shown(browse, self.letter(seen.label, browse.queue), seen)
        for browse in ended:
            missing = [
                letter for letter in browse.waiting if letter not in browse.shown and self._is_as_it_was(browse, letter)
            ]
            if missing:
                raise Disagreement(f"{browse} is told that this was all, and was not shown {missing}")
            self.browses.remove(browse)

    def _check_shown(self, browse: OpenBrowse, letter: Letter, seen: Seen) -> None:
        """C17.1, C17.4: in the order of K, no message twice, and none that did not wait all the time. C17.2: as it
        was."""
        if browse.shown and letter.key <= browse.shown[-1].key:
            raise Disagreement(f"{browse} is shown {letter} behind {browse.shown[-1]}")
        was_expired = 0 < letter.parcel.expires_ms <= browse.started_ms
        if (
            not self.is_visible(letter)
            or was_expired
            or (letter in browse.hidden and (letter.is_removed or letter.holder is not None))
        ):
            raise Disagreement(f"{browse} is shown {letter}, which does not wait: {vars(letter)}")
        if letter.parcel.priority not in browse.priorities:
            raise Disagreement(f"{browse} is shown {letter}, which it does not want")
        self.saw_sequence(letter, seen.sequence)
        if self._is_as_it_was(browse, letter):
            at_least = at_most = letter.deliveries
            if letter.least_deliveries is not None:
                # That would count the next dispatch, and this is none.
                at_least, at_most = letter.least_deliveries - 1, max(1, letter.deliveries)
            actual = (seen.attempts, seen.causes, seen.original_causes, seen.is_redelivered)
            expected = (letter.attempts, letter.causes, letter.original_causes, letter.is_flagged)
            # C26.8
            was_held = seen.redeliveries if letter.was_held_when_lost is None else int(letter.was_held_when_lost)
            if seen.redeliveries != max(letter.attempts, was_held):
                raise Disagreement(f"{browse} is shown {seen}; by the contract {vars(letter)}")
            if not at_least <= seen.deliveries <= at_most or actual != expected:
                raise Disagreement(f"{browse} is shown {seen}; by the contract {vars(letter)}")
        browse.shown.append(letter)
        browse.peer.unsent += letter.parcel.unsent

    def _is_as_it_was(self, browse: OpenBrowse, letter: Letter) -> bool:
        """True if the message has waited unchanged since the browse began."""
        return (
            browse.waiting.get(letter) == letter.dispatched_at
            and not letter.is_removed
            and letter.holder is None
            and not self.is_expired(letter)
            and not self.must_be_dead_lettered(letter)
        )

    def _has_capacity(self, peer: Peer) -> bool:
        """C4.5."""
        if peer.unsent >= UNSENT_BYTES_MAX:
            return False
        sockets_max = self.sockets_max
        return not (sockets_max is not None and peer.unsent and sum(each.unsent for each in self.peers) > sockets_max)

    def _explain(
        self,
        queues: list[str],
        labels: dict[Reader, list[tuple[str, str]]],
        done: dict[Reader, int],
        progress: dict[str, int],
        failed: set[tuple[int, ...]],
    ) -> bool:
        """Find an order of the queues' steps that makes what the broker did legal, and take them.

        `done` and `progress` count the steps taken so far, `failed` remembers what led nowhere.
        Returns: False, with nothing changed, if there is no such order.
        """
        # Where consumers choose, as much may have been dispatched in a queue in more than one way.
        state = (*(progress[queue] for queue in queues), *done.values())
        if state in failed:
            return False
        steps = [step for queue in queues for step in self.next_dispatches(queue)]
        if not self._is_roomy:
            # Who has waited longest is seen across queues only where they share a consumer: the smallest K first.
            steps.sort(key=lambda step: step[0].key)
        is_over = all(done[reader] == len(labels[reader]) for reader in done)
        if is_over and all(reader in self.unfinished or self._may_wait(letter, reader) for letter, reader in steps):
            return True
        for letter, reader in steps:
            if self._is_roomy and failed:
                break
            at = done[reader]
            if at < len(labels[reader]) and labels[reader][at] == (letter.parcel.label, letter.queue):
                undo = (letter.dispatched_at, reader.waiting_since)
                owners = dict(self.owners)
                self._dispatch(letter, reader)
                done[reader] += 1
                progress[letter.queue] += 1
                if self._explain(queues, labels, done, progress, failed):
                    return True
                progress[letter.queue] -= 1
                done[reader] -= 1
                letter.holder = None
                reader.requested += reader.is_pulling
                self.owners = owners
                letter.deliveries -= 1
                letter.dispatched_at, reader.waiting_since = undo
                reader.peer.unsent -= letter.parcel.unsent
        failed.add(state)
        return False

    def _dispatch(self, letter: Letter, reader: Reader) -> None:
        letter.holder = reader
        letter.is_started = False
        reader.requested -= reader.is_pulling
        letter.deliveries += 1
        letter.dispatched_at = reader.waiting_since = self._next_step()
        reader.peer.unsent += letter.parcel.unsent
        if letter.parcel.group:
            # C5.2, C5.4: it is the consumer's from now on, or free again.
            group = (letter.queue, letter.parcel.group)
            letter.is_first_of_group = group not in self.owners
            self.owners[group] = reader
            if letter.parcel.closes_group:
                del self.owners[group]

    def _end(self, reader: Reader) -> None:
        self.readers.remove(reader)
        # C5.3: free again when that consumer ends.
        self.owners = {group: owner for group, owner in self.owners.items() if owner is not reader}

    def _may_wait(self, letter: Letter, reader: Reader) -> bool:
        if not reader.is_of_many:
            return self._may_wait_in(letter.queue, letter, reader)
        # C7.5: it waits for a page of any of its queues, or for what is compared there.
        queues = {letter.queue, *self._reading, *self.scanning_for, *(queue for queue, _ in self.scanning)}
        return any(reader.is_for(queue) and self._may_wait_in(queue, letter, reader) for queue in queues)

    def _may_wait_in(self, queue: str, letter: Letter, reader: Reader) -> bool:
        if queue in self.scanning_for:
            # C5.8: what is in a queue with groups is compared as with a selector, for every consumer.
            return self.scanning_for[queue].get(reader, 10) <= letter.key[0]
        if reader.selector is not None:
            # C4.8: what was there before is compared in the background, in the order of K.
            return self.scanning.get((queue, reader.selector), 10) <= letter.key[0]
        # C4.3: what has left memory is read before anything behind it; higher priorities go on meanwhile.
        return queue in self._reading and self._reading[queue] <= letter.key[0]


def _is_temporary(queue: str) -> bool:
    """C6.2: a subscription is a temporary queue."""
    return queue.startswith("/")


@lru_cache
def _is_of_many(address: str) -> bool:
    return ("*" in address or ">" in address) and "," not in address and not _is_temporary(address)


# Asked a thousand times of the same names.
@lru_cache
def _is_for(address: str, queue: str) -> bool:
    # C7.1, C7.3: every ordinary queue whose name matches; some only if the first word says so.
    if not _is_of_many(address):
        return queue == address
    if _is_temporary(queue) or "," in queue:
        return False
    first = queue.split(".")[0]
    is_special = (first in ("DLQ", "Spark") and queue != first) or ".VirtualTopic." in queue
    return _is_meant(address, queue) and (not is_special or address.split(".")[0] == first)


def _keeps_failures(queue: str) -> bool:
    # C11.6: what fails in a dead-letter queue stays there, as it does in a temporary queue.
    return queue.startswith(DEAD_LETTER_PREFIX) or _is_temporary(queue)


def _is_meant(pattern: str, topic: str) -> bool:
    """C6.7: `*` is any one word, `>` the rest, one word or more."""
    first, _, rest = pattern.partition(".")
    word, _, others = topic.partition(".")
    if not word or not first:
        return word == first
    return first == ">" or (first in ("*", word) and _is_meant(rest, others))


def _consumes(queue: str, topic: str) -> bool:
    """C6.9: Consumer.ANY.VirtualTopic.NAME, *ANY* being one word."""
    return _topic_of(queue) == topic


def _topic_of(queue: str) -> str:
    """C6.9: the virtual topic whose messages are copied to a queue; empty if there is none."""
    words = queue.split(".")
    topic = ".".join(words[2:])
    return topic if words[0] == "Consumer" and topic.startswith("VirtualTopic.") else ""


def _queues_of(address: str) -> list[str]:
    """Return the queues that the address itself names."""
    return [part.removeprefix("/queue/") for part in address.split(",") if not part.startswith(TOPIC)]


def _is_stored(parcel: Parcel, queues: list[str]) -> bool:
    return parcel.persistent and not all(map(_is_temporary, queues))
