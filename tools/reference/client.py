"""Page of the client, docs/reference/client.md, from the signatures and docstrings of the client."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import truenext
from tools.reference.markdown import fence, joined, paragraphs, wrapped
from tools.reference.members import Member, call_parts, function_member, members_of, table_of
from truenext import blocking
from truenext.client.core.buffer import ReceivedMessage
from truenext.client.core.send_options import SendOptions
from truenext.client.core.subscriptions import ConsumerOptions

_HEAD = """\
# Reference of the client

Look up each name of the client here: its parameters, its result and its errors. [client.md](../client.md) shows how to
write programs with them. All durations are in seconds, unless a name ends with `_ms`.

`truenext.blocking` has the same names, for threads: `async` and `await` are left out, `async with` is `with`, and
`async for` is `for`. Sentences on tasks and a cancellation are true of threads and Ctrl-C.
[The last part](#in-truenextblocking) lists all other differences.

An `AwaitableContext[X]` is awaited, which results in an X; or it is used in an `async with`, which also closes the X.

This page is made from the docstrings: `make reference`.
"""
_CLASSES: tuple[type, ...] = (
    truenext.Connection,
    SendOptions,
    ConsumerOptions,
    truenext.Outgoing,
    truenext.Sent,
    truenext.Session,
    truenext.Consumer,
    truenext.Message,
    truenext.Content,
    truenext.Processing,
    truenext.Transaction,
    truenext.Outcome,
    truenext.Health,
    truenext.ConsumerHealth,
)
"""In the order of the page."""
_OF_MESSAGE = {"may_have_missed"}
"""Attributes of `ReceivedMessage`, the base class of a message, that a program uses."""
_ERRORS: tuple[type, ...] = (
    truenext.TruenextError,
    truenext.ClosedError,
    truenext.ConfigurationError,
    truenext.ConnectionLost,
    truenext.InDoubt,
    truenext.LocalProtocolError,
    truenext.Refused,
    truenext.RolledBack,
    truenext.Code,
)


def page() -> str:
    return joined(_parts())


def _parts() -> Iterator[str]:
    yield _HEAD
    names = [cls.__name__ for cls in _CLASSES]
    yield wrapped(" · ".join(f"[{name}](#{name.lower()})" for name in ("connect", *names, "Errors", "Codes")))
    yield "## connect"
    yield from call_parts(function_member(truenext.connect))
    for cls in _CLASSES:
        yield from _class(cls)
    yield "## Errors"
    yield "All are in `truenext`, and are a `TruenextError`."
    for error in _ERRORS:
        if error is not truenext.Code:
            yield f"### {error.__name__}"
            yield from paragraphs(inspect.getdoc(error) or "")
            yield from table_of(list(members_of(error)))
    codes = ", ".join(f"`{code.value}`" for code in truenext.Code)
    yield "## Codes"
    yield wrapped(f"`truenext.Code`: why the broker has refused something, for a program. {codes}.")
    yield wrapped("[protocol.md](../protocol.md#error-codes) describes each of them.")
    yield "## In truenext.blocking"
    yield from _differences()


def _class(cls: type) -> Iterator[str]:
    yield f"## {cls.__name__}"
    if cls is truenext.Outgoing:
        yield fence("Outgoing(body: bytes | str, **options: SendOptions)")
    # Not that of a class from which it is made.
    yield from paragraphs(inspect.cleandoc(cls.__doc__ or ""))
    members = list(members_of(cls))
    if cls is truenext.Message:
        members += [each for each in members_of(ReceivedMessage) if each.name in _OF_MESSAGE]
    yield from table_of([each for each in members if not each.is_call])
    if cls is truenext.Message:
        yield "It also has everything that [Content](#content) has."
    for member in members:
        if member.is_call:
            yield f"### {cls.__name__}.{member.name}"
            yield from call_parts(member)


def _differences() -> Iterator[str]:
    """Yield the members of `truenext.blocking` that differ from those of the asynchronous client."""
    yield from _difference("connect", function_member(truenext.connect), function_member(blocking.connect))
    for cls in _CLASSES:
        twin = getattr(blocking, cls.__name__, cls)
        if twin is cls:
            continue
        here = {each.name: each for each in members_of(cls)}
        for member in members_of(twin):
            yield from _difference(f"{cls.__name__}.{member.name}", here.get(member.name), member)


def _difference(name: str, here: Member | None, there: Member) -> Iterator[str]:
    if here is None or _without_tasks(here.text + here.doc) != _without_tasks(there.text + there.doc):
        assert there.is_call, f"{name} is another value there"
        yield f"### blocking: {name}"
        yield from call_parts(there)


def _without_tasks(text: str) -> str:
    for pattern, instead in (
        ("async ", ""),
        ("AsyncIterator", "Iterator"),
        ("Awaitable[None]", "None"),
        ("AwaitableContext[Connection]", "Connection"),
        ("AwaitableContext[Consumer]", "Consumer"),
        ("AwaitableContext[Session]", "Session"),
    ):
        text = text.replace(pattern, instead)
    return " ".join(text.split())
