"""Gathering: asks the broker every few seconds for what the overview and the charts show, once for all logins that may
see the same.

All users with the right `monitor` see the same figures, so one gathering serves them all, with the connection of one of
them. Any other user has a gathering of its own, which all logins of this user share. A gathering goes on as long as one
of its logins is open; its charts stay for an hour.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from truenext.client.tasks.connection import Consumer
from truenext.console.charts import STEP_S, Charts
from truenext.console.link import Link, LoggedOut, Restricted
from truenext.console.logins import Login
from truenext.console.rights import Rights
from truenext.errors import LocalProtocolError, Refused, TruenextError
from truenext.model.control_answers import QueueReport, QueuesReport, StatusReport
from truenext.model.process_report import REPLIES, REPORT_TTL_S, STAGES_TOPIC
from truenext.model.seen_processes import SeenProcess, SeenProcesses

logger = logging.getLogger(__name__)

TOP = 100
"""Number of queues that are gathered in each order."""
SELDOM = 3
"""Number of gatherings of the oldest messages for one of all other lists, whose requests visit all queues."""
_TOP_ORDERS = ("waiting", "held", "failing")
BUSY_MAX = 0.02
"""Largest part of the time in which a gathering waits for the broker."""
LONGEST_S = 30.0
"""Longest time between two gatherings."""
FIRST_S = 5.0
"""Seconds for which a page waits for the first answers."""
FIRST_REPORTS_S = 0.4
"""Seconds in which the first reports of processes are received."""


@dataclass
class Gathered:
    """Answers of the broker at one time."""

    status: StatusReport | None = None
    """State of the broker; None without the right `monitor`."""
    oldest: QueuesReport | None = None
    """Queues whose oldest messages wait longest, and the sums."""
    top_queues: list[QueueReport] = field(default_factory=list)
    """The fullest queues, those whose messages consumers hold longest, and those with the most repeated failures."""
    dead_letters: QueuesReport | None = None
    """Dead-letter queues, the fullest first."""
    error: str = ""
    """Reason why there are no newer answers; "" if there is none."""

    @property
    def queues(self) -> list[QueueReport]:
        """Queues of all lists but that of dead letters."""
        oldest = [] if self.oldest is None else self.oldest.queues
        return list({each.name: each for each in (*self.top_queues, *oldest)}.values())


class Member:
    """A login whose connection a gathering may use."""

    def __init__(self, login: Login, is_open: Callable[[Login], bool]) -> None:
        self.login = login
        self._is_open = is_open

    @property
    def is_open(self) -> bool:
        return self._is_open(self.login)


class _Loop:
    """Task that runs while a login needs it."""

    def __init__(self) -> None:
        self._members: dict[Login, Member] = {}
        self._task: asyncio.Task[None] | None = None
        self.has_answer = asyncio.Event()

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def join(self, member: Member) -> None:
        """Add a login. Idempotent."""
        self._members[member.login] = member
        if not self.is_running:
            self._task = asyncio.create_task(self._run())

    async def ready(self) -> None:
        """Wait for the first answers, at most FIRST_S seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await self.has_answer.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        while (login := self._open_login()) is not None:
            started = time.monotonic()
            try:
                await self._gather(login.link)
            except (TruenextError, TimeoutError) as error:
                if isinstance(error, LoggedOut | Refused | Restricted):
                    # Another login may have more luck.
                    del self._members[login]
                self._failed(str(error) or "the broker does not answer in time")
            except Exception:
                logger.exception("gathering has failed")
                self._failed("the console has failed to gather this: see its log")
            self.has_answer.set()
            await asyncio.sleep(self._pause_s(time.monotonic() - started))
        self.has_answer.clear()

    def _pause_s(self, busy_s: float) -> float:
        """Return how long to wait after the broker was asked for `busy_s` seconds."""
        return max(STEP_S - busy_s, min(busy_s / BUSY_MAX, LONGEST_S))

    def _open_login(self) -> Login | None:
        """Return the login that joined last, of those that are open."""
        self._members = {login: member for login, member in self._members.items() if member.is_open}
        return next(reversed(self._members), None)

    async def _gather(self, link: Link) -> None:
        raise NotImplementedError

    def _failed(self, error: str) -> None:
        raise NotImplementedError


