"""Broker that notes how long its event loop is held; run as `python -m bench.loop_watch FILE serve ...`.

A timer of the loop rings each millisecond. When the broker has ended, FILE has a line for each time that it rang late:
when it rang, the seconds since it had rang before, and the processor seconds of the loop's thread since then. The
latter are the loop's own work: in the other seconds another thread or process had the processor, or the interpreter.
"""

from __future__ import annotations

import sys
import time
from asyncio import AbstractEventLoop
from pathlib import Path
from typing import Any

from truenext.broker.broker import Broker
from truenext.cli.main import main

BEAT_S = 0.001
LATE_S = 0.003
"""Time between two beats from which on they are noted."""

_late: list[tuple[float, float, float]] = []


def _watch(loop: AbstractEventLoop) -> None:
    last, last_processor = time.monotonic(), time.thread_time()

    def beat() -> None:
        nonlocal last, last_processor
        now, processor = time.monotonic(), time.thread_time()
        if now - last > LATE_S:
            _late.append((now, now - last, processor - last_processor))
        last, last_processor = now, processor
        loop.call_later(BEAT_S, beat)

    beat()


def _run() -> None:
    file = Path(sys.argv[1])
    start = Broker.start

    async def watched_start(broker: Broker, **options: Any) -> None:
        await start(broker, **options)
        _watch(broker._loop)

    Broker.start = watched_start  # type: ignore[method-assign, assignment]
    try:
        main(sys.argv[2:])
    finally:
        file.write_text("".join(f"{at} {seconds} {processor}\n" for at, seconds, processor in _late))


if __name__ == "__main__":
    _run()
