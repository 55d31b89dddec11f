"""Place of a log in PostgreSQL: the URL of a database, and the name of a schema; and the name of a broker there.

A URL is as libpq reads it, postgresql://USER@HOST:PORT/DATABASE?OPTION=VALUE, but without a password. A password in a
URL could be read in the list of processes, and in logs. libpq finds it elsewhere: in a passfile (~/.pgpass, or the file
that PGPASSFILE names), or in a service file. So a URL that has passed `fault_of_database_url` may be shown.

No fault repeats a part of the URL: a password in the wrong place must not be shown, either.
"""

import re
from urllib.parse import unquote

SCHEMES = ("postgresql://", "postgres://")

AWAITED_TEXTS = {"database": "PostgreSQL", "standby": "the standby of PostgreSQL", "space": "space in PostgreSQL"}
"""Words for what a broker with a log waits for, by the cause that `status` names."""

SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
MEMBER_LENGTH_MAX = 63
_MEMBER_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{MEMBER_LENGTH_MAX - 1}}}")
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:[0-9]*)?")
"""Host and port, as a name, an IPv4 address, or an IPv6 address in brackets."""

_SECRETS = {"password", "sslpassword", "scram_client_key", "scram_server_key", "oauth_client_secret"}
"""Options of libpq whose values are secrets."""

_HAS_PASSWORD = (
    "must have no password: put the password into a passfile (~/.pgpass, or the file that PGPASSFILE names) or into a "
    "service file"
)


def fault_of_database_url(url: str) -> str | None:
    """Return why a text cannot be the URL of a database; None if it can. The fault continues a sentence whose subject
    is the URL.

    >>> fault_of_database_url("postgresql://truenext@db.example/main")
    >>> fault_of_database_url("mysql://db.example/main")
    'must begin with postgresql:// or postgres://'
    """
    scheme = next((each for each in SCHEMES if url.startswith(each)), None)
    if scheme is None:
        return "must begin with postgresql:// or postgres://"
    rest = url.removeprefix(scheme)
    # As libpq: a user may have each character but a slash and @.
    user, has_user, _ = rest.partition("/")[0].partition("@")
    place, _, options = rest.removeprefix(f"{user}@" if has_user else "").partition("?")
    names = {unquote(each.partition("=")[0]).strip().lower() for each in options.split("&")}
    if (has_user and ":" in user) or "@" in place or names & _SECRETS or "password=" in unquote(place):
        return _HAS_PASSWORD
    if not url.isprintable() or " " in url:
        return "must have no blanks and no control characters: write %20 for a blank"
    if not all(_HOST.fullmatch(each) for each in place.partition("/")[0].split(",")):
        return "must have a number as port: postgresql://USER@HOST:PORT/DATABASE"
    return None


def fault_of_schema(name: str) -> str | None:
    """Return why a text cannot be the name of a schema; None if it can. The fault continues a sentence whose subject is
    the name.

    >>> fault_of_schema("main")
    >>> fault_of_schema("Main")
    'must have 1 to 63 characters: a to z, 0 to 9 and _, no digit first'
    """
    if not SCHEMA_NAME.fullmatch(name):
        return "must have 1 to 63 characters: a to z, 0 to 9 and _, no digit first"
    if name.startswith("pg_"):
        return "must not begin with pg_: PostgreSQL reserves such names"
    return None


def fault_of_member(name: str) -> str | None:
    """Return why a text cannot be the name of a broker among those of its log; None if it can. The fault continues a
    sentence whose subject is the name.

    >>> fault_of_member("host1.example")
    >>> fault_of_member("host 1")
    'must have 1 to 63 characters: letters, digits, _, . and -, the last two not first'
    """
    if not _MEMBER_NAME.fullmatch(name):
        return "must have 1 to 63 characters: letters, digits, _, . and -, the last two not first"
    return None
