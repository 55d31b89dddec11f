"""`truenext stages rerun`: send messages to their stage again, under new ids, so that exactly-once stages run again,
too."""

from __future__ import annotations

import click
import msgspec

from truenext.blocking import Connection, Consumer, Message, Session
from truenext.cli import terminal
from truenext.cli.bulk_work import dead_letter_selector_option, queue_exists
from truenext.cli.connection import BrokerOptions, broker_options, connected
from truenext.cli.totals import ProgressReporter
from truenext.cli.values import COUNT, QueueNameParam
from truenext.client.core.send_options import SendOptions
from truenext.client.core.subscriptions import ConsumerOptions
from truenext.errors import Refused, RolledBack, TruenextError
from truenext.flows.envelope import CONTENT_TYPE, NotDecoded, as_occurrence, decode_envelope, encode_envelope
from truenext.model.destination import DEAD_LETTER_PREFIX
from truenext.model.failure_headers import ON_FAILURE, REPORT_ID, REPORT_TO
from truenext.model.numerals import count_noun
from truenext.stage.context import ServiceContext
from truenext.stage.core.failure import FAILURE, HANDLED

BATCH_MAX = 100
"""Largest number of messages in one transaction."""
WAIT_S = 2.0
"""Seconds without a new message after which the queue counts as empty."""


@click.command()
@click.argument("queue", type=QueueNameParam())
@click.option(
    "--to",
    type=QueueNameParam(is_creatable=True),
    help=f"Queue of the stage; required unless QUEUE is its dead-letter queue ({DEAD_LETTER_PREFIX}order.place).",
)
@dead_letter_selector_option
@click.option("--count", type=COUNT, help="Largest number of messages to send; the true next comes first.")
@click.option("--force", is_flag=True, help="Send the messages. Without this option only their number is printed.")
@broker_options
def rerun(
    queue: str, to: str | None, selector: str | None, count: int | None, force: bool, broker: BrokerOptions
) -> None:
    """Send messages to their stage once more, under new ids.

    Sends the messages that wait in QUEUE, and removes them there.

    An exactly-once stage knows a message by its id. The stage does not run again for a message that it has processed,
    even if the message is moved back. Under a new id the stage runs again, and so do stages that it sends to. So all
    effects happen a second time. This never happens with `truenext redrive`, which keeps the ids.
    """
    if to == queue:
        raise click.UsageError(
            f"the messages are in {queue} already: give --to the queue of the stage that is to get them"
        )
    to = to or queue.removeprefix(DEAD_LETTER_PREFIX)
    if to == queue:
        raise click.UsageError(
            f"{queue} is not a dead-letter queue, so it does not tell where its messages belong: give the stage's "
            "queue with --to"
        )
    with connected(broker) as connection:
        if not queue_exists(connection, queue):
            raise TruenextError(f"there is no queue {queue!r}: `truenext queues` lists them")
        is_new = not queue_exists(connection, to)
        if force:
            rerunning = Rerun(connection, f"/queue/{queue}", f"/queue/{to}")
            try:
                rerunning.run(selector, count)
            except KeyboardInterrupt:
                terminal.echo(rerunning.summary, err=True)
                raise
            note = f": {to} was created, and has no consumer yet" if is_new and rerunning.count else ""
            terminal.echo(f"{count_noun(rerunning.count, 'message')} sent to {to} under new ids{note}")
            return
        waiting = sum(1 for _ in connection.browse(f"/queue/{queue}", selector=selector))
    due = waiting if count is None else min(waiting, count)
    note = f"; there is no queue {to!r} yet: check the name" if is_new else ""
    terminal.echo(f"{count_noun(due, 'message')} would be sent to {to} under new ids: use --force{note}")


class Rerun:
    def __init__(self, connection: Connection, queue: str, to: str) -> None:
        self._connection = connection
        self._queue = queue
        self._to = to
        self.count = 0

    @property
    def summary(self) -> str:
        return f"{count_noun(self.count, 'message')} sent, and the rest is still in {self._queue}"

    def run(self, selector: str | None, limit: int | None) -> None:
        """Send the messages again, in transactions, until the queue is empty or `limit` messages were sent.

        Raises: TruenextError if a message cannot be sent; messages that were not sent are still in their queue
        """
        totals = ProgressReporter("sent")
        batch_max = BATCH_MAX
        options: ConsumerOptions = {"prefetch": BATCH_MAX}
        if selector is not None:
            options["selector"] = selector
        with (
            self._connection.session(transacted=True) as session,
            session.consumer(self._queue, **options) as consumer,
        ):
            while batch := _receive_batch(consumer, batch_max if limit is None else min(batch_max, limit - self.count)):
                try:
                    for message in batch:
                        _resend(session, message, self._to)
                    session.commit()
                except (NotDecoded, RolledBack) as error:
                    session.rollback(failed=False)
                    if len(batch) == 1 or not isinstance(error.__cause__, Refused):
                        raise TruenextError(f"{error}; {self.summary}") from error
                    # Large messages can exceed a limit of one transaction together.
                    batch_max = len(batch) // 2
                else:
                    self.count += len(batch)
                    batch_max = min(2 * batch_max, BATCH_MAX)
                    totals.report_if_due(self.count)


def _receive_batch(consumer: Consumer, count: int) -> list[Message]:
    return consumer.receive_many(count, WAIT_S) if count else []


def _resend(session: Session, message: Message, to: str) -> None:
    """Send a message under a new id.

    Raises: NotDecoded if it is not a message of stages, or a failure that a stage of `on_failure` handles
    """
    try:
        envelope = decode_envelope(message.body)
    except NotDecoded as error:
        raise NotDecoded(
            f"message {message.message_id} is not a message of stages ({error}): `truenext browse` shows it; skip it "
            "with --selector, or move it away"
        ) from error
    headers = message.headers
    if headers.get(FAILURE) == HANDLED:
        raise NotDecoded(
            f"message {message.message_id} reports a failure to an on_failure stage, and clients cannot send such "
            "messages: `truenext redrive` moves it back; skip it with --selector"
        )
    if envelope.recurring:
        envelope = as_occurrence(envelope, message.headers.get("truenext-due"))
    renewed = msgspec.structs.replace(envelope, id=ServiceContext.new_id())
    options: SendOptions = {
        "priority": message.priority,
        "persistent": message.persistent,
        "content_type": CONTENT_TYPE,
        "correlation_id": renewed.id,
        "headers": {"expires": str(message.expires_ms)} if message.expires_ms else {},
    }
    if REPORT_TO in headers:
        options["report_to"], options["report_id"] = headers[REPORT_TO], headers[REPORT_ID]
    if ON_FAILURE in headers:
        options["on_failure"] = headers[ON_FAILURE].split()
    session.send(to, encode_envelope(renewed), **options)
