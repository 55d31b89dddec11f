"""Tests of pulling subscriptions: they get as many messages as they request, and learn that none is ready.

Source of what is expected: docs/contract.md, C21.1 to C21.7; docs/protocol.md.
"""

import pytest

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies
from truenext.wire.stomp.frame import Frame

pytestmark = LIMITS


@pytest.fixture
def sender(broker: BrokerProcess) -> RawClient:
    return broker.connect()


@pytest.fixture
def reader(broker: BrokerProcess) -> RawClient:
    return broker.connect()


def pull(reader: RawClient, queue: str, headers: dict[str, str] | None = None) -> None:
    reader.subscribe(queue, prefetch=None, headers={"truenext-pull": "true"} | (headers or {}))


def fill(sender: RawClient, queue: str, count: int, *, first: int = 0) -> None:
    for number in range(first, first + count):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0)
    sender.arrived()


def unused(message: Frame) -> int:
    """Check that `message` ends a pull request, and return the number of unused requests."""
    assert "ack" not in message.headers and message.body == b""
    return int(message.headers["truenext-unused"])


def test_a_pulling_subscription_gets_no_message_beyond_its_requests(
    queue: str, sender: RawClient, reader: RawClient
) -> None:
    # C21.1
    pull(reader, queue)
    fill(sender, queue, 5)
    assert reader.arrived() == []
    reader.pull(2)
    first = reader.only(2)
    assert bodies(first) == ["0", "1"]
    for message in first:
        reader.ack(message)
    assert reader.arrived() == []
    reader.pull(1)
    assert bodies(reader.only(1)) == ["2"]


def test_a_waiting_pull_request_is_answered_when_a_message_comes(
    queue: str, sender: RawClient, reader: RawClient
) -> None:
    # C21.2
    pull(reader, queue)
    reader.pull(3)
    assert reader.arrived() == []
    fill(sender, queue, 2)
    assert bodies(reader.only(2)) == ["0", "1"]
    fill(sender, queue, 2, first=2)
    assert bodies(reader.only(1)) == ["2"]


def test_a_pull_request_without_wait_ends_when_no_message_is_ready(
    queue: str, sender: RawClient, reader: RawClient
) -> None:
    # C21.3
    pull(reader, queue)
    reader.pull(3, waits=False, name="a")
    end = reader.message()
    assert unused(end) == 3 and end.headers["correlation-id"] == "a" and end.headers["subscription"] == "1"
    fill(sender, queue, 2)
    assert reader.arrived() == []
    reader.pull(3, waits=False, name="b")
    *got, end = reader.messages(3)
    assert bodies(got) == ["0", "1"] and unused(end) == 1 and end.headers["correlation-id"] == "b"
    reader.pull(1, waits=False)
    assert unused(reader.message()) == 1


def test_a_withdrawn_pull_request_gets_no_message_after_the_answer(
    queue: str, sender: RawClient, reader: RawClient
) -> None:
    # C21.5
    pull(reader, queue)
    reader.pull(3)
    fill(sender, queue, 1)
    reader.messages(1)
    reader.pull(0)
    assert unused(reader.message()) == 2
    fill(sender, queue, 1, first=1)
    assert reader.arrived() == []
    # Of nothing that is left.
    reader.pull(0)
    assert unused(reader.message()) == 0


def test_pull_requests_add_up(queue: str, sender: RawClient, reader: RawClient) -> None:
    # C21.6
    pull(reader, queue)
    reader.pull(1)
    reader.pull(2)
    fill(sender, queue, 5)
    assert bodies(reader.only(3)) == ["0", "1", "2"]


def test_a_pulling_subscription_gets_the_true_next_message(queue: str, sender: RawClient, reader: RawClient) -> None:
    # C21.1, C21.7
    pull(reader, queue)
    for priority in (1, 4, 9, 4):
        sender.send(queue, b"%d" % priority, priority=priority)
    sender.arrived()
    reader.pull(2)
    assert bodies(reader.only(2)) == ["9", "4"]
    sender.send(queue, b"late 9", priority=9)
    sender.arrived()
    reader.pull(2)
    assert bodies(reader.only(2)) == ["late 9", "4"]


