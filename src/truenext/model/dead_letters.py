"""Groups of dead letters: those with the same origin, the same reason, and the same first line of their last cause.

GroupKey            what all messages of a group have in common
DeadLetterGroup     one group, in the answer to the control request `dead-letters`
DeadLetterGroups    groups of many answers, merged
GroupFilter         choice of messages by their group, in `redrive`, `move` and `purge`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec

from truenext.model.header_lines import dead_letter_facts_of, decode_value
from truenext.model.limits import CAUSE_LINE_LENGTH_MAX, DEAD_LETTER_GROUPS_MAX, GROUP_SEQUENCES_MAX
from truenext.model.message import SentMessage


class GroupKey(NamedTuple):
    """What all messages of a group have in common."""

    origin: str
    reason: str
    cause: str


class DeadLetterGroup(msgspec.Struct):
    """One group of messages in a dead-letter queue."""

    origin: str
    """Name of the queue to which `redrive` moves the messages, as `queues` reports it; "" if the broker has not made
    them dead letters."""
    reason: str
    """Reason for which they are dead letters: `attempts exhausted`, `expired` or `rejected`; "" if they are none."""
    cause: str
    """First line of the last cause that a consumer gave, without blanks at its ends: its first {CAUSE_LINE_LENGTH_MAX}
    characters; "" if no consumer gave any."""
    count: int
    """Number of messages."""
    first: int
    """Time at which the earliest of them became a dead letter, or arrived if it is none, in milliseconds since 1970."""
    last: int
    """Time at which the latest of them did."""
    sequences: list[int]
    """Sequences of the first {GROUP_SEQUENCES_MAX} messages, to look at with `truenext browse --id`, or for the field
    `sequences` of bulk work. To choose all messages of the group, use the field `group`."""

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.origin, self.reason, self.cause)

    def add(self, other: DeadLetterGroup) -> None:
        """Add the messages of another group, which come later in the queue."""
        self.count += other.count
        self.first = min(self.first, other.first)
        self.last = max(self.last, other.last)
        self.sequences += other.sequences[: GROUP_SEQUENCES_MAX - len(self.sequences)]


class DeadLetterGroups:
    """Groups of many messages, at most DEAD_LETTER_GROUPS_MAX. Messages of further groups count in `others`."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, DeadLetterGroup] = {}
        self.others: DeadLetterGroup | None = None
        """Messages of all further groups, with empty texts; None if there are none."""

    def __iter__(self) -> Iterator[DeadLetterGroup]:
        """Yield the groups, the largest first."""
        yield from sorted(self._groups.values(), key=lambda group: -group.count)

    def add(self, groups: Iterable[DeadLetterGroup]) -> None:
        """Add the groups of one answer."""
        for group in groups:
            known = self._groups.get(group.key)
            if known is not None:
                known.add(group)
            elif len(self._groups) < DEAD_LETTER_GROUPS_MAX:
                self._groups[group.key] = group
            elif self.others is not None:
                self.others.add(group)
            else:
                self.others = msgspec.structs.replace(group, origin="", reason="", cause="")

    def add_message(self, message: SentMessage, sequence: int) -> None:
        """Add one message, which comes later in the queue than all before."""
        key, time_ms = _group_of(message)
        known = self._groups.get(key)
        if known is None:
            self.add([DeadLetterGroup(*key, 1, time_ms, time_ms, [sequence])])
            return
        known.count += 1
        known.first = min(known.first, time_ms)
        known.last = max(known.last, time_ms)
        if len(known.sequences) < GROUP_SEQUENCES_MAX:
            known.sequences.append(sequence)


class GroupFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Choice of dead letters by their group. Each field that is not null must equal that of the group."""

    origin: str | None = None
    """Field `origin` of the group; None is any."""
    reason: str | None = None
    """Field `reason` of the group; None is any."""
    cause: str | None = None
    """Field `cause` of the group; None is any."""

    def matches(self, message: SentMessage) -> bool:
        """Return whether the message is of a group that is chosen."""
        key, _ = _group_of(message)
        return (
            self.origin in (None, key.origin) and self.reason in (None, key.reason) and self.cause in (None, key.cause)
        )


def _group_of(message: SentMessage) -> tuple[GroupKey, int]:
    """Return the group of a message, and when the message became a dead letter."""
    destination, reason, cause, time_ms = dead_letter_facts_of(message.header)
    key = _key_of(message.redrive_queue, destination, reason, cause)
    return key, int(time_ms) if time_ms.isdigit() else message.arrived_ms


@lru_cache(maxsize=128)
def _key_of(redrive_queue: str, destination: bytes, reason: bytes, cause: bytes) -> GroupKey:
    """Return the group of messages with these facts, which are escaped. Most messages of a queue share a few."""
    lines = decode_value(cause).strip().partition("\n")
    return GroupKey(
        redrive_queue or decode_value(destination).removeprefix("/queue/"),
        decode_value(reason),
        lines[0][:CAUSE_LINE_LENGTH_MAX].rstrip(),
    )
