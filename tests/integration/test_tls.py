"""Tests of a broker with TLS over real sockets; TRUENEXT_TLS=1 runs all others that use RawClient over TLS, too."""

import asyncio
import json
import random
import re
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa

from tests.integration import over_tls
from tests.integration.broker_here import broker_here, port_of
from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT
from tests.integration.forked import Forked
from tests.integration.raw_client import RECEIVE_SECONDS
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version, encode
from truenext.wire.stomp.shapes import FRAME_SHAPES


class TlsClient:
    """Blocking STOMP client over TLS."""

    def __init__(self, port: int, *, receive_buffer: int = 0, context: ssl.SSLContext | None = None) -> None:
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(RECEIVE_SECONDS)
        sock.connect(("127.0.0.1", port))
        self.sock = (context or over_tls.client_context()).wrap_socket(sock, server_hostname="localhost")
        self._decoder = Decoder(FRAME_SHAPES)
        self._frames: list[Frame] = []

    def connect(self, **headers: str) -> Frame:
        self.write("CONNECT", {"accept-version": "1.2", "host": "h"} | headers)
        answer = self.frame()
        if answer.command == "CONNECTED":
            self._decoder.version = Version.V1_2
        return answer

    def write(self, command: str, headers: dict[str, str], body: bytes = b"") -> None:
        self.sock.sendall(encode(Frame(command, headers, body), Version.V1_2))

    def frame(self) -> Frame:
        while not self._frames:
            data = b""
            if not self._decoder.has_more and not (data := self.sock.recv(65536)):
                raise EOFError
            self._frames += self._decoder.receive(data)
        return self._frames.pop(0)

    def frames_until(self, receipt: str) -> list[Frame]:
        """Return the frames up to a RECEIPT."""
        found = []
        while (frame := self.frame()).headers.get("receipt-id") != receipt:
            found.append(frame)
        return found

    def close(self) -> None:
        self.sock.close()


def run(use: Callable[[int], None], *, send_buffer: int = 0) -> None:
    async def here() -> None:
        async with broker_here(has_tls=True, send_buffer=send_buffer) as listener:
            assert listener.url.startswith("stomp+ssl://")
            await asyncio.get_running_loop().run_in_executor(None, use, port_of(listener))

    asyncio.run(here())


