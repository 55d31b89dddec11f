"""Tests of when a silent client is given up, with a clock that the test turns."""

import heapq
import socket
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from truenext.model.commands import Login
from truenext.model.limits import HEART_BEAT_MS_MIN
from truenext.server.connection import ServerConnection


class Timer:
    def __init__(self, at: float, action: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.at = at
        self.action = action
        self.arguments = arguments
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """The part of an event loop that a connection needs; its time advances only on request."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = count()
        self.readable: Callable[[], object] | None = None

    def time(self) -> float:
        return self._now

    def call_later(self, seconds: float, action: Callable[..., object], *arguments: object) -> Timer:
        timer = Timer(self._now + seconds, action, arguments)
        heapq.heappush(self._timers, (timer.at, next(self._order), timer))
        return timer

    def call_soon(self, action: Callable[..., object], *arguments: object) -> Timer:
        return self.call_later(0, action, *arguments)

    def add_reader(self, _: socket.socket, action: Callable[[], object]) -> None:
        self.readable = action

    def remove_reader(self, _: socket.socket) -> None:
        self.readable = None

    remove_writer = remove_reader

    def run_until(self, moment: float) -> None:
        while self._timers and self._timers[0][0] <= moment:
            at, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, at)
            if not timer.is_cancelled:
                timer.action(*timer.arguments)
        self._now = max(self._now, moment)


class Broker:
    """Takes everything and says nothing, but notes when a client is lost."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.incomplete_frames = SimpleNamespace(is_full=False)
        self.has_capacity = True
        self.ends = SimpleNamespace(lost=self._lost, park=lambda _: False, soon=lambda _, end: end())
        self.capacity = SimpleNamespace(
            incomplete_frames=self.incomplete_frames,
            read_turns=SimpleNamespace(has_time=lambda _: True, end=lambda _, end: end()),
            may_read=lambda _: self.has_capacity,
            bytes_to_read=lambda *_: 0,
            wait=lambda *_, **__: None,
        )
        self.lost_at: float | None = None
        self.silence = None
        self.is_silent = False

    def connect(self, connection: ServerConnection, **__: object) -> SimpleNamespace:
        self._connection = connection
        return SimpleNamespace(id="me")

    def execute(self, _: object, commands: Iterator[object]) -> None:
        for command in commands:
            if isinstance(command, Login):
                self._connection.send_connected(command, "", is_takeover=False, is_checked=False)

    def _lost(self, _: object, **__: object) -> None:
        self.lost_at = self._loop.time()

    def has_lost_client(self) -> bool:
        return self.lost_at is not None

    def all_sent(self, *_: object, **__: object) -> None:
        pass

    connection_closed = answer = all_sent


class Client:
    """Client that has agreed on a heart-beat of `interval_ms`."""

    def __init__(self, interval_ms: int) -> None:
        self.interval = interval_ms / 1000
        self.loop = Loop()
        self.broker = Broker(self.loop)
        self._here, there = socket.socketpair()
        there.setblocking(False)
        self.connection = ServerConnection(
            there,
            "here",
            cast(Any, self.broker),
            cast(Any, self.loop),
            identity="b1",
            server_name="x",
            on_closed=lambda _: None,
        )
        self.send(b"CONNECT\naccept-version:1.2\nheart-beat:%d,0\n\n\0" % interval_ms)

    def send(self, data: bytes, *, is_noticed: bool = True) -> None:
        self._here.sendall(data)
        if is_noticed and self.loop.readable is not None:
            self.loop.readable()

    def close(self) -> None:
        self._here.close()
        self.connection._socket.close()


@pytest.fixture(params=[HEART_BEAT_MS_MIN, 10_000])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    made = Client(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("beats", [[], [0.5], [1.0, 1.99], [0.7, 1.4, 2.1, 2.8, 3.5], [2.0, 4.0, 6.0]])
def test_a_client_is_given_up_after_2_to_2_5_times_the_agreed_silence_wherever_that_begins(
    client: Client, beats: list[float]
) -> None:
    # C10.12
    started = client.loop.time()
    for beat in beats:
        client.loop.run_until(started + beat * client.interval)
        client.send(b"\n")
    last = client.loop.time()
    client.loop.run_until(last + 2 * client.interval)
    assert not client.broker.has_lost_client()
    client.loop.run_until(last + 10 * client.interval)
    assert client.broker.lost_at is not None
    assert 2 * client.interval < client.broker.lost_at - last < 2.5 * client.interval


def test_data_received_while_the_broker_was_busy_counts_as_heard(client: Client) -> None:
    started = client.loop.time()
    client.send(b"\n", is_noticed=False)
    client.loop.run_until(started + 4 * client.interval)
    assert not client.broker.has_lost_client()
    client.loop.run_until(started + 10 * client.interval)
    assert client.broker.lost_at is not None


@pytest.mark.parametrize("is_frame", [False, True], ids=["no capacity", "no room for frames"])
def test_client_that_is_not_read_is_not_lost_and_has_its_full_interval_afterwards(
    client: Client, is_frame: bool
) -> None:
    if is_frame:
        client.broker.incomplete_frames.is_full = True
    else:
        client.broker.has_capacity = False
    client.send(b"\n")
    client.loop.run_until(client.loop.time() + 50 * client.interval)
    assert not client.broker.has_lost_client()
    client.broker.has_capacity = True
    client.broker.incomplete_frames.is_full = False
    client.connection.resume_reading()
    client.send(b"\n")
    last = client.loop.time()
    client.loop.run_until(last + 2 * client.interval)
    assert not client.broker.has_lost_client()
    client.loop.run_until(last + 10 * client.interval)
    assert client.broker.lost_at is not None
    assert 2 * client.interval < client.broker.lost_at - last < 2.5 * client.interval


def test_client_of_a_silent_broker_is_not_lost_before_the_silence_has_ended(client: Client) -> None:
    client.broker.is_silent = True
    client.loop.run_until(client.loop.time() + 50 * client.interval)
    assert not client.broker.has_lost_client()
    client.broker.is_silent = False
    client.loop.run_until(client.loop.time() + 10 * client.interval)
    assert client.broker.has_lost_client()
