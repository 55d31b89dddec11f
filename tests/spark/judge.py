"""A naive judge of histories, after docs/contract.md and docs/reference/history.md alone.

It keeps no state: before each event it reads the whole history up to it again, and answers every question by looking at
every message. Where the two pages leave a choice, the judge makes it here:

- An event number that is missing makes every message before it doubtful: neither evidence nor an offence, until a
  `returned` puts it in its place or a start does (persistent ones: what ends them is as durable as they are).
- A run that is missing makes everything before it unknown.
- A message that was accepted, and whose commit the history lacks, exists after the next start only if it is mentioned
  again.
- A message that was found lost may turn up again.
- A start finds the messages that were in a queue when it ended until they expire; they are evidence for nothing.
- A message with a group may have been another consumer's: it is evidence for messages of its group only, and waits for
  its next try for those alone. While it is being committed, it is unknown for which consumers its equals behind
  it are ready.
- A message that a consumer with a selector gets, or leaves, is no evidence; nor is one of a consumer that takes from
  other queues as well, which the history does not tell apart. The pull requests of such a consumer are known once the
  history has recorded them.
- The use of a window is known only if the client reports started messages: a message acknowledged inside a transaction
  is in no window any more, and the history does not record that for other clients. Express dispatches go beyond a
  window. A consumer with a selector may take from other queues, so that the changes of its window are not recorded.
- All consumers are known from a start on, until an event is missing. After that an unknown exclusive consumer may
  exist: that some consumer is free is known again once a consumer that is not exclusive has got a message.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

Event = dict[str, Any]


@dataclass
class Letter:
    """State of a message, as far as the history up to some event tells."""

    sequence: int
    priority: int | None
    persistent: bool | None
    visible: bool
    where: str
    """`waiting`, `held`, `doubtful`, `uncertain`, `gone`; `delayed` or `blocking` until its next try"""
    holder: int | None = None
    group: int | None = None
    is_ended: bool = False
    """True if its durable subscription has ended; `where` then tells what a start finds of it."""
    dispatched: int = 0
    """Event of the last dispatch."""
    started: bool = False
    """True if that dispatch was started."""
    attempts: int | None = None
    attempts_least: int = 0
    """Attempts by the last return, even if later events are missing."""
    has_cause: bool = False
    was_held: bool = False
    """True if the message was returned, so that it is visible."""

    @property
    def key(self) -> tuple[int, int]:
        assert self.priority is not None
        return (9 - self.priority, self.sequence)


@dataclass
class Receiver:
    """State of a consumer, as far as the history up to some event tells."""

    since: int
    mode: str
    window: int
    requested: int | None = None
    is_suspended: bool = False
    priority: int = 0
    """Priority of an exclusive consumer."""
    has_got: bool = False
    ended: int | None = None
    """Event of the end."""

    def has(self, word: str) -> bool:
        return word in self.mode.split()

    @property
    def names_started(self) -> bool:
        return self.has("started") and not self.has("auto")

    @property
    def is_exact(self) -> bool:
        return self.names_started and not (self.has("express") or self.has("pulling") or self.has("selector"))


class Judge:
    def __init__(self, events: list[Event], stuck_seconds: float) -> None:
        self.events = sorted(events, key=lambda each: each["event"])
        self.limit = stuck_seconds
        self.found: Counter[tuple[str, str]] = Counter()
        """(kind, queue): dispatches, messages or times"""
        self.witnesses: set[tuple[str, str, int, int | None]] = set()
        """(kind, queue, event, overtaken sequence)"""
        self.runs = sorted({each["run"] for each in events})

    def judge(self) -> Judge:
        for queue in sorted({each["queue"] for each in self.events if each.get("queue")}):
            self._judge_queue(queue)
        return self

    # What is visible when

    def _visible_from(self, accepted: Event) -> int | None:
        if not accepted["batch"]:
            return int(accepted["event"])
        for each in self.events:
            if each["kind"] == "committed" and each["run"] == accepted["run"] and each["batch"] >= accepted["batch"]:
                return int(each["event"])
        for start in self.events:
            if start["kind"] == "run-started" and start["run"] > accepted["run"]:
                again = any(
                    each.get("sequence") == accepted["sequence"] and each["kind"] != "accepted"
                    for each in self.events
                    if each["event"] > start["event"]
                )
                return int(start["event"]) if again else None
        return None

    # What stands where, before an event

    def _letters(self, queue: str, before: int) -> dict[int, Letter]:
        letters: dict[int, Letter] = {}
        previous: int | None = None
        for each in [*self.events, {"event": before, "kind": "now", "run": None}]:
            number = each["event"]
            if number > before:
                break
            if previous is not None and number - previous > 1:
                for letter in letters.values():
                    letter.attempts = None
                    if letter.where in ("waiting", "held", "delayed", "blocking"):
                        letter.where = "doubtful"
            previous = number
            for letter in letters.values():
                seen = self.visible_from.get(letter.sequence)
                letter.visible = letter.was_held or (
                    seen is not None and (seen < number if number == before else seen <= number)
                )
            if number in self.lost_before:
                self._all_perhaps(letters)
            if number == before:
                break
            if each["kind"] == "run-started":
                self._start(each, letters)
            if each.get("queue") == queue:
                self._step(each, letters)
        return letters

    def _start(self, start: Event, letters: dict[int, Letter]) -> None:
        if start["run"] - 1 not in self.runs:
            # Its older letters are unknown; what is gone stays gone.
            for letter in list(letters.values()):
                if letter.is_ended:
                    letter.where = "gone" if letter.where == "gone" else "unknown"
                elif letter.where != "gone":
                    del letters[letter.sequence]
            return
        for letter in letters.values():
            if letter.where in ("gone", "unknown"):
                continue
            if letter.priority is None:
                letter.where = "doubtful"
            elif not letter.persistent and start["reason"] == "unclean":
                letter.where = "gone"
            elif not letter.visible:
                letter.where = "uncertain"
            elif letter.where in ("waiting", "held", "delayed", "blocking") or (
                letter.where == "doubtful" and letter.persistent
            ):
                letter.where = "waiting"

    def _step(self, each: Event, letters: dict[int, Letter]) -> None:
        kind, sequence = each["kind"], each.get("sequence")
        letter = letters.get(sequence) if sequence is not None else None
        if kind == "accepted":
            seen = self.visible_from[each["sequence"]]
            visible = seen is not None and seen <= each["event"]
            letters[each["sequence"]] = Letter(
                *(each["sequence"], each["priority"], each["persistent"], visible, "waiting"),
                group=each.get("group"),
                attempts=0,
            )
        elif kind == "dispatched":
            if letter is None:
                letter = letters[each["sequence"]] = Letter(each["sequence"], None, None, True, "held")
            if letter.where != "gone" and not letter.is_ended:
                letter.where, letter.holder = "held", each["consumer"]
                letter.dispatched, letter.started = each["event"], False
        elif kind == "started":
            if letter is not None and letter.where == "held" and letter.holder == each["consumer"]:
                letter.started = True
        elif kind in ("acknowledged", "expired", "dead-lettered", "handled", "moved", "removed"):
            if letter is None:
                letter = letters[each["sequence"]] = Letter(each["sequence"], None, None, True, "gone")
            letter.where = "gone"
        elif kind == "returned":
            if letter is not None and letter.where != "gone" and not letter.is_ended:
                # "nacked and delayed", "delayed"
                last = each["reason"].rpartition(" ")[2]
                where = last if last in ("delayed", "blocking") else "waiting"
                # A consumer had it, so it was visible, also if a gap hides the commit.
                if where == "waiting" and letter.where != "waiting":
                    letter.was_held = True
                letter.where = "doubtful" if letter.priority is None else where
                letter.attempts = letter.attempts_least = each["attempts"]
                letter.has_cause |= each.get("cause") is not None
        elif kind == "drained":
            for each_letter in self._present(letters).values():
                if each_letter.where == "waiting" and each_letter.visible:
                    each_letter.where = "uncertain"
        elif kind == "ended":
            for each_letter in self._present(letters).values():
                each_letter.is_ended = True
                if each_letter.where in ("held", "delayed", "blocking"):
                    each_letter.where = "waiting"
        elif kind == "recovered" and each["event"] in self.lost_at:
            self._all_perhaps(letters)

    @staticmethod
    def _present(letters: dict[int, Letter]) -> dict[int, Letter]:
        """Return the messages in the queue: not gone, and not of a queue that has ended."""
        return {
            sequence: letter for sequence, letter in letters.items() if letter.where != "gone" and not letter.is_ended
        }

    def _all_perhaps(self, letters: dict[int, Letter]) -> None:
        for letter in letters.values():
            if letter.where == "waiting":
                letter.where = "uncertain"

    @staticmethod
    def ready(letters: dict[int, Letter]) -> list[Letter]:
        """Return the ready messages, by C3.3 and C3.5: visible, not held, and no earlier one of equal priority is
        still being committed."""
        waiting = [each for each in letters.values() if each.where == "waiting"]
        first_blocking = min((each.key for each in letters.values() if each.where == "blocking"), default=(10, 0))
        return [
            each
            for each in waiting
            if each.visible
            and each.key < first_blocking
            and not any(
                other.priority == each.priority and other.sequence < each.sequence and not other.visible
                for other in waiting
            )
        ]

    # What is wrong at an event

    def _judge_queue(self, queue: str) -> None:
        self.visible_from = {
            each["sequence"]: self._visible_from(each) for each in self.events if each["kind"] == "accepted"
        }
        self.lost_at: set[int] = set()
        self.lost_before: set[int] = set()
        for each in self.events:
            if each["kind"] == "run-started":
                self._recovery(queue, each)
            if each.get("queue") != queue:
                continue
            if each["kind"] == "dispatched":
                self._dispatch(queue, each)
            elif each["kind"] == "drained":
                lost = [
                    letter
                    for letter in self._present(self._letters(queue, each["event"])).values()
                    if letter.where == "waiting" and letter.visible
                ]
                self.found["lost", queue] += len(lost)
            elif each["kind"] == "reported":
                self._report(queue, each)
            elif each["kind"] in ("acknowledged", "dead-lettered", "handled", "moved", "removed"):
                letter = self._letters(queue, each["event"]).get(each["sequence"])
                if letter is not None and letter.is_ended and letter.where != "gone":
                    self._find("duplicate", queue, each)
                elif letter is not None and each["kind"] == "acknowledged":
                    self._acknowledgement(queue, each, letter)
                elif each["kind"] in ("dead-lettered", "handled") and self._forgets(each, letter):
                    self._find("lost-failure", queue, each)
            elif each["kind"] == "started":
                self._on_started(queue, each)
            elif each["kind"] == "returned":
                self._return(queue, each)
        self._stuck(queue)
        self.found = +self.found

    def _report(self, queue: str, each: Event) -> None:
        """C11.7: a dead letter sends one report, and nothing else sends any."""
        ends = ("acknowledged", "expired", "dead-lettered", "handled", "moved", "removed")
        kinds = [
            one["kind"]
            for one in self.events
            if one["event"] < each["event"] and (one.get("queue"), one.get("sequence")) == (queue, each["sequence"])
        ]
        of_end = [at for at, kind in enumerate(kinds) if kind in ends]
        letter = self._letters(queue, each["event"]).get(each["sequence"])
        if of_end:
            is_wrong = kinds[of_end[-1]] != "dead-lettered" or "reported" in kinds[of_end[-1] :]
        else:
            is_wrong = letter is not None and letter.where in ("waiting", "held", "delayed", "blocking")
        if is_wrong:
            self._find("duplicate", queue, each)

    @staticmethod
    def _forgets(each: Event, letter: Letter | None) -> bool:
        """True if the event names no cause although a consumer has failed with the message and given one."""
        return each.get("cause") is None and letter is not None and letter.where != "gone" and letter.has_cause

    def _dispatch(self, queue: str, each: Event) -> None:
        if self._is_paused(queue, self.events.index(each)):
            self._find("premature", queue, each)
        letters = self._letters(queue, each["event"])
        letter = letters.get(each["sequence"])
        receivers, are_all = self._receivers(queue, each["event"])
        receiver = receivers.get(each["consumer"])
        if receiver is None or receiver.ended:
            receiver = None
            if are_all:
                self._find("stale", queue, each)
        elif self._exclusive(receivers) not in (None, each["consumer"]) or not self._has_credit(
            receiver, each["consumer"], self._present(letters)
        ):
            self._find("uncredited", queue, each)
        if letter is None:
            return
        if letter.where == "gone" or letter.is_ended:
            self._find("duplicate", queue, each)
            return
        letters = self._present(letters)
        if letter.priority is not None and not (receiver is not None and receiver.has("selector")):
            for group in dict.fromkeys([None, letter.group]):
                if self._overtakes(letter, self._of_group(letters, group), letters, queue, each):
                    break
        if letter.where == "held":
            self._find("duplicate", queue, each)
        if letter.where in ("delayed", "blocking") or (letter.where == "waiting" and not letter.visible):
            self._find("premature", queue, each)

    def _receivers(self, queue: str, before: int) -> tuple[dict[int, Receiver], bool]:
        """Return the consumers that were subscribed before an event, and whether these are all there are."""
        receivers: dict[int, Receiver] = {}
        are_all = False
        previous: int | None = None
        for each in [*self.events, {"event": before, "kind": "now"}]:
            number = each["event"]
            if number > before:
                break
            if previous is not None and number - previous > 1:
                receivers, are_all = {}, False
            previous = number
            if number == before:
                break
            if each["kind"] == "run-started":
                receivers, are_all = {}, True
            if each.get("queue") != queue:
                continue
            receiver = receivers.get(each.get("consumer") or 0)
            if each["kind"] == "subscribed":
                # `auto`: with something unsent its connection may have no room.
                window = 1 if each["window"] is None else each["window"]
                receiver = receivers[each["consumer"]] = Receiver(number, each["mode"], window)
                if receiver.has("pulling") and not receiver.has("selector"):
                    receiver.requested = 0
                receiver.priority = each["priority"] or 0
            elif receiver is None or receiver.ended:
                continue
            elif each["kind"] == "unsubscribed":
                receiver.ended = number
            elif each["kind"] == "window":
                receiver.window = 1 if each["window"] is None else each["window"]
                receiver.is_suspended = each["window"] == 0
            elif each["kind"] == "requested":
                receiver.requested = each["count"]
            elif each["kind"] == "dispatched":
                receiver.has_got = True
                if receiver.requested is not None:
                    receiver.requested -= 1
        return receivers, are_all

    @staticmethod
    def _exclusive(receivers: dict[int, Receiver]) -> int | None:
        """Return the known exclusive consumer that owns the queue."""
        exclusive = {
            number: receiver
            for number, receiver in receivers.items()
            if receiver.has("exclusive") and receiver.ended is None
        }
        return min(exclusive, key=lambda number: (-exclusive[number].priority, number), default=None)

    @staticmethod
    def _has_credit(receiver: Receiver, consumer: int, letters: dict[int, Letter]) -> bool:
        """True if the consumer has credit, or if its credit is not known."""
        unstarted = [
            letter
            for letter in letters.values()
            if letter.where == "held"
            and letter.holder == consumer
            and letter.dispatched > receiver.since
            and not letter.started
        ]
        is_full = receiver.is_exact and len(unstarted) >= receiver.window
        return not (is_full or receiver.is_suspended or (receiver.requested is not None and receiver.requested <= 0))

    def _holder(self, queue: str, each: Event, letter: Letter) -> Receiver | None:
        """Return the holder of a message, if it is known and was subscribed at the dispatch."""
        receiver = self._receivers(queue, each["event"])[0].get(letter.holder or 0)
        if letter.where != "held" or receiver is None:
            return None
        return receiver if receiver.since < letter.dispatched < (receiver.ended or letter.dispatched + 1) else None

    def _acknowledgement(self, queue: str, each: Event, letter: Letter) -> None:
        if letter.where in ("waiting", "delayed", "blocking"):
            self._find("stale", queue, each)
        receiver = self._holder(queue, each, letter)
        if receiver is not None and receiver.ended and receiver.names_started and not letter.started:
            self._find("stale", queue, each)

    def _on_started(self, queue: str, each: Event) -> None:
        letter = self._letters(queue, each["event"]).get(each["sequence"])
        receivers, are_all = self._receivers(queue, each["event"])
        receiver = receivers.get(each["consumer"])
        is_there = receiver is not None and not receiver.ended
        if letter is not None and letter.where == "held" and not letter.is_ended and letter.holder == each["consumer"]:
            was_there = self._holder(queue, each, letter) is not None
            if not letter.started and was_there and not is_there:
                self._find("stale", queue, each)
        elif (are_all and not is_there) or (
            letter is not None
            and (letter.is_ended or letter.where in ("gone", "waiting", "held", "delayed", "blocking"))
        ):
            self._find("stale", queue, each)

    def _return(self, queue: str, each: Event) -> None:
        letter = self._letters(queue, each["event"]).get(each["sequence"])
        if letter is None or letter.where == "gone" or letter.is_ended:
            return
        if each["attempts"] < letter.attempts_least:
            self._find("lost-failure", queue, each)
        reason = each["reason"].partition(" ")[0]
        if reason == "released" and letter.attempts is not None and each["attempts"] > letter.attempts:
            self._find("miscount", queue, each)
        receiver = self._holder(queue, each, letter)
        if reason in ("lost", "aborted") and receiver is not None and receiver.names_started and not letter.started:
            self._find("miscount", queue, each)

    @staticmethod
    def _of_group(letters: dict[int, Letter], group: int | None) -> dict[int, Letter]:
        """Return the messages that are evidence for a group, or for all (None)."""
        some = {sequence: letter for sequence, letter in letters.items() if letter.group == group}
        if group is None:
            return some
        return {
            sequence: replace(letter, where="blocking" if letter.where == "delayed" else letter.where)
            for sequence, letter in some.items()
        }

    def _overtakes(
        self, letter: Letter, letters: dict[int, Letter], all_letters: dict[int, Letter], queue: str, each: Event
    ) -> bool:
        """`letters` are the evidence."""
        assert letter.priority is not None
        # A gap leaves in doubt whether one of them was dispatched, and not that it holds back its equals until then.
        committing = [
            other for other in all_letters.values() if other.where in ("waiting", "doubtful") and not other.visible
        ]
        ready = [
            other
            for other in self.ready(letters)
            if other.sequence != letter.sequence
            and not any(one.priority == other.priority and one.sequence < other.sequence for one in committing)
        ]
        above = [other for other in ready if other.priority is not None and other.priority > letter.priority]
        equals = [
            other
            for other in letters.values()
            if other.where == "waiting" and other.priority == letter.priority and other.sequence < letter.sequence
        ]
        blocking = [other for other in letters.values() if other.where == "blocking" and other.key < letter.key]
        if blocking:
            first = min(blocking, key=lambda other: other.key)
            self._find("order" if first.priority == letter.priority else "inversion", queue, each, first.sequence)
        elif above:
            self._find("inversion", queue, each, min(above, key=lambda other: other.key).sequence)
        elif equals:
            self._find("order", queue, each, min(equals, key=lambda other: other.key).sequence)
        return bool(blocking or above or equals)

    def _find(self, kind: str, queue: str, each: Event, overtaken: int | None = None) -> None:
        self.found[kind, queue] += 1
        self.witnesses.add((kind, queue, each["event"], overtaken))

    def _recovery(self, queue: str, start: Event) -> None:
        if start["run"] - 1 not in self.runs:
            return
        after = [each for each in self.events if each["run"] == start["run"] and each["event"] > start["event"]]
        own = [each for each in after if each.get("queue") == queue]
        recovered = next((each for each in own if each["kind"] == "recovered"), None)
        continues = any(each["kind"] != "recovered" for each in after)
        # A gap may have swallowed the row, or what came between.
        until = recovered or (own[0] if own else None)
        last = until["event"] if until else max(each["event"] for each in self.events)
        next_start = next(
            (each["event"] for each in self.events if each["kind"] == "run-started" and each["event"] > start["event"]),
            None,
        )
        if until is None and next_start is not None:
            last = next_start
        numbers = {each["event"] for each in self.events}
        if any(number not in numbers for number in range(start["event"], last)):
            return
        if recovered is None and not continues:
            return
        letters = self._letters(queue, start["event"])
        # `_letters` stops before the start.
        self._start(start, self._seen(letters, start["event"]))
        certain = [each for each in letters.values() if each.where == "waiting"]
        perhaps = [each for each in letters.values() if each.where in ("doubtful", "uncertain")]
        count = recovered["count"] if recovered else 0
        if count < len(certain):
            self.found["lost", queue] += len(certain) - count
            if recovered:
                self.lost_at.add(recovered["event"])
            elif own or next_start is not None:
                self.lost_before.add(last)
        whole = self.events[0]["event"] == 1 and all(run in self.runs for run in range(self.runs[0], start["run"]))
        if recovered and whole and count > len(certain) + len(perhaps):
            self.found["resurrected", queue] += count - len(certain) - len(perhaps)

    def _seen(self, letters: dict[int, Letter], number: int) -> dict[int, Letter]:
        for letter in letters.values():
            seen = self.visible_from.get(letter.sequence)
            letter.visible = letter.was_held or (seen is not None and seen <= number)
        return letters

    def _stuck(self, queue: str) -> None:
        """Find times in which the queue is stuck. Nothing changes between two events, so the state after each event
        holds until the next one."""
        since: float | None = None
        numbers = [each["event"] for each in self.events]
        for index, each in enumerate(self.events):
            now = each["at"].timestamp()
            is_gap = index > 0 and numbers[index] - numbers[index - 1] > 1
            if is_gap:
                since = None
            if since is not None:
                ended = each.get("queue") == queue and each["kind"] == "dispatched"
                stop = now
                if each["kind"] == "run-started":
                    ended, stop = True, self.events[index - 1]["at"].timestamp()
                if not ended and not self._could(queue, index):
                    ended = True
                if ended:
                    self._report_stuck(queue, since, stop)
                    since = None
            if since is None and self._could(queue, index):
                since = now
        if since is not None:
            self._report_stuck(queue, since, self.events[-1]["at"].timestamp())

    def _report_stuck(self, queue: str, since: float, until: float) -> None:
        if round(until - since, 6) > self.limit:
            self.found["stuck", queue] += 1

    def _is_paused(self, queue: str, index: int) -> bool:
        """True if the queue is paused after this event, as far as the history tells: a start records paused queues
        again, and a gap hides pauses."""
        is_paused = False
        previous = None
        for each in self.events[: index + 1]:
            if each["kind"] == "run-started" or (previous is not None and each["event"] - previous > 1):
                is_paused = False
            previous = each["event"]
            if each.get("queue") == queue and each["kind"] in ("paused", "resumed"):
                is_paused = each["kind"] == "paused"
        return is_paused

    def _could(self, queue: str, index: int) -> bool:
        """True if after this event a message is ready and a consumer is free."""
        letters = self._present(self._letters_after(queue, index))
        if not self.ready(self._of_group(letters, None)) or self._is_paused(queue, index):
            return False
        # Directly behind it: a number that is missing there says nothing yet.
        number = self.events[index]["event"] + 1
        kept, self.events = self.events, self.events[: index + 1]
        receivers, are_all = self._receivers(queue, number)
        self.events = kept
        if not are_all and not any(
            receiver.has_got and not receiver.has("exclusive") for receiver in receivers.values()
        ):
            return False
        owner = self._exclusive(receivers)
        held = Counter(letter.holder for letter in letters.values() if letter.where == "held")
        return any(
            (receiver.requested or 0) > 0 if receiver.has("pulling") else held[consumer] < receiver.window
            for consumer, receiver in receivers.items()
            if not (receiver.ended or receiver.has("selector")) and owner in (None, consumer)
        )

    def _letters_after(self, queue: str, index: int) -> dict[int, Letter]:
        """Return the messages directly after this event. A later gap of event numbers does not count yet."""
        kept = self.events
        self.events = kept[: index + 1]
        try:
            return self._letters(queue, kept[index]["event"] + 1)
        finally:
            self.events = kept