@pytest.mark.parametrize("ack", ["auto", "client", "client-individual"])
def test_unsubscribe_of_a_slow_reader_loses_and_doubles_no_message(ack: str) -> None:
    """Frames that are encrypted are sent, though their subscription has ended; all others go to the next one."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    count = 400

    def use(port: int) -> None:
        sender = TlsClient(port)
        sender.connect()
        for number in range(count):
            body = b"%d " % number + bytes(dice.choice((1, 500, 20_000)))
            sender.write("SEND", {"destination": "/queue/q"}, body)
        sender.write("SEND", {"destination": "/topic/nobody", "receipt": "r"})
        sender.frames_until("r")
        reader = TlsClient(port, receive_buffer=4096)
        reader.connect()
        got: list[int] = []
        rounds = 0
        while len(got) < count:
            rounds += 1
            headers = {"id": "s", "destination": "/queue/q", "ack": ack, "activemq.prefetchSize": "500"}
            reader.write("SUBSCRIBE", headers)
            # The socket fills up meanwhile.
            time.sleep(dice.choice((0, 0.02, 0.05)))
            for _ in range(dice.randrange(10)):
                if len(got) + 1 > count - 45:
                    break
                frame = reader.frame()
                got.append(int(frame.body.split()[0]))
                if ack != "auto":
                    reader.write("ACK", {"id": frame.headers["ack"]})
            if len(got) + 45 >= count:
                for _ in range(count - len(got)):
                    frame = reader.frame()
                    got.append(int(frame.body.split()[0]))
                    if ack != "auto":
                        reader.write("ACK", {"id": frame.headers["ack"]})
            time.sleep(dice.choice((0, 0, 0.01)))
            reader.write("UNSUBSCRIBE", {"id": "s", "receipt": f"u{rounds}"})
            late = [int(frame.body.split()[0]) for frame in reader.frames_until(f"u{rounds}")]
            if ack == "auto":
                got += late
        assert sorted(got) == list(range(count))
        assert rounds > 3
        # All messages are acknowledged, those that were sent in part as well: none is left in memory.
        reader.write("SUBSCRIBE", {"id": "a", "destination": "/temp-queue/answers", "ack": "auto"})
        reader.write("SEND", {"destination": "/control/status", "reply-to": "/temp-queue/answers"})
        assert json.loads(reader.frame().body)["memory"]["used"] == 0
        reader.close()
        sender.close()

    run(use, send_buffer=4096)


def test_handshake_that_is_cut_at_any_byte_leaves_the_broker_as_it_is() -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = over_tls.client_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    hello = outgoing.read()

    def use(port: int) -> None:
        for size in range(len(hello) + 1):
            with socket.create_connection(("127.0.0.1", port)) as cut:
                cut.sendall(hello[:size])
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as garbled:
                damaged = bytearray(hello)
                damaged[random.randrange(5, len(hello))] ^= 0xFF
                garbled.sendall(damaged)
        client = TlsClient(port)
        assert client.connect().command == "CONNECTED"
        client.close()

    run(use)


def test_client_without_tls_is_told_which_address_to_use() -> None:
    def use(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"CONNECT\naccept-version:1.2\nhost:h\n\n\0")
            answer = b""
            while data := plain.recv(4096):
                answer += data
        assert answer.startswith(b"ERROR\n") and b"this port speaks TLS: connect to stomp+ssl://" in answer

    run(use)


# ---- As users start it ----


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[int, Forked]]:
    """Run a broker, whose log is `folder / "log"`."""
    out, log = folder / "out", folder / "log"
    process = Forked(["serve", "--memory", "--listen", "stomp+ssl://127.0.0.1:0", *options], stdout=out, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (out.exists() and (line := out.read_text()).endswith("\n")):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.002)
        assert line.startswith("listening on stomp+ssl://"), log.read_text()
        yield int(line.rpartition(":")[2]), process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()


def users_file(folder: Path, text: str) -> str:
    file = folder / "users.toml"
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


def test_messages_of_connections_that_are_cut_within_a_record_go_to_the_next_consumer(tmp_path: Path) -> None:
    """The reset behind a part of a record is reported once, together with bytes that decrypt to nothing yet."""
    count = 200
    with serving(tmp_path, "--certificate", str(over_tls.folder() / "broker.pem"), "--log-level", "error") as (
        port,
        process,
    ):
        sender = TlsClient(port)
        sender.connect()
        for number in range(count):
            sender.write("SEND", {"destination": "/queue/q"}, b"%d" % number)
        sender.write("SEND", {"destination": "/queue/other", "receipt": "r"})
        sender.frames_until("r")
        subscribe = {"id": "s", "destination": "/queue/q", "ack": "client-individual", "activemq.prefetchSize": "1"}
        cuts = [TlsClient(port) for _ in range(8)]
        for cut in cuts:
            cut.connect()
            cut.write("SUBSCRIBE", subscribe)
        # So long that the sockets were checked since.
        time.sleep(1.5)
        # The broker finds both at once. Unread bytes make the end a reset.
        process.send_signal(signal.SIGSTOP)
        for number, cut in enumerate(cuts):
            with socket.socket(fileno=cut.sock.detach()) as raw:
                raw.sendall(b"\x17\x03\x03\x40\x00abc"[: 1 + number])
        time.sleep(0.05)
        process.send_signal(signal.SIGCONT)
        reader = TlsClient(port)
        reader.connect()
        reader.write("SUBSCRIBE", subscribe | {"activemq.prefetchSize": "1000"})
        found = {int(reader.frame().body) for _ in range(count)}
        assert found == set(range(count))
        reader.close()
        sender.close()


def test_client_certificate_logs_in_as_the_user_that_lists_it(tmp_path: Path) -> None:
    made = over_tls.folder()
    users = users_file(
        tmp_path,
        '[user.shop]\ncertificates = ["DNS:client.example"]\nsend = ["orders"]\n'
        '[user.other]\ncertificates = ["DNS:o"]\n',
    )
    options = ["--certificate", str(made / "broker.pem"), "--client-ca", str(made / "ca.pem"), "--users", users]
    with serving(tmp_path, *options, "--client-certificates", "asked") as (port, _):
        client = TlsClient(port)
        assert client.connect().command == "CONNECTED"
        client.write("SEND", {"destination": "/queue/orders", "receipt": "r"})
        assert client.frames_until("r") == []
        client.write("SEND", {"destination": "/queue/another", "receipt": "r"})
        assert client.frame().headers["truenext-code"] == "forbidden"
        client.close()
        named = TlsClient(port)
        assert named.connect(login="shop").command == "CONNECTED"
        named.close()
        wrong = TlsClient(port)
        refusal = wrong.connect(login="other").headers
        assert (
            refusal["truenext-code"] == "login" and "the client's certificate belongs to no user" in refusal["message"]
        )
        wrong.close()
        nameless = TlsClient(port, context=ssl.create_default_context(cafile=made / "ca.pem"))
        refusal = nameless.connect().headers
        assert refusal["truenext-code"] == "login" and "user or password is wrong" in refusal["message"]
        nameless.close()


def has_openssl() -> bool:
    """Return whether OpenSSL 3 or later is installed as a command."""
    try:
        version = subprocess.run(["openssl", "version"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return False
    return re.match(r"OpenSSL ([3-9]|[1-9]\d)\.", version) is not None


@pytest.mark.skipif(not has_openssl(), reason="OpenSSL 3 is not installed")
def test_certificates_made_as_the_page_says_log_in_by_name_and_by_fingerprint_but_not_by_common_name(
    tmp_path: Path,
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    commands = re.findall(r"^openssl (?:.*\\\n)*.*$", page, re.MULTILINE)
    for command in commands:
        done = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    fingerprint = done.stdout.strip()
    options = ["--certificate", str(tmp_path / "broker.pem"), "--key", str(tmp_path / "broker.key")]
    options += ["--client-ca", str(tmp_path / "ca.pem"), "--client-certificates", "required"]
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    context.load_cert_chain(tmp_path / "shop.pem", tmp_path / "shop.key")
    expected = {"DNS:shop.example": "CONNECTED", fingerprint: "CONNECTED", "DNS:shop": "ERROR"}
    for number, (name, answer) in enumerate(expected.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        users = users_file(folder, f'[user.shop]\ncertificates = ["{name}"]\nsend = ["orders"]\n')
        with serving(folder, *options, "--users", users) as (port, _):
            client = TlsClient(port, context=context)
            assert client.connect().command == answer, name
            client.close()


def test_certificate_name_that_a_reload_removes_ends_its_connections_and_is_named_as_the_reason(tmp_path: Path) -> None:
    made = over_tls.folder()
    text = '[user.shop]\ncertificates = ["DNS:{}.example"]\nsend = ["orders"]\n'
    users = users_file(tmp_path, text.format("client"))
    options = ["--certificate", str(made / "broker.pem"), "--client-ca", str(made / "ca.pem"), "--users", users]
    with serving(tmp_path, *options, "--client-certificates", "required") as (port, process):
        client = TlsClient(port)
        assert client.connect().command == "CONNECTED"
        users_file(tmp_path, text.format("other"))
        process.send_signal(signal.SIGHUP)
        end = client.frame()
        assert end.command == "ERROR"
        assert end.headers["message"] == (
            "the certificate name that this connection logged in with is not one of user 'shop' any more"
        )
        client.close()


def test_serve_warns_at_start_and_reload_of_certificates_of_users_without_client_ca(tmp_path: Path) -> None:
    made, warning = over_tls.folder(), "certificates of users have no effect without --client-ca"
    text = '[user.till]\ncertificates = ["DNS:till"]\n[user.shop]\ncertificates = ["DNS:shop"]\n'
    users = users_file(tmp_path, text)
    options = ["--certificate", str(made / "broker.pem"), "--users", users]
    asked = ["--client-ca", str(made / "ca.pem"), "--client-certificates", "asked"]
    with serving(tmp_path, *options) as (_, process):
        lines = [line for line in (tmp_path / "log").read_text().splitlines() if warning in line]
        assert len(lines) == 1 and users in lines[0] and "till" in lines[0] and "shop" in lines[0]
        users_file(tmp_path, text + '[user.new]\ncertificates = ["DNS:new"]\n')
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (tmp_path / "log").read_text().count(warning) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (other := tmp_path / "other").mkdir()
    with serving(other, *options, *asked):
        pass
    assert warning not in (other / "log").read_text()


def test_serve_with_a_key_that_others_can_read_warns_and_names_the_file(tmp_path: Path) -> None:
    key = tmp_path / "broker.pem"
    key.write_bytes((over_tls.folder() / "broker.pem").read_bytes())
    for mode, is_warned in ((0o644, True), (0o600, False)):
        key.chmod(mode)
        (folder := tmp_path / str(mode)).mkdir()
        with serving(folder, "--certificate", str(key)):
            pass
        log = (folder / "log").read_text()
        assert ("run `chmod 600` on it" in log and str(key) in log) is is_warned


def test_serve_with_a_certificate_that_clients_will_refuse_warns_of_it(tmp_path: Path) -> None:
    expired = over_tls.authority().issue_cert(
        "localhost", not_before=datetime(2019, 1, 1), not_after=datetime(2020, 1, 1)
    )
    file = tmp_path / "expired.pem"
    expired.private_key_and_cert_chain_pem.write_to_path(file)
    file.chmod(0o600)
    for certificate, is_refused in ((file, True), (over_tls.folder() / "broker.pem", False)):
        folder = tmp_path / str(is_refused)
        folder.mkdir()
        with serving(folder, "--certificate", str(certificate)):
            pass
        log = (folder / "log").read_text()
        assert ("clients refuse the certificate" in log and "certificate has expired" in log) is is_refused


def test_serve_with_a_certificate_of_a_kind_that_tls_does_not_use_any_more_warns_of_it(tmp_path: Path) -> None:
    """The error of the handshake in memory was once taken for one of standard output, and ended the broker."""
    key = dsa.generate_private_key(2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    certificate = builder.sign(key, hashes.SHA256())
    file = tmp_path / "dsa.pem"
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(private + certificate.public_bytes(pem))
    file.chmod(0o600)
    with serving(tmp_path, "--certificate", str(file)):
        pass
    log = (tmp_path / "log").read_text()
    assert "clients refuse the certificate" in log and "no shared cipher" in log


def test_certificate_of_another_authority_is_not_accepted(tmp_path: Path) -> None:
    made = over_tls.folder()
    stranger = trustme.CA().issue_cert("client.example")
    context = ssl.create_default_context(cafile=made / "ca.pem")
    stranger.configure_cert(context)
    options = ["--certificate", str(made / "broker.pem"), "--client-ca", str(made / "ca.pem")]
    with serving(tmp_path, *options, "--client-certificates", "required") as (port, _):
        refused = TlsClient(port, context=context)
        with pytest.raises((OSError, EOFError)):
            # The client learns of it only after its own part of the handshake.
            refused.connect()
        refused.close()
        client = TlsClient(port)
        assert client.connect().command == "CONNECTED"
        client.close()
        assert "unable to get local issuer certificate" in (tmp_path / "log").read_text()


def test_reload_takes_a_changed_certificate_for_new_connections(tmp_path: Path) -> None:
    file = tmp_path / "broker.pem"

    def write() -> None:
        over_tls.authority().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(file)
        file.chmod(0o600)

    write()
    with serving(tmp_path, "--certificate", str(file), "--log-level", "debug") as (port, process):
        first = TlsClient(port)
        first.connect()
        before = first.sock.getpeercert(binary_form=True)
        for text, shown in (("nothing", "not reloaded"), ("", "configuration reloaded")):
            file.write_text(text) if text else write()
            process.send_signal(signal.SIGHUP)
            deadline = time.monotonic() + 20
            while shown not in (tmp_path / "log").read_text():
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.02)
        second = TlsClient(port)
        assert second.connect().command == "CONNECTED"
        assert second.sock.getpeercert(binary_form=True) != before
        first.write("SEND", {"destination": "/queue/q", "receipt": "r"})
        assert first.frames_until("r") == []
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "stomp+ssl://127.0.0.1:0"], "needs a certificate: --certificate FILE"),
        (["--listen", "openwire+ssl://127.0.0.1:0"], "openwire+ssl://127.0.0.1:0 needs a certificate: --certificate"),
        (["--certificate", "{tmp}/text"], "certificate {tmp}/text cannot be used: "),
        (
            ["--certificate", "{made}/ca.pem"],
            "ca.pem cannot be used: there is no certificate, or no private key, in PEM",
        ),
        (["--certificate", "{made}/ca.pem"], "if its private key is in another file, set key (--key)"),
        (["--certificate", "{made}/ca.pem", "--key", "{made}/broker.pem"], "cannot be used: key values mismatch"),
        (["--key", "{made}/broker.pem"], "key needs the setting certificate: the file with the broker's certificate"),
        (["--client-certificates", "asked"], "client_certificates needs the setting certificate: the file with"),
        (
            ["--certificate", "{made}/broker.pem", "--client-certificates", "required"],
            'client_certificates = "required" needs client_ca',
        ),
        (
            ["--certificate", "{made}/broker.pem", "--client-ca", "{tmp}/text"],
            "{tmp}/text has no certificates: no certificate or crl found",
        ),
        (
            ["--certificate", "{made}/broker.pem", "--client-ca", "{tmp}/junk", "--client-certificates", "asked"],
            "{tmp}/junk has no certificates: it is not in PEM",
        ),
        (
            ["--certificate", "{made}/broker.pem", "--client-ca", "{made}/ca.pem"],
            'client_ca needs client_certificates = "asked" or "required"',
        ),
        (["--certificate", "{tmp}/open.pem"], "other users of this machine can write to {tmp}/open.pem"),
        (
            ["--users", "{tmp}/users.toml", "--listen", "stomp://0.0.0.0:0"],
            "passwords would not be encrypted; listen on stomp+ssl:// with a certificate",
        ),
        (
            ["--users", "{tmp}/users.toml", "--listen", "openwire://0.0.0.0:0"],
            "passwords would not be encrypted; listen on openwire+ssl:// with a certificate",
        ),
        (["--listen", "openwire://0.0.0.0:0"], "without a password; listen on 127.0.0.1, give the broker users"),
    ],
)
def test_serve_with_a_file_that_is_no_use_says_so_in_one_sentence(
    tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "text").write_text("text")
    (tmp_path / "junk").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (tmp_path / "open.pem").write_bytes((over_tls.folder() / "broker.pem").read_bytes())
    (tmp_path / "open.pem").chmod(0o666)
    users_file(tmp_path, '[user.a]\ncertificates = ["DNS:a"]\n')
    names = {"tmp": tmp_path, "made": over_tls.folder()}
    ended = subprocess.run(
        [TRUENEXT, "serve", "--memory", *(option.format(**names) for option in options)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert message.format(**names) in ended.stderr
    assert ended.stderr.startswith("truenext: ") and ended.stderr.count("\n") == 1
