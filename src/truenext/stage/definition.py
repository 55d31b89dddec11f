"""Definition of a service: its endpoints and stages, endpoints of other services, topics, and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack, overload

from truenext.client.core.credentials import CREDENTIAL_FILES, Credentials
from truenext.errors import ConfigurationError
from truenext.model.limits import TRANSACTION_CRON_SENDS_MAX
from truenext.model.url import DEFAULT_URL, parse_url
from truenext.stage.core.cron import UTC, CronFlow, new_cron_flow
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
from truenext.stage.core.names import expand_endpoint_name, replies_queue
from truenext.stage.interceptors.chain import InterceptorChain
from truenext.stage.interceptors.interceptor import Interceptor
from truenext.stage.interceptors.metrics import Metrics, ServiceCounters
from truenext.stage.lifespan import LifespanFactory

M = TypeVar("M")
R = TypeVar("R")
S = TypeVar("S")
F = TypeVar("F", bound="Callable[..., Any]")

SUBSCRIBER_ATTEMPTS = 7
"""Default number of attempts for subscribers, since the broker sets no limit for published messages. Source: "Attempts"
in docs/contract.md"""
CONCURRENCY = 8
"""Default number of messages that a stage processes at once. In addition, it processes the same number of interactive
messages (a caller waits for their flow)."""


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
        """Define a service. Its methods define endpoints and stages.

        Args:
            name: Name of the service: words of letters, digits, - and _, with dots between them.
            broker: URL of the broker, or several URLs; the first broker that answers is used.
            database: URL of SQLAlchemy, such as postgresql+psycopg:///shop or sqlite:////var/lib/shop.db, for stages
                that take a session, and for exactly-once processing.
            user: User name at the broker; None if the broker has no users, or identifies the service by its
                certificate.
            password: Password of `user`.
            password_file: File with the password in its first line. It is read at each login. Cannot be combined with
                `password`.
            ca: PEM file with the authorities that may sign the broker's certificate, for stomp+ssl:// URLs; None trusts
                the authorities of the system.
            certificate: PEM file with a certificate that the service shows to the broker.
            key: PEM file with the private key of `certificate`; None if the file of the certificate has the key, too.
            concurrency: Number of messages that each stage processes at once, 1 to 1,000. In addition, it processes the
                same number of interactive messages. The process needs memory for all these messages.
            attempts: Number of failures after which a message becomes a dead letter; None leaves the number to the
                policy of the queue. The lower of the two numbers counts.
            retry: Delays before retries, by the class of the exception; `StageOptions.retry` has the format. Other
                exceptions follow the policy of the queue.
            exactly_once: True for exactly-once processing of all stages but subscribers: however often a message is
                delivered, the stage's changes in the database, and the messages that it sends, happen once. It needs
                `database`, and the tables of `truenext stages schema` (docs/stages-database.md).
            lifespan: Function without parameters that opens a value for all stages, yields the value, and closes it
                when the service stops. The function is an `async` generator, and may be decorated with
                `contextlib.asynccontextmanager`. Its annotation `-> AsyncIterator[Shared]` names the value's class: a
                stage takes the value by a parameter of that class.
            interceptors: Interceptors of all stages and of the messages that the service sends; the first one is
                outermost. If no `Metrics` is among them, the service adds one before them.
            events: Folder in which each process that runs the stages records their executions, for `truenext audit
                --stages`.

        Raises: DefinitionError if an argument is invalid
        """
        self.name = expand_endpoint_name(name, "")
        files = {"password_file": password_file, "ca": ca, "certificate": certificate, "key": key}
        values = {"broker": broker, "database": database, "user": user, "password": password, **files}
        _check_types(name, values | {"interceptors": interceptors, "events": events})
        self.broker = _checked_brokers(name, broker)
        self.lifespan, self.interceptors = lifespan, list(interceptors)
        self._check_hooks(name)
        self.metrics = self._ensure_metrics()
        """Interceptor that counts executions."""
        self.database = database
        self.credentials = _make_credentials(name, user, password, files)
        self.events = None if events is None else Path(events)
        self.endpoints: dict[str, LocalEndpoint[Any, Any]] = {}
        """Endpoints of this service by name."""
        self.remotes: dict[str, Endpoint[Any, Any]] = {}
        self.topics: dict[str, Topic[Any]] = {}
        self.stages: dict[str, Stage] = {}
        """Stages by queue."""
        self.crons: dict[str, CronFlow] = {}
        """Cron flows by name."""
        self._settings = StageSettings(
            f"service {name}", concurrency=concurrency, attempts=attempts, retry=retry, exactly_once=exactly_once
        )

    def _check_hooks(self, name: str) -> None:
        if self.lifespan is not None and not callable(self.lifespan):
            raise DefinitionError(f"lifespan of service {name} must be a function, not {self.lifespan!r}")
        for each in self.interceptors:
            if not isinstance(each, Interceptor):
                raise DefinitionError(f"{each!r} of service {name} is not an instance of Interceptor")

    @property
    def direct_counters(self) -> ServiceCounters | None:
        """Counters with which a run counts itself; None if a subclass of `Metrics` counts, as an interceptor."""
        return self.metrics.counters if type(self.metrics) is Metrics else None

    def interceptor_chain(self) -> InterceptorChain:
        """Return the chain of the interceptors that are called."""
        direct = None if self.direct_counters is None else self.metrics
        return InterceptorChain([each for each in self.interceptors if each is not direct])

    def _ensure_metrics(self) -> Metrics:
        for each in self.interceptors:
            if isinstance(each, Metrics):
                return each
        metrics = Metrics()
        self.interceptors.insert(0, metrics)
        return metrics

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    # ---- Definitions ----

    @overload
    def remote(self, name: str, takes: type[M], replies: type[R]) -> Endpoint[M, R]: ...

    @overload
    def remote(self, name: str, takes: type[M], replies: None = None) -> Endpoint[M, None]: ...

    def remote(self, name: str, takes: type[Any], replies: type[Any] | None = None) -> Endpoint[Any, Any]:
        """Declare an endpoint of another service.

        Args:
            name: Full name of the endpoint, such as `stock.reserve`. A name that begins with a dot, such as `.reserve`,
                is appended to the name of this service.
            takes: Type of the message that the endpoint takes.
            replies: Type of the reply; None if the endpoint does not reply.

        Raises: DefinitionError if the name or a type is invalid, or the endpoint was declared before with other types
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
        """Define an endpoint of this service. The functions that its `stage` decorates run one after the other.

        Args:
            name: Name of the endpoint, and of the queue of its first stage: words of letters, digits, - and _, with
                dots between them. A name that begins with a dot is appended to the name of the service.
            takes: Type of the message that the first stage takes: a msgspec.Struct, a dataclass, a model of pydantic,
                or a type that JSON has. Unknown fields of a message are ignored, and missing fields get their defaults.
            replies: Type of the reply, which cannot be optional; None if the endpoint does not reply.
            state: Type of the state that the endpoint's stages share in one flow; None if they share nothing. Each
                field of the type has a default. An endpoint that these stages call never sees the state.
            **options: Options for all stages of the endpoint (`StageOptions`), unless a stage sets its own.

        Raises: DefinitionError if an argument is invalid, the name is already defined, or the service runs already
        """
        kind = StatelessEndpoint if state is None else StatefulEndpoint
        settings = StageSettings(name, **options).with_defaults(self._settings)
        made: LocalEndpoint[Any, Any] = kind(
            expand_endpoint_name(name, self.name), takes, replies, state, settings, register=self._register
        )
        if made.name == replies_queue(self.name):
            raise DefinitionError(f"{made.name} is the queue for replies that {self.name} keeps: use another name")
        self._add_endpoint(made)
        return made

    def single(
        self, name: str, takes: type[M], replies: type[R], **options: Unpack[StageOptions]
    ) -> Callable[[Callable[..., Any]], StatelessEndpoint[M, R]]:
        """Define an endpoint with one stage, the decorated function. The function's name then refers to the endpoint.

        Args:
            name: Name of the endpoint; `endpoint` has the rules.
            takes: Type of the message that the stage takes; `endpoint` has the rules.
            replies: Type of the reply, which cannot be optional.
            **options: Options of the stage (`StageOptions`).

        Raises: DefinitionError if an argument or the function is invalid, or the name is already defined
        """

        def decorate(function: Callable[..., Any]) -> StatelessEndpoint[M, R]:
            endpoint = self.endpoint(name, takes, replies, **options)
            endpoint.stage(function)
            return endpoint

        return decorate

    @overload
    def terminator(
        self, name: str, takes: type[M], *, state: None = None, **options: Unpack[StageOptions]
    ) -> Callable[[Callable[..., Any]], StatelessEndpoint[M, None]]: ...

    @overload
    def terminator(
        self, name: str, takes: type[M], *, state: type[S], **options: Unpack[StageOptions]
    ) -> Callable[[Callable[..., Any]], StatefulEndpoint[M, None, S]]: ...

    def terminator(
        self, name: str, takes: type[M], *, state: type[Any] | None = None, **options: Unpack[StageOptions]
    ) -> Callable[[Callable[..., Any]], LocalEndpoint[M, None]]:
        """Define an endpoint with one stage, the decorated function, which does not reply. The function's name then
        refers to the endpoint.

        Args:
            name: Name of the endpoint; `endpoint` has the rules.
            takes: Type of the message that the stage takes; `endpoint` has the rules. If other flows name this endpoint
                as their `reply_to`, this is the type of their reply.
            state: Type of the `reply_state` of flows that name this endpoint as their `reply_to`; None if no such flow
                has a `reply_state`.
            **options: Options of the stage (`StageOptions`).

        Raises: DefinitionError if an argument or the function is invalid, or the name is already defined
        """

        def decorate(function: Callable[..., Any]) -> Any:
            endpoint: StatelessEndpoint[M, None] | StatefulEndpoint[M, None, Any]
            if state is None:
                endpoint = self.endpoint(name, takes, **options)
            else:
                endpoint = self.endpoint(name, takes, state=state, **options)
            endpoint.stage(function)
            return endpoint

        return decorate

    def topic(self, name: str, takes: type[M]) -> Topic[M]:
        """Declare a topic, to which this service or another service publishes.

        Args:
            name: Name of the topic, without /topic/. Patterns are not allowed.
            takes: Type of the topic's messages.

        Raises: DefinitionError if the name or the type is invalid, or the topic was declared before with another type
        """
        topic = Topic(name, takes)
        known = self.topics.setdefault(topic.name, topic)
        if known.takes.type != takes:
            raise DefinitionError(f"{topic} was declared before with another type: {known}")
        return known

    def subscriber(self, topic: Topic[M], *, state: type[Any] | None = None) -> Callable[[F], F]:
        """Define a subscriber: the decorated function gets each message that is published to the topic, one at a time.
        Each process of the service gets its own copy. A process that does not run misses messages.

        A subscriber has no exactly-once processing, even if the service has it. After 7 failures, or `attempts` of the
        service, the subscriber drops the message, since topics have no dead letters.

        Args:
            topic: Topic whose messages the function takes as its first parameter.
            state: Type of a state that the function takes as its second parameter; None if it takes no state. A message
                without a state has the default of the type.

        Raises: DefinitionError if an argument or the function is invalid, or the service has an endpoint of that name
        """
        if not isinstance(topic, Topic):
            raise DefinitionError(f"subscriber of service {self.name} needs a topic, not {topic!r}")

        def decorate(function: F) -> F:
            name = expand_endpoint_name(f".{function.__name__}", self.name)
            # Each process gets its own copy of a published message, so no other process can have processed it.
            settings = StageSettings(name, concurrency=1, exactly_once=False).with_defaults(self._settings)
            settings.attempts = settings.attempts or SUBSCRIBER_ATTEMPTS
            endpoint: LocalEndpoint[M, None] = LocalEndpoint(
                name, topic.takes.type, None, state, settings, self._register
            )
            endpoint.subscribed_topic = topic
            self._add_endpoint(endpoint)
            endpoint.add(function, None, settings)
            return function

        return decorate

    def cron(self, name: str, cron: str, to: Endpoint[M, Any], message: M, *, zone: str = UTC) -> None:
        """Declare a flow that the broker starts at the times of a cron expression. `truenext stages cron --apply` sends
        all cron flows of a service to the broker.

        Args:
            name: Name of the flow, also its trace. Occurrences have ids made of this name and the due time.
            cron: Five fields of cron, such as `0 3 * * *`: minute, hour, day of the month, month, day of the week.
            to: Endpoint that handles the flow first.
            message: Message of the type that the endpoint takes; the same each time.
            zone: Time zone of `cron`, a name of the IANA database such as Europe/Oslo. A local time that the zone skips
                or repeats counts once.

        Raises: DefinitionError if an argument is invalid, or the name is already declared; FlowError if the message is
        not of the endpoint's type
        """
        if name in self.crons:
            raise DefinitionError(f"{self.name} has a cron flow {name!r} already: use another name")
        if len(self.crons) >= TRANSACTION_CRON_SENDS_MAX:
            raise DefinitionError(
                f"{self.name} has more than {TRANSACTION_CRON_SENDS_MAX} cron flows, and one transaction of the broker "
                "takes no more: let another service start them"
            )
        self.crons[name] = new_cron_flow(self.name, name, cron, zone, to, message)

    @property
    def has_outbox(self) -> bool:
        """Whether the service or a stage has exactly-once processing. Then each process of the service has a relay."""
        return bool(self._settings.exactly_once) or not self.only_initiates

    @property
    def only_initiates(self) -> bool:
        """Whether no stage has exactly-once processing. Then the outbox contains only flows that programs start."""
        return not any(each.settings.exactly_once for each in self.stages.values())

    def _add_endpoint(self, endpoint: LocalEndpoint[Any, Any]) -> None:
        self._check_not_running(endpoint.name)
        if endpoint.name in self.endpoints:
            raise DefinitionError(f"{self.name} has an endpoint {endpoint.name} already")
        self.endpoints[endpoint.name] = endpoint

    @property
    def is_running(self) -> bool:
        """Whether the service runs. Then endpoints and stages can no longer be defined."""
        return False

    def _register(self, stage: Stage) -> None:
        self._check_not_running(stage.queue)
        self.stages[stage.queue] = stage

    def _check_not_running(self, name: str) -> None:
        if self.is_running:
            raise DefinitionError(f"{self.name} runs already: define {name} before the service runs")

    def check(self) -> None:
        """Check that every endpoint is complete.

        Raises: DefinitionError if an endpoint has no stage, or its last stage does not return the reply
        """
        for endpoint in self.endpoints.values():
            endpoint.check()


