"""Planted holes in logins, grants, producers of users and TLS, which the tests of these must notice.

Each function opens one hole by replacing functions of the broker; its name says what is wrong. It opens it in the
test's process, and, by `serve_with_hole`, in that of a broker.
"""

from __future__ import annotations

import ssl
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from tests.unit.mutation import mutated
from truenext.broker import access, certificates, logins, producer_request
from truenext.broker.broker import Broker
from truenext.broker.connection_ends import ConnectionEnds
from truenext.broker.connection_list import ConnectionList
from truenext.broker.control_commands import ControlCommands
from truenext.broker.logins import Logins
from truenext.broker.passwords import find_credential
from truenext.broker.reply_rights import ReplyRights, _Repliers
from truenext.broker.takeovers import TakeoverSecrets
from truenext.broker.user_sessions import UserSessions
from truenext.broker.users import UserEntry, Users
from truenext.cli.main import main as truenext
from truenext.model import grants
from truenext.model.commands import (
    Browse,
    Commit,
    CreateTemporary,
    Disconnect,
    Login,
    OpenProducer,
    RemoveTemporary,
    Subscribe,
    Unsubscribe,
)
from truenext.model.destination import DestinationKind
from truenext.model.grants import Pattern, User
from truenext.model.pattern import matches
from truenext.server.connection import ServerConnection
from truenext.server.output import Output
from truenext.tls import TlsSocket
from truenext.wire.openwire.session import OpenWireSession


class Patch(Protocol):
    """Replacing of attributes and items, as by `pytest.MonkeyPatch`."""

    def setattr(self, target: Any, name: Any, value: Any, /) -> None:
        """Replace an attribute."""

    def setitem(self, dic: Mapping[Any, Any], name: Any, value: Any, /) -> None:
        """Replace an item."""


class _Lasting:
    """Replacing for the rest of a process."""

    def setattr(self, target: Any, name: Any, value: Any, /) -> None:
        setattr(target, name, value)

    def setitem(self, dic: Any, name: Any, value: Any, /) -> None:
        dic[name] = value


Hole = Callable[[Patch], None]


def serve_with_hole(name: str, run: Callable[[Sequence[str]], object] | None, command: Sequence[str]) -> None:
    """Run a command of truenext in a process with a hole. `run` is another main function, such as that of a broker
    whose checks of passwords a test holds."""
    hole: Hole = globals()[name]
    hole(_Lasting())
    (run or truenext)(command)


def holes() -> list[Hole]:
    """Return all holes, in their order here."""
    own = [each for each in globals().values() if callable(each) and getattr(each, "__module__", "") == __name__]
    return [each for each in own if not isinstance(each, type) and each.__name__[0] != "_" and each not in _HELPERS]


def _change(patch: Patch, owner: Any, name: str, old: str, new: str) -> None:
    patch.setattr(owner, name, mutated(vars(owner)[name], old, new))


def _change_check(patch: Patch, command: type[Any], old: str, new: str) -> None:
    check = access.COMMAND_CHECKS[command]
    patch.setitem(access.COMMAND_CHECKS, command, mutated(check, old, new))


def _allow(patch: Patch, command: type[Any]) -> None:
    patch.setitem(access.COMMAND_CHECKS, command, access.check_nothing)


_HELPERS: Collection[object] = (serve_with_hole, holes)


# Patterns -------------------------------------------------------------------------------------------------------------


def a_grant_allows_a_pattern_that_it_overlaps(patch: Patch) -> None:
    def overlaps(own: tuple[str, ...], other: tuple[str, ...]) -> bool:
        if not own or not other:
            return not own and not other
        if ">" in (own[0], other[0]):
            return True
        return (own[0] == other[0] or "*" in (own[0], other[0])) and overlaps(own[1:], other[1:])

    def faulty(pattern: Pattern, requested: Pattern) -> bool:
        is_hidden = pattern.words[0] in ("*", ">") and requested.may_be_special
        return pattern.is_topic is requested.is_topic and not is_hidden and overlaps(pattern.words, requested.words)

    patch.setattr(Pattern, "covers", faulty)


