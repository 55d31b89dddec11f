"""Tests of the socket with TLS: what it has taken, and what it must be given again."""

import random
import socket
import ssl
import threading
from contextlib import suppress

import pytest

from tests.integration import over_tls
from truenext.tls import CHUNK_BYTES, NoTlsError, TlsSocket


def pair(*, buffer: int = 4096) -> tuple[TlsSocket, ssl.SSLSocket]:
    """Return a server whose socket takes little at a time, and its blocking client, after their handshake."""
    here, there = socket.socketpair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    here.setblocking(False)
    there.settimeout(20)
    server = TlsSocket(here, over_tls.server_context())
    clients: list[ssl.SSLSocket] = []
    shaking = threading.Thread(
        target=lambda: clients.append(over_tls.client_context().wrap_socket(there, server_hostname="localhost"))
    )
    shaking.start()
    while shaking.is_alive() or not server.is_ready:
        with suppress(BlockingIOError):
            server.recv(65536)
        server.flush()
    shaking.join()
    return server, clients[0]


def test_bytes_arrive_as_they_were_given_whatever_the_socket_takes() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    server, client = pair()
    given = dice.randbytes(3_000_000)
    received = bytearray()
    taken = 0
    while taken < len(given):
        # What follows the encrypted bytes may change until it is encrypted, too.
        size = server.encrypted_count + dice.choice((1, 100, CHUNK_BYTES, 300_000))
        taken += server.send(given[taken : taken + size])
        assert server.encrypted_count <= CHUNK_BYTES
        if dice.random() < 0.7:
            client.settimeout(0.001)
            with suppress(TimeoutError):
                received += client.recv(dice.choice((10, 5000, 65536)))
        # Taken are at most the bytes whose records the peer can have.
        assert taken + server.encrypted_count >= len(received)
    client.settimeout(20)
    while len(received) < len(given):
        received += client.recv(65536)
    assert bytes(received) == given
    server.close()
    client.close()


def test_bytes_that_are_encrypted_and_not_taken_are_counted() -> None:
    server, client = pair()
    data = b"x" * 3 * CHUNK_BYTES
    assert server.send(data) == 0
    assert server.encrypted_count == CHUNK_BYTES and server.has_unsent
    assert server.send(data) == 0 and server.encrypted_count == CHUNK_BYTES
    client.settimeout(0.05)
    count = 0
    while count < CHUNK_BYTES:
        server.flush()
        with suppress(TimeoutError):
            count += len(client.recv(65536))
    # Now taken, and the next chunk is encrypted.
    assert server.send(data) == CHUNK_BYTES and server.encrypted_count == CHUNK_BYTES
    server.close()
    client.close()


def test_records_that_the_socket_has_taken_are_counted_before_all_are_taken() -> None:
    server, client = pair()
    data = random.Random(3).randbytes(CHUNK_BYTES)
    assert server.send(data) == 0
    received = bytearray()
    taken = 0
    client.settimeout(0.05)
    while len(received) < 2 * 16 * 1024:
        with suppress(TimeoutError):
            received += client.recv(16 * 1024)
        server.flush()
        taken += server.take_sent_records()
        assert taken >= len(received) and taken + server.encrypted_count == CHUNK_BYTES
    assert taken < CHUNK_BYTES
    # What was counted is not given again.
    while len(received) < len(data):
        taken += server.send(data[taken:])
        with suppress(TimeoutError):
            received += client.recv(16 * 1024)
    assert bytes(received) == data
    server.close()
    client.close()


def test_records_that_send_has_returned_are_not_counted_again() -> None:
    server, client = pair()
    assert server.send(b"a" * 1000) == 1000
    assert (server.take_sent_records(), server.encrypted_count) == (0, 0)
    server.close()
    client.close()


def test_record_of_the_largest_size_is_read_whole() -> None:
    server, client = pair()
    client.sendall(b"a" * 16 * 1024)
    assert server.recv(65536) == b"a" * 16 * 1024
    server.close()
    client.close()


def test_records_that_came_together_are_read_together() -> None:
    server, client = pair()
    for part in (b"a", b"b" * 20_000, b"c"):
        client.sendall(part)
    assert server.recv(65536) == b"a" + b"b" * 20_000 + b"c"
    server.close()
    client.close()


@pytest.mark.parametrize("is_valid", [True, False])
def test_reading_and_ending_write_no_bytes_of_a_blocked_send(*, is_valid: bool) -> None:
    """A broker that is silent (C28.9) may do both."""
    server, client = pair()
    assert server.send(b"x" * CHUNK_BYTES) == 0
    client.sendall(b"frame")
    with socket.socket(fileno=client.detach()) as raw:
        raw.setblocking(False)
        while read(raw):
            pass
        assert server.recv(65536) == b"frame"
        if not is_valid:
            raw.send(b"no record of TLS")
            with pytest.raises(ssl.SSLError):
                server.recv(65536)
        server.close_notify()
        assert read(raw) == b""
        server.flush()
        assert read(raw)
    server.close()


def read(raw: socket.socket) -> bytes:
    with suppress(BlockingIOError):
        return raw.recv(1 << 20)
    return b""


def test_client_that_speaks_no_tls_is_told_apart() -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    server = TlsSocket(here, over_tls.server_context())
    there.send(b"CONNECT\n")
    with pytest.raises(NoTlsError):
        server.recv(100)
    assert not server.is_ready and server.send(b"x") == 0
    here.close()
    there.close()


def test_end_that_was_told_is_an_end_and_names_of_a_client_are_those_of_its_certificate() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(over_tls.folder() / "broker.pem")
    context.load_verify_locations(over_tls.folder() / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(over_tls, "server_context", lambda: context)
        server, client = pair()
    names = server.peer_names()
    assert "DNS:client.example" in names and sum(name.startswith("sha256:") for name in names) == 1
    server.close_notify()
    assert client.recv(10) == b""
    server.close()
    client.close()
