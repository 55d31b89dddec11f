"""Which frame may come when, on either side of a STOMP connection.

One class plays both sides: the broker's connections are made with `Side.SERVER`, a client's with `Side.CLIENT`. All
that decides over a frame's turn is in TRANSITIONS; what a frame *means* is decided elsewhere (server.py).

    server:  CONNECTING --CONNECT, STOMP--> CONNECTED --DISCONNECT--> CLOSED
    client:  CONNECTING --CONNECTED-------> CONNECTED --ERROR-------> CLOSED
"""

from enum import Enum
from typing import Generic

from truenext.errors import Code, LocalProtocolError, RemoteProtocolError
from truenext.model.limits import ANSWER_BYTES_MAX, MESSAGE_HEADER_BYTES_MAX, MESSAGE_HEADERS_MAX
from truenext.model.numerals import are_digits
from truenext.wire.stomp.codec import Decoder, unknown_command
from truenext.wire.stomp.frame import BROKER_FRAME_END, Frame, Version, encode
from truenext.wire.stomp.shapes import Read, ShapeCache


class Side(Enum):
    CLIENT = "client"
    SERVER = "server"


class ProtocolState(Enum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    CLOSED = "closed"


CLIENT_COMMANDS = ("SEND", "SUBSCRIBE", "UNSUBSCRIBE", "ACK", "NACK", "BEGIN", "COMMIT", "ABORT")
SERVER_COMMANDS = ("MESSAGE", "RECEIPT")

Transitions = dict[ProtocolState, dict[str, ProtocolState]]

TRANSITIONS: dict[Side, Transitions] = {
    # What each side may say, and what the connection is in afterwards.
    Side.CLIENT: {
        ProtocolState.CONNECTING: {"CONNECT": ProtocolState.CONNECTING, "STOMP": ProtocolState.CONNECTING},
        ProtocolState.CONNECTED: {
            **dict.fromkeys(CLIENT_COMMANDS, ProtocolState.CONNECTED),
            "DISCONNECT": ProtocolState.CLOSED,
        },
        ProtocolState.CLOSED: {},
    },
    Side.SERVER: {
        ProtocolState.CONNECTING: {"CONNECTED": ProtocolState.CONNECTED, "ERROR": ProtocolState.CLOSED},
        ProtocolState.CONNECTED: {
            **dict.fromkeys(SERVER_COMMANDS, ProtocolState.CONNECTED),
            "ERROR": ProtocolState.CLOSED,
        },
        # The RECEIPT of a DISCONNECT.
        ProtocolState.CLOSED: {
            "RECEIPT": ProtocolState.CLOSED,
            "ERROR": ProtocolState.CLOSED,
            "MESSAGE": ProtocolState.CLOSED,
        },
    },
}
_HEART_BEAT_DIGITS = 9
"""A longer number of milliseconds is not meant as one."""
_KNOWN_COMMANDS = {side: {command for commands in TRANSITIONS[side].values() for command in commands} for side in Side}


class StompProtocol(Generic[Read]):
    """The session rules of one connection, seen from one side."""

    __slots__ = ("_decoder", "_end", "_known", "_peer_transitions", "side", "state", "stateless")

    def __init__(self, side: Side, shapes: ShapeCache[Read]) -> None:
        """`shapes` are what is read instead of frames, where it can be: FRAMES, if it is to be frames."""
        self.side = side
        peer = Side.CLIENT if side is Side.SERVER else Side.SERVER
        if side is Side.SERVER:
            self._decoder = Decoder(shapes)
        else:
            self._decoder = Decoder(shapes, ANSWER_BYTES_MAX, MESSAGE_HEADER_BYTES_MAX, MESSAGE_HEADERS_MAX)
        self._end = BROKER_FRAME_END if side is Side.SERVER else b"\0"
        self._peer_transitions = TRANSITIONS[peer]
        self._known = _KNOWN_COMMANDS[peer]
        self._enter(ProtocolState.CONNECTING)

    def _enter(self, state: ProtocolState) -> None:
        self.state = state
        self.stateless = frozenset(
            command
            for command, next_state in self._peer_transitions[state].items()
            if next_state is state is ProtocolState.CONNECTED
        )
        """What the peer may say now and change nothing by it: such frames need no `check`."""

    @property
    def version(self) -> Version:
        """The agreed version; 1.0 as long as none is."""
        return self._decoder.version or Version.V1_0

    def set_version(self, version: Version) -> None:
        """Both sides speak `version` from here on."""
        self._decoder.version = version
        self._enter(ProtocolState.CONNECTED)

    def receive(self, data: bytes) -> list[Frame | Read]:
        """What `data` completes; until the version is agreed one frame at a time, the next by `receive(b"")`.

        Raises: RemoteProtocolError if the bytes are not STOMP.
        """
        return self._decoder.receive(data)

    @property
    def pending(self) -> bytearray:
        """The beginning of a frame that is not complete; always the same object."""
        return self._decoder.pending

    @property
    def has_more(self) -> bool:
        """What was received last is to be followed by `receive(b"")`."""
        return self._decoder.has_more

    def check(self, frame: Frame) -> None:
        """Take note of a frame from the peer. May be left out for a frame in `stateless`.

        Raises: RemoteProtocolError if it may not come now.
        """
        state = self._peer_transitions[self.state].get(frame.command)
        if state is None:
            if frame.command not in self._known:
                raise RemoteProtocolError(unknown_command(frame.command, self._decoder.version), Code.COMMAND)
            raise RemoteProtocolError(f"{frame.command} may not come while {self.state.value}", Code.COMMAND)
        self._enter(state)

    def send(self, frame: Frame) -> bytes:
        """The bytes of a frame of our own.

        Raises: LocalProtocolError if it may not be sent now.
        """
        if self.side is Side.CLIENT or frame.command not in ("CONNECTED", "ERROR"):
            own_transitions = TRANSITIONS[self.side][self.state]
            if frame.command not in own_transitions:
                raise LocalProtocolError(f"{frame.command} may not be sent while {self.state.value}")
            if self.side is Side.CLIENT:
                self._enter(own_transitions[frame.command])
        return encode(frame, self.version, self._end)


def choose_version(accepted: str | None) -> Version:
    """The highest version that both sides know (STOMP 1.2, "Protocol Negotiation").

    >>> choose_version("1.0,1.1,2.0"), choose_version(None)
    (<Version.V1_1: '1.1'>, <Version.V1_0: '1.0'>)

    Raises: RemoteProtocolError if there is none.
    """
    if accepted is None:
        return Version.V1_0
    offered = {text.strip() for text in accepted.split(",")}
    for version in reversed(Version):
        if version.value in offered:
            return version
    raise RemoteProtocolError(
        f"Supported protocol versions are {' '.join(version.value for version in Version)}", Code.LOGIN
    )


def parse_heart_beat(text: str) -> tuple[int, int]:
    """What the sender of a heart-beat header can do and what it wants, in milliseconds; 0 is not at all.

    >>> parse_heart_beat("1000,0")
    (1000, 0)

    Raises: RemoteProtocolError if it is not two numbers.
    """
    numbers = text.split(",")
    if len(numbers) != 2 or not all(map(are_digits, numbers)):
        raise RemoteProtocolError("heart-beat is not two numbers of milliseconds", Code.LOGIN)
    if any(len(part) > _HEART_BEAT_DIGITS for part in numbers):
        raise RemoteProtocolError(
            f"heart-beat of more than {'9' * _HEART_BEAT_DIGITS} milliseconds (11 days)", Code.LOGIN
        )
    return int(numbers[0]), int(numbers[1])
