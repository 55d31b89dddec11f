"""How fast are flows of stages?

A service of three stages, each with concurrency 8, takes flows that wait before the clock starts, persistent ones with
messages of 1 KiB. Broker, service and whoever begins the flows are processes of their own. Beside it the same work is
done without stages: by truenext's client alone; in a database by SQLAlchemy alone; by Dramatiq on RabbitMQ, where that
is installed. The two take turns; the ratio is the median of those of each pair of runs. And how long does a question
take whose flow goes through three stages, alone and beside batch flows in the same queues?

python -m bench.flows --only messaging,sql --runs 3
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from bench import machine, queues
from bench.brokers import Truenext
from bench.flows import bare, interactive, shop, sql
from bench.flows.pairs import Side, begin, compare, hired, nothing_waits, ours
from bench.flows.postgresql import Postgresql, why_no_postgresql
from bench.flows.work import Order
from bench.foreign import RabbitMQ, why_no_rabbitmq
from bench.options import positive
from bench.progress import guarded, say
from bench.workers import end_in_order

PATHS = 0o711
"""A server that runs as another user finds its own folder in that of the bench."""


class Case(NamedTuple):
    key: str
    title: str
    measure: Callable[[Truenext, Path, int, int], None]
    """With a folder on the disk, so many flows and runs."""
    share: int = 1
    """This part of the flows."""

    def is_one_of(self, wanted: Sequence[str]) -> bool:
        """By its key, or the beginning of it, to a hyphen."""
        return any(f"{self.key}-".startswith(f"{each}-") for each in wanted)


def why_not(key: str, folder: Path) -> str:
    """The reason why a case cannot be measured with its data in this folder, or nothing."""
    if key in ("sql-postgresql", "once-postgresql"):
        return why_no_postgresql(folder) or ""
    if key == "dramatiq":
        no_client = "" if find_spec("dramatiq") else "Dramatiq is not installed (pip install 'dramatiq[rabbitmq]')"
        return "; ".join(filter(None, (why_no_rabbitmq(), no_client)))
    return ""


# ---- Cases ----


def _messaging(broker: Truenext, folder: Path, flows: int, runs: int) -> None:
    sides = ours(broker, shop.serve), ours(broker, bare.relay, name="the client alone")
    compare("messaging", sides, flows, runs, target=0.5)


def _poison(broker: Truenext, folder: Path, flows: int, runs: int) -> None:
    def begin_poisoned(order: Order) -> None:
        hired(shop.begin_poisoned, order)

    def check(order: Order) -> None:
        left, poison = asyncio.run(queues.waiting(broker.port)), shop.poison_of(flows)
        # The last of them may be between two attempts.
        if sum(left.values()) != poison:
            raise ValueError(f"{poison} messages were poison, and these wait still: {left}")
        asyncio.run(queues.empty(broker.port, list(left)))

    sides = (
        Side("beside poison", shop.serve_poisoned, begin_poisoned, check, broker.port, broker),
        ours(broker, shop.serve, name="the flows alone"),
    )
    compare("poison", sides, flows, runs, target=0.8)


def _sqlite(broker: Truenext, folder: Path, flows: int, runs: int) -> None:
    _beside_sqlalchemy(broker, f"sqlite:///{folder / 'bench.sqlite'}", flows, runs)


def _postgresql(broker: Truenext, folder: Path, flows: int, runs: int) -> None:
    with Postgresql(folder) as server:
        say(f"  {server.version}, fsync and synchronous_commit on, as shipped")
        _beside_sqlalchemy(broker, server.url, flows, runs)


def _once_sqlite(broker: Truenext, folder: Path, flows: int, runs: int) -> None:
    _once_beside_best_effort(broker, f"sqlite:///{folder / 'once.sqlite'}", flows, runs)


def _once_postgresql(broker: Truenext, folder: Path, flows: int, runs: int) -> None:
    with Postgresql(folder) as server:
        say(f"  {server.version}, fsync and synchronous_commit on, as shipped")
        _once_beside_best_effort(broker, server.url, flows, runs)


def _once_beside_best_effort(broker: Truenext, database: str, flows: int, runs: int) -> None:
    def begin_flows(order: Order) -> None:
        sql.prepare(database)
        begin(order)

    def check_all(order: Order) -> None:
        sql.check(database, flows)
        nothing_waits(order)

    sides = (
        Side("exactly once", sql.serve_once, begin_flows, check_all, broker.port, broker),
        Side("best-effort 1PC", sql.serve, begin_flows, check_all, broker.port, broker),
    )
    # A price of 1.5 at the most.
    compare("once", sides, flows, runs, target=0.67, database=database)


def _beside_sqlalchemy(broker: Truenext, database: str, flows: int, runs: int) -> None:
    def prepare(order: Order) -> None:
        sql.prepare(database)

    def check(order: Order) -> None:
        sql.check(database, flows)

    def begin_flows(order: Order) -> None:
        prepare(order)
        begin(order)

    def check_all(order: Order) -> None:
        check(order)
        nothing_waits(order)

    sides = (
        Side("truenext", sql.serve, begin_flows, check_all, broker.port, broker),
        Side("SQLAlchemy alone", sql.insert_alone, prepare, check),
    )
    compare("sql", sides, flows, runs, database=database)


def _interactive(broker: Truenext, folder: Path, questions: int, runs: int) -> None:
    interactive.compare(broker, max(questions, interactive.PER_S), runs)


def _dramatiq(broker: Truenext, folder: Path, flows: int, runs: int) -> None:
    from bench.flows import pipeline

    def begin_pipelines(order: Order) -> None:
        hired(pipeline.begin, order)
        pipeline.wait_for(order)

    with RabbitMQ(folder) as theirs:
        say(f"  Dramatiq {version('dramatiq')}, RabbitMQ {theirs.version}; without confirms, as shipped")
        sides = (
            ours(broker, shop.serve),
            Side("Dramatiq", pipeline.work, begin_pipelines, pipeline.check, theirs.port, theirs),
        )
        compare("dramatiq", sides, flows, runs, target=2)


CASES = (
    Case("messaging", "flows of three stages, beside the client alone", _messaging),
    Case("poison", "the same, and one poison message besides for every nineteen, with three attempts", _poison),
    Case("sql-sqlite", "the same with an INSERT in each stage, SQLite", _sqlite, 4),
    Case("sql-postgresql", "the same with an INSERT in each stage, PostgreSQL", _postgresql, 4),
    Case("once-sqlite", "the same, exactly once, beside best-effort 1PC, SQLite", _once_sqlite, 4),
    Case("once-postgresql", "the same, exactly once, beside best-effort 1PC, PostgreSQL", _once_postgresql, 4),
    Case("interactive", f"{interactive.PER_S} questions a second", _interactive, 20),
    Case("dramatiq", "the flows of messaging, beside Dramatiq on RabbitMQ", _dramatiq),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.flows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flows", type=positive, default=6000, metavar="N", help="in a run, fewer of what is slow")
    parser.add_argument("--runs", type=positive, default=5, metavar="N")
    keys = ",".join(case.key for case in CASES)
    parser.add_argument("--only", default=keys, metavar="KEYS", help=f"of {keys}; sql means all that begin so")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where all data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := [each for each in wanted if not any(case.is_one_of([each]) for case in CASES)]:
        parser.error(f"no such case: {', '.join(unknown)}")
    end_in_order()

    def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as name:
            folder = Path(name)
            folder.chmod(PATHS)
            for fact, value in machine.facts(folder):
                say(f"{fact}: {value}")
            with Truenext(folder) as broker:
                for case in CASES:
                    if not case.is_one_of(wanted):
                        continue
                    if reason := why_not(case.key, folder):
                        say(f"without {case.key}: {reason}")
                        continue
                    count = max(1, options.flows // case.share)
                    say(f"{case.key}: {case.title}, {count:,} in each run")
                    case.measure(broker, folder, count, options.runs)

    return guarded(measure)


if __name__ == "__main__":
    raise SystemExit(main())
