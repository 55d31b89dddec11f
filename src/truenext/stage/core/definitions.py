"""What a service consists of: endpoints, their stages, and what each of them takes and replies.

    Endpoint        can be asked or sent to: a name, what it takes, what it replies (None: nothing)
    └── LocalEndpoint       of this service, with stages
        ├── StatelessEndpoint, StatefulEndpoint     what a program decorates the stages with
    Topic           can be published to; each of its subscribers is an endpoint of its own

What types cannot say is checked here, before anything starts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import NoneType
from typing import Any, Concatenate, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

from truenext.errors import RemoteProtocolError
from truenext.model.destination import parse_stored_address
from truenext.model.pattern import is_pattern
from truenext.stage.core.codec import Codec, type_name
from truenext.stage.core.errors import DefinitionError
from truenext.stage.core.names import stage_queue
from truenext.stage.core.retry import RetryRules
from truenext.stage.core.signature import Signature, is_assignable, signature_of, without_none

M = TypeVar("M")
"""What is taken."""
R = TypeVar("R")
"""What is replied."""
S = TypeVar("S")
"""The state."""
P = ParamSpec("P")

CONCURRENCY_MAX = 1000


class Endpoint(Generic[M, R]):
    """Something that can be asked or sent to, of this service or another."""

    def __init__(self, name: str, takes: type[M], replies: type[R] | None) -> None:
        """By `Service.remote`, `Service.endpoint` and the like. Raises: DefinitionError"""
        self.name = name
        self.destination = f"/queue/{name}"
        self.takes = Codec(takes, f"what {name} takes")
        self.replies: Codec[R] | None = None
        if replies not in (None, NoneType):
            assert replies is not None, "it is not None"
            self.replies = Codec(replies, f"what {name} replies")

    def __repr__(self) -> str:
        replied = "" if self.replies is None else f" -> {type_name(self.replies.type)}"
        return f"<{type(self).__name__} {self.name}({type_name(self.takes.type)}){replied}>"


class Topic(Generic[M]):
    """Something that can be published to: each subscriber that is there gets it."""

    def __init__(self, name: str, takes: type[M]) -> None:
        """By `Service.topic`. Raises: DefinitionError"""
        if not isinstance(name, str):
            raise DefinitionError(f"{name!r} is no name of a topic: names are text")
        self.name = name
        self.destination = f"/topic/{name}"
        self.takes = Codec(takes, f"what is published to {name}")
        try:
            parse_stored_address(self.destination)
        except RemoteProtocolError as error:
            raise DefinitionError(f"{name!r} is no name of a topic: {error}") from error
        if is_pattern(name):
            raise DefinitionError(f"{name!r} is no name of a topic but a pattern: nothing can be published to it")

    def __repr__(self) -> str:
        return f"<Topic {self.name}({type_name(self.takes.type)})>"


class StageOptions(TypedDict, total=False):
    """What an endpoint or a stage may be defined with; of what is left out, or None, the outer one counts."""

    concurrency: int | None
    """Messages of a stage that are handled at once, and as many interactive ones."""
    attempts: int | None
    """Failures after which a message is a dead letter, if that is fewer than the policy of the queue says."""
    retry: Mapping[type[BaseException], str] | None
    """When a failed message is tried again, by the class of what was raised: {Busy: "2s, 10s, 1m", Bad: "never"}."""
    exactly_once: bool | None
    """Its effects in the database happen once, and what it sends is sent once."""


class StageSettings:
    """What a service, an endpoint or a stage may set; the nearest counts."""

    __slots__ = ("attempts", "concurrency", "exactly_once", "retries")

    def __init__(self, subject: str, /, **options: Unpack[StageOptions]) -> None:
        """Raises: DefinitionError, TypeError"""
        unknown = options.keys() - StageOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"{subject} has no option {', '.join(sorted(unknown))}")
        self.concurrency = concurrency = options.get("concurrency")
        self.attempts = attempts = options.get("attempts")
        self.exactly_once = exactly_once = options.get("exactly_once")
        if not isinstance(exactly_once, bool | None):
            raise DefinitionError(f"exactly_once of {subject} is True or False, not {exactly_once!r}")
        # True is an int, too.
        if concurrency is not None and not (type(concurrency) is int and 1 <= concurrency <= CONCURRENCY_MAX):
            raise DefinitionError(f"concurrency of {subject} is 1 to {CONCURRENCY_MAX}, not {concurrency!r}")
        if attempts is not None and not (type(attempts) is int and attempts >= 1):
            raise DefinitionError(f"attempts of {subject} is 1 or more, not {attempts!r}")
        retry = options.get("retry")
        self.retries = RetryRules({} if retry is None else retry, subject)

    def with_defaults(self, defaults: StageSettings) -> StageSettings:
        """These, and of the outer ones what these leave open."""
        merged = StageSettings("")
        merged.concurrency = self.concurrency or defaults.concurrency
        merged.attempts = self.attempts or defaults.attempts
        merged.exactly_once = defaults.exactly_once if self.exactly_once is None else self.exactly_once
        merged.retries = self.retries.with_defaults(defaults.retries)
        return merged


class Stage:
    """One function of an endpoint, with the queue that it takes from."""

    def __init__(
        self,
        endpoint: LocalEndpoint[Any, Any],
        name: str,
        queue: str,
        function: Callable[..., Any],
        settings: StageSettings,
    ) -> None:
        """By `StatelessEndpoint.stage` and `StatefulEndpoint.stage`. Raises: DefinitionError"""
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
        self.takes: Codec[Any] = Codec(self.signature.message, f"what {subject} takes")
        self.next_stage: Stage | None = None
        """The next one of its endpoint; None if it is the last."""

    def __repr__(self) -> str:
        return f"<Stage {self.queue} {self.name}>"


class LocalEndpoint(Endpoint[M, R]):
    """An endpoint of this service."""

    def __init__(
        self,
        name: str,
        takes: type[M],
        replies: type[R] | None,
        state: type[Any] | None,
        settings: StageSettings,
        register: Callable[[Stage], None],
        topic: Topic[M] | None = None,
    ) -> None:
        """`register` hears of each stage; `topic` is what it subscribes to, instead of a queue of its own.

        Raises: DefinitionError
        """
        super().__init__(name, takes, replies)
        if self.replies is not None and without_none(replies) != replies:
            raise DefinitionError(
                f"what {name} replies is {type_name(replies)}, but "
                "a stage that returns None replies nothing, and whoever "
                "asks would wait in vain: reply a type with a field that may be None"
            )
        self.state: Codec[Any] | None = None
        if state is not None:
            subject = f"the state of {name}"
            self.state = Codec(state, subject)
            self.state.check_default(subject)
        self.settings = settings
        self.subscribed_topic = topic
        self.stages_in_order: list[Stage] = []
        self._register = register

    def add(self, function: Callable[..., Any], name: str | None, settings: StageSettings) -> None:
        """One more stage. Raises: DefinitionError"""
        if name is None:
            name = str(getattr(function, "__name__", ""))
        if any(each.name == name for each in self.stages_in_order):
            raise DefinitionError(f"{self.name} has a stage {name} already: name=... gives this one another")
        queue = stage_queue(self.name, name) if self.stages_in_order else self.name
        stage = Stage(self, name, queue, function, settings.with_defaults(self.settings))
        signature = stage.signature
        if signature.message is Any and (self.stages_in_order or self.takes.type is not Any):
            raise DefinitionError(
                f"stage {name} of {self.name} takes Any, so it would get dicts, lists and texts, whatever was sent: "
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
        # It may be refused: then nothing goes to it.
        self._register(stage)
        if self.stages_in_order:
            self.stages_in_order[-1].next_stage = stage
        self.stages_in_order.append(stage)

    def check(self) -> None:
        """All stages are defined.

        Raises: DefinitionError if that is no endpoint
        """
        if not self.stages_in_order:
            raise DefinitionError(f"{self.name} has no stage: decorate a function with its .stage")
        last = self.stages_in_order[-1]
        if self.replies is not None and last.signature.reply is None:
            raise DefinitionError(
                f"stage {last.name} is the last of {self.name}, which replies {type_name(self.replies.type)}: "
                f"annotate that it returns {type_name(self.replies.type)}; "
                "with `| None` if it sometimes goes on otherwise"
            )


class StatelessEndpoint(LocalEndpoint[M, R]):
    """An endpoint whose stages keep nothing from one to the next."""

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

        It takes what the stage before has asked for (the first one: what the endpoint takes), and what else it names by
        type. It may reply by what it returns. Its name is that of its queue, and so of its messages under way. Options
        are `concurrency`, `attempts`, `retry` and `exactly_once` (StageOptions).

        Raises: DefinitionError
        """
        return _decorate(self, function, name, options)


