"""Broker that cuts the connection of a COMMIT when a test says so."""

from asyncio import AbstractEventLoop
from collections.abc import Iterable, Iterator
from typing import cast

from truenext.broker.broker import Broker
from truenext.broker.peer import PendingCommand
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.model.commands import Command, Commit
from truenext.testing.clock import OffsetClock
from truenext.testing.connection import CloseAfterCommit, CuttableConnection
from truenext.testing.disk import FaultyStore, FaultyWriteTimeEstimate
from truenext.testing.faults import Faults


class FaultyBroker(Broker):
    def __init__(
        self, engine: Engine, store: FaultyStore, loop: AbstractEventLoop, clock: OffsetClock, faults: Faults
    ) -> None:
        super().__init__(
            engine,
            store,
            loop,
            clock_ns=clock.wall_ns,
            monotonic_ns=clock.steady_ns,
            write_time=FaultyWriteTimeEstimate(store),
        )
        self._faults = faults
        self._engine_commit = engine.commands.commit
        self._execution.actions[Commit] = self._commit_and_lose_connection
        self._losing_sessions: set[ConnectionState] = set()
        """Sessions with an executed COMMIT that is not durable yet. The connection of such a session is cut when the
        COMMIT is durable."""

    def run_turn_soon(self) -> None:
        self._schedule_turn()

    def execute(self, session: ConnectionState, commands: Iterable[Command]) -> PendingCommand | None:
        return super().execute(session, self._commands_until_lost(session, commands))

    def connection_closed(self, session: ConnectionState) -> None:
        super().connection_closed(session)
        self._losing_sessions.discard(session)

    def _commands_until_lost(self, session: ConnectionState, commands: Iterable[Command]) -> Iterator[Command]:
        if session in self._losing_sessions:
            return
        for command in commands:
            if isinstance(command, Commit) and self._faults.take_commit_loss("before"):
                cast(CuttableConnection, self._peers[session]).drop("dropped before a COMMIT, by a test")
                return
            yield command
            if session in self._losing_sessions:
                return

    def _commit_and_lose_connection(self, session: ConnectionState, commit: Commit) -> None:
        self._engine_commit(session, commit)
        # A refused COMMIT raises above, so that the fault stays for the next one.
        if self._faults.take_commit_loss("after"):
            self._losing_sessions.add(session)
            self.answer(session, CloseAfterCommit())
