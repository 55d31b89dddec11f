"""Send buffer: numbers sends outside transactions, waits for their confirmations, and repeats sends after a reconnect.

    add ──▶ waiting ──write, under a number──▶ in flight ──RECEIPT──▶ confirmed
               ▲                                  │  ├──ERROR──▶ raised to its sender; not repeated
               │                                  │  └──sends after a refused one are refused as a gap ─┐
               └──────── connection lost ─────────┴─────────────────────────────────────────────────────┘

After a reconnect the broker is asked for the highest number that it has accepted (docs/contract.md, C18.5). Sends up to
this number count as confirmed. The unconfirmed sends are written again, in order and before all later sends, under the
next numbers. So no send is lost, doubled or overtaken, and no number is left out. The number and the bytes of
unconfirmed sends are limited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from truenext.client.core.context import ClientContext
from truenext.client.core.link import AnswerHandler, Link
from truenext.client.core.send_options import ttl_line
from truenext.client.core.transaction_state import ProducerNumbers
from truenext.client.core.waiting import Signal
from truenext.errors import Code, ConnectionLost, LocalProtocolError, Refused
from truenext.wire.stomp.frame import Frame

UNCONFIRMED_MESSAGES_MAX = 10_000
"""Largest number of unconfirmed sends."""
UNCONFIRMED_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of unconfirmed sends from which on further senders wait."""
RECEIPT_INTERVAL_BYTES = 64 * 1024
"""Bytes written without a receipt request after which the next send requests a receipt."""
FLUSH_BYTES = 64 * 1024
"""Bytes of waiting sends at which the sends are written at once. The broker then works while the program makes more
messages."""
NO_SPACE_RETRY_S = 0.25
"""Seconds after which a send that the broker has refused for lack of space is repeated."""
HEAD_BYTES_ESTIMATE = 200
"""Bytes that are counted for the head of each message."""


class PendingSend(AnswerHandler, msgspec.Struct, eq=False):
    """Message sent outside a transaction. It exists from the call until its outcome is known."""

    head: bytes
    """Beginning of the frame, without the headers for number, receipt and time to live."""
    body: bytes
    size: int
    """Estimated bytes of the frame."""
    expires_at: float | None
    """Time at which the message expires, by `ClientContext.clock`; None means never."""
    producer_lines: str = ""
    """Header lines with the producer and number that the program gave; empty if the client numbers the send."""
    producer_number: int = 0
    frame_number: int = 0
    """Number of the SEND on its link; 0 while the send waits to be written."""
    requests_receipt: bool = False
    """True if the frame requests a receipt. The receipt also confirms all earlier frames."""
    is_done: bool = False
    error: Exception | None = None
    is_abandoned: bool = False
    """True if the caller has stopped waiting for this send, so that it is not repeated."""
    completed: Signal | None = None
    """Signal that is set when the outcome is known. None if no caller waits."""
    send_buffer: SendBuffer | None = None
    batch: SendBatch | None = None

    def complete(self, error: Exception | None) -> None:
        self.is_done = True
        self.error = error
        if self.batch is not None:
            self.batch.on_settled(error)
        if self.completed is not None:
            self.completed.set()

    def on_confirmed(self, frame: Frame) -> None:
        assert self.send_buffer is not None, "it is under way"
        self.send_buffer.on_send_confirmed(self)

    def on_refused(self, error: Refused) -> None:
        assert self.send_buffer is not None, "it is under way"
        self.send_buffer.on_send_refused(self, error)

    def on_connection_lost(self) -> None:
        assert self.send_buffer is not None, "it is under way"
        self.send_buffer.on_send_lost(self)


