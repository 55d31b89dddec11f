"""How do the values that a stage asks for come about, message by message, and how do they end?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from truenext.stage.dependencies.exit_stack import StageExitStack
from truenext.stage.dependencies.factory import Factory, FactoryKind

ProvidedValues = Mapping[str, Any]


class FactoryStep:
    """One value, made by one factory."""

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
        """Parameters and the names of what is given to them."""
        self._made = made

    def call(self, provided: ProvidedValues, values: list[Any]) -> Any:
        return self.maker(**_arguments(self.direct, self._made, provided, values))


class DependencyPlan:
    """What one stage asks for, in the order in which it is made.

    `async with plan.scope(provided) as arguments` for an `async` stage, `with plan.thread_scope(provided)` for a
    plain one, in the thread that runs it. Both yield the arguments by their names. `provided` has the values by the
    names that `build_plan` was told. Where `has_factories` is False, `plan.arguments(provided)` is the same.

    When the block ends, whatever was entered is left, last first, and hears of the exception that ended it
    (`truenext.stage.dependencies.exit_stack`).
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
        """The names of what must be given, to the stage or to a factory."""
        self.overridden = overridden
        """The factories in whose place others are called."""

    def scope(self, provided: ProvidedValues) -> _DependencyScope:
        return _DependencyScope(self, provided)

    def thread_scope(self, provided: ProvidedValues) -> _ThreadDependencyScope:
        return _ThreadDependencyScope(self, provided)

    def arguments(self, provided: ProvidedValues, values: Sequence[Any] = ()) -> dict[str, Any]:
        """`values` are what the steps have made."""
        return _arguments(self._direct, self._made, provided, values)


class _DependencyScope:
    """Of one message, for an `async` stage. Plain factories run in the event loop's own thread."""

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
    """The same, for a plain stage."""

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
