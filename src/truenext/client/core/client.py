"""The state machine of a client: everything that a connection of a program knows and decides, without a socket.

    requests ──flows──▶ Client ──bytes, `outgoing`──▶ whoever has the socket
    answers  ◀─signals─        ◀──`received`, `lost`, `tick`──

Whoever drives it has one thing to do for it at a time: to connect, to read and write, to wait. A program's connection
outlives those to the broker: `Link` is one of these, `Client` is what stays.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from truenext.client.core import frames
from truenext.client.core.agreement import Agreement
from truenext.client.core.attempts import Attempts
from truenext.client.core.context import CONNECTED, NO_ROOM, NOT_CONFIRMED
from truenext.client.core.delayed_calls import DelayedCall
from truenext.client.core.holding import Received
from truenext.client.core.link import Link
from truenext.client.core.questions import OfProducer, Questions
from truenext.client.core.send_buffer import SendBuffer
from truenext.client.core.subscriptions import Subscriptions
from truenext.client.core.transaction_state import Outcome, ProducerNumbers, TransactionState
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import (
    ClosedError,
    Code,
    ConnectionLost,
    NoBroker,
    OtherProtocolError,
    Refused,
    RemoteProtocolError,
    TruenextError,
    copy_error,
)
from truenext.url import DEFAULT_URL, parse_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from truenext.client.core.context import ClientContext
    from truenext.client.core.holding import Buffer, Subscription, Wanted
    from truenext.url import Address
    from truenext.wire.stomp.frame import Frame

LOGIN_S = 10.0
"""From the first byte until CONNECTED; a broker that takes an old connection over may have a write under way."""
HEART_BEAT_S_MAX = 24 * 3600
COMPLAINT_S = 60.0
"""Seconds until the same reason why nothing can be connected to is reported again."""
PROMPT_S = 4.0
"""A login that is refused so soon was not refused for its slowness."""


_FOR_LOGIN = frozenset("\r\n\0")
"""What CONNECT cannot say, for its headers are not escaped."""
LOGIN_BYTES_EACH_MAX = 2048
"""Of user, password and client id; a CONNECT may have 8 KiB."""


class ConnectOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a client presents itself."""

    addresses: Sequence[Address]
    user: str | None = None
    password: str | None = None
    client_id: str | None = None
    """For durable subscriptions."""
    heart_beat_s: float = 10.0
    """0 is none."""
    reconnects: bool = True
    """What is lost is connected anew; else it is the end, and so is it if nobody is there at first."""
    beats_apart: bool = False
    """Heart-beats do not depend on the event loop that runs the client."""

    def __post_init__(self) -> None:
        """Raises: ValueError, without what was said: it may be a password"""
        for name in ("user", "password", "client_id"):
            said = getattr(self, name) or ""
            if not _FOR_LOGIN.isdisjoint(said) or len(said.encode()) > LOGIN_BYTES_EACH_MAX:
                raise ValueError(f"{name} has a line feed, a carriage return or a NUL in it, or is too long")


def connect_options(
    urls: Sequence[str],
    *,
    user: str | None,
    password: str | None,
    client_id: str | None,
    heart_beat_s: float,
    reconnects: bool,
    beats_apart: bool = False,
) -> ConnectOptions:
    """Without a URL it is the port of STOMP on this machine.

    Raises: ConfigurationError if a URL is none; ValueError, TypeError
    """
    for url in urls:
        if not isinstance(url, str):
            raise TypeError(f"a URL is text, such as {DEFAULT_URL}, not {url!r}")
    for name, said in (("user", user), ("password", password), ("client_id", client_id)):
        if said is not None and not isinstance(said, str):
            raise TypeError(f"{name} is text, not {type(said).__name__}")
    if not isinstance(heart_beat_s, int | float) or not 0 <= heart_beat_s <= HEART_BEAT_S_MAX:
        raise ValueError(f"heart_beat is 0 to {HEART_BEAT_S_MAX} seconds, not {heart_beat_s!r}")
    return ConnectOptions(
        addresses=[parse_url(url) for url in urls or (DEFAULT_URL,)],
        user=user,
        password=password,
        client_id=client_id,
        heart_beat_s=heart_beat_s,
        reconnects=bool(reconnects),
        beats_apart=bool(beats_apart),
    )


