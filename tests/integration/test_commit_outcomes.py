"""Tests of gapless numbers and of requests for the outcome of a COMMIT, over real sockets.

Source of what is expected: docs/contract.md, chapter 19; docs/protocol.md.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.broker_process import BrokerProcess
from tests.integration.raw_client import RawClient, bodies, numbered
from truenext.wire.stomp.frame import Frame

GAPLESS = {"truenext-gapless": "true"}


def query_producer(client: RawClient, producer: str, **arguments: Any) -> dict[str, Any]:
    client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"})
    body = json.dumps({"producer": producer} | arguments).encode()
    client.send_frame("SEND", {"destination": "/control/producer", "reply-to": "/temp-queue/answers"}, body)
    answer: dict[str, Any] = json.loads(client.message().body)
    client.unsubscribe("answers")
    return answer


def outcome(client: RawClient, producer: str, number: int, *, resolve: bool = False) -> str:
    answer: str = query_producer(client, producer, commit=number, resolve=resolve)["outcome"]
    return answer


def receipt_of(client: RawClient, command: str, headers: dict[str, str]) -> Frame:
    receipt = client.new_receipt()
    client.send_frame(command, headers | {"receipt": receipt})
    return client.await_receipt(receipt)


def commit(client: RawClient, queue: str, producer: str, number: int, *, headers: dict[str, str] = GAPLESS) -> None:
    client.begin("t")
    client.send(queue, f"of {number}".encode(), persistent=True, transaction="t")
    client.commit("t", headers=numbered(producer, number) | headers)


def code_of(client: RawClient) -> str:
    return client.error().headers["truenext-code"]


def test_a_send_and_a_commit_have_numbers_of_their_own(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    for number in (1, 2):
        client.send(queue, b"send", persistent=True, confirmed=True, headers=numbered(queue, number) | GAPLESS)
    commit(client, queue, queue, 1)
    expected = {"known": True, "gapless": True, "sends": 2, "commits": 1, "outcome": None}
    assert query_producer(client, queue) == expected
    client.disconnect()
    (first, *_) = messages = broker.remaining_messages(queue)
    assert bodies(messages) == ["send", "send", "of 1"]
    assert not {"truenext-gapless", "truenext-producer", "truenext-number"} & first.headers.keys()


@pytest.mark.parametrize("times", [1, 10], ids=["read in general", "read with one match"])
def test_a_number_that_is_too_far_on_is_refused_and_does_nothing(broker: BrokerProcess, queue: str, times: int) -> None:
    client = broker.connect()
    for number in range(1, times + 1):
        client.send(queue, b"", persistent=True, confirmed=True, headers=numbered(queue, number) | GAPLESS)
    client.send(queue, b"too far", persistent=True, headers=numbered(queue, times + 2) | GAPLESS)
    assert code_of(client) == "gap"
    client = broker.connect()
    assert query_producer(client, queue)["sends"] == times
    client.send(queue, b"", persistent=True, confirmed=True, headers=numbered(queue, times + 1))
    client.disconnect()
    assert len(broker.remaining_messages(queue)) == times + 1


def test_gapless_for_a_producer_that_had_numbers_before_is_refused(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    client.send(queue, b"", persistent=True, confirmed=True, headers=numbered(queue, 1))
    client.send(queue, b"", persistent=True, headers=numbered(queue, 2) | GAPLESS)
    error = client.error()
    assert error.headers["truenext-code"] == "header"
    assert "truenext-gapless" in error.body.decode()


@pytest.mark.parametrize("headers", [GAPLESS, {}], ids=["without gaps", "with gaps"])
def test_the_receipt_of_a_repeat_says_whether_it_may_have_been_left_out(
    broker: BrokerProcess, queue: str, headers: dict[str, str]
) -> None:
    # C19.7
    client = broker.connect()
    for number in (1, 2):
        commit(client, queue, queue, number, headers=headers)
    for number in (1, 2):
        headers_received = receipt_of(client, "COMMIT", {"transaction": "t"} | numbered(queue, number)).headers
        assert headers_received["truenext-repeat"] == "true"
        assert headers_received.get("truenext-outcome") == (None if number == 2 or headers else "unknown")


def test_a_commit_resolved_by_another_connection_is_rolled_back_in_the_open_transaction(
    broker: BrokerProcess, queue: str
) -> None:
    # C19.3
    client, other = broker.connect(), broker.connect()
    commit(client, queue, queue, 1)
    client.begin("t")
    client.send(queue, b"never", persistent=True, transaction="t", confirmed=True)
    assert outcome(other, queue, 2) == "not so far"
    assert outcome(other, queue, 3, resolve=True) == "not so far", "it is not the next"
    assert outcome(other, queue, 1, resolve=True) == "committed"
    assert outcome(other, queue, 2, resolve=True) == "rolled back"
    client.commit("t", confirmed=False, headers=numbered(queue, 2) | GAPLESS)
    assert code_of(client) == "rolled-back"
    commit(other, queue, queue, 3)
    assert [outcome(other, queue, number) for number in (1, 2, 3, 4)] == [
        *("committed", "rolled back", "committed", "not so far")
    ]
    other.disconnect()
    assert bodies(broker.remaining_messages(queue)) == ["of 1", "of 3"]


def test_the_first_commit_of_an_unknown_producer_may_still_come(broker: BrokerProcess, queue: str) -> None:
    client = broker.connect()
    nothing = {"known": False, "gapless": False, "sends": 0, "commits": 0}
    assert query_producer(client, queue, commit=1) == nothing | {"outcome": "not so far"}
    assert query_producer(client, queue, commit=2, resolve=True) == nothing | {"outcome": "unknown"}
    assert query_producer(client, queue, commit=1, resolve=True) == nothing | {
        "known": True,
        "commits": 1,
        "outcome": "rolled back",
    }
    commit(client, queue, queue, 2)
    assert query_producer(client, queue, commit=2) == {
        "known": True,
        "gapless": True,
        "sends": 0,
        "commits": 2,
        "outcome": "committed",
    }


def test_an_answer_comes_once_it_is_durable(held_broker: BrokerProcess) -> None:
    """Answers: the outcome of a resolved COMMIT, the numbers of a producer, and that a producer was forgotten."""
    client, sender = held_broker.connect(), held_broker.connect()
    commit(sender, "q", "p", 1)
    commit(sender, "q", "forgotten", 1)
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: sender.send("q", b"", persistent=True, headers=numbered("p", 1) | GAPLESS),
        lambda: sender.send_frame("DISCONNECT", {"truenext-forget": '["forgotten"]'}),
    ]
    all_arguments = [{"producer": "p", "commit": 2, "resolve": True}, {"producer": "p"}, {"producer": "forgotten"}]
    client.send_frame("SUBSCRIBE", {"id": "answers", "destination": "/temp-queue/answers"}, confirmed=True)
    for change, arguments in zip(changes, all_arguments, strict=True):
        held_broker.hold_disk()
        change()
        # Another connection's frames may come later than this.
        held_broker.status()
        headers = {"destination": "/control/producer", "reply-to": "/temp-queue/answers"}
        client.send_frame("SEND", headers, json.dumps(arguments).encode())
        assert client.arrived() == []
        held_broker.resume_disk()
        client.message()


@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
def test_an_answered_outcome_holds_after_a_restart(own_broker: BrokerProcess, is_clean: bool) -> None:
    # C19.2
    client = own_broker.connect()
    commit(client, "q", "p", 1)
    client.send("q", b"transient", headers=numbered("p", 1), confirmed=True)
    before = query_producer(client, "p", commit=2, resolve=True)
    assert before == {"known": True, "gapless": True, "sends": 1, "commits": 2, "outcome": "rolled back"}
    own_broker.restart(is_clean=is_clean)
    client = own_broker.connect()
    assert query_producer(client, "p", commit=2) == before
    client.commit("t", confirmed=False, headers=numbered("p", 2))
    assert code_of(client) == "rolled-back"


def test_a_disconnect_forgets_producers(own_broker: BrokerProcess) -> None:
    # C18.9
    client = own_broker.connect()
    for producer in ("p", "q:\u00e4", "r"):
        client.send("q", producer.encode(), persistent=True, confirmed=True, headers=numbered(producer, 1))
    client.send_frame("DISCONNECT", {"truenext-forget": json.dumps(["p", "q:\u00e4", "nobody"])}, confirmed=True)
    own_broker.restart(is_clean=False)
    client = own_broker.connect()
    assert [query_producer(client, producer)["known"] for producer in ("p", "q:\u00e4", "r")] == [False, False, True]
    for producer in ("p", "r"):
        client.send("q", producer.encode(), persistent=True, confirmed=True, headers=numbered(producer, 1))
    client.disconnect()
    assert bodies(own_broker.remaining_messages("q")) == ["p", "q:\u00e4", "r", "p"]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"producer": ""},
        {"producer": "p" * 256},
        {"producer": "p", "commit": -1},
        {"producer": "p", "commit": 2**63},
        {"producer": "p", "commit": "1"},
        {"producer": "p", "resolve": True},
        {"producer": "p", "comit": 1},
    ],
    ids=str,
)
def test_an_invalid_producer_request_is_refused_and_resolves_nothing(
    broker: BrokerProcess, arguments: dict[str, Any]
) -> None:
    client = broker.connect()
    headers = {"destination": "/control/producer", "reply-to": "/temp-queue/answers"}
    client.send_frame("SEND", headers, json.dumps(arguments).encode())
    assert code_of(client) == "control-request"
    assert not query_producer(broker.connect(), "p")["known"]