def a_grant_of_all_queues_grants_dead_letters_and_queues_of_virtual_topics(patch: Patch) -> None:
    patch.setattr(Pattern, "may_be_special", False)


def a_grant_of_all_queues_grants_queues_of_virtual_topics(patch: Patch) -> None:
    def faulty(pattern: Pattern) -> bool:
        return not pattern.is_topic and len(pattern.words) > 1 and pattern.words[0] in ("DLQ", "Spark")

    patch.setattr(Pattern, "may_be_special", property(faulty))


def a_grant_of_queues_is_one_of_topics(patch: Patch) -> None:
    _change(patch, Pattern, "covers", "if self.is_topic is not requested.is_topic:", "if False:")


def a_grant_of_one_word_grants_many(patch: Patch) -> None:
    _change(patch, Pattern, "covers", """ and ("*", ">") not in zip(own, other, strict=False)""", "")


def a_grant_of_what_begins_with_a_name_grants_the_name(patch: Patch) -> None:
    def faulty(own: Sequence[str], other: Sequence[str]) -> bool:
        return matches(own, other) or (len(own) > 1 and own[-1] == ">" and matches(own[:-1], other))

    patch.setattr(grants, "matches", faulty)


def each_right_gives_all_others(patch: Patch) -> None:
    _change(patch, User, "may", "self.grants[right]", "set().union(*self.grants.values())")


def a_client_id_that_begins_like_the_name_is_the_users(patch: Patch) -> None:
    _change(patch, User, "owns_client_id", """f"{self.name}.\"""", "self.name")


# Requests -------------------------------------------------------------------------------------------------------------


def of_several_destinations_only_the_first_is_checked(patch: Patch) -> None:
    _change(patch, access, "_require_send", "in destination.parts:", "in destination.parts[:1]:")


def of_several_destinations_of_scheduled_sends_only_the_first_is_checked(patch: Patch) -> None:
    _change(patch, access, "_require_on_scheduled", "destination.parts or", "destination.parts[:1] or")


def messages_are_moved_without_a_right_on_the_target(patch: Patch) -> None:
    _change_bulk(patch, "if isinstance(bulk_request, bulk.Move):", "if False:")


def a_selector_counts_messages_without_the_right_to_browse(patch: Patch) -> None:
    _change_bulk(patch, "bulk_request.selector is not None or", "False or")


def scheduled_sends_without_a_queue_are_anybodys(patch: Patch) -> None:
    _change(patch, access, "_require_on_scheduled", "if not user.is_admin:", "if False:")


def _change_bulk(patch: Patch, old: str, new: str) -> None:
    faulty = mutated(access._check_bulk, old, new)
    for verb, check in access.VERB_CHECKS.items():
        if check is access._check_bulk:
            patch.setitem(access.VERB_CHECKS, verb, faulty)


def a_durable_subscription_takes_any_client_id(patch: Patch) -> None:
    _change_check(patch, Subscribe, "if subscribe.durable_key:", "if False:")


def a_durable_subscription_of_another_client_id_can_be_ended(patch: Patch) -> None:
    _allow(patch, Unsubscribe)


def a_durable_subscription_is_browsed_without_a_right_on_its_topic(patch: Patch) -> None:
    patch.setattr(access, "check_browsed_subscription", lambda *_: None)


def a_durable_subscription_is_managed_by_its_name_as_a_queue(patch: Patch) -> None:
    _change(patch, access, "_named_by_queue", "if name.startswith(SUBSCRIPTION_PREFIX):", "if False:")


