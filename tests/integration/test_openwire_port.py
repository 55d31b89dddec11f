"""Tests of ports that speak OpenWire: which protocol a listener speaks, and what clients of other protocols get there.

What a client of OpenWire can do is not tested here.
"""

import asyncio
import http.client
import logging
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.integration import over_tls
from tests.integration.broker_here import broker_here, port_of
from tests.integration.broker_process import PATIENCE_SECONDS
from tests.integration.raw_client import RECEIVE_SECONDS
from tests.tls_broker import tls_broker
from tests.unit.test_wire_session import LineSession
from truenext import blocking
from truenext.broker.users import Users
from truenext.errors import ConfigurationError, Refused
from truenext.model.url import WireProtocol
from truenext.server import listener as listener_module
from truenext.testing.local import LocalBroker
from truenext.wire.openwire.session import OpenWireSession

URL = "openwire://127.0.0.1:0"
_PROPERTIES = struct.pack(">i", 0)
WIRE_FORMAT_INFO = b"\x01ActiveMQ" + struct.pack(">i?i", 12, True, len(_PROPERTIES)) + _PROPERTIES


KEEP_ALIVE = b"\x0a" + struct.pack(">i?", 1, True)


def frame_of(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def next_frame(sock: socket.socket) -> bytes:
    """Return the next frame of OpenWire without its size; empty at the end of the connection."""
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack_from(">i", data)[0]:
        received = sock.recv(1 if len(data) < 4 else 4 + struct.unpack_from(">i", data)[0] - len(data))
        if not received:
            assert not data, data
            return b""
        data += received
    return data[4:]


def run(
    use: Callable[[int], None],
    *,
    connections_max: int = 1000,
    before_login_max: int = 200,
    users: Users | None = None,
) -> None:
    """Run a broker with a port that speaks OpenWire while `use` uses the port, on a thread."""

    async def main() -> None:
        limited = partial(broker_here, connections_max=connections_max, before_login_max=before_login_max)
        async with limited(url=URL, has_tls=False, users=users) as listener:
            assert listener.url == f"openwire://127.0.0.1:{port_of(listener)}"
            await asyncio.to_thread(use, port_of(listener))

    asyncio.run(main())


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), RECEIVE_SECONDS)


def test_broker_sends_nothing_before_the_wire_format_info_of_the_client() -> None:
    def use(port: int) -> None:
        with connected(port) as sock:
            sock.settimeout(0.3)
            with pytest.raises(TimeoutError):
                sock.recv(1)
            sock.settimeout(RECEIVE_SECONDS)
            for byte in frame_of(WIRE_FORMAT_INFO):
                sock.sendall(bytes([byte]))
            assert next_frame(sock)[:9] == b"\x01ActiveMQ"

    run(use)


def test_client_of_stomp_at_an_openwire_port_is_told_what_the_port_speaks(caplog: pytest.LogCaptureFixture) -> None:
    def use(port: int) -> None:
        with (
            pytest.raises(Refused, match=r"this port speaks OpenWire: for STOMP, add stomp://HOST:PORT"),
            blocking.connect(f"stomp://127.0.0.1:{port}", timeout=PATIENCE_SECONDS, reconnect=False),
        ):
            pass

    caplog.set_level(logging.INFO, "truenext")
    run(use)
    (record,) = (each for each in caplog.records if each.message == "client refused: it speaks another protocol")
    assert vars(record)["protocol"] == "STOMP" and "--listen" in vars(record)["reason"]


def test_clients_of_http_and_tls_at_an_openwire_port_get_what_they_can_read() -> None:
    def use(port: int) -> None:
        web = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        web.request("GET", "/")
        answer = web.getresponse()
        assert answer.status == 400
        assert "the client speaks HTTP, and this port speaks OpenWire" in answer.read().decode()
        web.close()
        with connected(port) as sock, pytest.raises(ssl.SSLError, match=r"(?i)alert.protocol.version"):
            ssl.create_default_context().wrap_socket(sock, server_hostname="localhost")

    run(use)


@pytest.mark.parametrize("data", [b"\xff" * 30, frame_of(b"\x0a" + bytes(5)), b"\n\nCONNECT\n\n\0", frame_of(b"\0")])
def test_bytes_of_no_known_protocol_at_an_openwire_port_end_the_connection_without_an_answer(data: bytes) -> None:
    def use(port: int) -> None:
        with connected(port) as sock:
            sock.sendall(data)
            assert sock.recv(100) == b""

    run(use)


def test_connection_without_a_login_gives_its_place_to_a_newer_one(caplog: pytest.LogCaptureFixture) -> None:
    def use(port: int) -> None:
        with connected(port) as old:
            old.sendall(frame_of(WIRE_FORMAT_INFO))
            assert next_frame(old)
            time.sleep(listener_module.BEFORE_LOGIN_SECONDS_MIN)
            with connected(port) as new:
                new.sendall(frame_of(WIRE_FORMAT_INFO))
                assert next_frame(new)[:9] == b"\x01ActiveMQ"
                while next_frame(old):
                    pass

    run(use, before_login_max=1)
    (record,) = (each for each in caplog.records if each.message == "client refused")
    assert vars(record)["reason"].startswith("no ConnectionInfo yet, and 1 newer connections wait to log in")


