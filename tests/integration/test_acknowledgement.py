"""Tests of acknowledgement: acknowledged messages are gone, and all others return to their place with the right count.

Source of what is expected: docs/contract.md, chapters 9 to 11.
"""

import re
from collections.abc import Callable

import pytest

from tests.integration.broker_process import LIMITS, BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from truenext.model.limits import TRANSACTION_BYTES_MAX, TRANSACTION_MESSAGES_MAX, TRANSACTIONS_MAX
from truenext.wire.stomp.frame import Frame

pytestmark = LIMITS

ATTEMPTS_MAX = 7
AT_ONCE = {"truenext-delay": "0"}
"""Headers of a NACK without a delay, which would begin with the second failure."""
VERSIONS = pytest.mark.parametrize("version", ["1.0", "1.1", "1.2"])
MODES = pytest.mark.parametrize("ack", ["client", "client-individual"])


def fill(broker: BrokerProcess, queue: str, count: int) -> None:
    """Send messages 0 to `count` - 1, persistent and transient in turn."""
    sender = broker.connect()
    for number in range(count):
        sender.send(queue, b"%d" % number, persistent=number % 2 == 0)
    sender.arrived()
    sender.disconnect()


def numbers(count: int, *, first: int = 0) -> list[str]:
    return [str(number) for number in range(first, count)]


def attempts(messages: list[Frame]) -> list[int]:
    return [int(message.headers["truenext-attempts"]) for message in messages]


def deliveries(messages: list[Frame]) -> list[int]:
    return [int(message.headers["truenext-deliveries"]) for message in messages]


# ---- The three modes ----


@VERSIONS
def test_in_auto_mode_a_message_is_gone_once_it_was_sent(broker: BrokerProcess, queue: str, version: str) -> None:
    fill(broker, queue, 5)
    reader = broker.connect(version=version)
    reader.subscribe(queue, ack="auto")
    assert bodies(reader.messages(5)) == numbers(5)
    reader.crash()

    broker.await_facts(queue, waiting=0, unacknowledged=0, consumers=0)
    assert broker.remaining_messages(queue, once_durable=True) == []


@VERSIONS
def test_in_client_mode_an_ack_covers_all_that_came_before_it(broker: BrokerProcess, queue: str, version: str) -> None:
    fill(broker, queue, 6)
    reader = broker.connect(version=version)
    reader.subscribe(queue, ack="client")
    messages = reader.messages(6)
    reader.ack(messages[3], confirmed=True)
    reader.disconnect()

    assert bodies(broker.remaining_messages(queue, once_durable=True)) == ["4", "5"]


@VERSIONS
def test_in_client_individual_mode_an_ack_covers_one_message(broker: BrokerProcess, queue: str, version: str) -> None:
    fill(broker, queue, 6)
    reader = broker.connect(version=version)
    reader.subscribe(queue)
    messages = reader.messages(6)
    reader.ack(messages[3], confirmed=True)
    reader.ack(messages[0], confirmed=True)
    reader.disconnect()

    assert bodies(broker.remaining_messages(queue, once_durable=True)) == ["1", "2", "4", "5"]


def test_ack_in_client_mode_covers_by_order_of_dispatch_not_by_order_of_arrival(
    broker: BrokerProcess, queue: str
) -> None:
    sender, reader = broker.connect(), broker.connect()
    reader.subscribe(queue, ack="client")
    sender.send(queue, b"low", priority=1, confirmed=True)
    sender.send(queue, b"high", priority=8, confirmed=True)
    low, high = reader.messages(2)
    assert bodies([low, high]) == ["low", "high"]
    reader.ack(low, confirmed=True)
    reader.disconnect()

    assert bodies(broker.remaining_messages(queue, once_durable=True)) == ["high"]


@MODES
def test_an_acknowledgement_gives_its_credit_back(broker: BrokerProcess, queue: str, ack: str) -> None:
    # C4.6
    fill(broker, queue, 6)
    reader = broker.connect()
    reader.subscribe(queue, ack=ack, prefetch=2)
    held = reader.only(2)
    assert bodies(held) == ["0", "1"]
    reader.ack(held[1])
    assert bodies(reader.only(2 if ack == "client" else 1)) == (["2", "3"] if ack == "client" else ["2"])


