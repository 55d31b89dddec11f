"""Which messages somebody wants: JMS selectors (JMS 2.0, section 3.8.1), compiled once and tested often.

    "colour = 'red' AND weight > 2.5"    --selector-->    Selector    --matches(message)-->    True or False

A condition has three outcomes, as in SQL-92: what is said of a property that is not there is unknown, and a message is
wanted only if the whole is true. Unknown is None below.

STOMP knows only text. So a property that meets a number is taken for a number if it looks like one, and one that meets
TRUE or FALSE for a truth value if it looks like one. Source: docs/decisions/0020-selectors.md
"""

from __future__ import annotations

import operator
import re
from collections import deque
from functools import lru_cache
from sys import getsizeof
from types import BuiltinMethodType, CellType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from lark import Lark, Token, Transformer, UnexpectedInput, v_args

from truenext.envelope import read_header, unescape
from truenext.errors import RemoteProtocolError
from truenext.limits import SELECTOR_ANY_MAX, SELECTOR_DEPTH_MAX, SELECTOR_LENGTH_MAX, SELECTORS_KEPT_BYTES
from truenext.order import PRIORITY_MAX, RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from truenext.message import Message

    Value = str | int | float | bool | None
    Values = Mapping[str, Value]
    """What one message says of itself, by name; None, or no entry, is not there."""
    Test = Callable[[Values], Any]
    """A part of a selector, compiled: what it comes to for one message."""

_GRAMMAR = r"""
    ?start: either
    ?either: both (_OR both)*
    ?both: negated (_AND negated)*
    ?negated: predicate
            | NOT+ predicate                                         -> negation
    ?predicate: sum
              | sum COMPARISON sum                                   -> comparison
              | sum [NOT] _BETWEEN sum _AND sum                      -> between
              | sum [NOT] _IN "(" STRING ("," STRING)* ")"           -> among
              | sum [NOT] _LIKE STRING [_ESCAPE STRING]              -> like
              | sum _IS [NOT] _NULL                                  -> is_null
    ?sum: product
        | product (SIGN product)+                                    -> arithmetic
    ?product: signed
            | signed (FACTOR signed)+                                -> arithmetic
    ?signed: atom
           | SIGN+ atom                                              -> signed
    ?atom: "(" either ")"                                            -> parentheses
         | NAME                                                      -> name
         | STRING                                                    -> text
         | APPROXIMATE                                               -> approximate
         | EXACT                                                     -> exact
         | TRUTH                                                     -> truth

    COMPARISON: "<>" | "<=" | ">=" | "=" | "<" | ">"
    SIGN: "+" | "-"
    FACTOR: "*" | "/"
    STRING: /'[^']*(?:''[^']*)*'/
    APPROXIMATE.2: /(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?[fd]?|[0-9]+(?:e[+-]?[0-9]+[fd]?|[fd])/i
    EXACT.1: /(?:0x[0-9a-f]+|[0-9]+)l?/i
    NAME: /(?:[^\W\d]|\$)[\w$]*/

    _AND.3: /and(?![\w$])/i
    _OR.3: /or(?![\w$])/i
    NOT.3: /not(?![\w$])/i
    _BETWEEN.3: /between(?![\w$])/i
    _IN.3: /in(?![\w$])/i
    _LIKE.3: /like(?![\w$])/i
    _ESCAPE.3: /escape(?![\w$])/i
    _IS.3: /is(?![\w$])/i
    _NULL.3: /null(?![\w$])/i
    TRUTH.3: /(?:true|false)(?![\w$])/i

    %ignore /[ \t\f\r\n]+/
"""

