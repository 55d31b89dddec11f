"""Tests of audits that go on from a state: each finding is told once, and none is missing.

TRUENEXT_EXAMPLES=5000 pytest tests/spark/test_state.py   longer
TRUENEXT_SEED=7 pytest tests/spark/test_state.py          the same histories again
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pandas
import pytest
from pyspark.sql import DataFrame

from tests.spark import pieces as pieces_module
from tests.spark.faults import Fault, planted
from tests.spark.histories import Event, RandomHistory, joined
from tests.spark.pieces import Found, audit_pieces, judge_in_pieces, keys, pieces
from tests.spark.plain import outcomes_of, rows_of
from tests.spark.policies import alternating_buckets, serve, three_classes, true_next, two_buckets
from tests.spark.test_audit import AUDITS, ODD_NAME, of_broker
from tests.spark.test_consumers import Story
from tests.spark.test_cuts import EXAMPLES, random_history, seeds
from tests.spark.waiting import never_touched
from truenext.errors import ConfigurationError, HistoryError
from truenext.spark.audit.audit import audit
from truenext.spark.audit.command import run_audit
from truenext.spark.audit.continued import write_part
from truenext.spark.audit.cut import QueueRow
from truenext.spark.audit.model import EventCode, Finding
from truenext.spark.audit.queue_audit import QueueAudit
from truenext.spark.audit.resume import SavedAudit
from truenext.spark.audit.section_plan import SECTION_EVENTS
from truenext.spark.audit.section_sweep import _SectionAudit
from truenext.spark.audit.state import AuditState, StateFolder

STUCK_SECONDS = 10.0
Frame = Callable[[list[Event]], DataFrame]

# See test_sections.py.
pytestmark = pytest.mark.timeout(900 * AUDITS + EXAMPLES)


def random_cuts(events: list[Event], numbers: random.Random) -> list[int]:
    """Return the first events of all pieces but the first."""
    return sorted(numbers.sample([each["event"] for each in events[1:]], min(numbers.randint(1, 6), len(events) - 1)))


def of_whole(events: list[Event]) -> list[Found]:
    names = Finding.__struct_fields__
    return [
        (each["queue"], Finding(**{name: each[name] for name in names}))
        for each in outcomes_of(events, STUCK_SECONDS)
        if each["row"] == "finding"
    ]


# ---- Pieces in plain Python ----


def check_pieces(events: list[Event], cuts: list[int]) -> None:
    """Check that pieces tell each finding of the whole history once, and no other.

    A piece tells an idle time that is too long even if a gap then hides its end, and a loss in a crash even if the
    queue's next row is a gap, which might have hidden what the start had recovered.
    """
    found = [*chain.from_iterable(judge_in_pieces(events, cuts))]
    told, expected = keys(found), keys(of_whole(events))
    hidden = [each for each in told if (each[1] == "stuck" or each[-1] == "not recovered") and each not in expected]
    assert not hidden or has_gap(events)
    assert told == sorted([*expected, *hidden])


def test_pieces_of_a_random_history_find_each_finding_of_the_whole_once() -> None:
    for seed in seeds(EXAMPLES):
        events = random_history(seed)
        if not has_doubt(events):
            check_pieces(events, random_cuts(events, random.Random(seed)))


def test_sweeps_that_go_on_from_saved_rows_find_what_the_audits_of_the_queues_find() -> None:
    for seed in seeds(EXAMPLES):
        events = random_history(seed)
        check_sweeps(events, random_cuts(events, random.Random(seed)))


def check_sweeps(events: list[Event], cuts: list[int]) -> None:
    expected = [keys(each) for each in judge_in_pieces(events, cuts)]
    assert [keys(each) for each in pieces_module.sweep_in_pieces(events, cuts)] == expected


def test_untouched_messages_are_found_by_starts_or_are_in_doubt() -> None:
    for seed in seeds(EXAMPLES):
        check_sweeps(*never_touched(seed))


def has_doubt(events: list[Event]) -> bool:
    """Return whether a later start shows that a message was durable. A piece before it cannot know that."""
    rows = rows_of(events)
    starts = {each["event"] for each in rows if each["code"] == EventCode.RUN_STARTED}
    return any(each["code"] == EventCode.ACCEPTED and each["visible_event"] in starts for each in rows)


def has_gap(events: list[Event]) -> bool:
    return any(after["event"] - before["event"] > 1 for before, after in pairwise(events))


@pytest.mark.parametrize("policy", [two_buckets, alternating_buckets, three_classes])
def test_violations_of_a_policy_are_told_once_in_seven_pieces(policy: Callable[..., Any]) -> None:
    history, wrong = serve(policy, 1, messages=100)
    cuts = [history[len(history) * part // 7]["event"] for part in range(1, 7)]
    check_pieces(history, cuts)
    assert wrong


def test_idle_time_over_three_cuts_is_told_once_at_the_first_where_it_is_too_long() -> None:
    story = Story(messages=1, window=1).wait(6).add("paused", queue="another").wait(6)
    story.add("resumed", queue="another").wait(6).add("paused", queue="another").wait(1).dispatch(1)
    last = story.events[-1]["event"]
    found = judge_in_pieces(story.events, [last - 2, last - 1, last])
    assert [[each.kind for _, each in piece] for piece in found] == [[], ["stuck"], [], []]
    ((_, stuck),) = found[1]
    assert 12_000_000 <= stuck.duration < 13_000_000


def test_message_that_becomes_durable_after_the_cut_is_judged_by_its_commit() -> None:
    """Without the commit the message of priority 9 would never be overtaken."""
    story = Story(messages=1)
    story.add("accepted", sequence=2, priority=9, persistent=True, size=1, batch=1)
    story.add("committed", queue=None, batch=1).dispatch(1)
    cut = story.events[-2]["event"]
    found = judge_in_pieces(story.events, [cut])
    assert [[each.kind for _, each in piece] for piece in found] == [[], ["inversion"]]


# ---- Pieces in Spark ----


def judge_by_spark(
    frame: Frame,
    events: list[Event],
    cuts: list[int],
    folder: Path,
    section_events: int = SECTION_EVENTS,
    queue: str | None = None,
) -> list[tuple[list[tuple[Any, ...]], ...]]:
    """Return for the tables of each piece what `listed`, `places` and `depths` return."""
    saved: SavedAudit | None = None
    found: list[tuple[list[tuple[Any, ...]], ...]] = []
    for number, known in enumerate(pieces(events, cuts)):
        history = frame(known)
        assert saved is None or saved.has_new_events(history)
        options: dict[str, Any] = {"stuck_seconds": STUCK_SECONDS, "goes_on": True, "section_events": section_events}
        results = audit(history, queue=queue, saved=saved, **options)
        found.append((listed(results.tables), places(results.tables), depths(results.tables)))
        assert results.next is not None
        path = str(folder / f"cut-{number}")
        results.next.cut.write.parquet(path)
        encoded = msgspec.json.encode(results.next.state)
        saved = SavedAudit(msgspec.json.decode(encoded, type=AuditState), history.sparkSession.read.parquet(path))
        results.unpersist()
    return found


def listed(tables: dict[str, DataFrame]) -> list[tuple[Any, ...]]:
    """Return the findings of an audit's tables: queue, kind, event, sequence."""
    rows = []
    for name in ("violations", "lost", "duplicates", "consumers", "stuck"):
        table = tables[name]
        for row in table.collect():
            kind = row["kind"] if "kind" in table.columns else name
            rows.append((row["queue"], kind, row["event"], -1 if row["sequence"] is None else row["sequence"]))
    return sorted(rows)


