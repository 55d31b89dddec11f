"""Is a process that runs a service well? What it says to those who look after it.

It is **live** unless a restart would help: it has messages in hand and ends none of them, it has lost the broker and
does not find it again, or a stage takes nothing any more. It is **ready** while all is there that its stages need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

LOST_S: Final = 60.0
"""So long a broker that was there may be away before a restart is asked for: one restart, as a process that has just
begun waits for its broker as long as it takes."""

State = Literal["waiting for the broker", "waiting for the database", "running", "stopping"]


class BrokerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One connection to the broker."""

    lane: str
    state: str
    """`connected`, `connecting` or `closed`."""
    since_s: float
    reconnects: int
    has_room: bool
    """False while its stages rest because the broker has none on its disk."""


class StageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One stage in one lane."""

    stage: str
    """Its queue."""
    lane: str
    busy: int
    """Messages that it handles now."""
    waits_for_database: bool
    waits_for_broker: str
    """Why the broker gives it no messages yet; empty if it does, or the database is waited for."""
    without_progress_s: float
    """Since when none has ended, if there are any."""
    ended: str
    """Why it takes no messages any more; empty as long as it does."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    service: str
    state: State
    broker: list[BrokerFacts]
    database: str
    """Empty if no stage uses one; `there`, or why it is not."""
    stages: list[StageFacts]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    live: bool
    ready: bool
    why: list[str]
    """Why it is not."""
    facts: Facts


def judge(facts: Facts, stalled_after_s: float) -> Health:
    """`stalled_after_s`: so long may a stage have messages in hand and end none."""
    not_live = list(_ill(facts, stalled_after_s))
    not_ready = list(_not_ready(facts))
    return Health(live=not not_live, ready=not (not_live or not_ready), why=[*not_live, *not_ready], facts=facts)


def _ill(facts: Facts, stalled_after_s: float) -> Iterator[str]:
    if facts.state != "running":
        # It waits for others, or is about to end anyway.
        return
    for lane in facts.broker:
        if lane.state == "closed":
            yield f"the connection for {lane.lane} messages has ended for good"
        elif lane.state != "connected" and lane.since_s > LOST_S:
            yield f"the connection for {lane.lane} messages has been lost for {lane.since_s:.0f} seconds"
    for each in facts.stages:
        if each.ended:
            yield f"{each.stage} takes no {each.lane} messages any more: {each.ended}"
        elif each.busy and each.without_progress_s > stalled_after_s:
            yield (
                f"{each.stage} has {each.busy} {each.lane} message{'' if each.busy == 1 else 's'} in hand, "
                f"and none has ended for {each.without_progress_s:.0f} seconds"
            )


def _not_ready(facts: Facts) -> Iterator[str]:
    if facts.state != "running":
        yield f"it is {facts.state}"
        return
    for lane in facts.broker:
        if lane.state != "connected":
            yield f"the connection for {lane.lane} messages is {lane.state}"
        elif not lane.has_room:
            yield f"the broker has no room on its disk for what stages send of {lane.lane} messages"
    for each in facts.stages:
        if each.waits_for_broker:
            yield f"{each.stage} takes no {each.lane} messages yet: {each.waits_for_broker}"
    if facts.database not in ("", "there"):
        yield facts.database
