"""`truenext stages send`: start one flow at an endpoint of a service, and wait for its reply on request."""

from __future__ import annotations

import asyncio
from datetime import datetime
from functools import partial
from typing import Any

import click

from truenext.blocking import connect
from truenext.broker.settings import LogLevel
from truenext.broker.users import suggest_name
from truenext.cli import logs, terminal
from truenext.cli.connection import credentials_options, split_by_source, with_login_hint
from truenext.cli.exit_status import CommandFailure
from truenext.cli.loops import new_event_loop
from truenext.cli.stages.service_broker import merge_credentials, urls_option
from truenext.cli.stages.service_loader import load_service, service_argument
from truenext.cli.values import TEXT, BodyParam, DelayParam, TimeParam, seconds_option
from truenext.client.core.credentials import Credentials
from truenext.errors import ConfigurationError, TruenextError
from truenext.flows.envelope import NotDecoded
from truenext.stage.core.definitions import Endpoint
from truenext.stage.core.flow_start import FlowOptions
from truenext.stage.service import TIMEOUT_S, Service
from truenext.stage.service_run import RunResources, ServiceRun


@click.command()
@service_argument
@click.argument("name", metavar="ENDPOINT", type=TEXT)
@click.argument("message", metavar="JSON", type=BodyParam())
@click.option(
    "--trace",
    type=TEXT,
    required=True,
    help="Human-readable name of the flow, such as the number of an order.",
)
@click.option("--ask", "asks", is_flag=True, help="Wait for the reply, and print it as JSON.")
@click.option(
    "--key",
    "flow_key",
    type=TEXT,
    help="Name of the flow for the service, such as the number of an order: for 7 days the flow starts once, however "
    "often the command runs, and its reply is kept. It needs the database of the service.",
)
@click.option("--delay", "delay_s", type=DelayParam(), help="Time until the flow starts, such as 90s, 2h or 3d.")
@click.option("--at", type=TimeParam(), help="Time at which the flow starts, such as 2027-01-31T08:00+01:00.")
@seconds_option("--timeout", "timeout_s", default=TIMEOUT_S, help="Seconds for the commit and, with --ask, the reply.")
@urls_option
@partial(credentials_options, has_key=False)
def send(
    target: str,
    name: str,
    message: bytes,
    trace: str,
    asks: bool,
    flow_key: str | None,
    delay_s: float | None,
    at: datetime | None,
    timeout_s: float,
    urls: tuple[str, ...],
    credentials: Credentials,
) -> None:
    """Start a flow at ENDPOINT, with the message JSON.

    ENDPOINT is an endpoint of the service, or an endpoint of another service that it declares. JSON must be of the type
    that the endpoint takes. Prints the id of the flow once the broker has committed it, or with --ask the reply.

    With --key the flow is committed in the database of the service, whose processes send it. The same command prints
    the same id again, or with --ask the same reply. Another message or trace under the key is an error.

    User and password come from the first source that names a user: the command line, the service, TRUENEXT_USER. The
    file of --certificate must have its private key, too.

    Exits 0 if the flow was started and, with --ask, the reply came; 1 if the broker has refused the flow, or no reply
    came in time; 2 if JSON is not of the type, or no broker answers.
    """
    logs.configure_logging(LogLevel.WARNING.value)
    line, environment = split_by_source(credentials)
    service = load_service(target)
    endpoint = _endpoint(service, target, name)
    if asks and endpoint.replies is None:
        raise click.UsageError(f"{name} replies nothing: leave out --ask")
    options = _flow_options(delay_s, at)
    if options and asks and flow_key is None:
        raise click.UsageError("--ask waits for the reply of a delayed flow only under a key: add --key")
    try:
        decoded = endpoint.takes.decode(message)
    except NotDecoded as error:
        # A model of pydantic describes each field in lines of its own.
        raise click.BadParameter(" ".join(str(error).split()), param_hint="JSON") from error
    service.broker = urls or service.broker
    service.credentials, _ = merge_credentials(line, service.credentials, environment)
    try:
        # A broker must answer at once. A connection that is lost later is opened again.
        with connect(*service.broker, **service.credentials.arguments(), reconnect=False):
            pass
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            output = runner.run(_run(service, endpoint, decoded, trace, timeout_s, flow_key, options, asks=asks))
    except TimeoutError as error:
        raise CommandFailure(error) from error
    except TruenextError as error:
        raise CommandFailure(with_login_hint(error, service.credentials)) from error
    terminal.write_json_text(output)


def _endpoint(service: Service, target: str, name: str) -> Endpoint[Any, Any]:
    """Return the endpoint of this name. Raises: ConfigurationError if the service neither has nor declares it"""
    known = {**service.remotes, **service.endpoints}
    if name not in known:
        raise ConfigurationError(f"{target} has no endpoint {name!r}{suggest_name(name, known)}")
    return known[name]


def _flow_options(delay_s: float | None, at: datetime | None) -> FlowOptions:
    """Return the options of the flow. Raises: click.UsageError if both times are given"""
    if delay_s is not None and at is not None:
        raise click.UsageError("--delay and --at exclude each other: use one of them")
    if at is not None:
        return {"at": at}
    return {} if delay_s is None else {"delay": delay_s}


async def _run(
    service: Service,
    endpoint: Endpoint[Any, Any],
    message: object,
    trace: str,
    timeout_s: float,
    key: str | None,
    options: FlowOptions,
    *,
    asks: bool,
) -> bytes:
    """Start the flow. If there is a `key`, start it in a transaction of the service's database. Return the id of the
    flow or, with `asks`, its reply as JSON.

    Raises: TimeoutError without a reply in time; FlowError if the service can keep no keys, or another flow was started
    under the key; DatabaseUnavailable; the errors of `Service.send` and `Service.ask`
    """
    running = ServiceRun(service, service.plans(), RunResources.of(service))
    async with service.bound_to(running):
        await running.connect()
        if key is not None:
            # Only a key needs the database. Perhaps no other process runs that sends the messages of the outbox.
            await running.start_without_stages()
        if asks:
            reply = await service.ask(endpoint, message, trace=trace, key=key, timeout=timeout_s, **options)
            assert endpoint.replies is not None, "it was checked before"
            return bytes(endpoint.replies.encode(reply))
        if key is None:
            return (await service.send(endpoint, message, trace=trace, timeout=timeout_s, **options)).encode()
        id = ""

        async def start(session: Any) -> None:
            nonlocal id
            async with service.initiate(session, key=key) as initiation:
                keeps = endpoint.replies is not None
                id = initiation.send(endpoint, message, trace=trace, keep_reply=keeps, **options)

        try:
            async with asyncio.timeout(timeout_s):
                await running.kept_replies.run_in_transaction(start)
        except TimeoutError:
            raise TimeoutError(
                f"the database of {service.name} has not answered within {timeout_s:g} s; the flow may have started: "
                "run the command again with the same key"
            ) from None
        return id.encode()
