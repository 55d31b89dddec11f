"""Foreign clients under test, and the output and the messages that each of their programs must leave.

A program in `clients/` runs as `PROGRAM PORT QUEUE BEAT_MS` and goes through the cases below, each on queues of its own
(`QUEUE.auto`, `QUEUE.commit.from`, ...). It prints a line per case: the case, and the answers of its library. Sends are
persistent, if the library can wait for receipts. The line `heart-beat` comes over a connection with heart-beats, which
the program keeps until its input ends.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.integration.broker_process import dying_with_us

FOLDER = Path(__file__).parent / "clients"


class Case(NamedTuple):
    output: str
    remaining: dict[str, list[str]]
    """Bodies that wait afterwards, by the suffix of the queue's name."""


CASES = {
    # A low priority is sent first, then a high one.
    "auto": Case("high low", {".auto": []}),
    # Three are sent, three are taken, and the second is acknowledged.
    "client": Case("1 2 3", {".client": ["3"]}),
    "client-individual": Case("1 2 3", {".client-individual": ["1", "3"]}),
    # One is taken, acknowledged in a transaction, and another one is sent in it.
    "commit": Case("taken", {".commit.from": [], ".commit.to": ["sent"]}),
    "abort": Case("taken", {".abort.from": ["taken"], ".abort.to": []}),
    "receipt": Case("came", {".receipt": ["confirmed"]}),
    # Nothing is said for three times what was agreed, and then something is sent and taken.
    "heart-beat": Case("alive", {".heart-beat": []}),
}
WITHOUT_HEART_BEATS = tuple(case for case in CASES if case != "heart-beat")


class Program(NamedTuple):
    """Program of a foreign client."""

    command: tuple[str, ...]
    version_command: tuple[str, ...]
    """Command that prints the version of the library, and exits 0 only if that is installed."""
    needs: str
    cases: tuple[str, ...] = tuple(CASES)
    """Cases that the library supports."""

    @property
    def beats(self) -> bool:
        """Whether the program stays connected, with heart-beats, until its input ends."""
        return "heart-beat" in self.cases

    def version(self) -> str | None:
        """Return the version of the library, or None if this machine lacks the library or its language."""
        try:
            done = subprocess.run(self.version_command, cwd=FOLDER, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return None if done.returncode else done.stdout.strip()

    def run(self, port: int, queue: str, beat_ms: int, output: Path) -> subprocess.Popen[bytes]:
        """Start the program with `output` for its output and errors. It ends with its input, and with this process."""
        with output.open("wb") as file:
            return subprocess.Popen(
                dying_with_us(["/usr/bin/env", *self.command, str(port), queue, str(beat_ms)]),
                cwd=FOLDER,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
            )


def _npm(file: str, *packages: str) -> Program:
    """Return a Node.js program; the first package is the client."""
    found = " ".join(f"require('{package}');" for package in packages)
    folder = f"require.resolve('{packages[0]}').split('{packages[0]}')[0]"
    version = f"{found} console.log(require({folder} + '{packages[0]}/package.json').version)"
    return Program(("node", file), ("node", "-e", version), f"npm install {' '.join(packages)} (or set NODE_PATH)")


def _pypi(file: str, package: str, cases: tuple[str, ...] = tuple(CASES)) -> Program:
    found = f"from importlib.metadata import version; print(version({package!r}))"
    return Program((sys.executable, file), (sys.executable, "-c", found), f"pip install {package}", cases)


PROGRAMS = {
    "stompit": _npm("stompit.js", "stompit"),
    "stompjs": _npm("stompjs.js", "@stomp/stompjs", "@stomp/tcp-wrapper"),
    "ruby-stomp": Program(
        ("ruby", "stomp.rb"),
        ("ruby", "-e", "require 'stomp'; puts Stomp::Version::STRING"),
        "Debian's packages ruby and ruby-stomp",
    ),
    "php-stomp": Program(
        ("php", "stomp.php"),
        ("php", "-r", "phpversion('stomp') === false and exit(1); echo phpversion('stomp');"),
        "Debian's packages php-cli and php-stomp",
        WITHOUT_HEART_BEATS,
    ),
    "net-stomp": Program(
        ("perl", "net_stomp.pl"),
        ("perl", "-e", "use Net::Stomp; print $Net::Stomp::VERSION"),
        "Debian's package libnet-stomp-perl",
        WITHOUT_HEART_BEATS,
    ),
    "stompman": _pypi("stompman_client.py", "stompman"),
    "faststream": _pypi("faststream_client.py", "faststream-stomp", ("auto", "commit", "receipt", "heart-beat")),
    "aiostomp": _pypi("aiostomp_client.py", "aiostomp", ("auto", "client", "client-individual", "heart-beat")),
    "stompest": _pypi("stompest_client.py", "stompest"),
    "workflows": _pypi("workflows_client.py", "workflows", ("auto", "client-individual", "commit", "abort")),
}
