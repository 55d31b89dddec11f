"""Tests that selectors mean what JMS 2.0, section 3.8.1, says."""

import re

import pytest

from truenext.errors import RemoteProtocolError
from truenext.model.header_lines import HOP_BY_HOP_HEADERS, encode_header_lines
from truenext.model.limits import SELECTOR_DEPTH_MAX, SELECTOR_LENGTH_MAX, SELECTOR_SCAN_MAX
from truenext.model.message import SentMessage
from truenext.model.order import rank
from truenext.model.selector import are_equivalent, compile_selector, compile_stored_selector

TRUE, FALSE, UNKNOWN = "TRUE", "FALSE", "unknown"
_SPELLED = {TRUE: "yes", FALSE: "no", UNKNOWN: "missing"}


def message(headers: dict[str, str]) -> SentMessage:
    return SentMessage(4, True, 0, encode_header_lines(headers), b"", 1000)


def outcome(text: str, of: SentMessage) -> str:
    if compile_selector(text).matches(of):
        return TRUE
    return FALSE if compile_selector(f"NOT ({text})").matches(of) else UNKNOWN


@pytest.mark.parametrize(
    ("left", "right", "both", "either"),
    [
        (TRUE, TRUE, TRUE, TRUE),
        (TRUE, FALSE, FALSE, TRUE),
        (TRUE, UNKNOWN, UNKNOWN, TRUE),
        (FALSE, TRUE, FALSE, TRUE),
        (FALSE, FALSE, FALSE, FALSE),
        (FALSE, UNKNOWN, FALSE, UNKNOWN),
        (UNKNOWN, TRUE, UNKNOWN, TRUE),
        (UNKNOWN, FALSE, FALSE, UNKNOWN),
        (UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN),
    ],
)
def test_and_and_or_have_the_truth_tables_of_the_specification(left: str, right: str, both: str, either: str) -> None:
    of = message({"yes": "true", "no": "false"})
    assert outcome(f"{_SPELLED[left]} AND {_SPELLED[right]}", of) == both
    assert outcome(f"{_SPELLED[left]} OR {_SPELLED[right]}", of) == either


@pytest.mark.parametrize(("value", "negated"), [(TRUE, FALSE), (FALSE, TRUE), (UNKNOWN, UNKNOWN)])
def test_not_has_the_truth_table_of_the_specification(value: str, negated: str) -> None:
    of = message({"yes": "true", "no": "false"})
    assert outcome(f"NOT {_SPELLED[value]}", of) == negated
    assert outcome(f"NOT NOT {_SPELLED[value]}", of) == value


