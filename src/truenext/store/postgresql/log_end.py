"""LogEnd: what a broker knows of the end of its log, and what its folder has followed.

The folder's file `origin` has the newest origin of the log that the folder has followed. A former primary that comes
back has an earlier timeline, and only a folder can know that. The file stays if the rest of the folder is set aside:
what the folder has seen is still true.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from math import inf
from pathlib import Path

import psycopg

from truenext.errors import ConfigurationError, StoreBehindError
from truenext.store.folder import sync_folder
from truenext.store.log import Frames, LogPosition, MemberSettings
from truenext.store.postgresql import kept, repair
from truenext.store.postgresql.connection import Connection
from truenext.store.postgresql.forgotten import End, Fault, former_primary_fault, origin_fault, went_other_way
from truenext.store.postgresql.member import read_members
from truenext.store.postgresql.outcome import Row
from truenext.store.postgresql.standing_by import Origin, silent_from

logger = logging.getLogger(__name__)


class LogEnd:
    """End of a log, as one broker knows it. Each room of the log that sees or makes the last row notes that here."""

    def __init__(self, schema: str, member: MemberSettings) -> None:
        self.schema = schema
        self.member = member
        self.identity = ""
        self.epoch = 0
        self.number = 0
        self.origin: Origin | None = None
        """Origin that is named in the log."""
        self.was_replicated = False
        """Setting `is_replicated` of the broker that has named `origin`."""
        self.followed: Origin | None = None
        """Newest origin that the folder has followed."""
        self.frames: Frames
        self.silent_from = inf
        """Time from which the broker is silent; see `Log`."""

    def identify(self, identity: str) -> None:
        """Note the identity of the log, and read the origin that the folder has followed in it."""
        self.identity = identity
        self.followed = _read_origin(self.member.folder, identity)

    def note(self, last: Row, origin: Origin | None) -> None:
        """Note the last row of the log, and the origin that is named there."""
        self.epoch, self.number, self.origin = last.epoch, last.number, origin

    def confirm(self, began: float) -> None:
        """Note that the broker's last confirmed append, or its takeover, began at `began`."""
        self.silent_from = silent_from(began, self.member.failover_after_s)

    def follow(self, origin: Origin | None) -> None:
        """Note the origin that is named in the log, unless the folder has followed a newer one."""
        known = self.followed
        if origin is None or (known is not None and known.system == origin.system and known >= origin):
            return
        self.followed = origin
        _write_origin(self.member.folder, self.identity, origin)

    def check_is_no_copy(self, connection: Connection) -> None:
        """Raises: ConfigurationError if the database is a copy of the one that the last takeover has named"""
        now, named = connection.origin, self.origin
        if now is not None and named is not None and now.system != named.system:
            raise ConfigurationError(
                f"the database at {connection.where} is a copy: its system identifier is {now.system}, and the log in "
                f"schema {self.schema!r} was written in {named.system}; name the original in --store, or make the "
                f"copy a log of its own: `truenext store adopt URL --schema {self.schema}`"
            )

    def check_is_no_former_primary(self, connection: Connection, last: int) -> None:
        """Raises: StoreForgottenError if the folder has followed a later timeline"""
        fault = former_primary_fault(self.followed, connection.origin, last)
        if fault is not None and self.followed is not None:
            with suppress(psycopg.errors.DiskFull):
                kept.write_later_origin(connection, self.schema, self.followed)
            raise repair.forgotten_error(self.schema, fault, read_members(connection, self.schema))

    def origin_fault(self, connection: Connection, last: Row) -> Fault | None:
        return former_primary_fault(self.followed, connection.origin, last.number) or origin_fault(
            self.origin, connection.origin, last, is_replicated=self.was_replicated
        )

    def check_identity(self, found: str) -> None:
        """Raises: StoreBehindError if the log has got another identity than the folder"""
        if found != self.identity:
            raise self.behind_error("the log has got another identity")

    def behind_error(self, problem: str) -> StoreBehindError:
        return StoreBehindError(f"the folder cannot follow the log in schema {self.schema!r}: {problem}")


def is_other_way(last: Row, position: LogPosition, frames: Frames) -> bool:
    """Return whether the last row of the log is not in the folder that ends behind it, at `position`."""
    end = End(last, position, frames.oldest_frame)
    # A generator: nothing is read if the folder no longer has the rows.
    return went_other_way(end, frames.frames_after(last.number))


def _read_origin(folder: Path, identity: str) -> Origin | None:
    """Return the origin that the folder knows of the log with this identity; None if it knows none."""
    try:
        known, system, timeline = (folder / "origin").read_text().split()
    except (OSError, ValueError):
        return None
    return Origin(int(system), int(timeline)) if known == identity else None


def _write_origin(folder: Path, identity: str, origin: Origin) -> None:
    """Write the origin, durably. A disk that is full or fails is no reason to end the broker."""
    new = folder / "origin-new"
    try:
        with new.open("w") as file:
            file.write(f"{identity} {origin.system} {origin.timeline}\n")
            file.flush()
            os.fsync(file.fileno())
        new.rename(folder / "origin")
        sync_folder(folder)
    except OSError as error:
        logger.warning("cannot note the timeline of the database", extra={"folder": str(folder), "reason": str(error)})
