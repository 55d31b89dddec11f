"""Benchmark of flows of stages.

A service of three stages, each with concurrency 8, handles flows that wait before the clock starts, persistent ones
with messages of 1 KiB. Broker, service and the program that starts the flows are processes of their own. The same
work is also done without stages: by truenext's client alone; in a database by SQLAlchemy alone; by Dramatiq on
RabbitMQ, where that is installed. They run by turns; the ratio is the median over the rounds of runs. Another case
measures the round trip of `ask` through three stages, alone and beside batch flows in the same queues.

Exactly-once processing is measured with an INSERT in each stage: beside best-effort 1PC, part by part, beside DBOS
Transact and procrastinate, where these are installed, with many rows in the inbox, after an outage of the broker,
and its cost in statements, rows and bytes. Each flow must end with exactly three rows.

Flows that answer are measured beside those that do not: rejected messages with reports and handlers, `ask` that fails,
`ask` under a key, and delayed flows. With a checkout of an earlier version, flows and `ask` are compared with its own.

python -m bench.flows --only messaging,sql --runs 3 python -m bench.flows --only once --workers 8
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from bench import machine, queues
from bench.brokers import Truenext
from bench.flows import bare, before, costs, delayed, drain, failures, inbox, interactive, keyed, once, shop, sql
from bench.flows.databases import Measure, Run, in_postgresql, in_sqlite
from bench.flows.pairs import Side, compare, hired, truenext_side
from bench.flows.work import CONCURRENCY, Order, Sizes
from bench.foreign import RabbitMQ, no_rabbitmq_reason
from bench.options import positive
from bench.options import sizes as sizes_of
from bench.postgresql_server import no_postgresql_reason
from bench.progress import guarded, print_line
from bench.workers import end_in_order

PATHS = 0o711
"""Mode of the benchmark's folder, with which a server that runs as another user finds its own folder inside."""


class Case(NamedTuple):
    key: str
    title: str
    measure: Run
    share: int = 1
    """Divisor of the number of flows; 0 if the case counts units."""
    by_default: bool = True
    """Measured unless other cases are chosen."""

    def is_one_of(self, keys: Sequence[str]) -> bool:
        """Whether a key is that of the case, or its beginning up to a hyphen."""
        return any(f"{self.key}-".startswith(f"{each}-") for each in keys)


def skip_reason(key: str, folder: Path, checkout: Path | None) -> str:
    """Return the reason why a case cannot be measured with its data in this folder; empty if it can."""
    reasons: list[str | None] = []
    if key == "before" and checkout is None:
        reasons.append("no earlier version is named (--before CHECKOUT)")
    if key.endswith("-postgresql") or key in ("dbos", "procrastinate"):
        reasons.append(no_postgresql_reason(folder))
    if key == "dramatiq":
        reasons.append(no_rabbitmq_reason())
    if key in PEERS and not find_spec(key):
        name, package = PEERS[key]
        reasons.append(f"{name} is not installed (pip install '{package}')")
    return "; ".join(filter(None, reasons))


# ---- Cases ----


def _messaging(broker: Truenext, folder: Path, sizes: Sizes) -> None:
    sides = truenext_side(broker, shop.serve), truenext_side(broker, bare.relay, name="the client alone")
    compare("messaging", sides, sizes.flows, sizes.runs, target=0.5)


def _poison(broker: Truenext, folder: Path, sizes: Sizes) -> None:
    def start_flows(order: Order) -> None:
        hired(shop.start_flows_and_poison, order)

    def check(order: Order) -> None:
        waiting, poison = asyncio.run(queues.waiting(broker.port)), shop.poison_count(order.flows)
        # The last poison messages may be between two attempts.
        if sum(waiting.values()) != poison:
            raise ValueError(f"{poison} messages were poison, and these wait still: {waiting}")
        asyncio.run(queues.empty(broker.port, list(waiting)))

    sides = (
        Side("beside poison", shop.serve_poisoned, start_flows, check, broker.port, broker),
        truenext_side(broker, shop.serve, name="the flows alone"),
    )
    compare("poison", sides, sizes.flows, sizes.runs, target=0.8)


def _sqlalchemy(broker: Truenext, database: str, folder: Path, sizes: Sizes) -> None:
    def prepare(order: Order) -> None:
        sql.prepare(database)

    def check(order: Order) -> None:
        sql.check(database, order.flows)

    sides = (
        once.side("truenext", broker, database, sql.serve),
        Side("SQLAlchemy alone", sql.insert_alone, prepare, check, database=database),
    )
    compare("sql", sides, sizes.flows, sizes.runs)


def _interactive(broker: Truenext, folder: Path, sizes: Sizes) -> None:
    interactive.compare(broker, max(sizes.flows, interactive.PER_S), sizes.runs)


