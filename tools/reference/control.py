"""Page of the control requests, docs/reference/control.md, from their structs in the code."""

import inspect
from collections.abc import Callable, Iterator

from msgspec import Struct

from tools.reference.json_types import enum_table, fields_table, in_json, struct_parts
from tools.reference.markdown import code, fence, joined, paragraphs, table, wrapped
from tools.reference.members import members_of
from truenext.broker import (
    backup_request,
    connection_list,
    connection_request,
    drain,
    failover_request,
    history_request,
    producer_request,
    queue_details,
    security_log,
)
from truenext.broker.backup_request import BackupAction, BackupRequest
from truenext.broker.backups import BackupReport
from truenext.broker.connection_request import (
    ConnectionReport,
    RedeliveryReport,
    SubscriptionReport,
    TransactionReport,
)
from truenext.broker.control import QUERIES, QUEUE_CHANGES, QueueRequest
from truenext.broker.producer_request import ProducerAnswer, ProducerRequest
from truenext.broker.queues_request import QueuesRequest
from truenext.broker.reload import ReloadResult
from truenext.engine.background import bulk
from truenext.engine.dispatch.heads import WaitReason
from truenext.engine.state.producer import CommitOutcome
from truenext.model import control_answers
from truenext.model.dead_letters import DeadLetterGroup, GroupFilter
from truenext.model.disk_level import DiskLevel
from truenext.wire.stomp.actions import ACTION_PARSERS, ReleaseBody

_HEAD = """\
# Reference of control requests

Look up each verb of `/control/VERB` here, with the fields of its request and of its answer. A client sends such a
request with any STOMP library, and the `truenext` command and truenext's clients send the same ones.
[protocol.md](../protocol.md) describes how, and [security.md](../security.md) which of them a user may send.

This page is made from the code: `make reference`.
"""
_EXAMPLE = """\
SUBSCRIBE                          SEND                              MESSAGE
id:answers                         destination:/control/purge        destination:/remote-temp-queue/...
destination:/temp-queue/answers    reply-to:/temp-queue/answers      correlation-id:1
                                   correlation-id:1                  content-type:application/json
^@
                                   {"queue":"orders.old"}^@          {"moved":500,...,"next":[5,812],...}^@"""
_ANSWERS: dict[str, tuple[type[Struct], ...]] = {
    "queues": (control_answers.QueuesReport, control_answers.QueueReport, control_answers.QueueSums),
    "reload": (ReloadResult,),
    "status": (
        control_answers.StatusReport,
        control_answers.MessageCounts,
        control_answers.CommitsReport,
        control_answers.JournalReport,
        control_answers.HistoryReport,
        control_answers.StuckQueueReport,
        control_answers.MemoryReport,
        control_answers.SubscriptionCounts,
        control_answers.TemporaryReport,
        control_answers.TemporaryQueueReport,
        control_answers.LogReport,
        control_answers.MemberReport,
    ),
}
"""Structs of the answers to queries, by verb: the answer, and the structs in it."""
_REQUESTS: dict[str, type[Struct]] = {"queues": QueuesRequest}
"""Structs of the bodies of queries, by verb; the others have no body."""
_BULK = "bulk-work"
_INSPECTIONS: dict[str, tuple[Callable[..., object], type[Struct] | None, *tuple[type[Struct], ...]]] = {
    queue_details.CONSUMERS_VERB: (queue_details.report_consumers, QueueRequest, control_answers.ConsumerReport),
    queue_details.POLICY_VERB: (
        queue_details.report_policy,
        QueueRequest,
        control_answers.PolicyReport,
        control_answers.SettingReport,
    ),
    connection_list.LIST_VERB: (
        connection_list.ConnectionList.report,
        connection_list.ConnectionsRequest,
        control_answers.OpenConnection,
    ),
    connection_list.CLOSE_VERB: (
        connection_list.ConnectionList.close,
        connection_list.CloseRequest,
        connection_list.CloseReport,
    ),
    history_request.VERB: (
        history_request.HistoryRequests.make_piece,
        history_request.HistoryRequest,
        history_request.HistoryPiece,
    ),
    security_log.VERB: (security_log.RecentEvents.report, None, control_answers.SecurityEvent),
}
"""Function, request and structs of the answer of verbs about queues, connections and the security log."""
_LISTS = {queue_details.CONSUMERS_VERB, connection_list.LIST_VERB, security_log.VERB}
"""Verbs of these whose answer is a list."""


