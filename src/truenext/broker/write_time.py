"""How long will the disk take for a batch? Source: docs/decisions/0047-larger-batches-at-once.md"""

from truenext.model.limits import INLINE_SMALL_WRITE_SECONDS_MAX, INLINE_WRITE_SECONDS_MAX, SMALL_BATCH_BYTES

EMA_WEIGHT = 0.1
"""Of the last write in an average."""

INITIAL_SECONDS_PER_BYTE = 4e-9
"""What each byte of a large batch is expected to take until one was written: 250 MB/s."""


class WriteTimeEstimate:
    """Told of every write, it knows what to expect of the next one."""

    def __init__(self) -> None:
        self._small_batch_seconds = 0.0
        """What a small batch takes, on average."""
        self._seconds_per_byte = INITIAL_SECONDS_PER_BYTE
        """What a large one takes for each byte more, on average."""
        self._is_slow = False
        """The event loop was held for too long, and no write was quick since then."""

    def is_quick(self, size: int) -> bool:
        """A batch of so many bytes may be written by the event loop itself."""
        if self._is_slow or self._small_batch_seconds > INLINE_SMALL_WRITE_SECONDS_MAX:
            return False
        return (
            size <= SMALL_BATCH_BYTES
            or self._small_batch_seconds + size * self._seconds_per_byte <= INLINE_WRITE_SECONDS_MAX
        )

    def add_write(self, size: int, seconds: float, *, is_inline: bool) -> None:
        """A batch of so many bytes was written, by the event loop itself if `is_inline`."""
        weight = EMA_WEIGHT
        if is_inline or self._is_slow:
            was_slow, self._is_slow = self._is_slow, seconds > INLINE_WRITE_SECONDS_MAX
            if self._is_slow:
                return
            if was_slow:
                # Nothing that it did before counts.
                weight = 1.0
        if size <= SMALL_BATCH_BYTES:
            self._small_batch_seconds += weight * (seconds - self._small_batch_seconds)
        else:
            extra_seconds = max(0.0, seconds - self._small_batch_seconds)
            self._seconds_per_byte += weight * (extra_seconds / size - self._seconds_per_byte)
