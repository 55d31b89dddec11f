"""Model of brokers that stand by and take over, without I/O. Source: docs/contract.md, chapter 28.

`FailoverModel.steps` yields every step that is possible in a state. A step that breaks a promise raises `Violation`:

    C28.3, C28.4   no broker takes over from one that lives and reaches PostgreSQL
    C28.8          no number is confirmed twice under one identity; two brokers never append in one epoch
    C28.9          no broker writes to a socket in silence, nor after another one has taken over because of its silence
    C28.11         with a replicated log, nothing confirmed is lost by the promotion of the standby
    C28.12         repaired rows are the rows that they were
    C28.13, 14     no broker goes on without rows that are known to be missing

Time passes in steps of its own. Clocks run at the speeds of `Bounds.rates`. A frozen broker does nothing, and its clock
goes on. The decisions of brokers are those of the code: `find`, `decide`, `next_watch`, `chain`, `fault_of_folder`,
`origin_fault`, and `silent_from`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf
from typing import Final

from tests.contract.postgresql.failover_state import (
    Append,
    Bounds,
    Broker,
    Database,
    Life,
    Row,
    Rows,
    Seen,
    State,
    TakenOver,
    Watched,
    takeover_payload,
)
from tests.contract.postgresql.log_model import Violation
from truenext.store.log import BEAT_S, EMPTY_PAYLOAD, LogPosition
from truenext.store.postgresql import outcome
from truenext.store.postgresql.forgotten import End, Fault, chain, fault_of_folder, origin_fault
from truenext.store.postgresql.outcome import Finding, find
from truenext.store.postgresql.standing_by import (
    Decision,
    Look,
    Origin,
    Stop,
    Watch,
    decide,
    first_watch,
    next_watch,
    silent_from,
)

FAULTS: Final = (
    "a takeover row is like any other",
    "a takeover does not compare the last row",
    "a decision outlives its connection",
    "a free mark is trusted in a new session",
    "the own failover_after counts",
    "time counts from the begin of a look",
    "repaired rows have the epoch of the last row",
    "a socket is written to in silence",
    "silence counts from the end of an append",
    "the clock stops with the process",
    "the identity is kept",
    "rows are repaired after another broker has gone on",
    "a folder that is ahead takes over at once",
    "rows that are ahead are dropped",
    "another timeline is passed over",
    "a beat comes late",
)
"""Names of faults, each of which breaks one rule. An empty name breaks none."""

LOOKING: Final = ("starts", "begins a look", "looks", "has looked")

Step = tuple[str, State]
Steps = Iterator[Step]

TIMES_MS: Final = (400, 1000, 2000)
"""Durations of the steps in which time passes."""
HEALTHY_APPEND_MS: Final = 300
"""Longest duration of an append, by the broker's clock, with which PostgreSQL counts as reached."""
SLOW_MS: Final = 100
"""Duration of an append from which on it is checked again."""
EPOCHS_OF_LOSS: Final = 65_536


