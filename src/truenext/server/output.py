"""Output: writes the messages and answers of one connection to its socket.

    deliver, answer ──▶ parts ──flush──▶ socket
                          └── what it does not take ──▶ unsent frames ──on_writable──▶ socket

Each unsent frame has an owner, its subscriber. So `cancel_unsent` can drop a subscriber's unsent messages, and count
the messages that the socket has taken.
"""

from asyncio import AbstractEventLoop
from collections import Counter, deque
from collections.abc import Collection
from enum import Enum
from typing import Protocol

from truenext.broker.broker import Broker
from truenext.broker.silence import Silence
from truenext.engine.background.browsing import BrowseSlice
from truenext.engine.lifecycle.pull_requests import EndedPullRequest
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState, Subscriber
from truenext.engine.state.queue import Entry
from truenext.model.answers import Answer, ErrorAnswer, Receipt
from truenext.model.commands import AckMode
from truenext.model.limits import UNSENT_ANSWER_BYTES_MAX, UNSENT_BYTES_MAX
from truenext.server.client_socket import ClientSocket
from truenext.server.life import CLOSES_WHEN_SENT, OPEN, WITHOUT_SOCKET, WITHOUT_WRITER, ConnectionLife
from truenext.wire.session import WireReplies

WRITE_BYTES = 256 * 1024
"""Bytes of one write if the data is larger than LARGE_WRITE_BYTES, or if an earlier write has left unsent bytes."""
LARGE_WRITE_BYTES = 2 * UNSENT_BYTES_MAX
"""Bytes up to which a flush is one write. Larger data is written in parts of WRITE_BYTES."""
JOINED_ANSWER_BYTES = 4096
"""Bytes up to which unsent answers are joined to one frame: a bytes object takes more memory than the content of a
small answer."""


class Cancelled(Enum):
    """Owner of a message that `cancel_unsent` has cancelled too late: a part of it was sent or encrypted already, so
    the rest is still sent."""

    MESSAGE = "message"


Owner = Subscriber | Cancelled | None
"""Owner of an unsent frame; None if the frame is no message."""


class OutputEnding(Protocol):
    """Functions that `Output` calls when a connection must end. `Ending` has them, and tests replace them."""

    life: ConnectionLife

    def on_last_answer(self) -> None: ...

    def half_close(self) -> None:
        """Close our side of the socket. Called when the last answer was sent."""

    def on_answers_unread(self, reason: str) -> None:
        """End the connection at once, as its client leaves too many bytes of answers unread."""

    def on_socket_broken(self, reason: str) -> None: ...


