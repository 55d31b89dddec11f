"""Generator of docs/reference.md from the client's signatures and docstrings: `make reference`.

Texts that a docstring cannot hold, such as those of the options of a TypedDict, stand below the line they describe.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import truenext
from truenext import blocking
from truenext.client.core.buffer import ReceivedMessage
from truenext.client.core.send_options import SendOptions
from truenext.client.core.subscriptions import ConsumerOptions

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
_WIDTH = 120
_HEAD = """\
# Reference of the client

Every name of `truenext.connect`, with what it takes, returns and raises. What all of it promises together is in
[client.md](client.md). All durations are in seconds, unless a name ends with `_ms`.

`truenext.blocking` has the same names, for threads: `async` and `await` are left out, `async with` is `with`,
`async for` is `for`, and what is said of tasks and a cancellation is true of threads and Ctrl-C. What else differs is
[at the end](#in-truenextblocking).

What returns `AwaitableContext[X]` is awaited, which gives an X; or it is used in an `async with`, which also closes it.

This page is made from the docstrings: `make reference`.
"""
_CLASSES: tuple[type, ...] = (
    truenext.Connection,
    SendOptions,
    ConsumerOptions,
    truenext.Outgoing,
    truenext.Sent,
    truenext.Session,
    truenext.Consumer,
    truenext.Message,
    truenext.Content,
    truenext.Processing,
    truenext.Transaction,
    truenext.Outcome,
    truenext.Health,
    truenext.ConsumerHealth,
)
"""In the order of the page."""
_OF_MESSAGE = {"may_have_missed"}
"""Attributes of `ReceivedMessage`, the base class of a message, that a program uses."""
_ERRORS: tuple[type, ...] = (
    truenext.TruenextError,
    truenext.ClosedError,
    truenext.ConfigurationError,
    truenext.ConnectionLost,
    truenext.InDoubt,
    truenext.LocalProtocolError,
    truenext.Refused,
    truenext.RolledBack,
    truenext.Code,
)


class Member(NamedTuple):
    name: str
    text: str
    """Signature or type."""
    doc: str
    is_call: bool


def page() -> str:
    names = [cls.__name__ for cls in _CLASSES]
    index = " · ".join(f"[{name}](#{name.lower()})" for name in ("connect", *names, "Errors", "Codes"))
    parts = [_HEAD, _wrapped(index), "## connect", *_call(_function_of(truenext.connect))]
    for cls in _CLASSES:
        parts += _class(cls)
    parts += ["## Errors", "All are in `truenext`, and are a `TruenextError`."]
    for error in _ERRORS:
        if error is not truenext.Code:
            parts += [f"### {error.__name__}", *_text(inspect.getdoc(error) or ""), *_table(list(members_of(error)))]
    codes = ", ".join(f"`{code.value}`" for code in truenext.Code)
    parts += ["## Codes", _wrapped(f"`truenext.Code`: why the broker has refused something, for a program. {codes}.")]
    parts += [_wrapped("[stomp.md](stomp.md#codes) says what each of them means.")]
    parts += ["## In truenext.blocking", *_differences()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def members_of(cls: type) -> Iterator[Member]:
    """Yield the public members that the source of the class itself defines."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef), "it is the source of a class"
    yield from _attributes(tree.body, cls)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == "__init__":
                yield from _attributes(node.body, cls)
            elif not node.name.startswith("_"):
                yield _member(node, cls)


def _attributes(body: list[ast.stmt], cls: type) -> Iterator[Member]:
    """Names that are given a type or a value, and what the text below says of them."""
    for number, node in enumerate(body):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind):
                text = ast.unparse(kind)
            case ast.Assign(targets=[ast.Name(id=name)]) if issubclass(cls, Enum):
                text = repr(getattr(cls, name).value)
            case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name), annotation=kind):
                text = ast.unparse(kind)
            case _:
                continue
        below = body[number + 1] if number + 1 < len(body) else None
        doc = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            doc = inspect.cleandoc(below.value.value)
        if not name.startswith("_"):
            yield Member(name, text, doc, is_call=False)


def _function_of(function: object) -> Member:
    [node] = ast.parse(inspect.getsource(function)).body  # type: ignore[arg-type]
    assert isinstance(node, ast.FunctionDef), "it is the source of a function"
    return _member(node, function)


