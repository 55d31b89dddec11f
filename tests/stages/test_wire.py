"""Tests of the messages of stages on the wire. Source: docs/protocol.md"""

import json
from hashlib import blake2b
from typing import Any

import pytest

import truenext
from tests.stages.flows import Memo, Number, run, until
from truenext.flows.envelope import decode_envelope
from truenext.stage import Flow, NotDecoded, Service
from truenext.stage.interceptors.interceptor import Execution, Interceptor, MessageToSend
from truenext.testing.contents import WaitingMessage
from truenext.testing.stages import Stages


async def one(t: Stages, queue: str) -> WaitingMessage:
    async with truenext.connect(t.broker.url) as connection, connection.consumer(f"/queue/{queue}") as consumer:
        message = await consumer.receive(timeout=10)
        assert message is not None
        return WaitingMessage(body=message.body, headers=message.headers)


def test_a_first_message_has_what_the_page_says_and_what_has_its_default_is_left_out() -> None:
    app = Service("shop")
    there = app.remote("there", Number)

    async def work(t: Stages) -> None:
        id = await t.send(there, Number(7), trace="o7")
        message = await one(t, "there")
        body = json.loads(message.body)
        assert body.pop("flow").keys() == {"id", "trace", "startedMs", "startedBy"}
        assert body == {"version": 2, "id": id, "kind": "send", "sender": "shop", "message": {"n": 7}}
        headers = message.headers
        assert headers["persistent"] == "true" and headers["priority"] == "4"
        assert headers["correlation-id"] == id and headers["content-type"] == "application/json"
        assert "expires" not in headers

    run(app, work)


def test_request_has_the_waiting_endpoints_and_the_other_fields_of_its_flow() -> None:
    app = Service("shop")
    there = app.remote("there", Number, Number)
    outer = app.endpoint("outer", Number, Number, state=Memo)

    @outer.stage
    async def first(number: Number, memo: Memo, flow: Flow) -> None:
        memo.text = "mine"
        memo.n = 4
        flow.properties["p"] = 1
        flow.request(there, number, attachments={"a": b"\0"})

    @outer.stage
    async def second(reply: Number, memo: Memo) -> Number:
        return reply

    async def work(t: Stages) -> None:
        async with app.initiate() as initiation:
            id = initiation.send(
                outer,
                Number(7),
                trace="o7",
                reply_to=outer,
                reply_state=Memo(3),
                interactive=True,
                persistent=False,
                ttl=1000,
            )
        message = await one(t, "there")
        body = json.loads(message.body)
        flow = body.pop("flow")
        assert flow.pop("startedMs") > 1_700_000_000_000
        assert flow == {
            "id": id,
            "trace": "o7",
            "startedBy": "shop",
            "interactive": True,
            "persistent": False,
            "properties": {"p": 1},
        }
        assert body == {
            "version": 2,
            "id": id[:12] + blake2b(f"{id} outer 1".encode(), digest_size=16).hexdigest()[12:],
            "kind": "request",
            "sender": "shop outer",
            "parent": id,
            "message": {"n": 7},
            "waiting": [
                {"to": "/queue/outer", "state": {"n": 3, "text": ""}},
                {"to": "/queue/outer.stage.second", "state": {"n": 4, "text": "mine"}},
            ],
            "calls": 2,
            "attachments": {"a": "AA=="},
        }
        assert message.headers["priority"] == "9"
        assert message.headers.get("persistent", "false") == "false"
        assert int(message.headers["expires"]) > 0

    run(app, work)


def test_a_stage_in_another_language_replies_with_what_the_page_says() -> None:
    """The stage knows only the page, and sends the required fields alone."""
    app = Service("shop")
    there = app.remote("there", Number, Number)
    ended: list[tuple[int, str, str]] = []
    outer = app.endpoint("outer", Number, state=Memo)

    @outer.stage
    async def first(number: Number, memo: Memo, flow: Flow) -> None:
        memo.text = "mine"
        flow.request(there, number)

    @outer.stage
    async def second(reply: Number, memo: Memo, flow: Flow) -> None:
        ended.append((reply.n, memo.text, flow.trace))

    async def work(t: Stages) -> None:
        await t.send(outer, Number(7), trace="o7")
        request = json.loads((await one(t, "there")).body)
        *waiting, last = request["waiting"]
        reply: dict[str, Any] = {
            "version": 2,
            "id": "0" * 32,
            "flow": request["flow"],
            "kind": "reply",
            "sender": "theirs",
            "message": {"n": request["message"]["n"] + 1, "unknown": [1]},
            "state": last["state"],
            "waiting": waiting,
            "unknown": {"x": 1},
        }
        async with truenext.connect(t.broker.url) as connection:
            await connection.send(last["to"], json.dumps(reply))
        await until(lambda: bool(ended))
        await t.wait_until_ended()
        assert ended == [(8, "mine", "o7")]

    run(app, work)


