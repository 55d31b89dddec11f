"""Tests of a client's core whose connections are lost at an unlucky moment. Source: docs/client.md, "Lost connections".

Each test was once a fault.
"""

from asyncio import CancelledError

import pytest

from tests.client.scripted import ClientFrame, RunningFlow, Script, one, receive, select_frames
from truenext.client.core.buffer import Subscription, SubscriptionOptions
from truenext.client.core.disposition import ACKED, FAILED, REJECTED, CountedAttempts
from truenext.client.core.flows import TransactionBlock, encode_send_in_transaction
from truenext.client.core.send_buffer import UNCONFIRMED_MESSAGES_MAX, SendBatch
from truenext.client.core.send_flows import await_capacity, await_confirmed, enqueue, prepare_send, send, try_enqueue
from truenext.client.core.session import SessionCore, SessionMode
from truenext.errors import ClosedError, Code, InDoubt, LocalProtocolError, Refused, RolledBack


def test_pull_request_is_repeated_when_the_message_that_came_was_acknowledged_before() -> None:
    """Regression: the request was used up by it, and no other message ever came."""
    script = Script()
    script.connect()
    session = script.session()
    subscription = script.consumer(session, prefetch=0)
    waiting = receive(session)
    script.message(subscription, 1)
    session.settle(one(waiting), ACKED)
    script.reconnect()
    script.confirm()
    waiting = receive(session)
    script.message(subscription, 1, deliveries=2)
    assert not waiting.resume().is_done
    frames = script.take_frames()
    assert [each.headers["id"] for each in select_frames(frames, "ACK")] == [f"1.2@{subscription.id}"]
    assert len(select_frames(frames, "SEND", "/control/credit")) == 2
    script.message(subscription, 2)
    assert one(waiting).sequence == 2


def test_pull_request_is_repeated_when_the_program_still_has_the_message_that_came() -> None:
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
    assert not waiting.resume().is_done
    assert len(select_frames(script.take_frames(), "SEND", "/control/credit")) == 2
    script.message(subscription, 2)
    assert one(waiting).sequence == 2
    session.settle(first, ACKED)
    assert [each.headers["id"] for each in select_frames(script.take_frames(), "ACK")] == [f"1.2@{subscription.id}"]


def nacked(script: Script, attempts: int) -> list[str]:
    """Nack a message, lose the connection before the receipt, and redeliver the message. Return the ids of the NACKs
    that follow."""
    session = script.session()
    subscription = script.consumer(session, prefetch=1)
    waiting = receive(session)
    script.message(subscription, 1)
    session.settle(one(waiting), FAILED)
    script.reconnect()
    script.confirm()
    waiting = receive(session)
    script.message(subscription, 1, deliveries=2, **{"truenext-attempts": str(attempts)})
    waiting.resume()
    assert waiting.is_done == (attempts > 0)
    return [each.headers["id"] for each in select_frames(script.take_frames(), "NACK")]


def test_a_nack_that_the_broker_has_carried_out_is_not_repeated() -> None:
    """The message came again because of the nack, which would count twice."""
    script = Script()
    script.connect()
    assert nacked(script, attempts=1) == []


def test_a_nack_that_the_broker_has_not_carried_out_is_repeated() -> None:
    script = Script()
    script.connect()
    assert nacked(script, attempts=0) == ["1.2@1"]


@pytest.mark.parametrize("waits", ["another transaction", "nobody"])
def test_messages_of_a_transaction_in_doubt_are_handed_out_when_it_was_rolled_back(waits: str) -> None:
    """Regression: the redelivered message was kept for ever for the code, which had ended with InDoubt."""
    script = Script()
    script.connect()
    session = script.session(SessionMode.TRANSACTED)
    subscription = script.consumer(session, prefetch=1)
    receiving = receive(session)
    script.message(subscription, 1)
    one(receiving)
    committing = RunningFlow(session.commit(1.0))
    script.lose()
    with pytest.raises(InDoubt):
        committing.time_out()
    script.frames.clear()
    script.connect()
    (request,) = select_frames(script.confirm(), "SEND", "/control/producer")
    script.message(subscription, 1, deliveries=2)
    if waits == "another transaction":
        receiving = receive(session)
    script.reply(request, {"sends": 0, "commits": 1, "outcome": "rolled back"})
    if waits == "nobody":
        receiving = receive(session)
    assert select_frames(script.take_frames(), "SEND", "/control/release")
    script.message(subscription, 1, deliveries=3)
    assert one(receiving).sequence == 1
    assert script.client.subscriptions.orphaned_messages == {} and list(script.client.transactions) == [
        session.transaction
    ]


