"""Tests that compiled selectors agree with the oracle for random selectors and messages."""

import os
import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.property.selector_oracle import Node, conditions, matches, messages, respelled, written
from truenext.errors import RemoteProtocolError
from truenext.model.message import SentMessage
from truenext.model.order import rank
from truenext.model.selector import are_equivalent, compile_selector

EXAMPLES = int(os.environ.get("TRUENEXT_EXAMPLES", "200"))

_WORDS = (
    *("AND", "OR", "NOT", "BETWEEN", "IN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "a", "b", "JMSPriority", "JMSXa"),
    *("hyphenated_props:", "convert_string_expressions:", "a-b", "content-type", "truenext_attempts"),
    *("'a%_'", "'", "(", ")", ",", "1", "0x", "08", "1.5", "1e999", "9" * 30, *"=<>+-*/. \t\n\0é$", "<>", "<=", ">="),
)


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(conditions, st.lists(messages(), min_size=1, max_size=4), st.booleans())
def test_selector_matches_the_messages_that_the_oracle_matches(
    node: Node, sent: list[tuple[SentMessage, dict[str, str]]], is_converted: bool
) -> None:
    text = written(node, is_converted=is_converted)
    compiled = compile_selector(text)
    for message, headers in sent:
        is_match = matches(node, message, headers)
        assert compiled.matches(message) is is_match, f"{text!r} of {message}"
        assert not is_match or rank(message.priority) in compiled.ranks, f"{text!r} of {message}"
        if is_match and compiled.required is not None:
            its, texts = compiled.required
            assert its.value_in(message.header) in texts, f"{text!r} of {message}"


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(conditions, conditions, messages())
def test_respelled_selector_is_equivalent(node: Node, other: Node, sent: tuple[SentMessage, dict[str, str]]) -> None:
    text = written(node)
    assert are_equivalent(text, respelled(text))
    assert are_equivalent(text, written(node, is_grouped=True))
    assert not are_equivalent(text, written(other)) or matches(node, *sent) is matches(other, *sent)


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(
    st.lists(st.sampled_from(_WORDS), max_size=12).map(" ".join)
    | st.lists(st.sampled_from(_WORDS), max_size=12).map("".join)
    | st.text(string.printable)
    | st.text()
)
@example("a LIKE '\\' ESCAPE '\\'")
@example("\ud800")
def test_random_text_is_compiled_or_refused_with_the_position_of_the_fault(text: str) -> None:
    try:
        compiled = compile_selector(text)
    except RemoteProtocolError as error:
        assert "at character" in str(error) or "at its end" in str(error)
    else:
        compiled.matches(SentMessage(4, True, 0, "a:1\nb:x\né:\n".encode(), b""))


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("a = 'x'", {"x"}),
        ("'x' = a AND b > 1", {"x"}),
        ("(c < 3 AND (a = 'x'))", {"x"}),
        ("JMSPriority > 6 AND a IN ('x', 'y')", {"x", "y"}),
        ("a <> 'x'", None),
        ("a NOT IN ('x')", None),
        ("NOT a = 'x'", None),
        ("a = 'x' OR b = 'y'", None),
        ("a = 1", None),
        ("a = b", None),
        ("JMSDeliveryMode = 'PERSISTENT'", None),
        ("JMSDeliveryMode IN ('PERSISTENT')", None),
    ],
)
def test_required_values_of_a_property_are_derived_from_the_selector(text: str, texts: set[str] | None) -> None:
    required = compile_selector(text).required
    assert (required and required[1]) == texts
    if required is not None:
        assert required[0].value_in(b"xa:0\na:\\\\1\n") == "\\1"
        assert required[0].value_in(b"a:\n") == ""
        assert required[0].value_in(b"aa:x\n") is None


@pytest.mark.parametrize("length", [1, 8, 9, 40])
def test_selector_of_many_properties_finds_each_under_either_spelling(length: int) -> None:
    compiled = compile_selector(" AND ".join(f"p_{number} = '{number}'" for number in range(length)))
    hyphens = b"".join(b"p-%d:%d\n" % (number, number) for number in range(length))
    assert compiled.matches(SentMessage(4, True, 0, hyphens, b""))
    assert compiled.matches(SentMessage(4, True, 0, hyphens.replace(b"p-0:0", b"p-0:9\np_0:0"), b""))
    assert not compiled.matches(SentMessage(4, True, 0, hyphens.replace(b"p-0:0", b"p-0:0\np_0:9"), b""))
    assert not compiled.matches(SentMessage(4, True, 0, hyphens.replace(b"p-0:0", b"p.0:0"), b""))


@pytest.mark.parametrize("length", [1, 8, 9, 40])
def test_selector_of_many_properties_finds_each(length: int) -> None:
    compiled = compile_selector(" AND ".join(f"p{number} = '{number}\n'" for number in range(length)))
    header = b"".join(b"p%d:%d\\n\n" % (number, number) for number in range(length))
    assert compiled.matches(SentMessage(4, True, 0, header, b""))
    assert not compiled.matches(SentMessage(4, True, 0, header.replace(b"p0:0", b"p0:9"), b""))
    assert not compiled.matches(SentMessage(4, True, 0, header.replace(b"p0:", b"xp0:"), b""))
