"""Tests of services whose broker has TLS: each of their connections uses it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.forked import Forked
from tests.tls_broker import PATIENCE_S, Certificates, TlsBroker, tls_broker
from truenext.errors import ConfigurationError, NoBroker
from truenext.stage import Service, service_run


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


def test_service_with_ca_certificate_and_key_runs_over_tls(broker: TlsBroker, certificates: Certificates) -> None:
    certificate, key = certificates.issue_pair("shop", "shop.example")
    service = Service("shop", broker=broker.url, ca=certificates.ca, certificate=certificate, key=str(key))

    @service.single("order.place", str, str)
    async def place(order: str) -> str:
        return f"placed {order}"

    async def run() -> None:
        async with service.running():
            assert await service.ask(place, "a book", trace="t", timeout=PATIENCE_S) == "placed a book"

    asyncio.run(run())


@pytest.mark.alternates("services that find no broker")
def test_service_with_the_wrong_ca_says_why_it_has_no_broker(
    broker: TlsBroker, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_run, "CONNECT_TIMEOUT_S", 0.5)
    # The certificate of a client signs no other one.
    service = Service("shop", broker=broker.url, ca=certificates.client)

    async def run() -> None:
        async with service.connected():
            pass

    with pytest.raises(NoBroker, match="the broker's certificate is not accepted"):
        asyncio.run(run())


def test_service_with_a_missing_file_is_refused_when_it_connects(tmp_path: Path) -> None:
    async def connect() -> None:
        async with Service("shop", broker="stomp+ssl://localhost", ca=tmp_path / "ca").connected():
            pass

    with pytest.raises(ConfigurationError, match=r"^ca '.*/ca' cannot be used: No such file or directory$"):
        asyncio.run(connect())


def test_stages_run_uses_the_ca_of_the_environment_and_the_certificate_of_the_service(
    broker: TlsBroker, certificates: Certificates, tmp_path: Path
) -> None:
    (tmp_path / "secure_shop.py").write_text(
        "from truenext.stage import Service\n"
        f"app = Service('shop', broker={broker.url!r}, ca='/nowhere', certificate={str(certificates.client)!r})\n"
        "@app.terminator('order.place', str)\n"
        "async def place(order: str) -> None: ...\n"
    )
    log = tmp_path / "log"
    log.touch()
    environment = {"TRUENEXT_CA": str(certificates.ca)}
    command = ["stages", "run", "secure_shop:app"]
    process = Forked(command, stdout=log, stderr=log, folder=tmp_path, environment=environment)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "shop runs 1 stage" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        process.kill()