def commit_of(script: Script) -> ClientFrame:
    (commit,) = select_frames(script.take_frames(), "COMMIT")
    return commit


def settled_elsewhere(script: Script, *, is_in_time: bool) -> SessionCore:
    """Return a session whose transaction has message 1, and whose outcome another connection has requested before the
    broker had its COMMIT."""
    script.connect()
    session = script.session(SessionMode.TRANSACTED)
    subscription = script.consumer(session, prefetch=1)
    receiving = receive(session)
    script.message(subscription, 1)
    one(receiving)
    committing = RunningFlow(session.commit(1.0))
    if not is_in_time:
        with pytest.raises(InDoubt):
            committing.time_out()
    commit = commit_of(script)
    assert commit.headers["truenext-number"] == "1"
    script.refuse(int(commit.headers["receipt"]), Code.ROLLED_BACK)
    if is_in_time:
        with pytest.raises(RolledBack, match=r"queried on another connection .* repeat the transaction$"):
            committing.resume()
    return session


def commits_as_number_2(script: Script, session: SessionCore) -> None:
    committing = RunningFlow(session.commit(1.0))
    commit = commit_of(script)
    assert (commit.headers["truenext-producer"], commit.headers["truenext-number"]) == ("me-1", "2")
    script.receive("RECEIPT", **{"receipt-id": commit.headers["receipt"]})
    assert committing.resume().result is True


@pytest.mark.parametrize("is_in_time", [False, True])
def test_commit_settled_as_rolled_back_by_another_connection_is_followed_by_the_next_number(is_in_time: bool) -> None:
    """Regression: all later transactions were committed under the resolved number, and refused."""
    script = Script()
    session = settled_elsewhere(script, is_in_time=is_in_time)
    receiving = receive(session)
    assert select_frames(script.take_frames(), "SEND", "/control/release")
    (subscription,) = session.buffer.subscriptions
    script.message(subscription, 1, deliveries=2)
    assert one(receiving).sequence == 1
    commits_as_number_2(script, session)


@pytest.mark.parametrize("is_in_time", [False, True])
def test_session_made_after_a_commit_was_settled_by_another_connection_commits_under_the_next_number(
    is_in_time: bool,
) -> None:
    script = Script()
    settled_elsewhere(script, is_in_time=is_in_time).close("the task")
    script.confirm()
    session = script.session(SessionMode.TRANSACTED)
    assert session.try_send(encode_send_in_transaction("/queue/a", {}).head, b"x", None, "the task")
    commits_as_number_2(script, session)


def test_commit_whose_begin_was_refused_does_not_use_its_number() -> None:
    """The broker answers such a COMMIT with the same code as one whose number was resolved."""
    script = Script()
    script.connect()
    session = script.session(SessionMode.TRANSACTED)
    for _ in range(2):
        assert session.try_send(encode_send_in_transaction("/queue/a", {}).head, b"x", None, "the task")
        committing = RunningFlow(session.commit(1.0))
        commit = commit_of(script)
        assert commit.headers["truenext-number"] == "1"
        number = int(commit.headers["receipt"])
        script.refuse(number - 2, Code.LIMIT)
        script.refuse(number - 1, Code.NO_TRANSACTION)
        script.refuse(number, Code.ROLLED_BACK)
        with pytest.raises(RolledBack, match="limit"):
            committing.resume()


def committing_and_lost(script: Script) -> tuple[SessionCore, Subscription, TransactionBlock, RunningFlow]:
    """Return a transaction that has message 1, and whose connection was lost during its commit."""
    script.connect()
    session = script.session(SessionMode.TRANSACTED)
    subscription = script.consumer(session, prefetch=1)
    block = TransactionBlock(session, 60.0)
    block.enter()
    receiving = receive(session)
    script.message(subscription, 1)
    one(receiving)
    exiting = RunningFlow(block.exit(None, "the task"))
    script.lose()
    script.frames.clear()
    return session, subscription, block, exiting


