"""Tests of consumers of the unmodified client of ActiveMQ. All cases (JmsConsumers.java) are one run of Java."""

import re
from collections.abc import Iterator

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.openwire.java import Programs, missing_reason

REASON = missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

CASES = (
    "temporary_topic",
    "groups",
    "exclusive",
    "consumer_priority",
    "consumer_control",
    "optimized_failover",
    "stalled",
    "connection_consumer",
    "non_blocking",
    "error",
    "browse_many",
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """Lines that each case has printed."""
    folder = tmp_path_factory.mktemp("consumers")
    programs = Programs(folder, "JmsConsumers.java")
    broker = BrokerProcess(folder, ["--listen", "openwire://127.0.0.1:0"])
    printed: dict[str, list[str]] = {}
    try:
        broker.start()
        for line in programs.run(",".join(CASES), broker.openwire_url, "q"):
            if line.startswith("# "):
                printed[line[2:]] = lines = []
            else:
                lines.append(line)
        yield printed
        broker.stop()
    finally:
        broker.clean_up()


def test_temporary_topic_gets_what_another_connection_sends_until_it_is_deleted(said: dict[str, list[str]]) -> None:
    assert said["temporary_topic"] == ["r1/1 r2/1 r1/1 r2/1", "deleted"]


def test_group_stays_with_its_consumer_in_order_until_that_is_closed(said: dict[str, list[str]]) -> None:
    first, second = said["groups"]
    assert first == "{g0=[m0 first, m3, m6, m9], g1=[m1 first, m4, m7, m10], g2=[m2 first, m5, m8, m11]}"
    # Those that the other consumer has had already are not the first of their group there.
    assert re.sub(" first", "", second) == "{g0 1=[m0, m3, m6, m9], g1 1=[m1, m4, m7, m10], g2 1=[m2, m5, m8, m11]}"


def test_exclusive_consumer_gets_all_until_it_is_closed(said: dict[str, list[str]]) -> None:
    assert said["exclusive"] == ["m0/1 m1/1 m2/1, nothing", "m3/1 m4/1 m5/1"]


def test_consumer_of_higher_priority_gets_its_prefetch_first(said: dict[str, list[str]]) -> None:
    assert said["consumer_priority"] == ["m3/1 m4/1, m0/1 m1/1 m2/1"]


def test_consumer_control_changes_the_prefetch(said: dict[str, list[str]]) -> None:
    # A smaller prefetch takes nothing back.
    assert said["consumer_control"] == ["1 4 4 6"]


def test_lost_connection_neither_doubles_nor_dead_letters_with_optimize_acknowledge(said: dict[str, list[str]]) -> None:
    # Acknowledgements that waited at the client would be lost, and it would reject what comes again.
    assert said["optimized_failover"] == ["30 30"]


def test_client_that_forgets_its_consumers_after_a_lost_connection_connects_again(said: dict[str, list[str]]) -> None:
    # C26.19; with ActiveMQ's broker they get nothing any more.
    assert said["stalled"] == ["m0/1 m1/1 true"]


def test_connection_consumer_gives_messages_to_the_sessions_of_a_pool(said: dict[str, list[str]]) -> None:
    assert said["connection_consumer"] == ["m0/1 m1/1 m2/1 m3/1 m4/1", "nothing"]


def test_others_pass_a_failing_message_until_it_is_a_dead_letter_with_non_blocking_redelivery(
    said: dict[str, list[str]],
) -> None:
    assert said["non_blocking"] == ["m0/1 m1/1 m2/1 m0/2 m0/3", "m0 nothing"]


def test_error_in_a_listener_counts_an_attempt_whether_the_connection_is_closed_or_lost(
    said: dict[str, list[str]],
) -> None:
    # The lost connection held m1, too: its redelivery counter is 1, without an attempt (C26.8).
    assert said["error"] == ["m0/1", "m0/2", "m0/3 m1/2"]


def test_browser_shows_more_messages_than_its_prefetch(said: dict[str, list[str]]) -> None:
    assert said["browse_many"] == ["35"]
