"""The state machine of a client: everything that a connection of a program knows and decides, without a socket.

    requests ──flows──▶ Client ──bytes, `outgoing`──▶ whoever has the socket
    answers  ◀─signals─        ◀──`received`, `lost`, `tick`──

Whoever drives it has one thing to do for it at a time: to connect, to read and write, to wait. A program's connection
outlives those to the broker: `Link` is one of these, `Client` is what stays.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Protocol

import msgspec

from truenext.client.core import frames
from truenext.client.core.holding import Buffer, Received, State, Subscription, Wanted
from truenext.client.core.link import Link
from truenext.client.core.outbox import Outbox
from truenext.client.core.questions import Questions
from truenext.client.core.timers import Timer, Timers
from truenext.client.core.unit import Outcome, Producer, Unit
from truenext.client.core.verdict import Verdict
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import (
    ClosedError,
    Code,
    ConnectionLost,
    Refused,
    RemoteProtocolError,
    TruenextError,
)
from truenext.url import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from truenext.wire.stomp.frame import Frame

LOGIN_S = 10.0
"""From the first byte until CONNECTED; a broker that takes an old connection over may have a write under way."""
DELAY_FIRST_S = 0.1
DELAY_MAX_S = 15.0
"""Between two attempts to connect: doubled with each, and shortened by chance, so that a thousand clients of a broker
that comes back do not come at once."""
STABLE_S = 5.0
"""A connection that lived for so long counts as a success."""
QUICK_FAILURES_MAX = 3
"""... and others count as failures, but not as so many that the pauses get long: the broker is there."""
IDLE_S = 5.0
"""A buffer that nobody asks for goes back after so long, so that others get it."""
CHECK_S = 15.0
"""Between two looks at what the broker has of this connection, while nothing comes."""
CHECK_AGAIN_S = 1.0
CHECKS_MAX = 3
"""Looks that differ in the same way, until that is no coincidence."""
VERDICTS_MAX = 100_000
"""Messages that the program has settled and the broker may not know of."""
ACKS_PER_RECEIPT = 256


class Login(msgspec.Struct, frozen=True, kw_only=True):
    """How a client presents itself."""

    addresses: Sequence[Address]
    user: str | None = None
    password: str | None = None
    client_id: str | None = None
    """For durable subscriptions."""
    heart_beat_s: float = 10.0
    """0 is none."""


class Browsing(Protocol):
    """Who is shown what a browser is, on a connection that does nothing else."""

    def on_message(self, frame: Frame) -> None: ...

    def ended(self, error: Exception) -> None: ...


class Answered:
    """An acknowledgement that is under way."""

    __slots__ = ("_client", "_key", "_verdict")

    def __init__(self, client: Client, key: str, verdict: Verdict) -> None:
        self._client = client
        self._key = key
        self._verdict = verdict

    def confirmed(self, frame: Frame) -> None:
        pass

    def refused(self, error: Refused) -> None:
        raise ConnectionLost(f"the broker refused an acknowledgement: {error}") from error

    def lost(self) -> None:
        self._client.remember(self._key, self._verdict)


class Client:
    def __init__(
        self,
        login: Login,
        name: str,
        *,
        clock: Callable[[], float],
        chance: Callable[[], float],
        flush: Callable[[], bool],
        flush_soon: Callable[[], None],
        report: Callable[[str, dict[str, object]], None],
        make: type[Received] = Received,
    ) -> None:
        """`name` is nobody else's, and names producers. `clock` gives seconds and does not jump, `chance` numbers from
        0 to 1. `flush` writes what is in `outgoing`, and says whether all of it went; `flush_soon` does so before long.
        `report` tells whoever runs the program what happened; `make` makes messages.
        """
        self.login = login
        self.name = name
        self.clock = clock
        self.flush = flush
        self.flush_soon = flush_soon
        self.report = report
        self.timers = Timers()
        self.outbox = Outbox(name, self.timers, clock)
        self.questions = Questions()
        self.link: Link | None = None
        """The connection that is there, up or about to be."""
        self.up = Signal()
        """Set when a connection is there, and when there will never be one."""
        self.error: TruenextError | None = None
        """Why there will be no connection any more."""
        self.is_closing = False
        self.last_error: Exception | None = None
        """Why the last attempt to connect has failed."""
        self.browse: Browsing | None = None
        self.is_full = False
        """Nothing more is to be read for now."""
        self.closed = Signal()
        """Nothing is left to do: the socket may go."""
        self.since = clock()
        self.reconnects = -1
        self.subscriptions: dict[str, Subscription] = {}
        self.foreign: dict[str, Received] = {}
        """Messages that the program still has, of connections that were lost, by message id."""
        self.verdicts: dict[str, Verdict] = {}
        self.units: dict[Unit, None] = {}
        """Those that have not ended."""
        self._chance = chance
        self._make = make
        self._numbers = count(1)
        self._arrivals = count(1)
        self._connections = 0
        """The number of the last one, rising also over brokers that know nothing of it."""
        self.has_sends = False
        self._secret = ""
        self._store = ""
        self._failures = 0
        """Attempts to connect since the last that succeeded."""
        self._at = 0
        """The address that is next."""
        self._acks = 0
        self._free: deque[Producer] = deque()
        """Of sessions that have ended."""
        self._producers = 0
        self._drained: list[Signal] = []
        self._login_timer: Timer | None = None
        self._has_warned = False
        self.timers.at(clock() + IDLE_S, self._give_back_what_is_idle)

    # ---- The connection ----

    def next_address(self) -> tuple[Address, float]:
        """Where to connect to next, and after how many seconds."""
        addresses = self.login.addresses
        address = addresses[self._at % len(addresses)]
        self._at += 1
        if not self._failures:
            return address, 0.0
        rounds = (self._failures - 1) // len(addresses)
        longest = min(DELAY_FIRST_S * 2 ** min(rounds, 20), DELAY_MAX_S)
        return address, longest * (0.5 + self._chance() / 2)

    def connecting_failed(self, error: Exception) -> None:
        """Nobody was there."""
        self._failures += 1
        self.last_error = error
        self.report("cannot connect", {"error": str(error), "attempt": self._failures})

    def places(self) -> str:
        return ", ".join(f"stomp://{each.host}:{each.port}" for each in self.login.addresses)

    def opened(self, address: Address) -> None:
        """A socket is connected: say who we are."""
        self._connections += 1
        now = self.clock()
        self.link = link = Link(self._connections, self.login.heart_beat_s, now, heard=self._heard)
        headers = {"host": address.host}
        if self.login.user is not None:
            headers["login"] = self.login.user
        if self.login.password is not None:
            headers["passcode"] = self.login.password
        if self.login.client_id is not None:
            headers["client-id"] = self.login.client_id
        headers |= {
            "truenext-rounds": "true",
            "truenext-begun": "true",
            "truenext-keep-open": "true",
            "truenext-connection": str(link.number),
        }
        if self._secret:
            headers |= {"truenext-secret": self._secret, "truenext-blameless": "true"}
        link.log_in(headers)
        self._login_timer = self.timers.at(now + LOGIN_S, lambda: self._not_logged_in(link))
        self.flush()

    def _not_logged_in(self, link: Link) -> None:
        if self.link is link and not link.is_up:
            self.must_reconnect(ConnectionLost(f"the broker does not answer within {LOGIN_S:g} seconds"))

    def pump_soon(self) -> None:
        """Sends wait: those of one pass of the loop are written together, and share a receipt."""
        self.has_sends = True
        self.flush_soon()

    def outgoing(self) -> list[bytes]:
        """What is to be written; it is gone from here."""
        link = self.link
        if self.has_sends:
            self.has_sends = False
            self.outbox.pump()
        if link is None:
            return []
        out, link.out = link.out, []
        if out:
            link.written_at = self.clock()
        return out

    def received(self, data: bytes) -> None:
        """Bytes have come. Whatever is wrong with them ends the connection."""
        link = self.link
        if link is None:
            return
        try:
            link.received(data, self.clock())
        except Refused as error:
            self._was_refused(error, link)
        except TruenextError as error:
            self.must_reconnect(error)

    def _was_refused(self, error: Refused, link: Link) -> None:
        if error.code == Code.LATE:
            # Somebody has our secret, or the broker remembers more than we do: begin afresh.
            self._secret = ""
        elif not link.is_up and error.code in (Code.LOGIN, Code.NOT_SUPPORTED, Code.TAKEN, ""):
            self.fail(error)
            return
        self.must_reconnect(ConnectionLost(f"the broker ended the connection: {error}"))

    def must_reconnect(self, error: TruenextError) -> None:
        """This connection is of no further use."""
        self.lost(error)

    def lost(self, error: Exception) -> None:
        """The connection has ended, and whoever has the socket sees that `link` is gone."""
        link, self.link = self.link, None
        if link is None:
            return
        if self._login_timer is not None:
            self._login_timer.cancel()
        was_up = link.is_up
        if was_up:
            # One that ends at once, again and again, is no reason to try without a pause.
            self._failures = 0 if self.clock() - self.since >= STABLE_S else min(self._failures + 1, QUICK_FAILURES_MAX)
            self.up = Signal()
            self.since = self.clock()
            if not self.is_closing:
                self.report("connection lost", {"error": str(error), "connection": link.number})
        else:
            self.connecting_failed(error)
        why = ConnectionLost(f"the connection was lost: {error}")
        # What the program has: it comes again, and may do so here while the program still has it.
        for subscription in self.subscriptions.values():
            for received in subscription.held.values():
                # What has come again while the program still had it is known by what the program has.
                self.foreign.setdefault(received.key, received)
            subscription.begin_connection()
            subscription.has_missed |= was_up and subscription.wanted.is_lossy
            subscription.buffer.cleared()
        link.end()
        self.outbox.end()
        for unit in list(self.units):
            for received in unit.given:
                if received.link == link.number:
                    self.foreign[received.key] = received
            if unit.link == link.number:
                unit.doom(why)
        self.questions.lost(why)
        if self.browse is not None:
            self.browse.ended(error)
        self._wake_drained()
        for subscription in list(self.subscriptions.values()):
            subscription.buffer.wake_all()
        if self.is_closing and self.error is None:
            self.fail(why)

    def fail(self, error: TruenextError) -> None:
        """There will be no connection any more."""
        if self.error is None:
            self.error = error
        self.lost(error)
        self.up.set()
        self.outbox.fail(self.error)
        self.questions.lost(self.error)
        for subscription in self.subscriptions.values():
            subscription.end(self.error)
            subscription.buffer.wake_all()
        for unit in list(self.units):
            unit.doom(ConnectionLost(str(self.error)))
            if unit.outcome in (Outcome.IN_DOUBT, Outcome.COMMITTING):
                unit.outcome = Outcome.IN_DOUBT
                unit.settled.set()
        self.closed.set()

    def _heard(self, frame: Frame) -> None:
        if frame.command == "MESSAGE":
            self._on_message(frame)
        else:
            self._on_connected(frame)

    def _on_connected(self, frame: Frame) -> None:
        link = self.link
        assert link is not None, "it has just spoken"
        if self._login_timer is not None:
            self._login_timer.cancel()
        self._at -= 1
        self.reconnects += 1
        self.since = self.clock()
        self._secret = frame.headers.get("truenext-secret", "")
        is_another, self._store = bool(self._store) and self._store != link.store, link.store
        self.report("connected", {"session": link.session_id, "server": link.server, "reconnects": self.reconnects})
        if is_another or not link.is_truenext:
            if self.reconnects:
                self.outbox.fail_returned(
                    ConnectionLost("the broker that was reconnected to is another one; the message may have arrived")
                )
            if is_another:
                # Its messages are others, whatever they are called.
                self.foreign.clear()
                self.verdicts.clear()
        for subscription in self.subscriptions.values():
            if not subscription.is_closed:
                self._subscribe(subscription)
                # Those that pull ask anew.
                subscription.buffer.wake_all()
        self._begin_heart_beats(link)
        self.up.set()
        if not link.is_truenext:
            self.outbox.is_numbered = False
            self.outbox.begin(link, 0)
        elif self.outbox.producer.number:
            self._ask_for_highest(link)
        else:
            self.outbox.begin(link, 0)
        for unit in list(self.units):
            if unit.outcome is Outcome.IN_DOUBT:
                self.ask_for_outcome(unit)
        self._check_later(link)
        self.flush_soon()

    def _ask_for_highest(self, link: Link) -> None:
        def answered(answer: bytes) -> None:
            facts = msgspec.json.decode(answer, type=_Numbers)
            if self.link is link:
                self.outbox.begin(link, facts.sends)
                self.flush_soon()

        self.questions.ask(link, "producer", {"producer": self.outbox.producer.name}, answered)

    def ask_for_outcome(self, unit: Unit) -> None:
        """What became of its COMMIT? What did not happen so far never will."""
        producer = unit.producer
        assert producer is not None, "it has a COMMIT"
        link = self.link
        if link is None or not link.is_up:
            return
        if not link.is_truenext or producer.store != link.store:
            unit.settle(Outcome.UNKNOWN, ConnectionLost("the broker that was reconnected to is another one"))
            return

        def answered(answer: bytes) -> None:
            facts = msgspec.json.decode(answer, type=_Numbers)
            if unit.outcome is Outcome.IN_DOUBT:
                outcome = _OUTCOMES.get(facts.outcome or "", Outcome.UNKNOWN)
                producer.number = facts.commits
                unit.settle(outcome, ConnectionLost("the connection was lost while it was committed"))

        question = {"producer": producer.name, "commit": unit.number, "settle": True}
        self.questions.ask(link, "producer", question, answered)

    # ---- Heart-beats ----

    def _begin_heart_beats(self, link: Link) -> None:
        if link.beats_every_s:
            self.timers.at(self.clock() + link.beats_every_s, lambda: self._beat(link))
        if link.silent_after_s:
            self.timers.at(self.clock() + link.silent_after_s, lambda: self._listen(link))

    def _beat(self, link: Link) -> None:
        if self.link is link:
            now = self.clock()
            if now - link.written_at >= link.beats_every_s * 0.9 and not link.out:
                link.beat()
                self.flush()
            self.timers.at(max(now, link.written_at) + link.beats_every_s, lambda: self._beat(link))

    def _listen(self, link: Link) -> None:
        if self.link is link:
            silent_at = (self.clock() if self.is_full else link.read_at) + link.silent_after_s
            if silent_at <= self.clock():
                self.must_reconnect(ConnectionLost(f"nothing has come for {link.silent_after_s:g} seconds"))
            else:
                self.timers.at(silent_at, lambda: self._listen(link))

    def tick(self) -> None:
        """Do what is due; `timers.next_at` says when that is."""
        self.timers.run(self.clock())

    # ---- Subscriptions ----

    def subscribe(self, wanted: Wanted, buffer: Buffer, deadline: float | None) -> Flow[Subscription]:
        """Raises: Refused, ClosedError, TimeoutError; TruenextError that ended the connection"""
        self.check_open()
        subscription = Subscription(str(next(self._numbers)), wanted, buffer)
        self.subscriptions[subscription.id] = subscription
        buffer.subscriptions.append(subscription)
        if self.link is not None and self.link.is_up:
            self._subscribe(subscription)
            self.flush_soon()
        try:
            while not (subscription.is_open or subscription.is_closed):
                came = yield Wait(subscription.opened, deadline)
                if not came:
                    raise TimeoutError(f"the broker has not confirmed the subscription to {wanted.destination} in time")
        except BaseException:
            self.unsubscribe(subscription)
            raise
        if subscription.error is not None:
            error = subscription.error
            self.unsubscribe(subscription)
            raise error
        return subscription

    def _subscribe(self, subscription: Subscription) -> None:
        link = self.link
        assert link is not None, "it is up"
        wanted = subscription.wanted
        headers = {"id": subscription.id, "destination": wanted.destination, "ack": "client-individual"}
        is_truenext = link.is_truenext
        if wanted.prefetch == 0:
            if is_truenext:
                headers["truenext-pull"] = "true"
            else:
                # The least that others know.
                headers["activemq.prefetchSize"] = "1"
        elif wanted.prefetch is not None:
            headers["activemq.prefetchSize"] = str(wanted.prefetch)
        if is_truenext and wanted.prefetch != 0 and _may_be_express(wanted.destination):
            headers["truenext-express"] = "true"
        if wanted.selector is not None:
            headers["selector"] = wanted.selector
        if wanted.priority:
            headers["activemq.priority"] = str(wanted.priority)
        if wanted.exclusive:
            headers["activemq.exclusive"] = "true"
        if wanted.durable is not None:
            headers["activemq.subscriptionName"] = wanted.durable
        headers |= wanted.headers
        headers["receipt"] = str(link.frames + 1)
        number = link.write(frames.frame("SUBSCRIBE", headers))
        link.unanswered[number] = _Subscribing(self, subscription)
        subscription.is_known = True
        if subscription.is_paused and is_truenext:
            self.give_back([subscription], rest=True)

    def unsubscribe(self, subscription: Subscription) -> None:
        """What it has goes back, without an attempt; what the program has of it, too."""
        if self.subscriptions.pop(subscription.id, None) is None:
            return
        subscription.end(None)
        subscription.buffer.subscriptions.remove(subscription)
        link = self.link
        if link is not None and link.is_up and subscription.is_known:
            link.write(frames.frame("UNSUBSCRIBE", {"id": subscription.id}))
            for received in subscription.held.values():
                received.state = State.DONE
            self.flush_soon()
        subscription.begin_connection()
        subscription.buffer.cleared()
        subscription.buffer.wake_all()

    def end_durable(self, name: str, deadline: float | None) -> Flow[None]:
        """End a durable subscription; what waits in it goes."""
        yield from self.confirmed(
            "UNSUBSCRIBE", {"id": name, "activemq.subscriptionName": name, "durable": "true"}, deadline
        )

    def pause(self, subscription: Subscription) -> None:
        subscription.is_paused = True
        if subscription.is_known and not subscription.rests:
            self.give_back([subscription], rest=True)

    def resume(self, subscription: Subscription) -> None:
        subscription.is_paused = False
        self.wake(subscription)

    def wake(self, subscription: Subscription) -> None:
        """The program asks for messages."""
        link = self.link
        if subscription.rests and link is not None and not subscription.is_paused:
            subscription.rests = False
            if not subscription.pulls:
                link.write(frames.wake(subscription.id))
                self.flush_soon()

    def wish(self, subscription: Subscription, messages: int, *, waits: bool) -> None:
        """Ask for messages; 0 withdraws what has not come."""
        link = self.link
        assert link is not None, "it is up"
        link.write(frames.credit(subscription.id, messages, str(link.frames), waits=waits))
        subscription.rests = subscription.rests and not messages
        if messages:
            subscription.wished += messages

    def give_back(
        self,
        subscriptions: Sequence[Subscription],
        *,
        returning: Iterable[Received] = (),
        rest: bool = False,
        unit: Unit | None = None,
        charges_all: bool = True,
    ) -> None:
        """What subscriptions hold returns in one step, but for what the program has, and not `returning`."""
        link = self.link
        if link is None or not link.is_up:
            return
        if not link.is_truenext:
            self._resubscribe(link, subscriptions, unit)
            return
        going = set(returning)
        keep = []
        for subscription in subscriptions:
            keep += [ack_id for ack_id, received in subscription.held.items() if received not in going]
            subscription.clear()
            subscription.buffer.cleared()
            subscription.wished = 0
            subscription.rests = rest or subscription.is_paused
        link.rounds += 1
        # Those that are paused stay so; they are named in a request of their own.
        awake = [each.id for each in subscriptions if not each.rests]
        resting = [each.id for each in subscriptions if each.rests]
        abort = None if unit is None else unit.name
        if resting and awake:
            link.write(frames.give_back(resting, keep=keep, rest=True))
            link.rounds += 1
            resting = []
        link.write(
            frames.give_back(awake or resting, keep=keep, rest=bool(resting), abort=abort, charges_all=charges_all)
        )
        for subscription in subscriptions:
            subscription.round_min = link.rounds
        self.flush_soon()

    def _resubscribe(self, link: Link, subscriptions: Sequence[Subscription], unit: Unit | None) -> None:
        """The same where a broker knows no giving back: the subscriptions begin anew, under other names."""
        if unit is not None:
            link.write(frames.frame("ABORT", {"transaction": unit.name}))
        for subscription in subscriptions:
            link.write(frames.frame("UNSUBSCRIBE", {"id": subscription.id}))
            del self.subscriptions[subscription.id]
            for received in subscription.held.values():
                self.foreign[received.key] = received
            subscription.begin_connection()
            subscription.buffer.cleared()
            subscription.id = str(next(self._numbers))
            self.subscriptions[subscription.id] = subscription
            self._subscribe(subscription)
        self.flush_soon()

    # ---- Messages ----

    def _on_message(self, frame: Frame) -> None:
        headers = frame.headers
        link = self.link
        assert link is not None, "it has just spoken"
        subscription = self.subscriptions.get(headers.get("subscription", ""))
        if subscription is None:
            if self.browse is not None:
                self.browse.on_message(frame)
            else:
                # If it is no reply, its subscription ended while this was on its way, and with it that dispatch.
                self.questions.on_message(frame)
            return
        if "truenext-unused" in headers:
            # Of a wish that a later request has ended nothing is said; so this is of what was asked for last.
            subscription.wished = 0
            subscription.buffer.wake_all()
            return
        try:
            received = self._make(headers, frame.body, next(self._arrivals), subscription, link.number)
            if link.is_truenext and int(headers["truenext-round"]) < subscription.round_min:
                return
        except (KeyError, ValueError) as error:
            self._reject_unreadable(link, headers, error)
            return
        if subscription.wished:
            subscription.wished -= 1
        if subscription.has_missed:
            subscription.has_missed = False
            received.headers = headers | {"may-have-missed": "true"}
        if self.foreign or self.verdicts:
            key = received.key
            verdict = self.verdicts.pop(key, None)
            if verdict is not None:
                self._tell(link, received, verdict)
                self.flush_soon()
                return
            earlier = self.foreign.get(key)
            if earlier is not None:
                # The program still has it.
                earlier.again = received
                subscription.held[received.ack_id] = received
                received.state = State.HELD
                self.begin(received)
                self.flush_soon()
                return
        subscription.buffer.push(received)

    def _reject_unreadable(self, link: Link, headers: dict[str, str], error: Exception) -> None:
        self.report("a message cannot be read", {"error": repr(error), "message": headers.get("message-id", "")})
        ack_id = headers.get("ack")
        if ack_id is not None:
            link.write(frames.frame("NACK", {"id": ack_id, "truenext-poison": "true"}))
            self.flush_soon()

    def begin(self, received: Received) -> None:
        """Say that the program has it."""
        link = self.link
        if link is not None and link.is_truenext and not received.is_begun:
            received.is_begun = True
            link.write(frames.begun(received.ack_id))

    def is_current(self, received: Received) -> bool:
        """Its connection is there."""
        return self.link is not None and received.link == self.link.number

    def settle(self, received: Received, verdict: Verdict, begun: Received | None = None) -> None:
        """The program has said what became of a message; `begun` is the one that it gets instead."""
        received.state = State.DONE
        received.subscription.held.pop(received.ack_id, None)
        link = self.link
        if link is not None and received.link == link.number:
            self._tell(link, received, verdict, begun)
            return
        self.foreign.pop(received.key, None)
        again = received.again
        if again is not None and self.is_current(again):
            again.state = State.DONE
            again.subscription.held.pop(again.ack_id, None)
            assert link is not None, "it is current"
            self._tell(link, again, verdict)
        elif not received.subscription.is_closed:
            self.remember(received.key, verdict)
        if begun is not None:
            self.begin(begun)

    def _tell(self, link: Link, received: Received, verdict: Verdict, begun: Received | None = None) -> None:
        if verdict.is_done:
            self._acks += 1
            ack_id = received.ack_id
            begins = None if begun is None or begun.is_begun or not link.is_truenext else begun
            if begins is not None:
                begins.is_begun = True
            if self._acks % ACKS_PER_RECEIPT == 0:
                data = frames.ack_confirmed(ack_id, link.frames + 1, None if begins is None else begins.ack_id)
            elif begins is not None:
                data = frames.ack_and_begin(ack_id, begins.ack_id)
            else:
                data = frames.ack(ack_id)
            number = link.write(data)
        else:
            number = link.write(frames.frame("NACK", _nack_headers(received, verdict)))
        link.unanswered[number] = Answered(self, received.key, verdict)

    def remember(self, key: str, verdict: Verdict) -> None:
        """If the message comes again, that is what is said of it."""
        self.verdicts[key] = verdict
        if len(self.verdicts) > VERDICTS_MAX:
            del self.verdicts[next(iter(self.verdicts))]

    def put_back(self, received: Received) -> None:
        """The program does not have a message any more, and nothing was said of it: what has come again waits."""
        received.state = State.DONE
        self.foreign.pop(received.key, None)
        again, received.again = received.again, None
        if again is not None and self.is_current(again) and again.state is State.HELD:
            again.subscription.held.pop(again.ack_id, None)
            again.state = State.BUFFERED
            again.subscription.buffer.push(again)

    # ---- Producers and transactions ----

    def new_producer(self) -> Producer:
        if self._free:
            return self._free.popleft()
        self._producers += 1
        return Producer(f"{self.name}-{self._producers}")

    def free_producer(self, producer: Producer) -> None:
        self._free.append(producer)

    def transaction_name(self) -> str:
        return str(next(self._numbers))

    # ---- Flows that others are made of ----

    @property
    def is_closed_by_program(self) -> bool:
        return self.is_closing or isinstance(self.error, ClosedError)

    def check_open(self) -> None:
        """Raises: ClosedError; the error that ended the connection"""
        if self.error is not None:
            raise _again(self.error)
        if self.is_closing:
            raise ClosedError("the connection is closed")

    def wait_until_up(self, deadline: float | None, what: str) -> Flow[Link]:
        """Raises: TimeoutError if there is no connection in time; whatever ended it for good"""
        while True:
            if self.error is not None:
                raise _again(self.error)
            link = self.link
            if link is not None and link.is_up:
                return link
            came = yield Wait(self.up, deadline)
            if not came:
                raise TimeoutError(f"there was no connection to the broker in time to {what}")

    def request(self, head: bytes, body: bytes, deadline: float | None) -> Flow[Frame]:
        """Send a message, `head` from its command on, and wait for the reply.

        Raises: Refused, ConnectionLost, TimeoutError
        """
        self.check_open()
        link = yield from self.wait_until_up(deadline, "send a request")
        came: list[Frame] = []
        errors: list[Exception] = []
        settled = Signal()

        def answered(frame: Frame) -> None:
            came.append(frame)
            settled.set()

        def failed(error: Exception) -> None:
            errors.append(error)
            settled.set()

        question = self.questions.send(link, head, body, answered, failed)
        self.flush_soon()
        try:
            in_time = yield Wait(settled, deadline)
        finally:
            self.questions.forget(question)
        if errors:
            raise errors[0]
        if not in_time:
            raise TimeoutError("no reply in time")
        return came[0]

    def wait_until_written(self, deadline: float | None = None) -> Flow[bool]:
        """Until all frames so far are with the operating system, or their connection has gone."""
        while self.link is not None and not self.flush():
            signal = Signal()
            self._drained.append(signal)
            came = yield Wait(signal, deadline)
            if not came:
                return False
        return True

    def has_drained(self) -> None:
        """The socket has taken everything."""
        self._wake_drained()

    def _wake_drained(self) -> None:
        drained, self._drained = self._drained, []
        for signal in drained:
            signal.set()

    def confirmed(self, command: str, headers: dict[str, str], deadline: float | None) -> Flow[None]:
        """Say a frame and wait for its receipt.

        Raises: Refused, ConnectionLost, TimeoutError
        """
        self.check_open()
        link = yield from self.wait_until_up(deadline, f"say {command}")
        asked = Asked()
        number = link.write(frames.frame(command, headers | {"receipt": str(link.frames + 1)}))
        link.unanswered[number] = asked
        self.flush_soon()
        came = yield Wait(asked.settled, deadline)
        if not came:
            raise TimeoutError(f"the broker has not confirmed {command} in time")
        if asked.error is not None:
            raise asked.error

    # ---- Idle buffers, and whether the broker sees what we see ----

    def _give_back_what_is_idle(self) -> None:
        self.timers.at(self.clock() + IDLE_S, self._give_back_what_is_idle)
        link = self.link
        if link is None or not link.is_truenext or self.is_closing:
            return
        for subscription in self.subscriptions.values():
            buffer = subscription.buffer
            was_asked, subscription.is_asked = subscription.is_asked, False
            if not (was_asked or buffer.is_waited_for or subscription.rests or not len(subscription)):
                self.give_back([subscription], rest=True)

    def _check_later(self, link: Link) -> None:
        if link.is_truenext:
            differences: dict[str, tuple[int, int]] = {}
            self.timers.at(self.clock() + CHECK_S, lambda: self._check(link, differences, 0))

    def _check(self, link: Link, before: dict[str, tuple[int, int]], times: int) -> None:
        """Ask the broker what it has of this connection. What comes meanwhile makes a difference for a moment; one that
        stays means that something was lost on the way, and only a new connection can mend that."""
        if self.link is not link or self.is_closing:
            return

        def answered(answer: bytes) -> None:
            if self.link is not link:
                return
            facts = msgspec.json.decode(answer, type=_Facts)
            held = {each.id: each.held for each in facts.subscriptions}
            both = {
                each.id: (held.get(each.id, -1), _held(each))
                for each in self.subscriptions.values()
                if each.is_open and not each.is_closed
            }
            differences = {name: counts for name, counts in both.items() if counts[0] != counts[1]}
            same = {name: counts for name, counts in differences.items() if before.get(name) == counts}
            if same and times + 1 >= CHECKS_MAX:
                self.must_reconnect(ConnectionLost(f"the broker and this client disagree about what is held: {same}"))
                return
            self.timers.at(
                self.clock() + (CHECK_AGAIN_S if differences else CHECK_S),
                lambda: self._check(link, same or differences, times + 1 if same else 0),
            )

        if any(not each.is_closed for each in self.subscriptions.values()):
            self.questions.ask(link, "connection", None, answered)
            self.flush_soon()
        else:
            self.timers.at(self.clock() + CHECK_S, lambda: self._check(link, {}, 0))

    # ---- The end ----

    def close(self, deadline: float | None) -> Flow[None]:
        """Take leave: what is held goes back without an attempt, and what was said is confirmed.

        Raises: nothing that the other side does; what was not confirmed is known to whoever waits for it
        """
        if self.error is not None or self.closed.is_set:
            self.is_closing = True
            self.fail(self.error or ClosedError("the connection is closed"))
            return
        self.is_closing = True
        for subscription in list(self.subscriptions.values()):
            self.unsubscribe(subscription)
        link = self.link
        error: TruenextError = ClosedError("the connection is closed")
        if link is not None and link.is_up:
            doubtful = {unit.producer for unit in self.units if unit.outcome is Outcome.IN_DOUBT}
            headers = {}
            if link.is_truenext:
                names = [each.name for each in self._free if each not in doubtful and each.number]
                if self.outbox.producer.number and not self.outbox.open:
                    names.append(self.outbox.producer.name)
                if names:
                    headers["truenext-forget"] = msgspec.json.encode(names).decode()
            asked = Asked()
            headers["receipt"] = str(link.frames + 1)
            link.unanswered[link.write(frames.frame("DISCONNECT", headers))] = asked
            self.flush_soon()
            try:
                yield Wait(asked.settled, deadline)
            finally:
                self._secret = ""
                self.fail(error)
        self.fail(error)


class Asked:
    """A frame that somebody waits for."""

    __slots__ = ("error", "settled")

    def __init__(self) -> None:
        self.settled = Signal()
        self.error: TruenextError | None = None

    def confirmed(self, frame: Frame) -> None:
        self.settled.set()

    def refused(self, error: Refused) -> None:
        self.error = error
        self.settled.set()

    def lost(self) -> None:
        self.error = ConnectionLost("the connection was lost before the broker answered")
        self.settled.set()


class _Subscribing:
    __slots__ = ("_client", "_subscription")

    def __init__(self, client: Client, subscription: Subscription) -> None:
        self._client = client
        self._subscription = subscription

    def confirmed(self, frame: Frame) -> None:
        self._subscription.is_open = True
        self._subscription.opened.set()

    def refused(self, error: Refused) -> None:
        """Of a subscription that came back after a reconnect, too: then its consumer ends with that."""
        self._subscription.is_known = False
        self._subscription.end(error)
        self._subscription.buffer.wake_all()

    def lost(self) -> None:
        pass


class _Numbers(msgspec.Struct):
    sends: int
    commits: int
    outcome: str | None = None


class _OfSubscription(msgspec.Struct):
    id: str
    held: int


class _Facts(msgspec.Struct):
    subscriptions: list[_OfSubscription]


_OUTCOMES = {"committed": Outcome.COMMITTED, "rolled back": Outcome.ROLLED_BACK}


def _held(subscription: Subscription) -> int:
    """Messages of a subscription that the broker should know it to hold."""
    return len(subscription.held) + len(subscription) + subscription.buffer.parked


def _nack_headers(received: Received, verdict: Verdict) -> dict[str, str]:
    headers = {"id": received.ack_id}
    if verdict.delay_ms is not None:
        headers["truenext-delay"] = str(verdict.delay_ms)
    if verdict.is_poison:
        headers["truenext-poison"] = "true"
    return headers


def _may_be_express(destination: str) -> bool:
    """A pattern of queues has no express lane."""
    name = destination.partition("?")[0]
    return name.startswith(("/topic/", "/temp-topic/")) or not any(sign in name for sign in "*>")


def _again(error: TruenextError) -> TruenextError:
    """The same error for another caller: an exception that is raised twice collects the tracebacks of both."""
    if isinstance(error, Refused):
        return Refused(str(error), error.code)
    return type(error)(str(error)) if type(error) in (ConnectionLost, ClosedError, RemoteProtocolError) else error
