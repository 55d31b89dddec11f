"""Names of endpoints, and of their queues and stages.

    order.place                    the endpoint, and the queue of its first stage, which takes its requests
    order.place.stage.reserve      the queue of its stage `reserve`
    .price                         in the service `shop`: shop.price

The queue of a later stage is named after the stage, not numbered. So messages under way stay in the right queue if
stages are added or change their order.
"""

from __future__ import annotations

from truenext.flows.names import is_reserved, is_word, later_stage_queue
from truenext.model.limits import DESTINATION_LENGTH_MAX
from truenext.stage.core.errors import DefinitionError

_DEAD_LETTER_PREFIX = len("DLQ.")


def expand_endpoint_name(text: str, service: str) -> str:
    """Return the full name of an endpoint or a service. Raises: DefinitionError if the name is invalid"""
    if not isinstance(text, str):
        raise DefinitionError(
            f"{text!r} is not the name of an endpoint or service: names are text, such as order.place"
        )
    name = service + text if text.startswith(".") else text
    words = name.split(".")
    if not all(map(is_word, words)):
        raise DefinitionError(
            f"{text!r} is not the name of an endpoint or service: use words of letters, digits, - and _, with dots, "
            "such as order.place"
        )
    if is_reserved(words):
        raise DefinitionError(f"{text!r} cannot be the name of an endpoint: queues with such names are reserved")
    _check_length(name)
    return name


def stage_queue(endpoint: str, stage: str) -> str:
    """Return the queue of a stage that is not the first of its endpoint.

    Raises: DefinitionError if the name of the stage is invalid
    """
    if not (isinstance(stage, str) and is_word(stage)):
        raise DefinitionError(f"{stage!r} is not the name of a stage of {endpoint}: use letters, digits, - and _")
    name = later_stage_queue(endpoint, stage)
    _check_length(name)
    return name


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
