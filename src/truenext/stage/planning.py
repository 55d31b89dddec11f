"""Dependencies of each stage of a service, and whether the stage uses the database."""

from __future__ import annotations

from typing import Any, Final

from truenext.errors import ConfigurationError
from truenext.stage.core.definitions import Stage
from truenext.stage.core.errors import DefinitionError
from truenext.stage.core.flow import Flow
from truenext.stage.definition import Definition
from truenext.stage.dependencies.depends import Overrides, build_plan
from truenext.stage.dependencies.factory import name_of
from truenext.stage.dependencies.plan import DependencyPlan
from truenext.stage.lifespan import Lifespan
from truenext.stage.replies_stage import make_replies_stage

FLOW: Final = "flow"
SESSION: Final = "session"
LIFESPAN: Final = "lifespan"


class DependencyPlans:
    def __init__(self, definition: Definition, *, has_database: bool, overrides: Overrides | None = None) -> None:
        """Plan the dependencies of all stages. `overrides` replaces factories in tests.

        Raises: ConfigurationError if a parameter of a stage has no source, or no stage depends on an overridden factory
        """
        self._has_database = has_database
        self.lifespan = None if definition.lifespan is None else Lifespan(definition.lifespan)
        for factory, other in (overrides or {}).items():
            if not (callable(factory) and callable(other)):
                raise ConfigurationError(f"overrides maps a factory to another factory, not {factory!r} to {other!r}")
        self._by_stage = {stage: self._plan(definition, stage, overrides) for stage in definition.stages.values()}
        self.replies_stage: Stage | None = None
        """Stage that keeps replies; None if the service has no database or no exactly-once processing."""
        if has_database and definition.has_outbox:
            from truenext.stage.sql import keep_reply, session_type

            self.replies_stage = make_replies_stage(definition.name, keep_reply, session_type(is_async=True))
            self._by_stage[self.replies_stage] = self._plan(definition, self.replies_stage, None)
        overridden = {factory for plan in self._by_stage.values() for factory in plan.overridden}
        for factory in (overrides or {}).keys() - overridden:
            # Otherwise a test would run with the factory that it means to replace.
            raise ConfigurationError(
                f"overrides has {name_of(factory)}, and no stage of {definition.name} depends on it: use the same "
                "function as in Depends(...)"
            )

    def plan_of(self, stage: Stage) -> DependencyPlan:
        return self._by_stage[stage]

    def uses_sql(self, stage: Stage) -> bool:
        """Whether the stage takes a session, or depends on a factory that takes a session."""
        return SESSION in self._by_stage[stage].required_names

    def uses_database(self, stage: Stage) -> bool:
        """Whether the stage takes a session or has exactly-once processing."""
        return self.uses_sql(stage) or bool(stage.settings.exactly_once)

    def _plan(self, definition: Definition, stage: Stage, overrides: Overrides | None) -> DependencyPlan:
        provided: dict[Any, str] = {Flow: FLOW}
        forbidden: dict[Any, str] = {}
        if self.lifespan is not None and self.lifespan.yielded_type is not None:
            provided[self.lifespan.yielded_type] = LIFESPAN
        if self._has_database:
            from truenext.stage.sql import session_type

            # AsyncSession for async functions, Session for plain ones.
            is_async = stage.signature.is_async
            own, other = session_type(is_async=is_async), session_type(is_async=not is_async)
            provided[own] = SESSION
            kind = "an async function" if is_async else "a plain function"
            forbidden[other] = f"{kind} needs a session of type {own.__name__}, not {other.__name__}"
        elif stage.settings.exactly_once:
            raise DefinitionError(
                f"stage {stage.name} of {stage.endpoint.name} is exactly-once, and the service has no database: "
                f'Service("{definition.name}", database="postgresql+psycopg:///...")'
            )
        else:
            _check_no_session(definition, stage)
        positional = stage.signature.positional
        return build_plan(
            stage.function, provided=provided, positional=positional, overrides=overrides, forbidden=forbidden
        )


def _check_no_session(definition: Definition, stage: Stage) -> None:
    """Check that a stage takes no session. This check works without SQLAlchemy.

    Raises: DefinitionError if the stage takes a session
    """
    for name, kind in stage.signature.dependencies.items():
        if getattr(kind, "__module__", "").startswith("sqlalchemy."):
            raise DefinitionError(
                f"{name} of stage {stage.name} of {stage.endpoint.name} is a session, and the service has no database: "
                f'Service("{definition.name}", database="postgresql+psycopg:///...")'
            )
