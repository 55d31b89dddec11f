"""Tests of the health of a broker's process, and of its metrics. Source: docs/contract.md, "Health and metrics" """

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.prometheus_samples import samples_of
from tests.unit.test_control_queries import ReportDriver, finished
from truenext.broker import event_loop, metrics
from truenext.broker.broker import Broker
from truenext.broker.control_commands import Figures
from truenext.broker.event_loop import SAMPLE_INTERVAL_S, LoopDelay
from truenext.broker.health import LOOP_HELD_S, LOOP_SLOW_S, BrokerFacts, BrokerState, assess_health
from truenext.broker.metrics import BrokerMetrics, health_metrics
from truenext.broker.queues_request import ITEMS_PER_STEP, NAMES_PER_STEP, make_named_report
from truenext.broker.security_log import EVENTS_PER_SECOND_MAX, SecurityLog
from truenext.clock import monotonic
from truenext.model.control_answers import (
    HistoryReport,
    JournalReport,
    LogReport,
    MemberReport,
    QueueReport,
    StatusReport,
)
from truenext.model.histogram import HistogramCounter
from truenext.model.pattern import compile_patterns, matches

RUNNING = BrokerFacts(state=BrokerState.RUNNING)


def changed(**facts: Any) -> BrokerFacts:
    return msgspec.structs.replace(RUNNING, **facts)


# ---- Live and ready ----


@pytest.mark.parametrize(
    ("facts", "live", "ready", "reasons"),
    [
        (RUNNING, True, True, []),
        (BrokerFacts(state=BrokerState.RESTORING), True, False, ["restoring: it opens its folder"]),
        (BrokerFacts(state=BrokerState.STANDING_BY), True, False, ["standing by: another broker is active"]),
        (BrokerFacts(state=BrokerState.STOPPING), True, False, ["stopping"]),
        (changed(draining=True), True, False, ["draining: "]),
        (changed(silent=True), True, False, ["silent: another broker may have taken over"]),
        (changed(awaited="database"), True, False, ["nothing is confirmed: PostgreSQL does not answer"]),
        (changed(awaited="standby"), True, False, ["nothing is confirmed: the synchronous standby"]),
        (changed(awaited="space"), True, False, ["nothing is confirmed: the disk of PostgreSQL is full"]),
        (changed(loop_held_s=LOOP_SLOW_S), True, True, []),
        (changed(loop_held_s=LOOP_SLOW_S + 1), True, False, ["the event loop has stood still for 6 s"]),
        (changed(loop_held_s=LOOP_HELD_S), True, False, ["the event loop has stood still for 60 s"]),
        (changed(loop_held_s=LOOP_HELD_S + 1), False, False, ["the event loop has stood still for 61 s"]),
        (changed(disk_level="little"), True, True, []),
        (changed(disk_level="none"), True, True, ["disk level none: sends are refused, consumers go on"]),
        (changed(disk_level="full"), True, True, ["disk level full: sends are refused, consumers go on"]),
        (
            changed(draining=True, silent=True, disk_level="none"),
            True,
            False,
            ["draining: ", "silent: ", "disk level none: "],
        ),
    ],
)
def test_broker_is_live_and_ready_for_reasons(facts: BrokerFacts, live: bool, ready: bool, reasons: list[str]) -> None:
    health = assess_health(facts)
    assert (health.live, health.ready) == (live, ready)
    assert len(health.reasons) == len(reasons)
    assert all(found.startswith(expected) for found, expected in zip(health.reasons, reasons, strict=True))


# ---- Delay of the event loop ----


class FakeLoop:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.due: list[Any] = []
        monkeypatch.setattr(event_loop, "monotonic", lambda: self.now)

    def call_later(self, delay: float, function: Any) -> None:
        assert delay == SAMPLE_INTERVAL_S
        self.due.append(function)

    def run_after(self, seconds: float) -> None:
        self.now += seconds
        (function,) = self.due
        self.due.clear()
        function()


def test_delay_of_the_event_loop_is_the_time_by_which_a_timer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = FakeLoop(monkeypatch)
    delay = LoopDelay(cast(Any, loop))
    loop.run_after(SAMPLE_INTERVAL_S)
    loop.run_after(SAMPLE_INTERVAL_S + 0.3)
    loop.run_after(SAMPLE_INTERVAL_S - 0.001)
    assert (delay.delays.count, round(delay.delays.sum, 6)) == (3, 0.3)
    loop.now += SAMPLE_INTERVAL_S + 7
    assert round(delay.held_s(), 6) == 7, "before the loop turns again"


# ---- Figures ----


