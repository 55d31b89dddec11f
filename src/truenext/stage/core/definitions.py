"""Definitions of a service: endpoints and their stages, topics, and the types of messages and replies.

    Endpoint        takes requests: has a name, a type that it takes, a type that it replies (None: no reply)
    └── LocalEndpoint       endpoint of this service, with stages
        ├── StatelessEndpoint, StatefulEndpoint     with the decorator for stages
    Topic           takes publications; each of its subscribers is an endpoint of its own

Rules that a type checker cannot check are checked here, before the service starts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from types import NoneType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from truenext.errors import RemoteProtocolError
from truenext.flows.names import FAILURE_STAGE
from truenext.model.destination import parse_stored_address
from truenext.model.pattern import is_pattern
from truenext.stage.core.codec import Codec, type_name
from truenext.stage.core.errors import DefinitionError
from truenext.stage.core.failure import Failure
from truenext.stage.core.names import stage_queue
from truenext.stage.core.retry import RetryRules
from truenext.stage.core.signature import Signature, is_assignable, signature_of, without_none

M = TypeVar("M")
"""Type of the message that an endpoint or a topic takes."""
R = TypeVar("R")
"""Type of an endpoint's reply."""
S = TypeVar("S")
"""Type of an endpoint's state."""
P = ParamSpec("P")

CONCURRENCY_MAX = 1000


class Endpoint(Generic[M, R]):
    """Endpoint of this service or of another service, to which flows send messages and requests. An endpoint of this
    service is a `LocalEndpoint`: either a `StatelessEndpoint` or a `StatefulEndpoint`."""

    def __init__(self, name: str, takes: type[M], replies: type[R] | None) -> None:
        """Create an endpoint for a method such as `Service.remote`. Raises: DefinitionError if the name or a type is
        invalid"""
        self.name = name
        self.destination = f"/queue/{name}"
        self.takes = Codec(takes, f"the message of {name}")
        self.replies: Codec[R] | None = None
        if replies is not None and replies is not NoneType:
            self.replies = Codec(replies, f"the reply of {name}")

    def __repr__(self) -> str:
        replied = "" if self.replies is None else f" -> {type_name(self.replies.type)}"
        return f"<{type(self).__name__} {self.name}({type_name(self.takes.type)}){replied}>"


class Topic(Generic[M]):
    """Topic to which flows publish messages. Each connected subscriber gets a copy."""

    def __init__(self, name: str, takes: type[M]) -> None:
        """Create a topic for `Service.topic`. Raises: DefinitionError if the name or the type is invalid"""
        if not isinstance(name, str):
            raise DefinitionError(f"{name!r} is not the name of a topic: names are text")
        self.name = name
        self.destination = f"/topic/{name}"
        self.takes = Codec(takes, f"the message of topic {name}")
        try:
            parse_stored_address(self.destination)
        except RemoteProtocolError as error:
            raise DefinitionError(f"{name!r} is not the name of a topic: {error}") from error
        if is_pattern(name):
            raise DefinitionError(f"{name!r} is a pattern, and messages are published to one topic: use its name")

    def __repr__(self) -> str:
        return f"<Topic {self.name}({type_name(self.takes.type)})>"


class StageOptions(TypedDict, total=False):
    """Options of a service, an endpoint or a stage. If a stage lacks an option, or has None, the endpoint's option
    counts, and then the service's. The rules of `retry` are merged: for each class of exception, the rule of the
    innermost level counts."""

    concurrency: int | None
    """Number of messages that a stage processes at once, 1 to 1,000. In addition, it processes the same number of
    interactive messages (a caller waits for their flow). By default 8."""
    attempts: int | None
    """Number of failures, 1 or more, after which a message becomes a dead letter. If the policy of the queue has a
    lower number, the lower number counts. By default the policy alone counts."""
    retry: Mapping[type[BaseException], str] | None
    """Delays before retries, by the class of the exception: `{Busy: "2s, 10s, 1m", Bad: "never"}`. The first delay
    follows the first failure, and so on; the last delay follows all further failures. Units are ms, s, m, h and d, and
    the longest delay is 7 days. "never" makes the message a dead letter at once. If rules name several base classes of
    an exception, the first one in its method resolution order counts. An exception without a rule follows the policy of
    the queue. For an exception group, the rules of the errors in it count: "never" if one of them has it, else the
    longest delay."""
    exactly_once: bool | None
    """True: exactly-once processing. The stage's changes in the database happen once, and its messages are sent once.
    Requires a database of the service. By default False."""


