"""What the core of a client does when connections are lost at an unlucky moment. Source: docs/client.md, "Lost
connections". Each of these was once a fault."""

from tests.client.scripted import Script, named, one, receive
from truenext.client.core.verdict import DONE, FAILED


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


def nacked(script: Script, attempts: int) -> list[str]:
    """A message was refused, the connection lost before that was confirmed, and it comes again: what is said of it."""
    session = script.session()
    subscription = script.consumer(session, prefetch=1)
    waiting = receive(session)
    script.message(subscription, 1)
    session.settle(one(waiting), FAILED)
    script.reconnect()
    script.confirm()
    waiting = receive(session)
    script.message(subscription, 1, deliveries=2, **{"truenext-attempts": str(attempts)})
    waiting.again()
    assert waiting.is_done == (attempts > 0)
    return [each.headers["id"] for each in named(script.all_said(), "NACK")]


def test_a_refusal_that_the_broker_has_carried_out_is_not_repeated() -> None:
    """It came again because it was refused: to refuse it once more would count twice."""
    script = Script()
    script.connect()
    assert nacked(script, attempts=1) == []


def test_a_refusal_that_the_broker_has_not_carried_out_is_repeated() -> None:
    script = Script()
    script.connect()
    assert nacked(script, attempts=0) == ["1.2@1"]
