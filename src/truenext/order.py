"""Which message is next: the one rule of order.

`K(m) = (9 - priority, sequence)`, smallest first. Everything that orders messages - lanes in memory, keys in the
store, the order of a page - goes through this file. Source: docs/contract.md, "The key".
"""

PRIORITY_MAX = 9
PRIORITY_DEFAULT = 4
RANKS = range(PRIORITY_MAX + 1)
"""The ranks of the ten priorities, first served first."""


def clamp_priority(priority: int) -> int:
    """The nearest priority from 0 to 9.

    >>> clamp_priority(-3), clamp_priority(4), clamp_priority(12)
    (0, 4, 9)
    """
    return min(max(priority, 0), PRIORITY_MAX)


def rank(priority: int) -> int:
    """How many priorities are served before this one.

    >>> rank(9), rank(0)
    (0, 9)
    """
    return PRIORITY_MAX - priority


def order_key(priority: int, sequence: int) -> tuple[int, int]:
    """K of a message; comparing two of them says which message is next.

    >>> order_key(9, 70) < order_key(4, 1) < order_key(4, 2)
    True
    """
    return rank(priority), sequence
