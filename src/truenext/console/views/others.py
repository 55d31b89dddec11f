"""Views of scheduled sends, durable subscriptions, connections, Spark's queries, users and settings."""

from __future__ import annotations

import asyncio
from collections import Counter
from heapq import nsmallest
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from truenext.console.pages.bodies import beginning
from truenext.console.pages.links import address
from truenext.console.pages.message_rows import size_of
from truenext.console.pages.others import (
    ConnectionRow,
    Connections,
    Durable,
    DurableRow,
    QueryRow,
    Scheduled,
    ScheduledRow,
    Security,
    SecurityRow,
    Settings,
    Spark,
    UserRow,
)
from truenext.console.pages.overview import Figure
from truenext.console.pages.queue_rows import queue_row
from truenext.console.pages.queues import Act, PolicyRow
from truenext.console.pages.spark_queries import sink_row, source_row
from truenext.console.views.overview import broker_figures
from truenext.console.views.queues import browse, position
from truenext.console.visit import Visit
from truenext.console.work import pieces
from truenext.errors import Code, Refused, TruenextError
from truenext.model.control_answers import OpenConnection, PolicyReport, QueuesReport, ScheduledSendInfo, SecurityEvent
from truenext.model.destination import SPARK_PREFIX, SUBSCRIPTION_PREFIX
from truenext.model.spark_queues import (
    SINK_PREFIX,
    SOURCE_PREFIX,
    QueryStatus,
    SinkQueues,
    SinkStatus,
    mark_queue,
    parse_decision,
    parse_latest,
    queues_by_query,
)

ROWS = 100
SENDS_READ_MAX = 10_000
"""Scheduled sends that are read for one page; the soonest of them are shown."""
QUERIES_MAX = 50
BUNDLES_MAX = 1000
"""Bundles of one query that are read for the page of Spark's queries."""

# ---- Scheduled sends ----


async def scheduled(visit: Visit) -> Scheduled:
    to, selector = visit.text("to"), visit.text("selector")
    request: dict[str, object] = {"queue": ""}
    if selector:
        request["selector"] = selector
    if to.startswith("/topic/") or "," in to:
        request["to"] = to
    elif to:
        request["queue"] = to.removeprefix("/queue/")
    queues, has_all = ([str(request["queue"])], True) if to else await _queues_with_sends(visit)
    sends: list[tuple[str, ScheduledSendInfo]] = []
    total, is_part, notes = 0, not has_all, list[str]()
    for queue in queues:
        try:
            found, count, is_whole = await _sends(visit, request | {"queue": queue}, SENDS_READ_MAX - total)
        except Refused as error:
            if error.code not in (Code.FORBIDDEN, Code.NOT_FOUND, Code.SELECTOR) or (
                to and error.code == Code.FORBIDDEN
            ):
                raise
            if error.code != Code.NOT_FOUND:
                notes.append(str(error))
            continue
        sends += ((queue, each) for each in found)
        total += count
        if not is_whole:
            is_part = True
            break
    soonest = nsmallest(ROWS, sends, key=lambda each: each[1].due_ms)
    has_acts = to and total and visit.rights.may_unschedule(str(request["queue"]), str(request.get("to", "")))
    return Scheduled(
        rows=[_scheduled_row(visit, queue, each) for queue, each in soonest],
        to=to,
        selector=selector,
        total=total,
        is_part=is_part,
        note=" ".join(dict.fromkeys(f"{each}." for each in notes[:3])),
        acts=[_unschedule(str(request["queue"]), str(request.get("to", "")), selector=selector)] if has_acts else [],
    )


async def _queues_with_sends(visit: Visit) -> tuple[list[str], bool]:
    """Return the queues with scheduled sends that the user may see, "" for sends to other destinations, and whether
    these are all."""
    after: str | None = None
    names = [""]
    while True:
        answer = await visit.ask("queues", {"limit": 1000, "after": after}, QueuesReport)
        names += (each.name for each in answer.queues if each.scheduled)
        after = answer.next
        if after is None or not answer.sums.scheduled or len(names) > ROWS:
            return names, after is None or not answer.sums.scheduled


async def _sends(visit: Visit, request: dict[str, object], count_max: int) -> tuple[list[ScheduledSendInfo], int, bool]:
    """Return the soonest scheduled sends that a request selects, how many were read, and whether that is all."""
    found: list[ScheduledSendInfo] = []
    count = 0
    async for answer in pieces(visit.ask, "scheduled", request):
        count += answer.moved
        found = nsmallest(ROWS, [*found, *answer.sends], key=lambda each: each.due_ms)
        if answer.next is not None and count >= count_max:
            return found, count, False
    return found, count, True


