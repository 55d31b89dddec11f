"""What waits in the queues of a truenext broker, and how is a queue emptied?"""

from __future__ import annotations

import json

import truenext


async def waiting(port: int) -> dict[str, int]:
    """Messages by queue, of those in which some wait."""
    async with truenext.connect(f"stomp://127.0.0.1:{port}") as connection:
        found = json.loads(await connection.control_request("queues"))
    return {each["name"]: each["waiting"] for each in found if each["waiting"]}


async def empty(port: int, names: list[str]) -> None:
    """Remove all that waits there."""
    async with truenext.connect(f"stomp://127.0.0.1:{port}") as connection:
        for name in names:
            arguments: dict[str, object] = {"queue": name}
            while True:
                answer = json.loads(await connection.control_request("purge", arguments))
                if answer["next"] is None:
                    break
                arguments |= {"after": answer["next"], "until": answer["until"]}
