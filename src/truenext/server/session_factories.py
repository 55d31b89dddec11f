"""Session factories: for each protocol the function that makes the session of a new connection."""

from functools import partial

from truenext.model.url import WireProtocol
from truenext.wire.openwire.advisories import AdvisoryBoard
from truenext.wire.openwire.session import OpenWireSession
from truenext.wire.session import SessionFactory
from truenext.wire.stomp.server import StompSession


def make_session_factories() -> dict[WireProtocol, SessionFactory]:
    """Return the session factories of one broker. All its listeners share them, since the OpenWire connections of a
    broker tell one another of temporary destinations."""
    return {
        WireProtocol.STOMP: StompSession,
        WireProtocol.OPENWIRE: partial(OpenWireSession, board=AdvisoryBoard()),
    }
