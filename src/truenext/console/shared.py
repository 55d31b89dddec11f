"""What all logins share: the broker, gatherings, charts, and flows of stages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from truenext.console.charts import Charts
from truenext.console.gathering import Member, QueueGathering, StageGathering
from truenext.console.link import Broker
from truenext.console.logins import Login
from truenext.console.rights import Rights
from truenext.console.work import GroupReading
from truenext.flows.model import RecordedFlow
from truenext.flows.reader import FlowReader
from truenext.flows.search import find_flows

logger = logging.getLogger(__name__)

FLOWS_BYTES_MAX = 40 * 1024 * 1024
"""Bytes of flows in memory. With charts, and the 45 MiB that the console itself takes, they are below 100 MiB."""
FLOWS_S = 2.0
"""Seconds between two looks at the folders of events."""
COUNTED_MAX = 1000
SEARCHED_MAX = 5000
"""Executions that a search of the files keeps: a few MiB."""
READINGS_MAX = 5
"""Largest number of queues whose dead letters were read in part, and can be read on: each takes a MiB or two."""
EVERYTHING = "monitor"
"""Name of the gathering of all that see everything; others are called after their user."""


class Flows:
    """Flows of the folders with events, read by a thread as the files grow."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.reader = FlowReader(folders, bytes_max=FLOWS_BYTES_MAX)
        self._busy = asyncio.Lock()
        """Lock of the reader, which is not for several threads at once."""
        self._searching = asyncio.Lock()
        """Lock of searches, so that only one takes memory."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.folders:
            self._task = asyncio.create_task(self._run())

    async def find(self, text: str) -> tuple[list[RecordedFlow], list[str]]:
        """Return the flows with this trace or id, the latest first: those in memory, else those of the files. The
        second result has sentences about what is left out, or cannot be read."""
        async with self._busy:
            found, problems = self.reader.find(text), list(self.problems)
        if found or not self.folders:
            return found, problems
        # It is older than the flows in memory, or was pushed out.
        async with self._searching:
            searched = await asyncio.to_thread(find_flows, self.folders, text, SEARCHED_MAX)
        if searched.omitted:
            problems.append(f"earlier flows of this trace are left out: {searched.omitted:,}")
        return searched.flows[::-1], list(dict.fromkeys([*problems, *searched.problems]))

    async def list(self, order: str, limit: int) -> list[RecordedFlow]:
        """Return flows: `given-up`, `failed`, `unended`, `slowest` or `last`."""
        async with self._busy:
            reader = self.reader
            lists = {
                "given-up": reader.given_up,
                "failed": reader.failed,
                "unended": reader.unended,
                "slowest": reader.slowest,
                "last": reader.latest,
            }
            return lists[order](limit)

    async def count_given_up(self, since_s: float) -> int:
        """Return the number of flows that were given up and have started since a time, in seconds since 1970."""
        return sum(each.started_at >= since_s * 1e6 for each in await self.list("given-up", COUNTED_MAX))

    @property
    def problems(self) -> Sequence[str]:
        """Sentences about folders and files that cannot be read, or not completely."""
        return self.reader.problems

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            try:
                async with self._busy:
                    has_more = await asyncio.to_thread(self.reader.read)
            except Exception:
                logger.exception("reading of flows has failed")
                has_more = False
            await asyncio.sleep(0 if has_more else FLOWS_S)


class Shared:
    def __init__(self, broker: Broker, folders: Sequence[Path], settings: Mapping[str, str]) -> None:
        self.broker = broker
        self.flows = Flows(folders)
        self.settings = settings
        """Settings of the console, for the page that shows them."""
        self.charts = Charts()
        self.stages = StageGathering()
        self._gatherings: dict[str, QueueGathering] = {}
        self._readings: dict[tuple[Login, str], GroupReading] = {}

    def take_reading(self, login: Login, queue: str) -> GroupReading | None:
        """Return the groups of a queue that the login has read last. Until they are kept again, no other page has
        them: it would count messages twice."""
        return self._readings.pop((login, queue), None)

    def keep_reading(self, login: Login, queue: str, reading: GroupReading) -> None:
        """Keep groups for a page that reads on. Only the last ones are kept."""
        self._readings[login, queue] = reading
        while len(self._readings) > READINGS_MAX:
            del self._readings[next(iter(self._readings))]

    def gathering(self, login: Login, rights: Rights, is_open: Callable[[Login], bool]) -> QueueGathering:
        """Return the gathering of all that may see the same as this login, which joins it."""
        scope = scope_of(rights)
        self._gatherings = {name: each for name, each in self._gatherings.items() if each.is_running}
        gathering = self._gatherings.setdefault(scope, QueueGathering(scope, self.charts))
        gathering.join(Member(login, is_open))
        return gathering

    async def close(self) -> None:
        for gathering in (*self._gatherings.values(), self.stages):
            with suppress(Exception):
                await gathering.close()
        await self.flows.close()


def scope_of(rights: Rights) -> str:
    """Return the name of the gathering of a user. No user's name begins with a blank."""
    return EVERYTHING if rights.is_monitor else f" {rights.name}"