_PRIORITY = "JMSPriority"
_OF_MESSAGE: dict[str, tuple[str, Callable[[Message], Value]]] = {
    _PRIORITY: ("number", lambda message: message.priority),
    "JMSTimestamp": ("number", lambda message: message.arrived_ms),
    "JMSDeliveryMode": ("text", lambda message: "PERSISTENT" if message.persistent else "NON_PERSISTENT"),
}
"""What need not be read from a message's header lines, with its kind."""
_OF_HEADER = {"JMSCorrelationID": "correlation-id", "JMSType": "type"}
"""What stands in its header lines by another name."""
_OWN_PREFIXES = ("JMSX", "JMS_")
"""Names of properties that begin like a header's name."""

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?", re.IGNORECASE)
_NUMBER_LENGTH_MAX = 40
_LONG_PATTERN = 256
"""Characters of a selector from which on one pattern in it may take much."""
_LONG = 2**63
"""What a whole number may be, up or down, as in Java."""
_SINGLY_MAX = 8
"""Properties up to which each is looked for in the header lines by itself; for more, these are read once."""
_TRUTHS = {"true": True, "false": False}


class Property(NamedTuple):
    """One that stands in the header lines, by the bytes with which its line begins: names need no escape."""

    first: bytes
    """On the first line."""
    later: bytes

    @classmethod
    def called(cls, name: str) -> Property:
        """By its name in a selector."""
        its = _OF_HEADER.get(name, name)
        return cls(f"{its}:".encode(), f"\n{its}:".encode())

    def of(self, header: bytes) -> str | None:
        """What a message says of it; None if nothing."""
        if header.startswith(self.first):
            at = len(self.first)
        else:
            at = header.find(self.later)
            if at < 0:
                return None
            at += len(self.later)
        value = header[at : header.index(b"\n", at)].decode()
        return unescape(value) if "\\" in value else value


class Selector:
    """What somebody wants, and whether a message is that. Made by `selector`."""

    __slots__ = (
        "__weakref__",
        "_of_lines",
        "_of_message",
        "_singly",
        "_test",
        "ranks",
        "required",
        "size",
        "text",
    )

    def __init__(self, text: str, condition: _Part) -> None:
        self.text = text
        self._test = condition.test
        self._of_message = [(name, _OF_MESSAGE[name][1]) for name in condition.names if name in _OF_MESSAGE]
        self._of_lines = {name: _OF_HEADER.get(name, name) for name in condition.names if name not in _OF_MESSAGE}
        self._singly: list[tuple[str, Property]] = []
        if len(self._of_lines) <= _SINGLY_MAX:
            self._singly = [(name, Property.called(name)) for name in self._of_lines]
        self.ranks = _ranks(condition)
        """Of the messages that can match; what has another rank need not be tested."""
        one_of = next((one.one_of for one in _conjuncts(condition) if one.one_of is not None), None)
        self.required = None if one_of is None else (Property.called(one_of[0]), one_of[1])
        """A property, and the texts of which it has to be one; None if no such thing is known."""
        self.size = getsizeof(self) + _size(
            text, self._test, self._of_message, self._of_lines, self._singly, self.ranks, self.required
        )
        """Bytes of memory that it takes, roughly."""

    def matches(self, message: Message) -> bool:
        values: dict[str, Value] = {}
        for name, ask in self._of_message:
            values[name] = ask(message)
        header = message.header
        for name, its in self._singly:
            values[name] = its.of(header)
        if not self._singly and self._of_lines:
            headers = read_header(header)
            values.update((name, headers.get(its)) for name, its in self._of_lines.items())
        return self._test(values) is True


class _Compiled:
    """Selectors that there are: each once, however many use it."""

    def __init__(self) -> None:
        self._used: WeakValueDictionary[str, Selector] = WeakValueDictionary()
        """By text; those that are not kept go when nobody has them any more."""
        self._kept: deque[Selector] = deque()
        """Those that were compiled last, for they may come again. Some are large, so they are few."""
        self._kept_bytes = 0

    def get(self, text: str) -> Selector | None:
        return self._used.get(text)

    def add(self, selector: Selector) -> None:
        self._used[selector.text] = selector
        self._kept.append(selector)
        self._kept_bytes += selector.size
        while self._kept_bytes > SELECTORS_KEPT_BYTES:
            self._kept_bytes -= self._kept.popleft().size


_compiled = _Compiled()


def selector(text: str) -> Selector:
    """
    >>> from truenext.message import Message
    >>> selector("colour LIKE 're_' AND JMSPriority > 6").matches(Message(7, True, 0, b"colour:red\\n", b""))
    True

    Raises: RemoteProtocolError if it is no selector; says where.
    """
    found = _compiled.get(text)
    if found is None:
        found = _compile(text)
        _compiled.add(found)
    return found