@pytest.mark.parametrize(
    ("text", "headers", "expected"),
    [
        # The examples of the specification.
        (
            "JMSType = 'car' AND color = 'blue' AND weight > 2500",
            {"type": "car", "color": "blue", "weight": "2501"},
            TRUE,
        ),
        ("JMSType = 'car' AND color = 'blue' AND weight > 2500", {"type": "car", "color": "blue"}, UNKNOWN),
        ("age BETWEEN 15 AND 19", {"age": "15"}, TRUE),
        ("age BETWEEN 15 AND 19", {"age": "19.0"}, TRUE),
        ("age BETWEEN 15 AND 19", {"age": "20"}, FALSE),
        ("age BETWEEN 15 AND 19", {}, UNKNOWN),
        ("age NOT BETWEEN 15 AND 19", {"age": "17"}, FALSE),
        ("age NOT BETWEEN 15 AND 19", {"age": "14"}, TRUE),
        ("age NOT BETWEEN 15 AND 19", {}, UNKNOWN),
        ("5 BETWEEN missing AND 4", {}, FALSE),
        ("Country IN ('UK', 'US', 'France')", {"Country": "UK"}, TRUE),
        ("Country IN ('UK', 'US', 'France')", {"Country": "Peru"}, FALSE),
        ("Country IN ('UK', 'US', 'France')", {}, UNKNOWN),
        ("Country NOT IN ('UK', 'US', 'France')", {"Country": "Peru"}, TRUE),
        ("Country NOT IN ('UK', 'US', 'France')", {}, UNKNOWN),
        ("phone LIKE '12%3'", {"phone": "123"}, TRUE),
        ("phone LIKE '12%3'", {"phone": "12993"}, TRUE),
        ("phone LIKE '12%3'", {"phone": "1234"}, FALSE),
        ("word LIKE 'l_se'", {"word": "lose"}, TRUE),
        ("word LIKE 'l_se'", {"word": "loose"}, FALSE),
        (r"underscored LIKE '\_%' ESCAPE '\'", {"underscored": "_foo"}, TRUE),
        (r"underscored LIKE '\_%' ESCAPE '\'", {"underscored": "bar"}, FALSE),
        ("phone NOT LIKE '12%3'", {"phone": "1234"}, TRUE),
        ("phone LIKE '12%3'", {}, UNKNOWN),
        ("phone NOT LIKE '12%3'", {}, UNKNOWN),
        ("prop_name IS NULL", {}, TRUE),
        ("prop_name IS NULL", {"prop_name": ""}, FALSE),
        ("prop_name IS NOT NULL", {"prop_name": ""}, TRUE),
        ("prop_name IS NOT NULL", {}, FALSE),
        ("literal = 'literal''s'", {"literal": "literal's"}, TRUE),
        # Keywords in any case, properties in one.
        ("a iS nOt nULL aNd (tRUE oR a In ('x'))", {"a": ""}, TRUE),
        ("A = 'x'", {"a": "x"}, UNKNOWN),
        ("nothing = 'x' AND android = 'y'", {"nothing": "x", "android": "y"}, TRUE),
        # What binds tighter.
        ("TRUE OR TRUE AND FALSE", {}, TRUE),
        ("NOT FALSE AND FALSE", {}, FALSE),
        ("1 + 2 * 3 = 7 AND (1 + 2) * 3 = 9 AND 7 - 2 - 1 = 4 AND 8 / 4 / 2 = 1", {}, TRUE),
        ("- 2 + 3 = 1 AND 2 - -3 = 5 AND +-+2 = - +2", {}, TRUE),
        # Whole numbers are divided towards zero, as in Java; what has no result is unknown.
        ("7 / 2 = 3 AND -7 / 2 = -3 AND 7 / -2 = -3 AND 7 / 2.0 = 3.5", {}, TRUE),
        ("1 / 0 = 1", {}, UNKNOWN),
        ("9223372036854775807 + 1 > 0", {}, UNKNOWN),
        ("-9223372036854775808 < 0", {}, TRUE),
        # The literals of Java.
        ("010 = 8 AND 0x10 = 16 AND 0XffL = 255 AND 10l = 10 AND 0 = 00", {}, TRUE),
        ("7. = 7 AND .5 = 0.5 AND 1e1 = 10 AND 5E-1 = .5 AND 2f = 2 AND 2.5D = 2.5", {}, TRUE),
        # STOMP's text, where it meets another kind.
        ("a = 1 AND a < 1.5 AND a = 1.0 AND a + 1 = 2", {"a": "1"}, TRUE),
        ("a = '1'", {"a": "1.0"}, FALSE),
        ("a / 2 = 3", {"a": "7"}, TRUE),
        ("a = 9007199254740992", {"a": "9007199254740993"}, FALSE),
        ("a = 10", {"a": "1e1"}, TRUE),
        ("a = 10", {"a": "0xA"}, FALSE),
        ("a > 1", {"a": "red"}, FALSE),
        ("a <> 1", {"a": "red"}, FALSE),
        ("a BETWEEN 1 AND 2", {"a": "red"}, FALSE),
        ("a + 1 > 1", {"a": "red"}, UNKNOWN),
        ("a > 1", {"a": " 2"}, FALSE),
        ("a > 1", {"a": "٣"}, FALSE),
        ("a > 1", {"a": "2_000"}, FALSE),
        ("a = a", {"a": "NaN"}, TRUE),
        ("a > 1", {"a": "nan"}, FALSE),
        ("a > 1", {"a": "9" * 30}, TRUE),
        ("a > 1", {"a": "9" * 41}, FALSE),
        ("a = b", {"a": "1", "b": "1.0"}, FALSE),
        ("a >= b AND a <= b", {"a": "1", "b": "1.0"}, TRUE),
        ("a = TRUE AND a", {"a": "True"}, TRUE),
        ("a <> TRUE", {"a": "false"}, TRUE),
        ("a <> TRUE", {"a": "perhaps"}, FALSE),
        ("a", {"a": "perhaps"}, UNKNOWN),
        ("(a > 1) = TRUE", {"a": "2"}, TRUE),
        ("(a > 1) = FALSE", {}, UNKNOWN),
        # Header lines as they stand in a message.
        ("a = 'x:y\n\\z'", {"a": "x:y\n\\z"}, TRUE),
        ("größe = 'é'", {"größe": "é"}, TRUE),
        ("a = '1'", {"xa": "2", "b": "a:3", "a": "1", "ab": "4"}, TRUE),
        ("JMSCorrelationID = '7' AND JMSType IS NULL", {"correlation-id": "7"}, TRUE),
        ("JMSXGroupID = 'g' AND JMS_x = '1'", {"JMSXGroupID": "g", "JMS_x": "1"}, TRUE),
        # Headers with hyphens.
        ("content_type = 'x' AND content_type IS NOT NULL", {"content-type": "x"}, TRUE),
        ("content_type = 'x'", {"content-type": "x", "content_type": "y"}, FALSE),
        ("content_type IS NULL", {"content-type_": "x"}, TRUE),
        ("truenext_original_attempts > 2", {"truenext-original-attempts": "3"}, TRUE),
        ("correlation_id IN ('7')", {"correlation-id": "7"}, TRUE),
        (
            "hyphenated_props:content-type = 'x' AND a-1 = 2 AND a - 1 = 8",
            {"content-type": "x", "a-1": "2", "a": "9"},
            TRUE,
        ),
        ("hyphenated_props:and-or = 'x' AND NOT not-a", {"and-or": "x", "not-a": "false"}, TRUE),
        ("hyphenated_props:content_type = 'x'", {"content-type": "x"}, TRUE),
        ("total-paid > 10", {"total": "21", "paid": "10", "total-paid": "0"}, TRUE),
        ("a = 'content-type'", {"a": "content-type"}, TRUE),
        ("content - type > 1 AND content -type > 1", {"content": "3", "type": "1"}, TRUE),
        ("my-content-type = 0", {"my": "3", "content": "2", "type": "1"}, TRUE),
        # Conversions are done anyway.
        ("convert_string_expressions:a > 1", {"a": "2"}, TRUE),
        ("hyphenated_props:convert_string_expressions:a-b > 1", {"a-b": "2"}, TRUE),
        ("convert_string_expressions:hyphenated_props: a-b > 1", {"a-b": "2"}, TRUE),
        # What the broker knows of a message.
        ("JMSPriority = 4 AND JMSTimestamp = 1000 AND JMSDeliveryMode = 'PERSISTENT'", {}, TRUE),
        ("JMSPriority IS NULL OR JMSDeliveryMode LIKE 'NON%'", {"JMSPriority": "9"}, FALSE),
        # Any character is one, also where a value has lines.
        ("a LIKE '_'", {"a": "\n"}, TRUE),
        ("a LIKE '_%_'", {"a": "x"}, FALSE),
        ("a LIKE '%ab%ab'", {"a": "xab"}, FALSE),
        ("a LIKE '%ab%b'", {"a": "ab"}, FALSE),
        ("a LIKE '%_b%b'", {"a": "ab"}, FALSE),
        ("a LIKE '%a_c%'", {"a": "aaabcc"}, TRUE),
        ("a LIKE '.%'", {"a": "x"}, FALSE),
        ("a LIKE '%%'", {"a": ""}, TRUE),
        ("a LIKE 'A'", {"a": "a"}, FALSE),
    ],
)
def test_the_specification_means(text: str, headers: dict[str, str], expected: str) -> None:
    assert outcome(text, message(headers)) == expected


