"""Tests of users with the unmodified client of ActiveMQ: what each command needs, and who may reply."""

from collections.abc import Iterator

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.openwire.java import Programs, missing_reason

REASON = missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

PASSWORD = "open sesame"
GRANTS = {
    "nobody": "",
    "sender": 'send = ["q", "q.b"]',
    "half": 'send = ["q"]',
    "taker": 'take = ["q"]',
    "browser": 'browse = ["q"]',
    "asker": 'send = ["r"]',
    "answerer": 'take = ["r"]',
    "intruder": 'send = ["r.free"]',
}
ALLOWED = {
    "nobody": {"temporary"},
    "sender": {"producer", "send", "composite", "commit", "temporary"},
    "half": {"producer", "send", "commit", "temporary"},
    "taker": {"consumer", "temporary"},
    "browser": {"browser", "temporary"},
}
ACTIONS = ("producer", "send", "composite", "commit", "consumer", "browser", "temporary")


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("java"))


@pytest.fixture(scope="module")
def guarded_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    password, users = folder / "password", folder / "users.toml"
    for file, text in (
        (password, PASSWORD),
        (users, "".join(f'[user.{name}]\npassword_file = "password"\n{grants}\n\n' for name, grants in GRANTS.items())),
    ):
        file.touch(mode=0o600)
        file.write_text(text)
    broker = BrokerProcess(folder, ["--users", str(users), "--listen", "openwire://127.0.0.1:0"])
    try:
        broker.start()
        yield broker
        broker.stop()
    finally:
        broker.clean_up()


def test_each_command_needs_its_grant(guarded_broker: BrokerProcess, java: Programs) -> None:
    said = java.run("users", guarded_broker.openwire_url, "q", PASSWORD, ",".join(ALLOWED))
    # A login that is wrong is a SecurityException, which the client wraps.
    assert said[0] == "login nobody: JMSSecurityException"
    expected = [
        f"{action} {user}: " + ("allowed" if action in allowed else "JMSSecurityException")
        for user, allowed in ALLOWED.items()
        for action in ACTIONS
    ]
    assert said[1:] == expected


def test_reply_goes_to_another_user_only_after_its_request(guarded_broker: BrokerProcess, java: Programs) -> None:
    said = java.run("reply_to_user", guarded_broker.openwire_url, "r", PASSWORD)
    assert said == ["answer", "JMSSecurityException", "JMSSecurityException", "nothing"]