def full_status() -> StatusReport:
    """Return a status in which nothing is left out."""
    driver = ReportDriver()
    for queue in ("orders", "orders", "DLQ.orders"):
        driver.send(queue)
    status = msgspec.json.decode(finished(driver.start_request("status")), type=StatusReport)
    members = [
        MemberReport("a", "host", "active", 1, 9, 100),
        MemberReport("b", "host", "standing by", 1, 9, 900),
        MemberReport("c", "host", "standing by", 1, 9, 60_000),
    ]
    log = LogReport("db:5432", 1, 9, 3, True, "standby", 5, members)
    return msgspec.structs.replace(
        status,
        journal=JournalReport(2, 300),
        history=HistoryReport(77),
        log=log,
        disk_level="little",
        disk_bytes={"free": 5},
    )


class FakeBroker:
    """Broker whose event loop answers a scrape with `answer`; None if it is held."""

    def __init__(self, answer: Figures | None) -> None:
        self.answer = answer
        self.calls: list[list[str]] = []
        self.control = SimpleNamespace(collect=self._collect)
        self.users = SimpleNamespace(event_totals={"login": 3, "login failed": 2, "TLS failed": 1})
        self.committer = SimpleNamespace(totals=SimpleNamespace(times=HistogramCounter((0.1,))))

    def call_soon_threadsafe(self, function: Any, *arguments: Any) -> None:
        function(*arguments)

    def _collect(self, patterns: list[str], on_collected: Any) -> None:
        self.calls.append(patterns)
        self.on_collected = on_collected
        if self.answer is not None:
            on_collected(self.answer)

    def metrics(self, *patterns: str) -> BrokerMetrics:
        return BrokerMetrics(cast(Broker, self), cast(Any, self), HistogramCounter((0.1,)), patterns)


def figures(queues: Iterable[QueueReport] = (), matching: int | None = None) -> Figures:
    reports = list(queues)
    encode = msgspec.json.encode
    return Figures(encode(full_status()), encode(reports), len(reports) if matching is None else matching)


def report(name: str, **values: Any) -> QueueReport:
    return QueueReport(
        **{
            "name": name,
            **dict.fromkeys(("waiting", "unacknowledged", "consumers", "scheduled"), 0),
            **dict.fromkeys(("accepted", "acknowledged", "returned", "expired", "handled", "moved", "purged"), 0),
            "paused": False,
            "dead_lettered": {},
            "oldest_s": None,
            "rate": 0.0,
            **values,
        }
    )


def scrape(metrics: BrokerMetrics) -> dict[str, float]:
    return samples_of(asyncio.run(metrics.collect()))


def test_figures_of_the_status_are_metrics() -> None:
    samples = scrape(FakeBroker(figures()).metrics())
    prefix = "truenext_broker_"
    expected = {
        "queues": 2,
        'messages{state="waiting"}': 3,
        'messages{state="held"}': 0,
        "dead_letters": 1,
        "held_message_seconds": 0,
        "messages_accepted_total": 3,
        "messages_failed_again_total": 0,
        'messages_dead_lettered_total{reason="rejected"}': 0,
        "disk_level": 1,
        'logins_total{result="accepted"}': 3,
        'logins_total{result="failed"}': 2,
        'refusals_total{reason="right"}': 0,
        'refusals_total{reason="tls"}': 1,
        "journal_bytes": 300,
        "history_bytes_total": 77,
        "log_row": 9,
        'log_waits{for="standby"}': 1,
        'log_waits{for="database"}': 0,
        "log_standing_by": 1,
    }
    assert {name: samples[prefix + name] for name in expected} == expected
    assert not any(name.startswith("truenext_queue") for name in samples), "no name without metrics_queues"


def test_metrics_have_no_text_of_a_client_but_names_of_chosen_queues() -> None:
    # C33.3
    text = str(sorted(scrape(FakeBroker(figures()).metrics())))
    assert not any(word in text for word in ("orders", "db:5432", "host"))


def test_queue_with_metrics_of_its_own_has_its_name_as_a_label() -> None:
    dead = {"rejected": 4}
    queue = report(
        'a"b\\c', waiting=5, consumers=2, oldest_s=1.5, held_s=2.5, acknowledged=7, failed_again=3, dead_lettered=dead
    )
    samples = scrape(FakeBroker(figures([queue])).metrics("a*"))
    label = 'queue="a"b\\c"'
    expected = {
        f'messages{{{label},state="waiting"}}': 5,
        f"consumers{{{label}}}": 2,
        f"paused{{{label}}}": 0,
        f"oldest_message_seconds{{{label}}}": 1.5,
        f"held_message_seconds{{{label}}}": 2.5,
        f"messages_acknowledged_total{{{label}}}": 7,
        f"messages_failed_again_total{{{label}}}": 3,
        f'messages_dead_lettered_total{{{label},reason="rejected"}}': 4,
        f'messages_dead_lettered_total{{{label},reason="expired"}}': 0,
    }
    assert {name: samples[f"truenext_queue_{name}"] for name in expected} == expected


def test_patterns_that_match_too_many_queues_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    broker = FakeBroker(figures([report("a")], matching=3))
    found = broker.metrics("a", "b*")
    assert scrape(found)["truenext_broker_queues_left_out"] == 2
    scrape(found)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.message.startswith("metrics_queues matches too many queues")
    broker.answer = figures([report("a")])
    assert scrape(found)["truenext_broker_queues_left_out"] == 0
    broker.answer = figures([report("a")], matching=2)
    scrape(found)
    assert len(caplog.records) == 2


