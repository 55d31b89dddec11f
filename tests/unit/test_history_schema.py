"""Tests that history/schema.py and tools/reference/history.py describe what the broker writes."""

import pytest

from tools.reference.history import MODES, REASONS
from truenext.history.schema import COLUMNS, DRAINED
from truenext.model import events
from truenext.model.events import EventKind

KINDS = {kind.label for kind in EventKind if kind not in (EventKind.NAME, EventKind.CAUSE)}
FLAGS = {"priority", "persistent"}
"""Columns that the flags of an accepted message have."""
OF_BLOCKS: dict[str, set[str]] = {
    "accepted": {"batch"},
    "committed": {"batch"},
    "recovered": {"count"},
    "returned": {"reason", "cause"},
    "run-started": {"reason", "epoch"},
    "dead-lettered": {"cause"},
    "handled": {"cause"},
    "subscribed": {"mode", "consumer"},
    "unsubscribed": {"consumer"},
    "window": {"consumer"},
    "requested": {"consumer"},
}
"""Columns that the block of an event has, in its fields `code`, `other` and `queue`, by kind."""


def test_kinds_of_columns_are_those_of_events() -> None:
    assert {kind for column in COLUMNS for kind in column.kinds} <= KINDS | {DRAINED}


@pytest.mark.parametrize("label", sorted(KINDS))
def test_columns_of_a_kind_are_those_in_the_broker_s_files(label: str) -> None:
    own = {name for kind in EventKind if kind.label == label for name, _ in events.COLUMNS[kind]}
    if "flags" in own:
        own = own - {"flags"} | FLAGS
    described = {column.name for column in COLUMNS if label in column.kinds}
    assert described - {"queue"} == own | OF_BLOCKS.get(label, set())
    assert ("queue" in described) == (label not in ("run-started", "committed"))


def test_every_reason_and_mode_consists_of_described_texts() -> None:
    parts = {part for reason in events.REASONS if reason for part in reason.split(" and ")}
    assert parts == REASONS.keys()
    for mode in events.SUBSCRIPTION_MODES:
        for text in sorted(MODES, key=len, reverse=True):
            mode = mode.replace(text, "", 1)
        assert mode == ""