def test_commit_cancelled_after_its_connection_was_lost_waits_for_the_outcome() -> None:
    script = Script()
    session, _, block, exiting = committing_and_lost(script)
    script.now = 10.0
    exiting.cancel()
    assert exiting.deadline == 15.0
    script.connect()
    (request,) = select_frames(script.confirm(), "SEND", "/control/producer")
    script.reply(request, {"sends": 0, "commits": 1, "outcome": "committed"})
    with pytest.raises(CancelledError):
        exiting.resume()
    assert block.outcome.value == "committed" and block.token == ""
    assert session.require_transactions().transaction is None


@pytest.mark.parametrize("ends", ["too late", "cancelled again"])
def test_commit_left_undecided_by_a_cancellation_has_a_token_until_the_outcome_is_known(ends: str) -> None:
    script = Script()
    session, subscription, block, exiting = committing_and_lost(script)
    exiting.cancel()
    with pytest.raises(CancelledError):
        if ends == "too late":
            exiting.time_out()
        else:
            exiting.cancel()
    assert block.outcome.value == "in doubt" and block.token == "here me-1 1"
    # The session goes on, and what the transaction was given is handed out again.
    script.connect()
    (request,) = select_frames(script.confirm(), "SEND", "/control/producer")
    script.message(subscription, 1, deliveries=2)
    script.reply(request, {"sends": 0, "commits": 1, "outcome": "rolled back"})
    assert block.outcome.value == "rolled back" and block.token == ""
    receiving = receive(session)
    assert select_frames(script.take_frames(), "SEND", "/control/release")
    script.message(subscription, 1, deliveries=3)
    assert one(receiving).sequence == 1


def decided_late(outcome: str) -> SessionCore:
    """Return a session whose cancelled commit was left undecided, and whose outcome is known since."""
    script = Script()
    session, _, _, exiting = committing_and_lost(script)
    exiting.cancel()
    with pytest.raises(CancelledError):
        exiting.cancel()
    script.connect()
    (request,) = select_frames(script.confirm(), "SEND", "/control/producer")
    script.reply(request, {"sends": 0, "commits": 1, "outcome": outcome})
    return session


def test_commit_left_undecided_returns_its_outcome_when_it_is_called_again() -> None:
    assert RunningFlow(decided_late("committed").commit(60.0)).result is True
    with pytest.raises(RolledBack):
        RunningFlow(decided_late("rolled back").commit(60.0))


@pytest.mark.parametrize("outcome", ["committed", "rolled back"])
@pytest.mark.parametrize("fails", [False, True])
def test_empty_block_keeps_its_own_outcome_after_a_commit_that_was_decided_late(fails: bool, outcome: str) -> None:
    block = TransactionBlock(decided_late(outcome), 60.0)
    block.enter()
    assert RunningFlow(block.exit(ValueError() if fails else None, "the task")).is_done
    assert block.outcome.value == ("rolled back" if fails else "committed")


def test_a_message_of_a_closed_consumer_is_handed_out_by_another() -> None:
    """Regression: the message was kept for the closed consumer, although the program had released it."""
    script = Script()
    script.connect()
    closing, other = script.session(), script.session()
    first = script.consumer(closing, prefetch=1)
    receiving = receive(closing)
    script.message(first, 1)
    one(receiving)
    script.reconnect()
    script.confirm()
    closing.close("the task")
    second = script.consumer(other, prefetch=1)
    receiving = receive(other)
    script.message(second, 1, deliveries=2)
    assert one(receiving).sequence == 1


def test_a_message_redelivered_to_another_consumer_is_handed_out_when_the_first_is_closed() -> None:
    script = Script()
    script.connect()
    closing, other = script.session(), script.session()
    first, second = script.consumer(closing, prefetch=1), script.consumer(other, prefetch=1)
    receiving = receive(closing)
    script.message(first, 1)
    one(receiving)
    script.reconnect()
    script.confirm()
    receiving = receive(other)
    script.message(second, 1, deliveries=2)
    assert not receiving.resume().is_done
    closing.close("the task")
    assert select_frames(script.take_frames(), "SEND", "/control/release")
    script.message(second, 1, deliveries=3)
    assert one(receiving).sequence == 1


