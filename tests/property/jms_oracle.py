"""Oracle of JMS clients, by docs/contract.md alone: its chapter 26, and what that chapter takes from the others.

It follows the commands of all clients, and judges what each client is sent: which messages come next and to whom, with
which redelivery counter; answers, none before the disk has what it confirms; ends of requests; advisories.
Naive on purpose: one list of messages, sorted again for each question. Written from the contract and never from the
code. Selectors, groups, patterns and memory are left to the other oracle (oracle.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.property.oracle import Disagreement

PREFETCH_MAX = 32_767
"""C26.3."""
ATTEMPTS_MAX = 3
"""The machine's policy."""
RETRY_DELAY_NS = 10**9
"""C9.5: delay after the second attempt and each later one."""
GRACE_NS = 5 * 10**6
"""Time by which the end of a request may be late: the broker counts in milliseconds."""
DEAD_LETTERS = "DLQ."
TOPIC_COPY = "copy of "
TEMPORARY = "temp-queue://"
AT_ONCE = 0

MessageKey = tuple[str, int]
"""Producer's id and number of a message: its JMSMessageID."""


@dataclass(frozen=True)
class Parcel:
    """Message as its producer sends it."""

    label: str
    key: MessageKey
    priority: int
    is_persistent: bool
    reply_to: str = ""


@dataclass(eq=False)
class Letter:
    """Message after its acceptance."""

    parcel: Parcel
    queue: str
    is_persistent: bool
    order: int
    visible_from: int
    """Number of the batch that makes it visible."""
    attempts: int = 0
    was_held_when_lost: bool = False
    """C26.8."""
    due_ns: int = 0
    holder: "Consumer | None" = None
    kept_by: "Work | None" = None
    """C26.5."""
    taken_by: "Work | None" = None
    """C26.6: transaction to which its consumer has left it."""
    is_removed: bool = False
    sequence: int | None = None
    """The broker's number of it; None before its first dispatch."""
    cause: str | None = None
    """C26.9: cause in a dead letter."""

    @property
    def place(self) -> tuple[int, int]:
        """C2.1."""
        return (-self.parcel.priority, self.order)

    @property
    def is_dead(self) -> bool:
        return self.queue.startswith(DEAD_LETTERS)

    def __repr__(self) -> str:
        return f"{self.queue}:{self.parcel.label}(p{self.parcel.priority})"


@dataclass(eq=False)
class Work:
    """Open transaction."""

    number: int
    is_repeated: bool
    """C26.15: begun while its client repeats what it did on an earlier connection."""
    begun: int
    """Command id of its BEGIN."""
    commands: set[int] = field(default_factory=set)
    """Command ids of its messages, and of the beginnings and ends of producers that have sent in it and ended."""
    producers: set[str] = field(default_factory=set)
    """Producers that have sent in it and not ended."""
    sends: list[tuple[Parcel, list[str]]] = field(default_factory=list)
    sessions: set[int] = field(default_factory=set)
    """Sessions that send in it."""
    taken: list[Letter] = field(default_factory=list)
    has_acknowledged: bool = False
    """C26.15: true even if what it has acknowledged is removed."""
    is_doomed: bool = False
    """C23.5."""
    is_unmatched: bool = False
    """C26.15: it acknowledges what its consumer does not hold."""


@dataclass(eq=False)
class Consumer:
    client: "Client"
    session: int
    value: int
    queue: str
    prefetch: int
    priority: int
    waiting_since: int
    held: list[Letter] = field(default_factory=list)
    """In order of dispatch."""
    delivered: set[Letter] = field(default_factory=set)
    credit: int = 0
    has_received: bool = False
    waits: bool = True
    is_pull: bool = False
    """True if its client waits for the end of the request."""
    ends_ns: int | None = None

    @property
    def name(self) -> tuple[int, int]:
        return self.session, self.value

    def limit(self) -> int:
        """C26.3."""
        return self.prefetch + len(self.delivered.intersection(self.held))

    def __repr__(self) -> str:
        return f"{self.client.id}/{self.session}:{self.value}({self.queue},{self.prefetch})"


@dataclass(eq=False)
class Browse:
    client: "Client"
    session: int
    value: int
    queue: str
    waiting: list[Letter]
    """What waited when it began."""
    shown: list[Letter] = field(default_factory=list)
    dispatched: set[Letter] = field(default_factory=set)
    """What was dispatched since it began."""
    has_ended: bool = False


