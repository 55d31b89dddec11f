"""Benchmark of the console: what ten browsers and a scrape every 5 seconds cost a busy broker, and how soon pages come.

    meanwhile   rates of loads while ten browsers watch a broker of 10,000 queues, beside the same loads without console
    pages       seconds until a page has come while the broker is busy, and until the first page with all of its files
    memory      memory of the console
    command     processor time of `truenext queues` at 50,000 queues, beside that of `truenext queues --json`

python -m bench.console --queues 10000 --runs 5
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench import machine
from bench.brokers import Broker, BrokerError, Truenext
from bench.load import LOADS, Load, Outcome, connect, run
from bench.options import positive
from bench.progress import guarded, print_line
from bench.workers import Counter, Crew, Gate, counter, end_in_order

_MESSAGES = {"1": 300_000, "3": 60_000, "5": 3_000}
"""Number of messages of each run, by the key of its load."""
_LOADS = tuple(load for load in LOADS if load.key in _MESSAGES)
_BROWSERS = 10
_PAGES = ("/", "/queues", "/queues?order=oldest", "/queue?name=bench.1", "/dead-letters", "/stages", "/connections")
"""Pages that browsers show, one after the other."""
_SHOWN_S = 5.0
"""Seconds for which a browser shows a page, with its stream of changes, before the next one."""
_SCRAPE_S = 5.0
_QUEUES_OF_COMMAND = 50_000
_RATE_TARGET = 0.97
_PAGE_TARGET_S = 0.3
_FIRST_PAGE_TARGET = (1.0, 200 * 1024)
_MEMORY_TARGET = 100 * 1024
_COMMAND_TARGET = 3.0
_PATIENCE = 60.0
_LISTENING = re.compile(r"http://127\.0\.0\.1:(\d+)/open\?key=(\S+)")
_FILES = re.compile(rb'(?:href|src)="(/static/[^"]+)"')


class _Monitored(Truenext):
    options = ("--health", "127.0.0.1:0")

    @property
    def health_port(self) -> int:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.log())
        if found is None:
            raise BrokerError(f"the broker names no address of its health:\n{self.log()}")
        return int(found[1])


class _Console(Broker):
    """Console of a broker, as a process."""

    name = "console"

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self._url = f"stomp://127.0.0.1:{broker.port}"

    def prepare(self, folder: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "truenext", "console"),
            *("--broker", self._url, "--listen", "http://127.0.0.1:0"),
        ]

    def listening_port(self) -> int:
        found = _LISTENING.search(self.log())
        return int(found[1]) if found else 0

    @property
    def key(self) -> str:
        found = _LISTENING.search(self.log())
        assert found, "it listens"
        return found[2]


class _Browser:
    """Client of the console that keeps its cookie, and its connection while it loads a page."""

    def __init__(self, port: int, key: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
        self._headers = {"Accept": "text/html"}
        self._connection.request("GET", f"/open?key={key}")
        answer = self._connection.getresponse()
        answer.read()
        self._headers["Cookie"] = (answer.getheader("Set-Cookie") or "").partition(";")[0]

    def get(self, path: str) -> bytes:
        """Return a page, or a file. Raises: BrokerError if the console does not answer with one"""
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise BrokerError(f"the console answers {path} with {answer.status}: {body[:300].decode()}")
        return body

    def watch(self, path: str, seconds: float) -> None:
        """Read the changes of a page for so long."""
        # The console closes a connection without requests after 5 s: the next page opens it again.
        self._connection.close()
        stream = http.client.HTTPConnection("127.0.0.1", self._connection.port, timeout=seconds)
        stream.request("GET", path, headers={**self._headers, "Accept": "text/event-stream"})
        until = time.monotonic() + seconds
        try:
            with stream.getresponse() as changes:
                while time.monotonic() < until and changes.readline():
                    pass
        except TimeoutError:
            pass
        finally:
            stream.close()


def browse(gate: Gate, port: int, key: str, health_port: int, has_ended: Counter) -> list[float]:
    """Worker: show pages in ten browsers, and scrape metrics, until `has_ended` is 1. Return the seconds of pages."""
    times: list[float] = []
    failures: list[Exception] = []

    def show(number: int) -> None:
        try:
            browser = _Browser(port, key)
            while not has_ended.value:
                path = _PAGES[number % len(_PAGES)]
                number += 1
                started = time.monotonic()
                browser.get(path)
                times.append(time.monotonic() - started)
                browser.watch(path, _SHOWN_S)
        except Exception as error:
            failures.append(error)

    def scrape() -> None:
        try:
            while not has_ended.value:
                connection = http.client.HTTPConnection("127.0.0.1", health_port, timeout=_PATIENCE)
                connection.request("GET", "/metrics")
                if connection.getresponse().status != 200:
                    raise BrokerError("the broker does not answer /metrics")
                connection.close()
                time.sleep(_SCRAPE_S)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=show, args=(number,)) for number in range(_BROWSERS)]
    threads.append(threading.Thread(target=scrape))
    gate.ready()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        raise failures[0]
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="bench-console-", ignore_cleanup_errors=True) as name:
        for fact, value in [*machine.facts(Path(name)), ("seed", str(options.seed))]:
            print_line(f"{fact}: {value}")
        return guarded(lambda: _measure(Path(name), options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.console", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queues", type=positive, default=10_000, metavar="N", help="queues (default 10,000)")
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="runs of each (default 5)")
    parser.add_argument("--share", type=float, default=1.0, metavar="X", help="length of a run (default 1.0)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the messages (default 1)")
    return parser


def _measure(folder: Path, options: argparse.Namespace) -> None:
    with _Monitored(folder) as broker:
        _make_queues(broker, options.queues)
        with _Console(broker) as console:
            _measure_first_page(console)
        _measure_loads(broker, options)
    with Truenext(folder) as broker:
        _make_queues(broker, _QUEUES_OF_COMMAND * options.queues // 10_000)
        _measure_command(broker, options.runs)


def _make_queues(broker: Broker, count: int) -> None:
    """Send a message to each of so many queues."""
    with connect(broker.port) as sock:
        # One receipt at the end: the broker answers in order.
        sock.sendall(b"".join(_send(f"bench.{number}") for number in range(count - 1)) + _send("last", "receipt:1\n"))
        answer = b""
        while b"RECEIPT" not in answer:
            answer = answer[-16:] + sock.recv(65536)


def _send(queue: str, header: str = "") -> bytes:
    return f"SEND\ndestination:/queue/{queue}\n{header}content-length:1\n\nx\0".encode()


def _measure_first_page(console: _Console) -> None:
    started = time.monotonic()
    browser = _Browser(console.port, console.key)
    page = browser.get("/")
    files = [browser.get(path.decode()) for path in dict.fromkeys(_FILES.findall(page))]
    size = sum(map(len, [page, *files]))
    print_line(
        f"first page: {time.monotonic() - started:.2f} s (at most {_FIRST_PAGE_TARGET[0]:g}), {size >> 10} KiB in "
        f"{len(files) + 1} files (at most {_FIRST_PAGE_TARGET[1] >> 10})"
    )


def _measure_loads(broker: _Monitored, options: argparse.Namespace) -> None:
    pairs: dict[Load, list[tuple[Outcome, Outcome]]] = {load: [] for load in _LOADS}
    times: list[float] = []
    memory = 0
    for number in range(options.runs):
        for load in _LOADS:
            alone = _run(load, broker, f"alone.{number}", options)
            with _Console(broker) as console, Crew() as crew:
                has_ended = counter()
                browsers = crew.hire(browse, console.port, console.key, broker.health_port, has_ended)
                browsers.await_ready()
                browsers.start()
                # Each browser has its first page then.
                time.sleep(2.0)
                pairs[load].append((alone, _run(load, broker, f"watched.{number}", options)))
                memory = max(memory, console.anonymous_memory() or 0)
                has_ended.value = 1
                times += crew.finish(_PATIENCE)[0]
    for load, outcomes in pairs.items():
        ratio = statistics.median(watched.rate / alone.rate for alone, watched in outcomes)
        rates = [statistics.median(each.rate for each in side) for side in zip(*outcomes, strict=True)]
        print_line(
            f"{load.title}: {rates[1]:,.0f} messages a second beside {_BROWSERS} browsers, {rates[0]:,.0f} without; "
            f"{ratio:.3f} (at least {_RATE_TARGET}); {len(outcomes)} pairs"
        )
    p95 = statistics.quantiles(times, n=20)[-1]
    print_line(f"pages: p95 {p95 * 1000:,.0f} ms of {len(times)} pages (at most {_PAGE_TARGET_S * 1000:g})")
    print_line(f"memory of the console: RssAnon {memory >> 10} MiB (at most {_MEMORY_TARGET >> 10})")


def _run(load: Load, broker: Broker, name: str, options: argparse.Namespace) -> Outcome:
    messages = max(200, int(_MESSAGES[load.key] * options.share))
    return run(load, broker.port, f"/queue/bench.{load.key}.{name}", messages, options.seed)


def _measure_command(broker: Broker, runs: int) -> None:
    seconds: dict[str, list[float]] = {"": [], "--json": []}
    for _ in range(runs):
        for option, times in seconds.items():
            times.append(_processor_seconds(["queues", "--url", f"stomp://127.0.0.1:{broker.port}", *option.split()]))
    plain, as_json = (statistics.median(times) for times in seconds.values())
    print_line(
        f"truenext queues: {plain:.2f} s of processor time, {as_json:.2f} with --json; {plain / as_json:.2f} (at most "
        f"{_COMMAND_TARGET:g})"
    )


def _processor_seconds(command: list[str]) -> float:
    process = subprocess.Popen([sys.executable, "-m", "truenext", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BrokerError(f"truenext {' '.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
