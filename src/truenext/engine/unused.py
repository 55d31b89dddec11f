"""Which queues go because nobody needs them.

A queue costs memory though nothing is in it. So one that is empty, unused and has nothing to remember goes, in memory
and in the store, and is made again when somebody names it. Source: docs/contract.md, "Queues that come and go"

    every second       a part of all queues is looked at: what was not used for a minute goes
    a queue is made    where there is no room for it, what was not used for a second goes
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from truenext.engine.topics import virtual_topic
from truenext.errors import RemoteProtocolError
from truenext.limits import UNUSED_LOOK, UNUSED_PIECE, UNUSED_SECONDS, UNUSED_SECONDS_SHORT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from truenext.engine.memory import Memory
    from truenext.engine.queue import Queue


class Unused:
    __slots__ = ("_futile_until_us", "_is_needed_elsewhere", "_let_go", "_memory", "_queues", "_round")

    def __init__(
        self,
        queues: Mapping[str, Queue],
        memory: Memory,
        *,
        is_needed_elsewhere: Callable[[Queue], bool],
        let_go: Callable[[Queue], object],
    ) -> None:
        """`is_needed_elsewhere` knows what a queue itself does not know of; `let_go` ends one."""
        self._queues = queues
        self._memory = memory
        self._is_needed_elsewhere = is_needed_elsewhere
        self._let_go = let_go
        self._round: list[Queue] = []
        """Those that are still to be looked at, the next one last."""
        self._futile_until_us = 0
        """Until then nothing more can go."""

    def look(self, now_us: int) -> None:
        """To be called once a second."""
        self._go_round(now_us, UNUSED_LOOK, UNUSED_PIECE)

    def make_room(self, now_us: int) -> None:
        """A queue is to be made, and there is no room for it."""
        if now_us >= self._futile_until_us and not self._go_round(now_us, len(self._queues), UNUSED_PIECE):
            # Who asks again and again must not have all looked at again and again.
            self._futile_until_us = now_us + int(UNUSED_SECONDS_SHORT * 1_000_000)

    def _go_round(self, now_us: int, count: int, gone_max: int) -> int:
        """Look at so many queues, or until so many have gone: how many have."""
        is_short = not self._memory.has_room_for_queue
        before_us = now_us - int((UNUSED_SECONDS_SHORT if is_short else UNUSED_SECONDS) * 1_000_000)
        gone = 0
        for _ in range(min(count, len(self._queues))):
            if not self._round:
                self._round = list(self._queues.values())
                self._round.reverse()
            queue = self._round.pop()
            if queue.used_us > before_us or self._queues.get(queue.name) is not queue:
                continue
            if self._may_go(queue):
                self._let_go(queue)
                gone += 1
                if gone >= gone_max:
                    break
            else:
                queue.let_go_of_places()
        return gone

    def _may_go(self, queue: Queue) -> bool:
        return not (queue.is_needed or remembers(queue) or self._is_needed_elsewhere(queue))


def remembers(queue: Queue) -> bool:
    """It is there for what was said of it, or comes by itself, whether it is used or not."""
    return bool(queue.is_paused or queue.destination.topic or virtual_topic(queue.name))


def no_room_for_consumer(size: int, memory: Memory) -> RemoteProtocolError:
    """A consumer or a browser takes so many bytes, with its selector, and there is no room for that."""
    return RemoteProtocolError(
        f"no room for this subscription: it takes {-(-size >> 10)} KiB with its selector and in all its queues, and "
        f"queues and their consumers take {memory.queues >> 20} of the {memory.queues_limit >> 20} MiB that "
        "--memory-limit leaves for them; make it larger, have fewer or shorter selectors, or let fewer queues match"
    )


def no_room(queues: int, memory: Memory) -> RemoteProtocolError:
    """There is no room for another queue, and none of those that are there can go."""
    return RemoteProtocolError(
        f"no room for another queue: {queues} queues and their consumers take all of the {memory.queues_limit >> 20} "
        "MiB that --memory-limit leaves for them; make it larger, or let fewer queues be in use at once"
    )