# ---- NACK ----


@pytest.mark.parametrize("version", ["1.1", "1.2"])
def test_a_nack_returns_one_message_to_its_exact_place_at_once(broker: BrokerProcess, queue: str, version: str) -> None:
    # C9.1, C9.5
    fill(broker, queue, 10)
    reader = broker.connect(version=version)
    reader.subscribe(queue, prefetch=6)
    held = reader.messages(6)

    reader.nack(held[3])

    # Before 6 to 9, which wait, though nobody has seen them yet.
    again = reader.only(1)
    assert bodies(again) == ["3"]
    assert again[0].headers["redelivered"] == "true"
    assert (attempts(again), deliveries(again)) == ([1], [2])
    assert again[0].headers["truenext-sequence"] == held[3].headers["truenext-sequence"]
    reader.ack(again[0])
    assert bodies(reader.only(1)) == ["6"]


def test_a_nack_in_client_mode_returns_all_that_came_before_in_one_step(broker: BrokerProcess, queue: str) -> None:
    # C9.1, C9.2
    fill(broker, queue, 8)
    reader, other = broker.connect(), broker.connect()
    reader.subscribe(queue, ack="client", prefetch=6)
    held = reader.messages(6)

    reader.nack(held[3])

    again = reader.only(4)
    assert bodies(again) == ["0", "1", "2", "3"]
    assert attempts(again) == [1, 1, 1, 1]
    reader.disconnect()
    other.subscribe(queue)
    assert bodies(other.only(8)) == numbers(8)


def test_a_nacked_message_goes_to_the_consumer_that_holds_least(broker: BrokerProcess, queue: str) -> None:
    fill(broker, queue, 3)
    reader, other = broker.connect(), broker.connect()
    reader.subscribe(queue)
    held = reader.messages(3)
    other.subscribe(queue)

    reader.nack(held[1])

    assert bodies([other.message()]) == ["1"]
    assert reader.arrived() == []


@pytest.mark.parametrize("is_clean", [True, False], ids=["clean", "kill -9"])
def test_attempts_are_remembered_over_a_restart(own_broker: BrokerProcess, queue: str, is_clean: bool) -> None:
    sender, reader = own_broker.connect(), own_broker.connect()
    sender.send(queue, b"persistent", persistent=True, confirmed=True)
    reader.subscribe(queue)
    for _ in range(3):
        reader.nack(reader.message(), confirmed=True, headers=AT_ONCE)

    own_broker.restart(is_clean=is_clean)

    remaining = own_broker.remaining_messages(queue, once_durable=True)
    assert attempts(remaining) == [3]
    assert remaining[0].headers["redelivered"] == "true"


# ---- Transactions ----


def test_a_transaction_over_two_queues_is_done_as_a_whole_at_commit(
    broker: BrokerProcess, new_queue: Callable[[], str]
) -> None:
    # C18.4
    source, target, other_target = new_queue(), new_queue(), new_queue()
    fill(broker, source, 3)
    worker = broker.connect()
    worker.subscribe(source)
    held = worker.messages(3)
    worker.begin("t")
    worker.ack(held[0], transaction="t")
    worker.ack(held[1], transaction="t")
    worker.send(target, b"to one", persistent=True, transaction="t")
    worker.send(other_target, b"to the other", transaction="t", confirmed=True)
    assert (
        broker.remaining_messages(target, once_durable=True)
        == broker.remaining_messages(other_target, once_durable=True)
        == []
    )

    worker.commit("t")

    assert bodies(broker.remaining_messages(target, once_durable=True)) == ["to one"]
    assert bodies(broker.remaining_messages(other_target, once_durable=True)) == ["to the other"]
    worker.disconnect()
    assert bodies(broker.remaining_messages(source, once_durable=True)) == ["2"]


