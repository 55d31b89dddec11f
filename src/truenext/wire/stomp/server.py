"""What goes on between the broker and one of its clients? The server side of STOMP.

A login is answered here. After that frames become commands (requests.py), deliveries and answers become bytes
(replies.py).
"""

from collections.abc import Iterator

from truenext.commands import Ack, Command, Commit, Confirm, Send
from truenext.errors import Code, RemoteProtocolError
from truenext.limits import HEART_BEAT_MS_MIN
from truenext.wire.stomp.direct import REQUEST_SHAPES
from truenext.wire.stomp.frame import Frame
from truenext.wire.stomp.headers import check_login, check_ours
from truenext.wire.stomp.protocol import Protocol, Side, State, choose_version, parse_heart_beat
from truenext.wire.stomp.replies import Replies
from truenext.wire.stomp.requests import REQUESTS, Requests
from truenext.wire.stomp.values import read_name

_NUMBERED = (Send, Commit)
"""What may be repeated."""


class StompServer:
    """One client's connection as its frames and ours."""

    def __init__(self, *, session_id: str, identity: str, server_name: str) -> None:
        """`identity` makes message ids of this broker unlike those of any other."""
        self._session_id = session_id
        self._server_name = server_name
        self._protocol = Protocol(Side.SERVER, REQUEST_SHAPES)
        message_id_prefix = f"truenext-{identity}-"
        self.replies = Replies(self._protocol, message_id_prefix)
        """To what the client asks for, and its messages."""
        self._requests = Requests(session_id, message_id_prefix, self.replies)
        self.receipt_in_question: str | None = None
        """The receipt asked for by the frame that was read last; a refusal names it."""
        self.connected: bytes | None = None
        """The CONNECTED frame, once, as soon as it is due. Taken by the caller."""
        self.sends_every_ms = 0
        """Agreed heart-beat from us to the client; 0 is none."""
        self.expects_every_ms = 0
        """Agreed heart-beat from the client to us; 0 is none."""
        self.has_unchecked_login = False
        """The client has said who it is, and nobody knows whether that is true."""

    @property
    def client_id(self) -> str:
        """What the client calls itself, whichever of its connections it is."""
        return self._requests.client_id

    @property
    def is_connected(self) -> bool:
        return self._protocol.state is not State.CONNECTING

    @property
    def is_closed(self) -> bool:
        """The client has said DISCONNECT."""
        return self._protocol.state is State.CLOSED

    def receive(self, data: bytes) -> Iterator[Command]:
        """What `data` asks for, one command after the other; do each before asking for the next.

        Raises: RemoteProtocolError at the frame that may not be, or means nothing; all before it stands.
        """
        protocol = self._protocol
        requests = self._requests
        table = REQUESTS
        steady = protocol.steady
        self.receipt_in_question = None
        command: Command
        receipt: str | None
        while read := protocol.receive(data):
            for frame in read:
                if type(frame) is Send or type(frame) is Ack:
                    self.receipt_in_question = None
                    if not steady:
                        self._check(frame)
                    yield frame
                    continue
                if isinstance(frame, tuple):
                    command, receipt = frame
                    self.receipt_in_question = receipt
                    if not steady:
                        self._check(command)
                else:
                    assert isinstance(frame, Frame)
                    receipt = self.receipt_in_question = frame.headers.get("receipt")
                    if frame.command not in steady:
                        protocol.check(frame)
                        steady = protocol.steady
                        if frame.command not in table:
                            self._connect(frame)
                            steady = protocol.steady
                            continue
                    if frame.command != "SEND":
                        check_ours(frame.command, frame.headers)
                    command = table[frame.command](requests, frame)
                yield command
                if receipt is not None:
                    numbered = command if isinstance(command, _NUMBERED) and command.producer is not None else None
                    yield Confirm(read_name("receipt", receipt), numbered)
            # What may be wrong behind these is no frame that asked for anything.
            self.receipt_in_question = None
            if not protocol.has_more:
                return
            data = b""

    def _check(self, command: Send | Ack) -> None:
        """Raises: RemoteProtocolError if its frame may not come now."""
        self._protocol.check(Frame("SEND" if isinstance(command, Send) else "ACK", {}))

    def _connect(self, frame: Frame) -> None:
        headers = frame.headers
        version = choose_version(headers.get("accept-version"))
        check_login(headers)
        if "receipt" in headers:
            raise RemoteProtocolError(f"{frame.command} cannot ask for a receipt: CONNECTED is the answer", Code.LOGIN)
        can, wants = parse_heart_beat(headers.get("heart-beat", "0,0"))
        self.sends_every_ms = max(wants, HEART_BEAT_MS_MIN) if wants else 0
        self.expects_every_ms = max(can, HEART_BEAT_MS_MIN) if can else 0
        self._protocol.agree(version)
        self._requests.agree(version, headers.get("client-id", ""))
        self.replies.agree(version)
        answer = {
            "version": version.value,
            # Not what we could do, but what is agreed: the same to a client that compares it with what it has said, and
            # right for one that takes it as it stands (decision 42).
            "heart-beat": f"{self.sends_every_ms},{self.expects_every_ms}",
            "session": self._session_id,
            "server": self._server_name,
        }
        if headers.get("login", "").strip() or headers.get("passcode", "").strip():
            self.has_unchecked_login = True
            answer["truenext-login"] = "unchecked"
        self.connected = self._protocol.send(Frame("CONNECTED", answer))
