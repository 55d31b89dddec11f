"""Workers: handle each message of a stage in one transaction of SQL and one of the broker.

    received ─ run ─ checked ─ sent ─ SQL committed ─ committed ─ hooks
                   └ written to the outbox, with exactly-once processing

SQL is committed after two checks: the SQL transaction can still be committed, and the broker has taken the stage's
output into its transaction. Then only the broker's COMMIT is left, which includes the acknowledgement. An exception
before SQL's COMMIT rolls back both transactions. A stage that has not used SQL skips the steps of SQL.

With exactly-once processing, the first statement of SQL writes the message's id into the inbox, and the last one the
output into the outbox, under the number of the broker's COMMIT. Then a loss after SQL's COMMIT does no harm.

Source: docs/stages.md, "One transaction"; docs/stages-database.md
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from truenext.clock import monotonic
from truenext.errors import InDoubt, RolledBack
from truenext.stage.broker_transaction import (
    BrokerUnavailable,
    MapToBrokerUnavailable,
    encode_messages,
    is_disk_full,
    send_messages,
    sender_error,
    transaction_size,
)
from truenext.stage.core.envelope import decode_envelope
from truenext.stage.core.errors import FlowError, NoAttemptsLeft, Reject
from truenext.stage.core.failure import cause_of, describe_error, is_text_too_long
from truenext.stage.core.flow import UNSET, Flow, FlowSource
from truenext.stage.core.names import inbox_id
from truenext.stage.core.outbox_unit import OutboxUnit
from truenext.stage.core.output import PRIORITY_INTERACTIVE, Output
from truenext.stage.interceptors.interceptor import Execution, ExecutionResult
from truenext.stage.sql.errors import (
    AlreadyProcessed,
    DatabaseErrorKind,
    DatabaseUnavailable,
    InProgress,
    OutboxBusy,
    ProducerLost,
)
from truenext.stage.user_code import (
    CURRENT,
    call_after_commit,
    call_user_function,
    is_being_cancelled,
    run_user_coroutine,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from truenext.client.tasks.connection import Message, Session
    from truenext.stage.context import ServiceContext
    from truenext.stage.core.definitions import Stage
    from truenext.stage.core.envelope import Envelope
    from truenext.stage.core.outbox_unit import CommitNumber, EncodedMessage
    from truenext.stage.interceptors.interceptor import ExecutionOutcome
    from truenext.stage.outbox.exactly_once import BorrowedProducer, ExactlyOnceProcessing
    from truenext.stage.pool import PriorityPool
    from truenext.stage.sql.work import AsyncSqlWork, ThreadSqlWork

_logger = logging.getLogger("truenext.stage")

SQL_RETRIES_MAX = 5
"""Number of times that a stage runs again in place after a conflict of its SQL with another transaction."""
PAUSE_S = 1.0
"""Seconds that a worker pauses when it could not send the output of an already processed message."""
SQL_RETRY_PAUSE_S = 0.02
"""Seconds before the first run in place; each further pause is twice as long."""
TIMEOUT_S = 60.0
"""Limit in seconds of each step that waits for the broker."""

T = TypeVar("T")


class StageWorker:
    """Worker for the messages of one stage in one pool; handles several at once."""

    def __init__(
        self, context: ServiceContext, stage: Stage, pool: PriorityPool, exactly_once: ExactlyOnceProcessing | None
    ) -> None:
        """`exactly_once` is None for a stage without exactly-once processing."""
        self._context = context
        self._stage = stage
        self._pool = pool
        self._exactly_once = exactly_once
        # A subscriber has only the interactive pool, which gives it published messages of all priorities.
        self._is_interactive = pool.is_interactive and stage.endpoint.subscribed_topic is None
        self.active_count = 0
        """Number of messages that are being handled."""
        self.progress_at = monotonic()
        """Monotonic time at which the last message ended, or a message came to the idle worker."""

    async def handle(self, message: Message, session: Session) -> None:
        """Handle one message for `Connection.consume`, which then has nothing left to commit: the session has been
        committed, or the message settled.

        Raises: RolledBack, InDoubt, ConnectionLost: errors of the broker, not of the stage; CancelledError
        """
        if not self.active_count:
            self.progress_at = monotonic()
        self.active_count += 1
        handler = MessageHandler(self._context, self._stage, self._pool, self._exactly_once, message, session)
        priority = self._context.interactive_priority
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

    def __init__(
        self,
        context: ServiceContext,
        stage: Stage,
        pool: PriorityPool,
        exactly_once: ExactlyOnceProcessing | None,
        message: Message,
        session: Session,
    ) -> None:
        self._context = context
        self._stage = stage
        self._pool = pool
        self._exactly_once = exactly_once
        self._inbox_id = ""
        """Id of the message in the inbox; empty without exactly-once processing."""
        self._is_sql_committed = False
        """SQL is committed. With exactly-once processing, the outbox then has the output."""
        self._is_repeated_commit = False
        """The COMMIT's number was used before: the output is already sent, and nothing was acknowledged."""
        self._message = message
        self._session = session
        self._started_at = monotonic()
        self._ran_at = self._committed_at = 0.0
        self._envelope: Envelope | None = None
        self._execution: Execution | None = None
        self._output_sent = False
        """Output is being sent in the transaction of the broker, or has been."""
        self._is_flushed = False
        """The broker answers to the output before the COMMIT, while the message can still be nacked or rejected."""
        self._event_number = 0
        """Number of the recorded event of this start; 0 if none is recorded."""
        self._error_kind = DatabaseErrorKind.APPLICATION
        """Kind of the last error."""
        self._is_committing = False
        """The COMMIT of the broker has been started."""
        self._thread_abandoned = False
        """A second cancellation has left the stage's thread running."""

    async def handle(self) -> None:
        """Raises: as `StageWorker.handle`"""
        try:
            self._envelope = envelope = decode_envelope(self._message.body)
            self._record_start(envelope)
            await self._check_inbox(envelope)
            self._check_attempts()
            output = await self._run_until_committed(envelope)
        except AlreadyProcessed:
            await self._on_already_processed()
        except (InProgress, OutboxBusy) as error:
            await self._message.release()
            self._record_end("released", error)
        except DatabaseUnavailable as error:
            await self._on_database_unavailable(error)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                self._record_end("in doubt" if self._is_committing else "released", error)
                raise
            # The handling is not cancelled: the stage cancelled itself, or awaited something that was cancelled.
            await self._on_failed(error)
        except BrokerUnavailable as error:
            await self._message.release()
            self._record_end("released", error)
        except (InDoubt, RolledBack) as error:
            if not self._ran_at:
                await self._on_own_commit_failed(error)
            else:
                await self._on_commit_failed(error)
        except Exception as error:
            await self._on_failed(error)
        else:
            self._record_end("released" if self._is_repeated_commit else "completed", None)
            if output.after_commit:
                await call_after_commit(
                    output, self._log_fields(), None if self._stage.signature.is_async else self._in_thread
                )

    async def _on_database_unavailable(self, error: DatabaseUnavailable) -> None:
        self._error_kind = error.kind
        await self._on_failed(error)

    async def _on_own_commit_failed(self, error: InDoubt | RolledBack) -> None:
        """Settle the message after the COMMIT failed of a transaction that the stage itself started, by `initiate`. An
        InDoubt error or a refusal is a failure of the stage. A lost connection or a full disk is not."""
        if isinstance(error, InDoubt) or sender_error(error) is not None:
            await self._on_failed(error)
            return
        await self._message.release()
        self._record_end("released", error)
        await self._wait_if_disk_full(error)

    async def _on_commit_failed(self, error: InDoubt | RolledBack) -> None:
        """Raises: `error`, unless the message is settled; RolledBack for InDoubt, with exactly-once processing"""
        if isinstance(error, InDoubt):
            self._record_end("in doubt", error)
            if self._inbox_id:
                # Exactly-once processing resolves the doubt at the redelivery, so this counts no attempt.
                raise RolledBack("it is not known whether its message was acknowledged") from error
            raise error
        refused = sender_error(error)
        if refused is not None and self._is_flushed and not (self._inbox_id and self._is_sql_committed):
            await self._on_failed(refused)
            return
        # A refused COMMIT has requeued the message already. Its redelivery is flushed before the COMMIT.
        self._record_end("released", error)
        await self._wait_if_disk_full(error)
        raise error

    async def _wait_if_disk_full(self, error: RolledBack) -> None:
        """Pause this worker if the broker's disk is full: the output of other messages would not fit either."""
        if is_disk_full(error):
            await self._context.wait_or_stopping(self._pool.back_off_disk_full_s(self._context.loop.time()))

    async def _on_already_processed(self) -> None:
        """Send what the outbox still has of the message, and then acknowledge the message. Once it is acknowledged,
        no redelivery would send the rest.

        Raises: RolledBack, InDoubt; as `_on_failed`
        """
        exactly_once = self._exactly_once
        assert exactly_once is not None, "only an exactly-once stage calls this"
        try:
            await exactly_once.ensure_sent(self._inbox_id, self._pool)
            await self._session.commit(timeout=TIMEOUT_S)
        except (BrokerUnavailable, OutboxBusy) as error:
            await self._message.release()
            self._record_end("released", error)
            await self._context.wait_or_stopping(PAUSE_S)
        except DatabaseUnavailable as error:
            await self._on_database_unavailable(error)
        except RolledBack as error:
            if sender_error(error) is not None:
                # An immediate redelivery would be refused again.
                await self._context.wait_or_stopping(PAUSE_S)
            await self._on_commit_failed(error)
        except InDoubt as error:
            await self._on_commit_failed(error)
        else:
            exactly_once.on_committed(self._inbox_id, was_sent=False, is_acknowledged=True)
            self._record_end("already processed", None)

    async def _check_inbox(self, envelope: Envelope) -> None:
        """Look up a redelivered message, before its attempts: a process that died after SQL's COMMIT has counted one.

        Raises: AlreadyProcessed, DatabaseUnavailable
        """
        exactly_once = self._exactly_once
        if exactly_once is None:
            return
        self._inbox_id = inbox_id(self._context.service, self._stage.queue, envelope.id)
        if self._message.redelivered and await exactly_once.is_processed(self._inbox_id):
            raise AlreadyProcessed("the message was already processed")

    def _check_attempts(self) -> None:
        """Check that the message has attempts left. A process that dies counts one, but cannot reject the message.

        Raises: NoAttemptsLeft
        """
        attempts_max = self._stage.settings.attempts
        failures = self._message.attempts
        if attempts_max is not None and failures >= attempts_max:
            reason = f"{failures} attempts have failed, and {attempts_max} are allowed"
            if self._message.was_lost:
                reason += "; the last one ended with its process or connection"
            raise NoAttemptsLeft(reason, self._message.last_cause.partition("\n")[0])

    # ---- Running ----

    async def _run_until_committed(self, envelope: Envelope) -> Output:
        """Run the stage and commit, with retries after conflicts in SQL. Return the output. Raises: the last error"""
        pause_s = SQL_RETRY_PAUSE_S
        for retries_left in reversed(range(SQL_RETRIES_MAX + 1)):
            work = self._context.new_sql_work(
                self._stage, self._inbox_id or None, is_interactive=self._pool.is_interactive
            )
            output = Output(self._id_seed(envelope), f"{self._context.service} {self._stage.queue}")
            self._ran_at, self._error_kind = 0.0, DatabaseErrorKind.APPLICATION
            try:
                await self._run_and_commit(envelope, output, work)
            except Exception as error:
                # Before the rollback, which discards SQL errors that the stage has caught: they count, too.
                self._error_kind = DatabaseErrorKind.APPLICATION if work is None else work.classify_error(error)
                if isinstance(error, ProducerLost):
                    # The next run borrows another producer.
                    self._error_kind = DatabaseErrorKind.RETRYABLE
                skip_reason = None if work is None else work.skip_reason
                await self._roll_back(work)
                if skip_reason is not None and skip_reason is not error:
                    raise skip_reason from error
                if self._error_kind is not DatabaseErrorKind.RETRYABLE or self._output_sent:
                    # Output that was sent can only be rolled back together with the message.
                    raise
                if not retries_left:
                    self._error_kind = DatabaseErrorKind.APPLICATION
                    raise
                _logger.info(
                    "a stage runs again: its SQL conflicts with another transaction",
                    extra=self._log_fields() | {"error": describe_error(error)},
                )
            except BaseException:
                await self._roll_back(work)
                raise
            else:
                return output
            # Random, so that two transactions do not conflict again.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s *= 2
        raise AssertionError("the last time it was raised")

    def _id_seed(self, envelope: Envelope) -> str:
        """Return the seed of the output's ids, the same in each run of the stage. Several stages may get one message,
        and several processes a published one: their seeds differ."""
        seed = f"{envelope.id} {self._stage.queue}"
        return seed if self._stage.endpoint.subscribed_topic is None else f"{seed} {self._context.run_id}"

    async def _run_and_commit(
        self, envelope: Envelope, output: Output, work: AsyncSqlWork | ThreadSqlWork | None
    ) -> None:
        point, exactly_once = self._context.on_test_point, self._exactly_once
        point("received", self._stage)
        if exactly_once is None:
            messages = await self._run_and_collect(envelope, output, work)
            if work is not None and work.end_unused():
                work = None
            if work is not None:
                await self._run_sql_step(work.check, work)
                point("checked", self._stage)
            await self._commit(messages, work)
        else:
            async with exactly_once.borrow_producer() as producer:
                messages = await self._run_and_collect(envelope, output, work)
                await self._commit_exactly_once(messages, work, producer)
            exactly_once.on_committed(
                self._inbox_id, was_sent=bool(messages), is_acknowledged=not self._is_repeated_commit
            )
        self._committed_at = monotonic()
        self._pool.disk_full_pause_s = 0.0
        point("committed", self._stage)

    async def _run_and_collect(
        self, envelope: Envelope, output: Output, work: AsyncSqlWork | ThreadSqlWork | None
    ) -> list[EncodedMessage]:
        """Run the stage, and return its encoded output."""
        running = self._run(envelope, output, work)
        await (run_user_coroutine(running) if self._stage.signature.is_async else running)
        output.is_closed = True
        if work is not None:
            work.function_returned()
        self._ran_at = monotonic()
        self._context.on_test_point("run", self._stage)
        return encode_messages(output.outgoing, self._context.chain, self._execution)

    async def _commit_exactly_once(
        self, messages: Sequence[EncodedMessage], work: AsyncSqlWork | ThreadSqlWork | None, producer: BorrowedProducer
    ) -> None:
        """Write the output into the outbox and commit both transactions, under a number if there is output."""
        assert work is not None, "its database remembers what has happened"
        unit = OutboxUnit(messages, any(each.priority == PRIORITY_INTERACTIVE for each in messages))
        number = producer.use_next_number() if messages else None
        await self._run_sql_step(partial(work.complete, self._context.service, number, unit), work)
        self._context.on_test_point("checked", self._stage)
        self._is_repeated_commit = not await self._commit(messages, work, number)

    async def _commit(
        self,
        messages: Sequence[EncodedMessage],
        work: AsyncSqlWork | ThreadSqlWork | None,
        number: CommitNumber | None = None,
    ) -> bool:
        """Send the output, and commit both transactions. Return False if `number` was used before."""
        session, pool, point = self._session, self._pool, self._context.on_test_point
        # Workers wait here instead of exceeding the broker's limits of open transactions, which it would refuse.
        async with (
            pool.transaction_permits.acquired(1),
            pool.transaction_byte_permits.acquired(transaction_size(messages)),
        ):
            self._output_sent = bool(messages)
            # Before SQL's COMMIT, a flush shows that the broker is available and refuses no output. A message may be
            # redelivered because its COMMIT was refused: another refusal there would only requeue it again.
            self._is_flushed = work is not None or (self._output_sent and self._message.redelivered)
            with MapToBrokerUnavailable():
                await send_messages(session, messages, self._context.loop.time() + TIMEOUT_S)
                if self._is_flushed:
                    await session.flush(timeout=TIMEOUT_S)
            if work is not None:
                point("sent", self._stage)
                await self._commit_sql(work)
                self._is_sql_committed = True
                if self._context.events is not None:
                    self._context.events.add_sql_committed(self._event_number)
                point("SQL committed", self._stage)
            self._is_committing = True
            if number is None:
                return await session.commit(timeout=TIMEOUT_S)
            return await session.commit(timeout=TIMEOUT_S, producer=number.producer.name, number=number.number)

    async def _commit_sql(self, work: AsyncSqlWork | ThreadSqlWork) -> None:
        """Commit SQL. A cancellation that comes after the COMMIT is ignored, since it would only cause a redelivery."""
        try:
            await self._run_sql_step(work.commit, work)
        except asyncio.CancelledError:
            if not work.is_committed:
                raise

    async def _run(self, envelope: Envelope, output: Output, work: AsyncSqlWork | ThreadSqlWork | None) -> None:
        """Run the stage, and those that it continues with by `next_direct`."""
        message, stage = self._message, self._stage
        now_ms = self._context.now_ms()
        flow = Flow(stage, envelope, output, now_ms, FlowSource(message.expires_ms, message.attempts + 1))
        while True:
            if stage.signature.is_async:
                # An async stage runs in the context of its own task; a plain one sets this in its thread's context.
                CURRENT.set(stage)
            await self._call(stage, flow, work)
            if flow.direct_message is UNSET:
                return
            next_stage = stage.next_stage
            assert next_stage is not None, "next_direct has seen it"
            if next_stage.signature.is_async != stage.signature.is_async:
                raise FlowError(
                    f"{stage.name} and {next_stage.name} are not both async functions, so they cannot be in one "
                    "transaction: use next instead of next_direct"
                )
            if work is None and self._context.plans.uses_sql(next_stage):
                raise FlowError(
                    f"{next_stage.name} has a session, and {self._stage.name}, with which the transaction begins, has "
                    "none: add one there, too, or use next instead of next_direct"
                )
            flow, stage = flow.for_next_stage(), next_stage

    async def _call(self, stage: Stage, flow: Flow, work: AsyncSqlWork | ThreadSqlWork | None) -> None:
        context = self._context
        arguments = (flow.message,) if stage.endpoint.state is None else (flow.message, flow.state)
        plan = context.plans.plan_of(stage)
        provided = context.provided_values(flow, work)
        chain, execution = context.chain, self._execution
        if execution is not None and stage is not self._stage:
            # The stage was reached by `next_direct`.
            execution = msgspec.structs.replace(execution, stage=stage.name)
        around = chain.around(execution) if execution is not None and chain.has_around else None
        function = stage.function
        if not stage.signature.is_async:

            def call() -> object:
                CURRENT.set(stage)
                if around is None:
                    with plan.thread_scope(provided) as others:
                        return function(*arguments, **others)
                with around, plan.thread_scope(provided) as others:
                    return function(*arguments, **others)

            result = await self._in_thread(partial(call_user_function, call), work)
        elif around is None and not plan.has_factories:
            result = await function(*arguments, **plan.arguments(provided))
        elif around is None:
            async with plan.scope(provided) as others:
                result = await function(*arguments, **others)
        else:
            with around:
                async with plan.scope(provided) as others:
                    result = await function(*arguments, **others)
        if result is None:
            flow.check_replied()
            return
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                # Avoids the warning that the coroutine was never awaited.
                result.close()
            raise FlowError(
                f"{stage.name} has returned an awaitable that was not awaited ({type(result).__name__}): a decorator "
                "of an async function must be async itself, and await it"
            )
        flow.reply(result)

    async def _run_sql_step(self, step: Callable[[], Any], work: AsyncSqlWork | ThreadSqlWork) -> None:
        """Run an operation of the database where the stage has run: in the event loop or in a thread."""
        if self._stage.signature.is_async:
            await step()
        else:
            await self._in_thread(step, work)

    async def _in_thread(self, call: Callable[[], T], work: AsyncSqlWork | ThreadSqlWork | None = None) -> T:
        """Run `call` in a thread of the pool. A cancelled caller still waits: a thread cannot be interrupted, and
        keeps what it uses. A second cancellation leaves the thread alone, which then rolls back `work` itself."""

        def run() -> T:
            try:
                return call()
            finally:
                if self._thread_abandoned and work is not None:
                    work.rollback()

        future = self._context.loop.run_in_executor(self._pool.executor, copy_context().run, run)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                try:
                    await asyncio.wait({future})
                except asyncio.CancelledError:
                    self._thread_abandoned = True
                    raise
            raise

    async def _roll_back(self, work: AsyncSqlWork | ThreadSqlWork | None) -> None:
        if work is not None and not self._thread_abandoned:
            await self._run_sql_step(work.rollback, work)

    # ---- Outcome ----

    async def _on_failed(self, error: BaseException) -> None:
        try:
            outcome = await self._settle_failed(error)
        except BaseException as other:
            # The connection is lost, or the service stops.
            self._record_end("in doubt" if isinstance(other, InDoubt) else "released", other)
            raise
        self._record_end(outcome, error)
        if outcome == "released":
            return
        _logger.warning(
            "a stage has rejected its message" if outcome == "rejected" else "a stage has failed",
            extra=self._log_fields() | {"error": describe_error(error)},
            exc_info=None if isinstance(error, Reject) or is_text_too_long(error) else error,
        )

    async def _settle_failed(self, error: BaseException) -> ExecutionOutcome:
        """Release, nack or reject the message after an error, and return the outcome."""
        context, message = self._context, self._message
        if self._inbox_id and self._is_sql_committed:
            # The message is processed. Its redelivery sends the output that is left.
            await message.release()
            return "released"
        if context.gate is not None and await context.gate.is_uncounted_error(
            self._error_kind, error, message.message_id
        ):
            await message.release()
            return "released"
        retry = self._stage.settings.retries.decide(error, message.attempts + 1, self._stage.settings.attempts)
        cause = cause_of(error, self._stage.queue, context.instance)
        if retry.is_rejected and self._stage.endpoint.subscribed_topic is not None and not self._output_sent:
            # A subscription has no dead letters: a rejected message would be redelivered for ever.
            await self._session.commit(timeout=TIMEOUT_S)
        elif retry.is_rejected:
            await message.reject(cause=cause)
        else:
            await message.nack(delay=retry.delay_s, cause=cause)
        return "rejected" if retry.is_rejected else "failed"

    def _record_start(self, envelope: Envelope) -> None:
        events = self._context.events
        if events is not None:
            self._event_number = events.add_started(self._stage, self._message, envelope)
        chain, message, flow = self._context.chain, self._message, envelope.flow
        if chain.has_around or chain.has_sending or chain.has_ended:
            self._execution = Execution(
                endpoint=self._stage.endpoint.name,
                stage=self._stage.name,
                queue=self._stage.queue,
                message_id=envelope.id,
                flow_id=flow.id,
                trace=flow.trace,
                attempt=message.attempts + 1,
                interactive=flow.interactive,
                size=len(message.body),
                carrier=envelope.carrier,
                interceptor_data={},
            )

    def _record_end(self, outcome: ExecutionOutcome, error: BaseException | None) -> None:
        chain, events = self._context.chain, self._context.events
        execution = self._execution if chain.has_ended else None
        if execution is None and not self._event_number:
            return
        now = monotonic()
        ran_at = self._ran_at or now
        result = ExecutionResult(
            outcome=outcome,
            error=error,
            run=ran_at - self._started_at,
            commit=self._committed_at - ran_at if self._committed_at else None,
            total=now - self._started_at,
        )
        if events is not None and self._event_number:
            events.add_ended(self._event_number, result)
        if execution is not None:
            chain.ended(execution, result)

    def _log_fields(self) -> dict[str, object]:
        envelope = self._envelope
        return {
            "stage": self._stage.queue,
            "trace": "" if envelope is None else envelope.flow.trace,
            "message_id": self._message.message_id,
            "attempt": self._message.attempts + 1,
        }