_TYPES: Final[Mapping[str, tuple[Any, str]]] = {
    "broker": (Sequence, "a URL, or several"),
    "database": (str | None, "a URL of SQLAlchemy, as text"),
    **dict.fromkeys(("user", "password"), (str | None, "text")),
    **dict.fromkeys(CREDENTIAL_FILES, (Path | str | None, "a path")),
    "interceptors": (Sequence, "a list of Interceptors"),
    "events": (Path | str | None, "a folder"),
}
"""Type of each argument of `Definition`, and how errors describe that type."""


def _check_types(name: str, values: Mapping[str, object]) -> None:
    for subject, value in values.items():
        kind, expected = _TYPES[subject]
        if not isinstance(value, kind):
            # The value is left out, since it may be a password.
            raise DefinitionError(
                f"{subject} of service {name} must be {expected}, not of the type {type(value).__name__}"
            )


def _checked_brokers(name: str, broker: str | Sequence[str]) -> tuple[str, ...]:
    brokers = (broker,) if isinstance(broker, str) else tuple(broker)
    if not brokers or not all(isinstance(each, str) for each in brokers):
        raise DefinitionError(f"broker of service {name} must be a URL, or several, not {broker!r}")
    for url in brokers:
        try:
            parse_url(url)
        except ConfigurationError as error:
            raise DefinitionError(f"broker of service {name}: {error}") from error
    return brokers


def _make_credentials(
    name: str, user: str | None, password: str | None, files: Mapping[str, Path | str | None]
) -> Credentials:
    paths = {file: None if path is None else str(path) for file, path in files.items()}
    try:
        return Credentials(user=user, password=password, **paths)
    except ValueError as error:
        raise DefinitionError(f"service {name}: {error}") from error


def _types_of(endpoint: Endpoint[Any, Any]) -> tuple[Any, Any]:
    return endpoint.takes.type, None if endpoint.replies is None else endpoint.replies.type
