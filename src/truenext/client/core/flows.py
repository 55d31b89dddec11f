"""Requests of a program, each as a `Flow`: a generator (waiting.py) that a driver runs, for tasks or for threads. A
`Flow` is not a flow of stages."""

from __future__ import annotations

import msgspec

from truenext.client.core.buffer import (
    ReceiveBuffer,
    ReceivedMessage,
    ReceivedMessageState,
    Subscription,
    SubscriptionOptions,
)
from truenext.client.core.client import Client
from truenext.client.core.disposition import ACKED, FAILED, CountedAttempts, Disposition, counted_attempts_for
from truenext.client.core.message import Content, make_content
from truenext.client.core.pending_requests import ProducerStatus, encode_control_request
from truenext.client.core.send_buffer import PendingSend
from truenext.client.core.send_options import EncodedSend, SendOptions, encode_body, encode_send, ttl_line
from truenext.client.core.session import SessionCore, SessionMode
from truenext.client.core.transaction_state import CallerNumber, Outcome, TransactionState
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import InDoubt, LocalProtocolError
from truenext.model.limits import CAUSE_BYTES_MAX, DELAY_MS_MAX, NAME_LENGTH_MAX, PRODUCER_NUMBER_MAX

DEFAULT_TIMEOUT_S = 60.0
"""Default time, in seconds, to wait for a confirmation by the broker."""
CLOSE_TIMEOUT_S = 10.0
"""Default time, in seconds, that connecting or closing may take."""


def add_exit_failure_note(error: BaseException, exit_error: Exception) -> None:
    """Add to `error` a note that the end of the block has failed, too. `error` is the exception that has left the
    block."""
    if exit_error is not error:
        error.add_note(f"The end of the block has failed as well: {type(exit_error).__name__}: {exit_error}")


def wait_for_first_connection(client: Client, timeout_s: float) -> Flow[None]:
    """Wait until the first connection is up.

    Raises: ConnectionLost if no broker answers in time; Refused if a broker refuses the login
    """
    try:
        yield from client.wait_until_up(client.clock() + timeout_s, "begin")
    except TimeoutError:
        raise client.no_broker_error(timeout_s) from None


# ---- Receiving ----


def open_session(client: Client, mode: SessionMode) -> SessionCore:
    """Make a session that has its own buffer.

    Raises: ClosedError if the program has closed the connection; the error that ended the connection for good
    """
    client.check_open()
    return SessionCore(client, mode, ReceiveBuffer())


def parse_session_mode(ack: str, *, transacted: bool) -> SessionMode:
    """Return the mode of a session. `ack` is "receive" or "commit". Raises: ValueError for another `ack`"""
    modes = {"receive": SessionMode.TRANSACTED, "commit": SessionMode.AT_COMMIT}
    if ack not in modes:
        raise ValueError(f'ack in a transaction must be "receive" or "commit", not {ack!r}')
    if transacted:
        return modes[ack]
    if ack == "commit":
        raise ValueError('ack="commit" needs transacted=True')
    return SessionMode.INDIVIDUAL


def parse_consumer_mode(ack: str) -> SessionMode:
    """Return the mode of a consumer's own session. `ack` is "auto" or "individual". Raises: ValueError for another
    `ack`"""
    modes = {"auto": SessionMode.AUTO, "individual": SessionMode.INDIVIDUAL}
    if ack not in modes:
        raise ValueError(f'ack must be "auto" or "individual", not {ack!r}')
    return modes[ack]


def subscribe(session: SessionCore, options: SubscriptionOptions) -> Flow[Subscription]:
    """Subscribe a session, and wait until the broker has confirmed the subscription.

    Raises: Refused if the broker refuses the subscription; TimeoutError without an answer; ClosedError if the session
    is closed
    """
    session.check_open()
    client = session.client
    return (yield from client.subscribe(options, session.buffer, client.clock() + DEFAULT_TIMEOUT_S))


