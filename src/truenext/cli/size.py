"""A number of bytes on the command line."""

from __future__ import annotations

from typing import Any

import click

from truenext.size import parse_size, said


class Size(click.ParamType[int]):
    """256MiB, 50KB, 1.5 GB or plain bytes; the value is a number of bytes."""

    name = "size"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        size = parse_size(value)
        if size is None:
            self.fail(f"{value!r} is not a number of bytes, such as 256MiB, 50KB or 1000", param, ctx)
        if size < self._least:
            self.fail(f"{value} is too little: at least {said(self._least)}", param, ctx)
        return size
