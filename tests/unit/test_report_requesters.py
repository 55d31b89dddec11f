"""Tests of the order in which requesters get the report of a process. Source: docs/contract.md, chapter 34"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.model.process_report import REPORT_TTL_S
from truenext.stage.core import requesters
from truenext.stage.core.requesters import RECENT_S, Requester, Requesters, request_fault

QUEUE = "/remote-temp-queue/1f-1/processes"


@pytest.mark.parametrize(
    ("reply_to", "correlation_id", "body", "fault"),
    [
        (QUEUE, "", b"", ""),
        (QUEUE, "17", b" {} ", ""),
        (QUEUE, "", b'{"new": [1]}', ""),
        ("/remote-temp-queue/ID:a-1:2/with/more", "", b"", ""),
        ("", "", b"", "temporary queue"),
        ("/queue/orders", "", b"", "temporary queue"),
        ("/topic/news", "", b"", "temporary queue"),
        ("/temp-queue/processes", "", b"", "temporary queue"),
        ("/remote-temp-topic/1f/a", "", b"", "temporary queue"),
        ("/remote-temp-queue//a", "", b"", "temporary queue"),
        ("/remote-temp-queue/1f/", "", b"", "temporary queue"),
        (f"{QUEUE},/queue/orders", "", b"", "temporary queue"),
        (f"/queue/orders,{QUEUE}", "", b"", "temporary queue"),
        (f"{QUEUE}\n", "", b"", "temporary queue"),
        (QUEUE, "x" * 256, b"", "correlation-id"),
        (QUEUE, "", b"x" * 5000, "too large"),
        (QUEUE, "", b"[]", "JSON object"),
        (QUEUE, "", b"\xff", "JSON object"),
        (QUEUE, "", b'{"a":' + b"[" * 4000, "JSON object"),
    ],
)
def test_message_that_is_no_request_has_a_fault(reply_to: str, correlation_id: str, body: bytes, fault: str) -> None:
    found = request_fault(reply_to, correlation_id, body)
    assert fault in found and bool(found) is bool(fault)


STEPS = st.one_of(
    st.tuples(st.just("request"), st.integers(0, 5)),
    st.tuples(st.just("report"), st.sampled_from([1, 40, 1000])),
    st.tuples(st.just("send"), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([0.3, 1.0, REPORT_TTL_S])),
)


@given(st.lists(STEPS, max_size=60))
def test_each_request_is_answered_once_with_a_report_that_its_requester_has_not(drawn: list[tuple[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requesters, "WAITING_MAX", 4)
        patch.setattr(requesters, "SENDS_MAX", 3)
        patch.setattr(requesters, "SENT_BYTES_MAX", 100)
        patch.setattr(requesters, "RECENT_MAX", 2)
        _check_steps(drawn)


def _check_steps(drawn: list[tuple[str, Any]]) -> None:
    tested, now, number = Requesters(), 0.0, 0
    report, size, sends = 0, 100, 0
    waiting: dict[str, Requester] = {}
    """Requesters that wait, and expired ones that may be dropped."""
    got: set[tuple[int, str]] = set()
    tested.start_report(size)
    for kind, value in drawn:
        living = {key: each for key, each in waiting.items() if now - each.requested_at <= REPORT_TTL_S}
        if kind == "wait":
            now += value
        elif kind == "request":
            number += 1
            requester = Requester(f"q{value}", str(number), now)
            is_added = tested.add(requester)
            assert is_added or (requester.reply_to not in living and len(waiting) >= 4)
            assert not is_added or requester.reply_to in waiting or len(living) < 4
            if is_added:
                waiting[requester.reply_to] = requester
        elif kind == "report":
            report, size, sends = report + 1, value, 0
            tested.start_report(size)
        else:
            found = tested.next_requester(now)
            is_expected = sends < max(1, min(3, 100 // size)) and any((report, key) not in got for key in living)
            assert (found is not None) is is_expected
            if found is not None:
                sends += 1
                assert found == living[found.reply_to] and (report, found.reply_to) not in got
                del waiting[found.reply_to]
                got.add((report, found.reply_to))
        assert waiting or tested.is_empty
        assert not tested.is_empty or all(now - each.requested_at > REPORT_TTL_S for each in waiting.values())
        assert len(tested.recent_requesters(now)) <= 2


def test_a_requester_waits_no_longer_than_the_others() -> None:
    tested = Requesters()
    for each in range(5):
        tested.add(Requester(f"q{each}", "", 0.0))
    counts: Counter[str] = Counter()
    for report in range(10):
        tested.start_report(requesters.SENT_BYTES_MAX // 2)
        while (found := tested.next_requester(float(report))) is not None:
            counts[found.reply_to] += 1
            tested.add(Requester(found.reply_to, "", float(report)))
    assert counts == dict.fromkeys((f"q{each}" for each in range(5)), 4)


def test_requesters_of_the_last_minute_learn_of_the_end() -> None:
    tested = Requesters()
    tested.start_report(1)
    for each in range(3):
        tested.add(Requester(f"q{each}", "", each * 30.0))
        assert tested.next_requester(each * 30.0) is not None
    assert [each.reply_to for each in tested.recent_requesters(RECENT_S + 1)] == ["q2", "q1"]


def test_flood_of_one_requester_waits_as_one_request() -> None:
    tested = Requesters()
    tested.start_report(1)
    for number in range(1000):
        assert tested.add(Requester(QUEUE, json.dumps(number), 0.0))
    found = tested.next_requester(0.0)
    assert found is not None and found.correlation_id == "999"
    assert tested.next_requester(0.0) is None and tested.is_empty


def test_requester_that_has_a_report_waits_for_the_next_one() -> None:
    """C34.3."""
    tested, requester = Requesters(), Requester(QUEUE, "", 0.0)
    for _ in range(2):
        tested.start_report(1)
        tested.add(requester)
        assert tested.next_requester(0.0) == requester
        tested.add(requester)
        assert tested.next_requester(0.0) is None and not tested.is_empty


def test_requests_of_too_many_clients_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """C34.4."""
    monkeypatch.setattr(requesters, "WAITING_MAX", 3)
    tested = Requesters()
    tested.start_report(1)
    tested.add(Requester("a", "", 0.0))
    tested.next_requester(0.0)
    # One of three has the report already.
    assert [tested.add(Requester(name, "", 0.0)) for name in "abcd"] == [True, True, True, False]
    assert tested.add(Requester("a", "", 0.0)) and tested.add(Requester("b", "", 0.0))
