"""Groups of dead letters: those with the same origin, the same reason, and the same first line of their last cause, but
for words with digits.

GroupKey            what all messages of a group have in common
DeadLetterGroup     one group, in the answer to the control request `dead-letters`
DeadLetterGroups    groups of many answers, merged
GroupFilter         choice of messages by their group, in `redrive`, `move` and `purge`

A cause often names a number or an id. With these, each message would be a group of its own.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec

from truenext.model.header_lines import dead_letter_facts_of, decode_value, unescape
from truenext.model.limits import CAUSE_LINE_LENGTH_MAX, DEAD_LETTER_GROUPS_MAX, GROUP_SEQUENCES_MAX
from truenext.model.message import SentMessage

_FROM_DIGIT = re.compile("[0-9][A-Za-z0-9_-]*")
"""End of a word from its first digit on. The word is a number, an id, a UUID, or a part of a time or of an address."""
_UNTIL_DIGIT = string.ascii_letters + "_-"
"""Characters of such a word before its first digit."""

_FIRST_LINE = re.compile(rf"(?:\s+|\\[rn])*((?:[^\\]|\\[^n]){{,{CAUSE_LINE_LENGTH_MAX}}})")
"""Beginning of the first line in an escaped cause, which may be very long: characters behind blanks and line ends."""


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
    """First line of the last cause that a consumer gave, with `#` for each word that has a digit; "" if no consumer
    gave any. Words have letters from A to Z, digits, `_` and `-`."""
    count: int
    """Number of messages."""
    first: int
    """Time at which the earliest of them became a dead letter, or arrived if it is none, in milliseconds since 1970."""
    last: int
    """Time at which the latest of them did."""
    sequences: list[int]
    """Sequences of the first {GROUP_SEQUENCES_MAX} messages, to look at with `truenext browse --id`, or for the field
    `sequences` of bulk work. To choose all messages of the group, use the field `group`."""
    example: str = ""
    """First line of the last cause of the first message, as it is, without blanks at its ends: its first
    {CAUSE_LINE_LENGTH_MAX} characters."""

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
        self.cost = 0
        """Time that `add_message` has taken, in units of `_cost_of`."""

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
                self.others = msgspec.structs.replace(group, origin="", reason="", cause="", example="")

    def add_message(self, message: SentMessage, sequence: int) -> None:
        """Add one message, which comes later in the queue than all before."""
        key, example, time_ms = _group_of(message)
        self.cost += _cost_of(key, message)
        known = self._groups.get(key)
        if known is None:
            self.add([DeadLetterGroup(*key, 1, time_ms, time_ms, [sequence], example)])
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
    """Field `cause` of the group, or any text with such a first line, with other digits, as `example` is; None is
    any."""

    def __post_init__(self) -> None:
        if self.cause is not None:
            msgspec.structs.force_setattr(self, "cause", cause_pattern(_first_line(self.cause)))

    def compare(self, message: SentMessage) -> tuple[bool, int]:
        """Return whether the message is of a group that is chosen, and what this costs, in units of `_cost_of`: at
        least 4, so that 500 comparisons cost about 2 ms."""
        key, _, _ = _group_of(message)
        is_chosen = (
            self.origin in (None, key.origin) and self.reason in (None, key.reason) and self.cause in (None, key.cause)
        )
        return is_chosen, 4 + _cost_of(key, message)


def cause_pattern(line: str) -> str:
    """Return a line of a cause with `#` for each word that has a digit.

    >>> cause_pattern("order 17 of A17-3 at 10:02: no 'tea', see 0f8fad5b-d9cb-469f-a165-70867728950e")
    "order # of # at #:#: no 'tea', see #"
    """
    *before, last = _FROM_DIGIT.split(line)
    return "#".join([*(text.rstrip(_UNTIL_DIGIT) for text in before), last])


def _group_of(message: SentMessage) -> tuple[GroupKey, str, int]:
    """Return the group of a message, the line of its cause, and when the message became a dead letter."""
    destination, reason, cause, time_ms = dead_letter_facts_of(message.header)
    key, line = _key_of(message.redrive_queue, destination, reason, cause)
    return key, line, int(time_ms) if time_ms.isdigit() else message.arrived_ms


def _first_line(cause: str) -> str:
    """Return the line of a cause that belongs to its group."""
    return cause.strip().partition("\n")[0][:CAUSE_LINE_LENGTH_MAX].rstrip()


def _cost_of(key: GroupKey, message: SentMessage) -> int:
    """Return the time in which the group of a message was found, beside what is the same for each message: a word with
    digits in its cause counts 1, and so do 256 bytes of its headers."""
    return key.cause.count("#") + len(message.header) // 256


@lru_cache(maxsize=128)
def _key_of(redrive_queue: str, destination: bytes, reason: bytes, cause: bytes) -> tuple[GroupKey, str]:
    """Return the group of messages with these facts, which are escaped, and the line of their cause. Most messages of a
    queue share a few."""
    beginning = _FIRST_LINE.match(cause.decode())
    assert beginning is not None, "the pattern matches any text"
    line = unescape(beginning[1]).rstrip()
    origin = redrive_queue or decode_value(destination).removeprefix("/queue/")
    return GroupKey(origin, decode_value(reason), cause_pattern(line)), line