@dataclass
class Request:
    """Command that asks for an answer."""

    must_wait_for: int
    """Number of the batch that must be durable before."""
    is_refused: bool


@dataclass(eq=False)
class Client:
    """One connection."""

    id: str
    is_fault_tolerant: bool = False
    is_recovering: bool = False
    consumers: dict[tuple[int, int], Consumer] = field(default_factory=dict)
    browses: dict[tuple[int, int], Browse] = field(default_factory=dict)
    works: dict[int, Work] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    errors: int = 0
    """Refused commands that have asked for no answer, and are not told yet."""
    must_wait_for: int = AT_ONCE
    advisories: set[tuple[int, int]] = field(default_factory=set)
    """C26.16: its consumers of advisories."""
    told: set[str] = field(default_factory=set)
    told_ends: set[str] = field(default_factory=set)
    temporaries: set[str] = field(default_factory=set)
    producers: set[str] = field(default_factory=set)
    beginnings: dict[str, int] = field(default_factory=dict)
    """Command ids of the beginnings of producers that may send in repeated transactions."""
    has_ended: bool = False

    @property
    def watches(self) -> bool:
        return bool(self.advisories) and not self.has_ended

    @property
    def process(self) -> str:
        return self.id.rpartition("-")[0]


@dataclass(frozen=True)
class Seen:
    """Dispatch of a message as its client gets it."""

    label: str
    key: MessageKey
    priority: int
    is_persistent: bool
    sequence: int
    redeliveries: int
    cause: str | None


