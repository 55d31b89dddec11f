"""Users file: reads and checks users, their passwords and grants. Source: docs/security.md, "The users file"

    [role.NAME]     grants that several users have
    [user.NAME]     a user: its password, roles, client ids, and grants of its own

A file is applied as a whole or not at all, and all of its faults are reported at once. The text of a fault never has
the value of `passwords`, which may be a password by mistake."""

from __future__ import annotations

import base64
import json
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import argon2

from truenext.broker.regular_file import parse_toml, read_regular_file
from truenext.errors import ConfigurationError, FaultyFileError
from truenext.model.grants import Pattern, Right, User, parse_pattern
from truenext.model.limits import CONFIGURATION_BYTES_MAX

USER, ROLE = "user", "role"
PASSWORDS, PASSWORD_FILE = "passwords", "password_file"
ROLES, CLIENT_IDS, CERTIFICATES = "roles", "client_ids", "certificates"
MONITOR, ADMIN = "monitor", "admin"

_KEYS_OF_ROLES = (*(right.value for right in Right), MONITOR, ADMIN)
_KEYS_OF_USERS = (PASSWORDS, PASSWORD_FILE, CERTIFICATES, ROLES, CLIENT_IDS, *_KEYS_OF_ROLES)

PASSWORD_BYTES_MAX = 1024
"""Maximum number of bytes of a password. A longer password would take longer to hash."""

HASHES_MAX = 2
"""Maximum number of hashes of one user: the hash of a new password, and the hash of the old password until all clients
have the new one."""

HASH_MEMORY_KIB_MIN = 19456
HASH_PASSES_MIN = 2
"""Lowest number of passes of a hash. HASH_MEMORY_KIB_MIN is its lowest memory. OWASP recommends both: a password with a
weaker hash is guessed too quickly once the hash has leaked."""

HASH_MEMORY_KIB_MAX = 1024 * 1024
HASH_PASSES_MAX = 100
HASH_THREADS_MAX = 16

_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_-]{0,63}")
"""Pattern of the name of a user or role. It has no dots, so that a client id `NAME.x` belongs to the user NAME
alone."""
_CERTIFICATE = re.compile(r"(DNS|URI|email):[!-~]+|sha256:[0-9a-f]{64}")
_BARE_KEY = re.compile(r"[0-9A-Za-z_-]+")
_HASH = re.compile(
    r"\$argon2id\$v=(?:16|19)\$m=[1-9][0-9]{0,9},t=[1-9][0-9]{0,9},p=[1-9][0-9]{0,9}"
    # A salt of 8 bytes and a hash of 16 bytes, or more.
    r"\$(?P<salt>[0-9A-Za-z+/]{11,128})\$(?P<hash>[0-9A-Za-z+/]{22,128})"
)


class UserEntry(NamedTuple):
    user: User
    hashes: tuple[str, ...]
    """Argon2 hashes of the passwords; empty if the user has a password file."""
    password: str | None
    """First line of the password file; None if the user has none."""
    certificates: tuple[str, ...] = ()
    """Names and fingerprints of client certificates, such as `DNS:shop.example` and `sha256:0f...`."""

    @property
    def credentials(self) -> tuple[str, ...]:
        """Credentials of this user, one of which a login must match: hashes, the password of the password file, and
        names of certificates. No credential is empty."""
        return (*(self.hashes if self.password is None else (self.password,)), *self.certificates)


class Users(dict[str, UserEntry]):
    """Users of a users file, by name."""

    def __init__(
        self,
        entries: Mapping[str, UserEntry] | None = None,
        *,
        warnings: Iterable[str] = (),
        files: Iterable[Path] = (),
        digest: str = "",
    ) -> None:
        super().__init__(entries or {})
        self.warnings = list(warnings)
        """Sentences about unsafe parts of the files that are no faults."""
        self.files = tuple(files)
        """The users file, and the password files."""
        self.digest = digest
        """Digest of the content of the users file."""
        self._certificate_owners = {name: entry for entry in self.values() for name in entry.certificates}

    def find_by_certificate(self, names: Iterable[str]) -> tuple[UserEntry, str] | None:
        """Return the user whose entry has one of these names of a client certificate, and that name; None if no user or
        several users have one."""
        found = {
            self._certificate_owners[name].user.name: (self._certificate_owners[name], name)
            for name in names
            if name in self._certificate_owners
        }
        return next(iter(found.values())) if len(found) == 1 else None


def read_users(file: Path) -> Users:
    """Read a users file and the password files that it names.

    Raises: FaultyFileError if the files have faults; ConfigurationError if the users file cannot be read
    """
    reader = _UsersFileReader(file)
    try:
        content = read_regular_file(file)
        reader.check_permissions(file, "")
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror or error}") from error
    return reader.read(content)


