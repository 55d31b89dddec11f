"""Lifetime of one message: its state at each cut, and how it had ended before each of its later events.

Both follow from the message's own events and from the marks of its queue: starts, gaps, and what applies to all
messages. So Spark can compute them by a shuffle on the message, whatever other messages do. `QueueAudit` has the same
rules by event, and tests compare the two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import merge

from msgspec import structs

from truenext.spark.audit.cut import MessageRow
from truenext.spark.audit.model import HAS_CAUSE, UNKNOWN_PRIORITY, EventCode, MessageState, StartFlag, TimelineRow

WAITING, HELD, DOUBTFUL, UNCERTAIN, DELAYED, ENDED = MessageState

MARKS = {EventCode.RUN_STARTED, EventCode.GAP, EventCode.ENDED, EventCode.DRAINED, EventCode.NOT_RECOVERED}
"""Codes of rows that apply to all messages of a queue."""

ENDS = {
    *(EventCode.ACKNOWLEDGED, EventCode.EXPIRED, EventCode.DEAD_LETTERED),
    *(EventCode.HANDLED, EventCode.MOVED, EventCode.REMOVED),
}
"""Codes of events that end one message."""

MESSAGE_CODES = ENDS | {
    *(EventCode.ACCEPTED, EventCode.DISPATCHED, EventCode.STARTED, EventCode.RETURNED),
    *(EventCode.DELAYED, EventCode.BLOCKING, EventCode.REPORTED),
}
"""Codes of events of one message."""


AFTER_END_CODES = (ENDS - {EventCode.EXPIRED}) | {EventCode.DISPATCHED, EventCode.STARTED, EventCode.REPORTED}
"""Codes of events that are judged by how their message had ended before."""


class Lifetime:
    """State of one message, event by event.

    In a MessageRow from here, `arrival` and `delivery` are not positions, but the events of acceptance and of the first
    dispatch, and `subscription` is the event of the last dispatch. `sections.py` replaces them. A message that begins
    with a saved row keeps what it has.
    """

    def __init__(self, sequence: int, row: MessageRow | None = None, since: int = 0) -> None:
        """With a `row`, the message had this state after the event `since`."""
        self.sequence = sequence
        self.row = row
        """State; None if neither the queue nor an ended subscription has the message."""
        self._since = since
        self.end_code = int(EventCode.ENDED) if row is not None and row.is_expiring else 0
        """Code of the event that has ended the message. 0 if none has, as far as the history shows."""
        self.delivery = 0
        """Event of the first dispatch; 0 before it."""

    def states(
        self, rows: Sequence[TimelineRow], marks: Sequence[TimelineRow], cuts: Sequence[int]
    ) -> Iterator[tuple[int, MessageRow]]:
        """Yield each of the events `cuts` before which the message exists, with its state then. `rows` are the events
        of the message, `marks` those of its queue; all three are in order."""
        for positions, row in self.stretches(rows, marks, cuts):
            for cut in cuts[positions.start : positions.stop]:
                yield cut, structs.replace(row)

    def stretches(
        self, rows: Sequence[TimelineRow], marks: Sequence[TimelineRow], cuts: Sequence[int]
    ) -> Iterator[tuple[range, MessageRow]]:
        """Yield ranges of positions in `cuts` over which the state of the message is the same, with that state. It
        changes in place: copy it before the next step. The arguments are those of `states`."""
        position = bisect_right(cuts, self._first(rows))
        last = rows[-1].event if rows else 0
        for row in self._with_marks(rows, marks):
            if position < len(cuts) and cuts[position] <= row.event:
                first, position = position, bisect_right(cuts, row.event, position)
                if self.row is not None:
                    yield range(first, position), self.row
            self.apply(row)
            if self.row is None and row.event >= last:
                return
        if self.row is not None and position < len(cuts):
            yield range(position, len(cuts)), self.row

    def end_codes(self, rows: Sequence[TimelineRow], marks: Sequence[TimelineRow]) -> Iterator[tuple[int, int]]:
        """Yield each event of the message after its end, with the code of that end."""
        for row in self._with_marks(rows, marks):
            if self.end_code and row.code in AFTER_END_CODES:
                yield row.event, self.end_code
            self.apply(row)

    def _first(self, rows: Sequence[TimelineRow]) -> int:
        """Return the event from which on the message is followed."""
        return self._since if self.row is not None else rows[0].event

    def _with_marks(self, rows: Sequence[TimelineRow], marks: Sequence[TimelineRow]) -> Iterator[TimelineRow]:
        later = marks[bisect_right(marks, self._first(rows), key=_event) :]
        # Marks first: a queue that is found not recovered at an event was so before it.
        return merge(later, rows, key=_event)

    def apply(self, row: TimelineRow) -> None:
        match row.code:
            case EventCode.ACCEPTED:
                of_message = (row.sequence, row.number, row.persistent, row.visible_event, row.visible_at)
                self.row = MessageRow(*of_message, row.detail_code, arrival=row.event)
            case EventCode.REPORTED:
                if self.end_code == EventCode.DEAD_LETTERED:
                    self.end_code = EventCode.REPORTED
            case code if code in ENDS:
                self.row, self.end_code = None, code
            case code if code in MARKS:
                if self.row is not None:
                    self.row = self._after_mark(self.row, row)
            case _ if not self.end_code:
                self._apply_to_present(row)

    # ---- Events of a message that has not ended ----

    def _apply_to_present(self, row: TimelineRow) -> None:
        message = self.row
        if row.code == EventCode.DISPATCHED:
            if message is None and row.number:
                # The message had ended before the saved cut.
                self.end_code = row.number
                return
            if message is None:
                message = self.row = MessageRow(self.sequence, UNKNOWN_PRIORITY, False, 0, row.at)
                message.has_known_attempts = False
            self._dispatch(message, row)
        elif message is None:
            return
        elif row.code == EventCode.STARTED:
            message.is_started |= message.state is HELD and message.consumer == row.consumer
        else:
            self._return(message, row)

    def _dispatch(self, message: MessageRow, row: TimelineRow) -> None:
        _set_state(message, HELD)
        message.consumer, message.subscription, message.dispatched_at = row.consumer, row.event, row.at
        message.deliveries += 1
        if not message.delivery and message.priority >= 0:
            self.delivery = message.delivery = row.event
            is_later = message.visible_event <= row.event and row.at > message.visible_at
            message.wait = row.at - message.visible_at if is_later else 0

    @staticmethod
    def _return(message: MessageRow, row: TimelineRow) -> None:
        """Apply a return, at once or after a delay."""
        message.attempts, message.has_known_attempts = row.number, True
        message.has_cause |= bool(row.detail_code & HAS_CAUSE)
        is_delayed = row.code != EventCode.RETURNED
        if message.state is WAITING and not is_delayed:
            return
        if message.priority < 0:
            _set_state(message, DOUBTFUL)
        elif is_delayed:
            _set_state(message, DELAYED)
            message.is_blocking = row.code == EventCode.BLOCKING and not message.group
        else:
            _set_state(message, WAITING)
            if message.visible_event > row.event:
                message.visible_event, message.visible_at = row.event, row.at

    # ---- What applies to all messages of a queue ----

    def _after_mark(self, message: MessageRow, mark: TimelineRow) -> MessageRow | None:
        if mark.code == EventCode.RUN_STARTED:
            return self._after_start(message, mark)
        if mark.code == EventCode.GAP:
            message.has_known_attempts = False
            if message.state is not UNCERTAIN:
                _set_state(message, DOUBTFUL)
        elif mark.code == EventCode.NOT_RECOVERED:
            if message.state in (WAITING, ENDED):
                _set_state(message, UNCERTAIN)
        elif message.is_expiring:
            # A later subscription of the name is drained, or ends.
            pass
        elif mark.code == EventCode.DRAINED:
            if message.state is WAITING and message.visible_event <= mark.event:
                _set_state(message, UNCERTAIN)
        else:
            message.is_expiring, self.end_code = True, EventCode.ENDED
            if message.state in (WAITING, HELD, DELAYED):
                _set_state(message, ENDED)
        return message

    def _after_start(self, message: MessageRow, start: TimelineRow) -> MessageRow | None:
        if not start.number & StartFlag.CONTINUED:
            return None
        if message.priority < 0:
            _set_state(message, DOUBTFUL)
        elif not message.is_persistent and not start.number & StartFlag.CLEAN:
            self.end_code = EventCode.RUN_STARTED
            return None
        elif message.state is UNCERTAIN or message.visible_event > start.event:
            _set_state(message, UNCERTAIN)
        elif message.state is not DOUBTFUL or message.is_persistent:
            _set_state(message, ENDED if message.is_expiring else WAITING)
        return message


def is_continued(start: TimelineRow) -> bool:
    """Return whether a row is the start of a run whose run before is in the history."""
    return start.code == EventCode.RUN_STARTED and bool(start.number & StartFlag.CONTINUED)


def _event(row: TimelineRow) -> int:
    return row.event


def _set_state(message: MessageRow, state: MessageState) -> None:
    """Set a state, and what only messages in other states have."""
    message.state = state
    message.subscription = message.dispatched_at = 0
    message.is_started = message.is_blocking = False
