"""Control commands: executes SENDs to /control/. Source: docs/protocol.md, "Control requests"

bulk work                    done in pieces, by the engine
pause, resume                done at once, answered when the change is durable
producer, failover, backup   answered at once
connection, drain, queries   answered later, as the answer may take long to make: control_requests.py
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from truenext.broker import (
    access,
    backup_request,
    connection_request,
    control,
    drain,
    failover_request,
    producer_request,
)
from truenext.broker.backups import Backups
from truenext.broker.control_only import ControlOnlyConnections
from truenext.broker.control_requests import AnswerGenerator, ControlRequests
from truenext.broker.drain import Drain
from truenext.broker.event_loop import SlicedWork, Steps
from truenext.broker.queues_request import MaySee, make_named_report
from truenext.broker.user_sessions import UserSessions
from truenext.engine.background import bulk
from truenext.engine.engine import Engine
from truenext.engine.state.consumer import ConnectionState
from truenext.engine.state.producer import user_producer
from truenext.engine.state.queue import Queue
from truenext.model.commands import ControlRequest
from truenext.model.limits import METRICS_QUEUES_MAX
from truenext.model.pattern import compile_patterns


class Figures(NamedTuple):
    """Figures of the broker's metrics at one moment."""

    status: bytes
    """Answer to `status`."""
    queues: bytes
    """Queues that have metrics of their own, as a list of QueueReport in JSON."""
    matching: int
    """Number of the queues that could have metrics of their own."""


class ControlCommands:
    def __init__(
        self,
        engine: Engine,
        sliced_work: SlicedWork,
        users: UserSessions,
        broker_drain: Drain,
        time: Callable[[], float],
        backups: Backups,
        *,
        query_context: Callable[[MaySee, bytes], control.QueryContext],
        schedule_turn: Callable[[], object],
        when_heads_known: Callable[[Callable[[], object]], None],
    ) -> None:
        """`time` returns seconds of a clock that does not jump."""
        self._engine = engine
        self._users = users
        self._backups = backups
        self._drain = broker_drain
        self._query_context = query_context
        self._schedule_turn = schedule_turn
        self._sliced_work = sliced_work
        self._when_heads_known = when_heads_known
        self.only = ControlOnlyConnections(time)
        """Connections that may send nothing but control requests."""
        self.requests = ControlRequests(sliced_work, self._start_answer, self.send_answer, self._when_ready)
        """Requests whose answers take long to make."""

    def execute(self, session: ConnectionState, request: ControlRequest) -> None:
        """Execute a control request, or begin its execution.

        Raises: RemoteProtocolError if the request is invalid, or its connection waits for too many answers already
        """
        engine = self._engine
        engine.commands.administering.expect_reply(request.reply_to)
        self.only.note_activity(session)
        now_ms = engine.state.commit_state.now_ms
        if request.verb in bulk.VERBS:
            # Raises at once if the request is invalid.
            engine.tasks.bulk.add(session, request)
        elif request.verb in control.QUEUE_CHANGES:
            changed = control.apply_queue_change(engine, request.verb, request.body)
            engine.commands.administering.reply(control.make_reply_message(request, changed, now_ms))
        elif request.verb == failover_request.VERB:
            report = failover_request.begin_failover(self._query_context(None, b"").hand_over, request.body)
            engine.commands.administering.reply(control.make_reply_message(request, report, now_ms))
        elif request.verb == backup_request.VERB:
            report = backup_request.run_backup_request(self._backups, request.body)
            engine.commands.administering.reply(control.make_reply_message(request, report, now_ms))
        elif request.verb == producer_request.VERB:
            known, batch = producer_request.make_producer_report(
                engine, request.body, partial(user_producer, self._users.name_of(session))
            )
            engine.commands.administering.reply(control.make_reply_message(request, known, now_ms), batch)
        elif request.verb == connection_request.VERB:
            connection_request.check_body(request.body)
            self.requests.add(session, request, about=session)
        elif request.verb == drain.VERB:
            self.requests.add(session, request, name=self._drain.execute(request))
        else:
            body = control.check_query(request)
            user = self._users.user_of(session)
            self.requests.add(session, request, about=None if user is None or user.is_monitor else session, body=body)

    def _when_ready(self, name: str, begin: Callable[[], object]) -> None:
        """Call the function that begins an answer. Answers that tell the age of messages wait until it is known."""
        if name in control.WITH_AGES:
            self._when_heads_known(begin)
        else:
            begin()

    def collect(self, patterns: Sequence[str], on_collected: Callable[[Figures], object]) -> None:
        """Make the figures of the metrics, in steps, and call `on_collected` with them. `patterns` are those of the
        queues that have metrics of their own."""

        def begin() -> None:
            self._sliced_work.add(self._collect(patterns, on_collected))
            self._schedule_turn()

        self._when_ready("status", begin)

    def _collect(self, patterns: Sequence[str], on_collected: Callable[[Figures], object]) -> Steps:
        status = yield from self._start_answer("status", None, b"")
        queues, matching = b"[]", 0
        if patterns:
            is_named = compile_patterns(patterns)
            queues, matching = yield from make_named_report(self._engine, is_named, METRICS_QUEUES_MAX)
        on_collected(Figures(status, queues, matching))

    def _start_answer(self, name: str, about: ConnectionState | None, body: bytes) -> AnswerGenerator:
        if name in (drain.VERB, drain.BEGIN):
            return self._drain.report(name)
        if name == connection_request.VERB:
            assert about is not None, "`execute` names the connection"
            return connection_request.make_connection_report(self._engine, about, self._users.user_of(about))
        may_see: MaySee = None
        if about is not None:
            user = self._users.user_of(about)
            may_see = _see_nothing if user is None else partial(access.may_see, user)
        return control.QUERIES[name](self._query_context(may_see, body))

    def send_answer(self, session: ConnectionState, request: ControlRequest, body: bytes) -> bool:
        """Send the answer to a control request. Returns False if the connection has ended meanwhile."""
        self.only.note_activity(session)
        self._engine.commands.administering.reply(
            control.make_reply_message(request, body, self._engine.state.commit_state.now_ms)
        )
        self._schedule_turn()
        return self._engine.commands.connecting.is_connected(session)

    def idle_time_left(self, session: ConnectionState) -> float:
        """Return the seconds for which a control-only connection may still be idle. A connection that waits for an
        answer is not idle."""
        if self.requests.pending_count(session) or self._engine.tasks.bulk.pending_answer_count(session):
            self.only.note_activity(session)
        return self.only.seconds_left(session)

    def remove(self, session: ConnectionState) -> None:
        """Drop the answers of a closed connection."""
        self.only.remove(session)
        self.requests.connection_closed(session)


def _see_nothing(_: Queue) -> bool:
    """Return False for every queue. Used for a connection that has ended."""
    return False
