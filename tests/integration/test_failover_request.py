"""Tests of the control request `failover`, at a broker whose log says which member takes over."""

import asyncio
import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.contract.fake_log import LogRows, WaitingLog
from tests.integration.broker_here import broker_here, port_of
from tests.integration.raw_client import RawClient
from truenext.broker.broker import HAND_OVER_DELAY_S
from truenext.errors import StoreError
from truenext.store.log import Log
from truenext.wire.stomp.frame import Frame


def ask(port: int, body: bytes) -> Frame:
    """Return the answer to a request, or the ERROR."""
    client = RawClient(port)
    try:
        client.send_connect("1.2", "0,0")
        client.send_frame("SUBSCRIBE", {"id": "a", "destination": "/temp-queue/a"}, confirmed=True)
        client.send_frame("SEND", {"destination": "/control/failover", "reply-to": "/temp-queue/a"}, body)
        return client.next_frame()
    finally:
        client.close()


def request(folder: Path, log: Log | None, body: bytes) -> tuple[Frame, bool]:
    """Return the answer of a broker, and whether the broker has begun to stop."""
    has_begun = Event()

    async def run() -> Frame:
        async with broker_here(folder, log=log) as listener:
            listener._broker.end = has_begun.set
            answer = await asyncio.to_thread(ask, port_of(listener), body)
            assert not has_begun.is_set(), "the answer comes before the stop"
            await asyncio.sleep(2 * HAND_OVER_DELAY_S)
            return answer

    return asyncio.run(run()), has_begun.is_set()


@pytest.mark.parametrize(("body", "heir"), [(b"", "second"), (b"{}", "second"), (b'{"to": "third"}', "third")])
def test_broker_answers_stops_and_names_the_heir_in_its_log(body: bytes, heir: str, tmp_path: Path) -> None:
    # C28.7
    log = WaitingLog(LogRows())
    answer, has_begun = request(tmp_path / "data", log, body)
    assert json.loads(answer.body) == {"member": heir}
    assert has_begun
    assert log.heirs == [heir]


@pytest.mark.parametrize(
    ("log", "body", "text"),
    [
        (WaitingLog(LogRows()), b'{"to": "absent"}', "no broker with the member name 'absent' stands by"),
        (WaitingLog(LogRows()), b'{"from": "x"}', "failover: "),
        (None, b"", "this broker has no log (--store), so no other one can take over"),
    ],
)
def test_request_that_cannot_be_met_is_refused_and_the_broker_goes_on(
    log: Any, body: bytes, text: str, tmp_path: Path
) -> None:
    error, has_begun = request(tmp_path / "data", log, body)
    assert error.command == "ERROR"
    assert text in error.body.decode()
    assert not has_begun
    assert log is None or log.heirs == [""]


def test_clean_stop_that_the_database_does_not_learn_of_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class LostLog(WaitingLog):
        def hand_over(self, heir: str) -> None:
            raise StoreError("no connection")

    request(tmp_path / "data", LostLog(LogRows()), b"")
    assert "the database does not know of the clean stop" in caplog.text