def receive(
    session: SessionCore, subscription: Subscription | None, count: int, timeout: float | None, owner: object
) -> Flow[list[ReceivedMessage]]:
    """Receive up to `count` messages. With a `timeout` of 0, receive messages that the broker can dispatch now.

    Raises: ValueError if an argument is invalid; otherwise the errors of `SessionCore.receive`
    """
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"count must be a whole number, 1 or more, not {count!r}")
    if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
        raise ValueError(f"timeout must be None, or a number of seconds, 0 or more, not {timeout!r}")
    deadline = None if timeout is None else session.client.clock() + (timeout or DEFAULT_TIMEOUT_S)
    return (yield from session.receive(subscription, count, deadline, owner, no_wait=timeout == 0))


def settle(session: SessionCore, received: ReceivedMessage, disposition: Disposition, owner: object) -> Flow[None]:
    """Settle a message, and wait until the frame is written.

    Raises: LocalProtocolError if the message is settled already; RolledBack if the message's transaction was ended by
    anything but its own code
    """
    if not session.settle(received, disposition, owner):
        yield from session.client.wait_until_written()


def failed_disposition(delay: float | None, cause: str = "") -> Disposition:
    """Make the disposition of a nack; `delay` is in seconds. Raises: ValueError, TypeError for an invalid argument"""
    text = _truncate_cause(cause)
    if delay is None:
        return Disposition(False, cause=text) if text else FAILED
    # NaN is not a delay, either.
    if not 0 <= delay <= DELAY_MS_MAX / 1000:
        raise ValueError(f"delay must be 0 to {DELAY_MS_MAX // 1000} seconds, not {delay}")
    return Disposition(False, delay_ms=round(delay * 1000), cause=text)


def rejected_disposition(cause: str) -> Disposition:
    """Make the disposition of a reject. Raises: TypeError if `cause` is not text"""
    return Disposition(False, is_rejected=True, cause=_truncate_cause(cause))


def _truncate_cause(cause: str) -> str:
    """Shorten a cause to the size of a header, and replace characters that cannot be sent, such as NUL.

    Raises: TypeError if `cause` is not text
    """
    if not isinstance(cause, str):
        raise TypeError(f"cause must be text, not {cause!r}")
    # Each character has at least one byte.
    encoded = cause[:CAUSE_BYTES_MAX].replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace")
    return encoded[:CAUSE_BYTES_MAX].decode(errors="ignore")


def release(session: SessionCore, received: ReceivedMessage, owner: object) -> Flow[None]:
    session.release(received, owner)
    yield from session.client.wait_until_written()


def end_message_block(session: SessionCore, received: ReceivedMessage, error: BaseException | None) -> Flow[None]:
    """End a message's `Message.process` block: settle the message. In a transaction the message is only marked as
    failed, if an exception has left the block."""
    if received.state is not ReceivedMessageState.HELD:
        return
    if received.transaction is not None:
        if error is not None and counted_attempts_for(error) is CountedAttempts.ALL:
            session.mark_failed(received)
    elif error is None:
        yield from settle(session, received, ACKED, None)
    else:
        session.on_handling_failed(received, error)


def close_consumer(
    session: SessionCore,
    subscription: Subscription,
    owner: object,
    disposition: Disposition | None = None,
    *,
    owns_session: bool,
) -> Flow[None]:
    """Close a consumer. With `owns_session`, first settle the messages that wait for an automatic ACK, and also close
    the consumer's session. `disposition` says how to settle them; None releases them without an attempt."""
    if owns_session:
        session.settle_awaiting_auto_ack(disposition)
        session.close(owner)
    else:
        session.client.subscriptions.unsubscribe(subscription)
    yield from session.client.wait_until_written()


def end_consumer_block(
    session: SessionCore, subscription: Subscription, owner: object, error: BaseException | None, *, owns_session: bool
) -> Flow[None]:
    """Close a consumer at the end of its block. `error` is the exception that has left the block; None at a normal
    end."""
    disposition: Disposition | None = ACKED
    if error is not None:
        disposition = FAILED if counted_attempts_for(error) is CountedAttempts.ALL else None
    yield from close_consumer(session, subscription, owner, disposition, owns_session=owns_session)


def close_session(session: SessionCore, owner: object) -> Flow[None]:
    session.close(owner)
    yield from session.client.wait_until_written()


# ---- Transactions ----


