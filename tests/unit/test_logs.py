"""Tests of the log messages of a command."""

import logging
import sys

from truenext.cli.logs import TRACEBACK_MAX, FieldFormatter


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
