"""Slow clients: ends connections that read or send so slowly that memory runs short or other clients must wait."""

from collections.abc import Callable, Mapping

from truenext.broker.capacity import Capacity
from truenext.broker.control_requests import ControlRequests
from truenext.broker.peer import Peer
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.model.limits import (
    ANSWER_SECONDS_MAX,
    ANSWER_STALL_SECONDS,
    INCOMPLETE_FRAME_PROGRESS_BYTES,
    INCOMPLETE_FRAME_SECONDS,
)


class SlowClients:
    def __init__(
        self,
        engine: Engine,
        peers: Mapping[ConnectionState, Peer],
        requests: ControlRequests,
        capacity: Capacity,
        time: Callable[[], float],
    ) -> None:
        """`time` returns seconds of a clock that does not jump."""
        self._engine = engine
        self._peers = peers
        self._requests = requests
        self._capacity = capacity
        self._time = time

    def end_some(self) -> None:
        """End up to three connections, at most one for each reason: its topic subscription stalls, it does not read a
        large answer to a control request, or it does not complete a large frame. Called once a second.
        """
        stalled = self._engine.find_stalled_connection(self._bytes_sent)
        if stalled is not None:
            session, reason = stalled
            self._peers[session].end_slow_client(reason)
        blocking = self._requests.find_blocking(self._time(), self._bytes_sent)
        if blocking is not None:
            self._peers[blocking].end_slow_client(
                f"the client has read almost nothing of the answer to its control request for {ANSWER_STALL_SECONDS} "
                f"seconds, or not all of it for {ANSWER_SECONDS_MAX} seconds, and other requests wait: read and "
                "acknowledge the answer"
            )
        sender = self._capacity.find_stalled_sender()
        if sender is not None:
            self._peers[sender].end_slow_client(
                f"the client has sent less than {INCOMPLETE_FRAME_PROGRESS_BYTES} bytes of a large frame in "
                f"{INCOMPLETE_FRAME_SECONDS} seconds, and other connections wait for its memory: send each frame "
                "without a pause, or send smaller frames"
            )

    def _bytes_sent(self, session: ConnectionState) -> int:
        return self._peers[session].bytes_sent
