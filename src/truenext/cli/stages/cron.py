"""`truenext stages cron`: show the cron flows that a service declares and those in the broker, and make them equal.

The broker gets all declared cron flows anew in one COMMIT, and then the cron flows that were listed before are
cancelled. The COMMIT has the next number of the service's producer, which was read before the list. So if two commands
run at once, only one of them commits under a number. The other command begins anew, and its list has the cron flows
that the first command has sent. So no command cancels the sends of a later COMMIT, and the sends of the last COMMIT
remain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import click
import msgspec
from rich.table import Table

from truenext.blocking import Connection
from truenext.cli import terminal
from truenext.cli.connection import (
    connected,
    control_answers,
    credentials_options,
    send_control_request,
    timeout_option,
)
from truenext.cli.exit_status import CommandFailure
from truenext.cli.stages.service_broker import broker_of, urls_option
from truenext.cli.stages.service_loader import load_service, service_argument
from truenext.client.core.credentials import Credentials
from truenext.errors import Code, InDoubt, Refused, TruenextError
from truenext.flows.envelope import CONTENT_TYPE
from truenext.model.limits import CONTROL_REQUEST_SEQUENCES_MAX as NUMBERS_MAX
from truenext.model.numerals import count_noun
from truenext.stage.core.cron import CronFlow, CronPage, PresentCron, are_equal, present_selector
from truenext.stage.service import Service

TRIES_MAX = 20
"""Number of tries to commit, while other commands commit at the same time."""


@click.command()
@service_argument
@click.option(
    "--apply", "applies", is_flag=True, help="Replace the cron flows in the broker by those that the service declares."
)
@urls_option
@credentials_options
@timeout_option
def cron(target: str, applies: bool, urls: tuple[str, ...], credentials: Credentials, connect_timeout_s: float) -> None:
    """Show the cron flows of a service.

    Shows the cron flows that the service declares (`app.cron`), and those in the broker. With --apply the broker gets
    all declared flows, and loses all other cron flows of the service. Run it once with each deployment, always as the
    same user, who needs `send`, `browse` and `manage` for the queues of the endpoints.

    User and password come from the first source that names a user: the command line, the service, TRUENEXT_USER.

    Exits 0 if declared and present cron flows are equal, 1 if they differ.
    """
    service = load_service(target)
    with connected(broker_of(service, urls, credentials, connect_timeout_s)) as connection:
        if applies:
            sent, cancelled = apply_crons(connection, service)
            terminal.echo(f"{count_noun(sent, 'cron flow')} sent, {cancelled:,} cancelled")
        present = list_present(connection, service)
    _print_table(service.crons.values(), present)
    if not are_equal(service.crons.values(), present):
        raise SystemExit(1)


def list_present(connection: Connection, service: Service) -> list[PresentCron]:
    """Return the scheduled sends of the service's cron flows, in all queues that the user may browse.

    Raises: TruenextError if the broker refuses a request, or the user may not browse the queue of a declared cron flow
    """
    declared = {each.endpoint for each in service.crons.values()}
    counts = {each["name"]: each["scheduled"] for each in send_control_request(connection, "queues")}
    present: list[PresentCron] = []
    for queue in sorted(declared | {name for name, count in counts.items() if count}):
        try:
            present += _list_queue(connection, queue, service.name)
        except Refused as error:
            is_unreadable = error.code == Code.FORBIDDEN and queue not in declared
            if error.code != Code.NOT_FOUND and not is_unreadable:
                raise
    return present


def _list_queue(connection: Connection, queue: str, service: str) -> Iterator[PresentCron]:
    request = {"queue": queue, "selector": present_selector(service)}
    for answer in control_answers(connection, "scheduled", request):
        for each in msgspec.convert(answer, CronPage).sends:
            yield msgspec.structs.replace(each, queue=queue)


def apply_crons(connection: Connection, service: Service) -> tuple[int, int]:
    """Replace the cron flows in the broker by those that the service declares. Return the numbers of sent and of
    cancelled flows.

    Raises: CommandFailure if other commands commit all the time; TruenextError if the broker refuses
    """
    producer = f"{service.name}.cron"
    for _ in range(TRIES_MAX):
        # The number is read before the list: the list has all that was sent under this number and earlier ones.
        last_number = send_control_request(connection, "producer", {"producer": producer})["commits"]
        present = list_present(connection, service)
        if are_equal(service.crons.values(), present):
            return 0, 0
        if not service.crons or _commit(connection, service.crons.values(), producer, last_number + 1):
            _cancel(connection, present)
            return len(service.crons), len(present)
    raise CommandFailure(
        TruenextError(
            f"other commands change the cron flows of {service.name} all the time: try again when they have ended"
        )
    )


def _commit(connection: Connection, flows: Iterable[CronFlow], producer: str, number: int) -> bool:
    """Send cron flows in one COMMIT. Return False if another command has used the number first. Raises:
    TruenextError"""
    with connection.session(transacted=True) as session:
        for each in flows:
            session.send(
                f"/queue/{each.endpoint}",
                each.body,
                content_type=CONTENT_TYPE,
                correlation_id=each.id,
                cron=each.cron,
                zone=each.zone,
                headers=each.headers,
            )
        try:
            return session.commit(producer=producer, number=number)
        except InDoubt:
            # The next try finds out: what was committed is in its list.
            return False


def _cancel(connection: Connection, crons: Iterable[PresentCron]) -> None:
    by_queue: dict[str, list[int]] = {}
    for each in crons:
        by_queue.setdefault(each.queue, []).append(each.number)
    requests = [
        {"queue": queue, "sequences": numbers[first : first + NUMBERS_MAX]}
        for queue, numbers in by_queue.items()
        for first in range(0, len(numbers), NUMBERS_MAX)
    ]
    for request in requests:
        try:
            for _ in control_answers(connection, "unschedule", request):
                pass
        except Refused as error:
            if error.code != Code.NOT_FOUND:
                raise


def _print_table(declared: Iterable[CronFlow], present: Iterable[PresentCron]) -> None:
    table = Table("name", "times", "zone", "endpoint", "next (UTC)", "state", box=None)
    remaining = list(present)
    rows = []
    for flow in declared:
        found = next((each for each in remaining if each.digest == flow.digest), None)
        if found is not None:
            remaining.remove(found)
        rows.append((flow.name, flow.cron, flow.zone, flow.endpoint, found, "present" if found else "missing"))
    for each in remaining:
        rows.append((each.name, each.cron, each.zone, each.queue, each, "not declared"))
    for name, times, zone, endpoint, found, state in rows:
        due = "" if found is None else f"{datetime.fromtimestamp(found.due_ms / 1000, UTC):%Y-%m-%d %H:%M}"
        table.add_row(*map(terminal.table_cell, (name, times, zone, endpoint, due, state)))
    if rows:
        terminal.print_drawn(table)
    else:
        terminal.echo("no cron flows")
