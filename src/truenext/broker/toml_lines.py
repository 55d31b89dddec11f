"""In which line of a TOML file a table or a key stands: tomllib does not say.

The text has been read by tomllib before, so that nothing is checked here: what stands between keys is skipped.
"""

import re
import tomllib
from bisect import bisect_right

KeyPath = tuple[str, ...]
"""The names that lead to a table or value."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[A-Za-z0-9_-]+)"""
_KEY = re.compile(rf"{_NAME}(?:[ \t]*\.[ \t]*{_NAME})*")
_STRING = re.compile(
    r'''"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?'{3,5}|"(?:[^"\\]|\\.)*"|'[^']*\'''',
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]*")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")


def lines_of(text: str) -> dict[KeyPath, int]:
    """The line of every table and key, the first is 1. Keys in tables in arrays have none.

    >>> lines_of('a.b = 1\\n[c]\\nd = {e = 2}')[("c", "d", "e")]
    3
    """
    return _Scanner(text).lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line_ends = [found.start() for found in re.finditer("\n", text)]
        self.lines: dict[KeyPath, int] = {}
        table: KeyPath = ()
        while self._skip(_BLANK) < len(text):
            if text[self._at] == "[":
                # The second bracket of [[...]], if there is one.
                self._at += 2 if text.startswith("[[", self._at) else 1
                self._skip_spaces()
                line = self._line()
                table = self._key(())
                # Said itself, not only on the way to another.
                self.lines[table] = line
                self._at = text.index("]", self._at)
                while text.startswith("]", self._at):
                    self._at += 1
            else:
                self._pair(table)

    def _pair(self, table: KeyPath) -> None:
        path = self._key(table)
        self._skip(_EQUALS)
        self._value(path)

    def _key(self, table: KeyPath) -> KeyPath:
        line = self._line()
        found = _KEY.match(self._text, self._at)
        assert found is not None, "tomllib has found a key here"
        self._at = found.end()
        path = table
        # What escapes mean, tomllib knows.
        inner = tomllib.loads(f"{found[0]} = 0")
        while isinstance(inner, dict):
            ((name, inner),) = inner.items()
            path = (*path, name)
            self.lines.setdefault(path, line)
        return path

    def _value(self, path: KeyPath) -> None:
        match self._text[self._at]:
            case '"' | "'":
                self._skip(_STRING)
            case "[":
                self._array()
            case "{":
                self._at += 1
                self._skip(_BLANK)
                while self._text[self._at] != "}":
                    self._pair(path)
                    self._skip(_BLANK)
                    if self._text[self._at] == ",":
                        self._at += 1
                        self._skip(_BLANK)
                self._at += 1
            case _:
                self._skip(_SCALAR)

    def _array(self) -> None:
        depth = 0
        while True:
            match self._text[self._at]:
                case '"' | "'":
                    self._skip(_STRING)
                case "#":
                    self._skip(_BLANK)
                case bracket:
                    self._at += 1
                    depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(bracket, 0)
            if not depth:
                return

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self._text, self._at)
        assert match is not None, "tomllib has found it here"
        self._at = match.end()
        return self._at

    def _skip_spaces(self) -> None:
        while self._text[self._at] in " \t":
            self._at += 1

    def _line(self) -> int:
        return bisect_right(self._line_ends, self._at - 1) + 1
