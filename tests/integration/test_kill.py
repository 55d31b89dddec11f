"""Test that the broker keeps its contract when it is killed under load, again and again.

Producers and consumers of several kinds work at full speed (kill_load.py); at a random moment the broker gets a kill -9
and is started again on the same folder.

    TRUENEXT_KILL_CYCLES=20 TRUENEXT_SEED=7 pytest -s tests/integration/test_kill.py
"""

import os
import random
import time

import pytest

from tests.drawing import one_of
from tests.integration.broker_process import BrokerProcess
from tests.integration.kill_load import (
    Ledger,
    Letter,
    NumberedProducer,
    browse_all,
    check_sequences,
    check_work,
    hire,
    resolve,
)

CYCLES = int(os.environ.get("TRUENEXT_KILL_CYCLES", "3"))
SEED = int(os.environ.get("TRUENEXT_SEED", "0")) or random.SystemRandom().randrange(10**9)


@pytest.mark.timeout(120 + 30 * CYCLES)
@one_of("options", [(), ("--queue-memory-limit", "20KB", "--page-size", "7")], ids=["default limits", "20 KB a queue"])
def test_a_broker_that_is_killed_under_load_keeps_every_promise(own_broker: BrokerProcess) -> None:
    # C18.1, C18.3, C18.4, C18.5
    print(f"\nseed {SEED}, {CYCLES} cycles")
    chance = random.Random(SEED)
    ledger = Ledger()
    unconfirmed: list[tuple[Letter, bytes]] = []
    for cycle in range(1, CYCLES + 1):
        ledger.cycle = cycle
        resolve(own_broker, ledger)
        found = browse_all(own_broker, ledger, consumes=False)
        crew = hire(own_broker, ledger, unconfirmed, f"{SEED}-{cycle}")
        for worker in crew:
            worker.start()
        seconds = chance.uniform(0.1, 1.5)
        time.sleep(seconds)
        own_broker.kill()
        for worker in crew:
            worker.join()
        if ledger.failures:
            raise ledger.failures[0]
        own_broker.close_clients()
        own_broker.start()
        letters = ledger.letters.values()
        print(
            f"cycle {cycle}/{CYCLES}: found {found}, killed after {seconds:.2f} s; so far {len(letters)} sent, "
            f"{sum(letter.confirmed for letter in letters)} confirmed, {sum(letter.done for letter in letters)} "
            f"acknowledged for certain, {len(ledger.unresolved)} and {len(ledger.unknown_work)} transactions open",
            flush=True,
        )

    ledger.cycle += 1
    resolve(own_broker, ledger)
    NumberedProducer(ledger, own_broker.connect, "the end", unconfirmed).finish()
    own_broker.restart(is_clean=False)
    drained = browse_all(own_broker, ledger, consumes=True)
    check_work(ledger)
    check_sequences(ledger)
    print(f"drained {drained}", flush=True)
    own_broker.restart(is_clean=True)
    assert all(facts.waiting == 0 for facts in own_broker.queues().values())
