"""Test broker for programs that block: the broker runs in an event loop on a thread of its own."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from truenext.clock import monotonic
from truenext.testing.contents import QueueContents
from truenext.testing.faults import CommitMoment, caller_location
from truenext.testing.local import HasSession, LocalBroker, broker

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _RealTimeLoop(asyncio.SelectorEventLoop):
    """Event loop with the real time, even if the test has stopped the time of its program."""

    def time(self) -> float:
        return monotonic()


class BlockingBroker:
    """LocalBroker for programs that block. Any thread may call its methods. Each method does what the same method of
    LocalBroker does, and returns when that is done."""

    def __init__(self, local: LocalBroker, loop: asyncio.AbstractEventLoop) -> None:
        self._local = local
        self._loop = loop

    @property
    def url(self) -> str:
        """URL of the broker, stomp://127.0.0.1:PORT. It stays the same after a restart or a crash."""
        return self._local.url

    def restart(self) -> None:
        self._run_in_loop(self._local.restart())

    def crash(self) -> None:
        self._run_in_loop(self._local.crash())

    def lose_commit(self, when: CommitMoment, *, required: bool = True) -> None:
        self._call_in_loop(self._local.faults.order_commit_loss, when, required, caller_location())

    def drop(self, connection: HasSession | str | None = None) -> None:
        self._call_in_loop(self._local.drop, connection)

    def freeze(self, connection: HasSession | str | None = None) -> None:
        self._call_in_loop(self._local.freeze, connection)

    def thaw(self, connection: HasSession | str | None = None) -> None:
        self._call_in_loop(self._local.thaw, connection)

    def fill_disk(self) -> None:
        self._call_in_loop(self._local.fill_disk)

    def free_disk(self) -> None:
        self._call_in_loop(self._local.free_disk)

    def slow_disk(self, seconds: float) -> None:
        self._call_in_loop(self._local.slow_disk, seconds)

    def advance(self, *, seconds: float) -> None:
        self._run_in_loop(self._local.advance(seconds=seconds))

    def queue(self, name: str) -> QueueContents:
        return self._run_in_loop(self._local.queue(name))

    def _call_in_loop(self, action: Callable[_P, None], *arguments: _P.args, **named: _P.kwargs) -> None:
        async def act() -> None:
            action(*arguments, **named)

        self._run_in_loop(act())

    def _run_in_loop(self, action: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(action, self._loop).result()


@contextmanager
def blocking_broker() -> Iterator[BlockingBroker]:
    """Run a broker on a thread of its own for the duration of the block.

    Raises: at the end of the block, TruenextError if the broker has failed, which is a bug of truenext; NeverReached if
    a required fault was not reached and the block has raised nothing
    """
    started: Future[tuple[BlockingBroker, asyncio.Event]] = Future()

    async def serve() -> None:
        async with broker() as local:
            end = asyncio.Event()
            started.set_result((BlockingBroker(local, asyncio.get_running_loop()), end))
            await end.wait()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=_RealTimeLoop) as runner:
                runner.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    with ThreadPoolExecutor(1, "truenext-testing") as thread:
        ended = thread.submit(run)
        blocking, end = started.result()
        try:
            yield blocking
        finally:
            blocking._loop.call_soon_threadsafe(end.set)
        ended.result()
