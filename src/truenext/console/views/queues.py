"""Views of the list of queues, and of one queue."""

from __future__ import annotations

import asyncio
import time

from msgspec import UNSET

from truenext.client.core.message import Content
from truenext.console.gathering import note_queue
from truenext.console.link import Restricted
from truenext.console.pages.links import address, group_address
from truenext.console.pages.message_rows import ENVELOPE_MAX, message_row
from truenext.console.pages.queue_rows import queue_row, sum_figures
from truenext.console.pages.queues import Act, ConsumerRow, MessageList, PolicyRow, QueuePage, Queues
from truenext.console.pages.spark_queries import spark_command
from truenext.console.shared import scope_of
from truenext.console.views.overview import queue_charts
from truenext.console.visit import InvalidRequest, NotFound, Visit
from truenext.errors import Code, Refused
from truenext.model.control_answers import ConsumerReport, PolicyReport, QueueReport, QueuesReport
from truenext.model.dead_letters import GroupKey
from truenext.model.destination import DURABLE_ADDRESS_PREFIX, SUBSCRIPTION_PREFIX, dead_letter_name
from truenext.model.policy import INDIVIDUAL_DEAD_LETTERS

ROWS = 100
MESSAGES = 50
"""Messages of one page."""
PAGE_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of bodies with which a page of messages ends. They are in memory for a moment."""
ORDERS = ("oldest", "held", "waiting", "failing", "rate", "name")


async def queues(visit: Visit) -> Queues:
    name, order = visit.text("name"), visit.text("order", ORDERS[0])
    if order not in ORDERS:
        raise InvalidRequest(f"queues are ordered by {', '.join(ORDERS)}, not by {order[:50]!r}")
    after = visit.text("after")
    body = {"name": name, "order": order, "limit": ROWS, "after": after or None}
    answer = await visit.ask("queues", body, QueuesReport)
    return Queues(
        rows=[queue_row(each) for each in answer.queues],
        name=name,
        order=order,
        orders={each: address("/queues", name=name, order=each) for each in ORDERS},
        next=address("/queues", name=name, order=order, after=answer.next) if answer.next else "",
        first=address("/queues", name=name, order=order) if after else "",
        sums=sum_figures(answer.sums),
    )


async def queue(visit: Visit) -> QueuePage:
    name = visit.required("name")
    report = await ask_queue(visit, name)
    consumers, policy, messages = await asyncio.gather(
        visit.ask("consumers", {"queue": name}, list[ConsumerReport]),
        visit.ask("policy", {"queue": name}, PolicyReport),
        _messages(visit, name),
    )
    scope, now = scope_of(visit.rights), time.time()
    # The gathering has only queues that are at the top of a list.
    note_queue(visit.shared.charts, scope, report, now)
    dead_letters = policy.settings.get("dead_letters")
    lanes = {} if report.lanes is UNSET else report.lanes
    return QueuePage(
        row=queue_row(report),
        lanes=sorted(((int(priority), count) for priority, count in lanes.items()), reverse=True),
        dead_lettered=report.dead_lettered,
        consumers=[_consumer_row(each, may_close=visit.rights.is_admin) for each in consumers],
        policy=[PolicyRow(setting, each.value, each.source) for setting, each in policy.settings.items()],
        messages=messages,
        acts=queue_acts(visit, report),
        spark_command=spark_command(name),
        charts=queue_charts(visit.shared.charts, scope, name, now),
        dead_letters=_dead_letters_link(report, None if dead_letters is None else dead_letters.value),
    )


async def ask_queue(visit: Visit, name: str) -> QueueReport:
    """Return the report of one queue. Raises: NotFound if there is none that the user may see"""
    answer = await visit.ask("queues", {"names": [name]}, QueuesReport)
    if not answer.queues:
        raise NotFound(
            f"there is no queue {name[:200]!r}, or you have no right on it: an unused queue is removed once it is empty"
        )
    return answer.queues[0]


def queue_acts(visit: Visit, report: QueueReport) -> list[Act]:
    """Return what the user may do with a queue."""
    acts = message_acts(visit, report.name, dead_letters=report.dead_letters)
    return [Act("resume" if report.paused else "pause", ""), *acts] if acts else []


def message_acts(
    visit: Visit, queue: str, *, dead_letters: bool, group: GroupKey | None = None, **selection: object
) -> list[Act]:
    """Return what the user may do with all messages of a queue, or with those that `group` and `selection` choose.
    `dead_letters` tells whether it is a dead-letter queue."""
    if not visit.rights.may_act(queue):
        return []
    acts = []
    for verb in ("redrive", "move", "purge") if dead_letters else ("move", "purge"):
        parameters = {"verb": verb, "queue": queue, **selection}
        link = address("/action", **parameters) if group is None else group_address("/action", group, **parameters)
        acts.append(Act(verb, link))
    return acts


def _consumer_row(report: ConsumerReport, *, may_close: bool) -> ConsumerRow:
    close = address("/action", verb="close", connection=report.connection) if may_close and report.connection else ""
    return ConsumerRow(
        id=report.id,
        connection=report.connection,
        address=report.address,
        user=report.user,
        client_id=report.client_id,
        window=report.window,
        held=report.held,
        held_s=report.held_s,
        last_acknowledgement_s=report.last_acknowledgement_s,
        selector=report.selector,
        close=close,
    )


def _dead_letters_link(report: QueueReport, dead_letters: object) -> str:
    if report.dead_letters:
        return address("/dead-letters", queue=report.name)
    if report.dead_lettered and isinstance(dead_letters, str):
        is_own = dead_letters == INDIVIDUAL_DEAD_LETTERS
        return address("/dead-letters", queue=dead_letter_name(report.name) if is_own else dead_letters)
    return ""


# ---- Messages ----


def browse_address(queue: str) -> str:
    """Return the address at which a client browses a queue, by its name in `queues`."""
    if queue.startswith(SUBSCRIPTION_PREFIX):
        _, client, name, *_ = [*queue.split(",", 3), "", ""]
        return f"{DURABLE_ADDRESS_PREFIX}{client},{name}"
    return f"/queue/{queue}"


def parse_position(text: str) -> tuple[int, int] | None:
    """Return priority and sequence of a position in a queue, as `position` writes it; None for "".

    Raises: InvalidRequest if the text is none
    """
    if not text:
        return None
    priority, _, sequence = text.partition(",")
    if not (text.isascii() and priority.isdigit() and len(priority) == 1 and sequence.isdigit() and len(sequence) < 20):
        raise InvalidRequest(f"the parameter 'after' is not PRIORITY,SEQUENCE: {text[:50]!r}")
    return int(priority), int(sequence)


def position(content: Content) -> str:
    return f"{content.priority},{content.sequence}"


async def _messages(visit: Visit, queue: str) -> MessageList:
    selector, after = visit.text("selector"), visit.text("after")
    rows: list[Content] = []
    next = note = ""
    if not visit.rights.may_browse(queue):
        note = "You may not browse this queue: its messages are not shown."
    else:
        try:
            rows, is_whole = await browse(visit, queue, count=MESSAGES, after=after, selector=selector)
            has_more = len(rows) == MESSAGES or not is_whole
            if has_more and rows:
                next = address("/queue", name=queue, selector=selector, after=position(rows[-1]))
        except Refused as error:
            if error.code not in (Code.SELECTOR, Code.LIMIT, Code.FORBIDDEN):
                raise
            note = f"{error}"
        except Restricted as error:
            note = f"{error}"
        except TimeoutError:
            note = "No message was found in time: the selector matches few of many, or other pages read messages."
    return MessageList(
        rows=[message_row(queue, each) for each in rows],
        selector=selector,
        next=next,
        first=address("/queue", name=queue, selector=selector) if after else "",
        note=note,
    )


async def browse(
    visit: Visit,
    queue: str,
    *,
    count: int,
    after: str = "",
    selector: str = "",
    bytes_max: int = PAGE_BYTES_MAX,
    body_max: int | None = ENVELOPE_MAX,
) -> tuple[list[Content], bool]:
    """Return some messages of a queue, without the ends of long bodies, and whether these are all up to `count`.

    Raises: the errors of `Link.ask`
    """
    return await visit.link.browse(
        browse_address(queue),
        count=count,
        after=parse_position(after),
        selector=selector or None,
        bytes_max=bytes_max,
        body_max=body_max,
    )
