"""A broker that loses the connection of a COMMIT when a test says so."""

from asyncio import AbstractEventLoop
from collections.abc import Iterable, Iterator
from typing import cast

from truenext.broker.broker import Broker, PendingCommand
from truenext.commands import Command, Commit
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.testing.clock import Clock
from truenext.testing.connection import CuttableConnection, LostCommit
from truenext.testing.disk import Disk, WriteTimeOfDisk
from truenext.testing.faults import Faults


class FaultyBroker(Broker):
    def __init__(self, engine: Engine, disk: Disk, loop: AbstractEventLoop, clock: Clock, faults: Faults) -> None:
        super().__init__(
            engine, disk, loop, clock_ns=clock.wall_ns, monotonic_ns=clock.steady_ns, write_time=WriteTimeOfDisk(disk)
        )
        self._faults = faults
        self._commit_alone = engine.commit
        self._actions[Commit] = self._commit_and_lose
        self._losing: set[ConnectionState] = set()
        """Those whose COMMIT is on its way to the disk, and whose connections are lost then."""

    def execute(self, session: ConnectionState, commands: Iterable[Command]) -> PendingCommand | None:
        return super().execute(session, self._until_lost(session, commands))

    def connection_closed(self, session: ConnectionState) -> None:
        super().connection_closed(session)
        self._losing.discard(session)

    def _until_lost(self, session: ConnectionState, commands: Iterable[Command]) -> Iterator[Command]:
        if session in self._losing:
            return
        for command in commands:
            if isinstance(command, Commit) and self._faults.loses_commit("before"):
                cast(CuttableConnection, self._peers[session]).drop("dropped before a COMMIT, by a test")
                return
            yield command
            if session in self._losing:
                return

    def _commit_and_lose(self, session: ConnectionState, commit: Commit) -> None:
        self._commit_alone(session, commit)
        # If it was refused, it is the next one.
        if self._faults.loses_commit("after"):
            self._losing.add(session)
            self.answer(session, LostCommit())