def test_a_redelivered_message_that_the_program_releases_goes_back_to_the_broker() -> None:
    """Regression: the client handed it out itself, before a more urgent message of the broker. A killed client counted
    an attempt of it, as the broker took it for started."""
    script = Script()
    script.connect()
    session = script.session()
    subscription = script.consumer(session, prefetch=1)
    waiting = receive(session)
    script.message(subscription, 1)
    first = one(waiting)
    script.reconnect()
    script.confirm()
    script.message(subscription, 1, deliveries=2)
    script.take_frames()
    session.release(first)
    (released,) = select_frames(script.take_frames(), "SEND", "/control/release")
    assert "keep" not in released.body
    waiting = receive(session)
    assert not waiting.is_done
    script.message(subscription, 2, priority="9")
    assert one(waiting).sequence == 2


def test_a_pulling_subscription_refused_after_a_reconnect_ends_nothing_else() -> None:
    """Regression: the client requested messages before the refusal came; that request was refused too, and ended the
    connection."""
    script = Script()
    script.connect()
    session = script.session()
    script.consumer(session, prefetch=0)
    receiving = receive(session)
    script.reconnect()
    receiving.resume()
    frames = script.take_frames()
    assert [each.command for each in frames] == ["SUBSCRIBE"]
    script.refuse(int(frames[0].headers["receipt"]), "in-use")
    with pytest.raises(Refused, match="in-use"):
        receiving.resume()
    assert script.client.link is not None


def test_a_subscription_that_timed_out_and_was_then_refused_ends_nothing_else() -> None:
    script = Script()
    script.connect()
    session = script.session()
    subscribing = RunningFlow(script.client.subscribe(SubscriptionOptions(destination="/queue/a"), session.buffer, 1.0))
    with pytest.raises(TimeoutError):
        subscribing.time_out()
    frames = script.take_frames()
    assert [each.command for each in frames] == ["SUBSCRIBE", "UNSUBSCRIBE"]
    script.refuse(2, "destination")
    script.refuse(3, "not-found")
    assert script.client.link is not None


def test_a_subscription_not_confirmed_at_a_rollback_is_released_when_it_is_confirmed() -> None:
    """Regression: it was named in the release of a rollback, which was refused and ended the connection."""
    script = Script()
    script.connect()
    session = script.session(SessionMode.TRANSACTED)
    subscribing = RunningFlow(
        script.client.subscribe(SubscriptionOptions(destination="/queue/a"), session.buffer, None)
    )
    session.rollback("the task", counted=CountedAttempts.ALL)
    (subscription,) = session.buffer.subscriptions
    script.message(subscription, 1)
    assert select_frames(list(script.frames), "SEND", "/control/release") == []
    assert session.try_receive(subscription, "the task") is None
    script.confirm()
    (released,) = select_frames(script.take_frames(), "SEND", "/control/release")
    assert f'"{subscription.id}"' in released.body and "keep" not in released.body
    assert subscribing.resume().is_done
    script.message(subscription, 1, deliveries=2)
    assert session.try_receive(subscription, "the task") is not None


def test_a_block_that_was_interrupted_before_it_could_end_holds_up_no_other() -> None:
    """Regression: Ctrl-C came in the first or the last step of `with`, and the session was in that block for ever."""
    script = Script()
    script.connect()
    session = script.session(SessionMode.TRANSACTED)
    subscription = script.consumer(session, prefetch=1)
    block = TransactionBlock(session, 5.0)
    block.enter()
    with pytest.raises(LocalProtocolError, match="use another session"):
        TransactionBlock(session, 5.0).enter()
    waiting = receive(session)
    script.message(subscription, 1)
    one(waiting)
    script.take_frames()
    del block
    TransactionBlock(session, 5.0).enter()
    (released,) = select_frames(script.take_frames(), "SEND", "/control/release")
    assert '"abort"' in released.body and '"count_attempts":"nacked"' in released.body
    assert session.transaction is None


