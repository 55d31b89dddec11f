"""Tests that operations of the client are settled although the program was interrupted in them."""

import pytest

from truenext.client.core.buffer import ReceiveBuffer
from truenext.client.core.client import Client, ConnectOptions
from truenext.client.core.context import ClientContext
from truenext.client.core.link import Link
from truenext.client.core.send_buffer import SendBatch
from truenext.client.core.send_flows import await_confirmed
from truenext.client.core.session import SessionCore, SessionMode
from truenext.client.core.transaction_state import Outcome
from truenext.errors import ClosedError, ConnectionLost
from truenext.model.url import Address

ME = "the program"


@pytest.fixture
def client() -> Client:
    context = ClientContext(
        clock=lambda: 0.0,
        random=lambda: 0.0,
        flush=lambda: True,
        flush_soon=lambda: None,
        flush_later=lambda: None,
        report=lambda what, facts: None,
        has_owner_ended=lambda owner: False,
    )
    client = Client(ConnectOptions(addresses=[Address(host="127.0.0.1", port=1)]), "name", context)
    client.context.link = Link(1, 0.0, 0.0, on_frame=lambda frame: None)
    return client


def test_a_commit_that_is_interrupted_when_it_has_just_happened_is_over(client: Client) -> None:
    """Later sends are not part of the committed transaction: they would never be committed."""
    session = SessionCore(client, SessionMode.TRANSACTED, ReceiveBuffer())
    assert client.link is not None
    client.link.is_up = True
    sending = session.send(b"SEND\ndestination:/queue/q\n", b"", None, None, ME)
    with pytest.raises(StopIteration):
        next(sending)
    unit = session.transaction
    assert unit is not None
    committing = session.commit(None)
    next(committing)
    unit.resolve(Outcome.COMMITTED)
    with pytest.raises(KeyboardInterrupt):
        committing.throw(KeyboardInterrupt())
    assert session.transaction is None and not client.transactions


def test_waiting_for_a_write_ends_at_once_after_the_connection_is_lost(client: Client) -> None:
    client.flush = lambda: False
    client.on_connection_lost(ConnectionLost("gone"))
    with pytest.raises(StopIteration) as ended:
        next(client.wait_until_written())
    assert ended.value.value is True


def test_a_broker_that_hangs_up_first_while_we_take_leave_leaves_us_closed(client: Client) -> None:
    client.is_closing = client._is_disconnect_sent = True
    client.on_connection_lost(ConnectionLost("the broker has closed the connection"))
    assert isinstance(client.error, ClosedError)


def test_concurrent_flushes_are_all_woken_when_the_batch_is_settled(client: Client) -> None:
    batch = SendBatch()
    batch.unsettled_count = 1
    first, second = await_confirmed(client, batch, None), await_confirmed(client, batch, None)
    signals = {next(first).signal, next(second).signal}
    batch.on_settled(None)
    assert all(signal.is_set for signal in signals)
