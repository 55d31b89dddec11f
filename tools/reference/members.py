"""Members of a class and signatures of functions, read from their source.

The text of an attribute is the string below it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from tools.reference.markdown import WIDTH, code, fence, paragraphs, table


class Member(NamedTuple):
    name: str
    text: str
    """Signature or type."""
    doc: str
    is_call: bool


def members_of(cls: type) -> Iterator[Member]:
    """Yield the public members that the source of the class itself defines."""
    tree = _tree(cls)
    assert isinstance(tree, ast.ClassDef), "it is the source of a class"
    yield from _attributes(tree.body, cls)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == "__init__":
                yield from _attributes(node.body, cls)
            elif not node.name.startswith("_"):
                yield _member(node, cls)


def function_member(function: object) -> Member:
    node = _tree(function)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), "it is the source of a function"
    return _member(node, function)


def _tree(thing: object) -> ast.stmt:
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(thing))).body  # type: ignore[arg-type]
    return tree


def _attributes(body: list[ast.stmt], cls: type) -> Iterator[Member]:
    """Names that are given a type or a value, and the text below each."""
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
    if len(line) <= WIDTH:
        return line
    inner = f"    {', '.join(each)}" if len(", ".join(each)) <= WIDTH - 4 else "    " + ",\n    ".join(each) + ","
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


def call_parts(member: Member) -> Iterator[str]:
    """Yield the signature and the text of a function."""
    yield fence(member.text)
    yield from paragraphs(member.doc)


def table_of(members: list[Member]) -> Iterator[str]:
    """Yield a table of attributes, if there are any."""
    if members:
        kind = "value" if members[0].text.startswith("'") else "type"
        yield table(("name", kind, "is"), [(code(each.name), code(each.text), each.doc) for each in members])
