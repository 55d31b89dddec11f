"""Tests that a request is executed with the rights that it needs, and refused without any one of them.

Source of what is expected: docs/security.md, "What a request needs". `ROWS` is that table. Each row is tried by users
that have all of its rights, and by users that have all but one, which they lack in every way that `variants` knows.
Each case has a user and destinations of its own; all cases share one broker.

`{p}` stands for the prefix of a case in names, `{c}` for the client id of its user.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies, numbered
from truenext.broker import drain
from truenext.broker.access import VERB_CHECKS
from truenext.broker.passwords import hash_password
from truenext.model.commands import (
    Abort,
    Ack,
    AckRun,
    Begin,
    Browse,
    Close,
    Command,
    Commit,
    ControlRequest,
    CreateTemporary,
    Credit,
    Disconnect,
    ForgetProducers,
    InvalidFrame,
    Login,
    Nack,
    OpenProducer,
    Pause,
    ReceiptRequest,
    Release,
    RemoveTemporary,
    Send,
    SendRun,
    Started,
    Subscribe,
    Unsubscribe,
    Wake,
)
from truenext.model.limits import BROWSERS_MAX
from truenext.wire.stomp.actions import ACTION_PARSERS
from truenext.wire.stomp.frame import Frame, Version, encode

PASSWORD = "open sesame"
SHARED_PASSWORD = 'password_file = "password"'
"""Line of a user whose password is PASSWORD. A login with it costs no hash, and hundreds of users log in here."""
ROOT = "root"
"""User that may do everything."""
EVERYWHERE = (">", "DLQ.>", "Consumer.>", "Spark.>", "/topic/>")
RIGHTS = ("send", "take", "browse", "manage")
FLAGS = ("monitor", "admin")
RESERVED = ("DLQ", "Consumer.c.VirtualTopic", "Spark")
ANSWERS = "/temp-queue/answers"
JMS_COMMANDS = {Close, CreateTemporary, ForgetProducers, OpenProducer, Pause, RemoveTemporary}
"""Commands of JMS clients alone: openwire/test_raw_grants.py has the rows of these."""
Headers = Mapping[str, str]
NO_HEADERS: Headers = {}
LATER = {"AMQ_SCHEDULED_DELAY": "3600000"}
RED = {"colour": "red"}
DURABLE = {"durable": "true"}


class RequestRefused(Exception):
    def __init__(self, frame: Frame) -> None:
        super().__init__(f"{frame.headers.get('truenext-code')}: {frame.headers.get('message')}")
        self.frame = frame
        """ERROR of the broker."""

    @property
    def code(self) -> str:
        return self.frame.headers["truenext-code"]

    @property
    def text(self) -> str:
        return self.frame.body.decode() or self.frame.headers["message"]


class UserClient(RawClient):
    """Client with a login. It names destinations by the prefix of its case."""

    def __init__(
        self,
        port: int,
        user: str,
        prefix: str = "",
        *,
        password: str = PASSWORD,
        client_id: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(port)
        self.prefix = prefix
        self.client_id = client_id
        self._asked_count = 0
        self._barrier_count = 0
        login = {"login": user, "passcode": password}
        self.send_connect("1.2", "0,0", client_id=client_id, headers=login | (headers or {}))

    @property
    def session(self) -> str:
        return self.connected.headers["session"]

    def name(self, word: str) -> str:
        return f"{self.prefix}.{word}"

    def queue(self, word: str) -> str:
        return f"/queue/{self.name(word)}"

    def topic(self, word: str) -> str:
        return f"/topic/{self.name(word)}"

    def request(self, command: str, headers: dict[str, str], body: bytes = b"") -> None:
        """Send a frame, and wait for its receipt. Raises: RequestRefused for an ERROR, also of an earlier frame"""
        receipt = self.new_receipt()
        self.send_frame(command, headers | {"receipt": receipt}, body)
        refusal: Frame | None = None
        while True:
            frame = self.next_frame()
            if frame.command == "MESSAGE":
                self._messages.append(frame)
            elif frame.command == "ERROR":
                refusal = frame
                if "truenext-frame" not in frame.headers:
                    self.await_end()
                    break
                if frame.headers.get("receipt-id") == receipt:
                    break
            else:
                assert (frame.command, frame.headers["receipt-id"]) == ("RECEIPT", receipt), frame
                break
        if refusal is not None:
            raise RequestRefused(refusal)

    def barrier(self) -> None:
        """Wait until all earlier frames are executed. Raises: RequestRefused if one was refused"""
        self._barrier_count += 1
        self.request("BEGIN", {"transaction": f"barrier {self._barrier_count}"})

    def send_to(self, destination: str, body: bytes = b"x", headers: Headers = NO_HEADERS) -> None:
        self.request("SEND", {"destination": destination, **headers}, body)

    def subscribe_to(self, destination: str, headers: Headers = NO_HEADERS) -> None:
        self.request("SUBSCRIBE", {"id": "s", "destination": destination, "ack": "client-individual", **headers})

    def unsubscribe_from(self, headers: Headers = NO_HEADERS) -> None:
        self.request("UNSUBSCRIBE", {"id": "s", **headers})

    def browse(self, destination: str, headers: Headers = NO_HEADERS) -> list[str]:
        """Return the bodies that a browser is shown."""
        self.request("SUBSCRIBE", {"id": "b", "destination": destination, "browser": "true", **headers})
        shown: list[Frame] = []
        while (message := self.message()).headers.get("browser") != "end":
            shown.append(message)
        self.request("UNSUBSCRIBE", {"id": "b"})
        return bodies(shown)

    def ask(self, verb: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a control request. Raises: RequestRefused"""
        self.ask_later(verb, body)
        return self.answer()

    def ask_later(self, verb: str, body: dict[str, Any] | None = None) -> None:
        if not self._asked_count:
            self.request("SUBSCRIBE", {"id": "answers", "destination": ANSWERS})
        self._asked_count += 1
        headers = {"destination": f"/control/{verb}", "reply-to": ANSWERS, "correlation-id": str(self._asked_count)}
        self.send_frame("SEND", headers, b"" if body is None else json.dumps(body).encode())

    def answer(self) -> Any:
        while True:
            frame = self.next_frame()
            if frame.command == "ERROR":
                if "truenext-frame" not in frame.headers:
                    self.await_end()
                raise RequestRefused(frame)
            if frame.headers.get("subscription") == "answers":
                assert frame.headers["correlation-id"] == str(self._asked_count)
                return json.loads(frame.body)
            self._keep(frame)

    def ask_all(self, verb: str, body: dict[str, Any]) -> Iterator[Any]:
        """Return the answers to all pieces of a piece of work."""
        answer = self.ask(verb, body)
        yield answer
        while answer["next"] is not None:
            answer = self.ask(verb, body | {"after": answer["next"], "until": answer["until"]})
            yield answer


# ---- The table ----


Kind = type[Any] | str
"""Command, or control verb."""


def nothing(root: UserClient) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Row:
    """Request, and all that it needs."""

    name: str
    kinds: tuple[Kind, ...]
    """What the request consists of."""
    needs: tuple[str, ...]
    """Rights, as RIGHT PATTERN; `monitor`, `admin`; and `client-id` for a client id of the user."""
    perform: Callable[[UserClient], object]
    """Makes the request; asserts what it returns."""
    prepare: Callable[[UserClient], object] = nothing
    """Makes what the request is about; called with a client of ROOT."""
    given: str = ""
    """A right that each user of this row has."""
    check: Callable[[UserClient, UserClient], object] | None = None
    """Asserts, with a client of ROOT and the user's, that the request took effect; None compares `state_of`."""
    is_truenext: bool = False
    """True if only a truenext client can make the request."""
    other_names: tuple[str, ...] = ()
    """Names by which an ERROR may name the destination, besides that of the right."""


