"""Small sizes, so that few messages make what needs many in a broker."""

import pytest

from truenext import record
from truenext.engine import expiry, timers


@pytest.fixture(autouse=True)
def _small_blocks_and_few_timers_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "BLOCK_BITS", 2)
    monkeypatch.setattr(expiry, "BLOCK", 4)
    monkeypatch.setattr(timers, "TIMERS_MAX", 4)
    monkeypatch.setattr(timers, "PAGE_SIZE", 2)