def test_first_line_of_a_repeated_header_counts() -> None:
    assert compile_selector("a = '1'").matches(SentMessage(4, True, 0, b"a:1\na:2\n", b""))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "syntax error at its end"),
        ("a = ", "syntax error at its end, after 'a = '"),
        ("a = 1 b", "syntax error at character 7, 'b'"),
        ("a == 1", "syntax error at character 4, '= 1'"),
        ("a = 'x", 'syntax error at character 5, "\'x"'),
        ("a.b = 1", "syntax error at character 2, '.b = 1'"),
        ("and = 1", "syntax error at character 1"),
        ("a IN ()", "syntax error at character 7, ')'"),
        ("a IN (1)", "syntax error at character 7"),
        ("a IS 1", "syntax error at character 6"),
        ("a LIKE b", "syntax error at character 8"),
        ("a = \0", "syntax error at character 5"),
        ("TRUE AND 'x'", "a text is not a condition at character 10, \"'x'\""),
        ("1", "a number is not a condition at character 1"),
        ("a = 1 OR 1 = 'x'", "a number cannot be compared with a text at character 12"),
        ("JMSPriority = '9'", "a number cannot be compared with a text at character 13"),
        ("a < 'x'", "< is for numbers, not for a text, at character 3"),
        ("TRUE > FALSE", "> is for numbers, not for a truth, at character 6"),
        ("a BETWEEN 1 AND 'x'", "<= is for numbers, not for a text, at character 17"),
        ("1 + 'x' = 2", "a text is not a number at character 5"),
        ("-TRUE = 1", "a truth is not a number at character 2"),
        ("1 IN ('x')", "IN must follow the name of a property that is text, at character 1"),
        ("JMSPriority LIKE '1'", "LIKE must follow the name of a property that is text"),
        ("a = 1 AND (b) IS NULL", "IS NULL must follow the name of a property, at character 12"),
        ("a LIKE 'x' ESCAPE 'xy'", "ESCAPE must be one character at character 19"),
        (
            "a LIKE 'x!' ESCAPE '!'",
            "a LIKE pattern must not end with its ESCAPE character (write it twice), at character 8",
        ),
        *(
            (
                f"{name} = 1",
                f"messages cannot be selected by {name}, but by JMSCorrelationID, JMSDeliveryMode, JMSDestination, "
                "JMSMessageID, JMSPriority, JMSTimestamp, JMSType, at character 1",
            )
            for name in ("JMSReplyTo", "JMSExpiration", "JMSRedelivered")
        ),
        ("a = 08", "not a number: a number that begins with 0 is octal at character 5"),
        ("a = 9223372036854775809", "a number too large for 64 bits at character 5"),
        ("a = 1e999", "a number too large for 64 bits at character 5"),
        ("my-colour = 'x'", "a text (for a name with a hyphen write hyphenated_props: before the whole selector) at"),
        ("hyphenated_props:", "syntax error at its end, after 'hyphenated_props:'"),
        ("hyphenated_props:a = = 1", "syntax error at character 22, '= 1'"),
        (" hyphenated_props:a", "syntax error at character 18, ':a'"),
        *(
            (text, f"{name} is a subtraction: write {name.replace('-', '_')}, or hyphenated_props: before")
            for text, name in (
                ("content-type = 'x'", "content-type"),
                ("a = 1 AND 10 < content-length", "content-length"),
                ("-correlation-id = 1", "correlation-id"),
                ("reply-to IS NULL", "reply-to"),
                ("truenext-original-attempts > 2", "truenext-original-attempts"),
                ("convert_string_expressions:truenext-dead-letter-cause = 'x'", "truenext-dead-letter-cause"),
            )
        ),
        *(
            (text, f"messages cannot be selected by {name}, which belongs to one delivery or one frame")
            for text, name in (
                ("truenext-attempts > 2", "truenext-attempts"),
                ("truenext_attempts > 2", "truenext-attempts"),
                ("hyphenated_props:truenext-attempts > 2", "truenext-attempts"),
                ("truenext_deliveries > 2 AND a", "truenext-deliveries"),
                ("JMSXDeliveryCount > 2", "JMSXDeliveryCount"),
                ("1-JMSXDeliveryCount > 2", "JMSXDeliveryCount"),
                ("a-timestamp > 2", "timestamp"),
                ("message-id = 'x'", "message-id"),
                ("truenext_last_cause LIKE '%'", "truenext-last-cause"),
            )
        ),
        ("truenext_attempts > 2", "for a dead letter use truenext_original_attempts, at character 1"),
        ("timestamp > 2", "use JMSTimestamp, at character 1"),
        ("a" * (SELECTOR_LENGTH_MAX + 1), "4097 characters; at most 4096"),
        ("(" * (SELECTOR_DEPTH_MAX + 1) + "a" + ")" * 99, "more than 32 nested parentheses at character 33"),
        (f"a LIKE '%{'_a' * 99}%' OR a LIKE '%{'_a' * 99}%'", f"more than {SELECTOR_SCAN_MAX} characters of LIKE"),
    ],
)
def test_invalid_selector_is_refused_with_the_position_of_the_fault(text: str, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=re.escape(reason)):
        compile_selector(text)


