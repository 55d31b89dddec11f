"""Grammar and compiler of JMS selectors (JMS 2.0, section 3.8.1): a selector is compiled while it is parsed.

Two prefixes of ActiveMQ are allowed before a selector, in any order:

    hyphenated_props:              names may have hyphens: a-b is a name, a - b a subtraction
    convert_string_expressions:    no effect, as texts are converted to numbers in any case

A condition is true, false or unknown, as in SQL-92: a condition on a property that a message lacks is unknown. Below,
unknown is None.

All values of STOMP are texts. So when a property is compared with a number or a truth value, its text is converted to
that type if possible. Source: docs/decisions/0020-selectors.md

Properties of JMS have types: a boolean, a number or a text (`TypedText`), none of which is converted. A comparison of
values of different types is false.

This is one file, as each rule of the grammar is a method of the compiler.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from lark import Lark, Token, Transformer, UnexpectedInput, v_args

from truenext.model.limits import SELECTOR_DEPTH_MAX
from truenext.model.text_search import fixed_matcher, piece_finder, search_ns
from truenext.model.values import HEADER_PROPERTIES, Value

Values = Mapping[str, Value]
"""Properties of one message, by name. A property that is None, or missing, is unknown."""

Test = Callable[[Values], Any]
"""Compiled part of a selector: a function that returns the part's value for one message."""

Form = str | int | float | tuple[Any, ...]
"""Normal form of a part, the same for all its spellings: a name, a constant, or an operator with the forms of its
operands. """


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

HYPHENATED = "hyphenated_props:"
CONVERTED = "convert_string_expressions:"
_PREFIXES = re.compile(f"(?:{HYPHENATED}|{CONVERTED})*")

PRIORITY = "JMSPriority"
MESSAGE_PROPERTIES = {
    PRIORITY: "number",
    "JMSTimestamp": "number",
    "JMSDeliveryMode": "text",
    "JMSDestination": "text",
    "JMSMessageID": "text",
}
"""Kinds of the properties that are not in a message's header lines, by name."""
_JMS_HEADERS = ", ".join(sorted(MESSAGE_PROPERTIES | HEADER_PROPERTIES))
_JMS_PREFIXES = ("JMSX", "JMS_")
"""Prefixes of JMS properties that are headers of the same name."""

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
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?", re.IGNORECASE)
_NUMBER_LENGTH_MAX = 40
_INT64_LIMIT = 2**63
"""Limit of whole numbers, as in Java: -2 ** 63 to 2 ** 63 - 1."""
_BOOLEANS = {"true": True, "false": False}


class SelectorError(Exception):
    """A selector is invalid."""

    def __init__(self, at: int, reason: str) -> None:
        super().__init__(reason)
        self.at = at
        """Position of the fault: number of characters before it."""
        self.reason = reason


class Expression(NamedTuple):
    position: int
    """Position of this part: number of characters of the selector before it."""
    kind: str
    """Kind of the value: "truth", "number" or "text"; or "property", whose kind depends on the message."""
    test: Test
    names: frozenset[str] = frozenset()
    """Names of the properties that the part reads."""
    is_name: bool = False
    """True if the part is nothing but the name of a property."""
    conjuncts: tuple[Expression, ...] = ()
    """Operands of an AND, which must all be true; () if the part is no AND."""
    one_of: tuple[str, frozenset[str]] | None = None
    """Name of a property, and texts: the part can be true only if the property's value is one of the texts."""
    scan: int = 0
    """Number of characters in those pieces of LIKE patterns that have a _ and are between two %."""
    leaves: int = 1
    """Number of properties and constants that a test evaluates."""
    byte_ns: float = 0.0
    """Longest time of the LIKE conditions in nanoseconds, for each byte of a message's header lines."""
    form: Form = ""
    """Form of the part, which does not depend on blanks, capitals of keywords, spellings of numbers, and
    parentheses."""


def compile_condition(text: str) -> Expression:
    """Compile a selector.

    >>> compile_condition("weight > 2").test({"weight": "3"})
    True

    Raises: SelectorError if the selector is invalid.
    """
    try:
        _check_depth(text)
        prefix = activemq_prefixes(text)
        # Blanks replace the prefix, so that positions of faults stay right.
        blank = " " * len(prefix) + text[len(prefix) :]
        return _condition(_parser(is_hyphenated=HYPHENATED in prefix).parse(blank))
    except UnexpectedInput as error:
        is_end = isinstance(getattr(error, "token", None), Token) and error.token.type == "$END"  # type: ignore[attr-defined]
        at = len(text) if is_end or error.pos_in_stream is None else error.pos_in_stream
        raise SelectorError(at, "syntax error") from error