def existence_of_a_durable_subscription_is_looked_at_before_the_client_id(patch: Patch) -> None:
    _change_check(patch, Browse, "_require_client_id(user, browse.destination.name)", "pass")
    allowed = UserSessions._browse

    def faulty(users: UserSessions, session: Any, browse: Browse) -> None:
        if browse.destination.kind is DestinationKind.DURABLE:
            users._engine.queues.require_durable(browse.destination.name)
            access._require_client_id(users._users[session].user, browse.destination.name)
        allowed(users, session, browse)

    patch.setattr(UserSessions, "_browse", faulty)


def a_temporary_queue_of_another_connection_can_be_read(patch: Patch) -> None:
    _change(patch, access, "_require_reading", "elif destination.session != session.id:", "elif False:")


def a_user_may_send_to_any_temporary_queue(patch: Patch) -> None:
    _change(patch, ReplyRights, "_target", "if not self._may_reply(user, destination.session, address):", "if False:")


def a_temporary_queue_is_made_by_another_user(patch: Patch) -> None:
    _change(
        patch,
        ReplyRights,
        "_target",
        "if not self._is_there(destination):\n        return _NOWHERE",
        "if not self._is_there(destination):\n        return destination",
    )


def a_send_to_a_temporary_queue_that_is_not_there_is_refused(patch: Patch) -> None:
    _change(patch, ReplyRights, "_target", "if not self._is_there(destination):", "if False:")


def a_reply_to_a_caller_that_is_gone_is_refused(patch: Patch) -> None:
    _change(
        patch,
        ReplyRights,
        "_target",
        "if owner is None:\n        return _NOWHERE",
        "if owner is None:\n        raise _no_right_error(user, destination.address, destination.address)",
    )


def a_reply_to_is_not_checked(patch: Patch) -> None:
    _change(patch, ReplyRights, "_check_reply_to", "if name != user.name and", "if False and")


def a_reply_to_that_is_not_there_yet_is_not_checked(patch: Patch) -> None:
    _change(
        patch,
        ReplyRights,
        "_check_reply_to",
        "if owner is None:",
        "if owner is None or not self._engine.queues.has_temporary(address.removeprefix('/remote-temp-queue')):",
    )


def of_a_composite_reply_to_only_the_first_part_is_checked(patch: Patch) -> None:
    _change(
        patch,
        ReplyRights,
        "_check_reply_to",
        "in _named_in(reply_to_address(send.message)):",
        "in _named_in(reply_to_address(send.message))[:1]:",
    )


def of_a_composite_destination_temporary_queues_are_not_checked(patch: Patch) -> None:
    _change(patch, ReplyRights, "check", "elif any(map(is_private, destination.parts)):", "elif False:")


def the_last_destination_is_not_checked_again(patch: Patch) -> None:
    _change(
        patch,
        UserSessions,
        "guard",
        "not any(map(access.is_private, destination.parts or (destination,)))",
        "True",
    )


def a_reply_to_is_not_checked_at_the_last_destination(patch: Patch) -> None:
    _change(patch, UserSessions, "guard", " and not send.names_destinations:", ":")


def a_report_or_handler_is_checked_at_the_first_send_alone(patch: Patch) -> None:
    _change(patch, UserSessions, "guard", " and not send.names_destinations:", ":")


def a_handler_needs_no_right(patch: Patch) -> None:
    _change(patch, access, "require_send_rights", "in send.failure_destinations:", "in send.failure_destinations[:1]:")


def a_report_needs_no_right(patch: Patch) -> None:
    _change(patch, access, "require_send_rights", "in send.failure_destinations:", "in send.failure_destinations[1:]:")


def a_browser_gives_the_right_to_reply(patch: Patch) -> None:
    _change(
        patch,
        Broker,
        "_run_turn",
        "note_dispatched(deliveries)",
        "note_dispatched({**deliveries, **{one.browser: one.entries for one in browse_slices}})",
    )


def a_dispatch_gives_no_right_to_reply(patch: Patch) -> None:
    patch.setattr(ReplyRights, "note_dispatched", lambda *_: None)


