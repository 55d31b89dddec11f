"""What the core of a client does when connections are lost at an unlucky moment. Source: docs/client.md, "Lost
connections". Each of these was once a fault."""

from tests.client.scripted import Script, named, one, receive
from truenext.client.core.verdict import DONE


def test_who_pulls_asks_anew_when_what_came_was_acknowledged_before() -> None:
    """The wish was spent on it, and nothing else would ever have come."""
    script = Script()
    script.connect()
    session = script.session()
    subscription = script.consumer(session, prefetch=0)
    waiting = receive(session)
    script.message(subscription, 1)
    session.settle(one(waiting), DONE)
    script.reconnect()
    script.confirm()
    waiting = receive(session)
    script.message(subscription, 1, deliveries=2)
    assert not waiting.again().is_done
    said = script.all_said()
    assert [each.headers["id"] for each in named(said, "ACK")] == [f"1.2@{subscription.id}"]
    assert len(named(said, "SEND", "/control/credit")) == 2
    script.message(subscription, 2)
    assert one(waiting).sequence == 2


def test_who_pulls_asks_anew_when_what_came_is_still_with_the_program() -> None:
    script = Script()
    script.connect()
    session = script.session()
    subscription = script.consumer(session, prefetch=0)
    waiting = receive(session)
    script.message(subscription, 1)
    first = one(waiting)
    script.reconnect()
    script.confirm()
    waiting = receive(session)
    script.message(subscription, 1, deliveries=2)
    assert not waiting.again().is_done
    assert len(named(script.all_said(), "SEND", "/control/credit")) == 2
    script.message(subscription, 2)
    assert one(waiting).sequence == 2
    session.settle(first, DONE)
    assert [each.headers["id"] for each in named(script.all_said(), "ACK")] == [f"1.2@{subscription.id}"]
