"""A program of the service `failing` that asks for each number under a key, from START on (in seconds since 1970), and
prints each answer as a line of JSON. Some flows begin at once, some after a delay, and some at a time after START.

python -m tests.stages.services.asking URL DATABASE NUMBERS START EVENTS
"""

import asyncio
import json
import sys
import time
from datetime import UTC, datetime

from tests.stages.services.failing import KINDS, Ended, Job
from truenext.errors import ConnectionLost, TruenextError
from truenext.stage import FlowFailed, Service
from truenext.stage.core.flow_start import FlowOptions
from truenext.stage.sql.errors import DatabaseUnavailable

CONCURRENCY = 50
TIMEOUT_S = 20.0


def job_of(number: int, numbers: int, start: float) -> tuple[Job, FlowOptions]:
    """Return the job and the options of its flow, the same in each process. Each kind has each way to begin."""
    kind, way = KINDS[number % len(KINDS)], number // len(KINDS) % 3
    if way == 0:
        return Job(number, kind), {}
    if way == 1:
        delay = 1 + number % 7 / 4
        return Job(number, kind, delay=delay), {"delay": delay}
    # Few flows are spread over seconds, too, so that a kill comes before the last one is due.
    due = start + 2 + number * max(0.05, 5 / numbers)
    return Job(number, kind, due), {"at": datetime.fromtimestamp(due, UTC)}


async def main(url: str, database: str, numbers: int, start: float, events: str) -> None:
    app = Service("failing", broker=url, database=database, exactly_once=True, events=events)
    outer = app.remote("failing.outer", Job, Ended)
    places = asyncio.Semaphore(CONCURRENCY)

    async def ask(number: int) -> None:
        job, options = job_of(number, numbers, start)
        async with places:
            while True:
                answer: object
                try:
                    ended = await app.ask(
                        outer, job, trace=f"n{number}", key=f"n{number}", timeout=TIMEOUT_S, **options
                    )
                    answer = ended.path
                except FlowFailed as failed:
                    answer = failed.last_cause.partition("\n")[0]
                except (DatabaseUnavailable, TimeoutError):
                    continue
                print(json.dumps([number, answer]), flush=True)
                return

    await asyncio.sleep(start - time.time())
    while True:
        try:
            async with app.connected():
                await asyncio.gather(*map(ask, range(numbers)))
                return
        except ConnectionLost:
            # The broker is away: it comes again.
            await asyncio.sleep(0.1)
        except TruenextError as error:
            sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]))