def commit(session: SessionCore, timeout: float, producer: str | None = None, number: int = 0) -> Flow[bool]:
    """Commit the session's transaction. Return False if the broker has executed a commit with this number before.

    Raises: ValueError if producer or number is invalid; RolledBack if the transaction had no effect; InDoubt if its
    outcome is not known
    """
    caller_number = None
    if producer is not None or number:
        if not (isinstance(producer, str) and 0 < len(producer) <= NAME_LENGTH_MAX):
            raise ValueError(
                f"producer must be a name of 1 to {NAME_LENGTH_MAX} characters, together with number, not {producer!r}"
            )
        if type(number) is not int or not 1 <= number <= PRODUCER_NUMBER_MAX:
            raise ValueError(f"number must be a whole number, 1 or more, together with producer, not {number!r}")
        caller_number = CallerNumber(producer, number)
    return (yield from session.commit(session.client.clock() + timeout, caller_number))


def rollback(session: SessionCore, owner: object, counted: CountedAttempts) -> Flow[None]:
    session.rollback(owner, counted=counted)
    yield from session.client.wait_until_written()


class TransactionBlock:
    """Block (`async with` or `with`) of a program for one transaction. Its end commits or rolls back; afterwards
    `outcome` has the outcome."""

    def __init__(self, session: SessionCore, timeout: float) -> None:
        """Make a block whose commit may take `timeout` seconds.

        Raises: LocalProtocolError if the session is not transacted
        """
        self.session = session
        self._transactions = session.require_transactions()
        self._transaction: TransactionState | None = None
        """Transaction of the block. None before the block's end, and if nothing was received or sent in the block."""
        self._empty_outcome = Outcome.OPEN
        self._timeout = timeout
        self._is_used = False
        self._previous: TransactionState | None = None
        """Last transaction of the session that had ended when the block began."""
        self._undecided: TransactionState | None = None
        """Transaction that had not ended when the block began: its commit was cancelled, or is in doubt."""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the transaction. Before the end it is the transaction's state."""
        return self._empty_outcome if self._transaction is None else self._transaction.outcome

    @property
    def token(self) -> str:
        return "" if self._transaction is None else self._transaction.token

    def enter(self) -> None:
        """Start the block.

        Raises: LocalProtocolError if the block was used before, or the session is inside another block
        """
        if self._is_used:
            raise LocalProtocolError(
                "the block of a transaction can be used only once: make a new block with session.transaction()"
            )
        transactions = self.session.require_transactions()
        transactions.enter_block(self)
        self._is_used = True
        self._previous = transactions.last_ended
        self._undecided = transactions.undecided_transaction

    def mark_failed(self, received: ReceivedMessage) -> None:
        """Mark a message as a cause of the transaction's failure.

        Raises: LocalProtocolError outside the block, or if the message does not belong to the transaction
        """
        if not self._transactions.is_in_block(self):
            raise LocalProtocolError(
                "the block of this transaction has not started, or has ended: settle the message inside the block"
            )
        self.session.mark_failed(received)

    def exit(self, error: BaseException | None, owner: object) -> Flow[None]:
        """Commit at a normal end; roll back if `error` has left the block.

        Raises: RolledBack if the commit had no effect; InDoubt if the commit's outcome is not known
        """
        session = self.session
        transactions = self._transactions
        transactions.exit_block()
        transaction = transactions.transaction
        is_begun = transaction is None or transaction is not self._undecided
        if not is_begun:
            transaction = None
        elif transaction is None and transactions.last_ended not in (self._previous, self._undecided):
            # Its code has ended the transaction itself.
            transaction = transactions.last_ended
        try:
            if not is_begun:
                # The previous transaction is still in doubt, so nothing was delivered or sent in the block.
                pass
            elif error is None:
                try:
                    yield from commit(session, self._timeout)
                except LocalProtocolError:
                    # The broker does not support this commit, and the block is over.
                    yield from rollback(session, owner, CountedAttempts.NONE)
                    raise
            elif transactions.undecided_transaction is None:
                yield from rollback(session, owner, counted_attempts_for(error))
        finally:
            self._transaction = transaction
            self._empty_outcome = Outcome.COMMITTED if error is None else Outcome.ROLLED_BACK


def _parse_token(token: str) -> tuple[str, str, int]:
    """Return store id, producer and number from a token of `InDoubt`. Raises: ValueError for another text"""
    store, producer, number = (*token.split(" "), "", "", "")[:3]
    is_number = number.isascii() and number.isdigit() and 1 <= int(number[:20]) <= PRODUCER_NUMBER_MAX
    if not (store and producer and is_number and token.count(" ") == 2):
        raise ValueError(f"{token!r} is not a token: use the attribute `token` of an InDoubt, unchanged")
    return store, producer, int(number)