def _compile(text: str) -> Selector:
    if len(text) > SELECTOR_LENGTH_MAX:
        raise RemoteProtocolError(f"selector of {len(text)} characters; at most {SELECTOR_LENGTH_MAX}")
    try:
        _check_depth(text)
        condition: _Part = _condition(_parser().parse(text))
    except _Meaningless as error:
        raise _refusal(text, error.at, error.reason) from error
    except UnexpectedInput as error:
        is_end = isinstance(getattr(error, "token", None), Token) and error.token.type == "$END"  # type: ignore[attr-defined]
        at = len(text) if is_end or error.pos_in_stream is None else error.pos_in_stream
        raise _refusal(text, at, "is not understood") from error
    if condition.scan > SELECTOR_ANY_MAX:
        reason = f"has more than {SELECTOR_ANY_MAX} characters of LIKE in parts with _ between two %"
        raise RemoteProtocolError(f"selector {reason}")
    if len(text) > _LONG_PATTERN:
        # `re` keeps what it has compiled, and does not look at how much that is.
        re.purge()
    return Selector(text, condition)


def _size(*roots: object) -> int:
    """Bytes that these take, and what they are made of; whatever any module has is only counted itself."""
    size = 0
    known: dict[int, object] = {}
    todo: list[object] = [*roots]
    while todo:
        one = todo.pop()
        if id(one) in known:
            continue
        known[id(one)] = one
        size += getsizeof(one)
        if isinstance(one, FunctionType):
            todo.append(one.__closure__)
        elif isinstance(one, CellType):
            todo.append(one.cell_contents)
        elif isinstance(one, BuiltinMethodType):
            todo.append(one.__self__)
        elif isinstance(one, tuple | list | frozenset):
            todo += one
        elif isinstance(one, dict):
            todo += [*one.keys(), *one.values()]
    return size


def _refusal(text: str, at: int, reason: str) -> RemoteProtocolError:
    if at >= len(text):
        return RemoteProtocolError(f"selector: {reason} at its end, behind {text[-30:]!r}")
    return RemoteProtocolError(f"selector: {reason} at character {at + 1}, {text[at : at + 30]!r}")


class _Meaningless(Exception):
    """It can be parsed, but says nothing."""

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(reason)
        self.at = at
        """Characters before the place of the fault."""
        self.reason = reason


class _Part(NamedTuple):
    at: int
    """Characters of the selector before it."""
    kind: str
    """"truth", "number" or "text" where that is known before any message is; else "property"."""
    test: Test
    names: frozenset[str] = frozenset()
    """Of the properties that it asks for."""
    is_name: bool = False
    """It is a property's name and nothing more."""
    conjuncts: tuple[_Part, ...] = ()
    """It is true only if all of these are."""
    one_of: tuple[str, frozenset[str]] | None = None
    """It is true only if the property of this name is one of these texts."""
    scan: int = 0
    """Characters in pieces of patterns for which a value has to be searched character by character."""


@lru_cache(maxsize=1)
def _parser() -> Any:
    # Parts are compiled while they are parsed: no tree, and nothing that calls itself for each level of one.
    return Lark(_GRAMMAR, parser="lalr", lexer="basic", transformer=_Compiler())


def _check_depth(text: str) -> None:
    depth = 0
    for found in re.finditer(r"'[^']*'|[()]", text):
        depth += {"(": 1, ")": -1}.get(found.group(), 0)
        if depth > SELECTOR_DEPTH_MAX:
            raise _Meaningless(found.start(), f"more than {SELECTOR_DEPTH_MAX} parentheses in one another")


