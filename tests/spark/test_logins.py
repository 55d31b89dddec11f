"""Tests of the logins of sources, sinks and the commands of `truenext spark`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.login_broker import LoginBroker, login_broker
from truenext.cli.connection import LOGIN_HINT
from truenext.cli.main import main
from truenext.client.core.credentials import Credentials
from truenext.errors import ConfigurationError, Refused
from truenext.model.spark_queues import SinkQueues
from truenext.model.url import parse_url
from truenext.spark.broker import connection
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.datasource import BrowsingReader, QueueStreamReader, QueueStreamWriter, QueueWriter
from truenext.spark.sink.draft import WrittenDrafts
from truenext.spark.sink.options import SinkOptions
from truenext.spark.sink.options import parse_options as parse_sink_options
from truenext.spark.source.options import SourceOptions
from truenext.spark.source.options import parse_options as parse_source_options


@pytest.fixture
def broker() -> Iterator[LoginBroker]:
    with login_broker() as running:
        yield running


def connect(broker: LoginBroker, credentials: Credentials) -> None:
    with BrokerConnection([parse_url(broker.url)], credentials):
        pass


def test_connection_with_a_password_file_reads_it_for_each_login(broker: LoginBroker, tmp_path: Path) -> None:
    file = tmp_path / "file"
    for password in ("first", "second"):
        file.write_text(f"{password}\n")
        connect(broker, Credentials(user="archive", password_file=str(file)))
    assert broker.credentials() == [("archive", "first"), ("archive", "second")]


def test_connection_with_a_missing_password_file_names_it(broker: LoginBroker, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^password file '.*/file' cannot be read: No such file"):
        connect(broker, Credentials(user="archive", password_file=str(tmp_path / "file")))
    assert broker.logins == []


def test_connection_to_a_busy_broker_logs_in_again(broker: LoginBroker) -> None:
    broker.refusal_codes.extend(["busy", "busy"])
    connect(broker, Credentials(user="archive", password="secret"))
    assert broker.credentials() == [("archive", "secret")] * 3


def test_connection_to_a_broker_that_stays_busy_is_refused(
    broker: LoginBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.5)
    broker.refusal_codes.extend(["busy"] * 1000)
    with pytest.raises(Refused) as caught:
        connect(broker, Credentials())
    assert caught.value.code == "busy"
    assert len(broker.logins) >= 2


def test_connection_with_wrong_credentials_is_refused_at_once(broker: LoginBroker) -> None:
    broker.refusal_codes.append("login")
    with pytest.raises(Refused, match="refused here"):
        connect(broker, Credentials(user="archive", password="wrong"))
    assert len(broker.logins) == 1


def browse(source: SourceOptions, sink: SinkOptions) -> None:
    reader = BrowsingReader(source)
    list(reader.read(reader.partitions()[0]))


def read(source: SourceOptions, sink: SinkOptions) -> None:
    reader = QueueStreamReader(source)
    reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())


def commit_stream(source: SourceOptions, sink: SinkOptions) -> None:
    QueueStreamWriter(sink).commit([WrittenDrafts("query", ())], 1)


def commit_batch(source: SourceOptions, sink: SinkOptions) -> None:
    QueueWriter(sink, SinkQueues("main", "query")).commit([])


@pytest.mark.parametrize("work", [browse, read, commit_stream, commit_batch])
def test_source_and_sink_log_in_as_their_options_say(
    work: Callable[[SourceOptions, SinkOptions], None], broker: LoginBroker, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("secret")
    options = {"url": broker.url, "queue": "q", "user": "archive", "passwordFile": str(tmp_path / "file")}
    broker.refusal_codes.append("login")
    with pytest.raises(Refused, match="refused here"):
        work(parse_source_options(options), parse_sink_options(options, is_streaming=False))
    assert broker.credentials() == [("archive", "secret")]


def test_options_of_a_source_can_be_sent_to_executors() -> None:
    options = parse_source_options({"url": "stomp://h", "queue": "q", "user": "archive", "passwordFile": "file"})
    assert pickle.loads(pickle.dumps(options)) == options


def test_command_of_spark_logs_in_with_the_environment(broker: LoginBroker) -> None:
    broker.refusal_codes.append("login")
    variables = {"TRUENEXT_URL": broker.url, "TRUENEXT_USER": "ops", "TRUENEXT_PASSWORD": "wrong"}
    result = CliRunner().invoke(main, ["spark", "list"], env=variables)
    assert broker.credentials() == [("ops", "wrong")]
    assert (result.exit_code, result.output) == (1, "truenext: refused here\n")


def test_command_of_spark_without_a_user_that_is_refused_says_how_to_name_one(broker: LoginBroker) -> None:
    broker.refusal_codes.append("login")
    result = CliRunner().invoke(main, ["spark", "list", "--url", broker.url])
    assert (result.exit_code, result.output) == (1, f"truenext: refused here; {LOGIN_HINT}\n")
