"""Tests of the moments at which a client writes its sends. Source: docs/client.md, "Send"."""

import pytest

from tests.client.scripted import RunningFlow, Script, select_frames
from truenext.client.core.send_buffer import FLUSH_BYTES, NO_SPACE_RETRY_S, SendBatch
from truenext.client.core.send_flows import await_capacity, await_confirmed, enqueue, prepare_send, send, try_enqueue
from truenext.errors import Code, Refused


def test_the_first_of_many_sends_are_written_while_more_are_made() -> None:
    script = Script()
    script.connect()
    body = b"x" * (FLUSH_BYTES // 8)
    for _ in range(12):
        enqueue(script.client, prepare_send(script.client, "/queue/a", body, {}))
    written = select_frames(list(script.frames), "SEND")
    assert 6 <= len(written) <= 8
    assert "receipt" in written[-1].headers


def test_few_sends_wait_for_each_other_and_share_a_receipt() -> None:
    script = Script()
    script.connect()
    for _ in range(3):
        enqueue(script.client, prepare_send(script.client, "/queue/a", b"x", {}))
    assert not script.frames
    sends = select_frames(script.take_frames(), "SEND")
    assert ["receipt" in each.headers for each in sends] == [False, False, True]


# ---- No room on the broker's disk ----


def test_a_send_refused_for_lack_of_space_times_out_as_not_taken() -> None:
    script = Script()
    script.connect()
    client = script.client
    sending = RunningFlow(send(client, prepare_send(client, "/queue/a", b"x", {}), 1.0))
    script.take_frames()
    script.refuse(2, Code.NO_SPACE)
    with pytest.raises(TimeoutError, match=r"^the broker has not accepted the message: no-space$") as caught:
        sending.time_out()
    cause = caught.value.__cause__
    assert isinstance(cause, Refused) and cause.code == Code.NO_SPACE


def test_a_send_repeated_after_a_refusal_times_out_as_perhaps_arrived() -> None:
    script = Script()
    script.connect()
    client = script.client
    sending = RunningFlow(send(client, prepare_send(client, "/queue/a", b"x", {}), 1.0))
    script.take_frames()
    script.refuse(2, Code.NO_SPACE)
    script.now += NO_SPACE_RETRY_S
    client.run_due_calls()
    assert len(select_frames(script.take_frames(), "SEND", "/queue/a")) == 1
    with pytest.raises(TimeoutError, match=r"^the message is not confirmed and may have arrived: no-space$") as caught:
        sending.time_out()
    assert isinstance(caught.value.__cause__, Refused)


def test_sends_that_wait_for_space_are_reported_at_once_and_then_once_a_minute() -> None:
    script = Script()
    script.connect()
    client = script.client
    enqueue(client, prepare_send(client, "/queue/a", b"x", {}))
    reports = []
    for second in range(0, 100, 10):
        script.now = second
        client.run_due_calls()
        assert len(select_frames(script.take_frames(), "SEND", "/queue/a")) == 1
        assert client.link is not None
        script.refuse(client.link.frame_count, Code.NO_SPACE)
        reports.append(len(script.reports) - 1)
    assert reports == [1] * 6 + [2] * 4
    assert script.reports[1:] == ["sends wait until stomp://127.0.0.1:61613 has space: no-space"] * 2


def test_a_batch_refused_for_lack_of_space_times_out_as_not_taken() -> None:
    script = Script()
    script.connect()
    client = script.client
    batch = SendBatch()
    for _ in range(3):
        assert try_enqueue(client, batch, prepare_send(client, "/queue/a", b"x", {}))
    waiting = RunningFlow(await_confirmed(client, batch, 1.0))
    script.take_frames()
    script.refuse(2, Code.NO_SPACE)
    script.refuse(3, Code.GAP)
    script.refuse(4, Code.GAP)
    with pytest.raises(TimeoutError, match=r"^3 messages were not accepted: no-space$"):
        waiting.time_out()


def test_a_batch_repeated_after_a_refusal_times_out_with_the_confirmed_count_and_the_cause() -> None:
    script = Script()
    script.connect()
    client = script.client
    batch = SendBatch()
    assert try_enqueue(client, batch, prepare_send(client, "/queue/a", b"x", {}))
    (first,) = select_frames(script.take_frames(), "SEND", "/queue/a")
    script.receive("RECEIPT", **{"receipt-id": first.headers["receipt"]})
    while try_enqueue(client, batch, prepare_send(client, "/queue/a", b"x", {})):
        pass
    count = batch.unsettled_count
    waiting = RunningFlow(await_capacity(client, batch, 1.0))
    written = len(select_frames(script.take_frames(), "SEND", "/queue/a"))
    script.refuse(3, Code.NO_SPACE)
    for frame in range(4, 3 + written):
        script.refuse(frame, Code.GAP)
    script.now += NO_SPACE_RETRY_S
    client.run_due_calls()
    assert select_frames(script.take_frames(), "SEND", "/queue/a")
    report = f"{count:,} messages were not confirmed and may have arrived, after 1 that is confirmed: no-space"
    with pytest.raises(TimeoutError, match=f"^{report}$") as caught:
        waiting.time_out()
    assert isinstance(caught.value.__cause__, Refused)