def places(tables: dict[str, DataFrame]) -> list[tuple[Any, ...]]:
    """Return the positions at which messages had arrived, and were dispatched first."""
    return sorted(map(tuple, tables["positions"].select("queue", "sequence", "arrival", "delivery").collect()))


def depths(tables: dict[str, DataFrame]) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, tables["depth"].select("queue", "event", "waiting", "held").collect()))


def expected_in_pieces(events: list[Event], cuts: list[int]) -> list[tuple[list[tuple[Any, ...]], ...]]:
    expected: list[tuple[list[tuple[Any, ...]], ...]] = []
    for piece in audit_pieces(events, cuts):
        findings = [(queue, each.kind, each.event, each.sequence) for queue, audit in piece for each in audit.findings]
        messages = [(queue, each) for queue, audit in piece for each in audit.finished if each.delivery > 0]
        of_messages = [(queue, each.sequence, each.arrival, each.delivery) for queue, each in messages]
        points = [(queue, event, *rest) for queue, audit in piece for _, event, _, *rest in audit.depth_points]
        expected.append((sorted(findings), sorted(of_messages), sorted(points)))
    return expected


@pytest.mark.drawn
@pytest.mark.parametrize("section_events", [SECTION_EVENTS, 10], ids=["whole queues", "sections"])
def test_spark_finds_in_each_piece_what_is_found_without_it(section_events: int, frame: Frame, tmp_path: Path) -> None:
    for seed in seeds(AUDITS):
        events = joined(RandomHistory(each, 60, faults=0.3).events for each in range(seed, seed + 4))
        cuts = random_cuts(events, random.Random(seed))[:3]
        found = judge_by_spark(frame, events, cuts, tmp_path / str(seed), section_events)
        assert found == expected_in_pieces(events, cuts)


