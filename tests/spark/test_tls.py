"""Tests of sources, sinks and the commands of `truenext spark` at a broker with TLS."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.spark.queues import run_to_end
from tests.tls_broker import Certificates, TlsBroker, tls_broker
from truenext import blocking
from truenext.cli.main import main
from truenext.client.core.credentials import Credentials
from truenext.errors import ConfigurationError, ConnectionLost, NoBroker
from truenext.model.url import parse_url
from truenext.spark.broker import connection, tls_stream
from truenext.spark.broker.connection import BrokerConnection
from truenext.spark.source.options import parse_options

BEAT_S = 0.002


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def certificates(folder: Path) -> Certificates:
    return Certificates(folder)


@pytest.fixture(scope="module")
def broker(folder: Path, certificates: Certificates) -> Iterator[TlsBroker]:
    """Broker that requires certificates of its clients."""
    with tls_broker(folder, *certificates.broker_options("required")) as running:
        yield running


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    """Name of a queue that no other test uses."""
    return str(abs(hash(request.node.nodeid)))


def connect(url: str, certificates: Certificates) -> BrokerConnection:
    return BrokerConnection([parse_url(url)], credentials_of(certificates))


def credentials_of(certificates: Certificates) -> Credentials:
    return Credentials(ca=str(certificates.ca), certificate=str(certificates.client))


# ---- The connection ----


def test_messages_of_all_sizes_are_sent_and_pulled_while_heart_beats_are_written(
    broker: TlsBroker, certificates: Certificates, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread writes heart-beats all the time, while the caller reads and writes."""
    monkeypatch.setattr(connection, "HEART_BEAT_SECONDS", 1.0)
    draws = random.Random(1)
    sizes = [1, 1 << 20, *(round((1 << 20) ** draws.random()) for _ in range(198))]
    bodies = [draws.randbytes(size) for size in sizes]
    with connect(broker.url, certificates) as opened:
        beats = []
        is_over = threading.Event()

        def beat() -> None:
            while not is_over.wait(BEAT_S):
                opened._write(b"\n")
                beats.append(1)

        beating = threading.Thread(target=beat)
        beating.start()
        try:
            opened.subscribe_to_pull("s", f"/queue/{queue}", "client-individual")
            for body in bodies:
                opened.call("SEND", {"destination": f"/queue/{queue}", "persistent": "true"}, body)
                opened.pull("s", 1)
                frame = opened.answer("s")
                assert frame.body == body
                opened.post("ACK", {"id": frame.headers["ack"]})
            assert {each["name"]: each["waiting"] for each in opened.ask("queues")}.get(queue, 0) == 0
        finally:
            is_over.set()
            beating.join()
    assert len(beats) > 10


