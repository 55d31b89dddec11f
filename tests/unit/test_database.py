"""Tests of the URL of a database, of the name of a schema, and of the name of a broker."""

import contextlib

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict

from truenext.model.database import fault_of_database_url, fault_of_member, fault_of_schema

SECRET = "s3cret"
VALID = [
    "postgresql://db.example/main",
    "postgres://truenext@db.example:5433/main",
    "postgresql://truenext@[::1]:5433/main?sslmode=verify-full&passfile=/etc/truenext/pgpass",
    "postgresql://first:5432,second:5433/main?target_session_attrs=read-write",
    "postgresql:///main?host=/run/postgresql",
    "postgresql:///main?host=@abstract",
    "postgresql://user%40example@db.example/main",
    "postgresql:///?service=truenext",
    "postgresql://",
]
WITH_PASSWORD = [
    f"postgresql://truenext:{SECRET}@db.example/main",
    f"postgresql://truenext:a/{SECRET}@db.example/main",
    f"postgresql://truenext:a?{SECRET}@db.example/main",
    f"postgresql://truenext:a?b={SECRET}@db.example/main",
    f"postgresql://truenext:a#{SECRET}@db.example/main",
    f"postgresql://truenext:a@{SECRET}@db.example/main",
    f"postgresql://truenext@a:{SECRET}@db.example/main",
    f"postgresql://truenext: {SECRET}@db.example/main",
    f"postgresql://db.example/main?password={SECRET}",
    f"postgresql://db.example/main?sslmode=require&password={SECRET}",
    f"postgresql://db.example/main?pass%77ord={SECRET}",
    f"postgresql://db.example/main?PASSWORD={SECRET}",
    f"postgresql://db.example/main?sslpassword={SECRET}",
    f"postgresql://db.example/main?oauth_client_secret={SECRET}",
    f"postgresql://db.example/main?scram_client_key={SECRET}",
    f"postgresql:///user%3Da%20password%3D{SECRET}",
]


@pytest.mark.parametrize("url", VALID)
def test_a_url_that_libpq_reads_has_no_fault(url: str) -> None:
    assert fault_of_database_url(url) is None
    conninfo_to_dict(url)


@pytest.mark.parametrize("url", WITH_PASSWORD)
def test_a_url_with_a_password_has_a_fault_that_does_not_show_it(url: str) -> None:
    fault = fault_of_database_url(url)
    assert fault is not None and "passfile" in fault
    assert SECRET not in fault


def test_each_secret_option_of_libpq_counts_as_a_password() -> None:
    secrets = [each.keyword.decode() for each in pq.Conninfo.get_defaults() if each.dispchar == b"*"]
    assert "password" in secrets
    assert all("passfile" in (fault_of_database_url(f"postgresql://db/main?{each}=x") or "") for each in secrets)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("", "must begin with postgresql:// or postgres://"),
        ("data", "must begin with postgresql:// or postgres://"),
        ("postgresql:main", "must begin with postgresql:// or postgres://"),
        ("postgresql+psycopg://db.example/main", "must begin with postgresql:// or postgres://"),
        (f"mysql://truenext:{SECRET}@db.example/main", "must begin with postgresql:// or postgres://"),
        ("postgresql://db.example/my main", "must have no blanks"),
        ("postgresql://db.example/ma\nin", "must have no blanks"),
        (f"postgresql://truenext:{SECRET}/main", "must have a number as port"),
        (f"postgresql://first,second:{SECRET}/main", "must have a number as port"),
    ],
)
def test_another_text_has_a_fault(url: str, fault: str) -> None:
    found = fault_of_database_url(url)
    assert found is not None and found.startswith(fault)
    assert SECRET not in found


@given(st.lists(st.sampled_from(["u", ":", "@", "/", "?", "&", "=", ",", "#", "%3A", "%70", "password", "host"])))
def test_libpq_finds_no_password_in_a_url_without_fault(pieces: list[str]) -> None:
    url = "postgresql://" + "".join(pieces)
    if fault_of_database_url(url) is None:
        with contextlib.suppress(psycopg.ProgrammingError):
            assert "password" not in conninfo_to_dict(url)


@pytest.mark.parametrize("name", ["main", "_", "truenext_2", "a" * 63])
def test_a_schema_has_no_fault(name: str) -> None:
    assert fault_of_schema(name) is None


@pytest.mark.parametrize("name", ["", "Main", "2main", "ma in", 'ma"in', "a" * 64, "pg_main", "main\n", "größe"])
def test_another_name_of_a_schema_has_a_fault(name: str) -> None:
    assert fault_of_schema(name)


@pytest.mark.parametrize("name", ["host1.example", "HOST-2", "_", "9", "a" * 63])
def test_a_member_has_no_fault(name: str) -> None:
    assert fault_of_member(name) is None


@pytest.mark.parametrize("name", ["", "-a", ".a", "a b", "a@b", "a" * 64, "a\n", "größe"])
def test_another_name_of_a_member_has_a_fault(name: str) -> None:
    assert fault_of_member(name)
