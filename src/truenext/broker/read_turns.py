"""Read turns: share the time for reading in one pass of the event loop among the connections that have input.

    there is time in this pass                 the connection is read
    the pass has no time left                  the connection waits, and is read after a turn
    commands of a connection have taken long   its remaining commands wait in the same way (execution.py)

Waiting users are served in turn, one connection of each. So a user that floods the broker on many connections delays
only its own connections. A connection without a user counts as a user of its own.
"""

from asyncio import AbstractEventLoop
from collections.abc import Callable

from truenext.engine.state.consumer import ConnectionState
from truenext.model.limits import READ_NS_PER_PASS

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

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def has_time(self) -> bool:
        """Return whether one more connection may be read in this pass. If not, the caller must call `wait`."""
        if not self._began_ns:
            self._began_ns = self._monotonic_ns()
            return True
        return self._monotonic_ns() - self._began_ns < READ_NS_PER_PASS

    def wait(self, session: ConnectionState) -> None:
        """Read the connection after the next turn, once the connections that began to wait earlier were read."""
        if session not in self._keys:
            key = self._keys[session] = self._user_name_of(session) or session
            self._waiting.setdefault(key, {})[session] = None
            self._schedule_turn()

    def remove(self, session: ConnectionState) -> None:
        """Forget a connection that is not read any more."""
        key = self._keys.pop(session, None)
        if key is not None:
            sessions = self._waiting[key]
            del sessions[session]
            if not sessions:
                del self._waiting[key]

    def on_turn_done(self) -> None:
        self._began_ns = 0
        if self._waiting:
            self._loop.call_soon(self._resume_some)

    def _resume_some(self) -> None:
        self._began_ns = 0
        while self._waiting and self.has_time():
            session = self._next()
            self._resume(session)
        if self._monotonic_ns() - self._began_ns < 2 * READ_NS_PER_PASS:
            # Connections that have not waited have their own time, unless a long command has used that up as well.
            self._began_ns = 0

    def _next(self) -> ConnectionState:
        key, sessions = next(iter(self._waiting.items()))
        session = next(iter(sessions))
        self.remove(session)
        if sessions:
            del self._waiting[key]
            self._waiting[key] = sessions
        return session
