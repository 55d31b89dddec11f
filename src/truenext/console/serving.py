"""Serving: listens on an address, and runs the console until it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from asyncio import constants
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import uvicorn

from truenext.client.core.credentials import Credentials
from truenext.console.app import Console, make_app
from truenext.console.doors import Address
from truenext.console.link import Broker, Link, OlderBroker, older_text
from truenext.console.rendering import Renderer
from truenext.console.shared import Shared
from truenext.errors import Code, ConfigurationError, Refused
from truenext.model.control_answers import ConnectionUser, QueuesReport
from truenext.model.url import host_and_port, is_loopback
from truenext.tls import fault_of_files
from truenext.version import VERSION

PORTS = {"http": 80, "https": 443}
CONNECTIONS_MAX = 500
"""Largest number of requests and streams at once."""
HANDSHAKE_S = 8.0
"""Seconds that a browser has for its TLS handshake."""
STOP_S = 3
"""Seconds that requests have to end when the console is stopped."""


class Listen(NamedTuple):
    """Address on which the console listens."""

    scheme: str
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    def with_port(self, port: int) -> Listen:
        return self._replace(port=port)

    @property
    def url(self) -> str:
        return f"{self.scheme}://{host_and_port(self.host, self.port)}"


class ConsoleOptions(NamedTuple):
    urls: tuple[str, ...]
    credentials: Credentials
    events: tuple[Path, ...]
    listen: Listen
    hosts: tuple[str, ...]
    """Further names or origins by which browsers call the console."""
    certificate: Path | None
    key: Path | None
    allows_plaintext: bool


def parse_listen(text: str) -> Listen:
    """Parse an address such as http://127.0.0.1:8161.

    >>> parse_listen("https://[::1]:8443")
    Listen(scheme='https', host='::1', port=8443)

    Raises: ConfigurationError if the text is none
    """
    try:
        return _parse_origin(text)
    except ValueError as error:
        raise ConfigurationError(f"{text!r} is not an address to listen on: {error}") from error


def _parse_origin(text: str) -> Listen:
    """Raises: ValueError if the text is no http://HOST:PORT or https://HOST:PORT"""
    parts = urlsplit(text)
    port = parts.port
    is_bare = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
    if parts.scheme not in PORTS or not parts.hostname or not is_bare or not text.isprintable():
        raise ValueError("it must be http://HOST:PORT, or with --certificate https://HOST:PORT")
    return Listen(parts.scheme, parts.hostname, PORTS[parts.scheme] if port is None else port)


def parse_host(text: str, listen: Listen) -> Listen:
    """Parse a name by which browsers call the console: an origin, or a host with or without a port. A port tells the
    scheme if it is 80 or 443; otherwise port and scheme are those of `listen`.

    >>> parse_host("console.example:443", Listen("http", "127.0.0.1", 8161))
    Listen(scheme='https', host='console.example', port=443)

    Raises: ConfigurationError if the text is none
    """
    try:
        if "://" in text:
            return _parse_origin(text)
        bare = f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text
        parsed = _parse_origin(f"{listen.scheme}://{bare}")
    except ValueError as error:
        raise ConfigurationError(
            f"--host {text!r} is no name of the console: give HOST, HOST:PORT, or the origin of a proxy such as "
            "https://HOST"
        ) from error
    port = urlsplit(f"//{bare}").port
    if port is None:
        return parsed.with_port(listen.port)
    schemes = {number: scheme for scheme, number in PORTS.items()}
    return parsed._replace(scheme=schemes.get(port, listen.scheme))


def check_options(options: ConsoleOptions) -> None:
    """Check what can be checked without a broker.

    Raises: ConfigurationError if options exclude one another, or a file is missing
    """
    listen = options.listen
    if listen.scheme == "https" and options.certificate is None:
        raise ConfigurationError(f"{listen.url} needs --certificate, the file with the certificate of the console")
    if listen.scheme == "http" and options.certificate is not None:
        raise ConfigurationError(f"--certificate needs --listen {listen._replace(scheme='https').url}")
    if listen.scheme == "http" and not listen.is_loopback and not options.allows_plaintext:
        raise ConfigurationError(
            f"{listen.url} is not of this machine alone, and passwords would be sent unencrypted: use https:// and "
            "--certificate, or --allow-plaintext if a proxy or a tunnel encrypts"
        )
    if listen.host in ("0.0.0.0", "::") and not options.hosts:
        raise ConfigurationError(
            f"{listen.url} stands for any address: name with --host the host by which browsers call the console"
        )
    public_address(listen, options.hosts)
    for folder in options.events:
        if not folder.is_dir():
            what = "is no folder" if folder.exists() else "does not exist"
            raise ConfigurationError(
                f"--events {folder}: it {what}; name the folder that a service of stages has as its `events`"
            )


