"""Tests of the causes of failures that a client sends, and of those that it shows to its program.

Source: docs/attempts.md. Tests of the broker cover what it does with a cause.
"""

import pytest

from tests.client.scripted import ClientFrame, Script, one, receive, select_frames
from truenext.client.core.disposition import FAILED, REJECTED, Disposition
from truenext.client.core.flows import failed_disposition, rejected_disposition
from truenext.client.core.message import Content
from truenext.client.core.session import SessionMode
from truenext.model.limits import CAUSE_BYTES_MAX


def nacked(
    script: Script, disposition: Disposition, mode: SessionMode = SessionMode.INDIVIDUAL, *, is_lost: bool = False
) -> list[ClientFrame]:
    session = script.session(mode)
    subscription = script.consumer(session, prefetch=1)
    waiting = receive(session)
    script.message(subscription, 1)
    session.settle(one(waiting), disposition, "the task")
    if is_lost:
        script.reconnect()
        script.confirm()
        script.message(subscription, 1, deliveries=2)
    return select_frames(script.take_frames(), "NACK")


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("mode", [SessionMode.INDIVIDUAL, SessionMode.AT_COMMIT])
def test_a_nack_carries_its_cause_and_delay_also_when_it_is_repeated(mode: SessionMode, is_lost: bool) -> None:
    script = Script()
    script.connect()
    (nack,) = nacked(script, failed_disposition(1.5, "no: wire\nat all"), mode, is_lost=is_lost)
    assert nack.headers["truenext-delay"] == "1500"
    # As it stands on the wire.
    assert nack.headers["truenext-cause"] == "no\\c wire\\nat all"
    assert "transaction" not in nack.headers


def test_a_rejection_carries_its_cause() -> None:
    script = Script()
    script.connect()
    (nack,) = nacked(script, rejected_disposition("never"))
    assert (nack.headers["truenext-reject"], nack.headers["truenext-cause"]) == ("true", "never")


def test_nack_without_a_cause_has_no_cause_header() -> None:
    script = Script()
    script.connect()
    assert failed_disposition(None) == FAILED
    assert rejected_disposition("") == REJECTED
    for disposition in (FAILED, failed_disposition(1), REJECTED):
        (nack,) = nacked(script, disposition)
        assert "truenext-cause" not in nack.headers


def test_another_broker_gets_no_cause() -> None:
    script = Script()
    script.connect(store="")
    (nack,) = nacked(script, rejected_disposition("never"))
    assert [name for name in nack.headers if name.startswith("truenext-cause")] == []


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("x" * CAUSE_BYTES_MAX, "x" * CAUSE_BYTES_MAX),
        ("x" * (CAUSE_BYTES_MAX + 1), "x" * CAUSE_BYTES_MAX),
        ("x" + "ä" * CAUSE_BYTES_MAX, "x" + "ä" * (CAUSE_BYTES_MAX // 2 - 1)),
        ("xx" + "\N{SNAKE}" * CAUSE_BYTES_MAX, "xx" + "\N{SNAKE}" * (CAUSE_BYTES_MAX // 4 - 1)),
        ("a\0b", "a\N{REPLACEMENT CHARACTER}b"),
        ("a\ud800b", "a?b"),
    ],
    ids=["as long as may be", "longer", "two bytes", "four bytes", "a NUL", "half a character"],
)
def test_a_cause_is_cut_between_two_characters_and_its_invalid_characters_are_replaced(
    cause: str, expected: str
) -> None:
    assert failed_disposition(None, cause).cause == rejected_disposition(cause).cause == expected
    assert len(expected.encode()) <= CAUSE_BYTES_MAX


def test_a_cause_is_text() -> None:
    with pytest.raises(TypeError):
        failed_disposition(None, ValueError("x"))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        rejected_disposition(b"x")  # type: ignore[arg-type]


def test_a_message_shows_its_first_and_last_cause_apart_from_the_programs_headers() -> None:
    script = Script()
    script.connect()
    session = script.session()
    subscription = script.consumer(session)
    causes = {"truenext-first-cause": "no\\c wire", "truenext-last-cause": "busy", "mine": "x"}
    script.message(subscription, 1, deliveries=1, **causes)
    script.message(subscription, 2)
    message = one(receive(session))
    assert (message.first_cause, message.last_cause) == ("no: wire", "busy")
    assert dict(message.application_headers) == {"mine": "x"}
    message = one(receive(session))
    assert (message.first_cause, message.last_cause) == ("", "")
    assert isinstance(Content.first_cause, property)


def test_a_dead_letter_shows_the_causes_of_its_original_message_until_it_fails_itself() -> None:
    script = Script()
    script.connect()
    session = script.session()
    subscription = script.consumer(session)
    causes = {"truenext-original-first-cause": "no", "truenext-original-last-cause": "never"}
    script.message(subscription, 1, 1, **causes)
    script.message(subscription, 2, 1, **causes, **{"truenext-first-cause": "busy", "truenext-last-cause": "gone"})
    message = one(receive(session))
    assert (message.first_cause, message.last_cause) == ("no", "never")
    message = one(receive(session))
    assert (message.first_cause, message.last_cause) == ("busy", "gone")
