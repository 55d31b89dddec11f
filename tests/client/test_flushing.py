"""Tests of the frames that a flush of a transaction sends, and of its return. Source: docs/client.md,
"Transactions"."""

import pytest

from tests.client.scripted import ClientFrame, RunningFlow, Script, select_frames
from truenext.client.core.flows import encode_send_in_transaction
from truenext.client.core.session import SessionCore, SessionMode
from truenext.errors import Code, LocalProtocolError, Refused, RolledBack


def a_session(script: Script) -> SessionCore:
    script.connect()
    return script.session(SessionMode.AT_COMMIT)


def send(session: SessionCore, body: bytes = b"x") -> None:
    assert session.try_send(encode_send_in_transaction("/queue/a", {}).head, body, None, "me")


def flush(session: SessionCore) -> RunningFlow:
    return RunningFlow(session.flush(60.0))


def receipts(frames: list[ClientFrame]) -> list[str]:
    return [each.headers["receipt"] for each in frames if "receipt" in each.headers]


def test_the_receipt_goes_with_the_last_send_that_is_not_written_yet() -> None:
    script = Script()
    session = a_session(script)
    send(session, b"1")
    send(session, b"2")
    flushing = flush(session)
    frames = script.take_frames()
    assert [each.command for each in frames] == ["BEGIN", "SEND", "SEND"]
    assert [(each.body, each.headers.get("receipt")) for each in frames] == [("", None), ("1", None), ("2", "4")]
    assert not flushing.is_done
    script.receive("RECEIPT", **{"receipt-id": "4"})
    assert flushing.resume().is_done


@pytest.mark.parametrize("how", ["written", "behind another frame", "behind a heart-beat"])
def test_an_empty_transaction_carries_the_receipt_if_the_last_send_is_written_already(how: str) -> None:
    script = Script()
    session = a_session(script)
    send(session)
    before = script.take_frames() if how == "written" else []
    link = script.client.link
    assert link is not None
    if how == "behind another frame":
        link.write(b"SEND\ndestination:/queue/b\n\n\0")
    if how == "behind a heart-beat":
        link.write_heart_beat()
    flushing = flush(session)
    frames = [*before, *script.take_frames()]
    assert [each.command for each in frames][-2:] == ["BEGIN", "ABORT"]
    (receipt,) = receipts(frames)
    assert receipt == str(link.frame_count)
    script.receive("RECEIPT", **{"receipt-id": receipt})
    assert flushing.resume().is_done


def test_flush_after_an_answered_flush_sends_nothing() -> None:
    script = Script()
    session = a_session(script)
    assert flush(session).is_done
    send(session)
    flushing = flush(session)
    script.confirm()
    assert flushing.resume().is_done
    assert flush(session).is_done
    assert not script.take_frames()


def test_two_flushes_wait_for_one_receipt() -> None:
    script = Script()
    session = a_session(script)
    send(session)
    script.is_blocked = True
    first, second = flush(session), flush(session)
    script.is_blocked = False
    assert len(receipts(script.confirm())) == 1
    assert first.resume().is_done and second.resume().is_done


@pytest.mark.parametrize("refused", [3, 4])
def test_flush_raises_the_first_refusal_as_cause(refused: int) -> None:
    script = Script()
    session = a_session(script)
    send(session, b"1")
    send(session, b"2")
    flushing = flush(session)
    script.take_frames()
    script.refuse(refused, Code.NO_SPACE)
    with pytest.raises(RolledBack) as caught:
        if refused == 3:
            assert not flushing.resume().is_done
            # The next one is refused because of that.
            script.refuse(4, Code.ROLLBACK_ONLY)
        flushing.resume()
    cause = caught.value.__cause__
    assert isinstance(cause, Refused) and cause.code == Code.NO_SPACE


def test_a_refused_begin_of_the_empty_transaction_ends_the_flush() -> None:
    """BEGIN is refused as the limit of open transactions is reached."""
    script = Script()
    session = a_session(script)
    send(session)
    script.take_frames()
    flushing = flush(session)
    script.take_frames()
    script.refuse(4, Code.LIMIT)
    script.refuse(5, Code.NO_TRANSACTION)
    assert flushing.resume().is_done


def test_a_lost_connection_ends_a_flush() -> None:
    script = Script()
    session = a_session(script)
    send(session)
    flushing = flush(session)
    script.lose()
    with pytest.raises(RolledBack):
        flushing.resume()


def test_a_flush_that_times_out_leaves_the_transaction_open() -> None:
    script = Script()
    session = a_session(script)
    send(session)
    flushing = flush(session)
    with pytest.raises(TimeoutError):
        flushing.time_out()
    send(session)
    committing = RunningFlow(session.commit(None))
    script.confirm()
    assert committing.resume().is_done


def test_a_session_that_is_not_transacted_has_nothing_to_flush() -> None:
    script = Script()
    script.connect()
    with pytest.raises(LocalProtocolError, match="not transacted"):
        flush(script.session())
    assert not select_frames(script.take_frames(), "BEGIN")
