"""Oracle of grants, by docs/security.md alone.

Naive on purpose: it enumerates every queue and topic whose name has at most `NAME_WORDS_MAX` words of `WORDS`, and
compares the sets that two patterns match. A drawn pattern has at most `PATTERN_WORDS_MAX` words, all of `WORDS`: names
with one word more are long enough to tell any two of them apart, and a pattern has a single word at each position, so
that `WORDS` always has another.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product

from hypothesis import strategies as st

RESERVED = ("DLQ", "Spark")
"""First words of queue names that a wildcard does not stand for where more words follow."""
WORDS = ("a", "dlq", *RESERVED, "Consumer", "VirtualTopic")
PATTERN_WORDS_MAX = 4
NAME_WORDS_MAX = PATTERN_WORDS_MAX + 1
NAMES = [words for count in range(1, NAME_WORDS_MAX + 1) for words in product(WORDS, repeat=count)]

RIGHTS = ("send", "take", "browse", "manage")


# ---- Patterns ----


def covers(grant: str, requested: str) -> bool:
    """Whether a grant allows all that `requested`, a pattern or a name, stands for."""
    return matched(requested) <= matched(grant)


@cache
def matched(pattern: str) -> frozenset[str]:
    """Return the addresses that a pattern stands for."""
    kind, words = split(pattern)
    return frozenset(f"/{kind}/{'.'.join(name)}" for name in NAMES if _stands_for(kind, words, name))


def split(pattern: str) -> tuple[str, tuple[str, ...]]:
    """Return whether a pattern is one of queues or topics, and its words."""
    if pattern.startswith("/topic/"):
        return "topic", tuple(pattern.removeprefix("/topic/").split("."))
    return "queue", tuple(pattern.removeprefix("/queue/").split("."))


def _stands_for(kind: str, words: tuple[str, ...], name: tuple[str, ...]) -> bool:
    is_first_word_wildcard = words[0] in ("*", ">")
    is_of_virtual_topic = len(name) > 3 and (name[0], name[2]) == ("Consumer", "VirtualTopic")
    is_reserved = kind == "queue" and ((name[0] in RESERVED and len(name) > 1) or is_of_virtual_topic)
    return not (is_first_word_wildcard and is_reserved) and _do_words_match(words, name)


def _do_words_match(words: tuple[str, ...], name: tuple[str, ...]) -> bool:
    if not words or not name:
        return not words and not name
    if words[0] == ">":
        return True
    return words[0] in ("*", name[0]) and _do_words_match(words[1:], name[1:])


# ---- Users ----


def may(grants: Mapping[str, Sequence[str]], right: str, requested: str) -> bool:
    """Whether a user with lists of patterns by right has the right to all of `requested`."""
    return any(covers(grant, requested) for grant in grants.get(right, ()))


def owns_client_id(user: str, client_ids: Sequence[str], client_id: str) -> bool:
    return client_id == user or client_id[: len(user) + 1] == user + "." or client_id in client_ids


# ---- Draws ----

_prefixes = st.sampled_from(["", "/queue/", "/topic/"])


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """Draw a pattern, or a name; one in four has the words of a queue of a virtual topic, or the first of them."""
    word = st.sampled_from(["*", *WORDS]) if draw(st.booleans()) else st.sampled_from(WORDS)
    words = draw(st.lists(word, max_size=PATTERN_WORDS_MAX))
    if not draw(st.integers(0, 3)):
        topic = draw(st.sampled_from(["VirtualTopic", "VirtualTopic", "*"]))
        words = ["Consumer", draw(word), topic, draw(word)][: draw(st.integers(1, PATTERN_WORDS_MAX))]
    if not words or (len(words) < PATTERN_WORDS_MAX and draw(st.booleans())):
        words.append(draw(st.sampled_from([">", *WORDS])))
    return draw(_prefixes) + ".".join(words)


@st.composite
def wider(draw: st.DrawFn, pattern: str) -> str:
    """Draw a pattern of the same kind, with wildcards in place of words or one more: it often covers the other."""
    kind, words = split(pattern)
    wider_words = [draw(st.sampled_from([word, word, "*"])) for word in words]
    if draw(st.booleans()):
        end = len(words) - 1 if words[-1] == ">" or len(words) == PATTERN_WORDS_MAX else len(words)
        wider_words[draw(st.integers(0, end)) :] = [">"]
    prefix = "/topic/" if kind == "topic" else draw(st.sampled_from(["", "/queue/"]))
    return prefix + ".".join(wider_words)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a grant and what is requested: unrelated, or alike."""
    requested = draw(patterns())
    grant = draw(st.one_of(patterns(), wider(requested), wider(requested)))
    return (grant, requested) if draw(st.integers(0, 3)) else (requested, grant)


@st.composite
def grants(draw: st.DrawFn, requested: str) -> dict[str, list[str]]:
    """Draw grants of a user that may want `requested`."""
    rights = draw(st.lists(st.sampled_from(RIGHTS), unique=True))
    return {right: draw(st.lists(st.one_of(patterns(), wider(requested)), max_size=3)) for right in rights}
