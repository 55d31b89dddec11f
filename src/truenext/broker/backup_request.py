"""Control request `backup`: starts a backup, tells how far it is, or stops it."""

from __future__ import annotations

from enum import Enum

import msgspec

from truenext.broker.backups import BackupOptions, BackupReport, Backups
from truenext.errors import Code, ConfigurationError, RemoteProtocolError
from truenext.model.commands import decode_client_json

VERB = "backup"


class BackupAction(Enum):
    """Action of a request `backup`."""

    START = "start"
    """Start a backup."""
    SHOW = "show"
    """Tell how far the backup is that runs, or how the last one has ended."""
    STOP = "stop"
    """Stop the backup that runs."""


class BackupRequest(BackupOptions, forbid_unknown_fields=True):
    """Body of the request, in JSON. An empty body stands for one without fields."""

    action: BackupAction = BackupAction.START
    """Action: `start`, `show` or `stop`."""


def run_backup_request(backups: Backups, body: bytes) -> bytes:
    """Start a backup, tell how far it is, or stop it.

    Raises: RemoteProtocolError if the body is invalid, or the broker refuses
    """
    request = decode_client_json(VERB, body, BackupRequest) if body else BackupRequest()
    try:
        return msgspec.json.encode(_run(backups, request))
    except ConfigurationError as error:
        raise RemoteProtocolError(str(error), Code.CONTROL_REQUEST) from error


def is_poll(body: bytes) -> bool:
    """Return whether a valid body only asks how far the backup is."""
    return bool(body) and decode_client_json(VERB, body, BackupRequest).action is BackupAction.SHOW


def _run(backups: Backups, request: BackupRequest) -> BackupReport:
    match request.action:
        case BackupAction.START:
            return backups.start(request)
        case BackupAction.STOP:
            return backups.stop()
        case BackupAction.SHOW:
            return backups.report()