def of_a_composite_reply_to_only_the_first_part_gives_a_right(patch: Patch) -> None:
    _change(patch, ReplyRights, "_add_rights", "in _named_in(reply_to):", "in _named_in(reply_to)[:1]:")


def the_right_to_reply_to_a_topic_is_one_to_the_queue_of_its_name(patch: Patch) -> None:
    may_reply = _Repliers.may_reply

    def faulty(own: _Repliers, user: str, address: str) -> bool:
        return any(may_reply(own, user, address.replace(*kinds)) for kinds in (("queue", "topic"), ("topic", "queue")))

    patch.setattr(_Repliers, "may_reply", faulty)


def a_queue_that_exists_is_forgotten_with_old_topics(patch: Patch) -> None:
    _change(patch, ReplyRights, "_add_rights", "by_address = repliers.queues", "by_address = repliers.others")


def a_user_that_a_reload_removes_keeps_the_right_to_reply(patch: Patch) -> None:
    patch.setattr(ReplyRights, "keep_users", lambda *_: None)


def the_right_to_send_is_remembered_for_all_users_together(patch: Patch) -> None:
    remembered: set[str] = set()
    # Each user sets an attribute of its own where this is looked up first.
    patch.setattr(User, "sendable_queues", property(lambda _: remembered, lambda *_: None))


def a_verb_that_is_missing_in_the_table_is_allowed(patch: Patch) -> None:
    patch.setitem(access.VERB_CHECKS, "status", access._allow_verb)


def a_reload_needs_no_admin(patch: Patch) -> None:
    patch.setitem(access.VERB_CHECKS, "reload", access._allow_verb)


def a_failover_needs_no_admin(patch: Patch) -> None:
    patch.setitem(access.VERB_CHECKS, "failover", access._allow_verb)


def a_backup_needs_no_admin(patch: Patch) -> None:
    patch.setitem(access.VERB_CHECKS, "backup", access._allow_verb)


def connections_need_no_monitor(patch: Patch) -> None:
    patch.setitem(access.VERB_CHECKS, "connections", access._allow_verb)


def a_close_needs_no_admin(patch: Patch) -> None:
    patch.setitem(access.VERB_CHECKS, "close", access._allow_verb)


def a_history_needs_no_monitor(patch: Patch) -> None:
    patch.setitem(access.VERB_CHECKS, "history", access._allow_verb)


def causes_in_a_history_need_no_admin(patch: Patch) -> None:
    patch.setattr(UserSessions, "is_admin", UserSessions.sees_all)


def security_events_need_no_admin(patch: Patch) -> None:
    patch.setitem(access.VERB_CHECKS, "security", access._require_monitor)


def a_queue_is_inspected_without_a_right_on_it(patch: Patch) -> None:
    patch.setitem(access.VERB_CHECKS, "consumers", access._allow_verb)


def a_policy_is_shown_without_a_right_on_the_queue(patch: Patch) -> None:
    patch.setitem(access.VERB_CHECKS, "policy", access._allow_verb)


def dead_letters_are_counted_by_a_user_who_may_manage_them(patch: Patch) -> None:
    _change_bulk(patch, 'in ("scheduled", "dead-letters")', 'in ("scheduled",)')


def a_group_is_chosen_without_the_right_to_browse(patch: Patch) -> None:
    _change_bulk(patch, " or bulk.group_of(bulk_request) is not None", "")


def a_consumer_of_another_user_is_shown_with_its_address(patch: Patch) -> None:
    _change(patch, ConnectionList, "identify", "if not sees_all and", "if False and")


def a_temporary_queue_of_another_connection_is_inspected(patch: Patch) -> None:
    check = mutated(access.VERB_CHECKS["policy"], '_require_name(user, "inspect", name)', "pass")
    patch.setitem(access.VERB_CHECKS, "policy", check)