class SendBatch(msgspec.Struct, eq=False):
    """Sends of one `send_many`, or all `send_nowait` of a connection. A caller may wait until each send is confirmed or
    has failed."""

    unsettled_count: int = 0
    confirmed_count: int = 0
    error: Exception | None = None
    """First error of a send of the batch, as long as no caller has got this error."""
    waiters: list[BatchWaiter] = []

    def add(self, send: PendingSend) -> None:
        send.batch = self
        self.unsettled_count += 1

    def on_settled(self, error: Exception | None) -> None:
        self.unsettled_count -= 1
        if error is None:
            self.confirmed_count += 1
        elif self.error is None:
            self.error = error
        if not self.unsettled_count and self.waiters:
            for awaited in self.waiters:
                awaited.error = self.error
                awaited.completed.set()
            self.waiters.clear()
            self.error = None


class BatchWaiter(msgspec.Struct, eq=False):
    """Signal that is set when each send of a batch is confirmed or has failed, with the batch's first error."""

    completed: Signal = msgspec.field(default_factory=Signal)
    error: Exception | None = None


class SendBuffer:
    def __init__(
        self,
        name: str,
        context: ClientContext,
        *,
        pump_soon: Callable[[], None],
        on_no_space: Callable[[Refused], None],
    ) -> None:
        """Make a buffer whose producer has this `name`. `pump_soon` must soon call `pump` and write its output.
        `on_no_space` is called whenever the broker refuses a send for lack of space."""
        self.producer = ProducerNumbers(name)
        self._pump_soon = pump_soon
        self._on_no_space = on_no_space
        self._call_later = context.call_later
        self._clock = context.clock
        self._link: Link | None = None
        """Link to which sends are written. None without a connection, and until the broker has reported the highest
        number that it has accepted."""
        self._to_write: deque[PendingSend] = deque()
        self._in_flight_count = 0
        self._interrupted: list[PendingSend] = []
        """Sends that were in flight when the connection was lost, in order of their writing."""
        self._to_resend: list[PendingSend] | None = None
        """Refused sends that will be written again, once all sends in flight are answered. None if no send was
        refused."""
        self._no_space_error: Refused | None = None
        """Last refusal for lack of space. None once the broker has confirmed a send since."""
        self._is_backing_off = False
        """True while nothing is written for `NO_SPACE_RETRY_S`, because the broker has refused a send for lack of
        space."""
        self.unconfirmed_count = 0
        self._byte_count = 0
        self._capacity_waiters: list[Signal] = []
        self._empty_waiters: list[Signal] = []
        self._bytes_since_receipt = 0
        self._bytes_since_write = 0
        self.uses_producer_numbers = True
        """True if the broker accepts numbers of producers, as truenext does."""

    # ---- Adding and giving up ----

    @property
    def has_capacity(self) -> bool:
        return self.unconfirmed_count < UNCONFIRMED_MESSAGES_MAX and (
            self._byte_count < UNCONFIRMED_BYTES_MAX or not self.unconfirmed_count
        )

    def capacity_signal(self) -> Signal:
        """Return a signal that is set when the buffer may have space again."""
        signal = Signal()
        self._capacity_waiters.append(signal)
        return signal

    def empty_signal(self) -> Signal:
        """Return a signal that is set when all sends are confirmed or have failed."""
        signal = Signal()
        self._empty_waiters.append(signal)
        return signal

    def add(self, send: PendingSend) -> None:
        send.send_buffer = self
        self.unconfirmed_count += 1
        self._byte_count += send.size
        self._bytes_since_write += send.size
        self._to_write.append(send)

    @property
    def is_flush_due(self) -> bool:
        """Whether the bytes that wait are enough for a write at once."""
        return self._bytes_since_write >= FLUSH_BYTES

    def abandon(self, send: PendingSend) -> Refused | None:
        """Give up a send, because its caller has stopped waiting. The send is not repeated.

        Return the refusal for which the broker has not accepted the send. None if the broker may have accepted the
        send.
        """
        # A send that waits although there is a connection was never written, or was refused.
        reason = None if send.frame_number or send.is_done else self.no_space_error
        if not send.is_done:
            send.is_abandoned = True
            if not send.frame_number:
                self._complete(send, TimeoutError(_ABANDONED))
        return reason

    def abandon_batch(self, batch: SendBatch) -> Refused | None:
        """Give up all sends of a batch that are neither confirmed nor failed. Return a refusal if the broker has
        accepted none of these sends; None if it may have accepted one.
        """
        link = self._link
        in_flight = [] if link is None else [each for each in link.unanswered.values() if isinstance(each, PendingSend)]
        reasons: list[Refused | None] = []
        for send in (*self._to_write, *self._interrupted, *(self._to_resend or ()), *in_flight):
            if send.batch is batch:
                send.batch = None
                batch.on_settled(None)
                reasons.append(self.abandon(send))
        return reasons[0] if reasons and all(reasons) else None

    @property
    def no_space_error(self) -> Refused | None:
        """Last refusal for lack of space by the current broker. None once the broker has confirmed a send since."""
        return None if self._link is None else self._no_space_error

    # ---- Writing ----

    def start_on_link(self, link: Link, highest: int) -> None:
        """Start sending on a new connection. `highest` is the highest number that the broker has accepted from this
        producer. Interrupted sends up to this number count as confirmed; the others are written again."""
        interrupted, self._interrupted = self._interrupted, []
        for send in interrupted:
            if 0 < send.producer_number <= highest and not send.is_done:
                self._complete(send, None)
        to_resend = [send for send in interrupted if not send.is_done]
        self._to_write.extendleft(reversed(to_resend))
        self.producer.last_number = highest
        self._link = link
        self.pump()

    def on_link_ended(self) -> None:
        """Stop sending until the next connection. Must be called after `on_send_lost` for each send in flight."""
        self._link = None
        self._to_resend = None
        self._in_flight_count = self._bytes_since_receipt = 0

    def pump(self) -> None:
        """Write the waiting sends, unless there is no link or a refusal holds the sends back."""
        self._bytes_since_write = 0
        link = self._link
        if link is None or self._is_backing_off or self._to_resend is not None:
            return
        waiting = self._to_write
        producer = self.producer
        while waiting:
            send = waiting.popleft()
            if send.is_done:
                # The send was abandoned.
                continue
            try:
                if send.producer_lines:
                    link.require_truenext("send(producer=..., number=...)")
                ttl = ""
                if send.expires_at is not None:
                    link.require_truenext("a ttl")
                    ttl = ttl_line(send.expires_at - self._clock())
            except (LocalProtocolError, TimeoutError) as error:
                self._complete(send, error)
                continue
            self._bytes_since_receipt += send.size
            receipt = ""
            send.requests_receipt = not waiting or self._bytes_since_receipt >= RECEIPT_INTERVAL_BYTES
            if send.requests_receipt:
                receipt = f"receipt:{link.next_receipt_id}\n"
                self._bytes_since_receipt = 0
            number_lines = send.producer_lines
            if self.uses_producer_numbers and not number_lines:
                producer.last_number = number = send.producer_number = producer.last_number + 1
                number_lines = f"truenext-producer:{producer.name}\ntruenext-number:{number}\ntruenext-gapless:true\n"
            lines = f"{ttl}{receipt}{number_lines}content-length:{len(send.body)}\n\n".encode()
            send.frame_number = link.write_tracked(b"".join((send.head, lines, send.body, b"\0")), send)
            self._in_flight_count += 1
        if self._bytes_since_receipt:
            # The last waiting send was not written, so its request for a receipt is missing.
            self._request_receipt(link)

    def _request_receipt(self, link: Link) -> None:
        self._bytes_since_receipt = 0
        link.request_receipt(_ReceiptRequestHandler(self, link))

    def on_receipt_refused(self, link: Link) -> None:
        """Request the receipt again later. The broker had no space even for the empty transaction that requests it."""

        def request_again() -> None:
            if self._link is link and self._in_flight_count:
                self._request_receipt(link)
                self._pump_soon()

        self._call_later(NO_SPACE_RETRY_S, request_again)

    # ---- Outcomes ----

    def on_send_confirmed(self, send: PendingSend) -> None:
        self._in_flight_count -= 1
        self._complete(send, None)
        if self._to_resend is None:
            self._no_space_error = None
        elif not self._in_flight_count:
            # The broker may accept sends with numbers that the program gave, after a refused send.
            self._requeue_refused(self._to_resend)

    def on_send_refused(self, send: PendingSend, error: Refused) -> None:
        self._in_flight_count -= 1
        to_resend = self._to_resend
        if to_resend is not None and error.code == Code.GAP:
            to_resend.append(send)
        else:
            if to_resend is None:
                to_resend = self._to_resend = []
                if send.producer_number:
                    # The broker refuses the sends after it as a gap, so their numbers become free again.
                    self.producer.last_number = send.producer_number - 1
            if error.code == Code.NO_SPACE:
                to_resend.append(send)
                self._no_space_error = error
                self._is_backing_off = True
                self._on_no_space(error)
            else:
                self._complete(send, error)
        if not self._in_flight_count:
            self._requeue_refused(to_resend)
        elif send.requests_receipt and self._link is not None:
            # A refused frame gets no receipt; frames before it wait for another one.
            self._request_receipt(self._link)
            self._pump_soon()

    def _requeue_refused(self, to_resend: list[PendingSend]) -> None:
        """Queue refused sends for writing again, now that no send is in flight."""
        self._to_resend = None
        for send in to_resend:
            send.frame_number = 0
            if send.is_abandoned and not send.is_done:
                self._complete(send, TimeoutError(_ABANDONED))
        self._to_write.extendleft(reversed(to_resend))
        if self._is_backing_off:
            self._call_later(NO_SPACE_RETRY_S, self._end_backoff)
        else:
            self._pump_soon()

    def _end_backoff(self) -> None:
        self._is_backing_off = False
        self._pump_soon()

    def on_send_lost(self, send: PendingSend) -> None:
        if self._to_resend:
            # These were written before `send`, and were refused.
            for each in self._to_resend:
                each.producer_number = each.frame_number = 0
            self._interrupted.extend(self._to_resend)
            self._to_resend = []
        if send.is_abandoned or not self.uses_producer_numbers:
            self._complete(send, TimeoutError(_ABANDONED) if send.is_abandoned else ConnectionLost(_MAY_HAVE_ARRIVED))
        else:
            send.frame_number = 0
            self._interrupted.append(send)

    def fail_all(self, error: Exception) -> None:
        """Fail all waiting and interrupted sends with `error`."""
        for send in (*self._interrupted, *self._to_write):
            if not send.is_done:
                self._complete(send, error)
        self._interrupted.clear()
        self._to_write.clear()
        _set_all(self._capacity_waiters)

    def fail_interrupted(self, error: Exception) -> None:
        """Fail the sends that were in flight when the connection was lost, because the client now connects to another
        broker."""
        for send in self._interrupted:
            if not send.is_done:
                self._complete(send, error)
        self._interrupted.clear()

    def _complete(self, send: PendingSend, error: Exception | None) -> None:
        self.unconfirmed_count -= 1
        self._byte_count -= send.size
        send.complete(error)
        if not self.unconfirmed_count and self._empty_waiters:
            _set_all(self._empty_waiters)
        if self._capacity_waiters and self.has_capacity:
            _set_all(self._capacity_waiters)


class _ReceiptRequestHandler(AnswerHandler, msgspec.Struct, eq=False):
    _send_buffer: SendBuffer
    _link: Link

    def on_refused(self, error: Refused) -> None:
        self._send_buffer.on_receipt_refused(self._link)


def _set_all(signals: list[Signal]) -> None:
    waiting = signals[:]
    signals.clear()
    for signal in waiting:
        signal.set()


_MAY_HAVE_ARRIVED = "the connection was lost before the message was confirmed; it may have arrived"
_ABANDONED = "the broker has not confirmed the message in time; it may have arrived, and is not sent again"
