"""Name patterns: of queues in the configuration file, of topics and queues in a subscription.

Names and patterns consist of words with dots between them: `*` stands for one word, `>` at the end for one or more.
"""

from collections.abc import Sequence


def is_pattern(name: str) -> bool:
    """Whether a name is a pattern: no name of a queue or topic has these characters."""
    return "*" in name or ">" in name


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


def matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """
    >>> matches(["orders", ">"], ["orders", "new", "eu"]), matches(["orders", "*"], ["orders"])
    (True, False)
    """
    if pattern[-1] == ">":
        pattern = pattern[:-1]
        if len(words) <= len(pattern):
            return False
        words = words[: len(pattern)]
    return len(pattern) == len(words) and all(one in ("*", word) for one, word in zip(pattern, words, strict=True))