def check_users(file: Path, content: bytes) -> Users:
    """Return the users in the content of a users file that is not written yet.

    Raises: FaultyFileError if the content has faults
    """
    return _UsersFileReader(file).read(content)


# ---- Values ----


def fault_of_name(name: str) -> str | None:
    """Return why a text cannot be the name of a user or role; None if the name is valid.

    >>> fault_of_name("till-1"), fault_of_name("a b")
    (None, "a name is 1 to 64 letters (a to z, A to Z), digits, '-' or '_'")
    """
    if _NAME.fullmatch(name):
        return None
    return "a name is 1 to 64 letters (a to z, A to Z), digits, '-' or '_'"


def is_certificate_name(text: str) -> bool:
    """Return whether a text is a name in a client certificate, such as `DNS:shop.example`, or a fingerprint."""
    return _CERTIFICATE.fullmatch(text) is not None


def fault_of_password(password: str) -> str | None:
    """Return why a text cannot be a password; None if the password is valid. The reason does not repeat the text."""
    if not password:
        return "a password must not be empty"
    try:
        size = len(password.encode())
    except UnicodeEncodeError:
        return "a password must be UTF-8"
    if password.startswith("\ufeff") or set(password) & set("\0\r\n"):
        return "no client can send it: it begins with a byte order mark, or has a NUL or a line break"
    return None if size <= PASSWORD_BYTES_MAX else f"a password has at most {PASSWORD_BYTES_MAX} bytes, not {size:,}"


def fault_of_client_id(client_id: str) -> str | None:
    """Return why a text cannot be in `client_ids`; None if the client id is valid."""
    if not client_id or not client_id.isprintable() or set(client_id) & set(",*>"):
        return "a client id is a printable text, not empty, without ',', '*' and '>'"
    return None


def fault_of_hash(text: str) -> str | None:
    """Return why the broker does not accept a text as the hash of a password; None if the hash is valid. The reason
    does not repeat the text."""
    found = _HASH.fullmatch(text)
    if found is None or not (_is_base64(found["salt"]) and _is_base64(found["hash"])):
        return "is not an Argon2id hash: replace it by one of `truenext user hash`"
    costs = argon2.extract_parameters(text)
    for cost, least, most, name, unit in (
        (costs.memory_cost, HASH_MEMORY_KIB_MIN, HASH_MEMORY_KIB_MAX, "m", "KiB of memory"),
        (costs.time_cost, HASH_PASSES_MIN, HASH_PASSES_MAX, "t", "passes"),
        (costs.parallelism, 1, HASH_THREADS_MAX, "p", "threads"),
    ):
        if not least <= cost <= most:
            bound = f"at least {least:,}" if cost < least else f"at most {most:,}"
            return f"is a hash with {name}={cost} ({unit}), {bound}: replace it by one of `truenext user hash`"
    return None


def _is_base64(text: str) -> bool:
    try:
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        return False
    # Argon2 accepts only the one text that stands for the bytes.
    return base64.b64encode(decoded).decode().rstrip("=") == text


