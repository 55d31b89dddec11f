"""`truenext drain`: let consumers empty the queues of a broker while producers wait."""

from __future__ import annotations

import time
from typing import Any

import click

from truenext.blocking import Connection
from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, address_options, connected, send_control_request
from truenext.cli.totals import REPORT_INTERVAL_S
from truenext.cli.values import SecondsParam
from truenext.errors import TruenextError
from truenext.model.numerals import count_noun

POLL_FIRST_S, POLL_MAX_S = 0.05, 1.0
"""Pause before the second request for progress, and longest pause: each pause is twice as long as the one before."""


@click.command()
@click.option(
    "--timeout",
    "timeout_s",
    type=SecondsParam(),
    default="5m",
    show_default=True,
    help="Time to wait until nothing is left, in seconds, or with a unit: 90, 90s, 5m or 1h.",
)
@click.option("--undo", is_flag=True, help="End the drain: producers and new clients go on.")
@address_options
def drain(timeout_s: float, undo: bool, broker: BrokerOptions) -> None:
    """Let consumers empty all queues, while producers wait.

    From now on connections that only send wait, new connections may only send control requests, and `truenext status`
    says that the broker is not ready. Consumers, stages and queries of Spark go on. The broker stays so until it ends,
    or until `truenext drain --undo`, also if the time is over.

    The command does not wait for scheduled sends, messages that wait for their next try, messages in paused queues,
    dead letters, and marks and decisions that Spark's queries keep. It prints how many there are.

    Exits 0 if nothing else is left; 1 if the time is over, and prints what is left, or if the drain does not begin
    because messages wait in a queue without a consumer; 2 if the broker could not be asked.
    """
    with connected(broker) as connection:
        if undo:
            _undo(connection)
            return
        report = send_control_request(connection, "drain", {"draining": True})
        if report["error"]:
            raise TruenextError(report["error"])
        report = _wait(connection, timeout_s)
    if not report["draining"]:
        raise TruenextError("the drain was ended by another command, `truenext drain --undo`: producers continue")
    if not report["drained"]:
        raise TruenextError(
            f"the time is over, and {left_text(report)}; the broker is still being drained: run this command again, "
            "or end the drain with `truenext drain --undo`"
        )
    terminal.echo(f"Nothing is left to wait for.{_excepted_text(report)}")


def _undo(connection: Connection) -> None:
    was_draining = send_control_request(connection, "drain")["draining"]
    send_control_request(connection, "drain", {"draining": False})
    terminal.echo("The drain has ended: producers continue." if was_draining else "The broker was not being drained.")


def _wait(connection: Connection, timeout_s: float) -> dict[str, Any]:
    """Wait until nothing is left, the drain has ended or the time is over, and return the last report. Prints what is
    left every few seconds."""
    ends_at = time.monotonic() + timeout_s
    reported_at = float("-inf")
    pause_s = POLL_FIRST_S
    while True:
        report: dict[str, Any] = send_control_request(connection, "drain")
        now = time.monotonic()
        if report["drained"] or not report["draining"] or now >= ends_at:
            return report
        if now - reported_at >= REPORT_INTERVAL_S:
            reported_at = now
            terminal.echo(left_text(report), err=True)
        time.sleep(min(pause_s, ends_at - now))
        pause_s = min(2 * pause_s, POLL_MAX_S)


def left_text(report: dict[str, Any]) -> str:
    """Return a text on the messages for which a drain waits."""
    text = f"{report['waiting']:,} wait and {report['held']:,} are held"
    queues, without = report["queues"], report["no_consumer"]
    if not queues:
        return f"{text}, but messages move"
    if report["queues_total"] == 1:
        text += f", in {_queue_name(queues[0])} ({count_noun(queues[0]['consumers'], 'consumer')})"
    else:
        text += f", in {'; '.join(map(_queue_text, queues))}{_others_text(report['queues_total'] - len(queues))}"
    if without:
        names = ", ".join(terminal.escape_line(each["queue"]) for each in without)
        text += f"; no consumer is left for {names}{_others_text(report['no_consumer_total'] - len(without))}"
    return text


def _others_text(count: int) -> str:
    return f" and {count_noun(count, 'other queue')}" if count else ""


def _queue_text(queue: dict[str, Any]) -> str:
    counts = f"{queue['waiting']:,} waiting, {queue['held']:,} held, {count_noun(queue['consumers'], 'consumer')}"
    return f"{_queue_name(queue)} ({counts})"


def _queue_name(queue: dict[str, Any]) -> str:
    owner = f" of {queue['client']}" if queue["client"] else ""
    return f"{terminal.escape_line(queue['queue'])}{owner}"


_EXCEPTED = {
    "scheduled": "scheduled",
    "delayed": "waiting for their next try",
    "paused": "in paused queues",
    "dead": "dead",
    "kept": "kept by queries of Spark",
}
"""Counts of messages for which a drain does not wait, with their texts."""


def _excepted_text(report: dict[str, Any]) -> str:
    """Return a text on the messages for which a drain does not wait; "" if there are none."""
    counts = [f"{report[name]:,} {what}" for name, what in _EXCEPTED.items() if report[name]]
    return f" There are still: {', '.join(counts)}." if counts else ""
