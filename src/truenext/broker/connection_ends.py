"""Connection ends: release or keep the messages and the place of a connection that ends, for each cause.

DISCONNECT       unsent messages are cancelled, held ones released
socket lost      parked for a moment if its client can take it over, else its held messages are requeued
takeover         a new connection of the client has proved that it is the same; the old one closes
closed           no answer follows; partially sent messages are released
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping

from truenext.broker.capacity import Capacity
from truenext.broker.peer import Peer
from truenext.broker.takeovers import TakeoverSecrets
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.queue import Entry
from truenext.model.commands import AckMode, Disconnect, Login, Release, Unsubscribe


class ConnectionEnds:
    def __init__(
        self,
        engine: Engine,
        peers: Mapping[ConnectionState, Peer],
        capacity: Capacity,
        *,
        tick: Callable[[], object],
        schedule_turn: Callable[[], object],
        drop_answers: Callable[[ConnectionState], object],
    ) -> None:
        """`tick` sets the time. `drop_answers` drops answers to control requests of a connection."""
        self._engine = engine
        self._peers = peers
        self._capacity = capacity
        self._tick = tick
        self._schedule_turn = schedule_turn
        self._drop_answers = drop_answers
        self._takeovers = TakeoverSecrets()
        self._parked: set[ConnectionState] = set()
        """Connections without a socket that wait for a takeover."""
        self._partially_sent: dict[ConnectionState, deque[Entry | None]] = {}
        """Messages that were partially sent, or encrypted, when their consumer ended or released its messages; in
        order, with None for one that is not of a consumer in auto mode."""

    def take_over(self, session: ConnectionState, login: Login, user: str) -> tuple[str, bool]:
        """Give a truenext client its secret, and close the connection of the same client that it takes over, whose
        place it gets. Returns the secret, and whether there was such a connection.

        Raises: RemoteProtocolError if the login is late
        """
        secret, former = self._takeovers.take_over(session, login, user)
        if former is not None:
            self._peers[former].close_for_takeover(is_exempt=True)
        return secret, former is not None

    def park(self, session: ConnectionState) -> bool:
        """Park a connection whose socket ended without a DISCONNECT, so that its client may take it over. Only state
        that would count an attempt is kept. Returns False if there is none, or no takeover is possible."""
        if not self._takeovers.has_secret(session):
            return False
        self._tick()
        self.drop_unsent(session)
        self._drop_answers(session)
        self._capacity.remove(session)
        self._schedule_turn()
        is_parked = self._engine.commands.connecting.park(session)
        if is_parked:
            self._parked.add(session)
        return is_parked

    def lost(self, session: ConnectionState, *, is_exempt: bool = False) -> None:
        """End the session of a client that sent no DISCONNECT; answers may still follow until `closed`.

        If `is_exempt`, its held messages count no attempt, as after a DISCONNECT.
        """
        self._tick()
        self.cancel_unsent(session, None)
        self._engine.commands.disconnect(session, is_exempt=is_exempt)
        self._takeovers.remove(session)
        self._drop_answers(session)
        self._schedule_turn()

    def closed(self, session: ConnectionState) -> None:
        """Release what a closed connection has sent in part."""
        self.release_partially_sent(session)
        self._parked.discard(session)

    # ---- Commands that end something ----

    def disconnect(self, session: ConnectionState, disconnect: Disconnect) -> None:
        self.cancel_unsent(session, None)
        self._engine.commands.disconnect(session, is_exempt=True, is_requested=True)
        self._takeovers.remove(session)
        if disconnect.forgotten_producers:
            self._engine.state.producers.forget(session, disconnect.forgotten_producers)

    def unsubscribe(self, session: ConnectionState, unsubscribe: Unsubscribe) -> None:
        self.close_parked_users(unsubscribe.durable_key)
        consumer = session.consumers.get(unsubscribe.subscription)
        if consumer is not None:
            self.cancel_unsent(session, [consumer])
        self._engine.commands.unsubscribe(session, unsubscribe)

    def release(self, session: ConnectionState, request: Release) -> None:
        # Checked first: a refused request must not drop unsent messages.
        self.cancel_unsent(session, self._engine.commands.releasing.check_request(session, request))
        self._engine.commands.release(session, request)

    def close_parked_users(self, durable_key: str) -> None:
        """Close parked connections that use a durable subscription ("" is none), so that another client can use it."""
        if self._parked and durable_key:
            for session in self._engine.commands.subscribing.durable_subscribers(durable_key):
                if session in self._parked:
                    self._peers[session].close_for_takeover(is_exempt=False)

    # ---- Messages that were not sent, or in part ----

    def cancel_unsent(self, session: ConnectionState, consumers: Collection[BrokerConsumer] | None) -> None:
        """Drop unsent messages of some consumers (None: of all); what the socket took in auto mode is acknowledged."""
        peer = self._peers.get(session)
        if peer is None:
            return
        sent, subscribers = peer.cancel_unsent(consumers)
        for consumer, count in sent.items():
            self._engine.commands.acknowledging.acknowledge_first(consumer, count)
        for subscriber in subscribers:
            entry = None
            if isinstance(subscriber, BrokerConsumer) and subscriber.mode is AckMode.AUTO:
                entry = self._engine.commands.acknowledging.hold_partially_sent(subscriber)
            self._partially_sent.setdefault(session, deque()).append(entry)

    def partial_frame_sent(self, session: ConnectionState) -> None:
        """Note that the socket has taken all of a partially sent message, see `Peer.cancel_unsent`."""
        messages = self._partially_sent.get(session)
        if messages:
            self._settle(messages.popleft(), is_sent=True)

    def drop_unsent(self, session: ConnectionState) -> None:
        """Cancel all unsent messages of a connection that sends nothing more, also those that were sent in part."""
        self.cancel_unsent(session, None)
        self.release_partially_sent(session)

    def release_partially_sent(self, session: ConnectionState) -> None:
        """Release the partially sent messages of a connection, which ends."""
        for entry in self._partially_sent.pop(session, ()):
            self._settle(entry, is_sent=False)

    def _settle(self, entry: Entry | None, *, is_sent: bool) -> None:
        """Acknowledge or release a partially sent message of a consumer in auto mode."""
        if entry is not None:
            self._engine.commands.acknowledging.resolve_partially_sent(entry, is_sent=is_sent)
            self._schedule_turn()
