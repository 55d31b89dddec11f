"""Session factories: for each protocol the function that makes the session of a new connection."""

from truenext.model.url import WireProtocol
from truenext.wire.openwire.session import OpenWireSession
from truenext.wire.session import SessionFactory
from truenext.wire.stomp.server import StompSession

SESSION_FACTORIES: dict[WireProtocol, SessionFactory] = {
    WireProtocol.STOMP: StompSession,
    WireProtocol.OPENWIRE: OpenWireSession,
}
