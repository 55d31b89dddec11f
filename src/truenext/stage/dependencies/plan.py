"""Plan of a stage's dependencies: makes their values for each message, and closes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from truenext.stage.dependencies.exit_stack import StageExitStack
from truenext.stage.dependencies.factory import Factory, FactoryKind

ProvidedValues = Mapping[str, Any]


class FactoryStep:
    """Step of a DependencyPlan: the call of one factory, which makes one value."""

    __slots__ = ("_made", "direct", "kind", "maker", "name")

    def __init__(
        self,
        name: str,
        maker: Factory,
        kind: FactoryKind,
        direct: Sequence[tuple[str, str]],
        made: Sequence[tuple[str, int]],
    ) -> None:
        self.name = name
        self.maker = maker
        self.kind = kind
        self.direct = direct
        """Parameters that get provided values, with the names of these values."""
        self._made = made

    def call(self, provided: ProvidedValues, values: list[Any]) -> Any:
        return self.maker(**_arguments(self.direct, self._made, provided, values))


class DependencyPlan:
    """Dependencies of one stage, in the order in which they are made.

    `async with plan.scope(provided) as arguments` is for an `async` stage, `with plan.thread_scope(provided)` for a
    plain one, in the thread that runs it. Both yield the arguments by parameter. `provided` has the values by the names
    given to `build_plan`. Without factories (`has_factories`), `plan.arguments(provided)` returns the same.

    At the end of the block the entered resources are closed, the last one first, with the exception that ended the
    block (`truenext.stage.dependencies.exit_stack`).
    """

    __slots__ = ("_direct", "_made", "has_factories", "overridden", "required_names", "steps")

    def __init__(
        self,
        steps: Sequence[FactoryStep],
        direct: Sequence[tuple[str, str]],
        made: Sequence[tuple[str, int]],
        overridden: frozenset[Factory],
    ) -> None:
        self.steps = tuple(steps)
        self._direct = direct
        self._made = made
        self.has_factories: bool = bool(steps)
        self.required_names = frozenset(
            name for _, name in (*direct, *(each for step in steps for each in step.direct))
        )
        """Names of the provided values that the stage and its factories take."""
        self.overridden = overridden
        """Factories that were replaced by others from `overrides`."""

    def scope(self, provided: ProvidedValues) -> _DependencyScope:
        return _DependencyScope(self, provided)

    def thread_scope(self, provided: ProvidedValues) -> _ThreadDependencyScope:
        return _ThreadDependencyScope(self, provided)

    def arguments(self, provided: ProvidedValues, values: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the arguments of the stage; `values` are the results of the steps."""
        return _arguments(self._direct, self._made, provided, values)


class _DependencyScope:
    """Block with the dependencies of an `async` stage for one message. Plain factories run in the event loop."""

    __slots__ = ("_exit_stack", "_plan", "_provided")

    def __init__(self, plan: DependencyPlan, provided: ProvidedValues) -> None:
        self._plan = plan
        self._provided = provided
        self._exit_stack = StageExitStack()

    async def __aenter__(self) -> dict[str, Any]:
        values: list[Any] = []
        try:
            for step in self._plan.steps:
                value = step.call(self._provided, values)
                if step.kind is FactoryKind.AWAIT:
                    value = await value
                elif step.kind is FactoryKind.ENTER:
                    value = self._exit_stack.enter(step.name, value)
                elif step.kind is FactoryKind.ENTER_ASYNC:
                    value = await self._exit_stack.enter_async(step.name, value)
                values.append(value)
        except BaseException as error:
            await self._exit_stack.close_async(error)
            raise
        return self._plan.arguments(self._provided, values)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._exit_stack.close_async(error)


class _ThreadDependencyScope:
    """Block with the dependencies of a plain stage for one message, in the thread of the stage."""

    __slots__ = ("_exit_stack", "_plan", "_provided")

    def __init__(self, plan: DependencyPlan, provided: ProvidedValues) -> None:
        self._plan = plan
        self._provided = provided
        self._exit_stack = StageExitStack()

    def __enter__(self) -> dict[str, Any]:
        values: list[Any] = []
        try:
            for step in self._plan.steps:
                value = step.call(self._provided, values)
                values.append(self._exit_stack.enter(step.name, value) if step.kind is FactoryKind.ENTER else value)
        except BaseException as error:
            self._exit_stack.close(error)
            raise
        return self._plan.arguments(self._provided, values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit_stack.close(error)


def _arguments(
    direct: Sequence[tuple[str, str]], made: Sequence[tuple[str, int]], provided: ProvidedValues, values: Sequence[Any]
) -> dict[str, Any]:
    arguments = {parameter: provided[name] for parameter, name in direct}
    for parameter, step in made:
        arguments[parameter] = values[step]
    return arguments
