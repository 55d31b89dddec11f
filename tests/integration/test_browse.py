"""Tests that browsers are shown the whole queue, in memory and on disk, and do not change it; over real sockets, with a
real store."""

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from typing import Any

import pytest
import stomp

import truenext
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import completed
from tests.integration.raw_client import RawClient, bodies
from truenext.blocking import connect
from truenext.client.core.message import Content
from truenext.errors import Refused
from truenext.wire.stomp.frame import Frame

EVICTED = pytest.mark.parametrize("options", [("--queue-memory-limit", "100KiB", "--page-size", "50")])


def browse(client: RawClient, queue: str, *, name: str = "b", selector: str | None = None) -> None:
    headers = {"id": name, "destination": f"/queue/{queue}", "browser": "true"}
    client.send_frame("SUBSCRIBE", headers if selector is None else headers | {"selector": selector}, confirmed=True)


def shown(client: RawClient) -> list[Frame]:
    """Return the messages up to the broker's mark of the end."""
    messages = []
    while (message := client.message()).headers.get("browser") != "end":
        messages.append(message)
    return messages


def run_truenext(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return completed(*arguments)


def fill(client: RawClient, queue: str, count: int) -> list[str]:
    """Send messages of all kinds, and return their bodies in the order of their keys."""
    for number in range(count):
        headers = {"weight": str(number % 7)}
        is_last = number == count - 1
        client.send(
            queue,
            b"%d" % number,
            persistent=number % 3 > 0,
            priority=number % 3 * 4,
            headers=headers,
            confirmed=is_last,
        )
    return [str(number) for number in sorted(range(count), key=lambda number: (-(number % 3), number))]


@EVICTED
def test_browser_is_shown_the_whole_queue_in_order_and_does_not_change_it(broker: BrokerProcess, queue: str) -> None:
    # C17.1, C17.2
    client = broker.connect()
    expected = fill(client, queue, 3000)
    # Those that consumers gave back have left memory, too.
    client.subscribe(queue, prefetch=200)
    for message in client.messages(200)[::2]:
        client.nack(message)
    client.disconnect()
    client = broker.connect()
    browse(client, queue)
    messages = shown(client)
    assert bodies(messages) == expected
    assert {message.headers["truenext-attempts"] for message in messages[:10]} == {"0", "1"}
    assert "redelivered" not in messages[-1].headers and messages[-1].headers["truenext-deliveries"] == "0"
    assert broker.queues()[queue].waiting == 3000
    client.subscribe(queue, prefetch=100)
    received = []
    for _ in expected:
        received.append(client.message())
        client.ack(received[-1])
    assert bodies(received) == expected
    assert received[-1].headers["truenext-deliveries"] == "1"


@EVICTED
def test_a_selector_filters_messages_on_disk_too(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    expected = fill(client, queue, 1000)
    browse(client, queue, selector="weight BETWEEN 2 AND 3 AND JMSPriority > 0 AND JMSDeliveryMode = 'PERSISTENT'")
    assert bodies(shown(client)) == [body for body in expected if int(body) % 7 in (2, 3) and int(body) % 3]


def test_a_browser_that_does_not_read_costs_little_and_is_shown_all_when_it_does(
    broker: BrokerProcess, queue: str
) -> None:
    sender, reader = broker.connect(), broker.connect()
    for number in range(40):
        sender.send(queue, b"%d %b" % (number, bytes(200_000)), persistent=True, confirmed=True)
    browse(reader, queue)
    # Others are served meanwhile.
    sender.subscribe(queue, prefetch=1)
    sender.nack(sender.message(), confirmed=True)
    assert broker.status()["memory"]["unsent"] < 4_000_000
    sender.unsubscribe()
    assert [message.body.split()[0] for message in shown(reader)] == [b"%d" % number for number in range(40)]


def test_a_browser_cannot_acknowledge_the_messages_it_is_shown(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    client.send(queue, b"x", confirmed=True)
    browse(client, queue)
    (message,) = shown(client)
    assert "ack" not in message.headers
    client.send_frame("ACK", {"id": f"{message.headers['truenext-sequence']}@b"})
    assert "is a browser" in client.error().headers["message"]


def test_an_invalid_selector_is_refused_with_the_place_of_the_fault(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    client.send_frame(
        "SUBSCRIBE", {"id": "b", "destination": f"/queue/{queue}", "browser": "true", "selector": "a = = 1"}
    )
    assert "syntax error at character 5" in client.error().headers["message"]


class Listener(stomp.ConnectionListener):
    def __init__(self) -> None:
        self.bodies: list[str] = []
        self.has_ended = threading.Event()

    def on_message(self, frame: Any) -> None:
        if frame.headers.get("browser") == "end":
            self.has_ended.set()
        else:
            self.bodies.append(frame.body)


def test_stomp_py_browses(broker: BrokerProcess, queue: str) -> None:
    expected = fill(broker.connect(), queue, 30)
    listener = Listener()
    connection = stomp.Connection12([("127.0.0.1", broker.port)])
    connection.set_listener("", listener)
    connection.connect(wait=True)
    connection.subscribe(f"/queue/{queue}", id="1", headers={"browser": "true"})
    assert listener.has_ended.wait(PATIENCE_SECONDS)
    connection.disconnect()
    assert listener.bodies == expected


def test_browse_command_prints_waiting_messages_and_leaves_them(broker: BrokerProcess, queue: str) -> None:
    expected = fill(broker.connect(), queue, 30)
    url = f"stomp://127.0.0.1:{broker.port}"
    for _ in range(2):
        ended = run_truenext("browse", queue, "--url", url)
        assert (ended.returncode, ended.stdout.decode().split()) == (0, expected)
    ended = run_truenext("browse", queue, "--count", "3", "--selector", "weight = 4", "--json", "--url", url)
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [line["body"] for line in lines] == [body for body in expected if int(body) % 7 == 4][:3]
    assert lines[0]["headers"]["weight"] == "4"


def test_browse_command_reports_the_fault_of_a_selector(broker: BrokerProcess, queue: str) -> None:
    ended = run_truenext("browse", queue, "--selector", "a = ", "--url", f"stomp://127.0.0.1:{broker.port}")
    assert ended.returncode == 2 and ended.stdout == b""
    assert b"selector: syntax error at its end" in ended.stderr


def page(
    broker: BrokerProcess, queue: str, count: int, after: tuple[int, int] | None = None, selector: str | None = None
) -> list[Content]:
    with connect(broker.url) as connection:
        contents, is_whole = connection.browse_page(f"/queue/{queue}", count=count, after=after, selector=selector)
        assert is_whole
        return contents


@EVICTED
def test_browse_in_pages_shows_each_message_once_in_order(broker: BrokerProcess, queue: str) -> None:
    # C17.6
    expected = fill(broker.connect(), queue, 3000)
    seen: list[str] = []
    after: tuple[int, int] | None = None
    with connect(broker.url) as connection:
        for count in itertools.cycle((1, 7, 500)):
            contents, is_whole = connection.browse_page(f"/queue/{queue}", count=count, after=after)
            assert is_whole and len(contents) <= count
            seen += [each.text for each in contents]
            if len(contents) < count:
                break
            after = contents[-1].priority, contents[-1].sequence
    assert seen == expected
    chosen = page(broker, queue, 40, selector="weight = 3")
    assert [each.text for each in chosen] == [each for each in expected if int(each) % 7 == 3][:40]
    followed = page(broker, queue, 40, (chosen[-1].priority, chosen[-1].sequence), "weight = 3")
    assert [each.text for each in followed] == [each for each in expected if int(each) % 7 == 3][40:80]


def test_browse_after_the_last_message_of_a_priority_goes_on_with_the_next_priority(
    broker: BrokerProcess, queue: str
) -> None:
    # C17.6
    expected = fill(broker.connect(), queue, 30)
    assert [each.text for each in page(broker, queue, 2, (8, 2**60))] == expected[10:12]
    assert [each.text for each in page(broker, queue, 2, (6, 0))] == expected[10:12]
    assert [each.text for each in page(broker, queue, 2, (9, 0))] == expected[:2]
    assert page(broker, queue, 2, (0, 2**60)) == []


def test_browse_page_ends_once_its_bodies_are_large_and_leaves_the_connection_usable(
    broker: BrokerProcess, queue: str
) -> None:
    with connect(broker.url) as connection:
        connection.send_many(f"/queue/{queue}", [bytes(100_000)] * 50)
        contents, is_whole = connection.browse_page(f"/queue/{queue}", count=40, bytes_max=1_000_000)
        assert not is_whole and len(contents) == 10
        with pytest.raises(Refused, match="selector"):
            connection.browse_page(f"/queue/{queue}", count=40, selector="a b c")
        contents, is_whole = connection.browse_page(f"/queue/{queue}", count=40, after=(4, contents[-1].sequence))
        assert is_whole and len(contents) == 40
        assert json.loads(connection.control_request("queues"))


@pytest.mark.parametrize(
    "headers",
    [
        {"truenext-after": "10,1"},
        {"truenext-after": "1"},
        {"truenext-after": "a,b"},
        {"truenext-count": "0"},
        {"truenext-count": "-1"},
        {"browser": "false", "truenext-count": "1"},
        {"browser": "false", "truenext-after": "4,1"},
    ],
)
def test_browse_with_wrong_options_is_refused(broker: BrokerProcess, queue: str, headers: dict[str, str]) -> None:
    client = broker.connect()
    client.send_frame("SUBSCRIBE", {"id": "b", "destination": f"/queue/{queue}", "browser": "true"} | headers)
    assert client.error().headers["truenext-code"] == "header"


def test_forgotten_login_is_no_longer_in_memory(broker: BrokerProcess) -> None:
    password = "".join(("not", "-kept-", "7c1f"))

    async def run() -> None:
        before = sys.getrefcount(password)
        connection = await truenext.connect(broker.url, user="anna", password=password, reconnect=False)
        connection.forget_login()
        assert sys.getrefcount(password) == before
        assert await connection.control_request("connection")
        await connection.close()

    asyncio.run(run())
