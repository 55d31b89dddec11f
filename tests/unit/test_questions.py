"""Is what is asked of all queues answered rightly, in steps that are short however many queues there are?"""

import json
from collections import Counter
from collections.abc import Generator
from functools import partial
from typing import Any
from unittest import mock

import pytest
from msgspec import structs

from tests.unit.looking import looked
from truenext.broker import slices as slices_module
from truenext.broker.control import (
    ITEMS_PER_STEP,
    LARGEST_COUNT,
    NAMES_SORTED_PER_STEP,
    VERBS,
    ClientInfo,
    QueryContext,
)
from truenext.broker.control_requests import SMALL_ANSWER_BYTES, ControlRequests
from truenext.broker.pager import Pager
from truenext.broker.reload import NO_FILE
from truenext.broker.slices import SlicedWork, Steps
from truenext.commands import AckMode, ControlRequest, Send, Subscribe
from truenext.destination import parse
from truenext.engine import stuck
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.queue import Queue
from truenext.engine.stuck import StuckAudit
from truenext.errors import RemoteProtocolError
from truenext.limits import ANSWER_SECONDS_MAX, ANSWER_STALL_SECONDS, ANSWERS_IN_FLIGHT_BYTES_MAX, PIECES_MAX
from truenext.message import SentMessage
from truenext.order import RANKS

MANY = 2345


class World:
    def __init__(self) -> None:
        self.engine = Engine()
        self.engine.start()
        batch = self.engine.take_batch()
        assert batch is not None
        self.engine.committed(batch)
        self.session = self.engine.connect("s")
        self.audit = StuckAudit()

    def send(self, queue: str) -> None:
        self.send_to(f"/queue/{queue}")

    def send_to(self, address: str, body: bytes = b"") -> None:
        message = SentMessage(4, False, 0, b"content-length:0\n", body)
        self.engine.send(self.session, Send(parse(address, "s"), message))

    def subscribe(self, address: str, session: ConnectionState | None = None, window: int = 1000) -> None:
        subscribe = Subscribe(address, parse(address, session.id if session else "s"), AckMode.INDIVIDUAL, window)
        self.engine.subscribe(session or self.session, subscribe)

    def begin(self, verb: str) -> Generator[None, None, bytes]:
        pager = mock.Mock(spec=Pager, pending=set())
        return VERBS[verb](QueryContext(self.engine, self.audit, pager, lambda: NO_FILE, self.caller, {}))

    @staticmethod
    def caller(session: ConnectionState) -> ClientInfo:
        return ClientInfo(f"host of {session.id}", f"id of {session.id}")

    def answer(self, verb: str) -> Any:
        return json.loads(finished(self.begin(verb)))


def finished(answer: Generator[None, None, bytes]) -> bytes:
    while True:
        try:
            next(answer)
        except StopIteration as end:
            body: bytes = end.value
            return body


def row(name: str, **facts: Any) -> dict[str, Any]:
    return {"name": name, "waiting": 0, "unacknowledged": 0, "consumers": 0, "scheduled": 0, "paused": False} | facts


def test_each_queue_is_there_once_in_the_order_of_names_whatever_number_there_are() -> None:
    world = World()
    names = [f"q{number * 7919 % MANY}" for number in range(MANY)]
    for name in names:
        world.send(name)
    assert world.answer("queues") == [row(name, waiting=1) for name in sorted(names)]
    assert MANY > 2 * NAMES_SORTED_PER_STEP


def test_what_somebody_holds_who_takes_from_many_queues_is_counted_in_each() -> None:
    world = World()
    other = world.engine.connect("other")
    world.subscribe("/queue/a.*")
    for name in ("a.x", "a.x", "a.y", "b", "b"):
        world.send(name)
    world.engine.turn()
    world.subscribe("/queue/b", other)
    world.send("a.y")
    world.engine.turn()
    world.send("b")
    assert world.answer("queues") == [
        row("a.x", unacknowledged=2, consumers=1),
        row("a.y", unacknowledged=2, consumers=1),
        row("b", unacknowledged=2, waiting=1, consumers=1),
    ]
    status = world.answer("status")
    assert (status["waiting"], status["in_memory"], status["queues"]) == (1, 7, 3)


