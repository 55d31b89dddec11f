"""Unread heads: reads when the first messages of lanes arrived, of which nothing was read since the broker's start.

Only the store has these messages. They are read once, by the pager's thread, after the start. Answers meanwhile do not
tell the ages that are not known yet: to read the first messages of all queues may take long on a slow disk.
"""

from functools import partial

from truenext.broker.pager import Pager
from truenext.engine.state.queue import Lane
from truenext.errors import StoreError
from truenext.model.record import DamagedRecord, decode_record
from truenext.store.store import Store

LANES_PER_READ = 10
"""Number of lanes that the thread reads before it reads pages for consumers again."""


class UnreadHeads:
    def __init__(self, lanes: list[Lane], store: Store, pager: Pager) -> None:
        """`lanes` are all lanes of which nothing was read when the broker started. This object empties the list."""
        self._lanes = lanes
        self._store = store
        self._pager = pager

    def read(self) -> None:
        """Read some lanes, and then the others."""
        if not self._lanes:
            return
        lanes = self._lanes[-LANES_PER_READ:]
        del self._lanes[-LANES_PER_READ:]
        unread = [lane for lane in lanes if lane.unread and not (lane.horizon or lane.evicted_ms)]
        self._pager.call(
            partial(_read_arrivals, self._store, [lane.key for lane in unread]), partial(self._note, unread)
        )

    def _note(self, lanes: list[Lane], arrivals_ms: list[int]) -> None:
        for lane, arrived_ms in zip(lanes, arrivals_ms, strict=True):
            if lane.unread and not (lane.horizon or lane.evicted_ms):
                lane.evicted_ms = arrived_ms
        self.read()


def _read_arrivals(store: Store, lane_keys: list[bytes]) -> list[int]:
    """Return when the first message of each lane arrived, in milliseconds since the epoch; 0 if it cannot be read."""
    return [_read_arrival(store, key) for key in lane_keys]


def _read_arrival(store: Store, lane_key: bytes) -> int:
    try:
        for stored in store.read_page(lane_key, 0, 1).messages:
            return decode_record(stored.key, stored.record, stored.content).arrived_ms
    except (StoreError, DamagedRecord):
        # Consumers find out, or an operator by `truenext store check`.
        pass
    return 0
