"""Oracle of selectors, by JMS 2.0, section 3.8.1, and docs/decisions/0020-selectors.md alone.

Naive on purpose: a tree that is walked anew for each message. Hypothesis makes the trees; `printed` makes text of them
with no more parentheses than are needed, so that what binds tighter is tested, too. `written` puts the prefixes before
it that it needs, and `respelled` makes another text of the same tree.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from hypothesis import strategies as st

from truenext.model.header_lines import encode_header_lines
from truenext.model.message import SentMessage

Value = str | int | float | bool | None
LONG = range(-(2**63), 2**63)


@dataclass(frozen=True)
class Property:
    name: str


@dataclass(frozen=True)
class Literal:
    spelling: str
    value: Value


@dataclass(frozen=True)
class Operation:
    """Binary operation."""

    sign: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Signed:
    sign: str
    operand: Node


@dataclass(frozen=True)
class Not:
    operand: Node


@dataclass(frozen=True)
class Between:
    value: Node
    is_not: bool
    least: Node
    most: Node


@dataclass(frozen=True)
class Among:
    name: Property
    is_not: bool
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Like:
    name: Property
    is_not: bool
    pattern: tuple[str, ...]
    """Characters; "any" and "many" stand for _ and %."""
    escape: str | None


@dataclass(frozen=True)
class IsNull:
    name: Property
    is_not: bool


Node = Property | Literal | Operation | Signed | Not | Between | Among | Like | IsNull

COMPARISONS = ("=", "<>", "<", "<=", ">", ">=")
TRUTH, NUMBER, TEXT = "truth", "number", "text"


# What it comes to ----------------------------------------------------------------------------------------------------


def matches(node: Node, message: SentMessage, headers: dict[str, str]) -> bool:
    # A name with underscores that a message lacks means the header with hyphens.
    with_hyphens = {name.replace("-", "_"): value for name, value in headers.items() if "-" in name}
    return truth_of(node, {**with_hyphens, **headers, **of_message(message)}) is True


def of_message(message: SentMessage) -> dict[str, Value]:
    return {
        "JMSPriority": message.priority,
        "JMSTimestamp": message.arrived_ms,
        "JMSDeliveryMode": "PERSISTENT" if message.persistent else "NON_PERSISTENT",
    }


def truth_of(node: Node, values: dict[str, Value]) -> bool | None:
    match node:
        case Property(name):
            return as_truth(values.get(name))
        case Literal(_, bool() as value):
            return value
        case Not(operand):
            return negated(truth_of(operand, values))
        case Operation("AND", left, right):
            both = {truth_of(left, values), truth_of(right, values)}
            return False if False in both else None if None in both else True
        case Operation("OR", left, right):
            both = {truth_of(left, values), truth_of(right, values)}
            return True if True in both else None if None in both else False
        case Between(value, is_not, least, most):
            inside = truth_of(Operation("AND", Operation(">=", value, least), Operation("<=", value, most)), values)
            return negated(inside) if is_not else inside
        case Among(Property(name), is_not, texts):
            found = values.get(name)
            return None if found is None else (found in texts) is not is_not
        case Like(Property(name), is_not, pattern, _):
            found = values.get(name)
            return None if found is None else is_like(str(found), pattern) is not is_not
        case IsNull(Property(name), is_not):
            return (values.get(name) is None) is not is_not
        case Operation(sign, left, right) if sign in COMPARISONS:
            return compared(sign, left, right, values)
    raise AssertionError(f"{node} is no condition")


def compared(sign: str, left: Node, right: Node, values: dict[str, Value]) -> bool | None:
    kinds = {kind_of(left), kind_of(right)} - {None}
    kind = kinds.pop() if kinds else TEXT if sign in ("=", "<>") else NUMBER
    one, other = raw(left, values), raw(right, values)
    if one is None or other is None:
        return None
    if kind == NUMBER:
        one, other = as_number(one), as_number(other)
    elif kind == TRUTH:
        one, other = as_truth(one), as_truth(other)
    if one is None or other is None:
        return False
    if sign in ("=", "<>"):
        return (one == other) is (sign == "=")
    assert not isinstance(one, str) and not isinstance(other, str)
    return {"<": one < other, "<=": one <= other, ">": one > other, ">=": one >= other}[sign]


def raw(node: Node, values: dict[str, Value]) -> Value:
    """The value of an operand of a comparison."""
    match node:
        case Property(name):
            return values.get(name)
        case Literal(_, value):
            return value
    return number_of(node, values) if kind_of(node) == NUMBER else truth_of(node, values)


def number_of(node: Node, values: dict[str, Value]) -> int | float | None:
    match node:
        case Property(name):
            return as_number(values.get(name))
        case Literal(_, value):
            return as_number(value)
        case Signed(sign, operand):
            value = number_of(operand, values)
            return value if value is None or sign == "+" else fitting(-value)
        case Operation(sign, left, right):
            one, other = number_of(left, values), number_of(right, values)
            if one is None or other is None or (sign == "/" and other == 0):
                return None
            if sign == "/":
                if isinstance(one, int) and isinstance(other, int):
                    return fitting(math.trunc(Fraction(one, other)))
                return one / other
            return fitting(one + other if sign == "+" else one - other if sign == "-" else one * other)
    raise AssertionError(f"{node} is no number")


def fitting(number: int | float) -> int | float | None:
    return number if isinstance(number, float) or number in LONG else None


def negated(value: bool | None) -> bool | None:
    return {True: False, False: True, None: None}[value]


def as_truth(value: Value) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False}.get(str(value).lower())


def as_number(value: Value) -> int | float | None:
    if value is None or isinstance(value, int | float):
        return value
    if len(value) > 40 or not set(value) <= set("0123456789+-.eE"):
        return None
    digits = value.lstrip("+-")
    try:
        if digits.isdigit() and len(digits) <= 19:
            return int(value) if int(value) in LONG else float(value)
        return float(value)
    except ValueError:
        return None


def is_like(text: str, pattern: tuple[str, ...]) -> bool:
    if not pattern:
        return not text
    first, *rest = pattern
    if first == "many":
        return any(is_like(text[at:], tuple(rest)) for at in range(len(text) + 1))
    return bool(text) and first in ("any", text[0]) and is_like(text[1:], tuple(rest))


def kind_of(node: Node) -> str | None:
    match node:
        case Property(name):
            return NUMBER if name in ("JMSPriority", "JMSTimestamp") else TEXT if name == "JMSDeliveryMode" else None
        case Literal(_, value):
            return TRUTH if isinstance(value, bool) else TEXT if isinstance(value, str) else NUMBER
        case Signed() | Operation("+" | "-" | "*" | "/"):
            return NUMBER
    return TRUTH


# As text -------------------------------------------------------------------------------------------------------------

_TIGHTNESS = {"OR": 1, "AND": 2, **dict.fromkeys(COMPARISONS, 4), "+": 5, "-": 5, "*": 6, "/": 6}
_NOT, _PREDICATE, _SUM, _SIGNED, _ATOM = 3, 4, 5, 7, 8


_KEYWORDS = re.compile(r"'[^']*'|\b(?:AND|OR|NOT|BETWEEN|IN|LIKE|ESCAPE|IS|NULL|TRUE|FALSE)\b|\s+", re.IGNORECASE)


def written(node: Node, *, is_converted: bool = False, is_grouped: bool = False) -> str:
    """The selector of a tree: a name with a hyphen needs its prefix, and that of conversions asks for nothing."""
    text = printed(node, is_grouped=is_grouped)
    hyphenated = "hyphenated_props:" if any(name in text for name in HYPHENATED) else ""
    return "convert_string_expressions:" * is_converted + hyphenated + text


def respelled(text: str) -> str:
    """Respell a selector: capitals of keywords, blanks, and parentheses around it."""
    prefix, colon, rest = text.rpartition("_props:")
    other = _KEYWORDS.sub(lambda found: found[0] if found[0][0] == "'" else f" {found[0].swapcase()}\t", rest)
    return f"{prefix}{colon}( {other} )"


def printed(node: Node, at_least: int = 0, *, is_grouped: bool = False) -> str:
    """`is_grouped`: with parentheses around each operand, whether they are needed or not."""
    tightness, text = _printed(node, is_grouped)
    return f"({text})" if tightness < at_least or is_grouped else text


def _printed(node: Node, is_grouped: bool) -> tuple[int, str]:
    match node:
        case Property(name):
            return _ATOM, name
        case Literal(spelling, _):
            return _ATOM, spelling
        case Signed(sign, operand):
            return _SIGNED, sign + printed(operand, _SIGNED, is_grouped=is_grouped)
        case Not(operand):
            return _NOT, f"NOT {printed(operand, _NOT, is_grouped=is_grouped)}"
        case Operation(sign, left, right):
            tightness = _TIGHTNESS[sign]
            # A comparison takes sums on either side; everything else is done from the left.
            least = tightness + (sign in COMPARISONS)
            before = printed(left, least, is_grouped=is_grouped)
            return tightness, f"{before} {sign} {printed(right, tightness + 1, is_grouped=is_grouped)}"
        case Between(value, is_not, least_value, most):
            outer = [printed(each, _SUM, is_grouped=is_grouped) for each in (value, least_value, most)]
            return _PREDICATE, f"{outer[0]} {'NOT ' * is_not}BETWEEN {outer[1]} AND {outer[2]}"
        case Among(name, is_not, texts):
            return _PREDICATE, f"{name.name} {'not ' * is_not}in ({', '.join(map(quoted, texts))})"
        case Like(name, is_not, pattern, escape):
            spelling = "".join(_pattern_character(each, escape) for each in pattern)
            escape_clause = "" if escape is None else f" Escape {quoted(escape)}"
            return _PREDICATE, f"{name.name} {'NOT ' * is_not}LIKE {quoted(spelling)}{escape_clause}"
        case IsNull(name, is_not):
            return _PREDICATE, f"{name.name} IS {'NOT ' * is_not}NULL"


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _pattern_character(character: str, escape: str | None) -> str:
    if character in ("any", "many"):
        return {"any": "_", "many": "%"}[character]
    return f"{escape}{character}" if escape is not None and character in ("_", "%", escape) else character


# Trees and messages --------------------------------------------------------------------------------------------------

NAMES = ("a", "b", "colour", "$price_1", "ship_to", "größe", "JMSType", "JMSCorrelationID", "JMSXGroup")
HYPHENATED = ("ship-to", "$price-1")
LINES = {"JMSType": "type", "JMSCorrelationID": "correlation-id"}
_TEXTS = ["", "a", "ab", "red", "1", "2", "1.0", "true", "False", "it's", "a_b%", "a\nb:\\c", "é", "-3", "x" * 50]

properties = st.sampled_from(NAMES * 2 + HYPHENATED).map(Property)
texts = st.sampled_from([*_TEXTS, "PERSISTENT"]).map(lambda text: Literal(quoted(text), text))
truths = st.sampled_from([("TRUE", True), ("false", False)]).map(lambda pair: Literal(*pair))
number_literals = st.sampled_from(
    [
        *((str(value), value) for value in (0, 1, 2, 7, 2**63 - 1)),
        *(("010", 8), ("0x1F", 31), ("3L", 3), ("0l", 0)),
        *(("1.0", 1.0), (".5", 0.5), ("7.", 7.0), ("2E1", 20.0), ("1.5e-1", 0.15), ("1f", 1.0), ("2.5d", 2.5)),
    ]
).map(lambda pair: Literal(*pair))

number_values: st.SearchStrategy[Node] = properties | number_literals | st.just(Property("JMSPriority"))
numbers: st.SearchStrategy[Node] = st.recursive(
    number_values,
    lambda inner: (
        st.builds(Operation, st.sampled_from("+-*/"), inner, inner) | st.builds(Signed, st.sampled_from("+-"), inner)
    ),
    max_leaves=4,
)
characters = st.sampled_from(["any", "many", "many", "a", "b", "e", "r", "_", "%", "'", "é", "1"])


@st.composite
def likes(draw: st.DrawFn) -> Like:
    pattern = tuple(draw(st.lists(characters, max_size=5)))
    escape = draw(st.sampled_from([None, "\\", "é", "a"]))
    if escape is None:
        # Without an escape these two can only be what they are in a pattern.
        pattern = tuple(each for each in pattern if each not in ("_", "%"))
    return Like(draw(properties), draw(st.booleans()), pattern, escape)


predicates: st.SearchStrategy[Node] = st.one_of(
    st.builds(Operation, st.sampled_from(COMPARISONS), numbers, numbers),
    st.builds(Operation, st.sampled_from(("=", "<>")), properties | texts, properties | texts),
    st.builds(Operation, st.sampled_from(("=", "<>")), properties | truths, truths),
    st.builds(Operation, st.sampled_from(("=", "<>")), st.just(Property("JMSDeliveryMode")), properties | texts),
    st.builds(Between, numbers, st.booleans(), numbers, numbers),
    st.builds(Among, properties, st.booleans(), st.lists(st.sampled_from(_TEXTS), min_size=1).map(tuple)),
    likes(),
    st.builds(IsNull, properties | st.just(Property("JMSPriority")), st.booleans()),
    properties,
    truths,
)
conditions: st.SearchStrategy[Node] = st.recursive(
    predicates,
    lambda inner: (
        st.builds(Operation, st.sampled_from(("AND", "OR")), inner, inner)
        | st.builds(Operation, st.sampled_from(("=", "<>")), inner.filter(lambda node: kind_of(node) == TRUTH), truths)
        | st.builds(Not, inner)
    ),
    max_leaves=6,
)


@st.composite
def messages(draw: st.DrawFn) -> tuple[SentMessage, dict[str, str]]:
    """And its properties, by the names that selectors have for them."""
    headers = draw(st.dictionaries(st.sampled_from(NAMES + HYPHENATED), st.sampled_from(_TEXTS)))
    # Names that only look like those that are asked for, before and behind.
    lines = {"xa": "1", "a.b": "1", "ab": "2"} | {LINES.get(name, name): value for name, value in headers.items()}
    order = draw(st.permutations(list(lines)))
    header = encode_header_lines({name: lines[name] for name in order})
    priority, persistent = draw(st.integers(0, 9)), draw(st.booleans())
    return SentMessage(priority, persistent, 0, header, b"", draw(st.sampled_from([0, 7]))), headers
