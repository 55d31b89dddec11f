"""Tests of both clients over TLS, at brokers in processes of their own.

Source of what is expected: docs/client.md, "Connect".
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography.hazmat.primitives import serialization

import truenext
from tests.tls_broker import PATIENCE_S, Certificates, TlsBroker, tls_broker
from truenext import blocking
from truenext.client.tasks import heartbeat_thread
from truenext.errors import ConfigurationError, NoBroker, Refused

MESSAGES = 2000
BYTES_MAX = 1 << 20
QUEUE = "/queue/q"
HEART_BEAT_S = 0.2
BLOCKED_S = 1.6
"""Duration of a blocked loop: many times as long as a broker waits for a client's heart-beat."""

While = Callable[[], None]


def connect_task(urls: str | tuple[str, ...], work: While, **options: Any) -> None:
    async def connect() -> None:
        async with truenext.connect(*([urls] if isinstance(urls, str) else urls), **options):
            await asyncio.to_thread(work)

    asyncio.run(connect())


def connect_thread(urls: str | tuple[str, ...], work: While, **options: Any) -> None:
    with blocking.connect(*([urls] if isinstance(urls, str) else urls), **options):
        work()


Connect = Callable[..., None]
"""Connects to a URL or the first good one of several, calls a function, and closes the connection."""

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
Loop = Callable[[], asyncio.AbstractEventLoop]


def nothing() -> None:
    pass


def await_until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(params=[connect_task, connect_thread], ids=["tasks", "threads"])
def connect(request: pytest.FixtureRequest) -> Connect:
    function: Connect = request.param
    return function


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def certificates(folder: Path) -> Certificates:
    return Certificates(folder)


@pytest.fixture(scope="module")
def broker(folder: Path, certificates: Certificates) -> Iterator[TlsBroker]:
    with tls_broker(folder, *certificates.broker_options(), "--log-level", "info") as running:
        yield running


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    """Address of a queue that no other test uses."""
    return f"/queue/{abs(hash(request.node.nodeid))}"


# ---- Messages ----


@functools.cache
def body_sizes() -> list[int]:
    """Return 1 byte, 1 MB, and others in between, of which small ones are as likely as large ones."""
    draws = random.Random(1)
    return [1, BYTES_MAX, *(round(BYTES_MAX ** draws.random()) for _ in range(MESSAGES - 2))]


def make_body(number: int) -> bytes:
    return random.Random(number).randbytes(body_sizes()[number])


CHUNK = 100


@LOOPS
def test_tasks_send_and_receive_messages_of_all_sizes_over_tls(
    loop: Loop, broker: TlsBroker, certificates: Certificates, queue: str
) -> None:
    async def main() -> None:
        async with truenext.connect(broker.url, ca=certificates.ca) as connection:

            async def send() -> None:
                for first in range(0, MESSAGES, CHUNK):
                    bodies = [make_body(number) for number in range(first, first + CHUNK)]
                    await connection.send_many(queue, bodies, persistent=False)

            sending = asyncio.create_task(send())
            async with connection.consumer(queue) as consumer:
                for number in range(MESSAGES):
                    message = await consumer.receive(PATIENCE_S)
                    assert message is not None and message.body == make_body(number)
            await sending
            assert connection.health().reconnects == 0

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_threads_send_and_receive_messages_of_all_sizes_over_tls(
    broker: TlsBroker, certificates: Certificates, queue: str
) -> None:
    with blocking.connect(broker.url, ca=certificates.ca) as connection:

        def send() -> None:
            for first in range(0, MESSAGES, CHUNK):
                bodies = [make_body(number) for number in range(first, first + CHUNK)]
                connection.send_many(queue, bodies, persistent=False)

        sending = threading.Thread(target=send)
        sending.start()
        with connection.consumer(queue) as consumer:
            for number in range(MESSAGES):
                message = consumer.receive(PATIENCE_S)
                assert message is not None and message.body == make_body(number)
        sending.join()
        assert connection.health().reconnects == 0


def test_threads_that_send_on_one_connection_over_tls_while_it_receives_lose_nothing(
    broker: TlsBroker, certificates: Certificates, queue: str
) -> None:
    senders, seconds = 8, 5.0
    sent = [0] * senders
    received = [0] * senders

    with blocking.connect(broker.url, ca=certificates.ca, heart_beat=0.5) as connection:

        def send(sender: int) -> None:
            draws = random.Random(sender)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                text = f"{sender} {sent[sender]} "
                connection.send(queue, text + "x" * round(100_000 ** draws.random()), persistent=False)
                sent[sender] += 1

        threads = [threading.Thread(target=send, args=(sender,)) for sender in range(senders)]
        for each in threads:
            each.start()
        with connection.consumer(queue) as consumer:
            while True:
                is_over = not any(each.is_alive() for each in threads)
                message = consumer.receive(0.1)
                if message is not None:
                    sender, number, _ = message.text.split(" ")
                    assert int(number) == received[int(sender)]
                    received[int(sender)] += 1
                elif is_over:
                    break
        for each in threads:
            each.join()
        assert received == sent and all(sent)
        assert connection.health().reconnects == 0


