"""Tests that encoded header lines are decoded unchanged, each on a line of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.model.header_lines import decode_header_lines, encode_header_lines, escape, unescape

TEXTS = st.text(st.sampled_from("\\\r\n:crn \u00e9\u2028"), max_size=10) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=10
)


@given(TEXTS)
def test_escaped_text_is_unescaped_to_the_original(text: str) -> None:
    assert unescape(escape(text)) == text


@given(TEXTS)
def test_escaped_text_has_no_line_end_and_no_colon(text: str) -> None:
    assert not set("\r\n:") & set(escape(text))


@given(TEXTS, TEXTS)
def test_different_texts_stay_different(first: str, second: str) -> None:
    assert (escape(first) == escape(second)) == (first == second)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [("\r", "\\r"), ("\n", "\\n"), (":", "\\c"), ("\\", "\\\\"), ("\\r", "\\\\r"), ("\t\0\u00e9 /", "\t\0\u00e9 /")],
)
def test_the_escapes_are_those_of_stomp_1_2(text: str, escaped: str) -> None:
    """1.2, "Value Encoding"."""
    assert escape(text) == escaped
    assert unescape(escaped) == text


@pytest.mark.parametrize("text", ["\\t", "\\", "a\\", "\\\\\\", "\\\n", "\\C", "\\x41"])
def test_unknown_escape_is_an_error(text: str) -> None:
    with pytest.raises(KeyError):
        unescape(text)


@given(st.dictionaries(TEXTS, TEXTS))
def test_headers_come_back_in_their_order(headers: dict[str, str]) -> None:
    header = encode_header_lines(headers)
    assert list(decode_header_lines(header).items()) == list(headers.items())
    assert header.count(b"\n") == len(headers)
    assert header[-1:] in (b"", b"\n")


def test_first_value_of_a_repeated_name_counts() -> None:
    """1.2, "Repeated Header Entries"."""
    assert decode_header_lines(b"a:1\nb:2\na:3\n") == {"a": "1", "b": "2"}


def test_a_header_is_utf_8() -> None:
    assert encode_header_lines({"\u00e9": "\u20ac"}) == "\u00e9:\u20ac\n".encode()
    assert decode_header_lines("\u00e9:\u20ac\n".encode()) == {"\u00e9": "\u20ac"}


def test_no_headers_are_no_lines() -> None:
    assert encode_header_lines({}) == b""
    assert decode_header_lines(b"") == {}
