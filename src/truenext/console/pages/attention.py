"""What wants an operator's attention, from the answers of the broker and the reports of processes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET

from truenext.console.formats import format_bytes, format_count, format_duration
from truenext.console.pages.links import address, queue_link
from truenext.console.pages.overview import Attention
from truenext.model.control_answers import QueueReport, StatusReport
from truenext.model.database import AWAITED_TEXTS
from truenext.model.destination import SPARK_PREFIX
from truenext.model.numerals import count_noun
from truenext.model.seen_processes import SeenProcess

ATTENTION_MAX = 50
"""Largest number of things that the overview shows."""
KIND_MAX = 8
"""Largest number of queues, of dead-letter queues and of processes that are shown, so that none hides the others."""
OLD_S, VERY_OLD_S = 300.0, 3600.0
"""Ages of the oldest message of a queue, and times for which one is held, that are worth a warning, and worse."""
_LEVELS = ("bad", "warn", "")
NO_CONSUMER_S = 60.0
"""Age of the oldest message of a queue without consumers that is worth attention."""
AGAIN_MIN = 2
"""Number of repeated failures within ten minutes that is worth a warning. With the longest delay of the default policy,
5 minutes, one message makes as many."""
OUTBOX_OLD_S = 60.0


_DISK_EFFECTS = {
    "little": ("Space for new messages is short", "Connections that only send wait or are refused."),
    "none": (
        "There is no space for new messages",
        "Sends are refused, except in transactions that free as much as they send.",
    ),
    "full": ("The disk is full", "All sends are refused."),
}


class Judgement(NamedTuple):
    """Judgement of a queue."""

    level: str = ""
    """`bad`, `warn` or ""."""
    why: str = ""
    """Reason."""
    subject: str = ""
    """Figure that decides: `oldest` or `held`; "" without a reason."""
    age_s: float = 0.0
    """Value of this figure."""


_GOOD = Judgement()


def judge_queue(report: QueueReport) -> Judgement:
    """Return the worse judgement of what waits in a queue, and of what consumers hold; of equal ones that with the
    larger age.

    >>> judge_queue(QueueReport("a", 3, 0, 0, 0, False, oldest_s=70.0)).why
    'nothing consumes, and a message has waited for 1 min 10 s'
    >>> judge_queue(QueueReport("a", 0, 3, 1, 0, False, held_s=1200.0))[:3]
    ('warn', 'a consumer has held a message for 20 min 0 s', 'held')
    """
    if report.name.startswith(SPARK_PREFIX):
        # Bundles wait, and queries hold messages, for long on purpose.
        return _GOOD
    judged = _judge_waiting(report), _judge_held(report)
    return min(judged, key=lambda each: (_LEVELS.index(each.level), -each.age_s))


def _judge_held(report: QueueReport) -> Judgement:
    held_s = report.held_s or 0.0
    if held_s < OLD_S:
        return _GOOD
    level = "bad" if held_s >= VERY_OLD_S else "warn"
    return Judgement(level, f"a consumer has held a message for {format_duration(held_s)}", "held", held_s)


def _judge_waiting(report: QueueReport) -> Judgement:
    if report.dead_letters or not report.waiting:
        # Dead letters wait for ever on purpose.
        return _GOOD
    age = report.oldest_s or 0.0
    if report.paused:
        return Judgement("warn", "paused", "oldest", age)
    if not report.consumers and report.topic is UNSET and age >= NO_CONSUMER_S:
        return Judgement("bad", f"nothing consumes, and a message has waited for {format_duration(age)}", "oldest", age)
    if age >= OLD_S:
        level = "bad" if age >= VERY_OLD_S else "warn"
        return Judgement(level, f"the oldest message has waited for {format_duration(age)}", "oldest", age)
    return _GOOD


def find_attention(
    status: StatusReport | None,
    queues: Iterable[QueueReport],
    dead_letters: Iterable[QueueReport],
    growth: Mapping[str, float],
    failures: Mapping[str, int],
    processes: Sequence[SeenProcess],
    given_up: int,
    unasked: str = "",
) -> list[Attention]:
    """Return what wants attention, the worst first. `growth` is by how much each dead-letter queue has grown within
    ten minutes, `failures` how often messages of each queue have failed again within them, `given_up` the number of
    flows that were given up within an hour, `unasked` the reason why processes are not asked."""
    found = [
        *_of_broker(status),
        *_of_unasked(processes, unasked),
        *_shorten(_of_processes(processes), "process", "/stages"),
        *_shorten(_of_dead_letters(dead_letters, growth), "dead-letter queue", "/dead-letters"),
        *_shorten(_of_queues(queues), "queue", address("/queues", order="oldest")),
        *_shorten(_of_failures(failures), "queue whose messages fail again", address("/queues", order="failing")),
        *_of_flows(given_up),
    ]
    return sorted(found, key=_is_less_urgent)


def _is_less_urgent(found: Attention) -> bool:
    return found.level != "bad"


def _shorten(found: Iterable[Attention], noun: str, link: str) -> list[Attention]:
    """Return the first things of one kind, the worst first, and one for all others.

    >>> [each.what for each in _shorten([Attention(level="bad", what=str(each)) for each in range(10)], "queue", "")]
    ['0', '1', '2', '3', '4', '5', '6', '7', '2 more queues']
    """
    ordered = sorted(found, key=_is_less_urgent)
    shown, others = ordered[:KIND_MAX], ordered[KIND_MAX:]
    if others:
        number, _, plural = count_noun(len(others), noun).partition(" ")
        shown.append(Attention(level=others[0].level, what=f"{number} more {plural}", link=link, action="Show all"))
    return shown


def _of_broker(status: StatusReport | None) -> Iterator[Attention]:
    if status is None:
        return
    for stuck in status.stuck:
        yield Attention(
            level="bad",
            what=f"{stuck.queue} is stuck for {format_duration(stuck.waiting_ms / 1000)}",
            why="A message is ready and a consumer has credit, but nothing is dispatched. This is a fault of the "
            "broker: pause and resume the queue, and report it.",
            link=queue_link(stuck.queue),
            action="Show the queue",
        )
    if status.disk_level in _DISK_EFFECTS:
        what, effect = _DISK_EFFECTS[status.disk_level]
        free = status.disk_bytes.get("free")
        space = "" if free is None else f": {format_bytes(free)} are free"
        yield Attention(
            level="bad",
            what=f"{what}{space}",
            why=effect,
            link=address("/queues", order="waiting"),
            action="Show the longest queues",
        )
    if status.log is not UNSET and status.log.awaited is not None:
        waits_for = AWAITED_TEXTS.get(status.log.awaited, status.log.awaited)
        yield Attention(level="bad", what=f"The broker waits for {waits_for}", why="Nothing is confirmed meanwhile.")
    if not status.ready:
        yield Attention(
            level="warn", what="The broker is being drained", why="New clients may only send control requests."
        )


def _of_unasked(processes: Sequence[SeenProcess], why: str) -> Iterator[Attention]:
    """Yield that processes are not asked, so that they are shown as they were."""
    if why:
        age_s = min((each.seen_s for each in processes), default=None)
        last = "" if age_s is None else f"; the last answer came {age_s:,.0f} s ago"
        what = "Processes of stages are not known"
        yield Attention(level="warn", what=what, why=f"{why}{last}", link="/stages", action="Show")


def _of_queues(queues: Iterable[QueueReport]) -> Iterator[Attention]:
    for report in queues:
        judged = judge_queue(report)
        # A queue that was just paused is no news.
        if judged.level and judged.age_s >= NO_CONSUMER_S:
            yield Attention(
                level=judged.level,
                what=f"{report.name}: {judged.why}",
                why=f"Waiting: {format_count(report.waiting)}. Held: {format_count(report.unacknowledged)}. Consumers: "
                f"{format_count(report.consumers)}.",
                link=queue_link(report.name),
                action="Show the queue",
            )


def _of_failures(failures: Mapping[str, int]) -> Iterator[Attention]:
    for name, count in sorted(failures.items(), key=lambda item: -item[1]):
        if count >= AGAIN_MIN:
            yield Attention(
                level="warn",
                what=f"{name}: messages fail again and again",
                why=f"{format_count(count)} repeated failures within ten minutes.",
                link=queue_link(name),
                action="Show the queue",
            )


def _of_dead_letters(queues: Iterable[QueueReport], growth: Mapping[str, float]) -> Iterator[Attention]:
    for report in queues:
        if report.waiting:
            more = growth.get(report.name, 0)
            yield Attention(
                level="bad" if more > 0 else "warn",
                what=f"{report.name} has {count_noun(report.waiting, 'message')}",
                why=f"{format_count(round(more))} more within ten minutes." if more > 0 else "",
                link=address("/dead-letters", queue=report.name),
                action="Show the causes",
            )


def _of_processes(processes: Iterable[SeenProcess]) -> Iterator[Attention]:
    for process in processes:
        report = process.report
        if process.state == "silent":
            yield Attention(
                level="bad",
                what=f"Process {report.instance} is silent for {format_duration(process.seen_s)}",
                why="It was killed, hangs, or has lost the broker.",
                link="/stages",
                action="Show the processes",
            )
        elif process.state == "answers" and not report.health.ready:
            yield Attention(
                level="warn",
                what=f"Process {report.instance} is not ready",
                why="; ".join(report.health.reasons[:3]),
                link="/stages",
                action="Show the processes",
            )
    # All processes of a service tell of the same outbox.
    outboxes = {each.report.service: each.report.outbox for each in processes if each.state == "answers"}
    for service, outbox in outboxes.items():
        if outbox is not None and (outbox.oldest_s or 0.0) >= OUTBOX_OLD_S:
            yield Attention(
                level="bad",
                what=f"The outbox of {service} is {format_duration(outbox.oldest_s)} behind",
                why=f"{format_count(outbox.unsent)} messages are committed in the database, and not sent yet.",
                link="/stages",
                action="Show the outbox",
            )


def _of_flows(given_up: int) -> Iterator[Attention]:
    if given_up:
        yield Attention(
            level="warn",
            what=f"{count_noun(given_up, 'flow')} were given up within the last hour"
            if given_up > 1
            else "1 flow was given up within the last hour",
            link=address("/flows", order="given-up"),
            action="Show the flows",
        )