def row(
    name: str, kinds: Kind | tuple[Kind, ...], needs: str, perform: Callable[[UserClient], object], **options: Any
) -> Row:
    """Return a row; `needs` are separated by commas."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return Row(name, kinds, tuple(needs.split(", ")) if needs else (), perform, **options)


def fill(root: UserClient, *words: str) -> None:
    for word in words or ("q",):
        root.send_to(root.queue(word), headers=RED)


def fill_reserved(root: UserClient) -> None:
    for word in RESERVED:
        root.send_to(f"/queue/{word}.{root.name('q')}")


def fill_dead_letters(root: UserClient) -> None:
    root.send_to(root.queue("q"), headers=RED)
    root.subscribe_to(root.queue("q"))
    root.nack(root.message(), headers={"truenext-reject": "true"}, confirmed=True)
    root.unsubscribe_from()


def named_subscription(client: UserClient) -> dict[str, str]:
    """Return the header that names the durable subscription of a case."""
    return {"activemq.subscriptionName": client.prefix}


def follow(root: UserClient, destination: str, headers: Headers = NO_HEADERS) -> None:
    """Make a durable subscription named by the prefix, which nobody uses."""
    root.subscribe_to(destination, {**named_subscription(root), **headers})
    root.unsubscribe_from()


def follow_topic(root: UserClient) -> None:
    follow(root, root.topic("t"))
    root.send_to(root.topic("t"), headers=RED)


def follow_pattern(root: UserClient) -> None:
    follow(root, root.topic(">"))
    root.send_to(root.topic("t"), headers=RED)


def follow_with_selector(root: UserClient) -> None:
    follow(root, root.topic("t"), {"selector": COMMAS})
    root.send_to(root.topic("t"), headers=RED)


def follow_virtual_topic(root: UserClient) -> None:
    root.send_to(f"/queue/Consumer.{root.prefix}.VirtualTopic.{root.prefix}")


def schedule(root: UserClient) -> None:
    root.send_to(root.queue("q"), headers=LATER | RED)


def schedule_for_topic(root: UserClient) -> None:
    root.send_to(root.topic("t"), headers=LATER | RED)


def schedule_for_several(root: UserClient) -> None:
    root.send_to(two_of(root), headers=LATER | RED)


def pause(root: UserClient) -> None:
    fill(root)
    root.ask("pause", {"queue": root.name("q")})


def pause_subscription(root: UserClient) -> None:
    follow_topic(root)
    root.ask("pause", {"queue": durable_name(root)})


def two_of(client: UserClient) -> str:
    return f"{client.queue('a')},{client.topic('t')}"


def three_of(client: UserClient) -> str:
    return f"{client.queue('a')},{client.queue('b')},{client.topic('t')}"


def durable_name(client: UserClient, topic: str = "t", selector: str = "") -> str:
    """Return the name of the queue of the durable subscription that `follow` makes."""
    name = f"subscription,{client.client_id},{client.prefix},{client.name(topic)}"
    return f"{name},{selector}" if selector else name


def in_transaction(client: UserClient, destination: str, headers: Headers = NO_HEADERS) -> None:
    client.send_frame("BEGIN", {"transaction": "t"})
    client.send_to(destination, headers={"transaction": "t", **headers})
    client.request("COMMIT", {"transaction": "t"})


def send_unconfirmed(client: UserClient, headers: Headers = NO_HEADERS) -> None:
    """Send as clients do that the broker serves fastest."""
    client.send_frame("SEND", {"destination": client.queue("q"), **headers}, b"x")
    client.barrier()


def told_of_failures(client: UserClient) -> dict[str, str]:
    """Return headers of a SEND that names a report and two handlers."""
    return {
        "truenext-report-to": client.topic("r"),
        "truenext-report-id": "i",
        "truenext-on-failure": f"{client.queue('h')} {client.queue('i')}",
    }


def send_in_one_write(client: UserClient) -> None:
    client.write(encode(Frame("SEND", {"destination": client.queue("q")}, b"x"), Version.V1_2) * 40)
    client.barrier()


def acknowledge_in_one_write(client: UserClient) -> None:
    client.subscribe_to(client.queue("q"))
    acks = [Frame("ACK", {"id": client.message().headers["ack"]}) for _ in range(40)]
    client.write(b"".join(encode(ack, Version.V1_2) for ack in acks))
    client.barrier()


def numbered_commit(client: UserClient) -> None:
    client.send_frame("BEGIN", {"transaction": "t"})
    client.send_to(client.queue("q"), headers={"transaction": "t"})
    client.request("COMMIT", {"transaction": "t"} | numbered(client.prefix, 1))


def gets_message(root: UserClient, client: UserClient) -> None:
    assert client.message().body == b"x"


def gets_what_is_published(root: UserClient, client: UserClient) -> None:
    root.send_to(root.topic("t"), b"news")
    assert client.message().body == b"news"


def gets_what_is_published_virtually(root: UserClient, client: UserClient) -> None:
    root.send_to(f"/topic/VirtualTopic.{root.prefix}", b"news")
    assert client.message().body == b"news"


def is_performed(root: UserClient, client: UserClient) -> None:
    """Check nothing more: `perform` has asserted all that there is to see."""


def expect(actual: object, expected: object) -> None:
    assert actual == expected


def ask_for_failover(client: UserClient) -> None:
    """Ask a broker that cannot hand over: it says so to a user who may ask."""
    with pytest.raises(RequestRefused) as refused:
        client.ask("failover")
    if refused.value.code != "control-request":
        raise refused.value
    assert "this broker has no log" in refused.value.text


def ask_for_backup(client: UserClient) -> None:
    """Ask a broker that has no folder for backups: it says so to a user who may ask."""
    with pytest.raises(RequestRefused) as refused:
        client.ask("backup")
    if refused.value.code != "control-request":
        raise refused.value
    assert "backup" in refused.value.text


def ask_to_close(client: UserClient) -> None:
    """Ask to close a connection that is not there: the broker says so to a user who may ask."""
    with pytest.raises(RequestRefused) as refused:
        client.ask("close", {"connection": "none"})
    if refused.value.code != "not-found":
        raise refused.value


def held_message(client: UserClient) -> Frame:
    client.subscribe_to(client.queue("q"))
    return client.message()


def acknowledge_in_transactions(client: UserClient) -> None:
    message = held_message(client)
    for end in ("ABORT", "COMMIT"):
        client.send_frame("BEGIN", {"transaction": end})
        client.ack(message, transaction=end)
        client.request(end, {"transaction": end})
        if end == "ABORT":
            message = client.message()


def pull(client: UserClient) -> None:
    client.subscribe_to(client.queue("q"), {"truenext-pull": "true"})
    client.request("SEND", {"destination": "/control/credit", "id": "s", "messages": "1"})
    client.ack(client.message(), confirmed=True)


def start_release_and_wake(client: UserClient) -> None:
    message = held_message(client)
    client.request("SEND", {"destination": "/control/started", "id": message.headers["ack"]})
    body = json.dumps({"subscriptions": ["s"], "suspend": True}).encode()
    client.request("SEND", {"destination": "/control/release"}, body)
    client.request("SEND", {"destination": "/control/wake", "id": "s"})
    client.ack(client.message(), confirmed=True)


def disconnect_and_forget(client: UserClient) -> None:
    client.send_frame("DISCONNECT", {"truenext-forget": json.dumps([client.prefix])}, confirmed=True)
    client.await_end()


def make_invalid_frame(client: UserClient) -> None:
    with pytest.raises(RequestRefused) as refused:
        client.request("ACK", {})
    assert refused.value.code == "header"


def use_own_temporaries(client: UserClient) -> None:
    for number, destination in enumerate(("/temp-queue/own", "/temp-topic/own")):
        client.request("SUBSCRIBE", {"id": str(number), "destination": destination})
        client.send_to(destination, destination.encode())
        assert client.message().body == destination.encode()


def send_request(root: UserClient) -> None:
    root.request("SUBSCRIBE", {"id": "own", "destination": "/temp-queue/own"})
    root.send_to(root.queue("q"), headers={"reply-to": "/temp-queue/own"})


def reply_to_root(client: UserClient) -> None:
    client.subscribe_to(client.queue("q"))
    client.send_to(client.message().headers["reply-to"], b"an answer")


def root_gets_answer(root: UserClient, client: UserClient) -> None:
    assert root.message().body == b"an answer"


COMMAS = "colour IN ('red', 'blue')"
SELECTOR = "colour = 'red'"


def work(verb: str, word: str = "q", **fields: Any) -> Callable[[UserClient], object]:
    """Return a function that asks for work on a queue of its case; `to` is a queue of its case, too."""

    def perform(client: UserClient) -> None:
        body: dict[str, Any] = {"queue": word if word.startswith("DLQ.") else client.name(word)} | fields
        body = {
            name: value.replace("{p}", client.prefix) if isinstance(value, str) else value
            for name, value in body.items()
        }
        expect(client.ask(verb, body)["moved"], 1)

    return perform


def durable_work(
    verb: str, topic: str = "t", *, subscription_selector: str = "", **fields: Any
) -> Callable[[UserClient], object]:
    def perform(client: UserClient) -> None:
        body = {"queue": durable_name(client, topic, subscription_selector)} | fields
        client.ask(verb, {name: text.replace("{p}", client.prefix) for name, text in body.items()})

    return perform


def topic_work(verb: str, to: Callable[[UserClient], str] | None, **fields: Any) -> Callable[[UserClient], object]:
    """Return a function that asks for work on scheduled sends that do not go to a single queue."""

    def perform(client: UserClient) -> None:
        target = {} if to is None else {"to": to(client)}
        answer = client.ask(verb, {"queue": ""} | target | fields)
        assert answer["moved"] == 1 if target else answer["moved"] >= 1

    return perform


def topic_of(client: UserClient) -> str:
    return client.topic("t")


SENDING = [
    row("SEND to a queue", (Send, ReceiptRequest), "send /queue/{p}.q", lambda c: c.send_to(c.queue("q"))),
    row("SEND to a bare name", Send, "send /queue/{p}.q", lambda c: c.send_to(c.name("q"))),
    row("SEND without a receipt", Send, "send /queue/{p}.q", send_unconfirmed),
    row("SENDs in one write", (Send, SendRun), "send /queue/{p}.q", send_in_one_write),
    row(
        "persistent SEND without a receipt",
        Send,
        "send /queue/{p}.q",
        lambda c: send_unconfirmed(c, {"persistent": "true", "priority": "9"}),
    ),
    row(
        "SEND with a reply-to",
        Send,
        "send /queue/{p}.q",
        lambda c: c.send_to(c.queue("q"), headers={"reply-to": c.queue("replies")}),
    ),
    row("numbered SEND", Send, "send /queue/{p}.q", lambda c: c.send_to(c.queue("q"), headers=numbered(c.prefix, 1))),
    row(
        "SEND to a topic",
        Send,
        "send /topic/{p}.t",
        lambda c: c.send_to(c.topic("t")),
        prepare=lambda r: follow(r, r.topic("t")),
    ),
    row(
        "SEND to a virtual topic",
        Send,
        "send /topic/VirtualTopic.{p}",
        lambda c: c.send_to(f"/topic/VirtualTopic.{c.prefix}"),
        prepare=follow_virtual_topic,
    ),
    row("SEND in a transaction", (Begin, Send, Commit), "send /queue/{p}.q", lambda c: in_transaction(c, c.queue("q"))),
    row(
        "SEND to a topic in a transaction",
        (Begin, Send, Commit),
        "send /topic/{p}.t",
        lambda c: in_transaction(c, c.topic("t")),
        prepare=lambda r: follow(r, r.topic("t")),
    ),
    row("SEND in a transaction with a number", (Begin, Send, Commit), "send /queue/{p}.q", numbered_commit),
    row("scheduled SEND", Send, "send /queue/{p}.q", lambda c: c.send_to(c.queue("q"), headers=LATER)),
    row("scheduled SEND to a topic", Send, "send /topic/{p}.t", lambda c: c.send_to(c.topic("t"), headers=LATER)),
    row(
        "scheduled SEND in a transaction",
        (Begin, Send, Commit),
        "send /queue/{p}.q",
        lambda c: in_transaction(c, c.queue("q"), {"AMQ_SCHEDULED_CRON": "0 0 1 1 *"}),
    ),
    row(
        "SEND to several destinations",
        Send,
        "send /queue/{p}.a, send /queue/{p}.b, send /topic/{p}.t",
        lambda c: c.send_to(three_of(c)),
        prepare=lambda r: follow(r, r.topic("t")),
    ),
    row(
        "SEND to several destinations in a transaction",
        (Begin, Send, Commit),
        "send /queue/{p}.a, send /topic/{p}.t",
        lambda c: in_transaction(c, two_of(c)),
    ),
    row(
        "scheduled SEND to several destinations",
        Send,
        "send /queue/{p}.a, send /topic/{p}.t",
        lambda c: c.send_to(two_of(c), headers=LATER),
    ),
    *(
        row(
            f"{name} with a report and handlers",
            kinds,
            "send /queue/{p}.q, send /topic/{p}.r, send /queue/{p}.h, send /queue/{p}.i",
            perform,
        )
        for name, kinds, perform in (
            ("SEND", Send, lambda c: c.send_to(c.queue("q"), headers=told_of_failures(c))),
            ("scheduled SEND", Send, lambda c: c.send_to(c.queue("q"), headers=LATER | told_of_failures(c))),
            (
                "SEND in a transaction",
                (Begin, Send, Commit),
                lambda c: in_transaction(c, c.queue("q"), told_of_failures(c)),
            ),
        )
    ),
    row(
        "SEND with a report to a queue",
        Send,
        "send /queue/{p}.q, send /queue/{p}.r",
        lambda c: c.send_to(c.queue("q"), headers={"truenext-report-to": c.queue("r"), "truenext-report-id": "i"}),
    ),
    *(
        row(
            f"SEND to a queue {word}.",
            Send,
            f"send /queue/{word}.{{p}}.q",
            lambda c, word=word: c.send_to(f"/queue/{word}.{c.name('q')}"),  # type: ignore[misc]
        )
        for word in RESERVED
    ),
]

TAKING = [
    row(
        "SUBSCRIBE to a queue",
        Subscribe,
        "take /queue/{p}.q",
        lambda c: c.subscribe_to(c.queue("q")),
        prepare=fill,
        check=gets_message,
    ),
    row("SUBSCRIBE to a new queue", Subscribe, "take /queue/{p}.q", lambda c: c.subscribe_to(c.queue("q"))),
    row(
        "SUBSCRIBE to a bare name in auto mode",
        Subscribe,
        "take /queue/{p}.q",
        lambda c: c.subscribe_to(c.name("q"), {"ack": "auto"}),
        prepare=fill,
        check=gets_message,
    ),
    row(
        "SUBSCRIBE with options",
        Subscribe,
        "take /queue/{p}.q",
        lambda c: c.subscribe_to(f"{c.queue('q')}?consumer.priority=3&consumer.exclusive=true"),
    ),
    row(
        "SUBSCRIBE with a selector",
        Subscribe,
        "take /queue/{p}.q",
        lambda c: c.subscribe_to(c.queue("q"), {"selector": SELECTOR}),
        prepare=fill,
        check=gets_message,
    ),
    row(
        "SUBSCRIBE to a pattern of queues",
        Subscribe,
        "take /queue/{p}.>",
        lambda c: c.subscribe_to(c.queue(">")),
        prepare=fill,
        check=gets_message,
    ),
    row(
        "SUBSCRIBE to a pattern with *",
        Subscribe,
        "take /queue/{p}.*",
        lambda c: c.subscribe_to(c.queue("*")),
        prepare=fill,
        check=gets_message,
    ),
    *(
        row(
            f"SUBSCRIBE to a queue {word}.",
            Subscribe,
            f"take /queue/{word}.{{p}}.q",
            lambda c, word=word: c.subscribe_to(f"/queue/{word}.{c.name('q')}"),  # type: ignore[misc]
            prepare=fill_reserved,
            check=gets_message,
        )
        for word in RESERVED
    ),
    *(
        row(
            f"SUBSCRIBE to a pattern {word}.",
            Subscribe,
            f"take /queue/{word}.{{p}}.>",
            lambda c, word=word: c.subscribe_to(f"/queue/{word}.{c.name('>')}"),  # type: ignore[misc]
            prepare=fill_reserved,
            check=gets_message,
        )
        for word in RESERVED
    ),
    row(
        "SUBSCRIBE to a topic",
        Subscribe,
        "take /topic/{p}.t",
        lambda c: c.subscribe_to(c.topic("t")),
        check=gets_what_is_published,
    ),
    row(
        "SUBSCRIBE to a pattern of topics",
        Subscribe,
        "take /topic/{p}.>",
        lambda c: c.subscribe_to(c.topic(">")),
        check=gets_what_is_published,
    ),
    row(
        "SUBSCRIBE to a virtual topic",
        Subscribe,
        "take /topic/VirtualTopic.{p}",
        lambda c: c.subscribe_to(f"/topic/VirtualTopic.{c.prefix}"),
        check=gets_what_is_published_virtually,
    ),
    row(
        "SUBSCRIBE as a durable subscription",
        Subscribe,
        "take /topic/{p}.t, client-id",
        lambda c: c.subscribe_to(c.topic("t"), DURABLE),
        other_names=("/subscription/{c},s",),
    ),
    row(
        "SUBSCRIBE as a durable subscription to a pattern",
        Subscribe,
        "take /topic/{p}.>, client-id",
        lambda c: c.subscribe_to(c.topic(">"), named_subscription(c)),
        other_names=("/subscription/{c},{p}",),
    ),
    row(
        "SUBSCRIBE to a durable subscription that has messages",
        Subscribe,
        "take /topic/{p}.t, client-id",
        lambda c: c.subscribe_to(c.topic("t"), named_subscription(c)),
        prepare=follow_topic,
        check=gets_message,
        other_names=("/subscription/{c},{p}",),
    ),
    row(
        "SUBSCRIBE that ends a durable subscription to another topic",
        Subscribe,
        "take /topic/{p}.new, client-id",
        lambda c: c.subscribe_to(c.topic("new"), named_subscription(c)),
        prepare=follow_topic,
        other_names=("/subscription/{c},{p}",),
    ),
    row(
        "UNSUBSCRIBE that ends a durable subscription",
        Unsubscribe,
        "client-id",
        lambda c: c.unsubscribe_from(named_subscription(c)),
        prepare=follow_topic,
    ),
]

BROWSING = [
    row(
        "browse a queue",
        (Browse, Unsubscribe),
        "browse /queue/{p}.q",
        lambda c: expect(c.browse(c.queue("q")), ["x"]),
        prepare=fill,
        check=is_performed,
    ),
    row(
        "browse a queue with a selector",
        Browse,
        "browse /queue/{p}.q",
        lambda c: expect(c.browse(c.queue("q"), {"selector": SELECTOR}), ["x"]),
        prepare=fill,
        check=is_performed,
    ),
    row(
        "browse a queue that is not there",
        Browse,
        "browse /queue/{p}.q",
        lambda c: expect(c.browse(c.queue("q")), []),
        check=is_performed,
    ),
    row(
        "browse dead letters",
        Browse,
        "browse /queue/DLQ.{p}.q",
        lambda c: expect(c.browse(f"/queue/DLQ.{c.name('q')}"), ["x"]),
        prepare=fill_dead_letters,
        check=is_performed,
    ),
    row(
        "browse a durable subscription",
        Browse,
        "browse /topic/{p}.t, client-id",
        lambda c: expect(c.browse(f"/subscription/{c.client_id},{c.prefix}"), ["x"]),
        prepare=follow_topic,
        check=is_performed,
        other_names=("/subscription/{c},{p}", "subscription,{c},{p},{p}.t"),
    ),
    row(
        "browse a durable subscription to a pattern",
        Browse,
        "browse /topic/{p}.>, client-id",
        lambda c: expect(c.browse(f"/subscription/{c.client_id},{c.prefix}"), ["x"]),
        prepare=follow_pattern,
        check=is_performed,
        other_names=("/subscription/{c},{p}", "subscription,{c},{p},{p}.>"),
    ),
]

MANAGING = [
    row(
        "pause",
        (ControlRequest, "pause"),
        "manage /queue/{p}.q",
        lambda c: c.ask("pause", {"queue": c.name("q")}),
        prepare=fill,
    ),
    row(
        "pause of a queue that is not there",
        "pause",
        "manage /queue/{p}.q",
        lambda c: c.ask("pause", {"queue": c.name("q")}),
    ),
    row("resume", "resume", "manage /queue/{p}.q", lambda c: c.ask("resume", {"queue": c.name("q")}), prepare=pause),
    row("purge", "purge", "manage /queue/{p}.q", work("purge"), prepare=fill),
    row(
        "purge that only counts",
        "purge",
        "manage /queue/{p}.q",
        work("purge", dry_run=True),
        prepare=fill,
        check=is_performed,
    ),
    row(
        "purge of dead letters",
        "purge",
        "manage /queue/DLQ.{p}.q",
        work("purge", "DLQ.{p}.q"),
        prepare=fill_dead_letters,
    ),
    row(
        "purge with a selector",
        "purge",
        "manage /queue/{p}.q, browse /queue/{p}.q",
        work("purge", selector=SELECTOR),
        prepare=fill,
    ),
    row(
        "purge that only counts with a selector",
        "purge",
        "manage /queue/{p}.q, browse /queue/{p}.q",
        work("purge", selector=SELECTOR, dry_run=True),
        prepare=fill,
        check=is_performed,
    ),
    row("redrive", "redrive", "manage /queue/DLQ.{p}.q", work("redrive", "DLQ.{p}.q"), prepare=fill_dead_letters),
    row(
        "redrive with a selector",
        "redrive",
        "manage /queue/DLQ.{p}.q, browse /queue/DLQ.{p}.q",
        work("redrive", "DLQ.{p}.q", selector=SELECTOR),
        prepare=fill_dead_letters,
    ),
    row(
        "purge of a group",
        "purge",
        "manage /queue/{p}.q, browse /queue/{p}.q",
        work("purge", group={"cause": ""}),
        prepare=fill,
    ),
    row(
        "redrive of a group",
        "redrive",
        "manage /queue/DLQ.{p}.q, browse /queue/DLQ.{p}.q",
        work("redrive", "DLQ.{p}.q", group={"reason": "rejected"}),
        prepare=fill_dead_letters,
    ),
    row(
        "move of a group",
        "move",
        "manage /queue/{p}.q, browse /queue/{p}.q, send /queue/{p}.to",
        work("move", to="{p}.to", group={"origin": ""}),
        prepare=fill,
    ),
    row(
        "dead-letters",
        "dead-letters",
        "browse /queue/DLQ.{p}.q",
        work("dead-letters", "DLQ.{p}.q"),
        prepare=fill_dead_letters,
        check=is_performed,
    ),
    row("move", "move", "manage /queue/{p}.q, send /queue/{p}.to", work("move", to="{p}.to"), prepare=fill),
    row(
        "move to a dead-letter queue",
        "move",
        "manage /queue/{p}.q, send /queue/DLQ.{p}.to",
        work("move", to="DLQ.{p}.to"),
        prepare=fill,
    ),
    row(
        "move with a selector",
        "move",
        "manage /queue/{p}.q, browse /queue/{p}.q, send /queue/{p}.to",
        work("move", to="{p}.to", selector=SELECTOR),
        prepare=fill,
    ),
    row("unschedule", "unschedule", "manage /queue/{p}.q", work("unschedule"), prepare=schedule),
    row(
        "unschedule with a selector",
        "unschedule",
        "manage /queue/{p}.q, browse /queue/{p}.q",
        work("unschedule", selector=SELECTOR),
        prepare=schedule,
    ),
    row(
        "unschedule for a topic",
        "unschedule",
        "manage /topic/{p}.t",
        topic_work("unschedule", topic_of),
        prepare=schedule_for_topic,
    ),
    row(
        "unschedule for several destinations",
        "unschedule",
        "manage /queue/{p}.a, manage /topic/{p}.t",
        topic_work("unschedule", two_of),
        prepare=schedule_for_several,
    ),
    row(
        "unschedule for several destinations with a selector",
        "unschedule",
        "manage /queue/{p}.a, manage /topic/{p}.t, browse /queue/{p}.a, browse /topic/{p}.t",
        topic_work("unschedule", two_of, selector=SELECTOR),
        prepare=schedule_for_several,
    ),
    row("unschedule for all topics", "unschedule", "admin", topic_work("unschedule", None), prepare=schedule_for_topic),
    row(
        "scheduled",
        "scheduled",
        "browse /queue/{p}.q",
        lambda c: expect(c.ask("scheduled", {"queue": c.name("q")})["sends"][0]["body"], "x"),
        prepare=schedule,
        check=is_performed,
    ),
    row(
        "scheduled for a topic",
        "scheduled",
        "browse /topic/{p}.t",
        topic_work("scheduled", topic_of),
        prepare=schedule_for_topic,
        check=is_performed,
    ),
    row(
        "scheduled for several destinations",
        "scheduled",
        "browse /queue/{p}.a, browse /topic/{p}.t",
        topic_work("scheduled", two_of),
        prepare=schedule_for_several,
        check=is_performed,
    ),
    row(
        "scheduled for all topics",
        "scheduled",
        "admin",
        topic_work("scheduled", None),
        prepare=schedule_for_topic,
        check=is_performed,
    ),
]

_DURABLE_NAMES = ("subscription,{c},{p},{p}.t", "/subscription/{c},{p}")

MANAGING_SUBSCRIPTIONS = [
    row(
        "pause of a durable subscription",
        "pause",
        "manage /topic/{p}.t",
        durable_work("pause"),
        prepare=follow_topic,
        other_names=_DURABLE_NAMES,
    ),
    row(
        "resume of a durable subscription",
        "resume",
        "manage /topic/{p}.t",
        durable_work("resume"),
        prepare=pause_subscription,
        other_names=_DURABLE_NAMES,
    ),
    row(
        "purge of a durable subscription",
        "purge",
        "manage /topic/{p}.t",
        durable_work("purge"),
        prepare=follow_topic,
        other_names=_DURABLE_NAMES,
    ),
    row(
        "purge of a durable subscription to a pattern",
        "purge",
        "manage /topic/{p}.>",
        durable_work("purge", ">"),
        prepare=follow_pattern,
        other_names=("subscription,{c},{p},{p}.>", "/subscription/{c},{p}"),
    ),
    row(
        "purge of a durable subscription with a selector",
        "purge",
        "manage /topic/{p}.t",
        durable_work("purge", subscription_selector=COMMAS),
        prepare=follow_with_selector,
        other_names=_DURABLE_NAMES,
    ),
    row(
        "purge with a selector of a durable subscription",
        "purge",
        "manage /topic/{p}.t, browse /topic/{p}.t",
        durable_work("purge", selector=SELECTOR),
        prepare=follow_topic,
        other_names=_DURABLE_NAMES,
    ),
    row(
        "move of a durable subscription",
        "move",
        "manage /topic/{p}.t, send /queue/{p}.to",
        durable_work("move", to="{p}.to"),
        prepare=follow_topic,
        other_names=_DURABLE_NAMES,
    ),
]

BROKER = [
    row(
        "queues",
        "queues",
        "",
        lambda c: expect([each["name"] for each in c.ask("queues") if c.prefix in each["name"]], []),
        prepare=fill,
        check=is_performed,
    ),
    row("history", "history", "monitor", lambda c: expect(c.ask("history")["error"], ""), check=is_performed),
    row("status", "status", "monitor", lambda c: c.ask("status")["memory"], check=is_performed),
    row("connections", "connections", "monitor", lambda c: c.ask("connections")[0], check=is_performed),
    row("close", "close", "admin", ask_to_close, check=is_performed),
    row("security", "security", "admin", lambda c: c.ask("security"), check=is_performed),
    row(
        "consumers",
        "consumers",
        "",
        lambda c: expect(c.ask("consumers", {"queue": c.name("q")}), []),
        prepare=fill,
        given="send {p}.q",
        check=is_performed,
    ),
    row(
        "policy",
        "policy",
        "",
        lambda c: expect(c.ask("policy", {"queue": c.name("q")})["queue"], c.name("q")),
        prepare=fill,
        given="manage {p}.*",
        check=is_performed,
    ),
    row("reload", "reload", "admin", lambda c: expect(c.ask("reload")["errors"], []), check=is_performed),
    row("failover", "failover", "admin", ask_for_failover, check=is_performed),
    row("backup", "backup", "admin", ask_for_backup, check=is_performed),
    row(
        "producer",
        "producer",
        "",
        lambda c: expect(c.ask("producer", {"producer": c.prefix})["known"], False),
        given="take {p}.other",
        check=is_performed,
    ),
    row("connection", "connection", "", lambda c: c.ask("connection")["subscriptions"], check=is_performed),
]

_TAKE = "take /queue/{p}.q"

OWN_MESSAGES = [
    row("CONNECT", Login, "", lambda c: c.barrier(), check=is_performed),
    row("invalid frame", InvalidFrame, "", make_invalid_frame, check=is_performed, is_truenext=True),
    row("ACK", Ack, "", lambda c: c.ack(held_message(c), confirmed=True), prepare=fill, given=_TAKE),
    row(
        "ACKs in one write",
        (Ack, AckRun),
        "",
        acknowledge_in_one_write,
        prepare=lambda root: fill(root, *["q"] * 40),
        given=_TAKE,
    ),
    row("NACK", Nack, "", lambda c: c.nack(held_message(c), confirmed=True), prepare=fill, given=_TAKE),
    row(
        "NACK that rejects",
        Nack,
        "",
        lambda c: c.nack(held_message(c), headers={"truenext-reject": "true"}, confirmed=True),
        prepare=fill,
        given=_TAKE,
    ),
    row("ACK in transactions", (Begin, Ack, Abort, Commit), "", acknowledge_in_transactions, prepare=fill, given=_TAKE),
    row("credit", (Credit, "credit"), "", pull, prepare=fill, given=_TAKE),
    row(
        "started, release and wake",
        (Started, "started", Release, "release", Wake, "wake"),
        "",
        start_release_and_wake,
        prepare=fill,
        given=_TAKE,
        is_truenext=True,
    ),
    row("DISCONNECT", Disconnect, "", disconnect_and_forget, check=is_performed),
    row("own temporary queue and topic", (Subscribe, Send), "", use_own_temporaries, check=is_performed),
    row(
        "SEND to the temporary queue in the reply-to of a message",
        Send,
        "",
        reply_to_root,
        prepare=send_request,
        given="take /queue/{p}.q",
        check=root_gets_answer,
    ),
]

ROWS = [*SENDING, *TAKING, *BROWSING, *MANAGING, *MANAGING_SUBSCRIPTIONS, *BROKER, *OWN_MESSAGES]


# ---- Cases ----


@dataclass(frozen=True)
class Variant:
    """What a user has."""

    name: str
    has: Sequence[str]
    """Rights and flags."""
    lacks: str | None = None
    """Need that the user lacks; None if it has all."""
    by_role: bool = False
    client_id: str = "{u}"
    client_ids: Sequence[str] = ()
    has_owner_tried: bool = False
    """True if a user with all rights makes the same request before."""


def variants(row: Row) -> Iterator[Variant]:
    needs = list(row.needs)
    yield Variant("held", needs)
    if not needs:
        return
    yield Variant("held by patterns", [wider(need) for need in needs])
    yield Variant("held by a role", needs, by_role=True)
    if "client-id" in needs:
        yield Variant("held with a name after the user's", needs, client_id="{u}.till")
        yield Variant("held with a listed client id", needs, client_id="till.{p}", client_ids=["till.{p}"])
    for at, need in enumerate(needs):
        others = needs[:at] + needs[at + 1 :]
        of = f" ({need})" if len(needs) > 1 else ""
        if need == "client-id":
            for what, client_id in (("not listed", "till.{p}"), ("that only begins alike", "{u}x")):
                yield Variant(f"client id {what}", others, need, client_id=client_id, client_ids=["till"])
            continue
        yield Variant(f"missing{of}", others, need)
        if need in FLAGS:
            all_others = [f"{right} {pattern}" for right in RIGHTS for pattern in EVERYWHERE]
            yield Variant(f"all but {need}", [*all_others, *(flag for flag in FLAGS if flag != need)], need)
            continue
        right, pattern = need.split()
        yield Variant(f"too narrow{of}", [*others, *(f"{right} {each}" for each in narrower(pattern))], need)
        yield Variant(f"of the other kind{of}", [*others, f"{right} {of_other_kind(pattern)}"], need)
        foreign = [f"{each} {pattern}" for each in RIGHTS if each != right and f"{each} {pattern}" not in needs]
        yield Variant(f"other rights{of}", [*others, *foreign, *FLAGS], need)
        if any(pattern.split("/")[-1].startswith(f"{word}.") for word in RESERVED):
            rest = pattern.partition(".")[2]
            yield Variant(f"too wide a first word{of}", [*others, f"{right} >", f"{right} *.{rest}"], need)
    if needs != ["client-id"]:
        yield Variant("another user's", [], needs[0], has_owner_tried=True, client_id="till.{p}")


def wider(need: str) -> str:
    """Return a need with > in place of all words but the first."""
    return need if need in (*FLAGS, "client-id") else need.partition(".")[0] + ".>"


def narrower(pattern: str) -> list[str]:
    """Return patterns that cover a part of a pattern each, or names like it."""
    stem, _, last = pattern.rpartition(".")
    if last == ">":
        # Together they cover it.
        return [f"{stem}.*", f"{stem}.*.>", f"{stem}.q", f"{stem}.t"]
    if last == "*":
        return [f"{stem}.q", f"{stem}.a", f"{stem}.*.*"]
    return [f"{pattern}.>", f"{pattern}.*", f"{pattern}q", stem, f"{stem}.*.*"]


def of_other_kind(pattern: str) -> str:
    kind, _, words = pattern[1:].partition("/")
    return f"/{'queue' if kind == 'topic' else 'topic'}/{words}"


@dataclass(frozen=True)
class Case:
    number: int
    row: Row
    variant: Variant

    @property
    def prefix(self) -> str:
        return f"c{self.number:04d}"

    @property
    def user(self) -> str:
        return f"user-{self.prefix}"

    def filled_in(self, text: str) -> str:
        """Replace the placeholders of a text."""
        client_id = self.variant.client_id.replace("{u}", self.user)
        return text.replace("{c}", client_id).replace("{u}", self.user).replace("{p}", self.prefix)

    @property
    def client_id(self) -> str:
        return self.filled_in(self.variant.client_id)


def _cases() -> list[Case]:
    pairs = [(row, variant) for row in ROWS for variant in variants(row)]
    return [Case(number, row, variant) for number, (row, variant) in enumerate(pairs)]


CASES = _cases()


@cache
def passwords(text: str) -> str:
    """Return the line of a user with this password, hashed once in a run of the tests."""
    return f"passwords = {json.dumps([hash_password(text)])}"


@dataclass
class UserText:
    """Users file in the making."""

    tables: list[str] = field(default_factory=list)

    def add(
        self,
        user: str,
        has: Sequence[str],
        *,
        client_ids: Sequence[str] = (),
        roles: Sequence[str] = (),
        credentials: str | None = None,
    ) -> None:
        """`credentials` is the line of the user's passwords; None is PASSWORD."""
        lines = [f'[user."{user}"]', credentials or SHARED_PASSWORD, *_grant_lines(has)]
        if client_ids:
            lines.append(f"client_ids = {json.dumps(list(client_ids))}")
        if roles:
            lines.append(f"roles = {json.dumps(list(roles))}")
        self.tables.append("\n".join(lines))

    def add_role(self, role: str, has: Sequence[str]) -> None:
        self.tables.append("\n".join([f'[role."{role}"]', *_grant_lines(has)]))

    def write(self, file: Path) -> None:
        """Replace the file in one step, readable and writable by its owner alone, beside the file of PASSWORD."""
        shared = file.with_name("password")
        if not shared.exists():
            shared.touch(mode=0o600)
            shared.write_text(PASSWORD)
        new = file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text("\n\n".join(self.tables) + "\n")
        new.rename(file)


