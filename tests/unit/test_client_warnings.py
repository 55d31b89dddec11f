"""Tests of warnings about clients: each is logged once, however often the client repeats its mistake."""

import pytest

from truenext.broker import client_warnings
from truenext.broker.client_warnings import ClientWarnings


def test_unsupported_feature_is_logged_once_for_each_reason_and_user(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_warnings, "UNSUPPORTED_MAX", 4)
    warnings = ClientWarnings(lambda: 0.0)
    for user, reason in (("a", "XA"), ("a", "XA"), ("b", "XA"), ("a", "blobs"), ("a", "XA")):
        warnings.warn_of_unsupported("here:1", user, reason)
    warnings.keep_users(["a"])
    for number in range(9):
        warnings.warn_of_unsupported("here:1", "a", f"pattern {number}")
    logged = [(record.__dict__["user"], record.__dict__["reason"]) for record in caplog.records]
    assert logged == [("a", "XA"), ("b", "XA"), ("a", "blobs"), ("a", "pattern 0"), ("a", "pattern 1")]
    assert {record.getMessage() for record in caplog.records} == {"frame refused: the broker does not support it"}


def test_client_that_is_refused_during_a_drain_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_warnings, "DRAINING_MAX", 2)
    now = 0.0
    warnings = ClientWarnings(lambda: now)
    for client in ("here:1", "here:2", "there:1", "elsewhere:1"):
        warnings.warn_of_drain(client, "drained")
    now = client_warnings.DRAINING_SECONDS
    warnings.warn_of_drain("elsewhere:2", "drained")
    assert [record.__dict__["client"] for record in caplog.records] == ["here:1", "there:1", "elsewhere:2"]
