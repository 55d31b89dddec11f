"""Requests of a program that need several steps, and are the same whether it waits with a task or with a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from truenext.client.core import frames
from truenext.client.core.message import Content, content_of
from truenext.client.core.sends import SendOptions, Spoken, body_of, spoken
from truenext.client.core.waiting import Flow, Signal, Wait

if TYPE_CHECKING:
    from truenext.client.core.client import Client
    from truenext.client.core.outbox import Send


def first_connection(client: Client, deadline: float) -> Flow[None]:
    """Raises: ConnectionLost if no broker is there in time; Refused"""
    try:
        yield from client.wait_until_up(deadline, "begin")
    except TimeoutError:
        raise client.not_there() from None


def spoken_in_transaction(destination: str, options: SendOptions) -> Spoken:
    """Raises: ValueError, TypeError"""
    said = spoken(destination, options)
    if said.producer is not None:
        raise ValueError("a send in a transaction has no number of its own: the COMMIT has")
    return said


def await_send(client: Client, send: Send, deadline: float | None) -> Flow[None]:
    """Until a message is confirmed. Raises: what became of it instead"""
    if not send.is_done:
        if send.settled is None:
            send.settled = Signal()
        yield Wait(send.settled, deadline)
    if send.error is not None:
        raise send.error


def request(
    client: Client, destination: str, body: bytes | str, options: SendOptions, deadline: float
) -> Flow[Content]:
    """Raises: Refused, ConnectionLost, TimeoutError, ValueError"""
    said = spoken(destination, {"persistent": False, **options})
    for name in ("reply_to", "correlation_id", "producer"):
        if name in options:
            raise ValueError(f"{name} of a request is the client's")
    head = said.head
    if said.ttl_s is not None:
        client.check_open()
        link = yield from client.wait_until_up(deadline, "send a request")
        link.require_truenext("a ttl")
        head += f"truenext-ttl:{max(1, int(said.ttl_s * 1000))}\n".encode()
    frame = yield from client.request(head, body_of(body), deadline)
    return content_of(frame)


def ask(client: Client, verb: str, question: object, deadline: float) -> Flow[bytes]:
    """Raises: Refused, ConnectionLost, TimeoutError"""
    body = b"" if question is None else msgspec.json.encode(question)
    headers = {"destination": f"/control/{verb}"}
    frames.check(headers)
    head = f"SEND\n{frames.lines(headers)}".encode()
    client.check_open()
    link = yield from client.wait_until_up(deadline, "ask the broker")
    link.require_truenext("a question to the broker")
    frame = yield from client.request(head, body, deadline)
    return frame.body


def reply_to(message: Content) -> tuple[str]:
    """Raises: ValueError if no reply is wanted"""
    if not message.reply_to:
        raise ValueError(f"{message!r} wants no reply: it has no reply-to")
    return (message.reply_to,)


def reply_options(message: Content) -> SendOptions:
    options: SendOptions = {"persistent": False}
    if message.correlation_id:
        options["correlation_id"] = message.correlation_id
    return options


class _Question(msgspec.Struct):
    known: bool
    outcome: str | None


def outcome(client: Client, token: str, deadline: float) -> Flow[str]:
    """Raises: ValueError, TimeoutError, ConnectionLost"""
    if not token:
        return "unknown"
    parts = token.split(" ")
    if len(parts) != 3 or not parts[2].isdigit():
        raise ValueError(f"{token!r} is no token of a transaction in doubt")
    store, producer, number = parts
    link = yield from client.wait_until_up(deadline, "ask what became of a transaction")
    if link.store != store:
        return "unknown"
    question = {"producer": producer, "commit": int(number), "settle": True}
    answer = yield from ask(client, "producer", question, deadline)
    said = msgspec.json.decode(answer, type=_Question).outcome
    return said if said in ("committed", "rolled back") else "unknown"
