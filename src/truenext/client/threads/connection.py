"""truenext for threads: `truenext.blocking`.

`make generate` makes this file of client/tasks/connection.py: change that.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from threading import current_thread
from types import TracebackType
from typing import Self, Unpack, cast

from truenext.client.core import flows
from truenext.client.core.buffer import ReceiveBuffer, ReceivedMessage, Subscription
from truenext.client.core.client import ConnectOptions, connect_options
from truenext.client.core.disposition import ACKED, CountedAttempts, Disposition
from truenext.client.core.flows import CLOSE_TIMEOUT_S, DEFAULT_TIMEOUT_S
from truenext.client.core.health import Health
from truenext.client.core.message import Content
from truenext.client.core.queue_browser import QueueBrowser
from truenext.client.core.send_buffer import PendingSend, SendBatch
from truenext.client.core.send_flows import (
    await_capacity,
    await_confirmed,
    check_confirmed,
    prepare_message,
    prepare_send,
    send,
    try_enqueue,
)
from truenext.client.core.send_options import Outgoing, SendOptions, encode_body
from truenext.client.core.session import SessionCore as CoreSession
from truenext.client.core.subscriptions import ConsumerOptions, parse_consumer_options
from truenext.client.core.transaction_state import Outcome
from truenext.client.threads.driver import Driver
from truenext.client.threads.handlers import Handlers
from truenext.clock import monotonic
from truenext.errors import ClosedError, InDoubt


def connect(
    *urls: str,
    user: str | None = None,
    password: str | None = None,
    client_id: str | None = None,
    heart_beat: float = 10.0,
    reconnect: bool = True,
    timeout: float = CLOSE_TIMEOUT_S,
) -> Connection:
    """Connect to a broker, stomp://127.0.0.1:61613 unless told, or to the first of several that is there.
    `with` closes the connection.

    What is lost is connected anew, for as long as it takes; without `reconnect` that is the end, and so is it if nobody
    is there at first. `client_id` names this client for durable subscriptions.
    Within two `heart_beat`s (seconds; 0 is none) each side sees that the other has gone. `timeout` is for the first
    connection, in seconds.

    Raises: ConfigurationError if a URL is none; ValueError, TypeError; ConnectionLost if no broker is there in time;
    Refused, such as for wrong credentials
    """
    options = connect_options(
        urls,
        user=user,
        password=password,
        client_id=client_id,
        heart_beat_s=heart_beat,
        reconnects=reconnect,
    )

    connection = Connection(options)
    connection._open(timeout)
    return connection


class Message(ReceivedMessage):
    """A message that a consumer was handed."""

    __slots__ = ("_session",)
    _session: _SessionWithDriver

    def ack(self) -> None:
        """It was handled. If the connection is lost before the broker knows, and the message comes again here, it is
        acknowledged again and not handed out.

        Raises: LocalProtocolError if something was said of it already, or it belongs to a transaction
        """
        self._settle(ACKED)

    def nack(self, *, delay: float | None = None, cause: str = "") -> None:
        """It has failed, which counts as an attempt: it is tried again, at once or after so many seconds. A transaction
        that has it and has not acknowledged it (`ack="commit"`) is rolled back, and charges nobody else.

        `cause` says why, to whoever looks at it later: `first_cause` and `last_cause` of the message, and of its dead
        letter. Of a text of more than 4096 bytes of UTF-8 only the beginning is said, whole characters; another broker
        is told nothing.

        Raises: LocalProtocolError if something was said of it already, or a transaction has acknowledged it;
        RolledBack if another task has ended its transaction; ValueError, TypeError
        """
        self._settle(flows.failed_disposition(delay, cause))

    def reject(self, *, cause: str = "") -> None:
        """It will never do: it is a dead letter from now on. Of `cause` and of its transaction as `nack`.

        Raises: as `nack`
        """
        self._settle(flows.rejected_disposition(cause))

    def release(self) -> None:
        """It was not handled, and nobody has failed: it returns without an attempt. A transaction that has it and has
        not acknowledged it (`ack="commit"`) is rolled back. Nothing happens if something was said of it already, or a
        transaction has acknowledged it."""
        source = self._session
        owner = current_thread()
        source.driver.run_flow(flows.release(source.core, self, owner))

    def _settle(self, disposition: Disposition) -> None:
        core, driver = self._session.core, self._session.driver
        owner = None if self.transaction is None else current_thread()
        if not driver.run_step(core.settle, self, disposition, owner):
            driver.run_flow(core.client.wait_until_written())

    def process(self) -> Processing:
        """`with message.process():` says what became of it: acknowledged at the end of the block, failed by an
        exception, given back without an attempt by a cancellation or Ctrl-C, or if the connection was lost. In a
        transaction an exception names this message as the one that failed."""
        return Processing(self)


class Processing:
    """The block of `Message.process`."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def __enter__(self) -> Message:
        return self._message

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        source = self._message._session
        if os.getpid() == source.driver.process_id:
            source.driver.exit_block(flows.end_message_block(source.core, self._message, error), error)


