"""In which line of a TOML file does a key stand?"""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truenext.broker.toml_lines import KeyPath, lines_of


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ("a = 1\nb = 2", ("b",), 2),
        ("# c\n\n  a = 1", ("a",), 3),
        ("[t]\na = 1", ("t",), 1),
        ("[t]\na = 1", ("t", "a"), 2),
        ("[t] # [u]\n\n[ t . u ]\na = 1", ("t", "u", "a"), 4),
        ("[t.u]\n[t]\na = 1", ("t",), 2),
        ('[t."a.>"]\nb = 1', ("t", "a.>", "b"), 2),
        ("[t.'a]b']\nb = 1", ("t", "a]b", "b"), 2),
        ('x = 1\n"a\\tb\\u0041" = 1', ("a\tbA",), 2),
        ("a.b.c = 1\na.b.d = 2", ("a", "b", "d"), 2),
        ("a.b.c = 1\na.b.d = 2", ("a", "b"), 1),
        ("a = '''\nb = 1\n'''\nb = 2", ("b",), 4),
        ('a = """\\"""\nb = 1\n"""""\nb = 2', ("b",), 4),
        ('a = "# \\" [x]"\nb = 2', ("b",), 2),
        ("a = [ # ]\n  '[', {c = ']'},\n]\nb = 2", ("b",), 4),
        ("a = {b = 1, c.d = [\n1], e = {}}\nf = 1", ("a", "c", "d"), 1),
        ("a = {b = 1, c.d = [\n1], e = {}}\nf = 1", ("a", "e"), 2),
        ("a = {b = 1, c.d = [\n1], e = {}}\nf = 1", ("f",), 3),
        ("[[t]]\na = 1\n[[t]]\nb = 1", ("t", "b"), 4),
        ("a = 1979-05-27 07:32:00Z\nb = inf", ("b",), 2),
    ],
)
def test_a_key_stands_in(text: str, path: KeyPath, line: int) -> None:
    tomllib.loads(text)
    assert lines_of(text)[path] == line


BASIC = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters='"\\'), max_size=6)
NAMES = st.one_of(st.text("ab-_1", min_size=1, max_size=3), BASIC.map(lambda text: f'"{text}"'))
TEXTS = st.one_of(
    BASIC.map(lambda text: f'"{text}"'),
    BASIC.map(lambda text: f'"""{text}\n[a]\nb = 1 # {text}"""'),
    st.just("'''\n'' # [x]\n'''''"),
    st.just('"\\\\\\""'),
)
SCALARS = st.one_of(TEXTS, st.sampled_from(["1", "-0.5e3", "true", "inf", "2026-11-21", "1979-05-27 07:32:00"]))
ARRAYS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3).map(lambda each: "[ # ]\n" + ",\n".join(each) + "\n]"),
    max_leaves=5,
)
VALUES = st.recursive(
    ARRAYS,
    lambda inner: st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, max_size=3).map(
        lambda table: "{" + ", ".join(f"{name} = {value}" for name, value in table.items()) + "}"
    ),
    max_leaves=4,
)
LINES = st.lists(
    st.one_of(
        st.tuples(st.just("key"), st.lists(NAMES, min_size=1, max_size=3), VALUES),
        st.tuples(st.sampled_from(["table", "array"]), st.lists(NAMES, min_size=1, max_size=3), st.just("")),
        st.tuples(st.just("comment"), st.just([]), st.just("# [x] = 'y'")),
    ),
    max_size=10,
)


def paths(content: dict[str, Any], above: KeyPath = ()) -> set[KeyPath]:
    found = set()
    for name, value in content.items():
        found.add((*above, name))
        if isinstance(value, dict):
            found |= paths(value, (*above, name))
    return found


@given(LINES)
def test_every_key_of_a_file_has_the_line_that_it_was_written_to(
    parts: list[tuple[str, list[str], str]],
) -> None:
    """What TOML does not allow (keys twice) is left out when it shows."""
    text = ""
    written: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for kind, names, value in parts:
        dotted = " . ".join(names)
        more = {"key": f"{dotted} = {value} # c\n", "table": f"[ {dotted} ]\n", "array": f"[[{dotted}]]\n"}.get(
            kind, value + "\n"
        )
        try:
            tomllib.loads(text + more)
        except tomllib.TOMLDecodeError:
            continue
        own = tuple(name.removeprefix('"').removesuffix('"') for name in names)
        if kind in ("table", "array"):
            table = own
        if kind != "comment":
            written[table if kind != "key" else (*table, *own)] = text.count("\n") + 1
        text += more
    lines = lines_of(text)
    # A table that is a list has been written to several times; the last counts, of its keys, too.
    assert {path: lines[path] for path in written} == written or "[[" in text
    assert paths(tomllib.loads(text)) <= lines.keys()
