"""Tests of the command `truenext console`: its options, its end, and what clients notice of a console that hangs."""

from __future__ import annotations

import asyncio
import http.client
import re
import signal
import socket
import ssl
import sys
import time
from asyncio import constants
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import trustme

from tests.drawing import each_one_of
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import Forked, completed_text
from truenext import blocking
from truenext.console.serving import Listen, limit_handshakes, parse_listen, public_address
from truenext.errors import ConfigurationError


@contextmanager
def running(folder: Path, *options: str, is_alone: bool = False) -> Iterator[tuple[Forked | Popen[bytes], str]]:
    """Run a console until the end of the block, and yield it with the address that it has printed. With `is_alone` its
    process has only its own modules."""
    log = folder / "console.log"
    command = ["console", *options]
    process: Forked | Popen[bytes]
    if is_alone:
        with log.open("wb") as file:
            process = Popen([sys.executable, "-m", "truenext", *command], stdout=file, stderr=file)
    else:
        process = Forked(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := re.search(r"https?://\S+", log.read_text() if log.exists() else "")) is None:
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.02)
        yield process, found[0]
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


class Answer(NamedTuple):
    status: int
    cookie: str
    body: bytes


def get(
    address: str, path: str = "", headers: Mapping[str, str] | None = None, context: ssl.SSLContext | None = None
) -> Answer:
    """Return the answer to a GET of a path of the console, or of the printed address itself."""
    parts = urlsplit(address)
    kind = http.client.HTTPConnection if context is None else partial(http.client.HTTPSConnection, context=context)
    with closing(kind(parts.hostname or "", parts.port, timeout=PATIENCE_SECONDS)) as connection:
        connection.request("GET", path or f"{parts.path}?{parts.query}", headers=headers or {})
        answer = connection.getresponse()
        cookie = (answer.headers["set-cookie"] or "").partition(";")[0]
        return Answer(answer.status, cookie, answer.read())


def failed(*options: str) -> str:
    """Return the error of a console that does not start."""
    done = completed_text("console", "--listen", "http://127.0.0.1:0", *options)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("number", each_one_of([signal.SIGTERM, signal.SIGINT], ["SIGTERM", "SIGINT"]))
def test_console_opens_by_its_printed_address_and_ends_with_a_signal(
    open_broker: BrokerProcess, tmp_path: Path, number: signal.Signals
) -> None:
    # C35.2
    listen = ["--broker", open_broker.url, "--listen", "http://127.0.0.1:0"]
    with running(tmp_path, *listen) as (process, address):
        cookie = get(address).cookie
        assert b'"rows"' in get(address, "/queues", {"cookie": cookie, "accept": "application/json"}).body
        assert get(address, "/queues", {"host": "evil.example", "cookie": cookie}).status == 421
        # An open stream does not delay the end.
        parts = urlsplit(address)
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port)) as reader:
            reader.request("GET", "/queues", headers={"cookie": cookie, "accept": "text/event-stream"})
            assert reader.getresponse().status == 200
            process.send_signal(number)
            assert process.wait(PATIENCE_SECONDS) == 0
    assert "Traceback" not in (tmp_path / "console.log").read_text()


def test_console_serves_tls(users_broker: BrokerProcess, tmp_path: Path) -> None:
    authority = trustme.CA()
    file = tmp_path / "console.pem"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(file))
    options = ["--listen", "https://127.0.0.1:0", "--certificate", str(file), "--broker", users_broker.url]
    with running(tmp_path, *options) as (_, address):
        context = ssl.create_default_context()
        authority.configure_trust(context)
        answer = get(address.replace("127.0.0.1", "localhost"), "/login", context=context)
        assert answer.status == 200 and answer.cookie.startswith("__Host-truenext-")


def test_clients_notice_nothing_of_a_console_that_hangs_or_is_killed(own_broker: BrokerProcess, tmp_path: Path) -> None:
    # C35.9
    with running(tmp_path, "--broker", own_broker.url, "--listen", "http://127.0.0.1:0") as (process, address):
        cookie, parts = get(address).cookie, urlsplit(address)
        with blocking.connect(own_broker.url) as client:
            client.send_many("/queue/many", [bytes(20_000)] * 300)
            for number in range(2):
                # It is asked for a page that it does not send any more.
                with closing(http.client.HTTPConnection(parts.hostname or "", parts.port)) as reader:
                    reader.request("GET", "/queue?name=many", headers={"cookie": cookie})
                    process.send_signal(signal.SIGSTOP if number == 0 else signal.SIGKILL)
                    for _ in range(50):
                        client.send("/queue/a", "a")
                        with client.consumer("/queue/a") as consumer:
                            assert consumer.receive(timeout=5) is not None


