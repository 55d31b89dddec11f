"""Tests of the compatibility check against drawn types: JSON of the old type is read by the new type unless the check
finds a mismatch.

TRUENEXT_EXAMPLES=20000 pytest tests/stages/test_compatibility.py       longer
"""

import os
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.stages.drawn_types import Kind, Made, changed, harmless, kinds, structs
from truenext.stage.core.codec import Codec
from truenext.stage.core.schema import schema_of
from truenext.stage.introspection.mismatch import find_mismatches

LONG = settings(
    max_examples=int(os.environ.get("TRUENEXT_EXAMPLES", "300")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def codec(kind: Kind) -> tuple[Made, Codec[Any]]:
    made = Made(kind)
    return made, Codec(made.type, "this")


@LONG
@given(st.data())
def test_values_without_a_mismatch_are_read_by_the_new_type(data: st.DataObject) -> None:
    old = data.draw(structs(), "old")
    new = data.draw(st.one_of(changed(old), changed(old), kinds()), "new")
    made, writing = codec(old)
    _, reading = codec(new)
    found = find_mismatches(schema_of(writing.type), schema_of(reading.type))
    event("breaks" if found else "breaks nothing")
    if not found:
        for value in data.draw(st.lists(made.values(), min_size=1, max_size=3), "values"):
            reading.decode(writing.encode(value))


@LONG
@given(st.data())
def test_harmless_changes_are_no_mismatch(data: st.DataObject) -> None:
    old = data.draw(kinds(), "old")
    new = data.draw(harmless(old), "new")
    assert find_mismatches(schema_of(codec(old)[1].type), schema_of(codec(new)[1].type)) == []
