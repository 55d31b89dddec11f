"""Tests that each SUBSCRIBE header known to some broker is understood, ignored, or refused by name."""

from itertools import product

import pytest

from tools.reference.header_docs import CLIENT_HEADERS
from truenext.errors import RemoteProtocolError
from truenext.model.commands import Browse, Command, Login, Nack, Send, Subscribe, Unsubscribe
from truenext.model.destination import DestinationKind
from truenext.model.header_lines import ADDED_HEADERS
from truenext.model.limits import WINDOW_MAX
from truenext.wire.stomp.frame import Frame, Version, encode
from truenext.wire.stomp.headers import (
    DURABLE_NAME,
    INEFFECTIVE_HEADERS,
    OPTIONS,
    PRIORITY,
    SUBSCRIBE_RULES,
    WINDOW,
)
from truenext.wire.stomp.server import StompSession

QUEUES = ["/queue/a", "a", "/queue/a.*"]
TEMPORARY = ["/temp-queue/a", "/remote-temp-queue/me/a"]
TOPICS = ["/topic/a", "/topic/a.>"]
ENDING = [*TOPICS, "/temp-topic/a"]
NOTHING: dict[str, str] = {}


def connected(
    version: Version = Version.V1_2, client_id: str = "c", reported: list[tuple[str, str, str]] | None = None
) -> StompSession:
    """Return a session with a login, which adds reports of headers without effect to `reported`."""
    found = [] if reported is None else reported
    server = StompSession(
        session_id="me",
        identity="b1",
        server_name="truenext/1",
        on_ineffective_header=lambda *report: found.append(report),
    )
    headers = {"accept-version": version.value} | ({"client-id": client_id} if client_id else {})
    assert list(server.receive(encode(Frame("CONNECT", headers), version))) == [Login()]
    return server


def receive(server: StompSession, command: str, headers: dict[str, str]) -> list[Command]:
    return list(server.receive(encode(Frame(command, headers), server._protocol.version)))


def subscribed(address: str, headers: dict[str, str] = NOTHING, *, client_id: str = "c") -> Subscribe:
    (command,) = receive(connected(client_id=client_id), "SUBSCRIBE", {"id": "s", "destination": address} | headers)
    assert isinstance(command, Subscribe)
    return command


def error_of(address: str, headers: dict[str, str] = NOTHING, *, client_id: str = "c") -> str:
    with pytest.raises(RemoteProtocolError) as raised:
        subscribed(address, headers, client_id=client_id)
    assert len(str(raised.value)) < 350
    return str(raised.value)


@pytest.mark.parametrize("address", ["/topic/orders.#", "/topic/#", "/queue/orders.#.new", "/queue/*.#", "#"])
def test_subscribe_with_the_wildcard_of_rabbitmq_is_refused_with_the_one_to_use(address: str) -> None:
    # C7.10
    assert "# is not a wildcard here; use > as the last word" in error_of(address)


def test_subscribe_to_a_name_with_a_number_sign_within_a_word_is_accepted() -> None:
    assert subscribed("/topic/orders.#1").destination.address == "/topic/orders.#1"


# ---- The whole table: name, values that pass, values that do not, by what is subscribed to ----

ANY = ["", "true", "false", "17", "whatever"]
NEVER = ["", "true", "false", "0", "17", "whatever"]
FALSE = ["false", "False", "FALSE"]
TRUE = ["true", "True", "TRUE"]
NO_BOOLEAN = ["", "yes", "0", "1"]
DURABLE = {"durable": "true"}

