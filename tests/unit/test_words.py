"""Tests that docstrings and names of tests name their subject: "Words" in CONTRIBUTING.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRONOUN = (
    "(what|who|whom|whose|which|when|where|how)(ever)?|why|its?|they|them|their|he|she|his|her|those|these|that|"
    "there|here|(no|some)(body|thing)|of"
)
HIDDEN_IN_NAME = re.compile(rf"test_({PRONOUN}|none|this)(_|$)")
HIDDEN_IN_TEXT = re.compile(
    rf"({PRONOUN}|(any|every)(body|thing)|all|another|as|at|before|behind|beside|both|by|else|for|from|more|not|only|"
    r"others?|since|so|such|then|until|while|one of|the same|to be|up to|if (it|not)|in which)\b",
    re.IGNORECASE,
)
HIDDEN_SHARE_MAX = 0.02
"""Share of the docstrings of a folder that may seem to hide their subject: a first word does not tell for sure."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module, classes, functions and attributes included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for before, statement in zip([None, *node.body], node.body, strict=False):
                match statement:
                    case ast.Expr(ast.Constant(str(text))) if before is None or isinstance(
                        before, ast.Assign | ast.AnnAssign
                    ):
                        yield statement.lineno, text.strip()


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(
    "folder",
    [
        "src",
        *(
            pytest.param(each, marks=pytest.mark.alternates("words"))
            for each in ("tests", "bench", "examples", "tools")
        ),
    ],
)
def test_docstrings_name_their_subject(folder: str) -> None:
    found = [(path, *one) for path in files(folder) for one in docstrings(ast.parse(path.read_text()))]
    hidden = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]!r}" for path, line, text in found if HIDDEN_IN_TEXT.match(text)
    ]
    assert len(hidden) <= HIDDEN_SHARE_MAX * len(found), "\n".join(hidden)


@pytest.mark.alternates("style")
def test_names_of_tests_name_their_subject() -> None:
    names = {path.stem: path for path in files("tests")}
    for path in files("tests"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names |= {node.name: path for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    hidden = [f"{path.relative_to(ROOT)}: {name}" for name, path in names.items() if HIDDEN_IN_NAME.match(name)]
    assert not hidden, "\n".join(hidden)
