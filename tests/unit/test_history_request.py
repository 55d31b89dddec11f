"""Tests of control requests `history`: each gets an answer, whatever is in the folder."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from truenext.broker.history_request import HistoryPiece, HistoryRequests
from truenext.history.pieces import PieceReader


def test_request_that_meets_an_unforeseen_error_is_answered_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: it had no answer, and counted for its connection for ever."""

    def fail(*_: object, **__: object) -> None:
        raise IndexError("kind 77")

    monkeypatch.setattr(PieceReader, "read", fail)

    async def ask() -> HistoryPiece:
        loop = asyncio.get_running_loop()
        requests, made = HistoryRequests(tmp_path, loop, lambda: 5), loop.create_future()
        requests.begin(0, made.set_result, with_causes=True)
        piece = msgspec.json.decode(await asyncio.wait_for(made, 20), type=HistoryPiece)
        requests.close()
        return piece

    piece = asyncio.run(ask())
    assert (piece.error, piece.next) == ("kind 77", 5)


def test_next_event_is_asked_for_on_the_event_loop(tmp_path: Path) -> None:
    """Fixed: the thread could see a number that was passed before, and a query then took the history for an older
    copy."""
    threads: list[int] = []

    def next_event() -> int:
        threads.append(threading.get_ident())
        return 7

    async def ask() -> HistoryPiece:
        loop = asyncio.get_running_loop()
        requests, made = HistoryRequests(tmp_path, loop, next_event), loop.create_future()
        requests.begin(None, made.set_result, with_causes=True)
        piece = msgspec.json.decode(await asyncio.wait_for(made, 20), type=HistoryPiece)
        requests.close()
        return piece

    assert asyncio.run(ask()).next == 7
    assert threads == [threading.get_ident()]
