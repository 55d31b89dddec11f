"""Audit that compares the engine's counts of its memory with the messages that are there.

Only this part of the property tests looks into the engine: it counts message by message, and compares the sums with the
numbers by which the engine decides what to evict.
"""

from collections.abc import Collection, Iterator

from tests.property import targets
from truenext.engine.engine import Engine
from truenext.engine.selecting.groups import GroupScanCursor, group_bytes
from truenext.engine.selecting.keyed import key_count
from truenext.engine.state.causes import causes_size
from truenext.engine.state.consumer import ConnectionState, Subscriber
from truenext.engine.state.memory import (
    DEQUE_BYTES,
    GROUP_LANE_BYTES,
    GROUPS_BYTES,
    JOIN_BYTES,
    KEYED_BYTES,
    LANE_BYTES,
    SELECTED_ENTRIES_BYTES,
    SELECTION_BYTES,
    SELECTOR_BYTES,
    SELECTOR_LANE_BYTES,
    consumer_size,
    queue_size,
    size_of,
)
from truenext.engine.state.queue import NO_ENTRIES, Entry, Queue
from truenext.engine.state.transaction import send_count
from truenext.model.policy import Policy


def miscounted(engine: Engine, sessions: Collection[ConnectionState]) -> list[str]:
    """Return the wrong counts; after every step there must be none."""
    counted = {queue: _size(_all(engine, queue)) for queue in engine.queues.by_name.values()}
    messages = {
        queue: sum(entry.message is not None for entry in _all(engine, queue))
        for queue in engine.queues.by_name.values()
    }
    # What transactions have of subscriptions that have ended.
    for session in sessions:
        for transaction in session.transactions.values():
            for entry in transaction.held.values():
                if entry.lane.queue not in counted:
                    counted[entry.lane.queue] = _size(_all(engine, entry.lane.queue))
    memory = engine.state.memory
    queues = [*engine.queues.by_name.values(), *targets.queues_of_scheduled(engine), *targets.queues_that_ended(engine)]
    books = [
        (f"resident of {queue.name}", queue.resident_bytes, in_memory) for queue, in_memory in counted.items()
    ]  # fmt: skip
    books += [(f"messages in memory of {queue.name}", queue.resident_count, count) for queue, count in messages.items()]
    books += [
        ("used", memory.message_bytes, sum(counted.values())),
        (
            "leaving",
            memory.pending_free_bytes,
            # Causes leave memory with their message; they are few, and not counted before.
            sum(_message_size(entry) for queue in counted for lane in queue.lanes for entry in lane.unread_in_memory),
        ),
        (
            "places",
            memory.deque_bytes,
            DEQUE_BYTES * sum(lane.arrived is not NO_ENTRIES for queue in counted for lane in queue.lanes),
        ),
        (
            "queues",
            memory.queue_bytes,
            sum(_bytes_of(engine, queue) for queue in queues)
            + _bytes_of_consumers(engine, sessions)
            + sum(queue_size(one) + LANE_BYTES for one in targets.reserved(engine).values()),
        ),
        ("unsent", memory.unsent_bytes, sum(session.unsent_bytes for session in sessions)),
        (
            "open",
            memory.transaction_bytes,
            sum(each.total_bytes for session in sessions for each in session.transactions.values()),
        ),
    ]
    reserved = {name for session in sessions for each in session.transactions.values() for name in each.reserved_queues}
    there = {queue.name for queue in queues}
    books.append(("promised, and there or not said", 0, len(targets.reserved(engine).keys() - (reserved - there))))
    for session in sessions:
        is_open = session.transactions
        answering = sum(each.message_count > sum(map(send_count, each.sends)) for each in is_open.values())
        books += [
            ("said in transactions", is_open.message_count, sum(each.message_count for each in is_open.values())),
            ("bytes said in transactions", is_open.total_bytes, sum(each.total_bytes for each in is_open.values())),
            ("transactions that answer", len(is_open.settling_transactions), answering),
            (
                "... and are not known to",
                0,
                sum(each not in is_open.settling_transactions for each in is_open.values() if each.held),
            ),
        ]
    for queue in engine.queues.by_name.values():
        lanes = queue.lanes
        is_all_here = not any(
            lane.unread > len(lane.unread_in_memory) or lane.delayed or lane.unloaded for lane in lanes
        )
        is_all_here &= all(entry.message is not None for entry in _all(engine, queue))
        if is_all_here:
            books.append((f"spilled sizes of {queue.name}", len(queue.spilled_sizes), 0))
        if is_all_here or not queue.is_subscription:
            books.append((f"spilled of {queue.name}", queue.spilled_bytes, 0))
        elif queue.spilled_bytes < sum(queue.spilled_sizes.values()):
            books.append((f"spilled of {queue.name}", queue.spilled_bytes, sum(queue.spilled_sizes.values())))
    return [f"{name} is {booked}, counted are {there}" for name, booked, there in books if booked != there]


