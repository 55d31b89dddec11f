"""Tests of the promises of store.py, for every store.

One suite for all stores; what only a disk can do wrong is in test_embedded_store.py.
"""

import itertools
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.disk import (
    COPIES,
    KINDS,
    LANE,
    NEXT_QUEUE,
    OTHER_LANE,
    Disk,
    all_timers,
    embedded,
    key,
    put,
    sequences,
    timers,
)
from tests.contract.postgresql.log_writer import make_log, open_compacted
from tests.drawing import each_one_of
from truenext.errors import StoreError
from truenext.model.batch import DUE_NEVER, NO_MARK, Batch, Causes, Mark, ProducerState
from truenext.model.record import (
    CONTENTS_LANE_KEY,
    LANE_KEY_SIZE,
    content_key,
    encode_reference,
    lane_key,
    message_key,
    referenced_content_number,
    sequence_of,
    split_lane_key,
    split_timer,
    timer_key,
)
from truenext.store.changes import PUT_HEADER_BYTES, changes_of, decode_changes, encode_batch
from truenext.store.changes import causes_of as causes_of_rare
from truenext.store.embedded import EmbeddedStore
from truenext.store.memory import MemoryStore
from truenext.store.overlay import iter_spans
from truenext.store.store import Recovered, Store, TimerPage, UndecodedMessage


class Shared(NamedTuple):
    """A content that a batch puts."""

    number: int
    record: bytes
    copies: list[bytes]
    """Keys of the messages that refer to it."""
    persistent: bool = True


# A new store


def test_a_new_store_is_empty_and_counts_as_cleanly_stopped(disk: Disk) -> None:
    recovered = disk.crash()
    assert recovered == Recovered(identity=recovered.identity, clean_stop=True)
    assert recovered.sequence_limit == 1
    assert disk.store.read_page(LANE, 0, 10).messages == []


def test_the_identity_is_eight_hexadecimal_digits_and_never_changes(disk: Disk, tmp_path: Path) -> None:
    identity = disk.crash().identity
    assert len(identity) == 8
    assert set(identity) <= set("0123456789abcdef")
    disk.apply(puts=put(1), clean_stop=False)
    assert disk.crash().identity == identity
    assert disk.stop().identity == identity
    other = Disk(disk.kind, tmp_path / "other")
    assert other.crash().identity != identity
    other.store.close()


def test_a_batch_before_recover_is_refused(disk: Disk, tmp_path: Path) -> None:
    store: Store = MemoryStore() if disk.kind == "memory" else embedded(disk.kind, tmp_path / "other")
    with pytest.raises(StoreError, match=r"recover\(\) was not called"):
        store.apply(Batch(1))
    store.close()


def test_a_batch_after_close_is_refused(disk: Disk) -> None:
    disk.store.close()
    with pytest.raises(StoreError, match="the store is closed"):
        disk.apply(puts=put(1))
    disk.open()
    assert sequences(disk.store) == []


def test_close_can_be_called_twice(disk: Disk) -> None:
    disk.store.close()
    disk.store.close()


# What a batch does


def test_applied_batch_survives_a_crash(disk: Disk) -> None:
    resolved = (2, 2**63 - 2)
    producer = ProducerState(2**63 - 1, 1_700_000_000_000, highest_commit=2**63 - 1, is_gapless=True, resolved=resolved)
    disk.apply(
        puts=put(1, 2),
        marks={key(2): (3, 4)},
        queues={1: "orders"},
        producers={"p": producer},
        sequence_limit=1 << 20,
        clean_stop=False,
    )
    identity = disk.crash().identity
    recovered = disk.crash()
    assert recovered == Recovered(
        identity=identity,
        clean_stop=False,
        sequence_limit=1 << 20,
        queues={1: "orders"},
        counts={LANE: 2},
        producers={"p": producer},
    )
    messages = disk.store.read_page(LANE, 0, 10).messages
    assert [(m.key, m.record, m.mark.attempts, m.mark.deliveries) for m in messages] == [
        (key(1), b"record 1", 0, 0),
        (key(2), b"record 2", 3, 4),
    ]


def test_a_batch_that_fails_leaves_nothing_behind(disk: Disk) -> None:
    disk.apply(puts=put(1, 2), marks={key(1): (1, 1)}, queues={1: "orders"}, sequence_limit=100, clean_stop=False)
    before = disk.crash()
    bad = disk.batch(
        removes=[key(1), key(77)],
        unmarks=[key(1)],
        puts=put(3),
        transient_puts=put(4),
        queues={2: "more"},
        producers={"p": ProducerState(1, 1)},
        sequence_limit=200,
    )
    with pytest.raises(StoreError, match="disagree"):
        disk.store.apply(bad)
    assert disk.crash() == before
    messages = disk.store.read_page(LANE, 0, 10).messages
    assert [(sequence_of(m.key), m.mark.attempts) for m in messages] == [(1, 1), (2, 0)]


def test_after_a_failed_batch_every_other_is_refused_until_a_restart(disk: Disk) -> None:
    with pytest.raises(StoreError, match="disagree"):
        disk.apply(removes=[key(77)])
    good = Batch(2)
    good.queues = {1: "orders"}
    for _ in range(2):
        with pytest.raises(StoreError, match="batch 2 is refused: batch 1 could not be written"):
            disk.store.apply(good)
    assert disk.crash().queues == {}
    disk.apply(queues={1: "orders"})
    assert disk.crash().queues == {1: "orders"}


@pytest.mark.parametrize("field", ["removes", "transient_removes"])
def test_removing_a_message_that_is_not_there_is_refused(disk: Disk, field: str) -> None:
    with pytest.raises(StoreError, match=r"disagrees?( with the broker)?: batch 1 removes"):
        disk.apply(**{field: [key(1)]})


@pytest.mark.parametrize("field", ["removes", "transient_removes"])
def test_removing_a_message_twice_in_one_batch_is_refused(disk: Disk, field: str) -> None:
    disk.apply(puts=put(1, 2), transient_puts=put(3, 4))
    removed = key(1) if field == "removes" else key(3)
    with pytest.raises(StoreError, match="removes"):
        disk.apply(**{field: [removed, removed]})


def test_a_message_is_removed_only_as_the_kind_it_was_put(disk: Disk) -> None:
    disk.apply(puts=put(1), transient_puts=put(2))
    with pytest.raises(StoreError, match="removes"):
        disk.apply(removes=[key(2)])
    disk.crash()
    with pytest.raises(StoreError, match="removes"):
        disk.apply(transient_removes=[key(1)])


