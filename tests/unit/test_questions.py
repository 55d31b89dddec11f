"""Is what is asked of all queues answered rightly, in steps that are short however many queues there are?"""

import json
from collections import Counter
from collections.abc import Generator
from typing import Any
from unittest import mock

import pytest

from tests.unit.looking import looked
from truenext.broker import slices as slices_module
from truenext.broker.control import LOOKED_AT_AT_ONCE, SORTED_AT_ONCE, VERBS, Asked
from truenext.broker.pager import Pager
from truenext.broker.questions import Questions
from truenext.broker.reload import NO_FILE
from truenext.broker.slices import Slices, Steps
from truenext.commands import AckMode, Control, Send, Subscribe
from truenext.destination import parse
from truenext.engine import stuck
from truenext.engine.engine import Engine
from truenext.engine.queue import Queue
from truenext.engine.session import Session
from truenext.engine.stuck import StuckAudit
from truenext.errors import RemoteProtocolError
from truenext.limits import PIECES_MAX
from truenext.message import Message
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
        message = Message(4, False, 0, b"content-length:0\n", b"")
        self.engine.send(self.session, Send(parse(f"/queue/{queue}", "s"), message))

    def subscribe(self, address: str, session: Session | None = None) -> None:
        subscribe = Subscribe(address, parse(address, "s"), AckMode.INDIVIDUAL, 1000)
        self.engine.subscribe(session or self.session, subscribe)

    def begin(self, verb: str) -> Generator[None, None, bytes]:
        pager = mock.Mock(spec=Pager, under_way=set())
        return VERBS[verb](Asked(self.engine, self.audit, pager, lambda: NO_FILE))

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
    assert MANY > 2 * SORTED_AT_ONCE


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


@pytest.mark.parametrize("verb", ["queues", "status"])
def test_no_step_looks_at_more_than_a_few_queues(verb: str) -> None:
    world = World()
    for number in range(MANY):
        world.send(f"q{number}")
    looks: Counter[int] = Counter()
    waiting = Queue.waiting

    def counted(queue: Queue) -> int:
        looks[step] += 1
        return waiting(queue)

    step = 0
    with mock.patch.object(Queue, "waiting", counted):
        for _ in world.begin(verb):
            step += 1
    assert max(looks.values()) == LOOKED_AT_AT_ONCE
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
        for _ in world.audit.look(world.engine, set):
            step += 1
    assert max(looks.values()) == 10 * stuck.QUEUES_AT_ONCE
    assert sum(looks.values()) == 10 * stuck.QUEUES_MAX
    assert [looks[number] for number in range(MANY // stuck.CONSUMERS_AT_ONCE)] == [0] * (
        MANY // stuck.CONSUMERS_AT_ONCE
    )


def test_a_queue_whose_consumer_has_left_since_the_round_began_is_not_taken_for_stuck() -> None:
    world = World()
    leaving, world.session = world.session, world.engine.connect("other")
    world.subscribe("/queue/q", leaving)
    world.subscribe("/queue/r")
    with mock.patch.object(stuck, "QUEUES_AT_ONCE", 1):
        steps = world.audit.look(world.engine, set)
        next(steps)
        assert [queue.name for queue in world.audit._left] == ["q"]
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

    slices = Slices(clock)
    slices.begin(work("a"))
    slices.begin(work("b"))
    expected = [["a0", "a1"], ["a2", "b0"], ["b1", "b2"]]
    for some in expected:
        slices.go_on()
        assert done == some
        done.clear()
        assert slices.begun
    slices.go_on()
    assert not slices.begun


class Asking:
    """Questions whose answers are numbers, each made in two steps."""

    def __init__(self) -> None:
        self.slices = Slices(Clock())
        self.made = 0
        self.replies: list[tuple[str, str | None, bytes]] = []
        self.questions = Questions(self.slices, self.begin, self.reply)

    def begin(self, verb: str) -> Generator[None, None, bytes]:
        yield
        self.made += 1
        return f"{verb} {self.made}".encode()

    def reply(self, session: Session, question: Control, body: bytes) -> None:
        self.replies.append((session.id, question.correlation, body))

    def ask(self, session: Session, correlation: str, verb: str = "queues") -> None:
        self.questions.ask(session, Control(verb, b"", parse("/temp-queue/a", session.id), correlation))


def test_all_who_asked_before_an_answer_was_begun_get_it_and_who_asks_later_gets_another() -> None:
    asking = Asking()
    one, other = Session("one"), Session("other")
    asking.ask(one, "1")
    asking.ask(other, "2")
    asking.ask(one, "3", "status")
    begun = asking.slices.begun
    next(begun[0])
    asking.ask(one, "4")
    assert asking.questions.owed(one) == 3
    asking.slices.go_on()
    assert asking.replies == [
        ("one", "1", b"queues 1"),
        ("other", "2", b"queues 1"),
        ("one", "3", b"status 2"),
        ("one", "4", b"queues 3"),
    ]
    assert asking.questions.owed(one) == asking.questions.owed(other) == 0


def test_a_connection_may_wait_for_a_hundred_answers_and_no_more() -> None:
    asking = Asking()
    one, other = Session("one"), Session("other")
    for number in range(PIECES_MAX):
        asking.ask(one, str(number))
    with pytest.raises(RemoteProtocolError, match=f"waits for {PIECES_MAX} answers"):
        asking.ask(one, "one too many")
    asking.ask(other, "another's")
    asking.slices.go_on()
    asking.ask(one, "again")
    assert len(asking.replies) == PIECES_MAX + 1
