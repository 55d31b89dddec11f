"""Tests of the choice of a queue's policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.model.pattern import matches
from truenext.model.policy import Policies, Policy

NAMES = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4)
PATTERNS = st.builds(
    lambda words, last: [*words, last], st.lists(st.sampled_from(["a", "b", "*"]), max_size=3), st.sampled_from("*>a")
)


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        ("orders", ["orders"], ["orders.new", "order", "Orders"]),
        ("orders.*", ["orders.new", "orders.old"], ["orders", "orders.new.eu", "other.new"]),
        ("orders.>", ["orders.new", "orders.new.eu"], ["orders", "other.new"]),
        ("*.new", ["orders.new"], ["new", "orders.old", "a.b.new"]),
        (">", ["a", "a.b.c"], []),
    ],
)
def test_a_pattern_stands_for_these_names_and_no_others(pattern: str, names: list[str], others: list[str]) -> None:
    words = pattern.split(".")
    assert all(matches(words, name.split(".")) for name in names)
    assert not any(matches(words, name.split(".")) for name in others)


def test_the_most_specific_pattern_counts_wherever_it_stands() -> None:
    patterns = "orders.new.eu orders.new.* orders.new.> orders.*.eu orders.*.* orders.> *.new.eu >".split()  # noqa: SIM905
    for order in (patterns, patterns[::-1]):
        for first in range(len(patterns)):
            remaining = [pattern for pattern in order if patterns.index(pattern) >= first]
            policies = Policies(by_pattern={one: Policy(page_size=1 + patterns.index(one)) for one in remaining})
            assert policies.for_queue("orders.new.eu").page_size == 1 + first


def test_queue_that_no_pattern_matches_has_the_default_policy() -> None:
    policies = Policies(Policy(page_size=5), {"a.*": Policy(page_size=6)})
    assert (policies.for_queue("a").page_size, policies.for_queue("a.b").page_size) == (5, 6)


def test_a_policys_pattern_means_queues_that_a_consumers_pattern_leaves_out_too() -> None:
    # C13.1
    policies = Policies(by_pattern={">": Policy(page_size=5), "*.source.>": Policy(page_size=6)})
    names = ("DLQ.orders", "Consumer.a.VirtualTopic.t", "Spark.orders", "Spark.source.s.1.0")
    assert [policies.for_queue(name).page_size for name in names] == [5, 5, 5, 6]


def _matches(pattern: list[str], words: list[str]) -> bool:
    """Match by the definition: `*` is one word, `>` one or more."""
    if not pattern or not words:
        return not pattern and not words
    if pattern == [">"]:
        return True
    return pattern[0] in ("*", words[0]) and _matches(pattern[1:], words[1:])


@given(PATTERNS, NAMES)
def test_pattern_matches_by_its_definition(pattern: list[str], words: list[str]) -> None:
    assert matches(pattern, words) is _matches(pattern, words)
