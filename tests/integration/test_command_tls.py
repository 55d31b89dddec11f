"""Tests of commands at a broker with TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.tls_broker import Certificates, TlsBroker, tls_broker
from truenext.cli.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def certificates(folder: Path) -> Certificates:
    return Certificates(folder)


@pytest.fixture(scope="module")
def broker(folder: Path, certificates: Certificates) -> Iterator[TlsBroker]:
    with tls_broker(folder, *certificates.broker_options()) as running:
        yield running


def run(*arguments: str, broker: TlsBroker, ca: Path | str) -> Result:
    """Run a command with the address and the CA in its environment."""
    environment = {"TRUENEXT_URL": broker.url, "TRUENEXT_CA": str(ca)}
    return CliRunner().invoke(main, arguments, env=environment)


def output_of(*arguments: str, broker: TlsBroker, ca: Path | str) -> str:
    done = run(*arguments, broker=broker, ca=ca)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_commands_with_a_ca_in_the_environment_send_list_and_receive(
    broker: TlsBroker, certificates: Certificates
) -> None:
    ca = certificates.ca
    output_of("send", "orders", "5 apples", broker=broker, ca=ca)
    queues = json.loads(output_of("queues", "--json", broker=broker, ca=ca))
    assert [(each["name"], each["waiting"]) for each in queues] == [("orders", 1)]
    assert output_of("receive", "orders", broker=broker, ca=ca) == "5 apples\n"


@pytest.mark.parametrize("ca", ["", " "])
def test_blank_ca_in_the_environment_is_that_of_the_system(ca: str, broker: TlsBroker) -> None:
    done = run("queues", broker=broker, ca=ca)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"truenext: no broker at {broker.url}: the broker's certificate is not accepted: unable to get local issuer "
        "certificate; set ca (--ca, TRUENEXT_CA) to a file with the certificate that signed it\n"
    )


def test_ca_of_the_command_line_replaces_that_of_the_environment(broker: TlsBroker, certificates: Certificates) -> None:
    output_of("queues", "--ca", str(certificates.ca), broker=broker, ca=certificates.broker)


def test_ca_that_is_missing_is_named_with_exit_status_2(broker: TlsBroker, tmp_path: Path) -> None:
    done = run("queues", broker=broker, ca=tmp_path / "none")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"truenext: ca '{tmp_path / 'none'}' cannot be used: No such file or directory\n"


def test_command_shows_a_certificate_to_a_broker_that_requires_one(folder: Path, certificates: Certificates) -> None:
    certificate, key = certificates.issue_pair("pair", "ops.example")
    ca = certificates.ca
    with tls_broker(folder, *certificates.broker_options("required")) as broker:
        output_of("queues", "--certificate", str(certificate), "--key", str(key), broker=broker, ca=ca)
        output_of("status", "--certificate", str(certificates.client), broker=broker, ca=ca)
        done = run("queues", broker=broker, ca=ca)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the broker requires a certificate of the client: set certificate" in done.stderr


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="a recording needs what Spark needs")
def test_record_uses_tls(certificates: Certificates, tmp_path: Path) -> None:
    arguments = ["record", "--count", "10", "--out", str(tmp_path / "new")]
    # A broker of its own: the queue of the recording stays for a while, and another test lists all queues.
    with tls_broker(tmp_path, *certificates.broker_options()) as broker:
        assert "10 of 10 messages came" in run(*arguments, broker=broker, ca=certificates.ca).stderr
