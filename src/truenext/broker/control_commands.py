"""Control commands: executes SENDs to /control/. Source: docs/protocol.md, "Control requests"

bulk work                    done in pieces, by the engine
pause, resume                done at once, answered when the change is durable
producer, failover, backup, close, policy, security
                             answered at once
connection, drain, connections, consumers, history, queries
                             answered later, as the answer may take long to make: control_requests.py
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from truenext.broker import (
    access,
    backup_request,
    connection_list,
    connection_request,
    control,
    drain,
    failover_request,
    history_request,
    producer_request,
    queue_details,
    security_log,
)
from truenext.broker.backups import Backups
from truenext.broker.connection_list import ConnectionList
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
        history: history_request.HistoryRequests,
        *,
        query_context: Callable[[MaySee, bytes], control.QueryContext],
        connections: ConnectionList,
        close_connection: Callable[[ConnectionState, str], None],
        policy_source: Callable[[str, str], str],
        schedule_turn: Callable[[], object],
    ) -> None:
        """`time` returns seconds of a clock that does not jump. `close_connection` ends a connection for a reason,
        without an attempt. `policy_source` is as for `report_policy`."""
        self._engine = engine
        self._users = users
        self._drain = broker_drain
        self._history = history
        self._query_context = query_context
        self._connections = connections
        self._schedule_turn = schedule_turn
        self._sliced_work = sliced_work
        self.only = ControlOnlyConnections(time)
        """Connections that may send nothing but control requests."""
        self.requests = ControlRequests(sliced_work, self._start_answer, self.send_answer)
        """Requests whose answers take long to make."""
        self._at_once: dict[str, Callable[[ConnectionState, ControlRequest], bytes]] = {
            **dict.fromkeys(
                control.QUEUE_CHANGES, lambda _, each: control.apply_queue_change(engine, each.verb, each.body)
            ),
            failover_request.VERB: lambda _, each: failover_request.begin_failover(
                query_context(None, b"").hand_over, each.body
            ),
            backup_request.VERB: lambda _, each: backup_request.run_backup_request(backups, each.body),
            queue_details.POLICY_VERB: lambda _, each: queue_details.report_policy(
                self._require_queue(each), policy_source
            ),
            connection_list.CLOSE_VERB: lambda session, each: connections.close(session, each.body, close_connection),
            security_log.VERB: lambda *_: users.recent_events(),
        }
        """Functions that execute a request and return its answer, by verb."""

    def execute(self, session: ConnectionState, request: ControlRequest) -> None:
        """Execute a control request, or begin its execution.

        Raises: RemoteProtocolError if the request is invalid, or its connection waits for too many answers already
        """
        engine = self._engine
        engine.commands.administering.expect_reply(request.reply_to)
        self.only.note_activity(session)
        if request.verb in bulk.VERBS:
            # Raises at once if the request is invalid.
            engine.tasks.bulk.add(session, request)
        elif request.verb in self._at_once:
            self._reply(request, self._at_once[request.verb](session, request))
        elif request.verb == producer_request.VERB:
            known, batch = producer_request.make_producer_report(
                engine, request.body, partial(user_producer, self._users.name_of(session))
            )
            self._reply(request, known, batch)
        elif request.verb == queue_details.CONSUMERS_VERB:
            self._require_queue(request)
            self.requests.add(session, request, about=session, body=request.body)
        elif request.verb == connection_list.LIST_VERB:
            connection_list.parse_connections_request(request.body)
            self.requests.add(session, request, about=session, body=request.body)
        elif request.verb == connection_request.VERB:
            connection_request.check_body(request.body)
            self.requests.add(session, request, about=session)
        elif request.verb == history_request.VERB:
            self._history.require()
            after, is_admin = history_request.parse_history_request(request.body).after, self._users.is_admin(session)
            self.requests.add_other(session, request, partial(self._history.begin, after, with_causes=is_admin))
        elif request.verb == drain.VERB:
            self.requests.add(session, request, name=self._drain.execute(request))
        else:
            access.check_verb(request.verb)
            body = control.check_query(request)
            self.requests.add(session, request, about=None if self._users.sees_all(session) else session, body=body)
        self._users.note_control_request(session, request)

    def _require_queue(self, request: ControlRequest) -> Queue:
        """Return the queue that the body names.

        Raises: RemoteProtocolError if the body is invalid, or there is no such queue
        """
        return self._engine.queues.require_permanent(control.decode_queue_name(request.verb, request.body))

    def _reply(self, request: ControlRequest, body: bytes, batch: int = 0) -> None:
        """Send an answer, once the batch is durable that `Administering.reply` waits for."""
        message = control.make_reply_message(request, body, self._engine.state.commit_state.now_ms)
        self._engine.commands.administering.reply(message, batch)

    def collect(self, patterns: Sequence[str], on_collected: Callable[[Figures], object]) -> None:
        """Make the figures of the metrics, in steps, and call `on_collected` with them. `patterns` are those of the
        queues that have metrics of their own."""
        self._sliced_work.add(self._collect(patterns, on_collected))
        self._schedule_turn()

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
        if name == connection_list.LIST_VERB:
            return self._connections.report(connection_list.parse_connections_request(body))
        if name == queue_details.CONSUMERS_VERB:
            assert about is not None, "`execute` names the connection"
            identify = partial(self._connections.identify, client=about, sees_all=self._users.sees_all(about))
            return queue_details.report_consumers(self._engine, control.decode_queue_name(name, body), identify)
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
        self._reply(request, body)
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
