"""What a client may hand out, written from docs/client.md and docs/contract.md, and not from the client.

It believes the program (what was asked, what was said of a message) and what the wire shows (which message the broker
dispatched when, which frames the socket of the client has taken, which have come). From these it knows of each message
who has it, how often it has failed, and whether it must still be there. How the client works is not known here.

Time is the number of the event: dispatches, requests of the program and frames are events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from tests.client.world import Peer, Wire, World, subscriptions_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from truenext.client.core.holding import Received, Subscription
    from truenext.client.core.session import SessionCore as CoreSession
    from truenext.client.core.transaction_state import TransactionState as CoreUnit
    from truenext.wire.stomp.frame import Frame


class Disagreement(AssertionError):
    """The client does not do what docs/client.md says."""


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
    """A message, known by its body."""

    token: str
    queue: str
    priority: int
    sent: Sent = Sent.PENDING
    had_by: dict[Peer, Given] = field(default_factory=dict)
    """Programs that have it; several only if the broker has lost sight of the others."""
    done_by: dict[Peer, Said] = field(default_factory=dict)
    """Programs that have handled it, or will never have it again."""
    was_handled: bool = False
    """Some program has handled it: wherever it comes again, that may be said of it."""
    was_rejected: bool = False
    fewest: int = 0
    """Attempts, if all of `unsure` have come to nothing: less than these."""
    most: int = 0
    unsure: list[tuple[Peer, Wire | None]] = field(default_factory=list)
    """Attempts of `fewest` of which the broker may not know yet: who has failed, and the wire on which that was said.
    If it is None, the broker will know when the message comes to that program again."""
    rolled_back: list[Wire] = field(default_factory=list)
    """Those of its attempts that are a rollback of which the broker may not know yet."""
    sequences: dict[str, set[int]] = field(default_factory=dict)
    """That it was seen to have, by queue."""

    def count_attempt(self, peer: Peer, wire: Wire | None) -> None:
        self.fewest += 1
        self.most += 1
        self.unsure.append((peer, wire))


@dataclass(eq=False)
class Said:
    """That a message was handled, and whether the broker knows."""

    wire: Wire | None
    """On which that was said; None if it is gone, or never was."""
    is_sure: bool = False
    is_in_doubt: bool = False
    """In a transaction of which the program does not know; the client may."""


@dataclass(eq=False)
class Given:
    """A message that a program has."""

    letter: Letter
    received: Received
    consumer: Consumer
    owner: object
    unit: Unit | None = None


@dataclass(eq=False)
class Unit:
    """A transaction."""

    owner: object
    core: CoreUnit | None = None
    given: list[Given] = field(default_factory=list)
    failed: list[Given] = field(default_factory=list)
    sent: list[Letter] = field(default_factory=list)
    maybe_sent: list[Letter] = field(default_factory=list)
    letters: set[Letter] = field(default_factory=set)
    """Of `given`."""
    is_doomed: bool = False
    is_returned: bool = False
    """What it was given went back when it was doomed."""
    is_committing: bool = False


@dataclass(eq=False)
class Live:
    """What has come to a consumer."""

    place: tuple[int, int]
    letter: Letter
    dispatched: int
    wire: int
    come: int
    ack: str
    round: int


@dataclass(eq=False)
class Incoming:
    """What has come to a subscription."""

    mark: int = 0
    """Nothing that was dispatched before is handed out any more."""
    why: str = ""
    round_min: int = 0
    """Nothing of an earlier round, on the wire that was there last."""
    live: dict[tuple[int, int], Live] = field(default_factory=dict)
    """By sequence and deliveries."""


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
    given: list[Given] = field(default_factory=list)
    unit: Unit | None = None
    in_doubt: Unit | None = None
    """The last of which the program was told that nobody knows."""
    rolled_back: int = 0
    """When, last."""
    is_closed: bool = False


class Oracle:
    def __init__(self, world: World, attempts_max: int) -> None:
        self.came_at = 0.0
        """When a message came to a client last."""
        self._world = world
        self.attempts_max = attempts_max
        self.letters: dict[str, Letter] = {}
        self.sessions: list[Session] = []
        self._incoming: dict[tuple[Peer, str], Incoming] = {}
        """By the name of the subscription, which is the same on each connection."""
        self._started: dict[tuple[int, str], int] = {}
        """By wire and `ack`: when the socket took the frame that says that the program has it."""
        world.said_of = self._on_said
        world.heard_of = self._on_heard
        world.dispatched = self._on_dispatched
        world.lost_by_broker = self._on_lost_by_broker
        world.left = self._on_left

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

    def _on_said(self, wire: Wire, frame: Frame) -> None:
        world, peer = self._world, wire.owner
        if peer is None:
            return
        headers = frame.headers
        if frame.command == "SEND":
            verb = headers.get("destination", "")
            if verb == "/control/started":
                self._started.setdefault((wire.number, headers["id"]), world.event())
            elif verb == "/control/release":
                wire.rounds += 1
                for name in subscriptions_of(frame):
                    self._mark([self.incoming(peer, name)], "the client gave it back")
                    self.incoming(peer, name).round_min = wire.rounds
        elif frame.command in ("ACK", "NACK"):
            if "truenext-started" in headers:
                self._started.setdefault((wire.number, headers["truenext-started"]), world.event())
            if "transaction" in headers:
                self._started.setdefault((wire.number, headers["id"]), world.event())
            else:
                name = headers["id"].partition("@")[2]
                incoming = self.incoming(peer, name)
                # The client may say so of what its program had on a connection that was lost.
                incoming.live = {key: each for key, each in incoming.live.items() if each.ack != headers["id"]}
                if frame.command == "NACK" and headers.get("truenext-reject") != "true":
                    self._mark([incoming], "a message of it was refused")
        elif frame.command == "UNSUBSCRIBE":
            self._mark([self.incoming(peer, headers["id"])], "it was unsubscribed")

    def _on_heard(self, wire: Wire, frame: Frame) -> None:
        headers = frame.headers
        if frame.command != "MESSAGE" or wire.owner is None or "ack" not in headers:
            return
        letter = self.letters.get(frame.body.decode())
        if letter is None:
            return
        self.came_at = self._world.loop.now
        sequence, deliveries = int(headers["truenext-sequence"]), int(headers["truenext-deliveries"])
        dispatched, _, _ = self._world.dispatches[sequence, deliveries]
        incoming = self.incoming(wire.owner, headers["subscription"])
        incoming.live[sequence, deliveries] = Live(
            (9 - int(headers.get("priority", "4")), sequence),
            letter,
            dispatched,
            wire.number,
            self._world.event(),
            headers["ack"],
            int(headers["truenext-round"]),
        )

    def incoming(self, peer: Peer, name: str) -> Incoming:
        return self._incoming.setdefault((peer, name), Incoming())

    def _on_left(self, peer: Peer, wire: Wire) -> None:
        for letter in self.letters.values():
            said = letter.done_by.get(peer)
            if said is not None and said.wire is wire:
                said.wire = None
            letter.unsure = [(each, None if on is wire else on) for each, on in letter.unsure]
            # A rollback that never came to the broker has charged nobody.
            letter.fewest -= letter.rolled_back.count(wire)
            letter.rolled_back = [on for on in letter.rolled_back if on is not wire]
        for (owner, _), incoming in self._incoming.items():
            if owner is peer:
                incoming.round_min = 0
        for session in self.sessions:
            if session.peer is peer and session.unit is not None and not session.unit.is_committing:
                self.is_doomed(session.unit)

    def _on_lost_by_broker(self, wire: Wire) -> None:
        """What was begun is charged."""
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
            if (sequence, deliveries + 1) in self._world.dispatches:
                continue
            for letter in self.letters.values():
                if any(sequence in seen for seen in letter.sequences.values()):
                    letter.most += 1

    def confirm(self, peer: Peer) -> None:
        """All that the client has said has come to the broker."""
        for letter in self.letters.values():
            said = letter.done_by.get(peer)
            if said is not None and said.wire is peer.wire:
                said.is_sure = True
            letter.unsure = [(each, on) for each, on in letter.unsure if on is None or on is not peer.wire]
            letter.rolled_back = [on for on in letter.rolled_back if on is not peer.wire]

    # ---- What the program does ----

    def _mark(self, subscriptions: Iterable[Incoming | Consumer], why: str) -> None:
        event = self._world.event()
        for each in subscriptions:
            incoming = each.incoming if isinstance(each, Consumer) else each
            incoming.mark, incoming.why = event, why

    def releases(self, consumers: Iterable[Consumer], why: str) -> None:
        """All that was dispatched to them before is not to be handed out any more."""
        self._mark(consumers, why)

    def hands_out(
        self, session: Session, asked: Consumer | None, got: list[Received], owner: object, most: int
    ) -> list[Given]:
        """The program gets these messages."""
        if len(got) > most:
            raise Disagreement(f"{len(got)} messages were handed out, of {most} asked for")
        given = [self._hands_out(session, asked, received, owner) for received in got]
        if len(got) > 1 and any(received.attempts for received in got):
            raise Disagreement("a message that has failed before came with others")
        return given

    def _hands_out(self, session: Session, asked: Consumer | None, received: Received, owner: object) -> Given:
        world, peer = self._world, session.peer
        letter = self.letters[received.text]
        name = f"{letter.token} ({received.ack_id})"
        consumer = next((each for each in session.consumers if each.subscription is received.subscription), None)
        if consumer is None or (asked is not None and consumer is not asked):
            raise Disagreement(f"{name} was handed out by a consumer that was not asked")
        if consumer.is_closed or session.is_closed:
            raise Disagreement(f"{name} was handed out by what is closed")
        if consumer.is_paused:
            raise Disagreement(f"{name} was handed out by a consumer that is paused")
        key = received.sequence, received.deliveries
        if key not in world.dispatches:
            raise Disagreement(f"{name} was handed out, and never dispatched so")
        dispatched, wire, subscription = world.dispatches[key]
        if peer.wire is None or wire != peer.wire.number:
            raise Disagreement(f"{name} was handed out, and is of a connection that is gone")
        if subscription != received.subscription.id:
            raise Disagreement(f"{name} was handed out by another consumer than it was dispatched to")
        if int(received.headers["truenext-round"]) < consumer.incoming.round_min:
            raise Disagreement(f"{name} is of an earlier round: it was given back, and handed out after that")
        if dispatched < consumer.incoming.mark:
            raise Disagreement(f"{name} was dispatched before {consumer.incoming.why}, and handed out after that")
        if peer in letter.had_by:
            raise Disagreement(f"{name} was handed out, and the program has it already")
        if peer in letter.done_by and not letter.done_by[peer].is_in_doubt:
            raise Disagreement(f"{name} was handed out, and the program has handled it")
        if any(said.is_sure for said in letter.done_by.values()):
            raise Disagreement(f"{name} was handed out, and is acknowledged")
        said_at = self._started.get((wire, received.ack_id))
        if said_at is None and not peer.has_rest:
            raise Disagreement(f"{name} was handed out before the broker was told")
        self._attempts(letter, received.attempts, peer, name)
        if received.attempts >= self.attempts_max:
            raise Disagreement(f"{name} was handed out though it has failed {received.attempts} times")
        # What another client has said on a connection that was lost it may say again.
        letter.unsure = [(said_by, on) for said_by, on in letter.unsure if said_by is not peer]
        letter.fewest = received.attempts
        letter.most = received.attempts + len(letter.unsure)
        letter.rolled_back.clear()
        letter.done_by.clear()
        out = consumer.incoming.live.pop(key, None)
        if out is None:
            raise Disagreement(f"{name} was handed out after the broker was told that it is done")
        self._order(session, asked, out, said_at or world.now_event, name)
        given = Given(letter, received, consumer, owner)
        letter.had_by[peer] = given
        if session.ack.is_transacted:
            unit = self.unit(session, owner)
            if unit.is_doomed:
                raise Disagreement(f"{name} was handed out to a doomed transaction")
            given.unit = unit
            unit.given.append(given)
            unit.letters.add(letter)
        else:
            session.given.append(given)
        return given

    def _attempts(self, letter: Letter, seen: int, peer: Peer | None, name: str) -> None:
        fewest = letter.fewest - sum(said_by is not peer for said_by, _ in letter.unsure)
        if not fewest <= seen <= letter.most:
            raise Disagreement(f"{name} says {seen} attempts, and has {fewest} to {letter.most}")

    def _order(self, session: Session, asked: Consumer | None, out: Live, said_at: int, name: str) -> None:
        for consumer in session.consumers if asked is None else [asked]:
            if consumer.is_closed or consumer.is_paused:
                continue
            for live in consumer.incoming.live.values():
                if live.place < out.place and live.come < said_at and self._may_come(consumer, live):
                    raise Disagreement(f"{name} was handed out before {live.letter.token} ({live.ack}), which was here")

    def _may_come(self, consumer: Consumer, live: Live) -> bool:
        """It is here, and the program could get it."""
        peer = consumer.session.peer
        return (
            peer.wire is not None
            and live.wire == peer.wire.number
            and live.dispatched > consumer.incoming.mark
            and live.round >= consumer.incoming.round_min
            and peer not in live.letter.had_by
            and peer not in live.letter.done_by
            and not any(each is peer for each, _ in live.letter.unsure)
            and (live.wire, live.ack) not in self._started
        )

    def _is_with_a_doomed(self, letter: Letter) -> bool:
        """A doomed transaction was given it, and its code has not ended."""
        units = (session.unit for session in self.sessions)
        return any(unit is not None and unit.is_doomed and letter in unit.letters for unit in units)

    def has_again(self, consumer: Consumer) -> int:
        """Messages that have come to it, and that the code of its program still has from elsewhere: how long is not
        said, so the client is asked."""
        foreign = consumer.session.peer.client.subscriptions.foreign
        again = [received.again for received in foreign.values()]
        return sum(received in again for received in consumer.subscription.held.values())

    def is_current(self, given: Given) -> bool:
        """The dispatch is of the connection that is there."""
        wire = given.consumer.session.peer.wire
        dispatch = self._world.dispatches[given.received.sequence, given.received.deliveries]
        return wire is not None and dispatch[1] == wire.number

    def _is_held(self, given: Given) -> bool:
        """The broker knows that it is the program's."""
        return self.is_current(given) and not (given.unit is not None and given.unit.is_doomed)

    def is_over(self, given: Given) -> None:
        """The program does not have it any more."""
        session = given.consumer.session
        if given.letter.had_by.get(session.peer) is given:
            del given.letter.had_by[session.peer]
        if given in session.given:
            session.given.remove(given)

    def is_done(self, given: Given) -> None:
        """The program has handled it."""
        peer = given.consumer.session.peer
        self.is_over(given)
        given.letter.was_handled = True
        given.letter.done_by[peer] = Said(peer.wire if self.is_current(given) else None)

    def is_rejected(self, given: Given) -> None:
        self.is_done(given)
        given.letter.was_rejected = True

    def has_failed(self, given: Given) -> None:
        self.is_over(given)
        peer = given.consumer.session.peer
        given.letter.count_attempt(peer, peer.wire if self.is_current(given) else None)
        if self.is_current(given):
            self._mark([given.consumer], "a message was refused")

    def is_released(self, given: Given) -> None:
        self.is_over(given)
        if self.is_current(given):
            self._mark([given.consumer], "a message was given back")

    def is_closed(self, consumer: Consumer) -> None:
        """What the program has of it goes back."""
        consumer.is_closed = True
        unit = consumer.session.unit
        if consumer.session.ack is Ack.AT_COMMIT and unit is not None and not unit.is_committing:
            released = [given for given in unit.given if given.consumer is consumer]
            if released and not unit.is_doomed:
                self.is_doomed(unit)
            for given in released:
                self.is_over(given)
        for given in list(consumer.session.given):
            if given.consumer is consumer:
                self.is_over(given)

    # ---- Transactions ----

    def unit(self, session: Session, owner: object) -> Unit:
        if session.unit is None:
            session.unit = Unit(owner)
        session.unit.core = session.core.transaction
        return session.unit

    def is_committed(self, session: Session, unit: Unit) -> None:
        for given in unit.given:
            self.is_over(given)
            if given in unit.failed:
                # It may have come again, and been handed out, before the program knew of the commit.
                given.letter.fewest = min(given.letter.fewest + 1, given.letter.most)
            else:
                given.letter.done_by[session.peer] = Said(None, is_sure=True)
        for letter in unit.sent:
            letter.sent = Sent.ACCEPTED
        for letter in unit.maybe_sent:
            letter.sent = Sent.MAYBE
        self._ended(session, unit)

    def is_rolled_back(self, session: Session, unit: Unit) -> None:
        """And its code has ended."""
        for given in unit.given:
            self.is_over(given)
        for letter in [*unit.sent, *unit.maybe_sent]:
            letter.sent = Sent.NEVER
        self._ended(session, unit)

    def is_in_doubt(self, session: Session, unit: Unit) -> None:
        for given in unit.given:
            self.is_over(given)
            given.letter.done_by[session.peer] = Said(None, is_in_doubt=True)
            given.letter.most += 1
        for letter in [*unit.sent, *unit.maybe_sent]:
            letter.sent = Sent.MAYBE
        self._ended(session, unit)
        session.in_doubt = unit

    def is_known(self, session: Session, unit: Unit, *, is_committed: bool) -> None:
        """What became of one that was in doubt."""
        if session.in_doubt is unit:
            session.in_doubt = None
        for letter in unit.sent:
            letter.sent = Sent.ACCEPTED if is_committed else Sent.NEVER
        if not is_committed:
            for letter in unit.maybe_sent:
                letter.sent = Sent.NEVER
        for given in unit.given:
            said = given.letter.done_by.get(session.peer)
            if said is None:
                continue
            if is_committed and given not in unit.failed:
                said.is_sure = True
            else:
                del given.letter.done_by[session.peer]

    def _ended(self, session: Session, unit: Unit) -> None:
        if session.unit is unit:
            session.unit = None

    def is_settled(self, session: Session, given: Given, owner: object, *, is_rejected: bool) -> None:
        """Of a message of the open transaction is said that it has failed: the others return without an attempt."""
        unit = given.unit
        assert unit is not None, "it is a transaction's"
        unit.given.remove(given)
        unit.letters.discard(given.letter)
        if given in unit.failed:
            unit.failed.remove(given)
        given.unit = None
        self.rolls_back(session, owner, counts_attempts=False, returns=bool(unit.given))
        if is_rejected:
            self.is_rejected(given)
        else:
            self.has_failed(given)

    def rolls_back(self, session: Session, owner: object, *, counts_attempts: bool, returns: bool = True) -> None:
        """By its code, or by another task."""
        unit = session.unit
        if unit is None:
            # It is empty, and nothing is said of it: nothing returns, so nothing is ahead of its place.
            return
        if not unit.is_doomed:
            self.count_attempts(unit, counts_attempts=counts_attempts)
            if returns:
                self._mark(session.consumers, "a rollback")
        if owner is unit.owner:
            self.is_rolled_back(session, unit)
        elif not unit.is_doomed:
            self.is_doomed(unit)
            unit.is_returned = True
            # The broker has it again, and whoever else asks may get it.
            for given in unit.given:
                self.is_over(given)

    def is_doomed(self, unit: Unit) -> None:
        unit.is_doomed = True
        for letter in [*unit.sent, *unit.maybe_sent]:
            letter.sent = Sent.NEVER

    def count_attempts(self, unit: Unit, *, counts_attempts: bool) -> None:
        if counts_attempts:
            for given in unit.failed or unit.given:
                wire = given.consumer.session.peer.wire
                given.letter.fewest += 1
                given.letter.most += 1
                if wire is not None:
                    given.letter.rolled_back.append(wire)

    # ---- What is left ----

    def check_waiting(self, queue: str, shown: Iterable[Frame], dead: Iterable[Frame], *, is_end: bool) -> None:
        """Nobody asks for anything, and nothing is on its way: what waits in a queue, and what is dead."""
        waits: dict[str, Frame] = {}
        for frame in shown:
            token = frame.body.decode()
            if token in waits:
                raise Disagreement(f"{token} is twice in {queue}")
            waits[token] = frame
        gone: dict[str, Frame] = {}
        for frame in dead:
            token = frame.body.decode()
            if token in gone or token in waits:
                raise Disagreement(f"{token} is a dead letter twice, or not wholly")
            gone[token] = frame
        for letter in self.letters.values():
            if letter.queue != queue:
                continue
            token = letter.token
            is_there = token in waits or token in gone
            is_had = bool(letter.had_by) and not is_end
            if is_there and letter.sent is Sent.NEVER:
                raise Disagreement(f"{token} is there, and its transaction was rolled back")
            if is_there and any(said.is_sure for said in letter.done_by.values()) and not letter.was_rejected:
                raise Disagreement(f"{token} was acknowledged, and is there")
            if token in waits:
                if any(said.is_sure for said in letter.done_by.values()):
                    raise Disagreement(f"{token} was rejected, and waits")
                if is_had and any(self._is_held(given) for given in letter.had_by.values()):
                    raise Disagreement(f"{token} waits, and a program has it")
                self._attempts(letter, int(waits[token].headers["truenext-attempts"]), None, token)
            elif token in gone:
                if letter.most < self.attempts_max and not letter.was_rejected:
                    raise Disagreement(f"{token} is dead after {letter.most} attempts at most")
            elif (
                letter.sent is Sent.ACCEPTED
                and not (is_had or letter.done_by or letter.was_handled)
                and (is_end or not self._is_with_a_doomed(letter))
            ):
                raise Disagreement(f"{token} is lost")
            elif letter.was_rejected and any(said.is_sure for said in letter.done_by.values()):
                raise Disagreement(f"{token} was rejected, and is no dead letter")
