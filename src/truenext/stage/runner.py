"""Runner: calls the functions of a stage and executes its steps of SQL, in the event loop or in a thread of the
pool."""

from __future__ import annotations

import asyncio
import inspect
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from truenext.stage.core.errors import FlowError
from truenext.stage.core.flow import UNSET, Flow, FlowSource
from truenext.stage.dependencies.exit_stack import StageExitStack
from truenext.stage.message_state import ABANDONED
from truenext.stage.user_code import CURRENT, call_user_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from truenext.client.tasks.connection import Message
    from truenext.flows.envelope import Envelope
    from truenext.stage.context import ServiceContext
    from truenext.stage.core.definitions import Stage
    from truenext.stage.core.output import Output
    from truenext.stage.message_life import MessageLife
    from truenext.stage.pool import PriorityPool
    from truenext.stage.sql.work import AnySqlWork

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class StageRunner:
    """Runner of one stage for one message. With `next_direct`, it also runs the stages that follow."""

    context: ServiceContext
    stage: Stage
    pool: PriorityPool
    message: Message
    life: MessageLife

    async def run(self, envelope: Envelope, output: Output, work: AnySqlWork | None) -> None:
        """Run the stage, and each stage that follows by `next_direct`. Raises the errors of these stages."""
        message, stage = self.message, self.stage
        now_ms = self.context.now_ms()
        flow = Flow(stage, envelope, output, now_ms, FlowSource(message.expires_ms, message.attempts + 1))
        while True:
            if stage.signature.is_async:
                # An async stage runs in the context of its own task; a plain one sets this in its thread's context.
                CURRENT.set(stage)
            await self._call(stage, flow, work)
            if flow.direct_message is UNSET:
                return
            next_stage = flow.next_stage
            assert next_stage is not None, "next_direct has seen it"
            if next_stage.signature.is_async != stage.signature.is_async:
                raise FlowError(
                    f"{stage.name} and {next_stage.name} are not both async functions, so they cannot be in one "
                    "transaction: use next instead of next_direct"
                )
            if work is None and self.context.plans.uses_sql(next_stage):
                raise FlowError(
                    f"stage {next_stage.name} takes a session, but {self.stage.name}, which begins the transaction, "
                    f"takes none: let {self.stage.name} take a session, too, or use next instead of next_direct"
                )
            flow, stage = flow.for_next_stage(), next_stage

    async def _call(self, stage: Stage, flow: Flow, work: AnySqlWork | None) -> None:
        context = self.context
        arguments = (flow.message,) if stage.endpoint.state is None else (flow.message, flow.state)
        plan = context.plans.plan_of(stage)
        provided = context.provided_values(flow, work)
        execution = self.life.execution if context.chain.has_around else None
        if execution is not None and stage is not self.stage:
            # The stage was reached by `next_direct`.
            execution = msgspec.structs.replace(execution, stage=stage.name)
        function = stage.function
        if stage.signature.is_async and execution is None and not plan.steps:
            # Most stages enter nothing, and need no stack.
            result = await function(*arguments, **plan.arguments(provided))
        elif stage.signature.is_async:
            async with StageExitStack() as stack:
                if execution is not None:
                    context.chain.enter_around(stack, execution)
                result = await function(*arguments, **await plan.make_arguments_async(stack, provided))
        else:

            def call() -> object:
                CURRENT.set(stage)
                with StageExitStack() as stack:
                    if execution is not None:
                        context.chain.enter_around(stack, execution)
                    return function(*arguments, **plan.make_arguments(stack, provided))

            result = await self.run_in_thread(partial(call_user_function, call), work)
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

    async def run_sql_step(self, step: Callable[[], Any], work: AnySqlWork | None) -> None:
        """Execute a step of SQL: in the event loop for an `async` stage, otherwise in a thread. If the thread is
        abandoned, it rolls back `work`."""
        if self.stage.signature.is_async:
            await step()
        else:
            await self.run_in_thread(step, work)

    async def run_in_thread(self, call: Callable[[], T], work: AnySqlWork | None = None) -> T:
        """Run `call` in a thread of the pool. A thread cannot be interrupted, so a cancelled caller still waits until
        `call` has returned. A second cancellation abandons the thread: the caller waits no longer, and the thread
        itself rolls back `work`."""
        abandoned_work: AnySqlWork | None = None

        def run() -> T:
            try:
                return call()
            finally:
                if abandoned_work is not None:
                    abandoned_work.rollback()

        future = self.context.loop.run_in_executor(self.pool.executor, copy_context().run, run)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                try:
                    await asyncio.wait({future})
                except asyncio.CancelledError:
                    if work is not None:
                        abandoned_work = work
                        self.life.enter(ABANDONED)
                    raise
            raise

    async def roll_back(self, work: AnySqlWork | None) -> None:
        if work is not None and self.life.state is not ABANDONED:
            await self.run_sql_step(work.rollback, None)
