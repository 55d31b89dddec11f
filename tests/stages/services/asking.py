"""A program of the service `failing` that asks for each number under a key, and prints each answer as a line of JSON.

python -m tests.stages.services.asking URL DATABASE NUMBERS
"""

import asyncio
import json
import sys

from tests.stages.services.failing import KINDS, Ended, Job
from truenext.errors import ConnectionLost, TruenextError
from truenext.stage import FlowFailed, Service
from truenext.stage.sql.errors import DatabaseUnavailable

CONCURRENCY = 10
TIMEOUT_S = 20.0


async def main(url: str, database: str, numbers: int) -> None:
    app = Service("failing", broker=url, database=database, exactly_once=True)
    outer = app.remote("failing.outer", Job, Ended)
    places = asyncio.Semaphore(CONCURRENCY)

    async def ask(number: int) -> None:
        job = Job(number, KINDS[number % len(KINDS)])
        async with places:
            while True:
                answer: object
                try:
                    ended = await app.ask(outer, job, trace=f"n{number}", key=f"n{number}", timeout=TIMEOUT_S)
                    answer = ended.path
                except FlowFailed as failed:
                    answer = failed.last_cause.partition("\n")[0]
                except (DatabaseUnavailable, TimeoutError):
                    continue
                print(json.dumps([number, answer]), flush=True)
                return

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
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