ROWS: list[tuple[str, list[str], dict[str, str], list[str], list[str]]] = [
    # names, destinations, with these headers, values that pass, values that are refused
    ("activemq.dispatchAsync", [*QUEUES, *TEMPORARY, *ENDING], {}, ANY, []),
    ("activemq.maximumPendingMessageLimit", [*QUEUES, *TEMPORARY, *ENDING], {}, ANY, []),
    ("transformation", [*QUEUES, *TEMPORARY, *ENDING], {}, ANY, []),
    ("x-max-priority", [*QUEUES, *TEMPORARY, *ENDING], {}, ["5", "10", "255"], []),
    *(
        (name, [*QUEUES, *TEMPORARY, *ENDING], {}, FALSE, [*TRUE, *NO_BOOLEAN])
        for name in ("no-local", "activemq.noLocal", "activemq.retroactive")
    ),
    ("exclusive", QUEUES, {}, FALSE, NO_BOOLEAN),
    ("exclusive", [*TEMPORARY, *ENDING], {}, [*TRUE, *FALSE], NO_BOOLEAN),
    ("exclusive", TOPICS, DURABLE, FALSE, [*TRUE, *NO_BOOLEAN]),
    ("x-queue-type", [*QUEUES, *TEMPORARY, *ENDING], {}, ["classic", "quorum"], ["stream", "", "classic,quorum"]),
    *((name, QUEUES, {}, [*TRUE, *FALSE], NO_BOOLEAN) for name in ("durable", "persistent")),
    *((name, TEMPORARY, {}, FALSE, [*TRUE, *NO_BOOLEAN]) for name in ("durable", "persistent")),
    *((name, ENDING, {}, FALSE, NO_BOOLEAN) for name in ("durable", "persistent")),
    ("auto-delete", QUEUES, {}, [*TRUE, *FALSE], NO_BOOLEAN),
    ("auto-delete", TEMPORARY, {}, TRUE, [*FALSE, *NO_BOOLEAN]),
    ("auto-delete", ENDING, {}, TRUE, [*FALSE, *NO_BOOLEAN]),
    ("auto-delete", TOPICS, DURABLE, FALSE, [*TRUE, *NO_BOOLEAN]),
    ("subscription-type", [*QUEUES, *TEMPORARY], {}, ["ANYCAST", "anycast"], ["MULTICAST", "", "both"]),
    ("subscription-type", ENDING, {}, ["MULTICAST", "multicast"], ["ANYCAST", "", "both"]),
    ("subscription-type", TOPICS, DURABLE, ["MULTICAST"], ["ANYCAST"]),
    *(
        (name, [*QUEUES, *TEMPORARY, *ENDING], {}, [], NEVER)
        for name in (
            *("activemq.selector", "activemq.browser", "consumer-window-size", "x-queue-name", "x-message-ttl"),
            *("x-expires", "x-max-length", "x-max-length-bytes", "x-overflow", "x-dead-letter-exchange"),
            *("x-dead-letter-routing-key", "x-delivery-limit", "x-single-active-consumer", "x-priority"),
            *("x-cancel-on-ha-failover", "x-max-age", "x-stream-offset", "x-stream-filter"),
            *("x-stream-match-unfiltered", "x-stream-filter-size-bytes", "x-stream-max-segment-size-bytes"),
        )
    ),
]
AS_OPTIONS = {
    f"consumer.{name}": f"activemq.{name}"
    for name in ("dispatchAsync", "maximumPendingMessageLimit", "noLocal", "retroactive")
}
"""Options that are accepted without effect, by the header they stand for."""


def test_table_here_has_all_headers_of_subscribe() -> None:
    assert {name for name, *_ in ROWS} | AS_OPTIONS.keys() == SUBSCRIBE_RULES.keys()
    assert AS_OPTIONS.keys() < set(OPTIONS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1][0]}-{'-'.join(row[2])}")
def test_header_of_another_broker_has_no_effect_or_is_refused_by_name(
    row: tuple[str, list[str], dict[str, str], list[str], list[str]],
) -> None:
    name, addresses, others, passing, refusing = row
    for address in addresses:
        plain = subscribed(address, others)
        for value in passing:
            assert subscribed(address, others | {name: value}) == plain
        for value in refusing:
            reason = error_of(address, others | {name: value})
            assert name in reason and repr(value) in reason
            # It says more than that: what to do.
            assert reason.endswith("is not true or false") or ("; " in reason or "use " in reason)


@pytest.mark.parametrize("address", QUEUES)
@pytest.mark.parametrize("value", TRUE)
def test_exclusive_on_a_queue_makes_an_exclusive_consumer(address: str, value: str) -> None:
    consumer = subscribed(address, {"exclusive": value})
    assert consumer.is_exclusive
    assert consumer == subscribed(address, {"activemq.exclusive": value})


@pytest.mark.parametrize("address", [*TEMPORARY, *ENDING])
def test_exclusive_on_what_belongs_to_its_connection_makes_no_exclusive_consumer(address: str) -> None:
    consumer = subscribed(address, {"exclusive": "true"})
    assert not consumer.is_exclusive
    # It conflicts with nothing there.
    assert subscribed(address, {"exclusive": "true", "activemq.exclusive": "false"}) == consumer


def test_exclusive_browser_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="an exclusive consumer with browser:true"):
        receive(
            connected(), "SUBSCRIBE", {"id": "s", "destination": "/queue/a", "browser": "true", "exclusive": "true"}
        )


# ---- Headers without effect ----


