"""Parameters of a stage: `Depends`, and the search for the source of each parameter's value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, get_args, get_origin

from truenext.errors import ConfigurationError
from truenext.stage.core.signature import without_none
from truenext.stage.dependencies.factory import (
    Factory,
    classify_factory,
    evaluated_parameters,
    is_awaited,
    name_of,
)
from truenext.stage.dependencies.plan import DependencyPlan, FactoryStep

Overrides: TypeAlias = Mapping[Factory, Factory]


@dataclass(frozen=True, slots=True)
class Depends:
    """Mark a parameter, in `Annotated[T, Depends(factory)]`, as a value that `factory` makes.

    A factory is a function, a generator function that yields once, a function that `contextlib` has made a context
    manager of, or a class. The functions may be `async`, but not for a plain stage, since it runs in a thread. Code
    after the `yield` runs when the stage has returned, before anything is committed. If the instances of a class are
    context managers, they are entered before the stage, and exited when the stage has returned.

    A factory may take the same parameters as a stage, except the message and the state. It is called once for each
    message, even if several parameters depend on it.

    Raises: ConfigurationError if `factory` is not callable
    """

    factory: Factory
    """Function or class that makes the value."""

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise ConfigurationError(f"Depends takes a factory, not the value that it makes: {self.factory!r}")


def build_plan(
    function: Callable[..., Any],
    *,
    provided: Mapping[Any, str],
    positional: Collection[str] = (),
    overrides: Overrides | None = None,
    forbidden: Mapping[Any, str] = MappingProxyType({}),
) -> DependencyPlan:
    """Build the plan of a stage's dependencies.

    `provided` names the value for each type that the caller provides; a generic type includes its parameterized types.
    `positional` are parameters that the caller passes itself. `overrides` maps a factory to the factory that replaces
    it everywhere. `forbidden` has the types that no parameter may have, each with the reason.

    Raises: ConfigurationError if a parameter has no value, or a forbidden type; the text names parameter and function
    """
    is_async = inspect.iscoroutinefunction(function)
    search = _PlanBuilder(provided, overrides or {}, forbidden, is_async, function)
    direct, made = search.parameter_sources(function, positional)
    return DependencyPlan(search.steps, direct, made, search.overridden)


@dataclass(slots=True, eq=False)
class _PlanBuilder:
    """Search for the sources of a function's parameters, and of the parameters of its factories."""

    provided: Mapping[Any, str]
    overrides: Overrides
    forbidden: Mapping[Any, str]
    is_async: bool
    function: Callable[..., Any]
    steps: list[FactoryStep] = field(default_factory=list)
    """Calls of factories, in the order in which they are made."""
    overridden: set[Factory] = field(default_factory=set)
    _step_numbers: dict[Factory, int] = field(default_factory=dict)
    _path: list[Callable[..., Any]] = field(default_factory=list)

    def parameter_sources(
        self, function: Callable[..., Any], positional: Collection[str] = ()
    ) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, int], ...]]:
        """Return two lists: parameters with a provided value, each with the name of the value, and parameters with a
        factory, each with the number of the factory's step."""
        direct: list[tuple[str, str]] = []
        made: list[tuple[str, int]] = []
        self._path.append(function)
        for parameter in self._parameters(function):
            if parameter.name in positional:
                continue
            kind, depends = self._annotation(function, parameter)
            if depends is not None:
                if depends in self.overrides:
                    self.overridden.add(depends)
                    depends = self.overrides[depends]
                made.append((parameter.name, self._add_step(depends, parameter.name)))
            elif (name := self._provided_name(kind)) is not None:
                direct.append((parameter.name, name))
            elif (why := self.forbidden.get(kind)) is not None:
                raise self._fault(function, parameter.name, why)
            elif parameter.default is parameter.empty:
                raise self._fault(function, parameter.name, self._missing_reason(kind))
        self._path.pop()
        return tuple(direct), tuple(made)

    def _parameters(self, function: Callable[..., Any]) -> list[inspect.Parameter]:
        try:
            every = evaluated_parameters(function)
        except NameError as error:
            # Annotations that are text, because of quotes or a `__future__` import, are evaluated in their module.
            reason = f"an annotation of {name_of(function)} cannot be read: {error}"
            raise ConfigurationError(reason + self._dependency_path()) from error
        return [each for each in every if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]

    def _annotation(self, function: Callable[..., Any], parameter: inspect.Parameter) -> tuple[Any, Factory | None]:
        if isinstance(parameter.default, Depends):
            raise self._fault(function, parameter.name, "Depends belongs in Annotated[T, Depends(...)], not after =")
        kind, depends = _parse_annotation(parameter.annotation)
        if len(depends) > 1:
            raise self._fault(function, parameter.name, "it depends on several factories")
        is_needed = depends or parameter.default is parameter.empty
        if is_needed and parameter.kind is parameter.POSITIONAL_ONLY:
            raise self._fault(function, parameter.name, "it cannot be passed by name")
        return kind, depends[0].factory if depends else None

    def _provided_name(self, kind: Any) -> str | None:
        return self.provided.get(kind) or self.provided.get(get_origin(kind))

    def _add_step(self, factory: Factory, parameter: str) -> int:
        """Return the number of the step that calls the factory, and add the step if it is new. All parameters that
        depend on the factory share the step."""
        if factory in self._path:
            cycle = [*self._path[self._path.index(factory) :], factory]
            raise self._fault(
                self._path[-1], parameter, f"the dependencies run in a circle: {' -> '.join(map(name_of, cycle))}"
            )
        if factory in self._step_numbers:
            return self._step_numbers[factory]
        maker, kind = classify_factory(factory, is_async=self.is_async)
        if is_awaited(kind) and not self.is_async:
            raise self._fault(
                self._path[-1],
                parameter,
                f"{name_of(factory)} must be awaited, and {name_of(self.function)} is a plain function, which runs "
                "in a thread; make both async, or both plain",
            )
        direct, made = self.parameter_sources(factory)
        self._step_numbers[factory] = len(self.steps)
        self.steps.append(FactoryStep(name_of(factory), maker, kind, direct, made))
        return self._step_numbers[factory]

    def _missing_reason(self, kind: Any) -> str:
        if kind is inspect.Parameter.empty:
            return "it has no annotation"
        available = ", ".join(sorted({_type_name(each) for each in self.provided})) or "nothing"
        return (
            f"no value of type {_type_name(kind)} is provided; provided are {available}; others need "
            "Annotated[T, Depends(...)]"
        )

    def _fault(self, function: Callable[..., Any], parameter: str, why: str) -> ConfigurationError:
        return ConfigurationError(f"{name_of(function)}, parameter {parameter!r}: {why}{self._dependency_path()}")

    def _dependency_path(self) -> str:
        return f" (dependencies: {' -> '.join(map(name_of, self._path))})" if len(self._path) > 1 else ""


def _parse_annotation(annotation: Any) -> tuple[Any, list[Depends]]:
    """Return the type of an annotation, and its Depends. `T | None` counts as T."""
    kind = without_none(annotation)
    if get_origin(kind) is not Annotated:
        return kind, []
    within, *notes = get_args(kind)
    kind, depends = _parse_annotation(within)
    return kind, [*depends, *(each for each in notes if isinstance(each, Depends))]


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
