"""Tests that a connection goes on after a refused frame, and that the frame has no effect.

Source of what is expected: docs/contract.md, C23.3 to C23.7; docs/protocol.md.
"""

import pytest

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient, bodies, numbered
from truenext.model.disk_level import DiskLevel
from truenext.wire.stomp.frame import Frame

pytestmark = LIMITS


@pytest.fixture
def client(broker: BrokerProcess) -> RawClient:
    return broker.connect(headers=TRUENEXT_CLIENT)


def of(error: Frame) -> tuple[str, int]:
    return error.headers["truenext-code"], int(error.headers["truenext-frame"])


def test_an_error_names_the_frame_and_the_connection_goes_on(client: RawClient, queue: str) -> None:
    # C23.3, C23.4
    client.send(queue, b"0")
    client.send_frame("SEND", {"destination": "nonsense:"}, b"1")
    client.send(queue, b"2")
    client.send_frame("ACK", {"id": "7@1"})
    client.write(b"\n\n")
    client.send_frame("NONSENSE", {})
    client.send_frame(
        "SUBSCRIBE", {"id": "1", "destination": f"/queue/{queue}", "ack": "client", "activemq.prefetchSize": "x"}
    )
    client.subscribe(queue)
    assert [of(client.next_error()) for _ in range(4)] == [
        ("destination", 3),
        ("not-found", 5),
        ("command", 6),
        ("header", 7),
    ]
    assert bodies(client.only(2)) == ["0", "2"]


def test_the_error_comes_before_the_receipt_of_a_later_frame_and_instead_of_its_own(
    client: RawClient, queue: str
) -> None:
    # C23.4
    for number in range(20):
        client.send_frame(
            "SEND", {"destination": f"/queue/{queue}", "persistent": "true", "receipt": f"a{number}"}, b"x"
        )
        client.send_frame("SEND", {"destination": "/queue/", "persistent": "true", "receipt": f"b{number}"}, b"x")
    answers = [client.next_frame() for _ in range(40)]
    assert [frame.command for frame in answers] == ["RECEIPT", "ERROR"] * 20
    assert [frame.headers["receipt-id"] for frame in answers] == [f"{each}{n}" for n in range(20) for each in "ab"]
    assert [frame.headers["truenext-frame"] for frame in answers[1::2]] == [str(3 + 2 * n) for n in range(20)]


def test_a_transaction_with_a_refused_frame_can_only_be_aborted(client: RawClient, queue: str) -> None:
    # C23.5
    client.begin("a")
    client.begin("b")
    client.send(queue, b"a", transaction="a")
    client.send(queue, b"b", transaction="b")
    client.send_frame("SEND", {"destination": "/queue/", "transaction": "a"}, b"a")
    client.send(queue, b"a", transaction="a")
    client.commit("a", confirmed=False, headers=numbered(queue, 1))
    client.commit("b")
    client.abort("a")
    client.begin("a")
    client.send(queue, b"again", transaction="a")
    client.commit("a", headers=numbered(queue, 1))
    client.subscribe(queue)
    assert [of(client.next_error())[0] for _ in range(3)] == ["destination", "rollback-only", "rollback-only"]
    assert bodies(client.only(2)) == ["b", "again"]


def test_a_refused_acknowledgement_dooms_its_transaction(client: RawClient, queue: str) -> None:
    # C23.5
    client.subscribe(queue)
    client.send(queue, b"0")
    message = client.message()
    client.begin("t")
    client.ack(message, transaction="t")
    client.ack(message, transaction="t")
    client.commit("t", confirmed=False)
    assert [of(client.next_error())[0] for _ in range(2)] == ["not-held", "rollback-only"]
    client.abort("t")
    assert client.message().headers["truenext-attempts"] == "1"


def test_a_refused_subscription_does_not_exist_and_can_be_made_otherwise(
    client: RawClient, broker: BrokerProcess, queue: str
) -> None:
    client.send(queue, b"0")
    fields = {"id": "1", "destination": f"/queue/{queue}"}
    client.send_frame("SUBSCRIBE", fields | {"ack": "auto", "truenext-pull": "true"})
    client.send_frame("SUBSCRIBE", fields | {"ack": "client"}, confirmed=False)
    client.send_frame("SUBSCRIBE", fields | {"ack": "auto"})
    assert [of(client.next_error())[0] for _ in range(2)] == ["not-supported", "in-use"]
    message = client.message()
    client.ack(message, confirmed=True)
    broker.await_facts(queue, waiting=0, unacknowledged=0, consumers=1)