def frames_of(command: str) -> list[dict[str, str]]:
    if command == "SUBSCRIBE":
        return [{"id": "s", "destination": address} for address in ("/queue/a", "/topic/a", "/temp-queue/a")]
    return [{"destination": address} for address in ("/queue/a", "/topic/a", "/queue/a,/topic/b")]


@pytest.mark.parametrize("command", INEFFECTIVE_HEADERS)
def test_header_without_effect_is_reported_once_and_changes_nothing(command: str) -> None:
    known = INEFFECTIVE_HEADERS[command]
    for headers in frames_of(command):
        for name, instead in known.items():
            reported: list[tuple[str, str, str]] = []
            server = connected(reported=reported)
            (plain,) = receive(server, command, headers)
            (other,) = receive(server, command, headers | {name: "7"})
            receive(server, command, headers | {name: "8"})
            assert reported == [(command, name, instead)]
            if isinstance(other, Send) and isinstance(plain, Send):
                assert f"{name}:7\n".encode() in other.message.header
                other.message.header = plain.message.header
            assert other == plain
        reported = []
        receive(connected(reported=reported), command, headers | dict.fromkeys(known, "x"))
        assert sorted(reported) == sorted((command, name, instead) for name, instead in known.items())


@pytest.mark.parametrize("command", INEFFECTIVE_HEADERS)
def test_header_without_effect_is_not_reported_on_another_frame_or_in_another_spelling(command: str) -> None:
    reported: list[tuple[str, str, str]] = []
    (other,) = INEFFECTIVE_HEADERS.keys() - {command}
    names = [
        *INEFFECTIVE_HEADERS[other].keys() - INEFFECTIVE_HEADERS[command].keys() - SUBSCRIBE_RULES.keys(),
        *(name.swapcase() for name in INEFFECTIVE_HEADERS[command]),
    ]
    for headers in frames_of(command):
        for name in names:
            receive(connected(reported=reported), command, headers | {name: "7"})
    receive(connected(reported=reported), "ACK", {"id": "7@s"} | dict.fromkeys(INEFFECTIVE_HEADERS["SEND"], "7"))
    assert not reported


def test_header_without_effect_beside_a_schedule_and_a_group_changes_neither() -> None:
    reported: list[tuple[str, str, str]] = []
    headers = {"destination": "/queue/a", "AMQ_SCHEDULED_DELAY": "5", "JMSXGroupID": "g", "x-delay": "7"}
    (send,) = receive(connected(reported=reported), "SEND", headers)
    assert isinstance(send, Send) and send.schedule is not None
    assert (send.schedule.delay_ms, send.message.group) == (5, "g")
    assert [name for _, name, _ in reported] == ["x-delay"]


@pytest.mark.parametrize(
    ("header", "instead"),
    [
        ("truenext-tll", "use truenext-ttl"),
        ("truenext-prodcuer", "use truenext-producer"),
        ("truenext-started", "this header is for ACK; leave it out"),
        (
            "truenext-x",
            "truenext- headers of SEND are truenext-number, truenext-producer, truenext-gapless, truenext-ttl, ",
        ),
    ],
)
def test_unknown_header_of_truenext_on_send_is_reported_once_and_forwarded(header: str, instead: str) -> None:
    reported: list[tuple[str, str, str]] = []
    server = connected(reported=reported)
    for _ in range(40):
        (send,) = receive(server, "SEND", {"destination": "/queue/a", "content-length": "0", header: "7"})
        assert isinstance(send, Send)
        assert f"{header}:7\n".encode() in send.message.header
    ((command, name, advice),) = reported
    assert (command, name) == ("SEND", header) and advice.startswith(instead)


def test_headers_that_truenext_knows_on_send_are_not_reported() -> None:
    reported: list[tuple[str, str, str]] = []
    producer = {"truenext-producer": "p", "truenext-number": "1", "truenext-ttl": "5"}
    repeated_message = {"truenext-sequence": "1", "truenext-tll": "5"}
    dead_letter = {"truenext-original-priority": "4", "truenext-lost": "true"}
    for headers in (producer, repeated_message, dead_letter):
        receive(connected(reported=reported), "SEND", {"destination": "/queue/a"} | headers)
    receive(connected(reported=reported), "SUBSCRIBE", {"id": "s", "destination": "/queue/a", "truenext-pull": "false"})
    assert not reported


