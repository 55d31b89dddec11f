"""Tests that order, positions, windows and promises to clients hold when memory is short.

The workloads of the first part are those under which ActiveMQ's cursors are known to lose the order: more messages than
fit, in several priorities, persistent and transient mixed. Source of what is expected: docs/contract.md.
"""

import threading

import pytest

from tests.drawing import one_of
from tests.integration.broker_process import TINY_LIMITS, BrokerProcess
from tests.integration.raw_client import RawClient, bodies
from truenext.model.limits import MEMORY_LIMIT_MIN
from truenext.wire.stomp.frame import Frame

PAGE_BY_PAGE = ("--queue-memory-limit", "2KB", "--page-size", "1")
LIMITS = pytest.mark.parametrize(
    ("options", "prefetch"),
    [((), None), (("--queue-memory-limit", "50KB"), None), (PAGE_BY_PAGE, 1)],
    ids=["default limits", "50 KB a queue", "2 KB a queue, page size 1, prefetch 1"],
)
TINY = pytest.mark.parametrize("options", [TINY_LIMITS], ids=["tiny limits"])
KINDS = one_of("kind", ["persistent", "transient", "mixed"], ["persistent", "transient", "mixed"])
"""Kinds of messages."""


def is_persistent(kind: str, number: int) -> bool:
    return kind == "persistent" or (kind == "mixed" and number % 3 != 1)


def send_all(sender: RawClient, queue: str, kind: str, names: list[str], priority: int, *, size: int = 0) -> None:
    """Send messages without waiting for each, and return when all are ready."""
    for number, name in enumerate(names):
        body = name.encode().ljust(size, b".")
        sender.send(queue, body, persistent=is_persistent(kind, number), priority=priority)
    # Batches are written in order.
    sender.send("barrier", b"", persistent=True, confirmed=True)


def receive(receiver: RawClient, count: int) -> list[str]:
    """Receive `count` messages, and acknowledge each as it comes. There must be no more."""
    messages = []
    for _ in range(count):
        messages.append(receiver.message())
        receiver.ack(messages[-1])
    assert bodies(receiver.arrived()) == []
    return names_of(messages)


def names_of(messages: list[Frame]) -> list[str]:
    return [message.body.decode().rstrip(".") for message in messages]


def named(what: str, count: int) -> list[str]:
    return [f"{what} {number}" for number in range(count)]


# ---- Workloads that do not fit ----


@LIMITS
@KINDS
def test_600_of_priority_3_and_600_of_priority_7_come_sevens_first_each_in_order(
    broker: BrokerProcess, queue: str, kind: str, prefetch: int | None
) -> None:
    threes, sevens = named("three", 600), named("seven", 600)
    first, second, receiver = broker.connect(), broker.connect(), broker.connect()
    for number in range(0, 600, 50):
        send_all(first, queue, kind, threes[number : number + 50], 3, size=200)
        send_all(second, queue, kind, sevens[number : number + 50], 7, size=200)

    receiver.subscribe(queue, prefetch=prefetch)

    assert receive(receiver, 1200) == sevens + threes


@LIMITS
@KINDS
def test_ten_urgent_ones_overtake_1800_that_wait_in_front_of_a_consumer_half_way_through(
    broker: BrokerProcess, queue: str, kind: str, prefetch: int | None
) -> None:
    window = prefetch or 5
    lows, highs = named("low", 1800), named("high", 10)
    sender, receiver = broker.connect(), broker.connect()
    send_all(sender, queue, kind, lows, 2)
    receiver.subscribe(queue, prefetch=window)
    held = receiver.messages(window)
    for number in range(300 - window):
        receiver.ack(held[number])
        held.append(receiver.message())
    assert names_of(held) == lows[:300]

    send_all(sender, queue, kind, highs, 8)

    for message in held[-window:]:
        receiver.ack(message)
    assert receive(receiver, 1510) == highs + lows[300:]