@pytest.mark.parametrize("field", ["puts", "transient_puts"])
def test_putting_a_message_that_is_there_already_is_refused(disk: Disk, field: str) -> None:
    disk.apply(**{field: put(1)})
    with pytest.raises(StoreError, match="exists already"):
        disk.apply(**{field: put(1)})


def test_giving_a_queue_number_a_second_name_is_refused(disk: Disk) -> None:
    disk.apply(queues={1: "orders"})
    with pytest.raises(StoreError, match="exists already"):
        disk.apply(queues={1: "invoices"})
    assert disk.crash().queues == {1: "orders"}


def test_a_queue_number_gets_another_name_when_its_queue_has_ended(disk: Disk) -> None:
    disk.apply(queues={1: "orders", 2: "kept"})
    disk.apply(queues={1: "ended,orders"})
    assert disk.crash().queues == {1: "ended,orders", 2: "kept"}
    for wrong in ("ended,orders", "invoices"):
        with pytest.raises(StoreError, match="exists already"):
            disk.apply(queues={1: wrong})
        assert disk.crash().queues == {1: "ended,orders", 2: "kept"}
    disk.apply(queues={1: ""})
    assert disk.crash().queues == {2: "kept"}
    disk.apply(queues={1: "invoices"})
    disk.stop()
    assert disk.crash().queues == {1: "invoices", 2: "kept"}


def test_a_queue_that_has_gone_is_not_known_any_more_and_its_number_may_be_anothers(disk: Disk) -> None:
    disk.apply(queues={1: "orders", 2: "kept"}, puts=put(1), transient_puts=put(2))
    disk.apply(queues={1: ""}, removes=[key(1)], transient_removes=[key(2)])
    disk.stop()
    recovered = disk.crash()
    assert (recovered.queues, recovered.counts) == ({2: "kept"}, {})
    disk.apply(queues={1: "other"}, puts=put(3))
    recovered = disk.crash()
    assert (recovered.queues, sequences(disk.store)) == ({1: "other", 2: "kept"}, [3])


def test_a_queue_may_go_with_the_batch_that_resumes_it(disk: Disk) -> None:
    disk.apply(queues={1: "orders"}, paused={1: True})
    disk.apply(queues={1: ""}, paused={1: False})
    disk.stop()
    recovered = disk.crash()
    assert (recovered.queues, recovered.paused) == ({}, set())


def test_a_queue_that_is_not_there_cannot_go(disk: Disk) -> None:
    with pytest.raises(StoreError, match="exists already"):
        disk.apply(queues={1: ""})
    assert disk.crash().queues == {}


def test_removed_messages_are_gone_for_good(disk: Disk) -> None:
    disk.apply(puts=put(1, 2, 3), transient_puts=put(4, 5))
    disk.apply(removes=[key(2)], transient_removes=[key(4)])
    assert sequences(disk.store) == [1, 3, 5]
    disk.stop()
    assert sequences(disk.store) == [1, 3, 5]


def test_an_empty_batch_is_applied(disk: Disk) -> None:
    disk.apply()
    assert disk.store.read_page(LANE, 0, 1).as_of == 1


# Pages


def test_a_page_is_as_large_as_it_may_be_and_says_whether_it_is_the_lanes_end(disk: Disk) -> None:
    disk.apply(puts={key(1): bytes(100), key(3): bytes(100)}, transient_puts={key(2): bytes(100), key(4): bytes(500)})

    def page(after: int, limit: int, size_max: int) -> tuple[list[int], bool]:
        page = disk.store.read_page(LANE, after, limit, size_max)
        return [sequence_of(message.key) for message in page.messages], page.is_end

    assert page(0, 9, 1000) == ([1, 2, 3, 4], True)
    assert page(0, 4, 1000) == ([1, 2, 3, 4], True)
    assert page(0, 3, 1000) == ([1, 2, 3], False)
    assert page(0, 9, 250) == ([1, 2], False)
    assert page(0, 9, 1) == ([1], False)
    assert page(3, 9, 1) == ([4], True)
    assert page(4, 9, 1000) == ([], True)


def test_messages_are_found_by_their_keys_in_any_lanes_as_many_as_fit(disk: Disk) -> None:
    disk.apply(puts=put(1, 3) | put(2, lane=OTHER_LANE), transient_puts=put(4, lane=NEXT_QUEUE), marks={key(3): (1, 2)})
    there = [key(1), key(3), key(2, lane=OTHER_LANE), key(4, lane=NEXT_QUEUE)]
    keys = [*reversed(there), key(2), key(9), key(1, lane=OTHER_LANE), key(77, lane=lane_key(9, 9))]
    page = disk.store.read_messages(keys)
    assert [(each.key, each.record, each.mark.deliveries) for each in page.messages] == [
        (one, b"record %d" % sequence_of(one), 2 if one == key(3) else 0) for one in sorted(there)
    ]
    assert (page.as_of, page.is_end) == (1, True)

    size = len(b"record 1")
    for size_max, count in ((1, 1), (size, 1), (2 * size, 2), (4 * size, 4)):
        page = disk.store.read_messages(keys, size_max)
        assert ([each.key for each in page.messages], page.is_end) == (sorted(there)[:count], count == 4)
    page = disk.store.read_messages([key(2), key(9)], 1)
    assert (page.messages, page.is_end) == ([], True)
    assert disk.store.read_messages([]).is_end


def test_page_is_in_sequence_order_for_any_order_and_kind_of_puts(disk: Disk) -> None:
    disk.apply(puts=put(9, 2, 300), transient_puts=put(256, 1, 7))
    disk.apply(puts=put(3), transient_puts=put(8, 2**40))
    messages = disk.store.read_page(LANE, 0, 100).messages
    assert [sequence_of(m.key) for m in messages] == [1, 2, 3, 7, 8, 9, 256, 300, 2**40]
    assert all(m.record == b"record %d" % sequence_of(m.key) for m in messages)


def test_a_page_holds_its_lane_and_no_other(disk: Disk) -> None:
    disk.apply(puts=put(1) | put(2, lane=OTHER_LANE) | put(3, lane=NEXT_QUEUE), transient_puts=put(4))
    disk.apply(transient_puts=put(5, lane=OTHER_LANE) | put(6, lane=NEXT_QUEUE))
    assert sequences(disk.store, LANE) == [1, 4]
    assert sequences(disk.store, OTHER_LANE) == [2, 5]
    assert sequences(disk.store, NEXT_QUEUE) == [3, 6]
    assert sequences(disk.store, lane_key(1, 4)) == []
    assert sequences(disk.store, lane_key(3, 0)) == []


