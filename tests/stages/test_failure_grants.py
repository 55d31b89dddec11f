"""Tests of the grants that failures need: with those of docs/security.md each caller is told, and with one less error
and cause name the grant. Source: docs/security.md, "Grants of a service or a query" """

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import truenext
from tests.drawing import each_one_of
from tests.integration import over_tls
from tests.integration.broker_process import BrokerProcess
from tests.stages.flows import Number
from truenext.errors import RolledBack
from truenext.model.grants import Right
from truenext.stage import Failure, Flow, FlowFailed, Reject, Service
from truenext.stage.introspection.grants import needed_grants
from truenext.stage.sql import apply_schema

PASSWORD = "open sesame"
PATIENCE_S = 60
REPLIES, HANDLER = "/topic/replies.web.*", "order.place.stage.on_failure"
GRANTS: Mapping[str, Mapping[str, list[str]]] = {
    "web": {"send": ["order.place", REPLIES], "take": [REPLIES]},
    "shop": {
        "send": ["stock.reserve", HANDLER, "order.place.stage.finish", REPLIES],
        "take": ["order.place", "order.place.>"],
    },
    "stock": {
        "send": ["stock.reserve.stage.book", HANDLER, "order.place.stage.finish", REPLIES],
        "take": ["stock.reserve", "stock.reserve.>"],
    },
}
MISSING = [
    *(("web", f"send {grant}") for grant in GRANTS["web"]["send"]),
    *(("shop", f"send {grant}") for grant in ("stock.reserve", HANDLER, REPLIES)),
    *(("stock", f"send {grant}") for grant in GRANTS["stock"]["send"]),
]


def users_file(
    folder: Path, missing: tuple[str, str] | None, grants: Mapping[str, Mapping[str, list[str]]] = GRANTS
) -> Path:
    file, secret = folder / "users.toml", folder / "password"
    for path in (file, secret):
        path.touch(0o600)
    secret.write_text(PASSWORD)
    lines = []
    for user, rights in grants.items():
        lines += [f"[user.{user}]", 'password_file = "password"']
        for right, patterns in rights.items():
            left = [each for each in patterns if (user, f"{right} {each}") != missing]
            lines.append(f"{right} = {json.dumps(left)}")
    file.write_text("\n".join(lines) + "\n")
    return file


async def ask_twice(url: str) -> tuple[object, object]:
    """Ask for a number that is in stock, and for one that is not. Return replies or errors."""
    shop, stock, web = (
        Service(name, broker=url, user=name, password=PASSWORD, attempts=1) for name in ("shop", "stock", "web")
    )
    place = shop.endpoint("order.place", Number, Number)
    reserve = stock.endpoint("stock.reserve", Number, Number)
    reserve_of_shop = shop.remote("stock.reserve", Number, Number)

    @place.stage
    async def check(number: Number, flow: Flow) -> None:
        flow.request(reserve_of_shop, number)

    @place.stage
    async def finish(number: Number) -> Number:
        return number

    @place.on_failure
    async def failed(failure: Failure) -> Number:
        if failure.last_cause.startswith("Reject: sold out\n"):
            return Number(-1)
        raise Reject(failure.last_cause)

    @reserve.stage
    async def look(number: Number, flow: Flow) -> None:
        flow.next(number)

    @reserve.stage
    async def book(number: Number) -> Number:
        if number.n == 2:
            raise Reject("sold out")
        return number

    to = web.remote("order.place", Number, Number)
    async with asyncio.timeout(PATIENCE_S), shop.running(), stock.running(), web.connected():
        one, two = await asyncio.gather(
            *(web.ask(to, Number(n), trace=f"n{n}", timeout=20) for n in (1, 2)), return_exceptions=True
        )
        return one, two


def results(folder: Path, missing: tuple[str, str] | None) -> tuple[object, object]:
    broker = BrokerProcess(folder, ["--users", str(users_file(folder, missing))])
    broker.start()
    try:
        done = asyncio.run(ask_twice(f"{over_tls.SCHEME}://127.0.0.1:{broker.port}"))
        broker.stop()
        return done
    finally:
        broker.clean_up()


def test_callers_are_told_with_the_documented_grants_alone(tmp_path: Path) -> None:
    assert results(tmp_path, None) == (Number(1), Number(-1))


@pytest.mark.parametrize("missing", each_one_of(MISSING, ids=[" lacks ".join(each) for each in MISSING]))
def test_one_grant_less_is_named_by_the_error_or_the_cause(tmp_path: Path, missing: tuple[str, str]) -> None:
    user, grant = missing
    error, _ = results(tmp_path, missing)
    name = grant.removeprefix("send ").removesuffix("*")
    if user == "web":
        assert isinstance(error, RolledBack) and name in str(error)
    else:
        assert isinstance(error, FlowFailed), error
        assert name in error.last_cause and "send" in error.last_cause