def test_no_header_without_effect_is_understood_too() -> None:
    understood = {frame: {name for each in docs for name in each.names} for frame, docs in CLIENT_HEADERS.items()}
    for frame, names in INEFFECTIVE_HEADERS.items():
        assert not names.keys() & understood[frame]
    assert not INEFFECTIVE_HEADERS["SUBSCRIBE"].keys() & SUBSCRIBE_RULES.keys()


@pytest.mark.parametrize(("option", "header"), AS_OPTIONS.items())
def test_option_has_the_effect_of_the_header_of_its_name(option: str, header: str) -> None:
    rows = [row for row in ROWS if row[0] == header]
    assert rows
    for _, addresses, _, passing, refusing in rows:
        for address in addresses:
            for value in passing:
                assert subscribed(f"{address}?{option}={value}") == subscribed(address)
            for value in refusing:
                assert option in error_of(f"{address}?{option}={value}")


@pytest.mark.parametrize("address", ["/queue/a", "/subscription/c,n"])
def test_browser_accepts_headers_without_effect(address: str) -> None:
    headers = {"id": "s", "destination": address, "browser": "true"}
    for name, value in (("durable", "true"), ("auto-delete", "false"), ("x-queue-type", "quorum")):
        (browse,) = receive(connected(client_id=""), "SUBSCRIBE", headers | {name: value})
        assert isinstance(browse, Browse)
    with pytest.raises(RemoteProtocolError, match="x-queue-name"):
        receive(connected(), "SUBSCRIBE", headers | {"x-queue-name": "q"})


UNKNOWN = [
    *(
        "X-CSRF-TOKEN",
        "x-queue-names",
        "x-queue",
        "X-Queue-Name",
        "x-message-ttl ",
        "activemq.",
        "activemq.prefetchsize",
    ),
    *(
        "consumer.prefetchSize",
        "consumer.noLocal",
        "Durable",
        "requeue",
        "prefetch",
        "Truenext-delay",
        "truenext",
        "login",
    ),
]


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("address", ["/queue/a", "/topic/a", "/temp-queue/a"])
def test_unknown_header_belongs_to_the_user(name: str, address: str) -> None:
    assert subscribed(address, {name: "whatever"}) == subscribed(address)
    (command,) = receive(connected(), "UNSUBSCRIBE", {"id": "s", name: "whatever"})
    assert command == Unsubscribe("s")


@pytest.mark.parametrize("name", [*SUBSCRIBE_RULES, *WINDOW, *PRIORITY, *DURABLE_NAME, "requeue", "selector"])
def test_on_send_all_names_are_the_user_s(name: str) -> None:
    if name == "persistent":
        return
    (send,) = receive(connected(), "SEND", {"destination": "/queue/a", name: "whatever"})
    assert f"{name}:whatever\n".encode() in send.message.header  # type: ignore[union-attr]


# ---- Windows ----


@pytest.mark.parametrize("name", ["activemq.prefetchSize", "prefetch-count"])
def test_a_window_is_exact_or_refused_with_the_limit(name: str) -> None:
    for size in (1, 1000, WINDOW_MAX):
        assert subscribed("/queue/a", {name: str(size)}).window == size
    for size in (WINDOW_MAX + 1, 40_000, 10**9):
        reason = error_of("/queue/a", {name: str(size)})
        assert f"{name} {size} is more than {WINDOW_MAX} messages" in reason


def test_a_prefetch_count_of_0_names_no_window() -> None:
    assert subscribed("/queue/a", {"prefetch-count": "0"}).window is None
    assert subscribed("/queue/a", {"prefetch-count": "0", "activemq.prefetchSize": "7"}).window == 7
    for name in ("activemq.prefetchSize", "prefetch-count"):
        assert f"{name} '-1' is not a number" in error_of("/queue/a", {name: "-1"})
    assert "activemq.prefetchSize of 0 (pulling)" in error_of("/queue/a", {"activemq.prefetchSize": "0"})
    assert "consumer.prefetchSize of 0 (pulling)" in error_of("/queue/a?consumer.prefetchSize=0")


# ---- Options of a destination ----


def test_options_behind_a_destination_are_understood() -> None:
    subscribe = subscribed(
        "/queue/a?consumer.prefetchSize=7&consumer.priority=-3&consumer.exclusive=True"
        "&consumer.selector=b%20IN%20('x%2Cy'%2C%20'%25')%20AND%20c+%3E+1"
    )
    assert (subscribe.destination.kind, subscribe.destination.name) == (DestinationKind.QUEUE, "a")
    assert (subscribe.window, subscribe.priority, subscribe.is_exclusive) == (7, -3, True)
    assert subscribe.selector is not None and subscribe.selector.text == "b IN ('x,y', '%') AND c > 1"