class QueueGathering(_Loop):
    def __init__(self, scope: str, charts: Charts) -> None:
        super().__init__()
        self._scope = scope
        self._charts = charts
        self._number = 0
        self.latest = Gathered()

    async def _gather(self, link: Link) -> None:
        rights = await link.rights()
        status, oldest = await asyncio.gather(
            _status(link, rights), link.ask("queues", {"order": "oldest", "limit": TOP}, QueuesReport)
        )
        top_queues, dead = self.latest.top_queues, self.latest.dead_letters
        latest = oldest.queues
        if self._number % SELDOM == 0 or dead is None:
            by_waiting = {"order": "waiting", "limit": TOP}
            dead, *lists = await asyncio.gather(
                link.ask("queues", by_waiting | {"dead_letters": True}, QueuesReport),
                *(link.ask("queues", {"order": order, "limit": TOP}, QueuesReport) for order in _TOP_ORDERS),
            )
            top_queues = list({each.name: each for found in lists for each in found.queues}.values())
            latest = [*latest, *top_queues]
        self._number += 1
        now = time.time()
        self.latest = Gathered(status, oldest, top_queues, dead)
        self._note(self.latest, now)
        self._note_failures(latest, now)

    def _failed(self, error: str) -> None:
        self.latest.error = error

    def _note(self, gathered: Gathered, now: float) -> None:
        assert gathered.oldest is not None and gathered.dead_letters is not None, "they were just gathered"
        for report in gathered.queues:
            note_queue(self._charts, self._scope, report, now)
        for report in gathered.dead_letters.queues:
            self._charts.set((self._scope, report.name, "waiting"), report.waiting, now)
        sums, status = gathered.oldest.sums, gathered.status
        counts = sums if status is None else status.counts
        name = (self._scope, "")
        self._charts.set((*name, "waiting"), sums.waiting, now)
        self._charts.set((*name, "held"), sums.held, now)
        self._charts.set((*name, "oldest"), sums.oldest_s or 0.0, now)
        self._charts.count((*name, "accepted"), counts.accepted, now)
        self._charts.count((*name, "acknowledged"), counts.acknowledged, now)
        self._charts.count((*name, "dead letters"), sum(counts.dead_lettered.values()), now)

    def _note_failures(self, latest: Iterable[QueueReport], now: float) -> None:
        """Note the counts of repeated failures, also 0. Only this does, with reports that have just come: an older
        report would seem to be of a broker that has begun anew."""
        for report in latest:
            self._charts.set((self._scope, report.name, "failed again"), report.failed_again, now)


def note_queue(charts: Charts, scope: str, report: QueueReport, now: float) -> None:
    """Add the figures of one queue to its series."""
    name = (scope, report.name)
    charts.set((*name, "waiting"), report.waiting, now)
    charts.set((*name, "oldest"), report.oldest_s or 0.0, now)
    charts.count((*name, "accepted"), report.accepted, now)
    charts.count((*name, "acknowledged"), report.acknowledged, now)


async def _status(link: Link, rights: Rights) -> StatusReport | None:
    return await link.ask("status", None, StatusReport) if rights.is_monitor else None


class StageGathering(_Loop):
    """Gathers reports of processes of stages, for all users that may send to their topic."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = SeenProcesses()
        self._consumer: tuple[object, Consumer] | None = None
        self.error = ""

    def processes(self) -> list[SeenProcess]:
        return self._seen.processes(time.monotonic())

    def dismiss(self, run: str) -> bool:
        """Forget a process that does not answer, until it does. Return False if there is none."""
        return self._seen.dismiss(run, time.monotonic())

    async def _gather(self, link: Link) -> None:
        """Request reports, and receive them for a step."""
        connection = await link.whole_connection()
        if self._consumer is None or self._consumer[0] is not connection:
            await self._leave()
            self._seen.connection_lost()
            self._consumer = connection, await connection.consumer(REPLIES)
        consumer = self._consumer[1]
        # A page does not wait for the slowest process.
        until = time.monotonic() + (STEP_S - 1 if self.has_answer.is_set() else FIRST_REPORTS_S)
        try:
            await connection.send(
                STAGES_TOPIC, b"", persistent=False, ttl=REPORT_TTL_S, reply_to=REPLIES, timeout=STEP_S
            )
            self._seen.request_sent(time.monotonic())
            self.error = ""
            while (left := until - time.monotonic()) > 0:
                message = await consumer.receive(left)
                if message is not None:
                    self._seen.add_report(message.body, time.monotonic())
        except (Refused, LocalProtocolError):
            raise
        except TruenextError:
            await self._leave()
            self._seen.connection_lost()
            raise

    async def _leave(self) -> None:
        """Close the consumer. It would take a part of the reports from the next one of its connection."""
        former, self._consumer = self._consumer, None
        if former is not None:
            with suppress(TruenextError, TimeoutError):
                await former[1].close()

    def _failed(self, error: str) -> None:
        self.error = error

    def _pause_s(self, busy_s: float) -> float:
        # It has waited for processes, not for the broker.
        return max(0.5, STEP_S - busy_s)
