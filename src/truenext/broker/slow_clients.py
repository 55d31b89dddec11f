"""Slow clients: ends connections that read or send so slowly that memory runs short or other clients must wait."""

from collections.abc import Mapping

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


def end_slow_clients(
    engine: Engine,
    peers: Mapping[ConnectionState, Peer],
    requests: ControlRequests,
    capacity: Capacity,
    now_s: float,
) -> None:
    """End up to three connections, at most one for each reason: its topic subscription stalls, it does not read a
    large answer to a control request, or it does not complete a large frame. Called once a second.

    `now_s` is the time of a clock that does not jump.
    """

    def bytes_sent(session: ConnectionState) -> int:
        return peers[session].bytes_sent

    stalled = engine.find_stalled_connection(bytes_sent)
    if stalled is not None:
        session, reason = stalled
        peers[session].end_slow_client(reason)
    blocking = requests.find_blocking(now_s, bytes_sent)
    if blocking is not None:
        peers[blocking].end_slow_client(
            f"the client has read almost nothing of the answer to its control request for {ANSWER_STALL_SECONDS} "
            f"seconds, or not all of it for {ANSWER_SECONDS_MAX} seconds, and other requests wait: read and "
            "acknowledge the answer"
        )
    sender = capacity.find_stalled_sender()
    if sender is not None:
        peers[sender].end_slow_client(
            f"the client has sent less than {INCOMPLETE_FRAME_PROGRESS_BYTES} bytes of a large frame in "
            f"{INCOMPLETE_FRAME_SECONDS} seconds, and other connections wait for its memory: send each frame "
            "without a pause, or send smaller frames"
        )
