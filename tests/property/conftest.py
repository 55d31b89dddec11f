"""Fixtures that make sizes small, so that few and small messages reach the limits of a broker."""

from collections.abc import Iterator

import pytest

from tests.property import broker_machine, targets


@pytest.fixture(autouse=True)
def _small_blocks_and_few_timers_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    targets.BLOCK_BITS.replace(monkeypatch, 2)
    targets.BLOCK.replace(monkeypatch, 4)
    targets.TIMERS_MAX.replace(monkeypatch, 4)
    targets.TIMERS_PAGE_SIZE.replace(monkeypatch, 2)


@pytest.fixture(autouse=True)
def _small_contents_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share contents from 28 bytes on: messages with a colour are that large, others are not."""
    targets.CONTENT_BYTES_MIN.replace(monkeypatch, 28)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect the notes of runs without Hypothesis; show them if the test fails."""
    noted: list[str] = []
    monkeypatch.setattr(broker_machine, "note", noted.append)
    yield noted
    print("\n".join(noted))