def a_connection_is_named_by_its_id(patch: Patch) -> None:
    _change(patch, ConnectionList, "name_of", 'f"{self._prefix}{number}"', "session.id")


def a_close_counts_attempts(patch: Patch) -> None:
    _change(patch, ServerConnection, "end_exempt", "is_exempt=True", "is_exempt=False")


def queues_are_listed_for_users_without_a_right_on_them(patch: Patch) -> None:
    patch.setattr(access, "may_see", lambda *_: True)


def equal_requests_of_two_users_share_an_answer(patch: Patch) -> None:
    _change(
        patch,
        ControlCommands,
        "execute",
        "about=None if self._users.sees_all(session) else session",
        "about=None",
    )


def a_refused_request_has_been_executed(patch: Patch) -> None:
    _change(
        patch,
        UserSessions,
        "_guarded",
        "check(user, session, command)\n            action(session, command)",
        "action(session, command)\n            check(user, session, command)",
    )


# Producers ------------------------------------------------------------------------------------------------------------


def a_producer_is_known_without_its_user(patch: Patch) -> None:
    patch.setattr(access, "user_producer", lambda _, name: name)


def a_numbered_send_to_the_last_destination_is_without_its_user(patch: Patch) -> None:
    _change(
        patch,
        UserSessions,
        "guard",
        "if is_last and send.producer is None and",
        "if is_last and",
    )


def a_numbered_commit_is_without_its_user(patch: Patch) -> None:
    _allow(patch, Commit)


def a_producer_of_another_user_is_forgotten(patch: Patch) -> None:
    _allow(patch, Disconnect)


def a_producer_of_another_user_is_reported_and_resolved(patch: Patch) -> None:
    _change(patch, producer_request, "make_producer_report", "key_of(request.producer)", "request.producer")


# Logins ---------------------------------------------------------------------------------------------------------------


def a_remembered_login_is_one_of_any_password(patch: Patch) -> None:
    _change(patch, Logins, "_digest", "{login.user}\\0{login.passcode}", "{login.user}")


def a_remembered_login_outlives_the_password(patch: Patch) -> None:
    _change(patch, Logins, "replace_users", "and credential in users[user].credentials", "")
    _accept_former_credentials(patch)


def _accept_former_credentials(patch: Patch) -> None:
    _change(
        patch,
        UserSessions,
        "find_user",
        "if not credential or entry is None or credential not in entry.credentials:",
        "if credential and entry is not None:\n        return SessionUser(entry.user, credential)\n    else:",
    )


def a_connection_outlives_its_password(patch: Patch) -> None:
    _change(patch, UserSessions, "replace", "elif credential not in entry.credentials:", "elif False:")


def a_connection_outlives_its_user(patch: Patch) -> None:
    _change(
        patch,
        UserSessions,
        "replace",
        "if entry is None:",
        "if entry is None:\n            continue\n        elif False:",
    )


def a_connection_keeps_a_right_over_a_reload(patch: Patch) -> None:
    _change(
        patch,
        UserSessions,
        "replace",
        "elif not entry.user.has_all_of(user):",
        "elif not entry.user.has_all_of(user):\n            continue\n        elif False:",
    )


def a_flag_that_is_lost_ends_no_connection(patch: Patch) -> None:
    _change(patch, User, "has_all_of", "and self.is_monitor >= other.is_monitor", "")


def a_login_after_a_reload_has_the_rights_of_before(patch: Patch) -> None:
    replace = Logins.replace_users

    def faulty(own: Logins, users: Users) -> None:
        former = own.users
        kept = {
            name: UserEntry(former[name].user, entry.hashes, entry.password, entry.certificates)
            if name in former
            else entry
            for name, entry in users.items()
        }
        replace(own, Users(kept))

    patch.setattr(Logins, "replace_users", faulty)


def guesses_of_a_user_are_not_counted(patch: Patch) -> None:
    patch.setattr(logins, "FAILED_LOGINS_PER_USER", sys.maxsize)


