"""Tests that dead letters are grouped by origin, reason and first line of the last cause, but for words with digits,
piece by piece; and that a group chooses the same messages for re-drives, moves and purges.

The expected groups come from all headers, decoded one by one. The code under test searches the header lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.engine.background import bulk
from truenext.engine.background.bulk import (
    BulkRequest,
    BulkResult,
    CountDeadLetters,
    DeadLettersResult,
    Move,
    Purge,
    Redrive,
)
from truenext.engine.engine import Engine
from truenext.engine.lifecycle.redelivery import EXPIRED, REJECTED, make_dead_letter
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.pages import PageResult
from truenext.engine.state.queue import Entry
from truenext.errors import RemoteProtocolError
from truenext.model import dead_letters
from truenext.model.batch import Causes
from truenext.model.commands import Send
from truenext.model.dead_letters import DeadLetterGroup, DeadLetterGroups, GroupFilter, cause_pattern
from truenext.model.destination import parse_address
from truenext.model.header_lines import decode_header_lines
from truenext.model.limits import DEAD_LETTERS_PER_PIECE, GROUP_SEQUENCES_MAX, PAGE_BYTES
from truenext.model.message import OPENWIRE_FORM, SentMessage
from truenext.model.policy import Policy

CAUSES = st.sampled_from(
    [
        "",
        "one\ntwo",
        "one",
        " one \r\n\tthree",
        "a:b\\c\nd",
        "\n\n",
        "\nlate",
        "ü" * 300,
        "€:\\" * 500,
        "two",
        "\\n",
        "x" * 254 + "  y",
        "\r\n \n\t two \r\n",
        "order 17: no tea",
        "order A-18_b: no tea",
        "order -٣-: no tea",
        "order 0f8fad5b-d9cb-469f-a165-70867728950e: no tea",
        "order #: no tea",
        "order seventeen: no tea",
        "x" * 250 + " 17 18",
        "1" * 300,
    ]
)
ORIGINS = st.sampled_from(["orders", "DLQ.orders", "subscription,c,s,t", "a:b"])


@st.composite
def letters(draw: st.DrawFn) -> SentMessage:
    """Draw a dead letter, or a message that a client has sent to a dead-letter queue."""
    form = draw(st.sampled_from([0, OPENWIRE_FORM]))
    header = b"" if form else b"destination:/queue/orders\ncontent-length:0\n"
    message = SentMessage(4, True, 0, header, b"", arrived_ms=draw(st.integers(1, 20)), form=form)
    if draw(st.integers(0, 5)) == 0:
        return message
    cause = draw(CAUSES)
    failed = make_dead_letter(
        message,
        draw(ORIGINS),
        Policy(),
        attempts=1,
        causes=Causes("first", cause) if cause else Causes(),
        reason=draw(st.sampled_from([REJECTED, EXPIRED])),
        now_ms=draw(st.integers(1, 20)),
    )
    return failed.message


def line_of(letter: SentMessage) -> str:
    """Return the first line of the cause of a dead letter, as C32.14 says."""
    cause = decode_header_lines(letter.header).get("truenext-original-last-cause", "")
    lines = [line.strip() for line in cause.split("\n") if line.strip()]
    return lines[0][:255].rstrip() if lines else ""


def without_digits(line: str) -> str:
    """Return a line with # for each word that has a digit, as C32.14 says."""
    words = groupby(line, lambda letter: letter.isascii() and (letter.isalnum() or letter in "_-"))
    texts = ["".join(letters) for _, letters in words]
    return "".join("#" if set(text) & set("0123456789") else text for text in texts)


def key_of(letter: SentMessage) -> tuple[str, str, str]:
    """Return the group of a dead letter, as C32.14 says."""
    headers = decode_header_lines(letter.header)
    origin = letter.redrive_queue or headers.get("truenext-original-destination", "")
    reason = headers.get("truenext-dead-letter-cause", "")
    return origin.removeprefix("/queue/"), reason, without_digits(line_of(letter))


def time_of(letter: SentMessage) -> int:
    return int(decode_header_lines(letter.header).get("truenext-dead-letter-timestamp", letter.arrived_ms))


def expected_groups(found: list[SentMessage]) -> dict[tuple[str, str, str], DeadLetterGroup]:
    groups = {}
    for key in dict.fromkeys(map(key_of, found)):
        members = {number: letter for number, letter in enumerate(found, 1) if key_of(letter) == key}
        times = [time_of(letter) for letter in members.values()]
        sequences = list(members)[:GROUP_SEQUENCES_MAX]
        example = line_of(next(iter(members.values())))
        groups[key] = DeadLetterGroup(*key, len(members), min(times), max(times), sequences, example)
    return groups


