"""Demo of orders through queries of Spark, while drivers and broker are killed; then Spark audits the broker.

`python -m examples.queries.demo` runs this part of `make demo` alone.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from examples.guarded_broker import GuardedBroker
from examples.orders.service import SOLD_OUT
from examples.orders.web import make_order
from examples.program import ROOT, Program, exit_on_signals
from examples.queries.jobs import BILLS, JOBS, queue_of
from truenext.spark.audit.command import SPARK_LOG, audit_histories, write_page
from truenext.spark.session import start

ORDERS = 1000
TAXES = {"tea": 7, SOLD_OUT: 19}
"""Percent, by item."""
STEP_S = 300.0
"""Limit in seconds of a job for its next batch, or for its end; then it is stuck."""
USERS = Path(__file__).with_name("users.toml")
TITLE = "Orders through two queries of Spark, drivers and broker killed on the way"

PrintLine = Callable[[str], object]


def show(console: Console, out: Path, count: int = ORDERS) -> bool:
    """Run both queries, audit the broker, and print the results. Return whether all was right."""
    console.print("[bold]Spark reads and writes queues while its drivers and the broker are killed[/bold]")
    console.print(f"TLS, and for each query a user with the grants of {USERS.relative_to(ROOT)}")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="truenext-queries-") as name, ExitStack() as stack:
        folder = Path(name)
        broker = GuardedBroker(folder, USERS)
        stack.callback(broker.kill)
        send_orders(broker, count)

        console.print(f"{count} orders from a topic to Parquet files")
        run_killed("archive", broker, folder / "archive", console.print)
        spark = start(log=out / SPARK_LOG)
        archived = [row.id for row in spark.read.parquet(f"{folder}/archive/orders").select("id").collect()]
        is_right = is_each_once(archived, count)
        console.print(f"  sent {count}, rows {len(archived)}, distinct {len(set(archived))}")

        console.print(f"{count} orders from a topic, joined with a Parquet table, to the queue {BILLS}")
        run_killed("billing", broker, folder / "billing", console.print)
        billed = receive_bills(broker)
        is_right &= is_each_once(billed, count)
        console.print(f"  in {count}, out {len(billed)}, distinct {len(set(billed))}\n")

        broker.stop()
        console.print("[bold]Spark audits the history of this broker[/bold]")
        (audited,) = audit_histories([broker.data], out=out)
        write_page([audited], out, title=TITLE)
    if is_right:
        console.print("[bold green]Every order came out of each query, once.[/bold green]")
    else:
        console.print("[bold red]Not every order came out of each query, once.[/bold red]")
    return is_right and audited.verdict.has_contract_held


def send_orders(broker: GuardedBroker, count: int) -> None:
    for job in JOBS:
        # A queue gets copies of its topic's messages only after it was named once.
        with broker.connect(job) as connection, connection.consumer(f"/queue/{queue_of(job)}"):
            pass
    with broker.connect("shop") as connection:
        orders = (make_order("batch", number)[0] for number in range(count))
        connection.send_many("/topic/VirtualTopic.orders", map(msgspec.json.encode, orders))


def write_taxes(folder: Path) -> None:
    folder.mkdir()
    pq.write_table(pa.table({"item": [*TAXES], "percent": [*TAXES.values()]}), folder / "taxes.parquet")


def run_killed(job: str, broker: GuardedBroker, folder: Path, print_line: PrintLine) -> None:
    """Run a job to its end. Kill its driver after the first batch, and the broker after another one.

    Raises: SystemExit if the job fails, is stuck, or has ended before it could be killed
    """
    write_taxes(folder)
    command = ("examples.queries.jobs", job, str(folder))
    driver = Program(folder / "log", *command, environment=broker.environment(job))
    try:
        for name, victim in (("the driver", driver), ("the broker", broker)):
            wait_for(partial(has_more_batches, folder, committed_batches(folder)), driver)
            if driver.status is not None:
                raise SystemExit(f"{job} has ended before {name} was killed; its log is\n{driver.log}")
            victim.kill()
            print_line(f"  kill -9 of {name} after batch {committed_batches(folder)}, start again")
            victim.start()
        wait_for(lambda: driver.status is not None, driver)
        if driver.status != 0:
            raise SystemExit(f"{job} has ended with {driver.status}; its log is\n{driver.log}")
    finally:
        driver.kill()
    print_line(f"  done after batch {committed_batches(folder)}")


def committed_batches(folder: Path) -> int:
    """Return the number of batches that the checkpoint has as committed."""
    return len(list((folder / "checkpoint" / "commits").glob("[0-9]*")))


def has_more_batches(folder: Path, than: int) -> bool:
    return committed_batches(folder) > than


def wait_for(is_so: Callable[[], bool], driver: Program) -> None:
    """Wait until `is_so` returns True or the driver has ended.

    Raises: SystemExit if the wait takes too long
    """
    deadline = time.monotonic() + STEP_S
    while not is_so() and driver.status is None:
        if time.monotonic() > deadline:
            raise SystemExit(f"the job is stuck; its log is\n{driver.log}")
        time.sleep(0.02)


def receive_bills(broker: GuardedBroker) -> list[str]:
    """Receive all bills, and return their orders."""
    with broker.connect("shop") as connection, connection.consumer(f"/queue/{BILLS}") as bills:
        orders = []
        while (bill := bills.receive(0)) is not None:
            orders.append(json.loads(bill.body)["order"])
        return orders


def is_each_once(orders: Sequence[str], count: int) -> bool:
    return sorted(orders) == sorted(make_order("batch", number)[0].id for number in range(count))


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m examples.queries.demo", description=__doc__).parse_args()
    exit_on_signals()
    console = Console(width=None if sys.stdout.isatty() else 120)
    sys.exit(0 if show(console, Path("demo-report") / "queries") else 1)