class StageSettings:
    """Checked options of a service, an endpoint or a stage."""

    __slots__ = ("attempts", "concurrency", "exactly_once", "retries")

    def __init__(self, subject: str, /, **options: Unpack[StageOptions]) -> None:
        """Check the options. `subject` names the service, endpoint or stage in errors.

        Raises: DefinitionError if an option has an invalid value; TypeError for an unknown option
        """
        unknown = options.keys() - StageOptions.__annotations__.keys()
        if unknown:
            close = get_close_matches(min(unknown), StageOptions.__annotations__, n=1)
            hint = f": is {close[0]!r} meant?" if close else ""
            raise TypeError(f"{subject} has no option {', '.join(sorted(unknown))}{hint}")
        self.concurrency = concurrency = options.get("concurrency")
        self.attempts = attempts = options.get("attempts")
        self.exactly_once = exactly_once = options.get("exactly_once")
        if not isinstance(exactly_once, bool | None):
            raise DefinitionError(f"exactly_once of {subject} must be True or False, not {exactly_once!r}")
        # A bool is an int, too.
        if concurrency is not None and not (type(concurrency) is int and 1 <= concurrency <= CONCURRENCY_MAX):
            raise DefinitionError(f"concurrency of {subject} must be 1 to {CONCURRENCY_MAX}, not {concurrency!r}")
        if attempts is not None and not (type(attempts) is int and attempts >= 1):
            raise DefinitionError(f"attempts of {subject} must be 1 or more, not {attempts!r}")
        retry = options.get("retry")
        self.retries = RetryRules({} if retry is None else retry, subject)

    def with_defaults(self, defaults: StageSettings) -> StageSettings:
        """Return a copy of these settings. Options that are not set get the values of `defaults`."""
        merged = StageSettings("")
        merged.concurrency = self.concurrency or defaults.concurrency
        merged.attempts = self.attempts or defaults.attempts
        merged.exactly_once = defaults.exactly_once if self.exactly_once is None else self.exactly_once
        merged.retries = self.retries.with_defaults(defaults.retries)
        return merged


@dataclass(eq=False, repr=False)
class Stage:
    """One function of an endpoint, and the queue from which its messages come."""

    endpoint: LocalEndpoint[Any, Any]
    name: str
    queue: str
    function: Callable[..., Any]
    settings: StageSettings
    next_stage: Stage | None = None
    """Next stage of the endpoint; None for the last stage, and for the stage of `on_failure`."""
    handles_failures: bool = False
    """True for the stage that handles failures of the endpoint's requests (`on_failure`)."""
    keeps_replies: bool = False
    """True for the stage that writes kept replies to the database. It also gets reports of failed flows."""

    def __post_init__(self) -> None:
        """Read the signature. Raises: DefinitionError if the function is invalid"""
        topic, state = self.endpoint.subscribed_topic, self.endpoint.state
        self.destination = f"/queue/{self.queue}" if topic is None else topic.destination
        subject = f"stage {self.name} of {self.endpoint.name}"
        self.signature: Signature = signature_of(self.function, None if state is None else state.type, subject)
        self.takes: Codec[Any] = Codec(self.signature.message, f"the message of {subject}")

    def __repr__(self) -> str:
        return f"<Stage {self.queue} {self.name}>"


