"""SEND: accepts a message. The destination, the time and the transaction decide how. Source: docs/contract.md

to one queue          the message is accepted at once
to several queues     each queue accepts a copy
scheduled             the message is stored until it is due (background/scheduled.py)
in a transaction      the transaction keeps the message until COMMIT (transactions.py)
rejected              the transaction keeps its dead letter and its report instead
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec.structs import replace

from truenext.engine.background.scheduled import Scheduler
from truenext.engine.lifecycle.arrivals import Arrivals
from truenext.engine.lifecycle.redelivery import REJECTED, make_dead_letter, make_report
from truenext.engine.queues.queues import Queues
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.transaction import BrokerTransaction, TransactionLimits, send_count
from truenext.engine.writing.engine_state import EngineState
from truenext.errors import Code, NoSpaceError, RemoteProtocolError
from truenext.model.batch import Causes
from truenext.model.commands import Begin, Command, Commit, Send, SendRun
from truenext.model.destination import SPARK_PREFIX, Destination, DestinationKind
from truenext.model.disk_level import DISK_FULL, DRAINED, DiskLevel
from truenext.model.limits import (
    COPIES_MAX,
    ROUTING_STEP_NS,
    SPARK_SURPLUS_BYTES_MAX,
    TRANSACTION_CRON_SENDS_MAX,
    TRANSACTION_QUEUE_COUNT,
    TRANSACTION_QUEUES_UNCOUNTED,
)
from truenext.model.message import SentMessage, with_ttl
from truenext.model.policy import WhenFull
from truenext.model.schedule import Schedule

# Looking up an enumeration's member costs more than a global name, and this one is needed for every message.
_DISK_PLENTY = DiskLevel.PLENTY
_DISK_NONE = DiskLevel.NONE


class Sending:
    def __init__(
        self,
        state: EngineState,
        queues: Queues,
        arrivals: Arrivals,
        scheduler: Scheduler,
        when_full: WhenFull,
        limits: TransactionLimits,
    ) -> None:
        self._commit_state = state.commit_state
        self._memory = state.memory
        self._queues = queues
        self._by_name = queues.by_name
        self._arrivals = arrivals
        self._scheduler = scheduler
        self._producers_of = state.producers_of
        self._when_full = when_full
        self._limits = limits
        self._copies_max = max(COPIES_MAX, limits.messages)
        """Maximum number of copies that one command may make."""

    def send(self, session: ConnectionState, send: Send) -> None:
        """Accept a message, schedule it, or add it to a transaction. A repeat does nothing.

        Raises: RemoteProtocolError if there is no such transaction, or a limit is reached. NoSpaceError if disk or
        memory has no space for the message.
        """
        if send.transaction is not None:
            for each in (send,) if send.rejected_for is None else self._rejected(send):
                self._send_in_transaction(session, each, send.transaction)
            return
        if send.producer is not None and self.is_repeat(session, send):
            return
        session.has_sent = True
        if self._commit_state.disk_level is not _DISK_PLENTY:
            self._check_disk(session, send)
        if send.ttl_ms:
            send = self.with_ttl(send)
        message = send.message
        destination = send.destination
        if send.schedule is not None:
            # Raise errors now: when the send is due, no client is there to get an ERROR.
            self._queues.create_for_schedule(destination, self._queues.get_or_create)
            self._queues.await_introduction(session, destination)
            is_stored = message.persistent
            self.schedule(destination, message, send.schedule)
        elif destination.is_multi_queue:
            queues = self._queues.queues_for(send, self._queues.get_or_create)
            self.check_copies(len(queues) * send_count(send))
            self._commit_state.is_read_long = True
            is_stored = self._arrivals.accept_copies(queues, message)
            self._queues.await_introduction(session, destination)
        else:
            # A shortcut: most queues exist.
            queue = self._by_name.get(destination.name)
            if queue is None:
                self._commit_state.is_read_long = True
                queue = self._queues.get_or_create(destination)
                self._queues.await_introduction(session, destination)
            is_stored = queue is not None and self._arrivals.accept(queue, message)
        if send.producer is not None:
            self._producers_of(session).record_use(send, is_stored=is_stored)
        if is_stored:
            session.last_batch = self._commit_state.batch.number

    def send_run(self, session: ConnectionState, run: SendRun) -> None:
        """Accept all SENDs of a run at once and set `run.executed`, or accept none. None is accepted if disk space is
        short, the queue is missing, or messages need more than a position in the queue and storing."""
        queue = self._by_name.get(run.destination.name)
        if (
            queue is None
            or run.destination.is_multi_queue
            or self._commit_state.disk_level is not _DISK_PLENTY
            or not self._arrivals.may_accept_run(queue, len(run))
        ):
            return
        run.executed = len(run)
        session.has_sent = True
        if self._arrivals.accept_run(queue, run.messages):
            session.last_batch = self._commit_state.batch.number

    def _send_in_transaction(self, session: ConnectionState, send: Send, name: str) -> None:
        if send.producer is not None:
            raise RemoteProtocolError(
                "a SEND in a transaction must not have truenext-number: number the COMMIT instead"
            )
        transaction = session.transaction(name)
        memory = self._memory
        size = len(send.message.header) + len(send.message.body)
        count = send_count(send)
        session.transactions.check_limits(self._limits, count=count, size=size)
        has_cron = send.schedule is not None and send.schedule.cron != ""
        if has_cron and transaction.cron_count >= TRANSACTION_CRON_SENDS_MAX:
            raise RemoteProtocolError(
                f"more than {TRANSACTION_CRON_SENDS_MAX} sends with AMQ_SCHEDULED_CRON in one transaction: commit more "
                "often, or send them outside of a transaction",
                Code.LIMIT,
            )
        if not memory.has_space_for_send(size):
            raise NoSpaceError(
                f"open transactions of all connections have {memory.transaction_bytes} of at most "
                f"{memory.transaction_bytes_max} bytes (--memory-limit), too many for this SEND; commit, or "
                "try again later"
            )
        session.has_sent = True
        if self._commit_state.disk_level is not _DISK_PLENTY:
            self._check_disk(session, send, transaction)
        queues_before = len(transaction.reserved_queues)
        self._queues.reserve(send, transaction.reserved_queues)
        new_queues = len(transaction.reserved_queues) - max(queues_before, TRANSACTION_QUEUES_UNCOUNTED)
        if new_queues > 0:
            count += TRANSACTION_QUEUE_COUNT * new_queues
            # If refused, the queues stay reserved until the transaction ends, which can only be aborted now.
            session.transactions.check_limits(self._limits, count=count)
        transaction.sends.append(send)
        transaction.cron_count += has_cron
        if send.destination.is_multi_queue and send.schedule is None:
            transaction.sends_of_copies.append(send)
        if transaction.balance is not None:
            transaction.balance.send(send)
        session.transactions.add_usage(transaction, count=count, size=size)
        memory.transaction_bytes += size

    def _rejected(self, send: Send) -> Iterator[Send]:
        """Yield the send of the dead letter, or to the next handler, that takes the place of a rejecting send, and the
        send of its report, if it has one."""
        now_ms = self._commit_state.now_ms
        message = with_ttl(send.message, send.ttl_ms, now_ms) if send.ttl_ms else send.message
        message.arrived_ms = now_ms
        cause = send.rejected_for or ""
        failed = make_dead_letter(
            message,
            send.destination.name,
            self._queues.policies.for_queue(send.destination.name),
            attempts=1,
            causes=Causes(cause, cause),
            reason=REJECTED,
            now_ms=now_ms,
        )
        yield Send(failed.destination, failed.message, send.transaction, send.producer, send.number)
        report = None if failed.is_handled else make_report(failed)
        if report is not None:
            yield Send(*report, send.transaction)

    def check_copies(self, count: int) -> None:
        """Check the number of copies that a command would make. `count` counts copies as `send_count` says.

        Raises: RemoteProtocolError if the number is greater than one command may make.
        """
        if count > self._copies_max:
            raise RemoteProtocolError(
                f"{count} copies, more than the {self._copies_max} that one SEND or COMMIT may make, where copies with "
                "a group or an expiry count twice: commit more often, or send to fewer topics and queues at once",
                Code.LIMIT,
            )

    def find_queues_ahead(self, session: ConnectionState, command: Command) -> Iterator[None] | None:
        """Return a generator that searches for the queues of the command's messages to topics, a part of the search in
        each step. None if the search is so quick that executing the command can include it."""
        if not self._queues.topics.may_take_long:
            return None
        sends: list[Send] = []
        if isinstance(command, Send) and command.destination.is_multi_queue and command.schedule is None:
            # A send in a transaction is routed at COMMIT, unless its copies are counted at once.
            if command.transaction is None or self._commit_state.disk_level is _DISK_NONE:
                sends.append(command)
        elif not isinstance(command, Commit):
            return None
        if command.transaction is not None:
            transaction = session.transactions.get(command.transaction)
            if transaction is not None and (sends or isinstance(command, Commit)):
                sends += transaction.sends_of_copies
        cost_ns = 0
        for send in sends:
            cost_ns += self._queues.routing_ns(send.destination, send.message, send.ahead)
            if cost_ns > ROUTING_STEP_NS:
                return self._find_queues_ahead(sends)
        return None

    def _find_queues_ahead(self, sends: Iterable[Send]) -> Iterator[None]:
        count = 0
        for send in sends:
            message = self.with_ttl(send).message if send.ttl_ms else send.message
            send.ahead = send.ahead or self._queues.new_route_ahead()
            yield from self._queues.find_ahead(send.ahead, send.destination, message)
            yield
            count += send.ahead.count * send_count(send)
            if count > self._copies_max:
                # The command will be refused.
                return

    def with_ttl(self, send: Send) -> Send:
        """Return the send with an expiry: its time to live, counted from now."""
        return replace(send, message=with_ttl(send.message, send.ttl_ms, self._commit_state.now_ms))

    def schedule(self, destination: Destination, message: SentMessage, schedule: Schedule) -> None:
        """Store a send until it is due."""
        name = destination.name
        if destination.is_multi_queue:
            name, schedule = "", replace(schedule, to=destination.address)
        self._scheduler.accept(name, message, schedule)
        self._commit_state.is_batch_awaited |= message.persistent

    def is_repeat(self, session: ConnectionState, command: Send | Commit) -> bool:
        """Return whether the command is a repeat: its producer has used its number before. Notes this in the command.
        The receipt of a repeat waits until the first use of the number is durable.

        Raises: RemoteProtocolError if the number may not be used, or there are too many producers.
        """
        known = self._producers_of(session).find_repeat(command)
        if known is None:
            return False
        # The first use may have created a queue that must be kept, even if nothing else of it was stored.
        session.last_batch = max(session.last_batch, known.batch, self._queues.introduction_batch)
        return True

    # ---- Short disk space ----

    def _check_disk(self, session: ConnectionState, send: Send, transaction: BrokerTransaction | None = None) -> None:
        """Check a send while free disk space is short. `transaction` is the send's transaction, if it has one.

        Raises: NoSpaceError if the disk has no space for this send.
        """
        if self._never_waits(send.destination):
            return
        level = self._commit_state.disk_level
        if level is DiskLevel.NONE and transaction is not None:
            if not transaction.counted_balance().allows(send, self._queues.copy_count):
                raise _disk_full_error(
                    "; or use a transaction that first acknowledges messages, of at least as many bytes as it sends "
                    f"(except {SPARK_SURPLUS_BYTES_MAX} bytes to queues Spark.*)"
                )
            return
        does_not_wait = session.stays_after_refusal or self._when_full is WhenFull.REFUSE
        if level >= DiskLevel.NONE or (session.only_sends and does_not_wait):
            raise self._wait_error()

    def contents_to_count(self, session: ConnectionState, command: Command) -> Collection[int]:
        """Return the numbers of shared contents whose copies the store must count before this SEND is executed. The
        counts show how many bytes its transaction frees, which limits its sends while the disk level is NONE. At any
        other level the result is empty. The caller passes the counts to `count_contents`."""
        if self._commit_state.disk_level is not DiskLevel.NONE or not isinstance(command, Send):
            return ()
        transaction = session.transactions.get(command.transaction or "")
        return () if transaction is None else transaction.counted_balance().shared_copies

    def count_contents(self, session: ConnectionState, command: Command, references: Mapping[int, int]) -> None:
        """Note the store's number of copies of each content that `contents_to_count` has returned."""
        assert isinstance(command, Send) and command.transaction is not None, "it has named contents"
        session.transactions[command.transaction].counted_balance().count_contents(references)

    def waits_while_disk_short(self, session: ConnectionState, command: Command) -> bool:
        """Return whether a command and all later commands of its connection must wait for disk space, or for the end of
        a drain. Only a connection that sends and does nothing else can wait.

        Raises: NoSpaceError instead of returning True if the connection stays open after a refused command.
        """
        if not self.waits_with_send(session):
            return False
        # A transaction frees space only by acknowledging messages, and this connection holds none.
        waits = isinstance(command, Begin) or (isinstance(command, Send) and not self._never_waits(command.destination))
        if waits and session.stays_after_refusal:
            raise self._wait_error()
        return waits

    def waits_with_send(self, session: ConnectionState) -> bool:
        """Return whether the next SEND of this connection must wait while disk space is short."""
        return self._when_full is WhenFull.SLOW and session.only_sends

    def _never_waits(self, destination: Destination) -> bool:
        """Return whether sends to this destination are accepted even from a connection that only sends: to a temporary
        queue always, and during a drain to a queue of Spark's queries, if the disk has space."""
        if destination.kind is DestinationKind.TEMPORARY:
            return True
        is_spark = destination.kind is DestinationKind.QUEUE and destination.name.startswith(SPARK_PREFIX)
        return is_spark and not self._commit_state.is_disk_short

    def _wait_error(self) -> NoSpaceError:
        """Return the error for a send that is refused because of the disk level."""
        return _disk_full_error() if self._commit_state.is_disk_short else NoSpaceError(DRAINED)


def _disk_full_error(advice: str = "") -> NoSpaceError:
    return NoSpaceError(f"{DISK_FULL}: free disk space, or try again when messages were consumed{advice}")