@pytest.mark.parametrize(
    "text",
    [
        "a=1 OR " * 199 + "a=2",
        "a=1 AND " * 199 + "a=1",
        "NOT " * 796 + "a = 1",
        "-" * 796 + "1 = a",
        "0+" * 398 + "1=a",
        "1*" * 398 + "1=a",
        "(" * SELECTOR_DEPTH_MAX + "a=1" + ")" * SELECTOR_DEPTH_MAX,
        "(0 + 1 * -(-" * 16 + "a" + "))" * 16 + " = 1",
        "(a = 1 AND NOT (a = 2 OR " * 15 + "a <> 1" + "))" * 15,
        "a IN (" + "'1', " * 397 + "'2')",
        "a IN ('1'" + ", 'a text of 36 characters, as an id'" * 100 + ")",
    ],
)
def test_selector_of_maximal_size_and_depth_is_compiled_and_evaluated(text: str) -> None:
    assert compile_selector(text).matches(message({"a": "1"}))
    assert not compile_selector(text).matches(message({"b": "1"}))


@pytest.mark.parametrize(
    "text",
    [
        "-" * 798 + "1 = a",
        "a IN (" + "'1', " * 398 + "'2')",
        "a=1 OR " * 200 + "a=2",
        "a LIKE '%1" + "%" * 800 + "'",
    ],
)
def test_selector_of_more_than_800_parts_is_refused_unless_it_was_stored_before(text: str) -> None:
    with pytest.raises(RemoteProtocolError, match="names, values, signs and %; at most 800"):
        compile_selector(text)
    assert compile_stored_selector(text).matches(message({"a": "1"}))


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP_HEADERS))
def test_a_header_that_no_stored_message_has_is_refused_by_name(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"cannot be selected by {name}, "):
        compile_selector(f"hyphenated_props:{name} IS NULL")


