"""Tests of control requests about all queues: the answers are right and made in short steps."""

import json
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import pytest
from msgspec import structs

from tests.unit.inspection import run_stuck_audit
from truenext.broker import event_loop as event_loop_module
from truenext.broker.control import LARGEST_COUNT, QUERIES, ClientInfo, QueryContext, Vitals
from truenext.broker.control_requests import SMALL_ANSWER_BYTES, ControlRequests
from truenext.broker.event_loop import SlicedWork, Steps
from truenext.broker.pager import Pager
from truenext.broker.queue_details import ClientIdentity, report_consumers
from truenext.broker.queues_request import ITEMS_PER_STEP, PLACES_SORTED_PER_STEP
from truenext.broker.reload import NO_FILE
from truenext.engine import stuck
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.queue import Queue
from truenext.engine.stuck import StuckQueueDetector
from truenext.errors import RemoteProtocolError
from truenext.model.commands import Ack, AckMode, ControlRequest, Nack, Send, Subscribe
from truenext.model.control_answers import CommitsReport, PolicyReport, SettingReport
from truenext.model.destination import parse_address
from truenext.model.disk_level import DiskLevel
from truenext.model.limits import ANSWER_SECONDS_MAX, ANSWER_STALL_SECONDS, ANSWERS_IN_FLIGHT_BYTES_MAX, PIECES_MAX
from truenext.model.message import SentMessage
from truenext.model.order import RANKS
from truenext.store.log import Awaited, Log, LogStatus, Member, Role, Wait
from truenext.store.memory import MemoryStore
from truenext.store.store import JournalSize, Store

MANY = 2345
UNKNOWN = ClientIdentity("1", None, None, None)


