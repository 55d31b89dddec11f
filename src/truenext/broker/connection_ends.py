"""Connection ends: release or keep the messages of a connection that ends, for each cause.

DISCONNECT       unsent messages are dropped, held messages are requeued without an attempt
socket broken    parked (in the contract: cut) if its client has a secret for a takeover, and its end would count an
                 attempt; else lost
lost             held messages are requeued, with attempts unless the end is exempt
takeover         a new connection names the secret of the old one; the old one is closed, and counts no attempt
closed           no answer can follow; messages that were sent in part are requeued

A timeout or a lack of memory may end many connections at once. `soon` spreads these ends over several turns.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping

from truenext.broker.capacity import Capacity
from truenext.broker.peer import Peer
from truenext.broker.takeovers import TakeoverSecrets
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.queue import Entry
from truenext.model.commands import AckMode, Close, Disconnect, Login, Release, Unsubscribe
from truenext.model.limits import ENDS_NS_PER_TURN


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
        note_lost: Callable[[ConnectionState], object],
        monotonic_ns: Callable[[], int],
    ) -> None:
        """`tick` reads the clock. `drop_answers` drops the answers to control requests of a connection. `note_lost` is
        called with each connection that ends without DISCONNECT."""
        self._engine = engine
        self._peers = peers
        self._capacity = capacity
        self._tick = tick
        self._schedule_turn = schedule_turn
        self._drop_answers = drop_answers
        self._note_lost = note_lost
        self._monotonic_ns = monotonic_ns
        self.spent_ns = 0
        """Nanoseconds that ends by `soon` have taken since the last turn."""
        self.due: dict[ConnectionState, Callable[[], object]] = {}
        """Functions that end connections in one of the next turns, in this order."""
        self._takeovers = TakeoverSecrets()
        self._parked: set[ConnectionState] = set()
        """Parked connections: they have no socket, and their clients may take them over."""
        self._partially_sent: dict[ConnectionState, deque[Entry | None]] = {}
        """Messages that were sent in part, or encrypted, when their consumer ended or released its messages, in the
        order of sending. None stands for a message of a browser, or of a consumer that acknowledges its messages."""

    # ---- Many at once ----

    def soon(self, session: ConnectionState, end: Callable[[], object]) -> None:
        """End a connection by `end`: now, or in one of the next turns if other ends have taken ENDS_NS_PER_TURN since
        the last turn. If the connection is closed meanwhile, `end` is not called."""
        if self.due or self.spent_ns >= ENDS_NS_PER_TURN:
            self.due.setdefault(session, end)
            self._schedule_turn()
        else:
            self._run(end)

    def run_due(self) -> None:
        """End the connections that wait in `due`, until the ends have taken ENDS_NS_PER_TURN. Called in each turn."""
        self.spent_ns = 0
        while self.due and self.spent_ns < ENDS_NS_PER_TURN:
            session = next(iter(self.due))
            self._run(self.due.pop(session))

    def drop_due(self) -> None:
        """Forget the connections that wait in `due`. Called when the broker stops, because it then ends all connections
        without an attempt."""
        self.due.clear()

    def _run(self, end: Callable[[], object]) -> None:
        began_ns = self._monotonic_ns()
        end()
        self.spent_ns += self._monotonic_ns() - began_ns

    def is_open(self, session: ConnectionState) -> bool:
        """Return whether a connection is neither about to end nor parked."""
        return self._engine.commands.connecting.is_connected(session) and session not in self._parked

    # ---- Causes ----

    def take_over(self, session: ConnectionState, login: Login, user: str) -> tuple[str, bool]:
        """Close the old connection whose secret a login names, if there is one, in favour of the new connection.
        Returns the secret of the new connection, and whether there was an old one.

        Raises: RemoteProtocolError if the login came late: its client has logged in with a higher number since
        """
        secret, former = self._takeovers.take_over(session, login, user)
        if former is not None:
            self._peers[former].close_for_takeover(is_exempt=True)
        return secret, former is not None

    def forget_secret(self, session: ConnectionState) -> None:
        """Let no login take this connection over."""
        self._takeovers.remove(session)

    def park(self, session: ConnectionState) -> bool:
        """Park a connection whose socket ended without a DISCONNECT, so that its client may take it over.

        A client without a secret cannot take a connection over: then nothing is changed. Otherwise all that would count
        no attempt ends now: unsent messages and answers to control requests are dropped, and messages that were not
        started are requeued. Returns True if the connection is parked, and False if the caller must end the connection.
        """
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
        """Requeue the messages of a connection that ends without DISCONNECT. The connection may still get answers until
        `closed` is called.

        If `is_exempt`, the held messages count no attempt.
        """
        self._tick()
        if self._engine.commands.connecting.is_connected(session):
            self._note_lost(session)
        self.cancel_unsent(session, None)
        self._engine.commands.disconnect(session, is_exempt=is_exempt)
        self._takeovers.remove(session)
        self._drop_answers(session)
        self._schedule_turn()

    def closed(self, session: ConnectionState) -> None:
        """Requeue the messages in auto mode that a closed connection has sent only in part."""
        self.release_partially_sent(session)
        self._parked.discard(session)
        self.due.pop(session, None)

    # ---- Commands that end something ----

    def disconnect(self, session: ConnectionState, disconnect: Disconnect) -> None:
        self.cancel_unsent(session, None)
        if disconnect.last_delivered is not None:
            self._engine.commands.subscribing.requeue_delivered(
                session, session.consumers.values(), disconnect.last_delivered
            )
        self._engine.commands.disconnect(session, is_exempt=True, is_requested=True)
        self._takeovers.remove(session)
        if disconnect.forgotten_producers:
            self._engine.state.producers_of(session).forget(session, disconnect.forgotten_producers)

    def unsubscribe(self, session: ConnectionState, unsubscribe: Unsubscribe) -> None:
        self.close_parked_users(unsubscribe.durable_key)
        consumer = session.consumers.get(unsubscribe.subscription)
        if consumer is not None:
            self.cancel_unsent(session, [consumer])
        self._engine.commands.unsubscribe(session, unsubscribe)

    def close_subscriptions(self, session: ConnectionState, close: Close) -> None:
        consumers = session.consumers
        self.cancel_unsent(session, [consumers[name] for name in close.subscriptions if name in consumers])
        self._engine.commands.close(session, close)

    def release(self, session: ConnectionState, request: Release) -> None:
        # Checked first: a refused request must not drop unsent messages.
        self.cancel_unsent(session, self._engine.commands.releasing.check_request(session, request))
        self._engine.commands.release(session, request)

    def close_parked_users(self, durable_key: str) -> None:
        """Close the parked connection that uses a durable subscription, so that another client can use the
        subscription. `durable_key` is "" if the command names no durable subscription."""
        if self._parked and durable_key:
            for session in self._engine.commands.subscribing.durable_subscribers(durable_key):
                if session in self._parked:
                    self._peers[session].close_for_takeover(is_exempt=False)

    # ---- Messages that were not sent, or in part ----

    def cancel_unsent(self, session: ConnectionState, consumers: Collection[BrokerConsumer] | None) -> None:
        """Drop the unsent messages of these consumers; None stands for all consumers. Messages of consumers in auto
        mode that the socket has taken are acknowledged."""
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
        """Note that the socket has now taken all of a message that was sent in part when `cancel_unsent` dropped the
        other messages."""
        messages = self._partially_sent.get(session)
        if messages:
            self._settle(messages.popleft(), is_sent=True)

    def drop_unsent(self, session: ConnectionState) -> None:
        """Drop all unsent messages of a connection whose output has ended. Messages in auto mode that were sent in part
        are requeued."""
        self.cancel_unsent(session, None)
        self.release_partially_sent(session)

    def release_partially_sent(self, session: ConnectionState) -> None:
        """Requeue the messages in auto mode that a connection has sent in part. The rest of these messages will not be
        sent."""
        for entry in self._partially_sent.pop(session, ()):
            self._settle(entry, is_sent=False)

    def partially_sent_entries(self) -> Iterator[Entry]:
        """Yield the messages in auto mode that were sent in part, and that no consumer holds any more."""
        for messages in self._partially_sent.values():
            yield from (entry for entry in messages if entry is not None)

    def _settle(self, entry: Entry | None, *, is_sent: bool) -> None:
        """Acknowledge a message of a consumer in auto mode that was sent in part, if all of it `is_sent` now; else
        requeue it."""
        if entry is not None:
            self._engine.commands.acknowledging.resolve_partially_sent(entry, is_sent=is_sent)
            self._schedule_turn()
