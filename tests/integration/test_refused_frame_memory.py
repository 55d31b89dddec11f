"""Test that a refused frame leaves nothing in memory once its ERROR was sent."""

import asyncio
import gc

from tests.integration.broker_here import broker_here, port_of
from tests.integration.raw_client import TRUENEXT_CLIENT, RawClient

REFUSED = [
    b"SEND\ndestination:/control/release\n\n" + b"no JSON" * 1000 + b"\0",
    b"SEND\ndestination:/control/release\n\n" + b'{"subscriptions":["\xff"]}' + b"\0",
    b"SEND\ndestination:/queue/\n\n" + b"body" * 1000 + b"\0",
    b"ACK\nid:" + b"n" * 1000 + b"\n\n\0",
    b"ACK\nid:1@none\n\n\0",
    b"SEND\ndestination:/queue/a\ntransaction:none\n\n" + b"body" * 1000 + b"\0",
    b"NONSENSE\n\n\0",
]


def test_refused_frames_are_freed_without_garbage_collection() -> None:
    """Regression: frames stayed with their bodies, so that one client could make the broker take any amount of
    memory."""

    def use(port: int) -> None:
        client = RawClient(port)
        client.send_connect("1.2", "0,0", headers=TRUENEXT_CLIENT)
        for frame in REFUSED:
            client.write(frame)
            client.next_error()
        gc.collect()
        for frame in REFUSED * 10:
            client.write(frame)
            client.next_error()
        found.append(gc.collect())
        client.disconnect()

    async def here() -> None:
        async with broker_here(connections_max=2) as listener:
            await asyncio.get_running_loop().run_in_executor(None, use, port_of(listener))

    found: list[int] = []
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        asyncio.run(here())
    finally:
        if was_enabled:
            gc.enable()
    assert found[0] < len(REFUSED) * 10
