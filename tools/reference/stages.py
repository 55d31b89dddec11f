"""Page of stages and of the test kit, docs/reference/stages.md, from their signatures and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator

import truenext.stage
import truenext.testing
from tools.reference.markdown import fence, item, joined, paragraphs, wrapped
from tools.reference.members import (
    Member,
    constructor_of,
    described_call_parts,
    function_member,
    members_of,
    table_of,
    text_below,
)
from truenext.flows import events
from truenext.flows.envelope import NotDecoded
from truenext.model.service_health import PoolStatus, ServiceHealth, ServiceStatus, StageStatus
from truenext.stage import (
    Depends,
    Endpoint,
    Failure,
    Flow,
    FlowFailed,
    FlowOptions,
    Initiation,
    Interceptor,
    Service,
    StageOptions,
    Topic,
)
from truenext.stage.core.definitions import StatefulEndpoint, StatelessEndpoint
from truenext.stage.core.errors import BaseExceptionRaised, DefinitionError, FlowError, NoAttemptsLeft, Reject
from truenext.stage.definition import Definition
from truenext.stage.interceptors import interceptor
from truenext.stage.interceptors.interceptor import Execution, ExecutionResult, MessageToSend
from truenext.stage.interceptors.log import LogFields, StageFields
from truenext.stage.interceptors.metrics import Histogram, Metrics, StageMetrics
from truenext.stage.interceptors.tracing import Tracing
from truenext.stage.sql.errors import (
    CommitInDoubt,
    DatabaseUnavailable,
    InProgress,
    NotCommitted,
    OutboxBusy,
    OutboxUnusable,
    Swallowed,
)
from truenext.stage.sql.tables import apply_schema, schema_sql
from truenext.testing import LocalBroker, NeverReached, QueueContents, WaitingMessage
from truenext.testing import stages as kit

_HEAD = """\
# Reference of stages

Look up each name that a service of stages uses, and each parameter with its type, its default and its meaning.
[stages.md](../stages.md) shows how to write stages, [stages-database.md](../stages-database.md) SQL and exactly-once
processing, [testing.md](../testing.md) the test kit.

In types, M is the type of a message, R that of a reply, and S that of a state. All durations are in seconds. A name is
imported from `truenext.stage`, unless its part says another module.

