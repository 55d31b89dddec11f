"""Whose cancellation is it: that of the task that runs, or of something that it has waited for?"""

import asyncio


def is_being_cancelled() -> bool:
    """Somebody has cancelled the running task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
