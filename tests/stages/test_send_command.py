"""Tests of `truenext stages send`: it starts flows, checks the message by its type, and waits for a reply."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from bench.brokers import free_port
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import Forked, completed
from tests.login_broker import login_broker

SHOP = """


import msgspec
from pydantic import BaseModel

from truenext.stage import Flow, Reject, Service

app = Service("shop", attempts=1)


class Order(msgspec.Struct):
    id: str
    count: int = 1
    items: list[int] = []


class Placed(msgspec.Struct):
    id: str
    counted: int


class Parcel(BaseModel):
    weight: int
    to: str


bank = app.remote("bank.pay", Order, Placed)


@app.single("order.place", Order, Placed)
async def place(order: Order, flow: Flow) -> Placed:
    print("places", order.id, "in", flow.trace, flush=True)
    if order.count == 0:
        raise Reject("nothing ordered")
    return Placed(order.id, order.count)


@app.terminator("parcel.ship", Parcel)
async def ship(parcel: Parcel, flow: Flow) -> None:
    print("ships", parcel.weight, "to", parcel.to, "in", flow.trace, flush=True)
"""

Send = Callable[..., CompletedProcess[bytes]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "shop.py").write_text(SHOP)
    return folder


@pytest.fixture
def send(broker: BrokerProcess, folder: Path) -> Send:
    def send(*words: str) -> CompletedProcess[bytes]:
        url = f"stomp://127.0.0.1:{broker.port}"
        return completed("stages", "send", "shop:app", *words, "--url", url, folder=folder)

    return send


@pytest.fixture
def log(broker: BrokerProcess, folder: Path) -> Iterator[Path]:
    """Output of a process that runs the service."""
    log = folder / "log"
    command = ["stages", "run", "shop:app", "--url", f"stomp://127.0.0.1:{broker.port}"]
    process = Forked(command, stdout=log, stderr=log, folder=folder)
    try:
        await_line(log, "shop runs ")
        yield log
    finally:
        process.kill()


def await_line(log: Path, beginning: str) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        for line in log.read_text().splitlines() if log.exists() else ():
            if line.startswith(beginning):
                return line
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def complaint(done: CompletedProcess[bytes]) -> tuple[int, str]:
    """Return status and error, which is one line; nothing was printed."""
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    return done.returncode, line


# ---- Flows ----


def test_command_starts_a_flow_and_prints_its_id(log: Path, send: Send) -> None:
    done = send("order.place", '{"id": "o1"}', "--trace", "by hand")
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout.split()) == 1
    assert await_line(log, "places") == "places o1 in by hand"


def test_command_with_ask_prints_the_reply_as_json(log: Path, send: Send) -> None:
    done = send("order.place", '{"id": "oé", "count": 3}', "--trace", "t", "--ask")
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == {"id": "oé", "counted": 3}


def test_message_of_a_pydantic_model_is_sent(log: Path, send: Send) -> None:
    assert send("parcel.ship", '{"weight": 3, "to": "Oslo"}', "--trace", "t").returncode == 0
    assert await_line(log, "ships") == "ships 3 to Oslo in t"


def test_endpoint_of_another_service_gets_the_message(broker: BrokerProcess, send: Send) -> None:
    assert send("bank.pay", '{"id": "o1"}', "--trace", "t").returncode == 0
    assert broker.queues()["bank.pay"].waiting == 1


def test_reply_that_does_not_come_in_time_is_said_and_the_flow_has_started(broker: BrokerProcess, send: Send) -> None:
    status, line = complaint(send("order.place", '{"id": "o1"}', "--trace", "t", "--ask", "--timeout", "0.5"))
    assert (status, line) == (
        1,
        "truenext: order.place has not replied within 0.5 seconds; the reply may still come. If it does not, look for "
        "the request in the dead-letter queues: truenext queues",
    )
    assert broker.queues()["order.place"].waiting == 1


# ---- Messages that are not of the type ----


@pytest.mark.parametrize(
    ("endpoint", "message", "told"),
    [
        ("order.place", '{"count": 3}', "missing required field `id`"),
        ("order.place", '{"id": "o1", "count": "3"}', "Expected `int`, got `str` - at `$.count`"),
        ("order.place", '{"id": "o1", "items": [1, "2"]}', "Expected `int`, got `str` - at `$.items[1]`"),
        ("order.place", '["o1"]', "Expected `object`, got `array`"),
        ("order.place", '{"id": "o1"', "Input data was truncated"),
        ("order.place", "", "Input data was truncated"),
        ("parcel.ship", '{"weight": "heavy", "to": "Oslo"}', "1 validation error for Parcel weight Input should be"),
        ("parcel.ship", '{"weight": 3}', "to Field required"),
    ],
)
def test_message_of_another_type_is_refused_with_its_field(
    broker: BrokerProcess, send: Send, endpoint: str, message: str, told: str
) -> None:
    status, line = complaint(send(endpoint, message, "--trace", "t"))
    assert status == 2
    assert line.startswith("truenext: Invalid value for JSON: the JSON is not of type ") and told in line
    assert broker.queues() == {}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("order.plac", "{}", "--trace", "t"), "shop:app has no endpoint 'order.plac'; is 'order.place' meant?"),
        (("x", "{}", "--trace", "t"), "no endpoint 'x'; there are bank.pay, order.place, parcel.ship"),
        (("parcel.ship", '{"weight": 1, "to": ""}', "--trace", "t", "--ask"), "parcel.ship replies nothing: leave out"),
        (("order.place", '{"id": "o1"}'), "Missing option '--trace'"),
        (("order.place", '{"id": "o1"}', "--trace", ""), "'--trace': must be a printable text, not empty"),
        (("order.place", '{"id": "o1"}', "--trace", "t", "--key", "k.pem"), "No such option"),
    ],
)
def test_wrong_command_line_is_refused(send: Send, words: tuple[str, ...], told: str) -> None:
    status, line = complaint(send(*words))
    assert status == 2
    assert told in line


# ---- Broker and login ----


def test_missing_broker_is_said_at_once(folder: Path) -> None:
    url = f"stomp://127.0.0.1:{free_port()}"
    done = completed(
        "stages", "send", "shop:app", "order.place", '{"id": "o"}', "--trace", "t", "--url", url, folder=folder
    )
    status, line = complaint(done)
    assert status == 2
    assert "no broker at" in line and "truenext serve" in line


def test_refused_login_is_said_with_a_hint(folder: Path) -> None:
    with login_broker() as broker:
        broker.refusal_codes.append("login")
        words = ("order.place", '{"id": "o"}', "--trace", "t", "--url", broker.url)
        done = completed("stages", "send", "shop:app", *words, folder=folder)
    status, line = complaint(done)
    assert status == 1
    assert "refused here" in line and "TRUENEXT_USER" in line


def test_command_needs_no_database(broker: BrokerProcess, folder: Path) -> None:
    (folder / "web.py").write_text(
        "from truenext.stage import Service\n"
        "app = Service('web', database='postgresql+psycopg://nobody@127.0.0.1:1/shop', exactly_once=True)\n"
        "app.remote('order.place', str)\n"
    )
    words = ("order.place", '"o1"', "--trace", "t", "--url", f"stomp://127.0.0.1:{broker.port}")
    assert completed("stages", "send", "web:app", *words, folder=folder).returncode == 0
    assert broker.queues()["order.place"].waiting == 1