def test_options_are_split_off_before_commas_and_wildcards_are_parsed() -> None:
    for selector in ("b%20%3E%201", "b > 1", "b IN ('c', 'd')", "b LIKE '*'"):
        for address, kind in (
            ("/queue/a", DestinationKind.QUEUE),
            ("/topic/a", DestinationKind.TOPIC),
            ("/queue/a.>", DestinationKind.QUEUE_PATTERN),
        ):
            subscribe = subscribed(f"{address}?consumer.selector={selector}")
            assert subscribe.destination.kind is kind and subscribe.destination.name == address.split("/")[2]
            assert subscribe.selector is not None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("b", "option 'b' of a destination is not NAME=VALUE"),
        ("", "option '' of a destination is not NAME=VALUE"),
        ("=1", "option '=1' of a destination is not NAME=VALUE"),
        ("b=1", "unknown option 'b' of a destination"),
        ("consumer.window=1", "unknown option 'consumer.window' of a destination"),
        ("prefetchSize=1", "unknown option 'prefetchSize'"),
        ("consumer.prefetchSize=x", "consumer.prefetchSize 'x' is not a number"),
        ("consumer.prefetchSize=40000", "consumer.prefetchSize 40000 is more than 32767"),
        (
            "consumer.prefetchSize=1&consumer.prefetchSize=2",
            "option 'consumer.prefetchSize' of a destination is set twice",
        ),
        ("consumer.priority=200", "consumer.priority '200' is not a number from -127 to 127"),
        ("consumer.exclusive=maybe", "consumer.exclusive 'maybe' is not true or false"),
        ("consumer.selector=a ! 1", "at character 3"),
        ("consumer.selector=a LIKE 'b%'", "option 'consumer.selector' of a destination has a % "),
        ("consumer.selector=%ff", "option 'consumer.selector' of a destination is not UTF-8"),
        ("consumer.noLocal=true", "consumer.noLocal 'true'"),
        ("consumer.retroactive=true", "consumer.retroactive 'true'"),
    ],
)
def test_an_option_that_is_not_done_is_refused_by_name(options: str, reason: str) -> None:
    for address in ("/queue/a", "/topic/a", "/temp-queue/a"):
        assert reason in error_of(f"{address}?{options}")


def test_option_repeated_with_the_same_value_is_accepted() -> None:
    assert subscribed("/queue/a?consumer.prefetchSize=1&consumer.prefetchSize=1").window == 1


@pytest.mark.parametrize(
    "address", ["/queue/a", "/topic/a", "/temp-queue/a", "a", "/queue/a,/queue/b", "/control/status"]
)
@pytest.mark.parametrize("option", [*OPTIONS, "b"])
def test_on_send_every_option_is_refused_by_name(address: str, option: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"option '{option}' of '{address}"):
        receive(connected(), "SEND", {"destination": f"{address}?{option}=1", "reply-to": "/temp-queue/r"})
    with pytest.raises(RemoteProtocolError, match=f"option '{option}'"):
        receive(connected(), "SEND", {"destination": "/queue/a", "reply-to": f"/temp-queue/r?{option}=1"})


def test_in_1_0_a_subscription_is_known_by_its_destination_without_the_options() -> None:
    server = connected(Version.V1_0)
    (subscribe,) = receive(server, "SUBSCRIBE", {"destination": "/queue/a?consumer.prefetchSize=3"})
    assert isinstance(subscribe, Subscribe)
    assert (subscribe.subscription, subscribe.window) == ("/queue/a", 3)
    assert receive(server, "UNSUBSCRIBE", {"destination": "/queue/a"}) == [Unsubscribe("/queue/a")]
    assert receive(server, "UNSUBSCRIBE", {"destination": "/queue/a?consumer.prefetchSize=3"}) == [
        Unsubscribe("/queue/a")
    ]


# ---- Several names of one thing ----


AGREEING: list[tuple[dict[str, str], str, dict[str, str]]] = [
    # headers, options, headers that disagree with them
    ({"activemq.prefetchSize": "7", "prefetch-count": "07"}, "consumer.prefetchSize=7", {"prefetch-count": "8"}),
    ({"activemq.priority": "7"}, "consumer.priority=07", {"activemq.priority": "-7"}),
    ({"activemq.exclusive": "true"}, "consumer.exclusive=True", {"activemq.exclusive": "false"}),
    ({"exclusive": "true"}, "consumer.exclusive=True", {"exclusive": "false"}),
    ({"selector": "a > 1"}, "consumer.selector=a%20%3E%201", {"selector": "a > 2"}),
]


