"""Jobs of the client's benchmark with stomp.py; its listener acknowledges each message in its thread."""

from __future__ import annotations

import threading

import stomp

from bench.client.work import Done, Order, Stopwatch, check_numbers
from bench.workers import Gate

SILENCE = 60.0


def receive(gate: Gate, order: Order) -> Done:
    watch = Stopwatch(gate, order)
    connection = stomp.Connection12([("127.0.0.1", order.port)])
    receiver = _Receiver(connection, order.messages)
    connection.set_listener("", receiver)
    connection.connect(wait=True)
    watch.start()
    connection.subscribe(
        order.queue, id="1", ack="client-individual", headers={"activemq.prefetchSize": str(order.prefetch)}
    )
    if not receiver.has_all.wait(SILENCE):
        raise TimeoutError(f"{len(receiver.numbers)} of {order.messages} messages came")
    connection.disconnect(receipt="bye")
    if not receiver.is_disconnected.wait(SILENCE):
        raise TimeoutError("the last acknowledgements were not confirmed")
    done = watch.stop()
    check_numbers(receiver.numbers, order.messages)
    return done


class _Receiver(stomp.ConnectionListener):
    def __init__(self, connection: stomp.Connection12, messages: int) -> None:
        self._connection = connection
        self._messages = messages
        self.numbers: list[int] = []
        self.has_all = threading.Event()
        self.is_disconnected = threading.Event()

    def on_message(self, frame: stomp.utils.Frame) -> None:
        self.numbers.append(int(frame.headers["id"]))
        self._connection.ack(frame.headers["ack"])
        if len(self.numbers) == self._messages:
            self.has_all.set()

    def on_receipt(self, frame: stomp.utils.Frame) -> None:
        if frame.headers["receipt-id"] == "bye":
            self.is_disconnected.set()
