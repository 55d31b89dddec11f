"""Tests with Spring's listener container and JmsTemplate on the unmodified client of ActiveMQ."""

from collections.abc import Sequence

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.openwire.java import SPRING, Programs, missing_reason

REASON = missing_reason(SPRING)
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@pytest.fixture(scope="module")
def spring(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("spring"), "spring/SpringCases.java", SPRING)


@pytest.fixture
def options() -> Sequence[str]:
    return ("--listen", "openwire://127.0.0.1:0")


def test_container_copies_each_message_once_though_listeners_fail(
    broker: BrokerProcess, queue: str, spring: Programs
) -> None:
    assert spring.run("copy", broker.openwire_url, queue, "50") == ["50 50 5 true"]
    assert broker.remaining_messages(f"DLQ.{queue}") == []


@pytest.mark.parametrize("way", ["session", "same", "other"])
def test_request_of_a_template_is_answered(broker: BrokerProcess, queue: str, spring: Programs, way: str) -> None:
    assert spring.run("reply", broker.openwire_url, queue, way, "50") == ["50"]
