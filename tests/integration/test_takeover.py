"""Tests of takeovers: a client gets its own messages back, and nothing that its old connection sent takes effect later.

Source of what is expected: docs/contract.md, C22.1 to C22.4; docs/protocol.md.
"""

import contextlib
import re

import pytest

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from truenext.model.disk_level import DiskLevel

pytestmark = LIMITS


def numbered(number: int, secret: str = "") -> dict[str, str]:
    return {"truenext-client": str(number)} | ({"truenext-secret": secret} if secret else {})


def secret_of(client: RawClient) -> str:
    return client.connected.headers["truenext-secret"]


def is_taken_over(client: RawClient) -> str | None:
    return client.connected.headers.get("truenext-taken-over")


def test_a_secret_is_handed_out_to_clients_that_number_their_connections(broker: BrokerProcess) -> None:
    # C22.1
    clients = [broker.connect(headers=numbered(number)) for number in (1, 1, 7)]
    secrets = {secret_of(client) for client in clients}
    assert len(secrets) == 3 and all(re.fullmatch("[0-9a-f]{32}", secret) for secret in secrets)
    assert {is_taken_over(client) for client in clients} == {None}
    plain = broker.connect()
    assert not [name for name in plain.connected.headers if name.startswith("truenext-")]
    assert len({client.connected.headers["truenext-store"] for client in clients}) == 1


def test_messages_held_by_the_old_connection_come_to_the_new_one(broker: BrokerProcess, queue: str) -> None:
    # C22.2
    old = broker.connect(headers=numbered(1))
    old.subscribe(queue, headers={"activemq.exclusive": "true"})
    for number in range(2):
        old.send(queue, b"%d" % number)
    first = old.only(2)
    new = broker.connect(headers=numbered(2, secret_of(old)))
    assert is_taken_over(new) == "true" and secret_of(new) == secret_of(old)
    new.subscribe(queue)
    again = new.only(2)
    assert bodies(first) == bodies(again)
    assert [message.headers["truenext-attempts"] for message in again] == ["0", "0"]
    old.await_silent_end()


def test_a_takeover_counts_no_attempt_of_started_and_acknowledged_messages(broker: BrokerProcess, queue: str) -> None:
    # C22.2
    old = broker.connect(headers=numbered(1))
    old.subscribe(queue)
    for body in (b"0", b"1"):
        old.send(queue, body)
    old.begin("t")
    old.ack(old.message(), transaction="t")
    old.started(old.message())
    old.arrived()
    new = broker.connect(headers=numbered(2, secret_of(old)))
    new.subscribe(queue)
    assert [message.headers["truenext-attempts"] for message in new.messages(2)] == ["0", "0"]


def test_a_durable_subscription_is_free_for_the_client_that_comes_back(broker: BrokerProcess, queue: str) -> None:
    fields = {"id": "d", "destination": f"/topic/{queue}", "durable": "true", "ack": "client"}
    old = broker.connect(sends_connect=False)
    old.send_connect("1.2", "0,0", client_id=queue, headers=numbered(1))
    old.send_frame("SUBSCRIBE", fields, confirmed=True)
    new = broker.connect(sends_connect=False)
    new.send_connect("1.2", "0,0", client_id=queue, headers=numbered(2, secret_of(old)))
    new.send_frame("SUBSCRIBE", fields, confirmed=True)


def test_a_secret_that_is_not_known_is_no_error_and_is_the_connections_own_from_then_on(broker: BrokerProcess) -> None:
    # C22.3
    secret = "0123456789abcdef" * 2
    first = broker.connect(headers=numbered(5, secret))
    assert is_taken_over(first) == "false" and secret_of(first) == secret
    second = broker.connect(headers=numbered(6, secret))
    assert is_taken_over(second) == "true"
    second.disconnect()
    third = broker.connect(headers=numbered(7, secret))
    assert is_taken_over(third) == "false"


def test_a_connect_that_comes_late_is_refused_and_does_nothing(broker: BrokerProcess, queue: str) -> None:
    # C22.4
    first = broker.connect(headers=numbered(1))
    secret = secret_of(first)
    third = broker.connect(headers=numbered(3, secret))
    third.subscribe(queue)
    for number in (1, 2, 3):
        late = broker.connect(sends_connect=False)
        late.send_frame("CONNECT", {"accept-version": "1.2", "host": "h"} | numbered(number, secret))
        late.send(queue, b"late")
        assert late.error().headers["truenext-code"] == "stale"
    assert third.arrived() == []
    third.disconnect()
    late = broker.connect(sends_connect=False)
    late.send_frame("CONNECT", {"accept-version": "1.2", "host": "h"} | numbered(2, secret))
    assert late.error().headers["truenext-code"] == "stale"