class StatefulEndpoint(LocalEndpoint[M, R], Generic[M, R, S]):
    """An endpoint with a state that its stages share, in one flow, one after the other."""

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
        """As `StatelessEndpoint.stage`; the function takes the state behind its message.

        Raises: DefinitionError
        """
        return _decorate(self, function, name, options)


class StatelessStageDecorator(Generic[R]):
    """What `stage(concurrency=...)` returns: it decorates a function."""

    def __init__(self, add: Callable[[Callable[..., Any]], None]) -> None:
        self._add = add

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Awaitable[R | None]]
    ) -> Callable[Concatenate[Any, P], Awaitable[R | None]]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], R | None]
    ) -> Callable[Concatenate[Any, P], R | None]: ...

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self._add(function)
        return function


class StatefulStageDecorator(Generic[R, S]):
    """The same of an endpoint with a state."""

    def __init__(self, add: Callable[[Callable[..., Any]], None]) -> None:
        self._add = add

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, S, P], Awaitable[R | None]]
    ) -> Callable[Concatenate[Any, S, P], Awaitable[R | None]]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, S, P], R | None]
    ) -> Callable[Concatenate[Any, S, P], R | None]: ...

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self._add(function)
        return function


def _decorate(
    endpoint: LocalEndpoint[Any, Any], function: Callable[..., Any] | None, name: str | None, options: StageOptions
) -> Any:
    settings = StageSettings(f"a stage of {endpoint.name}", **options)

    def add(decorated: Callable[..., Any]) -> None:
        endpoint.add(decorated, name, settings)

    if function is not None:
        add(function)
        return function
    return (StatelessStageDecorator if endpoint.state is None else StatefulStageDecorator)(add)
