"""Tests of the encoding of outbox units, and of the ids derived from them. Source: docs/stages-database.md"""

from __future__ import annotations

import contextlib
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.client.core.send_options import SendOptions, encode_send
from truenext.flows.envelope import CONTENT_TYPE
from truenext.flows.message_ids import RANDOM_BYTES, child_id, first_id, inbox_id
from truenext.stage.broker_transaction import encode_heads, transaction_count
from truenext.stage.core.outbox_unit import (
    COMBINED_PREFIX,
    TTL_MIN_S,
    UNIT_PREFIXES,
    Delay,
    EncodedMessage,
    OutboxUnit,
    UnreadableUnit,
    combine_units,
    decode_unit,
)

messages = st.lists(
    st.builds(
        EncodedMessage,
        destination=st.just("/queue/take"),
        body=st.binary(max_size=20),
        id=st.text(max_size=5),
        priority=st.integers(0, 9),
        persistent=st.booleans(),
        expires_ms=st.integers(0, 2**50),
        ttl_s=st.none() | st.floats(TTL_MIN_S, 1e6),
        report_to=st.sampled_from(["", "/topic/replies.shop.1"]),
        report_id=st.text(max_size=5),
        on_failure=st.lists(st.just("/queue/a.stage.on_failure"), max_size=8).map(tuple),
    ),
    max_size=4,
)
DAY_MS = 86_400_000


@given(messages, st.integers(0, DAY_MS))
def test_a_unit_is_read_as_it_was_written(written: list[EncodedMessage], age_ms: int) -> None:
    data = OutboxUnit(written, False).encode()
    assert data.startswith(UNIT_PREFIXES)
    expect_read(decode_unit(data, age_ms), [(each, age_ms) for each in written])


@given(st.lists(st.tuples(st.integers(0, DAY_MS), messages), min_size=1, max_size=5))
def test_units_that_are_put_together_are_read_in_order_each_with_its_own_time(
    units: list[tuple[int, list[EncodedMessage]]],
) -> None:
    now_ms = 1_800_000_000_000
    ages = sorted((age for age, _ in units), reverse=True)
    written = [(now_ms - age, OutboxUnit(some, False).encode()) for age, (_, some) in zip(ages, units, strict=True)]
    data = combine_units(written)
    assert data.startswith(COMBINED_PREFIX)
    expected = [(each, age) for age, (_, some) in zip(ages, units, strict=True) for each in some]
    expect_read(decode_unit(data, ages[0]), expected)


def expect_read(read: list[EncodedMessage], written: list[tuple[EncodedMessage, int]]) -> None:
    assert len(read) == len(written)
    for is_now, (was, age_ms) in zip(read, written, strict=True):
        times = ("ttl_s", "expires_ms")
        for name in set(EncodedMessage.__struct_fields__) - (set() if was.ttl_s is None else {*times}):
            assert getattr(is_now, name) == getattr(was, name)
        if was.ttl_s is not None and was.ttl_s - age_ms / 1000 >= TTL_MIN_S:
            assert is_now.ttl_s == pytest.approx(was.ttl_s - age_ms / 1000) and is_now.expires_ms == was.expires_ms
        elif was.ttl_s is not None:
            # The broker removes it.
            assert is_now.ttl_s is None and is_now.expires_ms == 1


@given(messages, st.integers(0, 200), st.binary(max_size=10))
def test_damaged_unit_is_refused_or_read(written: list[EncodedMessage], cut: int, rest: bytes) -> None:
    for data in (OutboxUnit(written, False).encode(), combine_units([(1, OutboxUnit(written, False).encode())])):
        with contextlib.suppress(UnreadableUnit):
            decode_unit(data[:cut] + rest, 0)


class OlderMessage(msgspec.Struct, frozen=True, array_like=True):
    """Message of a unit, in a version of truenext without reports."""

    destination: str
    body: bytes
    id: str
    priority: int
    persistent: bool
    expires_ms: int = 0
    ttl_s: float | None = None
    refused: str = ""