# ---- Kept replies ----

KEEPER = {
    "shop": {
        "send": ["order.place", "shop.replies", "/topic/replies.shop.*"],
        "take": ["order.place", "shop.replies", "/topic/replies.shop.*"],
    }
}
"""Grants of a service that keeps replies, and asks its own endpoint."""


async def ask_with_key(url: str, database: str) -> list[Any]:
    """Ask for a number that is in stock, and for one that is not, each under a key; then ask without a key."""
    shop = Service("shop", broker=url, user="shop", password=PASSWORD, attempts=1, exactly_once=True, database=database)

    @shop.single("order.place", Number, Number)
    async def place(number: Number) -> Number:
        if number.n == 2:
            raise Reject("sold out")
        return number

    async with asyncio.timeout(PATIENCE_S), shop.running():
        return await asyncio.gather(
            *(shop.ask(place, Number(n), trace=f"n{n}", key=f"n{n}", timeout=3) for n in (1, 2)),
            shop.ask(place, Number(3), trace="n3", timeout=20),
            return_exceptions=True,
        )


@pytest.mark.parametrize("missing", [None, ("shop", "take shop.replies")], ids=["all", "without take"])
def test_replies_are_kept_with_the_documented_grants_and_without_them_the_service_does_all_else(
    tmp_path: Path, missing: tuple[str, str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "shop.db"
    file.touch()
    apply_schema(f"sqlite:///{file}")
    broker = BrokerProcess(tmp_path, ["--users", str(users_file(tmp_path, missing, KEEPER))])
    broker.start()
    try:
        url = f"{over_tls.SCHEME}://127.0.0.1:{broker.port}"
        one, two, three = asyncio.run(ask_with_key(url, f"sqlite:///{file}"))
        broker.stop()
    finally:
        broker.clean_up()
    warnings = [each for each in caplog.records if "lacks grants" in each.getMessage()]
    assert three == Number(3)
    if missing is None:
        assert one == Number(1) and isinstance(two, FlowFailed) and not warnings
    else:
        assert isinstance(one, TimeoutError) and isinstance(two, TimeoutError)
        (warning,) = warnings
        assert vars(warning)["take"] == ["/queue/shop.replies"]


def test_grants_of_a_service_that_keeps_replies_have_its_queue_and_its_topic() -> None:
    needed = needed_grants([], [], [], "shop")
    assert {right: [str(each) for each in patterns] for right, patterns in needed.items()} == {
        Right.SEND: ["/queue/shop.replies", "/topic/replies.shop.kept"],
        Right.TAKE: ["/queue/shop.replies", "/topic/truenext.stages"],
    }


# ---- The outbox of a program ----


async def start_in_a_transaction(url: str, database: str) -> truenext.Content | None:
    """Start a flow whose reply goes to an endpoint with `on_failure`, and return the message that the relay could not
    send as it was."""
    shop = Service("shop", broker=url, user="shop", password=PASSWORD, exactly_once=True, database=database)

    @shop.single("order.place", Number, Number)
    async def place(number: Number) -> Number:
        raise AssertionError("the SEND is refused")

    @shop.terminator("collect", Number)
    async def collect(number: Number) -> None: ...

    @collect.on_failure
    async def failed(failure: Failure) -> None: ...

    def initiate() -> None:
        engine = create_engine(database)
        with Session(engine) as session, session.begin(), shop.initiate(session) as initiation:
            initiation.send(place, Number(1), trace="n1", reply_to=collect)
        engine.dispose()

    async with asyncio.timeout(PATIENCE_S), shop.running():
        await asyncio.to_thread(initiate)
        async with truenext.connect(url, user="shop", password=PASSWORD) as connection:
            consumer = await connection.consumer("/queue/shop.refused")
            return await consumer.receive(timeout=PATIENCE_S)


def test_message_of_the_outbox_that_lacks_a_grant_goes_to_the_refused_queue_without_its_failure_headers(
    tmp_path: Path,
) -> None:
    file = tmp_path / "shop.db"
    file.touch()
    apply_schema(f"sqlite:///{file}")
    take = ["order.place", "collect", "collect.>", "shop.refused", "shop.replies"]
    grants = {"shop": {"send": ["order.place", "collect", "shop.refused"], "take": take}}
    broker = BrokerProcess(tmp_path, ["--users", str(users_file(tmp_path, None, grants))])
    broker.start()
    try:
        url = f"{over_tls.SCHEME}://127.0.0.1:{broker.port}"
        message = asyncio.run(start_in_a_transaction(url, f"sqlite:///{file}"))
        broker.stop()
    finally:
        broker.clean_up()
    assert message is not None
    assert "truenext-on-failure" not in message.headers
    assert message.headers["refused"].startswith("/queue/order.place: ")
    assert "collect.stage.on_failure" in message.headers["refused"]
