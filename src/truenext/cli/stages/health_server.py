"""HTTP server that tells whether a process is live and ready, and shows its metrics.

It serves only a small part of HTTP/1.1: one request for each connection, without a body. Any client that reaches the
port may send a request, so the cost of a request is limited.

Source: RFC 9112; Kubernetes, "Configure Liveness, Readiness and Startup Probes"
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from truenext.errors import ConfigurationError
from truenext.model.service_health import ServiceHealth
from truenext.model.url import host_and_port
from truenext.stage.interceptors.exposition import CONTENT_TYPE as METRICS_TYPE

REQUEST_BYTES_MAX = 8192
REQUEST_S = 5.0
"""Longest time in seconds from the start of a connection to the last byte of the answer."""
CONNECTIONS_MAX = 32
"""Largest number of connections at the same time. Further connections are closed without an answer."""
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


class Response(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


MetricsText = Callable[[], Awaitable[str]]
"""Function that returns the metrics as a text for Prometheus; empty if there are none."""


async def respond(method: str, path: str, health: Callable[[], ServiceHealth], metrics: MetricsText) -> Response:
    if method not in ("GET", "HEAD"):
        return Response(HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n")
    if path == "/metrics" and (text := await metrics()):
        response = Response(HTTPStatus.OK, text.encode(), METRICS_TYPE)
    elif path in ("/", "/live", "/ready"):
        now = health()
        is_well = {"/": True, "/live": now.live, "/ready": now.ready}[path]
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        facts = {**msgspec.to_builtins(now), **msgspec.to_builtins(now.facts)}
        del facts["facts"]
        response = Response(status, msgspec.json.encode(facts) + b"\n", JSON)
    else:
        response = Response(
            HTTPStatus.NOT_FOUND, b"there are /live, /ready, / and, with Metrics or an outbox, /metrics\n"
        )
    return response


@asynccontextmanager
async def serve_health(
    host: str, port: int, health: Callable[[], ServiceHealth], metrics: MetricsText
) -> AsyncIterator[str]:
    """Serve health and metrics by HTTP until the end of the block, and yield the URL.

    Raises: ConfigurationError if the address cannot be listened on
    """
    connections: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        connections.add(writer)
        try:
            async with asyncio.timeout(REQUEST_S):
                writer.write(await _response(await _request(reader), health, metrics))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.transport.abort()
            connections.discard(writer)

    try:
        server = await asyncio.start_server(serve, host, port, limit=REQUEST_BYTES_MAX)
    except OSError as error:
        reason = str(error.strerror or error)
        if error.errno and not isinstance(error, socket.gaierror):
            # asyncio's own text repeats the address.
            reason = os.strerror(error.errno)
        raise ConfigurationError(f"cannot listen on {host_and_port(host, port)} for --health: {reason}") from error
    try:
        yield f"http://{host_and_port(host, server.sockets[0].getsockname()[1])}"
    finally:
        server.close()
        for writer in connections:
            writer.transport.abort()


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


async def _response(
    request: tuple[str, str] | None, health: Callable[[], ServiceHealth], metrics: MetricsText
) -> bytes:
    if request is None:
        response = Response(HTTPStatus.BAD_REQUEST, b"this is no request\n")
    else:
        response = await respond(*request, health, metrics)
    head = (
        f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if request is not None and request[0] == "HEAD" else response.body)