@v_args(inline=True)
class _Compiler(Transformer[Token, Any]):
    """From the leaves up: each part becomes a function of a message's values."""

    # ---- Conditions ----

    def either(self, *parts: _Part) -> _Part:
        conditions = [_condition(part) for part in parts]
        tests = [condition.test for condition in conditions]

        def test(values: Values) -> bool | None:
            outcome: bool | None = False
            for one in tests:
                found = one(values)
                if found is True:
                    return True
                if found is None:
                    outcome = None
            return outcome

        return _joined(conditions, "truth", test)

    def both(self, *parts: _Part) -> _Part:
        conditions = [_condition(part) for part in parts]
        tests = [condition.test for condition in conditions]

        def test(values: Values) -> bool | None:
            outcome: bool | None = True
            for one in tests:
                found = one(values)
                if found is False:
                    return False
                if found is None:
                    outcome = None
            return outcome

        conjuncts = tuple(one for condition in conditions for one in condition.conjuncts or (condition,))
        return _joined(conditions, "truth", test)._replace(conjuncts=conjuncts)

    def negation(self, *parts: Any) -> _Part:
        *signs, part = parts
        condition = _condition(part)
        return _negated(condition) if len(signs) % 2 else condition

    def comparison(self, left: _Part, sign: Token, right: _Part) -> _Part:
        return _comparison(left, sign, right, _at(sign))

    def between(self, part: _Part, is_not: Token | None, least: _Part, most: _Part) -> _Part:
        at_least = _comparison(part, ">=", least, least.at)
        at_most = _comparison(part, "<=", most, most.at)
        return _perhaps_negated(self.both(at_least, at_most), is_not)

    def among(self, part: _Part, is_not: Token | None, *texts: Token) -> _Part:
        _expect_name(part, "IN")
        wanted = frozenset(_text(token) for token in texts)
        ask = part.test

        def test(values: Values) -> bool | None:
            value = ask(values)
            return None if value is None else value in wanted

        (name,) = part.names
        one_of = (name, wanted) if part.kind == "property" else None
        return _perhaps_negated(_joined([part], "truth", test)._replace(one_of=one_of), is_not)

    def like(self, part: _Part, is_not: Token | None, pattern: Token, escape: Token | None) -> _Part:
        _expect_name(part, "LIKE")
        matches, scan = _like(pattern, escape)
        ask = part.test

        def test(values: Values) -> bool | None:
            value = ask(values)
            return None if value is None else matches(value)

        return _perhaps_negated(_joined([part], "truth", test)._replace(scan=scan), is_not)

    def is_null(self, part: _Part, is_not: Token | None) -> _Part:
        if not part.is_name:
            raise _Meaningless(part.at, "IS NULL is for a property's name, which must stand before it,")
        ask = part.test
        if is_not is not None:
            return _joined([part], "truth", lambda values: ask(values) is not None)
        return _joined([part], "truth", lambda values: ask(values) is None)

    # ---- Values ----

    def arithmetic(self, *parts: Any) -> _Part:
        operands, signs = parts[::2], parts[1::2]
        for part in operands:
            _expect_number(part)
        first, *rest = [_numeric(part) for part in operands]
        steps = [(_divided if sign == "/" else _OPERATORS[sign], one) for sign, one in zip(signs, rest, strict=True)]

        def test(values: Values) -> Value:
            result = first(values)
            for calculate, one in steps:
                other = one(values)
                if result is None or other is None:
                    return None
                result = _calculated(calculate, result, other)
            return result  # type: ignore[no-any-return]

        return _joined(operands, "number", test)

    def signed(self, *parts: Any) -> _Part:
        *signs, part = parts
        _expect_number(part)
        ask = _numeric(part)
        if signs.count("-") % 2 == 0:
            return _joined([part], "number", ask)._replace(at=_at(signs[0]))

        def test(values: Values) -> Value:
            value = ask(values)
            return None if value is None else _calculated(operator.mul, value, -1)

        return _joined([part], "number", test)._replace(at=_at(signs[0]))

    def parentheses(self, part: _Part) -> _Part:
        return part._replace(is_name=False)

    def name(self, token: Token) -> _Part:
        name = str(token)
        kind, _ = _OF_MESSAGE.get(name, ("property", None))
        is_known = kind != "property" or name in _OF_HEADER or name.startswith(_OWN_PREFIXES)
        if name.startswith("JMS") and not is_known:
            raise _Meaningless(_at(token), f"messages cannot be selected by {name},")
        return _Part(_at(token), kind, lambda values: values.get(name), frozenset([name]), is_name=True)

    def text(self, token: Token) -> _Part:
        return _constant(token, "text", _text(token))

    def approximate(self, token: Token) -> _Part:
        value = float(token.rstrip("fFdD"))
        if value in (float("inf"), float("-inf")):
            raise _Meaningless(_at(token), "a number too large for 64 bits")
        return _constant(token, "number", value)

    def exact(self, token: Token) -> _Part:
        return _constant(token, "number", _exact(token))

    def truth(self, token: Token) -> _Part:
        return _constant(token, "truth", _TRUTHS[token.lower()])