@given(st.lists(letters(), max_size=40), st.lists(st.integers(0, 40), max_size=4), st.integers(1, 5))
def test_groups_of_pieces_add_up_to_those_of_all_messages_with_the_rest_as_others(
    found: list[SentMessage], cuts: list[int], groups_max: int
) -> None:
    # C32.14
    with pytest.MonkeyPatch.context() as patch:
        all_groups = DeadLetterGroups()
        ends = sorted({*(cut for cut in cuts if cut < len(found)), len(found)})
        for first, end in zip([0, *ends], ends, strict=False):
            piece = DeadLetterGroups()
            for number in range(first, end):
                piece.add_message(found[number], number + 1)
            patch.setattr(dead_letters, "DEAD_LETTER_GROUPS_MAX", groups_max)
            all_groups.add(msgspec.json.decode(msgspec.json.encode(list(piece)), type=list[DeadLetterGroup]))
            patch.undo()
    expected = expected_groups(found)
    shown = {(group.origin, group.reason, group.cause): group for group in all_groups}
    assert len(shown) == min(groups_max, len(expected))
    assert shown == {key: expected[key] for key in shown}
    counts = [group.count for group in all_groups]
    assert counts == sorted(counts, reverse=True)
    rest = [group for key, group in expected.items() if key not in shown]
    assert (all_groups.others is None) == (not rest)
    if all_groups.others is not None:
        others = all_groups.others
        assert (others.origin, others.reason, others.cause, others.example) == ("", "", "", "")
        assert others.count == sum(group.count for group in rest)
        assert others.first == min(group.first for group in rest)
        assert others.last == max(group.last for group in rest)


@given(letters(), st.lists(st.booleans(), min_size=3, max_size=3), letters())
def test_filter_matches_the_messages_whose_group_has_its_fields(
    letter: SentMessage, names: list[bool], other: SentMessage
) -> None:
    # C32.14
    fields = [value if is_named else None for value, is_named in zip(key_of(other), names, strict=True)]
    expected = all(value in (None, own) for value, own in zip(fields, key_of(letter), strict=True))
    assert GroupFilter(*fields).compare(letter)[0] is expected
    if fields[2] is not None:
        assert GroupFilter(fields[0], fields[1], line_of(other)).compare(letter)[0] is expected


@given(st.text(st.sampled_from("a7-_ :#'\u0663\n"), max_size=20))
def test_line_of_a_cause_has_a_number_sign_for_each_word_with_a_digit(line: str) -> None:
    # C32.14
    assert cause_pattern(line) == without_digits(line) == cause_pattern(cause_pattern(line))


class DeadLetterQueue:
    """Engine with messages in the queue DLQ.orders, all of them in memory."""

    def __init__(self, found: Iterable[SentMessage]) -> None:
        self.engine = Engine(memory=MemoryBudget(1 << 30))
        self.engine.lifespan.start()
        session = self.engine.commands.connect("s")
        queue = parse_address("/queue/DLQ.orders", "s")
        for letter in found:
            self.engine.commands.send(session, Send(queue, letter))
        self._commit()

    def _commit(self) -> None:
        while (batch := self.engine.take_batch()) is not None:
            self.engine.store_results.on_committed(batch)

    def waiting(self, name: str) -> list[Entry]:
        return [entry for lane in self.engine.queues.by_name[name].lanes for entry in lane.entries_between(0, 1000)]

    def pieces(self, request: BulkRequest) -> Iterator[BulkResult]:
        """Execute all pieces of a request."""
        work = self.engine.tasks.bulk_pieces
        while (read := work.next_read(request)) is not None:
            result = work.execute(request, read, PageResult([], as_of=0, is_end=True))
            self._commit()
            yield result
            if result.next is None:
                return
            request = msgspec.structs.replace(request, after=result.next, until=result.until)

    def count(self, request: CountDeadLetters) -> dict[tuple[str, str, str], int]:
        """Return the number of messages of each group."""
        groups = DeadLetterGroups()
        for result in self.pieces(request):
            assert isinstance(result, DeadLettersResult)
            assert result.count == sum(group.count for group in result.groups) <= DEAD_LETTERS_PER_PIECE
            groups.add(result.groups)
        return {(group.origin, group.reason, group.cause): group.count for group in groups}


COUNT_ALL = CountDeadLetters("DLQ.orders")
COUNT_ALL_OF_GROUP = CountDeadLetters("DLQ.orders", group=GroupFilter(origin="orders"))


@given(
    st.lists(letters(), min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from(["redrive", "move", "purge"]),
    st.data(),
)
def test_bulk_work_on_a_group_takes_its_messages_and_leaves_all_others(
    found: list[SentMessage], piece_size: int, verb: str, data: st.DataObject
) -> None:
    # C32.14
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "_PIECE_SIZES", {CountDeadLetters: (piece_size, PAGE_BYTES)})
        queue = DeadLetterQueue(found)
        assert queue.count(COUNT_ALL) == dict(Counter(map(key_of, found)))
        chosen = data.draw(st.sampled_from([*map(key_of, found), ("orders", "rejected", "one")]))
        group = GroupFilter(*chosen)
        assert queue.count(CountDeadLetters("DLQ.orders", group=group)) == {
            key: count for key, count in Counter(map(key_of, found)).items() if key == chosen
        }
        work: dict[str, BulkRequest] = {
            "redrive": Redrive("DLQ.orders", group=group),
            "move": Move("DLQ.orders", to="elsewhere", group=group),
            "purge": Purge("DLQ.orders", group=group),
        }
        moved = sum(result.count for result in queue.pieces(work[verb]))
        left = Counter(map(key_of, found))
        # What came from nowhere, or from this queue, or an ended subscription cannot go back.
        stays = verb == "redrive" and chosen[0] in ("", "DLQ.orders", "subscription,c,s,t")
        if stays:
            assert moved == 0
        else:
            assert moved == left.pop(chosen, 0)
        if queue.engine.queues.by_name.get("DLQ.orders") is not None:
            assert queue.count(COUNT_ALL) == dict(left)


