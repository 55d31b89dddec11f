"""Tests of the examples in docstrings of the audit."""

import pytest

from tests.unit.test_doctests import SPARK_MODULES, check_examples


@pytest.mark.parametrize("module", SPARK_MODULES)
def test_examples_of_a_module_give_what_they_say(module: str) -> None:
    check_examples(module)
