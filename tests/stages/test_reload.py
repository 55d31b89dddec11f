"""Tests of `truenext stages run --reload`: a service stops in order when a source file changes, and starts again."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT, BrokerProcess, dying_with_us
from truenext.stage import Service

pytest.importorskip("watchfiles", reason="the extra `reload` is not installed")

SHOP = """
import asyncio, os

from truenext.stage import Flow, Service

app = Service("shop")


@app.terminator("order.place", int)
async def place(number: int, flow: Flow) -> None:
    print("{version} begins", number, "in", os.getpid(), flush=True)
    await asyncio.sleep(number)
    print("{version} ends", number, "attempt", flow.attempt, flush=True)
"""


class Shop:
    """Process of the service in a folder whose files a test changes."""

    def __init__(self, folder: Path, broker: BrokerProcess) -> None:
        self._folder = folder
        self._url = f"stomp://127.0.0.1:{broker.port}"
        self._log = folder / "log"
        self.write(SHOP.format(version="first"))
        command = [TRUENEXT, "stages", "run", "shop:app", "--url", self._url, "--reload"]
        with self._log.open("wb") as log:
            # Not forked: the command runs its own command line again.
            self.process = subprocess.Popen(dying_with_us(command), cwd=folder, stdout=log, stderr=log)

    def write(self, source: str, file: str = "shop.py") -> None:
        # An editor replaces the file.
        (self._folder / f"{file}~").write_text(source)
        (self._folder / f"{file}~").replace(self._folder / file)

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def count(self, what: str) -> int:
        return sum(what in line for line in self.lines)

    def await_line(self, what: str, count: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.count(what) < count:
            assert time.monotonic() < deadline, f"{what!r} is not there:\n{self._log.read_text()}"
            assert self.process.poll() is None, f"it has ended:\n{self._log.read_text()}"
            time.sleep(0.01)

    def send(self, number: int) -> None:
        async def send() -> None:
            other = Service("other", broker=self._url)
            async with other.connected():
                await other.send(other.remote("order.place", int), number, trace="t")

        asyncio.run(send())


@pytest.fixture
def shop(tmp_path: Path, broker: BrokerProcess) -> Iterator[Shop]:
    folder = tmp_path / "shop"
    folder.mkdir()
    shop = Shop(folder, broker)
    try:
        yield shop
    finally:
        shop.process.kill()
        shop.process.wait()


def test_changed_file_lets_running_stages_end_and_starts_the_new_code(shop: Shop, broker: BrokerProcess) -> None:
    shop.await_line("shop runs ")
    shop.write("no source", "notes.txt")
    shop.send(2)
    shop.await_line("first begins 2")
    shop.write(SHOP.format(version="another"))
    shop.await_line("source files have changed")
    shop.await_line("shop runs ", 2)
    shop.send(0)
    shop.await_line("another ends 0 attempt 1")
    # The stage that ran was not cancelled, and its message did not come again.
    assert shop.count("first ends 2 attempt 1") == 1
    assert shop.count("begins 2") == 1
    # The process is the same, for an orchestrator and a terminal.
    pids = {line.rpartition(" ")[2] for line in shop.lines if " begins " in line}
    assert pids == {str(shop.process.pid)}
    assert shop.count("source files have changed") == 1
    assert broker.queues()["order.place"].unacknowledged == 0
    shop.process.send_signal(signal.SIGTERM)
    assert shop.process.wait(PATIENCE_SECONDS) == 0


def test_changed_module_that_the_service_imports_restarts_it_too(shop: Shop) -> None:
    shop.await_line("shop runs ")
    shop.write("PRICE = 3\n", "prices.py")
    shop.await_line("shop runs ", 2)


def test_error_in_the_file_is_shown_and_the_next_change_starts_the_service(shop: Shop) -> None:
    shop.await_line("shop runs ")
    for broken, told in [
        ("def (", "SyntaxError"),
        ("import nowhere\n", "No module named 'nowhere'"),
        ("", "has no app"),
    ]:
        waits = shop.count("waits for a change")
        shop.write(broken)
        shop.await_line(told)
        shop.await_line("waits for a change", waits + 1)
    shop.write(SHOP.format(version="mended"))
    shop.await_line("shop runs ", 2)
    shop.send(0)
    shop.await_line("mended ends 0")


def test_signal_while_the_service_stops_for_a_change_ends_it_when_its_stages_have_ended(shop: Shop) -> None:
    shop.await_line("shop runs ")
    shop.send(3)
    shop.await_line("first begins 3")
    shop.write(SHOP.format(version="another"))
    shop.await_line("source files have changed")
    # It stops by now, and not only for the signal.
    time.sleep(0.5)
    shop.process.send_signal(signal.SIGTERM)
    assert shop.process.wait(PATIENCE_SECONDS) == 0
    assert shop.count("first ends 3 attempt 1") == 1
    assert shop.count("shop runs ") == 1


def test_change_while_the_broker_is_away_starts_the_service_again(shop: Shop, broker: BrokerProcess) -> None:
    shop.await_line("shop runs ")
    port = broker.port
    broker.stop()
    # Each process tells it once for each connection.
    shop.await_line("cannot connect to", 2)
    shop.write(SHOP.format(version="second"))
    shop.await_line("source files have changed")
    shop.await_line("cannot connect to", 3)
    shop.write(SHOP.format(version="the third"))
    shop.await_line("source files have changed", 2)
    broker.start(port)
    shop.await_line("shop runs ", 2)
    shop.send(0)
    shop.await_line("the third ends 0")
