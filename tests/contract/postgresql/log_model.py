"""Model of a log in PostgreSQL and of the brokers that share it, without I/O. Source: docs/contract.md, chapter 27.

`LogModel.steps` yields every step that is possible in a state. A step that breaks a promise raises `Violation`:

    C27.1, C27.4   each row stands on the row before it, and is of the broker that took over last
    C27.2          what was confirmed stays in the log; the rows and what is compacted add up to it
    C27.3          a folder is a prefix of the log, with its content and its identity
    C27.5          a takeover needs one try
    C27.6          what was confirmed is on the standby, too
    C27.7          a broker exits with the status of what has happened
    C27.8          a batch is in the log once
    C27.9          a gap, a changed row and a forgotten row are never passed over
    C27.10         no number of an event is used twice

The decisions of brokers are those of the code: `find`, `relate`, `RowChain` and `NetEffect`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.contract.postgresql.log_state import (
    EMPTY,
    GENESIS,
    Broker,
    Compaction,
    Content,
    Damage,
    Database,
    Folder,
    Life,
    Payload,
    Row,
    State,
    digest_after,
    encoded,
)
from truenext.store.log import LogPosition, Relation
from truenext.store.postgresql import outcome
from truenext.store.postgresql.outcome import Finding, RowChain, find, relate

FAULTS: Final = (
    "a row is inserted without a comparison",
    "the epoch is not compared",
    "the digest is not compared",
    "a row in doubt is repeated under a new number",
    "a fenced broker appends its row after the last one",
    "a broker appends after the last row that PostgreSQL still has",
    "a takeover whose answer was lost is not repeated",
    "the frame comes before its row",
    "a takeover does not lock the log",
    "a row that is found counts as replicated",
    "the warning is ignored",
    "the position moves without a comparison",
    "rows are read before the position",
    "a partition above the position is dropped",
    "the newest row is dropped",
    "a folder drops transient messages by itself",
    "a folder is made in two snapshots",
    "a folder has an identity of its own",
    "the checkpoint is ahead of the journal",
    "a new folder counts events from 1",
    "a gap is passed over",
    "a changed row is passed over",
    "a changed row is compacted",
    "a folder that went another way counts as a prefix",
    "a folder that is ahead is made anew",
)
"""Names of faults, each of which breaks one rule. An empty name breaks none."""

Step = tuple[str, State]
Steps = Iterator[Step]


class Violation(Exception):
    pass


class LogModel:
    def __init__(self, fault: str = "") -> None:
        assert not fault or fault in FAULTS
        self._fault = fault
        self._contents = {GENESIS.digest: Content()}
        """Content that the rows up to a row add up to, by the digest of the row."""

    def steps(self, state: State) -> Steps:
        """Yield the possible next steps. Raises: Violation"""
        yield from self._of_failing_database(state)
        for at, broker in enumerate(state.brokers):
            name = f"broker {'ABCDEFGH'[at]}"
            for label, after in self._of_database(state, at):
                yield f"PostgreSQL {label} of {name}", after
            if broker.steps_left:
                spent = state.with_broker(at, broker._replace(steps_left=broker.steps_left - 1))
                for label, after in self._of_broker(spent, at):
                    yield f"{name} {label}", after

    # ---- PostgreSQL ----

    def _of_failing_database(self, state: State) -> Steps:
        database = state.database
        if state.failovers_left:
            failed = state._replace(failovers_left=state.failovers_left - 1)
            for cut in range(max(database.replicated, database.position), len(database.rows) - 1):
                if cut < state.confirmed:
                    raise Violation(f"row {state.confirmed} is confirmed, and the standby does not have it")
                yield f"the standby goes on after row {cut}", _cut(failed, cut)
        if state.losses_left:
            failed = state._replace(losses_left=state.losses_left - 1)
            for cut in range(database.position, len(database.rows) - 1):
                yield f"PostgreSQL loses the rows after {cut}", _cut(failed, cut)
        if state.damages_left and database.damage is None:
            failed = state._replace(damages_left=state.damages_left - 1)
            # To lose the last row is to forget it.
            for number in range(database.dropped_below, database.last.number):
                for damage in (Damage(number, is_missing=True), Damage(number, is_missing=False)):
                    label = f"row {number} is {'deleted' if damage.is_missing else 'changed'}"
                    yield label, failed._replace(database=database._replace(damage=damage))

    def _of_database(self, state: State, at: int) -> Steps:
        """Yield the execution of statements whose connections are lost."""
        broker = state.brokers[at]
        if broker.late is not None:
            after = state.with_broker(at, broker._replace(late=None))
            inserted = self._insert(state.database, broker.late)
            yield "executes the late append", after._replace(database=inserted) if inserted else after
        if broker.compaction is not None and broker.life is Life.OFF:
            yield "executes the late compaction", self._apply_compaction(state, at)

    def _insert(self, database: Database, row: Row) -> Database | None:
        """Compare and append, as one statement. Return None if no row is inserted."""
        before = database.find(row.number - 1)
        if self._fault == "a row is inserted without a comparison":
            is_next = row.number >= len(database.rows)
        elif before is None or row.number != len(database.rows):
            is_next = False
        else:
            is_own = before.epoch == row.epoch or self._fault == "the epoch is not compared"
            is_known = digest_after(before.digest, row.payload) == row.digest
            is_next = is_own and (is_known or self._fault == "the digest is not compared")
        return self._committed(database, row) if is_next else None

    def _committed(self, database: Database, row: Row) -> Database:
        """Check a row that is committed, and return the database with it."""
        last = database.last
        if row.number != last.number + 1 or row.digest != digest_after(last.digest, row.payload):
            raise Violation(f"row {row.number} does not stand on row {last.number}")
        is_takeover = row.epoch == last.epoch + 1 and row.payload == EMPTY
        if row.epoch != last.epoch and not is_takeover:
            raise Violation(f"a fenced broker appends row {row.number}")
        before, payload = self._contents[last.digest], row.payload
        if payload.put and any(each.payload.put == payload.put for each in database.rows):
            raise Violation(f"message {payload.put} is in the log twice")
        if payload.removed and payload.removed not in before.messages:
            raise Violation(f"message {payload.removed} is removed, and is not there")
        if payload != EMPTY and payload.event < before.next_event:
            raise Violation(f"event {payload.event} is used twice")
        self._contents[row.digest] = before.after(payload)
        return database._replace(rows=(*database.rows, row))

    # ---- A broker's life ----

    def _of_broker(self, state: State, at: int) -> Steps:
        life = state.brokers[at].life
        if life is Life.OFF:
            yield from self._open(state, at)
            return
        if life is Life.OPENED:
            yield from self._take_over(state, at)
        elif life is Life.ACTIVE:
            yield from self._append_next(state, at)
            yield from self._do_chore(state, at)
        else:
            yield from self._resolve(state, at)
        if state.failures_left:
            yield from self._die(state.with_failure(), at)

    def _die(self, state: State, at: int) -> Steps:
        broker = state.brokers[at]
        folder, off = _folder_of(broker), _off(broker)
        yield "is killed", state.with_broker(at, off)
        yield "is killed, and its folder is deleted", state.with_broker(at, off._replace(folder=None))
        if folder.synced_number < folder.number:
            yield "has a power cut", state.with_broker(at, off._replace(folder=folder.torn()))

    def _exit(self, state: State, at: int, status: int) -> State:
        """Check the exit status, and return the state with the broker off."""
        broker, database = state.brokers[at], state.database
        is_right = {
            1: database.damage is not None or database.has_forgotten,
            3: database.last.epoch > broker.epoch,
            4: database.has_forgotten or (database.damage is not None and database.damage.is_missing),
        }
        if not is_right[status]:
            raise Violation(f"a broker exits with status {status}, and nothing of that kind has happened")
        return state.with_broker(at, _off(broker))

    # ---- A folder ----

    def _open(self, state: State, at: int) -> Steps:
        broker, database = state.brokers[at], state.database
        folder = broker.folder
        if isinstance(broker.seen, Content):
            yield from self._opened(state, at, "reads the position of its new folder", self._new_folder(state, at))
            return
        relation = Relation.OLD if folder is None else _relation(database, folder)
        if relation is Relation.OTHER_WAY and self._fault == "a folder that went another way counts as a prefix":
            relation = Relation.PREFIX
        if relation is None:
            yield "finds a gap", self._exit(state, at, 1)
        elif folder is not None and relation is Relation.PREFIX:
            yield from self._opened(state, at, "opens its folder", folder)
        elif relation is Relation.AHEAD:
            if self._fault == "a folder that is ahead is made anew":
                raise Violation("a folder has rows that PostgreSQL has forgotten, and this is passed over")
            yield "finds that PostgreSQL has forgotten rows of its folder", self._exit(state, at, 4)
        elif self._fault == "a folder is made in two snapshots":
            half = broker._replace(folder=None, seen=database.kept)
            yield "reads what is kept for a new folder", state.with_broker(at, half)
        else:
            yield from self._opened(state, at, "makes its folder anew", self._new_folder(state, at))

    def _new_folder(self, state: State, at: int) -> Folder:
        database, seen = state.database, state.brokers[at].seen
        content = seen if isinstance(seen, Content) else database.kept
        if self._fault == "a new folder counts events from 1":
            content = content._replace(next_event=1)
        folder = Folder(database.position, database.rows[database.position].digest, content).synced()
        return folder._replace(has_own_identity=self._fault == "a folder has an identity of its own")

    def _opened(self, state: State, at: int, label: str, folder: Folder) -> Steps:
        if folder.has_own_identity:
            raise Violation("a folder has another identity than its log")
        if self._fault == "a folder drops transient messages by itself":
            folder = folder.with_frame(digest_after(folder.digest, EMPTY), EMPTY)
        rows = state.database.rows
        if folder.number >= len(rows) or rows[folder.number].digest != folder.digest:
            raise Violation("a folder is opened that is no prefix of the log")
        opened = state.brokers[at]._replace(life=Life.OPENED, folder=folder, seen=None)
        yield label, state.with_broker(at, opened)

    def _check_content(self, folder: Folder) -> None:
        if folder.content != self._contents[folder.digest]:
            raise Violation(f"a folder at row {folder.number} does not have the content of this row")

    # ---- Taking over ----

    def _take_over(self, state: State, at: int) -> Steps:
        broker, database = state.brokers[at], state.database
        last = database.last
        if self._fault == "a takeover does not lock the log":
            if broker.seen is None:
                yield "reads the last row", state.with_broker(at, broker._replace(seen=last))
                return
            assert isinstance(broker.seen, Row)
            last = broker.seen
        row = Row(last.number + 1, last.epoch + 1, digest_after(last.digest, EMPTY), EMPTY)
        if row.number != len(database.rows):
            raise Violation("a takeover fails, because another row was appended meanwhile")
        committed = self._committed(database, row)._replace(takeovers=database.takeovers + 1)
        active = broker._replace(
            life=Life.ACTIVE, epoch=row.epoch, run=committed.takeovers, batches=0, owes_row=False, seen=None
        )
        answered = state._replace(database=committed._replace(replicated=row.number))
        yield from self._follow(answered.with_broker(at, active), at)
        if not state.failures_left:
            return
        lost = state.with_failure()._replace(database=committed)
        yield "takes over, and the answer is lost", lost.with_broker(at, broker._replace(seen=None))
        if self._fault == "a takeover whose answer was lost is not repeated":
            # Before the row is committed. Another broker may commit one like it.
            taken = broker._replace(life=Life.IN_DOUBT, epoch=row.epoch, run=10 + at, batches=0, row=row)
            taken = taken._replace(folder=self._followed(database, _folder_of(broker)))
            yield "sends its takeover, and loses its connection", state.with_failure().with_broker(at, taken)

    def _follow(self, state: State, at: int) -> Steps:
        """Yield how the folder gets the rows that it lacks."""
        broker, database = state.brokers[at], state.database
        folder = _folder_of(broker)
        if folder.number + 1 < database.dropped_below:
            yield "takes over, and its folder is too old meanwhile", state.with_broker(at, _off(broker))
            return
        followed = self._followed(database, folder)
        if followed is None:
            yield "takes over, and finds a row missing or changed", self._exit(state, at, 1)
            return
        self._check_content(followed)
        yield "takes over", state.with_broker(at, broker._replace(folder=followed))

    def _followed(self, database: Database, folder: Folder) -> Folder | None:
        """Return the folder with all rows; None if a row is missing or changed."""
        chain = RowChain(LogPosition(folder.number, folder.digest))
        for number in range(folder.number + 1, len(database.rows)):
            row = database.rows[number]
            damage = database.damage if database.damage and database.damage.number == number else None
            if damage and self._fault == ("a gap" if damage.is_missing else "a changed row") + " is passed over":
                raise Violation(self._fault)
            if damage and damage.is_missing:
                continue
            payload = encoded(row.payload) + (b"changed" if damage else b"")
            if not _is_next(chain, row, payload):
                return None
            folder = folder.with_frame(row.digest, row.payload)
        return folder if folder.digest == database.last.digest else None

    # ---- Appending ----

    def _append_next(self, state: State, at: int) -> Steps:
        broker = state.brokers[at]
        folder = _folder_of(broker)
        payload = _next_payload(broker, folder)
        row = Row(folder.number + 1, broker.epoch, digest_after(folder.digest, payload), payload)
        ready = broker._replace(batches=broker.batches + 1, row=row)
        yield from self._append(state.with_broker(at, ready), at)
        if broker.late is None and state.failures_left:
            if self._fault == "the frame comes before its row":
                self._check_frame(state, row)
            lost = ready._replace(life=Life.IN_DOUBT, late=row)
            yield f"sends row {row.number}, and loses its connection", state.with_failure().with_broker(at, lost)

    def _append(self, state: State, at: int) -> Steps:
        """Yield the outcomes of an append that PostgreSQL executes."""
        broker = state.brokers[at]
        row = broker.row
        assert row is not None
        inserted = self._insert(state.database, row)
        if inserted is None:
            yield from self._not_inserted(state, at)
            return
        replicated = state._replace(database=inserted._replace(replicated=row.number))
        yield f"appends row {row.number}", self._appended(replicated, at, is_certain=True)
        if state.failures_left:
            local = state.with_failure()._replace(database=inserted)
            in_doubt = local.with_broker(at, broker._replace(life=Life.IN_DOUBT))
            yield f"appends row {row.number}, and the answer is lost", in_doubt
            is_certain = self._fault == "the warning is ignored"
            yield f"appends row {row.number} without its standby", self._appended(local, at, is_certain=is_certain)

    def _resolve(self, state: State, at: int) -> Steps:
        broker, last = state.brokers[at], state.database.last
        row = broker.row
        assert row is not None
        if self._fault == "a takeover whose answer was lost is not repeated" and row.epoch > last.epoch:
            return
        if self._fault == "a row in doubt is repeated under a new number" and last.number >= row.number:
            again = Row(last.number + 1, row.epoch, digest_after(last.digest, row.payload), row.payload)
            state = state.with_broker(at, broker._replace(row=again))
        yield from self._append(state, at)

    def _not_inserted(self, state: State, at: int) -> Steps:
        """Yield what a broker does whose row was not inserted."""
        broker = state.brokers[at]
        row = broker.row
        assert row is not None
        finding = self._finding(state.database, row, _folder_of(broker).digest)
        if finding is Finding.APPENDED:
            is_certain = self._fault == "a row that is found counts as replicated"
            yield f"finds row {row.number}", self._appended(state, at, is_certain=is_certain)
        elif finding is Finding.FENCED and self._fault == "a fenced broker appends its row after the last one":
            yield "appends elsewhere", self._append_after_last(state, row)
        elif finding is Finding.FENCED:
            yield "is fenced", self._exit(state, at, 3)
        elif self._fault == "a broker appends after the last row that PostgreSQL still has":
            yield "appends elsewhere", self._append_after_last(state, row)
        else:
            yield "finds that PostgreSQL has forgotten", self._exit(state, at, 4)

    def _finding(self, database: Database, row: Row, before: bytes) -> Finding:
        near = (database.find(row.number - 1), database.find(row.number), database.last)
        rows = [outcome.Row(*each[:3]) for each in near if each is not None]
        if self._fault == "the epoch is not compared":
            rows = [each._replace(epoch=row.epoch) for each in rows]
        return find(outcome.Row(*row[:3]), before, rows)

    def _append_after_last(self, state: State, row: Row) -> State:
        last = state.database.last
        if row.epoch == last.epoch:
            raise Violation("PostgreSQL has forgotten rows, and this is passed over")
        again = Row(last.number + 1, row.epoch, digest_after(last.digest, row.payload), row.payload)
        return state._replace(database=self._committed(state.database, again))

    def _appended(self, state: State, at: int, *, is_certain: bool) -> State:
        """Return the state after the row has its frame, and is confirmed if it may be."""
        broker = state.brokers[at]
        row = broker.row
        assert row is not None
        self._check_frame(state, row)
        folder = _folder_of(broker).with_frame(row.digest, row.payload)
        self._check_content(folder)
        if is_certain:
            state = _confirm(state, row.number)
        after = broker._replace(life=Life.ACTIVE, folder=folder, row=None, owes_row=not is_certain)
        return state.with_broker(at, after)

    def _check_frame(self, state: State, row: Row) -> None:
        rows = state.database.rows
        if row.number >= len(rows) or rows[row.number].digest != row.digest:
            raise Violation(f"a folder has frame {row.number}, and the log has no such row")

    # ---- Chores ----

    def _do_chore(self, state: State, at: int) -> Steps:
        broker = state.brokers[at]
        if broker.compaction is not None:
            yield f"compacts up to row {broker.compaction.target}", self._apply_compaction(state, at)
        elif state.chores_left:
            state = state._replace(chores_left=state.chores_left - 1)
            yield from self._read_to_compact(state, at)
            yield from self._drop_partitions(state, at)
            yield from self._sync(state, at)

    def _read_to_compact(self, state: State, at: int) -> Steps:
        """Yield the first half of a compaction: rows and position, in one snapshot."""
        broker, database = state.brokers[at], state.database
        first = database.position
        if self._fault == "rows are read before the position":
            if not isinstance(broker.seen, int):
                read = broker._replace(seen=database.position)
                yield "reads rows to compact", state.with_broker(at, read)._replace(chores_left=state.chores_left + 1)
                return
            first = broker.seen
        target = database.last.number
        if target == database.position:
            return
        if database.damage is not None and first < database.damage.number <= target:
            if self._fault == "a changed row is compacted":
                raise Violation(f"row {database.damage.number} is compacted, though it is missing or changed")
            yield "finds a row missing or changed", self._exit(state, at, 1)
            return
        payloads = tuple(row.payload for row in database.rows[first + 1 : target + 1])
        compaction = Compaction(database.position, target, database.kept.compacted(payloads))
        yield "reads rows to compact", state.with_broker(at, broker._replace(compaction=compaction, seen=None))

    def _apply_compaction(self, state: State, at: int) -> State:
        broker, database = state.brokers[at], state.database
        compaction = broker.compaction
        assert compaction is not None
        after = state.with_broker(at, broker._replace(compaction=None))
        is_unmoved = database.position == compaction.expected
        if not (is_unmoved or self._fault == "the position moves without a comparison"):
            return after
        if compaction.target < database.position:
            raise Violation("the position moves back")
        if compaction.content != self._contents[database.rows[compaction.target].digest]:
            raise Violation(f"what is kept is not what the rows up to {compaction.target} add up to")
        moved = database._replace(position=compaction.target, kept=compaction.content, replicated=database.last.number)
        return after._replace(database=moved)

    def _drop_partitions(self, state: State, at: int) -> Steps:
        """Yield the drop of compacted rows. A broker drops whole partitions, and other rows when space is short."""
        database = state.database
        last = database.last.number
        is_above = self._fault == "a partition above the position is dropped"
        end = (last if is_above else database.position) + 1
        if self._fault != "the newest row is dropped":
            end = min(end, last)
        if end <= database.dropped_below:
            return
        if end > database.position + 1:
            raise Violation("a row that is not compacted is dropped")
        if end > last:
            raise Violation("the newest row is dropped")
        dropped = database._replace(dropped_below=end, replicated=last)
        yield f"drops the rows below {end}", state._replace(database=dropped)

    def _sync(self, state: State, at: int) -> Steps:
        """Yield the move of the journal into the checkpoint."""
        broker = state.brokers[at]
        folder = _folder_of(broker)
        if folder.synced_number < folder.number:
            synced = folder.synced()
            if self._fault == "the checkpoint is ahead of the journal":
                synced = folder._replace(synced_content=folder.content)
            yield "moves its journal into the checkpoint", state.with_broker(at, broker._replace(folder=synced))


def _cut(state: State, cut: int) -> State:
    """Return the state after PostgreSQL has lost the rows after row `cut`."""
    database = state.database
    damage = database.damage
    shorter = database._replace(
        rows=database.rows[: cut + 1],
        replicated=min(database.replicated, cut),
        dropped_below=min(database.dropped_below, cut),
        damage=damage if damage and damage.number <= cut else None,
        has_forgotten=True,
    )
    brokers = tuple(each._replace(late=None, compaction=None) for each in state.brokers)
    return state._replace(database=shorter, brokers=brokers, confirmed=min(state.confirmed, cut))


def _confirm(state: State, number: int) -> State:
    if number > state.database.replicated:
        raise Violation(f"row {number} is confirmed, and its standby may not have it")
    return state._replace(confirmed=max(state.confirmed, number))


def _relation(database: Database, folder: Folder) -> Relation | None:
    row = database.find(folder.number)
    compacted = LogPosition(database.position, database.rows[database.position].digest)
    return relate(LogPosition(folder.number, folder.digest), row and row.digest, compacted, database.last.number)


def _is_next(chain: RowChain, row: Row, payload: bytes) -> bool:
    try:
        return chain.add(row.number, 0, row.digest, payload) is not None
    except ValueError:
        return False


def _next_payload(broker: Broker, folder: Folder) -> Payload:
    """Return the next batch of a broker: it removes the oldest of two messages, else adds a message."""
    if broker.owes_row:
        return EMPTY
    messages, event = folder.content
    if len(messages) >= 2:
        return Payload(removed=messages[0], event=event)
    return Payload(put=100 * broker.run + broker.batches + 1, event=event)


def _folder_of(broker: Broker) -> Folder:
    assert broker.folder is not None
    return broker.folder


def _off(broker: Broker) -> Broker:
    """Return the broker without all that ends with its process."""
    return Broker(broker.steps_left, folder=broker.folder, late=broker.late, compaction=broker.compaction)
