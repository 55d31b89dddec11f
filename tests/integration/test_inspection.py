"""Tests of the control requests that inspect consumers, policies, connections and security events, and close
connections: what each user sees, on both wires.

Source of what is expected: docs/contract.md, chapter 32, and docs/security.md.
"""

from __future__ import annotations

import json
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.naive_history import read
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.openwire.test_raw_connections import JmsClient
from tests.integration.raw_client import TRUENEXT_CLIENT
from tests.integration.test_grants import PASSWORD, SHARED_PASSWORD, RequestRefused, UserClient, UserText
from tests.integration.test_logins import code_of, login_answer
from truenext.model.events import FILE
from truenext.model.limits import SECURITY_EVENTS_MAX
from truenext.wire.openwire.structures import ConnectionErrorInfo

USERS = {
    "shop": ["send orders.>", "take orders.>"],
    "till": ["take >"],
    "sender": ["send orders.>"],
    "reader": ["browse orders.new"],
    "keeper": ["manage orders.*"],
    "watchman": ["monitor"],
    "boss": ["monitor", "admin", "take >"],
    "chief": ["admin", "take other.>", "send /topic/orders.>"],
}
SEES_ALL = ("watchman", "boss")
NEW = {"queue": "orders.new"}


class InspectedBroker(BrokerProcess):
    """Broker with USERS, and with listeners for both wires."""

    def login(self, user: str, **options: Any) -> UserClient:
        client = UserClient(self.port, user, password=PASSWORD, **options)
        self._clients.append(client)
        return client


def make_broker(folder: Path) -> InspectedBroker:
    """Return a broker with USERS in an empty folder; not started yet."""
    users = UserText()
    for user, has in USERS.items():
        users.add(user, has, credentials=SHARED_PASSWORD)
    users.write(folder / "users.toml")
    (folder / "truenext.toml").write_text(
        '[policy]\nattempts_max = 5\n[policy."orders.>"]\ndelay_ms = 7\nexpired = "dead-letter"\n'
    )
    listen = ("--listen", "openwire://127.0.0.1:0")
    options = ("--users", str(folder / "users.toml"), "--config", str(folder / "truenext.toml"), "--page-size", "40")
    return InspectedBroker(folder, [*options, *listen])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InspectedBroker]:
    broker = make_broker(tmp_path_factory.mktemp("inspected"))
    with broker.running():
        yield broker


@pytest.fixture
def broker(running: InspectedBroker) -> Iterator[InspectedBroker]:
    yield running
    running.close_clients()
    # The next test must not see connections of this one.
    boss = running.login("boss")
    await_true(lambda: len(boss.ask("connections")) == 1)
    running.close_clients()
    running.check_log()


