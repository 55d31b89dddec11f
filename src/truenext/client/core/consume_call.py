"""What `consume` does with what it gets, whether its handlers run in tasks or in threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.client.core.buffer import ReceivedState
from truenext.client.core.counted_attempts import CountedAttempts
from truenext.client.core.disposition import DONE
from truenext.client.core.flows import TIMEOUT_S
from truenext.client.core.isolation import HandlerIsolation, SharedBuffer
from truenext.client.core.session import SessionCore
from truenext.client.core.transaction_state import Outcome
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import ClosedError, InDoubt, RolledBack

if TYPE_CHECKING:
    from truenext.client.core.buffer import Received, Subscription, SubscriptionOptions
    from truenext.client.core.client import Client
    from truenext.client.core.session import Mode


class ConsumeCall:
    """One `consume`: its subscription, and the workers that run handlers."""

    def __init__(self, client: Client, mode: Mode, isolation: HandlerIsolation) -> None:
        self.client = client
        self.error: BaseException | None = None
        """The first that has ended a worker."""
        self._mode = mode
        self._buffer = SharedBuffer(isolation)
        self._subscription: Subscription | None = None
        self._working: dict[HandlerWorker, object] = {}
        """With the task or thread of each."""
        self._changed = Signal()

    def subscribe(self, options: SubscriptionOptions) -> Flow[None]:
        """Raises: Refused, ClosedError, TimeoutError"""
        client = self.client
        self._subscription = yield from client.subscribe(options, self._buffer, client.clock() + TIMEOUT_S)

    # ---- Workers ----

    def make_worker(self) -> HandlerWorker:
        return HandlerWorker(self)

    def make_session(self) -> SessionCore:
        """A session for a worker."""
        return SessionCore(self.client, self._mode, self._buffer)

    def start(self, worker: HandlerWorker, owner: object) -> None:
        """The worker waits for a message, or has one: `wait_until_handled` waits for the worker."""
        if not self._buffer.is_closed:
            self._working[worker] = owner

    def worker_idle(self, worker: HandlerWorker) -> object:
        """The worker has no message, and takes none for now. Returns its task or thread."""
        owner = self._working.pop(worker, None)
        self._notify_changed()
        return owner

    def worker_ended(self, error: BaseException | None) -> None:
        """A worker has ended, for there is nothing more to do, or by an error: then no other goes on."""
        if isinstance(error, ClosedError | InDoubt) and self.client.is_closed_by_program:
            # What was in doubt has been logged.
            error = None
        if self.error is None:
            self.error = error
        self.stop()

    # ---- The end ----

    def stop(self) -> None:
        """No handler begins any more."""
        self._buffer.is_closed = True
        if self._subscription is not None:
            self.client.subscriptions.pause(self._subscription)
        self._buffer.wake_all()
        self._notify_changed()

    @property
    def is_stopped(self) -> bool:
        return self._buffer.is_closed

    def wait_until_stopped(self) -> Flow[None]:
        """Until no handler begins any more."""
        while not self._buffer.is_closed:
            yield Wait(self._changed)

    def wait_until_handled(self, deadline: float | None = None, except_owner: object = None) -> Flow[bool]:
        """Until no handler runs any more; `except_owner` is who asks, if that is one. False if that was not in time."""
        while any(owner is not except_owner for owner in self._working.values()):
            in_time = yield Wait(self._changed, deadline)
            if not in_time:
                return False
        return True

    def abandon(self) -> None:
        """Handlers that run still are not waited for: what they have goes back."""
        working, self._working = self._working, {}
        for worker in working:
            worker.session.end(None)
        if self._subscription is not None:
            self.client.subscriptions.unsubscribe(self._subscription)
        self._notify_changed()

    def _notify_changed(self) -> None:
        changed, self._changed = self._changed, Signal()
        changed.set()


class HandlerWorker:
    """What runs one handler after the other, in one task or thread.

    Each call of a handler in transactions has a session of its own, which ends with the call: what the handler has left
    running can put nothing into the transaction of another message, and cannot commit it.
    """

    __slots__ = ("_call", "session")

    def __init__(self, call: ConsumeCall) -> None:
        self._call = call
        self.session = call.make_session()
        """That of the handler that runs, or is next."""

    def next(self, owner: object) -> Flow[Received | None]:
        """Return the message to handle; None at the end. Raises: Refused, ClosedError, ConnectionLost"""
        call = self._call
        if self.session.is_expired:
            yield from self._renew()
        call.start(self, owner)
        while not self.session.is_closed:
            try:
                messages = yield from self.session.receive(None, 1, None, owner)
            except RolledBack:
                self.session.rollback(owner, counted=CountedAttempts.NONE)
                continue
            return messages[0] if messages else None
        # Its handler has closed the session, and with it what all workers get their messages from.
        call.stop()
        return None

    def _renew(self) -> Flow[None]:
        """Raises: InDoubt if the connection ends for good"""
        call = self._call
        transactions = self.session.transactions
        assert transactions is not None, "no other session expires"
        if not transactions.is_ready() and not call.is_stopped:
            # A commit is in doubt, or the broker has no room: no handler runs meanwhile.
            call.worker_idle(self)
            yield from transactions.wait_until_ready()
        self.session.end_for_next()
        self.session = call.make_session()

    def handled(self, received: Received) -> Flow[None]:
        """The handler has returned. Raises: RolledBack, InDoubt, ClosedError"""
        session = self.session
        if session.is_closed:
            session.release(received)
        elif session.transactions is not None:
            yield from session.commit_and_expire(session.client.clock() + TIMEOUT_S)
        elif received.state is ReceivedState.HELD:
            session.settle(received, DONE)

    def failed(self, received: Received, error: BaseException) -> None:
        """The handler has raised, or what it has done did not happen."""
        session = self.session
        if session.transactions is not None and not session.is_closed:
            session.expire()
        session.handling_failed(received, error)

    def is_failure(self, error: Exception) -> bool:
        """Tell whether the handler has failed; what was rolled back from elsewhere, or closed, is no failure."""
        if isinstance(error, ClosedError):
            return not self._call.client.is_closed_by_program
        return not isinstance(error, RolledBack)

    def ended(self, error: BaseException | None) -> None:
        """Nothing more is handled here."""
        call, session = self._call, self.session
        owner = call.worker_idle(self)
        transactions, transaction = session.transactions, session.transaction
        if transactions is not None and transaction is not None and transaction.outcome is Outcome.ROLLBACK_ONLY:
            transactions.rollback(transaction.owner, counted=CountedAttempts.NONE)
        session.end(owner)
        call.worker_ended(error)
