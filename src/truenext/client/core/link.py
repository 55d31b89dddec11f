"""Link: one TCP connection to a broker, with bytes in and out, and handlers that wait for answers.

Client and broker number the frames of a link in the same way: CONNECT is 1. A frame that may be refused is *unanswered*
until a RECEIPT of this or a later frame arrives, or an ERROR with the frame's number. The broker answers in the order
of the frames, so not every frame must request a receipt. The name of a receipt is the number of its frame.

Source: docs/protocol.md, "Refused frames"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from truenext.client.core import frames
from truenext.client.core.waiting import Signal
from truenext.errors import Code, ConnectionLost, LocalProtocolError, Refused, RemoteProtocolError, TruenextError
from truenext.model.limits import HEART_BEAT_MS_MIN
from truenext.model.url import Address
from truenext.wire.protocol_detector import ProtocolDetector, detector_for_server
from truenext.wire.stomp.frame import Frame, Version
from truenext.wire.stomp.protocol import Side, parse_heart_beat
from truenext.wire.stomp.protocol import StompProtocol as Stomp
from truenext.wire.stomp.shapes import FRAME_SHAPES

SILENT_INTERVALS = 2.0
"""Number of heart-beat intervals without a byte from the broker after which the connection counts as lost."""

HEART_BEAT = b"\n"

UNANSWERED_FRAMES_MAX = 256
"""Number of unanswered frames from which on a receipt is requested, even if no caller waits for an answer."""

BROKER_INTERVAL_FACTOR = 0.4
"""Interval of the broker's heart-beats, as a share of the client's interval. With the shorter interval the client
notices a frozen connection before the broker does, and takes the connection over, so that no attempt is counted."""


_EMPTY_TRANSACTION_NAME = "nothing"
_DRAINING = "the broker is being drained: a connection that begins now may only send control requests"


class AnswerHandler:
    """Base of objects that get the answer to one frame. This class ignores all answers."""

    __slots__ = ()

    def on_confirmed(self, frame: Frame) -> None:
        """Handle a RECEIPT for this frame or a later one. The broker has executed the frame; persistent changes are
        durable."""

    def on_refused(self, error: Refused) -> None:
        """Handle an ERROR for this frame. The frame had no effect."""

    def on_connection_lost(self) -> None:
        """Handle the loss of the connection before an answer. The broker may have executed the frame or not."""


class AnswerWaiter(AnswerHandler, msgspec.Struct, eq=False):
    """Answer handler that hands the answer to one frame to another handler, and then sets a signal."""

    _handler: AnswerHandler = msgspec.field(default_factory=AnswerHandler)
    answered: Signal = msgspec.field(default_factory=Signal)
    error: TruenextError | None = None

    def on_confirmed(self, frame: Frame) -> None:
        self._handler.on_confirmed(frame)
        self.answered.set()

    def on_refused(self, error: Refused) -> None:
        self.error = error
        self._handler.on_refused(error)
        self.answered.set()

    def on_connection_lost(self) -> None:
        self.error = ConnectionLost("the connection was lost before the broker answered")
        self._handler.on_connection_lost()
        self.answered.set()


class Link:
    def __init__(
        self,
        number: int,
        heart_beat_s: float,
        now: float,
        *,
        on_frame: Callable[[Frame], None],
        accepts_control_only: bool = True,
    ) -> None:
        """Make a link. `number` rises with each link of the client; `on_frame` gets frames that answer no other frame.
        Unless it `accepts_control_only`, the link raises Refused if the broker is being drained, and so would refuse
        all but control requests."""
        self.number = number
        self.is_up = False
        """True once the broker has answered CONNECT with CONNECTED."""
        self.is_truenext = False
        self.store_id = ""
        self.session_id = ""
        self.server_name = ""
        self.is_refused_by_drain = False
        """True if the broker has refused a frame because it is being drained."""
        self.is_control_only = False
        """True if the broker allows only control requests on this link."""
        self._accepts_control_only = accepts_control_only
        self.release_count = 0
        self.out_chunks: list[bytes] = []
        """Bytes that the driver still has to write."""
        self.frame_count = 0
        self.unanswered: dict[int, AnswerHandler] = {}
        """Handlers of unanswered frames by frame number, in ascending order."""
        self._protocol_detector: ProtocolDetector | None = detector_for_server()
        """Detector that notices a peer with another protocol. None once the peer has proved to be a STOMP broker."""
        self._stomp: Stomp[Frame] = Stomp(Side.CLIENT, FRAME_SHAPES)
        self._on_frame = on_frame
        self._heart_beat_s = heart_beat_s
        self.heartbeat_interval_s = 0.0
        """Seconds without a byte sent after which a heart-beat is due. 0 means never."""
        self.silence_limit_s = 0.0
        """Seconds without a byte from the broker after which the connection counts as lost. 0 means never."""
        self.started_at = self.read_at = self.written_at = now

    def require_truenext(self, feature: str) -> None:
        """Check that the broker is truenext. Raises: LocalProtocolError if not; its text names `feature`"""
        if not self.is_truenext:
            raise LocalProtocolError(
                f"{feature} needs a truenext broker; this broker is {self.server_name or 'of another kind'}"
            )

    # ---- Out ----

    def send_connect(self, headers: dict[str, str]) -> None:
        beat_ms = round(self._heart_beat_s * 1000)
        own_headers = {"accept-version": "1.2", "heart-beat": f"{beat_ms},{round(beat_ms * BROKER_INTERVAL_FACTOR)}"}
        self.write(frames.encode_frame("CONNECT", own_headers | headers))

    def write(self, data: bytes) -> int:
        """Write one frame, and return its number."""
        self.out_chunks.append(data)
        self.frame_count += 1
        return self.frame_count

    def write_tracked(self, data: bytes, handler: AnswerHandler) -> int:
        """Write one frame, and return its number. `handler` gets the answer."""
        number = self.write(data)
        self.unanswered[number] = handler
        return number

    def write_all_tracked(self, data: bytes, count: int, handler: AnswerHandler) -> None:
        """Write `count` encoded frames. `handler` gets the answer to each."""
        first = self.frame_count + 1
        self.out_chunks.append(data)
        self.frame_count += count
        self.unanswered.update(dict.fromkeys(range(first, first + count), handler))

    def request_receipt(self, handler: AnswerHandler) -> None:
        """Request a receipt for all frames written so far. An empty transaction carries the request."""
        self.write_tracked(frames.encode_frame("BEGIN", {"transaction": _EMPTY_TRANSACTION_NAME}), AnswerHandler())
        self.write_tracked(
            frames.encode_frame("ABORT", {"transaction": _EMPTY_TRANSACTION_NAME, "receipt": self.next_receipt_id}),
            handler,
        )

    def answer_signal(self, number: int) -> Signal:
        """Return a signal that is set when frame `number` is answered. Ensure that a receipt for the frame is
        requested."""
        handler = self.unanswered[number]
        if isinstance(handler, AnswerWaiter):
            return handler.answered
        if number == self.frame_count and self.out_chunks and self.out_chunks[-1] != HEART_BEAT:
            # The frame was not written yet, so it can request the receipt.
            waiter = self.unanswered[number] = AnswerWaiter(handler)
            self.out_chunks[-1] = frames.add_receipt_header(self.out_chunks[-1], str(number))
        else:
            waiter = AnswerWaiter()
            self.request_receipt(waiter)
        return waiter.answered

    @property
    def next_receipt_id(self) -> str:
        return str(self.frame_count + 1)

    def write_heart_beat(self) -> None:
        """Write a heart-beat, which does not count as a frame."""
        self.out_chunks.append(HEART_BEAT)

    # ---- In ----

    def receive_data(self, data: bytes, now: float) -> None:
        """Handle received bytes.

        Raises: ConnectionLost or Refused if the broker ends the connection; RemoteProtocolError if the peer does not
        speak STOMP
        """
        self.read_at = now
        if self._protocol_detector is not None:
            rest = self._protocol_detector.receive(data)
            if rest is None:
                return
            self._protocol_detector, data = None, rest
        stomp = self._stomp
        for frame in stomp.receive(data):
            command = frame.command
            if command == "MESSAGE" and self.is_up:
                self._on_frame(frame)
                continue
            stomp.check(frame)
            if command == "RECEIPT":
                self._on_receipt(frame)
            elif command == "ERROR":
                self._on_error(frame)
            else:
                self._on_connected(frame)
        if stomp.has_more:
            self.receive_data(b"", now)

    def _on_connected(self, frame: Frame) -> None:
        headers = frame.headers
        if headers.get("version") != "1.2":
            raise RemoteProtocolError(f"the server has selected STOMP version {headers.get('version', '1.0')}")
        self._stomp.set_version(Version.V1_2)
        if headers.get("truenext-control-only") == Code.DRAINING and not self._accepts_control_only:
            raise Refused(_DRAINING, Code.DRAINING)
        self.is_control_only = "truenext-control-only" in headers
        self.is_up = True
        self.store_id = headers.get("truenext-store", "")
        self.is_truenext = bool(self.store_id)
        self.session_id = headers.get("session", "")
        self.server_name = headers.get("server", "")
        offered_ms, requested_ms = parse_heart_beat(headers.get("heart-beat", "0,0"))
        if self._heart_beat_s and requested_ms:
            self.heartbeat_interval_s = max(self._heart_beat_s * 1000, requested_ms) / 1000 / 2
        if self._heart_beat_s and offered_ms:
            self.silence_limit_s = (
                SILENT_INTERVALS
                * max(self._heart_beat_s * 1000 * BROKER_INTERVAL_FACTOR, offered_ms, HEART_BEAT_MS_MIN)
                / 1000
            )
        self._on_frame(frame)

    def _on_receipt(self, frame: Frame) -> None:
        receipt = frame.headers.get("receipt-id", "")
        if not receipt.isdigit():
            return
        number = int(receipt)
        unanswered = self.unanswered
        done = []
        for each in unanswered:
            if each > number:
                break
            done.append(each)
        for each in done:
            unanswered.pop(each).on_confirmed(frame)

    def _on_error(self, frame: Frame) -> None:
        reason = frame.body.decode(errors="replace").strip() or frame.headers.get("message", "no reason given")
        error = Refused(reason, frame.headers.get("truenext-code", ""))
        if error.code == Code.DRAINING and self.is_up:
            # Not the frame is at fault: it is to be sent again when the drain has ended, or to another broker.
            self.is_refused_by_drain = True
            raise error
        number = frame.headers.get("truenext-frame", "")
        if not number.isdigit():
            # Another broker, which closes the connection next: the frame that requested this receipt was wrong.
            receipt = frame.headers.get("receipt-id", "")
            if receipt.isdigit() and (handler := self.unanswered.pop(int(receipt), None)) is not None:
                handler.on_refused(error)
            raise error
        handler = self.unanswered.pop(int(number), None)
        if handler is None:
            # The client's state differs from the broker's: only a new connection is safe.
            raise ConnectionLost(f"the broker refused a frame: {reason}") from error
        handler.on_refused(error)

    def mark_unanswered_lost(self) -> None:
        """Tell each handler of an unanswered frame that the connection is lost."""
        unanswered, self.unanswered = self.unanswered, {}
        for each in unanswered.values():
            each.on_connection_lost()


# ---- Reconnecting ----

DELAY_FIRST_S = 0.1
DELAY_MAX_S = 5.0
"""Longest delay, in seconds, between two rounds over all addresses. The delay doubles with each round. The delay is
shortened by a random part, so that many clients do not connect at the same moment."""
ATTEMPT_TIMEOUT_S = 10.0
"""Seconds within which a broker must accept a connection. CONNECTED must follow within the same time. The time is
enough for a broker that must first finish a write of an old connection, which the client takes over."""
FIRST_ROUND_S = 5.0
"""Seconds that several addresses share in each of the FIRST_ROUNDS. So a machine without power does not keep the client
long from another broker, which may be about to take over."""
FIRST_ROUNDS = 3
"""Number of rounds after which each further round has twice the time, so that a slow broker gets ATTEMPT_TIMEOUT_S in
the end."""
STABLE_CONNECTION_S = 5.0
"""Lifetime, in seconds, from which on a connection counts as a success."""
QUICK_FAILURES_MAX = 3
"""Limit of the number of failed rounds after the loss of a short connection. The limit keeps the delays short, since a
broker has answered."""


class ConnectBackoff:
    """Order of the addresses, and the times between and for the attempts. In a round each address is tried once."""

    def __init__(self, addresses: Sequence[Address], random: Callable[[], float]) -> None:
        self.addresses = addresses
        self._random = random
        self._index = 0
        self._round_count = 0
        """Number of failed rounds since the last connection that lasted. The loss of a short connection counts, too."""
        self._tried_count = 0
        """Number of addresses that have failed in the current round."""

    @property
    def current_address(self) -> Address:
        """Address of the current connection, or of the next attempt."""
        return self.addresses[self._index % len(self.addresses)]

    @property
    def untried_count(self) -> int:
        """Number of addresses that are still to be tried in this round."""
        return len(self.addresses) - self._tried_count

    def next_address_and_delay(self) -> tuple[Address, float]:
        """Return the address of the next attempt, and the seconds to wait before it."""
        if self._tried_count or not self._round_count:
            return self.current_address, 0.0
        longest = min(DELAY_FIRST_S * 2 ** min(self._round_count - 1, 20), DELAY_MAX_S)
        return self.current_address, longest * (0.5 + self._random() / 2)

    def attempt_timeout_s(self, first_round_s: float) -> float:
        """Return the seconds that the next attempt may take. Several addresses share `first_round_s` in each of the
        FIRST_ROUNDS."""
        if len(self.addresses) == 1:
            return ATTEMPT_TIMEOUT_S
        share_s = first_round_s / len(self.addresses)
        doublings = max(0, self._round_count - FIRST_ROUNDS + 1)
        return min(share_s * 2.0 ** min(doublings, 20), ATTEMPT_TIMEOUT_S)

    def on_connect_failed(self) -> None:
        """Count a failure to connect or log in. The next attempt uses the next address."""
        self._tried_count += 1
        if not self.untried_count:
            self._round_count += 1
            self._tried_count = 0
        self.skip_address()

    def on_connection_lost(self, lifetime_s: float) -> None:
        """Count the end of a connection: a success if the connection lasted, otherwise a failure. The same address is
        tried again."""
        self._round_count = 0 if lifetime_s >= STABLE_CONNECTION_S else min(self._round_count + 1, QUICK_FAILURES_MAX)
        self._tried_count = 0

    def skip_address(self) -> None:
        """Begin with the next address."""
        self._index += 1