def test_what_ends_with_its_connection_is_summed_and_the_largest_are_named() -> None:
    world = World()
    nothing = {"waiting": 0, "unacknowledged": 0, "bytes": 0, "largest": []}
    assert world.answer("status")["temporary"] == nothing
    slow, slower = world.engine.connect("slow"), world.engine.connect("slower")
    world.subscribe("/topic/news.*", slow, window=1)
    world.subscribe("/temp-topic/own", slower)
    world.subscribe("/temp-queue/answers", slower, window=1)
    world.subscribe("/queue/q", window=1)
    assert world.answer("status")["temporary"] == nothing
    for _ in range(3):
        for address in ("/topic/news.eu", "/queue/q", "/remote-temp-queue/slower/answers"):
            world.send_to(address, bytes(1000))
            world.engine.turn()
    world.send_to("/remote-temp-queue/slower/answers", bytes(1000))
    status = world.answer("status")
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
    world.send_to("/remote-temp-topic/slower/own")
    assert "/temp-topic/own" in [each["destination"] for each in world.answer("status")["temporary"]["largest"]]


def test_of_many_that_end_with_their_connection_only_the_largest_are_named_those_that_are_left() -> None:
    world = World()
    sessions = [world.engine.connect(f"s{number}") for number in range(2 * LARGEST_COUNT)]
    for number, session in enumerate(sessions):
        world.subscribe("/topic/t", session)
        world.send_to("/topic/t", bytes(1000 * number))
    answer = world.begin("status")
    next(answer)
    world.engine.disconnect(sessions[0], is_clean=True)
    largest = json.loads(finished(answer))["temporary"]["largest"]
    assert [each["client"] for each in largest] == [f"host of s{number}" for number in range(1, LARGEST_COUNT)]


@pytest.mark.parametrize("verb", ["queues", "status"])
def test_no_step_looks_at_more_than_a_few_consumers_of_one_queue(verb: str) -> None:
    world = World()
    subscribe = Subscribe("", parse("/temp-queue/q" if verb == "status" else "/queue/q", "s"), AckMode.INDIVIDUAL, 1)
    for number in range(1000):
        world.engine.subscribe(world.session, structs.replace(subscribe, subscription=str(number)))
    steps = sum(1 for _ in world.begin(verb))
    assert steps >= 1000 // ITEMS_PER_STEP


@pytest.mark.parametrize("verb", ["queues", "status"])
def test_no_step_looks_at_more_than_a_few_queues(verb: str) -> None:
    world = World()
    for number in range(MANY):
        world.send(f"q{number}")
    looks: Counter[int] = Counter()
    waiting = Queue.waiting_count

    def counted(queue: Queue) -> int:
        looks[step] += 1
        return waiting(queue)

    step = 0
    with mock.patch.object(Queue, "waiting_count", counted):
        for _ in world.begin(verb):
            step += 1
    assert max(looks.values()) == ITEMS_PER_STEP
    assert sum(looks.values()) >= MANY


def test_what_is_said_of_a_queue_is_never_from_before_the_question() -> None:
    world = World()
    for number in range(MANY):
        world.send(f"q{number:04}")
    answer = world.begin("queues")
    world.send("q0000")
    world.send("q0000 is older")
    assert json.loads(finished(answer))[:2] == [row("q0000", waiting=2), row("q0000 is older", waiting=1)]


