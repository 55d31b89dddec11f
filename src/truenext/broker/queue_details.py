"""Control requests `consumers` and `policy`: the consumers of a queue, and the settings that apply to it.

Both need any right on the queue, or the right `monitor`. Source: docs/security.md, "What a request needs"
"""

from collections.abc import Callable, Generator, Iterator
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from truenext.broker.control_requests import AnswerGenerator, ListAnswer
from truenext.broker.queues_request import NEVER_US, Held, chunks, held_by
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import BrokerConsumer, ConnectionState
from truenext.engine.state.queue import Queue
from truenext.model.commands import AckMode
from truenext.model.control_answers import ConsumerReport, PolicyReport, SettingReport
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
    number, since_us = 0, NEVER_US
    for entries in chunks(list(consumer.held.values())):
        held = [entry for entry in entries if entry.lane.queue is queue]
        if held and not number:
            # The first message was dispatched first.
            since_us = held[0].dispatched_us
        number += len(held)
        yield
    return Held(number, since_us)


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
