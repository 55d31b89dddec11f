"""Does what stands between the sockets and the engine keep its word: time, ends of connections, and clean stops?"""

import asyncio
import resource
import struct
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.integration.broker_process import BrokerProcess
from truenext.batch import Batch
from truenext.cli import serve
from truenext.errors import TruenextError
from truenext.store.memory import MemoryStore
from truenext.store.store import Recovered

# ---- The end of a broker that failed ----


class StoreThatSeesItsEnd(MemoryStore):
    """The broker finds a bug of its own while the first batch is being written."""

    is_applying = False

    def recover(self) -> Recovered:
        self.loop = asyncio.get_running_loop()
        return super().recover()

    def apply(self, batch: Batch) -> None:
        self.is_applying = True
        self.loop.call_soon_threadsafe(self.find_a_bug)
        time.sleep(0.2)
        super().apply(batch)
        self.is_applying = False

    def find_a_bug(self) -> None:
        raise ZeroDivisionError("a bug")

    def close(self) -> None:
        assert not self.is_applying, "closed in the middle of a batch"
        super().close()


def test_a_store_is_not_closed_in_the_middle_of_a_batch_when_the_broker_fails() -> None:
    with (
        mock.patch.object(serve, "MemoryStore", StoreThatSeesItsEnd),
        mock.patch.object(serve, "_spare_the_collector"),
        mock.patch.object(serve.sys, "setswitchinterval"),
        pytest.raises(TruenextError, match="internal error, the broker stops: .*a bug"),
    ):
        serve.serve(None, ["stomp://127.0.0.1:0"], allow_anonymous=False)
