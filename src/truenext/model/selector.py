"""JMS selectors: compiled once, and tested against many messages.

    "colour = 'red' AND weight > 2.5"    --selector-->    Selector    --matches(message)-->    True or False

selector_grammar.py has the language. A message matches only if the whole condition is true. If a message has no header
with a name of the selector, underscores in the name are read as hyphens: content_type finds `content-type`.

Properties of a message in OpenWire form have types, and are compared by their types. All other values are header lines.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from sys import getsizeof
from types import BuiltinMethodType, CellType, FunctionType
from typing import NamedTuple
from weakref import WeakValueDictionary

from truenext.errors import Code, RemoteProtocolError
from truenext.model.forms import comparison_ns
from truenext.model.header_lines import HOP_BY_HOP_HEADERS, decode_header_lines, unescape
from truenext.model.limits import SELECTOR_CACHE_BYTES, SELECTOR_LENGTH_MAX, SELECTOR_PARTS_MAX, SELECTOR_SCAN_MAX
from truenext.model.loose_fields import encode_modified_utf8
from truenext.model.message import OPENWIRE_FORM, SentMessage
from truenext.model.openwire_message import (
    destination_as_sent,
    jms_headers,
    message_id,
    selector_values,
)
from truenext.model.order import PRIORITY_MAX, RANKS
from truenext.model.selector_grammar import (
    HYPHENATED,
    MESSAGE_PROPERTIES,
    PRIORITY,
    Expression,
    SelectorError,
    activemq_prefixes,
    compile_condition,
    conjuncts,
)
from truenext.model.values import HEADER_PROPERTIES, Value

_MESSAGE_ACCESSORS: dict[str, Callable[[SentMessage], Value]] = {
    PRIORITY: lambda message: message.priority,
    # The producer's time if it has stated one.
    "JMSTimestamp": lambda message: (
        jms_headers(message).timestamp_ms if message.form == OPENWIRE_FORM else message.arrived_ms
    ),
    "JMSDeliveryMode": lambda message: "PERSISTENT" if message.persistent else "NON_PERSISTENT",
    "JMSDestination": lambda message: (
        None if (destination := destination_as_sent(message)) is None else destination.qualified
    ),
    # The id of a message of a STOMP client depends on its queue, and is unknown here.
    "JMSMessageID": lambda message: message_id(message) if message.form == OPENWIRE_FORM else None,
}
"""Properties that are not in a message's header lines."""
assert _MESSAGE_ACCESSORS.keys() == MESSAGE_PROPERTIES.keys(), "a selector can name them"

_PURGE_LENGTH = 256
"""Length of a selector above which its regular expressions may be large. After such a selector is parsed, the cache of
the module `re` is emptied."""
_LOOKUPS_MAX = 8
"""Largest number of properties of one selector for which each is searched for in the header lines. For a selector with
more properties all header lines are decoded once."""

BASE_NS = 1500
LEAF_NS = 400
LOOKUP_BYTE_NS = 1
DECODING_LOOKUPS = 8
"""Model of the time that a comparison takes, in nanoseconds: BASE_NS, plus LEAF_NS for each leaf of the condition, plus
LOOKUP_BYTE_NS for each property and each byte of the header lines. Decoding all header lines takes as long as looking
up DECODING_LOOKUPS properties."""

_OWN_PREFIX = "truenext-"
_HYPHENATED_HEADERS = frozenset({"content-type", "content-length", "correlation-id", "reply-to"})
"""Headers of STOMP with hyphens. Without the prefix `hyphenated_props:`, these names are parsed as subtractions."""
_UNSTORED_HEADERS = HOP_BY_HOP_HEADERS | {"JMSXDeliveryCount"}
"""Headers that no stored message has. A selector that names one is refused, as it could never match."""
_ATTEMPTS_SUGGESTION = "for a dead letter use truenext_original_attempts"
_SUGGESTIONS = {
    "truenext-attempts": _ATTEMPTS_SUGGESTION,
    "truenext-deliveries": _ATTEMPTS_SUGGESTION,
    "JMSXDeliveryCount": _ATTEMPTS_SUGGESTION,
    "truenext-first-cause": "for a dead letter use truenext_original_first_cause",
    "truenext-last-cause": "for a dead letter use truenext_original_last_cause",
    "timestamp": "use JMSTimestamp",
}
_PARTS = re.compile(r"'[^']*'|[\w$.]+|[<>]=|<>|\S")
"""Pattern of one part of a selector: a text, name, keyword, number or sign. Each part takes time to compile."""
_NAMES = re.compile(r"'[^']*'|(?:[^\W\d]|\$)[\w$-]*")
"""Pattern of string literals and of names. Names that are joined by hyphens are found as one name."""


