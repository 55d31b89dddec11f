"""Tests of the report of an audit: one HTML file that a browser draws, safe with any text in it."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pandas", reason="the report needs truenext[spark]")
pytest.importorskip("vl_convert", reason="the report needs truenext[spark]")

import pandas
import vl_convert

from truenext.spark import plots, waterfalls
from truenext.spark.report import ROWS_MAX, AuditedHistory, write_comparison
from truenext.spark.verdict import FindingSummary, Verdict

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\u2028<!--&"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VIOLATION = ["kind", "queue", "event", "at", "sequence", "priority", "consumer", "witness_sequence", "witness_priority"]
SCRIPT = re.compile(r'<script type="application/json" id="specs">(.*?)</script>', re.DOTALL)


def broken(sentence: str, *notes: str) -> Verdict:
    return Verdict(40, (FindingSummary("inversion", 1, sentence),), notes)


def tables(queue: str = "orders", *, is_right: bool = True) -> dict[str, pandas.DataFrame]:
    """Make tables of 30 persistent messages of priority 4 and 10 transient ones of priority 9, delivered as
    contracted or in order of arrival."""
    arrivals = [*range(31, 41), *range(1, 31)] if is_right else list(range(1, 41))
    positions = pandas.DataFrame(
        {
            "queue": queue,
            "priority": [9 if arrival > 30 else 4 for arrival in arrivals],
            "persistent": [arrival <= 30 for arrival in arrivals],
            "arrival": arrivals,
            "delivery": range(1, 41),
        }
    )
    latency = pandas.DataFrame(
        {
            "queue": queue,
            "priority": [9, 4],
            "measure": "visible to dispatched",
            "p50": [0.0, 2.0],
            "p90": [1.5, 30.0],
            "p99": [4.0, 200.0],
            "max": [5.0, 300.0],
            "count": [10, 30],
        }
    )
    at = pandas.date_range("2026-01-01", periods=5000, freq="ms", tz="UTC")
    depth = pandas.DataFrame({"queue": queue, "at": at, "waiting": range(5000), "held": 1})
    violations = pandas.DataFrame(
        [] if is_right else [("inversion", queue, 41, at[0], 1, 4, 1, 31, 9)] * (ROWS_MAX + 20),
        columns=VIOLATION,
    )
    return {"positions": positions, "latency": latency, "depth": depth, "violations": violations}


def write_report(found: dict[str, pandas.DataFrame], verdict: Verdict, path: Path, *, title: str) -> None:
    """Write the page of one run."""
    write_comparison([AuditedHistory(title, found, verdict)], path, title=title)


def specs(page: str) -> list[dict[str, Any]]:
    found = SCRIPT.search(page)
    assert found is not None
    return list(json.loads(found[1]))


def dom(page: Path, folder: Path) -> str:
    """Return the DOM of the page after its scripts have run."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here to draw the page")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--virtual-time-budget=5000", "--dump-dom", page.as_uri()],
        env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.partition("</main>")[0]


