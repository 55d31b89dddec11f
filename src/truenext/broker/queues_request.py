"""Control request `queues`: reports queues by name, order and piece, and the sums of all that the user may see.

Source: docs/contract.md, "What the broker tells"
"""

from enum import Enum
from typing import Annotated

import msgspec

VERB = "queues"


class QueueOrder(Enum):
    """Order of the queues in an answer. Queues that are equal in it follow one another by name."""

    NAME = "name"
    """By name, from A to Z."""
    WAITING = "waiting"
    """By `waiting`, the largest number first."""
    OLDEST = "oldest"
    """By `oldest_s`, the largest age first, and queues in which nothing waits last."""
    RATE = "rate"
    """By `rate`, the highest first."""


class QueuesRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of the request, in JSON. With an empty body the answer is only a list of QueueReport, of all queues by
    name."""

    name: str = ""
    """Part of the names of the queues to report, upper and lower case alike, or a pattern of names, with `*` and `>`;
    empty for all."""
    order: QueueOrder = QueueOrder.NAME
    """Order of the queues."""
    limit: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Largest number of queues in the answer; null for all, 0 for the sums alone."""
    after: str | None = None
    """Cursor of the answer before, `next`, to go on behind the last queue that it has; null to begin."""