def test_an_unsubscribe_that_was_refused_leaves_the_subscription(broker: BrokerProcess, queue: str) -> None:
    user = broker.connect(sends_connect=False)
    user.send_connect("1.2", "0,0", client_id=queue)
    user.send_frame("SUBSCRIBE", {"id": "d", "destination": f"/topic/{queue}", "durable": "true"}, confirmed=True)
    other = broker.connect(sends_connect=False)
    other.send_connect("1.2", "0,0", client_id=queue, headers=TRUENEXT_CLIENT)
    other.send_frame("SUBSCRIBE", {"id": "d", "destination": f"/topic/{queue}", "ack": "client"}, confirmed=True)
    other.send_frame("UNSUBSCRIBE", {"id": "d", "durable": "true"})
    assert of(other.next_error())[0] == "in-use"
    user.send_frame("SEND", {"destination": f"/topic/{queue}"}, b"0")
    assert other.message().headers["ack"].endswith("@d")
    other.unsubscribe("d")


def test_bytes_that_are_no_frame_end_the_connection(client: RawClient, queue: str) -> None:
    # C23.3
    client.send(queue, b"0", confirmed=True)
    client.write(b"SEND\nno colon\n\n\0")
    assert client.error().headers["truenext-code"] == "malformed-frame"


def test_an_invalid_receipt_name_is_refused_before_its_frame_is_carried_out(
    client: RawClient, broker: BrokerProcess, queue: str
) -> None:
    client.send_frame("SEND", {"destination": f"/queue/{queue}", "receipt": "r" * 256, "x": "\\"}, b"0")
    assert of(client.next_error()) == ("header", 2)
    client.arrived()
    assert broker.remaining_messages(queue) == []


