"""Tests of the order in which a client tries several addresses, and of the time that each of them gets.

Source: docs/client.md, "Connect" and "Lost connections".
"""

from hypothesis import given
from hypothesis import strategies as st

from tests.client.scripted import Script
from truenext.client.core.client import Client, ConnectOptions, connect_options
from truenext.client.core.link import ATTEMPT_TIMEOUT_S, DELAY_FIRST_S, DELAY_MAX_S, FIRST_ROUND_S, ConnectBackoff
from truenext.errors import ConnectionLost
from truenext.model.url import parse_url

URLS = [f"stomp://127.0.0.1:{port}" for port in (61613, 61614, 61615)]
ADDRESSES = [parse_url(url) for url in URLS]
REFUSED = ConnectionRefusedError(111, "Connection refused")
NO_RANDOM_PART = 1.0


def connected(count: int = 2) -> Script:
    """Client with a connection to the first of `count` addresses, on which nothing has come for 60 seconds."""
    script = Script(ADDRESSES[:count], heart_beat_s=10)
    script.connect()
    script.now = 60.0
    return script


def backoff(count: int) -> ConnectBackoff:
    return ConnectBackoff(ADDRESSES[:count], lambda: NO_RANDOM_PART)


def test_client_of_a_silent_broker_tries_the_next_address_first() -> None:
    script = connected()
    script.client.run_due_calls()
    assert script.client.link is None
    assert script.reports[-1] == f"connection lost to {URLS[0]}: the broker has sent nothing for 8 s"
    assert script.client.connect_backoff.next_address_and_delay() == (ADDRESSES[1], 0.0)


def test_client_of_a_silent_broker_with_one_address_tries_that_again() -> None:
    script = connected(1)
    script.client.run_due_calls()
    assert script.client.connect_backoff.next_address_and_delay() == (ADDRESSES[0], 0.0)


def test_client_whose_connection_is_closed_tries_the_same_address_first() -> None:
    """Another address may be that of a machine without power, and the broker of this one may be there at once."""
    script = connected()
    script.lose()
    assert script.client.connect_backoff.next_address_and_delay() == (ADDRESSES[0], 0.0)
    script.client.on_connect_failed(REFUSED)
    assert script.client.connect_backoff.next_address_and_delay() == (ADDRESSES[1], 0.0)


@given(st.integers(1, 3), st.lists(st.sampled_from(["failed", "short", "long"]), max_size=60))
def test_delays_between_rounds_double_up_to_five_seconds_and_there_are_none_within_a_round(
    count: int, events: list[str]
) -> None:
    """The model counts failed attempts and rounds in its own way."""
    assert DELAY_MAX_S == 5.0
    tested = backoff(count)
    index, failures, round_count = 0, 0, 0
    for event in events:
        if event == "failed":
            tested.on_connect_failed()
            index, failures = index + 1, failures + 1
            round_count += failures % count == 0
        else:
            tested.on_connection_lost(100.0 if event == "long" else 0.0)
            failures, round_count = 0, 0 if event == "long" else min(round_count + 1, 3)
        expected = 0.0
        if round_count and failures % count == 0:
            expected = min(DELAY_FIRST_S * 2 ** (round_count - 1), 5.0)
        assert tested.next_address_and_delay() == (ADDRESSES[index % count], expected)


def test_delay_has_a_random_part() -> None:
    delays = []
    for random_part in (0.0, 0.5, 1.0):
        tested = ConnectBackoff(ADDRESSES[:1], lambda part=random_part: part)  # type: ignore[misc]
        for _ in range(20):
            tested.on_connect_failed()
        delays.append(tested.next_address_and_delay()[1])
    assert delays == [2.5, 3.75, 5.0]


def test_several_addresses_share_the_first_rounds_and_get_ten_seconds_in_the_end() -> None:
    for count, expected in ((1, [10.0] * 6), (2, [2.5, 2.5, 2.5, 5.0, 10.0, 10.0])):
        script = connected(count)
        script.lose()
        got = []
        for _ in expected:
            of_round = set()
            for _ in range(count):
                script.client.start_attempt()
                of_round.add(script.client.attempt_timeout_s)
                script.client.on_connect_failed(REFUSED)
            assert len(of_round) == 1
            got.append(of_round.pop())
        assert got == expected
    assert (FIRST_ROUND_S, ATTEMPT_TIMEOUT_S) == (5.0, 10.0)


def opening(urls: list[str], timeout_s: float, *, reconnects: bool) -> tuple[Script, Client]:
    """Client that has no connection yet, and the script whose clock it has."""
    script = Script()
    options: ConnectOptions = connect_options(
        urls, {}, client_id=None, heart_beat_s=0, reconnects=reconnects, timeout_s=timeout_s
    )
    return script, Client(options, "me", script.client.context)


def test_first_connection_of_a_client_that_reconnects_shares_a_short_timeout_too() -> None:
    _, client = opening(URLS[:2], 1.0, reconnects=True)
    client.start_attempt()
    assert client.attempt_timeout_s == 0.5


def test_error_of_the_first_connection_names_addresses_that_were_not_tried() -> None:
    script, client = opening(URLS, 12.0, reconnects=True)
    client.start_attempt()
    client.is_listening = True
    client.on_connect_failed(ConnectionLost("closed"))
    client.start_attempt()
    script.now = 5.0
    silent = "the host has not answered within 5 s: check that the broker runs, and host and port"
    assert str(client.no_broker_error(5.0)) == (
        f"no broker at {URLS[0]}: closed; at {URLS[1]}: {silent}; at {URLS[2]}: was not tried in time: wait longer"
    )


def test_address_that_refuses_at_once_leaves_its_time_to_the_others() -> None:
    script, client = opening(URLS, 12.0, reconnects=False)
    client.start_attempt()
    assert client.attempt_timeout_s == 4.0
    client.on_connect_failed(REFUSED)
    client.start_attempt()
    assert client.attempt_timeout_s == 6.0
    script.now = 6.0
    client.on_connect_failed(client.attempt_timeout_error())
    client.start_attempt()
    # The timeout of `connect` ends the attempt before.
    assert client.attempt_timeout_s == ATTEMPT_TIMEOUT_S
    script.now = 12.0
    silent = "the host has not answered within 6 s: check that the broker runs, and host and port"
    assert str(client.no_broker_error(12.0)) == (
        f"no broker at {URLS[0]}: Connection refused; at {URLS[1]}: {silent}; at {URLS[2]}: {silent}"
    )
