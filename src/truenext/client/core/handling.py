"""What `consume` does with what it gets, whether its handlers run in tasks or in threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.client.core.beside import Beside, SharedBuffer
from truenext.client.core.counted_attempts import CountedAttempts
from truenext.client.core.disposition import DONE
from truenext.client.core.flows import TIMEOUT_S
from truenext.client.core.holding import ReceivedState
from truenext.client.core.session import SessionCore
from truenext.client.core.transaction_state import Outcome
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import ClosedError, InDoubt, RolledBack

if TYPE_CHECKING:
    from truenext.client.core.client import Client
    from truenext.client.core.holding import Received, Subscription, Wanted
    from truenext.client.core.session import Mode


class Consuming:
    """One `consume`: its subscription, and the workers that run handlers."""

    def __init__(self, client: Client, mode: Mode, beside: Beside) -> None:
        self.client = client
        self.error: BaseException | None = None
        """The first that has ended a worker."""
        self._mode = mode
        self._buffer = SharedBuffer(beside)
        self._subscription: Subscription | None = None
        self._working: dict[HandlerWorker, object] = {}
        """With the task or thread of each."""
        self._changed = Signal()

    def subscribe(self, wanted: Wanted) -> Flow[None]:
        """Raises: Refused, ClosedError, TimeoutError"""
        client = self.client
        self._subscription = yield from client.subscribe(wanted, self._buffer, client.clock() + TIMEOUT_S)

    # ---- Workers ----

    def worker(self) -> HandlerWorker:
        return HandlerWorker(self)

    def session(self) -> SessionCore:
        """A session for a worker."""
        return SessionCore(self.client, self._mode, self._buffer)

    def start(self, worker: HandlerWorker, owner: object) -> None:
        """The worker waits for a message, or has one: `until_handled` waits for the worker."""
        if not self._buffer.is_over:
            self._working[worker] = owner

    def end(self, worker: HandlerWorker) -> object:
        """The worker has no message, and takes none for now. Returns its task or thread."""
        owner = self._working.pop(worker, None)
        self._change()
        return owner

    def ended(self, error: BaseException | None) -> None:
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
        self._buffer.is_over = True
        if self._subscription is not None:
            self.client.subscriptions.pause(self._subscription)
        self._buffer.wake_all()
        self._change()

    @property
    def is_over(self) -> bool:
        return self._buffer.is_over

    def until_stopped(self) -> Flow[None]:
        """Until no handler begins any more."""
        while not self._buffer.is_over:
            yield Wait(self._changed)

    def until_handled(self, deadline: float | None = None, but: object = None) -> Flow[bool]:
        """Until no handler runs any more; `but` is who asks, if that is one. False if that was not in time."""
        while any(owner is not but for owner in self._working.values()):
            came = yield Wait(self._changed, deadline)
            if not came:
                return False
        return True

    def leave(self) -> None:
        """Handlers that run still are not waited for: what they have goes back."""
        working, self._working = self._working, {}
        for worker in working:
            worker.session.leave(None)
        if self._subscription is not None:
            self.client.subscriptions.unsubscribe(self._subscription)
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, Signal()
        changed.set()


class HandlerWorker:
    """What runs one handler after the other, in one task or thread.

    Each call of a handler in transactions has a session of its own, which ends with the call: what the handler has left
    running can put nothing into the transaction of another message, and cannot commit it.
    """

    __slots__ = ("_consuming", "session")

    def __init__(self, consuming: Consuming) -> None:
        self._consuming = consuming
        self.session = consuming.session()
        """That of the handler that runs, or is next."""

    def next(self, owner: object) -> Flow[Received | None]:
        """Return the message to handle; None at the end. Raises: Refused, ClosedError, ConnectionLost"""
        consuming = self._consuming
        if self.session.is_expired:
            yield from self._renew()
        consuming.start(self, owner)
        while not self.session.is_closed:
            try:
                got = yield from self.session.receive(None, 1, None, owner)
            except RolledBack:
                self.session.rollback(owner, counted=CountedAttempts.NONE)
                continue
            return got[0] if got else None
        # Its handler has closed the session, and with it what all workers get their messages from.
        consuming.stop()
        return None

    def _renew(self) -> Flow[None]:
        """Raises: InDoubt if the connection ends for good"""
        consuming = self._consuming
        transactions = self.session.transactions
        assert transactions is not None, "no other session expires"
        if not transactions.may_go_on() and not consuming.is_over:
            # A commit is in doubt, or the broker has no room: no handler runs meanwhile.
            consuming.end(self)
            yield from transactions.until_one_may_go_on()
        self.session.leave_to_next()
        self.session = consuming.session()

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
        session.ended(received, error)

    def is_failure(self, error: Exception) -> bool:
        """Tell whether the handler has failed; what was rolled back from elsewhere, or closed, is no failure."""
        if isinstance(error, ClosedError):
            return not self._consuming.client.is_closed_by_program
        return not isinstance(error, RolledBack)

    def ended(self, error: BaseException | None) -> None:
        """Nothing more is handled here."""
        consuming, session = self._consuming, self.session
        owner = consuming.end(self)
        transactions, transaction = session.transactions, session.transaction
        if transactions is not None and transaction is not None and transaction.outcome is Outcome.DOOMED:
            transactions.rollback(transaction.owner, counted=CountedAttempts.NONE)
        session.leave(owner)
        consuming.ended(error)
