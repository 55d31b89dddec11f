"""Tests of control requests `history`: each gets an answer, whatever is in the folder."""

from __future__ import annotations

import asyncio
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