def _dramatiq(broker: Truenext, folder: Path, sizes: Sizes) -> None:
    from bench.flows import pipeline

    def start_pipelines(order: Order) -> None:
        hired(pipeline.start_pipelines, order)
        pipeline.wait_for(order)

    with RabbitMQ(folder) as rabbitmq:
        print_line(f"  Dramatiq {version('dramatiq')}, RabbitMQ {rabbitmq.version}; without confirms, as shipped")
        sides = (
            truenext_side(broker, shop.serve),
            Side("Dramatiq", pipeline.work, start_pipelines, pipeline.check, rabbitmq.port, rabbitmq),
        )
        compare("dramatiq", sides, sizes.flows, sizes.runs, target=2)


PEERS = {
    "dramatiq": ("Dramatiq", "dramatiq[rabbitmq]"),
    "dbos": ("DBOS Transact", "dbos"),
    "procrastinate": ("procrastinate", "procrastinate"),
}
"""Name and package of each optional peer, by key of the case."""


def _in_both(key: str, title: str, measure: Measure, share: int, *, by_default: bool = True) -> tuple[Case, Case]:
    return (
        Case(f"{key}-sqlite", f"{title}, SQLite", in_sqlite(measure), share, by_default),
        Case(f"{key}-postgresql", f"{title}, PostgreSQL", in_postgresql(measure), share, by_default),
    )


CASES = (
    Case("messaging", "flows of three stages, beside the client alone", _messaging),
    Case("poison", "the same, and one poison message besides for every nineteen, with three attempts", _poison),
    *_in_both("sql", "the same with an INSERT in each stage", _sqlalchemy, 4),
    *_in_both("once", "the same, exactly once, beside best-effort 1PC", once.compare_best_effort, 4),
    *_in_both(
        "once-parts", "the same, exactly once, with parts of that left out", once.compare_parts, 4, by_default=False
    ),
    Case("dbos", "exactly once, beside DBOS Transact, PostgreSQL", in_postgresql(once.compare_dbos), 4),
    Case(
        "procrastinate", "exactly once, beside procrastinate, PostgreSQL", in_postgresql(once.compare_procrastinate), 4
    ),
    *_in_both(
        "inbox", "exactly once, with a long inbox and with an empty one", inbox.compare_inboxes, 4, by_default=False
    ),
    *_in_both("drain", "what the outbox has after an outage, beside the client alone", drain.compare_drain, 0),
    *_in_both(
        "costs", "statements, rows and bytes of a message, exactly once and best-effort 1PC", costs.compare_costs, 20
    ),
    Case("before", "flows, and questions, beside those of an earlier version", before.compare_before),
    Case("rejections", "rejected messages, reported and handled", failures.compare_rejections),
    Case("failed", "questions that fail, beside those with replies", failures.compare_asks, 20),
    *_in_both("keyed", "questions under keys", keyed.compare_keyed, 20),
    Case("delayed", "delayed flows that are due at once, beside the client's", delayed.compare_delayed, 0),
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
    parser.add_argument(
        "--only", metavar="KEYS", help=f"of {keys}; sql means all that begin so (default: all but once-parts and inbox)"
    )
    parser.add_argument(
        "--workers", type=sizes_of, default=[1, CONCURRENCY], metavar="N,N", help="of a stage, in once (default: 1,8)"
    )
    parser.add_argument(
        "--inbox-rows", type=positive, default=10_000_000, metavar="N", help="in inbox; 10 million need 5 GB of disk"
    )
    parser.add_argument(
        "--units", type=positive, default=100_000, metavar="N", help="left in the outbox, in drain; flows of delayed"
    )
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="earlier version, for the case before")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where all data goes (default: temp folder)")
    options = parser.parse_args(arguments)
    chosen_keys = options.only.split(",") if options.only else [case.key for case in CASES if case.by_default]
    if unknown := [each for each in chosen_keys if not any(case.is_one_of([each]) for case in CASES)]:
        parser.error(f"no such case: {', '.join(unknown)}")
    end_in_order()

    def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as name:
            folder = Path(name)
            folder.chmod(PATHS)
            for fact, value in machine.facts(folder):
                print_line(f"{fact}: {value}")
            with Truenext(folder) as broker:
                for case in CASES:
                    if not case.is_one_of(chosen_keys):
                        continue
                    if reason := skip_reason(case.key, folder, options.before):
                        print_line(f"without {case.key}: {reason}")
                        continue
                    count = max(1, options.flows // case.share) if case.share else options.units
                    print_line(f"{case.key}: {case.title}, {count:,} in each run")
                    sizes = Sizes(
                        count, options.runs, options.workers, options.inbox_rows, options.units, options.before
                    )
                    case.measure(broker, folder, sizes)

    return guarded(measure)


if __name__ == "__main__":
    raise SystemExit(main())
