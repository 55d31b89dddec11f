"""A client's core whose broker is a script: what it says is looked at frame by frame, and what it hears is up to the
test. For faults that take a certain order of frames."""

from asyncio import CancelledError
from collections import deque
from typing import Any, NamedTuple, cast

import msgspec

from truenext.client.core.client import Client, ConnectOptions
from truenext.client.core.consumers import ConsumerOptions, wanted
from truenext.client.core.context import ClientContext
from truenext.client.core.holding import Buffer, Received, Subscription
from truenext.client.core.session import Mode, SessionCore
from truenext.client.core.waiting import Flow, Wait
from truenext.url import parse_url

ADDRESS = parse_url("stomp://127.0.0.1:61613")


class Said(NamedTuple):
    command: str
    headers: dict[str, str]
    body: str


class Running:
    """A flow that somebody waits for."""

    def __init__(self, flow: Flow[Any]) -> None:
        self._flow = flow
        self._wait: Wait | None = None
        self.result: Any = None
        self.is_done = False
        self._go_on(None)

    def again(self) -> "Running":
        """Go on if its signal has come."""
        while not self.is_done and self._wait is not None and self._wait.signal.is_set:
            self._go_on(True)
        return self

    def is_too_late(self) -> None:
        """Its deadline comes."""
        self._go_on(False)

    @property
    def deadline(self) -> float | None:
        """Of what it waits for."""
        assert self._wait is not None, "it waits"
        return self._wait.deadline

    def cancel(self) -> None:
        """A cancellation ends its waiting."""
        self._wait = self._flow.throw(CancelledError())

    def _go_on(self, came: bool | None) -> None:
        try:
            self._wait = next(self._flow) if came is None else self._flow.send(came)
        except StopIteration as ended:
            self.is_done, self.result = True, ended.value
        else:
            self.again()


class Script:
    def __init__(self) -> None:
        self.now = 0.0
        self.said: deque[Said] = deque()
        """What the client has written, and nobody has looked at."""
        self.reports: list[str] = []
        """What the log of the program says."""
        self.is_blocked = False
        """The socket takes nothing."""
        world = ClientContext(
            clock=lambda: self.now,
            chance=lambda: 0.5,
            flush=self.flush,
            flush_soon=lambda: None,
            report=lambda what, facts: self.reports.append(what % facts),
            has_ended=lambda owner: False,
        )
        self.client = Client(ConnectOptions(addresses=[ADDRESS], heart_beat_s=0), "me", world)

    def flush(self) -> bool:
        if self.is_blocked:
            return False
        for data in self.client.outgoing():
            if data == b"\n":
                continue
            head, _, body = data[:-1].decode().partition("\n\n")
            command, *lines = head.split("\n")
            self.said.append(Said(command, dict(line.split(":", 1) for line in lines), body))
        return True

    def all_said(self) -> list[Said]:
        """Everything since the last look."""
        self.flush()
        said = list(self.said)
        self.said.clear()
        return said

    def connect(self, store: str = "here") -> None:
        self.client.opened(ADDRESS)
        assert self.said.pop().command == "CONNECT"
        self.hear("CONNECTED", version="1.2", **{"truenext-store": store, "truenext-secret": "0" * 32})

    def lose(self) -> None:
        self.client.lost(OSError("cut"))

    def reconnect(self, store: str = "here") -> None:
        self.lose()
        self.said.clear()
        self.connect(store)

    def hear(self, command: str, body: str = "", **headers: str) -> None:
        said = "".join(f"{name}:{value}\n" for name, value in headers.items())
        self.client.received(f"{command}\n{said}\n{body}\0".encode())

    def message(self, subscription: Subscription, sequence: int, deliveries: int = 1, **headers: str) -> None:
        """A MESSAGE comes."""
        self.hear(
            "MESSAGE",
            body=str(sequence),
            **{
                "subscription": subscription.id,
                "message-id": f"truenext-here-{sequence}",
                "ack": f"{sequence}.{deliveries}@{subscription.id}",
                "destination": subscription.wanted.destination,
                "truenext-sequence": str(sequence),
                "truenext-round": str(0 if self.client.link is None else self.client.link.rounds),
                "truenext-deliveries": str(deliveries),
            },
            **headers,
        )

    def confirm(self) -> list[Said]:
        """Every receipt that was asked for comes; what was said."""
        said = self.all_said()
        for frame in said:
            if "receipt" in frame.headers:
                self.hear("RECEIPT", **{"receipt-id": frame.headers["receipt"]})
        return said

    def answer(self, question: Said, said: object) -> None:
        """The broker answers a question."""
        self.hear(
            "MESSAGE",
            msgspec.json.encode(said).decode(),
            subscription="replies",
            **{"correlation-id": question.headers["correlation-id"]},
        )

    def refuse(self, frame: int, code: str) -> None:
        self.hear("ERROR", code, **{"truenext-code": code, "truenext-frame": str(frame)})

    def session(self, mode: Mode = Mode.INDIVIDUAL) -> SessionCore:
        return SessionCore(self.client, mode, Buffer())

    def consumer(self, session: SessionCore, destination: str = "/queue/a", **options: Any) -> Subscription:
        asked = wanted(destination, cast("ConsumerOptions", options))
        subscribing = Running(self.client.subscribe(asked, session.buffer, None))
        self.confirm()
        subscription: Subscription = subscribing.again().result
        return subscription


def receive(session: SessionCore, count: int = 1) -> Running:
    return Running(session.receive(None, count, None, "the task"))


def one(running: Running) -> Received:
    """What was received."""
    (received,) = running.again().result
    assert isinstance(received, Received)
    return received


def named(said: list[Said], command: str, destination: str | None = None) -> list[Said]:
    return [
        each
        for each in said
        if each.command == command and (destination is None or each.headers.get("destination") == destination)
    ]