def test_group_and_selector_must_both_match() -> None:
    # C32.14
    def letter(colour: str, cause: str) -> SentMessage:
        message = SentMessage(4, True, 0, f"colour:{colour}\n".encode(), b"")
        causes = Causes(cause, cause)
        failed = make_dead_letter(message, "orders", Policy(), attempts=1, causes=causes, reason=REJECTED, now_ms=1)
        return failed.message

    found = [letter(colour, cause) for colour in ("red", "blue") for cause in ("one", "two")]
    queue = DeadLetterQueue(found)
    # A piece looks at more messages than its limit lets it remove.
    dry = Purge("DLQ.orders", group=GroupFilter(cause="two"), limit=1, dry_run=True)
    assert next(queue.pieces(dry)).count == 1
    request = Purge("DLQ.orders", selector="colour = 'red'", group=GroupFilter(cause="two"), limit=3)
    assert [result.count for result in queue.pieces(request)] == [1]
    assert queue.count(COUNT_ALL) == {("orders", "rejected", "one"): 2, ("orders", "rejected", "two"): 1}
    assert queue.count(CountDeadLetters("DLQ.orders", selector="colour = 'red'")) == {("orders", "rejected", "one"): 1}


def _failed_with(cause: str) -> SentMessage:
    message, causes = SentMessage(4, True, 0, b"", b""), Causes(cause, cause)
    return make_dead_letter(message, "orders", Policy(), attempts=1, causes=causes, reason=REJECTED, now_ms=1).message


@pytest.mark.parametrize("cause", ["1 " * 127, "x" * 4000])
def test_piece_ends_early_if_its_causes_take_long(cause: str) -> None:
    queue = DeadLetterQueue([_failed_with(cause)] * 100)
    for request in (COUNT_ALL, COUNT_ALL_OF_GROUP):
        counts = [result.count for result in queue.pieces(request)]
        assert len(counts) > 1 and sum(counts) == 100


@pytest.mark.parametrize("cause", ["1 " * 127, "x" * 4000])
def test_work_on_a_group_takes_more_pieces_if_the_causes_take_long(cause: str) -> None:
    number = 150
    for chosen in (cause, "other"):
        queue = DeadLetterQueue([_failed_with(cause)] * number)
        counts = [result.count for result in queue.pieces(Purge("DLQ.orders", group=GroupFilter(cause=chosen)))]
        assert len(counts) > 1 and sum(counts) == (number if chosen == cause else 0)


def test_group_of_a_long_cause_is_found_by_the_whole_cause() -> None:
    # C32.14
    cause = "  " + "no tea " * 100 + "\nTraceback"
    letter = _failed_with(cause)
    assert GroupFilter(cause=cause).compare(letter)[0]
    assert not GroupFilter(cause="tea" + cause).compare(letter)[0]


@pytest.mark.parametrize("work", [Redrive, partial(Move, to="elsewhere"), Purge], ids=["redrive", "move", "purge"])
@pytest.mark.parametrize("is_dry", [True, False])
def test_redrive_counts_messages_that_are_transient_again(work: Callable[..., BulkRequest], is_dry: bool) -> None:
    # C12.2
    found = []
    for is_persistent in (True, False, False, True, False):
        message = SentMessage(4, is_persistent, 0, b"", b"")
        failed = make_dead_letter(message, "orders", Policy(), attempts=1, causes=Causes(), reason=REJECTED, now_ms=1)
        found.append(failed.message)
    queue = DeadLetterQueue(found)
    (result,) = queue.pieces(work("DLQ.orders", dry_run=is_dry))
    assert (result.count, result.transient) == (5, 3 if work is Redrive else 0)
    if work is Redrive and not is_dry:
        assert sum(not entry.persistent for entry in queue.waiting("orders")) == 3


def test_messages_of_a_queue_that_is_no_dead_letter_queue_are_not_counted() -> None:
    # C32.14
    queue = DeadLetterQueue([])
    session = queue.engine.commands.connect("t")
    queue.engine.commands.send(session, Send(parse_address("/queue/orders", "t"), SentMessage(4, True, 0, b"", b"")))
    with pytest.raises(RemoteProtocolError, match=r"'orders' is not a dead-letter queue: .* in 'DLQ.orders'"):
        queue.engine.tasks.bulk_pieces.check_request(CountDeadLetters("orders"))
