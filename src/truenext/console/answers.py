"""Answers of the broker to control requests about bulk work, as far as the console shows them; for the others see
model/control_answers.py. Source: docs/reference/control.md"""

import msgspec

from truenext.model.control_answers import ScheduledSendInfo
from truenext.model.dead_letters import DeadLetterGroup


class BulkAnswer(msgspec.Struct, frozen=True):
    """Answer to one piece of bulk work, of any verb."""

    moved: int = 0
    to: dict[str, int] = {}
    left: int = 0
    next: tuple[int, int] | None = None
    until: int = 0
    sequences: list[int] = []
    ended: dict[str, int] = {}
    error: str = ""
    transient: int = 0
    """Number of re-driven messages that are transient again."""
    sends: list[ScheduledSendInfo] = []
    groups: list[DeadLetterGroup] = []
