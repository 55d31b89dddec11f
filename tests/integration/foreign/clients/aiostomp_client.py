"""Program with aiostomp, from PyPI: `python aiostomp_client.py PORT QUEUE BEAT_MS` prints one line per case of
programs.py.

aiostomp has neither receipts nor transactions. Its sends are transient, as it could not wait until they are durable.
"""

import asyncio
import sys
from typing import Any

import aiostomp

PORT, QUEUE, BEAT_MS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])


class Reader:
    """Subscription, and the messages that it has received."""

    def __init__(self, client: Any, name: str, ack: str) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._client = client
        self._subscription = client.subscribe(
            f"/queue/{QUEUE}.{name}", ack=ack, handler=self._keep, auto_ack=ack == "auto"
        )

    async def _keep(self, frame: Any, body: bytes) -> bool:
        await self._messages.put(frame)
        return True

    async def receive(self, count: int) -> list[Any]:
        return [await self._messages.get() for _ in range(count)]

    def unsubscribe(self) -> None:
        self._client.unsubscribe(self._subscription)


def print_case(name: str, received: list[Any]) -> None:
    print(f"{name}: {' '.join(frame.body.decode() for frame in received)}", flush=True)


async def main() -> None:
    client = aiostomp.AioStomp("127.0.0.1", PORT, heartbeat_interval_cx=BEAT_MS, heartbeat_interval_cy=BEAT_MS)
    await client.connect()

    client.send(f"/queue/{QUEUE}.auto", "low", headers={"priority": 1})
    client.send(f"/queue/{QUEUE}.auto", "high", headers={"priority": 9})
    reader = Reader(client, "auto", "auto")
    received = await reader.receive(2)
    reader.unsubscribe()
    print_case("auto", received)

    for ack in ("client", "client-individual"):
        for body in "123":
            client.send(f"/queue/{QUEUE}.{ack}", body)
        reader = Reader(client, ack, ack)
        received = await reader.receive(3)
        client.ack(received[1])
        reader.unsubscribe()
        print_case(ack, received)

    reader = Reader(client, "heart-beat", "auto")
    await asyncio.sleep(3 * BEAT_MS / 1000)
    client.send(f"/queue/{QUEUE}.heart-beat", "alive")
    print_case("heart-beat", await reader.receive(1))
    await asyncio.to_thread(sys.stdin.read)
    client.close()


asyncio.run(main())
