"""How do the values that a stage asks for come about, message by message, and how do they end?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from truenext.stage.dependencies.factory import Factory, Way
from truenext.stage.resources import OpenResources

Given = Mapping[str, Any]


class Step:
    """One value, made by one factory."""

    __slots__ = ("_made", "direct", "maker", "name", "way")

    def __init__(
        self,
        name: str,
        maker: Factory,
        way: Way,
        direct: Sequence[tuple[str, str]],
        made: Sequence[tuple[str, int]],
    ) -> None:
        self.name = name
        self.maker = maker
        self.way = way
        self.direct = direct
        """Parameters and the names of what is given to them."""
        self._made = made

    def call(self, given: Given, values: list[Any]) -> Any:
        return self.maker(**_arguments(self.direct, self._made, given, values))


class Plan:
    """What one stage asks for, in the order in which it is made.

    `async with plan.values(given) as arguments` is for an `async` stage, `with plan.values_in_thread(given)` for a
    plain one, in the thread in which that runs. Both yield the arguments by their names. `given` has the values by the
    names that `parameters_of` was told. Where `has_factories` is False, `plan.arguments(given)` is the same.

    When the block ends, whatever was entered is left, last first, and hears of the exception that ended it
    (`truenext.stage.resources`).
    """

    __slots__ = ("_direct", "_made", "asked", "has_factories", "overridden", "steps")

    def __init__(
        self,
        steps: Sequence[Step],
        direct: Sequence[tuple[str, str]],
        made: Sequence[tuple[str, int]],
        overridden: frozenset[Factory],
    ) -> None:
        self.steps = tuple(steps)
        self._direct = direct
        self._made = made
        self.has_factories: bool = bool(steps)
        self.asked = frozenset(name for _, name in (*direct, *(each for step in steps for each in step.direct)))
        """The names of what must be given, to the stage or to a factory."""
        self.overridden = overridden
        """The factories in whose place others are called."""

    def values(self, given: Given) -> _Values:
        return _Values(self, given)

    def values_in_thread(self, given: Given) -> _ValuesInThread:
        return _ValuesInThread(self, given)

    def arguments(self, given: Given, values: Sequence[Any] = ()) -> dict[str, Any]:
        """`values` are what the steps have made."""
        return _arguments(self._direct, self._made, given, values)


class _Values:
    """Of one message, for an `async` stage. Plain factories run in the event loop's own thread."""

    __slots__ = ("_given", "_opened", "_plan")

    def __init__(self, plan: Plan, given: Given) -> None:
        self._plan = plan
        self._given = given
        self._opened = OpenResources()

    async def __aenter__(self) -> dict[str, Any]:
        values: list[Any] = []
        try:
            for step in self._plan.steps:
                value = step.call(self._given, values)
                if step.way is Way.AWAIT:
                    value = await value
                elif step.way is Way.ENTER:
                    value = self._opened.enter(step.name, value)
                elif step.way is Way.ENTER_ASYNC:
                    value = await self._opened.enter_async(step.name, value)
                values.append(value)
        except BaseException as error:
            await self._opened.close_async(error)
            raise
        return self._plan.arguments(self._given, values)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._opened.close_async(error)


class _ValuesInThread:
    """The same, for a plain stage."""

    __slots__ = ("_given", "_opened", "_plan")

    def __init__(self, plan: Plan, given: Given) -> None:
        self._plan = plan
        self._given = given
        self._opened = OpenResources()

    def __enter__(self) -> dict[str, Any]:
        values: list[Any] = []
        try:
            for step in self._plan.steps:
                value = step.call(self._given, values)
                values.append(self._opened.enter(step.name, value) if step.way is Way.ENTER else value)
        except BaseException as error:
            self._opened.close(error)
            raise
        return self._plan.arguments(self._given, values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close(error)


def _arguments(
    direct: Sequence[tuple[str, str]], made: Sequence[tuple[str, int]], given: Given, values: Sequence[Any]
) -> dict[str, Any]:
    arguments = {parameter: given[name] for parameter, name in direct}
    for parameter, step in made:
        arguments[parameter] = values[step]
    return arguments