@pytest.mark.parametrize("mode", [SessionMode.INDIVIDUAL, SessionMode.TRANSACTED])
def test_client_that_only_rejects_or_rolls_back_does_not_keep_all_frames_in_memory(mode: SessionMode) -> None:
    """Regression: only acknowledgements and commits requested receipts, and all nacks since stayed in memory."""
    script = Script()
    script.connect()
    session = script.session(mode)
    subscription = script.consumer(session, prefetch=1)
    for sequence in range(1, 600):
        script.message(subscription, sequence)
        received = one(receive(session))
        if session.transaction is None:
            session.settle(received, REJECTED)
        else:
            session.rollback(session.transaction.owner, counted=CountedAttempts.ALL)
        script.confirm()
    assert script.client.link is not None
    assert len(script.client.link.unanswered) < 300


def test_the_first_message_of_a_topic_after_a_reconnect_may_have_missed_others() -> None:
    """The first message that came is not enough: a cancelled receive releases it."""
    script = Script()
    script.connect()
    session = script.session()
    subscription = script.consumer(session, "/topic/a")
    script.message(subscription, 1)
    assert not one(receive(session)).may_have_missed
    script.reconnect()
    script.confirm()
    script.message(subscription, 2)
    script.client.subscriptions.release_buffered([subscription])
    script.message(subscription, 2, deliveries=2)
    script.message(subscription, 3)
    got = receive(session, 2).result
    assert [(each.sequence, each.may_have_missed) for each in got] == [(2, True), (3, False)]


@pytest.mark.parametrize("options", [{"durable": "d"}, {}])
def test_messages_of_a_queue_or_durable_subscription_never_may_have_missed_others(options: dict[str, str]) -> None:
    script = Script()
    script.connect()
    session = script.session()
    subscription = script.consumer(session, "/topic/a" if options else "/queue/a", **options)
    script.reconnect()
    script.confirm()
    script.message(subscription, 2)
    assert not one(receive(session)).may_have_missed


def test_send_that_waits_for_capacity_raises_when_the_connection_is_closed() -> None:
    """Regression: its message waited in a queue that was not served any more, until the timeout."""
    script = Script()
    client = script.client
    sent = [prepare_send(client, "/queue/a", b"x", {}) for _ in range(UNCONFIRMED_MESSAGES_MAX + 1)]
    waiting = [RunningFlow(send(client, each, 60.0)) for each in sent]
    client.fail_permanently(ClosedError("the connection is closed"))
    for each in waiting[:1] + waiting[-1:]:
        with pytest.raises(ClosedError):
            each.resume()


def test_batch_of_sends_is_not_repeated_after_its_caller_got_a_timeout() -> None:
    script = Script()
    client = script.client
    script.connect()
    batch = SendBatch()
    sent = [prepare_send(client, "/queue/a", b"x", {}) for _ in range(2)]
    for each in sent:
        batch.add(each)
        enqueue(client, each)
    assert len(select_frames(script.take_frames(), "SEND")) == 2
    waiting = RunningFlow(await_confirmed(client, batch, 1.0))
    script.lose()
    with pytest.raises(TimeoutError):
        waiting.time_out()
    script.frames.clear()
    script.connect()
    (request,) = script.take_frames()[-1:]
    script.reply(request, {"sends": 0, "commits": 0})
    assert select_frames(script.take_frames(), "SEND", "/queue/a") == []
    # Nobody is told that they were confirmed, and the next to flush waits for none of them.
    assert [type(each.error) for each in sent] == [TimeoutError, TimeoutError]
    assert RunningFlow(await_confirmed(client, batch, 1.0)).is_done


def test_batch_of_sends_is_dropped_after_its_caller_got_a_timeout_for_lack_of_capacity() -> None:
    """Regression: sends that waited for a connection were sent when it was there, minutes later."""
    script = Script()
    client = script.client
    batch = SendBatch()
    sent = [prepare_send(client, "/queue/a", b"x", {}) for _ in range(UNCONFIRMED_MESSAGES_MAX)]
    assert all(try_enqueue(client, batch, each) for each in sent)
    assert not try_enqueue(client, batch, prepare_send(client, "/queue/a", b"x", {}))
    waiting = RunningFlow(await_capacity(client, batch, 1.0))
    with pytest.raises(TimeoutError):
        waiting.time_out()
    script.connect()
    assert select_frames(script.take_frames(), "SEND", "/queue/a") == []
    assert all(isinstance(each.error, TimeoutError) for each in sent)


