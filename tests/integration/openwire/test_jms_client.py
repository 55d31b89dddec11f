"""Tests with the unmodified client of ActiveMQ: Java programs (JmsCases.java) that are compiled here."""

from collections.abc import Sequence

import pytest

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.integration.openwire.java import Programs, missing_reason

REASON = missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

PREFETCHES = one_of("prefetch", [1, 1000], ["prefetch 1", "prefetch 1000"])
TEN = " ".join(f"m{number}/1" for number in range(10))


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("java"))


@pytest.fixture
def options() -> Sequence[str]:
    return ("--listen", "openwire://127.0.0.1:0")


def url_of(broker: BrokerProcess, prefetch: int | None = None) -> str:
    url = broker.openwire_url
    return url if prefetch is None else f"{url}?jms.prefetchPolicy.all={prefetch}"


def test_message_arrives_as_it_was_sent(broker: BrokerProcess, queue: str, java: Programs) -> None:
    said = java.run("round_trip", url_of(broker), queue)
    for mode in range(2):
        fields, said = said[:6], said[6:]
        assert fields == ["true", "true", "red 7 c1", f"greeting 7 {2 - mode}", "true false", "true"]
    assert said == ["nothing"]


def test_messages_of_each_kind_arrive_compressed_or_not(broker: BrokerProcess, queue: str, java: Programs) -> None:
    kinds = ["2000", "null", "42 bytes", "map 1099511627776 2", "[object, 1]", "1.5 stream", "ActiveMQMessage"]
    assert java.run("kinds", url_of(broker), queue) == 2 * kinds


@PREFETCHES
@pytest.mark.parametrize("mode", ["auto", "client", "individual", "dups_ok", "transacted"])
def test_each_mode_consumes_in_order_and_once(
    broker: BrokerProcess, queue: str, java: Programs, mode: str, prefetch: int
) -> None:
    assert java.run("consume", url_of(broker, prefetch), queue, mode) == [TEN, "nothing", "nothing"]


@PREFETCHES
def test_third_of_five_that_is_rolled_back_comes_again(
    broker: BrokerProcess, queue: str, java: Programs, prefetch: int
) -> None:
    assert java.run("third_of_five", url_of(broker, prefetch), queue) == [
        "m0/1 m1/1 m2/1 m2/2 m3/1 m4/1",
        "nothing",
        "out0 out1 out3 out4 out5 nothing",
    ]


@PREFETCHES
def test_message_becomes_a_dead_letter_after_six_redeliveries(
    broker: BrokerProcess, queue: str, java: Programs, prefetch: int
) -> None:
    tries = " ".join(f"m0/{number}" for number in range(1, 8))
    assert java.run("dead_letter", url_of(broker, prefetch), queue) == [f"{tries} m1/1", "m0/1", "true", "nothing"]


@PREFETCHES
def test_close_counts_an_attempt_for_what_was_delivered(
    broker: BrokerProcess, queue: str, java: Programs, prefetch: int
) -> None:
    assert java.run("closes", url_of(broker, prefetch), queue) == [
        "m0/1 m1/1",
        "m0/2 m1/2",
        "m0/3 m1/3",
        "m0/4 m1/4 m2/1 m3/1",
    ]


@PREFETCHES
def test_listener_that_throws_gets_the_message_again(
    broker: BrokerProcess, queue: str, java: Programs, prefetch: int
) -> None:
    assert java.run("listener", url_of(broker, prefetch), queue) == ["m0/1 m0/2 m0/3 m1/1 m2/1"]


@PREFETCHES
def test_recover_delivers_again_what_was_not_acknowledged(
    broker: BrokerProcess, queue: str, java: Programs, prefetch: int
) -> None:
    assert java.run("recover", url_of(broker, prefetch), queue) == [
        "m0/1 m1/1 m0/2 m1/2 m0/3 m1/3 m2/1",
        "nothing",
    ]


OPTIONS = pytest.mark.parametrize(
    "option", ["optimizeAcknowledge", "messagePrioritySupported", "nonBlockingRedelivery", "alwaysSyncSend"]
)


@OPTIONS
@pytest.mark.parametrize("mode", ["auto", "client", "transacted"])
def test_each_mode_consumes_in_order_and_once_with_options_of_the_client(
    broker: BrokerProcess, queue: str, java: Programs, mode: str, option: str
) -> None:
    said = java.run("consume", f"{url_of(broker)}?jms.{option}=true", queue, mode)
    assert said == [TEN, "nothing", "nothing"]


