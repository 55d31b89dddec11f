"""Tests of what wants an operator's attention: messages that consumers hold, messages that fail again, a full disk."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import UNSET

from truenext.console.charts import Charts
from truenext.console.gathering import QueueGathering
from truenext.console.pages.attention import NO_CONSUMER_S, OLD_S, VERY_OLD_S, find_attention, judge_queue
from truenext.console.pages.overview import Attention
from truenext.console.views.overview import GROWTH_S, _failures
from truenext.model.control_answers import QueueReport, StatusReport

NOW = 1_800_000_000.0


def _report(name: str, **fields: Any) -> QueueReport:
    """Return the report of a queue; numbers that are not given are 0."""
    numbers = {"waiting": 0, "unacknowledged": 0, "consumers": 0, "scheduled": 0, "paused": False}
    return QueueReport(name, **(numbers | fields))


def found(*queues: QueueReport, failures: dict[str, int] | None = None) -> list[Attention]:
    return find_attention(None, queues, [], {}, failures or {}, [], 0)


@pytest.mark.parametrize(
    ("held_s", "level"), [(None, ""), (OLD_S - 1, ""), (OLD_S, "warn"), (VERY_OLD_S - 1, "warn"), (VERY_OLD_S, "bad")]
)
@pytest.mark.parametrize("waiting", [0, 1])
def test_queue_wants_attention_if_a_consumer_holds_a_message_for_long(
    held_s: float | None, level: str, waiting: int
) -> None:
    """Fixed: a consumer that hangs with all messages of a queue was not seen, as none of them waits."""
    age = 1.0 if waiting else None
    queue = _report("a", waiting=waiting, unacknowledged=7, consumers=1, oldest_s=age, held_s=held_s)
    assert [each.level for each in found(queue)] == ([level] if level else [])
    if level:
        (shown,) = found(queue)
        assert shown.what.startswith("a: a consumer has held a message for ") and "Held: 7." in shown.why


def test_processes_that_are_not_asked_come_behind_what_is_worse_and_the_drain() -> None:
    """Fixed: in a drain, the first item was that processes are not known, above those that are bad."""
    status = SimpleNamespace(stuck=[], disk_level="plenty", log=UNSET, ready=False)
    bad = _report("a", waiting=1, oldest_s=VERY_OLD_S)
    shown = find_attention(cast(StatusReport, status), [bad], [], {}, {}, [], 0, "why")
    assert [each.what[:12] for each in shown] == ["a: nothing c", "The broker i", "Processes of"]


def test_worse_of_two_reasons_is_told() -> None:
    both = _report("a", waiting=1, consumers=1, oldest_s=VERY_OLD_S, held_s=OLD_S)
    assert judge_queue(both) == ("bad", "the oldest message has waited for 1 h 0 min", "oldest", VERY_OLD_S)
    held = _report("a", waiting=1, consumers=1, oldest_s=OLD_S, held_s=VERY_OLD_S)
    assert judge_queue(held)[::2] == ("bad", "held")


def test_queue_that_was_just_paused_is_no_news_for_what_its_consumers_hold() -> None:
    """Fixed: a queue paused a second ago was listed as soon as a consumer held a message for a minute."""
    assert not found(_report("a", waiting=1, paused=True, consumers=1, oldest_s=1.0, held_s=NO_CONSUMER_S))
    (shown,) = found(_report("a", waiting=1, paused=True, consumers=1, oldest_s=1.0, held_s=OLD_S))
    assert shown.what.startswith("a: a consumer has held a message")
    (shown,) = found(_report("a", waiting=1, paused=True, oldest_s=NO_CONSUMER_S))
    assert shown.what == "a: paused"


def test_queries_of_spark_may_hold_messages_for_long_and_consumers_of_dead_letters_may_not() -> None:
    assert judge_queue(_report("Spark.main.1", consumers=1, held_s=VERY_OLD_S)).level == ""
    assert judge_queue(_report("DLQ.a", dead_letters=True, consumers=1, held_s=VERY_OLD_S)).level == "bad"


def test_queue_wants_attention_if_its_messages_fail_again_more_than_once() -> None:
    shown = found(failures={"a": 2, "b": 1, "c": 30})
    assert [each.what.split(":")[0] for each in shown] == ["c", "a"]
    assert shown[0].why == "30 repeated failures within ten minutes."


@pytest.mark.parametrize(
    ("noted", "failures"),
    [
        ([(0, 5)], 0),
        ([(20, 0), (0, 500)], 500),
        ([(GROWTH_S - 20, 5), (0, 9)], 4),
        ([(GROWTH_S + 60, 5), (20, 7), (0, 9)], 2),
        ([(60, 5), (0, 2)], 2),
        ([(60, 5), (40, 7), (20, 1), (0, 9)], 11),
    ],
    ids=["unknown before", "none before", "known", "only of ten minutes", "broker restarted", "and more than before"],
)
def test_repeated_failures_are_those_since_the_first_known_count_of_ten_minutes(
    noted: list[tuple[float, int]], failures: int
) -> None:
    charts = Charts()
    gathering = QueueGathering("", charts)
    for ago_s, value in noted:
        gathering._note_failures([_report("a", failed_again=value)], NOW - ago_s)
    assert _failures(charts, "", "a", NOW) == failures


@pytest.mark.parametrize("level", ["little", "none", "full"])
def test_short_disk_leads_to_the_queues_with_the_most_messages(level: str) -> None:
    status = SimpleNamespace(stuck=[], disk_level=level, disk_bytes={}, log=UNSET, ready=True)
    (shown,) = find_attention(cast(StatusReport, status), [], [], {}, {}, [], 0)
    assert (shown.level, shown.link) == ("bad", "/queues?order=waiting")
