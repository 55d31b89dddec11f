"""Tests that docs/control.md has the control requests and the fields of their answers."""

import re
from pathlib import Path

import pytest
from msgspec.structs import fields

from truenext.broker import producer_request
from truenext.broker.control import QUERIES, QUEUE_CHANGES
from truenext.engine.background import bulk

PAGE = (Path(__file__).parents[2] / "docs" / "control.md").read_text()
NAMED_FIELDS = set(re.findall(r"`([a-z_]+)`", PAGE))


def test_control_page_has_exactly_the_verbs() -> None:
    table = PAGE[PAGE.index("| verb |") : PAGE.index("## What ends with its connection")]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == {
        *QUERIES,
        *QUEUE_CHANGES,
        producer_request.VERB,
        *bulk.VERBS,
    }


@pytest.mark.parametrize("shape", [*bulk.VERBS.values(), bulk.ScheduledResult, bulk.ScheduledSendInfo])
def test_control_page_has_the_fields_of_results(shape: type) -> None:
    assert {field.encode_name for field in fields(shape)} <= NAMED_FIELDS
