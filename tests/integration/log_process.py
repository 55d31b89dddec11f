"""Command with a log in PostgreSQL that is compacted at once, or has a planted fault. Loaded before it is forked."""

from __future__ import annotations

from collections.abc import Sequence

from tests.integration import planted_log_faults
from truenext.cli.main import main as truenext
from truenext.store.postgresql import compaction, layout, repair

SMALL_PARTITION_ROWS = 16


def use_small_log() -> None:
    """Let this process have small partitions, and compact a log at once, as after many hours of load."""
    layout.PARTITION_ROWS = SMALL_PARTITION_ROWS
    vars(repair)["PARTITION_ROWS"] = SMALL_PARTITION_ROWS
    compaction.UNCOMPACTED_ROWS = 10
    compaction.WINDOW_ROWS = 12


def serve(arguments: Sequence[str]) -> None:
    """Run `truenext`. The arguments are "small" or "", the name of a planted fault or "", and a command line."""
    size, fault, *command = arguments
    if size:
        use_small_log()
    if fault:
        planted_log_faults.plant(fault)
    truenext(command)
