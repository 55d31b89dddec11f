"""Control requests `consumers` and `policy`: the consumers of a queue, and the settings that apply to it.

Both need any right on the queue, or the right `monitor`. Source: docs/security.md, "What a request needs"
"""

from collections.abc import Callable, Generator, Iterator
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from truenext.broker.control_requests import AnswerGenerator, ListAnswer
from truenext.broker.queues_request import NONE_HELD, Held, chunks, held_by
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.queue import Queue
from truenext.model.commands import AckMode
from truenext.model.policy import Policy
from truenext.model.setting import settings_of

CONSUMERS_VERB, POLICY_VERB = "consumers", "policy"
CONSUMERS_PER_STEP = 50


class ClientIdentity(NamedTuple):
    """Connection of a consumer, as far as the client that asks may know it."""

    connection: str
    address: str | None
    user: str | None
    client_id: str | None


class ConsumerReport(msgspec.Struct, kw_only=True):
    """One consumer of a queue. The answer to `consumers` is a list of these, in the order of their subscriptions,
    consumers of patterns last."""

    id: str
    """Id that the client gave its subscription."""
    connection: str
    """Connection of the consumer, as `connections` reports it."""
    address: str | None
    """Address from which the client connects. Null if the client that asks lacks the right `monitor`, and the
    connection is of another user; so are `user` and `client_id`."""
    user: str | None
    """User of the connection; "" if the broker has no users."""
    client_id: str | None
    """Name that the client gave itself, `client-id` of its CONNECT; "" if none."""
    destination: str
    """Destination of the subscription: the queue, or a pattern of queues or topics."""
    selector: str | None
    """Selector of the subscription; null if it has none."""
    ack: str
    """Mode of acknowledgement: `auto`, `client` or `client-individual`."""
    window: int | None
    """Number of messages that the consumer may hold, in all queues of its pattern; null in auto mode, and if the
    subscription pulls."""
    automatic: bool
    """True if the broker chooses the window."""
    suspended: bool
    """True if the consumer gets no messages until its client wakes it."""
    held: int
    """Number of messages of this queue that the consumer holds."""
    held_s: float | None
    """Seconds since the dispatch of the message of this queue that it has held longest; null if it holds none. If it
    has acknowledged nothing for as long, it hangs or works for long."""
    last_acknowledgement_s: float | None
    """Seconds since the consumer's last ACK or NACK; null if there was none."""


class SettingReport(msgspec.Struct):
    """One setting of a queue's policy."""

    value: float | str | None
    """Value of the setting, sizes in bytes; null for "none"."""
    source: str
    """Table of the configuration file that sets it, such as `[policy."orders.>"]`; `command line` or `default`."""


class PolicyReport(msgspec.Struct):
    """Settings of one queue ([settings](settings.md))."""

    queue: str
    """Name of the queue."""
    settings: dict[str, SettingReport]
    """Settings by name."""


def report_consumers(
    engine: Engine, name: str, identify: Callable[[ConnectionState], ClientIdentity]
) -> AnswerGenerator:
    """Report the consumers of a queue, also those of patterns that match it.

    Makes a list of ConsumerReport as JSON, in steps. `identify` returns what the client that asks may know of a
    connection.
    """
    queue = engine.queues.by_name.get(name)
    rows = ListAnswer()
    # The queue may have ended since the request.
    consumers = [] if queue is None else engine.state.clients.receivers_of(queue).all()
    for number, consumer in enumerate(consumers, 1):
        held = (yield from _inspect_held(consumer, queue)) if consumer.queue is None else held_by(consumer)
        if consumer.is_subscribed:
            now_us = engine.state.commit_state.now_us
            rows.add(_report_consumer(consumer, held, identify(consumer.session), now_us))
        if number % CONSUMERS_PER_STEP == 0:
            yield
    yield
    return rows.finish()


def _report_consumer(consumer: BrokerConsumer, held: Held, identity: ClientIdentity, now_us: int) -> ConsumerReport:
    window = consumer.window if consumer.awake_window is None else consumer.awake_window
    has_window = consumer.mode is not AckMode.AUTO and consumer.pull_request is None
    last_us = consumer.last_settled_us
    return ConsumerReport(
        id=consumer.subscription,
        **identity._asdict(),
        destination=consumer.destination.address,
        selector=None if consumer.selector is None else consumer.selector.text,
        ack=consumer.mode.value,
        window=window if has_window else None,
        automatic=consumer.auto_window is not None,
        suspended=consumer.is_suspended,
        held=held.number,
        held_s=held.age_s(now_us),
        last_acknowledgement_s=(now_us - last_us) / 1e6 if last_us else None,
    )


def _inspect_held(consumer: BrokerConsumer, queue: Queue | None) -> Generator[None, None, Held]:
    """Inspect, in steps, what a consumer of a pattern holds of one queue. It may hold very many messages of others."""
    held = NONE_HELD
    for entries in chunks(list(consumer.held.values())):
        for entry in entries:
            if entry.lane.queue is queue:
                held = held.plus(Held(1, entry.dispatched_us))
        yield
    return held


def report_policy(queue: Queue, source_of: Callable[[str, str], str]) -> bytes:
    """Report the settings of a queue, and where each is set.

    Returns a PolicyReport as JSON. `source_of` returns the source of a setting, by the name or topic whose pattern
    decides, and by the name of the setting.
    """
    name = queue.destination.topic or queue.name
    settings = {setting: SettingReport(value, source_of(name, setting)) for setting, value in _values(queue.policy)}
    return msgspec.json.encode(PolicyReport(queue.name, settings))


def _values(policy: Policy) -> Iterator[tuple[str, Any]]:
    for name, setting in settings_of(Policy).items():
        value = getattr(policy, name)
        if value == setting.none:
            value = None
        yield name, value.value if isinstance(value, Enum) else value