class Output:
    def __init__(
        self,
        session: ConnectionState,
        replies: WireReplies,
        broker: Broker,
        client_socket: ClientSocket,
        loop: AbstractEventLoop,
        ending: OutputEnding,
    ) -> None:
        self._session = session
        self._replies = replies
        self._broker = broker
        self._socket = client_socket
        self._tls = client_socket.tls
        self._loop = loop
        self._ending = ending
        self._life = ending.life
        self._silence = broker.silence
        self.bytes_sent = 0
        """Bytes that the socket has taken."""
        self._has_sent = False
        """True if bytes were written since the last call of `send_heart_beat`."""
        self._parts: list[bytes] = []
        """Pieces of frames, to be joined and written by the next flush."""
        self._part_owners: list[tuple[Subscriber | None, int]] = []
        """Owners of `_parts`, in order: a subscriber and its number of messages, or None and 1 for a frame that is no
        message."""
        self._has_messages = False
        self._unsent: deque[tuple[bytes, Owner]] = deque()
        """Frames that the socket has not taken yet, each with its owner. Empty unless the client reads slowly."""
        self._unsent_messages: Counter[Subscriber] = Counter()
        self._unsent_answer_bytes = 0
        self._counted_answer_bytes = 0
        """Bytes of unsent answers as they were last reported to the broker."""
        self._first_unsent_offset = 0
        """Bytes of the first unsent frame that the socket has taken."""
        self._sent_counts: dict[BrokerConsumer, int] = {}
        """Number of messages that the socket has taken since the last `Broker.on_all_sent`, for each consumer in auto
        mode."""

    def answer(self, answer: Answer) -> None:
        """Implement `Peer.answer`."""
        if isinstance(answer, Receipt):
            self.add_frame(self._replies.encode_receipt(answer))
        elif isinstance(answer, ErrorAnswer):
            self.add_frame(self._replies.encode_fault(answer))
        else:
            self._ending.on_last_answer()

    def deliver(self, consumer: BrokerConsumer, entries: list[Entry]) -> None:
        """Implement `Peer.deliver`."""
        self._replies.encode_deliveries(consumer.subscription, entries, self._parts, consumer.session.release_count)
        self._part_owners.append((consumer, len(entries)))
        self._has_messages = True

    def deliver_browse_slice(self, browse_slice: BrowseSlice) -> None:
        """Implement `Peer.deliver_browse_slice`."""
        browser = browse_slice.browser
        self._replies.encode_deliveries(
            browser.subscription, browse_slice.entries, self._parts, browser.session.release_count, is_browse=True
        )
        self._part_owners.append((browser, len(browse_slice.entries)))
        self._has_messages = True
        if browse_slice.is_end:
            self.add_frame(self._replies.encode_end_of_browse(browser.subscription, browser.queue.destination))

    def end_pull_request(self, ended: EndedPullRequest) -> None:
        """Implement `Peer.end_pull_request`."""
        consumer = ended.consumer
        self.add_frame(
            self._replies.encode_end_of_pull_request(
                consumer.subscription, consumer.destination, ended.unused, ended.correlation
            )
        )

    def add_frame(self, frame: bytes) -> None:
        """Add a frame that is no message to the next flush. An empty frame says that the client is told nothing."""
        if frame:
            self._parts.append(frame)
            self._part_owners.append((None, 1))

    def forget_answers(self) -> None:
        """Report zero unsent answer bytes to the broker, because the connection is closed."""
        if self._counted_answer_bytes:
            self._count_answers(0)

    def send_heart_beat(self) -> None:
        """Send a heart-beat if nothing was sent since the last call."""
        if not self._has_sent:
            if self._silence is not None and self._silence.is_silent():
                self._send_heart_beat_in_silence(self._silence)
            elif not self._unsent:
                self.add_frame(self._replies.heart_beat)
                self.flush()
        self._has_sent = False

    def _send_heart_beat_in_silence(self, silence: Silence) -> None:
        """Send a heart-beat before the frames that wait, unless a part of the first one was sent or encrypted. Without
        heart-beats clients would take their connections for lost."""
        if self._first_unsent_offset or (self._tls is not None and self._tls.has_unsent):
            return
        frame = self._replies.heart_beat
        sent = self._send(frame)
        if sent < len(frame) and (sent or (self._tls is not None and self._tls.has_unsent)):
            self._unsent.appendleft((frame, None))
            self._unsent_answer_bytes += len(frame)
            self._count_sent(sent)
            silence.add(self._on_silence_ended)

    def flush(self) -> None:
        """Implement `Peer.flush`."""
        parts, state = self._parts, self._life.state
        if parts and (state is OPEN or state not in WITHOUT_SOCKET):
            if self._unsent or (self._silence is not None and self._waits_for_silence(self._silence)):
                self._buffer_unsent(0, None)
            else:
                data = parts[0] if len(parts) == 1 else b"".join(parts)
                # Most of a large write is left for later: to send it all at once would delay other connections.
                sent = self._send(data if len(data) <= LARGE_WRITE_BYTES else memoryview(data)[:WRITE_BYTES])
                if sent == len(data):
                    parts.clear()
                    self._part_owners.clear()
                    if self._has_messages:
                        self._has_messages = False
                        self._broker.on_all_sent(self._session)
                else:
                    self._buffer_unsent(sent, data)
                    if self._life.state not in WITHOUT_WRITER:
                        self._socket.watch_writes(self.on_writable)
        if state is not OPEN and self._life.state in CLOSES_WHEN_SENT and not self._unsent:
            self._ending.half_close()

    def flush_tls(self) -> None:
        """Send the bytes that TLS itself generates, such as those of its handshake, once the socket takes them."""
        is_due = self._tls is not None and self._tls.has_unsent and not self._unsent
        if is_due and self._life.state not in WITHOUT_SOCKET:
            self._socket.watch_writes(self.on_writable)

    def _waits_for_silence(self, silence: Silence) -> bool:
        """Return whether nothing may be written now because the broker is silent. If so, the unsent frames are written
        after the silence."""
        is_silent = silence.is_silent()
        if is_silent:
            silence.add(self._on_silence_ended)
        return is_silent

    def _on_silence_ended(self) -> None:
        if self._life.state not in WITHOUT_WRITER:
            self._socket.watch_writes(self.on_writable)

    def on_writable(self) -> None:
        """Write as much of the unsent frames as the socket takes, at most WRITE_BYTES."""
        if self._silence is not None and self._waits_for_silence(self._silence):
            # The loop would call again and again.
            self._socket.unwatch_writes()
            return
        if self._tls is not None and not self._unsent:
            try:
                self._tls.flush()
            except OSError as error:
                self._ending.on_socket_broken(f"cannot write to the connection: {error}")
                return
            if self._tls.has_unsent:
                return
        data = bytearray()
        start = self._first_unsent_offset
        for frame, _ in self._unsent:
            data += memoryview(frame)[start : start + WRITE_BYTES - len(data)]
            start = 0
            if len(data) >= WRITE_BYTES:
                break
        self._count_sent(self._send(data))
        if not self._unsent and self._life.state not in WITHOUT_SOCKET:
            self._socket.unwatch_writes()
            self._sent_counts.clear()
            self._has_messages = False
            self._broker.on_all_sent(self._session)
            if self._life.state in CLOSES_WHEN_SENT:
                self._ending.half_close()

    def cancel_unsent(
        self, consumers: Collection[BrokerConsumer] | None
    ) -> tuple[dict[BrokerConsumer, int], list[Subscriber]]:
        """Implement `Peer.cancel_unsent`."""
        owners: Collection[Subscriber] | None = None
        if self._tls is not None:
            # The client may have received the first of the encrypted messages: they must not be dispatched again.
            self._count_sent(self._tls.take_sent_records())
        if consumers is None:
            sent, self._sent_counts = self._sent_counts, {}
        else:
            sent = {
                consumer: self._sent_counts.pop(consumer) for consumer in consumers if consumer in self._sent_counts
            }
            owners = {consumer for consumer in consumers if self._unsent_messages.pop(consumer, 0)}
            if not owners:
                # Do not copy `_unsent`: it may hold very many answers, and subscriptions may end very often.
                return sent, []
        partly_sent: list[tuple[bytes, Owner]] = []
        partially_sent: list[Subscriber] = []
        # These bytes will be sent in any case: the socket has taken some of their frame, or they are encrypted.
        size = self._first_unsent_offset + (0 if self._tls is None else self._tls.encrypted_count)
        while size > 0:
            frame, owner = self._unsent.popleft()
            size -= len(frame)
            if isinstance(owner, Subscriber) and (owners is None or owner in owners):
                self._unsent_messages[owner] -= 1
                partially_sent.append(owner)
                owner = Cancelled.MESSAGE
            partly_sent.append((frame, owner))
        remaining = [
            (frame, owner)
            for frame, owner in self._unsent
            if owner is None or (owners is not None and owner not in owners)
        ]
        self._unsent = deque(partly_sent + remaining)
        if consumers is None:
            self._unsent_messages.clear()
        return sent, partially_sent

    def _send(self, data: bytes | bytearray | memoryview) -> int:
        """Write to the socket. Returns the number of bytes that the socket took."""
        self._has_sent = True
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            # Not at once: a turn that writes to many connections must not find one closed meanwhile.
            self._loop.call_soon(self._ending.on_socket_broken, f"cannot write to the connection: {error}")
            return 0
        self.bytes_sent += sent
        return sent

    def _buffer_unsent(self, sent: int, data: bytes | None) -> None:
        """Move the frames in `_parts` to `_unsent`. The socket has taken the first `sent` bytes of these frames. `data`
        is all parts joined; None if the caller has not joined the parts."""
        at = 0
        is_one_frame = len(self._part_owners) == 1 and self._part_owners[0][1] == 1
        for consumer, count in self._part_owners:
            size = 1 if consumer is None else self._replies.parts_per_message
            for _ in range(count):
                # Most likely a large frame, so it is not copied again.
                frame = data if data is not None and is_one_frame else b"".join(self._parts[at : at + size])
                at += size
                if consumer is None:
                    self._unsent_answer_bytes += len(frame)
                    if self._unsent and self._unsent[-1][1] is None and len(self._unsent[-1][0]) < JOINED_ANSWER_BYTES:
                        frame = self._unsent.pop()[0] + frame
                self._unsent.append((frame, consumer))
            if consumer is not None:
                self._unsent_messages[consumer] += count
        self._parts.clear()
        self._part_owners.clear()
        self._count_sent(sent)
        if self._unsent_answer_bytes > UNSENT_ANSWER_BYTES_MAX:
            self._ending.on_answers_unread(
                f"the client has {self._unsent_answer_bytes} bytes of unread answers, at most "
                f"{UNSENT_ANSWER_BYTES_MAX}: read them"
            )

    def _count_sent(self, sent: int) -> None:
        self._first_unsent_offset += sent
        unsent = self._unsent
        while unsent and self._first_unsent_offset >= len(unsent[0][0]):
            frame, consumer = unsent.popleft()
            self._first_unsent_offset -= len(frame)
            if isinstance(consumer, Cancelled):
                self._broker.ends.partial_frame_sent(self._session)
                continue
            if consumer is None:
                self._unsent_answer_bytes -= len(frame)
                continue
            self._unsent_messages[consumer] -= 1
            if isinstance(consumer, BrokerConsumer) and consumer.mode is AckMode.AUTO:
                self._sent_counts[consumer] = self._sent_counts.get(consumer, 0) + 1
        if self._counted_answer_bytes != self._unsent_answer_bytes:
            self._count_answers(self._unsent_answer_bytes)

    def _count_answers(self, size: int) -> None:
        self._counted_answer_bytes = size
        self._broker.unread_answers.update(self._ending, size)