def activemq_prefixes(text: str) -> str:
    """Return the prefixes of ActiveMQ with which a selector begins; "" if it has none."""
    match = _PREFIXES.match(text)
    assert match is not None, "it may be empty"
    return match.group()


def conjuncts(part: Expression) -> tuple[Expression, ...]:
    """Return the operands of an AND, which must all be true; for any other part, the part itself."""
    return part.conjuncts or (part,)


@lru_cache(maxsize=2)
def _parser(*, is_hyphenated: bool) -> Any:
    grammar = _GRAMMAR.replace(r"[\w$]", r"[\w$-]") if is_hyphenated else _GRAMMAR
    # Parts are compiled while they are parsed: no tree, and no recursion into its levels.
    return Lark(grammar, parser="lalr", lexer="basic", transformer=_Compiler())


def _check_depth(text: str) -> None:
    depth = 0
    for match in re.finditer(r"'[^']*'|[()]", text):
        depth += {"(": 1, ")": -1}.get(match.group(), 0)
        if depth > SELECTOR_DEPTH_MAX:
            raise SelectorError(match.start(), f"more than {SELECTOR_DEPTH_MAX} nested parentheses")


@v_args(inline=True)
class _Compiler(Transformer[Token, Any]):
    """Compiler that goes from the leaves up: each part becomes a function of the properties of a message."""

    # ---- Conditions ----

    def either(self, *parts: Expression) -> Expression:
        conditions = [_condition(part) for part in parts]
        return _combine(conditions, "truth", _first_outcome(conditions, True), _form("OR", conditions))

    def both(self, *parts: Expression) -> Expression:
        conditions = [_condition(part) for part in parts]
        test = _first_outcome(conditions, False)
        conjuncts = tuple(one for condition in conditions for one in condition.conjuncts or (condition,))
        return _combine(conditions, "truth", test, _form("AND", conditions))._replace(conjuncts=conjuncts)

    def negation(self, *parts: Any) -> Expression:
        *signs, part = parts
        condition = _condition(part)
        return _negate(condition) if len(signs) % 2 else condition

    def comparison(self, left: Expression, sign: Token, right: Expression) -> Expression:
        return _comparison(left, sign, right, _at(sign))

    def between(self, part: Expression, is_not: Token | None, least: Expression, most: Expression) -> Expression:
        at_least = _comparison(part, ">=", least, least.position)
        at_most = _comparison(part, "<=", most, most.position)
        return _negate_if(self.both(at_least, at_most), is_not)

    def among(self, part: Expression, is_not: Token | None, *texts: Token) -> Expression:
        _expect_name(part, "IN")
        choices = frozenset(_unquote(token) for token in texts)
        evaluate = part.test

        def test(values: Values) -> bool | None:
            value = evaluate(values)
            return value in choices if isinstance(value, str) else None

        (name,) = part.names
        one_of = (name, choices) if part.kind == "property" else None
        form = ("IN", part.form, *sorted(choices))
        return _negate_if(_combine([part], "truth", test, form)._replace(one_of=one_of), is_not)

    def like(self, part: Expression, is_not: Token | None, pattern: Token, escape: Token | None) -> Expression:
        _expect_name(part, "LIKE")
        compiled = _compile_like(pattern, escape)
        evaluate, matches = part.test, compiled.matches

        def test(values: Values) -> bool | None:
            value = evaluate(values)
            return matches(value) if isinstance(value, str) else None

        form = ("LIKE", part.form, _unquote(pattern), escape and _unquote(escape))
        condition = _combine([part], "truth", test, form)
        return _negate_if(condition._replace(scan=compiled.scan, byte_ns=compiled.byte_ns), is_not)

    def is_null(self, part: Expression, is_not: Token | None) -> Expression:
        if not part.is_name:
            raise SelectorError(part.position, "IS NULL must follow the name of a property,")
        evaluate = part.test
        if is_not is not None:
            return _combine([part], "truth", lambda values: evaluate(values) is not None, ("IS NOT NULL", part.form))
        return _combine([part], "truth", lambda values: evaluate(values) is None, ("IS NULL", part.form))

    # ---- Values ----

    def arithmetic(self, *parts: Any) -> Expression:
        operands, signs = parts[::2], parts[1::2]
        for part in operands:
            _expect_number(part)
        first, *rest = [_numeric(part) for part in operands]
        steps = [(_divide if sign == "/" else _OPERATORS[sign], one) for sign, one in zip(signs, rest, strict=True)]

        def test(values: Values) -> Value:
            result = first(values)
            for calculate, one in steps:
                other = one(values)
                if result is None or other is None:
                    return None
                result = _calculate_or_none(calculate, result, other)
            return result  # type: ignore[no-any-return]

        level = "sum" if signs[0] in ("+", "-") else "product"
        # A chain is calculated from the left: parentheses around its beginning change nothing.
        first_form = operands[0].form
        is_chain = isinstance(first_form, tuple) and first_form[0] == level
        form: list[Form] = list(first_form) if is_chain else [level, first_form]
        for sign, operand in zip(signs, operands[1:], strict=True):
            form += [str(sign), operand.form]
        return _combine(operands, "number", test, tuple(form))

    def signed(self, *parts: Any) -> Expression:
        *signs, part = parts
        _expect_number(part)
        evaluate = _numeric(part)
        form = part.form if part.kind == "number" else ("+", part.form)
        if signs.count("-") % 2 == 0:
            return _combine([part], "number", evaluate, form)._replace(position=_at(signs[0]))

        def test(values: Values) -> Value:
            value = evaluate(values)
            return None if value is None else _calculate_or_none(operator.mul, value, -1)

        form = form[1] if isinstance(form, tuple) and form[0] == "-" else ("-", form)
        return _combine([part], "number", test, form)._replace(position=_at(signs[0]))

    def parentheses(self, part: Expression) -> Expression:
        return part._replace(is_name=False)

    def name(self, token: Token) -> Expression:
        name = str(token)
        kind = MESSAGE_PROPERTIES.get(name, "property")
        is_known = kind != "property" or name in HEADER_PROPERTIES or name.startswith(_JMS_PREFIXES)
        if name.startswith("JMS") and not is_known:
            raise SelectorError(_at(token), f"messages cannot be selected by {name[:100]}, but by {_JMS_HEADERS},")
        return Expression(_at(token), kind, lambda values: values.get(name), frozenset([name]), is_name=True, form=name)

    def text(self, token: Token) -> Expression:
        return _constant(token, "text", _unquote(token))

    def approximate(self, token: Token) -> Expression:
        value = float(token.rstrip("fFdD"))
        if value in (float("inf"), float("-inf")):
            raise SelectorError(_at(token), "a number too large for 64 bits")
        return _constant(token, "number", value)

    def exact(self, token: Token) -> Expression:
        return _constant(token, "number", _parse_exact(token))

    def truth(self, token: Token) -> Expression:
        return _constant(token, "truth", _BOOLEANS[token.lower()])


