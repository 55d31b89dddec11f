"""Private memory of processes.

A process that forks brokers (forked.py) loads this module behind those of a broker, and before all others. What the
others take is no memory of a broker.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def private_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("this system does not say how much memory is private")


BROKER_MODULES_BYTES = private_bytes(os.getpid()) if sys.platform == "linux" else 0
"""In a process that forks brokers: its memory with the modules of a broker alone."""


def print_bytes_of_other_modules(_: Sequence[str]) -> None:
    print(private_bytes(os.getpid()) - BROKER_MODULES_BYTES)
