"""Tests of the order in which a program is handed messages, and of the frames that the broker gets before.

Each test was once a fault.
"""

import pytest

from tests.client.scripted import RunningFlow, Script, one, select_frames
from truenext.client.core.buffer import Subscription
from truenext.client.core.disposition import CountedAttempts
from truenext.client.core.flows import send_request
from truenext.client.core.send_flows import prepare_send, send
from truenext.client.core.session import SessionCore, SessionMode
from truenext.errors import RolledBack


def test_auto_mode_acknowledges_none_of_several_messages_before_the_next_receive() -> None:
    script = Script()
    script.connect()
    session = script.session(SessionMode.AUTO)
    subscription = script.consumer(session)
    for sequence in (1, 2, 3):
        script.message(subscription, sequence)
    got = RunningFlow(session.receive(subscription, 3, None, "me"))
    assert [each.sequence for each in got.result] == [1, 2, 3]
    frames = script.take_frames()
    assert not select_frames(frames, "ACK")
    assert len(select_frames(frames, "SEND", "/control/started")) == 3
    RunningFlow(session.receive(subscription, 3, None, "me"))
    assert [each.headers["id"] for each in select_frames(script.take_frames(), "ACK")] == [
        f"{sequence}.1@{subscription.id}" for sequence in (1, 2, 3)
    ]


def test_auto_mode_hands_out_messages_held_by_a_full_socket_without_acknowledging_them() -> None:
    script = Script()
    script.connect()
    session = script.session(SessionMode.AUTO)
    subscription = script.consumer(session)
    script.message(subscription, 1)
    script.message(subscription, 2)
    assert session.try_receive(subscription, "me") is not None
    script.is_blocked = True
    assert session.try_receive(subscription, "me") is None
    waiting = RunningFlow(session.receive(subscription, 1, None, "me"))
    assert not waiting.is_done
    script.is_blocked = False
    script.client.on_drained()
    assert one(waiting.resume()).sequence == 2
    assert [each.headers["id"] for each in select_frames(script.take_frames(), "ACK")] == [f"1.1@{subscription.id}"]


def test_messages_held_by_a_full_socket_go_to_the_receives_that_took_them() -> None:
    script = Script()
    script.connect()
    session = script.session(SessionMode.AUTO)
    subscription = script.consumer(session)
    script.message(subscription, 1)
    script.message(subscription, 2)
    script.is_blocked = True
    assert session.try_receive(subscription, "first") is None
    first = RunningFlow(session.receive(subscription, 1, None, "first"))
    assert session.try_receive(subscription, "second") is None
    second = RunningFlow(session.receive(subscription, 1, None, "second"))
    script.is_blocked = False
    script.client.on_drained()
    assert one(second.resume()).sequence == 2
    assert one(first.resume()).sequence == 1
    assert not select_frames(script.take_frames(), "ACK")


def test_a_message_held_by_a_full_socket_is_released_when_a_more_urgent_one_comes() -> None:
    """The first message was taken; the other came while the broker could not be told of it."""
    script = Script()
    script.connect()
    session = script.session()
    subscription = script.consumer(session, prefetch=10)
    script.message(subscription, 1)
    script.message(subscription, 2)
    script.is_blocked = True
    assert session.try_receive(subscription, "me") is None
    waiting = RunningFlow(session.receive(subscription, 1, None, "me"))
    script.message(subscription, 3, priority="9")
    script.is_blocked = False
    script.client.on_drained()
    assert not waiting.resume().is_done
    released = select_frames(script.take_frames(), "SEND", "/control/release")
    assert len(released) == 1 and "keep" not in released[0].body


def test_a_message_of_another_broker_held_by_a_full_socket_is_handed_out_before_later_ones() -> None:
    """Taking it anew would renew the subscription, and a topic keeps no messages."""
    script = Script()
    script.connect(store="")
    session = script.session()
    subscription = script.consumer(session, "/topic/a")
    script.message(subscription, 1)
    script.is_blocked = True
    assert session.try_receive(subscription, "me") is None
    waiting = RunningFlow(session.receive(subscription, 1, None, "me"))
    script.message(subscription, 2, priority="9")
    script.is_blocked = False
    script.client.on_drained()
    assert one(waiting.resume()).sequence == 1


def delivered_and_not_seen() -> tuple[Script, SessionCore, Subscription]:
    """Return a session whose transaction has a message that its code has not seen yet."""
    script = Script()
    script.connect()
    session = script.session(SessionMode.TRANSACTED)
    subscription = script.consumer(session, prefetch=10)
    script.message(subscription, 1)
    script.is_blocked = True
    assert session.try_receive(subscription, "me") is None
    return script, session, subscription


def test_a_message_rolled_back_before_its_code_saw_it_is_not_handed_out() -> None:
    script, session, subscription = delivered_and_not_seen()
    session.rollback("me", counted=CountedAttempts.NONE)
    script.is_blocked = False
    assert not RunningFlow(session.receive(subscription, 1, None, "me")).is_done
    assert session.transaction is None


def test_a_transaction_with_a_message_that_its_code_has_not_seen_is_not_committed() -> None:
    script, session, _ = delivered_and_not_seen()
    script.is_blocked = False
    with pytest.raises(RolledBack):
        RunningFlow(session.commit(5.0))
    assert select_frames(script.take_frames(), "COMMIT") == []


def test_a_single_send_or_request_is_written_at_once() -> None:
    """Writing at the end of a pass of the loop would delay it by a pass."""
    script = Script()
    script.connect()
    script.frames.clear()
    RunningFlow(send(script.client, prepare_send(script.client, "/queue/a", b"x", {}), None))
    assert [each.headers["destination"] for each in script.frames] == ["/queue/a"]
    script.confirm()
    RunningFlow(send_request(script.client, "/queue/b", b"x", {}, 60.0))
    assert [each.headers["destination"] for each in select_frames(list(script.frames), "SEND")] == ["/queue/b"]
