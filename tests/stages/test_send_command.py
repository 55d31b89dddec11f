"""Tests of `truenext stages send`: it starts flows, checks the message by its type, and waits for a reply."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from bench.brokers import free_port
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import Forked, completed
from tests.login_broker import login_broker
from truenext.blocking import connect
from truenext.stage.sql import apply_schema

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
        "truenext: order.place has not replied within 0.5 s; the reply may still come. If it does not, look for "
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
        (("x", "{}", "--trace", "t"), "no endpoint 'x'; known: bank.pay, order.place, parcel.ship"),
        (("parcel.ship", '{"weight": 1, "to": ""}', "--trace", "t", "--ask"), "parcel.ship replies nothing: leave out"),
        (("order.place", '{"id": "o1"}'), "Missing option '--trace'"),
        (("order.place", '{"id": "o1"}', "--trace", ""), "'--trace': must be a printable text, not empty"),
        (("order.place", '{"id": "o1"}', "--trace", "t", "--key", ""), "'--key': must be a printable text"),
        (("order.place", '{"id": "o1"}', "--trace", "t", "--delay", "3"), "'3' is not a number with ms, s, m, h or d"),
        (("order.place", '{"id": "o1"}', "--trace", "t", "--delay", "-3d"), "'-3d' is not a number with ms, s, m"),
        (
            ("order.place", '{"id": "o1"}', "--trace", "t", "--delay", "40000d"),
            "40000d is too long: at most 36,500 days",
        ),
        (("order.place", '{"id": "o1"}', "--trace", "t", "--at", "2027-01-31T08:00"), "is not a time with a time zone"),
        (("order.place", '{"id": "o1"}', "--trace", "t", "--at", "tomorrow"), "is not a time with a time zone"),
        (
            ("order.place", '{"id": "o1"}', "--trace", "t", "--at", "2027-01-31T08:00Z", "--delay", "3d"),
            "--delay and --at exclude each other",
        ),
        (("order.place", '{"id": "o1"}', "--trace", "t", "--ask", "--delay", "3d"), "only under a key: add --key"),
    ],
)
def test_wrong_command_line_is_refused(send: Send, words: tuple[str, ...], told: str) -> None:
    status, line = complaint(send(*words))
    assert status == 2
    assert told in line


# ---- Later ----


def due_s(broker: BrokerProcess) -> float:
    """Return the due time of the one scheduled send, in seconds since 1970."""
    with connect(broker.url) as connection:
        answer = json.loads(connection.control_request("scheduled", {"queue": "order.place"}))
    (send,) = answer["sends"]
    return float(send["due_ms"]) / 1000


def test_delay_of_days_schedules_the_flow(broker: BrokerProcess, send: Send) -> None:
    before = time.time()
    assert send("order.place", '{"id": "o1"}', "--trace", "t", "--delay", "3d").returncode == 0
    assert 3 * 86_400 <= due_s(broker) - before < 3 * 86_400 + PATIENCE_SECONDS
    assert broker.queues()["order.place"].waiting == 0


def test_time_with_a_zone_schedules_the_flow(broker: BrokerProcess, send: Send) -> None:
    assert send("order.place", '{"id": "o1"}', "--trace", "t", "--at", "2040-01-31T08:00+01:00").returncode == 0
    assert due_s(broker) == datetime(2040, 1, 31, 7, tzinfo=UTC).timestamp()


def test_delayed_flow_runs_when_it_is_due(log: Path, send: Send) -> None:
    assert send("parcel.ship", '{"weight": 3, "to": "Oslo"}', "--trace", "t", "--delay", "500ms").returncode == 0
    assert await_line(log, "ships") == "ships 3 to Oslo in t"


# ---- Under a key ----


@pytest.fixture
def keyed(broker: BrokerProcess, folder: Path, database: str) -> Iterator[Send]:
    """The command, with a process that runs the same service with a database."""
    service = f'Service("shop", attempts=1, database="{database}", exactly_once=True)'
    (folder / "keyed.py").write_text(SHOP.replace('Service("shop", attempts=1)', service))
    apply_schema(database)
    url = f"stomp://127.0.0.1:{broker.port}"

    def send(*words: str) -> CompletedProcess[bytes]:
        return completed("stages", "send", "keyed:app", *words, "--url", url, folder=folder)

    log = folder / "log"
    process = Forked(["stages", "run", "keyed:app", "--url", url], stdout=log, stderr=log, folder=folder)
    try:
        await_line(log, "shop runs ")
        yield send
    finally:
        process.kill()


def test_command_with_a_key_starts_one_flow_and_prints_its_id_each_time(keyed: Send, folder: Path) -> None:
    words = ("order.place", '{"id": "o1", "count": 2}', "--trace", "t", "--key", "o1")
    first, second = keyed(*words), keyed(*words)
    assert (first.returncode, first.stderr) == (0, b"")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    # What was started without --ask is asked later, too.
    for _ in range(2):
        asked = keyed(*words, "--ask")
        assert (asked.returncode, asked.stderr) == (0, b"")
        assert json.loads(asked.stdout) == {"id": "o1", "counted": 2}
    assert (folder / "log").read_text().count("places o1") == 1


def test_key_of_an_endpoint_that_replies_nothing_starts_one_flow(keyed: Send, folder: Path) -> None:
    words = ("parcel.ship", '{"weight": 3, "to": "Oslo"}', "--trace", "t", "--key", "p1")
    assert [keyed(*words).returncode for _ in range(2)] == [0, 0]
    await_line(folder / "log", "ships 3")
    assert keyed("parcel.ship", '{"weight": 4, "to": "Oslo"}', "--trace", "t", "--key", "p2").returncode == 0
    await_line(folder / "log", "ships 4")
    assert (folder / "log").read_text().count("ships 3") == 1


def test_delayed_flow_under_a_key_is_asked_when_it_is_due(keyed: Send) -> None:
    words = ("order.place", '{"id": "o1"}', "--trace", "t", "--key", "o1", "--delay", "1s")
    assert keyed(*words).returncode == 0
    asked = keyed(*words, "--ask")
    assert json.loads(asked.stdout) == {"id": "o1", "counted": 1}


def test_failure_and_other_message_under_a_key_are_said(keyed: Send) -> None:
    words = ("--trace", "t", "--key", "o1", "--ask")
    for _ in range(2):
        status, line = complaint(keyed("order.place", '{"id": "o1", "count": 0}', *words))
        assert status == 1 and "order.place" in line and "nothing ordered" in line
    status, line = complaint(keyed("order.place", '{"id": "o2", "count": 0}', *words))
    assert status == 1 and "other flows began under this key before" in line


def test_key_without_a_database_is_refused(broker: BrokerProcess, send: Send) -> None:
    status, line = complaint(send("order.place", '{"id": "o1"}', "--trace", "t", "--key", "o1"))
    assert status == 1 and "shop keeps no replies: it needs a database and exactly-once processing" in line
    assert broker.queues() == {}


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
