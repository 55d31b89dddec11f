"""Do the two faces of the client have the same names, parameters and promises, but for `await`?"""

import inspect
import re
from types import FunctionType

import pytest

import truenext
from truenext import blocking
from truenext.client.tasks import connection as tasks
from truenext.client.threads import connection as threads

CLASSES = ["Connection", "Consumer", "Message", "Processing", "Sent", "Session", "Transaction"]
TWINS = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "__await__": "wait",
}
REPLACEMENTS = [
    (r"To be awaited, or used in an `async with`", "To be used in a `with`, or closed"),
    (r"to be awaited, or used in an `async with`", "to be used in a `with`, or closed"),
    (r"`await` what this returns", "`wait` for what this returns"),
    (r"to await it is to wait until it is confirmed", "`wait` until it is confirmed"),
    (r"block was cancelled", "block was interrupted"),
    (r"by a cancellation", "by Ctrl-C"),
    (r"async with", "with"),
    (r", or a test has stopped the time of the event loop", ""),
]
LONGER_DOCS = {"Connection.consume", "Sent.wait"}
"""What a thread does otherwise, and says so."""
OF_TASKS = {"connect": ("heartbeat_thread", "An event loop that is blocked")}
"""A parameter of what threads do anyway, and how the paragraph begins that says so."""


def public(kind: type) -> dict[str, object]:
    return {
        TWINS.get(name, name): member
        for name, member in vars(kind).items()
        if name in TWINS or name in TWINS.values() or not name.startswith("_")
    }


def plain(annotation: str) -> str:
    """As a thread says it."""
    annotation = re.sub(r"\b(AwaitableContext|Awaitable)\[(\w+)\]", r"\2", annotation)
    annotation = re.sub(r"Generator\[None, None, (\w+)\]", r"\1", annotation)
    annotation = re.sub(r" \| AsyncIterable\[.*\]", "", annotation)
    return annotation.replace("AsyncIterator", "Iterator")


def signature(member: object) -> list[tuple[str, object, object, str]]:
    if isinstance(member, property):
        member = member.fget
    assert isinstance(member, FunctionType)
    found = inspect.signature(member)
    parameters = [
        (each.name, each.kind, each.default, plain(str(each.annotation))) for each in found.parameters.values()
    ]
    return [*parameters, ("return", None, None, plain(str(found.return_annotation)))]


def doc(member: object, without: str | None = None) -> str:
    paragraphs = (inspect.getdoc(member) or "").split("\n\n")
    return " ".join(" ".join(each for each in paragraphs if without is None or not each.startswith(without)).split())


def members() -> list[tuple[str, object, object]]:
    found: list[tuple[str, object, object]] = [("connect", tasks.connect, threads.connect)]
    for name in CLASSES:
        async_member, blocking_member = public(getattr(tasks, name)), public(getattr(threads, name))
        assert async_member.keys() == blocking_member.keys(), f"{name} differs"
        found += [(f"{name}.{each}", async_member[each], blocking_member[each]) for each in async_member]
    return [
        (name, async_member, blocking_member)
        for name, async_member, blocking_member in found
        if callable(async_member) or isinstance(async_member, property)
    ]


MEMBERS = pytest.mark.parametrize(
    ("name", "async_member", "blocking_member"), [pytest.param(*each, id=each[0]) for each in members()]
)


def test_both_doors_have_the_same_names() -> None:
    errors = {name for name in truenext.__all__ if name in vars(truenext.errors)}
    assert set(truenext.__all__) - errors - {"__version__"} == set(blocking.__all__)
    assert all(getattr(truenext, name) for name in truenext.__all__)
    assert set(truenext.__all__) <= set(dir(truenext))
    with pytest.raises(AttributeError):
        truenext.nothing  # noqa: B018


@MEMBERS
def test_both_take_and_return_the_same(name: str, async_member: object, blocking_member: object) -> None:
    without, _ = OF_TASKS.get(name, (None, ""))
    assert signature(blocking_member) == [each for each in signature(async_member) if each[0] != without]


@MEMBERS
def test_both_promise_the_same(name: str, async_member: object, blocking_member: object) -> None:
    if name in LONGER_DOCS or name.rpartition(".")[2].startswith("__"):
        return
    _, without = OF_TASKS.get(name, ("", None))
    expected = doc(async_member, without)
    for pattern, plainly in REPLACEMENTS:
        expected = re.sub(pattern, plainly, expected)
    assert expected, f"{name} says nothing"
    assert doc(blocking_member) == expected


@pytest.mark.parametrize("name", CLASSES)
def test_both_say_the_same_of_a_class(name: str) -> None:
    expected = doc(getattr(tasks, name))
    for pattern, plainly in REPLACEMENTS:
        expected = re.sub(pattern, plainly, expected)
    assert doc(getattr(threads, name)) == expected
