"""Recovery: restores queues, numbers of messages and producers from the store when a broker starts. The messages
themselves are read when they are needed."""

import logging
import random
from sys import maxsize

from truenext.engine.engine import Engine
from truenext.engine.state.memory import MemoryBudget
from truenext.engine.state.transaction import TransactionLimits
from truenext.engine.writing.commit_state import CommitState
from truenext.engine.writing.event_log import EventLog, NoEventLog
from truenext.errors import StoreError
from truenext.history.writer import HistoryWriter
from truenext.model.policy import Policies, WhenFull
from truenext.model.record import split_lane_key
from truenext.store.log import Log
from truenext.store.store import Recovered, Store

logger = logging.getLogger(__name__)


def recover(
    store: Store,
    policies: Policies,
    *,
    when_full: WhenFull = WhenFull.SLOW,
    memory_limit: int = maxsize,
    queues_memory_limit: int = maxsize,
    transaction_limits: TransactionLimits | None = None,
    history: HistoryWriter | None = None,
    log: Log | None = None,
) -> tuple[Engine, Recovered]:
    """Return an engine with the queues and producers of the store, and what the store has recovered.

    `memory_limit` and `queues_memory_limit` are bytes for messages, and for queues and subscriptions. `log` is the log
    of which the store is a copy.

    Raises: StoreError if the store cannot be read; HistoryError if events that only the store has cannot be written to
        the history.
    """
    recovered = store.recover()
    event_log: EventLog = NoEventLog()
    if history is not None:
        history.restore(recovered.history)
        # Read after `store.recover`, which takes over: until then another broker may use further numbers.
        lowest = (1, 1) if log is None else log.next_history
        run, first_event = history.start_run(after_clean_stop=recovered.clean_stop, lowest=lowest)
        event_log = EventLog(run=run, first_event=first_event)
    engine = Engine(
        CommitState(
            event_log,
            sequence_limit=recovered.sequence_limit,
            redelivered_below=recovered.redelivered_below if recovered.clean_stop else recovered.sequence_limit,
        ),
        memory=MemoryBudget(memory_limit, queues_memory_limit),
        policies=policies,
        when_full=when_full,
        transaction_limits=transaction_limits,
        random=random.random,
    )
    queues = {number: engine.lifespan.restore_queue(number, name) for number, name in recovered.queues.items()}
    for number in recovered.paused & queues.keys():
        engine.lifespan.restore_pause(queues[number])
        logger.warning("queue is paused", extra={"queue": queues[number].name})
    engine.state.producers.restore(recovered.producers.items())
    engine.state.jms_producers.restore(recovered.producers.items())
    for lane, count in recovered.counts.items():
        number, rank = split_lane_key(lane)
        if number not in queues:
            raise StoreError(
                f"the store is damaged: {count} messages are in queue {number}, whose name is missing. "
                "`truenext store check DIR` shows details, `truenext store export DIR NEW` saves all that is readable"
            )
        engine.lifespan.restore_lane(queues[number], rank, count)
    waiting = sum(recovered.counts.values())
    if waiting or not recovered.clean_stop:
        logger.info("recovered", extra={"messages": waiting, "queues": len(queues), "clean": recovered.clean_stop})
    return engine, recovered
