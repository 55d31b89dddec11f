"""Does the event loop look again for as long as it is told, and sleep then?"""

from collections.abc import Callable
from typing import Any, cast

from truenext.broker.poll import Poll


class Loop:
    """Runs what is due; each pass takes ten microseconds."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._due: list[Callable[[], None]] = []

    def call_soon(self, action: Callable[[], None]) -> None:
        self._due.append(action)

    def passes_until_it_sleeps(self) -> int:
        passes = 0
        while self._due:
            due, self._due = self._due, []
            self.now_ns += 10_000
            passes += 1
            for action in due:
                action()
        return passes


def poll_of(loop: Loop, microseconds: int) -> Poll:
    return Poll(cast(Any, loop), microseconds, lambda: loop.now_ns)


def test_it_looks_again_for_as_long_as_it_is_told() -> None:
    loop = Loop()
    poll_of(loop, 100).begin()
    assert loop.passes_until_it_sleeps() == 10


def test_it_looks_once_a_pass_however_much_has_happened() -> None:
    loop = Loop()
    poll = poll_of(loop, 100)
    for _ in range(5):
        poll.begin()
    assert len(loop._due) == 1


def test_it_begins_anew_whenever_something_happens() -> None:
    loop = Loop()
    poll = poll_of(loop, 100)
    poll.begin()
    loop.call_soon(poll.begin)
    assert loop.passes_until_it_sleeps() == 11
    poll.begin()
    assert loop.passes_until_it_sleeps() == 10
