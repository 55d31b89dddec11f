"""Steps of an upgrade, each from one format of the data folder to the next one.

A step converts values of the checkpoint. It leaves batches and records as they are, wherever they are stored: journal,
checkpoint, and the rows of a log. So `decode_changes` (changes.py) and the readers of records (record.py) must read
what the two formats before have written. A million records would also take too long.

A new format takes the next number that neither a folder nor a copy of a log has, and a step in STEPS; the steps of the
formats that are older than the two before go. Source: docs/decisions/0105-upgrade.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

Entry = tuple[bytes, bytes]
"""Key and value of a database, without the checksum of the value."""


class Conversion(NamedTuple):
    """Conversion of all entries of one database of the checkpoint."""

    database: bytes
    convert: Callable[[bytes, bytes], Entry]
    """Function from an entry of the earlier format to that of the next one. It keeps the key, unless the entry moves.

    Raises: ValueError, struct.error, msgspec.MsgspecError if the entry is damaged
    """
    into: bytes = b""
    """Database to which the entries move; empty if they stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Step from the format `source` to the format `target`."""

    source: int
    target: int
    conversions: tuple[Conversion, ...] = ()
    added: tuple[bytes, ...] = ()
    """Databases that only the next format has. They are empty before the first conversion."""
    removed: tuple[bytes, ...] = ()
    """Databases that only the earlier format has. The conversions move all their entries."""
    convert_meta: Callable[[dict[bytes, bytes]], dict[bytes, bytes]] = dict
    """Function from the database `meta` of the earlier format to that of the next one, without the key `format`."""


STEPS: tuple[Step, ...] = ()
"""Steps to the format of this truenext, oldest first. Format 12 is the first one that a later truenext converts."""