def _member(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: object) -> Member:
    doc = ast.get_docstring(node) or ""
    if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list):
        return Member(node.name, ast.unparse(node.returns) if node.returns else "", doc, is_call=False)
    return Member(node.name, _signature(node, sys.modules[inspect.getmodule(owner).__name__]), doc, is_call=True)  # type: ignore[union-attr]


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, module: object) -> str:
    """Return the signature as in a stub; a default that has a name is shown as its value."""
    arguments = node.args
    arguments.args = [each for each in arguments.args if each.arg != "self"]
    for defaults in (arguments.defaults, arguments.kw_defaults):
        for number, default in enumerate(defaults):
            if isinstance(default, ast.Name):
                defaults[number] = ast.Constant(getattr(module, default.id))
    if arguments.kwarg is not None and isinstance(arguments.kwarg.annotation, ast.Subscript):
        # Unpack[...]
        arguments.kwarg.annotation = arguments.kwarg.annotation.slice
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    end = f" -> {ast.unparse(node.returns)}: ..." if node.returns else ": ..."
    each = [re.sub(r"^(\w+: [^=]+)=", r"\1 = ", text) for text in _split(ast.unparse(arguments).replace("'", '"'))]
    line = f"{keyword} {node.name}({', '.join(each)}){end}"
    if len(line) <= _WIDTH:
        return line
    inner = f"    {', '.join(each)}" if len(", ".join(each)) <= _WIDTH - 4 else "    " + ",\n    ".join(each) + ","
    return f"{keyword} {node.name}(\n{inner}\n){end}"


def _split(arguments: str) -> list[str]:
    """Split at commas outside of brackets."""
    depth, parts = 0, [""]
    for character in arguments:
        depth += (character in "([") - (character in ")]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _class(cls: type) -> Iterator[str]:
    yield f"## {cls.__name__}"
    if cls is truenext.Outgoing:
        yield "```python\nOutgoing(body: bytes | str, **options: SendOptions)\n```"
    # Not that of a class from which it is made.
    yield from _text(inspect.cleandoc(cls.__doc__ or ""))
    members = list(members_of(cls))
    if cls is truenext.Message:
        members += [each for each in members_of(ReceivedMessage) if each.name in _OF_MESSAGE]
    yield from _table([each for each in members if not each.is_call])
    if cls is truenext.Message:
        yield "It also has everything that [Content](#content) has."
    for member in members:
        if member.is_call:
            yield f"### {cls.__name__}.{member.name}"
            yield from _call(member)


def _call(member: Member) -> Iterator[str]:
    yield f"```python\n{member.text}\n```"
    yield from _text(member.doc)


def _table(members: list[Member]) -> Iterator[str]:
    if members:
        kind = "value" if members[0].text.startswith("'") else "type"
        rows = [
            f"| `{each.name}` | {_code(each.text)} | {' '.join(each.doc.split()).replace('|', chr(92) + '|')} |"
            for each in members
        ]
        yield "\n".join((f"| name | {kind} | is |", "|---|---|---|", *rows))


def _code(said: str) -> str:
    return f"`{said}`".replace("|", "\\|") if said else ""


def _text(doc: str) -> Iterator[str]:
    for paragraph in doc.split("\n\n"):
        text = " ".join(paragraph.split())
        if text:
            yield _wrapped(text.replace("Raises:", "**Raises:**", 1) if text.startswith("Raises:") else text)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _differences() -> Iterator[str]:
    """Yield the members of `truenext.blocking` that differ from those of the asynchronous client."""
    yield from _difference("connect", _function_of(truenext.connect), _function_of(blocking.connect))
    for cls in _CLASSES:
        twin = getattr(blocking, cls.__name__, cls)
        if twin is cls:
            continue
        here = {each.name: each for each in members_of(cls)}
        for member in members_of(twin):
            yield from _difference(f"{cls.__name__}.{member.name}", here.get(member.name), member)


def _difference(name: str, here: Member | None, there: Member) -> Iterator[str]:
    if here is None or _without_tasks(here.text + here.doc) != _without_tasks(there.text + there.doc):
        assert there.is_call, f"{name} is another value there"
        yield f"### blocking: {name}"
        yield from _call(there)


def _without_tasks(text: str) -> str:
    for pattern, instead in (
        ("async ", ""),
        ("AsyncIterator", "Iterator"),
        ("Awaitable[None]", "None"),
        ("AwaitableContext[Connection]", "Connection"),
        ("AwaitableContext[Consumer]", "Consumer"),
        ("AwaitableContext[Session]", "Session"),
    ):
        text = text.replace(pattern, instead)
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(page())