class JmsOracle:
    def __init__(self) -> None:
        self.clients: list[Client] = []
        self.letters: list[Letter] = []
        self.topics: dict[str, list[Consumer]] = {}
        self.numbers: dict[str, tuple[int, int]] = {}
        """C26.10: highest number of each producer that is remembered, and the last batch of its sends."""
        self.untold: set[tuple[Client, str]] = set()
        self.untold_ends: set[tuple[Client, str]] = set()
        """Advisories that must come with the read that has caused them."""
        self.gathering = 1
        self.durable = 0
        self.now_ns = 0
        self._order = self._step = 0

    # ---- Connections ----

    def connect(self, name: str, *, is_fault_tolerant: bool, is_reconnect: bool) -> Client:
        for former in [each for each in self.clients if each.id == name]:
            self.lose(former)
        client = Client(name, is_fault_tolerant, is_reconnect)
        self.clients.append(client)
        return client

    def lose(self, client: Client) -> None:
        """C10.2, C26.8: the socket of a client that has not ended its connection by a command."""
        if client.has_ended:
            self.clients.remove(client)
            return
        failed = [each for work in client.works.values() for each in work.taken]
        lost = list(failed)
        for consumer in client.consumers.values():
            failed += consumer.held[:1]
            lost += consumer.held
        for letter in lost:
            letter.was_held_when_lost = True
        self._end(client, lost, failed)
        self.clients.remove(client)

    def disconnect(self, client: Client, last: int) -> None:
        """C26.7: RemoveInfo of the connection."""
        returned = [each for work in client.works.values() for each in work.taken]
        failed: list[Letter] = []
        for consumer in client.consumers.values():
            returned += consumer.held
            failed += _up_to(consumer, last)
        self._wait_for_attempts(client, failed)
        self._end(client, returned, failed)
        for name in client.producers if client.is_fault_tolerant else ():
            self.numbers.pop(name, None)
        client.has_ended = True

    def _end(self, client: Client, returned: Iterable[Letter], failed: list[Letter]) -> None:
        for letter in list(returned):
            self._requeue(letter, has_failed=letter in failed, is_at_once=True)
        for consumer in client.consumers.values():
            self._drop_copies(consumer)
        for name in list(client.temporaries):
            self._remove_queue(name)
        client.consumers.clear()
        client.browses.clear()
        client.works.clear()
        ended = list(client.temporaries)
        client.temporaries.clear()
        for name in ended:
            self._expect_end(name)

    def restart(self) -> None:
        """Restart the broker after a clean stop, with which all connections have ended (C10.2, C16.2, C26.8)."""
        for client in list(self.clients):
            self._end(client, [], [])
        self.clients.clear()
        self.topics.clear()
        self.untold.clear()
        self.untold_ends.clear()
        for letter in self.letters:
            letter.holder = letter.kept_by = letter.taken_by = None
            letter.visible_from = AT_ONCE
        self.numbers = {name: (number, AT_ONCE) for name, (number, _) in self.numbers.items()}

    # ---- Consumers ----

    def subscribe(self, client: Client, session: int, value: int, queue: str, prefetch: int, priority: int) -> bool:
        """Add a consumer. Nothing happens if there is one. Returns False if it is refused."""
        if (session, value) in client.consumers or (session, value) in client.browses:
            return True
        if queue.startswith(TEMPORARY) and not self._is_there(queue):
            return False
        topic = queue.removeprefix("topic://")
        if topic != queue:
            queue = f"{TOPIC_COPY}{topic} of {client.id} {session}:{value} {self._next_step()}"
        consumer = Consumer(client, session, value, queue, min(prefetch, PREFETCH_MAX), priority, self._next_step())
        client.consumers[consumer.name] = consumer
        if queue.startswith(TOPIC_COPY):
            self.topics.setdefault(topic, []).append(consumer)
        return True

    def browse(self, client: Client, session: int, value: int, queue: str) -> None:
        if (session, value) not in client.consumers and (session, value) not in client.browses:
            waiting = [each for each in self._waiting(queue) if each.visible_from <= self.durable]
            client.browses[session, value] = Browse(client, session, value, queue, waiting)

    def close(self, client: Client, consumers: list[Consumer], last: int) -> None:
        """C26.6, C26.7: RemoveInfo of a consumer or session."""
        returned: list[Letter] = []
        failed: list[Letter] = []
        for consumer in consumers:
            for letter in [each for each in consumer.held if each.kept_by is not None and not each.kept_by.is_doomed]:
                work = letter.kept_by
                assert work is not None
                work.taken.append(letter)
                letter.taken_by, letter.kept_by, letter.holder = work, None, None
                consumer.held.remove(letter)
        for consumer in consumers:
            returned += consumer.held
            failed += _up_to(consumer, last)
            del client.consumers[consumer.name]
        self._wait_for_attempts(client, failed)
        for letter in returned:
            self._requeue(letter, has_failed=letter in failed, is_at_once=True)
        for consumer in consumers:
            self._drop_copies(consumer)

    def _drop_copies(self, consumer: Consumer) -> None:
        """C6.3."""
        if consumer.queue.startswith(TOPIC_COPY):
            for consumers in self.topics.values():
                if consumer in consumers:
                    consumers.remove(consumer)
            self._remove_queue(consumer.queue)

    def _remove_queue(self, queue: str) -> None:
        for letter in self.letters:
            if letter.queue == queue:
                letter.is_removed = True
                letter.holder = letter.kept_by = None
                if letter.taken_by is not None:
                    letter.taken_by.taken.remove(letter)
                    letter.taken_by = None

    def control(self, client: Client, consumer: Consumer, prefetch: int) -> None:
        client.is_recovering = False
        if prefetch < consumer.prefetch:
            consumer.credit = 0
        consumer.prefetch = prefetch

    def pull(self, consumer: Consumer, timeout_ms: int) -> None:
        """C26.4."""
        if consumer.prefetch:
            return
        consumer.credit += 1
        consumer.waits, consumer.is_pull = timeout_ms >= 0, True
        consumer.ends_ns = self.now_ns + timeout_ms * 10**6 if timeout_ms > 0 else None

    def request(self, client: Client) -> None:
        """C26.3: after each read of the socket."""
        for consumer in client.consumers.values():
            lacking = consumer.limit() - len(consumer.held)
            if consumer.prefetch and lacking > consumer.credit:
                consumer.credit = min(lacking, PREFETCH_MAX)
                consumer.waits, consumer.is_pull, consumer.ends_ns = True, False, None

    # ---- Acknowledgements ----

    def report_delivered(self, consumer: Consumer, last: Letter) -> None:
        consumer.delivered.update(consumer.held[: consumer.held.index(last) + 1])

    def acknowledge(self, client: Client, consumer: Consumer, letters: list[Letter]) -> None:
        for letter in letters:
            self._settle(consumer, letter)
            if letter.is_persistent:
                self._wait(client)

    def keep(self, client: Client, consumer: Consumer, letters: list[Letter], work: Work) -> None:
        """C26.5. What a client acknowledges it has delivered."""
        work.has_acknowledged = True
        for letter in letters:
            letter.kept_by = work
            consumer.delivered.add(letter)

    def reject(self, client: Client, consumer: Consumer, letters: list[Letter], cause: str) -> None:
        """C26.9."""
        for letter in letters:
            consumer.held.remove(letter)
            self._wait_for_attempts(client, [letter])
            self._requeue(letter, has_failed=True, is_rejected=True, cause=cause)

    def fail(self, client: Client, consumer: Consumer, letters: list[Letter], cause: str) -> None:
        """A NACK: the client has found the messages expired, and the broker has not."""
        for letter in letters:
            consumer.held.remove(letter)
            self._wait_for_attempts(client, [letter])
            self._requeue(letter, has_failed=True, cause=cause)

    def _settle(self, consumer: Consumer, letter: Letter) -> None:
        consumer.held.remove(letter)
        letter.is_removed, letter.holder = True, None

    def _requeue(
        self,
        letter: Letter,
        *,
        has_failed: bool,
        is_at_once: bool = False,
        is_rejected: bool = False,
        cause: str | None = None,
    ) -> None:
        letter.holder = letter.kept_by = letter.taken_by = None
        if letter.is_removed or not has_failed:
            return
        letter.attempts += 1
        # C9.5, C9.6
        is_delayed = not is_at_once and letter.attempts > 1
        letter.due_ns = self.now_ns + RETRY_DELAY_NS if is_delayed else 0
        if cause is not None:
            letter.cause = cause
        if (is_rejected or letter.attempts >= ATTEMPTS_MAX) and not _keeps_failures(letter.queue):
            # C11.2
            letter.is_removed = True
            self._accept(letter.parcel, DEAD_LETTERS + letter.queue, self.gathering, True).cause = letter.cause

    # ---- Messages ----

    def send(self, client: Client, parcel: Parcel, queues: list[str], work: Work | None, producer: str) -> None:
        if work is not None:
            work.sends.append((parcel, queues))
            return
        if client.is_fault_tolerant and parcel.is_persistent:
            highest, batch = self.numbers.get(producer, (-1, AT_ONCE))
            number = parcel.key[1]
            if number <= highest:
                # C18.6
                client.must_wait_for = max(client.must_wait_for, batch)
                return
        is_any_stored = False
        for queue in self._spread(queues):
            is_stored = parcel.is_persistent and not _is_temporary(queue)
            self._accept(parcel, queue, self.gathering if is_stored else AT_ONCE, is_stored)
            if is_stored:
                is_any_stored = True
                self._wait(client)
        if client.is_fault_tolerant and parcel.is_persistent:
            self.numbers[producer] = (parcel.key[1], self.gathering if is_any_stored else AT_ONCE)

    def _spread(self, queues: list[str]) -> list[str]:
        """C6.1, C6.11, C26.13."""
        copies: list[str] = []
        for queue in queues:
            topic = queue.removeprefix("topic://")
            if topic != queue:
                copies += [each.queue for each in self.topics.get(topic, ())]
            elif not queue.startswith(TEMPORARY) or self._is_there(queue):
                copies.append(queue)
        return copies

    def _accept(self, parcel: Parcel, queue: str, visible_from: int, is_persistent: bool) -> Letter:
        self._order += 1
        letter = Letter(parcel, queue, is_persistent, self._order, visible_from)
        self.letters.append(letter)
        return letter

    def add_producer(self, client: Client, name: str, command_id: int) -> None:
        client.producers.add(name)
        if client.is_recovering or any(work.is_repeated for work in client.works.values()):
            client.beginnings.setdefault(name, command_id)

    def end_producer(self, client: Client, name: str, command_id: int) -> None:
        begun = client.beginnings.pop(name, command_id)
        for work in client.works.values():
            if name in work.producers:
                work.producers.remove(name)
                work.commands |= {begun, command_id}
        self.forget(client, [name])

    def forget(self, client: Client, names: Iterable[str]) -> None:
        """C26.11."""
        for name in names:
            if name in client.producers:
                client.producers.remove(name)
                if client.is_fault_tolerant:
                    self.numbers.pop(name, None)

    # ---- Transactions ----

    def sent_in(self, work: Work, producer: str, session: int, command_id: int) -> None:
        """Note a message in a transaction."""
        work.sessions.add(session)
        work.producers.add(producer)
        work.commands.add(command_id)

    def begin(self, client: Client, number: int, command_id: int) -> None:
        client.works.setdefault(number, Work(number, client.is_recovering, command_id))

    def kept(self, work: Work) -> list[Letter]:
        return [each for each in self.letters if each.kept_by is work]

    def commit(self, client: Client, number: int, command_id: int) -> bool:
        """Commit a transaction. Returns False if that is refused; then the transaction is rolled back."""
        client.is_recovering = False
        work = client.works.get(number)
        if work is None:
            return False
        kept = self.kept(work)
        lost_acknowledgements = (
            work.is_repeated
            and not work.has_acknowledged
            and any(session in work.sessions for session, _ in client.consumers)
            and not self._knows_all(client, work, command_id)
        )
        if work.is_doomed or work.is_unmatched or lost_acknowledgements:
            self.roll_back(client, number)
            return False
        del client.works[number]
        copies = [(parcel, queue) for parcel, queues in work.sends for queue in self._spread(queues)]
        is_lasting = any(each.is_persistent for each in (*kept, *work.taken)) or any(
            parcel.is_persistent and not _is_temporary(queue) for parcel, queue in copies
        )
        for letter in kept:
            assert letter.holder is not None
            letter.holder.held.remove(letter)
        for letter in (*kept, *work.taken):
            letter.is_removed = True
            letter.holder = letter.kept_by = letter.taken_by = None
        for parcel, queue in copies:
            is_stored = parcel.is_persistent and not _is_temporary(queue)
            self._accept(parcel, queue, self.gathering if is_lasting else AT_ONCE, is_stored)
        if is_lasting:
            self._wait(client)
        return True

    def _knows_all(self, client: Client, work: Work, commit_id: int) -> bool:
        """C26.15: whether no acknowledgement can be missing between BEGIN and COMMIT."""
        beginnings = {client.beginnings.get(each, 0) for each in work.producers}
        return set(range(work.begun + 1, commit_id)) <= work.commands | beginnings

    def roll_back(self, client: Client, number: int) -> None:
        """C26.5, C26.6: nothing happens to what its consumers hold; no attempt counts."""
        work = client.works.pop(number, None)
        if work is not None:
            for letter in self.kept(work):
                letter.kept_by = None
            for letter in work.taken:
                self._requeue(letter, has_failed=False)

    # ---- Temporary queues and advisories (C26.13, C26.14, C26.16) ----

    def add_temporary(self, client: Client, name: str) -> None:
        if name not in client.temporaries:
            client.temporaries.add(name)
            self.untold |= {(each, name) for each in self.clients if name in each.told_ends and each.watches}

    def remove_temporary(self, client: Client, name: str) -> bool:
        """Returns False if it is refused, as the queue has a consumer."""
        if name not in client.temporaries:
            return True
        if any(each.queue == name for each in client.consumers.values()):
            return False
        client.temporaries.remove(name)
        self._remove_queue(name)
        self._expect_end(name)
        return True

    def _expect_end(self, name: str) -> None:
        self.untold_ends |= {(each, name) for each in self.clients if name in each.told}

    def _is_there(self, name: str) -> bool:
        return any(name in client.temporaries for client in self.clients)

    def told(self, client: Client, name: str, *, is_end: bool) -> None:
        """An advisory has come."""
        if is_end == (name not in client.told):
            raise Disagreement(f"{client.id} is told of {'the end of ' if is_end else ''}{name} twice, or in vain")
        if is_end:
            client.told.remove(name)
            client.told_ends.add(name)
            self.untold_ends.discard((client, name))
        else:
            client.told.add(name)
            client.told_ends.discard(name)
            self.untold.discard((client, name))

    def check_reply_to(self, client: Client, name: str) -> None:
        """Check before a message with this reply-to is dispatched.

        Raises: Disagreement
        """
        if client.advisories and name not in client.told and _owner(name) != client.id:
            raise Disagreement(f"{client.id} gets a message with the reply-to {name} before it is told of that")

    def check_told(self) -> None:
        """Check after each read and turn that a process knows the same on all its connections, that the owner's process
        knows all of its own, and that each end was told.

        Raises: Disagreement
        """
        self.untold_ends = {(client, name) for client, name in self.untold_ends if client.watches}
        if self.untold_ends or self.untold:
            raise Disagreement(f"never told of ends {self.untold_ends} and beginnings {self.untold}")
        there = {name for client in self.clients for name in client.temporaries}
        for client in self.clients:
            if not client.watches:
                continue
            own = {name for name in there if _owner(name).rpartition("-")[0] == client.process}
            if missing := {name for name in own if _owner(name) != client.id} - client.told:
                raise Disagreement(f"{client.id} is never told of {missing}, which its process has made")
            for other in self.clients:
                if other.process != client.process or not other.watches:
                    continue
                apart = {name for name in client.told ^ other.told if _owner(name) not in (client.id, other.id)}
                if apart:
                    raise Disagreement(f"of {client.id} and {other.id} only one is told of {apart}")

    # ---- What is durable ----

    def _wait(self, client: Client) -> None:
        """C18.1, C18.3: later answers to this client wait for the gathering batch."""
        client.must_wait_for = max(client.must_wait_for, self.gathering)

    def _wait_for_attempts(self, client: Client, failed: list[Letter]) -> None:
        """C10.6."""
        if any(letter.is_persistent for letter in failed):
            self._wait(client)

    def ask(self, client: Client, command_id: int, *, is_refused: bool) -> None:
        """Note a command that asks for an answer."""
        client.requests[command_id] = Request(client.must_wait_for, is_refused)

    def answered(self, client: Client, command_id: int, *, is_refused: bool) -> None:
        """Check an answer (C26.1, C26.2).

        Raises: Disagreement
        """
        request = client.requests.pop(command_id, None)
        if request is None:
            raise Disagreement(f"{client.id} gets an answer to {command_id}, which has asked for none, or has one")
        if request.is_refused is not is_refused:
            raise Disagreement(f"{client.id}: command {command_id} is{'' if is_refused else ' not'} refused")
        if not is_refused and request.must_wait_for > self.durable:
            raise Disagreement(
                f"{client.id} gets the answer to {command_id} when batch {self.durable} is durable, and not "
                f"{request.must_wait_for}"
            )

    # ---- Turns ----

    def _waiting(self, queue: str) -> list[Letter]:
        found = [
            each
            for each in self.letters
            if each.queue == queue and not each.is_removed and each.holder is None and each.taken_by is None
        ]
        return sorted(found, key=lambda each: each.place)

    def ready(self, queue: str) -> list[Letter]:
        """C3.3, C3.5: what could be dispatched now, in the order of K."""
        held_back: set[int] = set()
        ready: list[Letter] = []
        for letter in self._waiting(queue):
            if letter.visible_from > self.durable:
                held_back.add(letter.parcel.priority)
            elif letter.parcel.priority not in held_back and letter.due_ns <= self.now_ns:
                ready.append(letter)
        return ready

    def check_turn(
        self, dispatched: dict[Consumer, list[Seen]], ended: list[Consumer], *, is_reading: bool = False
    ) -> None:
        """Compare the dispatches of a turn with the contract, and follow them. `is_reading`: messages are being read
        from the store, so that their dispatch may wait (C4.3).

        Raises: Disagreement
        """
        consumers = [each for client in self.clients for each in client.consumers.values()]
        for queue in sorted({each.queue for each in consumers}):
            receivers = [each for each in consumers if each.queue == queue]
            for letter in self.ready(queue):
                free = [each for each in receivers if each.credit > 0]
                if not free:
                    break
                # C4.11
                next_one = min(free, key=lambda each: (-each.priority, len(each.held), each.waiting_since))
                all_seen = dispatched.get(next_one, [])
                if not all_seen and is_reading:
                    break
                if not all_seen:
                    got = {each: seen for each, seen in dispatched.items() if seen}
                    raise Disagreement(f"{next_one} must get {letter}; the broker has dispatched {got}")
                self._dispatch(letter, next_one, all_seen.pop(0))
        if surplus := {each: seen for each, seen in dispatched.items() if seen}:
            raise Disagreement(f"more is dispatched than the contract allows: {surplus}")
        self._check_ends(consumers, ended, is_reading=is_reading)

    def _dispatch(self, letter: Letter, consumer: Consumer, seen: Seen) -> None:
        redeliveries = max(letter.attempts, int(letter.was_held_when_lost))
        if letter.sequence is None:
            letter.sequence = seen.sequence
        cause = letter.cause if letter.is_dead and not letter.attempts else seen.cause
        parcel = letter.parcel
        expected = Seen(
            *(parcel.label, parcel.key, parcel.priority, parcel.is_persistent or letter.is_dead),
            *(letter.sequence, redeliveries, cause),
        )
        if seen != expected:
            raise Disagreement(f"{consumer} gets {seen}; by the contract {expected}")
        for client in self.clients:
            for browse in client.browses.values():
                browse.dispatched.add(letter)
        letter.holder = consumer
        consumer.delivered.discard(letter)
        consumer.held.append(letter)
        consumer.credit -= 1
        consumer.has_received = True
        consumer.waiting_since = self._next_step()
        if not consumer.credit:
            consumer.is_pull, consumer.ends_ns = False, None

    def _check_ends(self, consumers: list[Consumer], ended: list[Consumer], *, is_reading: bool) -> None:
        """C21.3, C26.4."""
        for consumer in consumers:
            is_told = consumer in ended
            over = consumer.ends_ns is not None and consumer.ends_ns <= self.now_ns
            is_asking = consumer.credit > 0 and consumer.is_pull
            may = is_asking and (over or (not consumer.waits and not self.ready(consumer.queue)))
            if is_told and not may:
                raise Disagreement(f"{consumer} is told the end of a request that goes on")
            must = may and (not over or consumer.ends_ns is None or consumer.ends_ns + GRACE_NS <= self.now_ns)
            if must and not is_told and not is_reading:
                raise Disagreement(f"{consumer} is never told that its request is over")
            if is_told:
                consumer.credit = 0
                consumer.is_pull, consumer.ends_ns = False, None

    def is_any_end_overdue(self) -> bool:
        return any(
            consumer.ends_ns is not None and consumer.ends_ns + GRACE_NS <= self.now_ns
            for client in self.clients
            for consumer in client.consumers.values()
        )

    def shown(self, browse: Browse, seen: Seen) -> None:
        """C17.1, C17.2, C17.4, C26.8."""
        if browse.has_ended:
            raise Disagreement(f"a browser of {browse.queue} is shown {seen} after its end")
        now = self._waiting(browse.queue)
        found = [
            each
            for each in self.letters
            if (each.queue, each.parcel.key) == (browse.queue, seen.key)
            and each not in browse.shown
            and each.visible_from <= self.durable
            and (each in browse.waiting or each in now or (each in browse.dispatched and not each.is_removed))
        ]
        if not found:
            raise Disagreement(f"a browser of {browse.queue} is shown {seen}, which does not wait, or is shown twice")
        letter = found[0]
        if browse.shown and letter.place < browse.shown[-1].place:
            raise Disagreement(f"a browser of {browse.queue} is shown {letter} behind {browse.shown[-1]}")
        if letter not in browse.dispatched and seen.redeliveries != max(
            letter.attempts, int(letter.was_held_when_lost)
        ):
            raise Disagreement(f"a browser of {browse.queue} is shown {seen}; by the contract {vars(letter)}")
        browse.shown.append(letter)

    def browse_ended(self, browse: Browse) -> None:
        """C17.3."""
        still = [each for each in self._waiting(browse.queue) if each not in browse.dispatched]
        missing = [each for each in browse.waiting if each not in browse.shown and each in still]
        if missing:
            raise Disagreement(f"a browser of {browse.queue} is told that this was all, and was not shown {missing}")
        browse.has_ended = True

    def check_rest(self) -> None:
        """Check while nothing is left to do.

        Raises: Disagreement
        """
        for client in self.clients:
            if client.requests:
                raise Disagreement(f"{client.id} never gets answers to {client.requests}")
            if unended := [each for each in client.browses.values() if not each.has_ended]:
                raise Disagreement(f"browses of {client.id} never end: {unended}")
            if client.errors:
                raise Disagreement(f"{client.id} is never told of {client.errors} refused commands")

    def _next_step(self) -> int:
        self._step += 1
        return self._step


def _up_to(consumer: Consumer, last: int) -> list[Letter]:
    """C26.7: what the consumer holds up to the last delivered message, if it holds that."""
    for number, letter in enumerate(consumer.held):
        if letter.sequence == last:
            return consumer.held[: number + 1]
    return []


def _is_temporary(queue: str) -> bool:
    return queue.startswith((TEMPORARY, TOPIC_COPY))


def _keeps_failures(queue: str) -> bool:
    """C11.6."""
    return queue.startswith(DEAD_LETTERS) or _is_temporary(queue)


def _owner(name: str) -> str:
    """Return the id of the connection that has made a temporary queue."""
    return name.removeprefix(TEMPORARY).rpartition(":")[0]
