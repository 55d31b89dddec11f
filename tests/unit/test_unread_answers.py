"""Tests of the memory that all answers take together which clients have not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from truenext.broker.unread_answers import UnreadAnswers
from truenext.engine.state.memory import MemoryBudget
from truenext.model.limits import UNREAD_ANSWER_BYTES, UNSENT_ANSWER_BYTES_MAX

SHARE = UNSENT_ANSWER_BYTES_MAX


class Reader:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_answers_unread(self, reason: str) -> None:
        self.reasons.append(reason)


class Rig:
    def __init__(self) -> None:
        self.memory = MemoryBudget(limit=1)
        self.soon: list[Callable[[], None]] = []
        self.answers = UnreadAnswers(self.memory, cast(Any, self))

    def call_soon(self, action: Callable[[str], None], reason: str) -> None:
        self.soon.append(lambda: action(reason))


def test_connection_with_most_unread_answers_ends_once_all_take_more_than_their_share() -> None:
    rig = Rig()
    most, other, last = Reader(), Reader(), Reader()
    rig.answers.update(most, SHARE // 2)
    rig.answers.update(other, SHARE // 4)
    rig.answers.update(last, SHARE // 4)
    assert not rig.soon and rig.memory.answer_bytes == SHARE
    rig.answers.update(last, SHARE // 4 + 1)
    (end,) = rig.soon
    assert rig.memory.answer_bytes == SHARE // 2 + 1
    end()
    (reason,) = most.reasons
    assert f"has {SHARE // 2} bytes of unread answers, the most of all" in reason and f"more than {SHARE} " in reason
    rig.answers.update(most, 0)
    assert not other.reasons and not last.reasons and rig.memory.answer_bytes == SHARE // 2 + 1


def test_connections_with_few_unread_answers_each_go_on() -> None:
    rig = Rig()
    readers = [Reader() for _ in range(2 * SHARE // UNREAD_ANSWER_BYTES)]
    for reader in readers:
        rig.answers.update(reader, UNREAD_ANSWER_BYTES)
    assert not rig.soon and rig.memory.answer_bytes == 2 * SHARE
    rig.answers.update(readers[0], UNREAD_ANSWER_BYTES + 1)
    assert len(rig.soon) == 1


def test_connection_that_reads_its_answers_ends_none() -> None:
    rig = Rig()
    most, other = Reader(), Reader()
    rig.answers.update(most, SHARE // 2)
    rig.answers.update(other, SHARE // 2)
    rig.memory.limit = 0
    rig.memory.answer_bytes += 1
    rig.answers.update(other, SHARE // 2)
    rig.answers.update(most, SHARE // 2 - 1)
    assert not rig.soon


def test_unread_answers_count_as_memory_of_messages() -> None:
    rig = Rig()
    rig.answers.update(Reader(), 1000)
    assert rig.memory.bytes_over_limit == 999