class HeaderProperty(NamedTuple):
    """Property that is found in the header lines by the first bytes of its line. This works because no name in a
    selector needs an escape."""

    name: str
    """Name in the selector."""
    first_start: bytes
    """First bytes of the property's line, if it is the first line."""
    line_start: bytes
    """Line feed, and the first bytes of the property's line, if it is not the first line."""
    fallback: HeaderProperty | None = None
    """Property to use if a message lacks this one, with hyphens in place of underscores in its name."""

    @classmethod
    def named(cls, name: str) -> HeaderProperty:
        """Return the property that a selector calls by this name."""
        header_name = HEADER_PROPERTIES.get(name, name)
        fallback = cls.named(_with_hyphens(header_name)) if "_" in header_name else None
        return cls(name, f"{header_name}:".encode(), f"\n{header_name}:".encode(), fallback)

    def value_in(self, header: bytes) -> str | None:
        """Return the value of the property in a message's header lines; None if the message lacks the property."""
        if header.startswith(self.first_start):
            at = len(self.first_start)
        else:
            at = header.find(self.line_start)
            if at < 0:
                return None if self.fallback is None else self.fallback.value_in(header)
            at += len(self.line_start)
        value = header[at : header.index(b"\n", at)].decode()
        return unescape(value) if "\\" in value else value

    def text_of(self, message: SentMessage) -> str | None:
        """Return the property of a message of either form if it is a text, else None."""
        if message.form != OPENWIRE_FORM:
            return self.value_in(message.header)
        value = _typed_values(message, _typed_names((self.name,)))[self.name]
        return value if isinstance(value, str) else None


def _with_hyphens(name: str) -> str:
    return name.replace("_", "-")


class _TypedNames(NamedTuple):
    """Names that a selector looks for in a message in OpenWire form."""

    by_key: dict[bytes, str]
    """Names of properties, those with hyphens included, by their modified UTF-8."""
    with_hyphens: dict[str, str]
    """Name that is used if a message lacks the property, by the name in the selector."""


@lru_cache(maxsize=256)
def _typed_names(names: tuple[str, ...]) -> _TypedNames:
    header_names = {name: HEADER_PROPERTIES.get(name, name) for name in names}
    with_hyphens = {name: _with_hyphens(header) for name, header in header_names.items() if "_" in header}
    return _TypedNames({encode_modified_utf8(name): name for name in (*with_hyphens.values(), *names)}, with_hyphens)


def _typed_values(message: SentMessage, names: _TypedNames) -> dict[str, Value]:
    """Return the values of these names in a message in OpenWire form; None for those that the message lacks."""
    values = dict.fromkeys(names.by_key.values()) | selector_values(message, names.by_key)
    for name, other in names.with_hyphens.items():
        if values[name] is None:
            values[name] = values[other]
    return values


