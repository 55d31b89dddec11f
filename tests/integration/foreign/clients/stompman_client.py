"""Program with stompman, from PyPI: `python stompman_client.py PORT QUEUE BEAT_MS` prints one line per case of
programs.py.

stompman acknowledges no message in a transaction; the case `commit` acknowledges after it.
"""

import asyncio
import sys
from collections.abc import Sequence

import stompman

PORT, QUEUE, BEAT_MS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
RECEIPT_SECONDS = 20.0


class AbortedByUs(Exception):
    """Exception that makes stompman abort a transaction."""


def client(beat_ms: int) -> stompman.Client:
    server = stompman.ConnectionParameters(host="127.0.0.1", port=PORT, login="", passcode="")
    return stompman.Client([server], heartbeat=stompman.Heartbeat(beat_ms, beat_ms))


async def send(connection: stompman.Client, name: str, body: str, **headers: str) -> None:
    await connection.send(
        body.encode(),
        f"/queue/{QUEUE}.{name}",
        headers={"persistent": "true"} | headers,
        receipt_timeout=RECEIPT_SECONDS,
    )


class Reader:
    """Subscription, and the messages that it has received."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[stompman.AckableMessageFrame] = asyncio.Queue()

    async def subscribe(self, connection: stompman.Client, name: str, ack: stompman.AckMode) -> None:
        self._subscription = await connection.subscribe_with_manual_ack(
            f"/queue/{QUEUE}.{name}", self._messages.put, ack=ack
        )

    async def receive(self, count: int) -> list[stompman.AckableMessageFrame]:
        return [await self._messages.get() for _ in range(count)]

    async def unsubscribe(self) -> None:
        await self._subscription.unsubscribe()


async def reader_of(connection: stompman.Client, name: str, ack: stompman.AckMode) -> Reader:
    reader = Reader()
    await reader.subscribe(connection, name, ack)
    return reader


def print_case(name: str, received: Sequence[stompman.AckableMessageFrame]) -> None:
    print(f"{name}: {' '.join(message.body.decode() for message in received)}", flush=True)


async def main() -> None:
    async with client(1000) as connection:
        await send(connection, "auto", "low", priority="1")
        await send(connection, "auto", "high", priority="9")
        reader = await reader_of(connection, "auto", "auto")
        received = await reader.receive(2)
        await reader.unsubscribe()
        print_case("auto", received)

        modes: tuple[stompman.AckMode, ...] = ("client", "client-individual")
        for ack in modes:
            for body in "123":
                await send(connection, ack, body)
            reader = await reader_of(connection, ack, ack)
            received = await reader.receive(3)
            await received[1].ack()
            await reader.unsubscribe()
            print_case(ack, received)

        for end in ("commit", "abort"):
            await send(connection, f"{end}.from", "taken")
            reader = await reader_of(connection, f"{end}.from", "client-individual")
            received = await reader.receive(1)
            try:
                async with connection.begin() as transaction:
                    await transaction.send(b"sent", f"/queue/{QUEUE}.{end}.to", headers={"persistent": "true"})
                    if end == "abort":
                        raise AbortedByUs
                await received[0].ack()
            except AbortedByUs:
                pass
            await reader.unsubscribe()
            print_case(end, received)

        await send(connection, "receipt", "confirmed")
        print("receipt: came", flush=True)

    async with client(BEAT_MS) as connection:
        reader = await reader_of(connection, "heart-beat", "auto")
        await asyncio.sleep(3 * BEAT_MS / 1000)
        await send(connection, "heart-beat", "alive")
        print_case("heart-beat", await reader.receive(1))
        await asyncio.to_thread(sys.stdin.read)
        await reader.unsubscribe()


asyncio.run(main())
