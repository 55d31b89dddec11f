"""Contents of a queue, for a test. They are read over a connection, as any client can read them."""

import asyncio
import json
from dataclasses import dataclass

from truenext.model.limits import BODY_BYTES_MAX, MESSAGE_HEADER_BYTES_MAX, MESSAGE_HEADERS_MAX
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version, encode
from truenext.wire.stomp.shapes import FRAME_SHAPES

READ_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage:
    """Message that waits in a queue."""

    body: bytes
    """Body of the message."""
    headers: dict[str, str]
    """Headers of the MESSAGE that a browser gets: the headers of the SEND, and those that the broker adds, such as
    `priority`, `truenext-sequence` and `truenext-attempts` (docs/reference/headers.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueContents:
    """Contents of a queue at one moment."""

    messages: tuple[WaitingMessage, ...]
    """Messages that wait in the queue, in the order in which they would be dispatched."""
    unacknowledged: int
    """Number of messages that consumers hold. Messages that an open transaction has acknowledged are not counted."""
    scheduled: int
    """Number of scheduled sends that are not due yet."""

    @property
    def waiting(self) -> int:
        """Number of waiting messages."""
        return len(self.messages)

    @property
    def bodies(self) -> list[bytes]:
        """Bodies of the waiting messages."""
        return [message.body for message in self.messages]


async def read_queue_contents(host: str, port: int, queue: str) -> QueueContents:
    """Return the contents of the queue with this name. If the queue does not exist, the contents are empty."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        decoder = Decoder(FRAME_SHAPES, BODY_BYTES_MAX, MESSAGE_HEADER_BYTES_MAX, MESSAGE_HEADERS_MAX)
        frames: list[Frame] = []

        def send_frame(command: str, headers: dict[str, str]) -> None:
            writer.write(encode(Frame(command, headers), Version.V1_2))

        async def next_frame() -> Frame:
            while not frames:
                data = b""
                if not decoder.has_more and not (data := await reader.read(READ_BYTES)):
                    raise ConnectionError("the broker has stopped")
                frames.extend(decoder.receive(data))
            return frames.pop(0)

        send_frame("CONNECT", {"accept-version": "1.2", "host": "testing"})
        await next_frame()
        decoder.version = Version.V1_2
        send_frame("SUBSCRIBE", {"id": "browser", "destination": f"/queue/{queue}", "browser": "true"})
        messages = []
        while (frame := await next_frame()).headers.get("browser") != "end":
            _raise_if_error(frame)
            messages.append(WaitingMessage(body=frame.body, headers=frame.headers))
        send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"})
        send_frame("SEND", {"destination": "/control/queues", "reply-to": "/temp-queue/answers"})
        answer = await next_frame()
        _raise_if_error(answer)
        row = next((row for row in json.loads(answer.body) if row["name"] == queue), None)
        return QueueContents(
            messages=tuple(messages),
            unacknowledged=row["unacknowledged"] if row else 0,
            scheduled=row["scheduled"] if row else 0,
        )
    finally:
        writer.close()


def _raise_if_error(frame: Frame) -> None:
    if frame.command == "ERROR":
        raise ValueError(frame.body.decode())
