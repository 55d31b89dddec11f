"""Name patterns, which the configuration file has for queues, and subscriptions have for topics and queues.

Names and patterns are words with dots between them. In a pattern `*` stands for any one word, and `>` at the end for
one or more words."""

import re
from collections.abc import Callable, Sequence


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern. Names of queues and topics have no * and no >."""
    return "*" in name or ">" in name


def fault_of_uri(text: str) -> str | None:
    """Return why a command or grant cannot have this name of a queue or topic, if the name is a URI of ActiveMQ; else
    None. The reason continues a sentence that begins with the name.

    >>> fault_of_uri("topic://news"), fault_of_uri("/queue/topic://news")
    ('is a URI of ActiveMQ: write /topic/news', None)
    """
    for scheme, prefix in (("queue://", ""), ("topic://", "/topic/")):
        if text.startswith(scheme):
            return f"is a URI of ActiveMQ: write {prefix}{text[len(scheme) :][:100]}"
    return None


def fault_of_pattern(pattern: str) -> str | None:
    """Return why a text is not a pattern; None if it is one.

    >>> fault_of_pattern("orders.>"), fault_of_pattern("orders.>.new")
    (None, '> is allowed only as the last word')
    """
    words = pattern.split(".")
    if "" in words:
        return "it has an empty word"
    if ">" in words[:-1]:
        return "> is allowed only as the last word"
    for word in words:
        if len(word) > 1 and set(word) & {"*", ">"}:
            return f"{word!r}: * and > are whole words, not parts of one"
    return None


def compile_patterns(patterns: Sequence[str]) -> Callable[[str], object]:
    """Return the function that tells, as true or false, whether a name is one of these names or matches one of these
    patterns.

    >>> is_named = compile_patterns(["orders.>", "*.eu", "a+b"])
    >>> [name for name in ("orders.new.eu", "orders", "b.eu", ".eu", "a+b", "aab") if is_named(name)]
    ['orders.new.eu', 'b.eu', 'a+b']
    """
    words = {"*": r"[^.]+", ">": r".+"}
    expressions = (r"\.".join(words.get(word) or re.escape(word) for word in each.split(".")) for each in patterns)
    return re.compile("|".join(expressions), re.DOTALL).fullmatch


def matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether a pattern matches a name, both as lists of words.

    >>> matches(["orders", ">"], ["orders", "new", "eu"]), matches(["orders", "*"], ["orders"])
    (True, False)
    """
    if pattern[-1] == ">":
        pattern = pattern[:-1]
        if len(words) <= len(pattern):
            return False
        words = words[: len(pattern)]
    return len(pattern) == len(words) and all(one in ("*", word) for one, word in zip(pattern, words, strict=True))
