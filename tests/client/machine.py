"""Machine that draws events at random and compares the client with the oracle after each.

A program is several tasks, each of which waits at a place of its own until the machine lets it go on. So every
interleaving of tasks may be drawn, also those with an event between the waking of a task and its going on.
"""

from __future__ import annotations

from asyncio import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.client.oracle import Ack, Consumer, Disagreement, Letter, Oracle, Sent, Session, Unit
from tests.client.simulation import NeverIdle, Peer, Simulation
from truenext.client.core import flows
from truenext.client.core.buffer import ReceiveBuffer, Subscription
from truenext.client.core.disposition import ACKED, FAILED, REJECTED, CountedAttempts, Disposition, counted_attempts_for
from truenext.client.core.send_flows import prepare_send, send
from truenext.client.core.session import SessionCore as CoreSession
from truenext.client.core.session import SessionMode
from truenext.client.core.subscriptions import parse_consumer_options
from truenext.client.core.transaction_state import Outcome
from truenext.engine.state.window import SIZE_MIN
from truenext.errors import ClosedError, ConnectionLost, InDoubt, LocalProtocolError, RolledBack
from truenext.model.policy import Policies, Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    import pytest

    from truenext.client.core.waiting import Flow, Wait

STEPS = 60
"""Number of steps of an example."""
TIMEOUT_S = 60.0
IDLE_MAX_S = 11.0
"""Time after which a buffer without a receive has been released."""
REST_S = 65.0
"""Time after which messages without a receive are back, though they went from one idle consumer to the next."""
PREFETCHES = [0, 0, 1, 2, 3, 10, 1000, None]
QUEUES = ["a", "a", "a", "b"]
PRIORITIES = [4, 4, 4, 9, 1]
MODES = {
    Ack.AUTO: SessionMode.AUTO,
    Ack.INDIVIDUAL: SessionMode.INDIVIDUAL,
    Ack.TRANSACTED: SessionMode.TRANSACTED,
    Ack.AT_COMMIT: SessionMode.AT_COMMIT,
}
ALL = 1 << 30


class Failed(Exception):
    """Exception of the program's code."""


@dataclass(eq=False)
class Task:
    """Request of a program that may wait."""

    what: str
    peer: Peer
    owner: object
    flow: Flow[Any]
    done: Callable[[Any], None]
    failed: Callable[[BaseException], None]
    wait: Wait | None = None
    session: Session | None = None
    consumer: Consumer | None = None
    is_now: bool = False
    has_deadline: bool = False

    @property
    def can_resume(self) -> bool:
        wait = self.wait
        assert wait is not None, "it waits"
        return wait.signal.is_set or (wait.deadline is not None and self.peer.simulation.loop.now >= wait.deadline)


