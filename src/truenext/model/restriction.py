"""Restriction: reason for which a connection may only send control requests. Source: docs/contract.md, C31.3"""

from typing import NamedTuple

from truenext.errors import Code


class Restriction(NamedTuple):
    reason: str
    code: Code
    """Code with which all other frames are refused."""
