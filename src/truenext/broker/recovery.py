"""How the engine gets back what the store holds when a broker starts."""

import logging

from truenext.engine.account import Account
from truenext.engine.engine import Engine
from truenext.engine.lane import Entry
from truenext.engine.queue import Queue
from truenext.history.writer import History
from truenext.limits import PAGE_SIZE
from truenext.policy import Policy
from truenext.record import DamagedRecord, decode, sequence_of, split_lane_key
from truenext.store.store import Recovered, Store, StoredMessage

logger = logging.getLogger(__name__)

PROGRESS_EVERY = 200_000
"""Messages between two lines of progress."""


def recover(store: Store, policy: Policy, history: History | None = None) -> tuple[Engine, Recovered]:
    """An engine that holds every message of the store, at its place.

    Raises: StoreError if the store cannot be read, HistoryError if the history cannot be brought up to it.
    """
    recovered = store.recover()
    account = None
    if history is not None:
        history.restore(recovered.history)
        run, first_event = history.begin_run(after_clean_stop=recovered.clean_stop)
        account = Account(run=run, first_event=first_event)
    engine = Engine(sequence_limit=recovered.sequence_limit, policy=policy, account=account)
    queues = {number: engine.restore_queue(number, name) for number, name in recovered.queues.items()}
    engine.restore_producers(recovered.producers.items())
    loaded = 0
    for lane in sorted(recovered.counts):
        queue = queues[split_lane_key(lane)[0]]
        after_sequence = 0
        while messages := store.page(lane, after_sequence, PAGE_SIZE).messages:
            for stored in messages:
                entry = _entry(queue, stored, is_redelivered=not recovered.clean_stop)
                if entry is not None:
                    engine.restore_entry(entry)
            after_sequence = sequence_of(messages[-1].key)
            loaded += len(messages)
            if loaded % PROGRESS_EVERY < len(messages):
                logger.info("recovering", extra={"messages": loaded})
    if loaded or not recovered.clean_stop:
        logger.info("recovered", extra={"messages": loaded, "queues": len(queues), "clean": recovered.clean_stop})
    return engine, recovered


def _entry(queue: Queue, stored: StoredMessage, *, is_redelivered: bool) -> Entry | None:
    sequence = sequence_of(stored.key)
    try:
        message = decode(stored.key, stored.record)
    except DamagedRecord as error:
        # It stays in the store for whoever looks into it; it is never delivered.
        logger.error(
            "message is damaged and will not be delivered",
            extra={"queue": queue.name, "sequence": sequence, "reason": str(error)},
        )
        return None
    return Entry(
        sequence=sequence,
        message=message,
        queue=queue,
        batch=0,
        stored=True,
        # Whoever crashed may have dispatched it without having written that down.
        deliveries=max(stored.deliveries, 1) if is_redelivered else stored.deliveries,
        attempts=stored.attempts,
        marked=bool(stored.deliveries or stored.attempts),
    )