class Machine:
    def __init__(self, random: Random, patch: pytest.MonkeyPatch, steps: list[str], often: Sequence[str] = ()) -> None:
        """Prepare an example, in which the actions of `often` happen more than usual."""
        self.random = random
        self._steps = steps
        attempts_max = random.choice([2, 3, 7, 7])
        policy = Policy(attempts_max=attempts_max, first_delay_ms=random.choice([0, 0, 0, 500]), delay_ms=1000)
        self.simulation = Simulation(random, patch, Policies(policy))
        self.oracle = Oracle(self.simulation, attempts_max)
        self.tasks: list[Task] = []
        self.busy: set[tuple[object, object]] = set()
        self._serial = 0
        self._closed: set[Peer] = set()
        beats = random.choice([0.0, 0.0, 10.0])
        for _ in range(random.choice([1, 1, 1, 2])):
            self.simulation.peer(beats)
        self.sender = self.simulation.peer(0.0)
        self.is_lossy = random.random() < 0.6
        self.is_calm = random.random() < 0.3
        """Whether bytes arrive soon after they were written."""
        self.weights = self._weights()
        for name in often:
            self.weights[name] = 12

    def note(self, step: str) -> None:
        self._steps.append(f"{self.simulation.loop.now - 1000:.2f} {step}")

    # ---- One example ----

    @classmethod
    def run_plainly(
        cls, random: Random, patch: pytest.MonkeyPatch, steps: list[str], often: Sequence[str] = ()
    ) -> None:
        steps.clear()
        with patch.context() as here:
            cls(random, here, steps, often).run()

    def run(self) -> None:
        random = self.random
        for peer in self.simulation.peers:
            peer.connect()
        if random.random() < 0.8:
            self.run_all()
        for _ in range(random.choice([1, 1, 2, 3])):
            self.open_session()
        for _ in range(random.choice([0, 3, 6, 12])):
            self.send()
        if random.random() < 0.7:
            self.run_all()
        self.simulation.committer.is_instant = random.random() < 0.5
        actions = list(self.weights)
        weights = list(self.weights.values())
        for _ in range(STEPS):
            getattr(self, random.choices(actions, weights)[0])()
            self.confirm()
            if self.is_calm and random.random() < 0.7:
                self.run_all()
        self.settle()
        self.finish()

    def _weights(self) -> dict[str, int]:
        weights = {
            "send": 6,
            "receive": 14,
            "receive_many": 3,
            "receive_now": 3,
            "answer": 14,
            "commit": 5,
            "rollback": 4,
            "fail_in_unit": 1,
            "answer_in_unit": 3,
            "flush_unit": 2,
            "send_in_unit": 4,
            "cancel": 4,
            "pause": 1,
            "resume_consumer": 2,
            "close_consumer": 1,
            "close_session": 1,
            "open_session": 1,
            "subscribe_more": 1,
            "deliver_up": 12,
            "deliver_down": 14,
            "broker_step": 12,
            "disk": 4,
            "resume_any": 16,
            "flush": 5,
            "connect": 4,
            "advance_time": 3,
            "run_all": 2,
            "settle": 1,
            "narrow": 1,
        }
        if self.is_lossy:
            weights |= {"lose": 3, "broker_notices": 2, "late_bytes": 2, "cut": 1}
        for name in self.random.sample(sorted(weights), 4):
            weights[name] = weights[name] * 3 if self.random.random() < 0.5 else weights[name] // 3
        return weights

    # ---- Tasks ----

    def start(
        self,
        what: str,
        peer: Peer,
        owner: object,
        flow: Flow[Any],
        done: Callable[[Any], None],
        failed: Callable[[BaseException], None],
        *,
        session: Session | None = None,
        consumer: Consumer | None = None,
        is_now: bool = False,
        has_deadline: bool = False,
    ) -> Task:
        task = Task(what, peer, owner, flow, done, failed, None, session, consumer, is_now, has_deadline)
        self.tasks.append(task)
        if session is not None:
            self.busy.add((session, owner))
        self._advance(task, lambda: next(flow))
        return task

    def _advance(self, task: Task, step: Callable[[], Wait]) -> None:
        try:
            task.wait = step()
            while task.wait.signal.is_set:
                task.wait = task.flow.send(True)
                task.peer.after()
        except StopIteration as ended:
            self._is_over(task)
            self.note(f"{task.what}: {shown(ended.value)}")
            task.done(ended.value)
        except (Disagreement, AssertionError):
            raise
        except (Exception, CancelledError) as error:
            self._is_over(task)
            self.note(f"{task.what} raises {error!r}")
            task.failed(error)
        finally:
            task.peer.after()

    def _is_over(self, task: Task) -> None:
        self.tasks.remove(task)
        session = task.session
        if session is not None:
            self.busy.discard((session, task.owner))
            if session.is_closed and task.owner == "main":
                # Its block ends.
                session.core.close("main")

    def resume(self, task: Task) -> None:
        assert task.wait is not None, "it waits"
        in_time = task.wait.signal.is_set
        self._advance(task, lambda: task.flow.send(in_time))

    def resume_any(self) -> None:
        able = [task for task in self.tasks if task.can_resume]
        if able:
            self.resume(self.random.choice(able))

    def cancel(self) -> None:
        able = [task for task in self.tasks if task.what != "close"]
        if able:
            task = self.random.choice(able)
            self.note(f"cancel {task.what}")
            self._advance(task, lambda: task.flow.throw(CancelledError()))

    # ---- The program: sessions ----

    @property
    def now(self) -> float:
        return self.simulation.loop.now

    def open_session(self) -> None:
        peers = [peer for peer in self.simulation.peers if peer is not self.sender and peer not in self._closed]
        if len([each for each in self.oracle.sessions if not each.is_closed]) >= 4 or not peers:
            return
        peer = self.random.choice(peers)
        ack = self.random.choice([Ack.AUTO, Ack.INDIVIDUAL, Ack.INDIVIDUAL, *[Ack.TRANSACTED, Ack.AT_COMMIT] * 2])
        session = Session(
            f"s{len(self.oracle.sessions)}", peer, CoreSession(peer.client, MODES[ack], ReceiveBuffer()), ack
        )
        self.oracle.sessions.append(session)
        self.subscribe(session)
        if ack is not Ack.AUTO and self.random.random() < 0.3:
            self.subscribe(session)

    def subscribe_more(self) -> None:
        sessions = [each for each in self.sessions() if each.ack is not Ack.AUTO and len(each.consumers) < 2]
        if sessions:
            self.subscribe(self.random.choice(sessions))

    def subscribe(self, session: Session) -> None:
        queue = self.random.choice(QUEUES)
        prefetch = self.random.choice(PREFETCHES)
        self.note(f"subscribe {session.name} {session.ack.value} to {queue}, prefetch {prefetch}")
        core = session.core
        flow = core.client.subscribe(
            parse_consumer_options(f"/queue/{queue}", {"prefetch": prefetch}), core.buffer, self.now + TIMEOUT_S
        )

        def done(subscription: Any) -> None:
            pass

        def failed(error: BaseException) -> None:
            if not isinstance(error, CancelledError | TimeoutError | ClosedError):
                raise Disagreement(f"a subscription was refused: {error!r}")
            for consumer in started:
                self.oracle.is_closed(consumer)

        started: list[Consumer] = []
        before = len(core.buffer.subscriptions)
        self.start(f"subscribe {session.name}", session.peer, object(), flow, done, failed)
        # What comes to it may be handed out by its session before it is there.
        for subscription in core.buffer.subscriptions[before:]:
            incoming = self.oracle.incoming(session.peer, subscription.id)
            started.append(Consumer(session, subscription, queue, prefetch, incoming))
            session.consumers.append(started[-1])

    def sessions(self, *acks: Ack) -> list[Session]:
        return [
            each
            for each in self.oracle.sessions
            if not each.is_closed and each.peer not in self._closed and (not acks or each.ack in acks)
        ]

    def consumers(self) -> list[Consumer]:
        return [each for session in self.sessions() for each in session.consumers if not each.is_closed]

    # ---- The program: receiving ----

    def receive(self) -> None:
        self._receive(1)

    def receive_many(self) -> None:
        self._receive(self.random.choice([2, 3, 10]))

    def receive_now(self) -> None:
        self._receive(self.random.choice([1, 1, 3]), is_now=True)

    def _receive(self, max_count: int, *, is_now: bool = False) -> None:
        random = self.random
        consumers = self.consumers()
        if not consumers:
            return
        consumer = random.choice(consumers)
        session = consumer.session
        receiver: Consumer | None = consumer
        if session.ack is not Ack.AUTO and random.random() < 0.3:
            receiver = None
        owner = "main" if session.ack.is_transacted or random.random() < 0.7 else "second"
        if (session, owner) in self.busy:
            return
        unit = session.unit
        must_fail = unit is not None and unit.is_rollback_only
        if session.ack is Ack.AUTO:
            for delivered in [each for each in session.delivered if each.owner == owner]:
                self.oracle.is_done(delivered)
        subscription = None if receiver is None else receiver.subscription
        receiver_name = session.name if receiver is None else receiver.name
        what = f"receive {max_count}{' now' if is_now else ''} of {receiver_name}"
        self.note(f"{what} begins")

        def done(got: Any) -> None:
            if must_fail:
                raise Disagreement("a doomed transaction was given something")
            self.oracle.deliver(session, receiver, got, owner, max_count)

        def failed(error: BaseException) -> None:
            unit = session.unit
            if isinstance(error, RolledBack) and unit is not None and unit.is_rollback_only:
                return
            is_closed = session.is_closed or session.peer in self._closed
            if isinstance(error, CancelledError) or (isinstance(error, RolledBack) and is_closed):
                return
            if isinstance(error, ClosedError) and (
                session.is_closed or session.peer in self._closed or (receiver is not None and receiver.is_closed)
            ):
                return
            if isinstance(error, ClosedError | LocalProtocolError) and all(
                each.is_closed for each in session.consumers
            ):
                return
            if isinstance(error, ConnectionLost | TimeoutError) and is_now:
                return
            raise Disagreement(f"{what} raises {error!r}") from error

        if max_count == 1 and not is_now and receiver is not None and random.random() < 0.7:
            try:
                received = session.core.try_receive(subscription, owner)
            except Exception as error:
                self.note(f"{what} raises {error!r} at once")
                failed(error)
                return
            session.peer.after()
            if received is not None:
                self.note(f"{what}: {shown([received])} at once")
                done([received])
                return
        timeout = TIMEOUT_S if is_now else random.choice([None, None, 0.2, 3.0])
        deadline = None if timeout is None else self.now + timeout
        flow = session.core.receive(subscription, max_count, deadline, owner, no_wait=is_now)
        self.start(
            what,
            session.peer,
            owner,
            flow,
            done,
            failed,
            session=session,
            consumer=receiver,
            is_now=is_now,
            has_deadline=deadline is not None,
        )

    def answer(self) -> None:
        """Let the program settle a message, or end the code that handles it."""
        delivered = [each for session in self.sessions(Ack.INDIVIDUAL) for each in session.delivered]
        delivered += [
            each for session in self.sessions(Ack.AUTO) for each in session.delivered if self.random.random() < 0.2
        ]
        if not delivered:
            return
        which = self.random.choice(delivered)
        core, received = which.consumer.session.core, which.received
        what = self.random.choice(["ack"] * 6 + ["nack", "nack", "later", "reject", "release", "raise", "cancelled"])
        self.note(f"{what} {received.text} {received.ack_id}")
        if self.oracle.is_current(which) and what in ("ack", "nack", "later", "reject"):
            self.oracle.requests(which.consumer.session.peer, received.ack_id, is_ack=what == "ack")
        if what == "ack":
            core.settle(received, ACKED)
            self.oracle.is_done(which)
        elif what in ("nack", "later"):
            core.settle(
                received, FAILED if what == "nack" else Disposition(False, delay_ms=self.random.choice([0, 700]))
            )
            self.oracle.has_failed(which)
        elif what == "reject":
            core.settle(received, REJECTED)
            self.oracle.is_rejected(which)
        elif what == "release":
            core.release(received)
            self.oracle.is_released(which)
        elif what == "raise":
            core.on_handling_failed(received, Failed())
            self.oracle.has_failed(which)
        else:
            core.on_handling_failed(
                received, self.random.choice([CancelledError(), ConnectionLost("lost"), SystemExit()])
            )
            self.oracle.is_released(which)
        which.consumer.session.peer.after()

    # ---- The program: transactions ----

    def _transacted(self) -> list[Session]:
        return self.sessions(Ack.TRANSACTED, Ack.AT_COMMIT)

    def _of_unit(self) -> Session | None:
        sessions = [each for each in self._transacted() if (each, "main") not in self.busy]
        return self.random.choice(sessions) if sessions else None

    def send_in_unit(self) -> None:
        session = self._of_unit()
        if session is None:
            return
        letter = self._letter()
        was_rollback_only = session.unit is not None and session.unit.is_rollback_only
        before = session.unit
        start_wire, start_event = session.peer.wire, self.simulation.event()
        self.note(f"send {letter.token} to {letter.queue} with priority {letter.priority} in a transaction")
        encoded = flows.encode_send_in_transaction(f"/queue/{letter.queue}", {"priority": letter.priority})
        body = letter.token.encode()

        def done(_: None) -> None:
            if was_rollback_only:
                raise Disagreement(f"{letter.token} was sent in a doomed transaction")
            unit = self.oracle.unit(session, "main")
            if before is not None and unit is not before:
                raise Disagreement(f"{letter.token} was sent in the next transaction")
            unit.sent.append(letter)
            if unit.is_rollback_only:
                letter.sent = Sent.NEVER

        def failed(error: BaseException) -> None:
            unit = session.unit
            if isinstance(error, RolledBack):
                letter.sent = Sent.NEVER
                if session.is_closed:
                    return
                if unit is None or not unit.is_rollback_only:
                    # It began with this send.
                    if session.peer.wire is start_wire and session.rolled_back < start_event:
                        raise Disagreement(f"a send in a transaction raises {error!r}") from error
                    self.oracle.mark_rollback_only(self.oracle.unit(session, "main"))
            elif isinstance(error, CancelledError | TimeoutError):
                if was_rollback_only or (unit is not None and unit.is_rollback_only):
                    letter.sent = Sent.NEVER
                elif (core := session.core.transaction) is not None and core.outcome in (
                    Outcome.OPEN,
                    Outcome.ROLLBACK_ONLY,
                ):
                    unit = self.oracle.unit(session, "main")
                    unit.maybe_sent.append(letter)
                    if session.peer.wire is not start_wire or session.rolled_back > start_event:
                        self.oracle.mark_rollback_only(unit)
                else:
                    # It waited for what becomes of the transaction before.
                    letter.sent = Sent.NEVER
            elif isinstance(error, ClosedError) and (session.is_closed or session.peer in self._closed):
                letter.sent = Sent.NEVER
            else:
                raise Disagreement(f"a send in a transaction raises {error!r}") from error

        if session.core.try_send(encoded.head, body, None, "main"):
            session.peer.after()
            done(None)
            return
        flow = session.core.send(encoded.head, body, None, self.now + TIMEOUT_S, "main")
        self.start("send in a transaction", session.peer, "main", flow, done, failed, session=session)

    def fail_in_unit(self) -> None:
        session = self._of_unit()
        if session is None or session.unit is None or not session.unit.delivered or session.unit.is_rollback_only:
            return
        delivered = self.random.choice(session.unit.delivered)
        self.note(f"{delivered.received.text} has failed in its transaction")
        if counted_attempts_for(Failed()) is CountedAttempts.ALL:
            session.core.mark_failed(delivered.received)
        if delivered not in session.unit.failed:
            session.unit.failed.append(delivered)

    def flush_unit(self) -> None:
        """Let the program flush a transaction."""
        session = self._of_unit()
        if session is None:
            return
        unit = session.unit
        was_rollback_only = unit is not None and unit.is_rollback_only
        sent = [] if unit is None else [letter.token.encode() for letter in unit.sent]
        wire = session.peer.wire
        self.note(f"flush of {session.name} begins")

        def done(_: None) -> None:
            if was_rollback_only:
                raise Disagreement("a doomed transaction was flushed")
            if sent:
                if wire is None or session.peer.wire is not wire or (unit is not None and unit.is_rollback_only):
                    raise Disagreement("a transaction was flushed that a lost connection or a rollback has ended")
                carried = {frame.body for frame in wire.carried if "transaction" in frame.headers}
                if not carried.issuperset(sent):
                    raise Disagreement(f"flushed, and the broker has not got all of {sent}")

        def failed(error: BaseException) -> None:
            is_rollback_only = unit is not None and unit.is_rollback_only
            if isinstance(error, RolledBack) and (is_rollback_only or session.is_closed):
                return
            if not isinstance(error, CancelledError | TimeoutError):
                raise Disagreement(f"flush raises {error!r}") from error

        flow = session.core.flush(self.now + TIMEOUT_S)
        self.start("flush", session.peer, "main", flow, done, failed, session=session)

    def answer_in_unit(self) -> None:
        """Let the program nack, reject or release a message of a transaction."""
        sessions = [each for each in self.sessions(Ack.AT_COMMIT) if each.unit is not None and each.unit.delivered]
        if not sessions:
            return
        session = self.random.choice(sessions)
        unit, core = session.unit, session.core
        assert unit is not None, "it has messages"
        delivered = self.random.choice(unit.delivered)
        received = delivered.received
        owner = "other" if (session, "main") in self.busy or self.random.random() < 0.2 else "main"
        what = self.random.choice(["nack", "nack", "later", "reject", "release"])
        self.note(f"{what} {received.text} {received.ack_id} of a transaction, by {owner}")
        dispositions = {
            "nack": FAILED,
            "later": Disposition(False, delay_ms=self.random.choice([0, 700])),
            "reject": REJECTED,
        }
        was_open = not (unit.is_rollback_only or unit.is_committing)
        # It is nobody else's: the program may say it.
        is_own = not (unit.is_committing or delivered.consumer.is_closed or unit.is_returned)
        try:
            if what == "release":
                core.release(received, owner)
            else:
                core.settle(received, dispositions[what], owner)
        except (RolledBack, LocalProtocolError) as error:
            self.note(f"... raises {error!r}")
            if is_own:
                raise Disagreement(f"{what} of a message of a transaction raises {error!r}") from error
        else:
            if was_open:
                session.rolled_back = self.simulation.event()
            if what == "release":
                if is_own:
                    self.oracle.rolls_back(session, owner, counts_attempts=False)
            elif is_own:
                self.oracle.is_settled(session, delivered, owner, is_rejected=what == "reject")
            else:
                raise Disagreement(f"{what} of a message of a transaction that others have ended raises nothing")
        session.peer.after()

    def commit(self) -> None:
        session = self._of_unit()
        if session is None:
            return
        unit = session.unit
        was_rollback_only = unit is not None and unit.is_rollback_only
        core, in_doubt = session.core.transaction, session.in_doubt
        if core is not None:
            self.oracle.requests(session.peer, core.name)
        if unit is not None:
            unit.core = core
            unit.is_committing = not was_rollback_only
            for delivered in unit.failed:
                # As soon as the broker commits it is there again.
                self.oracle.is_over(delivered)
                delivered.letter.attempts_max += 1
        names = "" if unit is None else f" with {[delivered.letter.token for delivered in unit.delivered]}"
        self.note(f"commit of {session.name} begins{names}")
        flow = session.core.commit(self.now + self.random.choice([TIMEOUT_S, TIMEOUT_S, 1.0]))

        def done(_: None) -> None:
            if was_rollback_only:
                raise Disagreement("a doomed transaction was committed")
            if unit is not None:
                self.oracle.is_committed(session, unit)
            elif in_doubt is not None and core is not None:
                self.oracle.is_known(session, in_doubt, is_committed=True)

        def failed(error: BaseException) -> None:
            if unit is None and in_doubt is not None and core is not None:
                if isinstance(error, RolledBack):
                    self.oracle.is_known(session, in_doubt, is_committed=False)
                return
            if unit is None:
                # Of one that was in doubt another may have asked meanwhile.
                is_of_the_last = core is not None and isinstance(error, RolledBack)
                if not (is_of_the_last or isinstance(error, CancelledError | ClosedError)):
                    raise Disagreement(f"an empty transaction raises {error!r}") from error
                return
            unit.is_committing = False
            if isinstance(error, RolledBack):
                self.oracle.is_rolled_back(session, unit)
            elif isinstance(error, InDoubt):
                self.oracle.is_in_doubt(session, unit)
                self._request_outcome(session, error, unit)
            elif isinstance(error, CancelledError | ClosedError):
                assert core is not None, "it was committed"
                outcome = core.outcome
                self.note(f"... and is {outcome.value}")
                if outcome is Outcome.COMMITTED:
                    self.oracle.is_committed(session, unit)
                elif outcome is Outcome.ROLLED_BACK:
                    self.oracle.is_rolled_back(session, unit)
                elif outcome in (Outcome.IN_DOUBT, Outcome.UNKNOWN, Outcome.COMMITTING):
                    self.oracle.is_in_doubt(session, unit)
                elif session.peer.wire is None or was_rollback_only or outcome is Outcome.ROLLBACK_ONLY:
                    self.oracle.mark_rollback_only(unit)
            else:
                raise Disagreement(f"commit raises {error!r}") from error

        self.start("commit", session.peer, "main", flow, done, failed, session=session)

    def _request_outcome(self, session: Session, doubt: InDoubt, unit: Unit) -> None:
        """Request the outcome of a transaction in doubt."""
        peer = session.peer
        flow = flows.resolve_outcome(peer.client, doubt.token, self.now + TIMEOUT_S)

        def done(result: str) -> None:
            if result not in ("committed", "rolled back"):
                raise Disagreement(f"what became of a transaction is {result}")
            self.oracle.is_known(session, unit, is_committed=result == "committed")

        self.start("outcome", peer, object(), flow, done, lambda error: None)

    def rollback(self) -> None:
        sessions = self._transacted()
        if not sessions:
            return
        session = self.random.choice(sessions)
        is_busy = (session, "main") in self.busy
        owner = "other" if is_busy or self.random.random() < 0.25 else "main"
        counted = self.random.choice([CountedAttempts.ALL, CountedAttempts.ALL, CountedAttempts.NONE])
        core = session.core.transaction
        if session.unit is None and core is not None and core.outcome in (Outcome.OPEN, Outcome.ROLLBACK_ONLY):
            # It has begun with a request that still waits.
            self.oracle.unit(session, core.owner)
        session.rolled_back = self.simulation.event()
        self.note(f"rollback of {session.name} by {owner}, {counted.value}")
        if core is not None and core.outcome not in (Outcome.OPEN, Outcome.ROLLBACK_ONLY):
            # What becomes of it, its COMMIT says.
            with suppress(LocalProtocolError):
                session.core.rollback(owner, counted=counted)
        else:
            session.core.rollback(owner, counted=counted)
            self.oracle.rolls_back(session, owner, counts_attempts=counted is CountedAttempts.ALL)
        session.peer.after()

    # ---- The program: ends ----

    def pause(self) -> None:
        consumers = [each for each in self.consumers() if not each.is_paused]
        if consumers:
            consumer = self.random.choice(consumers)
            self.note(f"pause {consumer.name}")
            consumer.session.peer.client.subscriptions.pause(consumer.subscription)
            consumer.is_paused = True
            self.oracle.releases([consumer], "a pause")

    def resume_consumer(self) -> None:
        consumers = [each for each in self.consumers() if each.is_paused]
        if consumers:
            consumer = self.random.choice(consumers)
            self.note(f"resume {consumer.name}")
            consumer.session.peer.client.subscriptions.resume(consumer.subscription)
            consumer.is_paused = False

    def close_consumer(self) -> None:
        consumers = [each for each in self.consumers() if each.session.ack is not Ack.TRANSACTED]
        if not consumers:
            return
        consumer = self.random.choice(consumers)
        session = consumer.session
        if session.ack is Ack.AUTO:
            disposition = self.random.choice([ACKED, ACKED, FAILED, None])
            self.note(f"close auto consumer {consumer.name}, {disposition}")
            session.core.settle_awaiting_auto_ack(disposition)
            for delivered in list(session.delivered):
                if disposition is ACKED:
                    self.oracle.is_done(delivered)
                elif disposition is FAILED:
                    self.oracle.has_failed(delivered)
                else:
                    self.oracle.is_released(delivered)
            session.core.close("main")
            session.is_closed = True
        else:
            self.note(f"close consumer {consumer.name}")
            session.peer.client.subscriptions.unsubscribe(consumer.subscription)
        self.oracle.is_closed(consumer)
        session.peer.after()

    def close_session(self) -> None:
        sessions = self.sessions()
        if sessions and self.random.random() < 0.5:
            self._close_session(self.random.choice(sessions))

    def _close_session(self, session: Session) -> None:
        owner = "other" if (session, "main") in self.busy else "main"
        self.note(f"close session {session.name} by {owner}")
        session.core.close(owner)
        if owner == "other" and (session, "main") not in self.busy:
            session.core.close("main")
        session.is_closed = True
        unit = session.unit
        if unit is not None and not unit.is_committing:
            self.oracle.is_rolled_back(session, unit)
        for consumer in session.consumers:
            self.oracle.is_closed(consumer)
        session.peer.after()

    # ---- Sends ----

    def _letter(self) -> Letter:
        self._serial += 1
        letter = Letter(f"m{self._serial}", self.random.choice(QUEUES), self.random.choice(PRIORITIES))
        self.oracle.letters[letter.token] = letter
        return letter

    def send(self) -> None:
        peers = [each for each in self.simulation.peers if each not in self._closed]
        peer = self.sender if self.random.random() < 0.7 else self.random.choice(peers)
        letter = self._letter()
        self.note(f"send {letter.token} to {letter.queue} with priority {letter.priority}")
        prepared = prepare_send(
            peer.client,
            f"/queue/{letter.queue}",
            letter.token,
            {"priority": letter.priority, "persistent": self.random.random() < 0.7},
        )
        flow = send(peer.client, prepared, self.now + TIMEOUT_S)

        def done(_: None) -> None:
            letter.sent = Sent.ACCEPTED

        def failed(error: BaseException) -> None:
            if not isinstance(error, CancelledError | TimeoutError | ClosedError):
                raise Disagreement(f"send raises {error!r}")
            letter.sent = Sent.MAYBE

        self.start(f"send {letter.token}", peer, object(), flow, done, failed)

    # ---- Wires ----

    def _size(self) -> int:
        return self.random.choice([ALL, ALL, ALL, 1, 20, 200, self.random.randrange(400)])

    def _wires(self) -> list[Peer]:
        return [peer for peer in self.simulation.peers if peer.wire is not None]

    def deliver_up(self) -> None:
        peers = [peer for peer in self._wires() if peer.wire is not None and peer.wire.up]
        if peers:
            peer = self.random.choice(peers)
            assert peer.wire is not None
            peer.wire.deliver_up(self._size())
            if peer.can_write_on:
                peer.write_on()

    def deliver_down(self) -> None:
        peers = [peer for peer in self._wires() if peer.wire is not None and (peer.wire.down or peer.wire.is_closed)]
        if peers:
            self.random.choice(peers).deliver(self._size())

    def flush(self) -> None:
        for peer in self.simulation.peers:
            if peer.must_flush or self.random.random() < 0.2:
                peer.flush_now()
            if peer.can_write_on:
                peer.write_on()

    def broker_step(self) -> None:
        for _ in range(self.random.choice([1, 1, 2, 5, 20])):
            if self.simulation.loop.ready:
                self.simulation.loop.step()

    def disk(self) -> None:
        if self.simulation.committer.batch is not None:
            self.simulation.committer.done()

    def connect(self) -> None:
        for peer in self.simulation.peers:
            if peer.connects_at is not None and peer.connects_at <= self.now:
                succeeds = self.random.random() < 0.9
                self.note(f"{peer.name} connects: {succeeds}")
                peer.connect(succeeds=succeeds)

    def narrow(self) -> None:
        """Change the number of bytes that a socket takes."""
        for peer in self._wires():
            wire = peer.wire
            assert wire is not None
            capacity = self.random.choice([50, 300, ALL])
            if self.random.random() < 0.5:
                wire.capacity_up = capacity
            else:
                wire.capacity_down = capacity

    def lose(self) -> None:
        """Break a connection, which either the client or the broker notices first."""
        peers = self._wires()
        if not peers:
            return
        peer = self.random.choice(peers)
        wire = peer.wire
        assert wire is not None
        wire.deliver_up(self._size())
        if self.random.random() < 0.5:
            peer.deliver(self._size())
        if peer.wire is not wire:
            return
        if self.random.random() < 0.3:
            self.note(f"the broker loses {peer.name}")
            self.simulation.broker_loses(wire)
        else:
            self.note(f"{peer.name} is lost")
            peer.lose()
            peer.flush()

    def broker_notices(self) -> None:
        if self.simulation.half_open:
            self.note("the broker notices")
            self.simulation.broker_loses(self.random.choice(self.simulation.half_open))

    def late_bytes(self) -> None:
        """Deliver bytes that were on their way when the client closed the connection."""
        if self.simulation.half_open:
            self.random.choice(self.simulation.half_open).deliver_up(self._size())

    def cut(self) -> None:
        peers = self._wires()
        if peers:
            peer = self.random.choice(peers)
            assert peer.wire is not None
            self.note(f"{peer.name} is cut")
            peer.wire.is_cut = True

    def advance_time(self) -> None:
        if any(peer.wire is not None and not peer.is_up for peer in self.simulation.peers):
            # Who takes too long to say who he is, is sent away.
            self.run_all()
        self._advance_by(self.random.choice([0.05, 0.2, 1.0, 6.0]))

    def _advance_by(self, seconds: float) -> None:
        simulation = self.simulation
        end = self.now + seconds
        while True:
            simulation.advance_to(min(end, simulation.next_after_now() or end))
            for peer in simulation.peers:
                due = peer.client.delayed_calls.next_due_at
                if due is not None and due <= self.now and peer.client.error is None and not peer.is_dead:
                    peer.tick()
                if peer.flush_by is not None and peer.must_flush:
                    peer.flush_now()
            simulation.run_broker()
            if self.now >= end:
                break

    # ---- Rest ----

    def confirm(self) -> None:
        for peer in self._wires():
            if peer.has_forgotten_bytes:
                raise Disagreement(f"{peer.name} has bytes to write, and never will")
            if peer.is_up and not (peer.has_unwritten or peer.is_flush_due or peer.flush_by) and peer.flush():
                wire = peer.wire
                if wire is not None and not wire.up and wire.is_listened_to:
                    self.oracle.confirm(peer)

    def run_all(self) -> None:
        """Deliver all bytes and resume all tasks until nothing changes."""
        simulation = self.simulation
        for _ in range(2000):
            is_quiet = True
            self.confirm()
            if simulation.loop.ready:
                simulation.run_broker()
                is_quiet = False
            if simulation.committer.batch is not None:
                simulation.committer.done()
                is_quiet = False
            for peer in simulation.peers:
                if (
                    peer.connects_at is not None
                    and peer.connects_at <= self.now
                    and peer.client.error is None
                    and not peer.is_dead
                ):
                    peer.connect()
                    is_quiet = False
                due = peer.client.delayed_calls.next_due_at
                if due is not None and due <= self.now and peer.client.error is None and not peer.is_dead:
                    peer.tick()
                    is_quiet = False
                if peer.is_flush_due or peer.flush_by is not None:
                    peer.flush_now()
                    is_quiet = False
                if peer.can_write_on:
                    peer.write_on()
                    is_quiet = False
                wire = peer.wire
                if wire is None or wire.is_cut:
                    continue
                if wire.up:
                    wire.deliver_up(ALL)
                    is_quiet = False
                elif peer.flush() and wire.up:
                    is_quiet = False
                if wire.down or wire.is_closed:
                    peer.deliver(ALL)
                    is_quiet = False
            able = [task for task in self.tasks if task.can_resume]
            if able:
                self.resume(self.random.choice(able))
                is_quiet = False
            if is_quiet:
                return
        raise NeverIdle(f"tasks: {[task.what for task in self.tasks]}")

    def settle(self, seconds: float = REST_S) -> None:
        """Deliver all bytes, let lost connections be noticed, and let time pass."""
        simulation = self.simulation
        self.note("settle")
        was_instant, simulation.committer.is_instant = simulation.committer.is_instant, True
        for peer in self._wires():
            wire = peer.wire
            assert wire is not None
            wire.capacity_up = wire.capacity_down = ALL
            if (write := simulation.loop.writers.get(wire)) is not None:
                write()
            if wire.is_cut:
                peer.lose()
        for wire in list(simulation.half_open):
            if self.random.random() < 0.5:
                simulation.broker_loses(wire)
        self.run_all()
        end = self.now + seconds
        while True:
            times = [task.wait.deadline for task in self.tasks if task.wait is not None and task.wait.deadline]
            at = simulation.next_after_now() or end
            simulation.advance_to(min([end, at, *(each for each in times if each > self.now)]))
            self.run_all()
            if self.now >= end:
                # What the broker has dispatched only just goes back when nobody asks for it.
                end = self.oracle.arrived_at + IDLE_MAX_S
            if self.now >= end:
                break
            for wire in list(simulation.half_open):
                simulation.broker_loses(wire)
        simulation.committer.is_instant = was_instant
        self.check_idle()

    def check_idle(self) -> None:
        for peer in self.simulation.peers:
            for report in peer.reports:
                if "differ in the number of held messages" in report:
                    # It is mended by a new connection, and should never have been so.
                    raise Disagreement(f"{peer.name}: {report}")
        self._check_waiting(is_end=False)

    def _check_waiting(self, *, is_end: bool) -> None:
        raw = self.simulation.raw()
        waiting: dict[str, set[str]] = {}
        try:
            for queue in ("a", "b"):
                shown = raw.waiting(queue)
                self.oracle.check_waiting(queue, shown, raw.waiting(f"DLQ.{queue}"), is_end=is_end)
                waiting[queue] = {frame.body.decode() for frame in shown}
        finally:
            raw.disconnect()
        if not is_end:
            for task in self.tasks:
                self._check_waits_rightly(task, waiting)

    def _check_waits_rightly(self, task: Task, waiting: dict[str, set[str]]) -> None:
        session = task.session
        if not task.what.startswith("receive"):
            if task.what != "close" and task.peer.client.error is None:
                raise Disagreement(f"{task.what} waits, and everything has come")
            return
        assert session is not None
        if task.is_now:
            raise Disagreement(f"{task.what} still waits")
        for consumer in session.consumers if task.consumer is None else [task.consumer]:
            if consumer.is_closed or consumer.is_paused:
                continue
            if consumer.prefetch != 0:
                # Without a prefetch the window opens slowly to who acknowledges slowly.
                # What a transaction has acknowledged is in no window; what has come again is, as long as its code
                # has it.
                has = self.oracle.count_redelivered(consumer)
                delivered = session.delivered
                if session.ack is Ack.AT_COMMIT and session.unit is not None and not session.unit.is_returned:
                    delivered = [each for each in session.unit.delivered if self.oracle.is_current(each)]
                has += sum(each.consumer is consumer for each in delivered)
                if has >= (consumer.prefetch or SIZE_MIN):
                    continue
            # The program's own, which comes again, is not handed out.
            ready = {
                token
                for token in waiting[consumer.queue]
                if session.peer not in self.oracle.letters[token].held_by
                and session.peer not in self.oracle.letters[token].handled_by
            }
            if ready:
                raise Disagreement(f"{task.what} waits, and {sorted(ready)} are ready in {consumer.queue}")

    def finish(self) -> None:
        """End the programs: they close, or are killed."""
        random = self.random
        for peer in self.simulation.peers:
            for task in [each for each in self.tasks if each.peer is peer]:
                if random.random() < 0.5 and task in self.tasks:
                    self._advance(task, lambda task=task: task.flow.throw(CancelledError()))  # type: ignore[misc]
            if random.random() < 0.7:
                for session in self.oracle.sessions:
                    if session.peer is peer and not session.is_closed and random.random() < 0.5:
                        self._close_session(session)
                self._closed.add(peer)
                for session in self.oracle.sessions:
                    if session.peer is peer and session.unit is not None and not session.unit.is_committing:
                        self.oracle.is_rolled_back(session, session.unit)
                self.note(f"{peer.name} closes")
                flow = peer.client.close(self.now + 5)
                self.start("close", peer, object(), flow, _has_ended, _not_at_the_end)
            else:
                self.note(f"{peer.name} dies")
                self._closed.add(peer)
                for task in [each for each in self.tasks if each.peer is peer]:
                    self._is_over(task)
                if peer.wire is not None:
                    if random.random() < 0.5:
                        peer.wire.deliver_up(ALL)
                    self.simulation.broker_loses(peer.wire)
                    peer.wire = None
                peer.connects_at = None
                peer.is_dead = True
            if random.random() < 0.5:
                self.run_all()
        self._lose_all()

    def _lose_all(self) -> None:
        self._wait(10)
        for wire in list(self.simulation.half_open):
            self.simulation.broker_loses(wire)
        for peer in self.simulation.peers:
            if peer.wire is not None:
                self.simulation.broker_loses(peer.wire)
        # Those that were cut have a second to come back.
        self._wait(2)
        self.simulation.run_broker()
        self._check_waiting(is_end=True)

    def _wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.run_all()
            self.simulation.advance_to(min(end, self.simulation.next_after_now() or end))
        self.run_all()


def _has_ended(_: object) -> None:
    pass


def _not_at_the_end(error: BaseException) -> None:
    raise Disagreement(f"close raises {error!r}") from error


def shown(value: object) -> str:
    if isinstance(value, list):
        return str([f"{each.text} {each.ack_id}" for each in value])
    if isinstance(value, Subscription):
        return value.id
    return repr(value)
