"""Tests of the options of a SEND for failures, and of the cache of encoded heads. Source: docs/reference/client.md"""

from __future__ import annotations

from typing import Any

import pytest

from truenext.client.core import send_options
from truenext.client.core.send_options import SendOptions, encode_send

OPTIONS: SendOptions = {
    "report_to": "/topic/replies.shop.1",
    "report_id": "f1",
    "on_failure": ("/queue/order.place.stage.on_failure", "/queue/b"),
}


def lines(options: SendOptions) -> list[str]:
    command, *headers = encode_send("/queue/a", options).head.decode().splitlines()
    assert command == "SEND"
    return sorted(headers)


def test_failure_options_become_headers_of_the_send() -> None:
    assert lines(OPTIONS) == [
        "destination:/queue/a",
        "persistent:true",
        "truenext-on-failure:/queue/order.place.stage.on_failure /queue/b",
        "truenext-report-id:f1",
        "truenext-report-to:/topic/replies.shop.1",
    ]


@pytest.mark.parametrize("more", [{}, {"headers": {"x": "1"}}, {"report_id": "two words: ä"}])
def test_failure_options_are_the_same_with_and_without_the_cache(more: Any) -> None:
    options: SendOptions = {**OPTIONS, "correlation_id": "m1", **more}
    with_a_list: SendOptions = {**options, "on_failure": list(options["on_failure"])}
    assert lines(options) == lines(with_a_list)
    assert "correlation-id:m1" in lines(options)
    assert sum(each.startswith("truenext-report-id:") for each in lines(options)) == 1


def test_sends_that_differ_in_their_ids_share_one_entry_of_the_cache() -> None:
    send_options._cache.clear()
    for number in range(3):
        options: SendOptions = {**OPTIONS, "report_id": f"f{number}", "correlation_id": f"m{number}"}
        assert {f"truenext-report-id:f{number}", f"correlation-id:m{number}"} <= set(lines(options))
    assert len(send_options._cache) == 1


@pytest.mark.parametrize("first", [True, False])
def test_report_to_without_report_id_is_refused_whatever_the_cache_has(first: bool) -> None:
    send_options._cache.clear()
    if first:
        encode_send("/queue/a", {"report_to": "/queue/r", "report_id": "1"})
    for options in ({"report_to": "/queue/r"}, {"report_id": "1"}):
        with pytest.raises(ValueError, match="report_to and report_id must be set together"):
            encode_send("/queue/a", options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"report_to": "/queue/r", "report_id": ""}, "report_id must have 1 to 64 characters, not 0"),
        ({"report_to": "/queue/r", "report_id": "x" * 65}, "report_id must have 1 to 64 characters, not 65"),
        ({"on_failure": ()}, "on_failure must have 1 to 8 destinations, not 0"),
        ({"on_failure": ("/queue/h",) * 9}, "on_failure must have 1 to 8 destinations, not 9"),
        ({"on_failure": "/queue/h"}, "on_failure must be a list of destinations, not '/queue/h'"),
        ({"on_failure": (1,)}, r"on_failure must be a list of destinations, not \(1,\)"),
        ({"report_to": 1, "report_id": "1"}, "report_to must be str, not 1"),
        ({"headers": {"truenext-report-to": "/queue/r"}}, "header truenext-report-to cannot be set by a program"),
    ],
)
def test_invalid_failure_options_are_refused(options: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        encode_send("/queue/a", options)