def test_a_send_that_would_wait_for_space_is_refused_and_later_frames_are_read(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C23.6, C23.7
    broker = held_broker
    client = broker.connect(headers=TRUENEXT_CLIENT)
    client.send_frame("SUBSCRIBE", {"id": "replies", "destination": "/temp-queue/replies"}, confirmed=True)
    client.send(queue, b"before", persistent=True, confirmed=True)
    broker.set_disk_level(DiskLevel.LITTLE)
    client.send(queue, b"refused", persistent=True)
    client.begin("t")
    client.send_frame("SEND", {"destination": "/temp-queue/replies"}, b"a reply to myself", confirmed=True)
    assert [of(client.next_error())[0] for _ in range(2)] == ["no-space", "no-space"]
    assert bodies([client.message()]) == ["a reply to myself"]
    broker.set_disk_level(DiskLevel.PLENTY)
    client.send(queue, b"after", persistent=True, confirmed=True)
    assert bodies(broker.remaining_messages(queue)) == ["before", "after"]


def test_frames_are_counted_by_either_way_of_reading(client: RawClient, queue: str) -> None:
    """Frames of a known shape are read in another way, and heart-beats are not counted."""
    # C23.4
    position = 1
    chunk = b""
    wrong = []
    for number in range(300):
        position += 1
        if number % 7 == 3:
            chunk += b"SEND\ndestination:/queue/\ncontent-length:1\n\nx\0"
            wrong.append(position)
        else:
            chunk += b"SEND\ndestination:/queue/%b\ncontent-length:1\n\nx\0\n" % queue.encode()
    client.write(chunk)
    assert [of(client.next_error())[1] for _ in wrong] == wrong


def test_connection_of_another_client_is_ended_by_a_refused_frame(broker: BrokerProcess, queue: str) -> None:
    # C10.2, C23.3
    client = broker.connect()
    client.send_frame("SEND", {"destination": "/queue/"}, b"")
    error = client.error()
    assert error.headers["truenext-code"] == "destination" and "truenext-frame" not in error.headers


@pytest.mark.parametrize(
    ("verb", "headers", "body"), [("started", {"id": "1.1@1"}, b""), ("release", {}, b'{"subscriptions":["1"]}')]
)
def test_request_of_a_truenext_client_is_refused_of_another_client(
    broker: BrokerProcess, queue: str, verb: str, headers: dict[str, str], body: bytes
) -> None:
    client = broker.connect()
    client.subscribe(queue)
    client.send_frame("SEND", {"destination": f"/control/{verb}"} | headers, body)
    error = client.error()
    assert error.headers["truenext-code"] == "not-supported" and b"truenext-client" in error.body


@pytest.mark.parametrize(
    ("verb", "headers", "body", "code"),
    [
        ("nothing", {}, b"", "header"),
        ("nothing", {"reply-to": "/temp-queue/a"}, b"", "control-request"),
        ("connection", {"reply-to": "/queue/a"}, b"", "control-request"),
        ("wake", {}, b"", "header"),
        ("wake", {"id": "other"}, b"", "not-found"),
        ("wake", {"id": "1", "transaction": "t"}, b"", "header"),
        ("wake", {"id": "1", "truenext-number": "1", "truenext-producer": "p"}, b"", "header"),
        ("wake", {"id": "1", "reply-to": "/temp-queue/a"}, b"", "header"),
        ("wake", {"id": "1", "AMQ_SCHEDULED_DELAY": "1"}, b"", "header"),
        ("status", {"reply-to": "/temp-queue/a", "truenext-ttl": "1"}, b"", "header"),
        ("started", {"id": "1"}, b"", "header"),
        ("credit", {"id": "1", "messages": "1"}, b"", "not-supported"),
        ("credit", {"id": "1", "messages": "32768"}, b"", "header"),
        ("credit", {"id": "1", "messages": "1", "wait": "no"}, b"", "header"),
        ("credit", {"id": "1"}, b"", "header"),
        ("credit", {"id": "1", "messages": "1", "correlation-id": "c" * 256}, b"", "header"),
        ("release", {}, b'{"subscriptions":["1"],"keep":["x"]}', "header"),
        ("release", {}, b"{}", "control-request"),
    ],
)
def test_control_requests_are_refused_with_the_codes_of_the_page(
    client: RawClient, queue: str, verb: str, headers: dict[str, str], body: bytes, code: str
) -> None:
    client.subscribe(queue)
    client.send_frame("SEND", {"destination": f"/control/{verb}"} | headers, body)
    assert of(client.next_error()) == (code, 3)


def test_a_control_request_may_have_further_headers_and_a_receipt(client: RawClient, queue: str) -> None:
    client.subscribe(queue)
    headers = {"destination": "/control/wake", "id": "1", "anything": "x"}
    client.send_frame("SEND", headers, b"body", confirmed=True)
    assert client.arrived() == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"subscriptions":[%b]}' % b",".join([b'"1"'] * 1001), "limit"),
        (b'{"subscriptions":["1"],"keep":[%b]}' % b",".join([b'"1@1"'] * 32768), "limit"),
        (b'{"subscriptions":["1"],"keep":[%b]}' % b",".join([b'"1@1"'] * 1_000_000), "limit"),
        (b'{"subscriptions":["%b"]}' % (b"s" * 100_000), "header"),
        (b'{"subscriptions":[],"abort":"%b"}' % (b"t" * 100_000), "header"),
    ],
    ids=["subscriptions", "kept", "very many kept", "long name", "long transaction"],
)
def test_a_release_with_too_many_or_too_long_names_is_refused(
    client: RawClient, queue: str, body: bytes, code: str
) -> None:
    client.subscribe(queue)
    client.send_frame("SEND", {"destination": "/control/release"}, body)
    assert of(client.next_error()) == (code, 3)


def test_a_connection_with_very_many_refusals_lets_others_be_served(
    client: RawClient, broker: BrokerProcess, queue: str
) -> None:
    """Refusing a frame of four bytes takes as long as a SEND."""
    other = broker.connect()
    other.subscribe(queue)
    client.write(b"X\n\n\0" * 3000 + b"SEND\ndestination:/queue/%b\n\nlast\0" % queue.encode())
    other.send(queue, b"other")
    assert bodies(other.messages(2)) == ["other", "last"]
    assert [of(client.next_error()) for _ in range(3000)] == [("command", 2 + number) for number in range(3000)]


def test_a_refused_disconnect_does_not_end_the_session(client: RawClient, broker: BrokerProcess, queue: str) -> None:
    client.subscribe(queue)
    client.send(queue, b"0")
    message = client.message()
    client.send_frame("DISCONNECT", {"truenext-anything": "1"})
    assert of(client.next_error())[0] == "header"
    client.ack(message, confirmed=True)
    client.disconnect()


def test_an_error_repeats_only_a_part_of_a_long_value(client: RawClient) -> None:
    client.send_frame("COMMIT", {"transaction": "t" * 60_000, "receipt": "r" * 255})
    error = client.next_error()
    assert error.headers["truenext-code"] == "no-transaction" and error.headers["receipt-id"] == "r" * 255
    assert len(error.body) <= 4000
    client.send_frame("SEND", {"destination": "/queue/a", "receipt": "r" * 60_000})
    error = client.next_error()
    assert "receipt-id" not in error.headers and len(error.body) <= 4000
    client.send_frame("BEGIN", {"transaction": "t"}, confirmed=True)