def _toml_key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def table_header(section: str, name: str) -> str:
    """Return the header of the table of a user or role, as it is written in the file.

    >>> table_header("user", "shop"), table_header("user", "shop.eu")
    ('[user.shop]', '[user."shop.eu"]')
    """
    return f"[{section}.{_toml_key(name)}]"


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the name that is probably meant, or all known names.

    >>> suggest_name("shpo", ["shop", "till"]), suggest_name("x", ["shop", "till"]), suggest_name("x", [])
    ("; is 'shop' meant?", '; known: shop, till', '; known: none')
    """
    names = list(known)
    close = get_close_matches(name, names, n=1)
    return f"; is {close[0]!r} meant?" if close else f"; known: {', '.join(names) or 'none'}"


# ---- File ----


class _Grants(NamedTuple):
    """Grants in the table of one user or role."""

    patterns: dict[Right, list[Pattern]]
    is_monitor: bool
    is_admin: bool


OPERATOR = "operator"
"""Built-in role that may do all that docs/operations.md describes. A role of this name in the file replaces it."""

_ALL = [parse_pattern(text) for text in (">", "DLQ.>", "Spark.>", "Consumer.>", "/topic/>")]
_BUILT_IN_ROLES = {
    # To move messages, an operator must send. To consume them is no part of its work.
    OPERATOR: _Grants({Right.SEND: _ALL, Right.TAKE: [], Right.BROWSE: _ALL, Right.MANAGE: _ALL}, True, True)
}


class _UsersFileReader:
    """Reader of one users file, used once, which raises all faults of the file together."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._faults: list[str] = []
        self._warnings: list[str] = []
        self._password_files: list[Path] = []
        self._roles = dict(_BUILT_IN_ROLES)
        self._hash_owners: dict[str, str] = {}
        """Header of the table in which each hash was found first, by hash."""
        self._certificate_owners: dict[str, str] = {}
        """Header of the table of the user that has a certificate, by the name of the certificate."""

    def check_permissions(self, file: Path, where: str) -> None:
        """Add a fault if other users of this machine can change a file, or a warning if they can read it.

        `where` is the table and key that names the file, if it is a password file.

        Raises: OSError if the file cannot be examined
        """
        if sys.platform == "win32":
            # The mode says nothing there.
            return
        mode = file.stat().st_mode
        quoted = shlex.quote(str(file))
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            named = str(file) if where else "it"
            self._fault(where, f"users other than its owner can write to {named}: run `chmod go-w {quoted}`")
        if mode & stat.S_IROTH:
            self._warnings.append(f"{file}: all users of this machine can read it: run `chmod o-r {quoted}`")

    def read(self, content: bytes) -> Users:
        """Return the users in the content of a file.

        Raises: FaultyFileError if the content has faults
        """
        document = self._parse(content)
        tables: dict[str, dict[str, dict[str, Any]]] = {USER: {}, ROLE: {}}
        for section, value in document.items():
            if section not in tables:
                self._fault("", f"there is no section [{_toml_key(section)}]{suggest_name(section, tables)}")
            elif not isinstance(value, dict):
                self._fault("", f"{section} must be tables: write [{section}.NAME]")
            else:
                tables[section] = self._named_tables(section, value)
        for name, table in tables[ROLE].items():
            self._roles[name] = self._grants(table_header(ROLE, name), table, _KEYS_OF_ROLES)
        entries = {name: self._user(name, table) for name, table in tables[USER].items()}
        if not entries and not self._faults:
            self._fault("", "there are no users, and nobody could log in: add [user.NAME]")
        if self._faults:
            raise self._faulty_file()
        files = dict.fromkeys([self._file, *self._password_files])
        return Users(entries, warnings=self._warnings, files=files, digest=sha256(content).hexdigest())

    def _fault(self, where: str, reason: str) -> None:
        self._faults.append(f"{where}: {reason}" if where else reason)

    def _faulty_file(self) -> FaultyFileError:
        return FaultyFileError(tuple(f"{self._file}: {fault}" for fault in self._faults))

    def _parse(self, content: bytes) -> dict[str, Any]:
        try:
            if len(content) > CONFIGURATION_BYTES_MAX:
                raise ValueError(f"a users file has at most {CONFIGURATION_BYTES_MAX} bytes: remove users or comments")
            return parse_toml(content)
        except ValueError as error:
            self._fault("", str(error))
            raise self._faulty_file() from error

    # ---- Tables ----

    def _named_tables(self, section: str, tables: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the tables of a section, by name, without the tables nested in them. Add a fault for each table that
        is nested, has an invalid name, or is a single value."""
        found: dict[str, dict[str, Any]] = {}
        for name, table in tables.items():
            header = table_header(section, name)
            if not isinstance(table, dict):
                self._fault(header, "it must be a table with keys, not a single value")
                continue
            fault = fault_of_name(name)
            if fault is not None:
                self._fault(header, fault)
            nested = [key for key, value in table.items() if isinstance(value, dict) and key not in _KEYS_OF_USERS]
            for key in nested:
                whole = table_header(section, f"{name}.{key}")
                self._fault(header, f"{key!r} cannot be a table: write a name with dots in quotes, as in {whole}")
            if not nested or len(nested) < len(table):
                found[name] = {key: value for key, value in table.items() if key not in nested}
        return found

    def _user(self, name: str, table: dict[str, Any]) -> UserEntry:
        header = table_header(USER, name)
        own = self._grants(header, table, _KEYS_OF_USERS)
        roles = self._texts(header, ROLES, table, '["operator"]')
        for role in roles:
            if role not in self._roles:
                self._fault(f"{header} {ROLES}", f"there is no role {role!r}{suggest_name(role, self._roles)}")
        client_ids = self._texts(header, CLIENT_IDS, table, '["till-1"]')
        for client_id in client_ids:
            fault = fault_of_client_id(client_id)
            if fault is not None:
                self._fault(f"{header} {CLIENT_IDS}", f"{_shortened(client_id)} cannot be a client id: {fault}")
        all_grants = [own, *(self._roles[role] for role in roles if role in self._roles)]
        user = User(
            name,
            {right: [pattern for each in all_grants for pattern in each.patterns[right]] for right in Right},
            client_ids,
            is_monitor=any(each.is_monitor for each in all_grants),
            is_admin=any(each.is_admin for each in all_grants),
        )
        certificates = self._certificates(header, table)
        if PASSWORDS in table and PASSWORD_FILE in table:
            self._fault(header, f"{PASSWORDS} and {PASSWORD_FILE} exclude each other: remove one of them")
        elif PASSWORDS in table:
            return UserEntry(user, self._hashes(header, table[PASSWORDS]), None, certificates)
        elif PASSWORD_FILE in table:
            return UserEntry(user, (), self._password(header, table[PASSWORD_FILE]), certificates)
        elif CERTIFICATES not in table:
            self._fault(
                header,
                f"the user has no password: add {PASSWORDS} (see `truenext user hash`), {PASSWORD_FILE} or "
                f"{CERTIFICATES}",
            )
        return UserEntry(user, (), None, certificates)

    def _certificates(self, header: str, table: dict[str, Any]) -> tuple[str, ...]:
        names = self._texts(header, CERTIFICATES, table, '["DNS:shop.example"]')
        for name in names:
            where = f"{header} {CERTIFICATES}"
            if not _CERTIFICATE.fullmatch(name):
                self._fault(
                    where,
                    f"{_shortened(name)} is no name of a certificate: write DNS:NAME, URI:URI, email:ADDRESS, or "
                    "sha256: and the 64 hexadecimal digits of its fingerprint, in lower case",
                )
            owner = self._certificate_owners.setdefault(name, header)
            if owner != header:
                self._fault(where, f"{owner} has {_shortened(name)}, too: a certificate belongs to one user")
        return tuple(names)

    def _grants(self, header: str, table: dict[str, Any], keys: Iterable[str]) -> _Grants:
        for key in table:
            if key in keys:
                continue
            if key in _KEYS_OF_USERS:
                self._fault(f"{header} {key}", "a role has only grants: move the key to the users of the role")
            else:
                self._fault(header, f"there is no key {key!r}{suggest_name(key, keys)}")
        patterns: dict[Right, list[Pattern]] = {right: [] for right in Right}
        for right in Right:
            for text in self._texts(header, right.value, table, '["orders.>"]'):
                try:
                    patterns[right].append(parse_pattern(text))
                except ValueError as error:
                    self._fault(f"{header} {right.value}", f"{_shortened(text)} {error}")
        return _Grants(patterns, self._flag(header, MONITOR, table), self._flag(header, ADMIN, table))

    def _texts(self, header: str, key: str, table: dict[str, Any], example: str) -> list[str]:
        value = table.get(key, [])
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return value
        self._fault(f"{header} {key}", f"it must be a list of texts, such as {example}")
        return []

    def _flag(self, header: str, key: str, table: dict[str, Any]) -> bool:
        value = table.get(key, False)
        if not isinstance(value, bool):
            self._fault(f"{header} {key}", "it must be true or false")
        return value is True

    # ---- Passwords ----

    def _hashes(self, header: str, value: Any) -> tuple[str, ...]:
        where = f"{header} {PASSWORDS}"
        is_list = isinstance(value, list) and all(isinstance(text, str) for text in value)
        if not is_list or not 1 <= len(value) <= HASHES_MAX:
            self._fault(where, "it must be a list of one or two hashes, as `truenext user hash` prints it")
            return ()
        for number, text in enumerate(value, start=1):
            fault = fault_of_hash(text)
            if fault is not None:
                self._fault(where, f"text {number} of the list {fault}")
                continue
            owner = self._hash_owners.setdefault(text, header)
            if owner != header:
                self._fault(where, f"{owner} has the same hash: give each user a password of its own")
            elif text in value[: number - 1]:
                self._fault(where, "the list has the same hash twice: remove one of them")
        return tuple(value)

    def _password(self, header: str, value: Any) -> str | None:
        where = f"{header} {PASSWORD_FILE}"
        if not isinstance(value, str) or not value or not value.isprintable():
            self._fault(where, "it must be the path of a file with the password")
            return None
        file = self._file.parent / value
        try:
            content = read_regular_file(file)
            self.check_permissions(file, where)
        except OSError as error:
            self._fault(where, f"cannot read {file}: {error.strerror or error}; the file must have the password")
            return None
        except ConfigurationError as error:
            self._fault(where, str(error))
            return None
        self._password_files.append(file)
        line = content.partition(b"\n")[0].removesuffix(b"\r")
        try:
            password = line.decode()
        except UnicodeDecodeError:
            self._fault(where, f"the first line of {file} is not UTF-8, and a password must be")
            return None
        fault = fault_of_password(password)
        if fault is not None:
            self._fault(where, f"the first line of {file} cannot be a password: {fault}")
            return None
        return password


def _shortened(text: str) -> str:
    found = repr(text)
    return found if len(found) <= 100 else f"{found[:100]}..."
