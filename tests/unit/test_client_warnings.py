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
