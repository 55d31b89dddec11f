"""Test that a broker that was stopped, and taken over meanwhile, sends its clients nothing when it goes on.

A broker works under load. It gets a SIGSTOP at a random moment, or in an append; after `failover_after_ms` the other
one takes over. Then the first one gets a SIGCONT: it must send heart-beats at most, and end with status 3.

    TRUENEXT_ZOMBIES=500 TRUENEXT_SEED=7 pytest -s tests/integration/test_zombies.py
"""

import os
import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.log_broker import LogBroker, delete_folder, make_schema
from tests.integration.test_fences import ANY, HELD, append_held
from tests.integration.zombies import BUSY_QUEUE, SLOW_QUEUE, Crowd
from tests.stages.postgres import PostgresServer

ZOMBIES = int(os.environ.get("TRUENEXT_ZOMBIES", "3"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)

AFTER_MS = 2_000
MOMENTS = [ANY, HELD, ANY]


@pytest.mark.alternates("kills of a broker with a log")
@pytest.mark.timeout(120 + 20 * ZOMBIES)
def test_broker_that_was_stopped_and_taken_over_sends_nothing_when_it_goes_on(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    """C28.4, C28.9, C28.10"""
    print(f"\nseed {SEED}, {ZOMBIES} zombies", flush=True)
    wake_and_judge(own_postgres, tmp_path, SEED, ZOMBIES)


def wake_and_judge(server: PostgresServer, folder: Path, seed: int, count: int, fault: str = "") -> None:
    """Stop the active broker again and again, and let it go on too late. Raises: AssertionError if it sends anything"""
    chance = random.Random(seed)
    schema = f"zombies_{fault}"[:63]
    make_schema(server, schema)
    active, heir = (
        LogBroker(folder / name, server, schema, ["--member", name], failover_after_ms=AFTER_MS, fault=fault)
        for name in ("first", "second")
    )
    frames = 0
    try:
        active.start()
        for number in range(count):
            heir.begin_start()
            frames += wake(server, schema, active, heir, chance, MOMENTS[number % len(MOMENTS)])
            active, heir = heir, active
            empty(active)
            if chance.random() < 0.3:
                delete_folder(heir.data)
            if number % 20 == 19 or number == count - 1:
                active.check_database()
                print(f"zombie {number + 1}/{count}: {frames} frames in time", flush=True)
        active.stop()
    finally:
        active.clean_up()
        heir.clean_up()


def wake(
    server: PostgresServer, schema: str, active: LogBroker, heir: LogBroker, chance: random.Random, moment: str
) -> int:
    """Stop `active` under load until `heir` has taken over. Return the number of frames that came before."""
    crowd = Crowd(active)
    crowd.start()
    time.sleep(chance.uniform(0.1, 0.6))
    with ExitStack() as asleep:
        if moment == HELD:
            with append_held(server, schema):
                asleep.enter_context(active.asleep())
        else:
            asleep.enter_context(active.asleep())
        crowd.mark_late()
        heir.await_start()
        time.sleep(chance.uniform(0, 0.3))
    status = active.wait_for_end()
    assert status == 3, f"the broker that was taken over ended with {status}, log:\n{active.log}"
    frames = crowd.join()
    active.close_clients()
    return frames


def empty(broker: LogBroker) -> None:
    """Take all messages, so that the next crowd begins with none."""
    client = broker.connect()
    for queue in (BUSY_QUEUE, SLOW_QUEUE):
        client.subscribe(queue, ack="auto", prefetch=1000, subscription=queue)
    client.arrived()
    client.disconnect()
    broker.close_clients()
