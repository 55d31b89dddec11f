"""Recorder of foreign clients: `python -m tests.integration.foreign.record NAME...`, with the names of programs.py.

The library of the client must be installed on this machine. Its program talks to a broker through the recorder, which
writes down what both send. The files go to `recordings/`; `test_recordings.py` plays them.
"""

import asyncio
import contextlib
import re
import sys
import tempfile
import time
from pathlib import Path

from tests.integration.broker_process import BrokerProcess
from tests.integration.foreign.programs import PROGRAMS
from tests.integration.foreign.recording import FOLDER, Listener, escaped

BEAT_MS = 1000
"""Heart-beat interval, long enough for a player that does not hurry."""
PATIENCE_SECONDS = 60.0
_EXPIRES = re.compile(rb"(?<=\nexpires:)\d+")


class Recorder:
    """Proxy between clients and a broker that writes down both sides."""

    def __init__(self, broker_port: int) -> None:
        self._broker_port = broker_port
        self.lines: list[str] = []
        self._connections = 0
        self._last = 0
        """Connection of the last line."""

    async def accept(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self._connections += 1
        connection = self._connections
        listener = Listener()
        broker, to_broker = await asyncio.open_connection("127.0.0.1", self._broker_port)

        async def forward_to_broker() -> None:
            while data := await client.read(65536):
                self._write(connection, ">", _lines(_general(data, listener)))
                to_broker.write(data)
            self._write(connection, "=", ["closed"])
            to_broker.close()

        async def forward_to_client() -> None:
            try:
                while data := await broker.read(65536):
                    self._write(connection, "<", listener.hear(data))
                    to_client.write(data)
            finally:
                to_client.close()

        # Who is gone has no use for what it is still told.
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(forward_to_broker(), forward_to_client())

    def _write(self, connection: int, kind: str, lines: list[str]) -> None:
        if lines and connection != self._last:
            self._last = connection
            self.lines.append(f"= connection {connection}")
        self.lines += [f"{kind} {line}" for line in lines]


def _lines(data: bytes) -> list[str]:
    return [escaped(line) for line in re.findall(rb"[^\n]*\n|[^\n]+", data)]


def _general(data: bytes, listener: Listener) -> bytes:
    """Replace parts that vary by braces."""
    for (header, subscription, number), value in listener.names.items():
        # The whole of a header's value: one id may be the beginning of another.
        data = re.sub(
            rb"(?<=:)" + re.escape(value) + rb"(?=\r?\n)", b"{%b %b %b}" % (header, subscription, number), data
        )
    return _EXPIRES.sub(lambda match: b"{now+%d}" % (round(int(match[0]) / 1000 - time.time()) * 1000), data)


async def record(name: str) -> None:
    program = PROGRAMS[name]
    version = program.version()
    if version is None:
        raise SystemExit(f"{name} is not on this machine: {program.needs}")
    with tempfile.TemporaryDirectory() as folder:
        broker = BrokerProcess(Path(folder))
        try:
            broker.start()
            recorder = Recorder(broker.port)
            server = await asyncio.start_server(recorder.accept, "127.0.0.1", 0)
            output = Path(folder) / "said"
            process = program.run(server.sockets[0].getsockname()[1], "{queue}", BEAT_MS, output)
            await asyncio.to_thread(process.communicate, timeout=PATIENCE_SECONDS)
            server.close()
            if process.returncode:
                raise SystemExit(f"{name} failed:\n{output.read_text()}")
            broker.stop()
        finally:
            broker.clean_up()
    head = [f"# What {name} {version} says, recorded by tests/integration/foreign/record.py."]
    (FOLDER / f"{name}.txt").write_text("\n".join([*head, *recorder.lines, ""]))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        asyncio.run(record(argument))