# ---- Parts ----


def _at(token: Token) -> int:
    assert token.start_pos is not None, "it came from the lexer"
    return token.start_pos


def _first_outcome(conditions: Iterable[Expression], outcome: bool) -> Test:
    """Make the test of an AND (`outcome` False) or an OR (True). The test returns `outcome` if any condition has this
    value; else unknown if a condition is unknown; else the opposite of `outcome`."""
    tests = [condition.test for condition in conditions]
    otherwise = not outcome

    def test(values: Values) -> bool | None:
        result: bool | None = otherwise
        for one in tests:
            value: bool | None = one(values)
            if value is outcome:
                return outcome
            if value is None:
                result = None
        return result

    return test


def _combine(parts: Iterable[Expression], kind: str, test: Test, form: Form) -> Expression:
    """Make an expression with these operands, whose `conjuncts` is empty."""
    parts = list(parts)
    names = frozenset().union(*(part.names for part in parts))
    return Expression(
        parts[0].position,
        kind,
        test,
        names,
        scan=sum(part.scan for part in parts),
        leaves=sum(part.leaves for part in parts),
        byte_ns=sum(part.byte_ns for part in parts),
        form=form,
    )


def _form(operator: str, parts: list[Expression]) -> Form:
    """Return the form of a chain of ANDs, or of ORs. Parentheses inside the chain do not change the form."""
    operands: list[Form] = []
    for part in parts:
        form = part.form
        if isinstance(form, tuple) and form[0] == operator:
            operands.extend(form[1:])
        else:
            operands.append(form)
    return (operator, *operands)


