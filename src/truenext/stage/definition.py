"""Definition of a service: its endpoints and stages, endpoints of other services, topics, and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

from truenext.client.core.credentials import Credentials
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
"""Default for subscribers: the broker itself sets no limit. Source: "Deliveries and attempts" in docs/contract.md"""
CONCURRENCY = 8
"""Default number of messages that a stage handles at once, and of interactive ones in addition."""


class Definition:
    """Service as a program defines it: endpoints with stages, endpoints of other services, topics and settings."""

    def __init__(
        self,
        name: str,
        *,
        broker: str | Sequence[str] = DEFAULT_URL,
        database: str | None = None,
        user: str | None = None,
        password: str | None = None,
        password_file: Path | str | None = None,
        ca: Path | str | None = None,
        certificate: Path | str | None = None,
        key: Path | str | None = None,
        concurrency: int = CONCURRENCY,
        attempts: int | None = None,
        retry: Mapping[type[BaseException], str] | None = None,
        exactly_once: bool = False,
        lifespan: LifespanFactory[Any] | None = None,
        interceptors: Sequence[Interceptor] = (),
        events: Path | str | None = None,
    ) -> None:
        """`broker` is a URL, or several, of which the first available one is used. `user` logs in there, with
        `password`, or with the first line of the file `password_file`, which is read for each login. `ca`,
        `certificate` and `key` are files for TLS, as of `truenext.connect`. `database` is a URL of SQLAlchemy, for
        stages that take a Session or an AsyncSession.

        `concurrency`, `attempts` and `retry` are defaults for all stages. A stage handles `concurrency` messages at
        once, and as many interactive ones. After `attempts` failures a message is a dead letter, unless the queue's
        policy allows fewer. `retry` gives the delays of retries by the class of the exception: {Busy: "2s, 10s, 1m",
        Bad: "never"}.

        `exactly_once` is the default of exactly-once processing, for all stages but subscribers: effects in the
        database and the messages that a stage sends happen once, however often its message is delivered
        (docs/stages-outbox.md).

        `events` is a folder in which each process that runs the stages records their executions, for `truenext audit
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
            ("password_file", password_file, Path | str | None, "a path"),
            ("ca", ca, Path | str | None, "a path"),
            ("certificate", certificate, Path | str | None, "a path"),
            ("key", key, Path | str | None, "a path"),
            ("interceptors", interceptors, Sequence, "a list of Interceptors"),
            ("events", events, Path | str | None, "a folder"),
        ):
            if not isinstance(value, kind):
                # The value is left out, since it may be a password.
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
                raise DefinitionError(f"{each!r} of service {name} is not an instance of Interceptor")
        self.broker: tuple[str, ...] = tuple(brokers)
        self.database = database
        try:
            self.credentials = Credentials(
                user=user,
                password=password,
                password_file=None if password_file is None else str(password_file),
                ca=None if ca is None else str(ca),
                certificate=None if certificate is None else str(certificate),
                key=None if key is None else str(key),
            )
        except ValueError as error:
            raise DefinitionError(f"service {name}: {error}") from error
        self.lifespan = lifespan
        self.interceptors = list(interceptors)
        self.events = None if events is None else Path(events)
        self.endpoints: dict[str, LocalEndpoint[Any, Any]] = {}
        """Endpoints of this service by name."""
        self.remotes: dict[str, Endpoint[Any, Any]] = {}
        self.topics: dict[str, Topic[Any]] = {}
        self.stages: dict[str, Stage] = {}
        """Stages by queue."""
        self._settings = StageSettings(
            f"service {name}", concurrency=concurrency, attempts=attempts, retry=retry, exactly_once=exactly_once
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    # ---- Definitions ----

    @overload
    def remote(self, name: str, takes: type[M], replies: type[R]) -> Endpoint[M, R]: ...

    @overload
    def remote(self, name: str, takes: type[M], replies: None = None) -> Endpoint[M, None]: ...

    def remote(self, name: str, takes: type[Any], replies: type[Any] | None = None) -> Endpoint[Any, Any]:
        """Declare an endpoint of another service.

        Raises: DefinitionError, also if it was declared before with other types
        """
        endpoint: Endpoint[Any, Any] = Endpoint(expand_endpoint_name(name, self.name), takes, replies)
        known = self.remotes.setdefault(endpoint.name, endpoint)
        if _types_of(known) != _types_of(endpoint):
            raise DefinitionError(f"{endpoint} was declared before with other types: {known}")
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
        """Define an endpoint of this service. The functions that its `stage` decorates run one after the other. A
        `name` that begins with a dot is appended to the name of the service. `state` is the type of data that the
        stages of one flow share. The options `concurrency`, `attempts`, `retry` and `exactly_once` are defaults for
        the stages (StageOptions).

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
        """Decorate the only stage of a new endpoint, which the function's name then refers to. Options are those of
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
        """Decorate the only stage of a new endpoint without replies, which the function's name then refers to.
        `state` is the type of `reply_state`, if the endpoint receives replies. Options are those of `endpoint`.

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
        """Declare a topic, to which this service or another publishes.

        Raises: DefinitionError, also if it was declared before with another type
        """
        topic = Topic(name, takes)
        known = self.topics.setdefault(topic.name, topic)
        if known.takes.type != takes:
            raise DefinitionError(f"{topic} was declared before with another type: {known}")
        return known

    def subscriber(self, topic: Topic[M], *, state: type[Any] | None = None) -> Callable[[F], F]:
        """Decorate a function that gets the messages published to a topic while its process runs, one at a time, in
        each process of the service. A subscriber has no exactly-once processing, whatever the service's setting.

        Raises: DefinitionError
        """
        if not isinstance(topic, Topic):
            raise DefinitionError(f"subscriber of service {self.name} takes a topic, not {topic!r}")

        def decorate(function: F) -> F:
            name = expand_endpoint_name(f".{function.__name__}", self.name)
            # Each process gets its own copy of a published message, so no other process can have handled it.
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
        """Whether the service or a stage has exactly-once processing, so that its processes have a relay."""
        stages = (each.settings.exactly_once for each in self.stages.values())
        return bool(self._settings.exactly_once) or any(stages)

    @property
    def only_initiates(self) -> bool:
        """Whether no stage has exactly-once processing, so that an outbox contains only flows that programs start."""
        return not any(each.settings.exactly_once for each in self.stages.values())

    def _add_endpoint(self, endpoint: LocalEndpoint[Any, Any]) -> None:
        self._check_not_running(endpoint.name)
        if endpoint.name in self.endpoints:
            raise DefinitionError(f"{self.name} has an endpoint {endpoint.name} already")
        self.endpoints[endpoint.name] = endpoint

    @property
    def is_running(self) -> bool:
        """Whether the service runs, so that endpoints and stages can no longer be defined."""
        return False

    def _register(self, stage: Stage) -> None:
        self._check_not_running(stage.queue)
        self.stages[stage.queue] = stage

    def _check_not_running(self, name: str) -> None:
        if self.is_running:
            raise DefinitionError(f"{self.name} runs already: define {name} before")

    def check(self) -> None:
        """Check that every endpoint is complete.

        Raises: DefinitionError
        """
        for endpoint in self.endpoints.values():
            endpoint.check()


def _types_of(endpoint: Endpoint[Any, Any]) -> tuple[Any, Any]:
    return endpoint.takes.type, None if endpoint.replies is None else endpoint.replies.type
