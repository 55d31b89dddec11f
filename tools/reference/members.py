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
from types import ModuleType
from typing import NamedTuple

from tools.reference.markdown import WIDTH, code, fence, paragraphs, table


class Parameter(NamedTuple):
    name: str
    """Name, with its stars."""
    kind: str
    default: str
    """Default value as source text; empty if there is none."""


class Member(NamedTuple):
    name: str
    text: str
    """Signature or type."""
    doc: str
    is_call: bool
    parameters: tuple[Parameter, ...] = ()
    short: str = ""
    """Signature without the types of the parameters, for a member whose parameters are described one by one."""


def members_of(cls: type) -> Iterator[Member]:
    """Yield the public members that the source of the class itself defines."""
    tree = _tree(cls)
    assert isinstance(tree, ast.ClassDef), "it is the source of a class"
    yield from _attributes(tree.body, cls)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == "__init__":
                yield from _attributes(node.body, cls)
            elif not node.name.startswith("_") and not _has_decorator(node, "overload"):
                yield _member(node, cls)


def function_member(function: object) -> Member:
    node = _tree(function)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), "it is the source of a function"
    return _member(node, function)


def _tree(thing: object) -> ast.stmt:
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(thing))).body  # type: ignore[arg-type]
    return tree


def constructor_of(cls: type) -> Member:
    """Return `__init__` of a class or of its base class, under the name of the class."""
    member = function_member(cls.__init__)  # type: ignore[misc]
    return member._replace(short=cls.__name__ + member.short.removeprefix("__init__").removesuffix(" -> None"))


def text_below(module: ModuleType, name: str) -> str:
    """Return the string below the value of this name in a module."""
    body = ast.parse(inspect.getsource(module)).body
    for number, node in enumerate(body):
        match node:
            case ast.AnnAssign(target=ast.Name(id=found)) | ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                return _string_at(body, number + 1)
    raise AssertionError(f"{module.__name__} has no {name}")


def _string_at(body: list[ast.stmt], number: int) -> str:
    match body[number : number + 1]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return text
    return ""


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
        if not name.startswith("_"):
            yield Member(name, text, inspect.cleandoc(_string_at(body, number + 1)), is_call=False)


def _member(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: object) -> Member:
    doc = ast.get_docstring(node) or ""
    returns = ast.unparse(node.returns) if node.returns else ""
    if _has_decorator(node, "property"):
        return Member(node.name, returns, doc, is_call=False)
    text = _signature(node, sys.modules[inspect.getmodule(owner).__name__])  # type: ignore[union-attr]
    if _has_decorator(node, "asynccontextmanager"):
        returns = returns.replace("AsyncIterator", "AsyncContextManager", 1)
    elif _has_decorator(node, "contextmanager"):
        returns = returns.replace("Iterator", "ContextManager", 1)
    parameters = tuple(_parameters(node.args))
    names = [f"{each.name}={each.default}" if each.default else each.name for each in parameters]
    if node.args.kwonlyargs and not node.args.vararg:
        names.insert(len(node.args.posonlyargs) + len(node.args.args), "*")
    if node.args.posonlyargs:
        names.insert(len(node.args.posonlyargs), "/")
    is_awaited = isinstance(node, ast.AsyncFunctionDef) and not _has_decorator(node, "asynccontextmanager")
    start = "await " if is_awaited else ""
    end = f" -> {returns}" if returns else ""
    return Member(node.name, text, doc, True, parameters, f"{start}{node.name}({', '.join(names)}){end}")


def _has_decorator(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in node.decorator_list)


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    """Yield the parameters in the order of the signature."""
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    for each, default in zip(positional, [*[None] * missing, *arguments.defaults], strict=True):
        yield _parameter(each, "", default)
    if arguments.vararg is not None:
        yield _parameter(arguments.vararg, "*", None)
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(each, "", default)
    if arguments.kwarg is not None:
        yield _parameter(arguments.kwarg, "**", None)


def _parameter(argument: ast.arg, stars: str, default: ast.expr | None) -> Parameter:
    kind = ast.unparse(argument.annotation) if argument.annotation else ""
    return Parameter(stars + argument.arg, kind, ast.unparse(default).replace("'", '"') if default else "")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, module: object) -> str:
    """Return the signature as in a stub; a default that has a name is shown as its value."""
    arguments = node.args
    arguments.posonlyargs = [each for each in arguments.posonlyargs if each.arg != "self"]
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


def described_call_parts(member: Member, owner: str = "") -> Iterator[str]:
    """Yield the signature and the text of a function, with a table of its parameters from `Args:` of its docstring.

    Raises: ValueError if the docstring does not describe all of its parameters, and no other
    """
    before, texts, after = _split_args(member.doc)
    names = [each.name for each in member.parameters]
    if names != list(texts):
        raise ValueError(f"Args of {member.name} in the docstring are {list(texts)}, its parameters {names}")
    name = member.short.removeprefix("await ")
    start = member.short.removesuffix(name)
    yield fence(_shortened(f"{start}{owner}{name}"))
    yield from paragraphs(before)
    if texts:
        rows = [
            (code(each.name), code(each.kind), code(each.default) or _without_default(each.name), texts[each.name])
            for each in member.parameters
        ]
        yield table(("parameter", "type", "default", "meaning"), rows)
    yield from paragraphs(after)


def _without_default(name: str) -> str:
    return "" if name.startswith("*") else "required"


def _shortened(line: str) -> str:
    """Return the signature, in several lines if it is too long for one."""
    if len(line) <= WIDTH:
        return line
    [(start, arguments, end)] = re.findall(r"^(.*?\()(.*)(\).*)$", line)
    return "\n".join((start, textwrap.indent(textwrap.fill(f"{arguments},", WIDTH - 4), "    "), end))


def _split_args(doc: str) -> tuple[str, dict[str, str], str]:
    """Return the text before `Args:`, the text of each parameter, and the text after them."""
    before, _, rest = doc.partition("Args:\n")
    block, _, after = rest.partition("\n\n")
    texts: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", block) if block else ():
        name, _, text = entry.strip().partition(": ")
        texts[name] = " ".join(text.split())
    return before, texts, after


def table_of(members: list[Member]) -> Iterator[str]:
    """Yield a table of attributes, if there are any."""
    if members:
        kind = "value" if members[0].text.startswith("'") else "type"
        yield table(("name", kind, "is"), [(code(each.name), code(each.text), each.doc) for each in members])