@given(messages)
def test_unit_is_read_by_a_version_without_reports_and_the_other_way_round(written: list[EncodedMessage]) -> None:
    older_decoder = msgspec.msgpack.Decoder(tuple[int, list[OlderMessage]])
    _, older = older_decoder.decode(OutboxUnit(written, False).encode())
    kept = OlderMessage.__struct_fields__
    assert [[getattr(each, name) for name in kept] for each in older] == [
        [getattr(each, name) for name in kept] for each in written
    ]
    read = decode_unit(msgspec.msgpack.encode((1, older)), 0)
    assert read == [msgspec.structs.replace(each, report_to="", report_id="", on_failure=()) for each in written]


sent_messages = st.lists(
    st.builds(
        EncodedMessage,
        destination=st.sampled_from(["/queue/take", "/queue/pack"]),
        body=st.binary(max_size=2),
        id=st.sampled_from(["0f3a", "77b1", "a b", "a:b", "x" * 200, ""]),
        priority=st.sampled_from([4, 9]),
        persistent=st.booleans(),
        expires_ms=st.sampled_from([0, 0, 0, 1_800_000_000_000]),
        ttl_s=st.sampled_from([None, None, None, 2.5]),
        refused=st.sampled_from(["", "", "", "too large"]),
        delay=st.sampled_from([None, None, None, Delay(1500)]),
        report_to=st.sampled_from(["", "", "", "/topic/replies.shop.1"]),
        report_id=st.just("7"),
        on_failure=st.sampled_from([(), (), (), ("/queue/a.stage.on_failure",)]),
    ),
    max_size=8,
)


@given(sent_messages)
def test_head_of_each_sent_message_has_all_its_options(messages: list[EncodedMessage]) -> None:
    for each, (head, body, ttl_s) in zip(messages, encode_heads(messages), strict=True):
        options: SendOptions = {
            "priority": each.priority,
            "persistent": each.persistent,
            "content_type": CONTENT_TYPE,
            "correlation_id": each.id,
        }
        if each.refused:
            options["headers"] = {"refused": each.refused}
        elif each.expires_ms:
            options["headers"] = {"expires": str(each.expires_ms)}
        elif each.ttl_s is not None:
            options["ttl"] = each.ttl_s
        if each.report_to:
            options["report_to"], options["report_id"] = each.report_to, each.report_id
        if each.on_failure:
            options["on_failure"] = each.on_failure
        if each.delay is not None:
            options["delay"] = each.delay.ms / 1000
        expected = encode_send(each.destination, options)
        assert sorted(head.splitlines()) == sorted(expected.head.splitlines())
        assert head.endswith(b"\n")
        assert (body, ttl_s) == (each.body, expected.ttl_s)


def test_a_unit_of_another_version_is_refused() -> None:
    with pytest.raises(UnreadableUnit):
        decode_unit(b"\x92\x04\x90", 0)


def test_an_id_begins_with_the_time_and_what_is_made_of_it_with_the_same() -> None:
    first = first_id(1_800_000_000_000, bytes(RANDOM_BYTES))
    made = [child_id(first, 1), child_id(first, 2), child_id(child_id(first, 1), 1), inbox_id("shop", "take", first)]
    assert len({first, *made}) == 5
    for each in (first, *made):
        assert re.fullmatch("[0-9a-f]{32}", each) and int(each[:12], 16) == 1_800_000_000_000


@pytest.mark.parametrize("id", ["", "order 1", "0123", "x" * 10_000, "\0", "ABCDEF0123456789"])
def test_an_id_of_a_foreign_program_may_be_any_text(id: str) -> None:
    made = {inbox_id("shop", "take", id), inbox_id("bank", "take", id), inbox_id("shop", "give", id), child_id(id, 1)}
    assert len(made) == 4 and all(re.fullmatch("[0-9a-f]{32}", each) for each in made)


def test_messages_with_an_expiry_or_a_delay_count_twice_as_in_the_broker() -> None:
    plain = EncodedMessage("/queue/take", b"", "", 4, True)
    costly = [
        msgspec.structs.replace(plain, expires_ms=1),
        msgspec.structs.replace(plain, ttl_s=1.0),
        msgspec.structs.replace(plain, delay=Delay(1)),
    ]
    assert transaction_count([plain]) == 1
    assert [transaction_count([each]) for each in costly] == [2, 2, 2]
    assert transaction_count([plain, *costly]) == 7
