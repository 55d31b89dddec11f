"""Client's core with a scripted broker: a test checks each frame that the core writes and chooses each frame that it
gets.

For faults that need a certain order of frames.
"""

from asyncio import CancelledError
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec

from truenext.client.core.buffer import ReceiveBuffer, ReceivedMessage, Subscription
from truenext.client.core.client import Client, ConnectOptions
from truenext.client.core.context import ClientContext
from truenext.client.core.session import SessionCore, SessionMode
from truenext.client.core.subscriptions import ConsumerOptions, parse_consumer_options
from truenext.client.core.waiting import Flow, Wait
from truenext.model.url import Address, parse_url

ADDRESS = parse_url("stomp://127.0.0.1:61613")


class ClientFrame(NamedTuple):
    command: str
    headers: dict[str, str]
    body: str


class RunningFlow:
    """Flow that a caller waits for."""

    def __init__(self, flow: Flow[Any]) -> None:
        self._flow = flow
        self._wait: Wait | None = None
        self.result: Any = None
        self.is_done = False
        self._step(None)

    def resume(self) -> "RunningFlow":
        """Resume the flow while its signal is set."""
        while not self.is_done and self._wait is not None and self._wait.signal.is_set:
            self._step(True)
        return self

    def time_out(self) -> None:
        """Resume the flow as its deadline has passed."""
        self._step(False)

    @property
    def deadline(self) -> float | None:
        """Deadline of its current wait."""
        assert self._wait is not None, "it waits"
        return self._wait.deadline

    def cancel(self) -> None:
        """Cancel the flow in its wait."""
        self._wait = self._flow.throw(CancelledError())

    def _step(self, in_time: bool | None) -> None:
        try:
            self._wait = next(self._flow) if in_time is None else self._flow.send(in_time)
        except StopIteration as ended:
            self.is_done, self.result = True, ended.value
        else:
            self.resume()


class Script:
    def __init__(self, addresses: Sequence[Address] = (ADDRESS,), heart_beat_s: float = 0) -> None:
        self.now = 0.0
        self.frames: deque[ClientFrame] = deque()
        """Frames of the client that the test has not taken yet."""
        self.reports: list[str] = []
        """Log messages of the client."""
        self.is_blocked = False
        """Whether the socket takes no bytes."""
        self.write_count = 0
        self.is_flush_later_due = False
        """Whether bytes are to be written within `ACK_DELAY_S`."""
        context = ClientContext(
            clock=lambda: self.now,
            random=lambda: 0.5,
            flush=self.flush,
            flush_soon=lambda: None,
            flush_later=self._flush_later,
            report=lambda what, facts: self.reports.append(what % facts),
            has_owner_ended=lambda owner: False,
        )
        self.client = Client(ConnectOptions(addresses=addresses, heart_beat_s=heart_beat_s), "me", context)

    def flush(self) -> bool:
        if self.is_blocked:
            return False
        out = self.client.data_to_send()
        self.write_count += bool(out)
        for data in out:
            if data == b"\n":
                continue
            head, _, body = data[:-1].decode().partition("\n\n")
            command, *lines = head.split("\n")
            self.frames.append(ClientFrame(command, dict(line.split(":", 1) for line in lines), body))
        return True

    def _flush_later(self) -> None:
        self.is_flush_later_due = True

    def take_frames(self) -> list[ClientFrame]:
        """Return the frames since the last call."""
        self.flush()
        frames = list(self.frames)
        self.frames.clear()
        return frames

    def connect(self, store: str = "here") -> None:
        self.client.on_socket_connected(ADDRESS)
        assert self.frames.pop().command == "CONNECT"
        self.receive(
            "CONNECTED",
            version="1.2",
            **{"truenext-store": store, "truenext-secret": "0" * 32, "heart-beat": "4000,10000"},
        )

    def lose(self) -> None:
        self.client.on_connection_lost(OSError("cut"))

    def reconnect(self, store: str = "here") -> None:
        self.lose()
        self.frames.clear()
        self.connect(store)

    def receive(self, command: str, body: str = "", **headers: str) -> None:
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        self.client.receive_data(f"{command}\n{lines}\n{body}\0".encode())

    def message(self, subscription: Subscription, sequence: int, deliveries: int = 1, **headers: str) -> None:
        """Send a MESSAGE to the client."""
        self.receive(
            "MESSAGE",
            body=str(sequence),
            **{
                "subscription": subscription.id,
                "message-id": f"truenext-here-{sequence}",
                "ack": f"{sequence}.{deliveries}@{subscription.id}",
                "destination": subscription.options.destination,
                "truenext-sequence": str(sequence),
                "truenext-round": str(0 if self.client.link is None else self.client.link.release_count),
                "truenext-deliveries": str(deliveries),
            },
            **headers,
        )

    def confirm(self) -> list[ClientFrame]:
        """Send all receipts that the client has requested, and return its frames."""
        frames = self.take_frames()
        for frame in frames:
            if "receipt" in frame.headers:
                self.receive("RECEIPT", **{"receipt-id": frame.headers["receipt"]})
        return frames

    def reply(self, request: ClientFrame, body: object) -> None:
        """Send the answer to a control request."""
        self.receive(
            "MESSAGE",
            msgspec.json.encode(body).decode(),
            subscription="replies",
            **{"correlation-id": request.headers["correlation-id"]},
        )

    def refuse(self, frame: int, code: str) -> None:
        self.receive("ERROR", code, **{"truenext-code": code, "truenext-frame": str(frame)})

    def session(self, mode: SessionMode = SessionMode.INDIVIDUAL) -> SessionCore:
        return SessionCore(self.client, mode, ReceiveBuffer())

    def consumer(self, session: SessionCore, destination: str = "/queue/a", **options: Any) -> Subscription:
        parsed = parse_consumer_options(destination, cast("ConsumerOptions", options))
        subscribing = RunningFlow(self.client.subscribe(parsed, session.buffer, None))
        self.confirm()
        subscription: Subscription = subscribing.resume().result
        return subscription


def receive(session: SessionCore, count: int = 1) -> RunningFlow:
    return RunningFlow(session.receive(None, count, None, "the task"))


def one(running: RunningFlow) -> ReceivedMessage:
    """Return the only message that was received."""
    (received,) = running.resume().result
    assert isinstance(received, ReceivedMessage)
    return received


def select_frames(frames: list[ClientFrame], command: str, destination: str | None = None) -> list[ClientFrame]:
    return [
        each
        for each in frames
        if each.command == command and (destination is None or each.headers.get("destination") == destination)
    ]
