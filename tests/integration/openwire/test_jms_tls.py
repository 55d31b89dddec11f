"""Tests of openwire+ssl with the unmodified client of ActiveMQ, which logs in by a certificate or is refused."""

import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.environments import ROOT
from tests.integration.openwire.java import Programs, missing_reason
from tests.integration.pages import blocks_of
from tests.tls_broker import Certificates

REASON = missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

PAGE = "docs/jms.md"


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("java"))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def options_of_page(store: str, command: str, folder: Path) -> list[str]:
    """Run a command of docs/jms.md in the folder of the certificates, and return the page's options of Java for the
    store that the command makes."""
    commands = [line for block in blocks_of(PAGE) if block.language == "sh" for line in block.text.splitlines()]
    (line,) = (each for each in commands if each.startswith(command))
    subprocess.run(shlex.split(line), cwd=folder, check=True, capture_output=True, timeout=60)
    options = re.findall(rf"-Djavax\.net\.ssl\.{store}\w*=[\w.]+", (ROOT / PAGE).read_text())
    assert len(options) == 2
    return [each.replace("Store=", f"Store={folder}/") for each in options]


@pytest.fixture(scope="module")
def trust(certificates: Certificates) -> list[str]:
    """Options of Java with which it trusts the broker."""
    return options_of_page("trustStore", "keytool ", certificates.ca.parent)


@pytest.fixture(scope="module")
def certificate(certificates: Certificates) -> list[str]:
    """Options of Java with which it shows the certificate of a user."""
    for name in ("shop.pem", "shop.key"):
        certificates.ca.with_name(name).symlink_to(certificates.client)
    return options_of_page("keyStore", "openssl pkcs12 ", certificates.ca.parent)


@pytest.fixture(scope="module")
def tls_broker(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("tls")
    users = folder / "users.toml"
    users.touch(mode=0o600)
    users.write_text('[user.shop]\ncertificates = ["DNS:client.example"]\nsend = ["q"]\ntake = ["q"]\n')
    listen = ["--users", str(users), "--listen", "openwire+ssl://127.0.0.1:0"]
    broker = BrokerProcess(folder, [*listen, *certificates.broker_options("asked")])
    with broker.running():
        yield broker


def test_certificate_is_the_login(
    tls_broker: BrokerProcess, java: Programs, trust: list[str], certificate: list[str]
) -> None:
    said = java.run("connect", tls_broker.openwire_url, "q", java=[*trust, *certificate])
    assert said == ["sent"]


def test_client_without_certificate_and_password_is_refused(
    tls_broker: BrokerProcess, java: Programs, trust: list[str]
) -> None:
    assert java.run("connect", tls_broker.openwire_url, "q", java=trust) == ["JMSSecurityException"]


def test_client_that_does_not_trust_the_broker_gets_no_connection(tls_broker: BrokerProcess, java: Programs) -> None:
    logged = len(tls_broker.log)
    assert java.run("connect", tls_broker.openwire_url, "q") == ["JMSException"]
    assert "certificate unknown: the client does not trust the broker's certificate" in tls_broker.log[logged:]


def test_client_without_tls_gets_no_connection(tls_broker: BrokerProcess, java: Programs) -> None:
    url = tls_broker.openwire_url.replace("ssl://", "tcp://")
    assert java.run("connect", f"{url}?wireFormat.maxInactivityDurationInitalDelay=2000", "q") == ["JMSException"]


def test_slow_and_broken_handshakes_disturb_no_client(
    tls_broker: BrokerProcess, java: Programs, trust: list[str], certificate: list[str]
) -> None:
    port = int(tls_broker.openwire_url.rpartition(":")[2])
    silent, broken = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
    with silent, broken:
        silent.sendall(b"\x16\x03\x01")
        broken.sendall(b"\x16\x03\x01\x00\x05hello")
        time.sleep(0.1)
        assert java.run("connect", tls_broker.openwire_url, "q", java=[*trust, *certificate]) == ["sent"]
