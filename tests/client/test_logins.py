"""Tests of logins: which credentials the client sends, when it reads a password file, and which refusals it retries.

Each test runs with the client for tasks and the client for threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import truenext
from tests.login_broker import LoginBroker, login_broker
from truenext import blocking
from truenext.client.password_file import PASSWORD_FILE_BYTES_MAX
from truenext.errors import ConfigurationError, NoBroker, Refused

PATIENCE_S = 30.0

While = Callable[[], None]


def connect_task(urls: str, work: While, **options: Any) -> None:
    async def connect() -> None:
        async with truenext.connect(*urls.split(), **options):
            await asyncio.to_thread(work)

    asyncio.run(connect())


def connect_thread(urls: str, work: While, **options: Any) -> None:
    with blocking.connect(*urls.split(), **options):
        work()


Connect = Callable[..., None]
"""Connects to a URL, or the first of several, calls a function, and closes the connection."""


@pytest.fixture(params=[connect_task, connect_thread], ids=["tasks", "threads"])
def connect(request: pytest.FixtureRequest) -> Connect:
    function: Connect = request.param
    return function


@pytest.fixture
def broker() -> Iterator[LoginBroker]:
    with login_broker() as running:
        yield running


def nothing() -> None:
    pass


@contextmanager
def no_wait_longer_than(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def await_until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- Headers of CONNECT ----


def test_login_with_user_and_password_sends_both(connect: Connect, broker: LoginBroker) -> None:
    connect(broker.url, nothing, user="shop", password="secret: a")
    assert broker.credentials() == [("shop", "secret: a")]


def test_login_without_credentials_sends_no_header_for_them(connect: Connect, broker: LoginBroker) -> None:
    connect(broker.url, nothing)
    assert broker.credentials() == [(None, None)]


@pytest.mark.parametrize(
    "content",
    [b"secret", b"secret\n", b"secret\r\n", b"secret\nsecond line\n", b"secret\n" + b"\xff" * 1000],
    ids=["no line feed", "line feed", "carriage return", "second line", "second line no UTF-8"],
)
def test_password_file_first_line_is_the_password(
    content: bytes, connect: Connect, broker: LoginBroker, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(content)
    connect(broker.url, nothing, user="shop", password_file=tmp_path / "file")
    assert broker.credentials() == [("shop", "secret")]


def test_password_file_of_the_largest_size_is_read_whole(connect: Connect, broker: LoginBroker, tmp_path: Path) -> None:
    password = "ä" * (PASSWORD_FILE_BYTES_MAX // 2)
    (tmp_path / "file").write_text(password)
    connect(broker.url, nothing, user="shop", password_file=str(tmp_path / "file"))
    assert broker.credentials() == [("shop", password)]


def test_password_and_password_file_together_are_refused(connect: Connect, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="password and password_file exclude each other"):
        connect("stomp://127.0.0.1:1", nothing, user="shop", password="secret", password_file=tmp_path / "file")


def test_password_that_is_not_utf_8_is_refused_without_its_value(connect: Connect) -> None:
    with pytest.raises(ValueError, match=r"^password has .* is not UTF-8") as caught:
        connect("stomp://127.0.0.1:1", nothing, user="shop", password="secret\udcff")
    assert "secret" not in str(caught.value) and "udcff" not in str(caught.value)


# ---- Files without a password ----


def make_directory(path: Path) -> None:
    path.mkdir()


def make_unreadable(path: Path) -> None:
    path.symlink_to(path)


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "cannot be read: No such file or directory"),
    "unreadable": (make_unreadable, "cannot be read: Too many levels of symbolic links"),
    "folder": (make_directory, "cannot be read: Is a directory"),
    "named pipe": (os.mkfifo, "is not a regular file"),
    "empty": (lambda path: path.touch(), "has no password in its first line"),
    "empty line": (lambda path: path.write_text("\nsecret"), "has no password in its first line"),
    "too large": (lambda path: path.write_bytes(b"s\n" + b"x" * PASSWORD_FILE_BYTES_MAX), "has more than 1024 bytes"),
    "no UTF-8": (lambda path: path.write_bytes(b"secret\xff"), "cannot be used: it is not UTF-8"),
    "NUL": (lambda path: path.write_bytes(b"secret\0"), "cannot be used: its first line has"),
    "carriage return": (lambda path: path.write_bytes(b"sec\rret\n"), "cannot be used: its first line has"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_password_file_that_is_unusable_is_named_by_the_first_connect(
    case: str, connect: Connect, broker: LoginBroker, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    make, reason = UNUSABLE[case]
    make(file)
    with no_wait_longer_than(PATIENCE_S), pytest.raises(ConfigurationError) as caught:
        connect(broker.url, nothing, user="shop", password_file=file)
    assert str(caught.value).startswith(f"password file '{file}' {reason}")
    assert "secret" not in str(caught.value)
    assert broker.logins == []


# ---- Reconnects ----


def test_password_file_is_read_anew_at_a_reconnect(connect: Connect, broker: LoginBroker, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("first")

    def rotate() -> None:
        file.write_text("second")
        broker.cut_connections()
        await_until(lambda: len(broker.logins) >= 2)

    connect(broker.url, rotate, user="shop", password_file=file)
    assert broker.credentials() == [("shop", "first"), ("shop", "second")]


def test_password_file_that_is_missing_at_a_reconnect_is_logged_and_read_again(
    connect: Connect, broker: LoginBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("first")
    expected = f"cannot connect to {broker.url}: password file '{file}' cannot be read: No such file or directory"

    def remove_and_rotate() -> None:
        file.unlink()
        broker.cut_connections()
        await_until(lambda: expected in caplog.messages)
        file.write_text("second")
        await_until(lambda: len(broker.logins) >= 2)

    with caplog.at_level(logging.WARNING, "truenext.client"):
        connect(broker.url, remove_and_rotate, user="shop", password_file=file)
    assert broker.credentials() == [("shop", "first"), ("shop", "second")]


def test_relative_password_file_is_found_after_the_program_has_changed_its_folder(
    connect: Connect, broker: LoginBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("secret")

    def change_folder() -> None:
        os.chdir("/")
        broker.cut_connections()
        await_until(lambda: len(broker.logins) >= 2)

    connect(broker.url, change_folder, user="shop", password_file="file")
    assert broker.credentials() == [("shop", "secret")] * 2


# ---- Refused logins ----


@pytest.mark.parametrize("reconnect", [True, False])
def test_login_at_a_busy_broker_is_tried_again(reconnect: bool, connect: Connect, broker: LoginBroker) -> None:
    broker.refusal_codes.extend(["busy"] * 3)
    connect(broker.url, nothing, user="shop", password="secret", reconnect=reconnect)
    assert broker.credentials() == [("shop", "secret")] * 4


@pytest.mark.parametrize("reconnect", [True, False])
def test_login_at_a_broker_that_stays_busy_ends_with_the_timeout(
    reconnect: bool, connect: Connect, broker: LoginBroker
) -> None:
    broker.refusal_codes.extend(["busy"] * 1000)
    with pytest.raises(Refused, match="refused here") as caught:
        connect(broker.url, nothing, reconnect=reconnect, timeout=0.5)
    assert caught.value.code == "busy"
    assert len(broker.logins) >= 2


def test_login_without_reconnect_ends_once_the_busy_broker_is_gone(connect: Connect, broker: LoginBroker) -> None:
    broker.refusal_codes.append("busy")
    broker.logins_max = 1
    with no_wait_longer_than(PATIENCE_S), pytest.raises(NoBroker):
        connect(broker.url, nothing, reconnect=False, timeout=2 * PATIENCE_S)
    assert len(broker.logins) == 1


@pytest.mark.parametrize("reconnect", [True, False])
def test_login_at_a_program_that_does_not_answer_leaves_time_for_the_next_address(
    reconnect: bool, connect: Connect, broker: LoginBroker
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = f"stomp://127.0.0.1:{silent.getsockname()[1]} {broker.url}"
        connect(urls, nothing, reconnect=reconnect, timeout=2.0)
    assert len(broker.logins) == 1


@pytest.mark.parametrize("refusals", [1, 2])
def test_login_with_wrong_credentials_is_final(refusals: int, connect: Connect, broker: LoginBroker) -> None:
    broker.refusal_codes.extend(["busy"] * (refusals - 1) + ["login"])
    with pytest.raises(Refused, match=r"^refused here$") as caught:
        connect(broker.url, nothing, user="shop", password="wrong")
    assert caught.value.code == "login"
    assert len(broker.logins) == refusals


def test_login_that_is_refused_for_good_is_raised_and_not_logged_as_well(
    connect: Connect, broker: LoginBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.refusal_codes.append("login")
    with caplog.at_level(logging.WARNING, "truenext.client"), pytest.raises(Refused):
        connect(broker.url, nothing, user="shop", password="wrong")
    assert caplog.messages == []


def test_login_that_is_refused_at_a_reconnect_is_logged(
    connect: Connect, broker: LoginBroker, caplog: pytest.LogCaptureFixture
) -> None:
    def change_password() -> None:
        broker.refusal_codes.append("login")
        broker.cut_connections()
        await_until(lambda: any("refused here" in each for each in caplog.messages))

    with caplog.at_level(logging.WARNING, "truenext.client"):
        connect(broker.url, change_password, user="shop", password="wrong")
