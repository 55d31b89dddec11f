"""Oracle: the messages that a client may hand out, derived from docs/client.md and docs/contract.md, not from the
client.

The oracle believes the program (its requests and settlements) and the wire (which message the broker dispatched when,
which frames the socket of the client has taken, which have come). From these it knows of each message which program has
it, how often it has failed, and whether it must still be there. It does not know how the client works.

Time is the number of the event: dispatches, requests of the program and frames are events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from tests.client.simulation import Peer, Simulation, Wire, subscriptions_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from truenext.client.core.buffer import ReceivedMessage, Subscription
    from truenext.client.core.session import SessionCore as CoreSession
    from truenext.client.core.transaction_state import TransactionState as CoreUnit
    from truenext.wire.stomp.frame import Frame


class Disagreement(AssertionError):
    """Difference between the client and docs/client.md."""


class Sent(Enum):
    PENDING = "nobody knows yet"
    ACCEPTED = "it must be there"
    MAYBE = "it may be there"
    NEVER = "it must not be there"


class Ack(Enum):
    AUTO = "auto"
    INDIVIDUAL = "individual"
    TRANSACTED = "transacted"
    AT_COMMIT = "transacted, acknowledged at commit"

    @property
    def is_transacted(self) -> bool:
        return self in (Ack.TRANSACTED, Ack.AT_COMMIT)


@dataclass(eq=False)
class Letter:
    """Message, identified by its body."""

    token: str
    queue: str
    priority: int
    sent: Sent = Sent.PENDING
    held_by: dict[Peer, Delivered] = field(default_factory=dict)
    """Programs that have it; several only if the broker has lost the connections of the others."""
    handled_by: dict[Peer, Handled] = field(default_factory=dict)
    """Programs that have handled it, or will never have it again."""
    was_handled: bool = False
    """Whether a program has handled it: that program may acknowledge it at any redelivery."""
    was_rejected: bool = False
    attempts_min: int = 0
    """Smallest number of attempts, provided that the broker knows of all in `unsure`."""
    attempts_max: int = 0
    unsure: list[tuple[Peer, Wire | None]] = field(default_factory=list)
    """Attempts in `attempts_min` of which the broker may not know yet: the program that failed, and the wire of its
    NACK.

    If the wire is None, the broker will know when the message comes to that program again.
    """
    rolled_back: list[Wire] = field(default_factory=list)
    """Wires of attempts by rollback of which the broker may not know yet."""
    sequences: dict[str, set[int]] = field(default_factory=dict)
    """Sequences that it was seen with, by queue."""

    def count_attempt(self, peer: Peer, wire: Wire | None) -> None:
        self.attempts_min += 1
        self.attempts_max += 1
        self.unsure.append((peer, wire))


@dataclass(eq=False)
class Handled:
    """Record that a message was handled, and whether the broker knows."""

    wire: Wire | None
    """Wire of its acknowledgement; None if that is gone, or never was."""
    is_sure: bool = False
    is_in_doubt: bool = False
    """Whether it belongs to a transaction in doubt, whose outcome the client may know."""


@dataclass(eq=False)
class Delivered:
    """Message that a program has."""

    letter: Letter
    received: ReceivedMessage
    consumer: Consumer
    owner: object
    unit: Unit | None = None


@dataclass(eq=False)
class Unit:
    """Transaction."""

    owner: object
    core: CoreUnit | None = None
    delivered: list[Delivered] = field(default_factory=list)
    failed: list[Delivered] = field(default_factory=list)
    sent: list[Letter] = field(default_factory=list)
    maybe_sent: list[Letter] = field(default_factory=list)
    letters: set[Letter] = field(default_factory=set)
    """Letters of `delivered`, without those that were settled alone."""
    is_rollback_only: bool = False
    is_returned: bool = False
    """Whether its messages were released when it became rollback-only."""
    is_committing: bool = False


@dataclass(eq=False)
class Arrived:
    """Message that has come to a consumer."""

    key: tuple[int, int]
    letter: Letter
    dispatched: int
    wire: int
    arrived_at: int
    ack: str
    round: int


@dataclass(eq=False)
class Incoming:
    """Messages that have come to a subscription."""

    mark: int = 0
    """Event before which dispatches are not handed out any more."""
    why: str = ""
    round_min: int = 0
    """Smallest round that is handed out, on the last wire."""
    arrived: dict[tuple[int, int], Arrived] = field(default_factory=dict)
    """Messages by sequence and deliveries."""


@dataclass(eq=False)
class Consumer:
    session: Session
    subscription: Subscription
    queue: str
    prefetch: int | None
    incoming: Incoming
    is_closed: bool = False
    is_paused: bool = False

    @property
    def name(self) -> str:
        return f"{self.session.name} at {self.queue} ({self.subscription.id})"


@dataclass(eq=False)
class Session:
    name: str
    peer: Peer
    core: CoreSession
    ack: Ack
    consumers: list[Consumer] = field(default_factory=list)
    delivered: list[Delivered] = field(default_factory=list)
    unit: Unit | None = None
    in_doubt: Unit | None = None
    """Last transaction that raised InDoubt."""
    rolled_back: int = 0
    """Event of the last rollback."""
    is_closed: bool = False


class Oracle:
    def __init__(self, simulation: Simulation, attempts_max: int) -> None:
        self.arrived_at = 0.0
        """Time at which a message came to a client last."""
        self._simulation = simulation
        self.attempts_max = attempts_max
        self.letters: dict[str, Letter] = {}
        self.sessions: list[Session] = []
        self._incoming: dict[tuple[Peer, str], Incoming] = {}
        """Messages by client and name of the subscription, which is the same on each connection."""
        self._started: dict[tuple[int, str], int] = {}
        """Events by wire and `ack` at which the socket took the frame that says that the message is started."""
        self._requests: dict[int, dict[str, bool]] = {}
        """By wire and in the program's order the messages that it acknowledges (True) or nacks, by `ack`, and the
        transactions that it commits, by name; without those whose frame the socket has taken."""
        simulation.on_client_frame = self._on_client_frame
        simulation.on_broker_frame = self._on_broker_frame
        simulation.dispatched = self._on_dispatched
        simulation.lost_by_broker = self._on_lost_by_broker
        simulation.client_closed = self._on_client_closed

    # ---- What the wire shows ----

    def _on_dispatched(self, token: str, sequence: int, address: str) -> None:
        letter = self.letters.get(token)
        if letter is None:
            # An answer to a question of the client.
            return
        seen = letter.sequences.setdefault(address, set())
        seen.add(sequence)
        if len(seen) > 1:
            raise Disagreement(f"{token} was accepted {len(seen)} times")
        if letter.sent is Sent.NEVER:
            raise Disagreement(f"{token} was sent in a transaction that was rolled back, and is dispatched")

    def _on_client_frame(self, wire: Wire, frame: Frame) -> None:
        simulation, peer = self._simulation, wire.owner
        if peer is None:
            return
        headers = frame.headers
        if frame.command == "SEND":
            verb = headers.get("destination", "")
            if verb == "/control/started":
                self._started.setdefault((wire.number, headers["id"]), simulation.event())
            elif verb == "/control/release":
                wire.rounds += 1
                for name in subscriptions_of(frame):
                    self._mark([self.incoming(peer, name)], "the client gave it back")
                    self.incoming(peer, name).round_min = wire.rounds
        elif frame.command == "COMMIT":
            self._on_request_written(wire, headers["transaction"])
        elif frame.command in ("ACK", "NACK"):
            self._on_request_written(wire, headers["id"])
            if "truenext-started" in headers:
                self._started.setdefault((wire.number, headers["truenext-started"]), simulation.event())
            if "transaction" in headers:
                self._started.setdefault((wire.number, headers["id"]), simulation.event())
            else:
                name = headers["id"].partition("@")[2]
                incoming = self.incoming(peer, name)
                # The client may say so of what its program had on a connection that was lost.
                incoming.arrived = {key: each for key, each in incoming.arrived.items() if each.ack != headers["id"]}
                if frame.command == "NACK" and headers.get("truenext-reject") != "true":
                    self._mark([incoming], "a message of it was refused")
        elif frame.command == "UNSUBSCRIBE":
            self._mark([self.incoming(peer, headers["id"])], "it was unsubscribed")

    def requests(self, peer: Peer, key: str, *, is_ack: bool = False) -> None:
        """Record that the program acknowledges or nacks a message, or commits a transaction."""
        if peer.wire is not None:
            self._requests.setdefault(peer.wire.number, {})[key] = is_ack

    def _on_request_written(self, wire: Wire, key: str) -> None:
        """Check that acknowledgements before this request were written before it."""
        requests = self._requests.get(wire.number, {})
        if key in requests:
            for earlier, is_ack in requests.items():
                if earlier == key:
                    break
                if is_ack:
                    raise Disagreement(f"{key} was written before {earlier}, which was acknowledged before")
            del requests[key]

    def _on_broker_frame(self, wire: Wire, frame: Frame) -> None:
        headers = frame.headers
        if frame.command != "MESSAGE" or wire.owner is None or "ack" not in headers:
            return
        letter = self.letters.get(frame.body.decode())
        if letter is None:
            return
        self.arrived_at = self._simulation.loop.now
        sequence, deliveries = int(headers["truenext-sequence"]), int(headers["truenext-deliveries"])
        dispatched, _, _ = self._simulation.dispatches[sequence, deliveries]
        incoming = self.incoming(wire.owner, headers["subscription"])
        incoming.arrived[sequence, deliveries] = Arrived(
            (9 - int(headers.get("priority", "4")), sequence),
            letter,
            dispatched,
            wire.number,
            self._simulation.event(),
            headers["ack"],
            int(headers["truenext-round"]),
        )

    def incoming(self, peer: Peer, name: str) -> Incoming:
        return self._incoming.setdefault((peer, name), Incoming())

    def _on_client_closed(self, peer: Peer, wire: Wire) -> None:
        for letter in self.letters.values():
            handled = letter.handled_by.get(peer)
            if handled is not None and handled.wire is wire:
                handled.wire = None
            letter.unsure = [(each, None if on is wire else on) for each, on in letter.unsure]
            # A rollback that never came to the broker has charged nobody.
            letter.attempts_min -= letter.rolled_back.count(wire)
            letter.rolled_back = [on for on in letter.rolled_back if on is not wire]
        for (owner, _), incoming in self._incoming.items():
            if owner is peer:
                incoming.round_min = 0
        for session in self.sessions:
            if session.peer is peer and session.unit is not None and not session.unit.is_committing:
                self.mark_rollback_only(session.unit)

    def _on_lost_by_broker(self, wire: Wire) -> None:
        """Count a possible attempt of each started message."""
        started: dict[str, None] = {}
        for frame in wire.carried:
            headers = frame.headers
            if frame.command == "SEND" and headers.get("destination") == "/control/started":
                started[headers["id"]] = None
            elif frame.command in ("ACK", "NACK"):
                if "truenext-started" in headers:
                    started[headers["truenext-started"]] = None
                if "transaction" in headers:
                    started[headers["id"]] = None
        for ack in started:
            sequence, deliveries = (int(each) for each in ack.partition("@")[0].split("."))
            if (sequence, deliveries + 1) in self._simulation.dispatches:
                continue
            for letter in self.letters.values():
                if any(sequence in seen for seen in letter.sequences.values()):
                    letter.attempts_max += 1

    def confirm(self, peer: Peer) -> None:
        """Record that the broker has all frames of the client."""
        assert peer.wire is not None, "it has one"
        for ack, is_ack in self._requests.get(peer.wire.number, {}).items():
            if is_ack:
                raise Disagreement(f"{ack} was acknowledged, and the broker is never told")
        for letter in self.letters.values():
            handled = letter.handled_by.get(peer)
            if handled is not None and handled.wire is peer.wire:
                handled.is_sure = True
            letter.unsure = [(each, on) for each, on in letter.unsure if on is None or on is not peer.wire]
            letter.rolled_back = [on for on in letter.rolled_back if on is not peer.wire]

    # ---- What the program does ----

    def _mark(self, subscriptions: Iterable[Incoming | Consumer], why: str) -> None:
        event = self._simulation.event()
        for each in subscriptions:
            incoming = each.incoming if isinstance(each, Consumer) else each
            incoming.mark, incoming.why = event, why

    def releases(self, consumers: Iterable[Consumer], why: str) -> None:
        """Forbid handing out what was dispatched to these consumers before."""
        self._mark(consumers, why)

    def deliver(
        self,
        session: Session,
        receiver: Consumer | None,
        messages: list[ReceivedMessage],
        owner: object,
        max_count: int,
    ) -> list[Delivered]:
        """Check messages that the client hands out, and record that the program has them."""
        if len(messages) > max_count:
            raise Disagreement(f"{len(messages)} messages were handed out, of {max_count} asked for")
        delivered = [self._deliver(session, receiver, received, owner) for received in messages]
        if len(messages) > 1 and any(received.attempts for received in messages):
            raise Disagreement("a message that has failed before came with others")
        return delivered

    def _deliver(
        self, session: Session, receiver: Consumer | None, received: ReceivedMessage, owner: object
    ) -> Delivered:
        simulation, peer = self._simulation, session.peer
        letter = self.letters[received.text]
        name = f"{letter.token} ({received.ack_id})"
        consumer = next((each for each in session.consumers if each.subscription is received.subscription), None)
        if consumer is None or (receiver is not None and consumer is not receiver):
            raise Disagreement(f"{name} was handed out by a consumer that was not asked")
        if consumer.is_closed or session.is_closed:
            raise Disagreement(f"{name} was handed out by what is closed")
        if consumer.is_paused:
            raise Disagreement(f"{name} was handed out by a consumer that is paused")
        key = received.sequence, received.deliveries
        if key not in simulation.dispatches:
            raise Disagreement(f"{name} was handed out, and never dispatched so")
        dispatched, wire, subscription = simulation.dispatches[key]
        if peer.wire is None or wire != peer.wire.number:
            raise Disagreement(f"{name} was handed out, and is of a connection that is gone")
        if subscription != received.subscription.id:
            raise Disagreement(f"{name} was handed out by another consumer than it was dispatched to")
        if int(received.headers["truenext-round"]) < consumer.incoming.round_min:
            raise Disagreement(f"{name} is of an earlier round: it was given back, and handed out after that")
        if dispatched < consumer.incoming.mark:
            raise Disagreement(f"{name} was dispatched before {consumer.incoming.why}, and handed out after that")
        if peer in letter.held_by:
            raise Disagreement(f"{name} was handed out, and the program has it already")
        if peer in letter.handled_by and not letter.handled_by[peer].is_in_doubt:
            raise Disagreement(f"{name} was handed out, and the program has handled it")
        if any(handled.is_sure for handled in letter.handled_by.values()):
            raise Disagreement(f"{name} was handed out, and is acknowledged")
        started_at = self._started.get((wire, received.ack_id))
        if started_at is None and not peer.has_unwritten:
            raise Disagreement(f"{name} was handed out before the broker was told")
        self._attempts(letter, received.attempts, peer, name)
        if received.attempts >= self.attempts_max:
            raise Disagreement(f"{name} was handed out though it has failed {received.attempts} times")
        # What another client has said on a connection that was lost it may say again.
        letter.unsure = [(failed_by, on) for failed_by, on in letter.unsure if failed_by is not peer]
        letter.attempts_min = received.attempts
        letter.attempts_max = received.attempts + len(letter.unsure)
        letter.rolled_back.clear()
        letter.handled_by.clear()
        out = consumer.incoming.arrived.pop(key, None)
        if out is None:
            raise Disagreement(f"{name} was handed out after the broker was told that it is done")
        self._order(session, receiver, out, started_at or simulation.now_event, name)
        delivered = Delivered(letter, received, consumer, owner)
        letter.held_by[peer] = delivered
        if session.ack.is_transacted:
            unit = self.unit(session, owner)
            if unit.is_rollback_only:
                raise Disagreement(f"{name} was handed out to a doomed transaction")
            delivered.unit = unit
            unit.delivered.append(delivered)
            unit.letters.add(letter)
        else:
            session.delivered.append(delivered)
        return delivered

    def _attempts(self, letter: Letter, seen: int, peer: Peer | None, name: str) -> None:
        attempts_min = letter.attempts_min - sum(failed_by is not peer for failed_by, _ in letter.unsure)
        if not attempts_min <= seen <= letter.attempts_max:
            raise Disagreement(f"{name} says {seen} attempts, and has {attempts_min} to {letter.attempts_max}")

    def _order(self, session: Session, receiver: Consumer | None, out: Arrived, started_at: int, name: str) -> None:
        for consumer in session.consumers if receiver is None else [receiver]:
            if consumer.is_closed or consumer.is_paused:
                continue
            for live in consumer.incoming.arrived.values():
                if live.key < out.key and live.arrived_at < started_at and self._is_receivable(consumer, live):
                    raise Disagreement(f"{name} was handed out before {live.letter.token} ({live.ack}), which was here")

    def _is_receivable(self, consumer: Consumer, live: Arrived) -> bool:
        """Return whether a message has come that the program could get."""
        peer = consumer.session.peer
        return (
            peer.wire is not None
            and live.wire == peer.wire.number
            and live.dispatched > consumer.incoming.mark
            and live.round >= consumer.incoming.round_min
            and peer not in live.letter.held_by
            and peer not in live.letter.handled_by
            and not any(each is peer for each, _ in live.letter.unsure)
            and (live.wire, live.ack) not in self._started
        )

    def _is_in_rollback_only(self, letter: Letter) -> bool:
        """Return whether a rollback-only transaction has the letter, whose code has not ended."""
        units = (session.unit for session in self.sessions)
        return any(unit is not None and unit.is_rollback_only and letter in unit.letters for unit in units)

    def count_redelivered(self, consumer: Consumer) -> int:
        """Return the number of redelivered messages that the code of the program still has.

        The docs do not say how long it has them, so the client is asked.
        """
        orphaned = consumer.session.peer.client.subscriptions.orphaned_messages
        redeliveries = [received.redelivery for received in orphaned.values()]
        return sum(received in redeliveries for received in consumer.subscription.held_by_ack_id.values())

    def is_current(self, delivered: Delivered) -> bool:
        """Return whether the dispatch belongs to the current connection."""
        wire = delivered.consumer.session.peer.wire
        dispatch = self._simulation.dispatches[delivered.received.sequence, delivered.received.deliveries]
        return wire is not None and dispatch[1] == wire.number

    def _is_held(self, delivered: Delivered) -> bool:
        """Return whether the broker knows that the program has the message."""
        return self.is_current(delivered) and not (delivered.unit is not None and delivered.unit.is_rollback_only)

    def is_over(self, delivered: Delivered) -> None:
        """Record that the program does not have the message any more."""
        session = delivered.consumer.session
        if delivered.letter.held_by.get(session.peer) is delivered:
            del delivered.letter.held_by[session.peer]
        if delivered in session.delivered:
            session.delivered.remove(delivered)

    def is_done(self, delivered: Delivered) -> None:
        """Record that the program has handled the message."""
        peer = delivered.consumer.session.peer
        self.is_over(delivered)
        delivered.letter.was_handled = True
        delivered.letter.handled_by[peer] = Handled(peer.wire if self.is_current(delivered) else None)

    def is_rejected(self, delivered: Delivered) -> None:
        self.is_done(delivered)
        delivered.letter.was_rejected = True

    def has_failed(self, delivered: Delivered) -> None:
        self.is_over(delivered)
        peer = delivered.consumer.session.peer
        delivered.letter.count_attempt(peer, peer.wire if self.is_current(delivered) else None)
        if self.is_current(delivered):
            self._mark([delivered.consumer], "a message was refused")

    def is_released(self, delivered: Delivered) -> None:
        self.is_over(delivered)
        if self.is_current(delivered):
            self._mark([delivered.consumer], "a message was given back")

    def is_closed(self, consumer: Consumer) -> None:
        """Record that a consumer was closed, which releases its messages."""
        consumer.is_closed = True
        unit = consumer.session.unit
        if consumer.session.ack is Ack.AT_COMMIT and unit is not None and not unit.is_committing:
            released = [delivered for delivered in unit.delivered if delivered.consumer is consumer]
            if released and not unit.is_rollback_only:
                self.mark_rollback_only(unit)
            for delivered in released:
                self.is_over(delivered)
        for delivered in list(consumer.session.delivered):
            if delivered.consumer is consumer:
                self.is_over(delivered)

    # ---- Transactions ----

    def unit(self, session: Session, owner: object) -> Unit:
        if session.unit is None:
            session.unit = Unit(owner)
        session.unit.core = session.core.transaction
        return session.unit

    def is_committed(self, session: Session, unit: Unit) -> None:
        for delivered in unit.delivered:
            self.is_over(delivered)
            if delivered in unit.failed:
                # It may have come again, and been handed out, before the program knew of the commit.
                delivered.letter.attempts_min = min(delivered.letter.attempts_min + 1, delivered.letter.attempts_max)
            else:
                delivered.letter.handled_by[session.peer] = Handled(None, is_sure=True)
        for letter in unit.sent:
            letter.sent = Sent.ACCEPTED
        for letter in unit.maybe_sent:
            letter.sent = Sent.MAYBE
        self._ended(session, unit)

    def is_rolled_back(self, session: Session, unit: Unit) -> None:
        """Record that a transaction was rolled back and its code has ended."""
        for delivered in unit.delivered:
            self.is_over(delivered)
        for letter in [*unit.sent, *unit.maybe_sent]:
            letter.sent = Sent.NEVER
        self._ended(session, unit)

    def is_in_doubt(self, session: Session, unit: Unit) -> None:
        for delivered in unit.delivered:
            self.is_over(delivered)
            delivered.letter.handled_by[session.peer] = Handled(None, is_in_doubt=True)
            delivered.letter.attempts_max += 1
        for letter in [*unit.sent, *unit.maybe_sent]:
            letter.sent = Sent.MAYBE
        self._ended(session, unit)
        session.in_doubt = unit

    def is_known(self, session: Session, unit: Unit, *, is_committed: bool) -> None:
        """Record the outcome of a transaction that was in doubt."""
        if session.in_doubt is unit:
            session.in_doubt = None
        for letter in unit.sent:
            letter.sent = Sent.ACCEPTED if is_committed else Sent.NEVER
        if not is_committed:
            for letter in unit.maybe_sent:
                letter.sent = Sent.NEVER
        for delivered in unit.delivered:
            handled = delivered.letter.handled_by.get(session.peer)
            if handled is None:
                continue
            if is_committed and delivered not in unit.failed:
                handled.is_sure = True
            else:
                del delivered.letter.handled_by[session.peer]

    def _ended(self, session: Session, unit: Unit) -> None:
        if session.unit is unit:
            session.unit = None

    def is_settled(self, session: Session, delivered: Delivered, owner: object, *, is_rejected: bool) -> None:
        """Record a nack or a reject of a message of the open transaction, whose others return without an attempt."""
        unit = delivered.unit
        assert unit is not None, "it is a transaction's"
        unit.delivered.remove(delivered)
        unit.letters.discard(delivered.letter)
        if delivered in unit.failed:
            unit.failed.remove(delivered)
        delivered.unit = None
        self.rolls_back(session, owner, counts_attempts=False, returns=bool(unit.delivered))
        if is_rejected:
            self.is_rejected(delivered)
        else:
            self.has_failed(delivered)

    def rolls_back(self, session: Session, owner: object, *, counts_attempts: bool, returns: bool = True) -> None:
        """Record a rollback by the code of the transaction, or by another task."""
        unit = session.unit
        if unit is None:
            # It is empty, and nothing is said of it: nothing returns, so nothing is ahead of its place.
            return
        if not unit.is_rollback_only:
            self.count_attempts(unit, counts_attempts=counts_attempts)
            if returns:
                self._mark(session.consumers, "a rollback")
        if owner is unit.owner:
            self.is_rolled_back(session, unit)
        elif not unit.is_rollback_only:
            self.mark_rollback_only(unit)
            unit.is_returned = True
            # The broker has it again, and whoever else asks may get it.
            for delivered in unit.delivered:
                self.is_over(delivered)

    def mark_rollback_only(self, unit: Unit) -> None:
        unit.is_rollback_only = True
        for letter in [*unit.sent, *unit.maybe_sent]:
            letter.sent = Sent.NEVER

    def count_attempts(self, unit: Unit, *, counts_attempts: bool) -> None:
        if counts_attempts:
            for delivered in unit.failed or unit.delivered:
                wire = delivered.consumer.session.peer.wire
                delivered.letter.attempts_min += 1
                delivered.letter.attempts_max += 1
                if wire is not None:
                    delivered.letter.rolled_back.append(wire)

    # ---- What is left ----

    def check_waiting(self, queue: str, shown: Iterable[Frame], dead: Iterable[Frame], *, is_end: bool) -> None:
        """Check a queue and its dead letters while no receive waits and nothing is on its way."""
        waits: dict[str, Frame] = {}
        for frame in shown:
            token = frame.body.decode()
            if token in waits:
                raise Disagreement(f"{token} is twice in {queue}")
            waits[token] = frame
        dead_letters: dict[str, Frame] = {}
        for frame in dead:
            token = frame.body.decode()
            if token in dead_letters or token in waits:
                raise Disagreement(f"{token} is a dead letter twice, or not wholly")
            dead_letters[token] = frame
        for letter in self.letters.values():
            if letter.queue != queue:
                continue
            token = letter.token
            is_there = token in waits or token in dead_letters
            is_held = bool(letter.held_by) and not is_end
            if is_there and letter.sent is Sent.NEVER:
                raise Disagreement(f"{token} is there, and its transaction was rolled back")
            if is_there and any(handled.is_sure for handled in letter.handled_by.values()) and not letter.was_rejected:
                raise Disagreement(f"{token} was acknowledged, and is there")
            if token in waits:
                if any(handled.is_sure for handled in letter.handled_by.values()):
                    raise Disagreement(f"{token} was rejected, and waits")
                if is_held and any(self._is_held(delivered) for delivered in letter.held_by.values()):
                    raise Disagreement(f"{token} waits, and a program has it")
                self._attempts(letter, int(waits[token].headers["truenext-attempts"]), None, token)
            elif token in dead_letters:
                if letter.attempts_max < self.attempts_max and not letter.was_rejected:
                    raise Disagreement(f"{token} is dead after {letter.attempts_max} attempts at most")
            elif (
                letter.sent is Sent.ACCEPTED
                and not (is_held or letter.handled_by or letter.was_handled)
                and (is_end or not self._is_in_rollback_only(letter))
            ):
                raise Disagreement(f"{token} is lost")
            elif letter.was_rejected and any(handled.is_sure for handled in letter.handled_by.values()):
                raise Disagreement(f"{token} was rejected, and is no dead letter")
