"""Tests of the HTTP server of a service and of a broker. Source: docs/stages-running.md, docs/monitoring.md"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.request import urlopen

import pytest
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from truenext.cli import health_server as module
from truenext.cli.health_server import Health, HealthThread, serve_health
from truenext.errors import ConfigurationError
from truenext.model.service_health import ServiceHealth, ServiceStatus

WELL = Health(True, True, b"{}\n")


def health(*, live: bool = True, ready: bool = True) -> Health:
    facts = ServiceStatus(service="shop", state="running", broker=[], database="", stages=[])
    return Health.of(ServiceHealth(live=live, ready=ready, reasons=[], facts=facts))


async def none() -> Iterable[Metric]:
    return []


@asynccontextmanager
async def served(now: Health, metrics: module.MetricsSource = none, port: int = 0) -> AsyncIterator[int]:
    async with serve_health("127.0.0.1", port, lambda: now, metrics) as url:
        yield int(url.rpartition(":")[2])


async def exchange(port: int, request: bytes) -> tuple[int, bytes]:
    """Return status and body; 0 and no body if the server closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        answer = await reader.read()
    except ConnectionError:
        answer = b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (health(), {"/": 200, "/live": 200, "/ready": 200}),
        (health(ready=False), {"/": 200, "/live": 200, "/ready": 503}),
        (health(live=False, ready=False), {"/": 200, "/live": 503, "/ready": 503}),
    ],
)
def test_the_status_says_whether_it_is_live_and_ready(now: Health, expected: dict[str, int]) -> None:
    async def run() -> None:
        async with served(now) as port:
            for path, status in expected.items():
                found, body = await exchange(port, get(path))
                assert found == status
                assert json.loads(body)["service"] == "shop"
                assert json.loads(body)["live"] is now.is_live

    asyncio.run(run())


class Counting:
    """Source of metrics that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> Iterable[Metric]:
        self.calls += 1
        await asyncio.sleep(0)
        return [GaugeMetricFamily("calls", "Calls.", value=self.calls)]


def test_metrics_are_there_if_the_process_has_some() -> None:
    async def run() -> None:
        async with served(health(), Counting()) as port:
            assert b"\ncalls 1.0\n" in (await exchange(port, get("/metrics")))[1]
        async with served(health()) as port:
            assert (await exchange(port, get("/metrics")))[0] == 404

    asyncio.run(run())


def test_many_scrapes_at_once_make_the_metrics_once(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Counting()

    async def run() -> None:
        async with served(health(), metrics) as port:
            answers = await asyncio.gather(*(exchange(port, get("/metrics")) for _ in range(10)))
            assert {body for _, body in answers} == {answers[0][1]}
            assert metrics.calls == 1
            monkeypatch.setattr(module, "METRICS_AGE_S", 0.0)
            assert b"\ncalls 2.0\n" in (await exchange(port, get("/metrics")))[1]

    asyncio.run(run())


def test_http_server_refuses_invalid_requests_and_goes_on() -> None:
    async def run() -> None:
        async with served(health()) as port:
            assert (await exchange(port, get("/nowhere")))[0] == 404
            assert (await exchange(port, get("/live?x=1")))[0] == 200
            assert (await exchange(port, b"POST / HTTP/1.1\r\n\r\n"))[0] == 405
            assert (await exchange(port, b"nonsense\r\n\r\n"))[0] == 400
            assert (await exchange(port, b"GET / HTTP/1.1\r\nx: " + b"x" * 20_000 + b"\r\n\r\n"))[0] in (400, 0)
            assert await exchange(port, b"HEAD /live HTTP/1.1\r\n\r\n") == (200, b"")
            assert (await exchange(port, get("/live")))[0] == 200

    asyncio.run(run())


def test_http_server_closes_an_idle_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.05)

    async def run() -> None:
        async with served(health()) as port:
            assert (await exchange(port, b"GET / HT"))[0] == 0
            assert (await exchange(port, get("/live")))[0] == 200

    asyncio.run(run())


def test_http_server_closes_connections_above_its_limit() -> None:
    # C33.5
    async def run() -> None:
        async with served(health()) as port:
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(module.CONNECTIONS_MAX)]
            # They are served in the order in which they came.
            assert (await exchange(port, get("/live")))[0] == 0
            for _, writer in idle:
                writer.close()
                await writer.wait_closed()
            while (await exchange(port, get("/live")))[0] != 200:
                await asyncio.sleep(0.001)

    asyncio.run(run())


def test_a_port_that_is_taken_is_said() -> None:
    async def run() -> None:
        async with served(health()) as port:
            with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port} for --health"):
                async with served(health(), port=port):
                    pass

    asyncio.run(run())


# ---- On a thread ----


def test_server_on_a_thread_answers_while_the_main_thread_is_busy() -> None:
    thread = HealthThread("127.0.0.1", 0, lambda: WELL, Counting())
    try:
        with urlopen(f"{thread.url}/ready", timeout=5) as answer:
            assert answer.read() == WELL.body
        with urlopen(f"{thread.url}/metrics", timeout=5) as answer:
            assert answer.read().endswith(b"calls 1.0\n")
    finally:
        thread.close()
    assert not thread._thread.is_alive()


def test_server_on_a_thread_ends_although_a_probe_hangs() -> None:
    thread = HealthThread("127.0.0.1", 0, lambda: WELL, none)
    host, _, port = thread.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as hanging:
        hanging.sendall(b"GET /live")
        # Connections are accepted in order.
        urlopen(f"{thread.url}/live", timeout=5).close()
        started = time.monotonic()
        thread.close()
        assert time.monotonic() - started < module.STOP_S
        assert not thread._thread.is_alive()


def test_server_on_a_thread_whose_port_is_taken_does_not_start() -> None:
    thread = HealthThread("127.0.0.1", 0, lambda: WELL, none)
    port = int(thread.url.rpartition(":")[2])
    try:
        with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1:{port} for --health: Address"):
            HealthThread("127.0.0.1", port, lambda: WELL, none)
    finally:
        thread.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70, "::1%nothing"])
def test_host_that_is_none_is_refused_with_its_name(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on .* for --health: "):
        HealthThread(host, 0, lambda: WELL, none)


def test_answer_of_a_source_that_fails_is_none_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> Iterable[Metric]:
        raise ValueError("no metrics")

    async def run() -> None:
        async with served(health(), fail) as port:
            assert (await exchange(port, get("/metrics")))[0] == 0
            assert (await exchange(port, get("/live")))[0] == 200

    asyncio.run(run())
    assert [(each.message, each.exc_text is not None) for each in caplog.records] == [
        ("request for health or metrics not answered", True)
    ]
