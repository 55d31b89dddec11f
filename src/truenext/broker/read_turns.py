"""Read turns: share the time for reading in one pass of the event loop among the connections that have input.

    there is time in this pass                 the connection is read
    the pass has no time left                  the connection waits, and is read after a turn
    commands of a connection have taken long   its remaining commands wait in the same way (execution.py)
    a command or an end has taken 20 ms        the user is set back for a second: others are read first

Waiting users are served in turn, one connection of each. So a user that floods the broker on many connections delays
only its own connections. A connection without a user counts as a user of its own.

One step may take 100 ms, such as a large COMMIT. Between two such steps of a user that is *set back*, connections of
other users are read, and a turn answers them. If others are read in every pass, the user is read in every second one.
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable
from functools import partial

from truenext.engine.state.consumer import ConnectionState
from truenext.model.limits import LONG_READ_NS, READ_NS_PER_PASS, SET_BACK_NS

_Key = str | ConnectionState
"""Name of the user; without one, the connection."""


class ReadTurns:
    def __init__(
        self,
        loop: AbstractEventLoop,
        monotonic_ns: Callable[[], int],
        *,
        user_name_of: Callable[[ConnectionState], str],
        resume: Callable[[ConnectionState], object],
        schedule_turn: Callable[[], object],
    ) -> None:
        """`resume` reads a connection, unless the connection must wait for another reason as well."""
        self._loop = loop
        self._monotonic_ns = monotonic_ns
        self._user_name_of = user_name_of
        self._resume = resume
        self._schedule_turn = schedule_turn
        self._began_ns = 0
        """Time at which the first connection of this pass was read; 0 before that."""
        self._waiting: dict[_Key, dict[ConnectionState, None]] = {}
        """Waiting connections by user. The user whose turn is next comes first, and of its connections the one that has
        waited longest."""
        self._keys: dict[ConnectionState, _Key] = {}
        self._set_back: dict[_Key, int] = {}
        """Users that are set back, each with the time until which this lasts."""
        self._waiting_set_back: dict[_Key, dict[ConnectionState, None]] = {}
        """Waiting connections of users that are set back, in the order of `_waiting`."""
        self._resumed: ConnectionState | None = None
        """Connection that is being resumed."""
        self._is_resume_due = False
        """True if a call of `_resume_some` is scheduled."""
        self._have_gone_first = False
        """True if, in the last pass, connections of other users were read, and those of users that are set back were
        not."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting or self._waiting_set_back)

    def has_time(self, session: ConnectionState) -> bool:
        """Return whether the connection may be read in this pass. If not, the caller must call `wait`."""
        if self._set_back and session is not self._resumed and self._key_of(session) in self._set_back:
            return False
        if not self._began_ns:
            self._began_ns = self._monotonic_ns()
            return True
        return self._monotonic_ns() - self._began_ns < READ_NS_PER_PASS

    def wait(self, session: ConnectionState) -> None:
        """Read the connection after the next turn, once the connections that began to wait earlier were read."""
        if session not in self._keys:
            key = self._keys[session] = self._key_of(session)
            waiting = self._waiting_set_back if key in self._set_back else self._waiting
            waiting.setdefault(key, {})[session] = None
            self._schedule_turn()

    def wait_for_others(self, session: ConnectionState) -> None:
        """Let a connection wait for its next turn, because its commands have used up the time of this read. If they
        have taken LONG_READ_NS or more, set back the connection's user."""
        if self._began_ns:
            self._count_time(self._key_of(session), self._began_ns)
        self.wait(session)

    def end(self, session: ConnectionState, end: Callable[[], object]) -> None:
        """End a connection by `end`. If that takes long, set back the connection's user."""
        # Its user is not known afterwards.
        self._measured(self._key_of(session), end)

    def remove(self, session: ConnectionState) -> None:
        """Forget a connection that is not read any more."""
        key = self._keys.pop(session, None)
        if key is not None:
            waiting = self._waiting_set_back if key in self._waiting_set_back else self._waiting
            sessions = waiting[key]
            del sessions[session]
            if not sessions:
                del waiting[key]

    def on_turn_done(self) -> None:
        self._began_ns = 0
        if self._set_back:
            now_ns = self._monotonic_ns()
            for key in [key for key, until_ns in self._set_back.items() if until_ns <= now_ns]:
                del self._set_back[key]
                if key in self._waiting_set_back:
                    self._waiting[key] = self._waiting_set_back.pop(key)
        if self.has_waiting and not self._is_resume_due:
            self._is_resume_due = True
            self._loop.call_soon(self._resume_some)

    def _resume_some(self) -> None:
        self._is_resume_due = False
        # After the turn, connections may have been read that did not wait.
        has_read = self._began_ns > 0 or bool(self._waiting)
        self._began_ns = 0
        self._resume_from(self._waiting)
        if self._waiting_set_back and not self._has_taken_long():
            # If others were read, a turn answers them first.
            self._have_gone_first = has_read and not self._have_gone_first
            if not self._have_gone_first:
                self._began_ns = 0
                self._resume_from(self._waiting_set_back)
        if not self._has_taken_long():
            # Connections that have not waited have their own time, unless a long command has used that up as well.
            self._began_ns = 0

    def _resume_from(self, waiting: dict[_Key, dict[ConnectionState, None]]) -> None:
        while waiting:
            key, sessions = next(iter(waiting.items()))
            session = self._resumed = next(iter(sessions))
            if not self.has_time(session):
                break
            self.remove(session)
            if sessions:
                del waiting[key]
                waiting[key] = sessions
            self._measured(key, partial(self._resume, session))
        self._resumed = None

    def _has_taken_long(self) -> bool:
        return self._began_ns > 0 and self._monotonic_ns() - self._began_ns >= 2 * READ_NS_PER_PASS

    def _key_of(self, session: ConnectionState) -> _Key:
        return self._user_name_of(session) or session

    def _measured(self, key: _Key, action: Callable[[], object]) -> None:
        began_ns = self._monotonic_ns()
        action()
        self._count_time(key, began_ns)

    def _count_time(self, key: _Key, began_ns: int) -> None:
        now_ns = self._monotonic_ns()
        if now_ns - began_ns >= LONG_READ_NS:
            self._set_back[key] = now_ns + SET_BACK_NS
            if key in self._waiting:
                self._waiting_set_back[key] = self._waiting.pop(key)