class _SessionWithDriver:
    """What hands out messages: a session and its driver."""

    __slots__ = ("core", "driver")

    def __init__(self, core: CoreSession, driver: Driver) -> None:
        self.core = core
        self.driver = driver

    def receive(self, subscription: Subscription | None, count: int, timeout: float | None) -> list[Message]:
        core, driver = self.core, self.driver

        def on_interrupted(messages: list[ReceivedMessage]) -> None:
            core.on_receive_interrupted(subscription, messages)

        flow = flows.receive(core, subscription, count, timeout, current_thread())
        messages = cast("list[Message]", driver.run_flow(flow, on_interrupted))
        for message in messages:
            message._session = self
        return messages


class Consumer:
    """Messages of one destination, the true next first."""

    def __init__(self, source: _SessionWithDriver, subscription: Subscription, *, owns_session: bool) -> None:
        self._source = source
        self._core = source.core
        self._driver = source.driver
        self._subscription = subscription
        self._owns_session = owns_session

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None if none comes within `timeout` seconds. 0 asks what there is at this moment.

        Raises: RolledBack in a transaction that was ended from elsewhere; Refused if the broker has ended the
        subscription; ClosedError
        """
        message = self._try_receive()
        if message is None:
            messages = self._source.receive(self._subscription, 1, timeout)
            return messages[0] if messages else None
        return message

    def receive_many(self, count: int, timeout: float | None = None) -> list[Message]:
        """Up to `count` messages that are here; waits for the first, `timeout` seconds at most. A message that has
        failed before comes alone, so that no neighbour is charged with it again.

        Raises: as `receive`
        """
        return self._source.receive(self._subscription, count, timeout)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        message = self._try_receive()
        if message is None:
            try:
                messages = self._source.receive(self._subscription, 1, None)
            except ClosedError:
                if self._core.has_program_closed(self._subscription):
                    raise StopIteration from None
                raise
            if not messages:
                raise StopIteration
            message = messages[0]
        return message

    def _try_receive(self) -> Message | None:
        driver = self._driver
        received = driver.try_receive(self._core, self._subscription, current_thread())
        if received is None:
            return None
        message = cast("Message", received)
        message._session = self._source
        return message

    def pause(self) -> None:
        """Take nothing until `resume`: what is buffered goes back to others."""
        self._driver.run_step(self._core.client.subscriptions.pause, self._subscription)

    def resume(self) -> None:
        """Go on."""
        self._driver.run_step(self._core.client.subscriptions.resume, self._subscription)

    def close(self) -> None:
        """What was handed out and not settled goes back without an attempt, and so does what is buffered."""
        # In a finalizer at the end of the program, such as `__del__`, nothing is left to close.
        if not sys.is_finalizing():
            owner = current_thread()
            flow = flows.close_consumer(self._core, self._subscription, owner, owns_session=self._owns_session)
            self._driver.run_flow(flow)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self._driver.process_id:
            owner = current_thread()
            flow = flows.end_consumer_block(
                self._core, self._subscription, owner, error, owns_session=self._owns_session
            )
            self._driver.exit_block(flow, error)


class Transaction:
    """The block of `Session.transaction`: all of it happens, or nothing."""

    def __init__(self, source: _SessionWithDriver, timeout: float) -> None:
        """Only by `Session.transaction`."""
        self._driver = source.driver
        self._block = flows.TransactionBlock(source.core, timeout)

    @property
    def outcome(self) -> Outcome:
        """What became of it, also if the block was interrupted while it was committed."""
        return self._block.outcome

    @property
    def token(self) -> str:
        """The token for `Connection.outcome` while the outcome is not known after the end of the block, as that of
        `InDoubt`; empty otherwise."""
        return self._block.token

    def mark_failed(self, message: Message) -> None:
        """Name the message that made it fail: it alone is charged with an attempt.

        Raises: LocalProtocolError if the message is not one of the transaction's, or outside the block
        """
        self._driver.run_step(self._block.mark_failed, message)

    def __enter__(self) -> Self:
        self._driver.run_step(self._block.enter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self._driver.process_id:
            owner = current_thread()
            self._driver.exit_block(self._block.exit(error, owner), error)


class Session:
    """Consumers that share one buffer, in one order; if it is transacted, one transaction after the other."""

    def __init__(self, connection: Connection, core: CoreSession) -> None:
        self._connection = connection
        self._source = _SessionWithDriver(core, connection._driver)

    def consumer(self, destination: str, **options: Unpack[ConsumerOptions]) -> Consumer:
        """Take messages of a destination. `with` closes the consumer.

        Raises: Refused, TimeoutError, ValueError
        """
        parsed = parse_consumer_options(destination, options)

        subscription = self._source.driver.run_flow(flows.subscribe(self._source.core, parsed))
        return Consumer(self._source, subscription, owns_session=False)

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message of all consumers, as `Consumer.receive`."""
        messages = self.receive_many(1, timeout)
        return messages[0] if messages else None

    def receive_many(self, count: int, timeout: float | None = None) -> list[Message]:
        """The next messages of all consumers, as `Consumer.receive_many`."""
        return self._source.receive(None, count, timeout)

    def send(
        self, destination: str, body: bytes | str, *, timeout: float = DEFAULT_TIMEOUT_S, **options: Unpack[SendOptions]
    ) -> None:
        """Send a message; in a transacted session with its transaction, whose commit says whether the broker took it.

        Raises: RolledBack if the transaction was ended from elsewhere; otherwise as `Connection.send`
        """
        core, driver = self._source.core, self._source.driver
        if core.transactions is None:
            self._connection.send(destination, body, timeout=timeout, **options)
            return
        encoded = flows.encode_send_in_transaction(destination, options)
        data = encode_body(body)
        owner = current_thread()
        if not driver.run_step_of_many(core.try_send, encoded.head, data, encoded.ttl_s, owner):
            driver.run_flow(core.send(encoded.head, data, encoded.ttl_s, monotonic() + timeout, owner))

    def reply(self, message: Content, body: bytes | str, **options: Unpack[SendOptions]) -> None:
        """Answer a request, as `send`."""
        self.send(*flows.reply_destination(message), body, **(flows.reply_options(message) | options))

    def transaction(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> Transaction:
        """`with session.transaction():` commits at the end of the block, and rolls back if it raises. Of what
        failed says `Message.process` or `Transaction.mark_failed`; if nothing does, all messages of it have.

        Raises: RolledBack, InDoubt at its end
        """
        return Transaction(self._source, timeout)

    def flush(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until the broker has taken all that was sent in the open transaction. What it refuses of that is known
        then, and not at the commit only. None of it is visible or durable before the commit.

        Raises: RolledBack, whose cause says what was refused, or that the connection was lost; TimeoutError, and the
        transaction is still open; LocalProtocolError if the session is not transacted
        """
        driver = self._source.driver
        driver.run_flow(self._source.core.flush(monotonic() + timeout))

    def commit(self, *, timeout: float = DEFAULT_TIMEOUT_S, producer: str | None = None, number: int = 0) -> bool:
        """All of it happens, or nothing. Returns once it is durable.

        With a `producer` and a `number` of the program's own, of which the first is 1 and each next one more, it
        happens once, whoever commits under that number and however often. Returns False if the number was used
        already: then nothing of it has happened now, and what it was given comes again, without an attempt.

        Raises: RolledBack if nothing of it happened, also if the number is too far on; InDoubt if that could not be
        found out within `timeout` seconds, and with a number as soon as the connection is lost: say it once more;
        ValueError, LocalProtocolError if the number can be none, or there is nothing in it
        """
        return self._source.driver.run_flow(flows.commit(self._source.core, timeout, producer, number))

    def rollback(self, *, failed: bool = True) -> None:
        """Nothing of it happens: all that it was given returns to its place, and what is buffered. `failed` says
        whether that counts as an attempt."""
        counted = CountedAttempts.ALL if failed else CountedAttempts.NONE
        driver = self._source.driver
        driver.run_flow(flows.rollback(self._source.core, current_thread(), counted))

    def close(self) -> None:
        """What is open is rolled back, and what is buffered goes back, without an attempt."""
        driver = self._source.driver
        if not sys.is_finalizing():
            driver.run_flow(flows.close_session(self._source.core, current_thread()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        driver = self._source.driver
        if os.getpid() == driver.process_id:
            owner = current_thread()
            driver.exit_block(flows.close_session(self._source.core, owner), error)


class Sent:
    """A message that was sent with `send_nowait`; `sent.wait()` waits until it is confirmed."""

    __slots__ = ("_connection", "_send")

    def __init__(self, connection: Connection, send: PendingSend) -> None:
        self._connection = connection
        self._send = send

    @property
    def is_done(self) -> bool:
        """It was confirmed, or will never be."""
        return self._send.is_done

    def wait(self) -> None:
        """Until it is confirmed.

        Raises: as `Connection.send`
        """
        driver = self._connection._driver
        return driver.run_flow(flows.wait_until_send_confirmed(driver.client, self._send, None))


class Connection:
    """A program's connection. It outlives those to the broker: what is lost is connected anew."""

    def __init__(self, options: ConnectOptions) -> None:
        """Only by `connect`."""
        self._options = options
        self._driver = Driver(options, secrets.token_urlsafe(9), Message)
        self._nowait_batch = SendBatch()
        """What was sent with `send_nowait`."""
        self._handlers = Handlers(self._driver)
        self._browse_connections: set[Connection] = set()

    def _open(self, timeout: float) -> None:
        driver = self._driver
        driver.start()
        try:
            driver.run_flow(flows.wait_for_first_connection(driver.client, monotonic() + timeout))
        except BaseException:
            driver.run_step(driver.client.fail_permanently, ClosedError("it was never connected"))
            driver.stop()
            raise

    @property
    def session_id(self) -> str:
        """What the broker calls the connection that is there; empty if none is."""
        link = self._driver.client.link
        return "" if link is None else link.session_id

    def health(self) -> Health:
        """How it is: state, reconnects, consumers."""
        return self._driver.health()

    # ---- Sending ----

    def send(
        self, destination: str, body: bytes | str, *, timeout: float = DEFAULT_TIMEOUT_S, **options: Unpack[SendOptions]
    ) -> None:
        """Send a message. Returns once the broker has it as safe as it will be: durable, if it is persistent.

        Raises: Refused with the broker's code; TimeoutError if that is not known in time: it may have arrived;
        ValueError, TypeError if it cannot be said so
        """
        driver = self._driver
        prepared = prepare_send(driver.client, destination, body, options)
        driver.run_flow(send(driver.client, prepared, monotonic() + timeout))

    def send_many(
        self,
        destination: str,
        messages: Iterable[bytes | str | Outgoing],
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        **options: Unpack[SendOptions],
    ) -> int:
        """Send messages, many at once; how many. Returns once all are as safe as they will be. Each has `options`, but
        where an `Outgoing` says otherwise. `timeout` is for each step on.

        Raises: as `send`, the first error; what was sent behind it may have arrived
        """
        if isinstance(messages, str | bytes):
            raise TypeError("messages are several: for one there is send")
        driver = self._driver
        client = driver.client
        enqueue = driver.step_of_many(try_enqueue)
        batch = SendBatch()
        count = 0
        for message in messages:
            prepared = prepare_message(client, destination, message, options)
            while not enqueue(client, batch, prepared):
                driver.run_flow(await_capacity(client, batch, monotonic() + timeout))
            count += 1
            if batch.error is not None:
                raise batch.error
        driver.run_flow(await_confirmed(client, batch, monotonic() + timeout))
        return count

    def send_nowait(self, destination: str, body: bytes | str, **options: Unpack[SendOptions]) -> Sent:
        """Send a message and go on; wait for what this returns, or `flush`, to know that it was confirmed.

        Raises: BlockingIOError if too much waits for its confirmation: flush first; ValueError, TypeError, ClosedError
        """
        driver = self._driver
        prepared = prepare_send(driver.client, destination, body, options)
        if not driver.run_step_of_many(try_enqueue, driver.client, self._nowait_batch, prepared):
            raise BlockingIOError("too many messages wait for their confirmation: flush first")
        return Sent(self, prepared)

    def flush(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until all that was sent with `send_nowait` is confirmed.

        Raises: the first error of those; TimeoutError
        """
        driver = self._driver
        driver.run_flow(await_confirmed(driver.client, self._nowait_batch, monotonic() + timeout))

    def request(
        self, destination: str, body: bytes | str, *, timeout: float = DEFAULT_TIMEOUT_S, **options: Unpack[SendOptions]
    ) -> Content:
        """Send a message and wait for the reply to it. It is not persistent unless told: nobody could answer it after a
        crash.

        Raises: TimeoutError; ConnectionLost, for then a reply has nowhere to go; Refused
        """
        driver = self._driver
        return driver.run_flow(flows.send_request(driver.client, destination, body, options, monotonic() + timeout))

    def reply(self, message: Content, body: bytes | str, **options: Unpack[SendOptions]) -> None:
        """Answer a request: `message.reply_to` says where to. Not persistent unless told.

        Raises: ValueError if no reply is wanted; otherwise as `send`
        """
        self.send(*flows.reply_destination(message), body, **(flows.reply_options(message) | options))

    def control_request(self, verb: str, arguments: object = None, *, timeout: float = DEFAULT_TIMEOUT_S) -> bytes:
        """The broker's answer to a question, JSON (docs/control.md).

        Raises: Refused, TimeoutError, ConnectionLost
        """
        driver = self._driver
        return driver.run_flow(flows.send_control_request(driver.client, verb, arguments, monotonic() + timeout))

    # ---- Receiving ----

    def session(self, *, transacted: bool = False, ack: str = "receive") -> Session:
        """Consumers that share one buffer; `transacted`: and one transaction after the other. Without that the program
        says of each message what became of it. `with` closes the session.

        `ack` says when a transaction acknowledges a message: "receive", when it is handed out; or "commit": until then
        the program may say of it that it has failed (`Message.nack`, `Message.reject`), and it counts in the prefetch.

        Raises: ValueError
        """
        mode = flows.parse_session_mode(ack, transacted=transacted)

        return Session(self, self._driver.run_step(flows.open_session, self._driver.client, mode))

    def consumer(self, destination: str, *, ack: str = "auto", **options: Unpack[ConsumerOptions]) -> Consumer:
        """Take messages of a destination. `with` closes the consumer.

        `ack` is "auto": a message is acknowledged when the next one is asked for, or the block ends; an exception that
        leaves the block fails it. Or "individual": the program says of each message what became of it.

        Raises: Refused, TimeoutError, ValueError
        """
        mode = flows.parse_consumer_mode(ack)
        parsed = parse_consumer_options(destination, options)

        core = CoreSession(self._driver.client, mode, ReceiveBuffer())
        subscription = self._driver.run_flow(flows.subscribe(core, parsed))
        return Consumer(_SessionWithDriver(core, self._driver), subscription, owns_session=True)

    def consume(
        self,
        destination: str,
        handler: Callable[[Message, Session], None],
        *,
        transacted: bool = False,
        ack: str = "receive",
        concurrency: int = 1,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        """Hand each message to `handler`, `concurrency` at once, each in a task or thread, until interrupted or closed.

        A message is acknowledged when its handler returns, with all that it has sent through its session if
        `transacted`; for `ack` see `session`. Then the session of a transaction has ended: calls of it that come later
        or still wait raise ClosedError. A message has failed if the handler raises, which is logged. Never two messages
        of a group run at once, and beside one whose last attempt was a lost connection runs nothing.

        An interruption, which is a cancellation or Ctrl-C, waits for the handlers that run, and is raised again. A
        second one waits no longer: it cancels tasks, leaves threads alone, and gives back what they have.

        Raises: Refused, ClosedError if the connection ends for good
        """
        mode = flows.parse_session_mode(ack, transacted=transacted)
        parsed = parse_consumer_options(destination, options)
        self._handlers.run(parsed, mode, handler, concurrency, partial(Session, self))

    def browse(self, destination: str, *, selector: str | None = None) -> Iterator[Content]:
        """What waits at a queue or durable subscription, the true next first; all stays where it is. On a connection of
        its own, so that who looks slowly holds up nobody.

        Raises: Refused, ConnectionLost; also if its connection is not there within 10 seconds
        """
        return self._browse(destination, selector)

    def _browse(self, destination: str, selector: str | None) -> Iterator[Content]:
        self._driver.check_caller()
        self._driver.client.check_open()
        with connect_with_options(self._options) as other:
            self._browse_connections.add(other)
            driver = other._driver
            try:
                browser = QueueBrowser(driver.client, destination, selector)
                while (content := driver.run_flow(browser.next_message())) is not None:
                    yield content
            finally:
                self._browse_connections.discard(other)

    def unsubscribe(self, name: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """End a durable subscription that nobody uses: what waits in it goes.

        Raises: Refused, TimeoutError
        """
        driver = self._driver
        driver.run_flow(driver.client.end_durable_subscription(name, monotonic() + timeout))

    def outcome(self, doubt: InDoubt | str, *, timeout: float = DEFAULT_TIMEOUT_S) -> str:
        """What became of a transaction that was in doubt, by its error or the token of that: "committed", "rolled back"
        or "unknown". What has not happened by now never will. The error of another broker has an empty token, and is
        "unknown".

        Raises: TimeoutError, ConnectionLost; ValueError if the text is no token; TypeError
        """
        driver = self._driver
        return driver.run_flow(flows.resolve_outcome(driver.client, doubt, monotonic() + timeout))

    # ---- The end ----

    def close(self, *, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Hand out no more, give back at once what is buffered, wait `timeout` seconds for handlers of `consume` and
        until what was sent is confirmed, and take leave. A handler may call it: it does not wait for itself.

        Raises: of what was sent with `send_nowait` and nobody has asked for: the first error; TimeoutError
        """
        self._close(timeout)
        check_confirmed(self._nowait_batch)

    def _close(self, timeout: float) -> None:
        if sys.is_finalizing():
            return
        driver = self._driver
        driver.check_caller()
        deadline = monotonic() + timeout
        for other in list(self._browse_connections):
            other._driver.run_step(other._driver.client.fail_permanently, ClosedError("the connection is closed"))
        self._handlers.stop()
        try:
            self._handlers.wait(deadline)
            driver.run_flow(driver.client.close(deadline))
        except BaseException:
            self._handlers.abandon()
            driver.disconnect_nowait()
            raise
        finally:
            driver.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._driver.process_id:
            return
        if error is None:
            self.close()
            return
        try:
            self._close(0.0)
        except Exception as exit_error:
            # The program's exception leaves the block, whatever its end says.
            flows.add_exit_failure_note(error, exit_error)


def connect_with_options(options: ConnectOptions) -> Connection:
    """Another connection of the same kind."""

    connection = Connection(options)
    connection._open(CLOSE_TIMEOUT_S)
    return connection
