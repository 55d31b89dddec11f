"""Time from the bytes of a message to its command, beside STOMP's, in one process."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence

from bench import frames
from bench.openwire import client
from bench.workers import Crew, Gate
from truenext.model.commands import Login, Send, SendRun
from truenext.wire.openwire.fields import encode_frame
from truenext.wire.openwire.handshake import encode_wire_format_info
from truenext.wire.openwire.session import OpenWireSession
from truenext.wire.openwire.structures import ProducerId, ProducerInfo, QueueName
from truenext.wire.session import WireSession
from truenext.wire.stomp.server import StompSession

TARGET = 1.5
_MESSAGES = 2_000
_GROUP = 200
_ROUNDS = 60
_SECONDS = 60.0
_CONNECTION = "ID:bench-40000-1700000000000-1:1"


def measure() -> None:
    for language, value in (("Python", "0"), ("C", "1")):
        # The worker inherits it.
        os.environ["TRUENEXT_SPEEDUPS"] = value
        with Crew() as crew:
            crew.hire(_measure)
            ((stomp, openwire),) = crew.finish(_SECONDS)
        os.environ.pop("TRUENEXT_SPEEDUPS")
        note = f"(at most {TARGET})" if language == "Python" else "(for orientation)"
        print(
            f"decoding: {openwire:.2f} us a message, STOMP in {language} {stomp:.2f} us: {openwire / stomp:.2f} {note}",
            flush=True,
        )


def _measure(_: Gate) -> tuple[float, float]:
    """Worker: let both decode in turns. Returns microseconds a message, median, of STOMP and of OpenWire."""
    stomp: WireSession = StompSession(session_id="1", identity="bench", server_name="bench")
    _execute(stomp, frames.connect())
    openwire: WireSession = OpenWireSession(session_id="2", identity="bench", server_name="bench")
    producer = encode_frame(ProducerInfo(3, True, ProducerId(_CONNECTION, 1, 1), QueueName("bench")))
    for data in (encode_wire_format_info(), client.login(_CONNECTION), producer):
        _execute(openwire, data)
    sends = list(client.messages(_CONNECTION, QueueName("bench"), _MESSAGES))
    groups = [b"".join(sends[first : first + _GROUP]) for first in range(0, _MESSAGES, _GROUP)]
    stomp_groups = frames.send_groups("/queue/bench", False, _MESSAGES, _GROUP, False, 1)
    pairs = [(_time(stomp, stomp_groups), _time(openwire, groups)) for _ in range(_ROUNDS)]
    stomp_us, openwire_us = map(statistics.median, zip(*pairs, strict=True))
    return stomp_us, openwire_us


def _time(session: WireSession, groups: Sequence[bytes]) -> float:
    started = time.process_time()
    count = sum(_execute(session, group) for group in groups)
    seconds = time.process_time() - started
    if count != _MESSAGES:
        raise ValueError(f"{count} messages of {_MESSAGES}")
    return seconds / _MESSAGES * 1e6


def _execute(session: WireSession, data: bytes) -> int:
    """Take the commands of a session as a broker does. Returns the number of messages."""
    count = 0
    for command in session.receive(data):
        if isinstance(command, SendRun):
            command.executed = len(command)
            count += len(command)
        elif isinstance(command, Send):
            count += 1
        elif isinstance(command, Login):
            session.encode_connected(command, "", is_takeover=False, is_checked=False)
    return count
