"""Definitions of a service: endpoints with their stages, topics, and the types that they take and reply.

    Endpoint        takes requests: has a name, a type that it takes, a type that it replies (None: no reply)
    └── LocalEndpoint       of this service, with stages
        ├── StatelessEndpoint, StatefulEndpoint     with the decorator for stages
    Topic           takes publications; each of its subscribers is an endpoint of its own

Rules that type checkers cannot check are checked here, before anything starts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import NoneType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from truenext.errors import RemoteProtocolError
from truenext.model.destination import parse_stored_address
from truenext.model.pattern import is_pattern
from truenext.stage.core.codec import Codec, type_name
from truenext.stage.core.errors import DefinitionError
from truenext.stage.core.names import stage_queue
from truenext.stage.core.retry import RetryRules
from truenext.stage.core.signature import Signature, is_assignable, signature_of, without_none

M = TypeVar("M")
"""Type that an endpoint or topic takes."""
R = TypeVar("R")
"""Type that an endpoint replies."""
S = TypeVar("S")
"""Type of the state."""
P = ParamSpec("P")

CONCURRENCY_MAX = 1000


class Endpoint(Generic[M, R]):
    """Endpoint of this or another service, to which flows can send messages and requests. A `LocalEndpoint`, which is
    a `StatelessEndpoint` or a `StatefulEndpoint`, is one of this service."""

    def __init__(self, name: str, takes: type[M], replies: type[R] | None) -> None:
        """Called by `Service.remote`, `Service.endpoint` and the like. Raises: DefinitionError"""
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
    """Topic to which flows can publish: each connected subscriber gets the message."""

    def __init__(self, name: str, takes: type[M]) -> None:
        """Called by `Service.topic`. Raises: DefinitionError"""
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
    """Options of a service, an endpoint or a stage. A missing one, or None, is taken from the endpoint, and then from
    the service. The rules of `retry` are merged: the nearest one for a class counts."""

    concurrency: int | None
    """Number of messages that a stage handles at once, 1 to 1,000, and the same number of interactive ones in
    addition; 8 by default."""
    attempts: int | None
    """Number of failures, 1 or more, after which a message is a dead letter, if lower than in the policy of the queue;
    by default the policy alone counts."""
    retry: Mapping[type[BaseException], str] | None
    """Delays before retries, by the class of the exception: `{Busy: "2s, 10s, 1m", Bad: "never"}`. The nth delay
    follows the nth failure, the last one all further failures; units are ms, s, m, h and d, up to 7 days. "never" makes
    the message a dead letter at once. The nearest class in the order of inheritance counts; an exception without a rule
    follows the policy of the queue. Of an exception group, one error that is never retried decides, else the longest
    delay."""
    exactly_once: bool | None
    """Exactly-once processing: the effects in the database happen once, and the messages are sent once. It needs a
    database; False by default."""


class StageSettings:
    """Checked options of a service, an endpoint or a stage."""

    __slots__ = ("attempts", "concurrency", "exactly_once", "retries")

    def __init__(self, subject: str, /, **options: Unpack[StageOptions]) -> None:
        """Check the options. `subject` names their owner in errors.

        Raises: DefinitionError; TypeError for an unknown option
        """
        unknown = options.keys() - StageOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"{subject} has no option {', '.join(sorted(unknown))}")
        self.concurrency = concurrency = options.get("concurrency")
        self.attempts = attempts = options.get("attempts")
        self.exactly_once = exactly_once = options.get("exactly_once")
        if not isinstance(exactly_once, bool | None):
            raise DefinitionError(f"exactly_once of {subject} is True or False, not {exactly_once!r}")
        # A bool is an int, too.
        if concurrency is not None and not (type(concurrency) is int and 1 <= concurrency <= CONCURRENCY_MAX):
            raise DefinitionError(f"concurrency of {subject} is 1 to {CONCURRENCY_MAX}, not {concurrency!r}")
        if attempts is not None and not (type(attempts) is int and attempts >= 1):
            raise DefinitionError(f"attempts of {subject} is 1 or more, not {attempts!r}")
        retry = options.get("retry")
        self.retries = RetryRules({} if retry is None else retry, subject)

    def with_defaults(self, defaults: StageSettings) -> StageSettings:
        """Return these settings, with those of `defaults` for the ones that are not set."""
        merged = StageSettings("")
        merged.concurrency = self.concurrency or defaults.concurrency
        merged.attempts = self.attempts or defaults.attempts
        merged.exactly_once = defaults.exactly_once if self.exactly_once is None else self.exactly_once
        merged.retries = self.retries.with_defaults(defaults.retries)
        return merged


class Stage:
    """One function of an endpoint, with the queue from which it consumes."""

    def __init__(
        self,
        endpoint: LocalEndpoint[Any, Any],
        name: str,
        queue: str,
        function: Callable[..., Any],
        settings: StageSettings,
    ) -> None:
        """Called by `StatelessEndpoint.stage` and `StatefulEndpoint.stage`. Raises: DefinitionError"""
        self.endpoint = endpoint
        self.name = name
        self.queue = queue
        self.destination = (
            f"/queue/{queue}" if endpoint.subscribed_topic is None else endpoint.subscribed_topic.destination
        )
        self.function = function
        self.settings = settings
        subject = f"stage {name} of {endpoint.name}"
        state = None if endpoint.state is None else endpoint.state.type
        self.signature: Signature = signature_of(function, state, subject)
        self.takes: Codec[Any] = Codec(self.signature.message, f"the message of {subject}")
        self.next_stage: Stage | None = None
        """Next stage of the endpoint; None if this is the last."""

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
        """`register` is called with each new stage. Raises: DefinitionError"""
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
        self._register = register

    def add(self, function: Callable[..., Any], name: str | None, settings: StageSettings) -> None:
        """Add a stage after the others. Raises: DefinitionError"""
        if name is None:
            name = str(getattr(function, "__name__", ""))
        if any(each.name == name for each in self.stages_in_order):
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
        replies = None if self.replies is None else self.replies.type
        if signature.reply is not None and (replies is None or not is_assignable(replies, signature.reply)):
            raise DefinitionError(
                f"stage {name} of {self.name} returns {type_name(signature.reply)}, but the endpoint replies "
                f"{'nothing' if replies is None else type_name(replies)}"
            )
        # Before the stage is linked, as `register` may reject it.
        self._register(stage)
        if self.stages_in_order:
            self.stages_in_order[-1].next_stage = stage
        self.stages_in_order.append(stage)

    def check(self) -> None:
        """Check the endpoint when all its stages are defined.

        Raises: DefinitionError if it has no stage, or its last stage does not return the reply
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

        An `async` function runs in the event loop, in a task of its own, a plain one in a thread. Its parameters are:

        - first its message: in the first stage what the endpoint takes, in a later one a reply that the stage before
          requested, or the message that it passed on. Its annotation is not `Any`, unless the endpoint takes `Any`.
        - second the state, if the endpoint has one
        - `Flow`, by its type
        - `sqlalchemy.ext.asyncio.AsyncSession` in an `async` function, `sqlalchemy.orm.Session` in a plain one: the
          session of the stage's transaction in the service's database
        - the value of the lifespan, by its class
        - `Annotated[T, Depends(factory)]`: a value that a factory makes

        `T | None` counts as T. A parameter that nothing provides keeps its default; one without a default is a
        ConfigurationError when the service starts. The result of the function is the reply, if not None. A stage
        annotated `-> Placed` that returns None must have replied or continued the flow; one annotated
        `-> Placed | None` may also end the flow without a reply.

        Args:
            function: Function of the stage, if the decorator has no options.
            name: Name of the stage; None is the name of the function. The queue of a later stage has its name, as
                order.place.stage.reserve: renaming it leaves messages in the old queue.
            **options: Options of the stage: `StageOptions`.

        Raises: DefinitionError
        """
        return _decorate(self, function, name, options)


class StatefulEndpoint(LocalEndpoint[M, R], Generic[M, R, S]):
    """Endpoint with a state for each flow, which is passed from stage to stage."""

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
        """Decorate a function as with an endpoint without a state; the function takes the state after its message.

        Args:
            function: Function of the stage, if the decorator has no options.
            name: Name of the stage; None is the name of the function.
            **options: Options of the stage: `StageOptions`.

        Raises: DefinitionError
        """
        return _decorate(self, function, name, options)


class StatelessStageDecorator(Protocol[R]):
    """Decorator that `stage(concurrency=...)` returns."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Awaitable[R | None]]
    ) -> Callable[Concatenate[Any, P], Awaitable[R | None]]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], R | None]
    ) -> Callable[Concatenate[Any, P], R | None]: ...


class StatefulStageDecorator(Protocol[R, S]):
    """Decorator that `stage(concurrency=...)` of an endpoint with a state returns."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, S, P], Awaitable[R | None]]
    ) -> Callable[Concatenate[Any, S, P], Awaitable[R | None]]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, S, P], R | None]
    ) -> Callable[Concatenate[Any, S, P], R | None]: ...


def _decorate(
    endpoint: LocalEndpoint[Any, Any], function: Callable[..., Any] | None, name: str | None, options: StageOptions
) -> Any:
    settings = StageSettings(f"a stage of {endpoint.name}", **options)

    def add(decorated: Callable[..., Any]) -> Callable[..., Any]:
        endpoint.add(decorated, name, settings)
        return decorated

    return add if function is None else add(function)
