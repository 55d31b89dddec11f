"""Brokers that are there at once: for each data folder that a line names, a process that has all loaded forks one.

It says the number of the process and the port; when that process has ended, how it has. A broker that is killed a
thousand times is tried in a minute so, and not in a quarter of an hour.
"""

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path

from tests.integration.broker_here import broker_here, port_of


async def serve(data: Path) -> None:
    async with broker_here(data) as listener:
        print(os.getpid(), port_of(listener), flush=True)
        await asyncio.get_running_loop().create_future()


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            if sys.platform == "linux":
                # As in broker_process.py: it dies with whoever has started it.
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            asyncio.run(serve(Path(line.strip())))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
