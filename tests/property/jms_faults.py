"""Planted faults of the session of JMS clients, and of what the engine does for it alone, that the machine of
jms_machine.py must notice.

Each function makes the code wrong in one way; its name says what is wrong. Faults of the engine that its own machines
notice are in planted_faults.py.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.property import planted_faults
from truenext.engine.lifecycle.pull_requests import PullRequests
from truenext.engine.state.queue import Entry
from truenext.errors import RemoteProtocolError
from truenext.model.commands import Abort, Command, Commit, Credit, Nack, ReceiptRequest
from truenext.server.ending import Ending
from truenext.wire.openwire import consumers as consumers_module
from truenext.wire.openwire.advisories import Advisories, AdvisoryBoard
from truenext.wire.openwire.consumers import Consumer, Consumers
from truenext.wire.openwire.recovery import Recovery
from truenext.wire.openwire.replies import OpenWireReplies
from truenext.wire.openwire.session import OpenWireSession
from truenext.wire.openwire.structures import MessageAck, MessagePull, TransactionInfo
from truenext.wire.openwire.transactions import ROLLBACK, Transactions

Patch = pytest.MonkeyPatch


def a_kept_message_is_dispatched_again_after_a_rollback(patch: Patch) -> None:
    planted_faults.a_kept_message_is_dispatched_again_after_a_rollback(patch)


def a_response_comes_before_the_disk(patch: Patch) -> None:
    planted_faults.a_receipt_leaves_before_the_batch_is_durable(patch)


def a_response_comes_when_the_batch_is_handed_to_the_disk(patch: Patch) -> None:
    planted_faults.a_receipt_leaves_when_the_batch_is_handed_over(patch)


def a_rollback_widens_the_window(patch: Patch) -> None:
    control = Transactions.control

    def faulty(transactions: Transactions, info: TransactionInfo) -> Iterator[Command]:
        kept = transactions._kept(transactions.name_of(info.transaction_id) or "")
        yield from control(transactions, info)
        if info.operation == ROLLBACK:
            for consumer, sequences in kept.items():
                consumer.requested -= len(sequences)

    patch.setattr(Transactions, "control", faulty)


def an_acknowledgement_widens_the_window(patch: Patch) -> None:
    remove = Consumer.remove

    def faulty(consumer: Consumer, sequence: int) -> None:
        remove(consumer, sequence)
        consumer.requested -= 1

    patch.setattr(Consumer, "remove", faulty)


def a_prefetch_is_taken_for_a_number_of_messages_not_delivered_yet(patch: Patch) -> None:
    patch.setattr(Consumer, "lacking", property(lambda consumer: consumer.prefetch and not consumer.is_browser))


def a_report_of_delivery_covers_one_message(patch: Patch) -> None:
    patch.setattr(Consumer, "mark_delivered", Consumer.mark_one_delivered)


def a_pull_is_never_withdrawn(patch: Patch) -> None:
    patch.setattr(PullRequests, "end_overdue", lambda requests: requests._end_heap.clear())


def a_pull_without_time_waits(patch: Patch) -> None:
    def faulty(consumers: Consumers, pull: MessagePull) -> Iterator[Command]:
        for command in original(consumers, pull):
            if isinstance(command, Credit):
                command.waits = True
            yield command

    original = Consumers.pull
    patch.setattr(Consumers, "pull", faulty)


def a_client_is_not_told_that_its_pull_is_over(patch: Patch) -> None:
    patch.setattr(consumers_module, "PULL", None)


def _closes(patch: Patch, change: Callable[[list[Consumer], int], int]) -> None:
    original = Consumers.close

    def faulty(consumers: Consumers, ended: list[Consumer], last_delivered: int) -> Iterator[Command]:
        return original(consumers, ended, change(ended, last_delivered))

    patch.setattr(Consumers, "close", faulty)


def an_end_without_a_last_delivered_message_counts_an_attempt(patch: Patch) -> None:
    _closes(patch, lambda ended, last: next(iter(ended[0].held), last) if ended and last < 0 else last)


def an_end_with_a_last_delivered_message_counts_no_attempt(patch: Patch) -> None:
    _closes(patch, lambda ended, last: -1)


def an_end_of_a_consumer_requeues_what_it_has_kept(patch: Patch) -> None:
    patch.setattr(Transactions, "take_over", lambda transactions, consumers: iter(()))


def a_rollback_counts_an_attempt_for_what_a_consumer_has_left_to_it(patch: Patch) -> None:
    original = Transactions.control

    def faulty(transactions: Transactions, info: TransactionInfo) -> Iterator[Command]:
        for command in original(transactions, info):
            if isinstance(command, Abort):
                command.counts_all = True
            yield command

    patch.setattr(Transactions, "control", faulty)


def a_commit_leaves_out_an_acknowledgement(patch: Patch) -> None:
    original = Transactions._commit

    def faulty(transactions: Transactions, name: str, command_id: int) -> Iterator[Command]:
        for command in original(transactions, name, command_id):
            if isinstance(command, Commit):
                command.acks = command.acks[1:]
            yield command

    patch.setattr(Transactions, "_commit", faulty)


def a_transaction_with_acknowledgements_of_an_earlier_connection_is_committed(patch: Patch) -> None:
    original = Transactions._commit

    def faulty(transactions: Transactions, name: str, command_id: int) -> Iterator[Command]:
        transactions._unmatched.discard(name)
        return original(transactions, name, command_id)

    patch.setattr(Transactions, "_commit", faulty)


def a_repeated_transaction_without_acknowledgements_is_committed(patch: Patch) -> None:
    patch.setattr(Recovery, "doubtful_sessions", lambda recovery, name, commit_id: set())


def a_repeated_transaction_is_rolled_back_whatever_its_command_ids_show(patch: Patch) -> None:
    original = Recovery.doubtful_sessions
    patch.setattr(Recovery, "doubtful_sessions", lambda recovery, name, commit_id: original(recovery, name, -1))


def each_transaction_of_a_client_that_has_connected_again_counts_as_repeated(patch: Patch) -> None:
    patch.setattr(Recovery, "note_commit", lambda recovery: None)


def a_range_is_one_of_sequences(patch: Patch) -> None:
    def faulty(consumer: Consumer, ack: MessageAck) -> list[int]:
        covered = original(consumer, ack)
        return [each for each in consumer.held if covered[0] <= each <= covered[-1]] if covered else []

    original = Consumer.covered
    patch.setattr(Consumer, "covered", faulty)


def a_poison_acknowledgement_rejects_only_its_last_message(patch: Patch) -> None:
    def faulty(consumers: Consumers, ack: MessageAck, consumer: Consumer) -> Iterator[Command]:
        commands = list(original(consumers, ack, consumer)) if ack.ack_type == consumers_module.POISON else None
        return original(consumers, ack, consumer) if commands is None else iter(commands[-1:])

    original = Consumers.acknowledge
    patch.setattr(Consumers, "acknowledge", faulty)


def a_poison_acknowledgement_loses_its_cause(patch: Patch) -> None:
    def faulty(consumers: Consumers, ack: MessageAck, consumer: Consumer) -> Iterator[Command]:
        for command in original(consumers, ack, consumer):
            if isinstance(command, Nack):
                command.cause = ""
            yield command

    original = Consumers.acknowledge
    patch.setattr(Consumers, "acknowledge", faulty)


def a_report_of_redelivery_counts_an_attempt(patch: Patch) -> None:
    def faulty(consumers: Consumers, ack: MessageAck, consumer: Consumer) -> Iterator[Command]:
        yield from original(consumers, ack, consumer)
        if ack.ack_type == consumers_module.REDELIVERED:
            for sequence in consumers.require_covered(ack, consumer):
                yield Nack(consumer.subscription, sequence)
                consumer.remove(sequence)

    original = Consumers.acknowledge
    patch.setattr(Consumers, "acknowledge", faulty)


def the_redelivery_counter_counts_deliveries(patch: Patch) -> None:
    patch.setattr(Entry, "redelivery_count", property(lambda entry: entry.deliveries - 1))


def the_redelivery_counter_says_nothing_of_lost_connections(patch: Patch) -> None:
    patch.setattr(Entry, "redelivery_count", property(lambda entry: entry.attempts))


def a_request_whose_command_is_refused_is_answered_twice(patch: Patch) -> None:
    def faulty(session: OpenWireSession, structure: Any, error: RemoteProtocolError) -> Iterator[Command]:
        receipt = session.last_receipt
        yield from original(session, structure, error)
        if receipt is not None:
            yield ReceiptRequest(receipt)

    original = OpenWireSession._refuse
    patch.setattr(OpenWireSession, "_refuse", faulty)


def a_request_is_not_answered_if_nothing_was_to_do(patch: Patch) -> None:
    def faulty(session: OpenWireSession, structure: Any) -> Iterator[Command]:
        commands = list(original(session, structure)) if isinstance(structure, TransactionInfo) else None
        if commands is None:
            yield from original(session, structure)
        elif len(commands) > 1:
            yield from commands

    original = OpenWireSession._execute
    patch.setattr(OpenWireSession, "_execute", faulty)


def an_advisory_comes_after_the_message(patch: Patch) -> None:
    patch.setattr(Advisories, "announce_reply_to", lambda advisories, deliveries: None)


def only_one_connection_of_a_process_is_told(patch: Patch) -> None:
    def faulty(board: AdvisoryBoard, process: Any, advisories: Any) -> None:
        for member in list(board._members.get(process, ()))[:1]:
            member.send(advisories)

    patch.setattr(AdvisoryBoard, "_send", faulty)


def the_end_of_a_temporary_destination_is_told_when_the_socket_is_closed(patch: Patch) -> None:
    def faulty(ending: Ending, *, is_exempt: bool = False) -> None:
        ending.discard_input()
        ending._broker.ends.lost(ending._session, is_exempt=is_exempt)

    patch.setattr(Ending, "_end_session", faulty)


def a_later_connection_of_a_process_is_told_nothing(patch: Patch) -> None:
    def faulty(board: AdvisoryBoard, process: Any, advisories: Advisories) -> tuple[()]:
        original(board, process, advisories)
        return ()

    original = AdvisoryBoard.add
    patch.setattr(AdvisoryBoard, "add", faulty)


def the_end_of_a_browse_is_not_told(patch: Patch) -> None:
    patch.setattr(OpenWireReplies, "encode_end_of_browse", lambda *_: b"")


def a_numbered_send_is_repeated(patch: Patch) -> None:
    from truenext.wire.openwire.producers import Producers

    patch.setattr(Producers, "numbers_sends", property(lambda _: False, lambda *_: None), raising=False)


def a_producer_is_not_forgotten(patch: Patch) -> None:
    from truenext.wire.openwire.producers import Producers

    patch.setattr(Producers, "remove", lambda producers, producer_id: [])


def faults() -> list[Callable[[Patch], None]]:
    """Return all faults of this file."""
    return [
        each
        for name, each in globals().items()
        if callable(each)
        and getattr(each, "__module__", "") == __name__
        and not name.startswith("_")
        and name != "faults"
    ]
