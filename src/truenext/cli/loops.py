"""Event loop of commands that run until they are stopped. It is uvloop, or asyncio's own loop on Windows."""

import asyncio
import sys

if sys.platform == "win32":
    new_event_loop = asyncio.new_event_loop
else:
    from uvloop import new_event_loop

__all__ = ["new_event_loop"]
