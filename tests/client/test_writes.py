"""Tests of the writes with which a client acknowledges messages. Source: docs/client.md, "Receive"."""

from collections.abc import Callable

import pytest

from tests.client.scripted import ClientFrame, RunningFlow, Script, receive, select_frames
from truenext.client.core import flows
from truenext.client.core.buffer import ReceivedMessage, Subscription
from truenext.client.core.disposition import ACKED, FAILED, REJECTED
from truenext.client.core.link import UNANSWERED_FRAMES_MAX
from truenext.client.core.send_buffer import SendBatch
from truenext.client.core.send_flows import await_confirmed
from truenext.client.core.session import SessionCore, SessionMode


class Receiver:
    """Consumer with a connection of its own."""

    def __init__(self, mode: SessionMode = SessionMode.INDIVIDUAL, *, count: int, store: str = "here") -> None:
        self.script = Script()
        self.script.connect(store)
        self.session = self.script.session(mode)
        self.subscription = self.script.consumer(self.session)
        for sequence in range(1, count + 1):
            self.script.message(self.subscription, sequence)
        self.script.write_count = 0

    def receive(self) -> ReceivedMessage:
        received = self.session.try_receive(self.subscription, "me")
        assert received is not None, "one is buffered"
        return received

    def ack(self, received: ReceivedMessage) -> None:
        assert self.session.settle(received, ACKED)

    def ack_first(self) -> list[ClientFrame]:
        """Receive a message and acknowledge it, and return the frames written since the receive."""
        received = self.receive()
        self.script.frames.clear()
        self.ack(received)
        return list(self.script.frames)


def ack_ids(frames: list[ClientFrame]) -> list[str]:
    return [frame.headers["id"] for frame in select_frames(frames, "ACK")]


def test_each_of_many_buffered_messages_is_received_and_acknowledged_in_one_write() -> None:
    count = UNANSWERED_FRAMES_MAX + 44
    receiver = Receiver(count=count)
    script = receiver.script
    for _ in range(count):
        receiver.ack(receiver.receive())
    # One more reports the first message as started.
    assert script.write_count == count + 1
    frames = list(script.frames)
    assert ack_ids(frames) == [f"{each}.1@{receiver.subscription.id}" for each in range(1, count + 1)]
    assert [frame.headers.get("truenext-started") for frame in select_frames(frames, "ACK")] == [
        *(f"{each}.1@{receiver.subscription.id}" for each in range(2, count + 1)),
        None,
    ]
    assert sum("receipt" in frame.headers for frame in frames) == 1


def test_handlers_receive_and_acknowledge_each_message_in_one_write() -> None:
    """Handlers call `receive`, and not `try_receive`."""
    receiver = Receiver(count=10)
    for _ in range(10):
        (received,) = receive(receiver.session).result
        receiver.ack(received)
    assert receiver.script.write_count == 11


def test_an_explicit_ack_in_auto_mode_waits_for_the_next_receive_too() -> None:
    receiver = Receiver(SessionMode.AUTO, count=10)
    for _ in range(10):
        receiver.ack(receiver.receive())
    assert receiver.script.write_count == 11


def test_an_ack_that_waits_is_followed_by_reports_of_all_messages_received_together() -> None:
    receiver = Receiver(count=4)
    assert not receiver.ack_first()
    assert len(RunningFlow(receiver.session.receive(None, 3, None, "me")).result) == 3
    assert receiver.script.write_count == 2
    frames = list(receiver.script.frames)
    assert [frame.command for frame in frames] == ["ACK", "SEND", "SEND"]
    assert [frame.headers.get("truenext-started", frame.headers["id"]).partition(".")[0] for frame in frames] == [
        *"234"
    ]


def test_an_ack_that_waits_is_to_be_written_later() -> None:
    receiver = Receiver(count=2)
    assert not receiver.ack_first()
    assert receiver.script.is_flush_later_due
    receiver.script.flush()
    assert len(ack_ids(list(receiver.script.frames))) == 1


@pytest.mark.parametrize("reason", ["nothing is buffered", "another broker", "paused", "a frame waits"])
def test_an_ack_does_not_wait(reason: str) -> None:
    receiver = Receiver(
        count=1 if reason == "nothing is buffered" else 2, store="" if reason == "another broker" else "a"
    )
    received = receiver.receive()
    if reason == "paused":
        receiver.subscription.is_paused = True
    if reason == "a frame waits":
        link = receiver.script.client.link
        assert link is not None
        link.write(b"BEGIN\ntransaction:x\n\n\0")
    receiver.script.frames.clear()
    receiver.ack(received)
    assert len(ack_ids(list(receiver.script.frames))) == 1
    assert not receiver.script.is_flush_later_due