def _bytes_of(engine: Engine, queue: Queue) -> int:
    asides = sum(lane.selected is not None for lane in queue.lanes)
    joins = JOIN_BYTES * max(0, len(engine.state.clients.receivers_of(queue).wildcards) - 1)
    size = queue_size(queue.destination) + LANE_BYTES * len(queue.lanes) + SELECTED_ENTRIES_BYTES * asides + joins
    selecting = engine.queues.selections.by_queue.get(queue)
    if selecting is not None:
        if selecting.groups is not None:
            size += GROUPS_BYTES + sum(map(group_bytes, selecting.groups.owners))
        scans = selecting.scans.values()
        cursors = [cursor for scan in scans for cursor in scan.cursors.values()]
        groups = sum(isinstance(cursor, GroupScanCursor) for cursor in cursors)
        size += SELECTION_BYTES + SELECTOR_BYTES * len(scans)
        size += KEYED_BYTES * sum(key_count(scan.selector) for scan in scans)
        size += GROUP_LANE_BYTES * groups + SELECTOR_LANE_BYTES * (len(cursors) - groups)
    return size


def _bytes_of_consumers(engine: Engine, sessions: Collection[ConnectionState]) -> int:
    """Return the bytes of consumers, of their selectors and those of topics, and of queues yet to be joined."""
    consumers: list[Subscriber] = []
    for session in sessions:
        consumers += [*session.consumers.values(), *session.browsers.values()]
    selectors = {id(one.selector): one.selector.size for one in consumers if one.selector is not None}
    selectors |= {id(one): one.size for one in targets.selectors_of_topics(engine)}
    to_join = sum(targets.joining(engine).values())
    return (
        sum(consumer_size(one.subscription, one.destination) for one in consumers) + sum(selectors.values()) + to_join
    )


def orphaned_names(engine: Engine, names: dict[int, str]) -> dict[int, str]:
    """Return the names in the store of queues that the engine does not know; valid while no work is under way."""
    known = [*engine.queues.by_name.values(), *targets.queues_of_scheduled(engine), *targets.queues_that_ended(engine)]
    numbers = {queue.stored_number for queue in known}
    return {number: name for number, name in names.items() if number not in numbers}


def not_evicted(engine: Engine, policy: Policy) -> list[str]:
    """Return the messages that should have left memory; valid after `evict`, while no work is under way."""
    wrong = [
        f"{queue.name} waits for a write or a page that nobody has asked for"
        for queue in engine.queues.by_name.values()
        if any(lane.unread_in_memory or lane.pending_read for lane in queue.lanes)
    ]
    evictable = {
        queue: _size(_evictable(engine, queue)) for queue in engine.queues.by_name.values() if not queue.is_reply_queue
    }
    if engine.state.memory.bytes_over_limit > 0 and any(evictable.values()):
        wrong.append(f"{engine.state.memory.bytes_over_limit} bytes too many, and {evictable} can leave")
    wrong += [
        f"{queue.name} has {queue.resident_bytes} bytes in memory, {size} of which can leave"
        for queue, size in evictable.items()
        if size and queue.resident_bytes > policy.memory_limit and not queue.is_temporary
    ]
    return wrong


def _all(engine: Engine, queue: Queue) -> Iterator[Entry]:
    yield from _evictable(engine, queue)
    for lane in queue.lanes:
        yield from lane.unread_in_memory
    for session in engine.state.clients.sessions.values():
        for transaction in session.transactions.settling_transactions:
            yield from (entry for entry in transaction.held.values() if entry.lane.queue is queue)
    yield from (entry for entry in targets.awaiting_dead_letter(engine) if entry.lane.queue is queue)


def _evictable(engine: Engine, queue: Queue) -> Iterator[Entry]:
    """Yield the waiting messages and those that consumers hold; messages acknowledged in open transactions stay in
    memory."""
    for lane in queue.lanes:
        yield from lane
    yield from engine.state.clients.held_by_consumers(queue)


def _message_size(entry: Entry) -> int:
    return 0 if entry.message is None else size_of(entry.message)


def _size(entries: Collection[Entry] | Iterator[Entry]) -> int:
    return sum(_message_size(entry) + causes_size(entry.causes) for entry in entries)
