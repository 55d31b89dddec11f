"""How one message is handled: by one stage, in one transaction.

    received ─ run ─ checked ─ sent ─ SQL committed ─ committed ─ hooks
               └ (its effects happen once) written ┘

The database is asked whether its transaction is still good. What the stage has said is sent in a transaction of the
broker, and the broker has taken all of it, before SQL is committed. After that only the acknowledgement and COMMIT are
left. An exception anywhere before that takes both back. A stage that has not used SQL leaves out what is about it.

If the effects of a stage happen once, the first statement of SQL is the id of its message, and the last is what it
sends, under a number that the broker's COMMIT has, too. Then it makes no difference what is lost behind SQL's COMMIT.

Source: docs/stages.md, "One transaction"; docs/stages-outbox.md
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
from truenext.stage.core.flow import UNSET, Flow
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
"""So often a message is run again in place when its SQL has met another transaction's."""
PAUSE_S = 1.0
"""Until a message comes again whose outputs wait for somebody else."""
SQL_RETRY_PAUSE_S = 0.02
"""The first pause before that; each is twice as long as the one before."""
TIMEOUT_S = 60.0
"""For each step that waits for the broker."""

T = TypeVar("T")


class StageWorker:
    """Of one stage, in one lane: handles its messages, several at once."""

    def __init__(
        self, context: ServiceContext, stage: Stage, pool: PriorityPool, exactly_once: ExactlyOnceProcessing | None
    ) -> None:
        """`exactly_once` if the effects of the stage happen once."""
        self._context = context
        self._stage = stage
        self._pool = pool
        self._exactly_once = exactly_once
        # What is published comes here whatever its priority.
        self._is_interactive = pool.is_interactive and stage.endpoint.subscribed_topic is None
        self.active_count = 0
        """Messages that are handled now."""
        self.progress_at = monotonic()
        """When the last one ended, or nothing was there to do."""

    async def handle(self, message: Message, session: Session) -> None:
        """To be called by `Connection.consume`, which commits nothing more: the session has been committed, or the
        message has its verdict.

        Raises: RolledBack, InDoubt, ConnectionLost: what the broker did is nobody's failure; CancelledError
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
    """Of one message."""

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
        """By which the inbox knows the message, if its effects happen once."""
        self._is_sql_committed = False
        """What is left to be sent then, the outbox has."""
        self._is_repeated_commit = False
        """Somebody else has sent what this was to send, so that this has acknowledged nothing."""
        self._message = message
        self._session = session
        self._started_at = monotonic()
        self._ran_at = self._committed_at = 0.0
        self._envelope: Envelope | None = None
        self._execution: Execution | None = None
        self._output_sent = False
        """The broker has what the stage has said."""
        self._is_flushed = False
        """Whatever the broker refuses of that is known before the commit, while the message can still be refused."""
        self._event_number = 0
        """Its number, once it is written down that this has begun."""
        self._error_kind = DatabaseErrorKind.APPLICATION
        """What its last error says of the database."""
        self._is_committing = False
        """COMMIT was sent to the broker."""
        self._thread_abandoned = False
        """Nobody waits any more for the thread in which the stage runs."""

    async def handle(self) -> None:
        """Raises: as `Worker.handle`"""
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
            # Nobody has cancelled the handling: the stage has cancelled itself, or what it has waited for was.
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
        """It is not of this transaction, but of one that the stage has begun by itself. What the broker refuses of
        that is the stage's failure. That it was away, or has no room, is nobody's."""
        if isinstance(error, InDoubt) or sender_error(error) is not None:
            await self._on_failed(error)
            return
        await self._message.release()
        self._record_end("released", error)
        await self._wait_if_disk_full(error)

    async def _on_commit_failed(self, error: InDoubt | RolledBack) -> None:
        """Raises: the error, unless the message has its verdict"""
        if isinstance(error, InDoubt):
            self._record_end("in doubt", error)
            if self._inbox_id:
                # Whatever became of it, its effects happen once: it comes again, and nobody has failed.
                raise RolledBack("whether its message was acknowledged is not known") from error
            raise error
        refused = sender_error(error)
        if refused is not None and self._is_flushed and not (self._inbox_id and self._is_sql_committed):
            await self._on_failed(refused)
            return
        # What is refused at the commit has given back the message already. When it comes again it is flushed.
        self._record_end("released", error)
        await self._wait_if_disk_full(error)
        raise error

    async def _wait_if_disk_full(self, error: RolledBack) -> None:
        """With the message, for others would find no room, either."""
        if is_disk_full(error):
            await self._context.wait_or_stopping(self._pool.back_off_disk_full_s(self._context.loop.time()))

    async def _on_already_processed(self) -> None:
        """What it has to send goes first: who acknowledges it may be the last who knows of that.

        Raises: RolledBack, InDoubt; as `_failed`
        """
        exactly_once = self._exactly_once
        assert exactly_once is not None, "nobody else asks"
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
                # It would come again at once, and be refused again.
                await self._context.wait_or_stopping(PAUSE_S)
            await self._on_commit_failed(error)
        except InDoubt as error:
            await self._on_commit_failed(error)
        else:
            exactly_once.on_committed(self._inbox_id, was_sent=False, is_acknowledged=True)
            self._record_end("already processed", None)

    async def _check_inbox(self, envelope: Envelope) -> None:
        """Whether it was handled is looked at before its attempts are: a process that dies behind SQL's COMMIT is one.

        Raises: AlreadyProcessed, DatabaseUnavailable
        """
        exactly_once = self._exactly_once
        if exactly_once is None:
            return
        self._inbox_id = inbox_id(self._context.service, self._stage.queue, envelope.id)
        if self._message.redelivered and await exactly_once.is_processed(self._inbox_id):
            raise AlreadyProcessed("the message was already processed")

    def _check_attempts(self) -> None:
        """Refuse a message whose attempts are used up: a process that dies cannot do so itself.

        Raises: NoAttemptsLeft
        """
        attempts_max = self._stage.settings.attempts
        failures = self._message.attempts
        if attempts_max is not None and failures >= attempts_max:
            reason = f"{failures} attempts have failed, and this stage makes {attempts_max}"
            if self._message.was_lost:
                reason += "; the last one was with a process or connection that ended"
            raise NoAttemptsLeft(reason, self._message.last_cause.partition("\n")[0])

    # ---- Running ----

    async def _run_until_committed(self, envelope: Envelope) -> Output:
        """What it has said. Raises: whatever has gone wrong, if it is not only that SQL is to be run again"""
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
                # What the stage has swallowed counts, and is forgotten with the rollback.
                self._error_kind = DatabaseErrorKind.APPLICATION if work is None else work.classify_error(error)
                if isinstance(error, ProducerLost):
                    # Another one will do.
                    self._error_kind = DatabaseErrorKind.RETRYABLE
                skip_reason = None if work is None else work.skip_reason
                await self._roll_back(work)
                if skip_reason is not None and skip_reason is not error:
                    raise skip_reason from error
                if self._error_kind is not DatabaseErrorKind.RETRYABLE or self._output_sent:
                    # What was sent is taken back with the message.
                    raise
                if not retries_left:
                    self._error_kind = DatabaseErrorKind.APPLICATION
                    raise
                _logger.info(
                    "a stage runs again: its SQL has met another transaction's",
                    extra=self._log_fields() | {"error": describe_error(error)},
                )
            except BaseException:
                await self._roll_back(work)
                raise
            else:
                return output
            # Those who have met are not to meet again.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s *= 2
        raise AssertionError("the last time it was raised")

    def _id_seed(self, envelope: Envelope) -> str:
        """Of the ids of what the stage sends: the same whenever it runs again. One message may come to several stages,
        and what is published to several processes: each of them sends something of its own."""
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
        """Run it."""
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
        """Commit both, under a number if it sends anything."""
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
        """False: somebody else has used the number."""
        session, pool, point = self._session, self._pool, self._context.on_test_point
        # Whoever would be refused for what is open on the connection waits instead.
        async with (
            pool.transaction_permits.acquired(1),
            pool.transaction_byte_permits.acquired(transaction_size(messages)),
        ):
            self._output_sent = bool(messages)
            # Whatever the broker would refuse is known before SQL is committed; and that it is there. A message that
            # comes again may do so because of that: the commit would give it back once more.
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
        """Whoever is cancelled when it has happened goes on: the message is not to come again for that."""
        try:
            await self._run_sql_step(work.commit, work)
        except asyncio.CancelledError:
            if not work.is_committed:
                raise

    async def _run(self, envelope: Envelope, output: Output, work: AsyncSqlWork | ThreadSqlWork | None) -> None:
        """The stage, and those that it goes on with directly."""
        message, stage = self._message, self._stage
        now_ms = self._context.now_ms()
        flow = Flow(stage, envelope, output, now_ms, expires_ms=message.expires_ms, attempt=message.attempts + 1)
        while True:
            if stage.signature.is_async:
                # In the context of its own task; for a plain function it is set in that of its thread.
                CURRENT.set(stage)
            await self._call(stage, flow, work)
            if flow.direct_message is UNSET:
                return
            next_stage = stage.next_stage
            assert next_stage is not None, "next_direct has seen it"
            if next_stage.signature.is_async != stage.signature.is_async:
                raise FlowError(
                    f"{stage.name} and {next_stage.name} are not both async functions, so they cannot be in one "
                    "transaction: say next instead of next_direct"
                )
            if work is None and self._context.plans.uses_sql(next_stage):
                raise FlowError(
                    f"{next_stage.name} asks for a session, and {self._stage.name}, with which the transaction begins, "
                    "does not: ask for one there, too, or say next instead of next_direct"
                )
            flow, stage = flow.for_next_stage(), next_stage

    async def _call(self, stage: Stage, flow: Flow, work: AsyncSqlWork | ThreadSqlWork | None) -> None:
        context = self._context
        arguments = (flow.message,) if stage.endpoint.state is None else (flow.message, flow.state)
        plan = context.plans.plan_of(stage)
        provided = context.provided_values(flow, work)
        chain, execution = context.chain, self._execution
        if execution is not None and stage is not self._stage:
            # Directly after another one.
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
                # Nobody is to be warned of what is said here.
                result.close()
            raise FlowError(
                f"{stage.name} has returned what nobody has awaited ({type(result).__name__}): a decorator around an "
                "async function is async itself, and awaits it"
            )
        flow.reply(result)

    async def _run_sql_step(self, step: Callable[[], Any], work: AsyncSqlWork | ThreadSqlWork) -> None:
        """What is said to the database, where the stage has run."""
        if self._stage.signature.is_async:
            await step()
        else:
            await self._in_thread(step, work)

    async def _in_thread(self, call: Callable[[], T], work: AsyncSqlWork | ThreadSqlWork | None = None) -> T:
        """Whoever is cancelled waits all the same: a thread cannot be interrupted, and what it uses is not to be taken
        away under it. A second cancellation leaves it, and it rolls back `work` itself."""

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

    # ---- What became of it ----

    async def _on_failed(self, error: BaseException) -> None:
        try:
            outcome = await self._settle_failed(error)
        except BaseException as other:
            # The broker is away, or the service stops.
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
        """To the broker."""
        context, message = self._context, self._message
        if self._inbox_id and self._is_sql_committed:
            # It is done. When it comes again what it has to send is seen to.
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
            # In a subscription there are no dead letters: what is refused there would come again for ever.
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
