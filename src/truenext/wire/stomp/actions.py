"""What does a SEND to /control/ ask to be done for this connection? It is answered by nothing but a RECEIPT.

    begun, credit, wake     headers
    give-back               JSON, for it may name more messages than a header can hold

Source: docs/stomp.md
"""

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from truenext.commands import Begun, Credit, GiveBack, Wake
from truenext.errors import RemoteProtocolError
from truenext.limits import WINDOW_MAX
from truenext.question import read_question
from truenext.wire.stomp.frame import Frame
from truenext.wire.stomp.values import read_ack_id, read_boolean, read_name, read_number

Action = Begun | Credit | GiveBack | Wake


class _GiveBack(msgspec.Struct, forbid_unknown_fields=True):
    subscriptions: list[str]
    keep: list[str] = []
    rest: bool = False
    abort: str | None = None
    charge: Literal["all", "refused"] = "all"


def _begun(frame: Frame) -> Begun:
    subscription, sequence, dispatch = read_ack_id("begun", _required(frame.headers, "begun", "id"))
    return Begun(subscription, sequence, dispatch)


def _credit(frame: Frame) -> Credit:
    headers = frame.headers
    return Credit(
        read_name("id", _required(headers, "credit", "id")),
        read_number("messages", _required(headers, "credit", "messages"), WINDOW_MAX, " messages"),
        read_boolean("wait", headers.get("wait", "true")),
        headers.get("correlation-id"),
    )


def _wake(frame: Frame) -> Wake:
    return Wake(read_name("id", _required(frame.headers, "wake", "id")))


def _give_back(frame: Frame) -> GiveBack:
    asked = read_question("give-back", frame.body, _GiveBack)
    kept = [read_ack_id("give-back", text) for text in asked.keep]
    return GiveBack(asked.subscriptions, kept, asked.rest, asked.abort, asked.charge == "all")


def _required(headers: Mapping[str, str], verb: str, name: str) -> str:
    value = headers.get(name)
    if value is None:
        raise RemoteProtocolError(f"SEND to /control/{verb} without the header {name!r}")
    return value


ACTIONS: dict[str, Callable[[Frame], Action]] = {
    "begun": _begun,
    "credit": _credit,
    "give-back": _give_back,
    "wake": _wake,
}
"""By verb."""
