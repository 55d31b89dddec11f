"""Tests of a snapshot of a running broker's data folder: a broker starts on it, beside the original.

Source of what is expected: docs/contract.md, C29.11 and C29.18.
"""

import shutil
import signal
import threading
from pathlib import Path

from tests.integration.broker_process import BrokerProcess
from tests.integration.forked import completed_text
from tests.integration.raw_client import TRUENEXT_CLIENT, bodies


def test_broker_starts_on_a_snapshot_with_an_identity_of_its_own(own_broker: BrokerProcess, tmp_path: Path) -> None:
    """No process writes while the snapshot is taken, so it is of one moment, as an atomic one is."""
    confirmed: list[int] = []
    is_over = threading.Event()

    def send() -> None:
        client = own_broker.connect()
        while not is_over.is_set():
            client.send("orders", b"%d" % len(confirmed), persistent=True, confirmed=True)
            confirmed.append(len(confirmed))
        client.disconnect()

    sender = threading.Thread(target=send)
    sender.start()
    while len(confirmed) < 200:
        own_broker.status()
    own_broker.send_signal(signal.SIGSTOP)
    before = len(confirmed)
    copy = BrokerProcess(tmp_path / "copy")
    shutil.copytree(own_broker.data, copy.data)
    own_broker.send_signal(signal.SIGCONT)
    while len(confirmed) < before + 100:
        own_broker.status()
    is_over.set()
    sender.join()

    renewed = completed_text("store", "renew", copy.data)
    assert renewed.returncode == 0, renewed.stderr
    copy.start()
    try:
        found = {}
        for broker in (own_broker, copy):
            client = broker.connect(headers=TRUENEXT_CLIENT)
            identity = client.connected.headers["truenext-store"]
            count = broker.queues()["orders"].waiting
            client.subscribe("orders", prefetch=count)
            found[identity] = client.messages(count)
            client.disconnect()
        original, copied = found
        assert f"{copy.data} has the identity {copied} now" in renewed.stdout
        assert bodies(found[original]) == [str(number) for number in confirmed]
        # One more may have been written, and not confirmed.
        assert bodies(found[copied]) in ([str(number) for number in range(before + more)] for more in (0, 1))
        ids = [{message.headers["message-id"] for message in messages} for messages in found.values()]
        assert ids[0].isdisjoint(ids[1])
        assert completed_text("store", "renew", copy.data).returncode == 2
        copy.stop()
    finally:
        copy.clean_up()
