"""Control request `connection`: shows the connection that sends it. The answer has the release count, transactions and
subscriptions of this connection, why a subscription gets no messages, and the grants of its user.

The answer is made in steps, as there may be many subscriptions to many queues. Source: docs/protocol.md, "Control
requests"
"""

import msgspec

from truenext.broker.control_requests import AnswerGenerator
from truenext.engine.dispatch.heads import WaitReason
from truenext.engine.engine import Engine
from truenext.engine.idle import find_next
from truenext.engine.lifecycle.redelivery import dead_letter_queue
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.queue import Queue
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import AckMode
from truenext.model.control_answers import UserReport
from truenext.model.destination import TEMPORARY_PREFIX, TEMPORARY_TOPIC_PREFIX, Destination, DestinationKind
from truenext.model.grants import Right, User

VERB = "connection"

_ITEMS_PER_STEP = 50
"""Transactions or browsers reported in one step."""


class TransactionReport(msgspec.Struct):
    """One open transaction of the connection."""

    name: str
    """Name of the transaction."""
    sends: int
    """Number of messages that the transaction sends."""
    acknowledged: int
    """Number of messages that the transaction has acknowledged."""
    nacked: int
    """Number of NACKed messages, which `acknowledged` does not count."""
    rollback_only: bool
    """True if a frame of the transaction was refused, so that it can only be aborted."""


class RedeliveryReport(msgspec.Struct):
    """Settings of a queue's policy for failed messages ([settings](settings.md))."""

    attempts_max: int | None
    """Failures after which a message becomes a dead letter; None if the queue keeps failed messages."""
    first_delay_ms: int
    """Delay between the first failure of a message and its next try."""
    delay_ms: int
    """Delay between the second failure of a message and its next try."""
    backoff: float
    """Factor by which the delay grows with each further failure."""
    delay_max_ms: int
    """Maximum of the delay, before the jitter."""
    dead_letters: str | None
    """Name of the queue that gets the dead letters; None if the queue keeps failed messages."""


class SubscriptionReport(msgspec.Struct, kw_only=True):
    """One subscription of the connection."""

    id: str
    """Id that the client gave the subscription."""
    destination: str
    """Destination that the client named, with `/queue/` and without options."""
    held: int = 0
    """Number of messages that the subscription holds."""
    started: int = 0
    """Number of these messages that were started."""
    window: int | None = None
    """Window of the consumer, in messages; of a suspended one, the window that it has once it is woken. None in auto
    mode, for a browser, and if the subscription pulls."""
    requested: int | None = None
    """Number of messages still to come for a pull request; None if the subscription does not pull."""
    idle: str
    """Reason why no message is dispatched now (WaitReason); "" if a message could be dispatched. If several reasons are
    true, the first in the order of WaitReason is reported; for a pattern of queues, the reason of the queue whose
    message is next."""
    redelivery: RedeliveryReport | None = None
    """Policy for messages that fail; None for a browser and for a pattern of queues."""


class ConnectionReport(msgspec.Struct):
    """State of the connection that sends the request, after all earlier frames of the connection."""

    round: int
    """Number of `release` requests that were executed on this connection."""
    transactions: list[TransactionReport]
    """Open transactions of the connection."""
    subscriptions: list[SubscriptionReport]
    """Subscriptions of the connection, browsers last."""
    user: UserReport | None
    """User of the connection; null if the broker has no users."""


def check_body(body: bytes) -> None:
    """Check that the request has no body.

    Raises: RemoteProtocolError if it has one
    """
    if body:
        raise RemoteProtocolError(f"{VERB}: this control request must have an empty body", Code.CONTROL_REQUEST)


def make_connection_report(engine: Engine, session: ConnectionState, user: User | None) -> AnswerGenerator:
    """Report the connection that sends the request: its transactions and subscriptions, why a subscription gets no
    messages, and the grants of its user.

    Makes a ConnectionReport as JSON, in steps. `user` is the user of the connection `session`.
    """
    report = ConnectionReport(session.release_count, [], [], None if user is None else _report_user(user))
    for number, (name, transaction) in enumerate(list(session.transactions.items()), 1):
        nacked = len(transaction.nacked())
        report.transactions.append(
            TransactionReport(
                name=name,
                sends=len(transaction.sends),
                acknowledged=len(transaction.held) - nacked,
                nacked=nacked,
                rollback_only=transaction.is_rollback_only,
            )
        )
        if number % _ITEMS_PER_STEP == 0:
            yield
    for consumer in list(session.consumers.values()):
        found = yield from find_next(engine, consumer)
        if consumer.is_subscribed:
            idle = found.value if isinstance(found, WaitReason) else ""
            report.subscriptions.append(_report_consumer(consumer, idle))
        yield
    for number, browser in enumerate(list(session.browsers.values()), 1):
        report.subscriptions.append(
            SubscriptionReport(
                id=browser.subscription,
                destination=_own_address(browser.destination),
                idle=WaitReason.BROWSES.value,
            )
        )
        if number % _ITEMS_PER_STEP == 0:
            yield
    return msgspec.json.encode(report)


def _report_consumer(consumer: BrokerConsumer, idle: str) -> SubscriptionReport:
    window = consumer.window if consumer.awake_window is None else consumer.awake_window
    has_window = consumer.mode is not AckMode.AUTO and consumer.pull_request is None
    return SubscriptionReport(
        id=consumer.subscription,
        destination=_own_address(consumer.destination),
        held=len(consumer.held),
        started=sum(entry.is_started for entry in consumer.held.values()),
        window=window if has_window else None,
        requested=None if consumer.pull_request is None else consumer.pull_request.remaining,
        idle=idle,
        redelivery=None if consumer.queue is None else _report_redelivery(consumer.queue),
    )


def _report_redelivery(queue: Queue) -> RedeliveryReport:
    policy = queue.policy
    return RedeliveryReport(
        attempts_max=None if queue.keeps_failures else policy.attempts_max,
        first_delay_ms=policy.first_delay_ms,
        delay_ms=policy.delay_ms,
        backoff=policy.backoff,
        delay_max_ms=policy.delay_max_ms,
        dead_letters=None if queue.keeps_failures else dead_letter_queue(queue.name, policy),
    )


def _report_user(user: User) -> UserReport:
    patterns = {right.value: sorted(map(str, user.grants[right])) for right in Right}
    return UserReport(
        name=user.name,
        **patterns,
        monitor=user.is_monitor,
        admin=user.is_admin,
        client_ids=sorted(user.client_ids),
    )


def _own_address(destination: Destination) -> str:
    """Return the address of a destination as its own connection writes it, such as `/temp-queue/replies`."""
    if not destination.session:
        return destination.address
    prefix = TEMPORARY_TOPIC_PREFIX if destination.kind is DestinationKind.TOPIC else TEMPORARY_PREFIX
    return prefix + destination.name.removeprefix(f"/{destination.session}/")
