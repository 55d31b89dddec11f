"""Tests of brokers that stand by, as their operator sees them: commands, texts and exit statuses."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.contract.postgresql.log_writer import url_of
from tests.integration.broker_process import PATIENCE_SECONDS
from tests.integration.forked import completed
from tests.integration.log_broker import LogBroker
from tests.integration.notifications import Receiver
from tests.integration.raw_client import TRUENEXT_CLIENT
from tests.integration.test_postgresql import received, store_name
from tests.integration.test_standing_by import await_member
from tests.stages.postgres import PostgresServer

NewBroker = Callable[..., LogBroker]


@pytest.fixture
def new_broker(postgres: PostgresServer, schema: str, tmp_path: Path) -> Iterator[NewBroker]:
    """Function that prepares a broker of the schema, with this member name and a folder of its own."""
    brokers: list[LogBroker] = []

    def make(member: str) -> LogBroker:
        folder = tmp_path / f"broker {len(brokers)}"
        # None takes over because the active one is slow on a loaded machine.
        brokers.append(LogBroker(folder, postgres, schema, ["--member", member], failover_after_ms=30_000))
        return brokers[-1]

    yield make
    for broker in brokers:
        broker.clean_up()


def store(postgres: PostgresServer, schema: str, command: str, typed: str = "") -> CompletedProcess[bytes]:
    """Run a command of `truenext store`, in which the operator types a line."""
    return completed("store", command, url_of(postgres), "--schema", schema, stdin_bytes=typed.encode())


def members(postgres: PostgresServer, schema: str) -> str:
    return store(postgres, schema, "status").stdout.decode()


def await_standby(postgres: PostgresServer, schema: str, name: str) -> None:
    """Wait until a broker stands by and has all rows."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(
        f"{name} on " in line and "standing by" in line and "behind" not in line
        for line in members(postgres, schema).splitlines()
    ):
        assert time.monotonic() < deadline, members(postgres, schema)
        time.sleep(0.1)


def send(broker: LogBroker, *numbers: int) -> None:
    client = broker.connect(headers=TRUENEXT_CLIENT)
    for number in numbers:
        client.send("orders", b"%d" % number, persistent=True, confirmed=True)
    client.disconnect()


def set_fact(postgres: PostgresServer, schema: str, change: str) -> None:
    """Change the fact that names the origin of the log, as if the database were another one."""
    with postgres.connect() as connection:
        done = connection.execute(f"UPDATE {schema}.fact SET value = {change} WHERE kind = 'origin'")
        assert done.rowcount == 1


OTHER_SYSTEM = "overlay(value PLACING '\\x0102030405060708'::bytea FROM 1 FOR 8)"
OTHER_TIMELINE = "overlay(value PLACING '\\x00000063'::bytea FROM 9 FOR 4)"


# ---- failover ----


def test_failover_lets_the_named_broker_take_over(new_broker: NewBroker, postgres: PostgresServer, schema: str) -> None:
    """C28.4, C28.7"""
    first, second, third = (new_broker(name) for name in "abc")
    first.start()
    send(first, 1, 2)
    for standby in (second, third):
        standby.begin_start()
    for name in "bc":
        await_member(first, name)

    done = first.truenext("failover", "--to", "c")
    assert (done.returncode, done.stdout) == (0, "c is to take over.\n")
    assert first.wait_for_end() == 3
    assert "c takes over" in first.log
    third.await_start()
    assert received(third, 2) == ["1", "2"]
    assert "b on " in members(postgres, schema)
    assert second.is_running


def test_failover_is_refused_if_no_broker_can_take_over(new_broker: NewBroker) -> None:
    """C28.18"""
    first, second = new_broker("a"), new_broker("b")
    first.start()
    refused = first.truenext("failover")
    assert refused.returncode == 1 and "no broker stands by" in refused.stderr
    second.begin_start()
    # The active broker reads the members once a second.
    await_member(first, "b")
    refused = first.truenext("failover", "--to", "c")
    assert refused.returncode == 1 and "'c'" in refused.stderr
    send(first, 1)


def test_second_broker_with_the_same_member_name_does_not_start(new_broker: NewBroker) -> None:
    """C28.18"""
    first, second = new_broker("a"), new_broker("a")
    first.start()
    second.begin_start()
    assert second.wait_for_end() == 2
    assert "--member" in second.log


