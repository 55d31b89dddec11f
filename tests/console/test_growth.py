"""Tests of the growth of dead-letter queues, which the overview calls bad."""

import pytest

from truenext.console.charts import Charts
from truenext.console.pages.attention import _of_dead_letters
from truenext.console.views.overview import GROWTH_S, _growth
from truenext.model.control_answers import QueueReport

NOW = 1_800_000_000.0


def dead(waiting: int, oldest_s: float | None) -> QueueReport:
    return QueueReport("DLQ.orders", waiting, 0, 0, 0, paused=False, oldest_s=oldest_s)


@pytest.mark.parametrize(("oldest_s", "growth"), [(5.0, 500), (GROWTH_S + 5, 0), (None, 0)])
def test_growth_of_a_queue_without_a_chart_is_known_from_its_oldest_message(oldest_s: float, growth: int) -> None:
    """Fixed: the first burst of dead letters in a queue, and all in a console's first ten minutes, was no growth."""
    assert _growth(Charts(), "", dead(500, oldest_s), NOW) == growth


def test_growth_of_a_queue_with_a_chart_is_what_has_come_since() -> None:
    charts = Charts()
    charts.set(("", "DLQ.orders", "waiting"), 480, NOW - GROWTH_S)
    assert _growth(charts, "", dead(500, 9000.0), NOW) == 20


def test_growth_of_a_queue_is_not_compared_with_a_time_before_the_broker() -> None:
    """Fixed: a broker that was 105 s old had "1,000,000 more than ten minutes ago"."""
    (found,) = _of_dead_letters([dead(500, 5.0)], {"DLQ.orders": 500})
    assert found.why == "500 more within ten minutes."