@pytest.mark.parametrize(("headers", "options", "others"), AGREEING)
def test_two_names_of_one_thing_agree_or_are_refused(
    headers: dict[str, str], options: str, others: dict[str, str]
) -> None:
    by_headers, by_options = subscribed("/queue/a", headers), subscribed(f"/queue/a?{options}")
    both = subscribed(f"/queue/a?{options}", headers)
    for one, other in ((by_headers, both), (by_options, both)):
        assert (one.window, one.priority, one.is_exclusive) == (other.window, other.priority, other.is_exclusive)
        assert (one.selector and one.selector.text) == (other.selector and other.selector.text)
    reason = error_of(f"/queue/a?{options}", others)
    assert "disagree; use one of them" in reason
    assert options.partition("=")[0] in reason and all(name in reason for name in others)


def test_exclusive_and_activemq_exclusive_that_disagree_are_refused() -> None:
    for value, other in (("true", "false"), ("False", "True")):
        reason = error_of("/queue/a", {"exclusive": value, "activemq.exclusive": other})
        assert f"activemq.exclusive {other!r} and exclusive {value!r} disagree; use one of them" in reason


def test_two_headers_of_one_window_that_disagree_are_refused() -> None:
    reason = error_of("/queue/a", {"activemq.prefetchSize": "10", "prefetch-count": "20"})
    assert "activemq.prefetchSize '10' and prefetch-count '20' disagree" in reason


def test_an_empty_selector_is_none_named() -> None:
    subscribe = subscribed("/queue/a?consumer.selector=a%3D1", {"selector": ""})
    assert subscribe.selector is not None and subscribe.selector.text == "a=1"
    assert subscribed("/queue/a?consumer.selector=").selector is None


# ---- Durable subscriptions ----


@pytest.mark.parametrize("name", [*DURABLE_NAME])
def test_a_durable_subscription_has_one_of_four_names(name: str) -> None:
    assert subscribed("/topic/a", {name: "n"}).durable_key == "c,n"
    assert subscribed("/topic/a", {name: "n", "durable": "true"}).durable_key == "c,n"
    (command,) = receive(connected(), "UNSUBSCRIBE", {"id": "s", name: "n"})
    assert command == Unsubscribe("s", "c,n")
    assert f"{name} on a SUBSCRIBE to a queue: durable" in error_of("/queue/a", {name: "n"})
    assert f"{name} on a SUBSCRIBE to a temporary queue: durable" in error_of("/temp-queue/a", {name: "n"})
    assert f"{name} names a durable subscription, and durable:false" in error_of(
        "/topic/a", {name: "n", "durable": "false"}
    )


def test_an_empty_name_of_a_durable_subscription_is_none_by_one_of_the_names_alone() -> None:
    """Old clients of .NET say that one always."""
    assert subscribed("/topic/a", {"durable-subscriber-name": ""}, client_id="") == subscribed("/topic/a")
    assert subscribed("/queue/a", {"durable-subscriber-name": ""}, client_id="") == subscribed("/queue/a")
    assert subscribed("/topic/a", {"durable-subscriber-name": "", "durable": "true"}).durable_key == "c,s"
    assert (
        subscribed("/topic/a", {"durable-subscriber-name": "", "activemq.subscriptionName": "n"}).durable_key == "c,n"
    )
    for name in DURABLE_NAME[:3]:
        assert "is empty" in error_of("/topic/a", {name: ""})
        assert name in error_of("/queue/a", {name: ""})


@pytest.mark.parametrize(("one", "other"), [pair for pair in product(DURABLE_NAME, repeat=2) if pair[0] < pair[1]])
def test_two_names_of_a_durable_subscription_agree_or_are_refused(one: str, other: str) -> None:
    assert subscribed("/topic/a", {one: "n", other: "n"}).durable_key == "c,n"
    reason = error_of("/topic/a", {one: "n", other: "m"})
    assert one in reason and other in reason and "disagree" in reason
    with pytest.raises(RemoteProtocolError, match="disagree"):
        receive(connected(), "UNSUBSCRIBE", {"id": "s", one: "n", other: "m"})


