"""Content of the queues of a truenext broker."""

from __future__ import annotations

import json

import truenext


async def waiting(port: int) -> dict[str, int]:
    """Return the number of waiting messages by queue, without empty queues."""
    async with truenext.connect(f"stomp://127.0.0.1:{port}") as connection:
        found = json.loads(await connection.control_request("queues"))
    return {each["name"]: each["waiting"] for each in found if each["waiting"]}


async def empty(port: int, names: list[str]) -> None:
    """Remove all messages that wait in these queues."""
    async with truenext.connect(f"stomp://127.0.0.1:{port}") as connection:
        for name in names:
            arguments: dict[str, object] = {"queue": name}
            while True:
                answer = json.loads(await connection.control_request("purge", arguments))
                if answer["next"] is None:
                    break
                arguments |= {"after": answer["next"], "until": answer["until"]}
