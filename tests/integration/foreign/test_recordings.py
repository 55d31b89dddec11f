"""Does the broker still understand, byte for byte, what foreign clients say unasked? What they said once is said again,
on every machine. How a recording is made anew: `record.py`; how it is written: `recording.py`.
"""

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.foreign.recording import FOLDER, Player

NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))


@pytest.mark.parametrize("name", NAMES)
def test_broker_answers_a_replayed_foreign_client_as_recorded(broker: BrokerProcess, queue: str, name: str) -> None:
    Player(broker.port, queue, PATIENCE_SECONDS).play((FOLDER / f"{name}.txt").read_text())
