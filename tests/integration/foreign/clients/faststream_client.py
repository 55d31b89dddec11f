"""Program with FastStream and its STOMP broker (faststream-stomp, from PyPI): `python faststream_client.py PORT QUEUE
BEAT_MS` prints one line per case of programs.py.

A message is acknowledged when its handler returns. A batch is a transaction; FastStream has no other, and aborts none.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import faststream_stomp
import stompman

PORT, QUEUE, BEAT_MS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def new_broker() -> faststream_stomp.StompBroker:
    server = stompman.ConnectionParameters(host="127.0.0.1", port=PORT, login="guest", passcode="guest")
    client = stompman.Client([server], heartbeat=stompman.Heartbeat(BEAT_MS, BEAT_MS))
    return faststream_stomp.StompBroker(client, logger=None)


def address(name: str) -> str:
    return f"/queue/{QUEUE}.{name}"


def into(received: "asyncio.Queue[str]") -> Callable[[str], Awaitable[None]]:
    async def handle(body: str) -> None:
        await received.put(body)

    return handle


async def main() -> None:
    broker = new_broker()

    async def publish(name: str, body: str, **headers: str) -> None:
        await broker.publish(body, address(name), headers={"persistent": "true"} | headers, receipt_timeout=20.0)

    modes: dict[str, stompman.AckMode] = {
        "auto": "auto",
        "commit.from": "client-individual",
        "heart-beat": "client-individual",
    }
    received: dict[str, asyncio.Queue[str]] = {name: asyncio.Queue() for name in modes}
    for name, mode in modes.items():
        broker.subscriber(address(name), ack_mode=mode)(into(received[name]))

    async with broker:
        await publish("auto", "low", priority="1")
        await publish("auto", "high", priority="9")
        await publish("commit.from", "taken")
        await broker.start()
        print(f"auto: {await received['auto'].get()} {await received['auto'].get()}", flush=True)

        await broker.publish_batch("sent", destination=address("commit.to"), headers={"persistent": "true"})
        print(f"commit: {await received['commit.from'].get()}", flush=True)

        await publish("receipt", "confirmed")
        print("receipt: came", flush=True)

        await asyncio.sleep(3 * BEAT_MS / 1000)
        await publish("heart-beat", "alive")
        print(f"heart-beat: {await received['heart-beat'].get()}", flush=True)
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
