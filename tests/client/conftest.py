"""What a machine has done is shown if it fails."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def steps() -> Iterator[list[str]]:
    noted: list[str] = []
    yield noted
    print("\n".join(noted))
