"""Tests of the overlay beside a dict, with batches at random."""

import random

import pytest

from truenext.model.record import lane_key, message_key
from truenext.store.changes import Changes
from truenext.store.overlay import Overlay

LANES = [lane_key(1, 5), lane_key(1, 9), lane_key(2, 5)]


@pytest.mark.parametrize("seed", range(20))
def test_overlay_after_random_batches_finds_the_messages_of_a_dict(seed: int) -> None:
    dice = random.Random(seed)
    overlay = Overlay()
    expected: dict[bytes, tuple[int, bool]] = {}
    gone: list[bytes] = []
    sequence = 0
    offset = 0
    for batch in range(40):
        segment = 1 + batch // 10
        removed = sorted(expected) if dice.random() < 0.5 else list(expected)
        first = dice.randint(0, len(removed))
        removed = removed[first : first + dice.choice([1, 10, 100])]
        if dice.random() < 0.3:
            dice.shuffle(removed)
        lanes = dice.sample(LANES, dice.randint(1, 3))
        put: dict[bytes, bool] = {}
        for _ in range(dice.choice([0, 1, 50])):
            sequence += dice.randint(1, 2)
            put[message_key(dice.choice(lanes), sequence)] = dice.random() < 0.5
        assert not any(overlay.find(put))
        changes = Changes(
            [(key, 100) for key in put if not put[key]],
            [(key, 100) for key in put if put[key]],
            [key for key in removed if not expected[key][1]],
            [key for key in removed if expected[key][1]],
            None,
        )
        overlay.apply_changes(changes, segment, offset)
        offset += 100_000
        for key in removed:
            del expected[key]
        gone += removed
        expected |= {key: (segment, is_transient) for key, is_transient in put.items()}
        found = {key: (span.segment, span.is_transient) for key, span in overlay.messages()}
        assert found == expected
        keys = sorted([*expected, *gone])
        segments = [None if each is None else each[0].segment for each in overlay.find(keys)]
        assert segments == [expected[key][0] if key in expected else None for key in keys]
