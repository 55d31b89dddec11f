"""Session rules of STOMP: decide which frames are allowed in which state, on both sides of a connection.

One class does this for both sides: a broker makes it with `Side.SERVER`, a client with `Side.CLIENT`. TRANSITIONS alone
decides whether a frame may come. server.py decides what a frame means.

    server:  CONNECTING --CONNECT, STOMP--> CONNECTED --DISCONNECT--> CLOSED
    client:  CONNECTING --CONNECTED-------> CONNECTED --ERROR-------> CLOSED
"""

from collections.abc import Callable
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
    # Frames that each side may send, and the state of the connection afterwards.
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
        # The RECEIPT of a DISCONNECT, for example.
        ProtocolState.CLOSED: dict.fromkeys((*SERVER_COMMANDS, "ERROR"), ProtocolState.CLOSED),
    },
}
_HEART_BEAT_DIGITS = 9
"""Maximum number of digits of a heart-beat interval. A longer interval is taken for a mistake."""
_KNOWN_COMMANDS = {side: {command for commands in TRANSITIONS[side].values() for command in commands} for side in Side}


class StompProtocol(Generic[Read]):
    """Session rules of one connection, for one of its sides."""

    __slots__ = ("_decoder", "_end", "_known", "_peer_transitions", "side", "state", "stateless")

    def __init__(
        self,
        side: Side,
        shapes: ShapeCache[Read],
        on_names: Callable[[str, dict[str, str]], None] | None = None,
    ) -> None:
        """Frames with known header names are read by `shapes`: with FRAME_SHAPES they become frames, with
        REQUEST_SHAPES commands. A server's decoder calls `on_names` with command and headers of frames whose names may
        be new."""
        self.side = side
        peer = Side.CLIENT if side is Side.SERVER else Side.SERVER
        if side is Side.SERVER:
            self._decoder = Decoder(shapes, on_names=on_names)
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
        """Commands that the peer may send in this state, and that do not change it: their frames need no `check`."""

    @property
    def version(self) -> Version:
        """Agreed version of STOMP; 1.0 before a version is agreed."""
        return self._decoder.version or Version.V1_0

    def set_version(self, version: Version) -> None:
        """Use the agreed version from now on."""
        self._decoder.version = version
        self._enter(ProtocolState.CONNECTED)

    def receive(self, data: bytes) -> list[Frame | Read]:
        """Return the frames that `data` completes. Before a version is agreed this is at most one frame; `receive(b"")`
        returns the next.

        Raises: RemoteProtocolError if the bytes are not STOMP
        """
        return self._decoder.receive(data)

    @property
    def pending(self) -> bytearray:
        """Beginning of an incomplete frame. This is always the same object."""
        return self._decoder.pending

    @property
    def has_more(self) -> bool:
        """True if the caller must call `receive(b"")` now, as there may be more frames, or an error."""
        return self._decoder.has_more

    def check(self, frame: Frame) -> None:
        """Check that a frame of the peer may come now, and change the state. The caller may skip this call for a
        command in `stateless`.

        Raises: RemoteProtocolError if the frame may not come now
        """
        state = self._peer_transitions[self.state].get(frame.command)
        if state is None:
            if frame.command not in self._known:
                raise RemoteProtocolError(unknown_command(frame.command, self._decoder.version), Code.COMMAND)
            raise RemoteProtocolError(f"{frame.command} is not allowed while {self.state.value}", Code.COMMAND)
        self._enter(state)

    def send(self, frame: Frame) -> bytes:
        """Encode a frame for the peer.

        Raises: LocalProtocolError if the frame may not be sent now
        """
        if self.side is Side.CLIENT or frame.command not in ("CONNECTED", "ERROR"):
            own_transitions = TRANSITIONS[self.side][self.state]
            if frame.command not in own_transitions:
                raise LocalProtocolError(f"{frame.command} may not be sent while {self.state.value}")
            if self.side is Side.CLIENT:
                self._enter(own_transitions[frame.command])
        return encode(frame, self.version, self._end)


def choose_version(accepted: str | None) -> Version:
    """Return the highest version that is in an `accept-version` and that truenext knows (STOMP 1.2, "Protocol
    Negotiation").

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
    """Return the two intervals in a `heart-beat` header, in milliseconds: the interval that the sender of the header
    offers, and the interval that it requests; 0 means none.

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