def _grant_lines(has: Sequence[str]) -> Iterator[str]:
    for right in RIGHTS:
        if patterns := [each.removeprefix(f"{right} ") for each in has if each.startswith(f"{right} ")]:
            yield f"{right} = {json.dumps(patterns)}"
    for flag in FLAGS:
        if flag in has:
            yield f"{flag} = true"


EVERYTHING = [*(f"{right} {pattern}" for right in RIGHTS for pattern in EVERYWHERE), *FLAGS]

EXTRA_USERS: dict[str, list[str]] = {
    "sender": ["send seen.a", "send /topic/seen.t"],
    "taker": ["take seen.b.*"],
    "browser": ["browse seen.c"],
    "manager": ["manage seen.d.>", "manage DLQ.seen.>"],
    "wide": [f"{right} >" for right in RIGHTS],
    "stranger": ["send /topic/>"],
    "watchman": ["monitor"],
    "half": ["send half.open"],
    "everywhere": EVERYTHING,
}


def users_of(cases: Sequence[Case]) -> UserText:
    """Return the users of some cases, and those of the other tests."""
    users = UserText()
    users.add(ROOT, EVERYTHING, client_ids=sorted({case.client_id for case in cases}))
    for name, has in EXTRA_USERS.items():
        users.add(name, has)
    for case in cases:
        has = [case.filled_in(each) for each in (*case.variant.has, case.row.given)]
        client_ids = [case.filled_in(each) for each in case.variant.client_ids]
        if case.variant.by_role:
            users.add_role(f"role-{case.prefix}", has)
            users.add(case.user, (), client_ids=client_ids, roles=[f"role-{case.prefix}"])
        else:
            users.add(case.user, has, client_ids=client_ids)
    return users