def make_socket(listen: Listen) -> socket.socket:
    """Listen on an address.

    Raises: ConfigurationError if it is taken, or not of this machine
    """
    try:
        infos = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(100)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ConfigurationError(
            f"cannot listen on {listen.url}: {reason}; choose another address or port with --listen"
        ) from error
    return sock


def public_address(listen: Listen, hosts: Sequence[str]) -> Address:
    """Return the address of the console as browsers see it. Raises: ConfigurationError if a host is none"""
    names = {listen, *(parse_host(each, listen) for each in hosts)}
    if listen.is_loopback:
        names |= {listen._replace(host=host) for host in ("localhost", "127.0.0.1", "::1")}
    return Address(
        hosts=frozenset({*map(_shown_host, names), *(host_and_port(each.host, each.port).lower() for each in names)}),
        origins=frozenset(f"{each.scheme}://{_shown_host(each)}" for each in names),
        has_tls=any(each.scheme == "https" for each in names),
        is_loopback=listen.is_loopback,
        port=listen.port,
    )


def _shown_host(name: Listen) -> str:
    """Return what browsers send as Host: they leave out the default port of a scheme."""
    if name.port != PORTS[name.scheme]:
        return host_and_port(name.host, name.port).lower()
    return f"[{name.host}]" if ":" in name.host else name.host.lower()


async def ask_whether_users(broker: Broker) -> bool:
    """Return whether the broker has users. Check that it answers as the console needs.

    Raises: TruenextError without a broker, or with one that is too old
    """
    try:
        connection = await broker.connect(None, None)
    except Refused as error:
        if error.code == Code.LOGIN:
            return True
        raise
    link = Link(broker, connection, None)
    try:
        report = await link.ask("connection", None, ConnectionUser)
        await link.ask("queues", {"limit": 0, "order": "failing"}, QueuesReport)
    except Refused as error:
        # A broker that takes no body, or does not know this order, refuses what pages send.
        raise OlderBroker(older_text("queues")) from error
    finally:
        await link.close()
    return report.user is not None


async def run_console(options: ConsoleOptions, announce: Callable[[str], None]) -> None:
    """Serve the console until SIGINT or SIGTERM. `announce` gets sentences for the terminal.

    Raises: ConfigurationError for an address, or files, that cannot be used; TruenextError without a broker
    """
    check_options(options)
    broker = Broker(options.urls, options.credentials)
    has_users = await ask_whether_users(broker)
    if not has_users and not options.listen.is_loopback:
        raise ConfigurationError(
            f"the broker at {broker.name} has no users, so that any browser that reaches {options.listen.url} could "
            "do everything: listen on 127.0.0.1, or give the broker a users file (docs/security.md)"
        )
    sock = make_socket(options.listen)
    try:
        listen = options.listen.with_port(sock.getsockname()[1])
        settings = {
            "version": VERSION,
            "broker": broker.name,
            "users": "of the broker" if has_users else "none: the broker has no users",
            "listens on": listen.url,
            "names": ", ".join(sorted(public_address(listen, options.hosts).hosts)),
            "events": ", ".join(map(str, options.events)) or "none",
        }
        shared = Shared(broker, options.events, settings)
        console = Console(shared, public_address(listen, options.hosts), has_users=has_users, renderer=Renderer())
        server = _Server(_server_config(console, options))
        limit_handshakes()
        console.start()
        _stop_on_signals(server, console)
        announce(f"{listen.url}/" if has_users else f"{listen.url}/open?key={console.key}")
        try:
            await server.serve(sockets=[sock])
        finally:
            await console.close()
    finally:
        sock.close()


def _server_config(console: Console, options: ConsoleOptions) -> uvicorn.Config:
    """Return the configuration of uvicorn. Raises: ConfigurationError if the certificate cannot be used"""
    config = uvicorn.Config(
        make_app(console),
        http="h11",
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=STOP_S,
        ssl_certfile=None if options.certificate is None else str(options.certificate),
        ssl_keyfile=None if options.key is None else str(options.key),
    )
    try:
        config.load()
    except ssl.SSLError as error:
        named = f"--certificate {options.certificate}" + ("" if options.key is None else f", --key {options.key}")
        reason = fault_of_files(error, has_key=options.key is not None)
        raise ConfigurationError(f"{named}: {reason}") from error
    except OSError as error:
        raise ConfigurationError(f"--certificate {options.certificate}: {error.strerror}") from error
    return config


def limit_handshakes() -> None:
    """Limit the time of TLS handshakes in this process."""
    # uvicorn has no setting for this, and asyncio gives a minute to a connection that sends nothing.
    constants.SSL_HANDSHAKE_TIMEOUT = HANDSHAKE_S


class _Server(uvicorn.Server):
    """Server that leaves signals to the console."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _stop_on_signals(server: uvicorn.Server, console: Console) -> None:
    def stop(number: int) -> None:
        console.stopping.set()
        server.handle_exit(number, None)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