@pytest.mark.drawn
def test_spark_finds_in_sections_of_one_queue_what_is_found_without_it(frame: Frame, tmp_path: Path) -> None:
    for seed in seeds(AUDITS):
        rng = random.Random(seed)
        events = joined(RandomHistory(each, 60, faults=0.3).events for each in range(seed, seed + 4))
        queue = rng.choice(sorted({each["queue"] for each in events if each["queue"] is not None}))
        cuts = random_cuts(events, rng)[:3]
        found = judge_by_spark(frame, events, cuts, tmp_path / str(seed), 10, queue)
        expected = expected_in_pieces(events, cuts)
        assert found == [tuple([row for row in rows if row[0] == queue] for rows in piece) for piece in expected]


@pytest.mark.drawn
def test_sections_behind_a_state_follow_a_start_and_a_message_of_two_queues(frame: Frame, tmp_path: Path) -> None:
    """Fixed: message 40, which was not durable at the cut, had two saved rows, and each of them twice."""
    story = Story(mode="client pulling", messages=12, window=3).request(3)
    story.add("accepted", sequence=30, priority=9, persistent=True, size=1, batch=0, group=7)
    story.add("accepted", sequence=40, priority=4, persistent=True, size=1, batch=5)
    for sequence in range(21, 25):
        story.add("accepted", sequence=sequence, priority=1, persistent=True, size=1, batch=0)
    story.dispatch(30).add("dispatched", queue="another", sequence=40, consumer=9, deliveries=1)
    cuts = [story.events[-1]["event"] + 1]
    story.add("committed", queue=None, batch=5).dispatch(1, 2).acknowledge(30, 1, 2).request(9).dispatch(*range(3, 7))
    story.acknowledge(*range(3, 7)).add("run-started", queue=None, reason="clean", run=2)
    cuts.append(story.events[-1]["event"] + 1)
    # Two of 11 are lost, so that untouched messages are in doubt.
    story.add("recovered", count=9, run=2).subscribe(2, window=9).dispatch(*range(7, 13), 40, to=2)
    story.acknowledge(*range(7, 13)).accept(*range(50, 60)).dispatch(*range(50, 60), to=2)
    events = [each | {"run": 2 if each["event"] >= cuts[1] else each["run"]} for each in story.events]
    for some in (cuts, cuts[:1]):
        found = judge_by_spark(frame, events, some, tmp_path / str(len(some)), section_events=4)
        assert found == expected_in_pieces(events, some)


