"""In which order a program is handed messages, and what the broker is told of that before. Each of these was once a
fault."""

from tests.client.scripted import Running, Script, named, one
from truenext.client.core.session import Mode


def test_in_auto_mode_none_of_several_is_acknowledged_before_the_next_are_asked_for() -> None:
    script = Script()
    script.connect()
    session = script.session(Mode.AUTO)
    subscription = script.consumer(session)
    for sequence in (1, 2, 3):
        script.message(subscription, sequence)
    got = Running(session.receive(subscription, 3, None, "me"))
    assert [each.sequence for each in got.result] == [1, 2, 3]
    said = script.all_said()
    assert not named(said, "ACK")
    assert len(named(said, "SEND", "/control/begun")) == 3
    Running(session.receive(subscription, 3, None, "me"))
    assert [each.headers["id"] for each in named(script.all_said(), "ACK")] == [
        f"{sequence}.1@{subscription.id}" for sequence in (1, 2, 3)
    ]


def test_in_auto_mode_what_waits_for_a_full_socket_is_handed_out_and_not_acknowledged() -> None:
    script = Script()
    script.connect()
    session = script.session(Mode.AUTO)
    subscription = script.consumer(session)
    script.message(subscription, 1)
    script.message(subscription, 2)
    assert session.take_now(subscription, "me") is not None
    script.is_blocked = True
    assert session.take_now(subscription, "me") is None
    waiting = Running(session.receive(subscription, 1, None, "me"))
    assert not waiting.is_done
    script.is_blocked = False
    script.client.has_drained()
    assert one(waiting.again()).sequence == 2
    assert [each.headers["id"] for each in named(script.all_said(), "ACK")] == [f"1.1@{subscription.id}"]


def test_what_waits_for_a_full_socket_is_for_who_has_asked_for_it() -> None:
    script = Script()
    script.connect()
    session = script.session(Mode.AUTO)
    subscription = script.consumer(session)
    script.message(subscription, 1)
    script.message(subscription, 2)
    script.is_blocked = True
    assert session.take_now(subscription, "first") is None
    first = Running(session.receive(subscription, 1, None, "first"))
    assert session.take_now(subscription, "second") is None
    second = Running(session.receive(subscription, 1, None, "second"))
    script.is_blocked = False
    script.client.has_drained()
    assert one(second.again()).sequence == 2
    assert one(first.again()).sequence == 1
    assert not named(script.all_said(), "ACK")


def test_what_waits_for_a_full_socket_is_not_handed_out_before_something_more_urgent_that_comes_meanwhile() -> None:
    """One was taken; the other came while the broker could not be told of that."""
    script = Script()
    script.connect()
    session = script.session()
    subscription = script.consumer(session, prefetch=10)
    script.message(subscription, 1)
    script.message(subscription, 2)
    script.is_blocked = True
    assert session.take_now(subscription, "me") is None
    waiting = Running(session.receive(subscription, 1, None, "me"))
    script.message(subscription, 3, priority="9")
    script.is_blocked = False
    script.client.has_drained()
    assert not waiting.again().is_done
    given_back = named(script.all_said(), "SEND", "/control/give-back")
    assert len(given_back) == 1 and "keep" not in given_back[0].body