class BrowseListener(Protocol):
    """Who is shown what a browser is, on a connection that does nothing else."""

    def on_message(self, frame: Frame) -> None: ...

    def ended(self, error: Exception) -> None: ...


class Client:
    def __init__(
        self, options: ConnectOptions, name: str, context: ClientContext, make: type[Received] = Received
    ) -> None:
        """`name` is nobody else's, and names producers; `make` makes messages."""
        self.options = options
        self.name = name
        self.context = context
        self.clock, self.flush, self.flush_soon, self.delayed_calls = (
            context.clock,
            context.flush,
            context.flush_soon,
            context.delayed_calls,
        )
        self.attempts = Attempts(options.addresses, context.chance)
        self.send_buffer = SendBuffer(
            name, context.delayed_calls, context.clock, pump_soon=self.pump_soon, has_no_room=self._has_no_room
        )
        self.questions = Questions()
        self.subscriptions = Subscriptions(context, make)
        self.transactions: dict[TransactionState, None] = {}
        """Those that have not ended."""
        self.up = Signal()
        """Set when a connection is there, and when there will never be one."""
        self.error: TruenextError | None = None
        """Why there will be no connection any more."""
        self.last_error: Exception | None = None
        """Why the last attempt to connect has failed."""
        self.is_closing = False
        """The program may ask for nothing more."""
        self._is_leaving = False
        """DISCONNECT was said."""
        self.since = context.clock()
        """When the connection came, or went."""
        self._tries = 0
        """Attempts to connect that have failed since."""
        self._complaints: dict[tuple[str, str], float] = {}
        """When each reason of a report was reported, by URL."""
        self.reconnects = -1
        self.browse: BrowseListener | None = None
        self.is_full = False
        """Nothing more is to be read for now."""
        self._agreement = Agreement(context, self.subscriptions, self.questions, self.lost)
        self._connections = 0
        """The number of the last one, rising also over brokers that know nothing of it."""
        self._secret = ""
        self._store = ""
        self._has_sends = False
        self._free: deque[ProducerNumbers] = deque()
        """Of sessions that have ended."""
        self._producers = 0
        self._drained: list[Signal] = []
        self._login_timer: DelayedCall | None = None

    @property
    def link(self) -> Link | None:
        """The connection that is there, up or about to be."""
        return self.context.link

    # ---- The connection ----

    def connecting_failed(self, error: Exception) -> None:
        """Nobody was there."""
        url, reason = self.attempts.address.url, _reason(error)
        self.attempts.failed()
        self.last_error = error
        self._tries += 1
        if not self.options.reconnects and self.attempts.failures >= len(self.options.addresses):
            self.fail(self.not_there())
        else:
            self._complain("cannot connect to %(url)s: %(error)s", url, reason, attempts=self._tries)

    def _has_no_room(self, error: Refused) -> None:
        self._complain(NO_ROOM, self.attempts.address.url, str(error))

    def _complain(self, what: str, url: str, reason: str, **facts: object) -> None:
        """Report it, unless that was done less than a minute ago."""
        now = self.clock()
        complained = self._complaints.get((url, reason))
        if complained is None or now - complained >= COMPLAINT_S:
            self._complaints[url, reason] = now
            self.context.report(what, {"url": url, "error": reason, **facts})

    def not_there(self) -> NoBroker:
        """No broker could be connected to, and why."""
        places = ", ".join(each.url for each in self.options.addresses)
        if self.last_error is not None:
            reason = _reason(self.last_error)
        elif self.link is not None:
            reason = "it takes connections and does not answer"
        else:
            reason = "it has not answered in time"
        return NoBroker(f"no broker at {places}: {reason}")

    def opened(self, address: Address) -> None:
        """A socket is connected: say who we are."""
        self._connections += 1
        now = self.clock()
        self.context.link = link = Link(self._connections, self.options.heart_beat_s, now, heard=self._heard)
        headers = {"host": address.host}
        if self.options.user is not None:
            headers["login"] = self.options.user
        if self.options.password is not None:
            headers["passcode"] = self.options.password
        if self.options.client_id is not None:
            headers["client-id"] = self.options.client_id
        headers |= {
            "truenext-rounds": "true",
            "truenext-started": "true",
            "truenext-keep-open": "true",
            "truenext-connection": str(link.number),
        }
        if self._secret:
            headers |= {"truenext-secret": self._secret, "truenext-blameless": "true"}
        link.log_in(headers)
        self._login_timer = self.delayed_calls.at(now + LOGIN_S, lambda: self._not_logged_in(link))
        self.flush()

    def _not_logged_in(self, link: Link) -> None:
        if self.link is link and not link.is_up:
            self.lost(ConnectionLost(f"the broker does not answer within {LOGIN_S:g} seconds"))

    def pump_soon(self) -> None:
        """Sends wait: those of one pass of the loop are written together, and share a receipt."""
        self._has_sends = True
        self.flush_soon()

    def outgoing(self) -> list[bytes]:
        """What is to be written; it is gone from here."""
        link = self.link
        if self._has_sends:
            self._has_sends = False
            self.send_buffer.pump()
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
        except RemoteProtocolError as error:
            is_said = link.is_up or isinstance(error, OtherProtocolError)
            self.lost(error if is_said else RemoteProtocolError(f"the server there does not speak STOMP 1.2: {error}"))
        except TruenextError as error:
            self.lost(error)

    def _was_refused(self, error: Refused, link: Link) -> None:
        if error.code == Code.STALE:
            # Somebody has our secret, or the broker remembers more than we do: begin afresh.
            self._secret = ""
        elif not link.is_up and self._is_final(error.code) and self.clock() - link.started_at < PROMPT_S:
            self.fail(error)
            return
        self.lost(ConnectionLost(f"the broker ended the connection: {error}"))

    def _is_final(self, code: str) -> bool:
        """No later login will do. Another broker names no code: it says so of wrong credentials, and of a client whose
        lost connection it believes to be there; only who was never let in has the wrong credentials."""
        return code in _FINAL or (not code and self.reconnects < 0)

    def lost(self, error: Exception) -> None:
        """The connection has ended, and whoever has the socket sees that `link` is gone."""
        link, self.context.link = self.context.link, None
        if link is None:
            return
        if self._login_timer is not None:
            self._login_timer.cancel()
        if link.is_up:
            now = self.clock()
            self.attempts.ended(now - self.since)
            self.since = now
            self._tries = 0
            self._complaints.clear()
            self.up = Signal()
            if not (self.is_closing or isinstance(error, ClosedError)):
                self.context.report(
                    "connection lost to %(url)s: %(error)s",
                    {"url": self.attempts.address.url, "error": _reason(error), "connection": link.number},
                )
        elif not isinstance(error, ClosedError):
            self.connecting_failed(error)
        why = ConnectionLost(f"the connection was lost: {error}")
        self.subscriptions.lost(link, self.transactions, was_up=link.is_up)
        link.end()
        self.send_buffer.end()
        for transaction in list(self.transactions):
            if transaction.link == link.number:
                transaction.doom(why)
        self.questions.lost(why)
        if self.browse is not None:
            self.browse.ended(error)
        self.has_drained()
        for subscription in list(self.subscriptions.by_id.values()):
            subscription.buffer.wake_all()
        if (self._is_leaving or (link.is_up and not self.options.reconnects)) and self.error is None:
            end: TruenextError = why
            if self.is_closing:
                # The broker closes it, too, once it has confirmed that we take leave.
                end = ClosedError("the connection is closed")
                end.__cause__ = why
            self.fail(end)

    def fail(self, error: TruenextError) -> None:
        """There will be no connection any more."""
        if self.error is None:
            self.error = error
        self.lost(error)
        self.up.set()
        self.send_buffer.fail(self.error)
        self.questions.lost(self.error)
        for subscription in self.subscriptions.by_id.values():
            subscription.end(self.error)
            subscription.buffer.wake_all()
        for transaction in list(self.transactions):
            transaction.doom(ConnectionLost(str(self.error)))
            if transaction.outcome in (Outcome.IN_DOUBT, Outcome.COMMITTING):
                transaction.outcome = Outcome.IN_DOUBT
                transaction.resolved.set()

    def _heard(self, frame: Frame) -> None:
        if frame.command == "MESSAGE":
            # If it is nobody's, its subscription ended while it was on its way, and with it that dispatch.
            if not self.subscriptions.on_message(frame):
                if self.browse is not None:
                    self.browse.on_message(frame)
                else:
                    self.questions.on_message(frame)
        else:
            self._on_connected(frame)

    def _on_connected(self, frame: Frame) -> None:
        link = self.link
        assert link is not None, "it has just spoken"
        if self._login_timer is not None:
            self._login_timer.cancel()
        self.reconnects += 1
        now = self.clock()
        away_s, self.since = now - self.since, now
        self._secret = frame.headers.get("truenext-secret", "")
        is_another, self._store = bool(self._store) and self._store != link.store, link.store
        facts: dict[str, object] = {"url": self.attempts.address.url, "session": link.session_id, "server": link.server}
        if self.reconnects or self._tries:
            self.context.report(
                "connected to %(url)s, after %(seconds)s seconds and %(attempts)s attempts",
                {**facts, "seconds": round(away_s, 1), "attempts": self._tries + 1, "reconnects": self.reconnects},
            )
        else:
            self.context.report(CONNECTED, facts)
        if self.reconnects and (is_another or not link.is_truenext):
            self.send_buffer.fail_returned(
                ConnectionLost("the broker that was reconnected to is another one; the message may have arrived")
            )
            # The first broker knows the numbers that were used there: back with it they would be repeats.
            self.send_buffer.producer = self.another_producer()
        self.subscriptions.connected()
        self._start_heart_beats(link)
        self.up.set()
        self.send_buffer.is_numbered = link.is_truenext
        if link.is_truenext and self.send_buffer.producer.number:
            self._ask_for_highest(link)
        else:
            self.send_buffer.start(link, 0)
        for transaction in list(self.transactions):
            if transaction.outcome is Outcome.IN_DOUBT:
                self.ask_for_outcome(transaction)
        self._agreement.start(link)
        self.flush_soon()

    def _ask_for_highest(self, link: Link) -> None:
        def answered(facts: OfProducer) -> None:
            if self.link is link:
                self.send_buffer.start(link, facts.sends)
                self.flush_soon()

        self.questions.ask(link, "producer", {"producer": self.send_buffer.producer.name}, OfProducer, answered)

    def ask_for_outcome(self, transaction: TransactionState) -> None:
        """What became of its COMMIT? What did not happen so far never will."""
        producer = transaction.producer
        link = self.link
        if link is None or not link.is_up:
            return
        if producer is None or not link.is_truenext or producer.store != link.store:
            transaction.resolve(
                Outcome.UNKNOWN, ConnectionLost("nobody can be asked about it: it was another broker's")
            )
            return

        def answered(facts: OfProducer) -> None:
            if transaction.outcome is Outcome.IN_DOUBT:
                outcome = _OUTCOMES.get(facts.outcome or "", Outcome.UNKNOWN)
                is_crash = producer.is_told(facts.commits, link.number) and transaction.number > facts.commits + 1
                if is_crash and transaction.is_kept and facts.outcome == "not so far":
                    # The broker has crashed, and forgotten numbers before it, of transactions without anything
                    # persistent. This one had something: it would be known. It cannot come any more.
                    outcome = Outcome.ROLLED_BACK
                transaction.resolve(outcome, ConnectionLost("the connection was lost while it was committed"))

        question = {"producer": producer.name, "commit": transaction.number, "resolve": True}
        self.questions.ask(link, "producer", question, OfProducer, answered)

    # ---- Heart-beats ----

    def _start_heart_beats(self, link: Link) -> None:
        if link.beats_every_s:
            self.delayed_calls.at(self.clock() + link.beats_every_s, lambda: self._beat(link))
        if link.silent_after_s:
            self.delayed_calls.at(self.clock() + link.silent_after_s, lambda: self._listen(link))

    def _beat(self, link: Link) -> None:
        if self.link is link:
            now = self.clock()
            if now - link.written_at >= link.beats_every_s * 0.9 and not link.out:
                link.beat()
                self.flush()
            self.delayed_calls.at(max(now, link.written_at) + link.beats_every_s, lambda: self._beat(link))

    def _listen(self, link: Link) -> None:
        if self.link is link:
            silent_at = (self.clock() if self.is_full else link.read_at) + link.silent_after_s
            if silent_at <= self.clock():
                self.lost(ConnectionLost(f"nothing has come for {link.silent_after_s:g} seconds"))
            else:
                self.delayed_calls.at(silent_at, lambda: self._listen(link))

    def tick(self) -> None:
        """Do what is due; `timers.next_at` says when that is."""
        self.delayed_calls.run(self.clock())

    # ---- Producers and transactions ----

    def new_producer(self) -> ProducerNumbers:
        return self._free.popleft() if self._free else self.another_producer()

    def another_producer(self) -> ProducerNumbers:
        """One that no broker knows."""
        self._producers += 1
        return ProducerNumbers(f"{self.name}-{self._producers}")

    def free_producer(self, producer: ProducerNumbers) -> None:
        self._free.append(producer)

    # ---- Flows that others are made of ----

    @property
    def is_closed_by_program(self) -> bool:
        return self.is_closing or isinstance(self.error, ClosedError)

    def check_open(self) -> None:
        """Raises: ClosedError; the error that ended the connection"""
        if self.error is not None:
            raise copy_error(self.error)
        if self.is_closing:
            raise ClosedError("the connection is closed")

    def subscribe(self, wanted: Wanted, buffer: Buffer, deadline: float | None) -> Flow[Subscription]:
        """Raises: Refused, ClosedError, TimeoutError; TruenextError that ended the connection"""
        self.check_open()
        subscription = self.subscriptions.add(wanted, buffer)
        try:
            while not (subscription.is_open or subscription.is_closed):
                came = yield Wait(subscription.opened, deadline)
                if not came:
                    raise TimeoutError(f"the broker has not confirmed the subscription to {wanted.destination} in time")
        except BaseException:
            self.subscriptions.unsubscribe(subscription)
            raise
        if subscription.error is not None:
            error = subscription.error
            self.subscriptions.unsubscribe(subscription)
            raise error
        return subscription

    def end_durable(self, name: str, deadline: float | None) -> Flow[None]:
        """End a durable subscription; what waits in it goes."""
        frames.check({"id": name})
        yield from self._confirmed(
            "UNSUBSCRIBE", {"id": name, "activemq.subscriptionName": name, "durable": "true"}, deadline
        )

    def wait_until_up(self, deadline: float | None, what: str) -> Flow[Link]:
        """Raises: TimeoutError if there is no connection in time; whatever ended it for good"""
        while True:
            if self.error is not None:
                raise copy_error(self.error)
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
        ended = Signal()

        def answered(frame: Frame) -> None:
            came.append(frame)
            ended.set()

        def failed(error: Exception) -> None:
            errors.append(error)
            ended.set()

        is_alone = self.questions.are_none
        question = self.questions.send(link, head, body, answered, failed)
        if is_alone:
            self.flush()
        else:
            # Those of one pass of the loop are written together.
            self.flush_soon()
        try:
            in_time = yield Wait(ended, deadline)
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
        """The socket has taken everything, or is gone."""
        drained, self._drained = self._drained, []
        for signal in drained:
            signal.set()

    def _confirmed(self, command: str, headers: dict[str, str], deadline: float | None) -> Flow[None]:
        """Say a frame and wait for its receipt.

        Raises: Refused, ConnectionLost, TimeoutError
        """
        self.check_open()
        link = yield from self.wait_until_up(deadline, f"say {command}")
        asked = Asked()
        link.ask(frames.frame(command, headers | {"receipt": link.receipt}), asked)
        self.flush_soon()
        came = yield Wait(asked.answered, deadline)
        if not came:
            raise TimeoutError(f"the broker has not confirmed {command} in time")
        if asked.error is not None:
            raise asked.error

    # ---- The end ----

    def close(self, deadline: float | None) -> Flow[None]:
        """Take leave: what is held goes back without an attempt, and what was said is confirmed, over reconnects too.

        Raises: nothing that the other side does; what was not confirmed is known to whoever waits for it
        """
        self.is_closing = True
        error = ClosedError("the connection is closed")
        if self.error is not None:
            self.fail(error)
            return
        for subscription in list(self.subscriptions.by_id.values()):
            self.subscriptions.unsubscribe(subscription)
        try:
            if (yield from self.confirm(deadline)):
                self.context.report(NOT_CONFIRMED, {"count": self.send_buffer.open, "url": self.attempts.address.url})
                self.send_buffer.fail(
                    TimeoutError("the connection was closed before the message was confirmed; it may have arrived")
                )
            link = self.link
            if link is not None and link.is_up:
                yield Wait(self._say_disconnect(link), deadline)
        finally:
            self.fail(error)

    def confirm(self, deadline: float | None) -> Flow[int]:
        """Wait until the broker has confirmed all sends. Returns how many it has not confirmed in time."""
        in_time = True
        while in_time and self.send_buffer.open and self.error is None:
            in_time = yield Wait(self.send_buffer.emptied(), deadline)
        return self.send_buffer.open

    @property
    def left_open(self) -> int:
        """Number of sends that are lost if the program ends now: nobody has closed the connection."""
        return 0 if self.error is not None else self.send_buffer.open

    def _say_disconnect(self, link: Link) -> Signal:
        """Set when the broker has confirmed it."""
        headers = {}
        if link.is_truenext:
            doubtful = {
                transaction.producer for transaction in self.transactions if transaction.outcome is Outcome.IN_DOUBT
            }
            names = [each.name for each in self._free if each not in doubtful and each.number]
            if self.send_buffer.producer.number and not self.send_buffer.open:
                names.append(self.send_buffer.producer.name)
            if names:
                headers["truenext-forget"] = msgspec.json.encode(names).decode()
        headers["receipt"] = link.receipt
        asked = Asked()
        link.ask(frames.frame("DISCONNECT", headers), asked)
        self._is_leaving = True
        self.flush()
        return asked.answered


class Asked:
    """A frame that somebody waits for."""

    __slots__ = ("answered", "error")

    def __init__(self) -> None:
        self.answered = Signal()
        self.error: TruenextError | None = None

    def confirmed(self, frame: Frame) -> None:
        self.answered.set()

    def refused(self, error: Refused) -> None:
        self.error = error
        self.answered.set()

    def lost(self) -> None:
        self.error = ConnectionLost("the connection was lost before the broker answered")
        self.answered.set()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


_FINAL = frozenset({Code.LOGIN, Code.NOT_SUPPORTED, Code.IN_USE})
"""Why a login will never do."""

_OUTCOMES = {"committed": Outcome.COMMITTED, "rolled back": Outcome.ROLLED_BACK}