def page() -> str:
    return joined(_parts())


def _parts() -> Iterator[str]:
    yield _HEAD
    yield "## Verbs"
    yield wrapped(
        "A request with an answer is a SEND with a `reply-to`, a temporary queue of the same connection. The answer is "
        "a message there, with JSON in its body, and the `correlation-id` of the request:"
    )
    yield fence(_EXAMPLE, "")
    yield table(("verb", "does", "body of the request", "answer"), _verbs())
    yield "The other verbs change something for the connection that sends them, and have no answer but a RECEIPT:"
    yield table(
        ("verb", "does", "headers or body"),
        [
            (f"[`{verb}`](#{verb})", _summary(parser), "body in JSON" if verb == "release" else _headers(parser))
            for verb, parser in ACTION_PARSERS.items()
        ],
    )
    for verb in QUERIES:
        yield f"## {verb}"
        yield from _query(verb)
    for verb, change in QUEUE_CHANGES.items():
        yield f"## {verb}"
        yield from _text(change)
        yield fields_table(QueueRequest, is_request=True)
        yield wrapped("The answer comes once the change is durable:")
        only = () if verb == "pause" else ("queue",)
        yield fields_table(control_answers.QueueChange, only=only)
    yield from _bulk_work()
    yield from _inspections()
    yield from _failover()
    yield from _backup()
    yield from _drain()
    yield from _producer()
    yield from _connection()
    for verb, parser in ACTION_PARSERS.items():
        yield f"## {verb}"
        yield from _text(parser)
        if verb == "release":
            yield fields_table(ReleaseBody, is_request=True)


def _verbs() -> Iterator[tuple[str, str, str, str]]:
    for verb, query in QUERIES.items():
        answer = _ANSWERS[verb][0].__name__
        members = _REQUESTS[verb].__struct_fields__ if verb in _REQUESTS else ()
        names = ", ".join(map(code, members)) or "empty"
        yield _link(verb), _summary(query), names, f"[{answer}](#{answer.lower()})"
    for verb, change in QUEUE_CHANGES.items():
        yield _link(verb), _summary(change), "`queue`", "the same, once the change is durable"
    for verb, request in bulk.VERBS.items():
        yield _link(verb, _BULK), _first(request.__doc__), "a piece of work", "what was done, once it is durable"
    for verb, (function, body, *answers) in _INSPECTIONS.items():
        names = "empty" if body is None else ", ".join(map(code, body.__struct_fields__))
        of, answer = "list of " if verb in _LISTS else "", answers[0].__name__
        yield _link(verb), _summary(function), names, f"{of}[{answer}](#{answer.lower()})"
    yield _link(failover_request.VERB), _summary(failover_request.begin_failover), "`to`", "`member`"
    names = ", ".join(map(code, BackupRequest.__struct_fields__))
    report = "[BackupReport](#backupreport)"
    yield _link(backup_request.VERB), _summary(backup_request.run_backup_request), names, report
    yield _link(drain.VERB), _summary(drain.Drain.report), "`draining`", "[DrainReport](#drainreport)"
    names = ", ".join(code(member.name) for member in members_of(ProducerRequest))
    yield _link(producer_request.VERB), _summary(producer_request.make_producer_report), names, "numbers and outcome"
    report = _summary(connection_request.make_connection_report)
    yield _link(connection_request.VERB), report, "empty", "[ConnectionReport](#connectionreport)"


def _query(verb: str) -> Iterator[str]:
    yield from _text(QUERIES[verb])
    if verb in _REQUESTS:
        yield wrapped(_first(_REQUESTS[verb].__doc__))
        yield fields_table(_REQUESTS[verb], is_request=True)
        yield enum_table("`order`", control_answers.QueueOrder)
    for struct in _ANSWERS[verb]:
        yield from struct_parts(struct, "###")
        if struct is control_answers.StatusReport:
            rows = [(code(member.name.lower()), member.doc) for member in members_of(DiskLevel)]
            yield table(("`disk_level`", "means"), rows)


