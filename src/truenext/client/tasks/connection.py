"""Connection of an asyncio program: `truenext.connect`.

    async with truenext.connect("stomp://127.0.0.1:61613") as connection:
        await connection.send("/queue/orders", b"{}", priority=9)
        async with connection.consumer("/queue/orders") as orders:
            async for message in orders:
                print(message.text)

`make generate` derives client/threads/connection.py (`truenext.blocking`) from this file. Each method has the same name
there, without `await`. Methods call client/core only through the driver, because the driver for threads has a lock.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Self, Unpack, cast

from truenext.client.core import flows, send_flows
from truenext.client.core.buffer import ReceiveBuffer, ReceivedMessage, Subscription
from truenext.client.core.client import ConnectOptions, connect_options
from truenext.client.core.disposition import ACKED, CountedAttempts, Disposition
from truenext.client.core.flows import CLOSE_TIMEOUT_S, DEFAULT_TIMEOUT_S
from truenext.client.core.health import Health
from truenext.client.core.message import Content
from truenext.client.core.queue_browser import PAGE_BODIES_MAX, PageOptions, QueueBrowser, read_page
from truenext.client.core.send_buffer import PendingSend, SendBatch
from truenext.client.core.send_options import Outgoing, SendOptions, encode_body
from truenext.client.core.session import SessionCore as CoreSession
from truenext.client.core.subscriptions import ConsumerOptions, parse_consumer_options
from truenext.client.core.transaction_state import Outcome
from truenext.client.core.waiting import Flow
from truenext.client.password_file import absolute_paths
from truenext.client.tasks.driver import Driver
from truenext.client.tasks.handlers import Handlers
from truenext.client.tasks.opening import AwaitableContext, each
from truenext.errors import ClosedError, InDoubt


def connect(
    *urls: str,
    user: str | None = None,
    password: str | None = None,
    password_file: Path | str | None = None,
    ca: Path | str | None = None,
    certificate: Path | str | None = None,
    key: Path | str | None = None,
    client_id: str | None = None,
    heart_beat: float = 10.0,
    reconnect: bool = True,
    heartbeat_thread: bool = False,
    timeout: float = CLOSE_TIMEOUT_S,
) -> AwaitableContext[Connection]:
    """Connect to the first of `urls` at which a broker answers, by default to stomp://127.0.0.1:61613. `async with`
    closes the connection.

    A lost connection is opened again, however long that takes. Without `reconnect` a lost connection is closed for
    good. Then each URL is tried only once, or again while its broker is busy with other logins or is being drained.
    `client_id` names this client for durable subscriptions. `heart_beat` is the interval of heart-beats in seconds; 0
    disables them. Each side notices within two intervals that the other side is gone. `timeout` (seconds) limits the
    first connection; several URLs share it.

    The first line of `password_file` is the password. The file is read for each login, so that the next reconnect uses
    a changed password. If a reconnect cannot read the file, it tries again; the first connection fails.

    At a stomp+ssl:// address the broker must show a certificate for its host name. The certificate must be signed by an
    authority that the system trusts, or by `ca`. If the broker asks for a client certificate, the client shows
    `certificate`, with its private `key`. `ca`, `certificate` and `key` are PEM files, read for each connection. The
    file of a certificate may also contain its key.

    An event loop that is blocked for two heart-beats loses its connection, and other consumers get its messages. With
    `heartbeat_thread` a thread sends the heart-beats. Then the connection stays as long as the process lives, and a
    process that hangs keeps its messages. ConfigurationError is raised if a test has stopped the loop's clock.

    Raises: ConfigurationError for an invalid URL, or a file that cannot be used; ValueError, TypeError for another
    invalid argument; ConnectionLost if no broker answers in time; Refused if a broker refuses the login, such as for
    wrong credentials
    """
    # The program may change its folder before a reconnect.
    files = absolute_paths(password_file=password_file, ca=ca, certificate=certificate, key=key)
    options = connect_options(
        urls,
        {"user": user, "password": password, **files},
        client_id=client_id,
        heart_beat_s=heart_beat,
        reconnects=reconnect,
        timeout_s=timeout,
        heartbeat_thread=heartbeat_thread,
    )

    return connect_with_options(options, timeout)


class Message(ReceivedMessage):
    """Message that a consumer has received."""

    __slots__ = ("_session",)
    _session: _SessionWithDriver

    async def ack(self) -> None:
        """Acknowledge the message. If other messages are buffered, the ACK is written with the next receive, or soon
        if none follows. If the connection is lost before the broker receives the ACK, this client acknowledges a
        redelivery, and does not deliver it again.

        Raises: LocalProtocolError if the message was settled already, or belongs to a transaction
        """
        await self._settle(ACKED)

    async def nack(self, *, delay: float | None = None, cause: str = "") -> None:
        """Report that processing the message failed. This counts as an attempt. The message is redelivered after
        `delay` seconds; with None the queue's policy sets the delay. In a transaction with `ack="commit"`, the
        transaction is rolled back too, and its other messages count no attempt.

        `cause` says why processing failed. The cause is shown as `first_cause` and `last_cause` of the message and of
        its dead letter, cut to 4096 bytes of UTF-8. Only truenext gets the cause, no other broker.

        Raises: LocalProtocolError if the message was settled already, or a transaction has acknowledged it; RolledBack
        if another task has ended its transaction; ValueError, TypeError for an invalid argument
        """
        await self._settle(flows.failed_disposition(delay, cause))

    async def reject(self, *, cause: str = "") -> None:
        """Make the message a dead letter. `cause` says why. In a transaction with `ack="commit"`, the transaction is
        rolled back too, and its other messages count no attempt.

        Raises: LocalProtocolError, RolledBack, TypeError in the same cases as `nack`
        """
        await self._settle(flows.rejected_disposition(cause))

    async def release(self) -> None:
        """Return the message to its queue, unprocessed and without an attempt. In a transaction with `ack="commit"`,
        the transaction is rolled back too. The call does nothing if the message was settled already, or acknowledged in
        a transaction."""
        source = self._session
        owner = asyncio.current_task(source.driver.loop)
        await source.driver.run_flow(flows.release(source.core, self, owner))

    async def _settle(self, disposition: Disposition) -> None:
        core, driver = self._session.core, self._session.driver
        owner = None if self.transaction is None else asyncio.current_task(driver.loop)
        if not driver.run_step(core.settle, self, disposition, owner):
            await driver.run_flow(core.client.wait_until_written())

    def process(self) -> Processing:
        """Return a block that settles the message: `async with message.process():`. A normal end acknowledges the
        message. An exception nacks it. A cancellation, Ctrl-C or a lost connection releases it without an attempt. In a
        transaction, an exception marks this message as failed."""
        return Processing(self)


class Processing:
    """Block that `Message.process` returns. It settles the message at its end."""

    def __init__(self, message: Message) -> None:
        self._message = message

    async def __aenter__(self) -> Message:
        return self._message

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        source = self._message._session
        if os.getpid() == source.driver.process_id:
            await source.driver.exit_block(flows.end_message_block(source.core, self._message, error), error)


class _Block:
    """Object for `async with`. At the end of the block the driver runs the flow (client/core/waiting.py) that `_end`
    returns. A forked process runs none."""

    _driver: Driver

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        driver = self._driver
        if os.getpid() == driver.process_id:
            await driver.exit_block(self._end(error, asyncio.current_task(driver.loop)), error)

    def _end(self, error: BaseException | None, owner: object) -> Flow[None]:
        """Return the flow that ends the block. `error` is the exception that has left the block; None is a normal
        end."""
        raise NotImplementedError


class _SessionWithDriver:
    __slots__ = ("core", "driver")

    def __init__(self, core: CoreSession, driver: Driver) -> None:
        self.core = core
        self.driver = driver

    async def receive(self, subscription: Subscription | None, count: int, timeout: float | None) -> list[Message]:
        core, driver = self.core, self.driver
        flow = flows.receive(core, subscription, count, timeout, asyncio.current_task(driver.loop))
        release = partial(core.on_receive_interrupted, subscription)
        messages = cast("list[Message]", await driver.run_flow(flow, release))
        for message in messages:
            message._session = self
        return messages


class Consumer(_Block):
    """Consumer of one destination. It returns the true next message first."""

    def __init__(self, source: _SessionWithDriver, subscription: Subscription, *, owns_session: bool) -> None:
        self._source = source
        self._core = source.core
        self._driver = source.driver
        self._subscription = subscription
        self._owns_session = owns_session

    async def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message; None if no message arrives within `timeout` seconds. With a `timeout` of None, wait
        for ever. With 0, return a message only if the broker can dispatch one now.

        Raises: RolledBack if the session's transaction was ended by anything but its own code, such as a lost
        connection; Refused if the broker has ended the subscription; TimeoutError if `timeout` is 0 and there is no
        connection for 60 seconds; ClosedError if the consumer, its session or the connection is closed
        """
        message = self._try_receive()
        if message is None:
            messages = await self._source.receive(self._subscription, 1, timeout)
            return messages[0] if messages else None
        return message

    async def receive_many(self, count: int, timeout: float | None = None) -> list[Message]:
        """Return up to `count` messages. Wait at most `timeout` seconds for the first one; return the others if they
        have arrived. A message that has failed before is returned alone, so that its next failure counts no attempt for
        other messages.

        Raises: the errors of `receive`; ValueError if `count` is invalid
        """
        return await self._source.receive(self._subscription, count, timeout)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        message = self._try_receive()
        if message is None:
            try:
                messages = await self._source.receive(self._subscription, 1, None)
            except ClosedError:
                if self._core.has_program_closed(self._subscription):
                    raise StopAsyncIteration from None
                raise
            if not messages:
                raise StopAsyncIteration
            message = messages[0]
        return message

    def _try_receive(self) -> Message | None:
        driver = self._driver
        received = driver.try_receive(self._core, self._subscription, asyncio.current_task(driver.loop))
        if received is None:
            return None
        message = cast("Message", received)
        message._session = self._source
        return message

    async def pause(self) -> None:
        """Stop returning messages until `resume`, and release the buffered ones."""
        self._driver.run_step(self._core.client.subscriptions.pause, self._subscription)

    async def resume(self) -> None:
        """Start returning messages again after `pause`."""
        self._driver.run_step(self._core.client.subscriptions.resume, self._subscription)

    async def close(self) -> None:
        """Close the consumer. Buffered and unsettled messages are released without an attempt."""
        # In a finalizer at the end of the program, such as `__del__`, nothing is left to close.
        if not sys.is_finalizing():
            owner = asyncio.current_task(self._driver.loop)
            flow = flows.close_consumer(self._core, self._subscription, owner, owns_session=self._owns_session)
            await self._driver.run_flow(flow)

    def _end(self, error: BaseException | None, owner: object) -> Flow[None]:
        return flows.end_consumer_block(self._core, self._subscription, owner, error, owns_session=self._owns_session)