def _scheduled_row(visit: Visit, queue: str, send: ScheduledSendInfo) -> ScheduledRow:
    to = "" if queue else send.to
    may = visit.rights.may_unschedule(queue, to)
    return ScheduledRow(
        number=send.number,
        due_ms=send.due_ms,
        to=f"/queue/{queue}" if queue else send.to,
        repeats=_repeats(send),
        priority=send.priority,
        persistent=send.persistent,
        size=send.size,
        beginning=beginning(send.body.encode(errors="replace")),
        headers=sorted(send.headers.items()),
        acts=[_unschedule(queue, to, sequence=send.number)] if may else [],
    )


def _unschedule(queue: str, to: str, **selection: object) -> Act:
    return Act("unschedule", address("/action", verb="unschedule", queue=queue, to=to, **selection))


def _repeats(send: ScheduledSendInfo) -> str:
    if send.cron:
        return f"cron {send.cron}{f' {send.zone}' if send.zone else ''}"
    if not send.repeat:
        return ""
    times = "for ever" if send.repeat < 0 else f"{send.repeat:,} more times"
    return f"every {send.period_ms / 1000:g} s, {times}"


# ---- Durable subscriptions and connections ----


async def durable(visit: Visit) -> Durable:
    body = {"name": SUBSCRIPTION_PREFIX, "order": "waiting", "limit": ROWS, "after": visit.text("after") or None}
    answer = await visit.ask("queues", body, QueuesReport)
    rows = []
    for report in answer.queues:
        if report.topic is not UNSET:
            _, client, name, _, selector = [*report.name.split(",", 4), "", "", "", ""][:5]
            row = queue_row(report)
            rows.append(DurableRow(row=row, client_id=client, name=name, topic=report.topic, selector=selector))
    return Durable(rows=rows, next=address("/durable", after=answer.next) if answer.next else "")


async def connections(visit: Visit) -> Connections:
    after = visit.text("after")
    found = await visit.ask("connections", {"limit": ROWS, "after": after}, list[OpenConnection])
    return Connections(
        rows=[_connection_row(each, may_close=visit.rights.is_admin) for each in found],
        next=address("/connections", after=found[-1].connection) if len(found) == ROWS else "",
        first="/connections" if after else "",
    )


def _connection_row(report: OpenConnection, *, may_close: bool) -> ConnectionRow:
    return ConnectionRow(
        connection=report.connection,
        address=report.address,
        user=report.user or None,
        tls=report.tls is not None,
        client_id=report.client_id or None,
        since_ms=report.since,
        protocol=report.protocol,
        consumers=report.consumers,
        held=report.held,
        close=address("/action", verb="close", connection=report.connection) if may_close else "",
    )


# ---- Spark's queries ----


async def spark(visit: Visit) -> Spark:
    answer = await visit.ask("queues", {"name": f"{SPARK_PREFIX}>", "limit": 10 * ROWS}, QueuesReport)
    reports = [msgspec.to_builtins(each) for each in answer.queues]
    read, written = (list(queues_by_query(reports, prefix).items()) for prefix in (SOURCE_PREFIX, SINK_PREFIX))
    sources = [QueryStatus(*key, bundle_queues=names) for key, names in read[:QUERIES_MAX]]
    sinks = [SinkStatus(SinkQueues(*key), draft_queues=names) for key, names in written[:QUERIES_MAX]]
    notes: list[str] = []
    if answer.next is not None:
        notes.append(f"Only the first {10 * ROWS:,} queues of Spark's queries are shown, and queries may lack some.")
    if max(len(read), len(written)) > QUERIES_MAX:
        notes.append(f"Only the first {QUERIES_MAX} queries that read, and that write, are shown.")
    rows: list[QueryRow] = []
    for source in sources:
        if await _may_read(visit, mark_queue(source.space, source.id), notes):
            await _read_source(visit, source, notes)
            rows.append(source_row(source))
    for sink in sinks:
        if await _may_read(visit, sink.queues.decisions, notes):
            await _read_sink(visit, sink, notes)
            rows.append(sink_row(sink))
    return Spark(rows=rows, queues=[queue_row(each) for each in answer.queues], note=" ".join(dict.fromkeys(notes)))


async def _may_read(visit: Visit, queue: str, notes: list[str]) -> bool:
    if visit.rights.may_browse(queue):
        return True
    notes.append(f"You may not browse {SPARK_PREFIX}>: queries are not shown, only their queues.")
    return False