def test_stored_selector_from_before_names_were_checked_still_works() -> None:
    text = "content-type > 1 OR truenext-attempts > 2"
    assert compile_stored_selector(text).matches(message({"content": "3", "type": "1"}))
    with pytest.raises(RemoteProtocolError, match="content-type is a subtraction"):
        compile_selector(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a = 1", "a=1"),
        ("a = 1 AND b = 2", "a = 1 and(b=2)"),
        ("a = 10", "a = 0xA"),
        ("a = 8", "a = 010L"),
        ("a = .5", "a = 5e-1"),
        ("a IN ('x', 'y')", "a in ('y','x','y')"),
        ("a NOT LIKE 'x%' ESCAPE '!'", "a not like 'x%'\tescape '!'"),
        ("a BETWEEN 1 AND 2", "(a between (1) and (2))"),
        ("a IS NOT NULL OR TRUE", "a is not null or true"),
        ("a + 1 * 2 > 3", "(a+(1*2))>3"),
        ("a", "( a )"),
        ("NOT NOT a", "a"),
        ("NOT (NOT a)", "a"),
        ("NOT a = 2", "NOT (a = 2)"),
        ("a = 1 AND b = 1 AND c = 1", "(a = 1 AND b = 1) AND c = 1"),
        ("a = 1 AND b = 1 AND c = 1", "a = 1 AND (b = 1 AND c = 1)"),
        ("a = 1 OR b = 1 OR c = 1", "(a = 1 OR b = 1) OR c = 1"),
        ("a = 1 OR b = 1 OR c = 1", "a = 1 OR (b = 1 OR c = 1)"),
        ("a + b - c = 3", "(a + b) - c = 3"),
        ("a * b / c = 3", "(a * b) / c = 3"),
        ("a = 1", "a = 1.0"),
        ("a = 1", "a = +1"),
        ("a = 1", "a = 1d"),
        ("a = 100", "a = 1e2"),
        ("a > 2.5", "a > +2.5"),
        ("a > -2", "a > -2.0"),
        ("a BETWEEN 1 AND 2", "a BETWEEN 1.0 AND 2.0"),
        ("convert_string_expressions:a > 1", "a > 1"),
        ("hyphenated_props:a-b > 1", "hyphenated_props:convert_string_expressions:(a-b)>1"),
        ("", ""),
    ],
)
def test_selectors_that_differ_only_in_spelling_are_equivalent(one: str, other: str) -> None:
    assert are_equivalent(one, other) and are_equivalent(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a = 1", ""),
        ("a = 1", "a = '1'"),
        ("a = 1", "A = 1"),
        ("a = 'x'", "a = 'X'"),
        ("a = 'x y'", "a = 'x  y'"),
        ("a / 2 = 1", "a / 2.0 = 1"),
        ("a AND b OR c", "a AND (b OR c)"),
        ("a - b - c = 1", "a - (b - c) = 1"),
        ("-a + b = 1", "-(a + b) = 1"),
        ("+a = b", "a = b"),
        ("a + b * c = 1", "(a + b) * c = 1"),
        ("a * b + c = 1", "a * (b + c) = 1"),
        ("a = 1", "a = TRUE"),
        ("a AND b", "a OR b"),
        ("NOT a", "a"),
        ("a IS NULL", "a IS NOT NULL"),
        ("a LIKE '!%' ESCAPE '!'", "a LIKE '!%'"),
        ("a IN ('x')", "a NOT IN ('x')"),
        ("a = b", "a = 'b'"),
        ("a = TRUE", "a = 'TRUE'"),
        ("hyphenated_props:a-b > 1", "a-b > 1"),
        ("a_b > 1", "hyphenated_props:a-b > 1"),
    ],
)
def test_selectors_that_may_match_different_messages_are_not_equivalent(one: str, other: str) -> None:
    assert not are_equivalent(one, other) and not are_equivalent(other, one)


@pytest.mark.parametrize(
    ("text", "priorities"),
    [
        ("a = 1", range(10)),
        ("JMSPriority > 6", [7, 8, 9]),
        ("JMSPriority > 6 AND a = 1", [7, 8, 9]),
        ("(a = 1 AND JMSPriority >= 3) AND JMSPriority < 5", [3, 4]),
        ("JMSPriority = 9 OR JMSPriority = 0", [0, 9]),
        ("JMSPriority = 9 OR a = 1", range(10)),
        ("NOT (JMSPriority = 9 AND a = 1)", range(10)),
        ("JMSPriority = 9 AND FALSE", []),
    ],
)
def test_ranks_are_those_of_the_priorities_that_can_match(text: str, priorities: range | list[int]) -> None:
    assert compile_selector(text).ranks == {rank(priority) for priority in priorities}
