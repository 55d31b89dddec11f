"""Which event loop do commands run in that go on until they are stopped: the quicker one, where it is to be had."""

import asyncio
import sys

if sys.platform == "win32":
    new_event_loop = asyncio.new_event_loop
else:
    from uvloop import new_event_loop

__all__ = ["new_event_loop"]
