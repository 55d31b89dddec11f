"""Tests of the drawing of flows, as text and as HTML."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.stages.recorded_events import BEGINNING_US, Recorder, decoded
from truenext.flows.drawing import (
    BAR_KINDS,
    LEGEND_TEXT,
    LINES_MAX,
    Bar,
    format_duration,
    to_html,
    to_text,
    waterfall_lines,
)
from truenext.flows.events import OUTCOMES
from truenext.flows.model import RecordedFlow, executions_of, flows_of

ROOT = Path(__file__).parents[2]
EVIL = "<img src=x onerror=alert(1)>'\"&\x1b[31m\u202e\n"


def drawn_flow(recorder: Recorder) -> RecordedFlow:
    (flow,) = flows_of(executions_of(decoded(recorder.events)))
    return flow


def order_flow() -> RecordedFlow:
    """Return a flow of three messages: one that is tried twice, and one that becomes a dead letter."""
    recorder = Recorder()
    at = BEGINNING_US // 1000
    recorder.end(recorder.start("a", 1.0, accepted_ms=at), 2.0, total_us=1_000_000)
    for attempt, start, end, outcome in ((1, 3.0, 4.0, "failed"), (2, 7.0, 8.0, "completed")):
        facts: dict[str, Any] = {
            "stage": "price",
            "queue": "price",
            "parent": "a",
            "accepted_ms": at + 2000,
            "attempt": attempt,
        }
        execution = recorder.start("b", start, process=1, **facts)
        error = "Busy" if outcome == "failed" else None
        recorder.end(execution, end, outcome, error=error, total_us=1_000_000)
    facts = {"stage": "mail", "queue": "mail", "parent": "b", "accepted_ms": at + 8000}
    recorder.end(
        recorder.start("c", 8.5, **facts),
        10.0,
        "rejected",
        error="BadMail",
        total_us=1_500_000,
        given_up_for="rejected",
    )
    for each in recorder.events:
        each["trace"] = "order 7"
    return drawn_flow(recorder)


def test_lines_have_waits_works_outcomes_and_bars() -> None:
    lines = waterfall_lines(order_flow())
    assert [(each.stage, each.depth, each.waited_ms, each.worked_ms) for each in lines] == [
        ("order.place", 0, 1000.0, 1000.0),
        ("price", 1, 1000.0, 2000.0),
        ("mail", 2, 500.0, 1500.0),
    ]
    assert [each.outcome for each in lines] == [
        "completed",
        "failed: Busy, then completed",
        "rejected: BadMail; a dead letter",
    ]
    assert lines[1].bars == (
        Bar("waited", 0.2, 0.3),
        Bar("failed", 0.3, 0.4),
        Bar("waited", 0.4, 0.7),
        Bar("completed", 0.7, 0.8),
    )


def test_messages_are_below_the_one_whose_stage_sent_them() -> None:
    recorder = Recorder()
    # The children of two parents start in turns.
    for at, (message, parent) in enumerate((("a", ""), ("b", "a"), ("c", "a"), ("b1", "b"), ("c1", "c"), ("b2", "b"))):
        recorder.end(recorder.start(message, at, parent=parent), at + 0.5)
    # Its parent's file is deleted, and a foreign program has made a circle.
    for at, (message, parent) in enumerate((("d", "gone"), ("x", "y"), ("y", "x"), ("z", "z")), 10):
        recorder.start(message, at, parent=parent)
    lines = waterfall_lines(drawn_flow(recorder))
    assert [f"{each.depth} {each.message}" for each in lines] == [
        *("0 a", "1 b", "2 b1", "2 b2", "1 c", "2 c1"),
        *("0 d", "0 x", "1 y", "0 z"),
    ]


def test_every_outcome_has_a_bar() -> None:
    assert OUTCOMES | {"interrupted", "not ended"} == BAR_KINDS.keys()


def test_execution_without_an_end_was_interrupted_only_if_the_message_came_again() -> None:
    recorder = Recorder()
    recorder.start("a", 1.0)
    assert waterfall_lines(drawn_flow(recorder))[0].outcome == "not ended"
    recorder.start("a", 2.0, deliveries=2)
    assert waterfall_lines(drawn_flow(recorder))[0].outcome == "interrupted, then not ended"


def test_failure_that_a_stage_handles_is_on_two_lines_and_no_dead_letter() -> None:
    recorder = Recorder()
    recorder.end(recorder.start("a", 1.0), 2.0, "failed", error="Busy", given_up_for="attempts exhausted")
    recorder.end(recorder.start("a", 3.0, stage="order.place.stage.failed", queue="order.place.stage.failed"), 4.0)
    lines = waterfall_lines(drawn_flow(recorder))
    assert [each.outcome for each in lines] == ["failed: Busy; handled", "completed"]


def test_copies_for_subscribers_are_a_line_each() -> None:
    recorder = Recorder()
    recorder.end(recorder.start("a", 1.0, stage="mail", queue=None), 2.0, "rejected", given_up_for="rejected")
    recorder.end(recorder.start("a", 1.5, stage="stock", queue=None), 2.0)
    lines = waterfall_lines(drawn_flow(recorder))
    assert [(each.stage, each.outcome) for each in lines] == [
        ("mail", "rejected; a dead letter"),
        ("stock", "completed"),
    ]


def test_text_of_a_flow_is_that_of_the_page() -> None:
    text = to_text(order_flow(), width=100)
    assert text.splitlines() == [
        "order 7: 10 s, 3 messages, 4 runs, 1 given up",
        "             waited  worked  0                                10 s",
        "order.place     1 s     1 s  ...====                                completed",
        "  price         1 s     2 s         ....xxxx..........=====         failed: Busy, then completed",
        "    mail     500 ms   1.5 s                               ..xxxxxx  rejected: BadMail; a dead letter",
    ]
    assert f"{text}\n\n{LEGEND_TEXT}\n" in (ROOT / "docs/stages-running.md").read_text()


def test_text_is_never_wider_than_the_terminal_without_long_outcomes() -> None:
    for width in (60, 80, 200):
        lines = to_text(order_flow(), width=width).splitlines()
        assert max(map(len, lines)) <= max(width, 90)


def test_text_controls_no_terminal() -> None:
    recorder = Recorder()
    recorder.end(recorder.start("a", 1.0, stage=EVIL, trace=EVIL), 2.0, "failed", error=EVIL)
    text = to_text(drawn_flow(recorder))
    assert all(each.isprintable() or each == "\n" for each in text)
    assert len(text.splitlines()) == 3


class Parser(HTMLParser):
    """Parser that collects what a page's policy forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.forbidden: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.forbidden += [f"{tag} {name}" for name, _ in attrs if name == "style" or name.startswith("on")]
        if tag in ("script", "style", "img", "link", "iframe"):
            self.forbidden.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_balanced_and_has_neither_style_nor_script_nor_markup_of_others() -> None:
    recorder = Recorder()
    recorder.end(recorder.start(EVIL, 1.0, stage=EVIL, trace=EVIL), 2.0, "failed", error=EVIL)
    for flow in (drawn_flow(recorder), order_flow()):
        parser = Parser()
        parser.feed(to_html(flow))
        assert not parser.open and not parser.forbidden
    assert to_html(drawn_flow(recorder)).count(html.escape(EVIL)) == 3