def test_a_page_ends_at_its_limit_and_the_next_goes_on_behind_it(disk: Disk) -> None:
    disk.apply(puts=put(1, 4, 6), transient_puts=put(2, 3, 5))
    assert sequences(disk.store, limit=4) == [1, 2, 3, 4]
    assert sequences(disk.store, after=4, limit=4) == [5, 6]
    assert sequences(disk.store, after=6, limit=4) == []


def test_after_sequence_need_not_be_there(disk: Disk) -> None:
    disk.apply(puts=put(2, 9), transient_puts=put(5))
    assert sequences(disk.store, after=3) == [5, 9]
    assert sequences(disk.store, after=255) == []


def test_a_page_tells_the_last_batch_it_is_true_up_to(disk: Disk) -> None:
    assert disk.store.read_page(LANE, 0, 1).as_of == 0
    for number in (1, 2, 3):
        disk.apply(puts=put(number))
        assert disk.store.read_page(LANE, 0, 10).as_of == number
        assert disk.store.read_page(NEXT_QUEUE, 0, 10).as_of == number


def test_batch_numbers_begin_again_with_each_run(disk: Disk) -> None:
    disk.apply(puts=put(1))
    disk.apply(puts=put(2))
    disk.crash()
    assert disk.store.read_page(LANE, 0, 10).as_of == 0
    disk.apply(puts=put(3))
    assert disk.store.read_page(LANE, 0, 10).as_of == 1


def test_a_failed_batch_is_in_no_page(disk: Disk) -> None:
    disk.apply(puts=put(1))
    with pytest.raises(StoreError):
        disk.apply(puts=put(2), removes=[key(77)])
    page = disk.store.read_page(LANE, 0, 10)
    assert (page.as_of, [m.key for m in page.messages]) == (1, [key(1)])


def test_pages_read_while_batches_are_applied_show_whole_batches_and_claim_no_more(
    disk: Disk, request: pytest.FixtureRequest
) -> None:
    """Each batch puts three of each kind and removes those of the batch before it."""
    # So that the threads take turns within a batch, not once for all of them.
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-5)

    def batch(number: int) -> Batch:
        base = number * 10
        removed = [] if number == 1 else [key(base - 10 + n) for n in range(1, 7)]
        return disk.batch(
            puts=put(base + 1, base + 2, base + 3),
            transient_puts=put(base + 4, base + 5, base + 6),
            removes=removed[:3],
            transient_removes=removed[3:],
            marks={key(base + 1): (number, number)},
            unmarks=removed[:1],
        )

    batches = [batch(number) for number in range(1, 101)]
    failures: list[BaseException] = []
    returned = 0

    def apply_all() -> None:
        nonlocal returned
        try:
            for one in batches:
                disk.store.apply(one)
                returned = one.number
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=apply_all)
    thread.start()
    pages = 0
    while thread.is_alive() or not pages:
        returned_before = returned
        page = disk.store.read_page(LANE, 0, 100)
        pages += 1
        found = [sequence_of(message.key) for message in page.messages]
        shown = found[0] // 10 if found else 0
        assert found == ([shown * 10 + n for n in range(1, 7)] if shown else [])
        assert [m.mark.attempts for m in page.messages] == ([shown, 0, 0, 0, 0, 0] if shown else [])
        assert returned_before <= page.as_of <= shown <= page.as_of + 1
    thread.join()
    assert not failures


# Counts, marks, queues, producers, sequences


def test_counts_cover_both_kinds_and_leave_out_empty_lanes(disk: Disk) -> None:
    disk.apply(puts=put(1, 2) | put(3, lane=NEXT_QUEUE), transient_puts=put(4, 5, 6))
    disk.apply(removes=[key(1), key(3, NEXT_QUEUE)], transient_removes=[key(5)])
    assert disk.stop().counts == {LANE: 3}


def test_the_first_and_the_last_cause_of_a_message_stay_until_it_goes(disk: Disk) -> None:
    disk.apply(puts=put(1, 2), transient_puts=put(3), marks={key(1): (1, 1), key(3): (1, 1)})
    disk.apply(marks={key(1): (2, 2), key(3): (2, 2)}, causes={key(1): ("first", "first"), key(3): ("t", "t")})
    disk.apply(marks={key(1): (3, 3)})
    disk.apply(puts=put(*range(4, 40)))
    assert causes_of(disk) == {1: ("first", "first"), 3: ("t", "t")}
    disk.apply(marks={key(1): (4, 4)}, causes={key(1): ("", "last")})
    disk.apply(puts=put(*range(40, 80)), marks={key(1): (5, 5)})
    assert causes_of(disk) == {1: ("first", "last"), 3: ("t", "t")}
    disk.apply(clean_stop=False)
    disk.crash()
    assert causes_of(disk) == {1: ("first", "last")}
    disk.apply(removes=[key(1)], unmarks=[key(1)])
    # The key comes back, as it never does in a broker, to show that they are gone.
    disk.apply(puts=put(1))
    assert causes_of(disk) == {}


def test_cause_shared_by_many_messages_is_written_once(tmp_path: Path) -> None:
    texts = {key(n): ("why " * 1000, "because " * 500) for n in range(1, 1001)}
    batch = Batch(1)
    batch.marks, batch.causes = {k: Mark(1, 1) for k in texts}, {k: Causes(*both) for k, both in texts.items()}
    written = b"".join(encode_batch(batch, changes_of(batch).rare))
    assert len(written) < 100_000
    rest = decode_changes(memoryview(written)).rare
    assert rest is not None and causes_of_rare(rest) == batch.causes


def causes_of(disk: Disk) -> dict[int, tuple[str, str]]:
    messages = disk.store.read_page(LANE, 0, 1000).messages
    assert [m.causes for m in disk.store.read_messages([m.key for m in messages]).messages] == [
        m.causes for m in messages
    ]
    return {sequence_of(m.key): m.causes for m in messages if m.causes != ("", "")}


def test_marks_come_with_their_message_and_the_last_one_counts(disk: Disk) -> None:
    disk.apply(puts=put(1, 2), transient_puts=put(3), marks={key(1): (0, 1), key(3): (2, 9)})
    disk.apply(marks={key(1): (1, 2)})
    disk.stop()
    marks = {sequence_of(m.key): m.mark[:2] for m in disk.store.read_page(LANE, 0, 10).messages}
    assert marks == {1: (1, 2), 2: (0, 0), 3: (2, 9)}


@pytest.mark.parametrize("due_ms", [1, 1_800_000_000_000, DUE_NEVER])
def test_a_mark_says_when_its_message_is_due(disk: Disk, due_ms: int) -> None:
    disk.apply(puts=put(1), transient_puts=put(2), marks={key(1): Mark(2, 3, due_ms), key(2): Mark(1, 1, due_ms)})
    disk.stop()
    found = [m.mark for m in disk.store.read_page(LANE, 0, 10).messages]
    assert found == [Mark(2, 3, due_ms), Mark(1, 1, due_ms)]


