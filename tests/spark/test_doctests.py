"""Examples in docstrings of the audit give what they say."""

import pytest

from tests.unit.test_doctests import SPARK_MODULES, check_examples


@pytest.mark.parametrize("module", SPARK_MODULES)
def test_examples_of_a_module_give_what_they_say(module: str) -> None:
    check_examples(module)
