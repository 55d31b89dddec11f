"""Session factories: for each protocol the function that makes the session of a new connection."""

from functools import partial
from weakref import WeakKeyDictionary

from truenext.broker.broker import Broker
from truenext.model.url import WireProtocol
from truenext.wire.openwire.advisories import AdvisoryBoard
from truenext.wire.openwire.session import OpenWireSession
from truenext.wire.session import SessionFactory
from truenext.wire.stomp.server import StompSession

SESSION_FACTORIES: dict[WireProtocol, SessionFactory] = {
    WireProtocol.STOMP: StompSession,
    WireProtocol.OPENWIRE: OpenWireSession,
}
_BOARDS: WeakKeyDictionary[Broker, AdvisoryBoard] = WeakKeyDictionary()
"""Board of each broker: its OpenWire connections tell one another of temporary destinations, whichever listener they
have come through."""


def session_factory(protocol: WireProtocol, broker: Broker) -> SessionFactory:
    """Return the function that makes the sessions of one broker's listener."""
    factory = SESSION_FACTORIES[protocol]
    if factory is OpenWireSession:
        return partial(OpenWireSession, board=_BOARDS.setdefault(broker, AdvisoryBoard()))
    return factory