def test_a_mark_goes_with_its_message(disk: Disk) -> None:
    """No page shows a mark without its message, so the key comes back here, as it never does in a broker."""
    disk.apply(puts=put(1), transient_puts=put(2), marks={key(1): (1, 2), key(2): (1, 2)})
    disk.apply(removes=[key(1)], transient_removes=[key(2)], unmarks=[key(1), key(2)])
    disk.apply(puts=put(1), transient_puts=put(2))
    assert [m.mark[:2] for m in disk.store.read_page(LANE, 0, 10).messages] == [(0, 0), (0, 0)]


def test_message_requeued_and_removed_in_one_batch_leaves_no_mark(disk: Disk) -> None:
    disk.apply(puts=put(1))
    disk.apply(marks={key(1): (1, 2)}, removes=[key(1)], unmarks=[key(1)])
    disk.apply(puts=put(1))
    assert [m.mark[:2] for m in disk.store.read_page(LANE, 0, 10).messages] == [(0, 0)]


def test_a_message_without_a_mark_may_be_unmarked(disk: Disk) -> None:
    disk.apply(puts=put(1))
    disk.apply(removes=[key(1)], unmarks=[key(1)])
    assert sequences(disk.store) == []


def test_paused_queues_stay_paused_after_a_crash_until_they_are_resumed(disk: Disk) -> None:
    disk.apply(queues={1: "orders", 2: "invoices", 3: "mail"}, paused={1: True, 3: True})
    assert disk.crash().paused == {1, 3}
    disk.apply(paused={1: False, 2: True})
    assert disk.crash().paused == {2, 3}


def test_queues_keep_number_and_name(disk: Disk) -> None:
    disk.apply(queues={7: "DLQ.Aufträge", 2: "x" * 255})
    disk.apply(queues={2**32 - 1: "last"})
    assert disk.crash().queues == {2: "x" * 255, 7: "DLQ.Aufträge", 2**32 - 1: "last"}


def test_producers_come_back_in_order_of_last_use_then_name(disk: Disk) -> None:
    states = {"d": (1, 50), "a": (9, 70), **dict.fromkeys("zyxwcb", (5, 60))}
    disk.apply(producers={name: ProducerState(*state) for name, state in states.items()})
    disk.apply(producers={"d": ProducerState(2, 80)})
    producers = disk.crash().producers
    assert list(producers) == ["b", "c", "w", "x", "y", "z", "a", "d"]
    assert producers["d"] == ProducerState(highest_send=2, last_used_ms=80)
    assert producers["b"] == ProducerState(highest_send=5, last_used_ms=60)


@pytest.mark.parametrize("name", ["", "ä" * 5000, "\0"])
def test_a_producer_may_have_any_name(disk: Disk, name: str) -> None:
    disk.apply(producers={name: ProducerState(1, 2), name + "'": ProducerState(3, 4)})
    assert disk.crash().producers == {name: ProducerState(1, 2), name + "'": ProducerState(3, 4)}
    disk.apply(forgotten_producers=[name])
    assert disk.crash().producers == {name + "'": ProducerState(3, 4)}


def test_forgotten_producers_are_gone(disk: Disk) -> None:
    disk.apply(producers={"a": ProducerState(1, 1), "b": ProducerState(2, 2)})
    disk.apply(forgotten_producers=["a", "never seen"])
    assert disk.crash().producers == {"b": ProducerState(2, 2)}


def test_a_producer_forgotten_and_back_in_one_batch_is_there(disk: Disk) -> None:
    disk.apply(producers={"a": ProducerState(1, 1)})
    disk.apply(forgotten_producers=["a"], producers={"a": ProducerState(5, 9)})
    assert disk.crash().producers == {"a": ProducerState(5, 9)}


def test_redelivered_below_survives_crash_and_stop(disk: Disk) -> None:
    assert disk.crash().redelivered_below == 0
    disk.apply(redelivered_below=7)
    for n in range(1, 30):
        disk.apply(puts=put(n))
    assert disk.crash().redelivered_below == 7
    disk.apply(redelivered_below=2**63)
    assert disk.stop().redelivered_below == 2**63


def test_the_sequence_limit_stays_until_a_batch_sets_another(disk: Disk) -> None:
    disk.apply(sequence_limit=2**63)
    disk.apply(puts=put(1))
    assert disk.crash().sequence_limit == 2**63
    disk.apply(sequence_limit=2**63 + 5)
    assert disk.crash().sequence_limit == 2**63 + 5


# Stops


def test_after_a_clean_stop_the_transients_are_there_at_their_places(disk: Disk) -> None:
    disk.apply(clean_stop=False)
    disk.apply(puts=put(1, 3), transient_puts=put(2, 4), marks={key(2): (1, 2)})
    recovered = disk.stop()
    assert recovered.clean_stop is True
    assert recovered.counts == {LANE: 4}
    messages = disk.store.read_page(LANE, 0, 10).messages
    assert [(sequence_of(m.key), m.mark.attempts) for m in messages] == [(1, 0), (2, 1), (3, 0), (4, 0)]


def test_a_crash_drops_transients_with_their_counts_and_marks(disk: Disk) -> None:
    disk.apply(clean_stop=False)
    disk.apply(
        puts=put(1, 3) | put(8, lane=OTHER_LANE),
        transient_puts=put(2, 4, 5) | put(6, lane=NEXT_QUEUE),
        marks={key(1): (1, 1), key(2): (2, 2), key(5): (3, 3), key(6, NEXT_QUEUE): (4, 4)},
    )
    recovered = disk.crash()
    assert recovered.clean_stop is False
    assert recovered.counts == {LANE: 2, OTHER_LANE: 1}
    assert sequences(disk.store) == [1, 3]
    assert sequences(disk.store, NEXT_QUEUE) == []
    if disk.kind.endswith("postgresql"):
        # There, a key that came back would be found twice until the old message is deleted.
        return
    # The keys come back, as they never do in a broker, to show that their marks are gone.
    disk.apply(puts=put(2, 5) | put(6, lane=NEXT_QUEUE))
    assert [m.mark.attempts for m in disk.store.read_page(LANE, 0, 10).messages] == [1, 0, 0, 0]
    assert [m.mark.attempts for m in disk.store.read_page(NEXT_QUEUE, 0, 10).messages] == [0]


def test_a_crash_drops_the_transients_of_an_earlier_clean_stop_too(disk: Disk) -> None:
    disk.apply(clean_stop=False)
    disk.apply(puts=put(1), transient_puts=put(2, 3))
    assert disk.stop().counts == {LANE: 3}
    disk.apply(clean_stop=False)
    disk.apply(puts=put(4), transient_puts=put(5), transient_removes=[key(2)])
    assert disk.crash().counts == {LANE: 2}
    assert sequences(disk.store) == [1, 4]


