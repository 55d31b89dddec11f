"""Whoever looks after a process asks it over HTTP: is it live, is it ready, and how is it?

As little of HTTP/1.1 as that takes: one request a connection, without a body. What a request may cost is bounded, for
anybody may send one who reaches the port.

Source: RFC 9112; Kubernetes, "Configure Liveness, Readiness and Startup Probes"
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from truenext.errors import ConfigurationError
from truenext.stage.interceptors.exposition import CONTENT_TYPE as METRICS
from truenext.url import host_and_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from truenext.stage.core.health import ServiceHealth

REQUEST_BYTES_MAX = 8192
REQUEST_S = 5.0
"""From the connection to the last byte of the answer."""
CONNECTIONS_MAX = 32
"""At once; who comes then is hung up on."""
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


class Answer(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


Figures = Callable[[], Awaitable[str]]
"""For Prometheus; empty if there are none."""


async def answer(method: str, path: str, health: Callable[[], ServiceHealth], figures: Figures) -> Answer:
    if method not in ("GET", "HEAD"):
        return Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n")
    if path == "/metrics" and (said := await figures()):
        found = Answer(HTTPStatus.OK, said.encode(), METRICS)
    elif path in ("/", "/live", "/ready"):
        now = health()
        is_well = {"/": True, "/live": now.live, "/ready": now.ready}[path]
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        facts = {**msgspec.to_builtins(now), **msgspec.to_builtins(now.facts)}
        del facts["facts"]
        found = Answer(status, msgspec.json.encode(facts) + b"\n", JSON)
    else:
        found = Answer(HTTPStatus.NOT_FOUND, b"there are /live, /ready, / and, with Metrics or an outbox, /metrics\n")
    return found


@asynccontextmanager
async def answering(host: str, port: int, health: Callable[[], ServiceHealth], figures: Figures) -> AsyncIterator[str]:
    """For as long as the block lasts; where, as a URL.

    Raises: ConfigurationError if it cannot listen there
    """
    open_now: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(open_now) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        open_now.add(writer)
        try:
            async with asyncio.timeout(REQUEST_S):
                writer.write(await _response(await _request(reader), health, figures))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            writer.transport.abort()
            open_now.discard(writer)

    try:
        server = await asyncio.start_server(serve, host, port, limit=REQUEST_BYTES_MAX)
    except OSError as error:
        reason = str(error.strerror or error)
        if error.errno and not isinstance(error, socket.gaierror):
            # The text of asyncio says the address once more.
            reason = os.strerror(error.errno)
        raise ConfigurationError(f"cannot listen on {host_and_port(host, port)} for --health: {reason}") from error
    try:
        yield f"http://{host_and_port(host, server.sockets[0].getsockname()[1])}"
    finally:
        server.close()
        for writer in open_now:
            writer.transport.abort()


async def _request(reader: asyncio.StreamReader) -> tuple[str, str] | None:
    """Method and path; None if it is none, or too long. Raises: EOFError"""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return None
    words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    return words[0], words[1].partition("?")[0]


async def _response(request: tuple[str, str] | None, health: Callable[[], ServiceHealth], figures: Figures) -> bytes:
    if request is None:
        found = Answer(HTTPStatus.BAD_REQUEST, b"this is no request\n")
    else:
        found = await answer(*request, health, figures)
    head = (
        f"HTTP/1.1 {found.status.value} {found.status.phrase}\r\n"
        f"Content-Type: {found.content_type}\r\n"
        f"Content-Length: {len(found.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if request is not None and request[0] == "HEAD" else found.body)
