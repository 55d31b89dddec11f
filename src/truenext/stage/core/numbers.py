"""The numbers under which all that a stage sends is sent once, whoever sends it and however often.

A producer is a name under which COMMITs are numbered, 1, 2, 3 (docs/contract.md, L5). A process owns several: each has
one unit under way, and is free again when the broker has answered for that one.
"""

from __future__ import annotations

from typing import NamedTuple


class OutboxProducer:
    __slots__ = ("last_number", "name", "owner")

    def __init__(self, name: str, owner: str, number: int) -> None:
        self.name = name
        self.owner = owner
        """The run of the process that may use it."""
        self.last_number = number
        """The last one that was used."""

    @property
    def next_commit(self) -> CommitNumber:
        return CommitNumber(self, self.last_number + 1)


class CommitNumber(NamedTuple):
    """Of one unit."""

    producer: OutboxProducer
    number: int
