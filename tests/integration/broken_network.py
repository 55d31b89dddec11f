"""Network between asyncio clients and a broker that cuts and freezes connections.

A connection is cut at any byte or between any two frames. The bytes of a frozen connection arrive after the client has
stopped waiting for them.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum

ENDLESS = 1 << 60


class Break(Enum):
    AT_BYTES = "cut at a byte"
    AT_FRAMES = "cut behind a frame"
    FREEZES = "frozen"


class Network:
    """Listener before one broker, whose port may change."""

    def __init__(self, broker_port: Callable[[], int], chance: random.Random) -> None:
        self._broker_port = broker_port
        self._chance = chance
        self.breaks: tuple[Break, ...] = ()
        """Ways in which connections break; none breaks if this is empty."""
        self.breaks_max = ENDLESS
        """Number of breaks after which no connection breaks by itself."""
        self.breaks_count = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    @property
    def url(self) -> str:
        return f"stomp://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Refuse new connections and cut all others."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()
        while self._connections:
            await asyncio.sleep(0.001)

    def cut(self) -> None:
        """Cut all connections."""
        for connection in self._connections:
            connection.cut()

    def freeze(self, *, delivers: bool = True) -> None:
        """Freeze all connections.

        Bytes of a client that are not passed on yet, and all that it sends later, reach the broker once the client has
        hung up, unless `delivers` is false.
        """
        for connection in self._connections:
            connection.freeze(delivers=delivers)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_broker = await asyncio.open_connection("127.0.0.1", self._broker_port())
        except OSError:
            writer.transport.abort()
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        connection = _Connection(self, (reader, writer), to_broker)
        self._connections.add(connection)
        try:
            if self.breaks and self.breaks_count < self.breaks_max:
                connection.breaks_by(self._chance.choice(self.breaks), self._chance)
            await connection.run(self._chance)
        finally:
            self._connections.discard(connection)


End = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Connection:
    def __init__(self, network: Network, client: End, broker: End) -> None:
        self._network = network
        self._client = client
        self._broker = broker
        self._bytes = self._frames = ENDLESS
        """Bytes and frames that may still pass, in both directions together."""
        self._then_freezes = False
        self._is_frozen = False
        self._delivers = True

    def breaks_by(self, how: Break, chance: random.Random) -> None:
        if how is Break.AT_FRAMES:
            self._frames = chance.choice([chance.randrange(1, 5), chance.randrange(4, 20), chance.randrange(4, 120)])
        else:
            self._bytes = chance.choice([chance.randrange(1, 700), *(chance.randrange(700, 10_000) for _ in range(4))])
        self._then_freezes = how is Break.FREEZES

    def cut(self) -> None:
        self._network.breaks_count += 1
        for _, writer in (self._client, self._broker):
            writer.transport.abort()

    def freeze(self, *, delivers: bool = True) -> None:
        self._network.breaks_count += 1
        self._delivers = delivers
        self._is_frozen = True

    async def run(self, chance: random.Random) -> None:
        up = asyncio.create_task(self._pump(self._client[0], self._broker[1], chance))
        down = asyncio.create_task(self._pump(self._broker[0], self._client[1], chance))
        try:
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            if down.done() and not up.done():
                self._client[1].close()
            frozen = await up
            if frozen:
                # What has come of a client that hung up is on its way for a while.
                await asyncio.sleep(chance.choice([0, 0.05, 0.3]))
                if self._delivers:
                    self._broker[1].write(frozen)
        finally:
            down.cancel()
            for _, writer in (self._client, self._broker):
                writer.close()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, chance: random.Random) -> bytes:
        """Pass bytes on. Return the client's bytes that were frozen when it hung up."""
        is_up = target is self._broker[1]
        with suppress(OSError):
            while data := await source.read(chance.choice([20, 1000, 65536])):
                passing = b"" if self._is_frozen else self._passing(data)
                target.write(passing)
                await target.drain()
                if not (self._is_frozen or (self._bytes and self._frames)):
                    await asyncio.sleep(chance.choice([0, 0.001, 0.01]))
                    if not self._then_freezes:
                        self.cut()
                        break
                    self.freeze()
                if self._is_frozen:
                    rest = data[len(passing) :]
                    if is_up:
                        return rest + await source.read(-1)
                    await source.read(-1)
        return b""

    def _passing(self, data: bytes) -> bytes:
        """Return the part of `data` that may still pass."""
        data = data[: self._bytes]
        at = -1
        for _ in range(self._frames):
            following = data.find(b"\0", at + 1)
            if following < 0:
                break
            at = following
            self._frames -= 1
            if not self._frames:
                data = data[: at + 1]
        self._bytes -= len(data)
        return data


@asynccontextmanager
async def broken_network(broker_port: Callable[[], int], chance: random.Random) -> AsyncIterator[Network]:
    network = Network(broker_port, chance)
    await network.open()
    try:
        yield network
    finally:
        await network.close()
