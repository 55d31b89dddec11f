"""Life of a connection: its states, and the events that change them.

    OPEN ──DISCARD──▶ DISCARDING ──LAST_ANSWER──▶ CLOSING ──HALF_CLOSE──▶ LINGERING ──CLOSE──▶ CLOSED
    OPEN ──PARK─────▶ PARKED ──CLOSE──▶ CLOSED
    OPEN, or while it ends ──STOP──▶ STOPPING ──LAST_ANSWER──▶ STOPPING_CLOSING

These are the usual steps. HALF_CLOSE leads to LINGERING from DISCARDING and both states of a stop, too; and CLOSE leads
to CLOSED from all states but OPEN and CLOSED. TRANSITIONS has every step; any other step is a bug.
"""

from enum import Enum


class Life(Enum):
    OPEN = "open"
    """Input is executed."""
    DISCARDING = "discarding"
    """Input is discarded; answers may follow, such as the ERROR, or the receipt of a DISCONNECT."""
    CLOSING = "closing"
    """No answer follows. Our side of the socket will be closed once the socket has taken all bytes."""
    LINGERING = "lingering"
    """Our side of the socket is closed. The client has two seconds to close its side: to close the socket at once could
    reset it, and the client would lose the last frame."""
    PARKED = "parked"
    """The socket has closed without a DISCONNECT. For a second the broker keeps the started messages, because the end
    of the connection would count an attempt for them, and the client may take the connection over. (In the contract
    such a connection is "cut".)"""
    STOPPING = "stopping"
    """The broker stops: input is not read, and bytes that the socket does not take at once are never sent."""
    STOPPING_CLOSING = "stopping-closing"
    """The broker stops, and no answer follows. Our side of the socket will be closed if the socket has taken all
    bytes."""
    CLOSED = "closed"
    """The socket is closed, and the broker has removed the connection."""


class LifeEvent(Enum):
    DISCARD = "discard"
    """From now on input is discarded: after a DISCONNECT, an ERROR, a takeover, or when the client is lost."""
    PARK = "park"
    """The socket has closed without a DISCONNECT, the client may take the connection over, and the end of the
    connection would count an attempt."""
    LAST_ANSWER = "last-answer"
    """The last answer was added to the output."""
    HALF_CLOSE = "half-close"
    """Our side of the socket was closed."""
    CLOSE = "close"
    """The socket was closed, or a parked connection was not taken over in time."""
    STOP = "stop"
    """The broker stops."""


OPEN = Life.OPEN
"""The usual state. A module constant is quicker to read than `Life.OPEN`."""

TRANSITIONS: dict[Life, dict[LifeEvent, Life]] = {
    Life.OPEN: {
        LifeEvent.DISCARD: Life.DISCARDING,
        LifeEvent.PARK: Life.PARKED,
        LifeEvent.STOP: Life.STOPPING,
    },
    Life.DISCARDING: {
        LifeEvent.LAST_ANSWER: Life.CLOSING,
        # The answer to a client without TLS is sent at once.
        LifeEvent.HALF_CLOSE: Life.LINGERING,
        LifeEvent.CLOSE: Life.CLOSED,
        LifeEvent.STOP: Life.STOPPING,
    },
    Life.CLOSING: {
        LifeEvent.HALF_CLOSE: Life.LINGERING,
        LifeEvent.CLOSE: Life.CLOSED,
        LifeEvent.STOP: Life.STOPPING,
    },
    Life.LINGERING: {
        LifeEvent.CLOSE: Life.CLOSED,
        LifeEvent.STOP: Life.STOPPING,
    },
    Life.PARKED: {
        LifeEvent.CLOSE: Life.CLOSED,
        LifeEvent.STOP: Life.PARKED,
    },
    Life.STOPPING: {
        LifeEvent.LAST_ANSWER: Life.STOPPING_CLOSING,
        LifeEvent.HALF_CLOSE: Life.LINGERING,
        LifeEvent.CLOSE: Life.CLOSED,
        LifeEvent.STOP: Life.STOPPING,
    },
    Life.STOPPING_CLOSING: {
        LifeEvent.HALF_CLOSE: Life.LINGERING,
        LifeEvent.CLOSE: Life.CLOSED,
        LifeEvent.STOP: Life.STOPPING_CLOSING,
    },
    Life.CLOSED: {
        LifeEvent.STOP: Life.CLOSED,
    },
}
"""For each state: the events that may happen in it, each with the state after it. Facts that are kept beside the state:

    fact                                  may be true in
    reading is paused (Input)             all; without effect after OPEN
    a large frame is incomplete (Input)   OPEN
    commands wait (Input)                 OPEN
    frames are unsent (Output)            all; sent on in OPEN, DISCARDING and CLOSING
    the client has closed its side        all but OPEN and LINGERING, as nothing is left to wait for in these
"""

WITHOUT_SOCKET = (Life.PARKED, Life.CLOSED)
WITHOUT_WRITER = (Life.STOPPING, Life.STOPPING_CLOSING, *WITHOUT_SOCKET)
"""States in which unsent bytes are not sent any more."""
CLOSES_WHEN_SENT = (Life.CLOSING, Life.STOPPING_CLOSING)
"""States in which our side of the socket is closed as soon as all bytes are sent."""


class ConnectionLife:
    """State of one connection. Only `enter_after` changes it."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = OPEN

    def enter_after(self, event: LifeEvent) -> None:
        """Change the state as TRANSITIONS says.

        Raises: AssertionError if the event may not happen in the current state
        """
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise AssertionError(f"{event.name} cannot happen to a connection that is {self.state.value}")
        self.state = after
