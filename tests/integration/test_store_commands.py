"""Tests of `truenext store` on damaged folders: a real broker starts on what was salvaged, and hands it out in
order."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.forked import SEGMENT_BYTES, completed_text
from tests.integration.raw_client import TRUENEXT_CLIENT, bodies
from truenext.model.limits import HISTORY_FLUSH_SECONDS
from truenext.store.frame import FRAME


def store(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return completed_text("store", *arguments)


def serve(data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `truenext serve`, which must fail."""
    return completed_text("serve", "--data", data, "--listen", "stomp://127.0.0.1:0", *options)


def test_a_broker_hands_out_salvaged_messages_in_their_order(own_broker: BrokerProcess, tmp_path: Path) -> None:
    client = own_broker.connect(headers=TRUENEXT_CLIENT)
    store_name = client.connected.headers["truenext-store"]
    sent = [(priority, b"%d of %d" % (number, priority)) for number in range(20) for priority in (4, 9, 0)]
    for priority, body in sent:
        client.send("orders", body, priority=priority, persistent=priority != 9)
    client.send("orders", b"acknowledged", priority=9, persistent=True, confirmed=True)
    assert store("check", own_broker.data).returncode == 2
    client.subscribe("orders", prefetch=1)
    assert client.message().body == b"0 of 9"
    client.disconnect()
    own_broker.stop()
    assert store("check", own_broker.data).returncode == 0

    saved = BrokerProcess(tmp_path / "saved")
    (tmp_path / "saved").mkdir()
    assert store("export", own_broker.data, saved.data).returncode == 0
    saved.start()
    try:
        client = saved.connect(headers=TRUENEXT_CLIENT)
        assert client.connected.headers["truenext-store"] != store_name
        client.subscribe("orders")
        messages = client.messages(len(sent) + 1)
        expected = sorted(sent, key=lambda one: -one[0])
        expected.insert(20, (9, b"acknowledged"))
        assert bodies(messages) == [body.decode() for _, body in expected]
        assert [message.headers.get("redelivered") for message in messages[:2]] == ["true", None]
        client.send("orders", b"new", priority=9, confirmed=True)
        assert client.message().body == b"new"
        client.disconnect()
        saved.stop()
    finally:
        saved.clean_up()


def test_a_broker_that_damage_stops_reports_how_to_salvage_the_rest(own_broker: BrokerProcess, tmp_path: Path) -> None:
    """Messages that may have been acknowledged come as redelivered."""
    client = own_broker.connect()
    for number in range(20):
        client.send("orders", b"%d" % number, persistent=True, confirmed=True)
    client.disconnect()
    own_broker.stop()
    (segment,) = (own_broker.data / "journal").glob("*.journal")
    content = bytearray(segment.read_bytes())
    at = content.index(b"content-length:1\n7")
    content[at : at + FRAME.size] = bytes(FRAME.size)
    segment.write_bytes(content)

    served = serve(own_broker.data)
    assert served.returncode == 1
    assert f"`truenext store export {own_broker.data} NEW` saves all that is readable" in served.stderr
    checked = store("check", own_broker.data)
    assert checked.returncode == 1
    assert f"damaged: journal/{segment.name}: bytes " in checked.stdout

    saved = BrokerProcess(tmp_path / "saved")
    (tmp_path / "saved").mkdir()
    assert store("export", own_broker.data, saved.data).returncode == 1
    saved.start()
    try:
        client = saved.connect()
        client.subscribe("orders")
        messages = client.messages(19)
        assert bodies(messages) == [str(number) for number in range(20) if number != 7]
        assert {message.headers["redelivered"] for message in messages} == {"true"}
        client.disconnect()
        saved.stop()
    finally:
        saved.clean_up()


# ---- A journal that was cut ----


def send_200(broker: BrokerProcess) -> None:
    client = broker.connect()
    for number in range(200):
        client.send("orders", b"%d" % number, persistent=True, confirmed=True)
    client.close()


