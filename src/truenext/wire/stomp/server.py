"""STOMP session: the broker's side of STOMP on one connection.

It makes commands from a client's frames (requests.py), and bytes from messages and answers (replies.py). The bytes are
decoded lazily: `receive` is a generator, and decodes only as `Execution` takes the commands.
"""

from collections.abc import Callable, Iterator
from functools import partial
from operator import length_hint

from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import (
    Ack,
    AckRun,
    Command,
    Commit,
    InvalidFrame,
    Login,
    ReceiptRequest,
    Send,
    SendRun,
    Started,
)
from truenext.model.limits import HEART_BEAT_GRACE_FACTOR, HEART_BEAT_MS_MIN, LOGIN_BYTES_MAX, LOGIN_SECONDS_MAX
from truenext.wire.protocol_detector import ProtocolDetector, detector_of_stomp_port
from truenext.wire.session import ProtocolRules
from truenext.wire.stomp.frame import Frame
from truenext.wire.stomp.headers import check_own_headers, report_unknown_header
from truenext.wire.stomp.login import read_login
from truenext.wire.stomp.protocol import ProtocolState, Side, StompProtocol, choose_version, parse_heart_beat
from truenext.wire.stomp.replies import ReplyEncoder
from truenext.wire.stomp.request_shapes import REQUEST_SHAPES, ShapedCommand
from truenext.wire.stomp.requests import FRAME_INTERPRETERS, FrameInterpreter
from truenext.wire.stomp.values import read_name

_NUMBERED = (Send, Commit)
"""Commands that may have a number of a producer. Only these can be repeats."""


STOMP_RULES = ProtocolRules(
    protocol="STOMP",
    opening_seconds_max=LOGIN_SECONDS_MAX,
    login_bytes_max=LOGIN_BYTES_MAX,
    late_opening=f"no CONNECT within {LOGIN_SECONDS_MAX:g} seconds",
    unchecked_login=f"the login was not checked within {LOGIN_SECONDS_MAX:g} seconds",
    closing_seconds=0.0,
    displaced_login="no CONNECT yet, and {newer} newer connections wait to log in: send CONNECT at once",
    plain_text="this port speaks TLS: connect to stomp+ssl://, not to stomp://",
    missing_end="no DISCONNECT",
    has_takeover=True,
    has_control_requests=True,
)