def _bulk_work() -> Iterator[str]:
    yield "## Bulk work"
    verbs = [(code(verb), _first(request.__doc__)) for verb, request in bulk.VERBS.items()]
    yield table(("verb", "does"), verbs)
    yield wrapped(
        "A client requests such work piece by piece. Each request repeats the first one, with `after` and `until` set "
        "to `next` and `until` of the last answer. The work is done when `next` is `null`. A client that sends no "
        "further request stops the work between two pieces."
    )
    yield "### Request"
    yield fields_table(bulk.BulkRequest, is_request=True)
    yield "`redrive`, `move`, `purge` and `dead-letters` also have:"
    yield fields_table(bulk.MessageRequest, only=_own_fields(bulk.MessageRequest), is_request=True)
    yield "`move` also has:"
    yield fields_table(bulk.Move, only=_own_fields(bulk.Move), is_request=True)
    yield "`scheduled` and `unschedule` also have:"
    yield fields_table(bulk.ScheduledRequest, only=_own_fields(bulk.ScheduledRequest), is_request=True)
    yield "### GroupFilter"
    yield from paragraphs(in_json(GroupFilter.__doc__ or ""))
    yield fields_table(GroupFilter, is_request=True)
    yield "### Answer"
    yield fields_table(bulk.BulkResult)
    yield "`dead-letters` also has:"
    yield fields_table(bulk.DeadLettersResult, only=_own_fields(bulk.DeadLettersResult))
    yield from struct_parts(DeadLetterGroup, "###")
    yield "`scheduled` also has:"
    yield fields_table(bulk.ScheduledResult, only=_own_fields(bulk.ScheduledResult))
    yield from struct_parts(control_answers.ScheduledSendInfo, "###")


def _own_fields(struct: type[Struct]) -> list[str]:
    return [member.name for member in members_of(struct)]


def _inspections() -> Iterator[str]:
    for verb, (function, request, *answers) in _INSPECTIONS.items():
        yield f"## {verb}"
        yield wrapped(_summary(function))
        if request is not None:
            yield fields_table(request, is_request=True)
        for struct in answers:
            yield from struct_parts(struct, "###")


def _failover() -> Iterator[str]:
    yield f"## {failover_request.VERB}"
    yield wrapped(_first(failover_request.FailoverRequest.__doc__))
    yield fields_table(failover_request.FailoverRequest, is_request=True)
    yield from struct_parts(failover_request.FailoverReport, "###")


def _backup() -> Iterator[str]:
    yield f"## {backup_request.VERB}"
    yield wrapped(_first(backup_request.BackupRequest.__doc__))
    yield fields_table(BackupRequest, is_request=True)
    yield enum_table("`action`", BackupAction)
    yield from struct_parts(BackupReport, "###")


def _drain() -> Iterator[str]:
    yield f"## {drain.VERB}"
    yield wrapped(_summary(drain.Drain.report))
    yield fields_table(drain.DrainRequest, is_request=True)
    yield from struct_parts(drain.DrainReport, "###")
    yield from struct_parts(drain.RemainingQueue, "###")


def _producer() -> Iterator[str]:
    yield f"## {producer_request.VERB}"
    yield _summary(producer_request.make_producer_report)
    yield fields_table(ProducerRequest, is_request=True)
    yield "The answer comes once it is durable:"
    yield fields_table(ProducerAnswer)
    yield enum_table("`outcome`", CommitOutcome)


def _connection() -> Iterator[str]:
    yield f"## {connection_request.VERB}"
    yield wrapped(_summary(connection_request.make_connection_report))
    yield from struct_parts(ConnectionReport, "###")
    yield from struct_parts(TransactionReport, "###")
    yield from struct_parts(SubscriptionReport, "###")
    yield from struct_parts(RedeliveryReport, "###")
    yield from struct_parts(control_answers.UserReport, "###")
    yield enum_table("`idle`", WaitReason)


def _link(verb: str, anchor: str = "") -> str:
    return f"[`{verb}`](#{anchor or verb})"


def _first(doc: str | None) -> str:
    return in_json(inspect.cleandoc(doc or "").split("\n\n")[0])


def _summary(function: object) -> str:
    return _first(inspect.getdoc(function))


def _headers(function: object) -> str:
    """Return the names of the headers that the docstring of an action lists."""
    lines = (inspect.getdoc(function) or "").split("\n")
    return ", ".join(line[2:].partition(":")[0] for line in lines if line.startswith("- "))


def _text(function: object) -> Iterator[str]:
    yield from paragraphs(in_json(inspect.getdoc(function) or ""))