def _operand_form(part: Expression) -> Form:
    """Return the form of an operand of a comparison. In a comparison 1 and 1.0 have the same form, because numbers are
    compared by value."""
    value = part.test({}) if part.kind == "number" and not part.names else None
    return part.form if value is None else value


def _constant(token: Token, kind: str, value: Value) -> Expression:
    return Expression(_at(token), kind, lambda values: value, form=repr(value))


def _condition(part: Expression) -> Expression:
    """Return a part whose value is true, false or unknown. A property is converted to a truth value."""
    if part.kind == "truth":
        return part
    if part.kind != "property":
        raise SelectorError(part.position, f"a {part.kind} is not a condition")
    evaluate = part.test
    return _combine([part], "truth", lambda values: _boolean(evaluate(values)), part.form)


def _negate(part: Expression) -> Expression:
    evaluate, inner = part.test, part.form

    def test(values: Values) -> bool | None:
        value = evaluate(values)
        return None if value is None else not value

    form = inner[1] if isinstance(inner, tuple) and inner[0] == "NOT" else ("NOT", inner)
    return _combine([part], "truth", test, form)


def _negate_if(part: Expression, is_not: Token | None) -> Expression:
    return part if is_not is None else _negate(part)


def _expect_name(part: Expression, what: str) -> None:
    if not part.is_name or part.kind == "number":
        raise SelectorError(part.position, f"{what} must follow the name of a property that is text,")


def _expect_number(part: Expression) -> None:
    if part.kind not in ("number", "property"):
        raise SelectorError(part.position, f"a {part.kind} is not a number")


def _numeric(part: Expression) -> Test:
    """Return a test that returns the part's value as a number. Any other value is unknown."""
    evaluate = part.test
    return evaluate if part.kind == "number" else lambda values: _number(evaluate(values))


def _comparison(left: Expression, sign: str, right: Expression, at: int) -> Expression:
    """Make the comparison of two parts. If their values cannot be compared, the comparison is false, even for <>. `at`
    is its position, for an error."""
    is_equality = sign in ("=", "<>")
    kinds = {left.kind, right.kind} - {"property"}
    are_properties = not kinds
    if len(kinds) > 1:
        is_sum = any(part.kind == "number" and part.names and not part.is_name for part in (left, right))
        hint = " (for a name with a hyphen write hyphenated_props: before the whole selector)" if is_sum else ""
        raise SelectorError(at, f"a {left.kind} cannot be compared with a {right.kind}{hint}")
    kind = kinds.pop() if kinds else "text" if is_equality else "number"
    if not is_equality and kind != "number":
        raise SelectorError(at, f"{sign} is for numbers, not for a {kind},")
    compare, first, second = _OPERATORS[sign], left.test, right.test
    if are_properties and is_equality:
        compare = _differ if sign == "<>" else _are_equal
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

    def differ(values: Values) -> bool | None:
        one, other = first(values), second(values)
        if one is None or other is None:
            return None
        return isinstance(one, str) and isinstance(other, str) and one != other

    one_of = None
    if sign == "=" and kind == "text":
        for part, other in ((left, right), (right, left)):
            if part.is_name and part.kind == "property" and not other.names:
                (name,) = part.names
                one_of = (name, frozenset([str(other.test({}))]))
    form = (str(sign), _operand_form(left), _operand_form(right))
    is_text_inequality = sign == "<>" and kind == "text" and not are_properties
    return _combine([left, right], "truth", differ if is_text_inequality else test, form)._replace(one_of=one_of)


def _number(value: Value) -> int | float | None:
    """Return a number, or the number that a text states; None for any other value."""
    if type(value) is not str:
        return value if type(value) is int or type(value) is float else None
    if len(value) > _NUMBER_LENGTH_MAX:
        return None
    if _INTEGER.fullmatch(value) is not None:
        integer = int(value)
        return integer if -_INT64_LIMIT <= integer < _INT64_LIMIT else float(integer)
    return float(value) if _NUMBER.fullmatch(value) is not None else None


def _boolean(value: Value) -> bool | None:
    """Return a truth value, or that of the text "true" or "false"; None for any other value."""
    if type(value) is not str:
        return value if isinstance(value, bool) else None
    return _BOOLEANS.get(value.lower()) if len(value) <= 5 else None