class StompSession:
    """Broker's side of STOMP on one connection."""

    rules = STOMP_RULES
    outgoing = bytearray()
    """Always empty: the broker sends nothing before CONNECTED."""
    is_opening = True
    """Always True: CONNECT is the opening."""

    def __init__(
        self,
        *,
        session_id: str,
        identity: str,
        server_name: str,
        on_ineffective_header: Callable[[str, str, str], None] = lambda *_: None,
    ) -> None:
        """`identity` is a part of each message id, so that no other broker has the same ids. `on_ineffective_header` is
        called once for each header that has an effect in other brokers but none here. It is also called once for a
        connection: for the first unknown header with truenext's prefix in a SEND. Its arguments are the command, the
        header, and what to use instead."""
        self._session_id = session_id
        self._identity = identity
        self._server_name = server_name
        on_names = partial(report_unknown_header, on_ineffective_header, set())
        self._protocol = StompProtocol(Side.SERVER, REQUEST_SHAPES, on_names)
        message_id_prefix = f"truenext-{identity}-"
        self.replies = ReplyEncoder(self._protocol, message_id_prefix)
        self._interpreter = FrameInterpreter(session_id, message_id_prefix, self.replies, on_ineffective_header)
        self.pending = self._protocol.pending
        """Beginning of an incomplete frame. This is always the same object; the connection clears it when input
        ends."""
        self._detector: ProtocolDetector | None = detector_of_stomp_port()
        """Detector of other protocols; None once the client's protocol is known."""
        self.last_receipt: str | None = None
        """Receipt that the last frame has requested; None if it requests none. If the frame is refused, the ERROR names
        this receipt."""
        self.send_interval_ms = 0
        """Agreed heart-beat interval from broker to client, in milliseconds; 0 is none."""
        self.receive_interval_ms = 0
        """Agreed heart-beat interval from client to broker, in milliseconds; 0 is none."""
        self._is_truenext_client = False
        self._frame_count = 0
        self._remaining: Iterator[Frame | ShapedCommand] = iter(())
        """Decoded frames whose commands were not taken yet."""
        self._refused_frame = 0
        """Number of the frame that was refused last; 0 if no frame was refused."""
        self._last: tuple[Frame, Command] | None = None
        """Command that `receive` has yielded last, with its frame; None once the interpreter was notified that the
        command was accepted."""

    @property
    def client_id(self) -> str:
        """Value of `client-id` on CONNECT; "" if the client has sent none."""
        return self._interpreter.client_id

    @property
    def beat_check_s(self) -> float:
        """Half of the agreed interval from broker to client, in seconds."""
        return self.send_interval_ms / 2000

    @property
    def silence_limit_s(self) -> float:
        return self.receive_interval_ms * HEART_BEAT_GRACE_FACTOR / 1000

    @property
    def is_connected(self) -> bool:
        return self._protocol.state is not ProtocolState.CONNECTING

    @property
    def is_closed(self) -> bool:
        """True once the client has sent DISCONNECT."""
        return self._protocol.state is ProtocolState.CLOSED

    def receive(self, data: bytes) -> Iterator[Command]:
        """Yield the commands in `data`, decoded one after the other. The caller must execute each command before it
        takes the next one.

        Raises: RemoteProtocolError at a frame that is invalid, or may not come now; earlier commands stay valid.
            OtherProtocolError if the client speaks another protocol.
        """
        if self._detector is not None:
            opened = self._detector.receive(data)
            if opened is None:
                return
            self._detector, data = None, opened
        protocol = self._protocol
        requests = self._interpreter
        table = FRAME_INTERPRETERS
        stateless = protocol.stateless
        self.last_receipt = None
        command: Command
        receipt: str | None
        while read := protocol.receive(data):
            self._frame_count += len(read)
            self._remaining = remaining = iter(read)
            for frame in remaining:
                if type(frame) is Send or type(frame) is Ack or type(frame) is Started:
                    self.last_receipt = None
                    if not stateless:
                        self._check(frame)
                    yield frame
                    continue
                if type(frame) is SendRun or type(frame) is AckRun:
                    yield from self._receive_run(frame)
                    continue
                if isinstance(frame, tuple):
                    command, receipt = frame
                    self.last_receipt = receipt
                    if not stateless:
                        self._check(command)
                    yield command
                    if self._refused_frame and self._refused_frame == self.frame_number:
                        continue
                else:
                    assert isinstance(frame, Frame)
                    receipt = self.last_receipt = frame.headers.get("receipt")
                    try:
                        if frame.command not in stateless and frame.command != "DISCONNECT":
                            protocol.check(frame)
                            stateless = protocol.stateless
                        if frame.command not in table:
                            command = self._connect(frame)
                            stateless = protocol.stateless
                            receipt = None
                        else:
                            if frame.command != "SEND":
                                check_own_headers(frame.command, frame.headers)
                            if receipt is not None:
                                read_name("receipt", receipt)
                            command = table[frame.command](requests, frame)
                            if frame.command == "DISCONNECT":
                                # Only now: a refused DISCONNECT does not close the session.
                                protocol.check(frame)
                                stateless = protocol.stateless
                    except RemoteProtocolError as error:
                        if not self._is_truenext_client:
                            raise
                        command = InvalidFrame(str(error), error.code, frame.headers.get("transaction"))
                    self._last = (frame, command)
                    yield command
                    self.accept_last()
                    if self._refused_frame and self._refused_frame == self.frame_number:
                        continue
                if receipt is not None:
                    numbered = command if isinstance(command, _NUMBERED) and command.producer is not None else None
                    yield ReceiptRequest(receipt, numbered)
            # An error after these frames belongs to no frame that requested a receipt.
            self.last_receipt = None
            if not protocol.has_more:
                return
            data = b""

    def _receive_run(self, run: SendRun | AckRun) -> Iterator[Command]:
        """Yield a run, then each of its commands that the caller has not executed as part of the run."""
        self.last_receipt = None
        stateless = self._protocol.stateless
        before = self._frame_count - 1
        self._frame_count = before + len(run)
        if ("SEND" if type(run) is SendRun else "ACK") in stateless:
            yield run
        for number in range(run.executed, len(run)):
            self._frame_count = before + number + 1
            command = run[number]
            if not self._protocol.stateless:
                self._check(command)
            yield command

    def attach(self, on_outgoing: Callable[[], None], on_too_large: Callable[[str], None]) -> None:
        """Do nothing: no other connection causes bytes of this one, and clients of STOMP name no largest frame."""

    def detach(self) -> None:
        pass

    def accept_last(self) -> None:
        """Note that the command that was yielded last is executed. Taking the next command has the same effect. A
        caller that takes no further command for now must call this method, because MESSAGEs of a new subscription may
        be encoded first."""
        if self._last is not None:
            frame, command = self._last
            self._last = None
            if not self._refused_frame or self._refused_frame != self.frame_number:
                self._interpreter.on_accepted(frame, command)

    @property
    def frame_number(self) -> int:
        """Number of the last frame whose commands were taken, 1 for the first frame of the connection."""
        return self._frame_count - length_hint(self._remaining)

    def mark_refused(self) -> int:
        """Note that the last frame was refused while the connection stays open, and drop the frame's remaining
        commands.

        Returns the number of the frame.
        """
        self._refused_frame = self.frame_number
        return self._refused_frame

    def _check(self, command: Send | Ack | Started) -> None:
        """Check that the frame of this command may come now.

        Raises: RemoteProtocolError if the frame is not allowed
        """
        self._protocol.check(Frame("ACK" if isinstance(command, Ack) else "SEND", {}))

    def _connect(self, frame: Frame) -> Login:
        headers = frame.headers
        version = choose_version(headers.get("accept-version"))
        login = read_login(headers, version)
        if "receipt" in headers:
            raise RemoteProtocolError(f"{frame.command} cannot ask for a receipt: CONNECTED is the answer", Code.LOGIN)
        offered_ms, requested_ms = parse_heart_beat(headers.get("heart-beat", "0,0"))
        self.send_interval_ms = max(requested_ms, HEART_BEAT_MS_MIN) if requested_ms else 0
        self.receive_interval_ms = max(offered_ms, HEART_BEAT_MS_MIN) if offered_ms else 0
        self._protocol.set_version(version)
        self._interpreter.on_connected(version, headers.get("client-id", ""))
        self.replies.on_connected(version, login)
        return login

    def encode_connected(
        self, login: Login, secret: str, *, is_takeover: bool, is_checked: bool, control_only: Code | None = None
    ) -> bytes:
        """Encode the answer to an accepted login. `secret` is "" for a client other than truenext's.
        `is_checked` is False if the broker has no users, so that login and passcode were ignored. `control_only` is the
        code with which all but control requests are refused; None if the connection may do everything."""
        self._is_truenext_client = login.is_truenext_client
        answer = {
            "version": self._protocol.version.value,
            # The agreed intervals, not those that the broker offers: the same result for a client that compares them
            # with its own, and right for one that does not (decision 42).
            "heart-beat": f"{self.send_interval_ms},{self.receive_interval_ms}",
            "session": self._session_id,
            "server": self._server_name,
        }
        if not is_checked and (login.user.strip() or login.passcode.strip()):
            answer["truenext-login"] = "unchecked"
        if login.is_truenext_client:
            answer["truenext-store"] = self._identity
            answer["truenext-secret"] = secret
        if login.secret:
            answer["truenext-taken-over"] = "true" if is_takeover else "false"
        if control_only is not None:
            answer["truenext-control-only"] = control_only
        return self._protocol.send(Frame("CONNECTED", answer))
