"""Tests of addresses: the destinations they mean, and the invalid ones that are refused."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.errors import RemoteProtocolError
from truenext.model.destination import (
    DEAD_LETTER_PREFIX,
    Destination,
    DestinationKind,
    dead_letter_name,
    durable_key,
    durable_subscription,
    parse_address,
    parse_queue_name,
    parse_stored_address,
    split_options,
)
from truenext.model.limits import DESTINATION_LENGTH_MAX, DURABLE_LENGTH_MAX

LONGEST = "x" * (DESTINATION_LENGTH_MAX - len(DEAD_LETTER_PREFIX))


@pytest.mark.parametrize(
    ("address", "destination"),
    [
        ("/queue/orders", Destination(DestinationKind.QUEUE, "orders")),
        ("/queue/a/b c.\u20ac", Destination(DestinationKind.QUEUE, "a/b c.\u20ac")),
        ("/queue/DLQ.orders", Destination(DestinationKind.QUEUE, "DLQ.orders")),
        ("/queue/" + LONGEST, Destination(DestinationKind.QUEUE, LONGEST)),
        ("/temp-queue/r", Destination(DestinationKind.TEMPORARY, "/me/r", "me")),
        ("/temp-queue/r/s", Destination(DestinationKind.TEMPORARY, "/me/r/s", "me")),
        ("/remote-temp-queue/you/r", Destination(DestinationKind.TEMPORARY, "/you/r", "you")),
        ("/remote-temp-queue/you/r/s", Destination(DestinationKind.TEMPORARY, "/you/r/s", "you")),
        ("/control/status", Destination(DestinationKind.CONTROL, "status")),
        ("/topic/news", Destination(DestinationKind.TOPIC, "news")),
        ("/topic/news.*.>", Destination(DestinationKind.TOPIC_PATTERN, "news.*.>")),
        ("/temp-topic/t", Destination(DestinationKind.TOPIC, "/me/t", "me")),
        ("/remote-temp-topic/you/t", Destination(DestinationKind.TOPIC, "/you/t", "you")),
        ("orders", Destination(DestinationKind.QUEUE, "orders")),
        ("DLQ.orders", Destination(DestinationKind.QUEUE, "DLQ.orders")),
        ("orders.>", Destination(DestinationKind.QUEUE_PATTERN, "orders.>")),
        (LONGEST, Destination(DestinationKind.QUEUE, LONGEST)),
        ("/subscription/me?,a?b", Destination(DestinationKind.DURABLE, "me?,a?b")),
    ],
)
def test_an_address_means_one_destination(address: str, destination: Destination) -> None:
    assert parse_address(address, "me") == destination


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "unknown destination"),
        ("queue/orders", "unknown destination 'queue/orders': here it is '/queue/orders'"),
        ("topic/news", "unknown destination 'topic/news': here it is '/topic/news'"),
        ("orders:new", "unknown destination"),
        ("queue:orders", "unknown destination"),
        ("queue://orders", "here it is '/queue/orders'"),
        ("topic://news", "here it is '/topic/news'"),
        ("temp-queue://r", "here it is '/temp-queue/r'"),
        ("temp-topic://t", "here it is '/temp-topic/t'"),
        ("a/b", "unknown destination"),
        (LONGEST + "x", f"at most {len(LONGEST)}"),
        ("/Queue/orders", "unknown destination"),
        ("/queue", "unknown destination"),
        (" /queue/a", "unknown destination"),
        ("/amq/queue/a/b", "here it is '/queue/a/b'"),
        ("/reply-queue/a", "here a reply is sent to the destination in the MESSAGE's reply-to"),
        ("/queue/", "has no name"),
        ("/temp-queue/", "has no name"),
        ("/control/", "has no name"),
        ("/remote-temp-queue/", "has no name"),
        (
            "/remote-temp-queue/r",
            "'/remote-temp-queue/r': use '/temp-queue/r' for a temporary queue or topic of this "
            "connection, and the reply-to",
        ),
        (
            "/remote-temp-topic/t",
            "'/remote-temp-topic/t': use '/temp-topic/t' for a temporary queue or topic of this "
            "connection, and the reply-to",
        ),
        ("/remote-temp-queue/you/", "has no name"),
        ("/queue//a", "begin"),
        ("/temp-queue//you/r", "begin"),
        ("/remote-temp-queue/you//r", "begin"),
        ("/queue/" + LONGEST + "x", f"at most {len(LONGEST)}"),
        ("/temp-queue/" + LONGEST + "x", f"at most {len(LONGEST)}"),
        ("/remote-temp-queue/you/" + LONGEST + "x", f"at most {len(LONGEST)}"),
        ("/queue/a\nb", "cannot be printed"),
        ("/queue/a\x7f", "cannot be printed"),
        ("/queue/\u200b", "cannot be printed"),
        ("/queue/\x00", "cannot be printed"),
        ("/topic/", "has no name"),
        ("/topic//me/news", "begin"),
        ("/topic/a.>.b", "only as the last word"),
        ("/topic/a*", "are whole words"),
        ("/topic/a..*", "empty word"),
        ("/topic/*\n", "are whole words"),
        ("/temp-topic/a.*", "are for subscriptions"),
        (
            "/queue/a,b",
            "unknown destination 'b': each part of a composite destination must begin with /queue/ or /topic/",
        ),
        ("/topic/a,b", "unknown destination 'b'"),
        ("orders,/queue/b", "unknown destination 'orders'"),
        ("a,b", "unknown destination 'a'"),
        ("/queue/a,", "unknown destination"),
        ("/queue/a?b", "option 'b' of '/queue/a.b': options are for SUBSCRIBE"),
        ("a?b=1", "option 'b' of 'a.b=1'"),
        ("/queue/a?b=/topic/c,>", "option 'b'"),
        ("/topic/a?", "option '' of"),
        (",".join(["/queue/a"] * 101), "101 parts; at most 100"),
        ("/dsub/news", "a durable subscription is a SUBSCRIBE to its /topic/NAME with durable:true"),
        ("/exchange/amq.topic/news", "there are no exchanges here; use /topic/NAME for all subscribers"),
        ("/queue/a.>.b", "only as the last word"),
        ("/queue/a*", "are whole words"),
        ("/queue/a,/queue/b.*", "is for SUBSCRIBE only"),
    ],
)
def test_an_address_that_means_nothing_is_refused_and_says_why(address: str, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        parse_address(address, "me")


@pytest.mark.parametrize("session", ["", "s" * (DESTINATION_LENGTH_MAX + 1), "a\nb", "a*", "\x00"])
def test_the_session_of_a_remote_address_obeys_the_rules_of_names(session: str) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_address(f"/remote-temp-queue/{session}/r", "me")


def test_a_durable_subscription_has_a_name_of_which_its_dead_letter_queue_can_have_one() -> None:
    client, name = "c" * 37, "n" * (DURABLE_LENGTH_MAX - 37)
    subscription = durable_subscription(durable_key(client, name), "t", "colour IN ('red', 'blue')")
    assert subscription.name == f"subscription,{client},{name},t,colour IN ('red', 'blue')"
    assert len(dead_letter_name(subscription.name)) == DESTINATION_LENGTH_MAX
    with pytest.raises(RemoteProtocolError, match=f"of {DURABLE_LENGTH_MAX + 1} characters together; at most"):
        durable_key(client, name + "n")


NAMES = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="*>,/?"), min_size=1, max_size=20)


@given(NAMES, st.sampled_from(["/queue/", "/topic/", "/temp-queue/", "/temp-topic/", "/control/"]))
def test_address_of_a_destination_means_the_same_for_each_connection(name: str, prefix: str) -> None:
    destination = parse_address(prefix + name, "me")
    assert parse_address(destination.address, "me") == parse_address(destination.address, "you") == destination


def test_parts_of_a_composite_destination_mean_the_same_as_alone() -> None:
    composite = parse_address("/queue/a, /topic/b,/temp-queue/c", "me")
    assert composite.parts == tuple(parse_address(each, "me") for each in ("/queue/a", "/topic/b", "/temp-queue/c"))
    assert composite.is_multi_queue


@given(NAMES, NAMES)
def test_no_queue_shares_its_name_with_a_temporary_queue(name: str, other: str) -> None:
    names = {
        parse_address("/queue/" + name, "me").name,
        parse_address(f"/queue/me/{name}", "me").name,
        parse_address("/temp-queue/" + name, "me").name,
        parse_address("/temp-queue/" + name, "you").name,
    }
    assert len(names) == 4


def test_a_temporary_queue_belongs_to_the_connection_that_names_it() -> None:
    assert parse_address("/temp-queue/r", "me") != parse_address("/temp-queue/r", "you")
    assert parse_address("/temp-queue/r", "me") == parse_address("/remote-temp-queue/me/r", "you")


def test_a_dead_letter_queue_is_named_after_its_queue() -> None:
    assert dead_letter_name("orders") == "DLQ.orders"
    assert parse_address("/queue/" + dead_letter_name("orders"), "me").name.startswith(DEAD_LETTER_PREFIX)


def test_the_longest_name_of_a_queue_still_has_a_dead_letter_queue() -> None:
    assert parse_address(f"/queue/{dead_letter_name(LONGEST)}", "s").name == f"DLQ.{LONGEST}"


# ---- Options ----


@pytest.mark.parametrize(
    ("address", "bare", "options"),
    [
        ("/queue/a", "/queue/a", {}),
        ("/queue/a?b=c", "/queue/a", {"b": "c"}),
        ("/queue/a?b=c&d=e=f", "/queue/a", {"b": "c", "d": "e=f"}),
        ("/queue/a?b=", "/queue/a", {"b": ""}),
        ("/topic/>?b=c,d?e", "/topic/>", {"b": "c,d?e"}),
        ("a?b=%2C%3F%26%25+%2B", "a", {"b": ",?&% +"}),
        ("/subscription/me?,a?b", "/subscription/me?,a?b", {}),
    ],
)
def test_options_are_split_from_an_address(address: str, bare: str, options: dict[str, str]) -> None:
    assert split_options(address) == (bare, options)


@given(st.dictionaries(NAMES.map(lambda name: quote(name, safe="")), st.text(), max_size=3))
def test_percent_encoded_options_are_decoded(options: dict[str, str]) -> None:
    written = "&".join(f"{name}={quote(value, safe='')}" for name, value in options.items())
    assert split_options(f"/queue/a?{written}" if options else "/queue/a") == ("/queue/a", options)


@given(st.text(st.sampled_from("?=&%+25,a")))
def test_options_are_read_or_refused(text: str) -> None:
    try:
        bare, _ = split_options(f"/queue/a{text}")
    except RemoteProtocolError:
        return
    assert "?" not in bare


def test_stored_address_with_a_question_mark_is_still_parsed() -> None:
    assert parse_stored_address("/topic/a?b") == Destination(DestinationKind.TOPIC, "a?b")
    assert [part.name for part in parse_stored_address("/queue/a?b,/topic/c?d").parts] == ["a?b", "c?d"]
    with pytest.raises(RemoteProtocolError, match="not allowed in names"):
        parse_queue_name("a?b")