@pytest.mark.parametrize("name", ["durable", "persistent"])
@pytest.mark.parametrize("address", TOPICS)
def test_a_subscription_to_a_topic_is_durable_by_either_word(name: str, address: str) -> None:
    assert subscribed(address, {name: "true"}).durable_key == "c,s"
    assert subscribed(address, {name: "True", "auto-delete": "false"}).durable_key == "c,s"
    assert "needs a client-id" in error_of(address, {name: "true"}, client_id="")
    assert "disagree" in error_of(address, {"durable": "true", "persistent": "true"} | {name: "false"})
    (command,) = receive(connected(), "UNSUBSCRIBE", {"id": "s", name: "true", "auto-delete": "false"})
    assert command == Unsubscribe("s", "c,s")


@pytest.mark.parametrize("name", ["durable", "persistent"])
@pytest.mark.parametrize("client_id", ["", "c"])
@pytest.mark.parametrize("address", QUEUES)
def test_unsubscribe_from_a_queue_accepts_the_durable_headers_of_its_subscribe(
    name: str, client_id: str, address: str
) -> None:
    headers = {"id": "s", "destination": address, name: "true", "auto-delete": "false"}
    server = connected(client_id=client_id)
    for _ in range(2):
        (subscribe,) = receive(server, "SUBSCRIBE", headers)
        assert isinstance(subscribe, Subscribe) and subscribe.durable_key == ""
        assert receive(server, "UNSUBSCRIBE", headers) == [Unsubscribe("s")]
    if client_id:
        # Of no queue any more: a durable subscription that nobody uses now.
        assert receive(server, "UNSUBSCRIBE", headers) == [Unsubscribe("s", "c,s")]


# ---- Our own ----

OF_MESSAGE = [
    *("truenext-sequence", "truenext-deliveries", "truenext-attempts", "truenext-first-cause", "truenext-last-cause"),
    *sorted(ADDED_HEADERS),
]
FRAMES = {
    # what each asks for, and our names that it may have
    "SUBSCRIBE": ({"id": "s", "destination": "/queue/a", "ack": "client-individual"}, ["truenext-express"]),
    "UNSUBSCRIBE": ({"id": "s"}, ["truenext-express"]),
    "ACK": ({"id": "5@s", "message-id": "truenext-b1-5", "subscription": "s"}, OF_MESSAGE),
    "NACK": (
        {"id": "5@s", "message-id": "truenext-b1-5", "subscription": "s"},
        [*OF_MESSAGE, "truenext-delay", "truenext-reject", "truenext-cause"],
    ),
    "BEGIN": ({"transaction": "t"}, []),
    "COMMIT": ({"transaction": "t"}, ["truenext-producer", "truenext-number", "truenext-gapless"]),
    "ABORT": ({"transaction": "t"}, []),
    "DISCONNECT": ({}, ["truenext-forget"]),
}
BELONGS = {
    "truenext-producer": "SEND and COMMIT",
    "truenext-number": "SEND and COMMIT",
    "truenext-gapless": "SEND and COMMIT",
    "truenext-forget": "DISCONNECT",
    "truenext-delay": "NACK",
    "truenext-reject": "SEND and NACK",
    "truenext-cause": "SEND and NACK",
    "truenext-express": "SUBSCRIBE",
}
VALUES = dict.fromkeys(["truenext-express", "truenext-reject", "truenext-gapless"], "true") | {
    "truenext-forget": '["p"]'
}
SLIPS = ["truenext-numer", "truenext-Number", "truenext-", "truenext-number ", "truenext-login", "truenext-repeat"]


@pytest.mark.parametrize("version", [Version.V1_1, Version.V1_2])
@pytest.mark.parametrize("name", [*OF_MESSAGE, *BELONGS, *SLIPS])
@pytest.mark.parametrize("command", FRAMES)
def test_truenext_header_is_for_this_frame_or_refused_by_name(command: str, name: str, version: Version) -> None:
    headers, own_headers = FRAMES[command]
    if name in own_headers:
        both = {"truenext-producer": "p", "truenext-number": "1"} if command == "COMMIT" else {}
        value = VALUES.get(name, "7")
        assert receive(connected(version), command, headers | both | {name: value})
        return
    with pytest.raises(RemoteProtocolError) as raised:
        receive(connected(version), command, headers | {name: "7"})
    reason = str(raised.value)
    assert reason.startswith(f"unknown header {name!r} of {command}: ")
    if name in BELONGS:
        assert reason.endswith(f": this header is for {BELONGS[name]}; leave it out")
    elif name in OF_MESSAGE:
        assert reason.endswith(": only the broker sets this header; leave it out")
    else:
        assert reason.endswith((", or leave the header out", "; leave it out"))
        assert command == "UNSUBSCRIBE" or all(each in reason for each in own_headers if each not in OF_MESSAGE)