@pytest.mark.parametrize("option", ["optimizeAcknowledge", "messagePrioritySupported", "alwaysSyncSend"])
def test_rolled_back_message_becomes_a_dead_letter_with_options_of_the_client(
    broker: BrokerProcess, queue: str, java: Programs, option: str
) -> None:
    said = java.run("dead_letter", f"{url_of(broker)}?jms.{option}=true", queue)
    assert sorted(said[0].split()) == sorted([*(f"m0/{number}" for number in range(1, 8)), "m1/1"])
    assert said[1:] == ["m0/1", "true", "nothing"]


def test_idle_connection_stays(broker: BrokerProcess, queue: str, java: Programs) -> None:
    assert java.run("idle", url_of(broker), queue) == ["still there"]


def test_message_that_expires_at_the_client_is_gone(broker: BrokerProcess, queue: str, java: Programs) -> None:
    assert java.run("expire", url_of(broker), queue) == ["long 60000", "nothing"]
    assert broker.remaining_messages(queue) == []


def test_urgent_messages_come_first(broker: BrokerProcess, queue: str, java: Programs) -> None:
    assert java.run("priorities", url_of(broker), queue) == ["p9 p9 p4 p1 p0"]


def test_browser_shows_what_waits_and_takes_nothing(broker: BrokerProcess, queue: str, java: Programs) -> None:
    shown = "m0 m1 m2 m3 m4"
    assert java.run("browse", url_of(broker), queue) == 7 * [shown] + ["false", "m0/1"]


def test_consumer_of_prefetch_0_gets_what_it_asks_for(broker: BrokerProcess, queue: str, java: Programs) -> None:
    assert java.run("pull", url_of(broker), queue) == ["nothing", "nothing", "true", "m0", "m1", "m2", "nothing"]


@pytest.mark.parametrize("connection", ["same", "other", "third", "later"])
def test_reply_comes_to_a_temporary_queue(broker: BrokerProcess, queue: str, java: Programs, connection: str) -> None:
    assert java.run("reply", url_of(broker), queue, connection) == ["20"]


def test_topic_copies_to_each_consumer_that_selects(broker: BrokerProcess, queue: str, java: Programs) -> None:
    assert java.run("topic", url_of(broker), queue) == ["t0 t1 t2 t3 t2 t3 nothing"]


def test_selector_compares_properties_by_their_types(broker: BrokerProcess, queue: str, java: Programs) -> None:
    assert java.run("selectors", url_of(broker), queue) == ["m2", "m3", "m1", "m0"]


def test_producer_with_a_window_goes_on(broker: BrokerProcess, queue: str, java: Programs) -> None:
    assert java.run("window", url_of(broker), queue) == ["50"]


def test_feature_that_is_not_offered_is_refused_by_name(broker: BrokerProcess, queue: str, java: Programs) -> None:
    said = java.run("refused", url_of(broker), queue)
    for line, (name, what) in zip(
        said,
        [
            ("JMSException", "a consumer of a pattern, a.>"),
            ("JMSException", "a consumer of several destinations, a,b"),
            ("JMSException", "the advisory ActiveMQ.Advisory.Queue"),
            ("JMSException", "the durable subscription 'name'"),
            ("InvalidDestinationException", "send to ActiveMQ.Advisory.Queue"),
            ("JMSException", "statistics by ActiveMQ.Statistics.Broker"),
            ("JMSException", "commands that create or remove a queue or topic"),
            ("InvalidDestinationException", "pattern '/queue/a*'"),
            ("JMSException", "scheduled messages by AMQ_SCHEDULED_DELAY"),
            ("JMSException", "transaction '1' can only be aborted"),
        ],
        strict=False,
    ):
        assert line.startswith(f"{name}: {what}"), said
    assert said[10:] == ["0", "XAException -3", "accepted"]


def test_messages_pass_to_stomp(broker: BrokerProcess, queue: str, java: Programs) -> None:
    java.run("send_to_stomp", url_of(broker), queue)
    text, raw = broker.remaining_messages(queue)
    assert text.body.decode() == "héllo"
    assert (text.headers["colour"], text.headers["size"], text.headers["correlation-id"]) == ("red", "7", "c1")
    assert raw.body == b"\0\1\2"


def test_messages_pass_from_stomp(broker: BrokerProcess, queue: str, java: Programs) -> None:
    client = broker.connect()
    headers = {"destination": f"/queue/{queue}", "colour": "red", "correlation-id": "c1", "priority": "6"}
    client.write(("SEND\n" + "".join(f"{name}:{value}\n" for name, value in headers.items()) + "\nhéllo\0").encode())
    client.send_frame("SEND", {"destination": f"/queue/{queue}"}, b"\0\1\2", confirmed=True)
    assert java.run("receive_from_stomp", url_of(broker), queue) == ["héllo red c1", f"queue://{queue} 6", "3"]