def _are_alike(one: Value, other: Value) -> bool:
    """Return whether two values are of one type; all numbers are of one type."""
    if isinstance(one, str | bool):
        return isinstance(other, str) if isinstance(one, str) else isinstance(other, bool)
    return not isinstance(other, str | bool)


def _are_equal(one: Value, other: Value) -> bool:
    return _are_alike(one, other) and one == other


def _differ(one: Value, other: Value) -> bool:
    return _are_alike(one, other) and one != other


_CONVERSIONS: dict[str, Callable[[Value], Value] | None] = {"number": _number, "truth": _boolean, "text": None}
"""Functions that convert the text of a property, by the kind of the value with which it is compared."""


def _calculate_or_none(calculate: Callable[[Any, Any], Any], one: Any, other: Any) -> int | float | None:
    """Calculate with two numbers. Returns None (unknown) if Java has no result, or the result does not fit 64 bits."""
    try:
        result: int | float = calculate(one, other)
    except ArithmeticError:
        return None
    return result if isinstance(result, float) or -_INT64_LIMIT <= result < _INT64_LIMIT else None


def _divide(one: Any, other: Any) -> int | float:
    """Divide as Java does: the quotient of two whole numbers is rounded towards zero."""
    if isinstance(one, int) and isinstance(other, int):
        quotient = abs(one) // abs(other)
        return quotient if (one < 0) is (other < 0) else -quotient
    result: float = one / other
    return result


def _parse_exact(token: Token) -> int:
    digits = token.rstrip("lL").lower()
    base = 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10
    try:
        value = int(digits, base)
    except ValueError as error:
        raise SelectorError(_at(token), "not a number: a number that begins with 0 is octal") from error
    # The limit itself is allowed for a minus sign before it.
    if value > _INT64_LIMIT:
        raise SelectorError(_at(token), "a number too large for 64 bits")
    return value


def _unquote(token: Token) -> str:
    return token[1:-1].replace("''", "'")


def _compile_like(pattern: Token, escape: Token | None) -> Like:
    escape_character = None if escape is None else _unquote(escape)
    if escape is not None and len(_unquote(escape)) != 1:
        raise SelectorError(_at(escape), "ESCAPE must be one character")
    try:
        return compile_like(_unquote(pattern), escape_character)
    except ValueError as error:
        raise SelectorError(_at(pattern), str(error)) from error


# ---- LIKE: in a pattern % stands for any characters and _ for any one ----


class Like(NamedTuple):
    matches: Callable[[str], bool]
    scan: int = 0
    """Number of characters in those pieces that have a _ and are between two %."""
    byte_ns: float = 0.0
    """Longest time of a search in nanoseconds, for each byte of the text."""


def compile_like(pattern: str, escape: str | None) -> Like:
    """Compile a LIKE pattern.

    After the character `escape`, % and _ stand for themselves.

    A piece is the part of the pattern between two %. The text is searched for the pieces one after the other, and only
    the first position of each piece is tried. A regular expression for the whole pattern would try many positions.

    >>> like = compile_like("a!%_%", "!")
    >>> like.matches("a%b"), like.matches("abb")
    (True, False)

    Raises: ValueError if the pattern ends with its escape character
    """
    first, *others = _pieces(pattern, escape)
    starts_with_head, head_length = fixed_matcher(first), len(first)
    if not others:
        return Like(lambda value: len(value) == head_length and starts_with_head(value, 0))
    *inner, last = others
    middle = [piece_finder(piece) for piece in inner if piece]
    scan = sum(len(piece) for piece in inner if None in piece)
    byte_ns = sum(search_ns(piece) for piece in inner)
    ends_with_tail, tail_length = fixed_matcher(last), len(last)

    def matches(value: str) -> bool:
        if not starts_with_head(value, 0):
            return False
        at = head_length
        for find in middle:
            at = find(value, at)
            if at < 0:
                return False
        rest = len(value) - tail_length
        return rest >= at and ends_with_tail(value, rest)

    return Like(matches, scan, byte_ns)


def _pieces(pattern: str, escape: str | None) -> list[list[str | None]]:
    """Split a pattern at each %, into pieces. A piece is a list of characters; None stands for any one character."""
    pieces: list[list[str | None]] = [[]]
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            following = next(characters, None)
            if following is None:
                raise ValueError("a LIKE pattern must not end with its ESCAPE character (write it twice),")
            pieces[-1].append(following)
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append(None if character == "_" else character)
    return pieces
