"""World of the browser's tests: a broker with users, a service of stages with its events, and a console, each a process
of its own."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

from tests.console.browser.shop import Billed, Order
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import Forked
from tests.stages.service_process import ServiceProcess
from truenext import blocking
from truenext.client.core.send_options import SendOptions
from truenext.client.threads.connection import Connection
from truenext.stage import Service

PASSWORD = "open sesame"
READ = 'browse = [">", "DLQ.>", "Spark.>"]\nsend = ["/topic/truenext.stages"]\nmonitor = true\n'
ACT = READ.replace('send = ["', 'send = [">", "').replace("monitor", 'manage = [">", "DLQ.>"]\nmonitor')
ALL = "\n".join(f'{right} = [">", "DLQ.>", "Spark.>", "/topic/>"]' for right in ("send", "take", "browse", "manage"))
USERS = {
    # docs/security.md, "Roles for the console"
    "reader": READ,
    "actor": ACT,
    "admin": f"{ACT}admin = true\n",
    "shop": f"{ALL}\nmonitor = true\n",
}


class World:
    """Addresses and processes that tests share."""

    def __init__(self, folder: Path, users: dict[str, str]) -> None:
        self.folder = folder
        self.password_file = folder / "password"
        self.password_file.touch(mode=0o600)
        self.password_file.write_text(PASSWORD)
        self._users_file = folder / "users.toml"
        self._users_file.touch(mode=0o600)
        self._users_file.write_text(
            "\n".join(f"[user.{_quoted(name)}]\npassword_file = 'password'\n{grants}" for name, grants in users.items())
        )
        self.events = folder / "events"
        self.broker = BrokerProcess(folder, ["--users", str(self._users_file)], policy={"expired": "dead-letter"})
        self.address = ""
        """Address of the console."""
        self._console: Forked | None = None
        self._services: list[ServiceProcess] = []

    def start(self) -> None:
        self.broker.start()
        self.start_console()

    def start_console(self, *options: str) -> None:
        log = self.folder / "console.log"
        command = [
            "console",
            "--broker",
            self.broker.url,
            "--events",
            str(self.events),
            "--listen",
            "http://127.0.0.1:0",
        ]
        self.events.mkdir(exist_ok=True)
        self._console = Forked([*command, *options], stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := re.search(r"http://127\.0\.0\.1:[1-9]\d*", log.read_text() if log.exists() else "")) is None:
            assert time.monotonic() < deadline, f"no address: {log.read_text()}"
            assert self._console.poll() is None, f"the console has ended: {log.read_text()}"
            time.sleep(0.02)
        self.address = found[0]

    @property
    def console_log(self) -> str:
        return (self.folder / "console.log").read_text()

    def connect(self, client_id: str | None = None) -> Connection:
        return blocking.connect(self.broker.url, user="shop", password=PASSWORD, client_id=client_id)

    def start_service(self) -> ServiceProcess:
        """Start one process of the service `shop`, which writes its events."""
        login = ["--user", "shop", "--password-file", str(self.password_file)]
        options = [*login, "--events", str(self.events)]
        service = ServiceProcess(self.folder, "tests.console.browser.shop:app", self.broker.url, *options)
        self._services.append(service)
        return service

    def order(self, *orders: tuple[str, Order]) -> None:
        """Start a flow for each order, under its trace."""

        async def start() -> None:
            web = Service("web", broker=self.broker.url, user="shop", password=PASSWORD)
            endpoint = web.remote("shop.order", Order, Billed)
            async with web.connected():
                for trace, order in orders:
                    await web.send(endpoint, order, trace=trace)

        # Playwright has an event loop in this thread.
        thread = threading.Thread(target=asyncio.run, args=(start(),))
        thread.start()
        thread.join()

    def close(self) -> None:
        for each in self._services:
            if not each.has_ended:
                each.kill()
        if self._console is not None:
            assert self._console.poll() is None, f"the console has ended: {self.console_log}"
            self._console.send_signal(signal.SIGTERM)
            self._console.wait(PATIENCE_SECONDS)
        self.broker.clean_up()


@contextmanager
def world(folder: Path, users: dict[str, str] | None = None) -> Iterator[World]:
    made = World(folder, USERS if users is None else users)
    try:
        made.start()
        yield made
    finally:
        made.close()


def send_all(connection: Connection, messages: Sequence[tuple[str, str]], **options: Unpack[SendOptions]) -> None:
    """Send messages, each a queue and a body."""
    with connection.session(transacted=True) as session:
        for start in range(0, len(messages), 1000):
            with session.transaction():
                for queue, body in messages[start : start + 1000]:
                    session.send(f"/queue/{queue}", body, **options)


def fill_queues(connection: Connection, names: Sequence[str]) -> None:
    """Send one message to each queue."""
    send_all(connection, [(name, "filled") for name in names])


def reject_all(connection: Connection, queue: str, causes: Sequence[str]) -> None:
    """Send one message for each cause, and reject it with this cause."""
    bodies = [(queue, f'{{"number": {number}}}') for number in range(len(causes))]
    send_all(connection, bodies, headers={"content-type": "application/json"})
    with connection.consumer(f"/queue/{queue}", ack="individual") as consumer:
        for cause in causes:
            message = consumer.receive(PATIENCE_SECONDS)
            assert message is not None
            message.reject(cause=cause)


def _quoted(name: str) -> str:
    escaped = "".join(f"\\U{ord(char):08x}" if char in '"\\' or not char.isprintable() else char for char in name)
    return f'"{escaped}"'