This page is made from the docstrings: `make reference`.
"""
_INTERNAL: dict[type, Collection[str]] = {
    Definition: {"has_outbox", "only_initiates", "is_running", "check", "name", "broker", "endpoints", "stages"}
    | {"remotes", "topics"},
    Service: {"bound_to", "plans"},
    Endpoint: {"replies"},
    Flow: {"direct_message", "next_stage", "for_next_stage", "check_replied"},
    Metrics: {"around", "sending", "ended"},
    kit.Stages: {"on_point", "close"},
    LocalBroker: {"faults", "start", "kill", "check"},
}
"""Members that programs do not use, by class."""
_ERRORS: dict[str, tuple[type, ...]] = {
    "truenext.stage": (DefinitionError, FlowError, FlowFailed, Reject, NotDecoded),
    "truenext.stage.core.errors": (BaseExceptionRaised, NoAttemptsLeft),
    "truenext.stage.sql.errors": (
        DatabaseUnavailable,
        OutboxUnusable,
        OutboxBusy,
        Swallowed,
        NotCommitted,
        CommitInDoubt,
        InProgress,
    ),
}
"""Errors by the module from which a program imports them."""


def page() -> str:
    return joined(_parts())


def _parts() -> Iterator[str]:
    body = list(_sections())
    # The index names the parts of the page.
    titles = [part.removeprefix("## ") for part in body if part.startswith("## ")]
    yield _HEAD
    yield wrapped(" · ".join(f"[{each}](#{each.lower().replace(' ', '-')})" for each in titles))
    yield from body


def _sections() -> Iterator[str]:
    yield "## Service"
    yield from paragraphs(inspect.cleandoc(Service.__doc__ or ""))
    yield from described_call_parts(constructor_of(Service))
    yield from _attributes(Service)
    yield from _methods(Definition, "Service")
    yield from _methods(Service, "Service")
    yield "## ServiceHealth"
    yield "It is in `truenext.model.service_health`, as are the classes below it."
    yield from _class_text(ServiceHealth)
    for status in (ServiceStatus, PoolStatus, StageStatus):
        yield f"### {status.__name__}"
        yield from _class_text(status)
    yield "## StageOptions"
    yield from _class_text(StageOptions)
    yield "## Endpoint"
    yield from _class_text(Endpoint)
    yield "### Endpoint.stage"
    yield from described_call_parts(_member(StatelessEndpoint, "stage"), "Endpoint.")
    yield "### Endpoint.stage, with a state"
    yield from described_call_parts(_member(StatefulEndpoint, "stage"), "Endpoint.")
    yield "### Endpoint.on_failure"
    yield from described_call_parts(_member(StatelessEndpoint, "on_failure"), "Endpoint.")
    yield "### Endpoint.on_failure, with a state"
    yield from described_call_parts(_member(StatefulEndpoint, "on_failure"), "Endpoint.")
    yield "### Failure"
    yield from _class_text(Failure)
    yield "## Topic"
    yield from _class_text(Topic)
    yield "## Flow"
    yield from _class_text(Flow)
    yield "## FlowOptions"
    yield from _class_text(FlowOptions)
    yield "## Initiation"
    yield from _class_text(Initiation)
    yield "## Depends"
    yield from _class_text(Depends)
    yield from _interceptors()
    yield from _errors()
    yield "## Tables of exactly-once processing"
    yield wrapped(
        "These functions are in `truenext.stage.sql`; the tables, for Alembic, are in "
        "`truenext.stage.sql.tables.metadata`."
    )
    for function in (schema_sql, apply_schema):
        yield from _function(function)
    yield from _test_kit()
    yield from _test_broker()


def _interceptors() -> Iterator[str]:
    yield "## Interceptor"
    yield from _class_text(Interceptor)
    yield wrapped("The following names are in `truenext.stage.interceptors.interceptor`.")
    for cls in (Execution, MessageToSend, ExecutionResult):
        yield f"### {cls.__name__}"
        yield from _class_text(cls)
    yield "### ExecutionOutcome"
    yield "It is in `truenext.flows.events`."
    yield from paragraphs(text_below(events, "ExecutionOutcome"))
    yield "### PoolName"
    yield from paragraphs(text_below(interceptor, "PoolName"))
    yield "### GiveUpReason"
    yield "It is in `truenext.flows.events`."
    yield from paragraphs(text_below(events, "GiveUpReason"))
    yield "## Ready interceptors"
    yield "### LogFields and StageFields"
    yield "Both are in `truenext.stage.interceptors.log`."
    for fields in (LogFields, StageFields):
        yield fence(f"{fields.__name__}()")
        yield from paragraphs(inspect.cleandoc(fields.__doc__ or ""))
    yield "### Metrics"
    yield "It is in `truenext.stage.interceptors.metrics`."
    yield fence("Metrics()")
    yield from _class_text(Metrics)
    for metrics in (StageMetrics, Histogram):
        yield f"### {metrics.__name__}"
        yield from _class_text(metrics)
    yield "### Tracing"
    yield "It is in `truenext.stage.interceptors.tracing`."
    yield from paragraphs(inspect.cleandoc(Tracing.__doc__ or ""))
    yield from described_call_parts(constructor_of(Tracing))


def _errors() -> Iterator[str]:
    yield "## Errors"
    yield wrapped(
        "All are a `truenext.TruenextError`. [client.md](client.md#errors) has `RolledBack`, `InDoubt`, "
        "`ConnectionLost` and the other errors of the client, which programs that start flows meet, too."
    )
    for module, errors in _ERRORS.items():
        for error in errors:
            yield f"### {error.__name__}"
            yield f"`from {module} import {error.__name__}`"
            doc = inspect.cleandoc(error.__doc__ or "")
            text, _, attributes = doc.partition("Attributes:\n")
            yield from paragraphs(text)
            if attributes:
                yield joined(item(f"`{each.strip()}".replace(": ", "`: ", 1)) for each in attributes.splitlines())


def _test_kit() -> Iterator[str]:
    yield "## Test kit"
    yield "These names are in `truenext.testing.stages`."
    yield from _function(kit.stages)
    yield "### Stages"
    yield from _class_text(kit.Stages)
    yield "### Point"
    yield from paragraphs(text_below(kit, "Point"))
    yield "### DeadLetter"
    yield from _class_text(kit.DeadLetter)


def _test_broker() -> Iterator[str]:
    yield "## Test broker"
    yield wrapped(
        "These names are in `truenext.testing`. The fixture `truenext_broker` of pytest is a `BlockingBroker`, and "
        "needs no import. A `BlockingBroker` has the methods of `LocalBroker`, for any thread and without `await`: "
        "each returns once its work is done."
    )
    for function in (truenext.testing.broker, truenext.testing.blocking_broker):
        yield from _function(function)
    for cls in (LocalBroker, QueueContents, WaitingMessage, NeverReached):
        yield f"### {cls.__name__}"
        yield from _class_text(cls)


def _class_text(cls: type) -> Iterator[str]:
    """Yield the text of a class, its attributes, and its methods."""
    yield from paragraphs(inspect.cleandoc(cls.__doc__ or ""))
    yield from _attributes(cls)
    yield from _methods(cls, cls.__name__)


def _attributes(cls: type) -> Iterator[str]:
    yield from table_of([each for each in _public_members(cls) if not each.is_call])


def _methods(cls: type, name: str) -> Iterator[str]:
    for member in _public_members(cls):
        if member.is_call:
            yield f"### {name}.{member.name}"
            yield from described_call_parts(member, f"{name}.")


def _public_members(cls: type) -> Iterator[Member]:
    return (each for each in members_of(cls) if each.name not in _INTERNAL.get(cls, ()))


def _member(cls: type, name: str) -> Member:
    return next(each for each in members_of(cls) if each.name == name)


def _function(function: object) -> Iterator[str]:
    member = function_member(function)
    yield f"### {member.name}"
    yield from described_call_parts(member)
