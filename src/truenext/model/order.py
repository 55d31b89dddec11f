"""Order of messages: the one rule that decides which message is next.

`K(m) = (9 - priority, sequence)`, smallest first; 9 - priority is the rank. So the lanes of a queue are served in the
order of their ranks (engine/dispatch/plain.py). The messages of a lane are served in the order of their sequences
(engine/state/queue.py). The keys of the store sort in the same order (record.py). Source: docs/contract.md, "The key".
"""

PRIORITY_MAX = 9
PRIORITY_DEFAULT = 4
RANKS = range(PRIORITY_MAX + 1)
"""Ranks of the ten priorities, in the order of service."""


def clamp_priority(priority: int) -> int:
    """Return the nearest priority from 0 to 9.

    >>> clamp_priority(-3), clamp_priority(4), clamp_priority(12)
    (0, 4, 9)
    """
    return min(max(priority, 0), PRIORITY_MAX)


def rank(priority: int) -> int:
    """Return the rank of a priority: the number of higher priorities, which are served first.

    >>> rank(9), rank(0)
    (0, 9)
    """
    return PRIORITY_MAX - priority
