"""Tests that patterns and users agree with the oracle of grants."""

import os
from itertools import product

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.property import grants_oracle as oracle
from truenext.model.grants import Right, User, parse_pattern

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "200"))
RIGHTS = {
    "send": Right.SEND,
    "take": Right.TAKE,
    "browse": Right.BROWSE,
    "manage": Right.MANAGE,
}


@settings(max_examples=3 * EXAMPLES, deadline=None, database=None)
@given(oracle.pairs())
def test_pattern_covers_what_the_oracle_says(pair: tuple[str, str]) -> None:
    grant, requested = pair
    expected = oracle.covers(grant, requested)
    event(f"covers: {expected}")
    assert parse_pattern(grant).covers(parse_pattern(requested)) is expected, f"{grant!r} of {requested!r}"


@pytest.mark.parametrize(
    ("prefixes", "alphabet", "count_max"),
    [(("", "/topic/"), ("a", "DLQ", "*"), 3), (("",), ("Consumer", "VirtualTopic", "*"), 4)],
    ids=["three words", "four words of virtual topics"],
)
def test_short_patterns_cover_what_the_oracle_says(
    prefixes: tuple[str, ...], alphabet: tuple[str, ...], count_max: int
) -> None:
    """Compares all pairs of patterns."""
    texts = [
        prefix + ".".join([*words, *end])
        for prefix in prefixes
        for count in range(count_max + 1)
        for words in product(alphabet, repeat=count)
        for end in ((), (">",))
        if 1 <= len(words) + len(end) <= count_max
    ]
    parsed = {text: parse_pattern(text) for text in texts}
    wrong = [
        (grant, requested)
        for grant, requested in product(texts, repeat=2)
        if parsed[grant].covers(parsed[requested]) is not oracle.covers(grant, requested)
    ]
    assert wrong == []


@settings(max_examples=2 * EXAMPLES, deadline=None, database=None)
@given(st.data())
def test_user_may_do_what_the_oracle_says(data: st.DataObject) -> None:
    requested = data.draw(oracle.patterns(), label="requested")
    grants = data.draw(oracle.grants(requested), label="grants")
    user = User("shop", {RIGHTS[right]: [parse_pattern(text) for text in texts] for right, texts in grants.items()})
    for name, right in RIGHTS.items():
        expected = oracle.may(grants, name, requested)
        event(f"may: {expected}")
        assert user.may(right, parse_pattern(requested)) is expected, name


def test_monitor_and_admin_give_no_other_right() -> None:
    user = User("shop", {}, is_monitor=True, is_admin=True)
    assert not any(user.may(right, parse_pattern(text)) for right in Right for text in ("a", "/topic/a"))


_names = st.text("ab.-_", min_size=1, max_size=4)


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(
    _names.flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.lists(_names, max_size=2),
            _names | st.just(name) | _names.map(lambda end: name + end) | _names.map(lambda end: f"{name}.{end}"),
        )
    )
)
def test_client_ids_of_a_user_are_those_of_the_oracle(drawn: tuple[str, list[str], str]) -> None:
    name, client_ids, client_id = drawn
    user = User(name, {}, client_ids)
    for text in (client_id, *client_ids):
        expected = oracle.owns_client_id(name, client_ids, text)
        event(f"owns: {expected}")
        assert user.owns_client_id(text) is expected, text


@pytest.mark.parametrize(
    ("grant", "requested", "is_covered"),
    [
        ("orders.>", "orders.>", True),
        (">", "orders.>", True),
        ("orders.new", "orders.>", False),
        ("orders.>", "orders", False),
        ("orders.*", "orders.new.old", False),
        (">", "DLQ.orders", False),
        (">", "DLQ", True),
        ("*.*", "Spark.sink", False),
        ("*", "Consumer", True),
        (">", "Consumer.orders", True),
        (">", "Consumer.orders.VirtualTopic", True),
        (">", "Consumer.orders.VirtualTopic.new", False),
        (">", "Consumer.>", False),
        (">", "Consumer.orders.*.new", False),
        ("*.*.VirtualTopic.>", "Consumer.orders.VirtualTopic.new", False),
        ("Consumer.*.VirtualTopic.>", "Consumer.orders.VirtualTopic.new", True),
        ("DLQ.>", "DLQ.orders", True),
        (">", "/topic/orders", False),
        ("/topic/>", "/topic/DLQ.orders", True),
        ("/topic/*.*", "/topic/*.>", False),
    ],
)
def test_oracle_agrees_with_the_examples_of_the_page(grant: str, requested: str, is_covered: bool) -> None:
    """Words of the page that the alphabet of the oracle lacks are replaced by its words."""
    substitutes = {"orders": "a", "new": "dlq", "old": "DLQ", "sink": "a"}
    for word, substitute in substitutes.items():
        grant, requested = grant.replace(word, substitute), requested.replace(word, substitute)
    assert oracle.covers(grant, requested) is is_covered
    assert parse_pattern(grant).covers(parse_pattern(requested)) is is_covered


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/queue/",
        "/topic/",
        "a..*",
        ".>",
        "a.>.b",
        ">.a",
        "a*",
        "a.b>",
        "/temp-queue/a",
        "/other/a",
        "/queue/a,/topic/b",
    ],
)
def test_text_that_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_pattern(text)
