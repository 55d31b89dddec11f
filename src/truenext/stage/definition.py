"""What a service consists of: its endpoints with their stages, what it asks of others, and how it is set up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

from truenext.errors import ConfigurationError
from truenext.model.url import DEFAULT_URL, parse_url
from truenext.stage.core.definitions import (
    Endpoint,
    LocalEndpoint,
    Stage,
    StageOptions,
    StageSettings,
    StatefulEndpoint,
    StatelessEndpoint,
    Topic,
)
from truenext.stage.core.errors import DefinitionError
from truenext.stage.core.names import expand_endpoint_name
from truenext.stage.interceptors.interceptor import Interceptor
from truenext.stage.lifespan import LifespanFactory

M = TypeVar("M")
R = TypeVar("R")
S = TypeVar("S")
F = TypeVar("F", bound="Callable[..., Any]")

SUBSCRIBER_ATTEMPTS = 7
"""What fails in a subscription the broker itself never gives up. Source: docs/contract.md,
"Deliveries and attempts" """
CONCURRENCY = 8
"""Messages of one stage that are handled at once, and as many interactive ones, unless told."""


class Definition:
    """Endpoints with stages, and those of other services that they ask."""

    def __init__(
        self,
        name: str,
        *,
        broker: str | Sequence[str] = DEFAULT_URL,
        database: str | None = None,
        user: str | None = None,
        password: str | None = None,
        concurrency: int = CONCURRENCY,
        attempts: int | None = None,
        retry: Mapping[type[BaseException], str] | None = None,
        exactly_once: bool = False,
        lifespan: LifespanFactory[Any] | None = None,
        interceptors: Sequence[Interceptor] = (),
        events: Path | str | None = None,
    ) -> None:
        """`broker` is a URL, or several of which the first that is there is taken. `database` is a URL of SQLAlchemy,
        for stages that ask for a Session or an AsyncSession.

        `concurrency`, `attempts` and `retry` are for all stages that say nothing else: how many messages of a stage are
        handled at once (and as many interactive ones), after how many failures a message is a dead letter (if that is
        fewer than the policy of the queue says), and when a failed message is tried again, by the class of what was
        raised: {Busy: "2s, 10s, 1m", Bad: "never"}.

        `exactly_once` is for all stages that say nothing else: their effects in the database happen once, and what they
        send is sent once, whatever is lost and however often a message comes (docs/stages-outbox.md). A subscriber is
        none of them.

        `events` is a folder into which each process that runs the stages writes what they do, for `truenext audit
        --stages`.

        Raises: DefinitionError
        """
        self.name = expand_endpoint_name(name, "")
        brokers = (broker,) if isinstance(broker, str) else broker
        for subject, value, kind, expected in (
            ("broker", brokers, Sequence, "a URL, or several"),
            ("database", database, str | None, "a URL of SQLAlchemy, as text"),
            ("user", user, str | None, "text"),
            ("password", password, str | None, "text"),
            ("interceptors", interceptors, Sequence, "a list of Interceptors"),
            ("events", events, Path | str | None, "a folder"),
        ):
            if not isinstance(value, kind):
                # Not the value: it may be a password.
                raise DefinitionError(
                    f"{subject} of service {name} is {expected}, not of the type {type(value).__name__}"
                )
        if not brokers or not all(isinstance(each, str) for each in brokers):
            raise DefinitionError(f"broker of service {name} is a URL, or several, not {broker!r}")
        for url in brokers:
            try:
                parse_url(url)
            except ConfigurationError as error:
                raise DefinitionError(f"broker of service {name}: {error}") from error
        if lifespan is not None and not callable(lifespan):
            raise DefinitionError(f"lifespan of service {name} is a function, not {lifespan!r}")
        for each in interceptors:
            if not isinstance(each, Interceptor):
                raise DefinitionError(f"{each!r} of service {name} is no instance of Interceptor")
        self.broker: tuple[str, ...] = tuple(brokers)
        self.database = database
        self.broker_user = user
        self.broker_password = password
        self.lifespan = lifespan
        self.interceptors = list(interceptors)
        self.events = None if events is None else Path(events)
        self.endpoints: dict[str, LocalEndpoint[Any, Any]] = {}
        """By name."""
        self.remotes: dict[str, Endpoint[Any, Any]] = {}
        self.topics: dict[str, Topic[Any]] = {}
        self.stages: dict[str, Stage] = {}
        """By queue."""
        self._settings = StageSettings(
            f"service {name}", concurrency=concurrency, attempts=attempts, retry=retry, exactly_once=exactly_once
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    # ---- What it consists of ----

    @overload
    def remote(self, name: str, takes: type[M], replies: type[R]) -> Endpoint[M, R]: ...

    @overload
    def remote(self, name: str, takes: type[M], replies: None = None) -> Endpoint[M, None]: ...

    def remote(self, name: str, takes: type[Any], replies: type[Any] | None = None) -> Endpoint[Any, Any]:
        """An endpoint of another service.

        Raises: DefinitionError, also if it was said before with other types
        """
        endpoint: Endpoint[Any, Any] = Endpoint(expand_endpoint_name(name, self.name), takes, replies)
        known = self.remotes.setdefault(endpoint.name, endpoint)
        if _types_of(known) != _types_of(endpoint):
            raise DefinitionError(f"{endpoint} was said before, with other types: {known}")
        return known

    @overload
    def endpoint(
        self, name: str, takes: type[M], replies: type[R], **options: Unpack[StageOptions]
    ) -> StatelessEndpoint[M, R]: ...

    @overload
    def endpoint(
        self, name: str, takes: type[M], replies: type[R], *, state: type[S], **options: Unpack[StageOptions]
    ) -> StatefulEndpoint[M, R, S]: ...

    @overload
    def endpoint(
        self, name: str, takes: type[M], replies: None = None, **options: Unpack[StageOptions]
    ) -> StatelessEndpoint[M, None]: ...

    @overload
    def endpoint(
        self, name: str, takes: type[M], replies: None = None, *, state: type[S], **options: Unpack[StageOptions]
    ) -> StatefulEndpoint[M, None, S]: ...

    def endpoint(
        self,
        name: str,
        takes: type[Any],
        replies: type[Any] | None = None,
        *,
        state: type[Any] | None = None,
        **options: Unpack[StageOptions],
    ) -> LocalEndpoint[Any, Any]:
        """An endpoint of this service: functions that are decorated with its `stage` are what it does, one after the
        other. A name that begins with a dot is that of the service and the rest. What is shared by the stages of one
        flow is in its `state`. Options are `concurrency`, `attempts`, `retry` and `exactly_once` (StageOptions), for
        those of its stages that say nothing else.

        Raises: DefinitionError
        """
        kind = StatelessEndpoint if state is None else StatefulEndpoint
        settings = StageSettings(name, **options).with_defaults(self._settings)
        made: LocalEndpoint[Any, Any] = kind(
            expand_endpoint_name(name, self.name), takes, replies, state, settings, register=self._register
        )
        self._add_endpoint(made)
        return made

    def single(
        self, name: str, takes: type[M], replies: type[R], **options: Unpack[StageOptions]
    ) -> Callable[[Callable[..., Any]], StatelessEndpoint[M, R]]:
        """Decorate the only stage of an endpoint; the function's name is then that endpoint. Options are those of
        `endpoint`.

        Raises: DefinitionError
        """

        def decorate(function: Callable[..., Any]) -> StatelessEndpoint[M, R]:
            endpoint = self.endpoint(name, takes, replies, **options)
            endpoint.stage(function)
            return endpoint

        return decorate

    def terminator(
        self, name: str, takes: type[M], *, state: type[S] | None = None, **options: Unpack[StageOptions]
    ) -> Callable[[Callable[..., Any]], Endpoint[M, None]]:
        """Decorate the only stage of an endpoint that replies nothing; the function's name is then that endpoint.
        `state` is what comes with a reply, if this is who takes it. Options are those of `endpoint`.

        Raises: DefinitionError
        """

        def decorate(function: Callable[..., Any]) -> Endpoint[M, None]:
            endpoint: StatelessEndpoint[M, None] | StatefulEndpoint[M, None, S]
            if state is None:
                endpoint = self.endpoint(name, takes, **options)
            else:
                endpoint = self.endpoint(name, takes, state=state, **options)
            endpoint.stage(function)
            return endpoint

        return decorate

    def topic(self, name: str, takes: type[M]) -> Topic[M]:
        """What this service, or another, publishes.

        Raises: DefinitionError, also if it was said before with another type
        """
        topic = Topic(name, takes)
        known = self.topics.setdefault(topic.name, topic)
        if known.takes.type != takes:
            raise DefinitionError(f"{topic} was said before, with another type: {known}")
        return known

    def subscriber(self, topic: Topic[M], *, state: type[Any] | None = None) -> Callable[[F], F]:
        """Decorate a function that takes what is published to a topic while this process is there: one message at a
        time, in each process of the service. Its effects cannot happen once, whatever the service says.

        Raises: DefinitionError
        """
        if not isinstance(topic, Topic):
            raise DefinitionError(f"subscriber of service {self.name} takes a topic, not {topic!r}")

        def decorate(function: F) -> F:
            name = expand_endpoint_name(f".{function.__name__}", self.name)
            # What is published comes to each process, so there is nobody else who might have handled it.
            settings = StageSettings(name, concurrency=1, exactly_once=False).with_defaults(self._settings)
            settings.attempts = settings.attempts or SUBSCRIBER_ATTEMPTS
            endpoint: LocalEndpoint[M, None] = LocalEndpoint(
                name, topic.takes.type, None, state, settings, register=self._register, topic=topic
            )
            self._add_endpoint(endpoint)
            endpoint.add(function, None, settings)
            return function

        return decorate

    @property
    def has_outbox(self) -> bool:
        """Something of it happens once: so whoever runs it sends what its outbox has."""
        stages = (each.settings.exactly_once for each in self.stages.values())
        return bool(self._settings.exactly_once) or any(stages)

    @property
    def only_initiates(self) -> bool:
        """None of its stages happens once, so nobody runs it for the sake of these."""
        return not any(each.settings.exactly_once for each in self.stages.values())

    def _add_endpoint(self, endpoint: LocalEndpoint[Any, Any]) -> None:
        self._check_not_running(endpoint.name)
        if endpoint.name in self.endpoints:
            raise DefinitionError(f"{self.name} has an endpoint {endpoint.name} already")
        self.endpoints[endpoint.name] = endpoint

    @property
    def is_running(self) -> bool:
        """Nothing can be defined any more."""
        return False

    def _register(self, stage: Stage) -> None:
        self._check_not_running(stage.queue)
        self.stages[stage.queue] = stage

    def _check_not_running(self, name: str) -> None:
        if self.is_running:
            raise DefinitionError(f"{self.name} runs: {name} comes too late")

    def check(self) -> None:
        """All is defined.

        Raises: DefinitionError if something is missing
        """
        for endpoint in self.endpoints.values():
            endpoint.check()


def _types_of(endpoint: Endpoint[Any, Any]) -> tuple[Any, Any]:
    return endpoint.takes.type, None if endpoint.replies is None else endpoint.replies.type
