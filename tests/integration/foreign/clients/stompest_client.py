"""Program with stompest, from PyPI: `python stompest_client.py PORT QUEUE BEAT_MS` prints one line per case of
programs.py."""

import itertools
import select
import sys
import time
from typing import Any

from stompest.config import StompConfig
from stompest.protocol import StompSpec
from stompest.sync import Stomp

PORT, QUEUE, BEAT_MS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
RECEIPTS = itertools.count(1)


def connect(**options: Any) -> Any:
    client = Stomp(StompConfig(f"tcp://127.0.0.1:{PORT}", version=StompSpec.VERSION_1_2))
    client.connect(versions=[StompSpec.VERSION_1_1, StompSpec.VERSION_1_2], host="127.0.0.1", **options)
    return client


def send(client: Any, name: str, body: str, **headers: str) -> None:
    """Send a message and wait for its receipt; no other frame may come before."""
    receipt = f"receipt-{next(RECEIPTS)}"
    client.send(f"/queue/{QUEUE}.{name}", body.encode(), {"persistent": "true"} | headers, receipt=receipt)
    frame = client.receiveFrame()
    assert (frame.command, frame.headers["receipt-id"]) == ("RECEIPT", receipt), frame


def subscribe(client: Any, name: str, ack: str) -> Any:
    headers = {StompSpec.ACK_HEADER: ack, StompSpec.ID_HEADER: name}
    return client.subscribe(f"/queue/{QUEUE}.{name}", headers)


def receive(client: Any, count: int) -> list[Any]:
    return [client.receiveFrame() for _ in range(count)]


def print_case(name: str, received: list[Any]) -> None:
    print(f"{name}: {' '.join(frame.body.decode() for frame in received)}", flush=True)


def main() -> None:
    client = connect()

    send(client, "auto", "low", priority="1")
    send(client, "auto", "high", priority="9")
    token = subscribe(client, "auto", "auto")
    received = receive(client, 2)
    client.unsubscribe(token)
    print_case("auto", received)

    for ack in ("client", "client-individual"):
        for body in "123":
            send(client, ack, body)
        token = subscribe(client, ack, ack)
        received = receive(client, 3)
        client.ack(received[1])
        client.unsubscribe(token)
        print_case(ack, received)

    for end in ("commit", "abort"):
        send(client, f"{end}.from", "taken")
        token = subscribe(client, f"{end}.from", "client-individual")
        received = receive(client, 1)
        client.begin("t")
        # Its own ack() takes no transaction.
        acknowledgement = client.session.ack(received[0])
        acknowledgement.headers["transaction"] = "t"
        client.sendFrame(acknowledgement)
        client.send(f"/queue/{QUEUE}.{end}.to", b"sent", {"persistent": "true", "transaction": "t"})
        # Now, as whatever comes next is the receipt to `send`: it must not be the message once more.
        client.unsubscribe(token)
        getattr(client, end)("t")
        print_case(end, received)

    send(client, "receipt", "confirmed")
    print("receipt: came", flush=True)
    client.disconnect()

    client = connect(heartBeats=(BEAT_MS, BEAT_MS))
    subscribe(client, "heart-beat", "auto")
    deadline = time.monotonic() + 3 * BEAT_MS / 1000
    while time.monotonic() < deadline:
        client.beat()
        client.canRead(BEAT_MS / 2000)
    client.send(f"/queue/{QUEUE}.heart-beat", b"alive")
    print_case("heart-beat", receive(client, 1))
    while not select.select([sys.stdin], [], [], BEAT_MS / 2000)[0]:
        client.beat()
    client.disconnect()


main()
