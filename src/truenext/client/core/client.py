"""State machine of a client: has all state and all decisions of a program's connection, but no socket.

    requests ──flows──▶ Client ──bytes, `data_to_send`──▶ driver, which has the socket
    answers  ◀─signals─        ◀──`receive_data`, `on_connection_lost`, `run_due_calls`──

The driver connects, reads, writes and waits. A `Link` is one TCP connection; the `Client` outlives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeGuard

import msgspec

from truenext.client.core import frames
from truenext.client.core.buffer import ReceiveBuffer, ReceivedMessage, Subscription, SubscriptionOptions
from truenext.client.core.context import (
    CONNECTED_TEXT,
    DRAINING_TEXT,
    NO_SPACE_TEXT,
    NOT_CONFIRMED_TEXT,
    ClientContext,
)
from truenext.client.core.credentials import NO_CREDENTIALS, Credentials, check_login_text
from truenext.client.core.link import ATTEMPT_TIMEOUT_S, FIRST_ROUND_S, AnswerWaiter, ConnectBackoff, Link
from truenext.client.core.pending_requests import PendingRequests, ProducerStatus
from truenext.client.core.reconciler import Reconciler
from truenext.client.core.send_buffer import SendBuffer
from truenext.client.core.subscriptions import Subscriptions
from truenext.client.core.transaction_state import Outcome, ProducerNumbers, TransactionState
from truenext.client.core.waiting import DelayedCall, Flow, Signal, Wait
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
from truenext.model.url import DEFAULT_URL, Address, parse_url
from truenext.wire.stomp.frame import Frame

HEART_BEAT_S_MAX = 24 * 3600
REPORT_INTERVAL_S = 60.0
"""Seconds after a report within which the same problem with the same URL is not reported again."""
NO_ANSWER_HINT = "if its messages are in PostgreSQL, see `truenext store status` and its log"
"""Advice where a broker does not answer: it does not while it waits for PostgreSQL. Source: docs/contract.md, C28.9"""
PROMPT_REFUSAL_MAX_S = 4.0
"""Seconds within which a refusal of a login is final. A later refusal may be due to a slow network or broker."""


class ConnectOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `connect`."""

    addresses: Sequence[Address]
    credentials: Credentials = NO_CREDENTIALS
    client_id: str | None = None
    """Client id, which names this client's durable subscriptions."""
    heart_beat_s: float = 10.0
    """Interval of heart-beats in seconds; 0 disables heart-beats."""
    reconnects: bool = True
    """True: a lost connection is opened again. False: a lost connection stays closed, and the first connection tries
    each address once."""
    heartbeat_thread: bool = False
    """True: a thread sends the heart-beats, so that the connection survives a blocked event loop."""
    opening_timeout_s: float = ATTEMPT_TIMEOUT_S
    """Seconds within which the first connection must be up. Several addresses share the time, so that a host which does
    not answer leaves time for the next one."""

    def __post_init__(self) -> None:
        """Check the client id. Raises: ValueError if CONNECT cannot carry it"""
        check_login_text("client_id", self.client_id)


def connect_options(
    urls: Sequence[str],
    credentials: Mapping[str, str | None],
    *,
    client_id: str | None,
    heart_beat_s: float,
    reconnects: bool,
    timeout_s: float = ATTEMPT_TIMEOUT_S,
    heartbeat_thread: bool = False,
) -> ConnectOptions:
    """Check the arguments of `connect`, and return them as options. `credentials` are the fields of `Credentials`.
    Without a URL the client uses the STOMP port of this machine.

    Raises: ConfigurationError for an invalid URL; ValueError, TypeError for another invalid argument
    """
    for url in urls:
        if not isinstance(url, str):
            raise TypeError(f"a URL must be text, such as {DEFAULT_URL}, not {url!r}")
    for name, value in {**credentials, "client_id": client_id}.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be text, not {type(value).__name__}")
    if not isinstance(heart_beat_s, int | float) or not 0 <= heart_beat_s <= HEART_BEAT_S_MAX:
        raise ValueError(f"heart_beat must be 0 to {HEART_BEAT_S_MAX} seconds, not {heart_beat_s!r}")
    return ConnectOptions(
        addresses=[parse_url(url) for url in urls or (DEFAULT_URL,)],
        credentials=Credentials(**credentials),
        client_id=client_id,
        heart_beat_s=heart_beat_s,
        reconnects=bool(reconnects),
        heartbeat_thread=bool(heartbeat_thread),
        opening_timeout_s=timeout_s,
    )


