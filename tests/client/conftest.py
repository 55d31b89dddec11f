"""Fixture that prints the steps of a machine if its test fails."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def steps() -> Iterator[list[str]]:
    noted: list[str] = []
    yield noted
    print("\n".join(noted))
