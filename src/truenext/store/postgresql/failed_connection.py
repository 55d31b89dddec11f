"""Failed connections: one sentence for the texts of libpq and psycopg, which repeat each host and quote options.

PostgreSQL's SQLSTATE is not known before a connection is open, so the English texts tell the cause. A text in another
language counts as a cause that may pass by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

import psycopg
from psycopg import pq

TEXT_LENGTH_MAX = 300
_TARGET_LENGTH_MAX = 140
_ADVICE = ": start the server, or correct the URL"
"""Advice for a server that has not answered."""
_STANDBY_ADVICE = ": start the primary, or promote the standby"


class NoConnectionError(psycopg.OperationalError):
    """No connection could be opened. The text has no value of the URL but hosts, ports, database and user."""

    is_lasting = False
    """True if the error stays until a setting is changed, here or on the server."""


def connection_error(error: psycopg.Error, parameters: Mapping[str, str]) -> NoConnectionError:
    """Return the error for a connection with `parameters` of libpq that failed with `error`."""
    target = _Target(parameters)
    findings = list(dict.fromkeys(_findings(str(error), target)))
    reasons = "; ".join(finding.text for finding in findings)
    text = f"cannot connect to PostgreSQL at {target.text}: {reasons}"
    is_lasting = all(finding.is_lasting for finding in findings)
    advice = "" if is_lasting or "FATAL:" in str(error) else _ADVICE
    if any(finding.is_standby for finding in findings):
        advice = _STANDBY_ADVICE
    found = NoConnectionError(_cut(text, TEXT_LENGTH_MAX - len(advice)) + advice)
    found.is_lasting = is_lasting
    return found


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


class _Finding(NamedTuple):
    text: str
    is_lasting: bool
    is_standby: bool = False


class _Target:
    """Hosts, database and user of a connection."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        defaults = {
            each.keyword.decode(): each.val.decode() for each in pq.Conninfo.get_defaults() if each.val is not None
        }
        values = defaults | dict(parameters)
        self.user = values.get("user", "")
        self.database = values.get("dbname", self.user)
        hosts = (values.get("host") or values.get("hostaddr") or "localhost").split(",")
        ports = values.get("port", "").split(",")
        self.servers = [
            f"{host}:{port or '5432'}" for host, port in zip_longest(hosts, ports[: len(hosts)], fillvalue=ports[-1])
        ]

    @property
    def text(self) -> str:
        servers = _cut(",".join(self.servers), _TARGET_LENGTH_MAX)
        return _cut(f"{servers} (database {self.database}, user {self.user})", _TARGET_LENGTH_MAX + 60)

    @property
    def passfile_key(self) -> str:
        """Begin of the line of the passfile that libpq looks for."""
        server = self.servers[0] if len(self.servers) == 1 else "HOST:PORT"
        return f"{server}:{self.database}:{self.user}"

    @property
    def for_each(self) -> str:
        return "" if len(self.servers) == 1 else " for each host"


_ALL_FAILURES = "All failures were:\n"
_ATTEMPT = re.compile(r"- host: '(?P<host>.*?)', port: '(?P<port>\w+)'")
_PREFIX = re.compile(
    r"^(- host: ('.*?'|None), port: ('.*?'|None), hostaddr: ('.*?'|None): )?(connection failed: |connection is bad: )?"
    r"(connection to server (at|on socket) \"[^\"]*\"( \([^)]*\))?(, port \w+)? failed: )?"
    r"(failed to resolve host '[^']*': (\[Errno -?\d+\] )?)?(FATAL:\s+)?"
)
_HINT = re.compile(r"^(\t|Either provide|password retrieved from|DETAIL:|HINT:)")


def _findings(text: str, target: _Target) -> Iterator[_Finding]:
    for line in text.partition(_ALL_FAILURES)[2].splitlines() or text.splitlines():
        if "session is read-only" in line:
            yield _Finding(f"{_server_of(line, target)} is a standby, or read-only", is_lasting=False, is_standby=True)
        elif line.strip() and not _HINT.match(line):
            yield _finding(_PREFIX.sub("", line).strip(), target)


def _server_of(line: str, target: _Target) -> str:
    """Return host and port of a line that tells of an attempt to connect."""
    found = _ATTEMPT.match(line)
    return f"{found['host']}:{found['port']}" if found else target.servers[0]


_PASSFILE = "the passfile (PGPASSFILE, or ~/.pgpass)"
_LASTING = {
    r"no password supplied": (
        f"there is no password: add a line {{key}}:PASSWORD{{for_each}} to {_PASSFILE}, which only its owner may read"
    ),
    r"password authentication failed": f"the password is wrong: correct the line for {{key}} in {_PASSFILE}",
    r"authentication failed for user": (
        "the server does not let this user in: change pg_hba.conf, or name another user"
    ),
    r"no pg_hba\.conf entry": "pg_hba.conf has no entry for this database, user and client: add one",
    r"role .* is not permitted to log in": "the user may not log in: ALTER ROLE {user} LOGIN",
    r"role .* does not exist": "the user does not exist: create it (createuser {user}), or name another",
    r"database .* does not exist": "the database does not exist: create it (createdb {database}), or name another",
    r"permission denied for database": "the user may not connect to the database: GRANT CONNECT ON DATABASE",
    r"definition of service|service file": (
        "the service is not defined: write it into the service file (PGSERVICEFILE, or ~/.pg_service.conf)"
    ),
    r"invalid integer value .* for connection option \"(?P<option>\w+)\"": "the option {option} has an invalid value",
    r"invalid (?P<option>\w+) (value|number)": "the option {option} has an invalid value",
    r"bad value for (?P<option>\w+)": "the option {option} has an invalid value",
    r"certificate|private key|SSL was required|SSL error: (?!unexpected eof)": (
        "the certificates do not fit ({reason}): correct sslmode, sslrootcert, sslcert or sslkey"
    ),
}
"""Causes that stay until a setting is changed, by a pattern of libpq's text."""


def _finding(reason: str, target: _Target) -> _Finding:
    unquoted = _without_quotes(reason)
    for pattern, text in _LASTING.items():
        if found := re.search(pattern, reason):
            fields = {"reason": unquoted, "key": target.passfile_key, "for_each": target.for_each}
            names = {"user": target.user, "database": target.database}
            return _Finding(text.format(**fields, **names, **found.groupdict()), is_lasting=True)
    return _Finding(unquoted, is_lasting=False)


def _without_quotes(text: str) -> str:
    """Return the text without its quoted values, which may be those of options."""
    return re.sub(r"\s*(\"[^\"]*\"|'[^']*')", "", text)