UNMET: list[tuple[list[str], str]] = [
    (["--listen", "127.0.0.1:8161"], "must be http://HOST:PORT"),
    (["--listen", "ftp://127.0.0.1"], "must be http://HOST:PORT"),
    (["--listen", "http://127.0.0.1:99999"], "not an address to listen on"),
    (["--listen", "http://127.0.0.1:8161/path"], "must be http://HOST:PORT"),
    (["--listen", "http://192.0.2.1:8161"], "--allow-plaintext"),
    (["--listen", "http://0.0.0.0:8161", "--allow-plaintext"], "--host"),
    (["--listen", "https://127.0.0.1:8161"], "--certificate"),
    (["--events", "/nowhere/events"], "does not exist"),
    (["--broker", "stomp://127.0.0.1:1"], "truenext serve`, set its address with --broker"),
]
"""Options that cannot be met, and a part of the error."""


@pytest.mark.parametrize("unmet", each_one_of(UNMET, [" ".join(options) for options, _ in UNMET]))
def test_option_that_cannot_be_met_is_told_in_a_sentence(unmet: tuple[list[str], str]) -> None:
    # C35.1
    options, part = unmet
    assert part in failed(*options)


def test_faults_that_need_a_broker_are_told_in_a_sentence(open_broker: BrokerProcess, tmp_path: Path) -> None:
    # C35.1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = failed("--broker", open_broker.url, "--listen", f"http://127.0.0.1:{port}")
        assert "in use" in error and "--listen" in error
    error = failed("--broker", open_broker.url, "--listen", "http://0.0.0.0:0", "--allow-plaintext", "--host", "a")
    assert "has no users" in error and "users file" in error
    no_key = tmp_path / "no.pem"
    no_key.write_text("no key")
    error = failed("--broker", open_broker.url, "--listen", "https://127.0.0.1:0", "--certificate", str(no_key))
    assert "--certificate" in error and "set key (--key)" in error and "SSL" not in error.upper()


def test_console_of_a_broker_with_users_may_listen_anywhere(users_broker: BrokerProcess, tmp_path: Path) -> None:
    options = ["--broker", users_broker.url, "--listen", "http://0.0.0.0:0", "--host", "a.example", "--allow-plaintext"]
    with running(tmp_path, *options) as (_, address):
        assert "open?key" not in address
        assert get(address, "/login", {"host": "127.0.0.1"}).status == 421


def test_handshake_that_does_not_begin_ends_within_the_time_of_the_console(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fixed: such a connection stayed for a minute."""
    monkeypatch.setattr(constants, "SSL_HANDSHAKE_TIMEOUT", 60.0)
    monkeypatch.setattr("truenext.console.serving.HANDSHAKE_S", 0.1)
    file = tmp_path / "console.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(file))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)

    async def use() -> None:
        limit_handshakes()
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), PATIENCE_SECONDS / 2) == b""
            writer.close()

    asyncio.run(use())


# ---- Names of the console ----


def test_names_of_the_console_are_those_of_its_options() -> None:
    local = public_address(Listen("http", "127.0.0.1", 8161), ())
    assert local.hosts == {"127.0.0.1:8161", "localhost:8161", "[::1]:8161"} and local.is_loopback
    far = public_address(Listen("https", "10.0.0.1", 443), ("Console.example", "proxy.example:8443"))
    assert far.hosts == {
        *("10.0.0.1", "10.0.0.1:443", "console.example", "console.example:443", "proxy.example:8443"),
    }
    assert far.cookie_name.startswith("__Host-") and not far.is_loopback


def test_default_ports_are_those_of_http() -> None:
    assert parse_listen("http://localhost").port == 80
    assert parse_listen("https://[::1]") == Listen("https", "::1", 443)
    with pytest.raises(ConfigurationError):
        parse_listen("http://")


def test_host_may_be_an_origin_and_its_default_port_is_left_out() -> None:
    # C35.4
    for host in ("https://Console.example", "https://console.example:443/", "console.example:443"):
        address = public_address(Listen("http", "127.0.0.1", 8161), [host])
        assert address.hosts >= {"console.example", "console.example:443"} and address.has_tls
        assert "https://console.example" in address.origins and "http://127.0.0.1:8161" in address.origins
    for host in ("https://a/path", "ftp://a", "", "a:x"):
        with pytest.raises(ConfigurationError, match="--host"):
            public_address(Listen("http", "127.0.0.1", 8161), [host])