def test_crash_before_the_start_of_a_run_keeps_the_clean_stop(disk: Disk) -> None:
    disk.apply(transient_puts=put(1), clean_stop=False)
    disk.stop()
    assert disk.crash().clean_stop is True
    assert sequences(disk.store) == [1]


def test_an_unclean_stop_stays_unclean_until_a_batch_says_otherwise(disk: Disk) -> None:
    disk.apply(puts=put(1), transient_puts=put(2), clean_stop=False)
    assert disk.crash().clean_stop is False
    assert disk.crash() == Recovered(identity=disk.crash().identity, clean_stop=False, counts={LANE: 1})
    assert disk.stop().clean_stop is True


# Timers


def test_timers_come_in_the_order_in_which_they_are_due_then_by_lane_and_block(disk: Disk) -> None:
    in_order = [
        timer_key(255, LANE, 5 << 10),
        timer_key(256, LANE, 1 << 10),
        timer_key(256, LANE, 256 << 10),
        timer_key(256, OTHER_LANE, 0),
        timer_key(256, NEXT_QUEUE, 0),
        timer_key(2**63, LANE, 0),
    ]
    for one in reversed(in_order):
        disk.apply(timers={one: None})
    for limit in (1, 2, 6, 7):
        assert all_timers(disk.store, limit) == in_order
    assert disk.store.read_timers(in_order[0], 2).timers == in_order[1:3]
    assert disk.store.read_timers(timer_key(256, LANE, 2 << 10), 2).timers == in_order[2:4]


def test_a_page_of_timers_says_whether_it_is_the_last_and_up_to_which_batch_it_is_true(disk: Disk) -> None:
    assert disk.store.read_timers(b"", 1) == TimerPage(timers=[], as_of=0, is_end=True)
    disk.apply(timers=timers(1, 2))
    first, second = timers(1, 2)
    assert disk.store.read_timers(b"", 1) == TimerPage(timers=[first], as_of=1, is_end=False)
    assert disk.store.read_timers(b"", 2) == TimerPage(timers=[first, second], as_of=1, is_end=True)
    assert disk.store.read_timers(second, 2) == TimerPage(timers=[], as_of=1, is_end=True)


def test_setting_an_existing_timer_or_clearing_a_missing_one_changes_nothing(disk: Disk) -> None:
    disk.apply(timers=timers(1, 2))
    disk.apply(timers=timers(2, 3), cleared_timers=[*timers(4)])
    assert all_timers(disk.store) == [*timers(1, 2, 3)]
    disk.apply(cleared_timers=[*timers(2)])
    assert all_timers(disk.store) == [*timers(1, 3)]


def test_a_timer_that_one_batch_clears_and_sets_is_set(disk: Disk) -> None:
    disk.apply(timers=timers(1))
    disk.apply(timers=timers(1), cleared_timers=[*timers(1)])
    assert all_timers(disk.store) == [*timers(1)]


@pytest.mark.parametrize("end", ["crash", "stop"])
def test_timers_and_that_they_were_cleared_outlive_any_stop(disk: Disk, end: str) -> None:
    """Whether they were set for persistent messages or transient ones."""
    disk.apply(transient_puts=put(1), timers=timers(1, 2, 3), clean_stop=False)
    disk.apply(cleared_timers=[*timers(2)])
    disk.stop() if end == "stop" else disk.crash()
    assert all_timers(disk.store) == [*timers(1, 3)]
    disk.apply(cleared_timers=[*timers(1)], timers=timers(2))
    disk.stop() if end == "stop" else disk.crash()
    assert all_timers(disk.store) == [*timers(2, 3)]


def test_pages_of_timers_leave_nothing_out_while_more_are_set_and_everything_moves(disk: Disk) -> None:
    """One thread reads all of them again and again; some are set behind, those in front are cleared."""
    set_up_to, cleared_up_to = 0, 0
    failures: list[str] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            expected_up_to = set_up_to
            found = [split_timer(one)[0] for one in all_timers(disk.store, 3)]
            expected = range(cleared_up_to + 1, expected_up_to + 1)
            if found != sorted(set(found)) or not set(expected) <= set(found):
                failures.append(f"{expected}: {found}")

    thread = threading.Thread(target=read)
    thread.start()
    for n in range(1, 300):
        disk.apply(timers=timers(n), cleared_timers=[*timers(n - 20)] if n > 20 else [])
        set_up_to, cleared_up_to = n, max(0, n - 19)
    is_over.set()
    thread.join()
    assert failures == []
    assert [split_timer(one)[0] for one in all_timers(disk.store)] == [*range(280, 300)]


# Contents that several messages share


OF_EITHER_KIND = pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "transient"])


@OF_EITHER_KIND
def test_a_content_comes_with_every_message_that_refers_to_it_and_is_no_message_itself(
    disk: Disk, persistent: bool
) -> None:
    disk.apply(**share(7, key(7), key(8, OTHER_LANE), key(9, NEXT_QUEUE), persistent=persistent))
    for _ in range(2):
        for one in (key(7), key(8, OTHER_LANE), key(9, NEXT_QUEUE)):
            (found,) = disk.store.read_page(one[:LANE_KEY_SIZE], 0, 10).messages
            assert found.record == encode_reference(one, 7, persistent=persistent)
            assert found.content == b"content 7"
        assert disk.stop().counts == {LANE: 1, OTHER_LANE: 1, NEXT_QUEUE: 1}


@OF_EITHER_KIND
@pytest.mark.parametrize("end", ["none", "crash", "stop"])
def test_a_content_goes_with_the_last_message_that_refers_to_it(disk: Disk, end: str, persistent: bool) -> None:
    copies = [key(7), key(8, OTHER_LANE), key(9, NEXT_QUEUE)]
    disk.apply(**share(7, *copies, persistent=persistent), clean_stop=True)
    for remaining in (2, 1, 0):
        disk.apply(**unshare(7, copies[remaining], persistent=persistent))
        if end != "none":
            disk.stop() if end == "stop" else disk.crash()
        found = disk.store.read_page(CONTENTS_LANE_KEY, 0, 10).messages
        assert [(m.key, m.mark) for m in found] == ([(content_key(7), Mark(remaining, 0))] if remaining else [])
        shown = [m for lane in (LANE, OTHER_LANE, NEXT_QUEUE) for m in disk.store.read_page(lane, 0, 10).messages]
        assert [(m.key, m.content) for m in shown] == [(one, b"content 7") for one in copies[:remaining]]
    # The key comes back, as it never does in a broker, to show that its count is gone.
    disk.apply(**share(7, key(17), key(18), persistent=persistent))
    assert [m.mark for m in disk.store.read_page(CONTENTS_LANE_KEY, 0, 10).messages] == [Mark(2, 0)]


