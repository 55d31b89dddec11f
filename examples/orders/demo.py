"""Demo of orders through a service of five stages on SQLite, while broker and service are killed; Spark audits each.

`python -m examples.orders.demo` runs this part of `make demo` alone.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples.orders.audit import VERDICT_FILE, OrdersVerdict, judge
from examples.orders.run import USERS, Counts, run
from examples.program import ROOT, exit_on_signals

KINDS = {"customer": "users, outbox", "asked": "users who wait", "batch": "batch"}
"""Label of each kind of orders, in the order of the output."""
SHOWN_MAX = 20
"""Number of findings that are printed; the file has all."""


def show(console: Console, out: Path) -> bool:
    """Run the orders, audit them, and print the results. Return whether all was right."""
    counts = Counts()
    console.print("[bold]A service of stages processes orders while broker and service are killed[/bold]")
    console.print(
        f"{sum(counts)} orders: {counts.customer} in users' own transactions, {counts.asked} asked for by users who "
        f"wait, {counts.batch} in a batch; two processes of five stages, SQLite, exactly once; "
        f"TLS, a user with the grants of {USERS.relative_to(ROOT)}"
    )
    with tempfile.TemporaryDirectory(prefix="truenext-orders-") as folder:
        result = run(Path(folder), counts, console.print)
        console.print(f"  {result.seconds:.0f} s until nothing waited any more\n")
        console.print("[bold]Spark audits broker, stages and orders[/bold]")
        verdict = judge(result, out)
    print_verdict(console, verdict)
    console.print(f"For programs: {out / VERDICT_FILE}")
    return verdict.is_right


def print_verdict(console: Console, verdict: OrdersVerdict) -> None:
    console.print(_kinds(verdict))
    console.print(_tables(verdict))
    console.print(_dead_letters(verdict))
    for each in verdict.findings[:SHOWN_MAX]:
        console.print(f"[red]{each.order or 'all'}: {each.finding}[/red]")
    if len(verdict.findings) > SHOWN_MAX:
        console.print(f"[red]and {len(verdict.findings) - SHOWN_MAX} more[/red]")
    if verdict.is_right:
        console.print("[bold green]Every order got what was due to it, once.[/bold green]")
    elif verdict.findings:
        console.print("[bold red]Not every order got what was due to it, once.[/bold red]")
    else:
        console.print("[bold red]The contract of broker and stages was broken: see above.[/bold red]")


def _kinds(verdict: OrdersVerdict) -> Table:
    table = _table(
        "Orders, and what became of their flows; median and 99 % of the seconds from order to end, kills included",
        "orders",
    )
    for name in (
        "committed",
        "rolled back",
        "repeated by users",
        "flows",
        "completed",
        "given up",
        "end not recorded",
        "median s",
        "99 % s",
    ):
        table.add_column(name, justify="right")
    for each in sorted(verdict.kinds, key=lambda each: list(KINDS).index(each.kind)):
        counts = (each.committed, each.rolled_back, each.repeated, each.flows, each.completed, each.given_up)
        cells = map(str, (*counts, each.not_recorded))
        table.add_row(KINDS[each.kind], *cells, _seconds(each.p50), _seconds(each.p99))
    return table


def _tables(verdict: OrdersVerdict) -> Table:
    table = _table(
        "Rows in the service's tables: without primary keys, a row written twice would be there twice", "table"
    )
    for name in ("due", "there", "orders with too few", "orders with too many"):
        table.add_column(name, justify="right")
    for each in verdict.tables:
        table.add_row(each.table, str(each.due), str(each.there), str(each.missing), str(each.too_many))
    return table


def _dead_letters(verdict: OrdersVerdict) -> Table:
    table = _table("Dead letters: messages given up after their attempts", "stage", "cause of the last attempt")
    table.add_column("messages", justify="right")
    for each in verdict.dead_letters:
        table.add_row(each.stage, each.cause, str(each.messages))
    return table


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m examples.orders.demo", description=__doc__).parse_args()
    exit_on_signals()
    console = Console(width=None if sys.stdout.isatty() else 120)
    sys.exit(0 if show(console, Path("demo-report") / "orders") else 1)
