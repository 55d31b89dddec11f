"""Program with workflows, from PyPI: `python workflows_client.py PORT QUEUE` prints one line per case of programs.py.

workflows speaks through stomp.py, and asks for neither receipts nor heart-beats. All names begin with its namespace. A
status broadcast, which its services send by themselves, is sent too.
"""

import queue
import sys
from typing import Any

from workflows.transport.stomp_transport import StompTransport

PORT, QUEUE = sys.argv[1], sys.argv[2]


class Reader:
    """Subscription, and the messages that it has received."""

    def __init__(self, transport: StompTransport, name: str, *, acknowledges: bool) -> None:
        self._messages: queue.Queue[tuple[dict[str, str], Any]] = queue.Queue()
        self._transport = transport
        self._id = transport.subscribe(name, self._keep, acknowledgement=acknowledges, exclusive=False, priority=5)

    def _keep(self, headers: dict[str, str], message: Any) -> None:
        self._messages.put((headers, message))

    def receive(self, count: int) -> list[tuple[dict[str, str], Any]]:
        return [self._messages.get(timeout=20) for _ in range(count)]

    def unsubscribe(self) -> None:
        self._transport.unsubscribe(self._id)


def print_case(name: str, received: list[tuple[dict[str, str], Any]]) -> None:
    print(f"{name}: {' '.join(message for _, message in received)}", flush=True)


def main() -> None:
    StompTransport.config.update({"--stomp-host": "127.0.0.1", "--stomp-port": PORT, "--stomp-prfx": QUEUE})
    transport = StompTransport()
    transport.connect()

    # What is persistent and not confirmed may become visible one by one: these two are not.
    transport.send("auto", "low", headers={"priority": 1, "persistent": "false"})
    transport.send("auto", "high", headers={"priority": 9, "persistent": "false"})
    reader = Reader(transport, "auto", acknowledges=False)
    received = reader.receive(2)
    reader.unsubscribe()
    print_case("auto", received)

    for body in "123":
        transport.send("client-individual", body)
    reader = Reader(transport, "client-individual", acknowledges=True)
    received = reader.receive(3)
    transport.ack(received[1][0])
    reader.unsubscribe()
    print_case("client-individual", received)

    for end, act in (("commit", transport.transaction_commit), ("abort", transport.transaction_abort)):
        transport.send(f"{end}.from", "taken")
        reader = Reader(transport, f"{end}.from", acknowledges=True)
        received = reader.receive(1)
        transaction = transport.transaction_begin()
        transport.ack(received[0][0], transaction=transaction)
        transport.send(f"{end}.to", "sent", transaction=transaction)
        act(transaction)
        reader.unsubscribe()
        print_case(end, received)

    statuses: queue.Queue[Any] = queue.Queue()
    transport.subscribe_broadcast("transient.status", lambda _, status: statuses.put(status))
    transport.broadcast_status({"host": "test"})
    assert statuses.get(timeout=20) == {"host": "test"}
    transport.disconnect()


main()