class LocalEndpoint(Endpoint[M, R]):
    """Endpoint of this service, with its stages."""

    def __init__(
        self,
        name: str,
        takes: type[M],
        replies: type[R] | None,
        state: type[Any] | None,
        settings: StageSettings,
        register: Callable[[Stage], None],
    ) -> None:
        """Create an endpoint. It calls `register` with each new stage. Raises: DefinitionError if the name or a type is
        invalid"""
        super().__init__(name, takes, replies)
        if self.replies is not None and without_none(replies) != replies:
            raise DefinitionError(
                f"the reply of {name} is {type_name(replies)}, but "
                "a stage that returns None replies nothing, and the "
                "caller would wait for ever: reply a type with a field that may be None"
            )
        self.state: Codec[Any] | None = None
        if state is not None:
            subject = f"the state of {name}"
            self.state = Codec(state, subject)
            self.state.check_default(subject)
        self.settings = settings
        self.subscribed_topic: Topic[M] | None = None
        """Topic from which the endpoint consumes; None if it consumes from queues."""
        self.stages_in_order: list[Stage] = []
        """Stages that run one after the other, without the stage of `on_failure`."""
        self.failure_stage: Stage | None = None
        """Stage that handles failures of the endpoint's requests (`on_failure`); None without one."""
        self._register = register

    def add(self, function: Callable[..., Any], name: str | None, settings: StageSettings) -> None:
        """Add a stage after the last one. Raises: DefinitionError if the function or its name is invalid"""
        if name is None:
            name = str(getattr(function, "__name__", ""))
        if any(each.name == name for each in self.all_stages):
            raise DefinitionError(f"{self.name} has a stage {name} already: give this one another name with name=...")
        queue = stage_queue(self.name, name) if self.stages_in_order else self.name
        stage = Stage(self, name, queue, function, settings.with_defaults(self.settings))
        signature = stage.signature
        if signature.message is Any and (self.stages_in_order or self.takes.type is not Any):
            raise DefinitionError(
                f"stage {name} of {self.name} takes Any, so it would get plain dicts, lists and texts: "
                f"annotate {signature.positional[0]} with its type; dict[str, Any] is any object of JSON"
            )
        if not self.stages_in_order and not is_assignable(signature.message, self.takes.type):
            raise DefinitionError(
                f"stage {name} is the first of {self.name}, which takes {type_name(self.takes.type)}: "
                f"it cannot take {type_name(signature.message)}"
            )
        self._check_reply(stage)
        # Before the stage is linked, as `register` may reject it.
        self._register(stage)
        if self.stages_in_order:
            self.stages_in_order[-1].next_stage = stage
        self.stages_in_order.append(stage)

    def add_failure_stage(self, function: Callable[..., Any], settings: StageSettings) -> None:
        """Add the stage of `on_failure`. Raises: DefinitionError if the function is invalid, or there is one already"""
        if self.failure_stage is not None:
            raise DefinitionError(f"{self.name} has an on_failure already: {self.failure_stage.function!r}")
        if any(each.name == FAILURE_STAGE for each in self.stages_in_order):
            raise DefinitionError(
                f"{self.name} has a stage named {FAILURE_STAGE} that is not its on_failure: give that stage another "
                "name with name=..."
            )
        queue = stage_queue(self.name, FAILURE_STAGE)
        stage = Stage(self, FAILURE_STAGE, queue, function, settings.with_defaults(self.settings))
        stage.handles_failures = True
        if stage.signature.message is not Failure:
            raise DefinitionError(
                f"{FAILURE_STAGE} of {self.name} takes {type_name(stage.signature.message)}: annotate "
                f"{stage.signature.positional[0]} with Failure"
            )
        self._check_reply(stage)
        self._register(stage)
        self.failure_stage = stage

    def _check_reply(self, stage: Stage) -> None:
        reply, replies = stage.signature.reply, None if self.replies is None else self.replies.type
        if reply is not None and (replies is None or not is_assignable(replies, reply)):
            raise DefinitionError(
                f"stage {stage.name} of {self.name} returns {type_name(reply)}, but the endpoint replies "
                f"{'nothing' if replies is None else type_name(replies)}"
            )

    @property
    def all_stages(self) -> list[Stage]:
        """All stages of the endpoint. The stage of `on_failure` is the last one."""
        return self.stages_in_order if self.failure_stage is None else [*self.stages_in_order, self.failure_stage]

    def stage_at(self, destination: str) -> Stage | None:
        """Return the stage with this destination; None if there is none. The stage of `on_failure` is left out."""
        return next((each for each in self.stages_in_order if each.destination == destination), None)

    @property
    def failure_destination(self) -> str:
        """Destination of failures of this endpoint's requests; empty if the endpoint has no `on_failure`."""
        return "" if self.failure_stage is None else self.failure_stage.destination

    def check(self) -> None:
        """Check the endpoint after all its stages are defined.

        Raises: DefinitionError if the endpoint has no stage, or its last stage does not return the reply
        """
        if not self.stages_in_order:
            raise DefinitionError(f"{self.name} has no stage: decorate a function with its .stage")
        last = self.stages_in_order[-1]
        if self.replies is not None and last.signature.reply is None:
            raise DefinitionError(
                f"stage {last.name} is the last of {self.name}, which replies {type_name(self.replies.type)}: "
                f"annotate that it returns {type_name(self.replies.type)}; "
                "with `| None` if it sometimes continues with another stage or endpoint"
            )


