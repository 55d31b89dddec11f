"""CONNECT and DISCONNECT: opens, parks and ends connections, and notes that a socket has taken all bytes."""

from __future__ import annotations

from truenext.engine.commands.acknowledging import Acknowledging
from truenext.engine.commands.releasing import Releasing
from truenext.engine.commands.subscribing import Subscribing
from truenext.engine.commands.transactions import Transactions
from truenext.engine.queues.queues import Queues
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.queue import Entry, RequeueReason
from truenext.engine.writing.engine_state import EngineState
from truenext.model.commands import AckMode, Login, Unsubscribe
from truenext.model.limits import UNSENT_BYTES_MAX

_AUTO = AckMode.AUTO


class Connecting:
    def __init__(
        self,
        state: EngineState,
        queues: Queues,
        acknowledging: Acknowledging,
        transactions: Transactions,
        subscribing: Subscribing,
        releasing: Releasing,
    ) -> None:
        self._commit_state = state.commit_state
        self._events = state.commit_state.events
        self._memory = state.memory
        self._clients = state.clients
        self._queues = queues
        self._acknowledging = acknowledging
        self._transactions = transactions
        self._subscribing = subscribing
        self._releasing = releasing

    def connect(self, session_id: str) -> ConnectionState:
        session = self._clients.sessions[session_id] = ConnectionState(session_id)
        return session

    def log_in(self, session: ConnectionState, login: Login) -> None:
        session.is_truenext_client = login.is_truenext_client
        session.is_jms_client = login.is_jms_client
        if login.connection_id:
            # From now on its temporary queues and topics have names that contain this id.
            sessions = self._clients.sessions
            del sessions[session.id]
            session.id = login.connection_id
            sessions[session.id] = session

    def is_connected(self, session: ConnectionState) -> bool:
        # A later connection of a JMS client has the id of the one that it has lost.
        return self._clients.sessions.get(session.id) is session

    def park(self, session: ConnectionState) -> bool:
        """Park a lost connection of a truenext client: end all its parts whose end counts no attempt, and keep the
        other parts. These end: browsers, consumers without started messages, and transactions whose abort counts no
        attempt. Messages that were not started are requeued. These are kept: started messages, their consumers, which
        are suspended, and the other transactions. Returns whether anything is kept. After False, the caller must end
        the connection."""
        session.may_lack_reports = True
        for browser in session.browsers.values():
            self._subscribing.end_browser(browser)
        session.browsers.clear()
        for consumer in list(session.consumers.values()):
            started = _started_entries(consumer)
            if started:
                self._releasing.release_all_but(consumer, started)
            else:
                self._subscribing.unsubscribe(session, Unsubscribe(consumer.subscription))
        self._transactions.abort_uncounted(session)
        self._reset_unsent_bytes(session)
        return bool(session.consumers or session.transactions)

    def disconnect(self, session: ConnectionState, *, is_exempt: bool, is_requested: bool = False) -> None:
        """End a connection, and requeue all messages that it held in one step. Does nothing if the connection has ended
        before.

        With `is_exempt` no attempt counts. Otherwise an attempt counts for messages of consumers as
        `Subscribing.end_consumer` says, and for messages that open transactions have nacked or acknowledged. The BEGIN
        of a transaction may have excluded its acknowledged messages from the count. `is_requested` is True if the
        client has sent DISCONNECT.
        """
        if not self.is_connected(session):
            return
        del self._clients.sessions[session.id]
        session.may_lack_reports |= not is_requested
        self._clients.full_sessions.pop(session, None)
        self._transactions.abort_all(session, RequeueReason.RELEASED if is_exempt else RequeueReason.LOST)
        for consumer in session.consumers.values():
            self._subscribing.end_consumer(consumer, is_exempt=is_exempt)
        session.consumers.clear()
        for browser in session.browsers.values():
            self._subscribing.end_browser(browser)
        for queue in session.temporary_queues:
            self._queues.drop_temporary(queue, session)
        if session.temporary_topics:
            self._queues.forget_temporary_topics(session)
        self._reset_unsent_bytes(session)

    def stop(self) -> None:
        """Stop the engine: end all connections, and requeue all held messages without an attempt.

        From now on no message is dispatched, expires or becomes due, and pages are ignored, because
        `EngineLifespan.final_batches` is about to store all waiting messages.
        """
        self._commit_state.is_stopped = True
        for session in list(self._clients.sessions.values()):
            self.disconnect(session, is_exempt=True)

    # ---- Bytes and messages that the socket has taken ----

    def on_all_sent(self, session: ConnectionState) -> None:
        """Note that the socket has taken all bytes of all messages dispatched to the connection."""
        was_blocked = session.unsent_bytes >= self._memory.unsent_bytes_max
        self._reset_unsent_bytes(session)
        served, session.served_consumers = session.served_consumers, {}
        for consumer in session.consumers.values() if was_blocked else served:
            if was_blocked or len(consumer.held) >= consumer.window:
                self._commit_state.touch(consumer)
            if consumer.held and consumer.mode is _AUTO:
                self._acknowledging.acknowledge_all(consumer)

    def _reset_unsent_bytes(self, session: ConnectionState) -> None:
        """Note that the connection's socket has no bytes left to take."""
        memory = self._memory
        memory.unsent_bytes -= session.unsent_bytes
        session.unsent_bytes = 0
        if memory.unsent_bytes_max < UNSENT_BYTES_MAX and memory.unsent_bytes <= memory.unsent_threshold:
            memory.unsent_bytes_max = UNSENT_BYTES_MAX
            for one in self._clients.sessions.values():
                for consumer in one.consumers.values():
                    self._commit_state.touch(consumer)

    # ---- Windows ----

    def stretch_windows(self, session: ConnectionState) -> None:
        """Enlarge the connection's automatic windows that were full for long while nothing was settled."""
        for consumer in session.consumers.values():
            if consumer.stretch_window(self._commit_state.now_ms):
                if consumer.queue is not None:
                    self._events.window_changed(consumer, consumer.queue, consumer.window)
                self._commit_state.touch(consumer)


def _started_entries(consumer: BrokerConsumer) -> list[Entry]:
    """Return the started messages of a consumer. The list is empty if the queue is temporary, because that queue ends
    with the connection."""
    if consumer.queue is not None and consumer.queue.is_temporary:
        return []
    return [entry for entry in consumer.held.values() if entry.is_started]
