"""`truenext stages run`: start, run and end of the process of a service.

SIGTERM or SIGINT      take no more messages, finish running stages, release all other messages; exit status 0
a second signal        release the messages of running stages, too; exit status 128 + number of the signal
a third signal         end at once
a changed source file  with --reload: as after the first signal, but then the command runs again

The process ends at the latest 40 seconds after the first signal, or 10 seconds after the second, whatever the stages
do.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from truenext.broker.settings import LogFormat, LogLevel
from truenext.cli import logs, terminal
from truenext.cli.connection import credentials_options, split_by_source, with_login_hint
from truenext.cli.exit_status import BROKEN_PIPE, NO_ANSWER, CommandFailure
from truenext.cli.health_server import Health, serve_health
from truenext.cli.loops import new_event_loop
from truenext.cli.stages.process_exit import (
    RESTART,
    THREADS_TIMEOUT_S,
    ExitDeadline,
    exit_now,
    join_threads,
    restart,
)
from truenext.cli.stages.service_broker import merge_credentials, urls_option
from truenext.cli.stages.service_loader import database_option, load_service, service_argument
from truenext.cli.stages.source_watcher import SourceWatcher
from truenext.cli.values import HOST_AND_PORT, EnumParam, PathParam, seconds_option
from truenext.client.core.credentials import Credentials
from truenext.errors import Code, ConfigurationError, Refused, TruenextError
from truenext.flows.names import endpoint_of
from truenext.model.numerals import count_noun
from truenext.model.url import parse_host_and_port
from truenext.stage.core.cron import CronPage, PresentCron, are_equal, present_selector
from truenext.stage.core.health import STALLED_AFTER_S, assess_health
from truenext.stage.definition import Definition
from truenext.stage.service import Service
from truenext.stage.service_run import STOP_TIMEOUT_S, RunResources, ServiceRun

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger("truenext.stage")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NO_TIMEOUT_S = 0.0
CLOSE_TIMEOUT_S = 10.0
"""Seconds in which the process must end after STOP_TIMEOUT_S. This limit holds even if a stage blocks the event
loop."""


@click.command()
@service_argument
@urls_option
@credentials_options
@database_option
@click.option(
    "--events",
    type=PathParam(file_okay=False),
    help="Write the events of the stages into this folder, for truenext audit --stages.",
)
@click.option(
    "--health",
    "health_at",
    type=HOST_AND_PORT,
    help="Serve /live, /ready, / and /metrics here. A port alone is on 127.0.0.1, port 0 picks a free one.",
)
@seconds_option(
    "--stalled-after",
    "stalled_after_s",
    default=STALLED_AFTER_S,
    help="Seconds after which a stage is not live if it has messages and completes none.",
)
@click.option(
    "--reload",
    "reloads",
    is_flag=True,
    help="Stop and start again when a Python file in the current folder or below changes, for development. Needs "
    "truenext[reload].",
)
@click.option(
    "--log-level",
    type=EnumParam(LogLevel),
    default=LogLevel.WARNING.value,
    show_default=True,
    help="Lowest level of the log records that are written to standard error.",
)
@click.option(
    "--log-format",
    type=EnumParam(LogFormat),
    default=LogFormat.TEXT.value,
    show_default=True,
    help="Format of the log: lines for a reader, or one JSON object a line.",
)
def run(
    target: str,
    urls: tuple[str, ...],
    credentials: Credentials,
    database: str | None,
    events: Path | None,
    health_at: str | None,
    stalled_after_s: float,
    reloads: bool,
    log_level: LogLevel,
    log_format: LogFormat,
) -> None:
    """Run the stages of a service until SIGTERM or Ctrl-C.

    Prints one line once the service consumes messages. Waits for a broker or database that is not available yet. On the
    first signal it completes running stages for at most 30 seconds, releases all other messages, and exits 0. On a
    second signal it also releases the messages of running stages, and exits with 128 + the number of the signal.

    With --reload a change of a source file stops the service as the first signal does, and starts it again. After an
    error the command waits for a change.

    User and password come from the first source that names a user: the command line, the service, TRUENEXT_USER. A
    password without a user replaces only the password. --ca replaces the file of the service, and --certificate with
    --key replaces the certificate and key of the service.
    """
    line, environment = split_by_source(credentials)
    terminal.set_line_buffering()
    logs.configure_logging(log_level.value, log_format)
    deadline, status = ExitDeadline(), 1
    output_error: BaseException | None = None
    service: Service | None = None
    watcher: SourceWatcher | None = None
    has_failed = False
    try:
        if reloads:
            watcher = SourceWatcher(Path.cwd())
        with logs.warn_of_basic_config():
            service = load_service(target)
        login_note = _apply_options(service, urls, line, environment, database, events)
        if not service.stages:
            raise ConfigurationError(f"{target} has no stages to run: it only sends to other services")
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            try:
                process = _ServiceProcess(service, target, login_note, stalled_after_s, deadline, watcher)
                status = runner.run(process.run(health_at))
            except (SystemExit, KeyboardInterrupt) as error:
                # Raised by a task that a stage started and did not await. In an orderly end, the message of that stage
                # would be released without an attempt, and the next process would end the same way.
                exit_now(
                    1, "the process ends at once: a task that a stage started and did not await has raised this", error
                )
            finally:
                for number in SIGNALS:
                    signal.signal(number, signal.SIG_DFL)
                # The loop's end waits for stages that swallow their cancellation.
                deadline.bring_forward(THREADS_TIMEOUT_S, status)
    except TruenextError as error:
        failure = CommandFailure(error if service is None else with_login_hint(error, service.credentials))
        failure.show()
        status, has_failed = failure.exit_code, True
    except _OutputError as error:
        output_error = error.__cause__
        status = BROKEN_PIPE if isinstance(output_error, BrokenPipeError) else NO_ANSWER
    except Exception as error:
        logger.critical("the service has ended with an error", exc_info=error)
        status, has_failed = 1, True
    deadline.cancel()
    if has_failed and watcher is not None:
        terminal.echo("truenext: waits for a change of a source file", err=True)
        watcher.wait_for_change()
        status = RESTART
    join_threads(status)
    if output_error is not None:
        # The main group prints the reason and exits with that status, as for any command.
        raise output_error
    if status == RESTART:
        restart()
    raise SystemExit(status)


def _apply_options(
    service: Service,
    urls: tuple[str, ...],
    line: Credentials,
    environment: Credentials,
    database: str | None,
    events: Path | None,
) -> str:
    """Set the broker, credentials, database and events folder of a service as the options say. Return the login note of
    `merge_credentials`. `line` has the credentials of the command line."""
    if urls:
        service.broker = urls
    service.credentials, login_note = merge_credentials(line, service.credentials, environment)
    if database is not None:
        service.database = database
    if events is not None:
        service.events = events
    is_used = service.has_outbox or any(map(service.plans().uses_database, service.stages.values()))
    if database is not None and not is_used:
        logger.warning(
            "--database is unused: no stage has a session or is exactly-once", extra={"service": service.name}
        )
    return login_note


class _OutputError(Exception):
    """Standard output cannot be written to, so the line that reports the start cannot be printed. The cause is an
    OSError."""


@dataclass(eq=False)
class _ServiceProcess:
    _service: Service
    _target: str
    """Name of the service on a command line, such as `shop:app`."""
    _login_note: str
    _stalled_after_s: float
    _deadline: ExitDeadline
    _watcher: SourceWatcher | None
    _restarts: bool = False
    """True once a source file has changed."""
    _signals: list[signal.Signals] = field(default_factory=list)
    _main: asyncio.Task[object] | None = None

    async def run(self, health_at: str | None) -> int:
        """Run the service, and return the exit status.

        Raises: TruenextError or another error, if it has ended the service
        """
        service = self._service
        self._listen_to_signals()
        running = ServiceRun(
            service,
            service.plans(),
            RunResources.of(service),
            waits=True,
            stalled_after_s=self._stalled_after_s,
        )
        async with AsyncExitStack() as stack:
            note = ""
            if health_at is not None:
                server = serve_health(
                    *parse_host_and_port(health_at), partial(self._health, running), partial(self._metrics, running)
                )
                url = await stack.enter_async_context(server)
                note = f"; health at {url}"
            await stack.enter_async_context(service.bound_to(running))
            try:
                # Missing tables are reported before the wait for the broker.
                await running.prepare()
                await running.connect()
                await _warn_of_orphaned_queues(running, service)
                await _warn_of_other_crons(running, service, self._target)
                await running.start()
                _echo(
                    f"{service.name} runs {count_noun(len(service.stages), 'stage')} of "
                    f"{count_noun(len(service.endpoints), 'endpoint')} at {' or '.join(service.broker)}"
                    f"{self._login_note}{note}"
                )
                await running.wait_until_failed()
            except asyncio.CancelledError:
                self._check_signal()
            except _OutputError:
                await self._stop(running)
                raise
            except Exception as error:
                # Logged before the stop, which may take a while; without running stages the caller reports the error.
                if running.stage_consumers:
                    ended = sorted({each.stage.queue for each in running.stage_consumers if each.task.done()})
                    logger.critical(
                        "the service stops: a stage cannot consume messages any more",
                        extra={"stages": ended, "error": str(error)},
                    )
                await self._stop(running)
                raise
            await self._stop(running)
        return self._status

    async def _stop(self, running: ServiceRun) -> None:
        try:
            # The second signal may have come before this was reached.
            await running.stop(STOP_TIMEOUT_S if len(self._signals) < 2 else NO_TIMEOUT_S)
        except asyncio.CancelledError:
            self._check_signal()
            logger.warning(
                "second signal: messages that are being processed are released at once",
                extra={"signal": self._signals[-1].name},
            )
            await running.stop(NO_TIMEOUT_S)

    def _health(self, running: ServiceRun) -> Health:
        return Health.of(assess_health(running.status(), self._stalled_after_s))

    async def _metrics(self, running: ServiceRun) -> list[Metric]:
        of_stages = self._service.metrics.collect()
        exactly_once = running.exactly_once
        return of_stages if exactly_once is None else of_stages + await exactly_once.collect()

    def _listen_to_signals(self) -> None:
        # A signal cancels this task, which runs everything and therefore also closes what the lifespan opens.
        self._main = asyncio.current_task()
        # Not with the loop's own handlers: a stage may block the loop.
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        if self._watcher is not None:
            self._watcher.call_on_change(self._on_source_changed)

    def _on_signal(self, number: int, _: object) -> None:
        self._signals.append(signal.Signals(number))
        is_first = len(self._signals) == 1
        self._deadline.bring_forward((STOP_TIMEOUT_S if is_first else NO_TIMEOUT_S) + CLOSE_TIMEOUT_S, self._status)
        if not is_first:
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
        if not (is_first and self._restarts):
            # After a change of a source file the stop has begun already.
            self._cancel_main()

    def _on_source_changed(self) -> None:
        if not (self._signals or self._restarts):
            self._restarts = True
            self._deadline.bring_forward(STOP_TIMEOUT_S + CLOSE_TIMEOUT_S, RESTART)
            self._cancel_main()

    def _cancel_main(self) -> None:
        assert self._main is not None, "it listens"
        self._main.get_loop().call_soon_threadsafe(self._main.cancel)

    @property
    def _status(self) -> int:
        if self._restarts and not self._signals:
            return RESTART
        return 0 if len(self._signals) < 2 else 128 + self._signals[-1]

    def _check_signal(self) -> None:
        """Clear the cancellation of the main task after a signal or a change of a source file.

        Raises: CancelledError if neither has caused the cancellation
        """
        assert self._main is not None, "it listens"
        if not (self._signals or self._restarts):
            raise asyncio.CancelledError
        while self._main.cancelling():
            self._main.uncancel()


def _echo(text: str) -> None:
    try:
        terminal.echo(text)
    except OSError as error:
        raise _OutputError from error


class QueueInfo(msgspec.Struct):
    name: str
    waiting: int
    unacknowledged: int
    consumers: int
    scheduled: int = 0


async def _warn_of_orphaned_queues(running: ServiceRun, definition: Definition) -> None:
    """Log a warning for each queue of a former stage that has messages. An earlier version of the service has left
    these messages, or still sends them."""
    try:
        queues = msgspec.json.decode(await running.connection.control_request("queues"), type=list[QueueInfo])
    except (TruenextError, TimeoutError) as error:
        logger.warning("cannot check whether queues of former stages have messages", extra={"error": str(error)})
        return
    for queue in orphaned_queues(queues, definition):
        messages = queue.waiting + queue.unacknowledged
        facts = {"queue": queue.name, "messages": messages, "consumers": queue.consumers}
        logger.warning(
            "messages wait in the queue of a stage that does not exist any more",
            extra=facts,
        )


async def _warn_of_other_crons(running: ServiceRun, definition: Definition, target: str) -> None:
    """Log a warning if the cron flows in the broker are not those that the service declares. `target` names the service
    on a command line. No warning is logged if the user may not browse the queues of the declared cron flows."""
    declared = {each.endpoint for each in definition.crons.values()}
    present: list[PresentCron] = []
    try:
        counts = msgspec.json.decode(await running.connection.control_request("queues"), type=list[QueueInfo])
        scheduled = {each.name for each in counts if each.scheduled}
        for queue in declared | (definition.endpoints.keys() & scheduled):
            try:
                present += await _present_in(running, definition, queue)
            except Refused as error:
                if error.code == Code.FORBIDDEN and queue in declared:
                    return
                if error.code not in (Code.FORBIDDEN, Code.NOT_FOUND):
                    raise
    except (TruenextError, TimeoutError) as error:
        logger.warning("cannot check the cron flows of the service", extra={"error": str(error)})
        return
    if not are_equal(definition.crons.values(), present):
        logger.warning(
            "the broker has other cron flows than the service declares: see and change them with the command",
            extra={
                "service": definition.name,
                "command": f"truenext stages cron {target} --apply",
                "declared": sorted(definition.crons),
                "present": sorted(each.name for each in present),
            },
        )


async def _present_in(running: ServiceRun, definition: Definition, queue: str) -> list[PresentCron]:
    """Return the scheduled sends of the service's cron flows in a queue. Raises: TruenextError, TimeoutError"""
    request = {"queue": queue, "selector": present_selector(definition.name)}
    present: list[PresentCron] = []
    after: list[int] | None = [0, 0]
    until: dict[str, int] = {}
    while after is not None:
        answer = await running.connection.control_request("scheduled", request | until | {"after": after})
        page = msgspec.json.decode(answer, type=CronPage)
        present += page.sends
        after, until = page.next, {"until": page.until}
    return present


def orphaned_queues(queues: Iterable[QueueInfo], definition: Definition) -> list[QueueInfo]:
    """Return the queues of former stages: they have messages, and belong to an endpoint of the service but to none of
    its stages."""
    return [
        each
        for each in queues
        if each.name not in definition.stages
        and endpoint_of(each.name) in definition.endpoints
        and each.waiting + each.unacknowledged
    ]
