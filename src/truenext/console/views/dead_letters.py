"""View of dead letters: their queues, and the groups of one queue by origin, reason and cause."""

from __future__ import annotations

import asyncio

from truenext.console.pages.bodies import decode_stage_message
from truenext.console.pages.dead_letters import DeadLetters, Group
from truenext.console.pages.links import address, flow_link, queue_link
from truenext.console.pages.queue_rows import queue_row
from truenext.console.views.queues import browse, message_acts
from truenext.console.visit import NotAllowed, Visit
from truenext.console.work import GroupReading
from truenext.model.control_answers import QueuesReport
from truenext.model.dead_letters import DeadLetterGroup
from truenext.model.order import PRIORITY_DEFAULT

QUEUES = 100
READ_S, READ_ON_S = 1.0, 10.0
"""Seconds after which a page shows the groups that were found so far: first, and each time the operator reads on."""
EXAMPLES = 20
"""Groups, the largest first, for which the page looks for the flow of one message."""


async def dead_letters(visit: Visit) -> DeadLetters:
    queue, after = visit.text("queue"), visit.text("after")
    body = {"dead_letters": True, "order": "waiting", "limit": QUEUES, "after": after or None}
    queues = await visit.ask("queues", body, QueuesReport)
    if not queue and len(queues.queues) == 1 and not after:
        queue = queues.queues[0].name
    reading, total = GroupReading(), None
    if queue:
        if not visit.rights.may_browse(queue):
            raise NotAllowed(f"user {visit.rights.name!r} may not browse {queue!r}")
        reading = await _read_groups(visit, queue)
        total = await _waiting(visit, queue)
    groups, is_part = reading.groups, bool(queue) and not reading.is_whole
    shown = list(groups)
    flows = await asyncio.gather(*(_flow_of(visit, queue, each) for each in shown[:EXAMPLES]))
    flows += [""] * (len(shown) - len(flows))
    return DeadLetters(
        queue=queue,
        queues=[queue_row(each) for each in queues.queues],
        next=address("/dead-letters", queue=queue, after=queues.next) if queues.next else "",
        groups=[_group(visit, queue, each, flow) for each, flow in zip(shown, flows, strict=True)],
        others=groups.others.count if groups.others is not None else 0,
        is_part=is_part,
        read=reading.count,
        total=total,
        go_on=address("/dead-letters", queue=queue, read=max(1, reading.count)) if is_part else "",
        acts=message_acts(visit, queue, dead_letters=True) if queue else [],
    )


async def _read_groups(visit: Visit, queue: str) -> GroupReading:
    """Return the groups of the first messages of a queue: those of the page from which the operator reads on, and of
    what follows."""
    reads_on = bool(visit.number("read", 0))
    former = visit.shared.take_reading(visit.login, queue) if reads_on else None
    reading = former or GroupReading()
    try:
        await reading.read_on(visit.ask, queue, READ_ON_S if reads_on else READ_S)
    finally:
        if not reading.is_whole:
            visit.shared.keep_reading(visit.login, queue, reading)
    return reading


async def _waiting(visit: Visit, queue: str) -> int | None:
    """Return how many messages wait in a queue; None if it is gone."""
    answer = await visit.ask("queues", {"names": [queue]}, QueuesReport)
    return next((each.waiting for each in answer.queues), None)


def _group(visit: Visit, queue: str, group: DeadLetterGroup, flow: str) -> Group:
    return Group(
        origin=group.origin,
        origin_link=queue_link(group.origin) if group.origin else "",
        reason=group.reason,
        cause=group.example or group.cause,
        count=group.count,
        first_ms=group.first or None,
        last_ms=group.last or None,
        example=address("/message", queue=queue, sequence=group.sequences[0]) if group.sequences else "",
        messages=queue_link(queue),
        flow=flow,
        acts=message_acts(visit, queue, dead_letters=True, group=group.key),
    )


async def _flow_of(visit: Visit, queue: str, group: DeadLetterGroup) -> str:
    """Return the link to the flow of the first message of a group; "" if it is no message of stages."""
    if not visit.has_flows or not group.sequences:
        return ""
    after = f"{PRIORITY_DEFAULT},{group.sequences[0] - 1}"
    contents, _ = await browse(visit, queue, count=1, after=after)
    if not contents or contents[0].sequence != group.sequences[0]:
        return ""
    envelope = decode_stage_message(contents[0].body, contents[0].headers.get("truenext-due"))
    return "" if envelope is None else flow_link(envelope.flow.trace)