class StatelessEndpoint(LocalEndpoint[M, R]):
    """Endpoint without a state: its stages share nothing."""

    @overload
    def stage(
        self, function: Callable[Concatenate[Any, P], Awaitable[R | None]], /
    ) -> Callable[Concatenate[Any, P], Awaitable[R | None]]: ...

    @overload
    def stage(
        self, function: Callable[Concatenate[Any, P], R | None], /
    ) -> Callable[Concatenate[Any, P], R | None]: ...

    @overload
    def stage(self, /, *, name: str | None = None, **options: Unpack[StageOptions]) -> StatelessStageDecorator[R]: ...

    def stage(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        **options: Unpack[StageOptions],
    ) -> Any:
        """Decorate the function of the next stage: `@place.stage`, or `@place.stage(concurrency=8)`.

        An `async` function runs in the event loop, in a task of its own. A plain function runs in a thread. The
        parameters of the function are:

        - first the message: the endpoint's message in the first stage. In a later stage it is the reply that the
          previous stage requested, or the message that the previous stage gave to `Flow.next`. The annotation is not
          `Any`, unless the endpoint takes `Any`.
        - second the state, if the endpoint has one
        - `Flow`, by its type
        - `sqlalchemy.ext.asyncio.AsyncSession` in an `async` function, `sqlalchemy.orm.Session` in a plain function: a
          session in the stage's transaction, in the service's database
        - the value of the lifespan, by its class
        - `Annotated[T, Depends(factory)]`: a value that a factory makes

        `T | None` counts as T. A parameter of another type keeps its default. If it has no default, the service does
        not start, with a ConfigurationError. If the function returns a value other than None, that value is the reply.
        A stage annotated `-> Placed` may return None only if it has replied or continued the flow. A stage annotated
        `-> Placed | None` may also end the flow without a reply.

        Args:
            function: Function of the stage, if `@place.stage` is used without options.
            name: Name of the stage; None is the name of the function. Each stage after the first has a queue named
                after it, such as order.place.stage.reserve. If such a stage is renamed, messages stay in the old queue.
            **options: Options of the stage (`StageOptions`).

        Raises: DefinitionError if the function, the name or an option is invalid, or the service runs already
        """
        settings = StageSettings(f"a stage of {self.name}", **options)
        return _decorate(function, partial(self.add, name=name, settings=settings))

    @overload
    def on_failure(
        self, function: Callable[Concatenate[Failure, P], Awaitable[R | None]], /
    ) -> Callable[Concatenate[Failure, P], Awaitable[R | None]]: ...

    @overload
    def on_failure(
        self, function: Callable[Concatenate[Failure, P], R | None], /
    ) -> Callable[Concatenate[Failure, P], R | None]: ...

    @overload
    def on_failure(self, /, **options: Unpack[StageOptions]) -> StatelessStageDecorator[R]: ...

    def on_failure(self, function: Callable[..., Any] | None = None, /, **options: Unpack[StageOptions]) -> Any:
        """Decorate the function that handles failures of this endpoint's requests: `@place.on_failure`, or
        `@place.on_failure(attempts=3)`. It is to the endpoint's requests what an `except` block is to calls.

        If a requested endpoint cannot process a message, the message does not become a dead letter. The message goes to
        this stage, whose queue is `ENDPOINT.stage.on_failure`. The same holds for endpoints that the requested endpoint
        requests in turn. The first parameter of the function is the `Failure`; the others are those of any other stage.
        The stage may call `flow.next` with a message for the stage that waits for the reply, request anew, reply, or go
        to another endpoint. If the stage uses none of these calls, the flow ends there. If this stage itself fails, the
        next endpoint with `on_failure` handles the failure; if there is no such endpoint, the message becomes a dead
        letter.

        The stage does not handle failures of the endpoint's own stages. It also handles failures of flows that name
        this endpoint as their `reply_to`.

        Args:
            function: Function of the stage, if `@place.on_failure` is used without options.
            **options: Options of the stage (`StageOptions`).

        Raises: DefinitionError if the function or an option is invalid, the endpoint has an `on_failure` already, or
        the service runs already
        """
        settings = StageSettings(f"{FAILURE_STAGE} of {self.name}", **options)
        return _decorate(function, partial(self.add_failure_stage, settings=settings))


