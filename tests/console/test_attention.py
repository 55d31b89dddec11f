"""Tests of what the first page tells an operator to look at."""

import pytest

from truenext.console.answers import StatusReport
from truenext.console.pages.attention import find_attention


@pytest.mark.parametrize("level", ["little", "none", "full"])
def test_short_disk_leads_to_the_queues_with_the_most_messages(level: str) -> None:
    (found,) = find_attention(StatusReport(disk_level=level, ready=True), [], [], {}, [], 0)
    assert (found.level, found.link) == ("bad", "/queues?order=waiting")