def test_a_second_ack_sends_the_one_that_waits() -> None:
    """So a crash redelivers one finished message at most."""
    receiver = Receiver(count=3)
    first, second = receiver.receive(), receiver.receive()
    receiver.script.frames.clear()
    receiver.ack(first)
    assert not receiver.script.frames
    receiver.ack(second)
    assert len(ack_ids(list(receiver.script.frames))) == 2


def _nack(session: SessionCore, received: ReceivedMessage, subscription: Subscription) -> None:
    session.settle(received, FAILED)


def _reject(session: SessionCore, received: ReceivedMessage, subscription: Subscription) -> None:
    session.settle(received, REJECTED)


def _release(session: SessionCore, received: ReceivedMessage, subscription: Subscription) -> None:
    session.release(received)


def _flush(session: SessionCore, received: ReceivedMessage, subscription: Subscription) -> None:
    RunningFlow(await_confirmed(session.client, SendBatch(), None))


def _close_consumer(session: SessionCore, received: ReceivedMessage, subscription: Subscription) -> None:
    RunningFlow(flows.close_consumer(session, subscription, "me", owns_session=True))


def _close_connection(session: SessionCore, received: ReceivedMessage, subscription: Subscription) -> None:
    RunningFlow(session.client.close(None))


def _commit(session: SessionCore, received: ReceivedMessage, subscription: Subscription) -> None:
    other = SessionCore(session.client, SessionMode.AT_COMMIT, session.buffer)
    assert other.try_send(flows.encode_send_in_transaction("/queue/b", {}).head, b"", None, "me")
    RunningFlow(other.commit(None))


@pytest.mark.parametrize("follow", [_nack, _reject, _release, _flush, _close_consumer, _close_connection, _commit])
def test_an_ack_that_waits_is_written_before_the_frames_that_follow(
    follow: Callable[[SessionCore, ReceivedMessage, Subscription], None],
) -> None:
    receiver = Receiver(count=3)
    script = receiver.script
    first, second = receiver.receive(), receiver.receive()
    script.frames.clear()
    receiver.ack(first)
    assert not script.frames
    follow(receiver.session, second, receiver.subscription)
    assert script.frames[0].command == "ACK" and script.frames[0].headers["id"] == first.ack_id
    assert "truenext-started" not in script.frames[0].headers


def test_a_heart_beat_after_an_ack_that_waits_stays_a_byte_of_its_own() -> None:
    receiver = Receiver(count=2)
    assert not receiver.ack_first()
    link = receiver.script.client.link
    assert link is not None
    link.write_heart_beat()
    receiver.receive()
    assert [frame.command for frame in receiver.script.frames] == ["ACK", "SEND"]


def test_a_message_is_not_handed_out_before_a_full_socket_has_taken_the_ack_before_it() -> None:
    receiver = Receiver(count=2)
    script, session = receiver.script, receiver.session
    assert not receiver.ack_first()
    script.is_blocked = True
    waiting = receive(session)
    assert not waiting.is_done
    script.is_blocked = False
    script.client.on_drained()
    assert [each.sequence for each in waiting.resume().result] == [2]
    assert [frame.command for frame in script.frames] == ["ACK"]


def test_a_connection_lost_before_an_ack_was_written_acknowledges_the_redelivery() -> None:
    receiver = Receiver(count=2)
    script = receiver.script
    assert not receiver.ack_first()
    script.reconnect()
    script.confirm()
    script.message(receiver.subscription, 1, 2)
    assert ack_ids(script.take_frames()) == [f"1.2@{receiver.subscription.id}"]
    assert receiver.session.try_receive(receiver.subscription, "me") is None


def test_a_message_does_not_join_a_transaction_while_a_full_socket_holds_an_ack_of_another_session() -> None:
    receiver = Receiver(count=2)
    script = receiver.script
    transacted = script.session(SessionMode.TRANSACTED)
    script.message(script.consumer(transacted), 3)
    assert not receiver.ack_first()
    script.is_blocked = True
    waiting = receive(transacted)
    assert not waiting.is_done and transacted.transaction is None
    script.is_blocked = False
    script.client.on_drained()
    assert [each.sequence for each in waiting.resume().result] == [3]
