"""What becomes of a subscription that has ended: its messages go, wherever they are.

    it ends       its queue gets another name in the store, and no client can reach it any more
    from then on  page after page of it is read from the store and removed, a lane at a time
    in the end    it goes as any queue does in which nothing is (numbers.py)

One that ends with its connection has such a name from the beginning, see spilling.py.

Whatever is in memory is forgotten at once: what of it is in the store, or on its way there, is on the pages that are
read once the new name is durable. A broker that ends meanwhile goes on when it starts again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.batch import NO_MARK
from truenext.destination import ENDED_PREFIX
from truenext.engine.state.pages import Look, PageRead
from truenext.engine.state.queue import Entry
from truenext.engine.writing.background_task import BackgroundTask
from truenext.engine.writing.entries import dereference
from truenext.limits import PAGE_BYTES, PAGE_SIZE
from truenext.order import RANKS
from truenext.record import message_key

if TYPE_CHECKING:
    from truenext.engine.state.queue import Lane, Queue
    from truenext.engine.writing.event_log import EventLog
    from truenext.engine.writing.ledger import Ledger
    from truenext.engine.writing.numbers import Numbers


class EndingRead(Look):
    """A page of which all is to be removed."""

    __slots__ = ("_endings",)

    waits_for_commit = False

    def __init__(self, endings: Endings, lane: Lane, after_sequence: int) -> None:
        super().__init__(lane, after_sequence, PAGE_SIZE, PAGE_BYTES)
        self._endings = endings

    def on_page(self, page: PageRead) -> None:
        self._endings.page_read(self, page)


class _Ending:
    __slots__ = ("after", "batch", "has_damage", "queue", "rank")

    def __init__(self, queue: Queue, batch: int) -> None:
        self.queue = queue
        self.batch = batch
        """Once it is durable nothing comes to the queue any more."""
        self.rank = 0
        self.after = 0
        """The last sequence of the lane that is gone."""
        self.has_damage = False


class Endings(BackgroundTask):
    def __init__(self, ledger: Ledger, events: EventLog, numbers: Numbers) -> None:
        self._ledger = ledger
        self._events = events
        self._numbers = numbers
        self._endings: list[_Ending] = []
        """The first is under way."""
        self._is_reading = False

    def end(self, queue: Queue) -> None:
        """A queue has ended: the store is told with the gathering batch."""
        batch = self._ledger.batch
        batch.queues[queue.number] = ENDED_PREFIX + queue.name
        self.add(queue, batch.number)

    def add(self, queue: Queue, batch: int) -> None:
        """The store knows that a queue has ended as soon as a batch is durable."""
        self._endings.append(_Ending(queue, batch))
        self._ledger.busy[self] = None

    @property
    def has_any(self) -> bool:
        return bool(self._endings)

    def queues(self) -> list[Queue]:
        return [ending.queue for ending in self._endings]

    def is_due(self) -> bool:
        return (
            bool(self._endings)
            and not self._is_reading
            and not self._ledger.is_stopped
            and self._endings[0].batch <= self._ledger.committed
            and not self._ledger.is_full
        )

    def step(self) -> list[Look]:
        self._is_reading = True
        ending = self._endings[0]
        return [EndingRead(self, ending.queue.lane(ending.rank), ending.after)]

    def page_read(self, read: EndingRead, page: PageRead) -> None:
        batch = self._ledger.batch
        self._is_reading = False
        ending = self._endings[0]
        lane = read.lane
        for found in page.found:
            ending.after = found.sequence
            if found.message is None:
                # Nobody can say which of the store's two kinds it is of. It does no harm where it is.
                ending.has_damage = True
                continue
            key = message_key(lane.key, found.sequence)
            (batch.removes if found.message.persistent else batch.transient_removes).append(key)
            if found.content:
                dereference(batch, found.content, persistent=found.message.persistent)
            if found.mark != NO_MARK:
                batch.unmarks.append(key)
            batch.size += len(key)
            self._events.expired(_gone(lane, found.sequence, is_persistent=found.message.persistent))
        if not page.is_end:
            return
        ending.rank, ending.after = ending.rank + 1, 0
        if ending.rank == len(RANKS):
            del self._endings[0]
            if not ending.has_damage:
                self._numbers.free(ending.queue)
            ending.queue.let_go()


def _gone(lane: Lane, sequence: int, *, is_persistent: bool) -> Entry:
    return Entry(sequence, None, lane, 0, is_persistent, 0)