def await_true(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it does not become so"
        time.sleep(0.01)


def named(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in rows}


# ---- Consumers and policies ----


def test_consumers_are_listed_with_window_held_messages_and_last_acknowledgement(broker: InspectedBroker) -> None:
    # C32.10
    shop, till, boss = broker.login("shop"), broker.login("till", headers=TRUENEXT_CLIENT), broker.login("boss")
    shop.subscribe("orders.new", prefetch=2, subscription="own", headers={"selector": "colour = 'red'"})
    till.subscribe("orders.*", prefetch=None, subscription="pattern")
    till.subscribe("other", prefetch=5, subscription="other")
    for _ in range(3):
        shop.send("orders.new", b"x", headers={"colour": "red"})
        shop.send("orders.old", b"x", confirmed=True)
    messages = [shop.message(), *till.messages(4)]
    rows = named(boss.ask("consumers", NEW))
    assert list(rows) == ["own", "pattern"]
    assert rows["own"] | {"connection": "", "address": ""} == {
        "id": "own",
        "connection": "",
        "address": "",
        "user": "shop",
        "client_id": "",
        "destination": "/queue/orders.new",
        "selector": "colour = 'red'",
        "ack": "client-individual",
        "window": 2,
        "automatic": False,
        "suspended": False,
        "held": rows["own"]["held"],
        "held_s": rows["own"]["held_s"],
        "last_acknowledgement_s": None,
    }
    assert rows["pattern"]["destination"] == "/queue/orders.*"
    assert (rows["pattern"]["automatic"], rows["pattern"]["user"]) == (True, "till")
    assert rows["own"]["held"] + rows["pattern"]["held"] == 3
    assert 0 <= rows["own"]["held_s"] < 60 and 0 <= rows["pattern"]["held_s"] < 60
    shop.ack(messages[0], confirmed=True)
    till.release("pattern", suspend=True, confirmed=True)
    rows = named(boss.ask("consumers", NEW))
    assert 0 <= rows["own"]["last_acknowledgement_s"] < 60
    assert (rows["pattern"]["suspended"], rows["pattern"]["held"]) == (True, 0)
    assert [row["held"] for row in boss.ask("consumers", {"queue": "orders.old"})] == [0]
    connections = {row["user"]: row["connection"] for row in boss.ask("connections")}
    assert {id: row["connection"] for id, row in rows.items()} == {
        "own": connections["shop"],
        "pattern": connections["till"],
    }


def test_nack_and_auto_mode_count_as_acknowledgements(broker: InspectedBroker) -> None:
    # C32.10
    shop, boss = broker.login("shop"), broker.login("boss")
    shop.subscribe("orders.auto", ack="auto", subscription="auto")
    shop.subscribe("orders.client", ack="client", subscription="client")
    for queue in ("auto", "client"):
        shop.send(f"orders.{queue}", b"x", confirmed=True)
    by_body = {message.headers["subscription"]: message for message in shop.messages(2)}
    shop.nack(by_body["client"], confirmed=True)
    auto, client = (boss.ask("consumers", {"queue": f"orders.{queue}"})[0] for queue in ("auto", "client"))
    assert (auto["window"], auto["ack"]) == (None, "auto")
    assert auto["last_acknowledgement_s"] is not None and client["last_acknowledgement_s"] is not None


@pytest.mark.parametrize("verb", ["consumers", "policy"])
def test_user_with_any_right_on_a_queue_may_inspect_the_queue_and_others_may_not(
    broker: InspectedBroker, verb: str
) -> None:
    # C32.11
    broker.login("shop").send("orders.new", b"x", confirmed=True)
    for user in USERS:
        client = broker.login(user)
        if user == "chief":
            texts = []
            for queue in ("orders.new", "orders.none"):
                with pytest.raises(RequestRefused) as refused:
                    broker.login(user).ask(verb, {"queue": queue})
                assert refused.value.code == "forbidden"
                texts.append(refused.value.text.replace(queue, "QUEUE"))
            assert texts[0] == texts[1]
            assert texts[0].endswith("inspect /queue/QUEUE: this needs a right on it, or the right monitor")
        else:
            client.ask(verb, NEW)


@pytest.mark.parametrize("verb", ["consumers", "policy", "dead-letters"])
@pytest.mark.parametrize("queue", ["orders.none", "/session/answers", "subscription,a,b,orders.t"])
def test_queue_that_does_not_exist_cannot_be_inspected(broker: InspectedBroker, verb: str, queue: str) -> None:
    # C32.10
    queue = queue.replace("session", broker.login("till").connected.headers["session"])
    with pytest.raises(RequestRefused) as refused:
        broker.login("boss").ask(verb, {"queue": queue})
    is_hidden = verb == "dead-letters" or queue.startswith("/")
    assert refused.value.code == ("forbidden" if is_hidden else "not-found")


def test_client_without_the_right_monitor_does_not_see_who_the_others_are(broker: InspectedBroker) -> None:
    # C32.11
    for user in ("shop", "till"):
        broker.login(user, client_id=f"{user}.1").subscribe("orders.new", subscription=user)
    for user in ("shop", "till", "sender", *SEES_ALL):
        rows = named(broker.login(user).ask("consumers", NEW))
        assert set(rows) == {"shop", "till"}
        for owner, row in rows.items():
            identity = {name: row[name] for name in ("address", "user", "client_id")}
            if user == owner or user in SEES_ALL:
                assert identity.pop("address").startswith("127.0.0.1:")
                assert identity == {"user": owner, "client_id": f"{owner}.1"}
            else:
                assert set(identity.values()) == {None}


def test_policy_names_the_source_of_each_setting(broker: InspectedBroker) -> None:
    # C32.10
    broker.login("shop").send("orders.new", b"x", confirmed=True)
    settings = broker.login("keeper").ask("policy", NEW)["settings"]
    assert settings["delay_ms"] == {"value": 7, "source": '[policy."orders.>"]'}
    assert settings["expired"] == {"value": "dead-letter", "source": '[policy."orders.>"]'}
    assert settings["attempts_max"] == {"value": 5, "source": "[policy]"}
    assert settings["page_size"] == {"value": 40, "source": "command line"}
    assert settings["backoff"] == {"value": 1.0, "source": "default"}
    assert settings["memory_limit"] == {"value": None, "source": "default"}


def test_policy_of_a_durable_subscription_is_that_of_its_topic_and_follows_a_reload(own_folder: Path) -> None:
    # C32.10
    file = own_folder / "truenext.toml"
    file.write_text('[policy."news.*"]\ndelay_ms = 7\n')
    broker = BrokerProcess(own_folder, ["--config", str(file)])
    try:
        broker.start()
        client = UserClient(broker.port, "", client_id="c")
        client.send_frame(
            "SUBSCRIBE",
            {"id": "d", "destination": "/topic/news.a", "activemq.subscriptionName": "s", "receipt": "r"},
        )
        client.await_receipt("r")
        queue = "subscription,c,s,news.a"
        assert client.ask("policy", {"queue": queue})["settings"]["delay_ms"]["source"] == '[policy."news.*"]'
        file.write_text('[policy]\ndelay_ms = 8\n[policy."news.*"]\nbackoff = 2\n')
        assert client.ask("reload")["errors"] == []
        settings = client.ask("policy", {"queue": queue})["settings"]
        assert settings["delay_ms"] == {"value": 8, "source": "[policy]"}
        assert settings["backoff"] == {"value": 2.0, "source": '[policy."news.*"]'}
        client.close()
        broker.stop()
    finally:
        broker.clean_up()


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    return tmp_path


# ---- Connections ----


def test_connections_of_both_wires_are_listed_in_the_order_of_their_logins(broker: InspectedBroker) -> None:
    # C32.12
    before_ms = int(time.time() * 1000) - 1000
    shop = broker.login("shop", client_id="shop.1")
    jms = JmsClient(broker, name="ID:inspected-1:1", user="till", password=PASSWORD)
    jms.consume("orders.held")
    shop.send("orders.held", b"x", confirmed=True)
    jms.message()
    boss = broker.login("boss")
    rows = boss.ask("connections")
    facts = [(row["user"], row["protocol"], row["client_id"], row["consumers"], row["held"]) for row in rows]
    assert facts == [("shop", "STOMP", "shop.1", 0, 0), ("till", "OpenWire", "", 1, 1), ("boss", "STOMP", "", 1, 0)]
    assert all(before_ms < row["since"] < before_ms + 60_000 for row in rows)
    assert rows[0]["address"] == f"127.0.0.1:{shop.local_port}"
    assert {row["tls"] for row in rows} <= {None, "TLSv1.3"}
    assert len({row["connection"] for row in rows}) == 3
    jms.close()


def test_connections_come_in_pieces(broker: InspectedBroker) -> None:
    # C32.12
    clients = [broker.login("shop") for _ in range(5)]
    boss = broker.login("boss")
    names = [row["connection"] for row in boss.ask("connections")]
    assert len(names) == 6
    pieces, after = [], ""
    while piece := boss.ask("connections", {"limit": 2, "after": after}):
        pieces += [row["connection"] for row in piece]
        after = pieces[-1]
        if len(pieces) == 2:
            # The position holds although its connection has ended.
            clients[1].disconnect()
            await_true(lambda: len(boss.ask("connections")) == 5)
    assert pieces == names


def test_no_answer_has_the_id_or_the_secret_of_a_connection(broker: InspectedBroker) -> None:
    # C32.12
    shop = broker.login("shop", headers=TRUENEXT_CLIENT)
    jms = JmsClient(broker, name="ID:hidden-1:1", user="till", password=PASSWORD)
    jms.consume("orders.new")
    shop.subscribe("orders.new")
    shop.subscribe_to("/temp-queue/own")
    boss = broker.login("boss")
    hidden = [shop.connected.headers["session"], shop.connected.headers["truenext-secret"], "ID:hidden-1:1"]
    requests: dict[str, dict[str, str] | None] = {
        "connections": None,
        "consumers": NEW,
        "policy": NEW,
        "close": {"connection": name_of(boss, "shop")},
        "security": None,
    }
    for verb, body in requests.items():
        text = json.dumps(boss.ask(verb, body))
        assert not any(each in text for each in hidden), verb
    jms.close()


@pytest.mark.parametrize("verb", ["connections", "close", "security"])
def test_only_the_users_of_the_table_see_connections_and_events(broker: InspectedBroker, verb: str) -> None:
    # C32.12
    allowed = {"connections": {"watchman", "boss"}}.get(verb, {"boss", "chief"})
    for user in USERS:
        if verb == "close":
            broker.login("shop")
            body = {"connection": broker.login("boss").ask("connections")[0]["connection"]}
        client = broker.login(user)
        if user in allowed:
            client.ask(verb, body if verb == "close" else None)
        else:
            with pytest.raises(RequestRefused) as refused:
                client.ask(verb, body if verb == "close" else None)
            assert refused.value.code == "forbidden"


# ---- Closing ----


def name_of(boss: UserClient, user: str) -> str:
    (row,) = (row for row in boss.ask("connections") if row["user"] == user)
    return str(row["connection"])


@pytest.mark.parametrize("headers", [{}, TRUENEXT_CLIENT], ids=["plain", "truenext"])
def test_closed_connection_counts_no_attempt_and_its_messages_are_requeued(
    broker: InspectedBroker, headers: dict[str, str]
) -> None:
    # C32.13
    shop, boss = broker.login("shop", headers=headers), broker.login("boss")
    queue = f"orders.closed{len(headers)}"
    for number in range(3):
        shop.send(queue, b"%d" % number, confirmed=True)
    shop.subscribe(queue, prefetch=3)
    held = shop.messages(3)
    if headers:
        for message in held:
            shop.started(message)
    shop.begin("t")
    shop.ack(held[0], transaction="t")
    shop.send(queue, b"never", transaction="t", confirmed=True)
    name = name_of(boss, "shop")
    closed = boss.ask("close", {"connection": name})
    assert closed == {
        "connection": name,
        "address": f"127.0.0.1:{shop.local_port}",
        "user": "shop",
        "client_id": "",
    }
    error = shop.error()
    assert (error.headers["truenext-code"], error.headers.get("truenext-frame")) == ("closed", None)
    till = broker.login("till")
    till.subscribe(queue, prefetch=3)
    again = till.messages(3)
    assert [message.body for message in again] == [b"0", b"1", b"2"]
    assert [message.headers["truenext-attempts"] for message in again] == ["0"] * 3
    # It may connect again, and its former name stands for nothing.
    broker.login("shop").send(queue, b"x", confirmed=True)
    with pytest.raises(RequestRefused) as refused:
        broker.login("boss").ask("close", {"connection": name})
    assert refused.value.code == "not-found"


def test_closed_jms_client_counts_no_attempt(broker: InspectedBroker) -> None:
    # C32.13
    jms = JmsClient(broker, name="ID:closed-1:1", user="till", password=PASSWORD)
    jms.consume("orders.jms")
    broker.login("shop").send("orders.jms", b"x", confirmed=True)
    jms.message()
    boss = broker.login("boss")
    boss.ask("close", {"connection": name_of(boss, "till")})
    while not isinstance(answer := jms.next(), ConnectionErrorInfo):
        assert answer is not None, "the connection ended without an error"
    assert "an operator has closed this connection" in str(answer.exception)
    jms.await_end()
    jms.close()
    till = broker.login("till")
    till.subscribe("orders.jms")
    assert till.message().headers["truenext-attempts"] == "0"


def test_close_of_the_own_or_an_unknown_connection_is_refused(broker: InspectedBroker) -> None:
    # C32.13
    boss = broker.login("boss", headers=TRUENEXT_CLIENT)
    own = name_of(boss, "boss")
    run, _, number = own.partition("-")
    for name in ("", "0", number, f"{run}-", f"{run}-0", f"{run}-{number}0", f"{run}-٣", f"0{own}", "x" * 1000):
        with pytest.raises(RequestRefused) as refused:
            boss.ask("close", {"connection": name})
        assert refused.value.code == "not-found", name
    with pytest.raises(RequestRefused) as refused:
        boss.ask("close", {"connection": own})
    assert refused.value.code == "control-request"
    assert name_of(boss, "boss") == own


def test_cut_connection_is_not_listed_and_cannot_be_closed(broker: InspectedBroker) -> None:
    # C32.12
    shop, boss = broker.login("shop", headers=TRUENEXT_CLIENT), broker.login("boss", headers=TRUENEXT_CLIENT)
    shop.send("orders.cut", b"x", confirmed=True)
    shop.subscribe("orders.cut")
    shop.started(shop.message())
    shop.barrier()
    name = name_of(boss, "shop")
    shop.crash()
    await_true(lambda: [row["user"] for row in boss.ask("connections")] == ["boss"])
    with pytest.raises(RequestRefused) as refused:
        boss.ask("close", {"connection": name})
    assert refused.value.code == "not-found"


# ---- History ----


def piece_of(client: UserClient, after: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the answer to `history`, and the events in it."""
    answer = client.ask("history", {"after": after})
    content = b64decode(answer["content"])
    assert not answer["error"] and not answer["arrow"]
    return answer, list(read(content[FILE.size :]))


def follow(client: UserClient, after: int, is_last: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Return the events behind an event, up to one."""
    events: list[dict[str, Any]] = []

    def has_all() -> bool:
        nonlocal after
        answer, found = piece_of(client, after)
        events.extend(each for each in found if each["event"] > after)
        after = answer["end"] - 1
        return any(map(is_last, events))

    await_true(has_all)
    return events


def test_history_is_followed_piece_by_piece(broker: InspectedBroker) -> None:
    # C32.17
    watchman, shop = broker.login("watchman"), broker.login("shop")
    extent = watchman.ask("history")
    assert (extent["content"], extent["end"]) == ("", extent["next"]) and extent["first"] == 1
    after = extent["next"] - 1
    shop.send("orders.new", b"seen", priority=7, confirmed=True)
    events = follow(watchman, after, lambda each: each["kind"] == "accepted" and each["priority"] == 7)
    assert [each["event"] for each in events] == list(range(after + 1, after + 1 + len(events)))
    assert {each["queue"] for each in events if "queue" in each} == {"orders.new"}
    assert watchman.ask("history")["next"] > after + 1
    assert watchman.ask("history", {"after": 1 << 40})["content"] == ""


def test_history_has_causes_for_admins_alone(broker: InspectedBroker) -> None:
    # C32.17
    boss, watchman, shop = broker.login("boss"), broker.login("watchman"), broker.login("shop")
    after = boss.ask("history")["next"] - 1
    shop.send("orders.new", b"x", confirmed=True)
    shop.subscribe("orders.new")
    shop.nack(shop.message(), headers={"truenext-cause": "a secret cause"}, confirmed=True)

    def causes(client: UserClient) -> set[str]:
        events = follow(client, after, lambda each: each["kind"] == "returned")
        return {each["cause"] for each in events if "cause" in each}

    assert causes(boss) == {"a secret cause"}
    assert causes(watchman) == {""}


def test_only_users_with_the_right_monitor_see_the_history(broker: InspectedBroker) -> None:
    # C32.17
    for user in USERS:
        client = broker.login(user)
        if user in SEES_ALL:
            client.ask("history", {"after": 0})
        else:
            with pytest.raises(RequestRefused) as refused:
                client.ask("history", {"after": 0})
            assert refused.value.code == "forbidden"


@pytest.mark.parametrize("body", [{"after": -1}, {"after": "1"}, {"behind": 1}, {"after": 1 << 64}])
def test_history_with_a_wrong_body_is_refused(broker: InspectedBroker, body: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as refused:
        broker.login("boss").ask("history", body)
    assert refused.value.code == "control-request"


def test_history_of_a_broker_without_one_is_refused_in_one_sentence(tmp_path: Path) -> None:
    # C32.17
    with BrokerProcess(tmp_path, ["--no-history"]).running() as broker, pytest.raises(AssertionError, match="history"):
        broker.control_request("history")


def test_first_request_for_a_history_alone_is_logged(tmp_path: Path) -> None:
    broker = make_broker(tmp_path)
    (tmp_path / "truenext.toml").write_text('[broker]\nlog_level = "info"\n')
    with broker.running():
        for user in ("watchman", "boss"):
            client = broker.login(user)
            for after in range(3):
                client.ask("history", {"after": after})
        client.ask("status")
        lines = [line for line in broker.log.splitlines() if "control request" in line]
        assert [user for line in lines for user in ("watchman", "boss") if user in line] == ["watchman", "boss", "boss"]
        assert not events_of(client, event="control request")
        broker.close_clients()


# ---- Security events ----


def events_of(client: UserClient, **fields: str) -> list[dict[str, Any]]:
    return [each for each in client.ask("security") if fields.items() <= each.items()]


def test_refusals_failed_logins_and_control_requests_are_shown_at_any_log_level(broker: InspectedBroker) -> None:
    # C32.15
    boss = broker.login("boss")
    broker.login("keeper").ask("pause", NEW)
    for user, password in (("shop", "wrong"), ("no such user: a password", PASSWORD)):
        assert code_of(login_answer(broker, user, password)) == "login"
    for _ in range(3):
        with pytest.raises(RequestRefused):
            broker.login("till").send_to("/queue/orders.refused")
    assert "control request" not in broker.log
    failed = events_of(boss, event="login failed")
    assert {each["user"] for each in failed} == {"shop", "unknown"}
    assert "a password" not in json.dumps(boss.ask("security"))
    text = "user 'till' may not send to /queue/orders.refused"
    (refused,) = events_of(boss, event="request refused", user="till", text=text)
    assert (refused["count"], refused["address"]) == (3, "127.0.0.1")
    assert refused["first"] <= refused["at"]
    assert events_of(boss, event="control request", user="keeper", text="pause orders.new")
    times = [each["at"] for each in boss.ask("security")]
    assert times == sorted(times, reverse=True)


def test_repeated_events_push_no_others_out_and_each_kind_has_its_own_hundred(broker: InspectedBroker) -> None:
    # C32.15
    boss, till = broker.login("boss"), broker.login("till", headers=TRUENEXT_CLIENT)
    keeper = broker.login("keeper")
    keeper.ask("pause", NEW)
    for number in range(SECURITY_EVENTS_MAX + 20):
        with pytest.raises(RequestRefused):
            till.send_to(f"/queue/refused.{number}")
        keeper.ask("resume", NEW)
    texts = [each["text"] for each in events_of(boss, event="request refused")]
    assert len(texts) == SECURITY_EVENTS_MAX
    assert texts[0].endswith(f"refused.{SECURITY_EVENTS_MAX + 19}")
    assert events_of(boss, event="control request", text="pause orders.new")
    assert events_of(boss, event="control request", text="resume orders.new")[0]["count"] >= SECURITY_EVENTS_MAX


def test_requests_that_only_read_push_no_change_out(broker: InspectedBroker) -> None:
    """Fixed: a page of the console, which asks about each queue, made the broker forget what others had changed."""
    # C32.15
    boss = broker.login("boss")
    broker.login("keeper").ask("pause", NEW)
    for verb in ("drain", "queues", "status", "connections", "security"):
        boss.ask(verb)
    for verb in ("consumers", "policy"):
        boss.ask(verb, NEW)
    broker.login("reader").ask("scheduled", NEW)
    verbs = {each["text"].partition(" ")[0] for each in events_of(boss, event="control request")}
    assert "pause" in verbs and verbs <= {"pause", "resume", "close", "redrive", "move", "purge"}