def test_scrape_shows_the_last_figures_with_their_age_while_the_event_loop_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "COLLECT_S", 0.03)
    broker = FakeBroker(None)
    found = broker.metrics()
    samples = scrape(found)
    assert samples["truenext_broker_commit_seconds_count"] == 0
    assert not any("figures_age" in name or "disk" in name for name in samples), "it has no figures yet"
    broker.on_collected(figures())
    broker.answer = None
    now = monotonic()
    later: Iterator[float] = iter([now, now + 50, now + 50])
    monkeypatch.setattr(metrics, "monotonic", lambda: next(later))
    samples = scrape(found)
    assert samples["truenext_broker_figures_age_seconds"] > 49
    assert samples["truenext_broker_queues"] == 2


def test_scrape_does_not_ask_the_event_loop_again_before_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "COLLECT_S", 0.02)
    broker = FakeBroker(None)
    found = broker.metrics()
    for _ in range(3):
        scrape(found)
    assert len(broker.calls) == 1
    broker.on_collected(figures())
    scrape(found)
    assert len(broker.calls) == 2


def test_process_without_a_broker_yet_has_metrics_of_its_state() -> None:
    samples = samples_of(health_metrics(assess_health(BrokerFacts(state=BrokerState.STANDING_BY))))
    assert samples['truenext_broker_state{state="standing by"}'] == 1
    assert samples['truenext_broker_state{state="running"}'] == samples["truenext_broker_ready"] == 0


def test_oldest_message_of_a_broker_is_no_dead_letter_and_none_of_spark() -> None:
    driver = ReportDriver()
    for queue in ("DLQ.orders", "Spark.source.main.1f"):
        driver.send(queue)
    status = driver.answer("status")
    assert (status["oldest_s"], status["dead_letters"], status["waiting"]) == (None, 1, 2)
    driver.send("orders")
    assert driver.answer("status")["oldest_s"] is not None


# ---- Queues with metrics of their own ----


def finished_report(driver: ReportDriver, *patterns: str) -> tuple[list[str], int]:
    """Return the names of the queues that may have metrics of their own, and their number."""
    steps = make_named_report(driver.engine, compile_patterns(patterns), 100)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            queues, matching = end.value
            return [each.name for each in msgspec.json.decode(queues, type=list[QueueReport])], matching


def test_temporary_queue_has_no_metrics_of_its_own() -> None:
    # Its name has the id of its connection, with which others could send to it.
    driver = ReportDriver()
    driver.subscribe("/temp-queue/answers")
    driver.send_to("/temp-queue/answers")
    driver.send("orders")
    assert finished_report(driver, ">", "*") == (["orders"], 1)


def test_named_report_has_the_first_queues_by_name_and_counts_all() -> None:
    driver = ReportDriver()
    names = [f"a.q{number * 7919 % 2345:04}" for number in range(2345)]
    for name in ("b", *names, "a"):
        driver.send(name)
    steps, count = make_named_report(driver.engine, compile_patterns(["a.>", "b"]), 100), 0
    while True:
        try:
            next(steps)
            count += 1
        except StopIteration as end:
            queues, matching = end.value
            break
    assert count >= len(names) / NAMES_PER_STEP + 100 / ITEMS_PER_STEP, "C33.5: no step for all"
    found = msgspec.json.decode(queues, type=list[QueueReport])
    assert [each.name for each in found] == sorted(names)[:100]
    assert matching == len(names) + 1
    assert {each.waiting for each in found} == {1}


@pytest.mark.parametrize("name", ["a", "a.b", "a.b.c", "b", "a\nb", "a.b\n", "", ".", "a..b", "a+b"])
@pytest.mark.parametrize("pattern", ["a", "a.*", "a.>", "*", ">", "*.b", "a+b", "*.*.c"])
def test_compiled_pattern_matches_what_a_pattern_matches(pattern: str, name: str) -> None:
    if "" not in name.split("."):
        assert bool(compile_patterns([pattern])(name)) == matches(pattern.split("."), name.split("."))
        assert bool(compile_patterns(["x.y", pattern])(name)) == bool(compile_patterns([pattern])(name))


# ---- Logins and refusals ----


def test_events_of_the_security_log_are_counted_although_they_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = SecurityLog(lambda: 0.0, lambda: 0)
    with caplog.at_level(logging.ERROR):
        for _ in range(EVENTS_PER_SECOND_MAX + 5):
            log.log(logging.WARNING, "login failed", address="10.0.0.1", user="shop")
        log.log(logging.INFO, "login", address="10.0.0.1", user="shop")
    assert (log.totals, caplog.records) == ({"login failed": EVENTS_PER_SECOND_MAX + 5, "login": 1}, [])
