"""Tests of the grants that failures need: with those of docs/security.md each caller is told, and with one less error
and cause name the grant. Source: docs/security.md, "Grants of a service or a query" """

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.drawing import each_one_of
from tests.integration import over_tls
from tests.integration.broker_process import BrokerProcess
from tests.stages.flows import Number
from truenext.errors import RolledBack
from truenext.stage import Failure, Flow, FlowFailed, Reject, Service

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
    *(("web", grant) for grant in GRANTS["web"]["send"]),
    *(("shop", grant) for grant in ("stock.reserve", HANDLER, REPLIES)),
    *(("stock", grant) for grant in GRANTS["stock"]["send"]),
]


def users_file(folder: Path, missing: tuple[str, str] | None) -> Path:
    file, secret = folder / "users.toml", folder / "password"
    for path in (file, secret):
        path.touch(0o600)
    secret.write_text(PASSWORD)
    lines = []
    for user, rights in GRANTS.items():
        lines += [f"[user.{user}]", 'password_file = "password"']
        for right, patterns in rights.items():
            left = [each for each in patterns if right != "send" or (user, each) != missing]
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
    name = grant.removesuffix("*")
    if user == "web":
        assert isinstance(error, RolledBack) and name in str(error)
    else:
        assert isinstance(error, FlowFailed), error
        assert name in error.last_cause and "send" in error.last_cause