def test_a_crash_drops_a_transient_content_with_its_references_and_no_persistent_one(disk: Disk) -> None:
    disk.apply(**share(7, key(7), key(8, OTHER_LANE), persistent=False), clean_stop=False)
    disk.apply(**share(9, key(9), key(10, OTHER_LANE)))
    disk.apply(**share(11, key(11), key(12, NEXT_QUEUE), persistent=False))
    assert disk.crash().counts == {LANE: 1, OTHER_LANE: 1}
    assert [(m.key, m.mark) for m in disk.store.read_page(CONTENTS_LANE_KEY, 0, 10).messages] == [
        (content_key(9), Mark(2, 0))
    ]
    disk.apply(**unshare(9, key(9), key(10, OTHER_LANE)), clean_stop=True)
    assert disk.stop().counts == {}
    assert disk.store.read_page(CONTENTS_LANE_KEY, 0, 10).messages == []


@OF_EITHER_KIND
def test_batch_may_remove_several_references(disk: Disk, persistent: bool) -> None:
    copies = [key(7), key(8, OTHER_LANE), key(9, NEXT_QUEUE)]
    disk.apply(**share(7, *copies, persistent=persistent))
    disk.apply(**unshare(7, *copies[:2], persistent=persistent))
    assert [m.mark for m in disk.store.read_page(CONTENTS_LANE_KEY, 0, 10).messages] == [Mark(1, 0)]
    disk.apply(**unshare(7, *copies[2:], persistent=persistent))
    assert disk.store.read_page(CONTENTS_LANE_KEY, 0, 10).messages == []


@pytest.mark.parametrize("end", ["none", "crash", "stop"])
def test_number_of_references_to_contents_is_reported_as_they_are_removed(disk: Disk, end: str) -> None:
    copies = [key(7), key(8, OTHER_LANE), key(9, NEXT_QUEUE)]
    disk.apply(**share(7, *copies), clean_stop=True)
    disk.apply(**share(10, key(10), key(11, OTHER_LANE)))
    for remaining in (2, 1, 0):
        disk.apply(**unshare(7, copies[remaining]))
        if end != "none":
            disk.stop() if end == "stop" else disk.crash()
        assert disk.store.content_references([7, 10, 12]) == {7: remaining, 10: 2, 12: 0}


def test_releasing_a_content_more_often_than_it_has_references_is_refused(disk: Disk) -> None:
    disk.apply(**share(7, key(7), key(8)))
    with pytest.raises(StoreError, match="disagree"):
        disk.apply(removes=[key(7), key(8)], dereferenced=[content_key(7)] * 3)
    disk.crash()
    with pytest.raises(StoreError, match="disagree"):
        disk.apply(dereferenced=[content_key(8)])
    disk.crash()
    assert [m.content for m in disk.store.read_page(LANE, 0, 10).messages] == [b"content 7"] * 2


def test_a_page_is_as_large_with_contents_as_it_may_be(disk: Disk) -> None:
    for number in (1, 3, 5):
        disk.apply(**share(number, key(number), key(number, OTHER_LANE), record=bytes(1000)))
    page = disk.store.read_page(LANE, 0, 10, 2200)
    assert [(sequence_of(m.key), len(m.content)) for m in page.messages] == [(1, 1000), (3, 1000)]
    assert not page.is_end
    page = disk.store.read_page(LANE, 3, 10, 2200)
    assert page.is_end


@OF_EITHER_KIND
def test_pages_read_while_everything_moves_show_no_message_without_its_content(
    disk: Disk, request: pytest.FixtureRequest, persistent: bool
) -> None:
    """Each batch puts a content with a copy in two lanes, and removes the one or the other of an earlier one."""
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-5)
    failures: list[BaseException] = []

    def apply_all() -> None:
        try:
            for n in range(1, 300):
                removed = [key(n - 5)] if n > 5 else []
                removed += [key(n - 9, OTHER_LANE)] if n > 9 else []
                dereferenced = [content_key(sequence_of(one)) for one in removed]
                shared = share(n, key(n), key(n, OTHER_LANE), persistent=persistent)
                if persistent:
                    disk.apply(**shared, removes=removed, dereferenced=dereferenced)
                else:
                    disk.apply(**shared, transient_removes=removed, transient_dereferenced=dereferenced)
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=apply_all)
    thread.start()
    while thread.is_alive():
        for lane in (LANE, OTHER_LANE):
            for message in disk.store.read_page(lane, 0, 100).messages:
                assert message.content == b"content %d" % sequence_of(message.key)
    thread.join()
    assert not failures
    assert [sequence_of(m.key) for m in disk.store.read_page(CONTENTS_LANE_KEY, 0, 100).messages] == [*range(291, 300)]


def share(number: int, *copies: bytes, record: bytes = b"", persistent: bool = True) -> dict[str, Any]:
    """Return the changes of a batch that puts a content and these references to it."""
    shared = Shared(number, record or b"content %d" % number, [*copies], persistent)
    changes = Model().changes({}, [], shared=shared)
    return {"puts": changes["puts"], "transient_puts": changes["transient_puts"], "marks": changes["marks"]}


def unshare(number: int, *copies: bytes, persistent: bool = True) -> dict[str, Any]:
    """Return the changes of a batch that removes references to a content."""
    removes, dereferenced = (
        ("removes", "dereferenced") if persistent else ("transient_removes", "transient_dereferenced")
    )
    return {removes: [*copies], dereferenced: [content_key(number)] * len(copies)}


def _content_of(record: bytes) -> bytes:
    """Return the key of the content a record refers to; empty if it refers to none."""
    number = referenced_content_number(record)
    return content_key(number) if number else b""


# Random histories


SIZE_MAX = 1 << 30
"""Number, or bytes, of messages of a page that has all of them."""