def test_a_transaction_over_two_queues_is_undone_as_a_whole_at_abort(
    broker: BrokerProcess, new_queue: Callable[[], str]
) -> None:
    # C18.4
    source, other_source, target = new_queue(), new_queue(), new_queue()
    fill(broker, source, 2)
    fill(broker, other_source, 2)
    worker = broker.connect()
    worker.subscribe(source, subscription="1")
    worker.subscribe(other_source, subscription="2")
    held = worker.only(4)
    worker.begin("t")
    for message in held:
        worker.ack(message, transaction="t")
    worker.send(target, b"never", persistent=True, transaction="t")

    worker.abort("t")

    again = worker.only(4)
    assert sorted(bodies(again)) == ["0", "0", "1", "1"]
    assert attempts(again) == [1, 1, 1, 1]
    assert broker.remaining_messages(target, once_durable=True) == []


@pytest.mark.parametrize("end_started_by", ["disconnect", "crash", "kill -9"])
def test_a_transaction_that_is_not_committed_never_happened(
    own_broker: BrokerProcess, new_queue: Callable[[], str], end_started_by: str
) -> None:
    # C18.4
    source, target = new_queue(), new_queue()
    sender, worker = own_broker.connect(), own_broker.connect()
    sender.send(source, b"work", persistent=True, confirmed=True)
    worker.subscribe(source)
    worker.begin("t")
    worker.ack(worker.message(), transaction="t")
    worker.send(target, b"never", persistent=True, transaction="t", confirmed=True)

    if end_started_by == "disconnect":
        worker.disconnect()
    elif end_started_by == "crash":
        worker.crash()
        own_broker.await_facts(source, consumers=0)
    else:
        own_broker.restart(is_clean=False)

    remaining = own_broker.remaining_messages(source, once_durable=True)
    assert bodies(remaining) == ["work"]
    # Whoever crashed in an open transaction had failed with what it acknowledged there.
    assert attempts(remaining) == ([1] if end_started_by == "crash" else [0])
    assert own_broker.remaining_messages(target, once_durable=True) == []


def test_an_acknowledgement_inside_a_transaction_gives_its_credit_back_at_once(
    broker: BrokerProcess, queue: str
) -> None:
    # C4.6
    fill(broker, queue, 4)
    reader = broker.connect()
    reader.subscribe(queue, prefetch=1)
    reader.begin("t")
    for number in range(4):
        message = reader.message()
        assert message.body == b"%d" % number
        reader.ack(message, transaction="t")
    reader.commit("t")
    reader.disconnect()

    assert broker.remaining_messages(queue, once_durable=True) == []


def test_a_nack_inside_a_transaction_takes_effect_at_commit(broker: BrokerProcess, queue: str) -> None:
    # C9.3
    fill(broker, queue, 2)
    reader = broker.connect()
    reader.subscribe(queue)
    held = reader.messages(2)
    reader.begin("t")
    reader.nack(held[0], transaction="t")
    reader.ack(held[1], transaction="t")
    assert reader.arrived() == []

    reader.commit("t")

    again = reader.only(1)
    assert (bodies(again), attempts(again)) == (["0"], [1])


def test_a_receipt_for_an_acknowledgement_is_followed_by_no_redelivery_after_a_crash(
    own_broker: BrokerProcess, queue: str
) -> None:
    # C18.3
    sender, reader = own_broker.connect(), own_broker.connect()
    for number in range(20):
        sender.send(queue, b"%d" % number, persistent=True)
    sender.arrived()
    reader.subscribe(queue)
    held = reader.messages(20)
    for message in held[:10]:
        reader.ack(message)
    reader.begin("t")
    for message in held[10:15]:
        reader.ack(message, transaction="t")
    reader.commit("t")

    own_broker.restart(is_clean=False)

    assert bodies(own_broker.remaining_messages(queue, once_durable=True)) == numbers(20, first=15)


# ---- Bounds of a transaction ----


def expect_error(client: RawClient, pattern: str) -> None:
    """Check that the client's connection ends with an ERROR that matches `pattern`."""
    error = client.error()
    assert re.search(pattern, error.body.decode()), error.body
    assert error.headers["message"] in error.body.decode()


