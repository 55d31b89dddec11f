"""What `consume` does with what it gets, whether its handlers run in tasks or in threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.client.core.beside import Beside, SharedBuffer
from truenext.client.core.charging import Charge
from truenext.client.core.flows import TIMEOUT_S
from truenext.client.core.holding import State
from truenext.client.core.session import Session
from truenext.client.core.unit import Outcome
from truenext.client.core.verdict import DONE
from truenext.client.core.waiting import Flow, Signal, Wait
from truenext.errors import ClosedError, RolledBack

if TYPE_CHECKING:
    from truenext.client.core.client import Client
    from truenext.client.core.holding import Received, Subscription, Wanted
    from truenext.client.core.session import Mode


class Consuming:
    """One `consume`: its subscription, and the workers, each with a session of its own, that run handlers."""

    def __init__(self, client: Client, mode: Mode, beside: Beside) -> None:
        self.client = client
        self.error: BaseException | None = None
        """The first that has ended a worker."""
        self._mode = mode
        self._buffer = SharedBuffer(beside)
        self._subscription: Subscription | None = None
        self._working: dict[Session, object] = {}
        """Who works in it."""
        self._changed = Signal()

    def subscribe(self, wanted: Wanted) -> Flow[None]:
        """Raises: Refused, ClosedError, TimeoutError"""
        client = self.client
        self._subscription = yield from client.subscribe(wanted, self._buffer, client.clock() + TIMEOUT_S)

    # ---- Workers ----

    def session(self) -> Session:
        """For one more worker."""
        return Session(self.client, self._mode, self._buffer)

    def next(self, session: Session, owner: object) -> Flow[Received | None]:
        """What a worker is to handle. None: it has ended. Raises: Refused, ClosedError, ConnectionLost"""
        if not self._buffer.is_over:
            self._working[session] = owner
        while not session.is_closed:
            try:
                got = yield from session.receive(None, 1, None, owner)
            except RolledBack:
                session.rollback(owner, charge=Charge.NONE)
                continue
            return got[0] if got else None
        # Its handler has closed it, and with it what all get their messages from.
        self.stop()
        return None

    def handled(self, session: Session, received: Received, owner: object) -> Flow[None]:
        """The handler has returned. Raises: RolledBack, InDoubt, ClosedError"""
        if session.is_closed:
            session.give_back(received)
        elif session.transactions is not None:
            yield from session.commit(self.client.clock() + TIMEOUT_S)
        elif received.state is State.HELD:
            session.settle(received, DONE)

    def is_failure(self, error: Exception) -> bool:
        """Whether it is the handler's; what was rolled back from elsewhere, or closed, is not."""
        if isinstance(error, ClosedError):
            return not self.client.is_closed_by_program
        return not isinstance(error, RolledBack)

    def ended(self, session: Session, error: BaseException | None) -> None:
        """A worker has ended, for there is nothing more to do, or by an error: then no other goes on."""
        owner = self._working.pop(session, None)
        unit = session.unit
        if unit is not None and unit.outcome is Outcome.DOOMED:
            session.rollback(unit.owner, charge=Charge.NONE)
        session.leave(owner)
        if isinstance(error, ClosedError) and self.client.is_closed_by_program:
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
        for session in working:
            session.leave(None)
        if self._subscription is not None:
            self.client.subscriptions.unsubscribe(self._subscription)
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, Signal()
        changed.set()
