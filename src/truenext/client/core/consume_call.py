"""One call of `consume`, and the workers that run its handlers, both for tasks and for threads."""

from __future__ import annotations

from truenext.client.core.buffer import ReceivedMessage, ReceivedMessageState, Subscription, SubscriptionOptions
from truenext.client.core.client import Client
from truenext.client.core.disposition import ACKED, CountedAttempts
from truenext.client.core.flows import DEFAULT_TIMEOUT_S
from truenext.client.core.isolation import HandlerIsolation, SharedReceiveBuffer
from truenext.client.core.session import SessionCore, SessionMode
from truenext.client.core.transaction_state import Outcome
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import ClosedError, InDoubt, RolledBack


class ConsumeCall:
    """One call of `consume`: its subscription, and which of its workers have work."""

    def __init__(self, client: Client, mode: SessionMode, isolation: HandlerIsolation) -> None:
        self.client = client
        self.first_error: BaseException | None = None
        self._mode = mode
        self._buffer = SharedReceiveBuffer(isolation)
        self._subscription: Subscription | None = None
        self._owner_by_worker: dict[HandlerWorker, object] = {}
        """Task or thread of each worker that has a message, or waits for one."""
        self._changed = Signal()

    def subscribe(self, options: SubscriptionOptions) -> Flow[None]:
        """Subscribe, and wait until the broker has confirmed the subscription.

        Raises: Refused if the broker refuses the subscription; TimeoutError without an answer; ClosedError if the
        connection is closed
        """
        client = self.client
        self._subscription = yield from client.subscribe(options, self._buffer, client.clock() + DEFAULT_TIMEOUT_S)

    # ---- Workers ----

    def make_session(self) -> SessionCore:
        return SessionCore(self.client, self._mode, self._buffer)

    def add_working(self, worker: HandlerWorker, owner: object) -> None:
        """Record that a worker has a message, or waits for one. `wait_until_handled` waits for this worker."""
        if not self._buffer.is_closed:
            self._owner_by_worker[worker] = owner

    def remove_working(self, worker: HandlerWorker) -> object:
        """Record that a worker has no message, and gets none for now. Return the worker's task or thread."""
        owner = self._owner_by_worker.pop(worker, None)
        self._notify_changed()
        return owner

    def on_worker_ended(self, error: BaseException | None) -> None:
        """Stop the call, because one of its workers has ended. `error` is the worker's error, if there was one."""
        if isinstance(error, ClosedError | InDoubt) and self.client.is_closed_by_program:
            # The program has closed the connection itself. A commit in doubt was logged before.
            error = None
        if self.first_error is None:
            self.first_error = error
        self.stop()

    # ---- The end ----

    def stop(self) -> None:
        """Let no further handler start."""
        self._buffer.is_closed = True
        if self._subscription is not None:
            self.client.subscriptions.pause(self._subscription)
        self._buffer.wake_all()
        self._notify_changed()

    @property
    def is_stopped(self) -> bool:
        return self._buffer.is_closed

    def wait_until_stopped(self) -> Flow[None]:
        while not self._buffer.is_closed:
            yield Wait(self._changed)

    def wait_until_handled(self, deadline: float | None = None, except_owner: object = None) -> Flow[bool]:
        """Wait until no handler runs. The handler that runs in `except_owner` (a task or thread) is not waited for,
        because this handler may be the caller. Return False at the deadline."""
        while any(owner is not except_owner for owner in self._owner_by_worker.values()):
            in_time = yield Wait(self._changed, deadline)
            if not in_time:
                return False
        return True

    def abandon_handlers(self) -> None:
        """End the sessions of running handlers, and release their messages."""
        working, self._owner_by_worker = self._owner_by_worker, {}
        for worker in working:
            worker.session.end(None)
        if self._subscription is not None:
            self.client.subscriptions.unsubscribe(self._subscription)
        self._notify_changed()

    def _notify_changed(self) -> None:
        changed, self._changed = self._changed, Signal()
        changed.set()


class HandlerWorker:
    """Worker that runs one handler after the other, in one task or thread.

    If handlers run in transactions, each call of a handler has its own session, which ends with the call. Code that
    outlives its handler cannot send in the transaction of a later message, and cannot commit it.
    """

    def __init__(self, call: ConsumeCall) -> None:
        self._consume_call = call
        self.session = call.make_session()
        """Session of the handler that runs now, or that runs next."""

    def next_message(self, owner: object) -> Flow[ReceivedMessage | None]:
        """Return the next message to process, or None when the call has ended.

        Raises: Refused, ConnectionLost if the subscription or the connection has ended; ClosedError if the program has
        closed the connection
        """
        call = self._consume_call
        if self.session.is_expired:
            yield from self._renew_session()
        call.add_working(self, owner)
        while not self.session.is_closed:
            try:
                messages = yield from self.session.receive(None, 1, None, owner)
            except RolledBack:
                self.session.rollback(owner, counted=CountedAttempts.NONE)
                continue
            return messages[0] if messages else None
        # The handler has closed the session, and with it the buffer of all workers.
        call.stop()
        return None

    def _renew_session(self) -> Flow[None]:
        """Make the session for the next message. If a commit is in doubt, first wait for its outcome.

        Raises: InDoubt if the connection ends for good before the outcome is known
        """
        call = self._consume_call
        transactions = self.session.transactions
        assert transactions is not None, "no other session expires"
        if not transactions.is_ready() and not call.is_stopped:
            # A commit is in doubt, or the broker has no room: no handler runs meanwhile.
            call.remove_working(self)
            yield from transactions.wait_until_ready()
        self.session.free_for_next_session()
        self.session = call.make_session()

    def on_processed(self, received: ReceivedMessage) -> Flow[None]:
        """Settle a message whose handler has returned.

        Raises: RolledBack, InDoubt if the commit of the message's transaction fails; ClosedError if the connection is
        closed
        """
        session = self.session
        if session.is_closed:
            session.release(received)
        elif session.transactions is not None:
            yield from session.commit_and_expire(session.client.clock() + DEFAULT_TIMEOUT_S)
        elif received.state is ReceivedMessageState.HELD:
            session.settle(received, ACKED)

    def on_handler_failed(self, received: ReceivedMessage, error: BaseException) -> None:
        """Settle a message whose handler has raised `error`, or whose transaction was rolled back."""
        session = self.session
        if session.transactions is not None and not session.is_closed:
            session.expire()
        session.on_handling_failed(received, error)

    def is_handler_failure(self, error: Exception) -> bool:
        """Return whether `error` is the fault of the handler. RolledBack is not, nor is ClosedError after the program
        has closed the connection."""
        if isinstance(error, ClosedError):
            return not self._consume_call.client.is_closed_by_program
        return not isinstance(error, RolledBack)

    def on_ended(self, error: BaseException | None) -> None:
        """End the worker's session, and stop the call."""
        call, session = self._consume_call, self.session
        owner = call.remove_working(self)
        transactions, transaction = session.transactions, session.transaction
        if transactions is not None and transaction is not None and transaction.outcome is Outcome.ROLLBACK_ONLY:
            transactions.rollback(transaction.owner, counted=CountedAttempts.NONE)
        session.end(owner)
        call.on_worker_ended(error)