@pytest.mark.drawn
def test_command_judges_each_event_once_and_appends_tables_and_pages(frame: Frame, tmp_path: Path) -> None:
    """Three audits of a growing history, and one of no new events."""
    history, wrong = serve(two_buckets, 1, messages=60)
    data, state, out = (tmp_path / ODD_NAME / name for name in ("data", "state", "out"))
    parts = [history[len(history) * part // 3 : len(history) * (part + 1) // 3] for part in range(3)]
    verdicts = []
    for part in parts:
        frame(part).write.mode("append").parquet(str(data / "history" / "events"))
        verdicts += run_audit([str(data)], state=state, out=out)
    assert sum(each.events for each in verdicts) == len(history)
    whole = violations_of_whole(frame, history)
    table = pandas.read_parquet(out / "violations")
    assert sorted(zip(table["kind"], table["event"], strict=True)) == whole
    assert len(table["first_event"].unique()) <= 3
    assert sum(wrong.values()) == len(table)
    pages = {each.name for each in out.glob("*.html")}
    assert pages == {"report.html", *(f"report-{part[0]['event']}.html" for part in parts)}
    (none,) = run_audit([str(data)], state=state, out=out)
    assert (none.events, none.has_contract_held, len(none.notes)) == (0, True, 1)
    assert len(pandas.read_parquet(out / "violations")) == len(table)


def violations_of_whole(frame: Frame, history: list[Event]) -> list[tuple[str, int]]:
    results = audit(frame(history), stuck_seconds=STUCK_SECONDS)
    return sorted((row["kind"], row["event"]) for row in results.tables["violations"].collect())


@pytest.mark.drawn
def test_deleted_history_between_two_audits_is_named(frame: Frame) -> None:
    history, _ = serve(true_next, 3, messages=60)
    saved = first_piece(frame, history[:60])
    results = audit(frame(history[100:]), goes_on=True, saved=saved)
    assert results.verdict.has_contract_held
    assert results.verdict.notes == (
        f"Events 61 to {history[100]['event'] - 1}, after the last audit, are no longer in the history; what happened "
        "there was not judged: audit more often, or keep more history.",
    )


def first_piece(frame: Frame, events: list[Event]) -> SavedAudit:
    saved = audit(frame(events), goes_on=True).next
    assert saved is not None
    return saved


@pytest.mark.drawn
def test_state_of_another_broker_is_refused_by_name(frame: Frame) -> None:
    history, _ = serve(true_next, 3, messages=60)
    saved = first_piece(frame, of_broker(history[:60], "0000000a"))
    assert saved.state.store == "0000000a"
    other = [*history[:60], *of_broker(history[:20], "0000000b", run=2, after=60)]
    with pytest.raises(HistoryError, match="state is that of the broker with the identity 0000000a, but from run 2 on"):
        audit(frame(other), goes_on=True, saved=saved)
    for wrong in (history[:50], [each | {"run": 0} for each in history], late(history)):
        with pytest.raises(HistoryError, match="does not go on from event 60"):
            saved.has_new_events(frame(wrong))
    assert not saved.has_new_events(frame(history[:60]))


def late(history: list[Event]) -> list[Event]:
    return [each | {"at": each["at"].replace(year=2027)} for each in history]


# ---- Refused before Spark starts ----


def test_folder_with_other_files_is_refused_as_a_state_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "orders.csv").touch()
    with (
        pytest.raises(ConfigurationError, match=r"has other files than a state, such as orders\.csv"),
        StateFolder.locked(tmp_path),
    ):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["orders.csv"]


def test_state_is_used_by_one_audit_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.spark.audit.command.start", None)
    with StateFolder.locked(tmp_path), pytest.raises(ConfigurationError, match="another audit uses the state in"):
        run_audit([tmp_path], state=tmp_path)
    with StateFolder.locked(tmp_path) as state:
        assert state.read() is None


@pytest.mark.parametrize(
    ("folders", "queue", "error"),
    [
        (("one",), "orders", "the state is that of an audit of all queues: audit the same"),
        (("one",), None, None),
        (("one", "two"), None, "exactly one broker: .* has 2"),
        ((), None, "no history in"),
    ],
)
def test_another_queue_or_number_of_histories_is_refused_before_spark_starts(
    folders: tuple[str, ...], queue: str | None, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: it took the start of Spark to see that."""
    monkeypatch.setattr("truenext.spark.audit.command._start", None)
    data = tmp_path / "data"
    data.mkdir()
    for name in folders:
        (data / name / "history").mkdir(parents=True)
        (data / name / "history" / "0000000000000001.history").touch()
    with StateFolder.locked(tmp_path / "state") as folder:
        folder.cut_folder(11).mkdir()
        folder.write(STATE)
    # Without a fault the start of Spark is next.
    with pytest.raises(ConfigurationError if error else TypeError, match=error or "NoneType"):
        run_audit([data], state=tmp_path / "state", queue=queue)


def test_rows_of_a_table_are_durable_before_the_state_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed: after a power cut the state could be there, and the findings that it had counted not."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(str(Path(f"/proc/self/fd/{file}").readlink())))

    def write(_table: object, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "part.parquet").touch()

    monkeypatch.setattr("truenext.spark.audit.continued.write_table", write)
    write_part(object(), tmp_path, "lost", 7)  # type: ignore[arg-type]
    paths = ("lost/first_event=7/part.parquet", "lost/first_event=7", "lost", "")
    assert synced == [str(tmp_path / path) for path in paths]
    synced.clear()
    # An audit that was killed had rows, and the one that judges these events again has none.
    write_part(None, tmp_path, "lost", 7)
    assert not [*(tmp_path / "lost").iterdir()]
    with StateFolder.locked(tmp_path / "state") as folder:
        name = folder.name()
        assert synced == [str(tmp_path / "state" / "name.unfinished"), str(tmp_path / "state")]
        assert folder.name() == name


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"history_version": 8}, "is of history version 8 and format 2"),
        ({"format": 1}, "and format 1; this truenext goes on from"),
        ({"last_event": 7}, "cut-0000000000000008 is missing"),
        ({"run": "one"}, "is damaged"),
    ],
)
def test_state_of_another_version_or_damaged_is_refused(
    changed: dict[str, Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.spark.audit.command.start", None)
    with StateFolder.locked(tmp_path) as folder:
        folder.cut_folder(11).mkdir()
        folder.write(STATE)
        assert folder.read() == STATE
    path = tmp_path / "state.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | changed))
    with pytest.raises(ConfigurationError, match=error):
        run_audit([tmp_path], state=tmp_path)


STATE = AuditState(
    store=None, queue=None, run=1, last_event=10, last_at=0, is_recovered=True, is_whole=True, first_event=1, marks=()
)


@pytest.mark.parametrize("out", ["state", "state/tables"])
def test_tables_in_the_folder_of_the_state_are_refused_before_it_is_used(out: str, tmp_path: Path) -> None:
    """Fixed: the audit began, and each later one refused the folder."""
    with pytest.raises(ConfigurationError, match="is the folder of --state, or is in it"):
        run_audit([tmp_path], state=tmp_path / "state", out=tmp_path / out)
    assert not [*tmp_path.iterdir()]


def test_next_state_replaces_the_last_one_and_its_cut(tmp_path: Path) -> None:
    with StateFolder.locked(tmp_path) as folder:
        for event in (10, 20):
            folder.cut_folder(event + 1).mkdir()
            folder.write(msgspec.structs.replace(STATE, last_event=event))
        state = folder.read()
    assert state is not None and state.next_event == 21
    assert [each.name for each in tmp_path.glob("cut-*")] == ["cut-0000000000000021"]


@pytest.mark.parametrize(
    ("folders", "options", "error"),
    [
        (["."], {"since": object()}, "leave out --since and --stages"),
        (["."], {"stages": ["."]}, "leave out --since and --stages"),
        ([".", ".."], {}, "--state needs the history of exactly one broker"),
    ],
)
def test_options_that_a_state_excludes_are_refused(
    folders: list[str], options: dict[str, Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.spark.audit.command.start", None)
    with pytest.raises(ConfigurationError, match=error):
        run_audit(folders, state=tmp_path, **options)


def test_tables_of_an_audit_without_a_state_are_not_mixed_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truenext.spark.audit.command.start", None)
    (tmp_path / "violations").mkdir()
    (tmp_path / "violations" / "part.parquet").touch()
    with pytest.raises(ConfigurationError, match="has the tables of an audit without --state"):
        run_audit([tmp_path], state=tmp_path / "state", out=tmp_path)


# ---- Planted faults ----

FAULTS = [
    Fault("idle time told again", QueueAudit, "stop", "self.idle_since = NEVER", "pass"),
    Fault("idle time told late", QueueAudit, "stop", "message is not None and", "False and"),
    Fault("start forgotten", QueueAudit, "stop", "self.become_visible(event - 1)", "self.expected = None"),
    Fault("idle time forgotten", QueueAudit, "_restore_idle_time", "idle.event, idle.at", "idle.event, cut.event"),
    Fault("end of a recovery forgotten", QueueRow, "refresh_start", "= fresh.start_flags", "= 0"),
    Fault("holder forgotten", _SectionAudit, "add", "[sequence] = message.subscription", "[sequence] = 0"),
    Fault("consumers forgotten", _SectionAudit, "_saved_section", "for each in cut.consumers", "for each in ()"),
    Fault(
        "first of another group",
        _SectionAudit,
        "_saved_messages",
        "(each.priority, each.group) if",
        "(each.priority, 0) if",
    ),
    Fault("every message untouched", _SectionAudit, "_saved_messages", "each.can_be_untouched(cut.event)", "True"),
    Fault("doubt about untouched messages forgotten", pieces_module, "_after_starts", "if is_in_doubt:", "if False:"),
    Fault("attempts of untouched messages not forgotten", pieces_module, "_after_starts", "&= not has_gap", "&= True"),
    Fault("first of messages in doubt", pieces_module, "_after_starts", '("priority", "group")', "()"),
    Fault(
        "loss of untouched messages forgotten",
        QueueAudit,
        "on_recovered",
        "self.untouched_in_doubt + self.untouched",
        "0",
    ),
    Fault(
        "messages in doubt found again",
        QueueAudit,
        "on_recovered",
        "self.untouched, self.untouched_in_doubt = 0,",
        "self.untouched_in_doubt =",
    ),
    Fault("messages in doubt resurrected", QueueAudit, "on_run_started", " + self.untouched_in_doubt", ""),
    Fault("open recovery forgotten", pieces_module, "since", " or not is_recovered", ""),
    Fault("gap forgotten", pieces_module, "since", "has_gap = len(starts) < len(marks)", "has_gap = False"),
    Fault(
        "gap without a start forgotten", pieces_module, "since", "marks and marks[-1].code == EventCode.GAP", "False"
    ),
    Fault("transient messages found after a crash", pieces_module, "since", "each.number & StartFlag.CLEAN", "True"),
    Fault("start before a new queue forgotten", SavedAudit, "fresh", "= start is not None", "= False"),
    Fault("recovery of a new queue forgotten", SavedAudit, "fresh", "(0, 0), start.event", "None, 0"),
    Fault("later commit forgotten", pieces_module, "_become_durable", "if event is not None and", "if False and"),
]


@pytest.mark.drawn
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_in_a_piece_is_seen(fault: Fault) -> None:
    """In the findings of all pieces, or in those of sweeps."""
    with planted(fault):
        assert any(_differs(seed) for seed in range(1000))


def _differs(seed: int) -> bool:
    events = random_history(seed)
    cuts = random_cuts(events, random.Random(seed))
    try:
        check_sweeps(*never_touched(seed))
        if not has_doubt(events):
            check_pieces(events, cuts)
        check_sweeps(events, cuts)
    except (AssertionError, LookupError):
        return True
    return False
