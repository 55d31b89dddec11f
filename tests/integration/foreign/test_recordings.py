"""Tests of the broker with recorded frames of foreign clients: it must answer them as it did when they were recorded.

`record.py` makes the recordings; `recording.py` describes their format.
"""

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.foreign.recording import FOLDER, Player

NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))


@pytest.mark.parametrize("name", NAMES)
def test_broker_answers_a_replayed_foreign_client_as_recorded(broker: BrokerProcess, queue: str, name: str) -> None:
    Player(broker.port, queue, PATIENCE_SECONDS).play((FOLDER / f"{name}.txt").read_text())
