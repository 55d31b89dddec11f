"""Lookout: looks of a broker that stands by at the log, and the decision after each of them (standing_by.py)."""

from __future__ import annotations

import time

from truenext.clock import boottime
from truenext.store.checkpoint_format import NUMBER
from truenext.store.log import MemberSettings
from truenext.store.postgresql.connection import Connection
from truenext.store.postgresql.kept import ORIGIN, ActiveBroker, decode_active
from truenext.store.postgresql.layout import statement
from truenext.store.postgresql.log_rows import WAITS_FOR_STANDBY, relation_parameter
from truenext.store.postgresql.member import place_of
from truenext.store.postgresql.outcome import Row
from truenext.store.postgresql.standing_by import (
    FREE_S,
    LOOK_S,
    Decision,
    Look,
    Origin,
    Stop,
    Watch,
    decide,
    first_watch,
    next_watch,
)
from truenext.store.postgresql.takeover import IS_MARKED, empty_log_error, hint_parameters


class Lookout:
    """Looks of one broker at the log in `schema`."""

    def __init__(self, schema: str, member: MemberSettings) -> None:
        self._schema = schema
        self._member = member
        self._watch: Watch | None = None
        self._next_at = 0.0
        self._first_ended: float | None = None
        """End of the first look."""
        self._waits_since: float | None = None
        """Begin of the first of the last looks that have all shown the active broker and a wait for the standby."""
        self.last_look: Look
        """Set by `look`."""
        self.origin: Origin | None = None
        """Origin that the last takeover has named, as of the last look; None if none has."""
        self.identity = ""
        """Identity of the log, as of the last look."""
        self.active = ActiveBroker()
        """Last active broker, as of the last look."""

    def wait(self) -> None:
        """Wait for the time of the next look."""
        time.sleep(max(0.0, self._next_at - boottime()))
        self._next_at = boottime() + LOOK_S

    def look(self, connection: Connection) -> Look:
        """Look at the log. Raises: StoreError if the log is empty; psycopg.Error"""
        began = boottime()
        found = connection.execute(
            statement(
                self._schema,
                f"""
                SELECT number, epoch, digest, EXISTS ({IS_MARKED}),
                    (SELECT value FROM {{fact}} WHERE kind = 'stop'),
                    (SELECT value FROM {{fact}} WHERE kind = 'active'),
                    (SELECT value FROM {{fact}} WHERE kind = 'origin'),
                    (SELECT value FROM {{fact}} WHERE kind = 'identity'),
                    EXISTS ({WAITS_FOR_STANDBY})
                FROM {{log}} ORDER BY number DESC, part DESC LIMIT 1
                """,
            ),
            (*hint_parameters(self._schema), relation_parameter(self._schema)),
            binary=True,
        ).fetchone()
        if found is None:
            raise empty_log_error(self._schema)
        number, epoch, digest, is_marked, stop, active, origin, identity, waits = found
        self.identity = identity.decode()
        self.active = decode_active(active)
        self.origin = None if origin is None else Origin(*ORIGIN.unpack(origin))
        self.last_look = look = Look(
            began=began,
            ended=boottime(),
            session=connection.session,
            last=Row(number, epoch, digest),
            is_marked=is_marked,
            stop=None if stop is None else _decode_stop(stop),
            active=self.active.place,
            failover_after_s=self.active.failover_after_ms / 1000,
            is_starting=number <= self.active.takeover_number + 1,
            waits_for_standby=waits,
        )
        self._first_ended = self._first_ended or look.ended
        is_held_back = look.is_marked and look.waits_for_standby
        self._waits_since = (self._waits_since or look.began) if is_held_back else None
        self._watch = first_watch(look) if self._watch is None else next_watch(self._watch, look)
        return look

    @property
    def waited_s(self) -> float:
        """Seconds for which no time has counted, because the active broker's session waits for the standby; 0.0 if it
        does not."""
        return 0.0 if self._waits_since is None else self.last_look.ended - self._waits_since

    @property
    def is_certain_to_stand_by(self) -> bool:
        """False while this broker may be about to take over because no other one is active."""
        assert self._first_ended is not None, "there was a look"
        return self.last_look.is_marked or self.last_look.began >= self._first_ended + FREE_S

    def decide(self, *, needs_repair: bool) -> Decision:
        """Return what the broker does after the last look. `standing_by.decide` describes `needs_repair`."""
        assert self._watch is not None, "there was a look"
        return decide(
            self._watch,
            self.last_look,
            name=self._member.name,
            place=place_of(self._member),
            failover_after_s=self._member.failover_after_s,
            needs_repair=needs_repair,
        )


def _decode_stop(value: bytes) -> Stop:
    return Stop(NUMBER.unpack_from(value)[0], value[NUMBER.size :].decode())