@pytest.fixture(scope="module")
def guarded_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Running broker with the users of all cases."""
    folder = tmp_path_factory.mktemp("guarded")
    file = folder / "users.toml"
    users_of(CASES).write(file)
    broker = BrokerProcess(folder, ["--users", str(file)])
    with broker.running():
        yield broker


@pytest.fixture
def connect(guarded_broker: BrokerProcess) -> Iterator[Callable[..., UserClient]]:
    """Return connected clients, which are closed with the test."""
    clients: list[UserClient] = []

    def new(user: str, prefix: str = "", **options: Any) -> UserClient:
        clients.append(UserClient(guarded_broker.port, user, prefix, **options))
        return clients[-1]

    yield new
    for client in clients:
        client.close()
    assert guarded_broker.is_running, f"the broker has ended, log:\n{guarded_broker.log}"
    guarded_broker.check_log()


def state_of(root: UserClient) -> object:
    """Return all that the broker has under the prefix of a case."""
    queues = {queue["name"]: queue for queue in root.ask("queues") if root.prefix in queue["name"]}
    for queue in queues.values():
        # These change with the time.
        for name in ("oldest_s", "held_s", "rate"):
            queue.pop(name, None)
    answers = root.ask_all("scheduled", {"queue": ""})
    return queues, [send for answer in answers for send in answer["sends"] if root.prefix in send["to"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row.name}: {case.variant.name}")
def test_request_with_all_its_rights_is_executed_and_without_one_is_refused(
    connect: Callable[..., UserClient], case: Case
) -> None:
    # C23.1
    row = case.row
    root = connect(ROOT, case.prefix, client_id=case.client_id)
    row.prepare(root)
    if case.variant.has_owner_tried:
        row.perform(connect(ROOT, case.prefix, client_id=case.client_id, headers=TRUENEXT_CLIENT))
    before = state_of(root)
    for is_truenext in (True,) if row.is_truenext else (False, True):
        client = connect(
            case.user, case.prefix, client_id=case.client_id, headers=TRUENEXT_CLIENT if is_truenext else {}
        )
        if case.variant.lacks is None:
            row.perform(client)
            if row.check is not None:
                row.check(root, client)
            else:
                await_change(root, before)
            return
        with pytest.raises(RequestRefused) as refused:
            row.perform(client)
        check_refusal(case, refused.value, is_truenext=is_truenext)
        assert state_of(root) == before
        if is_truenext:
            # The connection goes on, and the refused request has left nothing there that takes messages.
            root.send_to(root.topic("t"))
            root.send_to(f"/topic/VirtualTopic.{root.prefix}")
            assert client.arrived() == []


def await_change(root: UserClient, before: object) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while state_of(root) == before:
        assert time.monotonic() < deadline, f"nothing has changed: {before}"
        time.sleep(0.01)


def check_refusal(case: Case, refusal: RequestRefused, *, is_truenext: bool) -> None:
    assert refusal.code == "forbidden", refusal.text
    assert ("truenext-frame" in refusal.frame.headers) is is_truenext
    text = refusal.text
    assert f"user {case.user!r}" in text
    lacking = case.row.needs if case.variant.has_owner_tried else [case.variant.lacks or ""]
    named = [case.filled_in(need) for need in lacking]
    assert any(is_named(case, need, text) for need in named), f"{text!r} names none of {named}"


def is_named(case: Case, need: str, text: str) -> bool:
    """Return whether a text names what is lacking: right and destination, flag, or client id."""
    if need == "client-id":
        return case.client_id in text
    if need in FLAGS:
        return "may not" in text and f"this needs the right {need}" in text
    right, _, address = need.partition(" ")
    names = [address, *(case.filled_in(each) for each in case.row.other_names)]
    return f"may not {right}" in text and any(name in text for name in names)


def test_each_command_and_each_control_verb_has_a_row() -> None:
    kinds = {kind for row in ROWS for kind in row.kinds}
    assert {kind for kind in kinds if not isinstance(kind, str)} == set(get_args(Command)) - JMS_COMMANDS
    assert {kind for kind in kinds if isinstance(kind, str)} == {*VERB_CHECKS, *ACTION_PARSERS} - {drain.VERB}


@pytest.mark.parametrize("user", [ROOT, "half"])
def test_control_verb_that_does_not_exist_is_refused_as_one(connect: Callable[..., UserClient], user: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        connect(user).ask("nothing")
    assert refused.value.code == "control-request", refused.value.text


# ---- What the table does not show ----


def test_refusal_does_not_tell_whether_the_destination_exists(connect: Callable[..., UserClient]) -> None:
    # C23.1
    root = connect(ROOT, "there", client_id=ROOT)
    fill(root, "known")
    follow(root, root.topic("known"))

    def refusals(word: str) -> Iterator[str]:
        requests: list[Callable[[UserClient], object]] = [
            lambda c: c.send_to(c.queue(word)),
            lambda c: c.subscribe_to(c.queue(word)),
            lambda c: c.browse(c.queue(word)),
            *(
                lambda c, verb=verb: c.ask(verb, {"queue": c.name(word)})
                for verb in ("pause", "resume", "purge", "redrive", "dead-letters", "scheduled", "unschedule")
            ),
            lambda c: c.ask("move", {"queue": c.name(word), "to": "half.open"}),
            lambda c: c.ask("purge", {"queue": f"subscription,{ROOT},there,there.{word}"}),
            lambda c: c.browse(f"/subscription/{ROOT},{'there' if word == 'known' else word}"),
            lambda c: c.unsubscribe_from({"activemq.subscriptionName": "there" if word == "known" else word}),
        ]
        for request in requests:
            with pytest.raises(RequestRefused) as refused:
                request(connect("half", "there", client_id=ROOT))
            assert refused.value.code == "forbidden", refused.value.text
            yield refused.value.text.replace(word, "WORD").replace(f"{ROOT},there", f"{ROOT},WORD")

    assert list(refusals("known")) == list(refusals("unknown"))


def test_queues_are_listed_for_users_with_any_right_on_them(connect: Callable[..., UserClient]) -> None:
    root = connect(ROOT, "seen")
    fill(root, "a", "b.x", "b.x.y", "c", "d.x", "other")
    fill_dead_letters(connect(ROOT, "seen"))

    def listed(user: str) -> set[str]:
        names = {queue["name"] for queue in connect(user).ask("queues")}
        return {name for name in names if "seen" in name}

    everything = {f"seen.{word}" for word in ("a", "b.x", "b.x.y", "c", "d.x", "other", "q")} | {"DLQ.seen.q"}
    assert {user: listed(user) for user in EXTRA_USERS} == {
        "sender": {"seen.a"},
        "taker": {"seen.b.x"},
        "browser": {"seen.c"},
        "manager": {"seen.d.x", "DLQ.seen.q"},
        "wide": everything - {"DLQ.seen.q"},
        "stranger": set(),
        "watchman": everything,
        "half": set(),
        "everywhere": everything,
    }


def test_durable_subscription_is_not_listed_for_a_user_without_rights(connect: Callable[..., UserClient]) -> None:
    root = connect(ROOT, "followed", client_id=ROOT)
    follow(root, root.topic("t"))
    names = {user: str(connect(user).ask("queues")) for user in ("half", "wide", "watchman")}
    assert {user: "followed" in text for user, text in names.items()} == {
        "half": False,
        "wide": False,
        "watchman": True,
    }


def test_users_that_ask_for_queues_at_the_same_time_get_their_own_answers(
    guarded_broker: BrokerProcess, connect: Callable[..., UserClient]
) -> None:
    """Equal requests share an answer if nothing tells them apart."""
    fill(connect(ROOT, "seen"), "a", "c")
    clients = {user: connect(user) for user in ("sender", "watchman", "browser", "half")}
    for client in clients.values():
        client.ask("connection")
    with guarded_broker.asleep():
        for client in clients.values():
            client.ask_later("queues")
    names = {user: {queue["name"] for queue in client.answer()} for user, client in clients.items()}
    assert (names["sender"], names["browser"], names["half"]) == ({"seen.a"}, {"seen.c"}, set())
    assert {"seen.a", "seen.c"} <= names["watchman"]


@pytest.mark.parametrize("end", ["COMMIT", "ABORT"])
def test_transaction_with_a_refused_send_can_only_be_aborted(connect: Callable[..., UserClient], end: str) -> None:
    root = connect(ROOT, "half")
    client = connect("half", "half", headers=TRUENEXT_CLIENT)
    client.send_frame("BEGIN", {"transaction": "t"})
    client.send_to(client.queue("open"), end.encode(), {"transaction": "t"})
    with pytest.raises(RequestRefused):
        client.send_to(client.queue("closed"), headers={"transaction": "t"})
    if end == "COMMIT":
        with pytest.raises(RequestRefused) as refused:
            client.request("COMMIT", {"transaction": "t"})
        assert refused.value.code == "rollback-only"
    client.request("ABORT", {"transaction": "t"})
    assert end not in root.browse(root.queue("open"))
    assert root.browse(root.queue("closed")) == []


@pytest.mark.parametrize("count", [1, 30], ids=["first of its shape", "of a known shape"])
@pytest.mark.parametrize("name", ["truenext-report-to", "truenext-on-failure"])
def test_named_report_or_handler_needs_its_right_at_each_send(
    connect: Callable[..., UserClient], name: str, count: int
) -> None:
    # C23.12
    client = connect("half", "half", headers=TRUENEXT_CLIENT)
    allowed, forbidden = ({name: client.queue(word)} for word in ("open", "closed"))
    if name == "truenext-report-to":
        allowed["truenext-report-id"] = forbidden["truenext-report-id"] = "i"
    for _ in range(count):
        client.send_to(client.queue("open"))
        client.send_to(client.queue("open"), headers=allowed)
        with pytest.raises(RequestRefused) as refused:
            client.send_to(client.queue("open"), headers=forbidden)
        assert refused.value.code == "forbidden"
        expected = (
            "user 'half' may not send to /queue/half.closed, which truenext-report-to or truenext-on-failure names"
        )
        assert refused.value.text == expected
    # Several SENDs of one write, of which the last one is refused.
    frames = [{"destination": client.queue("open")}] * 3 + [{"destination": client.queue("open")} | forbidden]
    client.write(b"".join(encode(Frame("SEND", headers, b"x"), Version.V1_2) for headers in frames))
    with pytest.raises(RequestRefused):
        client.send_to(client.queue("open"))


def test_refused_send_with_a_number_has_not_used_the_number(connect: Callable[..., UserClient]) -> None:
    client = connect("half", "half", headers=TRUENEXT_CLIENT)
    number = numbered("forbidden numbers", 1)
    with pytest.raises(RequestRefused):
        client.send_to(client.queue("closed"), headers=number)
    assert client.ask("producer", {"producer": "forbidden numbers"})["known"] is False
    client.send_frame("SEND", {"destination": client.queue("open"), "receipt": "r"} | number, b"numbered")
    assert client.await_receipt("r").headers.get("truenext-repeat") is None


_TEMPORARY_REQUESTS: dict[str, Callable[[UserClient, str], object]] = {
    "SUBSCRIBE": lambda c, session: c.subscribe_to(f"/remote-temp-queue/{session}/own"),
    "SUBSCRIBE to a topic": lambda c, session: c.subscribe_to(f"/remote-temp-topic/{session}/own"),
    "browse": lambda c, session: c.browse(f"/remote-temp-queue/{session}/own"),
    "pause": lambda c, session: c.ask("pause", {"queue": f"/{session}/own"}),
    "purge": lambda c, session: c.ask("purge", {"queue": f"/{session}/own"}),
    "consumers": lambda c, session: c.ask("consumers", {"queue": f"/{session}/own"}),
    "policy": lambda c, session: c.ask("policy", {"queue": f"/{session}/own"}),
    "dead-letters": lambda c, session: c.ask("dead-letters", {"queue": f"/{session}/own"}),
    "move": lambda c, session: c.ask("move", {"queue": f"/{session}/own", "to": "taken.away"}),
}


@pytest.mark.parametrize("request_name", _TEMPORARY_REQUESTS)
def test_temporary_queue_of_another_connection_is_closed_to_everything_but_send(
    connect: Callable[..., UserClient], request_name: str
) -> None:
    """A user with all rights is refused, too. test_reply_rights.py has SENDs of other users."""
    owner = connect("half")
    owner.request("SUBSCRIBE", {"id": "own", "destination": "/temp-queue/own", "ack": "client-individual"})
    owner.request("SUBSCRIBE", {"id": "topic", "destination": "/temp-topic/own"})
    with pytest.raises(RequestRefused) as refused:
        _TEMPORARY_REQUESTS[request_name](connect("everywhere"), owner.session)
    assert refused.value.code == "forbidden"
    connect("half").send_to(f"/remote-temp-queue/{owner.session}/own", b"still there")
    connect("half").send_to(f"/remote-temp-topic/{owner.session}/own", b"and this")
    assert sorted(bodies(owner.messages(2))) == ["and this", "still there"]


@pytest.mark.parametrize("reply_to", ["/queue/half.open", "/queue/half.closed", "/topic/half.t"])
def test_answer_goes_to_no_queue_of_others(connect: Callable[..., UserClient], reply_to: str) -> None:
    root = connect(ROOT, "half", client_id=ROOT)
    follow(root, root.topic("t"))
    before = state_of(root)
    client = connect("half")
    with pytest.raises(RequestRefused) as refused:
        client.request("SEND", {"destination": "/control/queues", "reply-to": reply_to})
    assert refused.value.code in ("control-request", "forbidden")
    assert state_of(root) == before


@pytest.mark.parametrize("word", RESERVED)
def test_consumer_of_all_queues_gets_nothing_that_its_grant_does_not_cover(
    connect: Callable[..., UserClient], word: str
) -> None:
    """The grant `>` allows a SUBSCRIBE to `/queue/>`, and no SUBSCRIBE to a queue with a reserved first word."""
    root = connect(ROOT, "hidden")
    client = connect("wide", headers=TRUENEXT_CLIENT)
    with pytest.raises(RequestRefused):
        client.subscribe_to(f"/queue/{word}.{root.name('q')}")
    client.subscribe_to("/queue/>", {"activemq.prefetchSize": "32767"})
    root.send_to(f"/queue/{word}.{root.name('q')}", f"secret of {word}".encode())
    root.send_to(root.queue("q"), b"for all")
    received = []
    while "for all" not in received:
        received += bodies([client.message()])
    received += bodies(client.arrived())
    client.disconnect()
    assert f"secret of {word}" not in received


def test_client_id_of_another_user_is_no_obstacle_without_a_durable_subscription(
    connect: Callable[..., UserClient],
) -> None:
    client = connect("half", "half", client_id="somebody else")
    client.send_to(client.queue("open"))


def test_one_user_has_at_most_half_of_all_browsers(connect: Callable[..., UserClient]) -> None:
    root, client = connect(ROOT, "half"), connect("browser", "seen")
    root.send_to("/queue/seen.c", b"it exists now")
    root.ask("purge", {"queue": "seen.c"})
    for _ in range(16):
        # More than the sockets take: no browser is done.
        root.send_to("/queue/seen.c", bytes(1024 * 1024))
    subscribe = {"destination": "/queue/seen.c", "browser": "true"}
    for number in range(BROWSERS_MAX // 2):
        client.send_frame("SUBSCRIBE", {"id": f"b{number}", **subscribe})
    with pytest.raises(RequestRefused, match="limit: user 'browser' has half of the 100 browsers") as refused:
        client.request("SUBSCRIBE", {"id": "more", **subscribe})
    assert refused.value.code == "limit"
    assert len(root.browse("/queue/seen.c")) == 16
    root.ask("purge", {"queue": "seen.c"})
