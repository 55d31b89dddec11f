"""Tests of cron flows: `app.cron`, `truenext stages cron`, and the ids of occurrences. Source: docs/stages.md, "By
cron" """

from __future__ import annotations

import asyncio
import logging
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from tests.integration.broker_process import BrokerProcess
from tests.integration.forked import completed_text
from tests.stages import flows
from tests.stages.flows import PATIENCE_S, Number, run, until
from tests.unit.mutation import mutated
from truenext.blocking import connect
from truenext.cli.stages import cron as command
from truenext.cli.stages.cron import apply_crons, list_present
from truenext.cli.stages.run import _warn_of_other_crons
from truenext.client.tasks.connection import connect as connect_async
from truenext.flows import envelope
from truenext.flows.message_ids import occurrence_id
from truenext.stage import Flow, Service, worker
from truenext.stage.core.cron import CronFlow, are_equal
from truenext.stage.core.errors import DefinitionError, FlowError
from truenext.stage.service_run import RunResources, ServiceRun
from truenext.testing.stages import Stages

SERVICE = """
import msgspec
from truenext.stage import Service

app = Service("shop")
class Night(msgspec.Struct):
    n: int = 0

@app.terminator("report", Night)
async def report(night: Night) -> None: ...
"""
YEARLY = "0 0 1 1 *"


def _service(*crons: tuple[str, str]) -> Service:
    app = Service("shop")

    @app.terminator("report", Number)
    async def report(number: Number) -> None: ...

    for name, times in crons:
        app.cron(name, times, report, Number(1), zone="Europe/Oslo")
    return app


# ---- Declarations ----


@pytest.mark.parametrize(
    ("name", "times", "zone", "why"),
    [
        ("nightly", "0 3 * *", "Europe/Oslo", "cron flow nightly of shop: cron .* is not five fields"),
        ("nightly", "0 25 * * *", "Europe/Oslo", "its hour is '25'"),
        ("nightly", "0 3 * * *", "Europe/Olso", "cron flow nightly of shop: zone 'Europe/Olso' is not a time zone"),
        ("nightly", "0 3 * * *", "", "in the zone ''"),
        ("nightly", "", "UTC", "the times ''"),
        ("", "0 3 * * *", "UTC", "'' is not the name of a cron flow"),
        (7, "0 3 * * *", "UTC", "7 is not the name of a cron flow"),
        ("twice", "0 3 * * *", "UTC", "has a cron flow 'twice' already"),
    ],
)
def test_invalid_cron_flow_is_refused_by_name(name: Any, times: str, zone: str, why: str) -> None:
    app = _service(("twice", YEARLY))
    with pytest.raises(DefinitionError, match=why):
        app.cron(name, times, app.endpoints["report"], Number(), zone=zone)


def test_cron_flow_to_no_endpoint_or_with_another_message_is_refused() -> None:
    app = _service()
    with pytest.raises(DefinitionError, match="starts at an endpoint, not at 'report'"):
        app.cron("nightly", YEARLY, "report", Number())  # type: ignore[arg-type]
    with pytest.raises(FlowError):
        app.cron("nightly", YEARLY, app.endpoints["report"], "text")


def test_more_cron_flows_than_one_transaction_takes_are_refused() -> None:
    app = _service(*((str(n), YEARLY) for n in range(100)))
    with pytest.raises(DefinitionError, match="more than 100 cron flows"):
        app.cron("one more", YEARLY, app.endpoints["report"], Number())


# ---- Occurrences ----


def _check_occurrences(zone: str, send: Callable[[Any, CronFlow], Any], count: int, database: str) -> None:
    """Run an exactly-once stage for occurrences whose scheduled sends `send` makes."""
    app = Service("shop", exactly_once=True)
    runs: list[tuple[str, str, str]] = []

    @app.terminator("report", Number)
    async def report(number: Number, flow: Flow, sql: AsyncSession) -> None:
        await sql.execute(text("INSERT INTO reports VALUES (:id)"), {"id": flow.message_id})
        runs.append((flow.message_id, flow.id, flow.trace))

    app.cron("nightly", "* * * * *", report, Number(1), zone=zone)

    async def work(t: Stages) -> None:
        async with t.sql() as sql:
            await sql.execute(text("CREATE TABLE reports (id TEXT)"))
        async with connect_async(t.broker.url) as connection:
            await send(connection, app.crons["nightly"])
            for _ in range(count):
                await t.advance(seconds=60)
                await asyncio.sleep(0.1)
        await until(lambda: len(set(runs)) >= count)
        await asyncio.sleep(0.3)
        async with t.sql() as sql:
            rows = list((await sql.execute(text("SELECT id FROM reports"))).scalars())
        # The minute of the test itself may end, too.
        assert len(rows) == len(set(rows)) and len(rows) in (count, count + 1)
        assert all(message == flow and trace == "nightly" for message, flow, trace in runs)

    run(app, work, database=database)


