"""Tests of the HTTP server of a service. Source: docs/stages-running.md"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from truenext.cli.stages import health_server as module
from truenext.cli.stages.health_server import serve_health
from truenext.errors import ConfigurationError
from truenext.stage.core.health import ServiceHealth, ServiceStatus
from truenext.stage.interceptors.metrics import Metrics


def health(*, live: bool = True, ready: bool = True) -> ServiceHealth:
    facts = ServiceStatus(service="shop", state="running", broker=[], database="", stages=[])
    return ServiceHealth(live=live, ready=ready, reasons=[], facts=facts)


@asynccontextmanager
async def served(now: ServiceHealth, metrics: Metrics | None = None, port: int = 0) -> AsyncIterator[int]:
    async def figures() -> str:
        return "" if metrics is None else metrics.exposition()

    async with serve_health("127.0.0.1", port, lambda: now, figures) as url:
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
def test_the_status_says_whether_it_is_live_and_ready(now: ServiceHealth, expected: dict[str, int]) -> None:
    async def run() -> None:
        async with served(now) as port:
            for path, status in expected.items():
                found, body = await exchange(port, get(path))
                assert found == status
                assert json.loads(body)["service"] == "shop"
                assert json.loads(body)["live"] is now.live

    asyncio.run(run())


def test_metrics_are_there_if_the_service_counts() -> None:
    async def run() -> None:
        async with served(health(), Metrics()) as port:
            assert b"truenext_stage_running" in (await exchange(port, get("/metrics")))[1]
        async with served(health()) as port:
            assert (await exchange(port, get("/metrics")))[0] == 404

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
