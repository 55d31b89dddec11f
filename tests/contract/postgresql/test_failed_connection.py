"""Tests of the errors of connections that PostgreSQL refuses, or that cannot be opened at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.contract.postgresql.log_writer import open_log, url_of
from tests.stages.postgres import PostgresServer
from truenext.errors import ConfigurationError, StoreError
from truenext.store.postgresql.connection import Connection, parse_url
from truenext.store.postgresql.failed_connection import NoConnectionError, connection_error
from truenext.store.postgresql.initialization import connected

SECRET = "s3cret"

REFUSED = (
    'connection failed: connection to server at "{ip}", port {port} failed: Connection refused\n'
    "\tIs the server running on that host and accepting TCP/IP connections?"
)
FATAL = 'connection failed: connection to server at "10.0.0.1", port 5432 failed: FATAL:  {text}'


def error_of(text: str, url: str = "postgresql://app@db1:5432/shop") -> NoConnectionError:
    return connection_error(psycopg.OperationalError(text), parse_url(url))


def all_failures(*texts: str) -> str:
    """Return the text of psycopg for the hosts a, b, ..., which begins with the last failure."""
    lines = [
        f"- host: {host!r}, port: '5432', hostaddr: '10.0.0.1': {text}"
        for host, text in zip("abc", texts, strict=False)
    ]
    return "\n".join([texts[-1], "Multiple connection attempts failed. All failures were:", *lines])


# ---- Texts ----


def test_error_names_each_host_and_each_reason_once() -> None:
    text = all_failures(*(REFUSED.format(ip=f"10.0.0.{number}", port=5432) for number in (1, 2)))
    error = error_of(text, "postgresql://app@a,b/shop")
    assert str(error) == (
        "cannot connect to PostgreSQL at a:5432,b:5432 (database shop, user app): Connection refused"
        ": start the server, or correct the URL"
    )
    assert not error.is_lasting


def test_error_of_a_standby_names_it_and_says_what_to_do() -> None:
    read_only = 'connection to server at "10.0.0.1", port 5432 failed: session is read-only'
    error = error_of(all_failures(REFUSED.format(ip="10.0.0.1", port=5432), read_only), "postgresql://app@a,b/shop")
    assert str(error) == (
        "cannot connect to PostgreSQL at a:5432,b:5432 (database shop, user app): Connection refused; b:5432 is a "
        "standby, or read-only: start the primary, or promote the standby"
    )
    assert not error.is_lasting
    assert "db1:5432 is a standby" in str(error_of(read_only))


@pytest.mark.parametrize("hosts", ["a", "a,b"])
def test_error_of_sockets_has_one_reason_and_the_next_step(hosts: str, tmp_path: Path) -> None:
    folders = ",".join(str(tmp_path / each) for each in hosts.split(","))
    with pytest.raises(NoConnectionError) as found:
        Connection.open(parse_url(f"postgresql://app@/shop?host={folders}"))
    servers = ",".join(f"{each}:5432" for each in folders.split(","))
    assert str(found.value) == (
        f"cannot connect to PostgreSQL at {servers} (database shop, user app): No such file or directory"
        ": start the server, or correct the URL"
    )


def test_error_of_two_hosts_is_lasting_only_if_both_reasons_are() -> None:
    wrong = FATAL.format(text='password authentication failed for user "app"')
    url = "postgresql://app@a,b/shop"
    assert error_of(all_failures(wrong, wrong), url).is_lasting
    assert not error_of(all_failures(wrong, REFUSED.format(ip="10.0.0.2", port=5432)), url).is_lasting


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            FATAL.format(text='password authentication failed for user "app"'),
            "the password is wrong: correct the line for db1:5432:shop:app in the passfile (PGPASSFILE, or ~/.pgpass)",
        ),
        (
            'connection to server at "10.0.0.1", port 5432 failed: fe_sendauth: no password supplied',
            "there is no password: add a line db1:5432:shop:app:PASSWORD to the passfile (PGPASSFILE, or ~/.pgpass), "
            "which only its owner may read",
        ),
        (FATAL.format(text='Peer authentication failed for user "app"'), "the server does not let this user in"),
        (
            FATAL.format(text='no pg_hba.conf entry for host "10.0.0.9", user "app", database "shop", no encryption'),
            "pg_hba.conf has no entry",
        ),
        (FATAL.format(text='role "app" does not exist'), "the user does not exist: create it (createuser app)"),
        (FATAL.format(text='database "shop" does not exist'), "the database does not exist: create it (createdb shop)"),
        (
            FATAL.format(text='permission denied for database "shop"\nDETAIL:  User does not have CONNECT privilege.'),
            "the user may not connect to the database",
        ),
        (f'connection is bad: definition of service "{SECRET}" not found', "the service is not defined"),
        (f'connection is bad: service file "/{SECRET}" not found', "the service is not defined"),
        (f'connection is bad: invalid sslmode value: "{SECRET}"', "the option sslmode has an invalid value"),
        (f"bad value for connect_timeout: '{SECRET}'", "the option connect_timeout has an invalid value"),
        (f'connection is bad: invalid port number: "{SECRET}"', "the option port has an invalid value"),
        (
            f'connection is bad: invalid integer value "{SECRET}" for connection option "keepalives"',
            "the option keepalives has an invalid value",
        ),
        (
            f'connection to server at "10.0.0.1", port 5432 failed: root certificate file "/{SECRET}" does not exist\n'
            "Either provide the file, use the system's trusted roots with sslrootcert=system, or change sslmode to "
            "disable server certificate verification.",
            "the certificates do not fit (root certificate file does not exist): correct sslmode",
        ),
        (
            'connection to server at "10.0.0.1", port 5432 failed: SSL error: certificate verify failed',
            "the certificates do not fit (SSL error: certificate verify failed)",
        ),
        (
            'connection to server at "10.0.0.1", port 5432 failed: server does not support SSL, but SSL was required',
            "the certificates do not fit (server does not support SSL, but SSL was required)",
        ),
    ],
)
def test_error_that_settings_must_mend_says_so_without_their_values(text: str, expected: str) -> None:
    error = error_of(text)
    assert error.is_lasting
    assert f"(database shop, user app): {expected}" in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) <= 300
    assert SECRET not in str(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FATAL.format(text="the database system is starting up"), "the database system is starting up"),
        (FATAL.format(text="sorry, too many clients already"), "sorry, too many clients already"),
        ("failed to resolve host 'db1': [Errno -2] Name or service not known", "Name or service not known"),
        ("connection timeout expired", "connection timeout expired"),
        (
            'connection to server at "10.0.0.1", port 5432 failed: SSL SYSCALL error: EOF detected',
            "SSL SYSCALL error: EOF detected",
        ),
        (f"connection is bad: unknown \"{SECRET}\" and '{SECRET}' are bad", "unknown and are bad"),
    ],
)
def test_error_that_may_pass_is_not_lasting(text: str, expected: str) -> None:
    error = error_of(text)
    assert not error.is_lasting
    advice = "" if "FATAL" in text else ": start the server, or correct the URL"
    assert str(error) == f"cannot connect to PostgreSQL at db1:5432 (database shop, user app): {expected}{advice}"


def test_error_with_many_hosts_and_a_long_reason_is_short() -> None:
    url = f"postgresql://app@{','.join(f'database{number}.example' for number in range(40))}/shop"
    error = error_of(FATAL.format(text="x" * 1000), url)
    assert len(str(error)) <= 300
    assert "xxx" in str(error)


def test_error_of_several_hosts_without_a_password_asks_for_a_line_for_each() -> None:
    text = 'connection to server at "10.0.0.1", port 5432 failed: fe_sendauth: no password supplied'
    error = error_of(all_failures(text, text), "postgresql://app@a,b/shop")
    assert "add a line HOST:PORT:shop:app:PASSWORD for each host to the passfile" in str(error)


def test_error_names_what_the_environment_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGHOST": "db7", "PGPORT": "5433", "PGUSER": "ada", "PGDATABASE": "shop"}.items():
        monkeypatch.setenv(name, value)
    error = error_of("connection timeout expired", "postgresql://")
    assert "at db7:5433 (database shop, user ada)" in str(error)


# ---- URLs ----


def test_url_with_an_unknown_option_is_refused_with_its_name_alone() -> None:
    with pytest.raises(ConfigurationError, match='no option "sslmod"') as found:
        parse_url(f"postgresql://host/shop?sslmod={SECRET}")
    assert SECRET not in str(found.value)


@pytest.mark.parametrize("url", ["postgresql://user:12/ss?word=x@host/shop", "postgresql://host/shop?password"])
def test_url_with_a_fault_that_may_be_of_a_password_is_refused_without_its_text(url: str) -> None:
    with pytest.raises(ConfigurationError) as found:
        parse_url(url)
    assert "word=" not in str(found.value) and '"word"' not in str(found.value)


# ---- Servers ----


@pytest.fixture
def role_with_password(own_log_server: PostgresServer) -> str:
    """A role that must log in with its password, `right`."""
    with own_log_server.connect() as admin:
        admin.execute("CREATE ROLE app LOGIN PASSWORD 'right'")
        file = own_log_server.folder / "data" / "pg_hba.conf"
        file.write_text(f"local all app scram-sha-256\n{file.read_text()}")
        admin.execute("SELECT pg_reload_conf()")
    return "app"


def wait_until_password_is_needed(url: str) -> None:
    for _ in range(1000):
        try:
            Connection.open(parse_url(url)).close()
        except psycopg.Error:
            return


@pytest.mark.parametrize(("password", "match"), [("wrong", "the password is wrong"), ("", "there is no password")])
def test_opening_with_a_wrong_password_or_without_one_is_a_fault_of_the_configuration(
    own_log_server: PostgresServer,
    role_with_password: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    password: str,
    match: str,
) -> None:
    passfile = tmp_path / "passfile"
    passfile.touch(mode=0o600)
    passfile.write_text(f"*:*:*:{role_with_password}:{password}\n" if password else "")
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    url = url_of(own_log_server).replace("postgres@", f"{role_with_password}@")
    wait_until_password_is_needed(url)
    with pytest.raises(ConfigurationError, match=match):
        open_log(url)
    with pytest.raises(ConfigurationError, match=match), connected(url):
        pass


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (("/postgres?", "/missing?"), r"the database does not exist: create it \(createdb missing\)"),
        (("postgres@", "missing@"), "the user does not exist"),
        (("?host", f"?service={SECRET}&host"), "the service is not defined"),
    ],
)
def test_opening_with_a_wrong_name_is_a_fault_of_the_configuration(
    log_server: PostgresServer, schema: str, change: tuple[str, str], match: str
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        open_log(url_of(log_server).replace(*change), schema)


@contextmanager
def open_listener() -> Iterator[int]:
    """Yield the port of a server that agrees to TLS, as PostgreSQL does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(8)
                connection.sendall(b"S")
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_opening_a_server_without_certificates_that_must_be_verified_is_a_fault_of_the_configuration() -> None:
    """libpq looks for the file before it sends anything, but after it has connected."""
    with open_listener() as port, pytest.raises(ConfigurationError, match="the certificates do not fit"):
        open_log(f"postgresql://app@127.0.0.1:{port}/shop?sslmode=verify-full&sslrootcert=/nowhere", "main")


def test_opening_a_server_that_does_not_listen_may_pass(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file or directory"):
        open_log(f"postgresql://app@/shop?host={tmp_path}", "main")