def test_more_open_transactions_than_allowed_are_refused(broker: BrokerProcess) -> None:
    client = broker.connect()
    for number in range(TRANSACTIONS_MAX):
        client.send_frame("BEGIN", {"transaction": f"t{number}"}, confirmed=True)
    client.begin("one too many")
    expect_error(client, f"more than {TRANSACTIONS_MAX} open transactions")


def test_more_bytes_in_open_transactions_than_allowed_are_refused(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    client.begin("t1")
    client.begin("t2")
    half = bytes(TRANSACTION_BYTES_MAX // 2)
    client.send(queue, half, transaction="t1", confirmed=True)
    client.send(queue, half, transaction="t2")
    expect_error(client, f"more than {TRANSACTION_BYTES_MAX} bytes")
    assert broker.remaining_messages(queue, once_durable=True) == []


def test_more_messages_in_open_transactions_than_allowed_are_refused(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    client.begin("t")
    send = b"SEND\ndestination:/queue/%s\ntransaction:t\n\n\0" % queue.encode()
    client.write(send * TRANSACTION_MESSAGES_MAX)
    client.send(queue, b"one too many", transaction="t")
    expect_error(client, f"more than {TRANSACTION_MESSAGES_MAX} sends and acknowledgements")
    assert broker.remaining_messages(queue, once_durable=True) == []


@pytest.mark.parametrize("command", ["SEND", "ACK", "NACK", "COMMIT", "ABORT"])
def test_a_transaction_that_is_not_open_is_refused_by_name(broker: BrokerProcess, queue: str, command: str) -> None:
    fill(broker, queue, 1)
    client = broker.connect()
    client.subscribe(queue)
    message = client.message()
    if command == "SEND":
        client.send(queue, b"", transaction="nowhere")
    elif command in ("ACK", "NACK"):
        client.send_frame(command, {"id": message.headers["ack"], "transaction": "nowhere"})
    else:
        client.send_frame(command, {"transaction": "nowhere"})
    expect_error(client, "transaction 'nowhere' is not open")
    broker.await_facts(queue, waiting=1, consumers=0)


def test_a_transaction_that_is_open_cannot_be_begun_again(broker: BrokerProcess) -> None:
    client = broker.connect()
    client.begin("t")
    client.begin("t")
    expect_error(client, "transaction 't' is open already")


# ---- Acknowledgements of what is not held ----


def test_an_acknowledgement_of_a_message_that_is_not_held_ends_that_connection_alone(
    broker: BrokerProcess, new_queue: Callable[[], str]
) -> None:
    queue, other_queue = new_queue(), new_queue()
    fill(broker, queue, 3)
    holder = broker.connect()
    holder.subscribe(queue, prefetch=1)
    held = holder.message()
    sequence = held.headers["truenext-sequence"]
    cases = {
        "another connection's": (held.headers["ack"], f"message {sequence} is not held"),
        "never sent": ("99999999@1", "message 99999999 is not held"),
        "of a subscription that is not": (f"{sequence}@2", "there is no subscription '2'"),
        "of another broker": ("ID:activemq-1:2:3", "'ID:activemq-1:2:3'"),
        "absurd": ("9" * 30 + "@1", "9{30}@1'"),
    }
    for command in ("ACK", "NACK"):
        for identity, pattern in cases.values():
            stranger = broker.connect()
            stranger.subscribe(other_queue, prefetch=1)
            stranger.send_frame(command, {"id": identity, "receipt": "the receipt in question"})
            error = stranger.error()
            assert re.search(pattern, error.body.decode()), error.body
            assert error.headers["receipt-id"] == "the receipt in question"

    holder.ack(held)
    again = holder.message()
    assert again.body == b"1"


@VERSIONS
def test_an_acknowledgement_is_accepted_once(broker: BrokerProcess, queue: str, version: str) -> None:
    fill(broker, queue, 1)
    reader = broker.connect(version=version)
    reader.subscribe(queue)
    message = reader.message()
    reader.ack(message, confirmed=True)
    reader.ack(message)
    expect_error(reader, f"message {message.headers['truenext-sequence']} is not held")


def test_an_acknowledgement_in_auto_mode_is_refused(broker: BrokerProcess, queue: str) -> None:
    fill(broker, queue, 1)
    reader = broker.connect()
    reader.subscribe(queue, ack="auto")
    message = reader.message()
    reader.send_frame("ACK", {"id": f"{message.headers['truenext-sequence']}@1"})
    expect_error(reader, "subscription '1' has ack:auto")


# ---- Attempts and dead letters ----


@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "transient"])
def test_after_seven_attempts_a_message_is_a_dead_letter(broker: BrokerProcess, queue: str, persistent: bool) -> None:
    # C11.1
    sender, reader = broker.connect(), broker.connect()
    sender.send(queue, b"poison", persistent=persistent, priority=7, headers={"colour": "red: dark"}, confirmed=True)
    sender.send(queue, b"good", confirmed=True)
    reader.subscribe(queue, prefetch=1)
    for attempt in range(ATTEMPTS_MAX):
        message = reader.message()
        assert message.body == b"poison"
        assert attempts([message]) == [attempt]
        assert deliveries([message]) == [attempt + 1]
        # The dead letter is visible in its new queue once it is durable there; the good one need not wait for that.
        reader.nack(message, confirmed=True, headers=AT_ONCE)
    assert reader.message().body == b"good"

    dead = broker.remaining_messages(f"DLQ.{queue}", once_durable=True)
    assert bodies(dead) == ["poison"]
    headers = dead[0].headers
    assert headers["destination"] == f"/queue/DLQ.{queue}"
    assert headers["priority"] == "7"
    assert headers["persistent"] == "true"
    assert headers["colour"] == "red: dark"
    assert headers["truenext-original-destination"] == f"/queue/{queue}"
    assert headers["truenext-original-persistent"] == ("true" if persistent else "false")
    assert headers["truenext-original-attempts"] == str(ATTEMPTS_MAX)
    assert headers["truenext-dead-letter-cause"]
    assert "redelivered" not in headers
    assert attempts(dead) == [0]
    assert int(headers["truenext-sequence"]) > int(message.headers["truenext-sequence"])


def test_a_message_nacked_in_a_dead_letter_queue_stays_there_at_its_place(broker: BrokerProcess, queue: str) -> None:
    # C11.6
    dead_letters = f"DLQ.{queue}"
    fill(broker, dead_letters, 3)
    reader = broker.connect()
    reader.subscribe(dead_letters, prefetch=1)
    for attempt in range(2 * ATTEMPTS_MAX):
        message = reader.message()
        assert (message.body, attempts([message])) == (b"0", [attempt])
        reader.nack(message, headers=AT_ONCE)
    reader.disconnect()

    assert bodies(broker.remaining_messages(dead_letters, once_durable=True)) == numbers(3)


@pytest.mark.parametrize("is_transient", [True, False], ids=["transient", "persistent"])
def test_a_dead_letter_is_confirmed_with_the_nack_that_made_it(
    own_broker: BrokerProcess, queue: str, is_transient: bool
) -> None:
    sender, reader = own_broker.connect(), own_broker.connect()
    sender.send(queue, b"poison", persistent=not is_transient, confirmed=True)
    reader.subscribe(queue)
    for _ in range(ATTEMPTS_MAX):
        reader.nack(reader.message(), confirmed=True, headers=AT_ONCE)

    own_broker.restart(is_clean=False)

    assert own_broker.remaining_messages(queue, once_durable=True) == []
    assert bodies(own_broker.remaining_messages(f"DLQ.{queue}", once_durable=True)) == ["poison"]


def test_seven_aborts_make_a_dead_letter_too(broker: BrokerProcess, queue: str) -> None:
    fill(broker, queue, 2)
    reader = broker.connect()
    reader.subscribe(queue, prefetch=2)
    for number in range(ATTEMPTS_MAX):
        message = reader.message()
        while message.body != b"0":
            message = reader.message()
        reader.begin(f"t{number}")
        reader.ack(message, transaction=f"t{number}")
        reader.abort(f"t{number}")
    reader.disconnect()

    remaining = broker.remaining_messages(queue, once_durable=True)
    assert (bodies(remaining), attempts(remaining)) == (["1"], [0])
    assert bodies(broker.remaining_messages(f"DLQ.{queue}", once_durable=True)) == ["0"]


@MODES
def test_a_consumer_that_crashes_ten_times_dead_letters_only_the_message_it_was_handling(
    broker: BrokerProcess, queue: str, ack: str
) -> None:
    # C10.2
    fill(broker, queue, 50)
    for crash in range(10):
        reader = broker.connect()
        reader.subscribe(queue, ack=ack, prefetch=1000)
        held = reader.messages(50 if crash < ATTEMPTS_MAX else 49)
        handled = "0" if crash < ATTEMPTS_MAX else "1"
        assert held[0].body.decode() == handled
        assert attempts(held) == [crash % ATTEMPTS_MAX] + [0] * (len(held) - 1)
        assert deliveries(held) == [crash + 1] * len(held)
        reader.crash()

    broker.await_facts(queue, waiting=49, consumers=0)
    remaining = broker.remaining_messages(queue, once_durable=True)
    assert bodies(remaining) == numbers(50, first=1)
    assert attempts(remaining) == [3] + [0] * 48
    assert bodies(broker.remaining_messages(f"DLQ.{queue}", once_durable=True)) == ["0"]


def test_ten_clean_disconnects_count_no_attempt(broker: BrokerProcess, queue: str) -> None:
    # C10.2
    fill(broker, queue, 20)
    for _ in range(10):
        reader = broker.connect()
        reader.subscribe(queue)
        assert bodies(reader.messages(20)) == numbers(20)
        reader.disconnect()

    remaining = broker.remaining_messages(queue, once_durable=True)
    assert bodies(remaining) == numbers(20)
    assert attempts(remaining) == [0] * 20
    assert deliveries(remaining) == [11] * 20


def test_ten_ends_of_the_broker_count_no_attempt(own_broker: BrokerProcess, queue: str) -> None:
    # C10.2
    sender = own_broker.connect()
    for number in range(5):
        sender.send(queue, b"%d" % number, persistent=True, confirmed=True)
    for time in range(10):
        reader = own_broker.connect()
        reader.subscribe(queue)
        assert bodies(reader.messages(5)) == numbers(5)
        own_broker.restart(is_clean=time % 2 == 0)

    remaining = own_broker.remaining_messages(queue, once_durable=True)
    assert (bodies(remaining), attempts(remaining)) == (numbers(5), [0] * 5)


def test_an_unsubscribe_requeues_held_messages_without_an_attempt(broker: BrokerProcess, queue: str) -> None:
    # C10.2
    fill(broker, queue, 10)
    reader = broker.connect()
    reader.subscribe(queue, prefetch=6)
    held = reader.messages(6)
    reader.ack(held[2], confirmed=True)
    assert reader.message().body == b"6"
    reader.unsubscribe()
    assert reader.arrived() == []

    reader.subscribe(queue)
    again = reader.only(9)
    assert bodies(again) == [number for number in numbers(10) if number != "2"]
    assert attempts(again) == [0] * 9
    assert deliveries(again) == [2] * 6 + [1] * 3
    # What it held before is not its own any more, though it comes from the same connection: it was given back.
    reader.unsubscribe()
    reader.ack(held[0])
    expect_error(reader, "there is no subscription '1'")


def test_the_end_of_one_subscription_leaves_the_others_of_its_connection_alone(
    broker: BrokerProcess, new_queue: Callable[[], str]
) -> None:
    queue, other_queue = new_queue(), new_queue()
    fill(broker, queue, 2)
    fill(broker, other_queue, 2)
    reader = broker.connect()
    reader.subscribe(queue, subscription="1")
    held = reader.messages(2)
    reader.subscribe(other_queue, subscription="2")
    other_held = reader.messages(2)
    reader.unsubscribe("2")
    reader.ack(held[0])
    reader.ack(held[1], confirmed=True)
    reader.disconnect()

    assert broker.remaining_messages(queue, once_durable=True) == []
    assert bodies(broker.remaining_messages(other_queue, once_durable=True)) == bodies(other_held)


# ---- Crashes that are hard to notice ----


def test_a_crash_of_a_consumer_right_after_its_last_frame_is_noticed(own_broker: BrokerProcess, queue: str) -> None:
    fill(own_broker, queue, 5)
    reader = own_broker.connect()
    reader.subscribe(queue)
    held = reader.messages(5)
    with own_broker.asleep():
        # The broker finds the ACK and the reset of the connection in one look.
        reader.ack(held[0])
        reader.crash()

    own_broker.await_facts(queue, consumers=0)
    remaining = own_broker.remaining_messages(queue, once_durable=True)
    assert bodies(remaining) == numbers(5, first=1)
    assert attempts(remaining) == [1, 0, 0, 0]


def test_consumers_that_crash_while_the_broker_writes_to_them_disturb_no_other(
    own_broker: BrokerProcess, queue: str
) -> None:
    sender, reader = own_broker.connect(), own_broker.connect()
    other_queue = f"{queue}-other"
    reader.subscribe(other_queue)
    for number in range(30):
        crashing = own_broker.connect()
        crashing.subscribe(queue, ack="auto")
        with own_broker.asleep():
            sender.send(queue, bytes(1000))
            sender.send(other_queue, b"%d" % number)
            crashing.begin("t")
            crashing.crash()
        assert reader.message().body == b"%d" % number
    own_broker.await_facts(queue, consumers=0)
    own_broker.stop()


# ---- A slow reader in auto mode ----


@pytest.mark.parametrize("end", ["hang up", "disconnect"])
def test_messages_that_a_slow_auto_readers_socket_has_not_taken_go_to_the_next_reader(
    broker: BrokerProcess, queue: str, end: str
) -> None:
    # C10.13
    count, padding = 300, bytes(50_000)
    slow, sender, next_reader = broker.connect(receive_buffer=4096), broker.connect(), broker.connect()
    slow.subscribe(queue, ack="auto")
    for number in range(count):
        sender.send(queue, b"%d " % number + padding, persistent=number % 2 == 0)
    sender.arrived()
    broker.await_full_sockets()
    dispatched = count - broker.queues()[queue].waiting
    assert dispatched < count, "the socket has taken everything; take more messages"

    received = []
    if end == "disconnect":
        slow.send_frame("DISCONNECT", {})
    else:
        slow.hang_up()
    try:
        while True:
            received.append(slow.message())
    except EOFError:
        slow.close()

    broker.await_facts(queue, consumers=0)
    next_reader.subscribe(queue)
    rest = next_reader.messages(count - len(received))
    assert next_reader.arrived() == []
    seen = [int(message.body.split()[0]) for message in received + rest]
    assert 0 < len(received) < count
    assert seen == list(range(count))
    assert attempts(rest) == [0] * len(rest)
    # Those that stood in line for the socket were dispatched, the others were not.
    counted = deliveries(rest)
    assert counted == sorted(counted, reverse=True)
    assert {1} <= set(counted) <= {1, 2}
    assert len(received) + counted.count(2) >= dispatched


def test_a_slow_auto_reader_that_reads_on_gets_all_messages_once_and_in_order(
    broker: BrokerProcess, queue: str
) -> None:
    count, padding = 100, bytes(50_000)
    slow, sender = broker.connect(receive_buffer=4096), broker.connect()
    slow.subscribe(queue, ack="auto")
    for number in range(count):
        sender.send(queue, b"%d " % number + padding, persistent=number % 2 == 0)
    sender.arrived()

    assert [int(message.body.split()[0]) for message in slow.messages(count)] == list(range(count))
    assert slow.arrived() == []
    broker.await_facts(queue, waiting=0, unacknowledged=0)
    slow.disconnect()
    assert broker.remaining_messages(queue, once_durable=True) == []
