"""Names of endpoints and stages, as far as the name of a queue tells them.

order.place                    the endpoint, and the queue of its first stage, which takes its requests
order.place.stage.reserve      the queue of its stage `reserve`
"""

from __future__ import annotations

import re

STAGE_MARK = "stage"
"""Word between the name of an endpoint and the name of a stage, in the name of the stage's queue."""
FAILURE_STAGE = "on_failure"
"""Name of the stage that handles failures of an endpoint's requests."""
RESERVED_FIRST_WORDS = frozenset({"DLQ", "Consumer", "VirtualTopic", "Spark"})

is_word = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*").fullmatch
"""Match a word of an endpoint's name, or the name of a stage."""


def is_reserved(words: list[str]) -> bool:
    """Return whether a name of these words means something else than an endpoint."""
    return STAGE_MARK in words or words[0] in RESERVED_FIRST_WORDS


def endpoint_of(queue: str) -> str | None:
    """Return the name of the endpoint to which the queue of a later stage belongs; None for other queues."""
    endpoint, mark, stage = queue.rpartition(f".{STAGE_MARK}.")
    return endpoint if mark and is_word(stage) else None


def endpoint_of_any_stage(queue: str) -> str | None:
    """Return the name of the endpoint whose stage has this queue, be it the first stage or a later one; None if no
    stage has a queue of such a name.

    >>> endpoint_of_any_stage("order.place"), endpoint_of_any_stage("order.place.stage.reserve")
    ('order.place', 'order.place')
    >>> endpoint_of_any_stage("DLQ.order.place"), endpoint_of_any_stage("orders/new")
    (None, None)
    """
    endpoint = endpoint_of(queue) or queue
    words = endpoint.split(".")
    return None if is_reserved(words) or not all(map(is_word, words)) else endpoint


def later_stage_queue(endpoint: str, stage: str) -> str:
    return f"{endpoint}.{STAGE_MARK}.{stage}"
