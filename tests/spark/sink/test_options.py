"""Tests of the sink's options: each is read, and invalid or unknown ones are refused by name."""

import pytest

from truenext.client.core.credentials import Credentials
from truenext.errors import ConfigurationError
from truenext.spark.sink.options import parse_options

URL = "stomp://127.0.0.1:61613"


def test_options_that_are_not_said_have_their_defaults() -> None:
    options = parse_options({"url": URL}, is_streaming=False)
    assert (options.destination, options.space, options.patience_s, options.app) == (None, "main", 600.0, None)


def test_options_are_read_with_names_in_any_case() -> None:
    options = parse_options(
        {
            "URL": URL,
            "USER": "archive",
            "passwordFILE": "/file",
            "Ca": "/ca",
            "certificate": "/certificate",
            "KEY": "/key",
            "Queue": "out",
            "SPACE": "team-1",
            "patience": "5",
            "txnappid": "nightly",
            "TXNVERSION": "42",
        },
        is_streaming=False,
    )
    assert options.credentials == Credentials(
        user="archive", password_file="/file", ca="/ca", certificate="/certificate", key="/key"
    )
    assert (options.destination, options.space, options.patience_s) == ("/queue/out", "team-1", 5.0)
    assert (options.app, options.version) == ("nightly", 42)


def test_options_that_spark_passes_for_a_query_are_ignored_by_the_sink() -> None:
    given = {"url": URL, "checkpointLocation": "/tmp/x", "queryname": "bills"}
    assert parse_options(given, is_streaming=True) == parse_options({"url": URL}, is_streaming=True)


@pytest.mark.parametrize(
    ("given", "is_streaming", "message"),
    [
        ({}, True, r'^option url is missing: \.option\("url", "stomp://127.0.0.1:61613"\)$'),
        ({"url": "http://a"}, True, "^option url: "),
        ({"url": URL, "topic": "a"}, True, "^option topic is unknown; the options are url, user, passwordFile, ca"),
        ({"url": URL, "txnAppId": "a", "txnVersion": "1"}, True, "^option txnAppId is unknown"),
        ({"url": URL, "checkpointLocation": "x"}, False, "^option checkpointLocation is unknown"),
        ({"url": URL, "password": "x"}, True, "^option password: Spark shows options in its plans"),
        ({"url": URL, "user": "x"}, True, "^options user and passwordFile must be set together"),
        ({"url": URL, "queue": "orders.*"}, True, "^option queue: "),
        (
            {"url": URL, "queue": "Spark.sink.a"},
            True,
            r"^option queue: .*queues Spark\.\* are reserved for sources and sinks",
        ),
        ({"url": URL, "txnAppId": "a"}, False, "^options txnAppId and txnVersion must be set together"),
        ({"url": URL, "txnVersion": "1"}, False, "^options txnAppId and txnVersion must be set together"),
        ({"url": URL, "txnAppId": "a.b", "txnVersion": "1"}, False, "^option txnAppId is 'a.b', and must be a word"),
        ({"url": URL, "txnAppId": "a" * 65, "txnVersion": "1"}, False, "and must be a word"),
        ({"url": URL, "txnAppId": "a", "txnVersion": "-1"}, False, "^option txnVersion is '-1', and must be a whole"),
        ({"url": URL, "patience": "soon"}, True, "^option patience is 'soon'"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(given: dict[str, str], is_streaming: bool, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_options(given, is_streaming=is_streaming)