@dataclass
class Model:
    """store.py once more, as plainly as it can be said."""

    messages: dict[bytes, tuple[bytes, bool]] = field(default_factory=dict)
    contents: dict[bytes, bytes] = field(default_factory=dict)
    """Shared contents, each there as long as a message refers to it."""
    used: set[bytes] = field(default_factory=set)
    """A broker never uses a key twice."""
    marks: dict[bytes, Mark] = field(default_factory=dict)
    causes: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    queues: dict[int, str] = field(default_factory=dict)
    producers: dict[str, ProducerState] = field(default_factory=dict)
    timers: set[bytes] = field(default_factory=set)
    sequence_limit: int = 1
    clean_stop: bool = True

    def lanes(self) -> dict[bytes, list[bytes]]:
        lanes: dict[bytes, list[bytes]] = {}
        for one in sorted(self.messages):
            lanes.setdefault(one[:LANE_KEY_SIZE], []).append(one)
        return lanes

    def restart(self) -> None:
        if not self.clean_stop:
            self.messages = {k: (record, kept) for k, (record, kept) in self.messages.items() if kept}
            self.marks = {k: mark for k, mark in self.marks.items() if k in self.messages}
            self.causes = {k: causes for k, causes in self.causes.items() if k in self.messages}
            self._drop_contents()

    def _drop_contents(self) -> None:
        """Remove contents that no message refers to any more."""
        references = self.references()
        self.contents = {k: record for k, record in self.contents.items() if k in references}

    def references(self) -> Counter[bytes]:
        """Return the number of messages that refer to each content."""
        return Counter(_content_of(record) for record, _ in self.messages.values() if _content_of(record))

    def changes(
        self,
        new: dict[bytes, tuple[bytes, bool]],
        removed: list[bytes],
        *,
        shared: Shared | None = None,
        marks: dict[bytes, Mark] | None = None,
        **rest: Any,
    ) -> dict[str, Any]:
        """Return the changes of a batch that puts `new`, keys to records and whether they are persistent, and the
        shared content, and removes `gone`."""
        puts = {k: record for k, (record, persistent) in new.items() if persistent}
        transient_puts = {k: record for k, (record, persistent) in new.items() if not persistent}
        marks = dict(marks or {})
        if shared is not None:
            of_kind = puts if shared.persistent else transient_puts
            of_kind[content_key(shared.number)] = shared.record
            for k in shared.copies:
                of_kind[k] = encode_reference(k, shared.number, persistent=shared.persistent)
            marks[content_key(shared.number)] = Mark(len(shared.copies), 0)
        dereferenced = [
            (_content_of(record), persistent) for record, persistent in map(self.messages.__getitem__, removed)
        ]
        return {
            "puts": puts,
            "marks": marks,
            "dereferenced": [k for k, persistent in dereferenced if k and persistent],
            "transient_dereferenced": [k for k, persistent in dereferenced if k and not persistent],
            "transient_puts": transient_puts,
            "removes": [k for k in removed if self.messages[k][1]],
            "transient_removes": [k for k in removed if not self.messages[k][1]],
            "unmarks": [k for k in removed if k in self.marks],
            **rest,
        }

    def new_queue(self) -> int:
        """A number that no queue has, though one may have had it."""
        return next(number for number in itertools.count(1) if number not in self.queues)

    def empty_queues(self, remaining: Iterable[bytes]) -> list[int]:
        """Return the queues that may be removed if only these messages are left."""
        there = {split_lane_key(one[:LANE_KEY_SIZE])[0] for one in remaining}
        return sorted(self.queues.keys() - there)

    def apply(self, changes: dict[str, Any]) -> None:
        for one in changes["removes"] + changes["transient_removes"]:
            del self.messages[one]
            self.marks.pop(one, None)
            self.causes.pop(one, None)
        for kind, persistent in (("puts", True), ("transient_puts", False)):
            self.messages.update(
                {k: (record, persistent) for k, record in changes[kind].items() if not k.startswith(CONTENTS_LANE_KEY)}
            )
            self.used.update(changes[kind])
        all_puts = changes["puts"] | changes["transient_puts"]
        self.contents |= {k: record for k, record in all_puts.items() if k.startswith(CONTENTS_LANE_KEY)}
        self._drop_contents()
        self.marks.update(
            {k: mark for k, mark in changes.get("marks", {}).items() if not k.startswith(CONTENTS_LANE_KEY)}
        )
        for k, texts in changes.get("causes", {}).items():
            first, last = self.causes.get(k, ("", ""))
            self.causes[k] = (first or texts[0], texts[1] or last)
        self.queues = {n: name for n, name in (self.queues | changes.get("queues", {})).items() if name}
        for name in changes.get("forgotten_producers", []):
            self.producers.pop(name, None)
        self.producers.update(changes.get("producers", {}))
        self.timers = (self.timers - set(changes.get("cleared_timers", ()))) | set(changes.get("timers", ()))
        self.sequence_limit = changes.get("sequence_limit") or self.sequence_limit
        if changes.get("clean_stop") is not None:
            self.clean_stop = changes["clean_stop"]

    def check(self, store: Store, limit: int) -> None:
        check_live_bytes(store)
        assert all_timers(store, limit) == sorted(self.timers)
        lanes = self.lanes()
        for lane in (LANE, OTHER_LANE, NEXT_QUEUE):
            found = []
            page = store.read_page(lane, 0, limit).messages
            while page:
                found += page
                page = store.read_page(lane, sequence_of(page[-1].key), limit).messages
            assert list(map(_shown, found)) == [
                self._shown(one, record) for one in lanes.get(lane, []) for record in [self.messages[one][0]]
            ]
        every = [one for one in self.used if not one.startswith(CONTENTS_LANE_KEY)]
        known = store.read_messages(every, size_max=SIZE_MAX)
        assert list(map(_shown, known.messages)) == [
            self._shown(one, record) for one, (record, _) in sorted(self.messages.items())
        ]
        references = self.references()
        contents = store.read_page(CONTENTS_LANE_KEY, 0, SIZE_MAX, size_max=SIZE_MAX).messages
        assert [(m.key, m.record, m.mark) for m in contents] == [
            (one, record, Mark(references[one], 0)) for one, record in sorted(self.contents.items())
        ]

    def _shown(self, one: bytes, record: bytes) -> tuple[bytes, bytes, Mark, bytes, tuple[str, str]]:
        content = self.contents.get(_content_of(record), b"")
        return one, record, self.marks.get(one, NO_MARK), content, self.causes.get(one, ("", ""))

    def check_recovered(self, recovered: Recovered) -> None:
        assert recovered == Recovered(
            identity=recovered.identity,
            clean_stop=self.clean_stop,
            sequence_limit=self.sequence_limit,
            queues=self.queues,
            counts={lane: len(keys) for lane, keys in self.lanes().items()},
            producers=self.producers,
        )
        assert list(recovered.producers) == sorted(self.producers, key=lambda n: (self.producers[n].last_used_ms, n))


def _shown(message: UndecodedMessage) -> tuple[bytes, bytes, Mark, bytes, tuple[str, str]]:
    return message.key, message.record, message.mark, message.content, message.causes


