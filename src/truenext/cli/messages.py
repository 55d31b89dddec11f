"""`truenext send`, `receive` and `browse`: send, consume and show messages, as any client can do."""

import base64
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import click

from truenext.blocking import Connection, Content
from truenext.cli import terminal
from truenext.cli.connection import BrokerOptions, address_options, broker_options, connected
from truenext.cli.exit_status import CommandFailure
from truenext.cli.totals import ProgressReporter
from truenext.cli.values import COUNT, SELECTOR, BodyParam, DestinationParam, HeaderParam, PathParam, seconds_option
from truenext.client.core.send_options import Outgoing, SendOptions
from truenext.client.core.subscriptions import ConsumerOptions
from truenext.errors import ConfigurationError, ConnectionLost, TruenextError

_CONNECTION_HEADERS = frozenset({"subscription", "ack", "truenext-round"})
"""Headers of a received message that mean nothing after the end of the command."""
_KIND = "amq-msg-type"
SEND_TIMEOUT_S = 60.0
"""Maximum time in seconds without a confirmed message, after which the command fails. So a broker with a full disk has
this time to free space, and one that is being drained to end the drain."""
POLL_S = 1.0
"""Shortest time in seconds between two polls of a queue."""

selector_option = click.option(
    "--selector",
    type=SELECTOR,
    help="Only messages that this JMS selector matches, such as \"colour = 'red' AND JMSPriority > 6\".",
)
json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print each message as a JSON object on a line, with headers and body. A body that is not UTF-8 is in "
    "body_base64 instead.",
)


@click.command()
@click.argument("queue", type=DestinationParam())
@click.argument("body", type=BodyParam(), required=False)
@click.option(
    "--file",
    "files",
    type=PathParam(exists=True, dir_okay=False, may_be_dash=True),
    multiple=True,
    help="Send the content of this file; - is standard input. May be repeated.",
)
@click.option(
    "--lines",
    is_flag=True,
    help="Send each line of the files, or of standard input, as a message, without its line feed.",
)
@click.option(
    "--priority",
    type=click.IntRange(0, 9),
    default=4,
    show_default=True,
    help="Priority of the messages, 0 to 9; 9 is delivered first.",
)
@click.option("--transient", is_flag=True, help="Do not write the message to disk; a crash of the broker loses it.")
@click.option(
    "--header",
    "headers",
    type=HeaderParam(),
    multiple=True,
    metavar="NAME=VALUE",
    help="Further header of each message, for its consumers. May be repeated.",
)
@broker_options
def send(
    queue: str,
    body: bytes | None,
    files: tuple[Path, ...],
    lines: bool,
    priority: int,
    transient: bool,
    headers: tuple[tuple[str, str], ...],
    broker: BrokerOptions,
) -> None:
    """Send messages to QUEUE.

    The body is BODY, or the content of files or of standard input. A JMS client gets a body that is UTF-8 as a
    TextMessage, any other as a BytesMessage; --header amq-msg-type=bytes makes each body a BytesMessage.

    Each file is a message; with --lines each line is a message. The command returns when the broker has confirmed all
    messages.

    An empty file is an empty message; with --lines it is no message. Nothing is sent if one of the files is missing. If
    a file cannot be read later, earlier messages stay sent. With several files or --lines, standard error shows the
    number of sent messages every two seconds and at the end.

    While the disk of the broker is full, or the broker is being drained, the command says so on standard error and
    tries again. If no message was
    confirmed for a minute, it exits 1 with the number of confirmed messages. After 500 confirmed messages, continue
    with line 501.
    """
    if body is not None and (lines or files):
        raise click.UsageError("BODY excludes --file and --lines: use one of them")
    bodies = [body] if body is not None else _bodies(files or (Path("-"),), lines=lines)
    progress = ProgressReporter("sent")
    is_whole = False
    try:
        with connected(broker, drain_timeout_s=SEND_TIMEOUT_S) as connection:
            options: SendOptions = {"priority": priority, "persistent": not transient, "headers": dict(headers)}
            messages = progress.count_each(map(_with_kind(dict(headers)), bodies))
            try:
                connection.send_many(queue, messages, timeout=SEND_TIMEOUT_S, **options)
            except ValueError as error:
                raise CommandFailure(error) from error
        is_whole = True
    finally:
        if (lines or len(files) > 1) and (is_whole or progress.count):
            terminal.echo(f"{progress.count:,} sent{'' if is_whole else ' at most'}", err=True)


def _with_kind(headers: Mapping[str, str]) -> Callable[[bytes], bytes | Outgoing]:
    """Return a function that gives a body that is UTF-8 the header with which JMS clients get it as a text, unless the
    message has this header already."""
    if _KIND in headers:
        return lambda body: body
    of_text = {**headers, _KIND: "text"}

    def outgoing(body: bytes) -> bytes | Outgoing:
        try:
            body.decode()
        except UnicodeDecodeError:
            return body
        return Outgoing(body, headers=of_text)

    return outgoing


def _bodies(files: Iterable[Path], *, lines: bool) -> Iterator[bytes]:
    """Yield the content of each file; with `lines` yield each of its lines.

    Raises: TruenextError if a file cannot be read
    """
    for file in files:
        is_input = str(file) == "-"
        name = "standard input" if is_input else str(file)
        if is_input and sys.stdin is None:
            raise TruenextError("cannot read standard input: it is closed")
        try:
            with open(sys.stdin.fileno() if is_input else file, "rb", closefd=not is_input) as opened:
                if lines:
                    yield from (line.removesuffix(b"\n") for line in opened)
                else:
                    yield opened.read()
        except OSError as error:
            raise TruenextError(f"cannot read {name}: {error.strerror}") from error