@LIMITS
@KINDS
def test_an_urgent_message_among_six_is_the_first_for_a_new_consumer(
    broker: BrokerProcess, queue: str, kind: str, prefetch: int | None
) -> None:
    sender, receiver = broker.connect(), broker.connect()
    lows = named("low", 6)
    send_all(sender, queue, kind, lows[:3], 3, size=1000)
    send_all(sender, queue, kind, ["high"], 6, size=1000)
    send_all(sender, queue, kind, lows[3:], 3, size=1000)

    receiver.subscribe(queue, prefetch=prefetch)

    assert receive(receiver, 7) == ["high", *lows]


@LIMITS
@KINDS
def test_500_kilobytes_of_mixed_priorities_come_in_true_order(
    broker: BrokerProcess, queue: str, kind: str, prefetch: int | None
) -> None:
    # C24.1
    sender, receiver = broker.connect(), broker.connect()
    order = []
    for number in range(500):
        # Each priority with both kinds of message, in no regular turn.
        priority = (number * 7 + number // 10) % 10
        body = f"{number}".encode().ljust(1024, b".")
        sender.send(queue, body, persistent=is_persistent(kind, number // 3), priority=priority)
        order.append((9 - priority, number))
    sender.send("barrier", b"", persistent=True, confirmed=True)

    receiver.subscribe(queue, prefetch=prefetch)

    assert receive(receiver, 500) == [str(number) for _, number in sorted(order)]


@TINY
@KINDS
def test_a_queue_beyond_its_limit_is_hardly_in_memory(own_broker: BrokerProcess, queue: str, kind: str) -> None:
    """This proves that the limits of the tests above have an effect."""
    sender = own_broker.connect()
    send_all(sender, queue, kind, named("low", 200), 4, size=1000)
    own_broker.await_facts(queue, waiting=200)
    sender.send(queue, b"last", persistent=True, confirmed=True)
    assert own_broker.status()["in_memory"] < 5


# ---- Transients that left memory ----


LITTLE_MEMORY = pytest.mark.parametrize(
    "options", [("--queue-memory-limit", "20KB", "--page-size", "7")], ids=["20 KB"]
)


def spill(broker: BrokerProcess, queue: str, *, first: int = 0) -> list[tuple[int, str, bool]]:
    """Send 300 messages of both kinds in three priorities, of which few fit into memory. Return rank, name and
    persistence of each, sorted by key."""
    sender = broker.connect()
    sent = []
    for number in range(first, first + 300):
        priority, persistent = (1, 4, 8)[number % 3], number % 2 == 0
        sender.send(queue, f"{number}".encode().ljust(1000, b"."), persistent=persistent, priority=priority)
        sent.append((9 - priority, number, persistent))
    for _ in range(2):
        # What has to leave is written with the second, if not with the first.
        sender.send("barrier", b"", persistent=True, confirmed=True)
    assert broker.status()["in_memory"] < 60
    return [(rank, str(number), persistent) for rank, number, persistent in sorted(sent)]


@LITTLE_MEMORY
def test_transients_that_left_memory_come_back_in_order(own_broker: BrokerProcess, queue: str) -> None:
    # C18.2, C24.1
    sent = spill(own_broker, queue)
    receiver = own_broker.connect()
    receiver.subscribe(queue, prefetch=3)
    assert receive(receiver, 300) == [name for _, name, _ in sent]


@LITTLE_MEMORY
def test_a_clean_stop_keeps_transients_that_left_memory_and_those_that_did_not_at_their_places(
    own_broker: BrokerProcess, queue: str
) -> None:
    sent = spill(own_broker, queue)
    own_broker.restart(is_clean=True)
    sent += spill(own_broker, queue, first=300)
    own_broker.restart(is_clean=True)
    receiver = own_broker.connect()
    receiver.subscribe(queue, prefetch=3)
    ranks = sorted(sent, key=lambda one: (one[0], int(one[1])))
    assert receive(receiver, 600) == [name for _, name, _ in ranks]


@LITTLE_MEMORY
def test_a_crash_drops_the_transients_of_this_run_and_of_earlier_ones_and_nothing_else(
    own_broker: BrokerProcess, queue: str
) -> None:
    sent = spill(own_broker, queue)
    own_broker.restart(is_clean=True)
    sent += spill(own_broker, queue, first=300)
    own_broker.restart(is_clean=False)
    own_broker.restart(is_clean=False)
    receiver = own_broker.connect()
    receiver.subscribe(queue, prefetch=3)
    kept = sorted((rank, int(name)) for rank, name, persistent in sent if persistent)
    assert receive(receiver, 300) == [str(number) for _, number in kept]


@LITTLE_MEMORY
def test_transients_that_a_consumer_took_do_not_come_back_after_a_clean_stop(
    own_broker: BrokerProcess, queue: str
) -> None:
    sent = spill(own_broker, queue)
    receiver = own_broker.connect()
    receiver.subscribe(queue, prefetch=1)
    messages = []
    for _ in range(150):
        messages.append(receiver.message())
        receiver.ack(messages[-1], confirmed=True)
    own_broker.restart(is_clean=True)
    receiver = own_broker.connect()
    receiver.subscribe(queue, prefetch=3)
    assert names_of(messages) + receive(receiver, 150) == [name for _, name, _ in sent]


# ---- While a page is being read ----


@TINY
def test_reading_of_a_page_holds_back_lower_priorities_and_not_higher_ones(
    held_broker: BrokerProcess, queue: str
) -> None:
    # C4.3
    sender, receiver = held_broker.connect(), held_broker.connect()
    send_all(sender, queue, "persistent", named("four", 5), 4, size=1000)
    held_broker.hold_pages()
    receiver.subscribe(queue)
    held_broker.await_page_read()

    sender.send(queue, b"two", priority=2, confirmed=True)
    sender.send(queue, b"four 5", priority=4, confirmed=True)
    sender.send(queue, b"nine", priority=9, confirmed=True)

    assert names_of(receiver.messages(1)) == ["nine"]
    assert receiver.arrived() == []
    held_broker.resume_pages()
    assert names_of(receiver.only(7)) == [*named("four", 6), "two"]


@TINY
def test_a_released_message_that_has_to_be_read_first_is_not_overtaken(held_broker: BrokerProcess, queue: str) -> None:
    sender, holder, receiver = held_broker.connect(), held_broker.connect(), held_broker.connect()
    holder.subscribe(queue, prefetch=3)
    send_all(sender, queue, "mixed", named("seven", 3), 7, size=1000)
    assert names_of(holder.messages(3)) == named("seven", 3)
    for _ in range(2):
        sender.send("barrier", b"", persistent=True, confirmed=True)
    assert held_broker.status()["in_memory"] < 3
    held_broker.hold_pages()
    receiver.subscribe(queue)
    holder.disconnect()
    held_broker.await_page_read()

    sender.send(queue, b"four", priority=4, confirmed=True)
    sender.send(queue, b"seven 3", priority=7, confirmed=True)

    assert receiver.arrived() == []
    held_broker.resume_pages()
    messages = receiver.only(5)
    assert names_of(messages) == [*named("seven", 4), "four"]
    assert [message.headers["truenext-deliveries"] for message in messages] == ["2", "2", "2", "1", "1"]


@TINY
@KINDS
def test_messages_sent_while_the_last_page_is_being_read_come_after_it(
    held_broker: BrokerProcess, queue: str, kind: str
) -> None:
    """The messages are durable before the page arrives, which does not contain them."""
    sender, receiver = held_broker.connect(), held_broker.connect()
    send_all(sender, queue, kind, ["0"], 4, size=2000)
    sender.send("barrier", b"", persistent=True, confirmed=True)
    held_broker.hold_pages()
    receiver.subscribe(queue)
    held_broker.await_page_read()
    send_all(sender, queue, kind, [str(number) for number in range(1, 20)], 4, size=1000)
    sender.send("barrier", b"", persistent=True, confirmed=True)

    held_broker.resume_pages()

    assert names_of(receiver.only(20)) == [str(number) for number in range(20)]


@TINY
@pytest.mark.parametrize("end", ["no end", "clean", "kill -9"])
def test_a_dead_letter_that_has_to_be_read_first_is_moved_once_by_this_run_or_by_the_next(
    held_broker: BrokerProcess, queue: str, end: str
) -> None:
    """After its last attempt no consumer of its old queue gets it."""
    sender, reader = held_broker.connect(), held_broker.connect()
    send_all(sender, queue, "persistent", ["poison", "good"], 4, size=2000)
    reader.subscribe(queue, prefetch=1)
    for _ in range(6):
        reader.nack(reader.message(), confirmed=True, headers={"truenext-delay": "0"})
    last = reader.message()
    assert (names_of([last]), last.headers["truenext-attempts"]) == (["poison"], "6")
    sender.send("barrier", b"", persistent=True, confirmed=True)
    held_broker.hold_pages()
    reader.nack(last, confirmed=True)
    held_broker.await_page_read()
    assert f"DLQ.{queue}" not in held_broker.queues()

    if end == "kill -9":
        held_broker.kill()
        held_broker.resume_pages()
        held_broker.close_clients()
        held_broker.start()
    elif end == "clean":
        # It has written down what waits by then, and waits for the page alone.
        threading.Timer(0.5, held_broker.resume_pages).start()
        held_broker.restart(is_clean=True)
    else:
        held_broker.resume_pages()
        reader.disconnect()

    assert names_of(held_broker.remaining_messages(queue, once_durable=True)) == ["good"]
    dead = held_broker.remaining_messages(f"DLQ.{queue}", once_durable=True)
    assert names_of(dead) == ["poison"]
    assert dead[0].headers["truenext-original-attempts"] == "7"
    held_broker.restart(is_clean=False)
    assert names_of(held_broker.remaining_messages(f"DLQ.{queue}", once_durable=True)) == ["poison"]
    assert names_of(held_broker.remaining_messages(queue, once_durable=True)) == ["good"]


@TINY
def test_a_consumer_that_ends_while_its_page_is_being_read_loses_no_message(
    held_broker: BrokerProcess, queue: str
) -> None:
    sender, receiver, next_receiver = held_broker.connect(), held_broker.connect(), held_broker.connect()
    send_all(sender, queue, "mixed", named("low", 10), 4, size=1000)
    held_broker.hold_pages()
    receiver.subscribe(queue)
    held_broker.await_page_read()
    receiver.disconnect()
    held_broker.resume_pages()
    next_receiver.subscribe(queue)
    assert names_of(next_receiver.only(10)) == named("low", 10)


# ---- Windows and sockets ----


LEAST_MEMORY = pytest.mark.parametrize("options", [("--memory-limit", "128MiB")], ids=["128 MiB"])
PRIVATE_BYTES_MAX = MEMORY_LIMIT_MIN + 32 * 1024 * 1024
"""Memory limit, and the share of freed memory that an allocator may keep."""


def large(number: int, size: int) -> bytes:
    """Return a body that differs from all others."""
    return f"{number} ".encode() + number.to_bytes(4) * (size // 4)


@LEAST_MEMORY
def test_consumers_that_do_not_read_their_sockets_take_no_memory_from_others(
    own_broker: BrokerProcess, queue: str
) -> None:
    # C4.5
    count, size = 500, 500_000
    sender, reader, other_reader = own_broker.connect(), own_broker.connect(), own_broker.connect()
    deaf = [own_broker.connect(receive_buffer=4096) for _ in range(50)]
    with own_broker.watched_memory() as samples:
        for number, client in enumerate(deaf):
            # Its receipt would stand behind the messages.
            client.send_frame(
                "SUBSCRIBE", {"id": "1", "destination": f"/queue/{queue}", "ack": ["auto", "client"][number % 2]}
            )
        own_broker.await_facts(queue, consumers=50)
        for number in range(count):
            sender.send(queue, large(number, size), persistent=number % 2 == 0, confirmed=number % 20 == 19)
        own_broker.await_full_sockets(8)
        assert own_broker.queues()[queue].waiting > 60
        memory = own_broker.status()["memory"]
        # From a quarter on each gets one message at a time.
        assert memory["unsent"] < memory["limit"] // 4 + (len(deaf) + 1) * size

        reader.subscribe(queue)
        other_reader.subscribe(f"{queue}-other")
        sequences = []
        for number in range(50):
            message = reader.message()
            assert message.body == large(int(message.body.split(b" ", 1)[0]), size)
            sequences.append(int(message.headers["truenext-sequence"]))
            reader.ack(message)
            sender.send(f"{queue}-other", large(number, 2000), persistent=number % 2 == 0)
            assert other_reader.message().body == large(number, 2000)
        assert sequences == sorted(sequences)
        for client in deaf:
            client.crash()
        own_broker.await_facts(queue, consumers=1)
    print(f"{max(samples) >> 20} MiB of private memory at most")
    assert max(samples) < PRIVATE_BYTES_MAX
    reader.disconnect()
    assert own_broker.status()["memory"]["unsent"] == 0


@LEAST_MEMORY
def test_held_messages_leave_memory_and_come_whole_to_the_next_consumer(own_broker: BrokerProcess, queue: str) -> None:
    count, size = 1000, 100_000
    sender, holder, next_reader = own_broker.connect(), own_broker.connect(), own_broker.connect()
    holder.subscribe(queue, prefetch=count)
    with own_broker.watched_memory() as samples:
        for number in range(count):
            sender.send(queue, large(number, size), persistent=number % 2 == 0, confirmed=number % 20 == 19)
            holder.message()
        own_broker.await_facts(queue, unacknowledged=count)
        assert own_broker.status()["in_memory"] < count // 2
        holder.crash()
        next_reader.subscribe(queue)
        for number in range(count):
            message = next_reader.message()
            assert message.body == large(number, size)
            assert message.headers["truenext-deliveries"] == "2"
            assert message.headers["truenext-attempts"] == ("1" if number == 0 else "0")
            next_reader.ack(message)
        assert next_reader.arrived() == []
    print(f"{max(samples) >> 20} MiB of private memory at most")
    assert max(samples) < PRIVATE_BYTES_MAX
    memory = own_broker.status()["memory"]
    assert (memory["used"], memory["leaving"], memory["unsent"]) == (0, 0, 0)


@LEAST_MEMORY
def test_a_client_that_does_not_read_its_replies_is_the_only_one_cut_when_memory_is_short(
    own_broker: BrokerProcess, queue: str
) -> None:
    # C24.16, C24.18
    size = 200_000
    modest, deaf, server = own_broker.connect(), own_broker.connect(receive_buffer=4096), own_broker.connect()
    server.subscribe("requests")
    addresses = []
    for client in (modest, deaf):
        client.send_frame("SUBSCRIBE", {"id": "replies", "destination": "/temp-queue/replies"}, confirmed=True)
        client.send_frame("SEND", {"destination": "/queue/requests", "reply-to": "/temp-queue/replies"})
        request = server.message()
        addresses.append(request.headers["reply-to"])
        server.ack(request)
    server.send(queue, b"kept", confirmed=True)
    with own_broker.watched_memory() as samples:
        server.send_frame("SEND", {"destination": addresses[0]}, b"a reply", confirmed=True)
        for number in range(400):
            server.send_frame("SEND", {"destination": addresses[1]}, large(number, size), confirmed=number % 20 == 19)
    print(f"{max(samples) >> 20} MiB of private memory at most")
    assert max(samples) < PRIVATE_BYTES_MAX

    assert modest.message().body == b"a reply"
    error = deaf.error()
    assert "the client does not read the messages of its temporary queues" in error.body.decode()
    assert error.headers["truenext-code"] == "too-slow"
    server.send_frame("SEND", {"destination": addresses[0]}, b"another reply", confirmed=True)
    assert modest.message().body == b"another reply"
    assert bodies(own_broker.remaining_messages(queue)) == ["kept"]
    assert own_broker.status()["memory"]["used"] < size
