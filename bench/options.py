"""Parsers of values on the benchmarks' command lines."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def sizes(text: str) -> list[int]:
    """Parse several numbers, with commas between them."""
    return [positive(part) for part in text.split(",")]


def not_negative(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number