# ---- Parts ----


def _at(token: Token) -> int:
    assert token.start_pos is not None, "it came from the lexer"
    return token.start_pos


def _joined(parts: Iterable[_Part], kind: str, test: Test) -> _Part:
    """What is made of these parts, but for its conjuncts."""
    parts = list(parts)
    names = frozenset().union(*(part.names for part in parts))
    return _Part(parts[0].at, kind, test, names, scan=sum(part.scan for part in parts))


def _constant(token: Token, kind: str, value: Value) -> _Part:
    return _Part(_at(token), kind, lambda values: value)


def _condition(part: _Part) -> _Part:
    """A part that is true, false or unknown; a property stands for its own truth."""
    if part.kind == "truth":
        return part
    if part.kind != "property":
        raise _Meaningless(part.at, f"a {part.kind} is neither true nor false")
    ask = part.test
    return _joined([part], "truth", lambda values: _truth(ask(values)))


def _negated(part: _Part) -> _Part:
    ask = part.test

    def test(values: Values) -> bool | None:
        value = ask(values)
        return None if value is None else not value

    return _joined([part], "truth", test)


def _perhaps_negated(part: _Part, is_not: Token | None) -> _Part:
    return part if is_not is None else _negated(part)


def _expect_name(part: _Part, what: str) -> None:
    if not part.is_name or part.kind == "number":
        raise _Meaningless(part.at, f"{what} is for a property that is text, whose name must stand before it,")


def _expect_number(part: _Part) -> None:
    if part.kind not in ("number", "property"):
        raise _Meaningless(part.at, f"a {part.kind} is no number")


def _numeric(part: _Part) -> Test:
    """As a number; what is none is unknown."""
    ask = part.test
    return ask if part.kind == "number" else lambda values: _number(ask(values))


def _comparison(left: _Part, sign: str, right: _Part, at: int) -> _Part:
    """`at` is the place that a refusal names. What cannot be compared is false, also for <>."""
    is_equality = sign in ("=", "<>")
    kinds = {left.kind, right.kind} - {"property"}
    if len(kinds) > 1:
        raise _Meaningless(at, f"a {left.kind} cannot be compared with a {right.kind}")
    kind = kinds.pop() if kinds else "text" if is_equality else "number"
    if not is_equality and kind != "number":
        raise _Meaningless(at, f"{sign} is for numbers, not for a {kind},")
    compare, first, second = _OPERATORS[sign], left.test, right.test
    as_first, as_second = (None if part.kind == kind else _CONVERSIONS[kind] for part in (left, right))

    def test(values: Values) -> bool | None:
        one, other = first(values), second(values)
        if one is None or other is None:
            return None
        if as_first is not None:
            one = as_first(one)
        if as_second is not None:
            other = as_second(other)
        return one is not None and other is not None and compare(one, other)

    one_of = None
    if sign == "=" and kind == "text":
        for part, other in ((left, right), (right, left)):
            if part.is_name and part.kind == "property" and not other.names:
                (name,) = part.names
                one_of = (name, frozenset([str(other.test({}))]))
    return _joined([left, right], "truth", test)._replace(one_of=one_of)


def _conjuncts(condition: _Part) -> tuple[_Part, ...]:
    """It is true only if all of these are."""
    return condition.conjuncts or (condition,)


def _ranks(condition: _Part) -> frozenset[int]:
    tests = [one.test for one in _conjuncts(condition) if one.names <= {_PRIORITY}]
    return frozenset(rank for rank in RANKS if all(test({_PRIORITY: PRIORITY_MAX - rank}) is True for test in tests))


# ---- Values ----


