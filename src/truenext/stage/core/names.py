"""Names of endpoints, and of their queues and stages.

    order.place                    the endpoint, and the queue of its first stage, which takes its requests
    order.place.stage.reserve      the queue of its stage `reserve`
    .price                         in the service `shop`: shop.price

The queue of a later stage is named after the stage, not numbered. So messages under way stay in the right queue if
stages are added or change their order.
"""

from __future__ import annotations

import re

from truenext.model.limits import DESTINATION_LENGTH_MAX
from truenext.stage.core.errors import DefinitionError

STAGE_MARK = "stage"
"""Word between the name of an endpoint and the name of a stage, in the name of the stage's queue."""
_IS_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*").fullmatch
_DEAD_LETTER_PREFIX = len("DLQ.")


def expand_endpoint_name(text: str, service: str) -> str:
    """Return the full name of an endpoint or a service. Raises: DefinitionError if the name is invalid"""
    if not isinstance(text, str):
        raise DefinitionError(
            f"{text!r} is not the name of an endpoint or service: names are text, such as order.place"
        )
    name = service + text if text.startswith(".") else text
    words = name.split(".")
    if not all(map(_IS_WORD, words)):
        raise DefinitionError(
            f"{text!r} is not the name of an endpoint or service: use words of letters, digits, - and _, with dots, "
            "such as order.place"
        )
    if STAGE_MARK in words or words[0] in ("DLQ", "Consumer", "VirtualTopic", "Spark"):
        raise DefinitionError(f"{text!r} cannot be the name of an endpoint: queues with such names are reserved")
    _check_length(name)
    return name


def stage_queue(endpoint: str, stage: str) -> str:
    """Return the queue of a stage that is not the first of its endpoint.

    Raises: DefinitionError if the name of the stage is invalid
    """
    if not (isinstance(stage, str) and _IS_WORD(stage)):
        raise DefinitionError(f"{stage!r} is not the name of a stage of {endpoint}: use letters, digits, - and _")
    name = f"{endpoint}.{STAGE_MARK}.{stage}"
    _check_length(name)
    return name


def endpoint_of(queue: str) -> str | None:
    """Return the name of the endpoint to which the queue of a later stage belongs; None for other queues."""
    endpoint, mark, stage = queue.rpartition(f".{STAGE_MARK}.")
    return endpoint if mark and _IS_WORD(stage) else None


def _check_length(name: str) -> None:
    if len(name) > DESTINATION_LENGTH_MAX - _DEAD_LETTER_PREFIX:
        length_max = DESTINATION_LENGTH_MAX - _DEAD_LETTER_PREFIX
        raise DefinitionError(
            f"{name} is too long for a queue: it has {len(name)} characters, and may have {length_max}"
        )


def replies_queue(service: str) -> str:
    """Return the queue for the replies and failures that the service keeps."""
    return f"{service}.replies"


def kept_topic(service: str) -> str:
    """Return the topic to which the service publishes the id of each reply that it has kept."""
    return f"replies.{service}.kept"