class Selector:
    """Compiled selector: `matches` tests a message. Made by `compile_selector`."""

    __slots__ = (
        "__weakref__",
        "_accessors",
        "_header_name_by_property",
        "_lookups",
        "_test",
        "base_ns",
        "byte_ns",
        "ranks",
        "required",
        "size",
        "text",
    )

    def __init__(self, text: str, part: Expression) -> None:
        self.text = text
        self._test = part.test
        self._accessors = [(name, _MESSAGE_ACCESSORS[name]) for name in part.names if name in _MESSAGE_ACCESSORS]
        self._header_name_by_property = {
            name: HEADER_PROPERTIES.get(name, name) for name in part.names if name not in _MESSAGE_ACCESSORS
        }
        self._lookups: list[tuple[str, HeaderProperty]] = []
        if len(self._header_name_by_property) <= _LOOKUPS_MAX:
            self._lookups = [(name, HeaderProperty.named(name)) for name in self._header_name_by_property]
        self.ranks = _ranks(part)
        """Ranks of messages that can match. Messages of other ranks need not be tested."""
        one_of = next((one.one_of for one in conjuncts(part) if one.one_of is not None), None)
        self.required = None if one_of is None else (HeaderProperty.named(one_of[0]), one_of[1])
        """Property and texts: a message can match only if the property's value is one of the texts. None if the
        selector has no such condition."""
        self.base_ns = BASE_NS + LEAF_NS * part.leaves
        """Longest time of a comparison in nanoseconds, without the part that depends on the message."""
        self.byte_ns = round(part.byte_ns + LOOKUP_BYTE_NS * (len(self._lookups) or DECODING_LOOKUPS))
        """Additional longest time of a comparison in nanoseconds, for each byte of the message's header lines."""
        self.size = getsizeof(self) + _size(
            text, self._test, self._accessors, self._header_name_by_property, self._lookups, self.ranks, self.required
        )
        """Approximate bytes of memory."""

    def cost_ns(self, message: SentMessage) -> int:
        """Return about how long a comparison with this message takes at most, in nanoseconds."""
        return comparison_ns(message, self.base_ns, self.byte_ns)

    def matches(self, message: SentMessage) -> bool:
        values: dict[str, Value] = {}
        for name, get in self._accessors:
            values[name] = get(message)
        if message.form:
            names = tuple(self._header_name_by_property)
            if names:
                # Only short lists of names are kept.
                make = _typed_names if self._lookups else _typed_names.__wrapped__
                values |= _typed_values(message, make(names))
            return self._test(values) is True
        header = message.header
        for name, lookup in self._lookups:
            values[name] = lookup.value_in(header)
        if not self._lookups and self._header_name_by_property:
            headers = decode_header_lines(header)
            for name, header_name in self._header_name_by_property.items():
                value = headers.get(header_name)
                values[name] = (
                    headers.get(_with_hyphens(header_name)) if value is None and "_" in header_name else value
                )
        return self._test(values) is True


def _ranks(part: Expression) -> frozenset[int]:
    tests = [one.test for one in conjuncts(part) if one.names <= {PRIORITY}]
    return frozenset(rank for rank in RANKS if all(test({PRIORITY: PRIORITY_MAX - rank}) is True for test in tests))


class _SelectorCache:
    """Cache of compiled selectors. Subscriptions whose selectors have the same text share one object."""

    def __init__(self) -> None:
        self._live: WeakValueDictionary[str, Selector] = WeakValueDictionary()
        """Selectors by text. A selector that is not in `_recent` is freed when the last subscription with this selector
        ends."""
        self._recent: deque[Selector] = deque()
        """Selectors that were compiled last, kept for reuse. Some are large, so their total size is limited."""
        self._recent_bytes = 0

    def get(self, text: str) -> Selector | None:
        return self._live.get(text)

    def add(self, selector: Selector) -> None:
        self._live[selector.text] = selector
        self._recent.append(selector)
        self._recent_bytes += selector.size
        while self._recent_bytes > SELECTOR_CACHE_BYTES:
            self._recent_bytes -= self._recent.popleft().size


_cache = _SelectorCache()


def compile_selector(text: str) -> Selector:
    r"""Compile the selector of a client.

    >>> from truenext.model.message import SentMessage
    >>> message = SentMessage(7, True, 0, b"colour:red\n", b"")
    >>> compile_selector("colour LIKE 're_' AND JMSPriority > 6").matches(message)
    True

    Raises: RemoteProtocolError, with the position, if the text is invalid, or names a header that no message can have
    """
    if len(text) <= SELECTOR_LENGTH_MAX and (parts := _count_parts(text)) > SELECTOR_PARTS_MAX:
        raise RemoteProtocolError(
            f"selector of {parts} names, values, signs and %; at most {SELECTOR_PARTS_MAX}", Code.SELECTOR
        )
    try:
        _check_names(text)
    except SelectorError as error:
        raise _selector_error(text, error.at, error.reason) from error
    return compile_stored_selector(text)