def test_misspelt_header_before_the_login_is_refused_without_repeating_it() -> None:
    server = StompSession(session_id="me", identity="b1", server_name="truenext/1")
    with pytest.raises(RemoteProtocolError) as raised:
        list(server.receive(b"CONNECT\naccept-version:1.2\ntruenext-sekret:hush\n\n\0"))
    assert str(raised.value).startswith("unknown header of CONNECT; those that begin with truenext- are truenext-")
    assert "sekret" not in str(raised.value) and "hush" not in str(raised.value)


@pytest.mark.parametrize("command", ["ACK", "NACK"])
@pytest.mark.parametrize("version", [Version.V1_1, Version.V1_2])
def test_acknowledgement_may_repeat_the_headers_of_its_message(command: str, version: Version) -> None:
    fields = {"truenext-sequence": "5", "truenext-numer": "1", "truenext-express": "maybe", "truenext-producers": ""}
    assert receive(connected(version), command, FRAMES[command][0] | fields)


@pytest.mark.parametrize("name", [*SLIPS, "truenext-express", "truenext-delay"])
def test_on_send_our_own_names_are_the_user_s_but_for_those_that_are_understood(name: str) -> None:
    (send,) = receive(connected(), "SEND", {"destination": "/queue/a", name: "whatever"})
    assert f"{name}:whatever\n".encode() in send.message.header  # type: ignore[union-attr]


# ---- NACK ----


NACKED = {"id": "5@s"}


@pytest.mark.parametrize(
    ("headers", "is_rejected"),
    [
        ({}, False),
        ({"requeue": "true"}, False),
        ({"requeue": "false"}, True),
        ({"requeue": "False"}, True),
        ({"truenext-reject": "true", "requeue": "false"}, True),
        ({"truenext-reject": "false", "requeue": "true"}, False),
    ],
)
def test_requeue_false_is_poison(headers: dict[str, str], is_rejected: bool) -> None:
    (nack,) = receive(connected(), "NACK", NACKED | headers)
    assert isinstance(nack, Nack) and nack.is_rejected is is_rejected


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"requeue": "no"}, "requeue 'no' is not true or false"),
        (
            {"requeue": "false", "truenext-delay": "5"},
            "requeue:false rejects the message, which then has no next try for truenext-delay",
        ),
        ({"requeue": "false", "truenext-reject": "false"}, "truenext-reject 'false' and requeue 'false' disagree"),
        ({"requeue": "true", "truenext-reject": "true"}, "truenext-reject 'true' and requeue 'true' disagree"),
    ],
)
def test_a_requeue_that_contradicts_is_refused(headers: dict[str, str], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        receive(connected(), "NACK", NACKED | headers)


REJECTING = {"destination": "/queue/a", "transaction": "t", "truenext-reject": "true"}


@pytest.mark.parametrize(
    ("headers", "rejected_for"),
    [
        (REJECTING, ""),
        (REJECTING | {"truenext-cause": "no such\nitem"}, "no such\nitem"),
        (REJECTING | {"truenext-reject": "false"}, None),
        ({"destination": "/queue/a"}, None),
    ],
)
def test_send_that_rejects_its_message_states_a_cause_and_does_not_store_it(
    headers: dict[str, str], rejected_for: str | None
) -> None:
    # C11.13
    (send,) = receive(connected(), "SEND", headers)
    assert isinstance(send, Send)
    assert send.rejected_for == rejected_for
    assert b"truenext-" not in send.message.header


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"destination": "/queue/a", "truenext-reject": "true"}, "truenext-reject is for a SEND in a transaction"),
        (REJECTING | {"AMQ_SCHEDULED_DELAY": "5"}, "truenext-reject rejects the message at once"),
        (REJECTING | {"destination": "/topic/a"}, "truenext-reject is for a SEND to one queue"),
        (REJECTING | {"destination": "/queue/a,/queue/b"}, "truenext-reject is for a SEND to one queue"),
        (REJECTING | {"destination": "/queue/DLQ.a"}, "truenext-reject is for a SEND to one queue"),
        (REJECTING | {"truenext-cause": "x" * 5000}, "truenext-cause of 5000 bytes; at most 4096"),
        (REJECTING | {"truenext-reject": "maybe"}, "truenext-reject"),
    ],
)
def test_send_that_cannot_reject_its_message_is_refused_by_name(headers: dict[str, str], reason: str) -> None:
    # C11.13
    with pytest.raises(RemoteProtocolError, match=reason):
        receive(connected(), "SEND", headers)
