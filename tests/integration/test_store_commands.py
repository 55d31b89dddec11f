"""What `truenext store` saves of a damaged folder: does a real broker start on it, and hand out all of it in order?"""

import subprocess
from pathlib import Path

from tests.integration.broker_process import TRUENEXT, BrokerProcess
from tests.integration.raw_client import bodies
from truenext.store.journal import FRAME


def store(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TRUENEXT, "store", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_broker_hands_out_what_was_saved_of_another_in_its_order(own_broker: BrokerProcess, tmp_path: Path) -> None:
    client = own_broker.connect()
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
        client = saved.connect()
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


def test_a_broker_that_damage_stops_says_how_to_save_the_rest(own_broker: BrokerProcess, tmp_path: Path) -> None:
    """Whatever may have been acknowledged comes as redelivered."""
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

    served = subprocess.run(
        [TRUENEXT, "serve", "--data", own_broker.data, "--listen", "stomp://127.0.0.1:0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert served.returncode == 1
    assert f"`truenext store export {own_broker.data} NEW` saves what can be read" in served.stderr
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
