"""Databases of the measurements: SQLite in a file of its own, and a PostgreSQL server of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.brokers import Truenext
from bench.flows.work import Sizes
from bench.postgresql_server import Postgresql
from bench.progress import print_line

Measure = Callable[[Truenext, str, Path, Sizes], None]
"""Measurement with the URL of a database, and a folder on the disk."""
Run = Callable[[Truenext, Path, Sizes], None]


def in_sqlite(measure: Measure) -> Run:
    def run(broker: Truenext, folder: Path, sizes: Sizes) -> None:
        with tempfile.TemporaryDirectory(prefix="bench-sqlite-", dir=folder) as name:
            measure(broker, f"sqlite:///{name}/bench.sqlite", Path(name), sizes)

    return run


def in_postgresql(measure: Measure) -> Run:
    def run(broker: Truenext, folder: Path, sizes: Sizes) -> None:
        with Postgresql(folder) as server:
            print_line(f"  {server.version}, fsync and synchronous_commit on, as shipped")
            measure(broker, server.url, folder, sizes)

    return run
