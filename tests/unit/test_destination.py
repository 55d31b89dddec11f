"""Which queue does an address mean, and is everything refused that means none?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.destination import DEAD_LETTER_PREFIX, Destination, Kind, dead_letter_name, parse
from truenext.errors import RemoteProtocolError
from truenext.limits import DESTINATION_LENGTH_MAX

LONGEST = "x" * (DESTINATION_LENGTH_MAX - len(DEAD_LETTER_PREFIX))


@pytest.mark.parametrize(
    ("address", "destination"),
    [
        ("/queue/orders", Destination(Kind.QUEUE, "orders")),
        ("/queue/a/b c.\u20ac", Destination(Kind.QUEUE, "a/b c.\u20ac")),
        ("/queue/DLQ.orders", Destination(Kind.QUEUE, "DLQ.orders")),
        ("/queue/" + LONGEST, Destination(Kind.QUEUE, LONGEST)),
        ("/temp-queue/r", Destination(Kind.TEMPORARY, "/me/r", "me")),
        ("/temp-queue/r/s", Destination(Kind.TEMPORARY, "/me/r/s", "me")),
        ("/remote-temp-queue/you/r", Destination(Kind.TEMPORARY, "/you/r", "you")),
        ("/remote-temp-queue/you/r/s", Destination(Kind.TEMPORARY, "/you/r/s", "you")),
        ("/control/status", Destination(Kind.CONTROL, "status")),
        ("/topic/news", Destination(Kind.TOPIC, "news")),
        ("/topic/news.*.>", Destination(Kind.PATTERN, "news.*.>")),
        ("/temp-topic/t", Destination(Kind.TOPIC, "/me/t", "me")),
        ("/remote-temp-topic/you/t", Destination(Kind.TOPIC, "/you/t", "you")),
    ],
)
def test_an_address_means_one_destination(address: str, destination: Destination) -> None:
    assert parse(address, "me") == destination


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "unknown destination"),
        ("orders", "unknown destination"),
        ("queue/orders", "unknown destination"),
        ("/Queue/orders", "unknown destination"),
        ("/queue", "unknown destination"),
        (" /queue/a", "unknown destination"),
        ("/amq/queue/a", "unknown destination"),
        ("/queue/", "has no name"),
        ("/temp-queue/", "has no name"),
        ("/control/", "has no name"),
        ("/remote-temp-queue/", "has no name"),
        ("/remote-temp-queue/you", "has no name"),
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
        ("/topic/a.>.b", "only at its end"),
        ("/topic/a*", "stand for whole words"),
        ("/topic/a..*", "empty word"),
        ("/topic/*\n", "stand for whole words"),
        ("/temp-topic/a.*", "are for subscriptions"),
        ("/queue/a,b", "unknown destination 'b'"),
        ("/queue/a,", "unknown destination"),
        (",".join(["/queue/a"] * 101), "101 parts; at most 100"),
        ("/dsub/news", "durable subscriptions by such an address are not supported yet"),
        ("/exchange/news", "exchanges are not supported yet"),
        ("/queue/a.>.b", "only at its end"),
        ("/queue/a*", "stand for whole words"),
        ("/queue/a,/queue/b.*", "can only be subscribed to"),
    ],
)
def test_an_address_that_means_nothing_is_refused_and_says_why(address: str, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        parse(address, "me")


@pytest.mark.parametrize("session", ["", "s" * (DESTINATION_LENGTH_MAX + 1), "a\nb", "a*", "\x00"])
def test_the_session_of_a_remote_address_obeys_the_rules_of_names(session: str) -> None:
    with pytest.raises(RemoteProtocolError):
        parse(f"/remote-temp-queue/{session}/r", "me")


NAMES = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="*>,/"), min_size=1, max_size=20)


@given(NAMES, st.sampled_from(["/queue/", "/topic/", "/temp-queue/", "/temp-topic/", "/control/"]))
def test_the_address_of_a_destination_means_it_for_everybody(name: str, prefix: str) -> None:
    destination = parse(prefix + name, "me")
    assert parse(destination.address, "me") == parse(destination.address, "you") == destination


def test_a_composite_destination_has_parts_each_of_which_means_what_it_means_alone() -> None:
    composite = parse("/queue/a, /topic/b,/temp-queue/c", "me")
    assert composite.parts == tuple(parse(each, "me") for each in ("/queue/a", "/topic/b", "/temp-queue/c"))
    assert composite.is_spread


@given(NAMES, NAMES)
def test_no_queue_shares_its_name_with_a_temporary_queue(name: str, other: str) -> None:
    names = {
        parse("/queue/" + name, "me").name,
        parse(f"/queue/me/{name}", "me").name,
        parse("/temp-queue/" + name, "me").name,
        parse("/temp-queue/" + name, "you").name,
    }
    assert len(names) == 4


def test_a_temporary_queue_belongs_to_the_connection_that_names_it() -> None:
    assert parse("/temp-queue/r", "me") != parse("/temp-queue/r", "you")
    assert parse("/temp-queue/r", "me") == parse("/remote-temp-queue/me/r", "you")


def test_a_dead_letter_queue_is_named_after_its_queue() -> None:
    assert dead_letter_name("orders") == "DLQ.orders"
    assert parse("/queue/" + dead_letter_name("orders"), "me").name.startswith(DEAD_LETTER_PREFIX)


def test_the_longest_name_of_a_queue_still_has_a_dead_letter_queue() -> None:
    assert parse(f"/queue/{dead_letter_name(LONGEST)}", "s").name == f"DLQ.{LONGEST}"
