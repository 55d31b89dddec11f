"""Tests of users with the unmodified client of ActiveMQ: what each command needs, and who may reply."""

import os
from collections.abc import Iterator

import pytest

from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.openwire.java import Programs, missing_reason

REASON = missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

PASSWORD = "open sesame"
REQUESTS = int(os.environ.get("TRUENEXT_JMS_REQUESTS", "100"))
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
    with broker.running():
        yield broker


def test_each_command_needs_its_grant(guarded_broker: BrokerProcess, java: Programs) -> None:
    said = java.run("users", guarded_broker.openwire_url, "q", ",".join(ALLOWED), password=PASSWORD)
    # A login that is wrong is a SecurityException, which the client wraps.
    assert said[0] == "login nobody: JMSSecurityException"
    expected = [
        f"{action} {user}: " + ("allowed" if action in allowed else "JMSSecurityException")
        for user, allowed in ALLOWED.items()
        for action in ACTIONS
    ]
    assert said[1:] == expected


def test_reply_goes_to_another_user_only_after_its_request(guarded_broker: BrokerProcess, java: Programs) -> None:
    said = java.run("reply_to_user", guarded_broker.openwire_url, "r", password=PASSWORD)
    assert said == ["answer", "JMSSecurityException", "JMSSecurityException", "nothing"]


@pytest.mark.timeout(120 + REQUESTS)
def test_requests_of_another_user_and_process_are_answered_in_each_way(
    guarded_broker: BrokerProcess, java: Programs
) -> None:
    answering = java.start("answer", guarded_broker.openwire_url, "r", password=PASSWORD)
    try:
        assert answering.stdout is not None and answering.stdout.readline() == "ready\n"
        asked = java.run(
            "ask",
            guarded_broker.openwire_url,
            "r",
            str(REQUESTS),
            password=PASSWORD,
            patience_seconds=120 + REQUESTS / 5,
        )
        assert asked == [str(REQUESTS)]
        said, _ = answering.communicate(timeout=PATIENCE_SECONDS)
    finally:
        answering.kill()
        answering.communicate()
    refused, done = said.splitlines()
    # The client refuses a reply if it has not read the advisory yet, which comes on another socket. It should be rare.
    through_session, *through_others = map(int, refused.split())
    assert through_session == 0 and sum(through_others) <= REQUESTS // 20 and done == "done", said
    print(
        f"{REQUESTS} requests; replies refused through session, same factory, other factory, new connection: {refused}"
    )