async def _read_source(visit: Visit, status: QueryStatus, notes: list[str]) -> None:
    try:
        latest = parse_latest(each.body for each in await _all(visit, mark_queue(status.space, status.id)))
        if latest is not None:
            status.add_mark(latest["batch"])
        for name in status.bundle_queues:
            for each in await _all(visit, name):
                status.add_bundle(each.headers)
    except (TruenextError, ValueError, LookupError, TypeError) as error:
        notes.append(f"Query {status.id}: {error}.")


async def _read_sink(visit: Visit, status: SinkStatus, notes: list[str]) -> None:
    try:
        latest = parse_latest(each.body for each in await _all(visit, status.queues.decisions))
        status.decision = None if latest is None else parse_decision(latest)
        for name in status.draft_queues:
            for each in await _all(visit, name):
                status.add_draft(each.headers, each.size)
    except (TruenextError, ValueError, LookupError, TypeError) as error:
        notes.append(f"Query {status.queues.id}: {error}.")


class _Bundle(NamedTuple):
    headers: dict[str, str]
    size: int
    body: bytes
    """The body, unless it is large."""


async def _all(visit: Visit, queue: str) -> list[_Bundle]:
    """Return the messages of a queue, at most BUNDLES_MAX, without large bodies."""
    found: list[_Bundle] = []
    after = ""
    while len(found) < BUNDLES_MAX:
        contents, is_whole = await browse(visit, queue, count=ROWS, after=after)
        found += (_Bundle(each.headers, size_of(each), each.body) for each in contents)
        if not contents or (is_whole and len(contents) < ROWS):
            break
        after = position(contents[-1])
    return found


# ---- Users and settings ----


async def security(visit: Visit) -> Security:
    rights = visit.rights
    events, note = list[SecurityEvent](), "Refusals and failed logins need the right admin."
    if rights.is_admin:
        events, note = await visit.ask("security", None, list[SecurityEvent]), ""
    clients = None
    if rights.is_monitor:
        clients = await visit.ask("connections", {"limit": 10 * ROWS}, list[OpenConnection])
        if len(clients) == 10 * ROWS:
            note = f"{note} Connections are counted by user among the first {10 * ROWS:,}.".lstrip()
    return Security(
        users=_users(events, clients),
        events=[
            SecurityRow(
                at_ms=each.at,
                event=each.event,
                user=each.user or None,
                address=each.address,
                text=each.text if each.count == 1 else f"{each.text} ({each.count:,} times)",
            )
            for each in events
        ],
        note=note,
        name=rights.name or "",
        grants=rights.grants,
    )


def _users(events: list[SecurityEvent], clients: list[OpenConnection] | None) -> list[UserRow]:
    counts = None if clients is None else Counter(each.user for each in clients)
    names = {each.user for each in events} | (counts or Counter()).keys()
    return [_user(name, [each for each in events if each.user == name], counts) for name in sorted(names - {""})]


def _user(name: str, events: list[SecurityEvent], counts: Counter[str] | None) -> UserRow:
    refused = [each for each in events if each.event in ("request refused", "connection ended")]
    failed = [each for each in events if each.event in ("login failed", "TLS failed")]
    last = max([*refused, *failed], key=lambda each: each.at, default=None)
    return UserRow(
        name=name,
        connections=None if counts is None else counts[name],
        refused=sum(each.count for each in refused),
        failed_logins=sum(each.count for each in failed),
        last_ms=None if last is None else last.at,
        last="" if last is None else last.text,
    )


async def settings(visit: Visit) -> Settings:
    queue, shared = visit.text("queue"), visit.shared
    gathering = visit.gathering()
    policy, _ = await asyncio.gather(_policy(visit, queue), gathering.ready())
    memory = [
        Figure("flows in memory", len(shared.flows.reader)),
        Figure("memory of charts", shared.charts.bytes, "bytes"),
    ]
    return Settings(
        console=[*(Figure(name, value) for name, value in shared.settings.items()), *memory],
        broker=broker_figures(gathering.latest),
        queue=queue,
        policy=[PolicyRow(name, each.value, each.source) for name, each in policy.settings.items()],
        note="" if visit.rights.is_monitor else "The state of the broker needs the right monitor.",
    )


async def _policy(visit: Visit, queue: str) -> PolicyReport:
    return await visit.ask("policy", {"queue": queue}, PolicyReport) if queue else PolicyReport()