class BrowseListener(Protocol):
    """Object that gets the messages of a browser."""

    def on_message(self, frame: Frame) -> None: ...

    def on_ended(self, error: Exception) -> None: ...


class FailedAttempt(NamedTuple):
    """Attempt to connect that has failed, or is under way."""

    reason: str
    is_listening: bool = False
    is_refused: bool = False
    """True if the host has refused the connection, so that nothing listens there."""


class Client:
    def __init__(
        self,
        options: ConnectOptions,
        name: str,
        context: ClientContext,
        make_message: type[ReceivedMessage] = ReceivedMessage,
    ) -> None:
        """Make a client. `name` must differ from the names of all other clients: the client's producers are named after
        it. `make_message` is the class of received messages."""
        self.options = options
        self.name = name
        self.context = context
        self.clock, self.delayed_calls = context.clock, context.delayed_calls
        self.flush, self.flush_soon, self.flush_later = context.flush, context.flush_soon, context.flush_later
        self.connect_backoff = ConnectBackoff(options.addresses, context.random)
        self.send_buffer = SendBuffer(name, context, pump_soon=self.pump_soon, on_no_space=self._on_no_space)
        self.pending_requests = PendingRequests()
        self.subscriptions = Subscriptions(context, make_message)
        self.transactions: dict[TransactionState, None] = {}
        """Transactions that are open, or whose outcome is not known."""
        self.up_or_failed = Signal()
        """Signal that is set while a connection is up, and when the client has ended for good."""
        self.is_opening_awaited = False
        """True while `connect` waits for the first connection. `connect` raises a final error, so it is not logged."""
        self.error: TruenextError | None = None
        """Reason why the client opens no more connections; None while it does."""
        self._last_error: Exception | None = None
        """Error of the last failed attempt to connect."""
        self._failures: dict[str, FailedAttempt] = {}
        """Last failed attempt at each URL."""
        self.is_listening = False
        """True if the last attempt to connect has connected a socket, so that a program listens at the address."""
        self.attempt_timeout_s = ATTEMPT_TIMEOUT_S
        """Seconds within which the broker must accept the connection in the current attempt. CONNECTED must follow
        within the same time."""
        self._attempt_started_at = 0.0
        self.is_closing = False
        """True if the program has closed the connection, so that new requests are refused."""
        self._is_disconnect_sent = False
        self.connection_state_since = context.clock()
        """Time at which the connection came up, or was lost."""
        self._failed_connect_count = 0
        """Number of failed attempts to connect since a connection was lost, or since the start."""
        self._unavailable_count = 0
        """Number of failed attempts to connect since the start, or since the last attempt that failed because the
        broker was busy or being drained."""
        self._reported_at: dict[tuple[str, str], float] = {}
        """Time of the last report of a problem, by URL and reason."""
        self.reconnect_count = -1
        self.browse_listeners: dict[str, BrowseListener] = {}
        """Listeners of the browsers of this connection, by subscription."""
        self.is_read_buffer_full = False
        """True if the driver must not read the socket for now, because a browser has enough messages."""
        self._reconciler = Reconciler(context, self.subscriptions, self.pending_requests, self.on_connection_lost)
        self._last_link_number = 0
        self._takeover_secret = ""
        self._accepts_control_only = True
        """False once a broker has refused a frame because it is being drained. Then the client uses no connection that
        may only send control requests, but waits for the end of the drain, or for another broker."""
        self._is_login_forgotten = False
        self._last_store_id = ""
        self._is_pump_due = False
        self._free_producers: deque[ProducerNumbers] = deque()
        """Producers of ended sessions, which new sessions use again."""
        self._producer_count = 0
        self._drain_waiters: list[Signal] = []
        self._login_timer: DelayedCall | None = None

    @property
    def link(self) -> Link | None:
        """Current connection to a broker, logged in or about to log in."""
        return self.context.link

    # ---- The connection ----

    @property
    def current_url(self) -> str:
        return self.connect_backoff.current_address.url

    def start_attempt(self) -> None:
        """Start an attempt to connect to the current address: set `attempt_timeout_s`."""
        self.is_listening = False
        self._attempt_started_at = self.clock()
        opening_s = self.options.opening_timeout_s
        if self.options.reconnects:
            first_round_s = FIRST_ROUND_S if self.reconnect_count >= 0 else min(opening_s, FIRST_ROUND_S)
            self.attempt_timeout_s = self.connect_backoff.attempt_timeout_s(first_round_s)
        else:
            # There is no second round: addresses that are still to be tried share all the time that is left.
            left_s = max(0.0, self.connection_state_since + opening_s - self.clock())
            untried_count = self.connect_backoff.untried_count
            # The caller's own deadline ends the attempt at the last address.
            self.attempt_timeout_s = left_s / untried_count if untried_count > 1 else max(left_s, ATTEMPT_TIMEOUT_S)

    def on_connect_failed(self, error: Exception) -> None:
        """Count and report a failed attempt to connect."""
        url, reason = self.current_url, _error_text(error)
        self.connect_backoff.on_connect_failed()
        self._last_error = error
        self._failures[url] = FailedAttempt(reason, self.is_listening, isinstance(error, ConnectionRefusedError))
        self._failed_connect_count += 1
        self._unavailable_count = 0 if _is_passing(error) else self._unavailable_count + 1
        if not self.options.reconnects and self._unavailable_count >= len(self.options.addresses):
            self.fail_permanently(self.no_broker_error(self.attempt_timeout_s))
        elif self.error is None or not self.is_opening_awaited:
            text = DRAINING_TEXT if _is_drain(error) else "cannot connect to %(url)s: %(error)s"
            self._report_seldom(text, url, reason, attempts=self._failed_connect_count)

    def _on_no_space(self, error: Refused) -> None:
        self._report_seldom(NO_SPACE_TEXT, self.current_url, str(error))

    def _report_seldom(self, text: str, url: str, reason: str, **fields: object) -> None:
        """Report a problem, unless the same problem was reported less than `REPORT_INTERVAL_S` ago."""
        now = self.clock()
        reported_at = self._reported_at.get((url, reason))
        if reported_at is None or now - reported_at >= REPORT_INTERVAL_S:
            self._reported_at[url, reason] = now
            self.context.report(text, {"url": url, "error": reason, **fields})

    def no_broker_error(self, waited_s: float) -> NoBroker | Refused:
        """Make the error that names the URLs and says why no connection was opened. If the last broker was busy or
        being drained, return the broker's own refusal."""
        last = self._last_error
        if isinstance(last, Refused) and _is_passing(last):
            return Refused(str(last), last.code)
        under_way = self._no_answer(min(waited_s, self.clock() - self._attempt_started_at))
        failures = dict.fromkeys((each.url for each in self.options.addresses), FailedAttempt(_NOT_TRIED_TEXT))
        failures |= {self.current_url: FailedAttempt(under_way, self.is_listening)} | self._failures
        error = NoBroker(f"no broker at {_join_reasons({url: each.reason for url, each in failures.items()})}")
        error.is_listening = any(each.is_listening for each in failures.values())
        error.is_refused = all(each.is_refused for each in failures.values())
        return error

    def attempt_timeout_error(self) -> TimeoutError:
        return TimeoutError(self._no_answer(self.attempt_timeout_s))

    def _no_answer(self, waited_s: float) -> str:
        waited_s = round(waited_s, 1)
        if self.is_listening:
            answer = f"has not answered as a STOMP broker within {waited_s:g} s: check the port"
            return f"a program listens there, but {answer}, or, {NO_ANSWER_HINT}"
        return f"the host has not answered within {waited_s:g} s: check that the broker runs, and host and port"

    @property
    def _urls(self) -> str:
        return ", ".join(each.url for each in self.options.addresses)

    def on_socket_connected(self, address: Address, password: str | None = None) -> None:
        """Send CONNECT on a new socket. `password` may come from the password file, which the driver reads."""
        self._last_link_number += 1
        now = self.clock()
        self.context.link = link = Link(
            self._last_link_number,
            self.options.heart_beat_s,
            now,
            on_frame=self._on_frame,
            accepts_control_only=self._accepts_control_only,
        )
        headers = {"host": address.host, **self.options.credentials.headers(password)}
        if self.options.client_id is not None:
            headers["client-id"] = self.options.client_id
        headers["truenext-client"] = str(link.number)
        if self._takeover_secret:
            headers["truenext-secret"] = self._takeover_secret
        link.send_connect(headers)
        timeout_s = self.attempt_timeout_s
        self._login_timer = self.context.call_later(timeout_s, lambda: self._check_login_time(link))
        self.flush()

    def _check_login_time(self, link: Link) -> None:
        if self.link is link and not link.is_up:
            self.on_connection_lost(ConnectionLost(self._no_answer(self.attempt_timeout_s)))

    @property
    def passing_refusal(self) -> Refused | None:
        """Refusal for which sends wait: the broker has no space, or is being drained. None if they wait for another
        reason."""
        if _is_drain(self._last_error) and not (self.link is not None and self.link.is_up):
            return self._last_error
        return self.send_buffer.no_space_error

    def pump_soon(self) -> None:
        """Make the driver write waiting sends soon. All sends of one pass of the loop are written together, and share a
        receipt."""
        self._is_pump_due = True
        self.flush_soon()

    def data_to_send(self) -> list[bytes]:
        """Remove and return the bytes that the driver must write."""
        link = self.link
        if self._is_pump_due:
            self._is_pump_due = False
            self.send_buffer.pump()
        if link is None:
            return []
        out, link.out_chunks = link.out_chunks, []
        if out:
            link.written_at = self.clock()
        return out

    def receive_data(self, data: bytes) -> None:
        """Handle received bytes. An error in the bytes ends the connection."""
        link = self.link
        if link is None:
            return
        try:
            link.receive_data(data, self.clock())
        except Refused as error:
            self._on_refused(error, link)
        except RemoteProtocolError as error:
            is_explained = link.is_up or isinstance(error, OtherProtocolError)
            self.on_connection_lost(
                error if is_explained else RemoteProtocolError(f"the server does not speak STOMP 1.2: {error}")
            )
        except TruenextError as error:
            self.on_connection_lost(error)

    def _on_refused(self, error: Refused, link: Link) -> None:
        if error.code == Code.STALE:
            # The broker knows a later connection of this client: log in without taking one over.
            self._takeover_secret = ""
        elif (
            not link.is_up
            and self._is_refusal_final(error.code)
            and self.clock() - link.started_at < PROMPT_REFUSAL_MAX_S
        ):
            self.fail_permanently(error)
            return
        if link.is_refused_by_drain:
            self._accepts_control_only = False
        is_own_text = link.is_refused_by_drain or (not link.is_up and _is_passing(error))
        self.on_connection_lost(error if is_own_text else ConnectionLost(f"the broker ended the connection: {error}"))

    def _is_refusal_final(self, code: str) -> bool:
        """Return whether later logins would be refused, too. A broker other than truenext sends no code, and may refuse
        a login for the only reason that it still has the lost connection. So a refusal without a code is final only if
        no login has succeeded before."""
        return code in _FINAL_REFUSAL_CODES or (not code and self.reconnect_count < 0)

    def on_connection_lost(self, error: Exception) -> None:
        """End the current connection. The driver notices the change of `link`."""
        link, self.context.link = self.context.link, None
        if link is None:
            return
        if self._login_timer is not None:
            self._login_timer.cancel()
        if link.is_up:
            now = self.clock()
            self.connect_backoff.on_connection_lost(now - self.connection_state_since)
            self.connection_state_since = now
            self._failed_connect_count = 0
            self._reported_at.clear()
            self.up_or_failed = Signal()
            if not (self.is_closing or isinstance(error, ClosedError)):
                fields = {"url": self.current_url, "error": _error_text(error), "connection": link.number}
                self.context.report("connection lost to %(url)s: %(error)s", fields)
        elif not isinstance(error, ClosedError):
            self.on_connect_failed(error)
        cause = ConnectionLost(f"the connection was lost: {error}")
        self.subscriptions.on_connection_lost(link, self.transactions, was_up=link.is_up)
        link.mark_unanswered_lost()
        self.send_buffer.on_link_ended()
        for transaction in list(self.transactions):
            if transaction.link_number == link.number:
                transaction.mark_rollback_only(cause)
        self.pending_requests.on_connection_lost(cause)
        for listener in list(self.browse_listeners.values()):
            listener.on_ended(error)
        self.on_drained()
        for subscription in list(self.subscriptions.by_id.values()):
            subscription.buffer.wake_all()
        is_refusal_passing = link.is_refused_by_drain and not self._is_login_forgotten
        is_last = link.is_up and not self.options.reconnects and not is_refusal_passing
        if (self._is_disconnect_sent or is_last) and self.error is None:
            final_error: TruenextError = cause
            if self.is_closing:
                # The broker closes the connection after it has confirmed DISCONNECT: this is no failure.
                final_error = ClosedError(_CLOSED_TEXT)
                final_error.__cause__ = cause
            self.fail_permanently(final_error)

    def forget_login(self) -> None:
        """Drop user and password: the connection stays, and is not opened again once it is lost."""
        options, names = self.options, replace(self.options.credentials, user=None, password=None, password_file=None)
        self.options = msgspec.structs.replace(options, credentials=names, reconnects=False)
        self._is_login_forgotten = True

    def fail_permanently(self, error: TruenextError) -> None:
        """End the client with `error`; no more connections are opened."""
        if self.error is None:
            self.error = error
        self.on_connection_lost(error)
        self.up_or_failed.set()
        self.send_buffer.fail_all(self.error)
        self.pending_requests.on_connection_lost(self.error)
        for subscription in self.subscriptions.by_id.values():
            subscription.end(self.error)
            subscription.buffer.wake_all()
        for transaction in list(self.transactions):
            transaction.mark_rollback_only(ConnectionLost(str(self.error)))
            if transaction.outcome in (Outcome.IN_DOUBT, Outcome.COMMITTING):
                transaction.outcome = Outcome.IN_DOUBT
                transaction.resolved.set()

    def _on_frame(self, frame: Frame) -> None:
        if frame.command == "MESSAGE":
            # If the subscription has ended, the message is ignored: the end of the subscription has released it.
            if not self.subscriptions.on_message(frame):
                listener = self.browse_listeners.get(frame.headers.get("subscription", ""))
                if listener is not None:
                    listener.on_message(frame)
                else:
                    self.pending_requests.on_message(frame)
        else:
            self._on_connected(frame)

    @property
    def store_id(self) -> str:
        """Identity of the broker's data (`truenext-store`) at the last login; empty if the broker sends none."""
        return self._last_store_id

    def _on_connected(self, frame: Frame) -> None:
        link = self.link
        assert link is not None, "it has just spoken"
        if self._login_timer is not None:
            self._login_timer.cancel()
        self._accepts_control_only = True
        self.reconnect_count += 1
        now = self.clock()
        downtime_s, self.connection_state_since = now - self.connection_state_since, now
        self._takeover_secret = frame.headers.get("truenext-secret", "")
        is_other_store = self._last_store_id not in ("", link.store_id)
        self._last_store_id = link.store_id
        fields: dict[str, object] = {"url": self.current_url, "session": link.session_id, "server": link.server_name}
        if self.reconnect_count or self._failed_connect_count:
            self.context.report(
                "connected to %(url)s, after %(seconds)s s, in attempt %(attempts)s",
                {
                    **fields,
                    "seconds": round(downtime_s, 1),
                    "attempts": self._failed_connect_count + 1,
                    "reconnects": self.reconnect_count,
                },
            )
        else:
            self.context.report(CONNECTED_TEXT, fields)
        if self.reconnect_count and (is_other_store or not link.is_truenext):
            self.send_buffer.fail_interrupted(
                ConnectionLost(
                    "the connection was lost, and the client is now connected to another broker; the message may "
                    "have arrived"
                )
            )
            # A new producer: after a return to the first broker, numbers used here would count as repeats.
            self.send_buffer.producer = self.make_producer()
        self.subscriptions.on_connected()
        self._start_heart_beats(link)
        self.is_opening_awaited = False
        self.up_or_failed.set()
        self.send_buffer.uses_producer_numbers = link.is_truenext
        if link.is_truenext and self.send_buffer.producer.last_number:
            self._request_highest_number(link)
        else:
            self.send_buffer.start_on_link(link, 0)
        for transaction in list(self.transactions):
            if transaction.outcome is Outcome.IN_DOUBT:
                self.request_commit_outcome(transaction)
        self._reconciler.start_checks(link)
        self.flush_soon()

    def _request_highest_number(self, link: Link) -> None:
        def on_reply(status: ProducerStatus) -> None:
            if self.link is link:
                self.send_buffer.start_on_link(link, status.sends)
                self.flush_soon()

        self.pending_requests.send_control_request(
            link, "producer", {"producer": self.send_buffer.producer.name}, ProducerStatus, on_reply
        )

    def request_commit_outcome(self, transaction: TransactionState) -> None:
        """Ask the broker for the outcome of a COMMIT in doubt. If the broker has not executed the COMMIT before it gets
        this request, it never executes the COMMIT."""
        producer = transaction.producer
        link = self.link
        if link is None or not link.is_up:
            return
        if producer is None or not link.is_truenext or producer.store_id != link.store_id:
            transaction.resolve(
                Outcome.UNKNOWN,
                ConnectionLost("the outcome is not known: the client is now connected to another broker"),
            )
            return

        def on_reply(status: ProducerStatus) -> None:
            if transaction.outcome is Outcome.IN_DOUBT:
                outcome = _OUTCOMES.get(status.outcome or "", Outcome.UNKNOWN)
                is_crash = (
                    producer.set_last_number(status.commits, link.number)
                    and transaction.commit_number > status.commits + 1
                )
                if is_crash and transaction.is_durable and status.outcome == "not so far":
                    # The broker has crashed and forgotten numbers before this one, of transactions without persistent
                    # messages. This transaction had some: if it had been committed, the broker would know. It cannot be
                    # committed any more.
                    outcome = Outcome.ROLLED_BACK
                transaction.resolve(outcome, ConnectionLost("the connection was lost during the commit"))

        arguments = {"producer": producer.name, "commit": transaction.commit_number, "resolve": True}
        self.pending_requests.send_control_request(link, "producer", arguments, ProducerStatus, on_reply)

    # ---- Heart-beats ----

    def _start_heart_beats(self, link: Link) -> None:
        if link.heartbeat_interval_s:
            self.context.call_later(link.heartbeat_interval_s, lambda: self._send_heart_beat_if_due(link))
        if link.silence_limit_s:
            self.context.call_later(link.silence_limit_s, lambda: self._check_silence(link))

    def _send_heart_beat_if_due(self, link: Link) -> None:
        if self.link is link:
            now = self.clock()
            if now - link.written_at >= link.heartbeat_interval_s * 0.9 and not link.out_chunks:
                link.write_heart_beat()
                self.flush()
            self.delayed_calls.call_at(
                max(now, link.written_at) + link.heartbeat_interval_s, lambda: self._send_heart_beat_if_due(link)
            )

    def _check_silence(self, link: Link) -> None:
        if self.link is link:
            silent_at = (self.clock() if self.is_read_buffer_full else link.read_at) + link.silence_limit_s
            if silent_at <= self.clock():
                self.on_connection_lost(ConnectionLost(f"the broker has sent nothing for {link.silence_limit_s:g} s"))
                # The machine may have no power: another address answers sooner.
                self.connect_backoff.skip_address()
            else:
                self.delayed_calls.call_at(silent_at, lambda: self._check_silence(link))

    def run_due_calls(self) -> None:
        """Run the delayed calls that are due. The driver calls this at the time that `delayed_calls.next_due_at`
        gives."""
        self.delayed_calls.run_due(self.clock())

    # ---- Producers and transactions ----

    def acquire_producer(self) -> ProducerNumbers:
        return self._free_producers.popleft() if self._free_producers else self.make_producer()

    def make_producer(self) -> ProducerNumbers:
        """Make a producer under a new name."""
        self._producer_count += 1
        return ProducerNumbers(f"{self.name}-{self._producer_count}")

    def free_producer(self, producer: ProducerNumbers) -> None:
        self._free_producers.append(producer)

    # ---- Flows used by other flows ----

    @property
    def is_closed_by_program(self) -> bool:
        return self.is_closing or isinstance(self.error, ClosedError)

    def check_open(self) -> None:
        """Check that the connection is not closed. Raises: ClosedError if the program has closed the connection;
        otherwise the error that ended the connection for good"""
        if self.error is not None:
            raise copy_error(self.error)
        if self.is_closing:
            raise ClosedError(_CLOSED_TEXT)

    def subscribe(
        self, options: SubscriptionOptions, buffer: ReceiveBuffer, deadline: float | None
    ) -> Flow[Subscription]:
        """Subscribe, and wait until the broker has confirmed the subscription.

        Raises: Refused if the broker refuses the subscription; TimeoutError at the deadline; ClosedError if the
        connection is closed; the error that ended the connection for good
        """
        self.check_open()
        subscription = self.subscriptions.add(options, buffer)
        try:
            while not (subscription.is_open or subscription.is_closed):
                in_time = yield Wait(subscription.opened, deadline)
                if not in_time:
                    raise TimeoutError(
                        f"the broker has not confirmed the subscription to {options.destination} in time"
                    )
        except BaseException:
            self.subscriptions.unsubscribe(subscription)
            raise
        if subscription.error is not None:
            error = subscription.error
            self.subscriptions.unsubscribe(subscription)
            raise error
        return subscription

    def end_durable_subscription(self, name: str, deadline: float | None) -> Flow[None]:
        """End a durable subscription, whose messages the broker deletes.

        Raises: Refused if the broker refuses it; ConnectionLost before the broker's answer; TimeoutError at the
        deadline
        """
        frames.check_headers({"id": name})
        self.check_open()
        link = yield from self.wait_until_up(deadline, "send UNSUBSCRIBE")
        headers = {"id": name, "activemq.subscriptionName": name, "durable": "true", "receipt": link.next_receipt_id}
        waiter = AnswerWaiter()
        link.write_tracked(frames.encode_frame("UNSUBSCRIBE", headers), waiter)
        self.flush_soon()
        in_time = yield Wait(waiter.answered, deadline)
        if not in_time:
            raise TimeoutError(f"the broker has not confirmed in time that durable subscription {name!r} has ended")
        if waiter.error is not None:
            raise waiter.error

    def wait_until_up(self, deadline: float | None, purpose: str) -> Flow[Link]:
        """Wait for a connection. Raises: TimeoutError at the deadline; the error that ended the connection for good"""
        while True:
            if self.error is not None:
                raise copy_error(self.error)
            link = self.link
            if link is not None and link.is_up:
                return link
            in_time = yield Wait(self.up_or_failed, deadline)
            if not in_time:
                raise TimeoutError(
                    f"there was no connection to {self._urls} in time to {purpose}: check that the broker runs, or "
                    "wait longer"
                )

    def send_request(self, head: bytes, body: bytes, deadline: float | None, timeout_text: str = "") -> Flow[Frame]:
        """Send a message, and return the reply. `head` is the beginning of the frame, command included.

        Raises: Refused if the broker refuses the message; ConnectionLost before the reply; TimeoutError with
        `timeout_text` at the deadline
        """
        self.check_open()
        link = yield from self.wait_until_up(deadline, "send a request")
        replies: list[Frame] = []
        errors: list[Exception] = []
        ended = Signal()

        def on_reply(frame: Frame) -> None:
            replies.append(frame)
            ended.set()

        def on_failure(error: Exception) -> None:
            errors.append(error)
            ended.set()

        is_alone = self.pending_requests.is_empty
        correlation = self.pending_requests.send_request(link, head, body, on_reply, on_failure)
        if is_alone:
            self.flush()
        else:
            # Requests of one pass of the loop are written together.
            self.flush_soon()
        try:
            in_time = yield Wait(ended, deadline)
        finally:
            self.pending_requests.forget_request(correlation)
        if errors:
            raise errors[0]
        if not in_time:
            raise TimeoutError(timeout_text)
        return replies[0]

    def wait_until_written(self, deadline: float | None = None) -> Flow[bool]:
        """Wait until the socket has accepted all frames written so far, or the link is lost. Return False at the
        deadline."""
        while self.link is not None and not self.flush():
            signal = Signal()
            self._drain_waiters.append(signal)
            in_time = yield Wait(signal, deadline)
            if not in_time:
                return False
        return True

    def on_drained(self) -> None:
        """Wake the callers of `wait_until_written`, because the socket has accepted all bytes, or is closed."""
        waiters, self._drain_waiters = self._drain_waiters, []
        for signal in waiters:
            signal.set()

    # ---- The end ----

    def close(self, deadline: float | None) -> Flow[None]:
        """Release held messages without an attempt, wait until all sends are confirmed, and disconnect. If the
        connection is lost meanwhile, the wait continues on the next connection. Sends that are not confirmed by the
        deadline fail with TimeoutError. If this call is interrupted, unconfirmed sends fail with ClosedError. Errors of
        the broker are not raised.
        """
        self.is_closing = True
        error = ClosedError(_CLOSED_TEXT)
        if self.error is not None:
            self.fail_permanently(error)
            return
        for subscription in list(self.subscriptions.by_id.values()):
            self.subscriptions.unsubscribe(subscription)
        try:
            if (yield from self.wait_until_confirmed(deadline)):
                values = {"count": self.send_buffer.unconfirmed_count, "url": self.current_url}
                self.context.report(NOT_CONFIRMED_TEXT, values)
                self.send_buffer.fail_all(
                    TimeoutError("the connection was closed before the message was confirmed; it may have arrived")
                )
            link = self.link
            if link is not None and link.is_up:
                yield Wait(self._send_disconnect(link), deadline)
        finally:
            self.fail_permanently(error)

    def wait_until_confirmed(self, deadline: float | None) -> Flow[int]:
        """Wait until the broker has confirmed all sends. Return how many are not confirmed at the deadline."""
        in_time = True
        while in_time and self.send_buffer.unconfirmed_count and self.error is None:
            in_time = yield Wait(self.send_buffer.empty_signal(), deadline)
        return self.send_buffer.unconfirmed_count

    @property
    def unconfirmed_count(self) -> int:
        """Number of sends that may be lost if the program ends now without closing the connection."""
        return 0 if self.error is not None else self.send_buffer.unconfirmed_count

    def _send_disconnect(self, link: Link) -> Signal:
        """Send DISCONNECT, with the names of producers that the broker may forget. The returned signal is set when the
        broker has confirmed the DISCONNECT."""
        headers = {}
        if link.is_truenext:
            in_doubt = {
                transaction.producer for transaction in self.transactions if transaction.outcome is Outcome.IN_DOUBT
            }
            names = [each.name for each in self._free_producers if each not in in_doubt and each.last_number]
            if self.send_buffer.producer.last_number and not self.send_buffer.unconfirmed_count:
                names.append(self.send_buffer.producer.name)
            if names:
                headers["truenext-forget"] = msgspec.json.encode(names).decode()
        headers["receipt"] = link.next_receipt_id
        waiter = AnswerWaiter()
        link.write_tracked(frames.encode_frame("DISCONNECT", headers), waiter)
        self._is_disconnect_sent = True
        self.flush()
        return waiter.answered


def _is_drain(error: Exception | None) -> TypeGuard[Refused]:
    return isinstance(error, Refused) and error.code == Code.DRAINING


def _is_passing(error: Exception) -> bool:
    """Return whether the broker refuses a login for the moment only, and can answer."""
    return _is_drain(error) or (isinstance(error, Refused) and error.code == Code.BUSY)


def _error_text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _join_reasons(reasons: Mapping[str, str]) -> str:
    """Join URLs, each with a reason. A reason that all have is written once."""
    if len(set(reasons.values())) == 1:
        return f"{', '.join(reasons)}: {next(iter(reasons.values()))}"
    return "; at ".join(f"{url}: {reason}" for url, reason in reasons.items())


_CLOSED_TEXT = "the connection is closed: open a new connection"
_NOT_TRIED_TEXT = "was not tried in time: wait longer"
_FINAL_REFUSAL_CODES = frozenset({Code.LOGIN, Code.NOT_SUPPORTED, Code.IN_USE})
"""Codes of refusals after which every later login would be refused, too."""

_OUTCOMES = {"committed": Outcome.COMMITTED, "rolled back": Outcome.ROLLED_BACK}