@pytest.mark.parametrize("users", [None, Users()], ids=["no users", "users"])
def test_client_that_sends_no_wire_format_info_in_time_is_refused_and_the_log_says_so(
    users: Users | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenWireSession, "rules", OpenWireSession.rules._replace(opening_seconds_max=0.1))

    def use(port: int) -> None:
        with connected(port) as late, connected(port) as opened:
            late.sendall(frame_of(WIRE_FORMAT_INFO)[:20])
            opened.sendall(frame_of(WIRE_FORMAT_INFO))
            assert late.recv(1) == b"", "it has not opened, and gets nothing"
            time.sleep(0.2)
            # Its ConnectionInfo may come much later.
            assert next_frame(opened)[:9] == b"\x01ActiveMQ"
            opened.sendall(frame_of(KEEP_ALIVE))
            assert next_frame(opened)[:1] == KEEP_ALIVE[:1]

    run(use, users=users)
    (record,) = (each for each in caplog.records if each.message == "client refused")
    assert vars(record)["reason"] == "no WireFormatInfo within 15 seconds"


def test_client_of_a_protocol_without_control_requests_beyond_the_limit_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener_module, "make_session_factories", lambda: {WireProtocol.OPENWIRE: LineSession})

    def use(port: int) -> None:
        with connected(port) as first, connected(port) as second:
            for sock, answer in ((first, b"WELCOME\n"), (second, b"FAULT None limit ")):
                sock.sendall(b"LOGIN\n")
                assert sock.recv(1000).startswith(answer)

    run(use, connections_max=1)


def test_port_with_tls_speaks_openwire_within_it_and_tells_a_client_without_it_nothing(tmp_path: Path) -> None:
    options = ["--certificate", str(over_tls.folder() / "broker.pem"), "--log-level", "info"]
    with tls_broker(tmp_path, *options, scheme="openwire+ssl") as broker:
        with over_tls.client_context().wrap_socket(connected(broker.port), server_hostname="localhost") as sock:
            sock.sendall(frame_of(WIRE_FORMAT_INFO))
            assert next_frame(sock)[:9] == b"\x01ActiveMQ"
        with connected(broker.port) as plain:
            plain.sendall(frame_of(WIRE_FORMAT_INFO))
            assert plain.recv(100) == b""
        assert "reason='this port speaks TLS: connect with ssl://, not with tcp://'" in broker.log


def test_command_prints_the_scheme_of_each_listener(tmp_path: Path) -> None:
    with tls_broker(tmp_path, "--listen", "stomp://127.0.0.1:0", scheme="openwire") as broker:
        (out,) = tmp_path.glob("broker-*.out")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while out.read_text().count("\n") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        lines = re.findall(r"listening on ([a-z+]+)://127\.0\.0\.1:(\d+)\n", out.read_text())
        assert [scheme for scheme, _ in lines] == ["openwire", "stomp"]
        with blocking.connect(f"stomp://127.0.0.1:{lines[1][1]}", timeout=PATIENCE_SECONDS) as connection:
            connection.send("/queue/q", b"x")
        with connected(int(lines[0][1])) as sock:
            sock.sendall(frame_of(WIRE_FORMAT_INFO))
            assert next_frame(sock)
        assert broker.log == ""


def test_clients_refuse_to_connect_to_a_url_of_openwire() -> None:
    with pytest.raises(ConfigurationError, match="truenext's clients speak STOMP"):
        blocking.connect("openwire://127.0.0.1:1")


def test_local_broker_listens_for_each_protocol_at_the_same_ports_after_a_restart() -> None:
    async def main() -> None:
        local = LocalBroker(WireProtocol.OPENWIRE)
        await local.start()
        try:
            url = local._url_of(WireProtocol.OPENWIRE)
            assert url.startswith("openwire://") and local._url_of(WireProtocol.STOMP) == local.url
            for change in (None, local.restart, local.crash):
                if change is not None:
                    await change()
                    assert local._url_of(WireProtocol.OPENWIRE) == url
                reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                writer.write(frame_of(WIRE_FORMAT_INFO))
                assert (await reader.readexactly(13))[4:] == b"\x01ActiveMQ"
                kinds = [type(each._wire) for each in local._broker_run.connections.values()]
                assert kinds == [OpenWireSession]
                local.drop()
                with pytest.raises(ConnectionResetError):
                    await reader.read()
                writer.close()
                assert (await local.queue("q")).waiting == 0
        finally:
            local.kill()
        local.check()

    asyncio.run(main())