# ---- Connections that are refused ----

OLD = datetime(2020, 1, 1)
UNKNOWN = (
    "unable to get local issuer certificate; set ca (--ca, TRUENEXT_CA) to a file with the certificate that signed it"
)


@pytest.fixture(scope="module")
def brokers(folder: Path, certificates: Certificates) -> Iterator[dict[str, TlsBroker]]:
    """Brokers by what is special of them."""
    old = certificates.issue("old", "127.0.0.1", not_after=OLD)
    other = certificates.issue("other", "other.example")
    with ExitStack() as stack:
        yield {
            "expired": stack.enter_context(tls_broker(folder, "--certificate", str(old))),
            "other host": stack.enter_context(tls_broker(folder, "--certificate", str(other))),
            "asks": stack.enter_context(tls_broker(folder, *certificates.broker_options("asked"))),
            "requires": stack.enter_context(tls_broker(folder, *certificates.broker_options("required"))),
            "plain": stack.enter_context(tls_broker(folder, scheme="stomp")),
        }


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of another authority."""
    return Certificates(tmp_path_factory.mktemp("strangers"))


def check_no_broker(connect: Connect, url: str, reason: str, **options: Any) -> None:
    with pytest.raises(NoBroker) as caught:
        connect(url, nothing, reconnect=False, **options)
    assert str(caught.value) == f"no broker at {url}: {reason}"


def test_broker_with_a_certificate_of_another_authority_is_refused(
    connect: Connect, broker: TlsBroker, strangers: Certificates
) -> None:
    logged = len(broker.log)
    reason = (
        f"unable to get local issuer certificate; ca {str(strangers.ca)!r} (--ca, TRUENEXT_CA) does not have the "
        "certificate that signed it"
    )
    check_no_broker(connect, broker.url, f"the broker's certificate is not accepted: {reason}", ca=strangers.ca)
    # The client has told it the reason.
    await_until(lambda: "unknown ca: the client does not trust the broker's certificate" in broker.log[logged:])


def test_broker_with_a_certificate_that_the_system_does_not_trust_is_refused(
    connect: Connect, broker: TlsBroker
) -> None:
    check_no_broker(connect, broker.url, f"the broker's certificate is not accepted: {UNKNOWN}")


def test_broker_with_a_certificate_of_another_host_is_refused(
    connect: Connect, brokers: dict[str, TlsBroker], certificates: Certificates
) -> None:
    for host, what in (("127.0.0.1", "IP address"), ("localhost", "Hostname")):
        url = brokers["other host"].url.replace("127.0.0.1", host)
        reason = f"{what} mismatch, certificate is not valid for '{host}'"
        check_no_broker(connect, url, f"the broker's certificate is not accepted: {reason}", ca=certificates.ca)


def test_broker_with_an_expired_certificate_is_refused(
    connect: Connect, brokers: dict[str, TlsBroker], certificates: Certificates
) -> None:
    reason = "the broker's certificate is not accepted: certificate has expired"
    check_no_broker(connect, brokers["expired"].url, reason, ca=certificates.ca)


def test_broker_without_tls_is_refused_at_an_address_with_tls(
    connect: Connect, brokers: dict[str, TlsBroker], certificates: Certificates
) -> None:
    url = brokers["plain"].url.replace("stomp:", "stomp+ssl:")
    reason = "the port does not speak TLS 1.2 or later: perhaps the port is for stomp://"
    check_no_broker(connect, url, reason, ca=certificates.ca)


def test_server_that_speaks_another_protocol_first_is_refused_at_an_address_with_tls(
    connect: Connect, certificates: Certificates
) -> None:
    def greet(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            accepted.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=greet, args=(listener,))
        thread.start()
        url = f"stomp+ssl://127.0.0.1:{listener.getsockname()[1]}"
        reason = "the port does not speak TLS: connect to stomp://, not to stomp+ssl://"
        check_no_broker(connect, url, reason, ca=certificates.ca)
        thread.join()


def test_server_that_closes_during_the_handshake_is_no_broker(connect: Connect, certificates: Certificates) -> None:
    def close(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.recv(100_000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=close, args=(listener,))
        thread.start()
        url = f"stomp+ssl://localhost:{listener.getsockname()[1]}"
        reason = "the broker has closed the connection during the TLS handshake"
        check_no_broker(connect, url, reason, ca=certificates.ca)
        thread.join()


def test_client_without_tls_is_refused_by_a_broker_with_tls(connect: Connect, broker: TlsBroker) -> None:
    with pytest.raises(Refused, match=r"^this port speaks TLS: connect to stomp\+ssl://, not to stomp://$") as caught:
        connect(broker.url.replace("+ssl", ""), nothing)
    # Not "login": a command would ask for a user.
    assert caught.value.code == "not-supported"


@pytest.mark.parametrize("reconnect", [True, False])
def test_certificate_that_is_not_accepted_is_refused_also_by_a_client_that_reconnects(
    reconnect: bool, connect: Connect, broker: TlsBroker, strangers: Certificates
) -> None:
    with pytest.raises(NoBroker, match="the broker's certificate is not accepted"):
        connect(broker.url, nothing, ca=strangers.ca, reconnect=reconnect, timeout=0.5)


def test_second_address_is_used_if_the_certificate_of_the_first_is_not_accepted(
    connect: Connect, broker: TlsBroker, brokers: dict[str, TlsBroker], certificates: Certificates
) -> None:
    connect((brokers["expired"].url, broker.url), nothing, ca=certificates.ca, reconnect=False)


# ---- Certificates of clients ----


@pytest.mark.parametrize("name", ["asks", "requires"])
def test_client_shows_its_certificate_to_a_broker_that_asks_for_one(
    name: str, connect: Connect, brokers: dict[str, TlsBroker], certificates: Certificates
) -> None:
    certificate, key = certificates.issue_pair("pair", "client.example")
    url, ca = brokers[name].url, certificates.ca
    connect(url, nothing, ca=ca, certificate=certificates.client, reconnect=False)
    connect(url, nothing, ca=ca, certificate=certificate, key=key, reconnect=False)


def test_client_without_a_certificate_is_accepted_by_a_broker_that_only_asks(
    connect: Connect, brokers: dict[str, TlsBroker], certificates: Certificates
) -> None:
    connect(brokers["asks"].url, nothing, ca=certificates.ca, reconnect=False)


def test_client_without_a_certificate_is_refused_by_a_broker_that_requires_one(
    connect: Connect, brokers: dict[str, TlsBroker], certificates: Certificates
) -> None:
    reason = "the broker requires a certificate of the client: set certificate"
    check_no_broker(connect, brokers["requires"].url, reason, ca=certificates.ca)


@pytest.mark.parametrize("name", ["asks", "requires"])
def test_client_with_a_certificate_of_another_authority_is_refused(
    name: str, connect: Connect, brokers: dict[str, TlsBroker], certificates: Certificates, strangers: Certificates
) -> None:
    reason = (
        "the broker does not accept the client's certificate: it must be signed by a certificate in the broker's "
        "--client-ca"
    )
    check_no_broker(connect, brokers[name].url, reason, ca=certificates.ca, certificate=strangers.client)


# ---- Files ----


def test_file_that_cannot_be_used_is_named_by_the_first_connect(
    connect: Connect, broker: TlsBroker, certificates: Certificates, strangers: Certificates, tmp_path: Path
) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.touch()
    _, key = certificates.issue_pair("first", "a.example")
    certificate, _ = certificates.issue_pair("second", "b.example")
    ca, no_pem = certificates.ca, "there is no certificate, or no private key, in PEM"
    set_key = "; if its private key is in another file, set key (--key)"
    for options, message in (
        ({"ca": missing}, f"ca '{missing}' cannot be used: No such file or directory"),
        ({"ca": tmp_path}, f"ca '{tmp_path}' cannot be used: Is a directory"),
        ({"ca": empty}, f"ca '{empty}' cannot be used: it has no certificate in PEM"),
        ({"ca": ca, "certificate": missing}, f"certificate '{missing}' cannot be used: No such file or directory"),
        ({"ca": ca, "certificate": empty}, f"certificate '{empty}' cannot be used: {no_pem}{set_key}"),
        ({"ca": ca, "certificate": certificate}, f"certificate '{certificate}' cannot be used: {no_pem}{set_key}"),
        (
            {"ca": ca, "certificate": certificate, "key": empty},
            f"certificate '{certificate}' and key '{empty}' cannot be used: {no_pem}",
        ),
        (
            {"ca": ca, "certificate": certificate, "key": key},
            f"certificate '{certificate}' and key '{key}' cannot be used: the private key is not that of the "
            "certificate",
        ),
    ):
        started = time.monotonic()
        with pytest.raises(ConfigurationError) as caught:
            connect(broker.url, nothing, **options)
        assert str(caught.value) == message
        assert time.monotonic() - started < 5


def test_key_with_a_password_is_refused_without_a_question(
    connect: Connect, broker: TlsBroker, certificates: Certificates, tmp_path: Path
) -> None:
    certificate, plain = certificates.issue_pair("locked", "client.example")
    loaded = serialization.load_pem_private_key(plain.read_bytes(), None)
    key = tmp_path / "key"
    key.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigurationError, match="the private key has a password: write it without one"):
        connect(broker.url, nothing, ca=certificates.ca, certificate=certificate, key=key)


def test_key_without_a_certificate_is_refused(connect: Connect, broker: TlsBroker, certificates: Certificates) -> None:
    with pytest.raises(
        ValueError, match=r"^the option key needs the option certificate: the file with the client's certificate$"
    ):
        connect(broker.url, nothing, key=certificates.client)


def test_files_are_not_read_for_an_address_without_tls(connect: Connect, brokers: dict[str, TlsBroker]) -> None:
    connect(brokers["plain"].url, nothing, ca="/nowhere", certificate="/nowhere", reconnect=False)


# ---- Reconnects ----


def test_client_that_reconnects_after_a_kill_uses_tls_again(certificates: Certificates, tmp_path: Path) -> None:
    async def main(broker: TlsBroker) -> None:
        async with (
            truenext.connect(broker.url, ca=certificates.ca) as task,
            asyncio.TaskGroup() as group,
        ):
            with blocking.connect(broker.url, ca=certificates.ca) as thread:
                broker.kill()
                sending = group.create_task(asyncio.to_thread(thread.send, QUEUE, "of the thread"))
                others = group.create_task(task.send(QUEUE, "of the task"))
                await asyncio.sleep(0.3)
                broker.start()
                await sending
                await others
                assert (task.health().reconnects, thread.health().reconnects) == (1, 1)
                async with task.consumer(QUEUE) as consumer:
                    texts = [message.text for _ in range(2) if (message := await consumer.receive(PATIENCE_S))]
        assert sorted(texts) == ["of the task", "of the thread"]

    options = ["--data", str(tmp_path / "data"), "--certificate", str(certificates.broker)]
    with tls_broker(tmp_path, *options) as broker:
        asyncio.run(main(broker))


def test_ca_that_is_missing_at_a_reconnect_is_logged_and_read_again(
    connect: Connect, certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca = tmp_path / "ca"
    ca.write_bytes(certificates.ca.read_bytes())
    with tls_broker(tmp_path, "--certificate", str(certificates.broker)) as broker:
        expected = f"cannot connect to {broker.url}: ca '{ca}' cannot be used: No such file or directory"

        def remove_and_replace() -> None:
            ca.unlink()
            broker.kill()
            broker.start()
            await_until(lambda: expected in caplog.messages)
            ca.write_bytes(certificates.ca.read_bytes())
            await_until(lambda: any(each.startswith("connected to ") for each in caplog.messages[-1:]))

        with caplog.at_level(logging.INFO, "truenext.client"):
            connect(broker.url, remove_and_replace, ca=ca)


# ---- Heart-beats ----


@LOOPS
def test_heartbeat_thread_keeps_a_connection_with_tls_while_its_loop_is_blocked(
    loop: Loop, broker: TlsBroker, certificates: Certificates, queue: str
) -> None:
    async def main() -> None:
        async with truenext.connect(
            broker.url, ca=certificates.ca, heart_beat=HEART_BEAT_S, heartbeat_thread=True
        ) as connection:
            for number in range(2):
                time.sleep(BLOCKED_S)
                await connection.send(queue, str(number))
            assert connection.health().reconnects == 0

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@LOOPS
def test_heart_beats_over_tls_are_never_written_into_a_frame(
    loop: Loop, broker: TlsBroker, certificates: Certificates, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread sends as many heart-beats as possible, during frames that no socket takes at once and between them."""
    # An interval that no busy machine misses.
    heart_beat_s = 5.0
    monkeypatch.setattr(heartbeat_thread, "CHECKS_PER_INTERVAL", 250_000)
    bodies = [str(number).encode() * (1_500_000 if number % 2 else 10) for number in range(10, 40)]

    async def main() -> None:
        async with (
            truenext.connect(
                broker.url, ca=certificates.ca, heart_beat=heart_beat_s, heartbeat_thread=True
            ) as connection,
            connection.consumer(queue) as consumer,
        ):
            for body in bodies:
                sending = asyncio.create_task(connection.send(queue, body, persistent=False))
                await asyncio.sleep(0)
                time.sleep(0.005)
                await sending
                message = await consumer.receive(PATIENCE_S)
                assert message is not None and message.body == body
            assert connection.health().reconnects == 0

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
