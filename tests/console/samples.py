"""A sample of each page's data, with texts that would do harm in a page that does not escape them.

`python -m tests.console.samples` serves the samples on http://127.0.0.1:8162, to work on templates.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import uvicorn

from truenext.client.core.credentials import NO_CREDENTIALS
from truenext.console.app import PAGES, Console, make_app
from truenext.console.doors import Address
from truenext.console.link import Broker, Link
from truenext.console.pages import dead_letters, messages, others, overview, queues, stages, work
from truenext.console.pages.links import address, queue_link
from truenext.console.pages.overview import Attention, Chart, Figure
from truenext.console.pages.queues import Act
from truenext.console.rendering import Renderer
from truenext.console.rights import Rights
from truenext.console.serving import Listen, public_address
from truenext.console.shared import Shared
from truenext.console.visit import Visit

EVIL = "<img src=x onerror=alert(1)>\"'`{{7*7}}"
"""Text that runs a script where it is not escaped."""

AT_MS = 1_790_000_000_000


def row(name: str = "orders.new", **changes: Any) -> queues.QueueRow:
    fields: dict[str, Any] = {
        "name": name,
        "link": queue_link(name),
        "kind": "dead letters" if name.startswith("DLQ.") else "Spark" if name.startswith("Spark.") else "queue",
        "waiting": 12_345,
        "held": 17,
        "consumers": 2,
        "scheduled": 0,
        "paused": False,
        "oldest_s": 93.4,
        "held_s": 4.2,
        "rate": 41.7,
        "accepted": 1_000_321,
        "acknowledged": 987_959,
        "returned": 12,
        "failed_again": 2,
        "expired": 0,
        "dead_lettered": 3,
    }
    return queues.QueueRow(**fields | changes)


def act(name: str) -> Act:
    return Act(name, "" if name in ("pause", "resume") else address("/action", verb=name, queue="orders.new"))


def chart(title: str, unit: str, *names: str) -> Chart:
    at = [AT_MS // 1000 - 3600 + 5 * number for number in range(720)]
    series: dict[str, list[float | None]] = {
        name: [None if 200 < number < 240 else 50 + 40 * math.sin(number / (20 + 7 * index)) for number in range(720)]
        for index, name in enumerate(names)
    }
    return Chart(title, unit, at, series)


CHARTS = [
    chart("Messages", "messages/s", "accepted", "acknowledged", "dead letters"),
    chart("Waiting", "messages", "waiting", "held"),
    chart("Oldest message", "seconds", "oldest"),
]

OVERVIEW = overview.Overview(
    attention=[
        Attention(
            level="bad",
            what="orders.slow: the oldest message has waited for 2 h 3 min",
            why="No consumer: nothing takes messages from this queue.",
            link=queue_link("orders.slow"),
            action="Show the queue",
        ),
        Attention(
            level="bad",
            what="DLQ.orders.new has 1,204 dead letters",
            why=f"Most of them: rejected, {EVIL}",
            link=address("/dead-letters", queue="DLQ.orders.new"),
            action="Show causes",
        ),
        Attention(level="warn", what="process 2 of service shop is silent for 40 s", link="/stages", action="Show"),
    ],
    attention_count=5,
    figures=[
        Figure("waiting", 52_345, "messages", "", "/queues?order=waiting"),
        Figure("held", 170, "messages"),
        Figure("accepted", 123.4, "messages/s"),
        Figure("acknowledged", 121.0, "messages/s"),
        Figure("dead letters", 1204, "messages", "bad", "/dead-letters"),
        Figure("scheduled", 12, "messages", "", "/scheduled"),
        Figure("queues", 10_000, "", "", "/queues"),
    ],
    broker=[
        Figure("version", "0.9.0"),
        Figure("up", 86_400.0 * 3, "seconds"),
        Figure("connections", 211, "", "", "/connections"),
        Figure("disk level", "little", "", "warn"),
        Figure("memory used", 123_456_789, "bytes"),
        Figure("memory limit", 268_435_456, "bytes"),
    ],
    charts=CHARTS,
    covers="all queues",
)

QUEUES = queues.Queues(
    rows=[
        row(
            "orders.slow", level="bad", why="nobody consumes", subject="oldest", consumers=0, oldest_s=7380.0, rate=0.0
        ),
        row(),
        row(EVIL, paused=True, level="warn", why="paused", subject="oldest"),
        row("DLQ.orders.new", waiting=1204, consumers=0),
        row("Spark.shop.1a2b3c.1", waiting=1000, consumers=0),
        *(row(f"customer.{number:05}.in", waiting=number % 7) for number in range(95)),
    ],
    name="",
    order="oldest",
    orders={order: address("/queues", order=order) for order in ("name", "waiting", "oldest", "rate")},
    next=address("/queues", order="oldest", after="100,customer.00095.in"),
    first="",
    sums=[Figure("queues", 10_000), Figure("waiting", 52_345, "messages"), Figure("held", 170, "messages")],
)

MESSAGE_ROWS = [
    queues.MessageRow(
        sequence=1000 + number,
        priority=4,
        link=address("/message", queue="orders.new", priority=4, sequence=1000 + number),
        persistent=number % 3 > 0,
        size=312 + number,
        arrived_ms=AT_MS - 93_400,
        attempts=number % 4,
        redelivered=number % 4 > 0,
        group="",
        expires_ms=None,
        cause=EVIL if number % 4 else "",
        origin="",
        trace="web o-1234" if number % 2 else "",
        beginning='{"order": "o-1234", "item": "' + EVIL,
    )
    for number in range(50)
]

QUEUE = queues.QueuePage(
    row=row(),
    lanes=[(9, 12), (4, 12_333)],
    dead_lettered={"rejected": 2, "attempts": 1},
    consumers=[
        queues.ConsumerRow(
            id="1",
            connection="c-17",
            address="10.0.0.17:40312",
            user="shop",
            client_id=EVIL,
            window=100,
            held=17,
            held_s=1300.0,
            last_acknowledgement_s=0.4,
            selector="colour = 'red'",
            close=address("/action", verb="close", connection="c-17"),
        ),
        queues.ConsumerRow(
            id="2",
            connection=None,
            address=None,
            user=None,
            client_id=None,
            window=None,
            held=0,
            held_s=None,
            last_acknowledgement_s=None,
            selector=None,
        ),
    ],
    policy=[
        queues.PolicyRow("attempts_max", 7, "default"),
        queues.PolicyRow("delay_ms", 5000, "[policy.'orders.>'] of broker.toml"),
    ],
    messages=queues.MessageList(
        rows=MESSAGE_ROWS, selector="", next=address("/queue", name="orders.new", after="5,1049"), first=""
    ),
    acts=[act("pause"), act("move"), act("purge")],
    spark_command="",
    charts=CHARTS[1:],
    dead_letters=address("/dead-letters", queue="DLQ.orders.new"),
)

BODY = messages.Body(
    form="json",
    text='{\n  "order": "o-1234",\n  "item": "' + EVIL + '"\n}',
    size=3_000_000,
    start=0,
    shown=65_536,
    forms={form: address("/message", queue="orders.new", sequence=1000, form=form) for form in ("text", "json", "hex")},
    next=address("/message", queue="orders.new", sequence=1000, start=65_536),
    first="",
)

MESSAGE = messages.MessagePage(
    queue="DLQ.orders.new",
    queue_link=queue_link("DLQ.orders.new"),
    sequence=1000,
    priority=4,
    message_id="truenext-1a2b-1000",
    persistent=True,
    arrived_ms=AT_MS,
    expires_ms=None,
    attempts=7,
    deliveries=8,
    origin="orders.new",
    reason="rejected",
    first_cause="Traceback (most recent call last):\n  ...\nValueError: " + EVIL,
    last_cause="Traceback (most recent call last):\n  ...\nValueError: " + EVIL,
    headers=[
        ("content-type", "application/json"),
        (EVIL, EVIL),
        ("truenext-original-destination", "/queue/orders.new"),
    ],
    body=BODY,
    stage=messages.StageMessage(
        trace="web o-1234",
        flow=address("/flow", trace="web o-1234"),
        kind="request",
        sender="web",
        started_by="web",
        started_ms=AT_MS - 93_400,
        parent="9f31",
        calls=2,
        interactive=True,
        message='{\n  "order": "o-1234"\n}',
        state="{}",
        properties={"tenant": '"' + EVIL + '"'},
        waiting=[messages.Waiting("/queue/order.place.stage.confirm", '{\n  "basket": 3\n}')],
        attachments={"scan.pdf": 123_456},
    ),
    download=address("/body", queue="orders.new", priority=4, sequence=1000),
    acts=[act("redrive"), act("move"), act("purge")],
    spark_command="",
)

DEAD_LETTERS = dead_letters.DeadLetters(
    queue="DLQ.orders.new",
    total=1204,
    queues=[row("DLQ.orders.new", waiting=1204, consumers=0), row("DLQ.bills", waiting=3, consumers=0)],
    next="",
    groups=[
        dead_letters.Group(
            origin="orders.new",
            origin_link=queue_link("orders.new"),
            reason="rejected",
            cause="ValueError: " + EVIL,
            count=1200 - 100 * number,
            first_ms=AT_MS - 7_200_000,
            last_ms=AT_MS - 4_000,
            example=address("/message", queue="DLQ.orders.new", priority=4, sequence=1000),
            messages=address("/queue", name="DLQ.orders.new"),
            flow=address("/flow", trace="web o-1234"),
            acts=[act("redrive"), act("move"), act("purge")],
        )
        for number in range(3)
    ],
    others=0,
    is_part=True,
    read=100_000,
    go_on=address("/dead-letters", queue="DLQ.orders.new", read=400_000),
    acts=[act("redrive"), act("move"), act("purge")],
)

ACTION = work.Action(
    verb="purge",
    title="Purge DLQ.orders.new",
    queue="DLQ.orders.new",
    selection="messages that match colour = 'red'",
    sentences=["1,204 messages are removed for ever.", "17 messages that consumers hold stay."],
    count=1204,
    is_part=False,
    to={},
    left=17,
    ended={},
    needs_target=False,
    target="",
    typed_name="DLQ.orders.new",
    fields=[("verb", "purge"), ("queue", "DLQ.orders.new"), ("selector", "colour = 'red'")],
    post="/work",
    button="Purge",
    back=queue_link("DLQ.orders.new"),
)

PROGRESS = work.Progress(
    id="1",
    verb="redrive",
    title="Re-drive DLQ.orders.new",
    queue="DLQ.orders.new",
    state="running",
    count=403,
    total=1204,
    to={"orders.new": 403},
    left=0,
    ended={},
    error="",
    sentences=[],
    started_ms=AT_MS,
    elapsed_s=2.5,
    back=queue_link("DLQ.orders.new"),
    others=[("Purge old: done", "/progress?id=0")],
)

STAGES = stages.Stages(
    services=[
        stages.ServiceRow(
            name="shop",
            level="bad",
            processes=[
                stages.ProcessRow(
                    service="shop",
                    version="1.2",
                    instance="a1-311",
                    state="ready",
                    why="",
                    answered_s=1.2,
                    figures=[Figure("running", 3), Figure("processed", 10_233)],
                ),
                stages.ProcessRow(
                    service="shop",
                    version="1.2",
                    instance="a2-17",
                    state="silent",
                    why="",
                    answered_s=43.0,
                    figures=[],
                    run="5b0e",
                ),
            ],
            stages=[
                stages.StageRow(
                    endpoint="order.place",
                    stage="check",
                    queue="order.place",
                    queue_link=queue_link("order.place"),
                    waiting=12,
                    oldest_s=3.2,
                    consumers=2,
                    completed=10_233,
                    failed=3,
                    given_up=1,
                    dead_letters=address("/dead-letters", queue="DLQ.order.place"),
                    sends_to=["stock.reserve"],
                ),
            ],
            outbox=[Figure("unsent", 12, "messages"), Figure("oldest", 3.4, "seconds", "warn")],
        )
    ],
    note="",
)

FLOWS = stages.Flows(
    rows=[
        stages.FlowRow(
            trace=f"web o-{number}",
            link=address("/flow", trace=f"web o-{number}"),
            state="failed",
            started_ms=AT_MS - 5000 * number,
            duration_s=1.2,
            executions=5,
            attempts=9,
            error=EVIL,
        )
        for number in range(30)
    ],
    order="failed",
    orders={order: address("/flows", order=order) for order in ("failed", "slowest", "last")},
    trace="",
    note="",
    figures=[Figure("flows", 12_334), Figure("memory", 12_345_678, "bytes")],
)

FLOW = stages.FlowPage(
    trace="web o-1234",
    state="given up",
    drawing="<p>drawing</p>",
    text="order.place  ====\n",
    note="",
    dead_letters=[("DLQ.orders.new", address("/dead-letters", queue="DLQ.orders.new"))],
    others=[("web o-1234 of 2026-10-01 07:00", address("/flow", trace="web o-1234", start=1))],
)

SCHEDULED = others.Scheduled(
    rows=[
        others.ScheduledRow(
            number=17,
            due_ms=AT_MS + 60_000,
            to="/queue/orders.new",
            repeats="every 60 s, for ever",
            priority=4,
            persistent=True,
            size=12,
            beginning=EVIL,
            headers=[("colour", EVIL)],
            acts=[act("unschedule")],
        )
    ],
    to="",
    selector="",
    total=1,
    is_part=False,
    note="",
    acts=[],
)

DURABLE = others.Durable(
    rows=[
        others.DurableRow(
            row=row("subscription,billing,all,orders.>", kind="durable subscription"),
            client_id="billing",
            name="all",
            topic="orders.>",
            selector="",
        )
    ],
    next="",
)

CONNECTIONS = others.Connections(
    rows=[
        others.ConnectionRow(
            connection="c-17",
            address="10.0.0.17:40312",
            user="shop",
            tls=True,
            client_id=EVIL,
            since_ms=AT_MS,
            protocol="STOMP 1.2",
            consumers=2,
            held=17,
            close=address("/action", verb="close", connection="c-17"),
        )
    ],
    next="",
    first="",
)

SPARK = others.Spark(
    rows=[
        others.QueryRow(
            space="main",
            id="1a2b3c4d",
            does="reads",
            source="orders.new",
            batch="17",
            state="",
            rows=1000,
            bytes=123_000,
            since_ms=AT_MS - 60_000,
            commands=["truenext spark abandon 1a2b3c4d"],
        )
    ],
    queues=[row("Spark.main.1a2b3c4d.1", waiting=1000)],
    note="",
)

SECURITY = others.Security(
    users=[
        others.UserRow(
            name=EVIL,
            connections=2,
            refused=3,
            failed_logins=1,
            last_ms=AT_MS,
            last="user 'shop' may not manage /queue/orders.new",
        )
    ],
    events=[
        others.SecurityRow(
            at_ms=AT_MS,
            event="request refused",
            user="shop",
            address="10.0.0.17:40312",
            text="user 'shop' may not manage /queue/orders.new",
        )
    ],
    note="",
    name="anna",
    grants=[("browse", "/queue/>"), ("monitor", "")],
)

SETTINGS = others.Settings(
    console=[Figure("broker", "stomp://127.0.0.1:61613"), Figure("listens on", "http://127.0.0.1:8161")],
    broker=[Figure("version", "0.9.0")],
    queue="orders.new",
    policy=QUEUE.policy,
    note="",
)

LOGIN = others.Login(next="/queues", error="wrong user or password", user=EVIL, needs_token=False)
FAILURE = others.Failure(status=404, error="there is no queue 'orders.gone'")

SAMPLES: Mapping[str, msgspec.Struct] = {
    "overview": OVERVIEW,
    "queues": QUEUES,
    "queue": QUEUE,
    "message": MESSAGE,
    "dead_letters": DEAD_LETTERS,
    "action": ACTION,
    "progress": PROGRESS,
    "stages": STAGES,
    "flows": FLOWS,
    "flow": FLOW,
    "scheduled": SCHEDULED,
    "durable": DURABLE,
    "connections": CONNECTIONS,
    "spark": SPARK,
    "security": SECURITY,
    "settings": SETTINGS,
    "login": LOGIN,
    "error": FAILURE,
}
"""Sample of each template's data, by the name of the template."""


class SampleLink(Link):
    """Link to no broker."""

    async def rights(self) -> Rights:
        return Rights(None)


def sample_console(address: Address) -> Console:
    shared = Shared(Broker((), NO_CREDENTIALS), (), {})
    console = Console(shared, address, has_users=False, renderer=Renderer())
    console._shared_link = SampleLink(console.broker, None, None)
    return console


def _loader(template: str) -> Callable[[Visit], Awaitable[msgspec.Struct]]:
    async def load(visit: Visit) -> msgspec.Struct:
        return SAMPLES[template]

    return load


SAMPLE_PAGES = [page._replace(load=_loader(page.template)) for page in PAGES]


async def _serve() -> None:
    console = sample_console(public_address(Listen("http", "127.0.0.1", 8162), []))
    print(f"http://127.0.0.1:8162/open?key={console.key}", flush=True)
    config = uvicorn.Config(make_app(console, SAMPLE_PAGES), port=8162, log_level="warning", lifespan="off")
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(_serve())