def test_frames_of_the_old_connection_after_a_takeover_are_not_read(broker: BrokerProcess, queue: str) -> None:
    # C22.2
    old = broker.connect(headers=numbered(1))
    with broker.asleep():
        new = broker.connect(sends_connect=False)
        new.send_frame("CONNECT", {"accept-version": "1.2", "host": "h"} | numbered(2, secret_of(old)))
    new.await_connected()
    try:
        for _ in range(10):
            old.send(queue, b"late")
    except OSError:
        pass
    assert bodies(broker.remaining_messages(queue)) == []


def test_sends_of_the_old_connection_that_wait_for_disk_space_are_dropped(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C22.2
    broker = held_broker
    old = broker.connect(headers=numbered(1))
    old.send(queue, b"before", persistent=True, confirmed=True)
    broker.set_disk_level(DiskLevel.LITTLE)
    old.send(queue, b"waits", persistent=True)
    new = broker.connect(headers=numbered(2, secret_of(old)))
    assert is_taken_over(new) == "true"
    broker.set_disk_level(DiskLevel.PLENTY)
    new.send(queue, b"after", persistent=True, confirmed=True)
    assert bodies(broker.remaining_messages(queue)) == ["before", "after"]


def test_the_secret_is_in_no_log_and_no_answer(own_broker: BrokerProcess, queue: str) -> None:
    # C22.1
    first = own_broker.connect(headers=numbered(1))
    second = own_broker.connect(headers=numbered(2, secret_of(first)))
    assert secret_of(second) not in own_broker.log
    assert secret_of(second) not in str(own_broker.status()) + str(own_broker.queues())
    own_broker.stop()
    secret = secret_of(second).encode()
    files = [path for path in own_broker.data.rglob("*") if path.is_file()]
    assert files and not any(secret in path.read_bytes() for path in files)


@pytest.mark.parametrize(
    "headers",
    [
        {"truenext-client": "0"},
        {"truenext-client": "x"},
        {"truenext-client": "9223372036854775808"},
        {"truenext-secret": "0" * 32},
        {"truenext-client": "1", "truenext-secret": "hush"},
        {"truenext-client": "1", "truenext-secret": "G" * 32},
        {"truenext-anything": "hush"},
    ],
)
def test_a_login_with_invalid_takeover_headers_is_refused_without_repeating_them(
    broker: BrokerProcess, headers: dict[str, str]
) -> None:
    client = broker.connect(sends_connect=False)
    client.send_frame("CONNECT", {"accept-version": "1.2", "host": "h"} | headers)
    error = client.error()
    assert error.headers["truenext-code"] == "login"
    assert b"hush" not in error.body and b"GGG" not in error.body


def test_truenext_headers_on_connect_need_stomp_1_2(broker: BrokerProcess) -> None:
    client = broker.connect(sends_connect=False)
    client.send_frame("CONNECT", {"accept-version": "1.1", "host": "h", "truenext-client": "1"})
    assert "1.2" in client.error().body.decode()


def test_unsent_messages_of_an_auto_subscription_come_to_the_new_connection(broker: BrokerProcess, queue: str) -> None:
    """The old client has read nothing; messages that its socket has taken count as acknowledged."""
    count = 5000
    old = broker.connect(headers=numbered(1), receive_buffer=4096)
    old.subscribe(queue, ack="auto", prefetch=None)
    sender = broker.connect()
    for number in range(count):
        sender.send(queue, b"%d " % number + b"x" * 1000)
    sender.arrived()
    new = broker.connect(headers=numbered(2, secret_of(old)))
    received = []
    with contextlib.suppress(EOFError):
        while True:
            received.append(old.message())
    new.subscribe(queue, prefetch=count)
    remaining = new.messages(count - len(received))
    assert [int(message.body.split()[0]) for message in received + remaining] == list(range(count))
    assert {message.headers["truenext-attempts"] for message in remaining} == {"0"}


def test_a_connection_that_is_taken_over_again_and_again_leaves_nothing_behind(
    own_broker: BrokerProcess, queue: str
) -> None:
    client = own_broker.connect(headers=numbered(1))
    client.send(queue, b"0")

    def take_over(first: int, times: int) -> None:
        nonlocal client
        for number in range(first, first + times):
            old, client = client, own_broker.connect(headers=numbered(number, secret_of(client)))
            old.close()
            client.subscribe(queue)
            client.begin("t")
            client.ack(client.message(), transaction="t")

    take_over(2, 1500)
    with own_broker.watched_memory() as samples:
        take_over(1502, 2000)
    assert samples[-1] - samples[0] < 1_500_000, samples[-1] - samples[0]
    client.arrived()
    client.disconnect()
    (remaining,) = own_broker.remaining_messages(queue)
    assert remaining.headers["truenext-attempts"] == "0"
