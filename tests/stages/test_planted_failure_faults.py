"""Tests that tests of failed requests and of kept replies fail when one of the rules is broken. Source: docs/stages.md,
"Failures of requests"; docs/stages-database.md, "Kept replies" """

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.stages import flows, test_kept_replies
from tests.stages import test_on_failure as tests
from tests.unit.mutation import mutated
from truenext.errors import TruenextError
from truenext.flows import envelope
from truenext.stage import kept_replies, replies_stage
from truenext.stage.core import failed_request, flow_start
from truenext.stage.core.definitions import LocalEndpoint
from truenext.stage.core.flow import Flow
from truenext.stage.core.initiation import Initiation
from truenext.stage.initiation_contexts import OutboxInitiationContext
from truenext.stage.initiator import Initiator
from truenext.stage.kept_replies import KeptReplies
from truenext.stage.pending_replies import PendingReplies
from truenext.stage.sql import keep_reply, reply_table, session_outbox


class Fault(NamedTuple):
    rule: str
    owner: Any
    name: str
    old: str
    new: str
    noticed_by: Callable[[], None]


def continues_with_the_state() -> None:
    tests.test_on_failure_continues_the_flow_with_the_state_of_the_request("next", "finished 8 by next")


def hands_on() -> None:
    tests.test_handler_that_fails_hands_on_to_the_next_one_outwards_with_the_state_of_its_own_request(2)


SQLITE = "sqlite://"


def with_patch(test: Callable[[pytest.MonkeyPatch], None]) -> Callable[[], None]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(patch)

    return run


FAULTS = [
    Fault(
        "handler gets the state of the leaf",
        failed_request,
        "failed_request",
        "state=request.state",
        "state=envelope.state",
        continues_with_the_state,
    ),
    Fault(
        "handler keeps the stack of the leaf",
        failed_request,
        "failed_request",
        "[*waiting, request]",
        "envelope.waiting",
        hands_on,
    ),
    Fault(
        "handler always takes the innermost request",
        failed_request,
        "_request_of",
        "tried -= bool(request.failure)",
        "tried = 1 - bool(request.failure)",
        tests.test_endpoint_that_requests_itself_handles_each_level_with_its_own_state,
    ),
    Fault(
        "handlers are named from the outside in",
        envelope,
        "failure_handlers",
        "reversed(waiting)",
        "waiting",
        hands_on,
    ),
    Fault(
        "attachments of the failed message go to the handler",
        failed_request,
        "failed_request",
        "attachments={}",
        "attachments=envelope.attachments",
        continues_with_the_state,
    ),
    Fault(
        "message that a program has sent is taken for a failure",
        failed_request,
        "failed_request",
        "headers.get(FAILURE) != HANDLED",
        "headers.get(FAILURE) == HANDLED == 0",
        tests.test_message_that_a_program_sends_to_the_queue_of_on_failure_is_rejected,
    ),
    Fault(
        "requests of the handler are not covered",
        LocalEndpoint,
        "failure_destination",
        "self.failure_stage is None",
        "True",
        continues_with_the_state,
    ),
    Fault(
        "reply_to does not name the handler",
        flow_start,
        "encode_first_message",
        "if isinstance(reply_to, LocalEndpoint)",
        "if False",
        tests.test_on_failure_serves_the_reply_to_of_a_flow,
    ),
    Fault(
        "stash forgets the failed request",
        Flow,
        "stash",
        "if self._failed_request is not None",
        "if False",
        tests.test_stash_in_on_failure_continues_later_where_the_reply_would_have_come,
    ),
    Fault(
        "ask names no topic for reports",
        Initiator,
        "ask",
        "report_to=reply_to.destination",
        'report_to=""',
        tests.test_ask_of_a_stage_that_rejects_raises_flow_failed_with_the_facts,
    ),
    Fault(
        "report ends another request than its own",
        PendingReplies,
        "_on_report",
        "self._numbers.get(message.correlation_id, 0)",
        "next(iter(self._waiting), 0)",
        tests.test_hundred_asks_at_once_are_told_each_of_its_own_flow,
    ),
    Fault(
        "ask waits longer than the ttl of its flow",
        Initiator,
        "ask",
        "min(deadline, ",
        "max(deadline, ",
        tests.test_ask_waits_no_longer_than_the_ttl_of_its_flow,
    ),
    Fault(
        "failure replaces a reply",
        reply_table,
        "keep_reply",
        ", replies.c.reply.is_(None)",
        "",
        lambda: test_kept_replies.test_kept_failure_is_replaced_by_a_later_reply_but_never_the_reverse(SQLITE),
    ),
    Fault(
        "reply under a key goes to a topic of one process",
        OutboxInitiationContext,
        "_start",
        'f"/queue/{replies_queue(self._definition.name)}"',
        'f"/topic/replies.{self._definition.name}.{ServiceContext.new_id()}"',
        lambda: test_kept_replies.test_asks_with_one_key_start_one_flow_and_all_get_its_reply(SQLITE),
    ),
    Fault(
        "report under a key goes nowhere",
        Initiation,
        "send",
        "report=self._kept_to",
        'report=""',
        lambda: test_kept_replies.test_kept_failure_is_replaced_by_a_later_reply_but_never_the_reverse(SQLITE),
    ),
    Fault(
        "reply of an earlier flow stays under its key",
        session_outbox,
        "_write",
        'row | {"reply": None, "failure": None}',
        "row",
        lambda: test_kept_replies.test_key_that_was_deleted_before_its_reply_starts_another_flow_whose_reply_counts(
            SQLITE
        ),
    ),
    Fault(
        "caller does not look once a second",
        KeptReplies,
        "wait",
        "min(left_s, POLL_S)",
        "left_s",
        with_patch(test_kept_replies.test_caller_finds_a_reply_whose_news_was_lost),
    ),
    Fault(
        "kept reply is told to no caller",
        replies_stage,
        "make_replies_stage",
        "if id is not None",
        "if id is not None and False",
        with_patch(test_kept_replies.test_ask_with_a_key_is_woken_by_the_topic_and_not_by_its_look_once_a_second),
    ),
    Fault(
        "key of another endpoint gives its reply",
        kept_replies,
        "_reply_of",
        "kept.endpoint != to.name",
        "False",
        lambda: test_kept_replies.test_key_is_for_one_endpoint_and_one_content(SQLITE),
    ),
]


def plant(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Plant the fault, in all modules that have imported the function."""
    right = vars(fault.owner)[fault.name]
    if isinstance(right, property):
        assert right.fget is not None
        patch.setattr(fault.owner, fault.name, property(mutated(right.fget, fault.old, fault.new)))
        return
    wrong = mutated(right, fault.old, fault.new)
    patch.setattr(fault.owner, fault.name, wrong)
    for name, module in list(sys.modules.items()):
        if name.startswith("truenext.stage.") and vars(module).get(fault.name) is right:
            patch.setattr(module, fault.name, wrong)


def test_planted_faults_of_failures_can_all_be_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the faults that are not drawn."""
    assert keep_reply is reply_table.keep_reply
    for fault in FAULTS:
        with monkeypatch.context() as patch:
            plant(fault, patch)


@pytest.mark.drawn
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.rule)
def test_planted_fault_in_the_handling_of_failures_is_noticed(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    # What would never come is not waited for as long as what is slow.
    monkeypatch.setattr(flows, "PATIENCE_S", 8)
    plant(fault, monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, TruenextError, ExceptionGroup, pytest.fail.Exception)):
        fault.noticed_by()
