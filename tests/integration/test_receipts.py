"""Tests of the order of RECEIPT frames: each rule, and faults that would break it.

The broker runs in the test's process, so that the test can look at a client's socket while the broker is about to write
to the disk.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.broker_here import broker_here, port_of
from tests.unit.mutation import mutated
from truenext.broker.write_time import WriteTimeEstimate
from truenext.engine.writing.commit_state import CommitState
from truenext.model.batch import Batch
from truenext.server.output import Output
from truenext.store.embedded import EmbeddedStore
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.shapes import FRAME_SHAPES

SECONDS = 20.0
"""Longest wait for an expected frame."""
LARGE = 8_000_000
"""Bytes of a body that no socket takes as a whole."""

OnBatch = Callable[[Batch], None]

CLIENTS: list["Client"] = []
"""Clients of the rule that is being checked."""


class Client:
    """Client that sends frames as text, and reads only when a rule asks for it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._decoder = Decoder(FRAME_SHAPES)
        self._frames: list[Frame] = []
        self._read = b""
        """Last bytes that were read."""

    @classmethod
    async def connect(cls, port: int) -> "Client":
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        client = cls(sock)
        CLIENTS.append(client)
        await client._loop.sock_connect(sock, ("127.0.0.1", port))
        await client.send("CONNECT\naccept-version:1.2\nhost:x\n\n\0")
        assert (await client.frame()).command == "CONNECTED"
        client._decoder.version = Version.V1_2
        return client

    async def send(self, *frames: str) -> None:
        """Send frames in one write."""
        await self._loop.sock_sendall(self.sock, "".join(frames).encode())

    async def frame(self) -> Frame:
        """Return the next frame. Raises: EOFError at the end of the connection"""
        while not self._frames:
            data = b""
            if not self._decoder.has_more:
                data = await asyncio.wait_for(self._loop.sock_recv(self.sock, 65536), SECONDS)
                if not data:
                    raise EOFError
            self._read = self._read[-1000:] + data
            self._frames += self._decoder.receive(data)
        return self._frames.pop(0)

    async def receive_until(self, last: str) -> list[str]:
        """Return the frames up to `last`: each command with its receipt or subscription."""
        received: list[str] = []
        while not received or received[-1] != last:
            frame = await self.frame()
            named = frame.headers.get("receipt-id") or frame.headers.get("subscription", "")
            received.append(f"{frame.command} {named}".strip())
            if frame.command == "MESSAGE":
                assert frame.body in (b"x" * LARGE, b"small"), "of another frame"
        return received

    def has_received(self, data: bytes) -> bool:
        try:
            waits = self.sock.recv(65536, socket.MSG_PEEK)
        except BlockingIOError:
            waits = b""
        return data in self._read + waits


def send(body: str = "small", *, persistent: bool = True, receipt: str = "") -> str:
    kind = "true" if persistent else "false"
    receipt_line = f"receipt:{receipt}\n" if receipt else ""
    return f"SEND\ndestination:/queue/a\npersistent:{kind}\n{receipt_line}content-length:{len(body)}\n\n{body}\0"


def subscribe(subscription: str) -> str:
    return f"SUBSCRIBE\nid:{subscription}\ndestination:/queue/a\nack:client-individual\nactivemq.prefetchSize:3\n\n\0"


# ---- What must hold ----


async def receipt_comes_after_the_sync(port: int, on_batch: list[OnBatch]) -> None:
    client = await Client.connect(port)

    written: list[Batch] = []

    def check_batch(batch: Batch) -> None:
        for _ in range(20 if batch.puts else 0):
            assert not client.has_received(b"receipt-id:r1"), "nothing of it is on the disk yet"
            # Another thread may be about to write it.
            time.sleep(0.01)
        if batch.puts:
            written.append(batch)

    on_batch.append(check_batch)
    await client.send(send(receipt="r1"))
    assert await client.receive_until("RECEIPT r1") == ["RECEIPT r1"]
    assert written, "nobody has begun to write it"


async def receipts_come_in_the_order_of_their_frames(port: int, _: list[OnBatch]) -> None:
    client = await Client.connect(port)
    begin = "BEGIN\ntransaction:t\nreceipt:r3\n\n\0"
    await client.send(send(receipt="r1"), send(persistent=False, receipt="r2"), begin, send(receipt="r4"))
    assert await client.receive_until("RECEIPT r4") == [f"RECEIPT r{number}" for number in (1, 2, 3, 4)]


async def error_comes_after_the_receipts_that_are_due(port: int, _: list[OnBatch]) -> None:
    client = await Client.connect(port)
    await client.send(send(receipt="r1"), "NONSENSE\n\n\0")
    assert await client.receive_until("ERROR") == ["RECEIPT r1", "ERROR"]


async def receipt_does_not_split_a_message(port: int, _: list[OnBatch]) -> None:
    client, other = await Client.connect(port), await Client.connect(port)
    await client.send(subscribe("s"))
    await other.send(*[send("x" * LARGE)] * 2, send(receipt="there"))
    await other.receive_until("RECEIPT there")
    await client.send(send(receipt="r1"))
    before = (await client.receive_until("RECEIPT r1"))[:-1]
    assert before and set(before) == {"MESSAGE s"}


