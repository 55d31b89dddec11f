"""How flows are begun by this process, and who waits for their replies."""

from __future__ import annotations

import asyncio
import random
import secrets
from typing import TYPE_CHECKING, Any

from truenext.errors import RolledBack
from truenext.stage.asking import Asking
from truenext.stage.committing import bodies_of, refused_with, send_all, size_of
from truenext.stage.core.initiation import Initiation
from truenext.stage.core.said import Said
from truenext.stage.hooks import call_hooks
from truenext.stage.sessions import Sessions

if TYPE_CHECKING:
    from truenext.errors import InDoubt
    from truenext.stage.core.beginning import BeginOptions
    from truenext.stage.core.definitions import Endpoint
    from truenext.stage.lane import Lane
    from truenext.stage.world import World

PAUSE_S = 0.05
"""Until what was rolled back is sent again; each pause is twice as long as the one before."""
PAUSE_MAX_S = 1.0


class Initiator:
    def __init__(self, world: World, lane: Lane) -> None:
        """`lane` is whose connection is used."""
        self._world = world
        self._lane = lane
        self._sessions = Sessions(lane.connection)
        self._asking = Asking(world.service)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._world.loop

    def initiation(self) -> tuple[Said, Initiation]:
        said = Said(secrets.token_hex(16), self._world.service)
        return said, Initiation(said, self._world.now_ms(), self._world.stages)

    async def initiate(self, said: Said, timeout: float) -> None:
        """Send all that was said, in one transaction.

        Raises: RolledBack if nothing of it happened; InDoubt if that is not known; FlowError
        """
        if not said.outgoing:
            await call_hooks(said, {"service": self._world.service})
            return
        bodies = bodies_of(said.outgoing, self._world.chain, None)
        deadline = self._world.loop.time() + timeout
        lane, pause_s = self._lane, PAUSE_S
        while True:
            left_s = max(deadline - self._world.loop.time(), 0.001)
            try:
                async with (
                    lane.transactions.taken(1),
                    lane.transaction_bytes.taken(size_of(bodies)),
                    self._sessions.one() as session,
                ):
                    await send_all(session, said.outgoing, bodies, left_s)
                    await session.commit(timeout=left_s)
                break
            except TimeoutError as error:
                raise RolledBack(f"nothing was sent: the broker was not there within {timeout:g} seconds") from error
            except RolledBack as error:
                # Nothing of it happened, so it can be sent again, unless the broker does not want it. The time that is
                # left is for the answer, too: without one it would be in doubt.
                if refused_with(error) is not None or self._world.loop.time() + 2 * pause_s >= deadline:
                    raise
            # A broker that has no room is not to be kept busy with that.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
        await call_hooks(said, {"service": self._world.service})

    async def ask(
        self, to: Endpoint[Any, Any], message: object, trace: str, timeout: float, options: BeginOptions
    ) -> object:
        """Raises: ValueError; TimeoutError if no reply comes in time; NotDecoded if it is none; as `initiate`"""
        deadline = self._world.loop.time() + checked_timeout(timeout)
        await self._asking.subscribe(self._lane.connection)
        reply_to, number, reply = self._asking.question(to)
        try:
            said, initiation = self.initiation()
            initiation.send(to, message, trace=trace, reply_to=reply_to, reply_state=number, **options)
            await self.initiate(said, timeout)
            async with asyncio.timeout_at(deadline):
                return await reply
        except TimeoutError:
            raise TimeoutError(f"{to.name} has not replied within {timeout:g} seconds; it may do so yet") from None
        finally:
            self._asking.forget(number)

    async def outcome(self, doubt: InDoubt | str, timeout: float) -> str:
        """Raises: as `Connection.outcome`"""
        return await self._lane.connection.outcome(doubt, timeout=timeout)

    async def stop(self) -> None:
        await self._asking.stop()


def checked_timeout(timeout: float) -> float:
    """Raises: ValueError if nothing could happen within it"""
    if not (isinstance(timeout, int | float) and timeout > 0):
        raise ValueError(f"timeout is seconds, more than 0, not {timeout!r}")
    return timeout
