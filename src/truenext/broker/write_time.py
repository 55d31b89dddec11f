"""Estimate of the time that the disk takes for a batch. Source: docs/decisions/0047-larger-batches-at-once.md"""

from truenext.model.limits import INLINE_SMALL_WRITE_SECONDS_MAX, INLINE_WRITE_SECONDS_MAX, SMALL_BATCH_BYTES

EMA_WEIGHT = 0.1
"""Weight of the newest write in the exponential moving averages."""

INITIAL_SECONDS_PER_BYTE = 4e-9
"""Estimated time for each byte of a large batch before the first one was written: 250 MB/s."""


class WriteTimeEstimate:
    """Estimate of the time that the disk takes for a batch, from earlier writes. The event loop itself writes a batch
    whose write will be quick; a thread writes other batches."""

    def __init__(self) -> None:
        self._small_batch_seconds = 0.0
        self._seconds_per_byte = INITIAL_SECONDS_PER_BYTE
        """Average seconds per byte that a large batch takes in addition to the time of a small batch."""
        self._is_slow = False
        """True if a write on the event loop took too long, and no write has been quick since."""

    def is_quick(self, size: int) -> bool:
        """Return whether the event loop itself may write a batch of `size` bytes."""
        if self._is_slow or self._small_batch_seconds > INLINE_SMALL_WRITE_SECONDS_MAX:
            return False
        return (
            size <= SMALL_BATCH_BYTES
            or self._small_batch_seconds + size * self._seconds_per_byte <= INLINE_WRITE_SECONDS_MAX
        )

    def add_write(self, size: int, seconds: float, *, is_inline: bool) -> None:
        """Add the time of a write of `size` bytes. `is_inline` tells whether the event loop itself made the write."""
        weight = EMA_WEIGHT
        if is_inline or self._is_slow:
            was_slow, self._is_slow = self._is_slow, seconds > INLINE_WRITE_SECONDS_MAX
            if self._is_slow:
                return
            if was_slow:
                # Earlier writes no longer count.
                weight = 1.0
        if size <= SMALL_BATCH_BYTES:
            self._small_batch_seconds += weight * (seconds - self._small_batch_seconds)
        else:
            extra_seconds = max(0.0, seconds - self._small_batch_seconds)
            self._seconds_per_byte += weight * (extra_seconds / size - self._seconds_per_byte)