def test_broker_that_takes_over_is_the_former_one_after_a_crash(
    new_broker: NewBroker, postgres: PostgresServer, schema: str
) -> None:
    """C28.6"""
    first, second = new_broker("a"), new_broker("b")
    first.start()
    second.begin_start()
    send(first, *range(5))
    name = store_name(first)
    consumer = first.connect()
    consumer.subscribe("orders", ack="client-individual", prefetch=3)
    held = consumer.messages(3)
    consumer.ack(held[1])
    consumer.send("other", b"", persistent=True, confirmed=True)
    await_standby(postgres, schema, "b")
    first.kill()

    second.await_start()
    assert store_name(second) == name
    client = second.connect()
    client.subscribe("orders", prefetch=4)
    messages = client.messages(4)
    assert [each.body for each in messages] == [b"0", b"2", b"3", b"4"]
    assert {each.headers["redelivered"] for each in messages} == {"true"}
    assert {each.headers["truenext-attempts"] for each in messages} == {held[0].headers["truenext-attempts"]}


# ---- Rows that are missing ----


def test_loss_that_the_operator_accepts_gives_the_log_a_new_identity(
    new_broker: NewBroker, postgres: PostgresServer, schema: str
) -> None:
    """C28.13, C28.14"""
    first, second = new_broker("a"), new_broker("b")
    first.start()
    send(first, 1, 2)
    name = store_name(first)
    refused = store(postgres, schema, "accept-loss", f"{schema}\n")
    assert refused.returncode == 2 and b"no row is missing" in refused.stderr
    first.kill()
    set_fact(postgres, schema, OTHER_TIMELINE)

    second.begin_start()
    assert second.wait_for_end() == 4
    assert "accept-loss" in second.log
    assert store(postgres, schema, "status").returncode == 1
    refused = store(postgres, schema, "accept-loss", "yes\n")
    assert (refused.returncode, store(postgres, schema, "status").returncode) == (2, 1)

    done = store(postgres, schema, "accept-loss", f"{schema}\n")
    assert done.returncode == 0, done.stderr
    assert store(postgres, schema, "status").returncode == 0
    first.start()
    assert store_name(first) != name
    assert f"identity {store_name(first)}" in done.stdout.decode()
    assert len(list(first.data.glob("aside-*"))) == 1
    assert received(first, 2) == ["1", "2"]
    first.stop()
    first.check_database()


def test_copy_of_a_database_must_be_adopted(new_broker: NewBroker, postgres: PostgresServer, schema: str) -> None:
    """C28.15, C28.18"""
    first = new_broker("a")
    first.start()
    send(first, 1, 2)
    name = store_name(first)
    refused = store(postgres, schema, "adopt", f"{schema}\n")
    assert refused.returncode == 2 and b"a broker is active" in refused.stderr
    first.stop()
    set_fact(postgres, schema, OTHER_SYSTEM)

    first.begin_start()
    assert first.wait_for_end() == 2
    assert "store adopt" in first.log
    assert store(postgres, schema, "status").returncode == 1
    done = store(postgres, schema, "adopt", f"{schema}\n")
    assert done.returncode == 0, done.stderr
    first.start()
    assert store_name(first) != name
    client = first.connect()
    client.subscribe("orders", prefetch=2)
    messages = client.messages(2)
    assert [(each.body, each.headers.get("redelivered")) for each in messages] == [(b"1", "true"), (b"2", "true")]


@pytest.mark.parametrize("is_copy", [True, False])
def test_log_is_not_renewed_while_a_broker_is_active(
    is_copy: bool, new_broker: NewBroker, postgres: PostgresServer, schema: str
) -> None:
    """C28.18"""
    first = new_broker("a")
    first.start()
    set_fact(postgres, schema, OTHER_SYSTEM if is_copy else OTHER_TIMELINE)
    refused = store(postgres, schema, "adopt" if is_copy else "accept-loss", f"{schema}\n")
    assert refused.returncode == 2 and b"active" in refused.stderr
    send(first, 1)


def test_broker_that_stands_by_is_ready_for_its_service_manager_before_it_listens(
    new_broker: NewBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog_s = 4.0
    active = new_broker("one")
    active.start()
    receiver = Receiver(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", receiver.address)
    monkeypatch.setenv("WATCHDOG_USEC", str(int(watchdog_s * 1_000_000)))
    with receiver.socket:
        standby = new_broker("two")
        standby.begin_start()
        assert receiver.receive() == "READY=1\nSTATUS=standing by for one"
        assert receiver.longest_pause(1.0) < watchdog_s / 2
        active.stop()
        assert receiver.receive_first("READY=1").startswith("READY=1\nSTATUS=listening on ")
        standby.await_start()
        standby.stop()
