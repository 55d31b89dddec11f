"""Table of all texts in the code that a user can see, tests/unit/texts.txt: `make texts`.

The table lists texts by file, kind and text, without line numbers. Kinds are:

    raise    message of an exception that is raised, of two words or more
    log      message of a log record
    help     help of a command or of an option
    setting  meaning, reason or unit of a setting
    text     any other string of two words or more: a reason, an answer, part of a report

An f-string has the names of its values in braces. Docstrings (but those of commands), annotations, messages of asserts
and code such as SQL are not texts. The code is parsed, not imported: this needs no package that is not in Python.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
SOURCE = _ROOT / "src" / "truenext"
TABLE = _ROOT / "tests" / "unit" / "texts.txt"

_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
_HELP_ARGUMENTS = {"help", "short_help", "epilog"}
_COMMAND_DECORATORS = {"command", "group"}
_WORD = re.compile(r"[A-Za-z]{2}")
_TWO_WORDS = re.compile(r"[A-Za-z]{2}.* .*[a-z]{2}|[a-z]{2}.* .*[A-Za-z]{2}", re.DOTALL)
_CODE = re.compile(
    r"\s*(ALTER|BEGIN|COMMIT|CREATE|DELETE|DROP|INSERT|PRAGMA|SAVEPOINT|SELECT|SET|UPDATE|WHERE|WITH) "
    # A type, a grammar.
    r"|\w+\[.*\]$"
    r"|\n    \?start"
)


def table() -> str:
    """Return the text of the table."""
    lines: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        if texts := texts_of(path.read_text(encoding="utf-8")):
            lines += ["", path.relative_to(SOURCE).as_posix()]
            lines += [f"  {kind:8}{text}" for kind, text in sorted(texts)]
    return "\n".join(lines[1:]) + "\n"


def texts_of(source: str) -> set[tuple[str, str]]:
    """Return kind and text of each text in the source of a module."""
    return set(_texts(ast.parse(source), "text"))


def _texts(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Constant(value=str(value)):
            yield from _entry(value, kind)
            return
        case ast.JoinedStr(values=values):
            yield from _entry("".join(_part(each) for each in values), kind)
            for part in values:
                if isinstance(part, ast.FormattedValue):
                    yield from _texts(part.value, kind)
            return
        case ast.Assert(test=test):
            yield from _texts(test, kind)
            return
        case ast.Expr(value=ast.Constant()):
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef() if any(map(_is_command, node.decorator_list)):
            yield from _entry(ast.get_docstring(node) or "", "help")
        case ast.Raise():
            kind = "raise"
        case ast.Call(func=ast.Attribute(attr=method, value=ast.Name(id=name)), args=[message, *_]) if (
            method in _LOG_METHODS and "log" in name.lower()
        ):
            yield from _texts(message, "log")
            for each in (*node.args[1:], *node.keywords):
                yield from _texts(each, kind)
            return
        case ast.Call(func=ast.Name(id="setting")):
            kind = "setting"
        case ast.keyword(arg=name) if name in _HELP_ARGUMENTS:
            kind = "help"
    for field, child in ast.iter_fields(node):
        if field in ("annotation", "returns", "format_spec"):
            continue
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, ast.AST):
                yield from _texts(each, kind)


def _entry(text: str, kind: str) -> Iterator[tuple[str, str]]:
    is_text = _TWO_WORDS if kind in ("raise", "text") else _WORD
    if is_text.search(text) and not _CODE.match(text):
        # One line a text, and no space at an end that an editor removes.
        line = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')
        yield kind, line if line == line.strip() else f'"{line}"'


def _part(node: ast.expr) -> str:
    """Return the text of a constant of an f-string, or the name of a value in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    assert isinstance(node, ast.FormattedValue), "an f-string has nothing else"
    conversion = f"!{chr(node.conversion)}" if node.conversion > 0 else ""
    return f"{{{_name(node.value)}{conversion}}}"


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Attribute(attr="join"), args=[each]):
            return _name(each)
        case ast.Call(func=function):
            return _name(function)
        case ast.Subscript(value=value) | ast.Await(value=value):
            return _name(value)
        case ast.GeneratorExp(elt=value) | ast.ListComp(elt=value):
            return _name(value)
    return "..."


def _is_command(decorator: ast.expr) -> bool:
    return (
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Attribute)
        and decorator.func.attr in _COMMAND_DECORATORS
    )


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
