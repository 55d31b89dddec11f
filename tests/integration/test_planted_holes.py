"""Tests that the tests of logins, grants, producers of users and TLS notice every planted hole.

A test that never fails may be one that sees nothing. Each hole of planted_holes.py has a named check that must fail:
the oracle of grants, cases of the matrix of requests over sockets, or another test of logins and TLS.

    TRUENEXT_DRAW=all pytest tests/integration/test_planted_holes.py          all of them, not a few
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import seed

from tests.integration import (
    broker_process,
    planted_holes,
    test_grants,
    test_inspection,
    test_logins,
    test_reply_rights,
    test_tls,
)
from tests.integration.broker_process import BrokerProcess
from tests.integration.forked import Forked
from tests.integration.openwire import test_raw_grants
from tests.integration.planted_holes import Hole
from tests.integration.raw_client import RawClient
from tests.integration.test_grants import RequestRefused, UserClient
from tests.integration.test_inspection import InspectedBroker
from tests.integration.test_logins import GuardedBroker
from tests.property import test_grants as test_patterns
from tests.unit import test_tls as test_tls_socket
from truenext.wire.openwire.structures import TemporaryQueueName

Check = Callable[[Path], None]
"""Test that a hole must make fail; called with an empty folder."""

PATIENCE_S = 3.0
"""Longest wait of a client for a frame, or an end, that a hole may keep from it."""


FOUND = (AssertionError, TimeoutError, IndexError, pytest.fail.Exception)
"""Errors as which a hole may show. IndexError: a broker in this process misses bytes that it has cancelled."""


class BrokenBrokerError(Exception):
    """A hole has broken the broker, so that its check would fail for another reason."""


@contextmanager
def intact(broker: BrokerProcess) -> Iterator[None]:
    """Require that the broker has no internal error, and clean it up."""
    try:
        yield
    finally:
        broker.clean_up()
        if {"CRITICAL", "Traceback"} & set(broker.log.split()):
            raise BrokenBrokerError(broker.log)


# ---- Checks ----


def of_patterns(test: Callable[[], None]) -> Check:
    """Return a check of drawn patterns, or users, against the oracle of grants, with the same draws each time."""
    return lambda _: seed(41)(test)()


def of_short_patterns(prefixes: tuple[str, ...], alphabet: tuple[str, ...], count_max: int) -> Check:
    """Return a check of all pairs of short patterns against the oracle of grants."""
    return lambda _: test_patterns.test_short_patterns_cover_what_the_oracle_says(prefixes, alphabet, count_max)


THREE_WORDS = of_short_patterns(("", "/topic/"), ("a", "DLQ", "*"), 2)
VIRTUAL_TOPICS = of_short_patterns(("",), ("Consumer", "VirtualTopic", "*"), 4)


@contextmanager
def connecting(folder: Path, *cases: test_grants.Case) -> Iterator[tuple[BrokerProcess, Callable[..., UserClient]]]:
    """Run a broker with the users of some cases of the matrix. Returns a function that connects a user, too."""
    test_grants.users_of(cases).write(folder / "users.toml")
    broker = BrokerProcess(folder, ["--users", str(folder / "users.toml")])
    broker.start()
    with intact(broker):
        clients: list[UserClient] = []

        def connect(user: str, prefix: str = "", **options: Any) -> UserClient:
            clients.append(UserClient(broker.port, user, prefix, **options))
            return clients[-1]

        try:
            yield broker, connect
        finally:
            for client in clients:
                client.close()


def of_matrix(row: str, variant: str) -> Check:
    """Return a check of one case of the matrix of requests."""
    (case,) = (case for case in test_grants.CASES if (case.row.name, case.variant.name) == (row, variant))

    def check(folder: Path) -> None:
        with connecting(folder, case) as (_, connect):
            test_grants.test_request_with_all_its_rights_is_executed_and_without_one_is_refused(connect, case)

    return check


def of_requests(test: Callable[[Callable[..., UserClient]], None]) -> Check:
    """Return a check of what the matrix does not show."""

    def check(folder: Path) -> None:
        with connecting(folder) as (_, connect):
            test(connect)

    return check


def of_replies(test: Callable[[Callable[..., UserClient]], None]) -> Check:
    """Return a check of SENDs to temporary queues and topics."""

    def check(folder: Path) -> None:
        guarded = test_reply_rights.Guarded(folder)
        guarded.broker.start()
        with intact(guarded.broker):
            try:
                test(guarded.connect)
            except RequestRefused as refused:
                raise AssertionError("a request that must be accepted is refused") from refused
            finally:
                guarded.close_clients()

    return check


def of_equal_requests(folder: Path) -> None:
    with connecting(folder) as (broker, connect):
        test_grants.test_users_that_ask_for_queues_at_the_same_time_get_their_own_answers(broker, connect)


def of_logins(test: Callable[[GuardedBroker], None]) -> Check:
    def check(folder: Path) -> None:
        broker = GuardedBroker(folder)
        broker.write()
        broker.start()
        with intact(broker):
            test(broker)

    return check


def of_jms(test: Callable[[BrokerProcess, Callable[..., test_raw_grants.JmsUser]], None]) -> Check:
    """Return a check with JMS clients, frame by frame."""

    def check(folder: Path) -> None:
        listen = ["--listen", "openwire://127.0.0.1:0"]
        broker = BrokerProcess(folder, ["--users", str(test_raw_grants.users_file(folder)), *listen])
        broker.start()
        with intact(broker), test_raw_grants.connecting(broker) as connect:
            test(broker, connect)

    return check


def of_jms_matrix(row: str, lacks: str) -> Check:
    """Return a check of one case of the rows of JMS clients."""
    (case,) = (case for case in test_raw_grants.CASES if (case.row.name, case.lacks) == (row, lacks))
    return of_jms(
        lambda broker, connect: (
            test_raw_grants.test_command_with_just_its_rights_is_executed_and_without_one_is_refused(
                broker, connect, case
            )
        )
    )


def of_inspection(test: Callable[[InspectedBroker], None]) -> Check:
    """Return a check of control requests about queues and connections."""

    def check(folder: Path) -> None:
        broker = test_inspection.make_broker(folder)
        broker.start()
        with intact(broker):
            test(broker)

    return check


GUESSED_NAMES = of_jms(
    lambda _, connect: test_raw_grants.test_guessed_name_of_a_temporary_destination_gives_nothing(
        connect, TemporaryQueueName
    )
)


def of_log(folder: Path) -> None:
    of_logins(lambda broker: test_logins.test_log_and_answers_have_no_password_and_no_hash(broker, folder))(folder)


# ---- Holes ----


CHECKS: dict[Hole, Check] = {
    planted_holes.a_grant_allows_a_pattern_that_it_overlaps: THREE_WORDS,
    planted_holes.a_grant_of_all_queues_grants_dead_letters_and_queues_of_virtual_topics: of_matrix(
        "SUBSCRIBE to a queue DLQ.", "too wide a first word"
    ),
    planted_holes.a_grant_of_all_queues_grants_queues_of_virtual_topics: VIRTUAL_TOPICS,
    planted_holes.a_grant_of_queues_is_one_of_topics: of_matrix("SUBSCRIBE to a topic", "of the other kind"),
    planted_holes.a_grant_of_one_word_grants_many: of_matrix("SUBSCRIBE to a pattern of queues", "too narrow"),
    planted_holes.a_grant_of_what_begins_with_a_name_grants_the_name: THREE_WORDS,
    planted_holes.each_right_gives_all_others: of_matrix("purge", "other rights"),
    planted_holes.a_client_id_that_begins_like_the_name_is_the_users: of_patterns(
        test_patterns.test_client_ids_of_a_user_are_those_of_the_oracle
    ),
    planted_holes.of_several_destinations_only_the_first_is_checked: of_matrix(
        "SEND to several destinations", "missing (send /topic/{p}.t)"
    ),
    planted_holes.of_several_destinations_of_scheduled_sends_only_the_first_is_checked: of_matrix(
        "unschedule for several destinations", "missing (manage /topic/{p}.t)"
    ),
    planted_holes.messages_are_moved_without_a_right_on_the_target: of_matrix("move", "missing (send /queue/{p}.to)"),
    planted_holes.a_selector_counts_messages_without_the_right_to_browse: of_matrix(
        "purge that only counts with a selector", "missing (browse /queue/{p}.q)"
    ),
    planted_holes.scheduled_sends_without_a_queue_are_anybodys: of_matrix("unschedule for all topics", "missing"),
    planted_holes.a_durable_subscription_takes_any_client_id: of_matrix(
        "SUBSCRIBE to a durable subscription that has messages", "client id that only begins alike"
    ),
    planted_holes.a_durable_subscription_of_another_client_id_can_be_ended: of_matrix(
        "UNSUBSCRIBE that ends a durable subscription", "client id not listed"
    ),
    planted_holes.a_durable_subscription_is_browsed_without_a_right_on_its_topic: of_matrix(
        "browse a durable subscription", "missing (browse /topic/{p}.t)"
    ),
    planted_holes.a_durable_subscription_is_managed_by_its_name_as_a_queue: of_requests(
        test_grants.test_durable_subscription_is_not_listed_for_a_user_without_rights
    ),
    planted_holes.existence_of_a_durable_subscription_is_looked_at_before_the_client_id: of_requests(
        test_grants.test_refusal_does_not_tell_whether_the_destination_exists
    ),
    planted_holes.a_temporary_queue_of_another_connection_can_be_read: of_requests(
        lambda connect: test_grants.test_temporary_queue_of_another_connection_is_closed_to_everything_but_send(
            connect, "browse"
        )
    ),
    planted_holes.a_user_may_send_to_any_temporary_queue: of_replies(
        test_reply_rights.test_request_that_only_a_browser_was_shown_gives_no_right_to_reply
    ),
    planted_holes.a_temporary_queue_is_made_by_another_user: of_replies(
        lambda connect: test_reply_rights.test_send_to_what_is_not_there_is_dropped_and_makes_no_queue(connect, "queue")
    ),
    planted_holes.a_send_to_a_temporary_queue_that_is_not_there_is_refused: of_replies(
        lambda connect: test_reply_rights.test_send_to_what_is_not_there_is_dropped_and_makes_no_queue(connect, "topic")
    ),
    planted_holes.a_reply_to_a_caller_that_is_gone_is_refused: of_replies(
        test_reply_rights.test_caller_that_has_given_up_fails_no_transaction
    ),
    planted_holes.a_reply_to_is_not_checked: of_replies(
        lambda connect: test_reply_rights.test_user_cannot_give_itself_the_right(connect, {})
    ),
    planted_holes.a_reply_to_that_is_not_there_yet_is_not_checked: of_replies(
        lambda connect: test_reply_rights.test_user_cannot_give_itself_the_right(connect, {})
    ),
    planted_holes.of_a_composite_reply_to_only_the_first_part_is_checked: of_replies(
        test_reply_rights.test_each_part_of_a_composite_reply_to_gives_the_right
    ),
    planted_holes.of_a_composite_destination_temporary_queues_are_not_checked: of_replies(
        test_reply_rights.test_each_part_of_a_composite_destination_needs_the_right
    ),
    planted_holes.the_last_destination_is_not_checked_again: of_replies(
        test_reply_rights.test_last_destination_of_a_connection_is_checked_again
    ),
    planted_holes.a_reply_to_is_not_checked_at_the_last_destination: of_replies(
        test_reply_rights.test_last_destination_of_a_connection_is_checked_again
    ),
    planted_holes.a_report_or_handler_is_checked_at_the_first_send_alone: of_requests(
        lambda connect: test_grants.test_named_report_or_handler_needs_its_right_at_each_send(
            connect, "truenext-on-failure", 1
        )
    ),
    planted_holes.a_handler_needs_no_right: of_matrix("SEND with a report and handlers", "missing (send /queue/{p}.i)"),
    planted_holes.a_report_needs_no_right: of_matrix("SEND with a report to a queue", "missing (send /queue/{p}.r)"),
    planted_holes.a_browser_gives_the_right_to_reply: of_replies(
        test_reply_rights.test_request_that_only_a_browser_was_shown_gives_no_right_to_reply
    ),
    planted_holes.a_dispatch_gives_no_right_to_reply: of_replies(
        lambda connect: test_reply_rights.test_user_that_was_dispatched_a_request_may_reply_on_any_of_its_connections(
            connect, "queue"
        )
    ),
    planted_holes.of_a_composite_reply_to_only_the_first_part_gives_a_right: of_replies(
        test_reply_rights.test_each_part_of_a_composite_reply_to_gives_the_right
    ),
    planted_holes.the_right_to_reply_to_a_topic_is_one_to_the_queue_of_its_name: of_replies(
        test_reply_rights.test_queue_and_topic_of_one_name_have_rights_of_their_own
    ),
    planted_holes.a_queue_that_exists_is_forgotten_with_old_topics: of_replies(
        test_reply_rights.test_topic_named_longest_ago_is_forgotten_and_existing_queue_is_not
    ),
    planted_holes.a_user_that_a_reload_removes_keeps_the_right_to_reply: (
        test_reply_rights.test_users_that_a_reload_removes_are_forgotten_and_others_are_not
    ),
    planted_holes.the_right_to_send_is_remembered_for_all_users_together: of_matrix(
        "SEND to a queue", "another user's"
    ),
    planted_holes.a_verb_that_is_missing_in_the_table_is_allowed: of_matrix("status", "all but monitor"),
    planted_holes.a_reload_needs_no_admin: of_matrix("reload", "all but admin"),
    planted_holes.a_failover_needs_no_admin: of_matrix("failover", "all but admin"),
    planted_holes.a_backup_needs_no_admin: of_matrix("backup", "all but admin"),
    planted_holes.connections_need_no_monitor: of_matrix("connections", "all but monitor"),
    planted_holes.a_close_needs_no_admin: of_matrix("close", "all but admin"),
    planted_holes.a_history_needs_no_monitor: of_matrix("history", "all but monitor"),
    planted_holes.causes_in_a_history_need_no_admin: of_inspection(
        test_inspection.test_history_has_causes_for_admins_alone
    ),
    planted_holes.security_events_need_no_admin: of_matrix("security", "all but admin"),
    planted_holes.a_queue_is_inspected_without_a_right_on_it: of_inspection(
        lambda broker: test_inspection.test_user_with_any_right_on_a_queue_may_inspect_the_queue_and_others_may_not(
            broker, "consumers"
        )
    ),
    planted_holes.a_policy_is_shown_without_a_right_on_the_queue: of_inspection(
        lambda broker: test_inspection.test_user_with_any_right_on_a_queue_may_inspect_the_queue_and_others_may_not(
            broker, "policy"
        )
    ),
    planted_holes.dead_letters_are_counted_by_a_user_who_may_manage_them: of_matrix("dead-letters", "other rights"),
    planted_holes.a_group_is_chosen_without_the_right_to_browse: of_matrix(
        "purge of a group", "missing (browse /queue/{p}.q)"
    ),
    planted_holes.a_consumer_of_another_user_is_shown_with_its_address: of_inspection(
        test_inspection.test_client_without_the_right_monitor_does_not_see_who_the_others_are
    ),
    planted_holes.a_temporary_queue_of_another_connection_is_inspected: of_requests(
        lambda connect: test_grants.test_temporary_queue_of_another_connection_is_closed_to_everything_but_send(
            connect, "policy"
        )
    ),
    planted_holes.a_connection_is_named_by_its_id: of_inspection(
        test_inspection.test_no_answer_has_the_id_or_the_secret_of_a_connection
    ),
    planted_holes.a_close_counts_attempts: of_inspection(
        lambda broker: test_inspection.test_closed_connection_counts_no_attempt_and_its_messages_are_requeued(
            broker, {}
        )
    ),
    planted_holes.queues_are_listed_for_users_without_a_right_on_them: of_requests(
        test_grants.test_durable_subscription_is_not_listed_for_a_user_without_rights
    ),
    planted_holes.equal_requests_of_two_users_share_an_answer: of_equal_requests,
    planted_holes.a_refused_request_has_been_executed: of_matrix("pause", "missing"),
    planted_holes.a_producer_is_known_without_its_user: of_logins(
        test_logins.test_gapless_numbers_of_two_users_have_their_own_next_number
    ),
    planted_holes.a_numbered_send_to_the_last_destination_is_without_its_user: of_logins(
        test_logins.test_numbered_sends_of_two_users_with_one_producer_name_do_not_interfere
    ),
    planted_holes.a_numbered_commit_is_without_its_user: of_logins(
        test_logins.test_outcome_of_a_commit_is_told_and_resolved_for_its_user_alone
    ),
    planted_holes.a_producer_of_another_user_is_forgotten: of_logins(
        test_logins.test_forgotten_producer_is_the_users_own
    ),
    planted_holes.a_producer_of_another_user_is_reported_and_resolved: of_logins(
        test_logins.test_outcome_of_a_commit_is_told_and_resolved_for_its_user_alone
    ),
    planted_holes.a_remembered_login_is_one_of_any_password: of_logins(
        lambda broker: test_logins.test_wrong_logins_get_the_same_answer(broker, is_remembered=True)
    ),
    planted_holes.a_remembered_login_outlives_the_password: of_logins(
        test_logins.test_reload_forgets_the_remembered_login_of_a_changed_user_alone
    ),
    planted_holes.a_connection_outlives_its_password: of_logins(
        test_logins.test_both_passwords_hold_while_one_is_being_replaced
    ),
    planted_holes.a_connection_outlives_its_user: of_logins(
        lambda broker: test_logins.test_faulty_users_file_at_a_reload_is_refused_and_changes_nothing(broker, "no TOML")
    ),
    planted_holes.a_connection_keeps_a_right_over_a_reload: lambda folder: (
        test_logins.test_reload_ends_connections_of_users_that_have_lost_something_and_no_others(folder, "SIGHUP")
    ),
    planted_holes.a_flag_that_is_lost_ends_no_connection: lambda folder: (
        test_logins.test_reload_ends_connections_of_users_that_have_lost_something_and_no_others(folder, "SIGHUP")
    ),
    planted_holes.a_login_after_a_reload_has_the_rights_of_before: of_logins(
        test_logins.test_lost_grant_does_not_hold_for_a_login_after_the_reload
    ),
    planted_holes.guesses_of_a_user_are_not_counted: of_logins(
        test_logins.test_eleventh_failed_login_of_a_user_is_refused_without_a_hash
    ),
    planted_holes.guesses_of_an_address_are_not_counted: of_logins(
        test_logins.test_hundred_failed_logins_of_many_users_refuse_new_logins_of_that_address_alone
    ),
    planted_holes.guesses_lock_a_user_out_everywhere: of_logins(
        test_logins.test_eleventh_failed_login_of_a_user_is_refused_without_a_hash
    ),
    planted_holes.a_user_that_does_not_exist_is_refused_in_other_words: of_logins(
        lambda broker: test_logins.test_wrong_logins_get_the_same_answer(broker, is_remembered=False)
    ),
    planted_holes.the_hash_of_a_password_is_a_password: of_logins(
        lambda broker: test_logins.test_wrong_logins_get_the_same_answer(broker, is_remembered=False)
    ),
    planted_holes.the_name_of_a_failed_login_is_logged: of_log,
    planted_holes.a_connection_is_taken_over_by_another_user: of_logins(
        test_logins.test_connection_is_taken_over_by_its_own_user_alone
    ),
    planted_holes.a_certificate_of_one_user_is_one_of_all: (
        test_tls.test_client_certificate_logs_in_as_the_user_that_lists_it
    ),
    planted_holes.a_required_certificate_is_not_checked: (
        test_tls.test_certificate_of_another_authority_is_not_accepted
    ),
    planted_holes.a_frame_that_is_encrypted_is_cancelled: lambda _: (
        test_tls.test_unsubscribe_of_a_slow_reader_loses_and_doubles_no_message("auto")
    ),
    planted_holes.frames_that_are_encrypted_count_as_one: lambda _: (
        test_tls.test_unsubscribe_of_a_slow_reader_loses_and_doubles_no_message("auto")
    ),
    planted_holes.encrypted_bytes_count_as_taken: lambda _: (
        test_tls_socket.test_bytes_that_are_encrypted_and_not_taken_are_counted()
    ),
    planted_holes.records_that_a_cut_socket_has_taken_do_not_count: lambda _: (
        test_tls_socket.test_records_that_the_socket_has_taken_are_counted_before_all_are_taken()
    ),
    planted_holes.a_record_behind_another_is_not_read: lambda _: (
        test_tls_socket.test_records_that_came_together_are_read_together()
    ),
    planted_holes.a_producer_needs_no_right: of_jms_matrix("producer", "send {p}.q"),
    planted_holes.a_temporary_queue_of_another_jms_client_is_made: GUESSED_NAMES,
    planted_holes.a_temporary_queue_of_another_jms_client_is_removed: GUESSED_NAMES,
    planted_holes.an_id_of_another_connection_is_accepted: of_jms(
        lambda _, connect: test_raw_grants.test_ids_of_another_connection_are_refused_and_the_broker_names_no_user(
            connect
        )
    ),
    planted_holes.a_run_of_sends_of_a_jms_client_is_not_checked: of_jms_matrix("many sends", "send {p}.q"),
}


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Shorten the waits for what a hole may keep from a client."""
    patch.setattr(test_tls, "RECEIVE_SECONDS", PATIENCE_S)
    read = RawClient.read
    patch.setattr(RawClient, "read", lambda client, seconds=PATIENCE_S: read(client, min(seconds, PATIENCE_S)))


def test_holes_have_a_check_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opens every hole, also the ones that are not drawn, and runs no check."""
    assert list(CHECKS) == planted_holes.holes()
    for hole in CHECKS:
        with monkeypatch.context() as patch:
            hole(patch)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.drawn
@pytest.mark.parametrize("hole", CHECKS, ids=lambda hole: hole.__name__)
def test_check_fails_where(hole: Hole, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hurry(monkeypatch)
    hole(monkeypatch)
    serve_with_hole = partial(planted_holes.serve_with_hole, hole.__name__)

    def forked(*arguments: Any, **options: Any) -> Forked:
        return Forked(*arguments, **{**options, "run": partial(serve_with_hole, options.get("run"))})

    for module in (broker_process, test_tls, test_logins):
        monkeypatch.setattr(module, "Forked", forked)
    with pytest.raises(FOUND):
        CHECKS[hole](tmp_path)
    # Sockets of a check that fails are left open.
    gc.collect()


@pytest.mark.drawn
@pytest.mark.parametrize("hole", CHECKS, ids=lambda hole: hole.__name__)
def test_check_passes_without(hole: Hole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that fails in any case would notice nothing."""
    hurry(monkeypatch)
    CHECKS[hole](tmp_path)
