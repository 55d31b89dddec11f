"""Contents of a data folder in words that are the same in every format."""

from pathlib import Path
from typing import Any

from truenext.model.record import (
    CONTENTS_LANE_KEY,
    SCHEDULED_TIMERS,
    decode_record,
    split_lane_key,
    split_message_key,
    split_scheduled_timer,
    split_timer,
)
from truenext.store.embedded import EmbeddedStore
from truenext.store.store import Recovered, UndecodedMessage


def contents_of(data: Path) -> dict[str, Any]:
    """Return everything that a broker finds in a data folder, as JSON has it."""
    store = EmbeddedStore(data)
    try:
        recovered = store.recover()
        messages = [
            _message(lane, message)
            for lane in sorted(recovered.counts)
            for message in store.read_page(lane, 0, 1_000_000, 1 << 30).messages
        ]
        contents = store.read_page(CONTENTS_LANE_KEY, 0, 1_000_000, 1 << 30).messages
        timers = store.read_timers(b"", 1_000_000).timers
        return {
            **_facts(recovered),
            "messages": messages,
            "contents": {split_message_key(each.key)[1]: each.mark.attempts for each in contents},
            "timers": [_timer(timer) for timer in timers],
        }
    finally:
        store.close()


def _facts(recovered: Recovered) -> dict[str, Any]:
    return {
        "identity": recovered.identity,
        "clean stop": recovered.clean_stop,
        "sequence limit": recovered.sequence_limit,
        "redelivered below": recovered.redelivered_below,
        "queues": dict(sorted(recovered.queues.items())),
        "paused": sorted(recovered.paused),
        "producers": {name: _producer(state) for name, state in sorted(recovered.producers.items())},
        "counts": {repr(split_lane_key(lane)): count for lane, count in sorted(recovered.counts.items())},
    }


def _producer(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in state.__struct_fields__}


def _message(lane: bytes, message: UndecodedMessage) -> dict[str, Any]:
    sent = decode_record(message.key, message.record, message.content)
    return {
        "queue": split_lane_key(lane)[0],
        "sequence": split_message_key(message.key)[1],
        "priority": sent.priority,
        "persistent": sent.persistent,
        "expires": sent.expires_ms,
        "arrived": sent.arrived_ms,
        "group": sent.group,
        "redrive": sent.redrive_queue,
        "form": sent.form,
        "text": sent.is_text,
        "headers": sent.header.decode(),
        "body": sent.body.decode("latin-1"),
        "mark": list(message.mark),
        "causes": list(message.causes),
    }


def _timer(timer: bytes) -> list[Any]:
    if timer > SCHEDULED_TIMERS:
        due_ms, number, lane = split_scheduled_timer(timer)
        return ["scheduled", due_ms, number, *split_lane_key(lane)]
    due_ms, lane, sequence = split_timer(timer)
    return ["timer", due_ms, *split_lane_key(lane), sequence]