class StatefulEndpoint(LocalEndpoint[M, R], Generic[M, R, S]):
    """Endpoint with a state for each flow. The flow's messages carry the state from stage to stage."""

    @overload
    def stage(
        self, function: Callable[Concatenate[Any, S, P], Awaitable[R | None]], /
    ) -> Callable[Concatenate[Any, S, P], Awaitable[R | None]]: ...

    @overload
    def stage(
        self, function: Callable[Concatenate[Any, S, P], R | None], /
    ) -> Callable[Concatenate[Any, S, P], R | None]: ...

    @overload
    def stage(self, /, *, name: str | None = None, **options: Unpack[StageOptions]) -> StatefulStageDecorator[R, S]: ...

    def stage(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        **options: Unpack[StageOptions],
    ) -> Any:
        """Decorate the function of the next stage. Its first parameter is the message, and its second one the state;
        `StatelessEndpoint.stage` describes the other parameters.

        Args:
            function: Function of the stage, if `@place.stage` is used without options.
            name: Name of the stage; None is the name of the function.
            **options: Options of the stage (`StageOptions`).

        Raises: DefinitionError if the function, the name or an option is invalid, or the service runs already
        """
        settings = StageSettings(f"a stage of {self.name}", **options)
        return _decorate(function, partial(self.add, name=name, settings=settings))

    @overload
    def on_failure(
        self, function: Callable[Concatenate[Failure, S, P], Awaitable[R | None]], /
    ) -> Callable[Concatenate[Failure, S, P], Awaitable[R | None]]: ...

    @overload
    def on_failure(
        self, function: Callable[Concatenate[Failure, S, P], R | None], /
    ) -> Callable[Concatenate[Failure, S, P], R | None]: ...

    @overload
    def on_failure(self, /, **options: Unpack[StageOptions]) -> StatefulStageDecorator[R, S]: ...

    def on_failure(self, function: Callable[..., Any] | None = None, /, **options: Unpack[StageOptions]) -> Any:
        """Decorate the function that handles failures of this endpoint's requests. Its first parameter is the
        `Failure`, and its second one the state at the time of the request; `StatelessEndpoint.on_failure` describes
        the rest.

        Args:
            function: Function of the stage, if `@place.on_failure` is used without options.
            **options: Options of the stage (`StageOptions`).

        Raises: DefinitionError if the function or an option is invalid, the endpoint has an `on_failure` already, or
        the service runs already
        """
        settings = StageSettings(f"{FAILURE_STAGE} of {self.name}", **options)
        return _decorate(function, partial(self.add_failure_stage, settings=settings))


class StatelessStageDecorator(Protocol[R]):
    """Decorator that `stage` returns when it is called with options, such as `stage(concurrency=8)`."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Awaitable[R | None]]
    ) -> Callable[Concatenate[Any, P], Awaitable[R | None]]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], R | None]
    ) -> Callable[Concatenate[Any, P], R | None]: ...


class StatefulStageDecorator(Protocol[R, S]):
    """Decorator that `stage` of an endpoint with a state returns when it is called with options."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, S, P], Awaitable[R | None]]
    ) -> Callable[Concatenate[Any, S, P], Awaitable[R | None]]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, S, P], R | None]
    ) -> Callable[Concatenate[Any, S, P], R | None]: ...


def _decorate(function: Callable[..., Any] | None, add: Callable[[Callable[..., Any]], None]) -> Any:
    """Add `function` as a stage by a call of `add`, and return it. If `function` is None, return a decorator that does
    so."""

    def decorate(decorated: Callable[..., Any]) -> Callable[..., Any]:
        add(decorated)
        return decorated

    return decorate if function is None else decorate(function)