def encode_send_in_transaction(destination: str, options: SendOptions) -> EncodedSend:
    """Encode the options of a SEND in a transaction. Raises: ValueError, TypeError for an invalid option"""
    encoded = encode_send(destination, options)
    if encoded.producer is not None:
        raise ValueError("a send in a transaction cannot have producer and number: set them at the commit")
    return encoded


# ---- Sends and requests ----


def wait_until_send_confirmed(send: PendingSend) -> Flow[None]:
    """Wait until a send is confirmed or has failed. Raises: the error of the send"""
    if not send.is_done:
        if send.completed is None:
            send.completed = Signal()
        yield Wait(send.completed)
    if send.error is not None:
        batch = send.batch
        if batch is not None and batch.error is send.error:
            # The caller gets the error now.
            batch.error = None
        raise send.error


def send_request(
    client: Client, destination: str, body: bytes | str, options: SendOptions, deadline: float
) -> Flow[Content]:
    """Send a request, and return the reply.

    Raises: ValueError for an invalid option; Refused if the broker refuses the request; TimeoutError at the deadline;
    ConnectionLost before the reply
    """
    encoded = encode_send(destination, {"persistent": False, **options})
    for name in ("reply_to", "correlation_id", "producer"):
        if name in options:
            raise ValueError(f"{name} of a request is set by the client: leave it out")
    head = encoded.head
    if encoded.ttl_s is not None:
        client.check_open()
        called_at = client.clock()
        link = yield from client.wait_until_up(deadline, "send a request")
        link.require_truenext("a ttl")
        head += ttl_line(encoded.ttl_s - (client.clock() - called_at)).encode()
    timeout_text = f"there was no reply from {destination} in time: check that a consumer replies, or wait longer"
    frame = yield from client.send_request(head, encode_body(body), deadline, timeout_text)
    return make_content(frame)


def send_control_request(client: Client, verb: str, arguments: object, deadline: float) -> Flow[bytes]:
    """Send a control request, and return the broker's answer, as JSON.

    Raises: Refused if the broker refuses the request; TimeoutError at the deadline; ConnectionLost before the answer;
    LocalProtocolError if the broker is not truenext
    """
    head, body = encode_control_request(verb, arguments)
    client.check_open()
    link = yield from client.wait_until_up(deadline, "send a control request")
    link.require_truenext("a control request")
    timeout_text = f"the broker has not answered the control request {verb!r} in time: wait longer"
    frame = yield from client.send_request(head, body, deadline, timeout_text)
    return frame.body


def reply_destination(message: Content) -> str:
    """Return the destination for a reply. Raises: ValueError if the message has no `reply_to`"""
    if not message.reply_to:
        raise ValueError(f"{message!r} has no reply-to: there is no destination for a reply")
    return message.reply_to


def reply_options(message: Content) -> SendOptions:
    options: SendOptions = {"persistent": False}
    if message.correlation_id:
        options["correlation_id"] = message.correlation_id
    return options


def resolve_outcome(client: Client, doubt: InDoubt | str, deadline: float) -> Flow[str]:
    """Return the outcome of a transaction in doubt: "committed", "rolled back" or "unknown".

    Raises: ValueError, TypeError for an invalid token; TimeoutError at the deadline; ConnectionLost before the answer
    """
    token = doubt
    if isinstance(doubt, InDoubt):
        token = doubt.token
        if not token:
            # The broker cannot be asked, or the program gave the number of the commit.
            return "unknown"
    if not isinstance(token, str):
        raise TypeError(f"outcome needs an InDoubt, or its token, which is text, not {token!r}")
    store, producer, number = _parse_token(token)
    link = yield from client.wait_until_up(deadline, "query the outcome of a transaction")
    if link.store_id != store:
        return "unknown"
    arguments = {"producer": producer, "commit": number, "resolve": True}
    reply = yield from send_control_request(client, "producer", arguments, deadline)
    result = msgspec.json.decode(reply, type=ProducerStatus).outcome
    return result if result in ("committed", "rolled back") else "unknown"
