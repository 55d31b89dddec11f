"""Workers: process each message of a stage in one transaction of SQL and one of the broker.

    received ─ run ─ checked ─ sent ─ SQL committed ─ committed ─ hooks
                   └ written to the outbox, with exactly-once processing

`message_state.py` has the states of a message, and the table of their transitions.

SQL is committed after two checks: the SQL transaction can still be committed, and the broker has taken the stage's
output into its transaction. After SQL's COMMIT only the broker's COMMIT is left, which includes the acknowledgement. An
exception before SQL's COMMIT rolls back both transactions. If a stage has not used SQL, the steps of SQL are skipped.

With exactly-once processing, the first SQL statement writes the message's id into the inbox. The last SQL statement
writes the output into the outbox, with the number that the broker's COMMIT will use. If the broker's COMMIT is then
lost, the relay sends the output under that number.

Source: docs/stages.md, "One transaction"; docs/stages-database.md
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial
from typing import TYPE_CHECKING

from truenext.clock import monotonic
from truenext.errors import InDoubt, RolledBack
from truenext.flows.envelope import PRIORITY_INTERACTIVE, Envelope, as_occurrence, decode_envelope
from truenext.flows.message_ids import inbox_id, output_seed
from truenext.model.failure_headers import ON_FAILURE, stored_handlers
from truenext.stage.broker_transaction import (
    BrokerUnavailable,
    MapToBrokerUnavailable,
    OutputRefused,
    encode_messages,
    is_disk_full,
    send_messages,
    sender_error,
    transaction_size,
)
from truenext.stage.core.errors import NoAttemptsLeft, Reject
from truenext.stage.core.failed_request import failed_request, reported_failure
from truenext.stage.core.failure import FAILURE, REPORT, cause_of, describe_error, is_text_too_long
from truenext.stage.core.outbox_unit import CommitNumber, EncodedMessage, OutboxUnit
from truenext.stage.core.output import Output
from truenext.stage.core.retry import EXHAUSTED
from truenext.stage.message_life import MessageLife
from truenext.stage.message_state import (
    ACKNOWLEDGING,
    COMMITTED,
    COMMITTING,
    REPEATED,
    RETURNED,
    RUNNING,
    SENDING,
    TRANSITIONS,
)
from truenext.stage.runner import StageRunner
from truenext.stage.sql.errors import (
    AlreadyProcessed,
    DatabaseErrorKind,
    DatabaseUnavailable,
    InProgress,
    OutboxBusy,
    ProducerLost,
)
from truenext.stage.user_code import call_after_commit, is_being_cancelled, run_user_coroutine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from truenext.client.tasks.connection import Message, Session
    from truenext.stage.context import ServiceContext
    from truenext.stage.core.definitions import Stage
    from truenext.stage.core.retry import RedeliveryPolicy, RetryDecision
    from truenext.stage.outbox.exactly_once import BorrowedProducer, ExactlyOnceProcessing
    from truenext.stage.pool import PriorityPool
    from truenext.stage.sql.work import AnySqlWork

_logger = logging.getLogger("truenext.stage")

SQL_RETRIES_MAX = 5
"""Number of times that a stage runs again at once after its SQL has conflicted with another transaction."""
PAUSE_S = 1.0
"""Seconds that a worker pauses when the output of an already processed message could not be sent."""
SQL_RETRY_PAUSE_S = 0.02
"""Seconds before a stage runs again after a conflict in SQL. Each further pause is twice as long."""
TIMEOUT_S = 60.0
"""Seconds that each step of a message may wait for the broker."""


class StageWorker:
    """Worker for one stage's messages in one pool (interactive messages, or all others). It processes several messages
    at once."""

    def __init__(
        self, context: ServiceContext, stage: Stage, pool: PriorityPool, exactly_once: ExactlyOnceProcessing | None
    ) -> None:
        self.context = context
        self.stage = stage
        self.pool = pool
        self.exactly_once = exactly_once
        # A subscriber has only the interactive pool, which gives it published messages of all priorities.
        self._is_interactive = pool.is_interactive and stage.endpoint.subscribed_topic is None
        self.active_count = 0
        self.progress_at = monotonic()
        """Monotonic time at which the processing of a message last ended, or the idle worker received a message."""

    async def handle(self, message: Message, session: Session) -> None:
        """Process one message, as the handler of `Connection.consume`. At the return, the session is committed or the
        message is settled, so `consume` has nothing left to commit.

        Raises: RolledBack, InDoubt or ConnectionLost if the broker is the cause, not the stage; CancelledError if the
        service stops
        """
        if not self.active_count:
            self.progress_at = monotonic()
        self.active_count += 1
        handler = MessageHandler(self, message, session)
        priority = self.context.interactive_priority
        try:
            if self._is_interactive:
                with priority.running_interactive():
                    await handler.handle()
            else:
                await priority.yield_to_interactive()
                await handler.handle()
        finally:
            self.active_count -= 1
            self.progress_at = monotonic()


class MessageHandler:
    """Handler of one message in one stage: runs the stage, commits, and settles the message."""

    def __init__(self, worker: StageWorker, message: Message, session: Session) -> None:
        self._context = context = worker.context
        self._stage = stage = worker.stage
        self._pool = pool = worker.pool
        self._exactly_once = worker.exactly_once
        self._message = message
        self._session = session
        self._life = MessageLife(context, stage, pool.name, message)
        self._runner = StageRunner(context, stage, pool, message, self._life)
        self._inbox_id = ""
        """Id of the message in the inbox; empty if the stage is not exactly-once."""
        self._error_kind = DatabaseErrorKind.APPLICATION

    async def handle(self) -> None:
        """Run the stage, commit, and settle the message, whatever the outcome.

        Raises: RolledBack, InDoubt or ConnectionLost if the broker is the cause, not the stage; CancelledError if the
        service stops
        """
        try:
            envelope = self._decode_envelope()
            self._life.record_start(envelope)
            await self._check_inbox(envelope)
            self._check_attempts()
            output = await self._run_until_committed(envelope)
        except AlreadyProcessed:
            await self._on_already_processed()
        except (InProgress, OutboxBusy, BrokerUnavailable) as error:
            await self._release(error)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                self._life.end("in doubt" if self._is_committing else "released", error)
                raise
            # The processing is not cancelled: the stage cancelled itself, or awaited something that was cancelled.
            await self._on_failed(error)
        except OutputRefused as error:
            await self._on_failed(error.refused)
        except (InDoubt, RolledBack) as error:
            if self._life.state is RUNNING:
                await self._on_own_commit_failed(error)
            else:
                await self._on_commit_failed(error)
        except Exception as error:
            await self._on_failed(error)
        else:
            self._life.end("released" if self._life.state is REPEATED else "completed", None)
            if output.after_commit:
                in_thread = None if self._stage.signature.is_async else self._runner.run_in_thread
                await call_after_commit(output, self._life.log_fields(), in_thread)

    def _decode_envelope(self) -> Envelope:
        stage, message = self._stage, self._message
        if stage.keeps_replies and message.headers.get(FAILURE) == REPORT:
            return reported_failure(message.headers)
        envelope = decode_envelope(message.body)
        if envelope.recurring:
            envelope = as_occurrence(envelope, message.headers.get("truenext-due"))
        return failed_request(stage, envelope, message.headers) if stage.handles_failures else envelope

    @property
    def _is_committing(self) -> bool:
        """Whether the SQL transaction is committed, if there was one, and the broker has not answered its COMMIT."""
        return self._life.state in (ACKNOWLEDGING, COMMITTING)

    @property
    def _is_processed(self) -> bool:
        """Whether the database has committed the message's id in the inbox, and its output in the outbox."""
        return self._exactly_once is not None and self._is_committing

    async def _release(self, error: Exception) -> None:
        await self._message.release()
        self._life.end("released", error)

    async def _on_own_commit_failed(self, error: InDoubt | RolledBack) -> None:
        """Settle the message after an `initiate` block in the stage has failed to commit. InDoubt, or an error that the
        sender has caused, is a failure of the stage. After a lost connection or a full disk, the message is
        released."""
        if isinstance(error, InDoubt) or sender_error(error) is not None:
            await self._on_failed(error)
            return
        await self._release(error)
        await self._wait_if_disk_full(error)

    async def _on_commit_failed(self, error: InDoubt | RolledBack) -> None:
        """Record the outcome after the COMMIT has failed, and raise the error.

        Raises: `error`; RolledBack in place of InDoubt if the stage is exactly-once
        """
        if isinstance(error, InDoubt):
            self._life.end("in doubt", error)
            if self._inbox_id:
                # Exactly-once processing resolves the doubt at the redelivery, so this counts no attempt.
                raise RolledBack(
                    f"the broker has not answered the COMMIT of message {self._message.message_id}: its redelivery "
                    "shows whether it was acknowledged"
                ) from error
            raise error
        # A refused COMMIT has requeued the message already. Its redelivery is flushed before the COMMIT.
        self._life.end("released", error)
        await self._wait_if_disk_full(error)
        raise error

    async def _wait_if_disk_full(self, error: RolledBack) -> None:
        """Pause this worker if the broker's disk is full, since the broker would refuse the output of other messages,
        too."""
        if is_disk_full(error):
            await self._context.wait_or_stopping(self._pool.back_off_disk_full_s(self._context.loop.time()))

    async def _on_already_processed(self) -> None:
        """Send the output of the message that is still in the outbox, and then acknowledge the message. In this order,
        a failure leads to a redelivery, and the redelivery sends the remaining output.

        Raises: RolledBack or InDoubt if the COMMIT has failed
        """
        exactly_once = self._exactly_once
        assert exactly_once is not None, "only an exactly-once stage calls this"
        try:
            await exactly_once.ensure_sent(self._inbox_id, self._pool)
            await self._session.commit(timeout=TIMEOUT_S)
        except (BrokerUnavailable, OutboxBusy) as error:
            await self._release(error)
            await self._context.wait_or_stopping(PAUSE_S)
        except DatabaseUnavailable as error:
            await self._on_failed(error)
        except (InDoubt, RolledBack) as error:
            if isinstance(error, RolledBack) and sender_error(error) is not None:
                # An immediate redelivery would be refused again.
                await self._context.wait_or_stopping(PAUSE_S)
            await self._on_commit_failed(error)
        else:
            exactly_once.on_committed(self._inbox_id, was_sent=False, is_acknowledged=True)
            self._life.end("already processed", None)

    async def _check_inbox(self, envelope: Envelope) -> None:
        """Raise AlreadyProcessed if the message is redelivered and its id is in the inbox. Call this before
        `_check_attempts`: the processing may have ended with a dead process, which counts an attempt.

        Raises: AlreadyProcessed, DatabaseUnavailable
        """
        exactly_once = self._exactly_once
        if exactly_once is None:
            return
        self._inbox_id = inbox_id(self._context.service, self._stage.queue, envelope.id)
        if self._message.redelivered and await exactly_once.is_processed(self._inbox_id):
            raise AlreadyProcessed("the message was already processed")

    def _check_attempts(self) -> None:
        """Check that the message has attempts left. A dying process counts an attempt, but cannot reject the message.
        So the next process that gets the message rejects it here.

        Raises: NoAttemptsLeft if the message has failed as often as the stage allows
        """
        attempts_max = self._stage.settings.attempts
        failures = self._message.attempts
        if attempts_max is not None and failures >= attempts_max:
            reason = f"{failures} of {attempts_max} allowed attempts have failed"
            if self._message.was_lost:
                reason += "; the last one ended with its process or connection"
            raise NoAttemptsLeft(reason, self._message.last_cause.partition("\n")[0])

    # ---- Running ----

    async def _run_until_committed(self, envelope: Envelope) -> Output:
        """Run the stage and commit. After conflicts in SQL, run the stage again. Return the output. Raises the error of
        the last run."""
        pause_s, retries_left = SQL_RETRY_PAUSE_S, SQL_RETRIES_MAX
        while True:
            work = self._context.new_sql_work(
                self._stage, self._inbox_id or None, is_interactive=self._pool.is_interactive
            )
            output = Output(self._id_seed(envelope), f"{self._context.service} {self._stage.queue}")
            self._life.enter(RUNNING)
            self._error_kind = DatabaseErrorKind.APPLICATION
            try:
                await self._run_and_commit(envelope, output, work)
                return output
            except Exception as error:
                if isinstance(error, ProducerLost):
                    # The next run borrows another producer.
                    self._error_kind = DatabaseErrorKind.RETRYABLE
                elif work is not None:
                    # Before the rollback, which discards SQL errors that the stage has caught: they count, too.
                    self._error_kind = work.classify_error(error)
                skip_reason = None if work is None else work.skip_reason
                await self._runner.roll_back(work)
                if skip_reason is not None and skip_reason is not error:
                    raise skip_reason from error
                if self._error_kind is not DatabaseErrorKind.RETRYABLE or RUNNING not in TRANSITIONS[self._life.state]:
                    raise
                if not retries_left:
                    self._error_kind = DatabaseErrorKind.APPLICATION
                    raise
                _logger.info(
                    "a stage runs again: its SQL conflicts with another transaction",
                    extra=self._life.log_fields() | {"error": describe_error(error)},
                )
            except BaseException:
                await self._runner.roll_back(work)
                raise
            # Random, so that two transactions do not conflict again.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s, retries_left = 2 * pause_s, retries_left - 1

    def _id_seed(self, envelope: Envelope) -> str:
        """Return the text from which the ids of the output's messages are derived. It is the same in each run of the
        stage. Different stages that get the same message have different seeds, and so do the processes that get a
        published message."""
        seed = output_seed(envelope.id, self._stage.queue)
        return seed if self._stage.endpoint.subscribed_topic is None else f"{seed} {self._context.run_id}"

    async def _run_and_commit(self, envelope: Envelope, output: Output, work: AnySqlWork | None) -> None:
        point, exactly_once = self._context.on_test_point, self._exactly_once
        point("received", self._stage)
        if exactly_once is None:
            messages = await self._run_and_collect(envelope, output, work)
            if work is not None and work.end_unused():
                work = None
            if work is not None:
                await self._runner.run_sql_step(work.check, work)
                point("checked", self._stage)
            await self._commit(messages, work)
        else:
            async with exactly_once.borrow_producer() as producer:
                messages = await self._run_and_collect(envelope, output, work)
                await self._commit_exactly_once(messages, work, producer)
            is_acknowledged = self._life.state is COMMITTED
            exactly_once.on_committed(self._inbox_id, was_sent=bool(messages), is_acknowledged=is_acknowledged)
        self._pool.disk_full_pause_s = 0.0
        point("committed", self._stage)

    async def _run_and_collect(
        self, envelope: Envelope, output: Output, work: AnySqlWork | None
    ) -> list[EncodedMessage]:
        running = self._runner.run(envelope, output, work)
        await (run_user_coroutine(running) if self._stage.signature.is_async else running)
        output.is_closed = True
        if work is not None:
            work.function_returned()
        self._life.enter(RETURNED)
        self._context.on_test_point("run", self._stage)
        messages = encode_messages(output.outgoing, self._context.chain, self._life.execution)
        if messages and self._life.counters is not None:
            self._life.counters.add_sent(len(messages))
        return messages

    async def _commit_exactly_once(
        self, messages: Sequence[EncodedMessage], work: AnySqlWork | None, producer: BorrowedProducer
    ) -> None:
        """Write the output into the outbox, and commit both transactions. If there is output, the broker's COMMIT has a
        number."""
        assert work is not None, "its database remembers what has happened"
        unit = OutboxUnit(messages, any(each.priority == PRIORITY_INTERACTIVE for each in messages))
        number = producer.use_next_number() if messages else None
        await self._runner.run_sql_step(partial(work.complete, self._context.service, number, unit), work)
        self._context.on_test_point("checked", self._stage)
        await self._commit(messages, work, number)

    async def _commit(
        self, messages: Sequence[EncodedMessage], work: AnySqlWork | None, number: CommitNumber | None = None
    ) -> None:
        """Send the output, commit the SQL transaction, and then the broker's transaction, under `number` if given.

        Raises: OutputRefused if the broker refuses the output before SQL's COMMIT; BrokerUnavailable before SQL's
        COMMIT; RolledBack or InDoubt if the broker's COMMIT fails; errors of SQL's COMMIT
        """
        session, pool, point = self._session, self._pool, self._context.on_test_point
        # Before SQL's COMMIT, a flush shows that the broker is available and refuses no output. A message may be
        # redelivered because its COMMIT was refused: another refusal there would only requeue it again.
        is_flushed = work is not None or (bool(messages) and self._message.redelivered)
        # Workers wait here instead of exceeding the broker's limits of open transactions, which it would refuse.
        async with (
            pool.transaction_permits.acquired(1),
            pool.transaction_byte_permits.acquired(transaction_size(messages)),
        ):
            try:
                if messages:
                    self._life.enter(SENDING)
                with MapToBrokerUnavailable():
                    await send_messages(session, messages, self._context.loop.time() + TIMEOUT_S)
                    if is_flushed:
                        await session.flush(timeout=TIMEOUT_S)
                if work is not None:
                    point("sent", self._stage)
                    await self._commit_sql(work)
                self._life.enter(COMMITTING if messages else ACKNOWLEDGING)
                if work is not None:
                    self._life.record_sql_commit()
                    point("SQL committed", self._stage)
                if number is None:
                    is_new = await session.commit(timeout=TIMEOUT_S)
                else:
                    is_new = await session.commit(
                        timeout=TIMEOUT_S, producer=number.producer.name, number=number.number
                    )
            except RolledBack as error:
                refused = sender_error(error)
                if refused is None or not is_flushed or self._is_processed:
                    raise
                raise OutputRefused(refused) from error
        self._life.enter(COMMITTED if is_new else REPEATED)

    async def _commit_sql(self, work: AnySqlWork) -> None:
        """Commit the SQL transaction. A cancellation that comes after SQL's COMMIT is ignored, since it would only
        cause a redelivery."""
        try:
            await self._runner.run_sql_step(work.commit, work)
        except asyncio.CancelledError:
            if not work.is_committed:
                raise

    # ---- Outcome ----

    async def _on_failed(self, error: BaseException) -> None:
        try:
            retry = await self._settle_failed(error)
        except BaseException as other:
            # The connection is lost, or the service stops.
            self._life.end("in doubt" if isinstance(other, InDoubt) else "released", other)
            raise
        if retry is None:
            self._life.end("released", error)
            return
        failures = self._message.attempts + 1
        policy = self._context.queue_policies.of(self._stage)
        is_last = policy is not None and policy.is_last(failures)
        given_up_for = retry.rejected_for or (EXHAUSTED.rejected_for if is_last else None)
        self._life.end("rejected" if retry.is_rejected else "failed", error, given_up_for)
        fields = self._life.log_fields() | {"error": describe_error(error)}
        if policy is not None and given_up_for is None:
            next_s = policy.delay_s(failures) if retry.delay_s is None else retry.delay_s
            _logger.warning("a stage has failed, and is tried again", extra=fields | {"next_s": next_s})
            return
        if given_up_for is not None and (moved_to := self._moved_to(policy)):
            fields["moved_to"] = moved_to
        if given_up_for == EXHAUSTED.rejected_for:
            text = "a stage has failed in the last attempt, and its message is given up"
        else:
            # Without a policy, this may be the last attempt.
            text = "a stage has rejected its message" if retry.is_rejected else "a stage has failed"
        _logger.warning(
            text,
            extra=fields,
            exc_info=None if isinstance(error, Reject) or is_text_too_long(error) else error,
        )

    def _moved_to(self, policy: RedeliveryPolicy | None) -> str:
        """Return the queue to which the broker moves the message that was given up: that of the next handler, or else
        the dead-letter queue; "" if it is not known."""
        if policy is None or policy.dead_letters is None:
            # An older broker, which does not report the queue, knows no handlers either.
            return ""
        handlers = stored_handlers(self._message.headers.get(ON_FAILURE, ""))
        return handlers[0].name if handlers else policy.dead_letters

    async def _settle_failed(self, error: BaseException) -> RetryDecision | None:
        """Release, nack or reject the message after an error. Return the decision; None if the message was released."""
        context, message = self._context, self._message
        if self._is_processed:
            # The redelivery sends the output that is left.
            await message.release()
            return None
        kind = error.kind if isinstance(error, DatabaseUnavailable) else self._error_kind
        if context.gate is not None and await context.gate.is_uncounted_error(kind, error, message.message_id):
            await message.release()
            return None
        retry = self._stage.settings.retries.decide(error, message.attempts + 1, self._stage.settings.attempts)
        cause = cause_of(error, self._stage.queue, context.instance)
        has_output = self._life.state in (SENDING, COMMITTING)
        if retry.is_rejected and self._stage.endpoint.subscribed_topic is not None and not has_output:
            # A subscription has no dead letters: a rejected message would be redelivered for ever.
            await self._session.commit(timeout=TIMEOUT_S)
        elif retry.is_rejected:
            await message.reject(cause=cause)
        else:
            await message.nack(delay=retry.delay_s, cause=cause)
        return retry
