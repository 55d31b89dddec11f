"""Data of each page, for tests of templates: as an operator may see it, or with a payload in each text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from truenext.console.pages import dead_letters, messages, others, overview, queues, stages, work

AT_MS = 1_790_000_000_000
AT = AT_MS // 1000


def _series(*bases: float) -> list[list[float | None]]:
    return [[None if n < 20 else base * (1 + ((n * 37) % 11) / 40) for n in range(120)] for base in bases]


CHARTS = [
    overview.Chart(
        "Messages",
        "messages/s",
        list(range(AT - 3570, AT + 30, 30)),
        dict(zip(("accepted", "acknowledged"), _series(812, 790))),
    ),
    overview.Chart("Waiting", "messages", list(range(AT - 3570, AT + 30, 30)), dict(zip(("waiting",), _series(41200)))),
]


def queue_row(name: str, **changes: Any) -> queues.QueueRow:
    fields: dict[str, Any] = {
        "name": name,
        "link": f"/queue?name={name}",
        "kind": "queue",
        "waiting": 0,
        "held": 2,
        "consumers": 4,
        "scheduled": 0,
        "paused": False,
        "oldest_s": None,
        "rate": 12.4,
        "accepted": 120311,
        "acknowledged": 120309,
        "returned": 17,
        "expired": 0,
        "dead_lettered": 0,
    }
    return queues.QueueRow(**(fields | changes))


ROWS = [
    queue_row(
        "orders.place",
        waiting=18211,
        oldest_s=7512.2,
        consumers=0,
        rate=0.0,
        level="bad",
        why="no consumer for 2 h 5 min",
    ),
    queue_row("orders.ship", waiting=212, oldest_s=3.4, rate=88.2),
    queue_row("stock.reserve", waiting=3, oldest_s=0.04, paused=True, level="warn", why="paused by an operator"),
    queue_row(
        "DLQ.orders",
        kind="dead letters",
        waiting=1031,
        oldest_s=86400.0 * 3,
        rate=0.0,
        consumers=0,
        accepted=1031,
        acknowledged=0,
    ),
    queue_row("Spark.bills.q1.drafts", kind="Spark", waiting=40, oldest_s=12.0, rate=3.1),
]
ACTS = [
    queues.Act("re-drive", "/action?verb=redrive&queue=DLQ.orders"),
    queues.Act("move", "/action?verb=move&queue=DLQ.orders"),
    queues.Act("purge", "/action?verb=purge&queue=DLQ.orders"),
    queues.Act("pause", ""),
]
FIGURES = [
    overview.Figure("waiting", 19497, "messages"),
    overview.Figure("oldest", 7512.2, "seconds", "bad", "/queues?order=oldest"),
    overview.Figure("accepted", 812.1, "messages/s"),
    overview.Figure("acknowledged", 790.4, "messages/s"),
    overview.Figure("held by consumers", 1204, "messages"),
    overview.Figure("dead letters", 1031, "messages", "warn", "/dead-letters"),
    overview.Figure("queues", 10012),
]
_ORDERS = {each: f"/queues?order={each}" for each in ("name", "waiting", "oldest", "rate")}
_MESSAGES = queues.MessageList(
    rows=[
        queues.MessageRow(
            sequence=81200 + n,
            priority=9 - n // 3,
            link=f"/message?queue=DLQ.orders&priority=4&sequence={81200 + n}",
            persistent=n % 4 != 0,
            size=412 + 17 * n,
            arrived_ms=AT_MS - 10_000 * n,
            attempts=n % 3 + 1,
            redelivered=n % 3 == 1,
            group="customer-7" if n == 2 else "",
            expires_ms=AT_MS + 60_000 if n == 3 else None,
            cause="KeyError: 'customer' at orders/check.py:41" if n % 2 else "",
            origin="orders.place" if n % 2 else "",
            trace="",
            beginning='{"order": 5512, "customer": {"name": "Ada Lovelace"}, "lines": [{"sku": "A-100", "count": 2}]}',
        )
        for n in range(8)
    ],
    selector="",
    next="/queue?name=DLQ.orders&after=81208",
    first="",
)

PAGES: Mapping[str, msgspec.Struct] = {
    "overview": overview.Overview(
        attention=[
            overview.Attention(
                level="bad",
                what="orders.place: 18,211 messages wait, the oldest for 2 h 5 min",
                why="Nothing consumes from it: no process of its service is connected.",
                link="/queue?name=orders.place",
                action="Look at the queue",
            ),
            overview.Attention(
                level="bad",
                what="Process 7f3a of service shop is silent for 41 s",
                why="It has answered before: it may have been killed, or its network cut.",
                link="/stages",
                action="Look at its service",
            ),
            overview.Attention(
                level="warn",
                what="DLQ.orders: 1,031 dead letters, 12 more in the last minute",
                why="Most failed in orders.place: KeyError: 'customer'",
                link="/dead-letters?queue=DLQ.orders",
                action="See them by cause",
            ),
            overview.Attention(
                level="warn",
                what="Space for new messages is little",
                why="2.1 GiB are free; below 1 GiB sends are refused.",
                link="/settings",
                action="See the limits",
            ),
        ],
        attention_count=6,
        figures=FIGURES,
        broker=[
            overview.Figure("version", "0.1.0"),
            overview.Figure("up for", 912_331.0, "seconds"),
            overview.Figure("connections", 212),
            overview.Figure("memory", 312 * 2**20, "bytes"),
            overview.Figure("space", "little", "", "warn"),
            overview.Figure("journal", 81 * 2**20, "bytes"),
        ],
        charts=CHARTS,
        covers="all queues",
    ),
    "queues": queues.Queues(
        rows=ROWS * 4, name="", order="oldest", orders=_ORDERS, next="/queues?after=x", first="", sums=FIGURES
    ),
    "queue": queues.QueuePage(
        row=ROWS[3],
        lanes=[(9, 12), (4, 1019)],
        dead_lettered={"rejected": 31, "attempts": 4},
        consumers=[
            queues.ConsumerRow(
                id="orders-1",
                connection="c-12",
                address="10.0.3.17:50122",
                user="shop",
                client_id="shop-a",
                window=1000,
                held=212,
                last_acknowledgement_s=0.4,
                selector="priority > 4",
                close="/action?verb=close&connection=c-12",
            ),
            queues.ConsumerRow(
                id="orders-2",
                connection=None,
                address=None,
                user=None,
                client_id=None,
                window=None,
                held=0,
                last_acknowledgement_s=None,
                selector=None,
            ),
        ],
        policy=[
            queues.PolicyRow("attempts", 6, "default"),
            queues.PolicyRow("queue_memory_limit", "256MiB", "pattern orders.> of truenext.toml"),
        ],
        messages=_MESSAGES,
        acts=ACTS,
        spark_command="",
        charts=CHARTS,
        dead_letters="/dead-letters?queue=DLQ.orders",
    ),
    "message": messages.MessagePage(
        queue="DLQ.orders",
        queue_link="/queue?name=DLQ.orders",
        sequence=81203,
        priority=4,
        message_id="m-5512",
        persistent=True,
        arrived_ms=AT_MS,
        expires_ms=None,
        attempts=6,
        deliveries=6,
        origin="orders.place",
        reason="attempts",
        first_cause="TimeoutError: database",
        last_cause="KeyError: 'customer'\n  File \"orders/check.py\", line 41, in check\n    name = order['customer']\n",
        headers=[
            ("content-type", "application/json"),
            ("truenext-dead-letter-cause", "attempts"),
            ("truenext-original-last-cause", "KeyError: 'customer'"),
            ("priority", "4"),
        ],
        body=messages.Body(
            form="json",
            text='{\n  "order": 5512,\n  "lines": [\n    {"sku": "A-100", "count": 2}\n  ]\n}',
            size=81234,
            start=0,
            shown=65536,
            forms={"text": "/message?form=text", "json": "/message?form=json", "hex": "/message?form=hex"},
            next="/message?start=65536",
            first="",
        ),
        stage=messages.StageMessage(
            trace="4bf92f3577b34da6a3ce929d0e0e4736",
            flow="/flow?trace=4bf92f3577b34da6a3ce929d0e0e4736",
            kind="request",
            sender="order.place/check",
            started_by="web",
            started_ms=AT_MS - 3000,
            parent="p",
            calls=2,
            interactive=True,
            message='{"sku": "A-100"}',
            state='{"order": 5512}',
            properties={"tenant": "7"},
            waiting=[
                messages.Waiting("order.place/confirm", '{"order": 5512}'),
                messages.Waiting("reply to the starter", ""),
            ],
            attachments={"photo": 81234},
        ),
        download="/body?queue=DLQ.orders&sequence=81203",
        acts=ACTS[:3],
        spark_command="",
    ),
    "dead_letters": dead_letters.DeadLetters(
        queue="DLQ.orders",
        queues=[],
        next="",
        others=12,
        is_part=True,
        read=100000,
        go_on="/dead-letters?queue=DLQ.orders&read=200000",
        acts=ACTS[:3],
        groups=[
            dead_letters.Group(
                origin=origin,
                origin_link=f"/queue?name={origin}",
                reason=reason,
                cause=cause,
                count=count,
                first_ms=AT_MS - 86_400_000,
                last_ms=AT_MS,
                example="/message?x=1",
                messages="/queue?name=DLQ.orders",
                flow=flow,
                acts=ACTS[:3],
            )
            for origin, reason, cause, count, flow in [
                ("orders.place", "attempts", "KeyError: 'customer'", 982, "/flow?trace=1"),
                ("orders.ship", "rejected", "no such account: 8812", 37, ""),
                ("stock.reserve", "expired", "", 12, ""),
            ]
        ],
    ),
    "action": work.Action(
        verb="purge",
        title="Purge DLQ.orders?",
        queue="DLQ.orders",
        selection="all messages of DLQ.orders",
        sentences=[
            "1,031 messages would be removed. They cannot be brought back.",
            "Messages that consumers hold stay.",
            "Messages that arrive meanwhile stay.",
        ],
        count=1031,
        is_part=False,
        to={},
        left=2,
        ended={},
        needs_target=False,
        target="",
        typed_name="DLQ.orders",
        fields=[("verb", "purge"), ("queue", "DLQ.orders")],
        post="/work",
        button="Purge 1,031 messages",
        back="/queue?name=DLQ.orders",
    ),
    "progress": work.Progress(
        id="w1",
        verb="redrive",
        title="Re-drive of DLQ.orders",
        queue="DLQ.orders",
        state="running",
        count=412_000,
        total=1_000_000,
        to={"orders.place": 400_000, "orders.ship": 12_000},
        left=2,
        ended={},
        error="",
        sentences=["Messages go back to the queue where they failed, in their order."],
        started_ms=AT_MS,
        elapsed_s=12.3,
        back="/queue?name=DLQ.orders",
        others=[("Purge of old, done", "/progress?id=w0")],
    ),
    "stages": stages.Stages(
        services=[
            stages.ServiceRow(
                name="shop",
                level="bad",
                processes=[
                    stages.ProcessRow(
                        service="shop",
                        version="1.4.2",
                        instance=f"host-{n}:81{n}2",
                        state=state,
                        why=why,
                        answered_s=answered,
                        figures=[
                            overview.Figure("completed", 8112 * n + 3),
                            overview.Figure("retries", 12),
                            overview.Figure("unsent", 0),
                        ],
                    )
                    for n, state, why, answered in [
                        (1, "ready", "", 0.4),
                        (2, "silent", "no answer for 41 s", 41.0),
                        (3, "not ready", "the database does not answer", 1.2),
                    ]
                ],
                stages=[
                    stages.StageRow(
                        endpoint="order.place",
                        stage="check",
                        queue="shop.order.place",
                        queue_link="/queue?name=shop.order.place",
                        waiting=12,
                        oldest_s=0.4,
                        consumers=3,
                        processed=81220,
                        retries=12,
                        failed=4,
                        dead_letters="/dead-letters?queue=DLQ.shop",
                        sends_to=["stock.reserve", "order.place/confirm"],
                    ),
                    stages.StageRow(
                        endpoint="order.place",
                        stage="confirm",
                        queue="shop.order.confirm",
                        queue_link="/queue?name=shop.order.confirm",
                        waiting=0,
                        oldest_s=None,
                        consumers=3,
                        processed=81100,
                        retries=0,
                        failed=0,
                        dead_letters="",
                        sends_to=[],
                    ),
                ],
                outbox=[overview.Figure("unsent", 41), overview.Figure("oldest unsent", 0.2, "seconds")],
            )
        ],
        note="",
    ),
    "flows": stages.Flows(
        rows=[
            stages.FlowRow(
                trace=f"4bf92f3577b34da6a3ce929d0e0e47{n:02}",
                link=f"/flow?trace={n}",
                state=state,
                started_ms=AT_MS - n * 1000,
                duration_s=duration,
                executions=5,
                attempts=5 + n,
                error=error,
            )
            for n, state, duration, error in [
                (1, "given up", 91.2, "KeyError: 'customer'"),
                (2, "failed", 12.0, "no such account"),
                (3, "ended", 0.042, ""),
                (4, "open", None, ""),
            ]
        ],
        order="failed",
        orders={"failed": "/flows", "slowest": "/flows?order=slowest", "last": "/flows?order=last"},
        trace="",
        note="",
        figures=[overview.Figure("flows", 81220), overview.Figure("failed", 4)],
    ),
    "flow": stages.FlowPage(
        trace="4bf92f3577b34da6a3ce929d0e0e4736",
        state="failed",
        drawing="<p>drawn</p>",
        text="drawn",
        note="",
        dead_letters=[("DLQ.orders", "/message?queue=DLQ.orders&sequence=1")],
        others=[("the second", "/flow?trace=1&number=2")],
    ),
    "scheduled": others.Scheduled(
        rows=[
            others.ScheduledRow(
                number=n,
                due_ms=AT_MS + 1000 * n,
                to="orders.remind",
                repeats="every 60 s, 3 more times" if n % 2 else "",
                priority=4,
                persistent=n % 2 == 0,
                size=81,
                beginning="remind",
                headers=[("a", "b")],
                acts=[queues.Act("unschedule", f"/action?verb=unschedule&number={n}")],
            )
            for n in range(4)
        ],
        to="",
        selector="",
        total=4,
        is_part=False,
        note="",
        acts=[],
    ),
    "durable": others.Durable(
        rows=[
            others.DurableRow(
                row=queue_row("subscription,shop,bills,orders.>", waiting=12, oldest_s=9.0),
                client_id="shop",
                name="bills",
                topic="orders.>",
                selector="",
            )
        ],
        next="",
    ),
    "connections": others.Connections(
        rows=[
            others.ConnectionRow(
                connection=f"c-{n}",
                address=f"10.0.3.{n}:50122",
                user="shop",
                tls=True,
                client_id="shop-a",
                since_ms=AT_MS,
                protocol="STOMP 1.2",
                consumers=3,
                held=212,
                close="/action?verb=close",
            )
            for n in range(4)
        ],
        next="",
        first="",
    ),
    "spark": others.Spark(
        rows=[
            others.QueryRow(
                space="bills",
                id="q-1",
                does="writes",
                source="orders",
                batch="41",
                state="drafts",
                rows=4000,
                bytes=812_000,
                since_ms=AT_MS,
                commands=["truenext spark settle q-1"],
            )
        ],
        queues=[ROWS[4]],
        note="",
    ),
    "security": others.Security(
        users=[
            others.UserRow(
                name="shop", connections=3, refused=2, failed_logins=1, last_ms=AT_MS, last="may not send to queue 'x'"
            )
        ],
        events=[
            others.SecurityRow(
                at_ms=AT_MS, event="refused", user="shop", address="10.0.3.17:5012", text="may not send to queue 'x'"
            )
        ],
        note="",
        name="operator",
        grants=[("browse", ">"), ("monitor", "")],
    ),
    "settings": others.Settings(
        console=[overview.Figure("broker", "stomp://127.0.0.1:61613")],
        broker=[overview.Figure("memory limit", 2**30, "bytes")],
        queue="orders",
        policy=[queues.PolicyRow("attempts", 6, "default")],
        note="",
    ),
    "login": others.Login(next="/", error="user or password is wrong", user="ada", needs_token=False),
    "error": others.Failure(status=403, error="you have no right to manage this queue"),
}


def with_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a page in which each text is changed, but none that decides what is shown, and no link."""
    if isinstance(value, str):
        return value if value.startswith("/") else change(value)
    if isinstance(value, list):
        return [with_text(each, change) for each in value]
    if isinstance(value, tuple):
        return tuple(with_text(each, change) for each in value)
    if isinstance(value, dict):
        return {with_text(name, change): with_text(each, change) for name, each in value.items()}
    if isinstance(value, msgspec.Struct):
        changes = {
            each.name: with_text(getattr(value, each.name), change)
            for each in msgspec.structs.fields(value)
            if each.name not in _DECIDING
        }
        return msgspec.structs.replace(value, **changes)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        raise TypeError("pages are structs")
    return value


_DECIDING = {"level", "state", "verb", "form", "unit", "order", "kind", "drawing"}
"""Fields that the console sets itself: the word decides what a template shows. A drawing is escaped where it is made."""