@pytest.mark.parametrize("kind", [*KINDS, *each_one_of(COPIES, ids=COPIES)])
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_store_agrees_with_a_plain_model_after_random_batches_and_restarts(
    kind: str, request: pytest.FixtureRequest, data: st.DataObject
) -> None:
    folder = Path(tempfile.mkdtemp())
    new_log = None
    if kind.endswith("postgresql"):
        # Made anew for each example.
        request.getfixturevalue("any_records")
        admin, schema = request.getfixturevalue("admin"), request.getfixturevalue("schema")
        admin.execute(f"DROP SCHEMA {schema} CASCADE")
        make_log(admin, schema=schema)
        new_log = open_compacted(request.getfixturevalue("log_server"), schema)
    disk = Disk(kind, folder / "data", new_log)
    try:
        model = Model()
        for _ in range(data.draw(st.integers(1, 6), label="steps")):
            draw_batch(data, disk, model)
            model.check(disk.store, limit=data.draw(st.sampled_from([1, 3, 1000]), label="limit"))
            end = data.draw(st.sampled_from(["none", "none", "crash", "stop"]), label="end")
            if end == "none":
                continue
            if end == "stop":
                model.clean_stop = True
            recovered = disk.stop() if end == "stop" else disk.crash()
            check_restart(data, disk, model, recovered)
    finally:
        disk.store.close()
        shutil.rmtree(folder)


def check_live_bytes(store: Store) -> None:
    """Check the bytes of each segment's messages, as far as the store has a journal."""
    if isinstance(store, EmbeddedStore):
        with store._lock:
            overlay = store._overlay
            for index in overlay.indexes:
                spans = [span for _, span in iter_spans(index.segment, overlay.copy_segment(index.segment))]
                assert index.live_bytes == sum(PUT_HEADER_BYTES + span.length for span in spans)


def check_restart(data: st.DataObject, disk: Disk, model: Model, recovered: Recovered) -> None:
    """Check a restarted store against the model; a new run may begin."""
    model.restart()
    model.check_recovered(recovered)
    model.check(disk.store, limit=1000)
    if data.draw(st.booleans(), label="the run begins"):
        disk.apply(clean_stop=False)
        model.clean_stop = False


def draw_batch(data: st.DataObject, disk: Disk, model: Model) -> None:
    """Apply one random batch that a broker could make, to the store and to the model."""
    some = st.sampled_from([LANE, OTHER_LANE, NEXT_QUEUE])
    numbers = st.integers(1, 300).filter(lambda number: content_key(number) not in model.used)
    fresh = (
        st.tuples(some, st.integers(1, 300)).map(lambda pair: message_key(*pair)).filter(lambda k: k not in model.used)
    )
    new = data.draw(st.dictionaries(fresh, st.tuples(st.binary(max_size=9), st.booleans()), max_size=6), label="puts")
    held = sorted(model.messages)
    removed = data.draw(st.lists(st.sampled_from(held), unique=True), label="removes") if held else []
    shared: Shared | None = None
    is_persistent: bool = data.draw(st.booleans(), label="is the content persistent")
    copies = [one for one, (_, persistent) in new.items() if persistent is is_persistent]
    are_shared: bool = data.draw(st.booleans(), label="are shared")
    if copies and are_shared:
        content: bytes = data.draw(st.binary(min_size=1, max_size=99), label="content")
        shared = Shared(data.draw(numbers, label="its number"), content, copies, is_persistent)
        new = {one: rest for one, rest in new.items() if one not in copies}
    remaining = sorted((model.messages.keys() | new | set(copies)) - set(removed))
    number = st.integers(0, 2**32 - 1)
    # The highest bit of attempts says that the last of them was a lost connection.
    attempts = st.integers(0, 2**31 - 1)
    mark = st.builds(Mark, attempts, number, st.sampled_from([0, 1, DUE_NEVER]), st.booleans())
    marks = data.draw(st.dictionaries(st.sampled_from(remaining), mark, max_size=4), label="marks") if remaining else {}
    texts = st.sampled_from([("", "b"), ("a", "a"), ("a", "b"), ("\u00fc\n" * 200, "c" * 400), ("", "")])
    causes = data.draw(st.dictionaries(st.sampled_from(sorted(marks)), texts), label="causes") if marks else {}
    # Who has said a last word has said a first one.
    causes = {k: both for k, both in causes.items() if both[0] or k in model.causes}
    names = st.sampled_from("abc")
    used = st.integers(-1, 2**63 - 1)
    state = st.builds(
        ProducerState,
        highest_send=used,
        last_used_ms=st.integers(0, 3),
        is_used_once=st.booleans(),
        highest_commit=used,
        highest_unknown_commit=used,
        is_gapless=st.none() | st.booleans(),
        resolved=st.lists(used, max_size=3).map(tuple),
    )
    producers = data.draw(st.dictionaries(names, state), label="producers")
    forgotten = data.draw(st.lists(names, unique=True), label="forgotten")
    queues = {model.new_queue(): f"queue {len(model.used)}"} if data.draw(st.booleans()) else {}
    empty = model.empty_queues(remaining)
    queues |= dict.fromkeys(data.draw(st.lists(st.sampled_from(empty)), label="queues that go") if empty else [], "")
    timer_of = st.builds(timer_key, st.integers(0, 3), some, st.sampled_from([0, 1024, 2**64 - 1]))
    timers = dict.fromkeys(data.draw(st.lists(timer_of, max_size=5), label="timers"))
    cleared = data.draw(st.lists(timer_of, max_size=3), label="cleared timers")
    limit = model.sequence_limit + 7 if data.draw(st.booleans()) else 0
    changes = model.changes(
        new,
        removed,
        shared=shared,
        marks=marks,
        causes=causes,
        queues=queues,
        producers=producers,
        forgotten_producers=forgotten,
        timers=timers,
        cleared_timers=cleared,
        sequence_limit=limit,
    )
    disk.apply(**changes)
    model.apply(changes)


# Memory only: bugs of the broker that it refuses, so that tests meet them


def test_memory_refuses_a_mark_without_a_message(memory_disk: Disk) -> None:
    memory_disk.apply(puts=put(1))
    with pytest.raises(StoreError, match="marks message"):
        memory_disk.apply(removes=[key(1)], marks={key(1): (1, 1)})


def test_memory_refuses_a_mark_that_outlives_its_message(memory_disk: Disk) -> None:
    memory_disk.apply(puts=put(1), marks={key(1): (1, 1)})
    with pytest.raises(StoreError, match="leaves the mark"):
        memory_disk.apply(removes=[key(1)])


def test_memory_refuses_one_key_in_both_kinds(memory_disk: Disk) -> None:
    with pytest.raises(StoreError, match="exists already"):
        memory_disk.apply(puts=put(1), transient_puts=put(1))