def guesses_of_an_address_are_not_counted(patch: Patch) -> None:
    patch.setattr(logins, "FAILED_LOGINS_PER_ADDRESS", sys.maxsize)


def guesses_lock_a_user_out_everywhere(patch: Patch) -> None:
    check = Logins.check

    def faulty(own: Logins, login: Login, address: str, on_checked: Callable[[str], object]) -> str:
        return check(own, login, "anywhere", on_checked)

    patch.setattr(Logins, "check", faulty)


def a_user_that_does_not_exist_is_refused_in_other_words(patch: Patch) -> None:
    _change(
        patch,
        UserSessions,
        "find_user",
        "RemoteProtocolError(WRONG_LOGIN,",
        "RemoteProtocolError(WRONG_LOGIN + login.user,",
    )


def the_hash_of_a_password_is_a_password(patch: Patch) -> None:
    def faulty(entry: UserEntry | None, passcode: str) -> str:
        return passcode if entry is not None and passcode in entry.hashes else find_credential(entry, passcode)

    patch.setattr(logins, "find_credential", faulty)


def the_name_of_a_failed_login_is_logged(patch: Patch) -> None:
    _change(patch, UserSessions, "_log_failed_login", """else "unknown\"""", "else login.user")


def a_connection_is_taken_over_by_another_user(patch: Patch) -> None:
    _change(patch, TakeoverSecrets, "take_over", "key = user, secret", 'key = "", secret')


# TLS ------------------------------------------------------------------------------------------------------------------


def a_certificate_of_one_user_is_one_of_all(patch: Patch) -> None:
    _change(
        patch,
        UserSessions,
        "is_login_checked",
        """in ("", found[0].user.name):
            login.user, self._checked_logins[session] = found[0].user.name, found[1]""",
        """in self._logins.users:
            self._checked_logins[session] = found[1]""",
    )
    _accept_former_credentials(patch)


def a_required_certificate_is_not_checked(patch: Patch) -> None:
    for each in certificates._VERIFY:
        patch.setitem(certificates._VERIFY, each, ssl.CERT_NONE)


def a_frame_that_is_encrypted_is_cancelled(patch: Patch) -> None:
    _change(patch, Output, "cancel_unsent", "(0 if self._tls is None else self._tls.encrypted_count)", "0")


def frames_that_are_encrypted_count_as_one(patch: Patch) -> None:
    _change(
        patch,
        ConnectionEnds,
        "cancel_unsent",
        "self._partially_sent.setdefault(session, deque()).append(entry)",
        "self._partially_sent[session] = deque([entry])",
    )


def encrypted_bytes_count_as_taken(patch: Patch) -> None:
    _change(patch, TlsSocket, "send", "return taken", "return taken + self.encrypted_count")


def records_that_a_cut_socket_has_taken_do_not_count(patch: Patch) -> None:
    patch.setattr(TlsSocket, "take_sent_records", lambda _: 0)


def a_record_behind_another_is_not_read(patch: Patch) -> None:
    _change(patch, TlsSocket, "recv", "if not incoming.pending:", "if True:")


# JMS clients ----------------------------------------------------------------------------------------------------------


def a_producer_needs_no_right(patch: Patch) -> None:
    _allow(patch, OpenProducer)


def a_temporary_queue_of_another_jms_client_is_made(patch: Patch) -> None:
    _allow(patch, CreateTemporary)


def a_temporary_queue_of_another_jms_client_is_removed(patch: Patch) -> None:
    _allow(patch, RemoveTemporary)


def an_id_of_another_connection_is_accepted(patch: Patch) -> None:
    patch.setattr(OpenWireSession, "_check_owner", lambda *_: None)


def a_run_of_sends_of_a_jms_client_is_not_checked(patch: Patch) -> None:
    _change(patch, UserSessions, "guard", "if last_targets.get(session) is run.destination:", "if True:")