def _number(value: Value) -> int | float | None:
    """The number that a text looks like."""
    if not isinstance(value, str) or len(value) > _NUMBER_LENGTH_MAX:
        return None
    if _WHOLE.fullmatch(value) is not None:
        whole = int(value)
        return whole if -_LONG <= whole < _LONG else float(whole)
    return float(value) if _NUMBER.fullmatch(value) is not None else None


def _truth(value: Value) -> bool | None:
    """The truth value that a text looks like."""
    return _TRUTHS.get(value.lower()) if isinstance(value, str) and len(value) <= 5 else None


_CONVERSIONS: dict[str, Callable[[Value], Value] | None] = {"number": _number, "truth": _truth, "text": None}
"""Of a property's text to what it is compared with."""


def _calculated(calculate: Callable[[Any, Any], Any], one: Any, other: Any) -> int | float | None:
    """Unknown where Java has no result, or one that does not fit 64 bits."""
    try:
        result: int | float = calculate(one, other)
    except ArithmeticError:
        return None
    return result if isinstance(result, float) or -_LONG <= result < _LONG else None


def _divided(one: Any, other: Any) -> int | float:
    """As in Java: whole numbers are divided towards zero."""
    if isinstance(one, int) and isinstance(other, int):
        quotient = abs(one) // abs(other)
        return quotient if (one < 0) is (other < 0) else -quotient
    result: float = one / other
    return result


def _exact(token: Token) -> int:
    digits = token.rstrip("lL").lower()
    base = 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10
    try:
        value = int(digits, base)
    except ValueError as error:
        raise _Meaningless(_at(token), "no number: one that begins with 0 is octal") from error
    # The largest is there for the sign that may stand before it.
    if value > _LONG:
        raise _Meaningless(_at(token), "a number too large for 64 bits")
    return value


def _text(token: Token) -> str:
    return token[1:-1].replace("''", "'")


def _like(pattern: Token, escape: Token | None) -> tuple[Callable[[str], bool], int]:
    """What tells whether a text is like a pattern; and how many characters of that are in pieces with _ between two %.

    Between two % each piece is taken where it comes first, so nothing is ever tried twice, as one regular expression
    would: no pattern takes longer than its length times that of the text.
    """
    first, *others = _pieces(pattern, escape)
    head = _regular(first)
    if not others:
        return lambda value: head.fullmatch(value) is not None, 0
    *inner, last = others
    middle = [_finder(piece) for piece in inner if piece]
    scan = sum(len(piece) for piece in inner if None in piece)
    tail, tail_length = _regular(last), len(last)

    def matches(value: str) -> bool:
        found = head.match(value)
        if found is None:
            return False
        at = found.end()
        for find in middle:
            at = find(value, at)
            if at < 0:
                return False
        rest = len(value) - tail_length
        return rest >= at and tail.match(value, rest) is not None

    return matches, scan


def _pieces(pattern: Token, escape: Token | None) -> list[list[str | None]]:
    """What stands between the % of a pattern, character by character; None is any one."""
    escaping = None if escape is None else _text(escape)
    if escape is not None and len(_text(escape)) != 1:
        raise _Meaningless(_at(escape), "ESCAPE takes one character")
    pieces: list[list[str | None]] = [[]]
    characters = iter(_text(pattern))
    for character in characters:
        if character == escaping:
            following = next(characters, None)
            if following is None:
                raise _Meaningless(_at(pattern), "a pattern that ends with its escape character")
            pieces[-1].append(following)
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append(None if character == "_" else character)
    return pieces


def _regular(piece: list[str | None]) -> re.Pattern[str]:
    return re.compile("".join("." if each is None else re.escape(each) for each in piece), re.DOTALL)


def _finder(piece: list[str | None]) -> Callable[[str, int], int]:
    """What gives the end of the first place, from one on, where a piece is; -1 if there is none."""
    if None in piece:
        search = _regular(piece).search

        def find(value: str, at: int) -> int:
            found = search(value, at)
            return -1 if found is None else found.end()

        return find
    text = "".join(each for each in piece if each is not None)

    def find_text(value: str, at: int) -> int:
        found = value.find(text, at)
        return found if found < 0 else found + len(text)

    return find_text
