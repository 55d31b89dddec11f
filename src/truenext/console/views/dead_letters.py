"""View of dead letters: their queues, and the groups of one queue by origin, reason and cause."""

from __future__ import annotations

import asyncio
import time

from truenext.console.pages.bodies import decode_stage_message
from truenext.console.pages.dead_letters import DeadLetters, Group
from truenext.console.pages.links import address, flow_link, queue_link
from truenext.console.pages.queue_rows import queue_row
from truenext.console.views.queues import browse, message_acts
from truenext.console.visit import NotAllowed, Visit
from truenext.console.work import pieces
from truenext.model.control_answers import QueuesReport
from truenext.model.dead_letters import DeadLetterGroup, DeadLetterGroups
from truenext.model.order import PRIORITY_DEFAULT

QUEUES = 100
READ_MAX = 100_000
"""Messages that are read for the groups of one page, unless the operator asks for more."""
READ_S = 1.0
"""Seconds after which a page shows the groups that were found so far."""
EXAMPLES = 20
"""Groups, the largest first, for which the page looks for the flow of one message."""


async def dead_letters(visit: Visit) -> DeadLetters:
    queue, after = visit.text("queue"), visit.text("after")
    body = {"dead_letters": True, "order": "waiting", "limit": QUEUES, "after": after or None}
    queues = await visit.ask("queues", body, QueuesReport)
    if not queue and len(queues.queues) == 1 and not after:
        queue = queues.queues[0].name
    groups, read, is_part = DeadLetterGroups(), 0, False
    read_max = visit.number("read", READ_MAX)
    if queue:
        if not visit.rights.may_browse(queue):
            raise NotAllowed(f"user {visit.rights.name!r} may not browse {queue!r}")
        groups, read, is_part = await _read_groups(visit, queue, read_max)
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
        read=read,
        go_on=address("/dead-letters", queue=queue, read=10 * read_max) if is_part else "",
        acts=message_acts(visit, queue, dead_letters=True) if queue else [],
    )


async def _read_groups(visit: Visit, queue: str, read_max: int) -> tuple[DeadLetterGroups, int, bool]:
    """Return the groups of the first messages of a queue, how many were read, and whether there are more."""
    groups, read, until = DeadLetterGroups(), 0, time.monotonic() + READ_S * max(1, read_max // READ_MAX)
    async for answer in pieces(visit.ask, "dead-letters", {"queue": queue}):
        groups.add(answer.groups)
        read += answer.moved
        if answer.next is not None and (read >= read_max or time.monotonic() > until):
            return groups, read, True
    return groups, read, False


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