def lose_half(data: Path, *, by: str) -> None:
    """Remove the second half of the journal's content."""
    (segment,) = (data / "journal").glob("*.journal")
    content = segment.read_bytes()
    half = content[: len(content.rstrip(b"\0")) // 2]
    segment.write_bytes(half if by == "cut" else half.ljust(len(content), b"\0"))


def expect_missed(data: Path, what: str, tmp_path: Path) -> None:
    """Check that both commands report the damage and the remedy, and that a broker starts on what was saved."""
    checked = store("check", data)
    assert checked.returncode == 1, checked.stdout
    assert "damaged: journal: " in checked.stdout
    assert what in checked.stdout
    assert f"`truenext store export {data} NEW` writes all readable messages into a new folder" in checked.stdout
    served = serve(data)
    assert served.returncode == 1
    assert f"the journal in {data} is damaged: " in served.stderr
    assert f"`truenext store export {data} NEW` saves all that is readable" in served.stderr
    assert store("check", data).stdout == checked.stdout

    saved = BrokerProcess(tmp_path / "saved")
    (tmp_path / "saved").mkdir()
    exported = store("export", data, saved.data)
    assert exported.returncode == 1
    assert what in exported.stdout
    saved.start()
    try:
        client = saved.connect()
        count = saved.queues()["orders"].waiting
        assert 80 < count < 120
        client.subscribe("orders")
        messages = client.messages(count)
        assert bodies(messages) == [str(number) for number in range(count)]
        assert {message.headers["redelivered"] for message in messages} == {"true"}
        client.send("orders", b"new", confirmed=True)
        assert client.message().body == b"new"
        client.disconnect()
        saved.stop()
    finally:
        saved.clean_up()


@pytest.mark.parametrize("by", ["cut", "zeros"])
@pytest.mark.parametrize("options", [(), ("--no-history",)], ids=["history", "no history"])
def test_a_journal_that_lost_its_end_after_a_clean_stop_is_damaged(
    own_broker: BrokerProcess, tmp_path: Path, by: str
) -> None:
    send_200(own_broker)
    own_broker.stop()
    checked = store("check", own_broker.data)
    assert checked.returncode == 0, checked.stdout
    lose_half(own_broker.data, by=by)
    expect_missed(own_broker.data, " are missing at its end; the checkpoint says that frame ", tmp_path)
    if by == "cut":
        assert f" bytes and was made with {SEGMENT_BYTES}" in store("check", own_broker.data).stdout
        assert f" bytes and was made with {SEGMENT_BYTES}" in serve(own_broker.data).stderr


def test_a_journal_that_lost_its_end_after_a_kill_is_damaged_if_the_history_tells_more(
    own_broker: BrokerProcess, tmp_path: Path
) -> None:
    send_200(own_broker)
    # It is told to the history's files within moments.
    while b"".join(path.read_bytes() for path in (own_broker.data / "history").glob("*.history")).count(b"orders") < 1:
        own_broker.status()
    time.sleep(3 * HISTORY_FLUSH_SECONDS)
    own_broker.kill()
    assert store("check", own_broker.data).returncode == 0
    lose_half(own_broker.data, by="zeros")
    expect_missed(own_broker.data, "frames are missing at its end", tmp_path)


def test_check_of_a_store_with_gaps_in_its_history_reports_no_damage(own_broker: BrokerProcess) -> None:
    """The history is deleted, switched off for a run, and on again; each run ends by a kill."""
    own_broker.options = ("--no-history",)
    for number in range(5):
        send_200(own_broker)
        own_broker.kill()
        assert store("check", own_broker.data).returncode == 0
        if number == 2:
            # In one step: what is about to be written there would go along.
            (own_broker.data / "history").rename(own_broker.data.parent / "history-that-was")
        own_broker.options = ("--no-history",) if number % 2 else ()
        own_broker.start()
    own_broker.await_facts("orders", waiting=1000)


def test_a_journal_that_lost_all_of_the_last_run_is_damaged(own_broker: BrokerProcess) -> None:
    """The journal ends with the clean stop of the run before."""
    own_broker.stop()
    (segment,) = (own_broker.data / "journal").glob("*.journal")
    before = segment.read_bytes()
    own_broker.options = ("--no-history",)
    own_broker.start()
    send_200(own_broker)
    own_broker.kill()
    segment.write_bytes(before)
    assert " is missing at its end; the checkpoint says " in store("check", own_broker.data).stdout
    assert " is missing at its end; the checkpoint says " in serve(own_broker.data).stderr


def test_check_takes_a_zeroed_end_after_a_kill_without_history_for_a_torn_tail(tmp_path: Path) -> None:
    """After a kill without history only the first batch of the run must be there; the number of later ones is
    unknown."""
    broker = BrokerProcess(tmp_path, ("--no-history",))
    broker.start()
    try:
        send_200(broker)
        broker.kill()
        lose_half(broker.data, by="zeros")
        assert store("check", broker.data).returncode == 0
        broker.start()
        assert 80 < broker.queues()["orders"].waiting < 120
        broker.stop()
    finally:
        broker.clean_up()
