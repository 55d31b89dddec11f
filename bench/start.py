"""Benchmark of starts: processor time of imports, and time until a broker listens, and until it is ready.

A service manager such as systemd takes a broker for started once it has sent READY=1 to the manager's socket. Starts
with and without such a socket alternate, so that a busy machine slows both. Times are by the clock, from the start of
the process until the line `listening on` can be read, or until READY=1 can.

python -m bench.start --runs 15
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.options import positive

IMPORTS = ("import truenext", "from truenext import blocking", "from truenext import connect")
"""Statements of programs. The first one has a limit; most of truenext is imported when one of its names is used."""
IMPORT_MAX_MS = 60.0
READY_MAX = 1.1
PATIENCE_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=positive, default=15, metavar="N", help="starts of each kind")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the broker's data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    imported = {each: statistics.median(import_ms(each) for _ in range(options.runs)) for each in IMPORTS}
    listening, ready = [], []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder:
        for number in range(options.runs + 1):
            times = time_until_listening(Path(folder) / "data"), time_until_ready(Path(folder))
            if number:
                # Not the first ones, which make the data folder and read modules from disk.
                listening.append(times[0])
                ready.append(times[1])
    ratio = statistics.median(ready) / statistics.median(listening)
    for statement, milliseconds in imported.items():
        limit = f" (at most {IMPORT_MAX_MS:.0f})" if statement == IMPORTS[0] else ""
        print(f"{statement}: {milliseconds:.1f} ms of processor time{limit}")
    print(f"listening: after {_described(listening)}")
    print(f"ready: after {_described(ready)}, {ratio:.2f} of that (at most {READY_MAX})")
    return 0


def import_ms(statement: str) -> float:
    """Return the processor time of an import in a new process, in ms."""
    program = f"import time; b = time.process_time(); {statement}; print((time.process_time() - b) * 1000)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)


def time_until_listening(data: Path) -> float:
    """Return the seconds from the start of a broker until it says where it listens."""
    began = time.monotonic()
    with _broker(data, stdout=subprocess.PIPE) as broker:
        assert broker.stdout is not None
        line = broker.stdout.readline()
        seconds = time.monotonic() - began
        assert line.startswith(b"listening on "), line
        _stop(broker)
    return seconds


def time_until_ready(folder: Path) -> float:
    """Return the seconds from the start of a broker until its service manager knows that it is ready."""
    address = folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(PATIENCE_S)
        began = time.monotonic()
        with _broker(folder / "data", stdout=subprocess.DEVNULL, notify=str(address)) as broker:
            notification = manager.recv(4096)
            seconds = time.monotonic() - began
            assert notification.startswith(b"READY=1"), notification
            _stop(broker)
    address.unlink()
    return seconds


def _broker(data: Path, *, stdout: int, notify: str = "") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "truenext", "serve", "--data", str(data), "--listen", "stomp://127.0.0.1:0"]
    return subprocess.Popen(command, stdout=stdout, env=os.environ | {"NOTIFY_SOCKET": notify})


def _stop(broker: subprocess.Popen[bytes]) -> None:
    broker.terminate()
    assert broker.wait(PATIENCE_S) == 0


def _described(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f} ms ({min(seconds) * 1000:.0f} to {max(seconds) * 1000:.0f})"


if __name__ == "__main__":
    sys.exit(main())
