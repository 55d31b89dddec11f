"""Sends whose frames a stage has encoded. The driver checks the caller only once for many messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from truenext.client.core.send_options import encode_body
from truenext.client.tasks.connection import Session


async def send_encoded(
    session: Session, messages: Iterable[tuple[bytes, bytes, float | None]], deadline: float
) -> None:
    """Send messages in the transaction of a session, as `Session.send` does. Each message has the head of its frame,
    its body, and its time to live in seconds.

    Raises: RolledBack if the transaction was ended by anything but its own code, such as a lost connection;
    TimeoutError if a message cannot be written before `deadline`, by the clock of the event loop; ValueError if a body
    is too large
    """
    core, driver = session._source.core, session._driver
    driver.check_caller()
    owner = asyncio.current_task(driver.loop)
    for head, body, ttl_s in messages:
        data = encode_body(body)
        if not core.try_send(head, data, ttl_s, owner):
            await driver.run_flow(core.send(head, data, ttl_s, deadline, owner))