async def _send_once(connection: Any, flow: CronFlow) -> None:
    await connection.send(f"/queue/{flow.endpoint}", flow.body, cron=flow.cron, zone=flow.zone, headers=flow.headers)


async def _send_twice(connection: Any, flow: CronFlow) -> None:
    """Two schedules overlap, as they do between the COMMIT of an --apply and its cancelling."""
    await _send_once(connection, flow)
    await _send_once(connection, flow)


@pytest.mark.parametrize("send", [_send_once, _send_twice])
def test_each_occurrence_of_a_cron_flow_runs_once_even_if_two_schedules_send_it(
    send: Callable[[Any, CronFlow], Any], database: str
) -> None:
    _check_occurrences("Europe/Oslo", send, 4, database)


@pytest.mark.drawn
@pytest.mark.parametrize("fault", ["one id for all", "the id of the schedule"])
def test_planted_id_without_the_due_time_is_caught(fault: str, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four occurrences an exactly-once stage runs one."""
    if fault == "one id for all":
        monkeypatch.setattr(envelope, "occurrence_id", lambda schedule, due_ms: occurrence_id(schedule, 0))
    else:
        monkeypatch.setattr(worker, "as_occurrence", lambda envelope, due: envelope)
    monkeypatch.setattr(flows, "PATIENCE_S", 5.0)
    with pytest.raises((AssertionError, TimeoutError)):
        _check_occurrences("UTC", _send_once, 4, database)


def test_occurrence_that_is_given_up_keeps_its_id_when_it_is_re_driven(broker: BrokerProcess) -> None:
    app = Service("shop", broker=broker.url, attempts=1)
    ids: list[str] = []

    @app.terminator("report", Number)
    async def report(number: Number, flow: Flow) -> None:
        ids.append(flow.message_id)
        if len(ids) == 1:
            raise ValueError("no paper")

    app.cron("often", "* * * * *", report, Number(1))
    flow = app.crons["often"]

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), app.running(), connect_async(broker.url) as connection:
            # A repeated send that is due at once, as no test waits for a minute.
            await connection.send("/queue/report", flow.body, delay=0.001, headers=flow.headers)
            await until(lambda: len(ids) == 1)
            while not broker.queues().get("DLQ.report"):
                await asyncio.sleep(0.05)
            await asyncio.to_thread(broker.output_of, "redrive", "DLQ.report")
            await until(lambda: len(ids) == 2)

    asyncio.run(main())
    assert ids[0] == ids[1] != flow.id


# ---- The command ----


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cronshop.py"


def test_apply_makes_present_cron_flows_those_that_are_declared(broker: BrokerProcess, shop: Path) -> None:
    def declare(*lines: str) -> None:
        shop.write_text(SERVICE + "\n".join(lines))

    def call(*options: str) -> tuple[int, str]:
        done = broker.truenext("stages", "cron", "cronshop:app", *options)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    nightly = 'app.cron("nightly", "0 3 * * *", report, Night(), zone="Europe/Oslo")'
    weekly = 'app.cron("weekly", "0 4 * * 1", report, Night(1))'
    declare(nightly, weekly)
    status, output = call()
    assert status == 1 and output.count("missing") == 2
    assert call("--apply")[1].startswith("2 cron flows sent, 0 cancelled")
    status, output = call()
    assert status == 0 and output.count("present") == 2 and "Europe/Oslo" in output
    # A second time changes nothing.
    assert call("--apply")[1].startswith("0 cron flows sent, 0 cancelled")
    # Other sends of the queue stay.
    client = broker.connect()
    client.send("report", b"", persistent=True, confirmed=True, headers={"AMQ_SCHEDULED_CRON": YEARLY})
    declare(nightly.replace("0 3", "0 5"))
    status, output = call()
    assert status == 1 and output.count("missing") == 1 and output.count("not declared") == 2
    assert call("--apply")[1].startswith("1 cron flow sent, 2 cancelled")
    declare()
    assert call("--apply") == (0, "0 cron flows sent, 1 cancelled\nno cron flows\n")
    assert [each["scheduled"] for each in broker.control_request("queues")] == [1]


def test_cron_command_uses_the_broker_of_the_service_unless_the_command_line_names_one(
    broker: BrokerProcess, shop: Path
) -> None:
    nobody = "stomp://127.0.0.1:1"
    shop.write_text(SERVICE.replace('Service("shop"', f'Service("shop", broker=["{nobody}", "{broker.url}"]'))
    done = completed_text("stages", "cron", "cronshop:app")
    assert (done.returncode, done.stdout) == (0, "no cron flows\n"), done
    done = completed_text("stages", "cron", "cronshop:app", "--url", nobody)
    assert done.returncode == 2 and f"no broker at {nobody}:" in done.stderr
    shop.write_text(SERVICE.replace('Service("shop"', f'Service("shop", broker="{nobody}"'))
    done = broker.truenext("stages", "cron", "cronshop:app")
    assert (done.returncode, done.stdout) == (0, "no cron flows\n"), done


def test_present_cron_flows_survive_a_kill_and_are_the_next_ones(broker: BrokerProcess) -> None:
    app = _service(("nightly", "0 3 * * *"))
    with connect(broker.url) as connection:
        assert apply_crons(connection, app) == (1, 0)
    broker.kill()
    broker.start()
    with connect(broker.url) as connection:
        (present,) = list_present(connection, app)
        assert (present.name, present.cron, present.zone, present.queue) == (
            "nightly",
            "0 3 * * *",
            "Europe/Oslo",
            "report",
        )
        assert apply_crons(connection, app) == (0, 0)


def test_apply_that_dies_between_its_commit_and_its_cancelling_is_mended_by_the_next(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = _service(("nightly", "0 3 * * *")), _service(("nightly", "0 4 * * *"), ("weekly", YEARLY))
    with connect(broker.url) as connection:
        apply_crons(connection, old)
        with monkeypatch.context() as patch:
            patch.setattr(command, "_cancel", lambda *_: None)
            assert apply_crons(connection, new) == (2, 1)
        assert sorted(each.cron for each in list_present(connection, new)) == [YEARLY, "0 3 * * *", "0 4 * * *"]
        assert apply_crons(connection, new) == (2, 3)
        assert are_equal(new.crons.values(), list_present(connection, new))


def _apply_at_once(broker: BrokerProcess, services: list[Service], seed: int) -> None:
    """Apply all services in threads, with pauses at each request."""
    errors: list[BaseException] = []

    def apply(app: Service, seed: int) -> None:
        pauses = random.Random(seed)
        try:
            with connect(broker.url) as connection:
                request = connection.control_request

                def slow(verb: str, arguments: object = None, **options: Any) -> bytes:
                    answer = request(verb, arguments, **options)
                    threading.Event().wait(pauses.choice([0, 0.001, 0.01, 0.03]))
                    return answer

                connection.control_request = slow  # type: ignore[method-assign]
                apply_crons(connection, app)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=apply, args=(app, seed * 10 + n)) for n, app in enumerate(services)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if errors:
        raise errors[0]


def _check_at_once(broker: BrokerProcess, rounds: int) -> None:
    variants = [
        _service(("nightly", "0 3 * * *"), ("weekly", YEARLY)),
        _service(("nightly", "0 4 * * *")),
        _service(("weekly", YEARLY)),
        _service(("nightly", "0 3 * * *"), ("monthly", "0 0 1 * *")),
    ]
    draw = random.Random(rounds)
    for n in range(rounds):
        services = [draw.choice(variants) for _ in range(draw.choice([2, 3]))]
        _apply_at_once(broker, services, n)
        with connect(broker.url) as connection:
            present = list_present(connection, services[0])
        assert any(are_equal(each.crons.values(), present) for each in services), (n, present)


def test_cron_flows_applied_at_once_are_in_the_end_those_of_one_declaration(broker: BrokerProcess) -> None:
    _check_at_once(broker, 30)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        # The COMMIT has no number.
        ("_commit", "return session.commit(producer=producer, number=number)", "session.commit(); return True"),
        # The number is read after the list.
        (
            "apply_crons",
            "present = list_present(connection, service)",
            "present = list_present(connection, service)\n"
            '        last_number = send_control_request(connection, "producer", {"producer": producer})["commits"]',
        ),
    ],
)
def test_planted_fault_in_applying_at_once_is_caught(
    broker: BrokerProcess, name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = mutated(getattr(command, name), old, new)
    # The test calls the one, and that calls the other.
    monkeypatch.setattr(command if name == "_commit" else sys.modules[__name__], name, planted)
    with pytest.raises(AssertionError):
        _check_at_once(broker, 100)


def test_start_warns_if_the_broker_has_other_cron_flows_and_else_not(
    broker: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    declared, other = _service(("nightly", "0 3 * * *")), _service(("nightly", "0 4 * * *"), ("weekly", YEARLY))

    def warnings() -> list[logging.LogRecord]:
        return [each for each in caplog.records if "other cron flows" in each.message]

    async def start(app: Service) -> None:
        app.broker = (broker.url,)
        running = ServiceRun(app, app.plans(), RunResources.of(app))
        async with app.bound_to(running):
            await running.connect()
            await _warn_of_other_crons(running, app, "shop:app")

    asyncio.run(start(_service()))
    assert not warnings()
    asyncio.run(start(declared))
    (missing,) = warnings()
    assert vars(missing)["declared"] == ["nightly"] and vars(missing)["present"] == []
    assert vars(missing)["command"] == "truenext stages cron shop:app --apply"
    with connect(broker.url) as connection:
        apply_crons(connection, other)
    caplog.clear()
    asyncio.run(start(other))
    assert not warnings()
    asyncio.run(start(_service()))
    asyncio.run(start(declared))
    assert [vars(each)["present"] for each in warnings()] == [["nightly", "weekly"], ["nightly", "weekly"]]
