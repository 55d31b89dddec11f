"""Tests of `truenext queues` and `truenext status` with --watch, without a broker."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from tests.unit.test_control_queries import ReportDriver
from truenext.cli.exit_status import INTERRUPTED, START_HINT, CommandFailure
from truenext.cli.main import main
from truenext.errors import NoBroker


class Answering:
    """Connection to a broker that answers at once."""

    def __init__(self, driver: ReportDriver, *, is_older: bool = False) -> None:
        self._driver = driver
        self._is_older = is_older
        self.requests: list[tuple[str, Any]] = []

    def control_request(self, verb: str, request: object = None) -> bytes:
        self.requests.append((verb, request))
        asked = None if self._is_older else request
        return msgspec.json.encode(self._driver.answer(verb, asked))  # type: ignore[arg-type]


@pytest.fixture
def driver() -> ReportDriver:
    driver = ReportDriver()
    for name, count in (("orders", 3), ("orders.eu", 12), ("pears of us", 1)):
        for _ in range(count):
            driver.send(name)
    return driver


def run_with(monkeypatch: pytest.MonkeyPatch, connection: Answering, *arguments: str) -> Result:
    @contextmanager
    def connected(*_: object, **__: object) -> Iterator[Answering]:
        yield connection

    for module in ("queues", "status"):
        monkeypatch.setattr(f"truenext.cli.{module}.connected", connected)
    return CliRunner().invoke(main, arguments)


def test_plain_list_has_the_columns_that_scripts_know(driver: ReportDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Answering(driver)
    done = run_with(monkeypatch, connection, "queues")
    assert done.output.splitlines() == [
        " queue        waiting  unacknowledged  consumers  scheduled",
        " orders             3               0          0          0",
        " orders.eu         12               0          0          0",
        " pears of us        1               0          0          0",
    ]
    assert connection.requests == [("queues", None)]


def test_list_of_some_queues_has_ages_rates_and_sums(driver: ReportDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.engine.state.commit_state.tick(90_000_000, 0)
    driver.engine.queues.by_name["orders.eu"].rate = 12.5
    done = run_with(monkeypatch, Answering(driver), "queues", "order", "--order", "waiting", "--count", "1")
    assert done.output.splitlines() == [
        " queue      waiting  unacknowledged  consumers  scheduled  dead  oldest  held for  again  rate",
        " orders.eu       12               0          0          0     0    90 s                   12.5",
        "1 of 2 queues: 15 waiting, the oldest for 90 s, 0 unacknowledged, 0 dead, 12.5 acknowledged a second",
    ]


def test_all_pieces_of_a_long_list_are_printed(driver: ReportDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truenext.broker.queues_request.QUEUES_MAX", 1)
    connection = Answering(driver)
    done = run_with(monkeypatch, connection, "queues", "*")
    assert [line.split()[0] for line in done.output.splitlines()] == ["queue", "orders", "pears", "2"]
    assert len(connection.requests) == 2


def test_broker_of_an_earlier_version_lists_only_all_queues(
    driver: ReportDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_with(monkeypatch, Answering(driver, is_older=True), "queues", "orders")
    assert done.exit_code == 2 and "of an earlier version" in done.output


def test_status_is_printed_as_json_for_programs(driver: ReportDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_with(monkeypatch, Answering(driver), "status", "--json")
    assert done.exit_code == 0
    assert msgspec.json.decode(done.output) == driver.answer("status")


@pytest.mark.parametrize("command", [["queues"], ["queues", "--json"], ["status"], ["status", "--json"]], ids=" ".join)
def test_watched_answer_is_shown_again_until_ctrl_c(
    command: list[str], driver: ReportDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    connection = Answering(driver)
    done = run_with(monkeypatch, connection, *command, "--watch")
    assert (done.exit_code, waits) == (INTERRUPTED, [2.0] * 3)
    assert len(connection.requests) == 3 and "\x1b" not in done.output
    if command[0] == "queues":
        assert connection.requests[0][1]["limit"] == 50, "what is shown is bounded"


@pytest.mark.parametrize(("is_refused", "is_listening"), [(True, False), (False, False), (False, True)])
def test_command_says_to_start_a_broker_only_where_nothing_listens(is_refused: bool, is_listening: bool) -> None:
    error = NoBroker("no broker at x")
    error.is_refused, error.is_listening = is_refused, is_listening
    assert (START_HINT in CommandFailure(error).message) is is_refused
