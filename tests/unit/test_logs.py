"""Tests of the log messages of a command."""

import json
import logging
import sys
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.cli.logs import TRACEBACK_MAX, FieldFormatter, JsonFormatter


def formatted(error: Exception) -> str:
    try:
        raise error
    except Exception:
        record = logging.LogRecord("truenext", logging.WARNING, "", 0, "it has failed", (), sys.exc_info())
    record.queue = "orders"
    return FieldFormatter("%(levelname)s %(message)s").format(record)


def test_an_event_has_its_facts_as_fields_and_its_traceback() -> None:
    text = formatted(ValueError("why"))
    assert text.startswith("WARNING it has failed queue='orders'\n  Traceback")
    assert text.endswith("\n  ValueError: why")


def test_the_text_of_an_error_begins_no_line_and_says_nothing_to_a_terminal() -> None:
    text = formatted(ValueError("one\n2026-01-01 CRITICAL the broker is gone\x1b[2J"))
    assert text.endswith("\n  ValueError: one\n  2026-01-01 CRITICAL the broker is gone\\x1b[2J")


def test_long_traceback_is_logged_with_its_beginning_and_end() -> None:
    text = formatted(ValueError("x" * 10_000_000 + " end"))
    assert "Traceback" in text and "characters left out" in text and text.endswith(" end")
    assert len(text) < TRACEBACK_MAX + 200


# ---- JSON ----


def as_json(message: str = "it has failed", error: Exception | None = None, **fields: Any) -> dict[str, Any]:
    """Return the object that a record with these fields becomes."""
    exc_info = None
    if error is not None:
        try:
            raise error
        except Exception:
            exc_info = sys.exc_info()
    record = logging.LogRecord("truenext.broker", logging.WARNING, "", 0, message, (), exc_info)
    vars(record).update(fields)
    line = JsonFormatter().format(record)
    assert line.isascii() and line.isprintable(), "C33.6: one line, and nothing for a terminal"
    found: dict[str, Any] = json.loads(line, parse_constant=lambda name: pytest.fail(f"JSON has no {name}"))
    return found


def test_event_is_a_json_object_with_its_fields() -> None:
    found = as_json(queue="orders", sequences=[1, 2], user=None)
    time = found.pop("time")
    assert datetime.fromisoformat(time).tzinfo is UTC
    assert found == {
        "level": "warning",
        "logger": "truenext.broker",
        "message": "it has failed",
        "queue": "orders",
        "sequences": [1, 2],
        "user": None,
    }


def test_exception_is_a_field_of_the_json_object_and_cut_if_long() -> None:
    assert as_json(error=ValueError("why"))["exception"].endswith("ValueError: why")
    assert len(as_json(error=ValueError("x" * 10_000_000))["exception"]) < TRACEBACK_MAX + 200


def test_field_with_the_name_of_another_one_is_kept_beside_it() -> None:
    found = as_json(level="low", time=5, exception="none", error=KeyError("x"))
    assert (found["level"], found["level_"], found["time_"], found["exception_"]) == ("warning", "low", 5, "none")


def test_values_that_json_does_not_have_are_texts() -> None:
    endless: list[Any] = []
    endless.append(endless)
    path = Path("/data")
    assert as_json(folder=path)["folder"] == repr(path)
    assert as_json(limit=inf, message_count=3) == as_json() | {"time": ANY, "limit": "inf", "message_count": "3"}
    assert as_json(endless=endless)["endless"] == "[[...]]"
    assert as_json(by_number={(1, 2): "x"})["by_number"] == "{(1, 2): 'x'}"
    assert as_json(surrogate="a\udcff")["surrogate"] == "a\udcff"


@given(st.text(), st.text() | st.floats() | st.binary() | st.dictionaries(st.text() | st.integers(), st.text()))
def test_any_text_and_field_is_one_line_of_json(message: str, value: Any) -> None:
    assert as_json(message.replace("%", "%%"), value=value)["message"] == message.replace("%", "%%")
