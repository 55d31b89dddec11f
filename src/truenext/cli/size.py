"""How a number of bytes is said on the command line."""

from __future__ import annotations

import re
from typing import Any

import click

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class Size(click.ParamType[int]):
    """256MiB, 50KB, 1.5 GB or plain bytes; the value is a number of bytes."""

    name = "size"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", value.strip().lower())
        if found is None or found[2] not in UNITS:
            self.fail(f"{value!r} is not a number of bytes, such as 256MiB, 50KB or 1000", param, ctx)
        size = int(float(found[1]) * UNITS[found[2]])
        if size < self._least:
            self.fail(f"{value} is too little: at least {said(self._least)}", param, ctx)
        return size


def said(size: int) -> str:
    """As people write it.

    >>> said(256 * 2**20), said(1000)
    ('256MiB', '1000')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size % UNITS[unit.lower()] == 0 and size:
            return f"{size // UNITS[unit.lower()]}{unit}"
    return str(size)
