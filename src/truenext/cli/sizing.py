"""Sizing: memory, disk space and open files that a configuration means for a machine. Source: docs/operations.md, "How
large a machine" """

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from sys import maxsize

from truenext.broker.settings import BrokerSettings
from truenext.cli import machine
from truenext.cli.files import FILES_OWN, needed_files, places_with
from truenext.cli.serve import MEMORY_SHARE
from truenext.engine.state.memory import LANE_BYTES, QUEUE_BYTES
from truenext.model.limits import BROKER_BYTES, CONNECTIONS_MAX, DISK_LIMIT_MIN
from truenext.model.numerals import short_size
from truenext.store.folder import NETWORK_FILE_SYSTEMS, file_system

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""Types of file systems whose files are lost with the machine's memory."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about the machine on which a broker is to run."""

    memory: int
    """Bytes of memory that the broker can have; `sys.maxsize` if unknown."""
    files: int
    """Largest number of files that the broker may open; `sys.maxsize` if there is no limit."""
    disk: int
    """Bytes of the disk with the data folder; 0 if there is no such folder, or the broker keeps nothing on disk."""
    disk_free: int
    """Bytes that are free there."""
    file_system: str
    """Type of its file system; "" if unknown."""


def read_machine(data: Path | None) -> MachineFacts:
    """Return the facts about this machine. `data` is the data folder, which need not exist.

    Raises: OSError if the file system cannot be read
    """
    files = files_max()
    if data is None:
        return MachineFacts(machine.memory_bytes(), files, 0, 0, "")
    existing = next(each for each in (data.absolute(), *data.absolute().parents) if os.access(each, os.F_OK))
    disk = os.statvfs(existing)
    return MachineFacts(
        machine.memory_bytes(), files, disk.f_frsize * disk.f_blocks, disk.f_frsize * disk.f_bavail, file_system(data)
    )


def files_max() -> int:
    """Return the largest number of files that a broker may open here; `sys.maxsize` if there is no limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return maxsize if hard == resource.RLIM_INFINITY else hard


def describe(settings: BrokerSettings, facts: MachineFacts) -> list[str]:
    """Return lines on the memory, disk space and files of a broker with these settings."""
    limit = settings.memory_limit
    queues = (limit - int(limit * MEMORY_SHARE) - BROKER_BYTES) // (QUEUE_BYTES + LANE_BYTES)
    memory = "" if facts.memory == maxsize else f" of {short_size(facts.memory)}"
    places = places_with(facts.files, len(settings.listen))
    lines = [
        f"memory: {short_size(limit)}{memory}; {short_size(BROKER_BYTES)} for the broker itself, "
        f"{short_size(int(limit * MEMORY_SHARE))} for messages, and the rest for some {queues:,} queues",
        f"files: up to {min(facts.files, needed_files(len(settings.listen))):,}; {max(0, places.connections):,} "
        "connections of each listener",
    ]
    if facts.disk:
        history = f", and {short_size(settings.history_bytes_max)} for the history" if settings.history else ""
        messages = "all of the disk but a reserve" if settings.disk_limit is None else short_size(settings.disk_limit)
        lines.append(
            f"disk: {messages} for messages{history}; the disk has {short_size(facts.disk)}, of which "
            f"{short_size(facts.disk_free)} are free"
        )
    return lines


def warnings(settings: BrokerSettings, facts: MachineFacts) -> list[str]:
    """Return a text for each part of a machine that is too small for a broker with these settings, with what to do."""
    found = []
    places = places_with(facts.files, len(settings.listen))
    if 1 <= places.connections < CONNECTIONS_MAX:
        found.append(
            f"a broker may open {facts.files:,} files here (ulimit -n), enough for {places.connections:,} "
            f"connections of each listener instead of {CONNECTIONS_MAX:,}: raise the limit to "
            f"{needed_files(len(settings.listen)):,}, of which {FILES_OWN} are for the broker itself"
        )
    messages = DISK_LIMIT_MIN if settings.disk_limit is None else settings.disk_limit
    history = settings.history_bytes_max if settings.history else 0
    if facts.disk and messages + history > facts.disk:
        name = "the smallest disk_limit" if settings.disk_limit is None else "disk_limit"
        found.append(
            f"{name} ({short_size(messages)}) and the history ({short_size(history)}) are together more than the disk, "
            f"{short_size(facts.disk)}: lower history_bytes_max"
            f"{'' if settings.disk_limit is None else ' or disk_limit'}"
        )
    if facts.file_system in NETWORK_FILE_SYSTEMS:
        found.append(
            f"data folder {settings.data} is on a network file system ({facts.file_system}): a broker starts there "
            "only with --allow-network-disk; use a disk of this machine"
        )
    if facts.file_system in IN_MEMORY:
        found.append(
            f"data folder {settings.data} is in memory ({facts.file_system}): a restart of the machine loses all "
            "messages; use a folder on a disk"
        )
    return found
