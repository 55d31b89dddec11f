"""Tests of liveness and readiness of a service's process. Source: docs/stages-running.md"""

from typing import Any

import pytest

from truenext.model.service_health import PoolStatus, ServiceHealth, ServiceState, ServiceStatus, StageStatus
from truenext.stage.core.health import LOST_S, assess_health


def broker(
    state: str = "connected", since_s: float = 5.0, *, error: str = "", has_disk_space: bool = True
) -> PoolStatus:
    return PoolStatus(
        pool="other", state=state, error=error, since_s=since_s, reconnects=0, has_disk_space=has_disk_space
    )


def stage(**other: Any) -> StageStatus:
    facts: dict[str, Any] = {
        "active": 0,
        "waits_for_database": False,
        "broker_wait_reason": "",
        "without_progress_s": 0.0,
        "end_reason": "",
    }
    return StageStatus(stage="order.place", pool="other", **(facts | other))


def judged(
    state: ServiceState = "running",
    *,
    lost: PoolStatus | None = None,
    stages: list[StageStatus] | None = None,
    database: str = "",
) -> ServiceHealth:
    facts = ServiceStatus(
        service="shop", state=state, broker=[lost or broker()], database=database, stages=stages or [stage()]
    )
    return assess_health(facts, stalled_after_s=300)


def test_a_service_that_runs_is_live_and_ready() -> None:
    health = judged(stages=[stage(active=3, without_progress_s=299)], database="available")
    assert (health.live, health.ready, health.reasons) == (True, True, [])


def test_a_stage_that_ends_none_of_its_messages_is_not_live() -> None:
    health = judged(stages=[stage(active=2, without_progress_s=301)])
    assert (health.live, health.ready) == (False, False)
    assert health.reasons == ["order.place has 2 other messages in progress, and none was completed for 301 s"]


def test_a_stage_without_messages_is_live_however_long_none_has_ended() -> None:
    assert judged(stages=[stage(active=0, without_progress_s=9999)]).live


def test_a_stage_that_takes_nothing_any_more_is_not_live() -> None:
    health = judged(stages=[stage(end_reason="ClosedError: refused")])
    assert not health.live
    assert health.reasons == ["order.place consumes no other messages any more: ClosedError: refused"]


def test_a_broker_that_has_just_been_lost_is_not_ready_but_live() -> None:
    health = judged(lost=broker("connecting", LOST_S - 1))
    assert (health.live, health.ready) == (True, False)


@pytest.mark.parametrize("lost", [broker("connecting", LOST_S + 1), broker("closed")], ids=lambda each: each.state)
def test_a_broker_that_is_not_found_again_is_not_live(lost: PoolStatus) -> None:
    assert not judged(lost=lost).live


def test_a_database_that_is_away_is_not_ready_but_live() -> None:
    health = judged(database="the database is unavailable: refused")
    assert (health.live, health.ready, health.reasons) == (True, False, ["the database is unavailable: refused"])


def test_a_stage_that_cannot_subscribe_is_not_ready_but_live() -> None:
    health = judged(stages=[stage(), stage(broker_wait_reason="no more consumers")])
    assert (health.live, health.ready) == (True, False)
    assert health.reasons == ["order.place consumes no other messages yet: no more consumers"]


def test_a_broker_without_room_is_not_ready_but_live() -> None:
    health = judged(lost=broker(has_disk_space=False))
    assert (health.live, health.ready) == (True, False)
    assert health.reasons == ["the broker has no disk space for the sends of stages with other messages"]


@pytest.mark.parametrize("state", ["waiting for the broker", "waiting for the database", "stopping"])
def test_a_service_that_comes_up_or_stops_is_live_and_not_ready(state: ServiceState) -> None:
    stages = [stage(active=1, without_progress_s=9999, end_reason="it was stopped")]
    health = judged(state, lost=broker("connecting", 9999), stages=stages)
    assert (health.live, health.ready, health.reasons) == (True, False, [f"it is {state}"])
