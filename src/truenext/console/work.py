"""Bulk work of an operator: one control request after the other, until nothing is left or the operator stops it.

The work goes on while its login lasts, whatever page is shown. Nothing is lost if it ends early: each request is one
step that is done or not done, and the same work goes on with what is left.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from truenext.console.answers import BulkAnswer
from truenext.console.link import Link
from truenext.errors import TruenextError
from truenext.model.dead_letters import DeadLetterGroups
from truenext.model.limits import CONTROL_REQUEST_SEQUENCES_MAX

logger = logging.getLogger(__name__)

PREVIEW_S = 1.5
"""Seconds after which a preview tells what it has found so far."""
WORK_MAX = 20
"""Largest number of works that one login has at once, finished ones included."""


Ask = Callable[[str, object, type[BulkAnswer]], Awaitable[BulkAnswer]]
"""Function that sends a control request, and returns the decoded answer."""


class Selection:
    """Messages of a queue, or scheduled sends, that an operator has chosen; and what to do with them."""

    def __init__(self, verb: str, request: Mapping[str, Any], sequences: Sequence[int] = ()) -> None:
        """`request` has the fields of the control request `verb`. `sequences` are the chosen messages; none of them
        means all that the request selects."""
        self.verb = verb
        self.request = dict(request)
        self.sequences = sorted(set(sequences))

    def requests(self) -> list[dict[str, Any]]:
        """Return the first requests of each part of the work: one takes so many sequences at most."""
        if not self.sequences:
            return [self.request]
        parts = range(0, len(self.sequences), CONTROL_REQUEST_SEQUENCES_MAX)
        return [
            self.request | {"sequences": self.sequences[first : first + CONTROL_REQUEST_SEQUENCES_MAX]}
            for first in parts
        ]


class Totals:
    """Sums of the answers to all pieces of a work."""

    def __init__(self) -> None:
        self.count = 0
        self.to: Counter[str] = Counter()
        self.left = 0
        self.ended: Counter[str] = Counter()
        self.transient = 0
        self.error = ""

    def add(self, answer: BulkAnswer) -> None:
        self.count += answer.moved
        self.to.update(answer.to)
        self.left += answer.left
        self.ended.update(answer.ended)
        self.transient += answer.transient
        self.error = answer.error or self.error


async def preview(link: Link, selection: Selection, seconds: float = PREVIEW_S) -> tuple[Totals, bool]:
    """Return what the work would do, and whether that is all: within `seconds` not all messages may be seen.

    Raises: the errors of `Link.ask`
    """
    totals, until = Totals(), time.monotonic() + seconds
    for request in selection.requests():
        async for answer in pieces(link.ask, selection.verb, request | {"dry_run": True}):
            totals.add(answer)
            if time.monotonic() > until and answer.next is not None:
                return totals, False
    return totals, True


async def pieces(ask: Ask, verb: str, request: Mapping[str, Any]) -> AsyncGenerator[BulkAnswer, None]:
    """Request one piece of bulk work after the other, by `Link.ask` or `Visit.ask`, and yield the answers.

    Raises: the errors of `Link.ask`
    """
    after: tuple[int, int] | None = (0, 0)
    until: dict[str, int] = {}
    while after is not None:
        answer = await ask(verb, {**request, **until, "after": after}, BulkAnswer)
        after, until = answer.next, {"until": answer.until}
        yield answer


class GroupReading:
    """Groups of the dead letters of a queue that were read so far. It can be read on."""

    def __init__(self) -> None:
        self.groups = DeadLetterGroups()
        self.count = 0
        """Number of messages that were read."""
        self._after: tuple[int, int] | None = (0, 0)
        self._until: dict[str, int] = {}

    @property
    def is_whole(self) -> bool:
        return self._after is None

    async def read_on(self, ask: Ask, queue: str, seconds: float) -> None:
        """Read one more piece, and further ones for so many seconds. Raises: the errors of `Link.ask`"""
        end = time.monotonic() + seconds
        while self._after is not None:
            request = {"queue": queue, **self._until, "after": self._after}
            answer = await ask("dead-letters", request, BulkAnswer)
            self.groups.add(answer.groups)
            self.count += answer.moved
            self._after, self._until = answer.next, {"until": answer.until}
            if time.monotonic() > end:
                return


class Work:
    """Bulk work that runs as a task."""

    def __init__(self, link: Link, selection: Selection, title: str, back: str, total: int | None) -> None:
        self.id = secrets.token_hex(8)
        self.selection = selection
        self.title = title
        self.back = back
        """Address of the page from which the work was begun."""
        self.total = total
        self.totals = Totals()
        self.state = "running"
        """`running`, `stopping`, `done`, `stopped` or `failed`."""
        self.started_ms = round(time.time() * 1000)
        self._started = time.monotonic()
        self._ended: float | None = None
        self._link = link
        self._task = asyncio.create_task(self._run())

    @property
    def is_over(self) -> bool:
        return self.state not in ("running", "stopping")

    @property
    def elapsed_s(self) -> float:
        return (self._ended or time.monotonic()) - self._started

    def stop(self) -> None:
        """Stop after the request that is under way."""
        if not self.is_over:
            self.state = "stopping"

    async def finished(self) -> None:
        """Wait until the work is over."""
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            for request in self.selection.requests():
                async for answer in pieces(self._link.ask, self.selection.verb, request):
                    self.totals.add(answer)
                    if self.state == "stopping":
                        self._end("stopped")
                        return
            self._end("failed" if self.totals.error else "done")
        except (TruenextError, TimeoutError) as error:
            self.totals.error = str(error) or "the broker does not answer in time"
            self._end("failed")
        except Exception:
            logger.exception("work of an operator has failed")
            self.totals.error = "the console has failed to go on: see its log"
            self._end("failed")

    def _end(self, state: str) -> None:
        self.state = state
        self._ended = time.monotonic()
