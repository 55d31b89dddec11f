"""When a client writes what it is to send. Source: docs/client.md, "Sends"."""

from tests.client.scripted import Script, named
from truenext.client.core.outbox import GATHERED_BYTES
from truenext.client.core.sending import enqueue, prepare


def test_of_many_sends_the_first_are_written_while_more_are_made() -> None:
    script = Script()
    script.connect()
    body = b"x" * (GATHERED_BYTES // 8)
    for _ in range(12):
        enqueue(script.client, prepare(script.client, "/queue/a", body, {}))
    written = named(list(script.said), "SEND")
    assert 6 <= len(written) <= 8
    assert "receipt" in written[-1].headers


def test_few_sends_wait_for_each_other_and_share_a_receipt() -> None:
    script = Script()
    script.connect()
    for _ in range(3):
        enqueue(script.client, prepare(script.client, "/queue/a", b"x", {}))
    assert not script.said
    sends = named(script.all_said(), "SEND")
    assert ["receipt" in each.headers for each in sends] == [False, False, True]