def test_numbers_that_one_broker_knows_are_not_used_again_after_a_time_with_another() -> None:
    """The sends would be repeats there: confirmed, and never accepted."""
    script = Script()
    client = script.client
    script.connect("here")

    def sent() -> tuple[str, str]:
        enqueue(client, prepare_send(client, "/queue/a", b"x", {}))
        (frame,) = select_frames(script.confirm(), "SEND", "/queue/a")
        return frame.headers["truenext-producer"], frame.headers["truenext-number"]

    def committed() -> tuple[str, str]:
        sending = RunningFlow(session.send(b"SEND\ndestination:/queue/a\n", b"x", None, None, "the task"))
        assert sending.is_done
        committing = RunningFlow(session.commit(None))
        (frame,) = select_frames(script.confirm(), "COMMIT")
        assert committing.resume().is_done
        return frame.headers["truenext-producer"], frame.headers["truenext-number"]

    session = script.session(SessionMode.TRANSACTED)
    used = [sent(), committed()]
    script.reconnect("there")
    used += [committed()]
    script.reconnect("here")
    used += [sent(), committed()]
    assert len(set(used)) == len(used)


def test_acknowledgement_is_repeated_after_a_time_with_another_broker() -> None:
    script = Script()
    script.connect("here")
    session = script.session()
    subscription = script.consumer(session)
    script.message(subscription, 1)
    session.settle(one(receive(session)), ACKED)
    script.reconnect("there")
    script.reconnect("here")
    script.confirm()
    script.message(subscription, 1, deliveries=2)
    assert len(select_frames(script.take_frames(), "ACK")) == 1


def test_end_of_code_does_not_forget_that_another_task_has_its_former_message() -> None:
    """A transaction was rolled back by another task, and its message went to another session before its own code knew.

    Regression: when the connection was lost and that code ended, the message came again and was handed out a second
    time.
    """
    script = Script()
    script.connect()
    transacted = script.session(SessionMode.TRANSACTED)
    first = script.consumer(transacted, prefetch=1)
    waiting = receive(transacted)
    script.message(first, 1)
    one(waiting)
    transacted.rollback("another", counted=CountedAttempts.NONE)
    other = script.session()
    second = script.consumer(other, prefetch=1)
    waiting = receive(other)
    script.message(second, 1, deliveries=2)
    held = one(waiting)
    script.reconnect()
    script.confirm()
    assert transacted.transaction is not None
    transacted.rollback(transacted.transaction.owner, counted=CountedAttempts.NONE)
    waiting = receive(other)
    script.message(second, 1, deliveries=3)
    assert not waiting.resume().is_done
    assert held.redelivery is not None


def test_a_message_redelivered_to_a_paused_consumer_is_released_when_its_code_has_ended() -> None:
    """Regression: no other consumer got it while a receive waited for the paused consumer."""
    script = Script()
    script.connect()
    session = script.session(SessionMode.TRANSACTED)
    subscription = script.consumer(session, prefetch=10)
    waiting = receive(session)
    script.message(subscription, 1)
    one(waiting)
    script.reconnect()
    script.confirm()
    script.message(subscription, 1, deliveries=2)
    script.client.subscriptions.pause(subscription)
    (pausing,) = select_frames(script.take_frames(), "SEND", "/control/release")
    assert f"1.2@{subscription.id}" in pausing.body, "its code has it"
    with pytest.raises(RolledBack):
        RunningFlow(session.commit(None))
    (released,) = select_frames(script.take_frames(), "SEND", "/control/release")
    assert "keep" not in released.body and "suspend" in released.body


def test_a_message_of_a_consumer_closed_after_a_lost_connection_cannot_be_settled() -> None:
    """Regression: a nack was accepted and forgotten with the consumer, and the message came to another one without an
    attempt."""
    script = Script()
    script.connect()
    session = script.session(SessionMode.AT_COMMIT)
    subscription = script.consumer(session)
    script.message(subscription, 1)
    received = one(receive(session))
    script.reconnect()
    script.client.subscriptions.unsubscribe(subscription)
    with pytest.raises(LocalProtocolError):
        session.settle(received, FAILED, "the task")
    session.release(received, "the task")
    with pytest.raises(RolledBack):
        RunningFlow(session.commit(None))