class Transaction(_Block):
    """Block of `Session.transaction`. It commits at its end, and rolls back after an exception."""

    def __init__(self, source: _SessionWithDriver, timeout: float) -> None:
        """Private: use `Session.transaction`."""
        self._driver = source.driver
        self._block = flows.TransactionBlock(source.core, timeout)

    @property
    def outcome(self) -> Outcome:
        """Outcome of the transaction. Before the end it is the transaction's state. After an interrupted commit the
        outcome may still change."""
        return self._block.outcome

    @property
    def token(self) -> str:
        """Token for `Connection.outcome`; empty if the outcome is known, or the block has not ended."""
        return self._block.token

    def mark_failed(self, message: Message) -> None:
        """Mark a message as failed. If messages are marked, only these count an attempt.

        Raises: LocalProtocolError if the message does not belong to the transaction, or outside the block
        """
        self._driver.run_step(self._block.mark_failed, message)

    async def __aenter__(self) -> Self:
        self._driver.run_step(self._block.enter)
        return self

    def _end(self, error: BaseException | None, owner: object) -> Flow[None]:
        return self._block.exit(error, owner)


class Session(_Block):
    """Consumers that share one buffer and one order. A transacted session has one transaction after the other."""

    def __init__(self, connection: Connection, core: CoreSession) -> None:
        self._connection = connection
        self._driver = connection._driver
        self._source = _SessionWithDriver(core, self._driver)

    def consumer(self, destination: str, **options: Unpack[ConsumerOptions]) -> AwaitableContext[Consumer]:
        """Subscribe to a destination. `async with` closes the consumer.

        Raises: Refused if the broker refuses the subscription; TimeoutError without an answer; ValueError, TypeError
        for an invalid option
        """
        parsed = parse_consumer_options(destination, options)

        async def make() -> Consumer:
            subscription = await self._driver.run_flow(flows.subscribe(self._source.core, parsed))
            return Consumer(self._source, subscription, owns_session=False)

        return AwaitableContext(make)

    async def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message of all consumers of the session. It works like `Consumer.receive`."""
        messages = await self.receive_many(1, timeout)
        return messages[0] if messages else None

    async def receive_many(self, count: int, timeout: float | None = None) -> list[Message]:
        """Return the next messages of all consumers of the session. It works like `Consumer.receive_many`."""
        return await self._source.receive(None, count, timeout)

    async def send(
        self, destination: str, body: bytes | str, *, timeout: float = DEFAULT_TIMEOUT_S, **options: Unpack[SendOptions]
    ) -> None:
        """Send a message. In a transacted session the message belongs to the transaction. If the broker refuses the
        message, a later call of the session raises the error.

        Raises: RolledBack if the transaction was ended by anything but its own code, such as a lost connection;
        otherwise the errors of `Connection.send`
        """
        core, driver = self._source.core, self._driver
        if core.transactions is None:
            await self._connection.send(destination, body, timeout=timeout, **options)
            return
        encoded = flows.encode_send_in_transaction(destination, options)
        data = encode_body(body)
        owner = asyncio.current_task(driver.loop)
        if not driver.run_step_of_many(core.try_send, encoded.head, data, encoded.ttl_s, owner):
            await driver.run_flow(core.send(encoded.head, data, encoded.ttl_s, driver.loop.time() + timeout, owner))

    async def reply(self, message: Content, body: bytes | str, **options: Unpack[SendOptions]) -> None:
        """Reply to a request with `send` of this session. It works like `Connection.reply`."""
        await self.send(flows.reply_destination(message), body, **(flows.reply_options(message) | options))

    def transaction(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> Transaction:
        """Return a block for one transaction: `async with session.transaction():`. It commits at its end, and rolls
        back after an exception. A rollback counts an attempt for messages marked by `Message.process` or
        `Transaction.mark_failed`. If no message is marked, an attempt counts for all messages of the transaction.

        Raises: LocalProtocolError if the session is not transacted. The end of the block raises RolledBack if the
        transaction had no effect, InDoubt if its outcome is not known.
        """
        return Transaction(self._source, timeout)

    async def flush(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until the broker has processed all sends of the open transaction. So a refusal is known before the
        commit. The messages are neither visible nor durable before the commit.

        Raises: RolledBack if a send was refused or the connection was lost, with this error as its cause; TimeoutError
        after `timeout` seconds, and the transaction stays open; LocalProtocolError if the session is not transacted
        """
        await self._driver.run_flow(self._source.core.flush(self._driver.loop.time() + timeout))

    async def commit(self, *, timeout: float = DEFAULT_TIMEOUT_S, producer: str | None = None, number: int = 0) -> bool:
        """Commit the open transaction. The call returns once the commit is durable.

        A program may give a `producer` and a `number` of its own (first 1, then one more each time). Then the
        transaction takes effect once, whichever process commits under that number and however often. The call returns
        False if the number was used before: this transaction then has no effect, and its messages are redelivered
        without an attempt.

        Raises: RolledBack if the transaction had no effect, also if numbers were left out; InDoubt if the outcome is
        not known within `timeout` seconds. A commit with a number raises InDoubt as soon as the connection is lost:
        commit again under the same number. ValueError for an invalid number; LocalProtocolError for a number without
        anything to commit
        """
        return await self._driver.run_flow(flows.commit(self._source.core, timeout, producer, number))

    async def rollback(self, *, failed: bool = True) -> None:
        """Roll back the open transaction. Its messages and the buffered ones return to their positions in the queue.
        With `failed` an attempt counts for messages marked as failed; if none is marked, for all messages of the
        transaction.

        Raises: LocalProtocolError while the transaction is being committed, or if the session is not transacted
        """
        counted = CountedAttempts.ALL if failed else CountedAttempts.NONE
        driver = self._driver
        await driver.run_flow(flows.rollback(self._source.core, asyncio.current_task(driver.loop), counted))

    async def close(self) -> None:
        """Close the session. Its transaction is rolled back, and buffered and unsettled messages are released, all
        without an attempt."""
        if not sys.is_finalizing():
            owner = asyncio.current_task(self._driver.loop)
            await self._driver.run_flow(flows.close_session(self._source.core, owner))

    def _end(self, error: BaseException | None, owner: object) -> Flow[None]:
        return flows.close_session(self._source.core, owner)


