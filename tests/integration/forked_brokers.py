"""Server that forks a broker, with all modules loaded, for each data folder that a line of its input names.

It prints the process number and the port of the broker, and its exit status when it has ended. So a test of a thousand
kills takes a minute instead of a quarter of an hour.
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
