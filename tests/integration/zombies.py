"""Clients of a broker that is stopped, taken over, and goes on: what it sends them then must be nothing."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from threading import Thread

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import RawClient
from truenext.wire.stomp.frame import Frame

BUSY_QUEUE, SLOW_QUEUE = "busy", "slow"
OUTSTANDING_MAX = 30
SLOW_COUNT = 400
SLOW_BYTES = 20_000
"""Number and size of messages for a client that does not read: more than its socket takes."""


class Line:
    """Connection with a thread that reads all that comes."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.frames = 0
        self.late = b""
        """Bytes but heart-beats that came after `mark_late`."""
        self._is_late = False
        self._idle_count = 0
        self._thread = Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def mark_late(self) -> None:
        """Regard all that comes from now on as late. What has arrived before is read first."""
        deadline, idle = time.monotonic() + PATIENCE_SECONDS, self._idle_count + 3
        while self._idle_count < idle and self._thread.is_alive():
            assert time.monotonic() < deadline, "the stopped broker still sends"
            time.sleep(0.005)
        self._is_late = True

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the broker has not closed the connection"

    def on_frame(self, frame: Frame) -> None:
        """Handle a frame that has come in time."""

    def _run(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                try:
                    self._read()
                except TimeoutError:
                    self._idle_count += 1

    def _read(self) -> None:
        if not self._is_late:
            frame = self.client.next_frame(0.02)
            self.frames += 1
            self.on_frame(frame)
            return
        data = self.client.read(0.02)
        if not data:
            raise EOFError
        self.late += data.strip(b"\n")


class Sender(Line):
    """Sender of transient and persistent messages with receipts. Several are outstanding."""

    def __init__(self, client: RawClient) -> None:
        super().__init__(client)
        self._sent = 0

    def start(self) -> None:
        super().start()
        self.send(OUTSTANDING_MAX)

    def on_frame(self, frame: Frame) -> None:
        assert frame.command == "RECEIPT", frame
        self.send(1)

    def send(self, count: int) -> None:
        for _ in range(count):
            self._sent += 1
            headers = {"receipt": self.client.new_receipt()}
            self.client.send(BUSY_QUEUE, b"%d" % self._sent, persistent=self._sent % 3 == 0, headers=headers)


class Consumer(Line):
    """Consumer that acknowledges each message some messages later."""

    def __init__(self, client: RawClient) -> None:
        super().__init__(client)
        self._held: deque[Frame] = deque()

    def start(self) -> None:
        self.client.subscribe(BUSY_QUEUE, prefetch=50)
        super().start()

    def on_frame(self, frame: Frame) -> None:
        assert frame.command == "MESSAGE", frame
        self._held.append(frame)
        if len(self._held) > 10:
            self.client.ack(self._held.popleft())

    def acknowledge_all(self) -> None:
        while self._held:
            self.client.ack(self._held.popleft())


class Crowd:
    """All clients of one broker."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._sender = Sender(broker.connect())
        self._consumer = Consumer(broker.connect())
        self._slow = Line(broker.connect(receive_buffer=4096))
        self._lines = (self._sender, self._consumer, self._slow)

    def start(self) -> None:
        filler = self._broker.connect()
        for _ in range(SLOW_COUNT):
            filler.send(SLOW_QUEUE, bytes(SLOW_BYTES))
        filler.send(SLOW_QUEUE, b"", confirmed=True)
        filler.disconnect()
        self._slow.client.subscribe(SLOW_QUEUE, prefetch=SLOW_COUNT)
        self._sender.start()
        self._consumer.start()

    def mark_late(self) -> None:
        """Read all that the stopped broker has written, and ask it for more."""
        self._slow.start()
        for line in self._lines:
            line.mark_late()
        self._consumer.acknowledge_all()
        self._sender.send(OUTSTANDING_MAX)

    def join(self) -> int:
        """Wait for the end of the broker, and check that nothing has come since. Return the number of frames before."""
        for line in self._lines:
            line.join()
            assert not line.late, f"{type(line).__name__} got {line.late[:200]!r} from a broker that was taken over"
        return sum(line.frames for line in self._lines)