class FailoverModel:
    def __init__(self, fault: str = "", times_ms: tuple[int, ...] = TIMES_MS) -> None:
        assert not fault or fault in FAULTS
        self._fault = fault
        self._times_ms = times_ms
        self._rows = Rows()

    def begin(self, bounds: Bounds) -> State:
        """Return a state in which broker A is active, and all others stand by."""
        state = bounds._replace(steps=len(LOOKING) + 1).initial_state()
        for label in (*LOOKING, "takes over"):
            state = self._after(state, f"broker A {label}")
        for at in range(1, len(state.brokers)):
            for label in LOOKING:
                state = self._after(state, f"broker {_name(at)} {label}")
        brokers = tuple(each._replace(steps_left=bounds.steps) for each in state.brokers)
        return self._after(state._replace(brokers=brokers), "broker A marks its session")

    def _after(self, state: State, label: str) -> State:
        return dict(self.steps(state))[label]

    def steps(self, state: State) -> Steps:
        """Yield the possible next steps. Raises: Violation"""
        for at in range(len(state.brokers)):
            self._check_writes(state, at)
        yield from self._of_time(state)
        yield from self._of_postgresql(state)
        yield from self._of_operator(state)
        for at, broker in enumerate(state.brokers):
            if broker.steps_left:
                spent = state.with_broker(at, broker._replace(steps_left=broker.steps_left - 1))
                for label, after in self._of_broker(spent, at):
                    yield f"broker {_name(at)} {label}", after

    # ---- Time ----

    def _of_time(self, state: State) -> Steps:
        if not state.times_left:
            return
        stops = self._fault == "the clock stops with the process"
        for real_ms in self._times_ms:
            brokers = tuple(each.aged(real_ms, stops_when_frozen=stops) for each in state.brokers)
            late = any(self._owes_beat(state, at, each) for at, each in enumerate(brokers))
            if not late or self._fault == "a beat comes late":
                yield f"{real_ms} ms pass", state._replace(brokers=brokers, times_left=state.times_left - 1)

    def _owes_beat(self, state: State, at: int, broker: Broker) -> bool:
        """Return whether a broker that could do so has not begun an append in time."""
        is_able = not broker.is_frozen and self._reaches(state.database, broker)
        return broker.life is Life.ACTIVE and is_able and broker.append is None and broker.idle > BEAT_S * 1000

    def _reaches(self, database: Database, broker: Broker) -> bool:
        return not broker.is_cut_off and broker.session == database.start

    # ---- PostgreSQL, and its operator ----

    def _of_postgresql(self, state: State) -> Steps:
        database = state.database
        started = database._replace(start=database.start + 1, marked=0)
        if state.failures_left:
            yield "PostgreSQL starts again", state.failed()._replace(database=started)
        if not state.losses_left:
            return
        state = state._replace(losses_left=state.losses_left - 1)
        _, confirmed = state.confirmed
        for number in range(1, self._rows[database.last].number):
            cut = self._cut(started, number)
            yield f"PostgreSQL is restored up to row {number}", state._replace(database=cut)
            if not state.is_replicated or self._rows.has(cut.last, confirmed):
                promoted = cut._replace(timeline=database.timeline + 1)
                yield f"a standby of PostgreSQL goes on after row {number}", state._replace(database=promoted)

    def _cut(self, database: Database, number: int) -> Database:
        row = self._rows.at(database.last, number)
        assert row is not None
        return database._replace(
            last=row.digest,
            takeovers=tuple(each for each in database.takeovers if each.number <= number),
            named=tuple(each for each in database.named if each[0] <= number),
            stop=database.stop if database.stop and database.stop.number <= number else None,
        )

    def _of_operator(self, state: State) -> Steps:
        if not state.has_said or any(each.life is Life.ACTIVE for each in state.brokers):
            return
        database, last = state.database, self._rows[state.database.last]
        keeps = self._fault == "the identity is kept"
        epoch = last.epoch + EPOCHS_OF_LOSS
        process = state.processes + 1
        row = self._rows.add(last.digest, epoch, takeover_payload(epoch, database.timeline, process))
        accepted = database._replace(
            last=row.digest,
            takeovers=(*database.takeovers, TakenOver(row.number, -1, process)),
            named=(*database.named, (row.number, database.timeline)),
            identity=database.identity + (0 if keeps else 1),
        )
        identity, confirmed = state.confirmed
        if accepted.identity == identity and not self._rows.has(row.digest, confirmed):
            raise Violation("the log goes on without confirmed rows under the identity that they had")
        after = state._replace(database=accepted, processes=process, has_said=False)
        yield "the loss is accepted", after._replace(confirmed=(accepted.identity, row.digest))

    # ---- A broker's life ----

    def _of_broker(self, state: State, at: int) -> Steps:
        broker = state.brokers[at]
        if broker.life is Life.OFF:
            yield "starts", self._start(state, at)
            return
        if broker.is_frozen:
            yield "goes on", state.with_broker(at, broker._replace(is_frozen=False))
        elif broker.is_cut_off:
            yield "reaches PostgreSQL again", state.with_broker(at, broker._replace(is_cut_off=False))
        elif broker.life is Life.STANDING_BY:
            yield from self._stand_by(state, at)
        else:
            yield from self._be_active(state, at)
        if state.failures_left:
            yield from self._fail(state.failed(), at)

    def _fail(self, state: State, at: int) -> Steps:
        broker = state.brokers[at]
        freed = _without_mark(state, broker)
        yield "is killed", freed.with_broker(at, broker.off())
        yield "dies with its machine", state.with_broker(at, broker.off())
        if not broker.is_frozen:
            yield "is frozen", state.with_broker(at, broker._replace(is_frozen=True, was_away=True))
        if state.database.marked == broker.process:
            yield "loses its marked session", freed
        if not broker.is_cut_off:
            cut = broker._replace(is_cut_off=True, session=0)
            yield "is cut off", state.with_broker(at, cut)
            yield "is cut off, and PostgreSQL knows", freed.with_broker(at, cut)

    def _start(self, state: State, at: int) -> State:
        broker, database = state.brokers[at], state.database
        row = self._rows[broker.folder]
        there = self._rows.at(database.last, row.number)
        is_usable = there is None or there.digest == row.digest
        if broker.identity != database.identity or not is_usable:
            broker = broker._replace(
                folder=database.last, takeovers=database.takeovers, oldest=self._rows[database.last].number + 1
            )
        started = broker._replace(
            life=Life.STANDING_BY,
            process=state.processes + 1,
            identity=database.identity,
            session=database.start,
        )
        return state._replace(processes=started.process).with_broker(at, started)

    # ---- Standing by ----

    def _stand_by(self, state: State, at: int) -> Steps:
        broker, database = state.brokers[at], state.database
        if broker.decided is not None:
            yield from self._take_over(state, at)
        elif broker.look_age is None:
            looking = broker._replace(look_age=0, session=database.start)
            yield "begins a look", state.with_broker(at, looking)
        elif broker.seen is None:
            seen = Seen(database, database.marked not in (0, broker.process))
            yield "looks", state.with_broker(at, broker._replace(seen=seen))
        elif broker.session != database.start:
            lost = broker._replace(look_age=None, seen=None)
            yield "loses its connection in a look", state.with_broker(at, lost)
        else:
            yield "has looked", self._has_looked(state, at)

    def _has_looked(self, state: State, at: int) -> State:
        broker = state.brokers[at]
        seen, age = broker.seen, broker.look_age
        assert seen is not None and age is not None
        if not self._follows(seen, broker):
            return state.with_broker(at, broker.off())
        look = self._look(state, broker, seen, age)
        watch = self._watch(broker, look)
        if broker.watched is None:
            broker = broker._replace(first_start=broker.session)
        broker = broker._replace(
            look_age=None,
            seen=None,
            watched=Watched(seen.database.last, round(-watch.since * 1000), watch.session, watch.is_trusted),
        )
        if not self._is_ahead(broker, seen.database):
            broker = broker._replace(folder=seen.database.last, takeovers=seen.database.takeovers)
        own = partial(decide, watch, name=_name(at), place=_name(at))
        needs_repair = self._needs_repair(state, broker, seen.database)
        decision = own(look, failover_after_s=broker.failover_after / 1000, needs_repair=needs_repair)
        if decision is Decision.WAIT:
            return state.with_broker(at, broker)
        is_by_silence = own(look, failover_after_s=inf, needs_repair=needs_repair) is Decision.WAIT
        ends = decision is Decision.END_AND_TAKE_OVER
        decided = broker._replace(decided=seen, ends_session=ends, is_by_silence=is_by_silence)
        return state.with_broker(at, decided)

    def _follows(self, seen: Seen, broker: Broker) -> bool:
        """Return whether the folder is a prefix of the log, or the log a prefix of the folder."""
        last = seen.database.last
        return seen.database.identity == broker.identity and (
            self._rows.has(last, broker.folder) or self._rows.has(broker.folder, last)
        )

    def _is_ahead(self, broker: Broker, database: Database) -> bool:
        return self._rows[broker.folder].number > self._rows[database.last].number

    def _needs_repair(self, state: State, broker: Broker, database: Database) -> bool:
        if self._fault == "a folder that is ahead takes over at once":
            return False
        is_moved = database.named[-1][1] != database.timeline and not state.is_replicated
        return is_moved or self._is_ahead(broker, database)

    def _look(self, state: State, broker: Broker, seen: Seen, age: int) -> Look:
        database, row = seen.database, self._rows[seen.database.last]
        place = database.takeovers[-1].place
        after = 0 if place < 0 else state.brokers[place].failover_after / 1000
        return Look(
            began=-age / 1000,
            ended=0.0,
            session=broker.session,
            last=outcome.Row(row.number, row.epoch, row.digest),
            is_marked=seen.is_marked,
            stop=database.stop,
            active="" if place < 0 else _name(place),
            failover_after_s=0.0 if self._fault == "the own failover_after counts" else after,
        )

    def _watch(self, broker: Broker, look: Look) -> Watch:
        watched = broker.watched
        if self._fault == "time counts from the begin of a look":
            look = look._replace(ended=look.began)
        if watched is None:
            return first_watch(look)
        row = self._rows[watched.last]
        before = Watch(
            outcome.Row(row.number, row.epoch, row.digest), -watched.age / 1000, watched.start, watched.is_trusted
        )
        watch = next_watch(before, look)
        return watch._replace(is_trusted=True) if self._fault == "a free mark is trusted in a new session" else watch

    # ---- Taking over ----

    def _take_over(self, state: State, at: int) -> Steps:
        broker, database = state.brokers[at], state.database
        decided = broker.decided
        assert decided is not None
        waiting = state.with_broker(at, broker._replace(decided=None, ends_session=False, is_by_silence=False))
        if database.identity != broker.identity:
            yield "finds another identity", state.with_broker(at, broker.off())
            return
        if broker.session != database.start and self._fault != "a decision outlives its connection":
            yield "loses its connection before a takeover", waiting
            return
        if database.last != decided.database.last and self._fault != "a takeover does not compare the last row":
            yield "stands by on, since a row has come", waiting
            return
        repaired = self._repaired(waiting, at)
        fault = repaired if isinstance(repaired, Fault) else self._origin_fault(state)
        if fault is not None or isinstance(repaired, Fault):
            assert fault is not None
            yield f"says what is missing: {fault.reason}", state._replace(has_said=True).with_broker(at, broker.off())
            return
        if repaired != database and not broker.is_by_silence:
            raise Violation(f"{_name(at)} repairs rows, and another broker may have more of them")
        waiting = self._check_victim(state, at).with_broker(at, waiting.brokers[at])
        taken = self._taken_over(waiting._replace(database=repaired), at)
        yield "takes over", self._active(taken, at, broker)
        if state.failures_left:
            lost = taken.failed().with_broker(at, waiting.brokers[at]._replace(session=0))
            yield "takes over, and the answer is lost", lost

    def _repaired(self, state: State, at: int) -> Database | Fault:
        """Return PostgreSQL with the rows that only the folder has."""
        broker, database = state.brokers[at], state.database
        last, folder = self._rows[database.last], self._rows[broker.folder]
        if folder.number <= last.number or self._fault == "rows that are ahead are dropped":
            return database
        # The folder is read before the check, as the code does. What it no longer has cannot be read.
        payloads = [row.payload for row in self._frames_after(broker, last.number)]
        new = list(chain(outcome.Row(last.number, last.epoch, last.digest), payloads))
        end = End(outcome.Row(*last[:3]), LogPosition(folder.number, folder.digest), broker.oldest)
        if (fault := fault_of_folder(end)) is not None:
            return fault
        has_gone_on = new[-1].digest != folder.digest
        if has_gone_on and self._fault != "rows are repaired after another broker has gone on":
            return Fault(last.number + 1, folder.number, "another broker has gone on without them")
        if self._fault == "repaired rows have the epoch of the last row":
            new = [each._replace(epoch=last.epoch) for each in new]
        for row in new:
            self._check_repaired(row, folder)
        return database._replace(last=folder.digest, takeovers=broker.takeovers)

    def _frames_after(self, broker: Broker, number: int) -> list[Row]:
        rows, row = list[Row](), self._rows[broker.folder]
        while row.number > number and row.number >= broker.oldest:
            rows.append(row)
            row = self._rows[row.before]
        return rows[::-1]

    def _check_repaired(self, row: outcome.NewRow, folder: Row) -> None:
        was = self._rows.at(folder.digest, row.number)
        if was is None or (was.epoch, was.digest) != (row.epoch, row.digest):
            raise Violation(f"row {row.number} is repaired, and is another row")

    def _origin_fault(self, state: State) -> Fault | None:
        database, row = state.database, self._rows[state.database.last]
        if self._fault == "another timeline is passed over":
            return None
        return origin_fault(
            Origin(1, database.named[-1][1]),
            Origin(1, database.timeline),
            outcome.Row(*row[:3]),
            is_replicated=state.is_replicated,
        )

    def _taken_over(self, state: State, at: int) -> State:
        database, broker = state.database, state.brokers[at]
        last = self._rows[database.last]
        is_plain = self._fault == "a takeover row is like any other"
        nonce = 0 if is_plain else broker.process
        row = self._rows.add(last.digest, last.epoch + 1, takeover_payload(last.epoch + 1, database.timeline, nonce))
        after = database._replace(
            last=row.digest,
            takeovers=(*database.takeovers, TakenOver(row.number, at, broker.process)),
            named=(*database.named, (row.number, database.timeline)),
        )
        self._check_losses(state, after, at)
        return self._committed(state, after)

    def _active(self, state: State, at: int, before: Broker) -> State:
        """Return the state after the takeover of a broker, which may have ended the session of the one before."""
        broker, database = state.brokers[at], state.database
        marked = 0 if before.ends_session else database.marked
        active = broker._replace(
            life=Life.ACTIVE,
            folder=database.last,
            takeovers=database.takeovers,
            epoch=self._rows[database.last].epoch,
            session=database.start,
            watched=None,
            idle=0,
            was_away=False,
            confirmed_age=0,
            believed_age=0,
        )
        confirmed = self._confirmed(state, database.last)
        return confirmed._replace(database=database._replace(marked=marked)).with_broker(at, active)

    def _check_victim(self, state: State, at: int) -> State:
        """Check a takeover by `at` against the broker that was active, and return the state in which that one must be
        silent, if it was passed for silent."""
        taker, database = state.brokers[at], state.database
        process = database.takeovers[-1].process
        for victim_at, victim in enumerate(state.brokers):
            if victim.life is not Life.ACTIVE or victim.process != process:
                continue
            if taker.is_by_silence:
                return state.with_broker(victim_at, victim._replace(must_be_silent=True))
            if not victim.is_frozen and not victim.is_cut_off and self._is_wronged(database, victim, taker):
                raise Violation(f"a broker takes over from {_name(victim_at)}, which lives and reaches PostgreSQL")
        return state

    def _is_wronged(self, database: Database, victim: Broker, taker: Broker) -> bool:
        if victim.session != database.start:
            # Who has just started cannot know that the active broker has yet to connect again.
            return taker.first_start != database.start
        is_slow = victim.append is not None and victim.append.age > HEALTHY_APPEND_MS
        return not victim.was_away and not is_slow

    # ---- Being active ----

    def _be_active(self, state: State, at: int) -> Steps:
        broker, database = state.brokers[at], state.database
        if broker.session != database.start:
            again = broker.append and broker.append._replace(is_executed=False)
            connected = broker._replace(session=database.start, append=again, was_away=True)
            yield "connects again", state.with_broker(at, connected)
            return
        if not database.marked:
            marked = database._replace(marked=broker.process)
            yield "marks its session", state._replace(database=marked)
        append = broker.append
        if append is None:
            row = self._rows.add(broker.folder, broker.epoch, EMPTY_PAYLOAD)
            appending = broker._replace(append=Append(row.digest, 0))
            yield f"begins to append row {row.number}", state.with_broker(at, appending)
            yield from self._hand_over(state, at)
        elif append.is_executed:
            yield "has the answer", self._appended(state, at)
        else:
            yield from self._execute(state, at)

    def _hand_over(self, state: State, at: int) -> Steps:
        broker, database = state.brokers[at], state.database
        for heir in ("", *map(_name, range(len(state.brokers)))):
            if heir != _name(at):
                stop = Stop(self._rows[broker.folder].number, heir)
                stopped = _without_mark(state._replace(database=database._replace(stop=stop)), broker)
                yield f"hands over to {heir or 'any'}", stopped.with_broker(at, broker.off())

    def _execute(self, state: State, at: int) -> Steps:
        """Yield what an append does that PostgreSQL executes."""
        broker, database = state.brokers[at], state.database
        assert broker.append is not None
        row, last = self._rows[broker.append.digest], self._rows[database.last]
        executed = broker._replace(append=broker.append._replace(is_executed=True))
        finding = self._finding(database, row, broker)
        if last.digest == row.before and last.epoch == broker.epoch:
            if database.takeovers[-1].process != broker.process:
                raise Violation(f"{_name(at)} appends in the epoch of another broker")
            named = database.named
            if named[-1][1] != database.timeline:
                named = (*named, (row.number, database.timeline))
            after = database._replace(last=row.digest, named=named)
            yield (
                f"appends row {row.number}",
                self._committed(state, after).with_broker(at, executed._replace(was_away=False, must_be_silent=False)),
            )
        elif finding is Finding.APPENDED:
            yield f"finds row {row.number}", state.with_broker(at, executed)
        elif finding is Finding.FENCED:
            yield "is fenced", _without_mark(state, broker).with_broker(at, broker.off())
        else:
            yield from self._repair(state, at)

    def _repair(self, state: State, at: int) -> Steps:
        repaired = self._repaired(state, at)
        if isinstance(repaired, Database) and repaired.last != state.database.last:
            yield "repairs the log", state._replace(database=repaired)
        else:
            off = _without_mark(state, state.brokers[at]).with_broker(at, state.brokers[at].off())
            yield "says that rows are missing", off._replace(has_said=True)

    def _finding(self, database: Database, row: Row, broker: Broker) -> Finding:
        numbers = {row.number - 1, row.number, self._rows[database.last].number}
        near = [found for number in numbers if (found := self._rows.at(database.last, number)) is not None]
        rows = [outcome.Row(*each[:3]) for each in near]
        return find(outcome.Row(row.number, broker.epoch, row.digest), row.before, rows)

    def _appended(self, state: State, at: int) -> State:
        """Return the state after the answer to an append that was executed."""
        broker = state.brokers[at]
        append = broker.append
        assert append is not None
        row = self._rows[append.digest]
        if append.age > SLOW_MS and self._finding(state.database, row, broker) is not Finding.APPENDED:
            return state.with_broker(at, broker._replace(append=append._replace(is_executed=False)))
        is_late = self._fault == "silence counts from the end of an append"
        appended = broker._replace(
            append=None,
            folder=row.digest,
            idle=0,
            was_away=broker.was_away or append.age > HEALTHY_APPEND_MS,
            confirmed_age=append.age,
            believed_age=0 if is_late else append.age,
        )
        return self._confirmed(state, row.digest).with_broker(at, appended)

    # ---- Promises ----

    def _check_writes(self, state: State, at: int) -> None:
        broker = state.brokers[at]
        if broker.life is not Life.ACTIVE or broker.is_frozen or not self._writes(broker):
            return
        if broker.must_be_silent:
            raise Violation(f"{_name(at)} writes to a socket after another broker has taken over")
        if _is_silent(broker, broker.confirmed_age):
            raise Violation(f"{_name(at)} writes to a socket in silence")

    def _writes(self, broker: Broker) -> bool:
        """Return whether the broker begins to write to a socket, if it can."""
        return not _is_silent(broker, broker.believed_age) or self._fault == "a socket is written to in silence"

    def _confirmed(self, state: State, digest: bytes) -> State:
        """Check a row that is confirmed, and return the state after it."""
        identity, last = state.confirmed
        if identity != state.database.identity or self._rows.has(last, digest):
            return state
        if not self._rows.has(digest, last):
            raise Violation(f"row {self._rows[digest].number} is confirmed, and another one was under this identity")
        return state._replace(confirmed=(identity, digest))

    def _check_losses(self, state: State, after: Database, at: int) -> None:
        """Check that a takeover does not go on without rows that are known to be missing."""
        identity, confirmed = state.confirmed
        if identity != after.identity or self._rows.has(after.last, confirmed):
            return
        left = self._rows.common(after.last, confirmed)
        taker = state.brokers[at]
        # Who has just started cannot know of an active broker that has yet to connect again.
        others = [] if taker.first_start == after.start else self._present(state)
        if any(self._knows_more(state, each, left) for each in (taker, *others)):
            raise Violation(f"{_name(at)} takes over without rows that it or the active broker has")
        if state.database.named[-1][1] != after.timeline:
            raise Violation(f"{_name(at)} takes over on another timeline without rows that were confirmed")

    def _committed(self, state: State, after: Database) -> State:
        """Return the state after a commit. Rows that it has not are given up: nobody can know of them, or the broker
        that has them will say so."""
        identity, confirmed = state.confirmed
        if identity == after.identity and not self._rows.has(after.last, confirmed):
            state = state._replace(confirmed=(identity, self._rows.common(after.last, confirmed)))
        return state._replace(database=after)

    def _present(self, state: State) -> Iterator[Broker]:
        """Yield the active brokers that reach PostgreSQL and are not silent."""
        for each in state.brokers:
            is_able = not each.is_frozen and self._reaches(state.database, each)
            if each.life is Life.ACTIVE and is_able and not _is_silent(each, each.confirmed_age):
                yield each

    def _knows_more(self, state: State, broker: Broker, left: bytes) -> bool:
        """Return whether the folder has a confirmed row behind `left`."""
        identity, confirmed = state.confirmed
        common = self._rows.common(broker.folder, confirmed)
        return broker.identity == identity and self._rows[common].number > self._rows[left].number


def _is_silent(broker: Broker, age_ms: int) -> bool:
    return silent_from(-age_ms, broker.failover_after) <= 0


def _without_mark(state: State, broker: Broker) -> State:
    """Return the state after PostgreSQL has ended the sessions of a broker."""
    database = state.database
    return state._replace(database=database._replace(marked=0)) if database.marked == broker.process else state


def _name(at: int) -> str:
    return "ABCDEFGH"[at]
