"""Tests of users files: the users they give, the faults in them, and checks of passwords."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import argon2
import pytest

from truenext.broker import passwords
from truenext.broker.passwords import PASSWORD_HASHER, find_credential, hash_password
from truenext.broker.users import HASHES_MAX, PASSWORD_BYTES_MAX, UserEntry, Users, check_users, read_users
from truenext.errors import ConfigurationError, FaultyFileError
from truenext.model.grants import Right, User, parse_pattern
from truenext.model.limits import CONFIGURATION_BYTES_MAX

CHEAP_HASHER = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
SALT, DIGEST = "A" * 22, "A" * 43
HASH = f"$argon2id$v=19$m=19456,t=2,p=1${SALT}${DIGEST}"
OTHER_HASH = f"$argon2id$v=19$m=19456,t=2,p=1${SALT}${'B' * 42}A"
SECRET = "hunter2"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "users.toml"


def write(file: Path, text: str | bytes) -> None:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    file.chmod(0o600)


def read(file: Path, text: str) -> Users:
    write(file, text)
    return read_users(file)


def faults(file: Path, text: str | bytes | None = None) -> list[str]:
    """Return the text of each fault, without the name of the file."""
    if text is not None:
        write(file, text)
    with pytest.raises(FaultyFileError) as raised:
        read_users(file)
    assert str(raised.value) == "\n".join(raised.value.faults)
    assert all(fault.startswith(f"{file}: ") and "\n" not in fault for fault in raised.value.faults)
    return [fault.removeprefix(f"{file}: ") for fault in raised.value.faults]


def user(keys: str, table: str = "user.shop") -> str:
    """Return a table with a password and these keys."""
    return f'[{table}]\npasswords = ["{HASH}"]\n{keys}\n'


# ---- Users ----


def test_users_file_gives_users_with_the_grants_of_their_roles(file: Path) -> None:
    users = read(
        file,
        f"""
        [user.shop]
        passwords = ["{HASH}", "{OTHER_HASH}"]
        send = ["orders.>", "/topic/news.*"]
        client_ids = ["till 1"]
        roles = ["operators", "readers"]
        [role.operators]
        manage = [">", "/queue/DLQ.>"]
        monitor = true
        [role.readers]
        send = ["a"]
        browse = ["a"]
        admin = true
        monitor = false
        """,
    )
    ((name, entry),) = users.items()
    shop = entry.user
    assert name == shop.name == "shop"
    assert shop.grants == {
        Right.SEND: {parse_pattern("orders.>"), parse_pattern("/topic/news.*"), parse_pattern("a")},
        Right.TAKE: frozenset(),
        Right.BROWSE: {parse_pattern("a")},
        Right.MANAGE: {parse_pattern(">"), parse_pattern("DLQ.>")},
    }
    assert shop.client_ids == {"till 1"}
    assert shop.is_monitor and shop.is_admin
    assert (entry.hashes, entry.password) == ((HASH, OTHER_HASH), None)
    assert entry.credentials == entry.hashes
    assert (users.files, users.warnings) == ((file,), [])


def test_built_in_role_operator_allows_all_but_taking(file: Path) -> None:
    operator = read(file, user('roles = ["operator"]'))["shop"].user
    for text in (">", "DLQ.>", "Spark.>", "Consumer.*.VirtualTopic.>", "/topic/>"):
        assert [operator.may(right, parse_pattern(text)) for right in Right] == [True, False, True, True]
    assert operator.is_monitor and operator.is_admin


def test_role_operator_of_the_file_counts_instead_of_the_built_in_one(file: Path) -> None:
    operator = read(file, user('roles = ["operator"]\n[role.operator]\nbrowse = ["a"]'))["shop"].user
    assert operator.grants == {right: {parse_pattern("a")} if right is Right.BROWSE else frozenset() for right in Right}
    assert not (operator.is_monitor or operator.is_admin)


def test_user_without_grants_may_nothing(file: Path) -> None:
    shop = read(file, user("send = []\nmonitor = false"))["shop"].user
    assert not any(shop.grants.values())
    assert not (shop.is_monitor or shop.is_admin or shop.client_ids)


@pytest.mark.parametrize("name", ["a", "a" * 64, "_", "A_b-9", "9"])
def test_name_of_letters_digits_and_marks_is_accepted(file: Path, name: str) -> None:
    assert list(read(file, user("", f"user.{name}"))) == [name.strip('"')]


@pytest.mark.parametrize("name", ['"eu.shop"', '"."', '"-a"', '""', f'"{"a" * 65}"'])
def test_name_with_a_dot_or_another_mark_is_a_fault(file: Path, name: str) -> None:
    """With dots a user `shop` would own the client ids of a user `shop.eu`."""
    assert "a name is 1 to 64 letters" in faults(file, user("", f"user.{name}"))[0]


def test_users_file_without_users_is_a_fault(file: Path) -> None:
    assert faults(file, "# None yet\n") == ["there are no users, and nobody could log in: add [user.NAME]"]


@pytest.mark.parametrize("line", ["\ufeffpassword", "pass\0word"])
def test_password_that_no_client_can_send_is_a_fault(file: Path, line: str) -> None:
    write(file.parent / "secret", line)
    assert "no client can send it" in faults(file, '[user.anna]\npassword_file = "secret"\n')[0]


@pytest.mark.parametrize("line", ["a secret: ü", "a secret: ü\n", "a secret: ü\r\nmore\n"])
def test_password_file_gives_its_first_line(file: Path, line: str) -> None:
    (file.parent / "secrets").mkdir()
    secret = file.parent / "secrets" / "anna"
    write(secret, line)
    users = read(file, '[user.anna]\npassword_file = "secrets/anna"\n')
    assert users["anna"].credentials == ("a secret: ü",)
    assert (users["anna"].hashes, users["anna"].password) == ((), "a secret: ü")
    assert users.files == (file, secret)


def test_absolute_password_file_is_read_once_for_two_users(file: Path) -> None:
    secret = file.parent / "secret"
    write(secret, SECRET)
    users = read(file, f'[user.a]\npassword_file = "{secret}"\n[user.b]\npassword_file = "{secret}"\n')
    assert users.files == (file, secret)


# ---- Faults ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[usr.shop]", "there is no section [usr]; is 'user' meant?"),
        ("[policy]", "there is no section [policy]; known: user, role"),
        ("user = 3", "user must be tables: write [user.NAME]"),
        ("[user]\nshop = 3", "[user.shop]: it must be a table with keys, not a single value"),
        (user("sned = []"), "[user.shop]: there is no key 'sned'; is 'send' meant?"),
        (
            user("hash = 1"),
            "[user.shop]: there is no key 'hash'; known: passwords, password_file, certificates, roles, client_ids, "
            "send, take, browse, manage, monitor, admin",
        ),
        (
            "[role.x]\nroles = []",
            "[role.x] roles: a role has only grants: move the key to the users of the role",
        ),
        (
            user("", 'user."a b"'),
            "[user.\"a b\"]: a name is 1 to 64 letters (a to z, A to Z), digits, '-' or '_'",
        ),
        (
            '[role."ä\\n"]\n',
            "[role.\"ä\\n\"]: a name is 1 to 64 letters (a to z, A to Z), digits, '-' or '_'",
        ),
        (
            user("", "user.eu.shop"),
            "[user.eu]: 'shop' cannot be a table: write a name with dots in quotes, as in [user.\"eu.shop\"]",
        ),
        (user('roles = ["ops"]\n[role.op]'), "[user.shop] roles: there is no role 'ops'; is 'op' meant?"),
        (user('roles = ["ops"]'), "[user.shop] roles: there is no role 'ops'; known: operator"),
        (user('roles = "ops"'), '[user.shop] roles: it must be a list of texts, such as ["operator"]'),
        (user('send = "a"'), '[user.shop] send: it must be a list of texts, such as ["orders.>"]'),
        (user("send = {a = 1}"), '[user.shop] send: it must be a list of texts, such as ["orders.>"]'),
        (user("take = [1]"), '[user.shop] take: it must be a list of texts, such as ["orders.>"]'),
        (
            user('browse = ["a.>.b"]'),
            "[user.shop] browse: 'a.>.b' is not a pattern: > is allowed only as the last word",
        ),
        (
            '[role.x]\nmanage = ["/temp-queue/a"]',
            "[role.x] manage: '/temp-queue/a' is not a pattern of queues or topics: write /queue/PATTERN, "
            "/topic/PATTERN or PATTERN",
        ),
        (user('send = ["queue://orders"]'), "[user.shop] send: 'queue://orders' is a URI of ActiveMQ: write orders"),
        (user("monitor = 1"), "[user.shop] monitor: it must be true or false"),
        ('[role.x]\nadmin = "true"', "[role.x] admin: it must be true or false"),
        (
            user('client_ids = ["a,b"]'),
            "[user.shop] client_ids: 'a,b' cannot be a client id: a client id is a printable text, not empty, without "
            "',', '*' and '>'",
        ),
    ],
)
def test_fault_of_a_key_names_table_key_and_remedy(file: Path, text: str, expected: str) -> None:
    assert faults(file, text) == [expected]


@pytest.mark.parametrize("client_id", ["", "a*", ">", "a\\tb"])
def test_client_id_that_no_client_has_is_a_fault(file: Path, client_id: str) -> None:
    (fault,) = faults(file, user(f'client_ids = ["{client_id}"]'))
    assert fault.startswith("[user.shop] client_ids: ")


def test_faults_of_a_file_are_reported_together(file: Path) -> None:
    found = faults(file, "[x]\n[role.r]\nsned = []\n[user.a]\nsend = [1]\nmonitor = 2\n[user.b]\n")
    assert [fault.split(":")[0] for fault in found] == [
        *("there is no section [x]; known", "[role.r]", "[user.a] send", "[user.a] monitor"),
        *("[user.a]", "[user.b]"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"[user.shop]\n\xff", "byte 0xff is not UTF-8 (at line 2)"),
        ("x = " + "[" * 100_000, "tables or arrays are nested too deeply"),
        ("[user", "Expected ']' at the end of a table declaration (at end of document)"),
    ],
)
def test_file_that_is_no_toml_has_one_fault(file: Path, text: str | bytes, expected: str) -> None:
    assert faults(file, text) == [expected]


def test_content_that_is_too_long_is_a_fault(file: Path) -> None:
    with pytest.raises(FaultyFileError, match=f"{file}: a users file has at most 1048576 bytes"):
        check_users(file, b"\n" * (CONFIGURATION_BYTES_MAX + 1))
    text = user("").encode()
    assert list(check_users(file, text + b"\n" * (CONFIGURATION_BYTES_MAX - len(text)))) == ["shop"]


def test_users_file_that_cannot_be_read_is_refused(file: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot read {file}: No such file"):
        read_users(file)
    os.mkfifo(file)
    with pytest.raises(ConfigurationError, match="it is a FIFO"):
        read_users(file)


# ---- Faults of passwords ----

NO_HASH = "is not an Argon2id hash: replace it by one of `truenext user hash`"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SECRET, NO_HASH),
        ("", NO_HASH),
        (HASH.replace("argon2id", "argon2i"), NO_HASH),
        (HASH.replace("v=19", "v=20"), NO_HASH),
        (HASH.replace("t=2,", ""), NO_HASH),
        (HASH.replace("t=2", "t=0"), NO_HASH),
        (HASH.replace("t=2", "t=+2"), NO_HASH),
        (HASH.replace(DIGEST, ""), NO_HASH),
        (HASH[:-1] + "B", NO_HASH),
        (HASH[:-2], NO_HASH),
        (HASH + "\\n", NO_HASH),
        (
            HASH.replace("m=19456", "m=19455"),
            "is a hash with m=19455 (KiB of memory), at least 19,456: replace it by one of `truenext user hash`",
        ),
        (
            HASH.replace("m=19456,t=2", "m=1048576,t=1"),
            "is a hash with t=1 (passes), at least 2: replace it by one of `truenext user hash`",
        ),
        (
            HASH.replace("m=19456", "m=1048577"),
            "is a hash with m=1048577 (KiB of memory), at most 1,048,576: replace it by one of `truenext user hash`",
        ),
        (
            HASH.replace("t=2", "t=101"),
            "is a hash with t=101 (passes), at most 100: replace it by one of `truenext user hash`",
        ),
        (
            HASH.replace("p=1", "p=17"),
            "is a hash with p=17 (threads), at most 16: replace it by one of `truenext user hash`",
        ),
    ],
)  # fmt: skip
def test_hash_that_no_login_can_be_checked_with_is_a_fault(file: Path, text: str, expected: str) -> None:
    found = faults(file, f'[user.shop]\npasswords = ["{OTHER_HASH}", "{text}"]')
    assert found == [f"[user.shop] passwords: text 2 of the list {expected}"]


@pytest.mark.parametrize("value", ["[]", f'"{SECRET}"', "[1]", f'["{SECRET}", "{HASH}", "{OTHER_HASH}"]', "true"])
def test_passwords_that_are_not_one_or_two_hashes_are_a_fault_without_the_value(file: Path, value: str) -> None:
    (fault,) = faults(file, f"[user.shop]\npasswords = {value}")
    expected = "it must be a list of one or two hashes, as `truenext user hash` prints it"
    assert fault == f"[user.shop] passwords: {expected}"


def test_hash_that_occurs_twice_is_a_fault(file: Path) -> None:
    assert faults(file, f'[user.a]\npasswords = ["{HASH}", "{HASH}"]\n' + user("")) == [
        "[user.a] passwords: the list has the same hash twice: remove one of them",
        "[user.shop] passwords: [user.a] has the same hash: give each user a password of its own",
    ]


def test_user_without_a_password_or_with_two_kinds_of_it_is_a_fault(file: Path) -> None:
    assert faults(file, "[user.a]\n" + user('password_file = "x"')) == [
        "[user.a]: the user has no password: add passwords (see `truenext user hash`), password_file or certificates",
        "[user.shop]: passwords and password_file exclude each other: remove one of them",
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "the first line of {} cannot be a password: a password must not be empty"),
        (f"\n{SECRET}", "the first line of {} cannot be a password: a password must not be empty"),
        (b"hunter2\xff", "the first line of {} is not UTF-8, and a password must be"),
        ("x" * 1025, "the first line of {} cannot be a password: a password has at most 1024 bytes, not 1,025"),
        (
            "\n" * (CONFIGURATION_BYTES_MAX + 1),
            "cannot read {}: a configuration file has at most 1048576 bytes",
        ),
    ],
)
def test_password_file_without_a_password_is_a_fault(file: Path, content: str | bytes, expected: str) -> None:
    secret = file.parent / "secret"
    write(secret, content)
    found = faults(file, '[user.shop]\npassword_file = "secret"')
    assert found == [f"[user.shop] password_file: {expected.format(secret)}"]


def test_password_file_that_cannot_be_read_is_a_fault(file: Path) -> None:
    fifo = file.parent / "fifo"
    os.mkfifo(fifo)
    text = "\n".join(
        f"[user.{name}]\npassword_file = {value}"
        for name, value in {"a": '"none"', "b": '"."', "c": '"fifo"', "d": '""', "e": "3", "f": '"a\\u0000"'}.items()
    )
    no_path = "it must be the path of a file with the password"
    assert faults(file, text) == [
        f"[user.a] password_file: cannot read {file.parent / 'none'}: No such file or directory; "
        "the file must have the password",
        f"[user.b] password_file: cannot read {file.parent}: Is a directory; the file must have the password",
        f"[user.c] password_file: cannot read {fifo}: it is a FIFO, not a regular file: copy its content to one",
        *(f"[user.{name}] password_file: {no_path}" for name in "def"),
    ]


# ---- Permissions ----


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_file_that_others_can_write_to_is_a_fault(file: Path, mode: int) -> None:
    secret = file.parent / "a secret"
    write(secret, SECRET)
    write(file, '[user.shop]\npassword_file = "a secret"')
    file.chmod(mode)
    secret.chmod(mode)
    assert faults(file) == [
        f"users other than its owner can write to it: run `chmod go-w {file}`",
        f"[user.shop] password_file: users other than its owner can write to {secret}: run `chmod go-w '{secret}'`",
    ]


def test_file_that_others_can_read_is_a_warning(file: Path) -> None:
    secret = file.parent / "secret"
    write(secret, SECRET)
    write(file, '[user.shop]\npassword_file = "secret"')
    for each in (file, secret):
        each.chmod(0o644)
    assert read_users(file).warnings == [
        f"{each}: all users of this machine can read it: run `chmod o-r {each}`" for each in (file, secret)
    ]
    for each in (file, secret):
        each.chmod(0o640)
    assert read_users(file).warnings == []


# ---- Passwords ----


def entry(*hashes: str, password: str | None = None) -> UserEntry:
    return UserEntry(User("shop", {}), hashes, password)


def test_hashed_password_is_found_and_its_hash_is_accepted_by_a_file(file: Path) -> None:
    hashed = hash_password("ü" * 512)
    assert hashed.startswith("$argon2id$v=19$m=19456,t=2,p=1$")
    assert read(file, f'[user.shop]\npasswords = ["{hashed}"]')["shop"].hashes == (hashed,)
    assert find_credential(entry(hashed), "ü" * 512) == hashed


@pytest.mark.parametrize("text", ["", "x" * (PASSWORD_BYTES_MAX + 1), "a\udcff"])
def test_text_that_cannot_be_a_password_is_not_hashed(text: str) -> None:
    with pytest.raises(ValueError, match="a password "):
        hash_password(text)


class CountingHasher:
    """Hasher with the cheapest hashes, which counts them."""

    def __init__(self) -> None:
        self.count = 0

    def verify(self, *arguments: Any) -> bool:
        self.count += 1
        return CHEAP_HASHER.verify(*arguments)


@pytest.fixture
def hasher(monkeypatch: pytest.MonkeyPatch) -> CountingHasher:
    counting = CountingHasher()
    monkeypatch.setattr(passwords, "PASSWORD_HASHER", counting)
    monkeypatch.setattr(passwords, "_DUMMY_HASH", CHEAP_HASHER.hash("dummy"))
    return counting


def test_dummy_hash_costs_as_much_as_the_hash_of_a_password() -> None:
    assert not PASSWORD_HASHER.check_needs_rehash(passwords._DUMMY_HASH)
    with pytest.raises(argon2.exceptions.VerifyMismatchError):
        PASSWORD_HASHER.verify(passwords._DUMMY_HASH, "")


def test_right_passcode_proves_its_credential(hasher: CountingHasher) -> None:
    old, new = CHEAP_HASHER.hash("old"), CHEAP_HASHER.hash("new")
    assert [find_credential(entry(new, old), passcode) for passcode in ("new", "old")] == [new, old]
    assert hasher.count == 3
    assert find_credential(entry(password="ü"), "ü") == "ü"
    assert hasher.count == 3


WRONG = ["", "x", f"{SECRET} ", SECRET[:-1], "dummy2", "ü" * 1000, f"{SECRET}\0", "a\udcff"]


@pytest.mark.parametrize("passcode", WRONG)
def test_wrong_passcode_takes_the_same_number_of_hashes_for_all_users(hasher: CountingHasher, passcode: str) -> None:
    one, two = CHEAP_HASHER.hash(SECRET), CHEAP_HASHER.hash("2")
    counts = []
    for each in (entry(one), entry(one, two), entry(password=SECRET), None):
        hasher.count = 0
        assert find_credential(each, passcode) == ""
        counts.append(hasher.count)
    assert counts == [HASHES_MAX] * 4


def test_hash_that_argon2_refuses_proves_nothing() -> None:
    assert find_credential(entry("$argon2id$no", "no hash"), "x") == ""
