"""HTTP server that tells whether a process is live and ready, and shows its metrics: of a broker, and of a service.

It serves only a small part of HTTP/1.1: one request for each connection, without a body. Any client that reaches the
port may send a request, so the cost of a request is limited.

    a service    serves on its own event loop: a stage that blocks the loop is noticed by the probe
    a broker     serves on a thread (HealthThread): it has no event loop while it restores and stands by

Source: RFC 9112; Kubernetes, "Configure Liveness, Readiness and Startup Probes"
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from math import inf
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from truenext.clock import monotonic
from truenext.errors import ConfigurationError
from truenext.model.url import host_and_port

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 8192
REQUEST_S = 5.0
"""Longest time in seconds from the start of a connection to the last byte of the answer."""
CONNECTIONS_MAX = 16
"""Largest number of connections at the same time. Further connections are closed without an answer. They are among the
FILES_OWN of a broker."""
METRICS_AGE_S = 1.0
"""Seconds for which a text of metrics is used again, so that many scrapes cost no more than one a second."""
STOP_S = 2.0
"""Longest time in seconds for which the end of a HealthThread waits for the thread."""
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Assessed(Protocol):
    """Health of a broker or a service, as a struct that also has `reasons`."""

    @property
    def live(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def facts(self) -> msgspec.Struct: ...


class Health(NamedTuple):
    is_live: bool
    is_ready: bool
    body: bytes
    """Body of the answer, in JSON."""

    @classmethod
    def of(cls, assessed: Assessed) -> Health:
        """Return the health with the facts from which it was concluded."""
        facts = {**msgspec.to_builtins(assessed), **msgspec.to_builtins(assessed.facts)}
        del facts["facts"]
        return cls(assessed.live, assessed.ready, msgspec.json.encode(facts) + b"\n")


class Response(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


HealthSource = Callable[[], Health]
MetricsSource = Callable[[], Awaitable[Iterable["Metric"]]]
"""Function that returns the metrics of the process; empty if there are none."""


class _MetricsText:
    """Text of the metrics, made anew for a request if the last text is older than METRICS_AGE_S."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source
        self._lock = asyncio.Lock()
        self._text = b""
        self._made_at = -inf

    async def get(self) -> bytes:
        async with self._lock:
            if monotonic() - self._made_at >= METRICS_AGE_S:
                self._text = _format(await self._source())
                self._made_at = monotonic()
            return self._text


class _Collected(NamedTuple):
    """Metrics in the form of a collector."""

    metrics: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def _format(metrics: Iterable[Metric]) -> bytes:
    # Imported here, because it takes 30 ms: processes without scrapes do not need it.
    from prometheus_client import generate_latest

    return generate_latest(_Collected(metrics))


async def _respond(method: str, path: str, health: HealthSource, metrics: _MetricsText) -> Response:
    if method not in ("GET", "HEAD"):
        return Response(HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n")
    if path == "/metrics" and (text := await metrics.get()):
        response = Response(HTTPStatus.OK, text, METRICS_TYPE)
    elif path in ("/", "/live", "/ready"):
        now = health()
        is_well = {"/": True, "/live": now.is_live, "/ready": now.is_ready}[path]
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        response = Response(status, now.body, JSON)
    else:
        response = Response(HTTPStatus.NOT_FOUND, b"there are /live, /ready, / and, if it has metrics, /metrics\n")
    return response


@asynccontextmanager
async def serve_health(host: str, port: int, health: HealthSource, metrics: MetricsSource) -> AsyncIterator[str]:
    """Serve health and metrics by HTTP until the end of the block, and yield the URL.

    Raises: ConfigurationError if the address cannot be listened on
    """
    connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
    metrics_text = _MetricsText(metrics)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
        else:
            connections[writer] = asyncio.create_task(serve(reader, writer))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                writer.write(await _response(await _request(reader), health, metrics_text))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError):
            pass
        except Exception:
            logger.exception("request for health or metrics not answered")
        finally:
            writer.transport.abort()
            connections.pop(writer, None)

    try:
        server = await asyncio.start_server(accept, host, port, limit=REQUEST_BYTES_MAX)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"cannot listen on {host_and_port(host, port)} for --health: {_reason(error)}"
        ) from error
    try:
        yield f"http://{host_and_port(host, server.sockets[0].getsockname()[1])}"
    finally:
        server.close()
        # The event loop may have a new connection that is not in `connections` yet.
        await asyncio.sleep(0)
        for writer, task in list(connections.items()):
            task.cancel()
            writer.transport.abort()
        await asyncio.sleep(0)


def _reason(error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return "it is not a host name"
    if error.errno and not isinstance(error, socket.gaierror):
        # asyncio's own text repeats the address.
        return os.strerror(error.errno)
    return str(error.strerror or error)


async def _request(reader: asyncio.StreamReader) -> tuple[str, str] | None:
    """Read the method and the path of a request. None if the request is invalid or too long.

    Raises: EOFError if the client has closed the connection before the end of the request
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return None
    words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    return words[0], words[1].partition("?")[0]


async def _response(request: tuple[str, str] | None, health: HealthSource, metrics: _MetricsText) -> bytes:
    if request is None:
        response = Response(HTTPStatus.BAD_REQUEST, b"this is no request\n")
    else:
        response = await _respond(*request, health, metrics)
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if request is not None and request[0] == "HEAD" else response.body)


class HealthThread:
    """Server of health and metrics on a thread of its own, with an event loop of its own. `health` and `metrics` are
    called on this thread."""

    def __init__(self, host: str, port: int, health: HealthSource, metrics: MetricsSource) -> None:
        """Start the thread, and return once it listens.

        Raises: ConfigurationError if the address cannot be listened on
        """
        self._started: Future[tuple[str, Callable[[], object]]] = Future()
        serving = serve_health(host, port, health, metrics)
        # A daemon: a hanging probe must not delay the end of a broker that has failed.
        self._thread = Thread(target=lambda: asyncio.run(self._run(serving)), name="truenext-health", daemon=True)
        self._thread.start()
        self.url, self._stop = self._started.result()

    async def _run(self, serving: AbstractAsyncContextManager[str]) -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            async with serving as url:
                self._started.set_result((url, lambda: loop.call_soon_threadsafe(stop.set)))
                await stop.wait()
        except Exception as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    def close(self) -> None:
        if self._thread.is_alive():
            self._stop()
            self._thread.join(STOP_S)