@click.command()
@click.argument("queue", type=DestinationParam())
@click.option("--count", type=COUNT, show_default="1", help="Number of messages to receive.")
@click.option("--all", "receive_all", is_flag=True, help="Receive messages until none comes within the timeout.")
@click.option(
    "--follow",
    is_flag=True,
    help="Receive messages until Ctrl-C. If the connection is lost, say so on standard error and reconnect. A "
    "broker must answer at the start.",
)
@seconds_option(
    "--timeout",
    default=2.0,
    help="Seconds to wait for a message. If this is more than 10, the command also waits this long for the broker.",
)
@selector_option
@json_option
@address_options
def receive(
    queue: str,
    count: int | None,
    receive_all: bool,
    follow: bool,
    timeout: float,
    selector: str | None,
    as_json: bool,
    broker: BrokerOptions,
) -> None:
    """Receive messages from QUEUE and print their bodies.

    The true next comes first.

    A message is acknowledged once it is printed. Exits 1 if fewer messages than --count came.

    The broker dispatches a message only when the command is about to print it. So messages that were not printed do not
    become `redelivered` for other consumers. A broker other than truenext may send one message ahead.
    """
    if (count is not None) + receive_all + follow > 1:
        raise click.UsageError("--count, --all and --follow exclude each other: use one of them")
    limit = None if receive_all or follow else count or 1
    received = 0
    with connected(broker._replace(timeout_s=max(broker.timeout_s, timeout)), reconnect=follow) as connection:
        # Without prefetch: a message that was prefetched and not printed would be redelivered to its next consumer.
        options: ConsumerOptions = {"prefetch": 0}
        if selector is not None:
            options["selector"] = selector
        with connection.consumer(queue, ack="individual", **options) as messages:
            while limit is None or received < limit:
                message = messages.receive(None if follow else timeout)
                if message is None:
                    break
                received += 1
                _print(message, as_json=as_json)
                sys.stdout.buffer.flush()
                message.ack()
    if limit is not None and received < limit:
        terminal.echo(f"truenext: {received} of {limit} messages came within {timeout:g} s", err=True)
        raise SystemExit(1)


@click.command()
@click.argument("queue", type=DestinationParam())
@selector_option
@click.option("--count", type=COUNT, help="Largest number of messages to show.")
@click.option(
    "--follow",
    is_flag=True,
    help="After the waiting messages show new messages until Ctrl-C. If the connection is lost, say so on "
    "standard error "
    "and reconnect.",
)
@json_option
@broker_options
def browse(
    queue: str, selector: str | None, count: int | None, follow: bool, as_json: bool, broker: BrokerOptions
) -> None:
    """Print the bodies of the messages that wait in QUEUE.

    The true next comes first. Messages stay in the queue.

    With --follow the command polls the queue about once a second, and shows the messages that are new. This needs a
    truenext broker. `send`, `receive` and `browse` without --follow work with any STOMP 1.2 broker.
    """
    with connected(broker) as connection:
        shown = connection.browse(queue, selector=selector)
        if follow:
            shown = _browse_repeatedly(connection, broker, queue, selector)
        for message in islice(shown, count):
            _print(message, as_json=as_json)
            if follow:
                sys.stdout.buffer.flush()


def _browse_repeatedly(
    connection: Connection, broker: BrokerOptions, queue: str, selector: str | None
) -> Iterator[Content]:
    """Yield the waiting messages, and then each new message, for ever. Each poll reads the whole queue.

    Raises: Refused if the broker refuses to browse; TruenextError if the broker does not number its messages
    """
    highest = -1
    with ExitStack() as connections:
        while True:
            started = time.monotonic()
            seen = highest
            try:
                for message in connection.browse(queue, selector=selector):
                    if "truenext-sequence" not in message.headers:
                        raise TruenextError("--follow needs a truenext broker: this broker does not number messages")
                    if message.sequence > seen:
                        highest = max(highest, message.sequence)
                        yield message
            except ConnectionLost as error:
                terminal.echo(f"truenext: connection lost ({error})", err=True)
                connection = connections.enter_context(_reconnect(broker))
                terminal.echo("truenext: connected again", err=True)
                continue
            # The longer the queue takes to read, the less often it is polled.
            time.sleep(max(POLL_S, 4 * (time.monotonic() - started)))


def _reconnect(broker: BrokerOptions) -> Connection:
    """Connect again. Try until the broker is available.

    Raises: Refused if the broker refuses the login
    """
    while True:
        try:
            return broker.connect(reconnect=False)
        except (ConnectionLost, ConfigurationError):
            # The password file was usable before.
            time.sleep(POLL_S)


def _print(message: Content, *, as_json: bool) -> None:
    if not as_json:
        terminal.write_body(message.body)
        return
    output: dict[str, object] = {
        "headers": {name: value for name, value in message.headers.items() if name not in _CONNECTION_HEADERS}
    }
    try:
        output["body"] = message.text
    except UnicodeDecodeError:
        output["body_base64"] = base64.b64encode(message.body).decode()
    terminal.write_json(output)
