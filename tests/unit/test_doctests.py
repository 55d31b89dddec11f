"""Runs the examples in docstrings as doctests."""

import doctest
import importlib
from pathlib import Path

import pytest

import truenext

SOURCE = Path(truenext.__file__).parent
MODULES = [
    ".".join(("truenext", *path.relative_to(SOURCE).with_suffix("").parts))
    for path in sorted(SOURCE.rglob("*.py"))
    if ">>> " in path.read_text()
]
SPARK_MODULES = [module for module in MODULES if module.startswith("truenext.spark.")]


@pytest.mark.parametrize("module", [module for module in MODULES if module not in SPARK_MODULES])
def test_examples_of_a_module_give_their_results(module: str) -> None:
    check_examples(module)


def check_examples(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried
    assert not failed