def test_html_of_bars_is_within_the_line_and_never_too_narrow_to_be_seen() -> None:
    recorder = Recorder()
    recorder.end(recorder.start("a", 0.0), 0.001)
    recorder.end(recorder.start("b", 9999.999), 10_000.0)
    for x, width in re.findall(r'x="([0-9.]+)" width="([0-9.]+)"', to_html(drawn_flow(recorder))):
        assert float(x) >= 0 and float(width) >= 4 and float(x) + float(width) <= 1000


def test_large_flow_is_drawn_in_part() -> None:
    recorder = Recorder()
    for number in range(LINES_MAX + 5):
        recorder.end(recorder.start(f"m{number}", number), number + 1)
    drawn = to_html(drawn_flow(recorder))
    assert drawn.count("<tr><td") == LINES_MAX
    assert "5 more messages." in drawn
    assert to_text(drawn_flow(recorder), lines_max=3).endswith(f"\n{LINES_MAX + 2} more messages")
    drawn_with_omitted = drawn_flow(recorder)
    drawn_with_omitted.omitted = 1
    assert "1 more run left out" in to_text(drawn_with_omitted)


def test_durations_keep_few_digits() -> None:
    assert [format_duration(ms) for ms in (0, 0.001, 9.96, 999, 1000, 119_000, 121_000, 7_300_000)] == [
        "0 ms",
        "0.001 ms",
        "10 ms",
        "999 ms",
        "1 s",
        "119 s",
        "2 min",
        "2 h",
    ]
