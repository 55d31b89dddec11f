"""Views and actions with which an operator changes something: first what would happen, then the work and its progress.

The selection is the same for the page that asks and for the form that acts: the parameters below.

    verb        redrive, move, purge, unschedule or close
    queue       queue of the messages, or to which scheduled sends go
    sequence    chosen messages; may be repeated
    origin, reason, cause    group of dead letters
    selector    messages that match it
    to          target of a move; or destination of scheduled sends that go to no single queue
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from truenext.console.pages.links import address, queue_link
from truenext.console.pages.work import Action, Progress
from truenext.console.views.queues import ask_queue
from truenext.console.visit import InvalidRequest, NotAllowed, NotFound, Visit
from truenext.console.work import WORK_MAX, Selection, Totals, Work, preview
from truenext.errors import TruenextError
from truenext.model.destination import SPARK_PREFIX, parse_queue_name
from truenext.model.grants import Right
from truenext.model.left_messages import LEFT_TEXTS
from truenext.model.numerals import count_noun

GROUP_FIELDS = ("origin", "reason", "cause")
WORK_VERBS = ("redrive", "move", "purge", "unschedule")
_TITLES = {"redrive": "Re-drive", "move": "Move", "purge": "Purge", "unschedule": "Cancel scheduled sends of"}
_BUTTONS = {"redrive": "Re-drive", "move": "Move", "purge": "Purge", "unschedule": "Cancel them"}
_NOUNS = {"unschedule": "scheduled send"}
MISTYPED = "mistyped"
"""Parameter of the page that asks, after another name than that of the queue was typed."""


# ---- What would happen ----


async def action(visit: Visit) -> Action:
    verb = visit.required("verb")
    if verb == "close":
        return await _ask_to_close(visit)
    selection = _selection(visit, verb)
    if verb == "move" and not visit.text("to"):
        return _ask_for_target(visit, selection)
    totals, is_whole = await preview(visit.link, selection)
    typed = _name_of(visit) if verb == "purge" else ""
    return Action(
        verb=verb,
        title=_title(visit, verb),
        queue=visit.text("queue"),
        selection=_describe(visit),
        sentences=_sentences(visit, verb, totals, is_whole=is_whole),
        count=totals.count,
        is_part=not is_whole,
        to=dict(totals.to),
        left=totals.left,
        ended=dict(totals.ended),
        target=visit.text("to"),
        typed_name=typed,
        error=f"Nothing was removed: what was typed is not {typed}." if typed and visit.text(MISTYPED) else "",
        fields=_fields(visit, total=totals.count if is_whole else None),
        post="/work" if totals.count or not is_whole else "",
        button=_BUTTONS[verb],
        back=_back(visit),
    )


def _ask_for_target(visit: Visit, selection: Selection) -> Action:
    return Action(
        verb=selection.verb,
        title=_title(visit, selection.verb),
        queue=visit.text("queue"),
        selection=_describe(visit),
        sentences=["Name the queue to which the messages move. Each of them is a new arrival there."],
        needs_target=True,
        fields=_fields(visit, total=None),
        button="Show what would happen",
        back=_back(visit),
    )


async def _ask_to_close(visit: Visit) -> Action:
    if not visit.rights.is_admin:
        raise NotAllowed(f"user {visit.rights.name!r} may not close connections: this needs the right admin")
    connection = visit.required("connection")
    return Action(
        verb="close",
        title=f"Close connection {connection}",
        sentences=[
            "The connection ends, and messages that its consumers hold are redelivered. This counts no attempt for "
            "them.",
            "A client that reconnects by itself is back at once: to keep it out, remove its user from the users file, "
            "and reload.",
        ],
        fields=[("connection", connection)],
        post="/close",
        button="Close the connection",
        back="/connections",
    )


def _sentences(visit: Visit, verb: str, totals: Totals, *, is_whole: bool) -> list[str]:
    sentences = []
    noun = _NOUNS.get(verb, "message")
    number = ("" if is_whole else "at least ") + count_noun(totals.count, noun)
    if not totals.count and is_whole:
        sentences.append(f"Nothing would happen: no {noun} {'can be taken' if totals.left else 'is selected'}.")
    elif not totals.count:
        sentences.append(f"Nothing that would happen was found so far: no {noun} among those that were looked at.")
    elif verb == "redrive":
        sentences.append(f"{number} would move back to where they failed, as new arrivals with all their attempts.")
        if totals.transient:
            sentences.append(
                f"{totals.transient:,} of them would be transient again, as they were sent: a crash of the broker "
                "loses them."
            )
    elif verb == "move":
        sentences.append(f"{number} would move to {visit.text('to')}, as new arrivals.")
    elif verb == "purge":
        sentences.append(f"{number} would be removed for ever. No dead letter and no copy remains.")
    else:
        sentences.append(f"{number} would be cancelled for ever.")
    if not is_whole:
        sentences.append("Not all messages were looked at: there are too many to count them now.")
    if left := totals.left - totals.ended.total():
        sentences.append(f"{count_noun(left, noun)} would stay: {LEFT_TEXTS[verb]}.")
    for name, count in totals.ended.items():
        sentences.append(
            f"{count_noun(count, noun)} would stay: they failed in {name}, which does not exist any more. "
            "Move them to a queue instead."
        )
    return sentences


def _title(visit: Visit, verb: str) -> str:
    return f"{_TITLES[verb]} {_name_of(visit)}"


def _name_of(visit: Visit) -> str:
    return visit.text("queue") or visit.text("to")


def _describe(visit: Visit) -> str:
    """Return words for the chosen messages."""
    parts = []
    if sequences := visit.numbers("sequence"):
        parts.append(count_noun(len(sequences), "chosen message"))
    group = [f"{name} {visit.text(name)!r}" for name in GROUP_FIELDS if name in visit.parameters]
    if group:
        parts.append(f"dead letters with {', '.join(group)}")
    if selector := visit.text("selector"):
        parts.append(f"messages that match {selector}")
    return " and ".join(parts) or "all messages"


def _fields(visit: Visit, *, total: int | None) -> list[tuple[str, str]]:
    """Return the hidden fields of the form: the selection, and the number of messages that was shown."""
    names = ("verb", "queue", "sequence", *GROUP_FIELDS, "selector", "to")
    fields = [(name, value) for name in names for value in visit.parameters.get(name, ())]
    return fields if total is None else [*fields, ("total", str(total))]


def _back(visit: Visit) -> str:
    if visit.text("verb") == "unschedule":
        return address("/scheduled", to=visit.text("to") or f"/queue/{visit.text('queue')}")
    if any(name in visit.parameters for name in GROUP_FIELDS):
        return address("/dead-letters", queue=visit.text("queue"))
    return queue_link(visit.text("queue"))


# ---- The selection ----


def _selection(visit: Visit, verb: str) -> Selection:
    """Return the messages that the parameters choose.

    Raises: InvalidRequest if a parameter is wrong; NotAllowed if the user may not do that
    """
    if verb not in WORK_VERBS:
        raise InvalidRequest(f"there is no action {verb[:50]!r}")
    if verb == "unschedule":
        return _scheduled_selection(visit)
    queue = visit.required("queue")
    _check_may_act(visit, verb, queue)
    request: dict[str, Any] = {"queue": queue}
    if selector := visit.text("selector"):
        request["selector"] = selector
    group = {name: visit.text(name) for name in GROUP_FIELDS if name in visit.parameters}
    if group:
        request["group"] = group
    if (selector or group) and not visit.rights.may_browse(queue):
        raise NotAllowed(
            f"user {visit.rights.name!r} may not choose messages of {queue!r}: this needs the right browse"
        )
    if verb == "move":
        request["to"] = visit.text("to")
        if request["to"]:
            _check_target(visit, queue, request["to"])
    return Selection(verb, request, visit.numbers("sequence"))


def _check_may_act(visit: Visit, verb: str, queue: str) -> None:
    if queue.startswith(SPARK_PREFIX):
        raise NotAllowed(
            f"{queue!r} is a queue of Spark's queries: {verb} would break their guarantees, use the `truenext spark` "
            "command instead"
        )
    if not visit.rights.may(Right.MANAGE, queue):
        raise NotAllowed(f"user {visit.rights.name!r} may not manage {queue!r}")


def _check_target(visit: Visit, queue: str, to: str) -> None:
    try:
        parse_queue_name(to)
    except TruenextError as error:
        raise InvalidRequest(f"the target of a move must be the name of a queue: {error}") from error
    if to == queue:
        raise InvalidRequest(f"source and target are the same queue, {to!r}: name another one")
    if to.startswith(SPARK_PREFIX):
        raise NotAllowed(f"{to!r} is a queue of Spark's queries: nothing else may send there")
    if not visit.rights.may(Right.SEND, to):
        raise NotAllowed(f"user {visit.rights.name!r} may not send to {to!r}")


def _scheduled_selection(visit: Visit) -> Selection:
    queue, to = visit.text("queue"), visit.text("to")
    if not queue and not to:
        raise InvalidRequest("choose the destination whose scheduled sends are cancelled")
    if not visit.rights.may_unschedule(queue, to):
        raise NotAllowed(f"user {visit.rights.name!r} may not manage {queue or to!r}")
    request: dict[str, Any] = {"queue": queue} if queue else {"queue": "", "to": to}
    if selector := visit.text("selector"):
        request["selector"] = selector
    return Selection("unschedule", request, visit.numbers("sequence"))


# ---- Doing it ----


async def begin_work(visit: Visit) -> str:
    """Begin bulk work, and return the address of its progress."""
    verb = visit.required("verb")
    selection = _selection(visit, verb)
    if verb == "move":
        visit.required("to")
    if verb == "purge" and visit.text("typed") != _name_of(visit):
        return f"/action?{urlencode([*_fields(visit, total=None), (MISTYPED, '1')])}"
    works = visit.login.work
    running = [each for each in works.values() if not each.is_over]
    if len(running) >= WORK_MAX:
        raise InvalidRequest(f"{WORK_MAX} works of this login are running: wait for one, or stop one")
    while len(works) >= WORK_MAX:
        works.pop(next(id for id, each in works.items() if each.is_over))
    total = visit.number("total", 0) or None
    work = Work(visit.link, selection, f"{_title(visit, verb)}: {_describe(visit)}", _back(visit), total)
    works[work.id] = work
    return address("/progress", id=work.id)


async def progress(visit: Visit) -> Progress:
    work = _work(visit)
    totals = work.totals
    noun = _NOUNS.get(work.selection.verb, "message")
    sentences = []
    if work.is_over and (left := totals.left - totals.ended.total()):
        sentences.append(f"{count_noun(left, noun)} have stayed: {LEFT_TEXTS[work.selection.verb]}.")
    for name, count in totals.ended.items():
        sentences.append(
            f"{count_noun(count, noun)} have stayed: they failed in {name}, which does not exist any more. "
            "Move them to a queue instead."
        )
    if work.state == "stopped":
        sentences.append("What is done stays done; the same action goes on with the rest.")
    return Progress(
        id=work.id,
        verb=work.selection.verb,
        title=work.title,
        queue=str(work.selection.request.get("queue", "")),
        state=work.state,
        count=totals.count,
        total=work.total,
        to=dict(totals.to),
        left=totals.left,
        ended=dict(totals.ended),
        error=totals.error,
        sentences=sentences,
        started_ms=work.started_ms,
        elapsed_s=round(work.elapsed_s, 1),
        back=work.back,
        others=[
            (f"{each.title}: {each.state}", address("/progress", id=each.id))
            for each in reversed(visit.login.work.values())
            if each is not work
        ],
    )


async def stop_work(visit: Visit) -> str:
    work = _work(visit)
    work.stop()
    return address("/progress", id=work.id)


def _work(visit: Visit) -> Work:
    work = visit.login.work.get(visit.required("id"))
    if work is None:
        raise NotFound("there is no such work of this login: it was begun by another login, or is long over")
    return work


async def pause(visit: Visit) -> str:
    return await _change(visit, "pause")


async def resume(visit: Visit) -> str:
    return await _change(visit, "resume")


async def _change(visit: Visit, verb: str) -> str:
    queue = visit.required("queue")
    _check_may_act(visit, verb, queue)
    # A pause would make a queue that is not there.
    await ask_queue(visit, queue)
    await visit.ask(verb, {"queue": queue}, dict[str, Any])
    return queue_link(queue)


async def close(visit: Visit) -> str:
    if not visit.rights.is_admin:
        raise NotAllowed(f"user {visit.rights.name!r} may not close connections: this needs the right admin")
    await visit.ask("close", {"connection": visit.required("connection")}, dict[str, Any])
    return "/connections"
