"""Brokers in the process of a test with a copy of another broker's messages and an identity of their own, as after
`truenext restore` or `store renew`."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

from truenext.store.checkpoint_format import new_identity
from truenext.store.memory import MemoryStore
from truenext.testing import BlockingBroker, blocking_broker
from truenext.testing.local import LocalBroker


def renewed_copy(store: MemoryStore) -> MemoryStore:
    """Return a copy of the store, of one moment, with a new identity."""
    copied = MemoryStore()
    with store._lock:
        state = {name: value for name, value in vars(store).items() if name != "_lock"}
        vars(copied).update(deepcopy(state))
    copied._identity = new_identity()
    return copied


async def replace_store(broker: LocalBroker, store: MemoryStore) -> None:
    """Kill the broker, and start it at the same address with another store."""
    async with broker._lock:
        broker._broker_run.kill()
        broker._store = store
        await broker._start_again()


@contextmanager
def restored(original: BlockingBroker) -> Iterator[BlockingBroker]:
    """Run, beside the original, a broker that was restored from its backup of this moment."""
    with blocking_broker() as other:
        other._run_in_loop(replace_store(other._local, renewed_copy(original._local._store)))
        yield other
