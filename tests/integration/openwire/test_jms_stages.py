"""Tests with stages that call the unmodified client of ActiveMQ as Mats3 does (StageCases.java)."""

from collections.abc import Sequence

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.openwire.java import Programs, missing_reason

REASON = missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("stages"), "StageCases.java")


@pytest.fixture
def options() -> Sequence[str]:
    return ("--listen", "openwire://127.0.0.1:0")


def test_stages_finish_each_flow_once_or_dead_letter_it(broker: BrokerProcess, queue: str, stages: Programs) -> None:
    said = stages.run("all", broker.openwire_url, queue)
    flows, failures, topic = said[:2], said[2:6], said[6:]
    assert flows == ["{f main leaf main.1 leaf main.2 1=30}", "null"]
    assert failures == [
        "{f main 1=27}",
        "[f0 true, f1 true, f2 sent by the stage] true",
        "[1, 2, 3, 4, 5, 6, 7]",
        "true",
    ]
    assert topic == ["{f 1=60}"]
