"""Certificates that are made in a test, and brokers that listen with TLS, each in a process of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import trustme

from tests.integration.forked import Forked

PATIENCE_S = 60.0


class Certificates:
    """Authority, and certificates that it signs, as PEM files of a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)
        self.broker = self.issue("broker", "localhost", "127.0.0.1")
        """Certificate of a broker of this machine, with its key."""
        self.client = self.issue("client", "client.example")
        """Certificate of a client, with its key."""

    def issue(self, name: str, *identities: str, not_after: datetime | None = None) -> Path:
        """Return a file with a new certificate and its key."""
        begin = None if not_after is None else not_after.replace(year=not_after.year - 1)
        issued = self._authority.issue_cert(*identities, not_before=begin, not_after=not_after)
        file = self._folder / f"{name}.pem"
        issued.private_key_and_cert_chain_pem.write_to_path(file)
        file.chmod(0o600)
        return file

    def issue_pair(self, name: str, *identities: str) -> tuple[Path, Path]:
        """Return a file with a new certificate, and one with its key."""
        issued = self._authority.issue_cert(*identities)
        certificate, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        return certificate, key

    def broker_options(self, clients: str | None = None) -> list[str]:
        """Return the options of `truenext serve` for TLS; `clients`: "asked" or "required", for their certificates."""
        of_clients = [] if clients is None else ["--client-ca", str(self.ca), "--client-certificates", clients]
        return ["--certificate", str(self.broker), *of_clients]


class TlsBroker:
    """Broker that listens on one address, with TLS unless its scheme is another one. Without `--data` it stores
    nothing."""

    def __init__(self, folder: Path, *options: str, scheme: str = "stomp+ssl") -> None:
        self._options = options
        self._scheme = scheme
        self._out, self._log = folder / f"broker-{id(self)}.out", folder / f"broker-{id(self)}.log"
        self._process: Forked | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def start(self) -> None:
        """Start the broker, at the port that it had before."""
        assert self._process is None, "it runs already"
        self._out.unlink(missing_ok=True)
        store = [] if "--data" in self._options else ["--memory"]
        serve = ["serve", *store, "--listen", self.url, *self._options]
        self._process = process = Forked(serve, stdout=self._out, stderr=self._log)
        deadline = time.monotonic() + PATIENCE_S
        while not (self._out.exists() and self._out.read_text().endswith("\n")):
            assert process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.01)
        self.port = int(self._out.read_text().strip().rpartition(":")[2])

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Suspend the process of the broker for the duration of the block."""
        assert self._process is not None, "it runs"
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stop the broker cleanly, which must succeed."""
        assert self._process is not None, "it runs"
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(PATIENCE_S) == 0, self.log
        self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None


@contextmanager
def tls_broker(folder: Path, *options: str, scheme: str = "stomp+ssl") -> Iterator[TlsBroker]:
    """Run a broker with options of `truenext serve`; its log must have no error."""
    broker = TlsBroker(folder, *options, scheme=scheme)
    try:
        broker.start()
        yield broker
        for line in broker.log.splitlines():
            assert not {"ERROR", "CRITICAL", "Traceback"} & set(line.split()), broker.log
    finally:
        broker.kill()