class ReportDriver:
    def __init__(self) -> None:
        self.engine = Engine()
        self.engine.lifespan.start()
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.store_results.on_committed(batch)
        self.session = self.engine.commands.connect("s")
        self.audit = StuckQueueDetector()
        self.store: Store = MemoryStore()
        self.log: Log | None = None

    def tick(self, seconds: float) -> None:
        """Set both clocks."""
        self.engine.state.commit_state.tick(int(seconds * 1_000_000), int(seconds * 1_000_000))

    def send(self, queue: str) -> None:
        self.send_to(f"/queue/{queue}")

    def send_to(self, address: str, body: bytes = b"") -> None:
        message = SentMessage(4, False, 0, b"content-length:0\n", body)
        self.engine.commands.send(self.session, Send(parse_address(address, "s"), message))

    def subscribe(self, address: str, session: ConnectionState | None = None, window: int = 1000) -> None:
        subscribe = Subscribe(
            address, parse_address(address, session.id if session else "s"), AckMode.INDIVIDUAL, window
        )
        self.engine.commands.subscribe(session or self.session, subscribe)

    def start_request(self, verb: str, body: bytes = b"") -> Generator[None, None, bytes]:
        pager = mock.Mock(spec=Pager, pending=set())
        context = QueryContext(
            self.engine,
            self.audit,
            pager,
            lambda: NO_FILE,
            self.caller,
            self.store,
            self.log,
            lambda _: "",
            lambda: Vitals(1.5, CommitsReport(2, 300, 0.25), None),
            None,
            body,
        )
        return QUERIES[verb](context)

    @staticmethod
    def caller(session: ConnectionState) -> ClientInfo:
        return ClientInfo(f"host of {session.id}", f"id of {session.id}")

    def answer(self, verb: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(finished(self.start_request(verb, b"" if body is None else json.dumps(body).encode())))


def finished(answer: Generator[None, None, bytes]) -> bytes:
    while True:
        try:
            next(answer)
        except StopIteration as end:
            body: bytes = end.value
            return body


def row(name: str, **facts: Any) -> dict[str, Any]:
    states = {"waiting": 0, "unacknowledged": 0, "consumers": 0, "scheduled": 0, "paused": False}
    states["accepted"] = facts.get("waiting", 0) + facts.get("unacknowledged", 0)
    oldest = {"oldest_s": 0.0} if facts.get("waiting") else {}
    held = {"held_s": 0.0} if facts.get("unacknowledged") else {}
    return {"name": name} | states | oldest | held | facts


def test_queues_query_lists_many_queues_once_in_the_order_of_their_names() -> None:
    driver = ReportDriver()
    names = [f"q{number * 7919 % MANY}" for number in range(MANY)]
    for name in names:
        driver.send(name)
    assert driver.answer("queues") == [row(name, waiting=1) for name in sorted(names)]
    assert MANY > 2 * PLACES_SORTED_PER_STEP


def test_messages_held_by_a_wildcard_consumer_are_counted_in_their_queues() -> None:
    driver = ReportDriver()
    other = driver.engine.commands.connect("other")
    driver.subscribe("/queue/a.*")
    for name in ("a.x", "a.x", "a.y", "b", "b"):
        driver.send(name)
    driver.engine.turn.run()
    driver.subscribe("/queue/b", other)
    driver.send("a.y")
    driver.engine.turn.run()
    driver.send("b")
    assert driver.answer("queues") == [
        row("a.x", unacknowledged=2, consumers=1),
        row("a.y", unacknowledged=2, consumers=1),
        row("b", unacknowledged=2, waiting=1, consumers=1),
    ]
    status = driver.answer("status")
    assert (status["waiting"], status["in_memory"], status["queues"]) == (1, 7, 3)


def test_messages_of_one_queue_held_by_a_wildcard_consumer_are_counted_in_short_steps() -> None:
    """Fixed: all that a consumer of a pattern held was gone through in one step."""
    # C32.10
    driver = ReportDriver()
    driver.subscribe("/queue/a.*", window=3 * ITEMS_PER_STEP)
    for number in range(3 * ITEMS_PER_STEP):
        driver.send("a.x" if number % 3 else "a.y")
    driver.engine.turn.run()
    steps = iter(report_consumers(driver.engine, "a.y", lambda _: UNKNOWN))
    for _ in range(3):
        next(steps)
    (report,) = json.loads(finished(steps))
    assert report["held"] == ITEMS_PER_STEP


def test_message_that_a_consumer_holds_longest_is_told_by_queue_and_consumer() -> None:
    # C32.16
    driver, other = ReportDriver(), "Spark.source.main.1f"

    def dispatch(seconds: float, *queues: str) -> None:
        driver.tick(seconds)
        for queue in queues:
            driver.send(queue)
        driver.engine.turn.run()

    def held(order: str = "name") -> dict[str, float | None]:
        return {row["name"]: row["held_s"] for row in driver.answer("queues", {"order": order})["queues"]}

    def of_consumers(queue: str) -> list[tuple[int, float | None]]:
        rows = json.loads(finished(iter(report_consumers(driver.engine, queue, lambda _: UNKNOWN))))
        return [(row["held"], row["held_s"]) for row in rows]

    driver.subscribe("/queue/a.x", window=3)
    driver.subscribe("/queue/a.*", window=10)
    driver.subscribe(f"/queue/{other}")
    driver.send("idle")
    dispatch(90, other)
    # The first goes to the consumer of the queue, the next one to that of the pattern.
    dispatch(100, "a.x")
    dispatch(110, "a.x", "a.y")
    dispatch(130.5)
    assert held("held") == {other: 40.5, "a.x": 30.5, "a.y": 20.5, "idle": None}
    assert list(held("held")) == [other, "a.x", "a.y", "idle"]
    assert sorted(of_consumers("a.x")) == [(1, 20.5), (1, 30.5)] and of_consumers("a.y") == [(1, 20.5)]
    answer = driver.answer("queues", {"name": "a."})
    assert answer["sums"]["held_s"] == 30.5 == driver.answer("status")["held_s"], "but for Spark"
    (mine,) = [each for each in driver.session.consumers.values() if each.destination.name == "a.x"]
    (sequence,) = mine.held
    driver.engine.commands.nack(driver.session, Nack("/queue/a.x", sequence, None))
    dispatch(140.5)
    assert held()["a.x"] == 30.5, "the other one; the first was dispatched anew"
    for consumer in list(driver.session.consumers.values()):
        for sequence in list(consumer.held):
            driver.engine.commands.acknowledge(driver.session, Ack(consumer.subscription, sequence, None))
    assert set(held().values()) == {None} and driver.answer("status")["held_s"] is None


def test_status_sums_temporary_destinations_and_names_the_largest() -> None:
    driver = ReportDriver()
    nothing = {"waiting": 0, "unacknowledged": 0, "bytes": 0, "largest": []}
    assert driver.answer("status")["temporary"] == nothing
    slow, slower = driver.engine.commands.connect("slow"), driver.engine.commands.connect("slower")
    driver.subscribe("/topic/news.*", slow, window=1)
    driver.subscribe("/temp-topic/own", slower)
    driver.subscribe("/temp-queue/answers", slower, window=1)
    driver.subscribe("/queue/q", window=1)
    assert driver.answer("status")["temporary"] == nothing
    for _ in range(3):
        for address in ("/topic/news.eu", "/queue/q", "/remote-temp-queue/slower/answers"):
            driver.send_to(address, bytes(1000))
            driver.engine.turn.run()
    driver.send_to("/remote-temp-queue/slower/answers", bytes(1000))
    status = driver.answer("status")
    temporary = status["temporary"]
    assert (temporary["waiting"], temporary["unacknowledged"]) == (5, 2)
    assert 7 * 1000 < temporary["bytes"] < 7 * 1500
    first, second = temporary["largest"]
    assert 4 * 1000 < first.pop("bytes") < 4 * 1500
    assert 3 * 1000 < second.pop("bytes") < 3 * 1500
    assert (first, second) == (
        {
            "destination": "/temp-queue/answers",
            "client": "host of slower",
            "client_id": "id of slower",
            "waiting": 3,
            "unacknowledged": 1,
        },
        {
            "destination": "/topic/news.*",
            "client": "host of slow",
            "client_id": "id of slow",
            "waiting": 2,
            "unacknowledged": 1,
        },
    )
    # What is said of queues is of these alone.
    assert (status["queues"], status["waiting"]) == (1, 2)
    driver.send_to("/remote-temp-topic/slower/own")
    assert "/temp-topic/own" in [each["destination"] for each in driver.answer("status")["temporary"]["largest"]]


def test_status_names_only_the_largest_temporary_destinations_that_still_exist() -> None:
    driver = ReportDriver()
    sessions = [driver.engine.commands.connect(f"s{number}") for number in range(2 * LARGEST_COUNT)]
    for number, session in enumerate(sessions):
        driver.subscribe("/topic/t", session)
        driver.send_to("/topic/t", bytes(1000 * number))
    answer = driver.start_request("status")
    # A step for each connection, then all queues.
    for _ in range(len(driver.engine.state.clients.sessions) + 1):
        next(answer)
    driver.engine.commands.disconnect(sessions[0], is_exempt=True)
    largest = json.loads(finished(answer))["temporary"]["largest"]
    assert [each["client"] for each in largest] == [f"host of s{number}" for number in range(1, LARGEST_COUNT)]


@pytest.mark.parametrize("verb", ["queues", "status"])
def test_no_step_looks_at_more_than_a_few_consumers_of_one_queue(verb: str) -> None:
    driver = ReportDriver()
    subscribe = Subscribe(
        "", parse_address("/temp-queue/q" if verb == "status" else "/queue/q", "s"), AckMode.INDIVIDUAL, 1
    )
    for number in range(1000):
        driver.engine.commands.subscribe(driver.session, structs.replace(subscribe, subscription=str(number)))
    steps = sum(1 for _ in driver.start_request(verb))
    assert steps >= 1000 // ITEMS_PER_STEP


@pytest.mark.parametrize("verb", ["queues", "status"])
def test_no_step_looks_at_more_than_a_few_queues(verb: str) -> None:
    # C32.9
    driver = ReportDriver()
    for number in range(MANY):
        driver.send(f"q{number}")
    checked: Counter[int] = Counter()
    waiting = Queue.waiting_count

    def counted(queue: Queue) -> int:
        checked[step] += 1
        return waiting(queue)

    step = 0
    with mock.patch.object(Queue, "waiting_count", counted):
        for _ in driver.start_request(verb):
            step += 1
    assert max(checked.values()) == ITEMS_PER_STEP
    assert sum(checked.values()) >= MANY


def test_queues_answer_is_never_older_than_its_request() -> None:
    driver = ReportDriver()
    for number in range(MANY):
        driver.send(f"q{number:04}")
    answer = driver.start_request("queues")
    driver.send("q0000")
    driver.send("q0000 is older")
    assert json.loads(finished(answer))[:2] == [row("q0000", waiting=2), row("q0000 is older", waiting=1)]


def test_steps_of_the_stuck_audit_check_few_queues_and_find_few_consumers() -> None:
    driver = ReportDriver()
    for number in range(MANY):
        driver.subscribe(f"/queue/q{number}", driver.engine.commands.connect(f"s{number}"))
    for queue in driver.engine.queues.by_name.values():
        for rank in RANKS:
            queue.lane(rank)
    checked: Counter[int] = Counter()
    is_empty = stuck._is_empty

    def counted(lane: Any) -> bool:
        checked[step] += 1
        return is_empty(lane)

    step = 0
    with mock.patch.object(stuck, "_is_empty", counted):
        for _ in driver.audit.check(driver.engine, set):
            step += 1
    assert max(checked.values()) == 10 * stuck.QUEUES_PER_STEP
    assert sum(checked.values()) == 10 * stuck.QUEUES_MAX
    assert [checked[number] for number in range(MANY // stuck.CONSUMERS_PER_STEP)] == [0] * (
        MANY // stuck.CONSUMERS_PER_STEP
    )


def test_a_queue_whose_consumer_has_left_since_the_round_began_is_not_taken_for_stuck() -> None:
    driver = ReportDriver()
    disconnecting, driver.session = driver.session, driver.engine.commands.connect("other")
    driver.subscribe("/queue/q", disconnecting)
    driver.subscribe("/queue/r")
    with mock.patch.object(stuck, "QUEUES_PER_STEP", 1):
        steps = driver.audit.check(driver.engine, set)
        next(steps)
        assert [queue.name for queue in driver.audit._remaining] == ["q"]
        driver.engine.commands.disconnect(disconnecting, is_exempt=True)
        driver.send("q")
        list(steps)
    assert driver.audit._stuck_since_ms == {}
    driver.send("r")
    driver.engine.state.commit_state.tick(2000 * stuck.STUCK_MS, 2000 * stuck.STUCK_MS)
    run_stuck_audit(driver.audit, driver.engine)
    assert [queue.name for queue in driver.audit._stuck_since_ms] == ["r"], "nobody has dispatched it"


# ---- Slices ----


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def test_a_slice_ends_when_its_time_is_over_and_the_next_one_goes_on() -> None:
    clock = Clock()
    done: list[str] = []

    def work(name: str) -> Steps:
        for number in range(3):
            clock.now_ns += event_loop_module.SLICE_NS // 2
            done.append(f"{name}{number}")
            yield

    slices = SlicedWork(clock)
    slices.add(work("a"))
    slices.add(work("b"))
    expected = [["a0", "a1"], ["a2", "b0"], ["b1", "b2"]]
    for some in expected:
        slices.run_slice()
        assert done == some
        done.clear()
        assert slices.pending
    slices.run_slice()
    assert not slices.pending


class RequestQueue:
    """Control requests whose answers are numbers, each made in two steps, with `size` bytes."""

    def __init__(self, size: int = 0) -> None:
        self.slices = SlicedWork(Clock())
        self.made = 0
        self.size = size
        self.disconnected: set[ConnectionState] = set()
        self.replies: list[tuple[str, str | None, bytes]] = []
        self.requests = ControlRequests(self.slices, self.start_answer, self.reply)

    def start_answer(self, verb: str, of: ConnectionState | None, body: bytes) -> Generator[None, None, bytes]:
        yield
        verb += body.decode()
        if of is not None:
            verb = f"{verb} of {of.id}"
        self.made += 1
        return f"{verb} {self.made}".encode().ljust(self.size)

    def reply(self, session: ConnectionState, request: ControlRequest, body: bytes) -> bool:
        self.replies.append((session.id, request.correlation, body.strip()))
        return session not in self.disconnected

    def request(
        self,
        session: ConnectionState,
        correlation: str,
        verb: str = "queues",
        *,
        of: ConnectionState | None = None,
        body: bytes = b"",
    ) -> None:
        request = ControlRequest(verb, body, parse_address("/temp-queue/a", session.id), correlation)
        self.requests.add(session, request, about=of, body=body)


def test_requests_made_before_an_answer_starts_share_it_and_later_ones_get_another() -> None:
    queue = RequestQueue()
    one, other = ConnectionState("one"), ConnectionState("other")
    queue.request(one, "1")
    queue.request(other, "2")
    queue.request(one, "3", "status")
    started = queue.slices.pending
    next(started[0])
    queue.request(one, "4")
    assert queue.requests.pending_count(one) == 3
    queue.slices.run_slice()
    assert queue.replies == [
        ("one", "1", b"queues 1"),
        ("other", "2", b"queues 1"),
        ("one", "3", b"status 2"),
        ("one", "4", b"queues 3"),
    ]
    assert queue.requests.pending_count(one) == queue.requests.pending_count(other) == 0


def test_requests_with_different_bodies_have_different_answers() -> None:
    queue = RequestQueue()
    one, other = ConnectionState("one"), ConnectionState("other")
    for session, body in ((one, b"{}"), (other, b""), (other, b"{}")):
        queue.request(session, "1", body=body)
    while queue.slices.pending:
        queue.slices.run_slice()
    assert queue.replies == [
        ("one", "1", b"queues{} 1"),
        ("other", "1", b"queues{} 1"),
        ("other", "1", b"queues 2"),
    ]


def test_connection_query_is_answered_only_to_the_connection_it_is_about() -> None:
    queue = RequestQueue()
    one, other = ConnectionState("one"), ConnectionState("other")
    for session in (one, other, one):
        queue.request(session, "1", "connection", of=session)
    while queue.slices.pending:
        queue.slices.run_slice()
    assert queue.replies == [
        ("one", "1", b"connection of one 1"),
        ("one", "1", b"connection of one 1"),
        ("other", "1", b"connection of other 2"),
    ]


def test_a_connection_may_wait_for_a_hundred_answers_and_no_more() -> None:
    queue = RequestQueue()
    one, other = ConnectionState("one"), ConnectionState("other")
    for number in range(PIECES_MAX):
        queue.request(one, str(number))
    with pytest.raises(RemoteProtocolError, match=f"{PIECES_MAX} control requests of this connection have no answer"):
        queue.request(one, "one too many")
    queue.request(other, "another's")
    queue.slices.run_slice()
    queue.request(one, "again")
    assert len(queue.replies) == PIECES_MAX + 1


def make_requests(queue: RequestQueue, count: int) -> list[ConnectionState]:
    sessions = [ConnectionState(str(number)) for number in range(count)]
    for session in sessions:
        queue.request(session, "1")
    while queue.slices.pending:
        queue.slices.run_slice()
    return sessions


def test_large_answers_in_flight_are_limited_and_the_next_wait_until_those_are_sent() -> None:
    """Fixed: two hundred who asked at once made the broker take 783 MiB, and ended those who read."""
    queue = RequestQueue(size=ANSWERS_IN_FLIGHT_BYTES_MAX // 3)
    sessions = make_requests(queue, 7)
    assert [session for session, _, _ in queue.replies] == ["0", "1", "2"]
    queue.requests.on_all_sent(sessions[5])
    assert len(queue.replies) == 3, "it has got nothing yet"
    queue.requests.on_all_sent(sessions[1])
    assert len(queue.replies) == 4 and queue.requests.pending_count(sessions[4]) == 1
    queue.requests.connection_closed(sessions[0])
    queue.disconnected.add(sessions[5])
    queue.requests.on_all_sent(sessions[2])
    # Who has gone meanwhile stands in nobody's way.
    assert len(queue.replies) == 7
    for session in (*sessions[3:5], sessions[6]):
        queue.requests.on_all_sent(session)
    assert not queue.requests.in_flight


def test_answers_that_are_made_elsewhere_are_begun_only_while_none_waits_to_be_sent() -> None:
    """Fixed: clients that asked for pieces of the history, and read none, filled the broker's memory with them."""
    queue = RequestQueue()
    begun: list[Callable[[bytes], None]] = []
    sessions = [ConnectionState(str(number)) for number in range(6)]
    for session in sessions:
        request = ControlRequest("history", b"", parse_address("/temp-queue/a", session.id), "1")
        queue.requests.add_other(session, request, begun.append)
    piece = bytes(ANSWERS_IN_FLIGHT_BYTES_MAX // 2)
    for number in range(3):
        assert not begun[number:]
        queue.slices.run_slice()
        begun[number](piece)
    queue.slices.run_slice()
    assert (len(begun), len(queue.replies)) == (3, 2), "the third waits, and the fourth is not begun"
    queue.requests.connection_closed(sessions[3])
    assert queue.requests.pending_count(sessions[3]) == 0
    queue.requests.connection_closed(sessions[2])
    queue.slices.run_slice()
    begun[3](piece)
    assert (len(begun), len(queue.replies)) == (4, 2)
    queue.requests.on_all_sent(sessions[0])
    queue.slices.run_slice()
    begun[4](b"")
    assert [session for session, _, _ in queue.replies] == ["0", "1", "4", "5"]


def test_answer_above_the_limit_in_flight_is_sent_alone_and_small_answers_never_wait() -> None:
    queue = RequestQueue(size=3 * ANSWERS_IN_FLIGHT_BYTES_MAX)
    first, second = make_requests(queue, 2)
    assert len(queue.replies) == 1
    queue.requests.on_all_sent(first)
    assert len(queue.replies) == 2 and list(queue.requests.in_flight) == [second]
    small = RequestQueue(size=1000)
    make_requests(small, 100)
    assert len(small.replies) == 100 and not small.requests.in_flight


def test_connection_closed_before_its_answer_is_made_has_no_pending_request_afterwards() -> None:
    queue = RequestQueue(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    session = ConnectionState("one")
    queue.request(session, "1")
    queue.request(session, "2", "status")
    queue.requests.connection_closed(session)
    queue.disconnected.add(session)
    while queue.slices.pending:
        queue.slices.run_slice()
    assert not queue.requests._pending_counts and not queue.requests.in_flight


def test_equal_requests_are_answered_one_in_each_step() -> None:
    queue = RequestQueue()
    for number in range(5):
        queue.request(ConnectionState(str(number)), "1")
    (work,) = queue.slices.pending
    answered = []
    for _ in work:
        answered.append(len(queue.replies))
    assert answered == [0, 1, 2, 3, 4, 5]


def test_answers_without_credit_in_the_reply_queue_stay_in_flight() -> None:
    queue = RequestQueue(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    first, _ = make_requests(queue, 2)
    first.temporary_queues.append(mock.Mock(waiting=lambda: 1, is_reply_queue=True))
    queue.requests.on_all_sent(first)
    assert len(queue.replies) == 1
    # What waits in its subscriptions to topics is something else.
    first.temporary_queues[0] = mock.Mock(waiting=lambda: 1, is_reply_queue=False)
    queue.requests.on_all_sent(first)
    assert len(queue.replies) == 2


def test_a_small_answer_waits_for_no_large_one_but_of_its_own_connection() -> None:
    queue = RequestQueue(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    _, second = make_requests(queue, 2)
    queue.size = 10
    queue.request(second, "2", "status")
    queue.request(ConnectionState("other"), "3", "status")
    while queue.slices.pending:
        queue.slices.run_slice()
    assert [correlation for _, correlation, _ in queue.replies] == ["1", "3"]


def test_closed_connection_gets_no_further_answer_that_would_delay_others() -> None:
    queue = RequestQueue(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    first, second = ConnectionState("first"), ConnectionState("second")
    for session, correlation in ((first, "1"), (first, "2"), (second, "3")):
        queue.request(session, correlation)
    while queue.slices.pending:
        queue.slices.run_slice()
    queue.requests.connection_closed(first)
    assert [correlation for _, correlation, _ in queue.replies] == ["1", "3"]
    assert queue.requests.pending_count(first) == 0


def test_connection_that_reads_nothing_of_its_answer_for_ten_seconds_is_blocking_others() -> None:
    # C24.17
    queue = RequestQueue(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    received = Counter[ConnectionState]()
    hindering = partial(queue.requests.find_blocking, bytes_sent=lambda session: received[session])
    deaf, waiting = make_requests(queue, 2)
    assert hindering(0.0) is None
    received[deaf] = SMALL_ANSWER_BYTES
    assert hindering(9.0) is None and hindering(18.0) is None, "it took something meanwhile"
    received[deaf] += 40
    assert hindering(9.0 + ANSWER_STALL_SECONDS) is deaf, "those were heart-beats"
    queue.requests.connection_closed(deaf)
    assert [session for session, _, _ in queue.replies] == ["0", "1"]
    for now_s in (30.0, 60.0):
        assert hindering(now_s) is None, "nobody waits for another to be taken"
    assert queue.requests.pending_count(waiting) == 0


def test_connection_that_has_not_read_its_answer_after_a_minute_is_blocking_others() -> None:
    # C24.17
    queue = RequestQueue(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    slow, _ = make_requests(queue, 2)
    received = Counter[ConnectionState]()
    for second in range(ANSWER_SECONDS_MAX):
        assert queue.requests.find_blocking(second, received.__getitem__) is None
        received[slow] += SMALL_ANSWER_BYTES
    assert queue.requests.find_blocking(ANSWER_SECONDS_MAX, received.__getitem__) is slow


def test_status_has_the_log_of_a_broker_that_has_one() -> None:
    driver = ReportDriver()
    assert "log" not in driver.answer("status")
    member = Member(
        name="b",
        host="b.example",
        role=Role.STANDING_BY,
        epoch=3,
        number=998,
        age_ms=400,
        users="",
    )
    status = LogStatus(server="db1:5432", epoch=3, number=1000, position=900, is_replicated=True, members=(member,))
    driver.log = mock.Mock(spec=Log, status=status)
    assert driver.answer("status")["log"] == {
        "server": "db1:5432",
        "epoch": 3,
        "number": 1000,
        "position": 900,
        "replicated": True,
        "awaited": None,
        "waiting_since_ms": None,
        "members": [
            {
                "name": "b",
                "host": "b.example",
                "role": "standing by",
                "epoch": 3,
                "number": 998,
                "age_ms": 400,
            }
        ],
    }
    # As of now, not as of the start of the broker.
    driver.log.status = replace(status, number=1001, wait=Wait(Awaited.STANDBY, 1_790_000_000_000))
    found = driver.answer("status")["log"]
    assert found["number"] == 1001
    assert (found["awaited"], found["waiting_since_ms"]) == ("standby", 1_790_000_000_000)


def test_status_has_the_sizes_of_the_store_as_of_now() -> None:
    driver = ReportDriver()
    for used in (1, 2):
        driver.store = mock.Mock(spec=Store, disk_level=DiskLevel.PLENTY)
        driver.store.disk_level_bytes = {"database_used": used, "database_limit": 9}
        driver.store.journal_size = JournalSize(used, 99)
        assert driver.answer("status")["disk_bytes"] == {"database_used": used, "database_limit": 9}


def test_whole_numbers_of_a_policy_are_read_as_whole_numbers() -> None:
    """Fixed: the console showed `attempts_max 1000000.0`."""
    settings = {"attempts_max": SettingReport(1_000_000, "default"), "backoff": SettingReport(1.5, "default")}
    read = msgspec.json.decode(msgspec.json.encode(PolicyReport("orders", settings)), type=PolicyReport)
    assert [repr(each.value) for each in read.settings.values()] == ["1000000", "1.5"]
