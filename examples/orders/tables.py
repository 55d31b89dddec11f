"""Tables of the service in a SQLite file: its own, and those of exactly-once processing.

`python -m examples.orders.tables` makes them in `orders.db`, the database of the service, if they are missing.
"""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from examples.orders.service import TABLES, WEB_TABLE
from examples.program import ROOT

SERVICE = "examples.orders.service:app"


def make_tables(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(f"CREATE TABLE IF NOT EXISTS {WEB_TABLE} (id TEXT NOT NULL, item TEXT NOT NULL)")
        for table in TABLES.values():
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table} (id TEXT NOT NULL)")
    url = f"sqlite:///{database.absolute()}"
    command = [sys.executable, "-m", "truenext", "stages", "schema", SERVICE, "--database", url, "--apply"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    make_tables(Path("orders.db"))
