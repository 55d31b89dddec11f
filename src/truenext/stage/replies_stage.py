"""Stage of the queue `SERVICE.replies`, which each service with exactly-once processing has: it keeps the replies and
failures of flows that were started with `keep_reply`.

A redelivered message writes the same row again, so the stage needs no inbox. Source: docs/stages-database.md, "Kept
replies"
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from truenext.stage.core.definitions import LocalEndpoint, Stage, StageSettings, Topic
from truenext.stage.core.errors import Reject
from truenext.stage.core.flow import Flow
from truenext.stage.core.names import kept_topic, replies_queue

if TYPE_CHECKING:
    from collections.abc import Callable

CONCURRENCY = 8
_is_flow_id = re.compile("[0-9a-f]{32}").fullmatch


class KeptMessage(msgspec.Struct):
    """State of the stage that keeps replies: whether its message is a reply or a failure."""

    is_failure: bool = False
    """True if the message is the failure of a flow, as a report describes it; False if the message is a reply."""


def make_replies_stage(service: str, keep: Callable[..., Any], session: type[Any]) -> Stage:
    """Return the stage that keeps replies. `keep` writes a row, in a session of the type `session`."""
    stages: list[Stage] = []
    settings = StageSettings(service, concurrency=CONCURRENCY, exactly_once=False)
    endpoint: LocalEndpoint[Any, None] = LocalEndpoint(
        replies_queue(service), msgspec.Raw, None, KeptMessage, settings, stages.append
    )
    kept = Topic(kept_topic(service), str)

    async def keep_reply(reply: msgspec.Raw, state: KeptMessage, flow: Flow, sql: Any) -> None:
        if not _is_flow_id(flow.id):
            raise Reject(f"no flow of {service} has the id {flow.id[:100]!r}")
        id = await keep(sql, flow.id, bytes(reply), is_failure=state.is_failure)
        if id is not None:
            flow.publish(kept, id, persistent=False)

    keep_reply.__annotations__ |= {"reply": msgspec.Raw, "state": KeptMessage, "flow": Flow, "sql": session}
    endpoint.add(keep_reply, "keep_reply", settings)
    (stage,) = stages
    stage.keeps_replies = True
    return stage
