"""Tests of heart-beats that the heart-beat thread writes to a TLS connection whose socket is full.

A heart-beat that is encrypted and not taken by the socket must be the beginning of what is sent next: TlsSocket takes
the first bytes of the next `send` for those that it has encrypted already.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import Mock

import pytest
import trustme

from truenext.client.core.client import connect_options
from truenext.client.core.link import Link
from truenext.client.tasks.connection import Message
from truenext.client.tasks.driver import Driver
from truenext.tls import TlsSocket

FRAME = b"SEND" + b"x" * 1000
"""Bytes without a line feed, which a heart-beat is."""
READ_BYTES = 1 << 16
RECORD_BYTES = 23
"""Length of a record of TLS 1.3 with one byte."""


@cache
def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a client and of a server."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return client, server


class Peer:
    """Broker's side of a connection, which reads only when the test says so."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.tls = TlsSocket(sock, contexts()[1])
        self.received = bytearray()
        """All that was decrypted."""

    def read(self, size: int = READ_BYTES) -> bool:
        """Read up to `size` encrypted bytes. Returns whether there were any."""
        try:
            self.received += self.tls.recv(size)
        except BlockingIOError:
            return False
        return True

    def read_all(self) -> None:
        while self.read():
            pass


@contextmanager
def connection() -> Iterator[tuple[TlsSocket, Peer]]:
    """Make a client's side and a peer that have shaken hands."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        tls, peer = TlsSocket(ours, contexts()[0], host="localhost"), Peer(theirs)
        received = b""
        while not (tls.is_ready and peer.tls.is_ready):
            ours.sendall(tls.shake_hands(received))
            peer.read()
            received = theirs_to_ours(ours)
        yield tls, peer


def theirs_to_ours(ours: socket.socket) -> bytes:
    try:
        return ours.recv(READ_BYTES)
    except BlockingIOError:
        return b""


@contextmanager
def driver_of(tls: TlsSocket) -> Iterator[tuple[Driver, Link]]:
    """Make a driver with a heart-beat thread that uses this connection, which is up."""
    options = connect_options(
        (),
        {},
        client_id=None,
        heart_beat_s=10.0,
        reconnects=True,
        heartbeat_thread=True,
    )
    driver = Driver(options, "test", Message)
    link = Link(1, 10.0, 0.0, on_frame=lambda _: None)
    link.is_up, link.heartbeat_interval_s = True, 1.0
    driver.client.context.link = driver._link = link
    driver._sock = tls
    # Its calls are made by the test.
    driver._heartbeat_thread = Mock()
    try:
        yield driver, link
    finally:
        driver.loop.remove_writer(tls)
        driver._sock = None


def fill(tls: TlsSocket, peer: Peer) -> int:
    """Send until the socket takes nothing more, and nothing is encrypted that it has not taken. Returns the number of
    bytes."""
    count = 0
    while tls.send(b"x"):
        count += 1
    # The last record is encrypted, and gets the place of the first.
    assert peer.read(RECORD_BYTES)
    assert tls.send(b"x")
    return count + 1


async def pass_of_loop() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def beat(driver: Driver, link: Link) -> None:
    """Do what the heart-beat thread does if the loop has written nothing since its last check."""
    driver.send_heart_beat_if_idle(link.written_at)


def test_heart_beat_that_is_not_taken_is_the_beginning_of_what_is_sent_next() -> None:
    async def main() -> None:
        with connection() as (tls, peer), driver_of(tls) as (driver, link):
            filled = fill(tls, peer)
            beat(driver, link)
            assert tls.encrypted_count == 1
            link.write(FRAME)
            assert not driver.flush()
            beat(driver, link)
            assert tls.encrypted_count == 1
            peer.read_all()
            await pass_of_loop()
            peer.read_all()
            assert bytes(peer.received[filled:]) == b"\n" + FRAME
            assert driver.flush()

    asyncio.run(main())


def test_heart_beat_that_is_not_taken_is_written_by_the_next_check_of_the_thread() -> None:
    async def main() -> None:
        with connection() as (tls, peer), driver_of(tls) as (driver, link):
            filled = fill(tls, peer)
            beat(driver, link)
            peer.read_all()
            # The loop is blocked.
            beat(driver, link)
            peer.read_all()
            assert bytes(peer.received[filled:]) == b"\n" and tls.encrypted_count == 0
            beat(driver, link)
            link.write(FRAME)
            assert driver.flush()
            peer.read_all()
            await pass_of_loop()
            assert bytes(peer.received[filled:]) == b"\n\n" + FRAME

    asyncio.run(main())


@pytest.mark.parametrize("is_full", [True, False])
def test_heart_beat_that_begins_while_a_frame_is_about_to_be_written_precedes_it(is_full: bool) -> None:
    async def main() -> None:
        with connection() as (tls, peer), driver_of(tls) as (driver, link):
            filled = fill(tls, peer) if is_full else 0
            take_output: Callable[[], list[bytes]] = driver.client.data_to_send

            def take_output_after_a_heart_beat() -> list[bytes]:
                beat(driver, link)
                peer.read_all()
                return take_output()

            driver.client.data_to_send = take_output_after_a_heart_beat  # type: ignore[method-assign]
            link.write(FRAME)
            driver.flush()
            peer.read_all()
            await pass_of_loop()
            peer.read_all()
            assert bytes(peer.received[filled:]) == b"\n" + FRAME

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_heart_beats_of_any_order_of_events_are_never_within_a_frame(seed: int) -> None:
    draws = random.Random(seed)

    async def main() -> None:
        with connection() as (tls, peer), driver_of(tls) as (driver, link):
            frames = []
            for number in range(400):
                event = draws.choice(["beat", "beat", "frame", "read", "loop"])
                if event == "beat":
                    beat(driver, link)
                elif event == "frame":
                    frames.append(b"<%d%s>" % (number, b"x" * round(200_000 ** draws.random())))
                    link.write(frames[-1])
                    driver.flush()
                elif event == "read":
                    peer.read(round(READ_BYTES ** draws.random()))
                else:
                    await pass_of_loop()
            while not driver.flush() or peer.read():
                peer.read_all()
                await pass_of_loop()
            peer.read_all()
            text = bytes(peer.received)
            assert b"".join(frames) == text.replace(b"\n", b"")
            assert all(frame in text for frame in frames)

    asyncio.run(main())