def prepare_compiler() -> None:
    """Make the parsers now, so that the first client with a selector need not wait."""
    for text in ("TRUE", f"{HYPHENATED}TRUE"):
        compile_selector(text)


def compile_stored_selector(text: str) -> Selector:
    """Compile a selector that was accepted before, perhaps by a version in which selectors could name any header.

    Raises: RemoteProtocolError, with the position, if the text is invalid
    """
    found = _cache.get(text)
    if found is None:
        found = _compile(text)
        _cache.add(found)
    return found


def are_equivalent(one: str, other: str) -> bool:
    """Return whether two valid selectors are parsed to the same condition (C6.6). "" is no selector.

    >>> are_equivalent("a = 1 AND b", "(a=0x1) and b"), are_equivalent("a = 1", "a = '1'")
    (True, False)
    """
    if one == other or not (one and other):
        return one == other
    return compile_condition(one).form == compile_condition(other).form


def _count_parts(text: str) -> int:
    """Return the number of names, values, keywords and signs in a selector, which take time to compile. Each % counts
    once more, as each piece between two % takes time to search."""
    return sum(1 for _ in _PARTS.finditer(text)) + text.count("%")


def _check_names(text: str) -> None:
    """Check that a selector names only headers that a stored message can have, and that a hyphen in the name of a
    header is not read as a minus.

    Raises: SelectorError at the first name that is wrong
    """
    prefix = activemq_prefixes(text)
    is_hyphenated = HYPHENATED in prefix
    for name in _NAMES.finditer(text, len(prefix)):
        spelled = name.group()
        if spelled[0] == "'":
            continue
        _check_name(spelled, name.start())
        if is_hyphenated or "-" not in spelled:
            continue
        if spelled in _HYPHENATED_HEADERS or spelled.startswith(_OWN_PREFIX):
            plain = spelled.replace("-", "_")
            raise SelectorError(
                name.start(),
                f"{spelled[:100]} is a subtraction: write {plain[:100]}, or {HYPHENATED} before the whole selector,",
            )
        for each in spelled.split("-"):
            _check_name(each, name.start())


def _check_name(name: str, at: int) -> None:
    if name.startswith("truenext_"):
        name = name.replace("_", "-")
    if name in _UNSTORED_HEADERS:
        raise SelectorError(
            at,
            f"messages cannot be selected by {name}, which belongs to one delivery or one frame and is not stored: "
            f"{_SUGGESTIONS.get(name, 'leave it out')},",
        )


def _compile(text: str) -> Selector:
    if len(text) > SELECTOR_LENGTH_MAX:
        raise RemoteProtocolError(
            f"selector of {len(text)} characters; at most {SELECTOR_LENGTH_MAX}: let senders set one header for it",
            Code.SELECTOR,
        )
    try:
        part = compile_condition(text)
    except SelectorError as error:
        raise _selector_error(text, error.at, error.reason) from error
    if part.scan > SELECTOR_SCAN_MAX:
        reason = f"has more than {SELECTOR_SCAN_MAX} characters of LIKE in parts with _ between two %"
        raise RemoteProtocolError(f"selector {reason}", Code.SELECTOR)
    if len(text) > _PURGE_LENGTH:
        # The cache of `re` is not limited by the size of its expressions.
        re.purge()
    return Selector(text, part)


def _size(*roots: object) -> int:
    """Return the bytes of these objects and all their parts. Globals that functions use are not counted."""
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


def _selector_error(text: str, at: int, reason: str) -> RemoteProtocolError:
    if at >= len(text):
        return RemoteProtocolError(f"selector: {reason} at its end, after {text[-30:]!r}", Code.SELECTOR)
    return RemoteProtocolError(f"selector: {reason} at character {at + 1}, {text[at : at + 30]!r}", Code.SELECTOR)