def test_text_of_the_verdict_comes_before_plots(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(
        tables(is_right=False),
        broken("An inversion.", "40 messages"),
        path,
        title="A run",
    )
    page = path.read_text()
    positions = [page.index(text) for text in ("The contract was broken", "An inversion.", "40 messages", "data-spec")]
    assert positions == sorted(positions)
    assert "The contract held" not in page
    assert f"The first {ROWS_MAX} of {ROWS_MAX + 20} rows." in page
    assert list(tmp_path.iterdir()) == [path]


def test_report_requests_nothing_from_a_network(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(tables(), Verdict(1), path, title="A run")
    page = path.read_text()
    assert "default-src 'none'" in page
    assert not re.search(r'<(script|link|img|iframe)[^>]*\s(src|href)="', page.partition("</style>")[0])
    assert not re.search(r"@import|url\(", page.partition("</style>")[0])


def test_text_from_outside_is_never_markup(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    redelivery = pandas.DataFrame({"queue": [EVIL], EVIL: [1.5]})
    runs = [
        AuditedHistory(
            EVIL,
            {**tables(EVIL, is_right=False), "redelivery": redelivery},
            broken(EVIL, EVIL),
        ),
        AuditedHistory("other", tables(EVIL), Verdict(1)),
    ]
    write_comparison(runs, path, title=EVIL)
    page = path.read_text()
    assert "<script>document.title" not in page
    assert "<img" not in page.partition("</main>")[0]
    assert html.escape(EVIL) in page
    assert "owned" not in json.dumps(specs(page)), "names have no business in the plots"


def test_runs_of_one_queue_each_stand_side_by_side_to_one_scale(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    wrong = tables("a", is_right=False)
    right = {**tables("b"), "positions": tables("b")["positions"].head(20)}
    write_comparison(
        [AuditedHistory("one", wrong, broken("x")), AuditedHistory("two", right, Verdict(1))], path, title="Two"
    )
    drawn = specs(path.read_text())
    orders = [spec for spec in drawn if "vconcat" in spec]
    assert len(orders) == 2
    scales = [spec["vconcat"][0]["encoding"]["x"]["scale"]["domain"] for spec in orders]
    assert scales == [[0, 40], [0, 40]]


def test_a_queue_of_one_run_among_several_is_drawn_for_that_run_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    both = {name: pandas.concat([tables("a")[name], tables("b")[name]]) for name in tables()}
    write_comparison(
        [AuditedHistory("one", both, Verdict(1)), AuditedHistory("two", tables("a"), Verdict(1))], path, title="Two"
    )
    page = path.read_text()
    assert len([spec for spec in specs(page) if "vconcat" in spec]) == 3
    assert "one · b" in page and "two · b" not in page and "No rows" not in page


def test_sections_of_the_caller_come_right_after_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    kills = pandas.DataFrame({"killed": [EVIL]})
    write_comparison([AuditedHistory("one", tables(), Verdict(1))], path, title="One", sections={EVIL: kills})
    body = path.read_text().partition("</main>")[0]
    assert body.count(html.escape(EVIL)) == 2 and "<img" not in body
    assert body.index("The contract held") < body.index(html.escape(EVIL)) < body.index("<h2>Order</h2>")


def test_plots_are_valid_vega_lite() -> None:
    data = tables()
    depth = data["depth"].assign(seconds=range(5000))
    for spec in (
        plots.order_plot(data["positions"], deliveries=40, arrivals=40),
        plots.latency_plot(data["latency"], low=0.0, high=200.0),
        plots.depth_plot(depth, most=5000, seconds=5000.0),
    ):
        for part in spec.get("vconcat", [spec]):
            part["width"] = 300
        assert "<path" in vl_convert.vegalite_to_svg(spec, vl_version="6.4")


@pytest.mark.parametrize("kind", ["bool", "boolean", "object"])
def test_persistence_is_a_number_whatever_type_it_came_as(kind: str) -> None:
    positions = tables()["positions"].astype({"persistent": kind})
    spec = plots.order_plot(positions, deliveries=40, arrivals=40)
    assert spec["vconcat"][0]["data"]["values"].splitlines()[1] == "1,31,9,0"


def test_a_plot_of_many_messages_is_thinned_and_the_peaks_of_depth_are_kept() -> None:
    count = 5 * plots.POINTS_MAX
    numbers = range(1, count + 1)
    positions = pandas.DataFrame({"delivery": numbers, "arrival": numbers, "priority": 4, "persistent": True})
    spec = plots.order_plot(positions, deliveries=count, arrivals=count)
    assert len(spec["vconcat"][0]["data"]["values"].splitlines()) - 1 <= plots.POINTS_MAX
    depth = pandas.DataFrame({"seconds": range(50_000), "waiting": 1, "held": 0})
    depth.loc[31_234, "waiting"] = 777
    assert ",777," in plots.depth_plot(depth, most=777, seconds=50_000.0)["data"]["values"]


def test_a_sample_is_called_one_and_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    data = tables()
    write_report(data, Verdict(1), path, title="All")
    assert "Priority 9: 10 messages, the last delivered as number <b>10</b> of 40." in path.read_text()
    write_report({"positions": data["positions"].iloc[::3]}, Verdict(1), path, title="A sample")
    assert "Priority 9: the last delivered as number <b>10</b> of 40. A sample of the messages." in path.read_text()


def test_a_run_without_tables_is_a_page_too(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report({}, Verdict(0), path, title="Nothing")
    assert "The contract held" in path.read_text()
    empty = {name: table.head(0) for name, table in tables().items()}
    write_report(empty, Verdict(0), path, title="Nothing")
    assert "The contract held" in path.read_text()


def test_a_browser_draws_every_plot_and_runs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    runs = [
        AuditedHistory(EVIL, tables(EVIL, is_right=False), broken(EVIL)),
        AuditedHistory("truenext", tables(EVIL), Verdict(1)),
    ]
    write_comparison(runs, path, title="Two brokers")
    page = dom(path, tmp_path / "home")
    assert "could not be drawn" not in page
    assert page.count("<canvas") == len(specs(path.read_text())) == 6
    assert "<title>Two brokers</title>" in page


def runs_of(flow: str, *, trace: str = "order 7", messages: int = 1, given_up: int = 0, **other: Any) -> list[Any]:
    """Return the executions of one flow: messages one after the other, each sent by the one before."""
    started = pandas.Timestamp("2026-01-01", tz="UTC")
    return [
        {
            "flow": flow,
            "trace": trace,
            "message": f"{flow} {number}",
            "parent": f"{flow} {number - 1}" if number else "",
            "stage": "order.place",
            "accepted_at": started + pandas.Timedelta(number, "s"),
            "dispatched_at": started + pandas.Timedelta(number + 0.25, "s"),
            "started_at": started + pandas.Timedelta(number + 0.5, "s"),
            "ended_at": started + pandas.Timedelta(number + 1, "s"),
            "outcome": "completed",
            "error": None,
            "total_us": 500_000,
            "end_kind": "acknowledged",
            "flow_started_at": started,
            "seconds": float(messages),
            "messages": messages,
            "runs": messages,
            "failures": 0,
            "given_up": given_up,
            "in_progress": 0,
            "position": number + 1,
        }
        | other
        for number in range(messages)
    ]


def test_a_flow_has_a_line_for_each_message_with_what_it_waited_and_what_was_worked() -> None:
    drawn = waterfalls.waterfalls_html(pandas.DataFrame(runs_of("f", messages=4)))
    assert 'order 7 <span class="note">4 s · 4 messages</span>' in drawn
    rows = re.findall(r"<tr><td class=.*?</tr>", drawn)
    assert len(rows) == 4
    assert [re.findall(r'<td class="depth-(.)"', row)[0] for row in rows] == ["0", "1", "2", "3"]
    assert '<td class="number">250 ms</td><td class="number">500 ms</td><td>completed</td>' in rows[1]
    assert '<rect class="waited" x="250.0" width="125.0" height="10"/>' in rows[1]
    assert '<rect class="completed" x="375.0" width="125.0" height="10"/>' in rows[1]


def test_runs_of_one_message_are_on_one_line_and_say_what_became_of_them() -> None:
    first, second, third = (runs_of("f", given_up=1, position=position)[0] for position in (1, 2, 3))
    first |= {"outcome": None, "ended_at": pandas.NaT, "total_us": None}
    second |= {"outcome": "failed", "error": "Busy"}
    third |= {"outcome": "failed", "error": "Busy", "end_kind": "dead-lettered"}
    drawn = waterfalls.waterfalls_html(pandas.DataFrame([third, second, first]))
    assert drawn.count("<tr><td") == 1
    assert "<td>interrupted, then failed: Busy 2 times; a dead letter</td>" in drawn
    assert "1 given up" in drawn.partition("</summary>")[0]
    assert "Given up" in drawn and "The slowest" not in drawn


def test_a_page_of_many_long_flows_stays_small() -> None:
    rows = [row for number in range(100) for row in runs_of(f"f{number}", messages=60, trace="t" * 200)]
    drawn = waterfalls.waterfalls_html(pandas.DataFrame(rows))
    assert drawn.count("<details") == 100
    assert drawn.count('<details class="flow" open>') == waterfalls.OPEN_FLOWS
    assert drawn.count("20 more messages.") == 100
    assert len(drawn) < 2_500_000


def test_text_of_flows_is_never_markup(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    flow = pandas.DataFrame(runs_of(EVIL, trace=EVIL, stage=EVIL, outcome="failed", error=EVIL))
    runs = [
        AuditedHistory("a", {"waterfalls": flow}, Verdict(1)),
        AuditedHistory("b", {"waterfalls": flow.head(0)}, Verdict(1)),
    ]
    write_comparison(runs, path, title="x")
    body = path.read_text().partition("</main>")[0]
    assert "<img" not in body and "<script" not in body
    assert body.count(html.escape(EVIL)) == 3
    assert '<p class="note">None.</p>' in body