def test_a_pull_request_without_wait_reads_and_compares_all_messages_first(
    queue: str, sender: RawClient, reader: RawClient
) -> None:
    # C21.3
    for number in range(300):
        sender.send(queue, b"%d" % number, persistent=True, headers={"n": str(number)})
    sender.arrived()
    pull(reader, queue, {"selector": "n = '299'"})
    reader.pull(2, waits=False)
    found, end = reader.messages(2)
    assert found.body == b"299" and unused(end) == 1
    other = sender
    pull(other, queue)
    for number in range(299):
        other.pull(1, waits=False)
        assert bodies([other.message()]) == [str(number)]
    other.pull(1, waits=False)
    assert unused(other.message()) == 1


def test_a_pull_request_without_wait_finds_no_message_in_a_paused_queue(
    broker: BrokerProcess, queue: str, sender: RawClient, reader: RawClient
) -> None:
    # C21.3
    fill(sender, queue, 1)
    broker.output_of("pause", queue)
    pull(reader, queue)
    reader.pull(1, waits=False)
    assert unused(reader.message()) == 1
    reader.pull(1)
    broker.output_of("resume", queue)
    assert bodies(reader.only(1)) == ["0"]


def test_a_consumer_of_a_pattern_pulls_from_all_its_queues(queue: str, sender: RawClient, reader: RawClient) -> None:
    # C21.7
    pull(reader, f"{queue}.*")
    reader.pull(1, waits=False)
    assert unused(reader.message()) == 1
    for number in range(4):
        sender.send(f"{queue}.{number % 2}", b"%d" % number)
    sender.arrived()
    reader.pull(3, waits=False)
    assert bodies(reader.only(3)) == ["0", "1", "2"]
    reader.pull(3, waits=False)
    *got, end = reader.messages(2)
    assert bodies(got) == ["3"] and unused(end) == 2


def test_a_release_ends_a_pull_request_without_an_answer(broker: BrokerProcess, queue: str, sender: RawClient) -> None:
    reader = broker.connect(headers=TRUENEXT_CLIENT)
    pull(reader, queue)
    reader.pull(5)
    fill(sender, queue, 1)
    reader.only(1)
    reader.release("1")
    assert reader.arrived() == []
    reader.pull(1)
    (again,) = reader.only(1)
    assert again.body == b"0" and again.headers["truenext-round"] == "1"


@pytest.mark.parametrize(
    "headers",
    [
        {"ack": "auto"},
        {"browser": "true"},
        {"truenext-express": "true"},
        {"activemq.prefetchSize": "1"},
        {"activemq.prefetchSize": "0", "truenext-pull": "false"},
    ],
)
def test_headers_that_exclude_pulling_are_refused(queue: str, reader: RawClient, headers: dict[str, str]) -> None:
    # C21.7
    fields = {"id": "1", "destination": f"/queue/{queue}", "ack": "client-individual", "truenext-pull": "true"}
    reader.send_frame("SUBSCRIBE", fields | headers)
    assert "pull" in reader.error().body.decode()


def test_a_prefetch_of_0_makes_a_pulling_subscription(queue: str, sender: RawClient, reader: RawClient) -> None:
    pull(reader, queue, {"activemq.prefetchSize": "0"})
    fill(sender, queue, 1)
    reader.pull(1)
    assert bodies(reader.only(1)) == ["0"]


def test_pull_requests_beyond_the_limit_are_refused(queue: str, reader: RawClient) -> None:
    # C21.1
    pull(reader, queue)
    reader.pull(32767)
    reader.pull(1)
    assert reader.error().headers["truenext-code"] == "limit"


def test_a_pull_request_of_a_subscription_that_does_not_pull_is_refused(queue: str, reader: RawClient) -> None:
    reader.subscribe(queue)
    reader.pull(1)
    assert reader.error().headers["truenext-code"] == "not-supported"