NO_SINGLE_DESTINATION = [
    "/temp-queue/x",
    "/remote-temp-queue/s1/x",
    "/queue/a,/queue/b",
    "/queue/a,b",
    "/queue/a.*",
    "/topic/a.>",
    "/queue/a?consumer.priority=7",
    "/queue/",
    "/control/queues",
    "/subscription/c,n",
    "a",
    "",
    "/queue/a\nb:c",
]


@pytest.mark.parametrize("to", NO_SINGLE_DESTINATION)
def test_a_message_whose_reply_would_not_go_to_one_queue_or_topic_is_refused(to: str) -> None:
    for waiting in ([{"to": to}], [{"to": to}, {"to": "/queue/a"}]):
        with pytest.raises(NotDecoded, match=r"the reply address .* is not a single queue or topic"):
            decode_envelope(json.dumps(forged(waiting)).encode())


def test_a_message_whose_reply_goes_to_one_queue_or_topic_is_taken() -> None:
    waiting = [{"to": "/topic/replies.shop.2c44"}, {"to": "/queue/order.place.stage.reserve"}]
    assert [each.to for each in decode_envelope(json.dumps(forged(waiting)).encode()).waiting] == [
        each["to"] for each in waiting
    ]


def test_a_forged_message_is_a_dead_letter_at_once_that_says_why() -> None:
    app = Service("shop")

    @app.single("answer", Number, Number)
    async def answer(number: Number) -> Number:
        raise AssertionError("it was refused")

    async def work(t: Stages) -> None:
        async with truenext.connect(t.broker.url) as connection:
            await connection.send("/queue/answer", json.dumps(forged([{"to": "/queue/a,/queue/b"}])))
        (letter,) = await t.wait_until_ended(dead_letters=1)
        assert letter.attempts == 1
        assert letter.last_cause.startswith("NotDecoded: the reply address '/queue/a,/queue/b'")

    run(app, work)


def test_a_message_of_another_version_is_a_dead_letter_that_says_of_which() -> None:
    """Version 1 has other names for the fields of a flow, so that these are missing, too."""
    old = {"id": "0" * 32, "trace": "t", "begunMs": 1, "begunBy": "theirs"}
    for message, advice in (
        (forged([]) | {"version": 1, "flow": old}, "1 of messages of stages, .* 2: use the version that sent it"),
        (forged([]) | {"version": 3}, "3 of messages of stages, .* 2: update truenext"),
        (forged([]) | {"version": 3, "flow": {}}, "3 of messages of stages, .* 2: update truenext"),
    ):
        with pytest.raises(NotDecoded, match=f"the body has version {advice}"):
            decode_envelope(json.dumps(message).encode())
    with pytest.raises(NotDecoded, match="the body is not a message of stages"):
        decode_envelope(json.dumps(forged([]) | {"flow": old}).encode())


def forged(waiting: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "version": 2,
        "id": "0" * 32,
        "flow": {"id": "0" * 32, "trace": "t", "startedMs": 1, "startedBy": "theirs"},
        "kind": "request",
        "sender": "theirs",
        "message": {"n": 1},
        "waiting": waiting,
    }


def test_a_message_that_comes_again_sends_with_the_same_ids() -> None:
    ids: list[str] = []

    class Ids(Interceptor):
        def sending(self, execution: Execution | None, send: MessageToSend) -> None:
            if execution is not None:
                ids.append(send.message_id)

    app = Service("shop", interceptors=[Ids()])
    sink = app.remote("sink", Number)

    @app.terminator("take", Number)
    async def take(number: Number, flow: Flow) -> None:
        flow.send(sink, number)
        flow.send(sink, number)

    async def work(t: Stages) -> None:
        t.mock(sink, lambda number: None)
        # The commit does not happen, and the stage runs again.
        t.at("run", lambda: t.broker.lose_commit("before"), stage="take")
        await t.send(take, Number(1))
        await t.wait_until_ended()
        assert len(ids) == 4
        assert ids[:2] == ids[2:] and ids[0] != ids[1]

    run(app, work)