async def receipt_of_an_unsubscribe_comes_after_the_messages_of_its_subscription(port: int, _: list[OnBatch]) -> None:
    client, other = await Client.connect(port), await Client.connect(port)
    await client.send(subscribe("s"))
    await other.send(*[send("x" * LARGE)] * 2, send(receipt="there"))
    await other.receive_until("RECEIPT there")
    await client.send("UNSUBSCRIBE\nid:s\nreceipt:r1\n\n\0", send(receipt="r2"))
    received = await client.receive_until("RECEIPT r2")
    # What is half-way out is sent to its end; the others stay with the broker.
    assert received in (["MESSAGE s"] * sent + ["RECEIPT r1", "RECEIPT r2"] for sent in (0, 1, 2))


async def receipt_of_a_disconnect_is_the_last_frame(port: int, _: list[OnBatch]) -> None:
    client, other = await Client.connect(port), await Client.connect(port)
    await client.send(subscribe("s"))
    await other.send(*[send("x" * LARGE)] * 2, send(receipt="there"))
    await other.receive_until("RECEIPT there")
    await client.send(send(receipt="r1"), "DISCONNECT\nreceipt:bye\n\n\0")
    received = await client.receive_until("RECEIPT bye")
    assert received in (["MESSAGE s"] * sent + ["RECEIPT r1", "RECEIPT bye"] for sent in (0, 1, 2))
    with pytest.raises(EOFError):
        await client.frame()


async def receipt_and_message_reach_a_client_that_sends_and_consumes(port: int, _: list[OnBatch]) -> None:
    client = await Client.connect(port)
    await client.send(subscribe("s"), send(receipt="r1"))
    received = [str(await client.frame()) for _ in range(2)]
    assert [frame.partition("command=")[2].split("'")[1] for frame in received] == ["RECEIPT", "MESSAGE"]


Rule = Callable[[int, list[OnBatch]], Awaitable[None]]
RULES: list[Rule] = [
    receipt_comes_after_the_sync,
    receipts_come_in_the_order_of_their_frames,
    error_comes_after_the_receipts_that_are_due,
    receipt_does_not_split_a_message,
    receipt_of_an_unsubscribe_comes_after_the_messages_of_its_subscription,
    receipt_of_a_disconnect_is_the_last_frame,
    receipt_and_message_reach_a_client_that_sends_and_consumes,
]


def check(rule: Rule, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_batch: list[OnBatch] = []
    seen: list[AssertionError] = []
    apply = EmbeddedStore.apply

    def observed(store: EmbeddedStore, batch: Batch) -> None:
        for check_batch in on_batch:
            try:
                check_batch(batch)
            except AssertionError as error:
                seen.append(error)
        apply(store, batch)

    monkeypatch.setattr(EmbeddedStore, "apply", observed)

    async def run() -> None:
        async with broker_here(data) as listener:
            try:
                await asyncio.wait_for(rule(port_of(listener), on_batch), SECONDS)
            finally:
                on_batch.clear()
                while CLIENTS:
                    CLIENTS.pop().sock.close()

    asyncio.run(run())
    if seen:
        raise seen[0]


@pytest.mark.parametrize("is_at_once", [True, False], ids=["at once", "by the thread"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_receipt_follows_rule(rule: Rule, is_at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_at_once:
        monkeypatch.setattr(WriteTimeEstimate, "is_quick", lambda *_: False)
    check(rule, tmp_path / "data", monkeypatch)


# ---- Faults ----

FAULTS: dict[str, tuple[Rule, type, str, str, str]] = {
    "a receipt is sent before the sync": (
        receipt_comes_after_the_sync,
        *(
            CommitState,
            "answer",
            "if session.last_batch <= self.last_committed:",
            "if session.last_batch <= self.batch.number:",
        ),
    ),
    "a receipt that need not wait overtakes one that must": (
        receipts_come_in_the_order_of_their_frames,
        *(Output, "add_frame", "self._parts.append(frame)", "self._parts.insert(0, frame)"),
    ),
    "an ERROR overtakes a receipt": (
        error_comes_after_the_receipts_that_are_due,
        *(Output, "add_frame", "self._parts.append(frame)", "self._parts.insert(0, frame)"),
    ),
    "a receipt is written into an unsent message": (
        receipt_does_not_split_a_message,
        *(Output, "flush", "if self._unsent or", "if False or"),
    ),
    "the receipt of an UNSUBSCRIBE is written into an unsent message": (
        receipt_of_an_unsubscribe_comes_after_the_messages_of_its_subscription,
        *(Output, "flush", "if self._unsent or", "if False or"),
    ),
    "the connection is closed before the receipt of its DISCONNECT was sent": (
        receipt_of_a_disconnect_is_the_last_frame,
        *(Output, "flush", "in CLOSES_WHEN_SENT and not self._unsent", "in CLOSES_WHEN_SENT"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_breaks_its_rule(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, owner, name, old, new = FAULTS[fault]
    faulty: Any = mutated(getattr(owner, name), old, new)
    monkeypatch.setattr(owner, name, faulty)
    # Else the disk is through before anything else can happen.
    monkeypatch.setattr(WriteTimeEstimate, "is_quick", lambda *_: False)
    monkeypatch.setattr("tests.integration.test_receipts.SECONDS", 3.0)
    with pytest.raises(Exception):  # noqa: B017
        check(rule, tmp_path / "data", monkeypatch)