class Sent:
    """Message that was sent with `send_nowait`. `await sent` waits for its confirmation."""

    __slots__ = ("_connection", "_send")

    def __init__(self, connection: Connection, send: PendingSend) -> None:
        self._connection = connection
        self._send = send

    @property
    def is_done(self) -> bool:
        """True once the message is confirmed, or has failed."""
        return self._send.is_done

    def __await__(self) -> Generator[None, None, None]:
        """Wait until the broker has confirmed the message.

        Raises: the errors of `Connection.send`
        """
        driver = self._connection._driver
        return driver.run_flow(flows.wait_until_send_confirmed(self._send)).__await__()


class Connection:
    """Connection of a program to a broker. A lost TCP connection is replaced by a new one."""

    def __init__(self, options: ConnectOptions) -> None:
        """Private: use `connect`."""
        self._options = options
        self._driver = Driver(options, secrets.token_urlsafe(9), Message)
        self._nowait_batch = SendBatch()
        self._handlers = Handlers(self._driver)
        self._browse_connections: set[Connection] = set()

    async def _open(self, timeout: float | None) -> None:
        driver = self._driver
        driver.client.is_opening_awaited = timeout is not None
        driver.start()
        if timeout is None:
            return
        try:
            await driver.run_flow(flows.wait_for_first_connection(driver.client, timeout))
        except BaseException:
            driver.run_step(driver.client.fail_permanently, ClosedError("the connection was never opened"))
            await driver.stop()
            raise

    @property
    def session_id(self) -> str:
        """Name that the broker has given to the current TCP connection; empty without a connection."""
        link = self._driver.client.link
        return "" if link is None else link.session_id

    def health(self) -> Health:
        """Return the state of the connection and of its consumers."""
        return self._driver.health()

    # ---- Sending ----

    async def send(
        self, destination: str, body: bytes | str, *, timeout: float = DEFAULT_TIMEOUT_S, **options: Unpack[SendOptions]
    ) -> None:
        """Send a message. The call returns once the broker has accepted it; a persistent message is durable then.

        Raises: Refused with the broker's code if the broker refuses the message; TimeoutError without a confirmation
        within `timeout` seconds: the message may have arrived; ValueError, TypeError for invalid options;
        ConnectionLost, ClosedError if the connection has ended
        """
        driver = self._driver
        prepared = send_flows.prepare_send(driver.client, destination, body, options)
        await driver.run_flow(send_flows.send(driver.client, prepared, driver.loop.time() + timeout))

    async def send_many(
        self,
        destination: str,
        messages: Iterable[bytes | str | Outgoing] | AsyncIterable[bytes | str | Outgoing],
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        **options: Unpack[SendOptions],
    ) -> int:
        """Send messages without waiting for each. Return their number once the broker has accepted all; persistent ones
        are durable then. `options` apply to each message, but an `Outgoing` may override them. `timeout` (seconds)
        limits each wait: for space in the send buffer, and for the last confirmations.

        Raises: the errors of `send`, for the first message that fails; messages after it may have arrived
        """
        if isinstance(messages, str | bytes):
            raise TypeError("messages must be a list of messages, not one message: use send for one")
        driver = self._driver
        client = driver.client
        enqueue = driver.step_of_many(send_flows.try_enqueue)
        batch = SendBatch()
        count = 0
        async for message in each(messages):
            prepared = send_flows.prepare_message(client, destination, message, options)
            while not enqueue(client, batch, prepared):
                await driver.run_flow(send_flows.await_capacity(client, batch, driver.loop.time() + timeout))
            count += 1
            if batch.error is not None:
                raise batch.error
        await driver.run_flow(send_flows.await_confirmed(client, batch, driver.loop.time() + timeout))
        return count

    def send_nowait(self, destination: str, body: bytes | str, **options: Unpack[SendOptions]) -> Sent:
        """Send a message without waiting for its confirmation. `Connection.flush` and the returned `Sent` wait for the
        confirmation.

        Raises: BlockingIOError if too many messages are not confirmed yet: call `flush` first; ValueError, TypeError
        for invalid options; ClosedError if the connection is closed
        """
        driver = self._driver
        prepared = send_flows.prepare_send(driver.client, destination, body, options)
        if not driver.run_step_of_many(send_flows.try_enqueue, driver.client, self._nowait_batch, prepared):
            raise BlockingIOError("too many messages are not confirmed yet: flush first")
        return Sent(self, prepared)

    async def flush(self, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until all messages sent with `send_nowait` are confirmed.

        Raises: the first error of these messages; TimeoutError after `timeout` seconds
        """
        driver = self._driver
        await driver.run_flow(
            send_flows.await_confirmed(driver.client, self._nowait_batch, driver.loop.time() + timeout)
        )

    async def request(
        self, destination: str, body: bytes | str, *, timeout: float = DEFAULT_TIMEOUT_S, **options: Unpack[SendOptions]
    ) -> Content:
        """Send a message, and return the reply. By default the request is not persistent, because after a crash of the
        broker no reply could arrive.

        Raises: TimeoutError without a reply within `timeout` seconds; ConnectionLost if the connection is lost before
        the reply; Refused if the broker refuses the request; ValueError, TypeError for invalid options
        """
        driver = self._driver
        return await driver.run_flow(
            flows.send_request(driver.client, destination, body, options, driver.loop.time() + timeout)
        )

    async def reply(self, message: Content, body: bytes | str, **options: Unpack[SendOptions]) -> None:
        """Send a reply to the destination that a request names in its `reply_to`. By default the reply is not
        persistent.

        Raises: ValueError if the request has no `reply_to`; otherwise the errors of `send`
        """
        await self.send(flows.reply_destination(message), body, **(flows.reply_options(message) | options))

    async def control_request(
        self, verb: str, arguments: object = None, *, timeout: float = DEFAULT_TIMEOUT_S
    ) -> bytes:
        """Send a control request to the broker, and return its answer as JSON (docs/reference/control.md).

        Raises: Refused if the broker refuses the request; TimeoutError without an answer within `timeout` seconds;
        ConnectionLost if the connection is lost before the answer; LocalProtocolError if the broker is not truenext
        """
        driver = self._driver
        return await driver.run_flow(
            flows.send_control_request(driver.client, verb, arguments, driver.loop.time() + timeout)
        )

    # ---- Receiving ----

    def session(self, *, transacted: bool = False, ack: str = "receive") -> AwaitableContext[Session]:
        """Open a session, whose consumers share one buffer. A `transacted` session has one transaction after the other.
        In any other session the program settles each message. `async with` closes the session.

        `ack` says when a transaction acknowledges a message. With "receive" a message is acknowledged when the program
        receives it. With "commit" all messages are acknowledged by the commit. Until then the program may nack or
        reject them, and they count in the prefetch.

        Raises: ValueError for another `ack`; ClosedError if the connection is closed
        """
        mode = flows.parse_session_mode(ack, transacted=transacted)

        async def make() -> Session:
            return Session(self, self._driver.run_step(flows.open_session, self._driver.client, mode))

        return AwaitableContext(make)

    def consumer(
        self, destination: str, *, ack: str = "auto", **options: Unpack[ConsumerOptions]
    ) -> AwaitableContext[Consumer]:
        """Subscribe to a destination. `async with` closes the consumer.

        With `ack="auto"` a message is acknowledged when the next one is requested, or the block ends; an exception that
        leaves the block nacks it. With "individual" the program settles each message.

        Raises: Refused if the broker refuses the subscription; TimeoutError without an answer; ValueError, TypeError
        for an invalid option
        """
        mode = flows.parse_consumer_mode(ack)
        parsed = parse_consumer_options(destination, options)

        async def make() -> Consumer:
            core = CoreSession(self._driver.client, mode, ReceiveBuffer())
            subscription = await self._driver.run_flow(flows.subscribe(core, parsed))
            return Consumer(_SessionWithDriver(core, self._driver), subscription, owns_session=True)

        return AwaitableContext(make)

    async def consume(
        self,
        destination: str,
        handler: Callable[[Message, Session], Awaitable[None]],
        *,
        transacted: bool = False,
        ack: str = "receive",
        concurrency: int = 1,
        **options: Unpack[ConsumerOptions],
    ) -> None:
        """Call `handler` with each message, in up to `concurrency` tasks or threads, until interrupted or closed.

        A message is acknowledged when its handler returns. If `transacted`, one commit acknowledges it and sends all
        messages that the handler has sent through its session. The session ends with the handler: later calls, and
        calls that still wait, raise ClosedError. `ack` has the same meaning as for `session`. If the handler raises,
        the error is logged, and the message has failed. Two messages of one group never run at once. A message whose
        last attempt ended with a lost connection runs alone.

        After an interruption (a cancellation or Ctrl-C) the call waits for the running handlers, and raises the
        interruption again. After a second interruption the call stops waiting: it cancels tasks, leaves threads
        running, and releases their messages.

        Raises: Refused if the broker refuses or ends the subscription; ClosedError, or the error that ended the
        connection for good; ValueError, TypeError for an invalid argument
        """
        mode = flows.parse_session_mode(ack, transacted=transacted)
        parsed = parse_consumer_options(destination, options)
        await self._handlers.run(parsed, mode, handler, concurrency, partial(Session, self))

    def browse(self, destination: str, *, selector: str | None = None) -> AsyncIterator[Content]:
        """Return the messages of a queue or durable subscription, the true next first, without removing them. Browsing
        has its own connection, so that a slow reader delays nothing else.

        Raises: Refused if the broker refuses to browse; ConnectionLost if the connection is lost, or is not opened
        within 10 seconds
        """
        return self._browse(destination, selector)

    async def browse_page(
        self,
        destination: str,
        *,
        count: int,
        selector: str | None = None,
        after: tuple[int, int] | None = None,
        bytes_max: int = PAGE_BODIES_MAX,
        body_max: int | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> tuple[list[Content], bool]:
        """Return some messages of a queue or durable subscription, without removing them. Unlike `browse` this uses
        this connection.

        The messages follow `after`, a message's priority and sequence; None begins with the true next. There are at
        most `count`, and fewer if their bodies have `bytes_max` bytes together, or `timeout` seconds have passed. The
        second result is False if there are fewer for these reasons. With `body_max` only this number of bytes of each
        body is kept; the header `content-length` has the size of the whole body.

        Raises: Refused if the broker refuses to browse; ConnectionLost if the connection is lost; TimeoutError without
        a message within `timeout` seconds; LocalProtocolError if the broker is not truenext
        """
        driver = self._driver
        deadline = driver.loop.time() + timeout
        page = PageOptions(destination, selector, after, count, bytes_max, body_max)
        return await driver.run_flow(read_page(driver.client, page, deadline))

    def forget_login(self) -> None:
        """Drop user and password from memory. The connection stays, but is not opened again once it is lost, and
        `browse` cannot open another one."""
        driver = self._driver
        driver.run_step(driver.client.forget_login)
        self._options = driver.client.options

    async def _browse(self, destination: str, selector: str | None) -> AsyncIterator[Content]:
        self._driver.check_caller()
        self._driver.client.check_open()
        async with connect_with_options(self._options) as other:
            self._browse_connections.add(other)
            driver = other._driver
            try:
                browser = QueueBrowser(driver.client, destination, selector)
                while (content := await driver.run_flow(browser.next_message())) is not None:
                    yield content
            finally:
                self._browse_connections.discard(other)

    async def unsubscribe(self, name: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """End a durable subscription that no consumer uses, and delete its messages.

        Raises: Refused if a consumer uses the subscription, or there is no such subscription; TimeoutError without an
        answer within `timeout` seconds
        """
        driver = self._driver
        await driver.run_flow(driver.client.end_durable_subscription(name, driver.loop.time() + timeout))

    async def outcome(self, doubt: InDoubt | str, *, timeout: float = DEFAULT_TIMEOUT_S) -> str:
        """Return the outcome of a transaction in doubt: "committed", "rolled back" or "unknown". `doubt` is the InDoubt
        error or its token. If the transaction has not taken effect by now, it never will. An InDoubt with an empty
        token, such as one from a broker other than truenext, gives "unknown".

        Raises: TimeoutError without an answer within `timeout` seconds; ConnectionLost if the connection is lost before
        the answer; ValueError, TypeError if `doubt` is not a token
        """
        driver = self._driver
        return await driver.run_flow(flows.resolve_outcome(driver.client, doubt, driver.loop.time() + timeout))

    # ---- The end ----

    async def close(self, *, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Close the connection. No message is delivered any more, and buffered messages are released. The call waits at
        most `timeout` seconds for handlers of `consume` and for confirmations, and then disconnects. If a handler makes
        the call, the call does not wait for this handler.

        Raises: the first error of a message sent with `send_nowait`, unless it was raised before; TimeoutError if such
        a message was not confirmed in time
        """
        await self._close(timeout)
        send_flows.check_confirmed(self._nowait_batch)

    async def _close(self, timeout: float) -> None:
        if sys.is_finalizing():
            return
        driver = self._driver
        driver.check_caller()
        deadline = driver.loop.time() + timeout
        for other in list(self._browse_connections):
            other._driver.run_step(other._driver.client.fail_permanently, ClosedError("the connection is closed"))
        self._handlers.stop()
        try:
            await self._handlers.wait(deadline)
            await driver.run_flow(driver.client.close(deadline))
        except BaseException:
            self._handlers.abandon()
            driver.disconnect_nowait()
            raise
        finally:
            await driver.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if os.getpid() != self._driver.process_id:
            return
        if error is None:
            await self.close()
            return
        try:
            await self._close(0.0)
        except Exception as exit_error:
            # The program's exception matters more than a failed close.
            flows.add_exit_failure_note(error, exit_error)


def connect_with_options(
    options: ConnectOptions, timeout: float | None = CLOSE_TIMEOUT_S
) -> AwaitableContext[Connection]:
    """Connect with options that `connect` has checked. The same options may serve several connections. With a `timeout`
    of None the connection is opened in the background: each call waits for it, within its own timeout, and raises the
    broker's refusal of the login."""

    async def make() -> Connection:
        connection = Connection(options)
        await connection._open(timeout)
        return connection

    return AwaitableContext(make)