def test_no_step_of_the_look_for_stuck_queues_looks_at_more_than_a_few_or_finds_more_than_some_consumers() -> None:
    world = World()
    for number in range(MANY):
        world.subscribe(f"/queue/q{number}", world.engine.connect(f"s{number}"))
    for queue in world.engine.queues():
        for rank in RANKS:
            queue.lane(rank)
    looks: Counter[int] = Counter()
    is_empty = stuck._is_empty

    def counted(lane: Any) -> bool:
        looks[step] += 1
        return is_empty(lane)

    step = 0
    with mock.patch.object(stuck, "_is_empty", counted):
        for _ in world.audit.check(world.engine, set):
            step += 1
    assert max(looks.values()) == 10 * stuck.QUEUES_PER_STEP
    assert sum(looks.values()) == 10 * stuck.QUEUES_MAX
    assert [looks[number] for number in range(MANY // stuck.CONSUMERS_PER_STEP)] == [0] * (
        MANY // stuck.CONSUMERS_PER_STEP
    )


def test_a_queue_whose_consumer_has_left_since_the_round_began_is_not_taken_for_stuck() -> None:
    world = World()
    leaving, world.session = world.session, world.engine.connect("other")
    world.subscribe("/queue/q", leaving)
    world.subscribe("/queue/r")
    with mock.patch.object(stuck, "QUEUES_PER_STEP", 1):
        steps = world.audit.check(world.engine, set)
        next(steps)
        assert [queue.name for queue in world.audit._remaining] == ["q"]
        world.engine.disconnect(leaving, is_clean=True)
        world.send("q")
        list(steps)
    assert world.audit._since == {}
    world.send("r")
    looked(world.audit, world.engine)
    assert [queue.name for queue in world.audit._since] == ["r"], "nobody has dispatched it"


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
            clock.now_ns += slices_module.SLICE_NS // 2
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


class Asking:
    """Questions whose answers are numbers, each made in two steps, and as long as somebody says."""

    def __init__(self, size: int = 0) -> None:
        self.slices = SlicedWork(Clock())
        self.made = 0
        self.size = size
        self.gone: set[ConnectionState] = set()
        self.replies: list[tuple[str, str | None, bytes]] = []
        self.questions = ControlRequests(self.slices, self.begin, self.reply)

    def begin(self, verb: str, of: ConnectionState | None) -> Generator[None, None, bytes]:
        yield
        if of is not None:
            verb = f"{verb} of {of.id}"
        self.made += 1
        return f"{verb} {self.made}".encode().ljust(self.size)

    def reply(self, session: ConnectionState, question: ControlRequest, body: bytes) -> bool:
        self.replies.append((session.id, question.correlation, body.strip()))
        return session not in self.gone

    def ask(
        self, session: ConnectionState, correlation: str, verb: str = "queues", *, of: ConnectionState | None = None
    ) -> None:
        self.questions.add(
            session, ControlRequest(verb, b"", parse("/temp-queue/a", session.id), correlation), about=of
        )


def test_all_who_asked_before_an_answer_was_begun_get_it_and_who_asks_later_gets_another() -> None:
    asking = Asking()
    one, other = ConnectionState("one"), ConnectionState("other")
    asking.ask(one, "1")
    asking.ask(other, "2")
    asking.ask(one, "3", "status")
    started = asking.slices.pending
    next(started[0])
    asking.ask(one, "4")
    assert asking.questions.pending_count(one) == 3
    asking.slices.run_slice()
    assert asking.replies == [
        ("one", "1", b"queues 1"),
        ("other", "2", b"queues 1"),
        ("one", "3", b"status 2"),
        ("one", "4", b"queues 3"),
    ]
    assert asking.questions.pending_count(one) == asking.questions.pending_count(other) == 0


def test_what_a_connection_asks_of_itself_is_answered_to_no_other() -> None:
    asking = Asking()
    one, other = ConnectionState("one"), ConnectionState("other")
    for session in (one, other, one):
        asking.ask(session, "1", "connection", of=session)
    while asking.slices.pending:
        asking.slices.run_slice()
    assert asking.replies == [
        ("one", "1", b"connection of one 1"),
        ("one", "1", b"connection of one 1"),
        ("other", "1", b"connection of other 2"),
    ]


def test_a_connection_may_wait_for_a_hundred_answers_and_no_more() -> None:
    asking = Asking()
    one, other = ConnectionState("one"), ConnectionState("other")
    for number in range(PIECES_MAX):
        asking.ask(one, str(number))
    with pytest.raises(RemoteProtocolError, match=f"waits for {PIECES_MAX} answers"):
        asking.ask(one, "one too many")
    asking.ask(other, "another's")
    asking.slices.run_slice()
    asking.ask(one, "again")
    assert len(asking.replies) == PIECES_MAX + 1


def asked_by(asking: Asking, count: int) -> list[ConnectionState]:
    sessions = [ConnectionState(str(number)) for number in range(count)]
    for session in sessions:
        asking.ask(session, "1")
    while asking.slices.pending:
        asking.slices.run_slice()
    return sessions


def test_of_large_answers_only_some_are_on_their_way_at_once_and_the_next_come_when_those_are_taken() -> None:
    """Fixed: two hundred who asked at once made the broker take 783 MiB, and ended those who read."""
    asking = Asking(size=ANSWERS_IN_FLIGHT_BYTES_MAX // 3)
    sessions = asked_by(asking, 7)
    assert [session for session, _, _ in asking.replies] == ["0", "1", "2"]
    asking.questions.all_sent(sessions[5])
    assert len(asking.replies) == 3, "it has got nothing yet"
    asking.questions.all_sent(sessions[1])
    assert len(asking.replies) == 4 and asking.questions.pending_count(sessions[4]) == 1
    asking.questions.connection_closed(sessions[0])
    asking.gone.add(sessions[5])
    asking.questions.all_sent(sessions[2])
    # Who has gone meanwhile stands in nobody's way.
    assert len(asking.replies) == 7
    for session in (*sessions[3:5], sessions[6]):
        asking.questions.all_sent(session)
    assert not asking.questions.in_flight


def test_an_answer_that_is_larger_than_all_that_may_be_on_its_way_goes_alone_and_small_ones_wait_for_nobody() -> None:
    asking = Asking(size=3 * ANSWERS_IN_FLIGHT_BYTES_MAX)
    first, second = asked_by(asking, 2)
    assert len(asking.replies) == 1
    asking.questions.all_sent(first)
    assert len(asking.replies) == 2 and list(asking.questions.in_flight) == [second]
    small = Asking(size=1000)
    asked_by(small, 100)
    assert len(small.replies) == 100 and not small.questions.in_flight


def test_who_is_ended_before_its_answer_is_made_is_owed_nothing_after_that() -> None:
    asking = Asking(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    session = ConnectionState("one")
    asking.ask(session, "1")
    asking.ask(session, "2", "status")
    asking.questions.connection_closed(session)
    asking.gone.add(session)
    while asking.slices.pending:
        asking.slices.run_slice()
    assert not asking.questions._pending_counts and not asking.questions.in_flight


def test_those_who_asked_the_same_are_answered_one_in_each_step() -> None:
    asking = Asking()
    for number in range(5):
        asking.ask(ConnectionState(str(number)), "1")
    (work,) = asking.slices.pending
    answered = []
    for _ in work:
        answered.append(len(asking.replies))
    assert answered == [0, 1, 2, 3, 4, 5]


def test_who_has_credit_for_no_more_of_its_answers_has_not_taken_them() -> None:
    asking = Asking(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    first, _ = asked_by(asking, 2)
    first.temporary_queues.append(mock.Mock(waiting=lambda: 1, is_reply_queue=True))
    asking.questions.all_sent(first)
    assert len(asking.replies) == 1
    # What waits in its subscriptions to topics is something else.
    first.temporary_queues[0] = mock.Mock(waiting=lambda: 1, is_reply_queue=False)
    asking.questions.all_sent(first)
    assert len(asking.replies) == 2


def test_a_small_answer_waits_for_no_large_one_but_of_its_own_connection() -> None:
    asking = Asking(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    _, second = asked_by(asking, 2)
    asking.size = 10
    asking.ask(second, "2", "status")
    asking.ask(ConnectionState("other"), "3", "status")
    while asking.slices.pending:
        asking.slices.run_slice()
    assert [correlation for _, correlation, _ in asking.replies] == ["1", "3"]


def test_who_is_ended_gets_no_other_answer_that_would_keep_those_of_others() -> None:
    asking = Asking(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    first, second = ConnectionState("first"), ConnectionState("second")
    for session, correlation in ((first, "1"), (first, "2"), (second, "3")):
        asking.ask(session, correlation)
    while asking.slices.pending:
        asking.slices.run_slice()
    asking.questions.connection_closed(first)
    assert [correlation for _, correlation, _ in asking.replies] == ["1", "3"]
    assert asking.questions.pending_count(first) == 0


def test_who_takes_nothing_of_its_answer_while_others_wait_is_ended_after_ten_seconds() -> None:
    asking = Asking(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    taken = Counter[ConnectionState]()
    hindering = partial(asking.questions.find_blocking, bytes_sent=lambda session: taken[session])
    deaf, waiting = asked_by(asking, 2)
    assert hindering(0.0) is None
    taken[deaf] = SMALL_ANSWER_BYTES
    assert hindering(9.0) is None and hindering(18.0) is None, "it took something meanwhile"
    taken[deaf] += 40
    assert hindering(9.0 + ANSWER_STALL_SECONDS) is deaf, "those were heart-beats"
    asking.questions.connection_closed(deaf)
    assert [session for session, _, _ in asking.replies] == ["0", "1"]
    for now_s in (30.0, 60.0):
        assert hindering(now_s) is None, "nobody waits for another to be taken"
    assert asking.questions.pending_count(waiting) == 0


def test_who_has_not_all_of_its_answer_after_a_minute_is_ended_if_others_wait() -> None:
    asking = Asking(size=ANSWERS_IN_FLIGHT_BYTES_MAX)
    slow, _ = asked_by(asking, 2)
    taken = Counter[ConnectionState]()
    for second in range(ANSWER_SECONDS_MAX):
        assert asking.questions.find_blocking(second, taken.__getitem__) is None
        taken[slow] += SMALL_ANSWER_BYTES
    assert asking.questions.find_blocking(ANSWER_SECONDS_MAX, taken.__getitem__) is slow
