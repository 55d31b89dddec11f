"""Tests that both surfaces of the client have the same names, and that the one for threads is generated."""

import pytest

import truenext
from tools import generate
from truenext import blocking


def test_surface_for_threads_is_the_output_of_make_generate() -> None:
    assert generate.TARGET.read_text() == generate.threads_source(), "it is stale: say `make generate`"


def test_both_surfaces_have_the_same_names() -> None:
    errors = {name for name in truenext.__all__ if name in vars(truenext.errors)}
    assert set(truenext.__all__) - errors - {"__version__"} == set(blocking.__all__)
    assert all(getattr(truenext, name) for name in truenext.__all__)
    assert set(truenext.__all__) <= set(dir(truenext))
    with pytest.raises(AttributeError):
        truenext.nothing  # noqa: B018
