"""`truenext stages ps`: show the processes of all services whose broker is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.table import Table

from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, broker_options, connected
from truenext.cli.terminal import format_age
from truenext.cli.watch import show_repeatedly
from truenext.clock import monotonic
from truenext.errors import Code, ConnectionLost, Refused
from truenext.model.numerals import count_noun
from truenext.model.process_report import REPLIES, REPORT_TTL_S, STAGES_TOPIC, ProcessReport, StageFigures
from truenext.model.seen_processes import SeenProcess, SeenProcesses

if TYPE_CHECKING:
    from truenext.blocking import Connection, Consumer

GATHER_S = 2.0
"""Seconds in which reports are received after a request. With --watch also the time between two requests."""


_CONTROL_ONLY = (
    "processes do not answer, because the broker is being drained or has no place for more connections, as `truenext "
    "status` says: ask again later"
)


@click.command()
@click.option(
    "--watch",
    "watches",
    is_flag=True,
    help="Show them again every 2 seconds, also those that are silent, until Ctrl-C (exit status 130).",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@broker_options
def ps(watches: bool, as_json: bool, broker: BrokerOptions) -> None:
    """List the processes that run stages, of all services.

    The processes answer over the broker. Shows the state of each process, for how long it has been running, what its
    stages have done since its start, and the unsent messages in the outbox of its service.

    A process that has answered before, and has not answered for 10 seconds, is silent: it was killed, hangs, or has
    lost the broker. Only --watch shows it: without, the command asks once, and knows of no process from before. A
    process that does not answer at all is not shown, such as one whose user may not take from /topic/truenext.stages,
    or one of an older truenext.

    The user of this command needs the right to send to /topic/truenext.stages.
    """
    with connected(broker, reconnect=watches) as connection, connection.consumer(REPLIES) as replies:
        if connection.health().control_only and not watches:
            raise Refused(_CONTROL_ONLY, Code.DRAINING)
        requests = _Requests(connection, replies, watches=watches)
        if watches:
            show_repeatedly(requests.gather, lambda seen: _print(seen, as_json=as_json), pause_s=0)
        _print(requests.gather(), as_json=as_json)


class _Requests:
    def __init__(self, connection: Connection, replies: Consumer, *, watches: bool) -> None:
        self._connection = connection
        self._replies = replies
        self._watches = watches
        self._reconnects = connection.health().reconnects
        self.seen = SeenProcesses()

    def gather(self) -> SeenProcesses:
        """Request reports, receive them for GATHER_S seconds, and return all that were seen. While the connection is
        lost, only wait.

        Raises: Refused if the user may not send to the topic. Without --watch also TimeoutError if the request cannot
        be sent, and ConnectionLost
        """
        until = monotonic() + GATHER_S
        try:
            self._connection.send(
                STAGES_TOPIC, b"", persistent=False, ttl=REPORT_TTL_S, reply_to=REPLIES, timeout=GATHER_S
            )
            self.seen.request_sent(monotonic())
        except (TimeoutError, ConnectionLost):
            if not self._watches:
                raise
            self.seen.connection_lost()
        while (left_s := until - monotonic()) > 0:
            message = self._replies.receive(left_s)
            if message is not None:
                self.seen.add_report(message.body, monotonic())
        reconnects = self._connection.health().reconnects
        if reconnects != self._reconnects:
            self._reconnects = reconnects
            self.seen.connection_lost()
        return self.seen


def _print(seen: SeenProcesses, *, as_json: bool) -> None:
    processes = seen.processes(monotonic())
    if seen.ignored_count:
        terminal.echo(
            f"truenext: {count_noun(seen.ignored_count, 'answer')} ignored: no reports, or too many", err=True
        )
    if as_json:
        terminal.write_json([_facts(each) for each in processes])
    elif processes:
        terminal.print_drawn(_table(processes))
    else:
        terminal.echo("No process has answered.")


def _facts(process: SeenProcess) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(process)
    return {**facts.pop("report"), **facts}


def _table(processes: list[SeenProcess]) -> Table:
    table = Table("process", "state", "up", "running", "completed", "failed", "given up", "unsent", "why", box=None)
    for column in table.columns[2:8]:
        column.justify = "right"
    for each in processes:
        report = each.report
        metrics = report.metrics or []
        counts = [_total(metrics, count) for count in _COUNTS] if report.metrics is not None else ["?"] * len(_COUNTS)
        unsent = "" if report.outbox is None else "?" if report.outbox.unsent is None else f"{report.outbox.unsent:,}"
        cells = [report.instance, _state(each), format_age((report.at - report.started_at) / 1000), *counts, unsent]
        table.add_row(*map(terminal.table_cell, [*cells, _reason(report)]))
    return table


_COUNTS: tuple[Callable[[StageFigures], int], ...] = (
    lambda each: each.running,
    lambda each: each.outcomes.get("completed", 0),
    lambda each: each.outcomes.get("failed", 0),
    lambda each: sum(each.given_up.values()),
)


def _total(metrics: list[StageFigures], count: Callable[[StageFigures], int]) -> str:
    return f"{sum(map(count, metrics)):,}"


def _state(process: SeenProcess) -> str:
    if process.state == "silent":
        return f"silent for {format_age(process.seen_s)}"
    if process.state == "ended":
        return "ended"
    health = process.report.health
    return "ready" if health.ready else "not ready" if health.live else "not live"


def _reason(report: ProcessReport) -> str:
    reasons = report.health.reasons
    if report.has_ended or not reasons:
        return ""
    return reasons[0] if len(reasons) == 1 else f"{reasons[0]}, and {len(reasons) - 1:,} more"