def test_connection_that_is_left_alone_is_kept_by_heart_beats(
    broker: TlsBroker, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEART_BEAT_SECONDS", 0.5)
    with connect(broker.url, certificates) as opened:
        time.sleep(2.5)
        assert opened.next_message("none", 0.1) is None
        assert opened.ask("queues") is not None


def test_connection_that_another_thread_closes_is_lost_at_once(broker: TlsBroker, certificates: Certificates) -> None:
    opened = connect(broker.url, certificates)
    closing = threading.Timer(0.3, opened.close)
    closing.start()
    started = time.monotonic()
    with pytest.raises(ConnectionLost):
        opened.next_message("none", 60.0)
    assert time.monotonic() - started < 5
    closing.join()
    with pytest.raises(ConnectionLost):
        opened.call("SEND", {"destination": "/queue/x"})


def test_write_to_a_broker_that_reads_nothing_ends(
    certificates: Certificates, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_stream, "WRITE_SECONDS", 0.3)
    with tls_broker(folder, *certificates.broker_options()) as sleeping:
        opened = connect(sleeping.url, certificates)
        lost = r"^the connection to stomp\+ssl://.* was lost: timed out$"
        with sleeping.asleep(), pytest.raises(ConnectionLost, match=lost):
            opened.call("SEND", {"destination": "/queue/x"}, b"x" * (15 << 20))
        opened.close()


def test_certificate_that_is_not_accepted_is_the_reason_why_there_is_no_broker(
    broker: TlsBroker, certificates: Certificates, folder: Path, tmp_path: Path
) -> None:
    other = Certificates(tmp_path)
    own = credentials_of(certificates)
    old = certificates.issue("old", "127.0.0.1", not_after=datetime(2020, 1, 1))
    with (
        tls_broker(folder, "--certificate", str(old)) as expired,
        tls_broker(folder, scheme="stomp") as plain,
    ):
        tls_at_plain = plain.url.replace("stomp:", "stomp+ssl:")
        for url, credentials, reason in (
            (
                broker.url,
                Credentials(ca=str(other.ca)),
                # This broker shows the certificate of its authority as well, since it checks those of clients with it.
                "the broker's certificate is not accepted: self-signed certificate in certificate chain; ca "
                f"{str(other.ca)!r} (--ca, TRUENEXT_CA) does not have the certificate that signed it",
            ),
            (expired.url, own, "the broker's certificate is not accepted: certificate has expired"),
            (tls_at_plain, own, "the port does not speak TLS 1.2 or later: perhaps the port is for stomp://"),
            (
                broker.url,
                Credentials(ca=str(certificates.ca)),
                "the broker requires a certificate of the client: set certificate",
            ),
            (
                broker.url,
                Credentials(ca=str(certificates.ca), certificate=str(other.client)),
                "the broker does not accept the client's certificate: it must be signed by a certificate in the "
                "broker's --client-ca",
            ),
        ):
            with pytest.raises(NoBroker) as caught:
                BrokerConnection([parse_url(url)], credentials)
            assert str(caught.value) == f"no broker: {url}: {reason}"
        # The next address is tried.
        BrokerConnection([parse_url(expired.url), parse_url(broker.url)], own).close()


def test_file_that_is_missing_is_named(broker: TlsBroker, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^ca '.*/none' cannot be used: No such file or directory$"):
        BrokerConnection([parse_url(broker.url)], Credentials(ca=str(tmp_path / "none")))


# ---- Source, sink and commands ----


def test_options_with_files_can_be_sent_to_executors() -> None:
    options = parse_options({"url": "stomp+ssl://h", "queue": "q", "ca": "/a", "certificate": "/c", "key": "/k"})
    assert pickle.loads(pickle.dumps(options)) == options


def test_query_reads_and_writes_over_tls(
    spark: SparkSession, broker: TlsBroker, certificates: Certificates, queue: str, tmp_path: Path
) -> None:
    options = {"url": broker.url, "ca": str(certificates.ca), "certificate": str(certificates.client)}
    rows = spark.range(50).selectExpr("string(id) AS body", f"'{queue}' AS queue")
    rows.write.format("truenext").options(**options).mode("append").save()
    stream = spark.readStream.format("truenext").options(**options).option("queue", queue).load()
    writer = stream.selectExpr(f"'{queue}.copy' AS queue", "body").writeStream.format("truenext").options(**options)
    run_to_end(writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start())
    copies = spark.read.format("truenext").options(**options).option("queue", f"{queue}.copy").load()
    assert sorted(int(row["body"]) for row in copies.collect()) == list(range(50))
    with blocking.connect(broker.url, ca=certificates.ca, certificate=certificates.client) as client:
        assert [*client.browse(f"/queue/{queue}")] == []


def test_query_with_a_missing_ca_names_it(spark: SparkSession, broker: TlsBroker, tmp_path: Path) -> None:
    reader = spark.read.format("truenext").option("url", broker.url).option("queue", "q")
    with pytest.raises(PySparkException, match="none' cannot be used: No such file or directory"):
        reader.option("ca", str(tmp_path / "none")).load().collect()


def test_command_of_spark_uses_tls(broker: TlsBroker, certificates: Certificates) -> None:
    variables = {"TRUENEXT_URL": broker.url, "TRUENEXT_CA": str(certificates.ca)}
    listed = CliRunner().invoke(main, ["spark", "list", "--certificate", str(certificates.client)], env=variables)
    assert listed.exit_code == 0, listed.output
    refused = CliRunner().invoke(main, ["spark", "list"], env=variables)
    assert refused.exit_code == 2
    assert "the broker requires a certificate of the client: set certificate" in refused.stderr
