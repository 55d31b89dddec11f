"""Passwords: hashes them, and checks the passcode of a login.

Each wrong login takes the time of HASHES_MAX hashes, whether the user exists or not, and whether the user has hashes or
a password file. So the time does not tell which users exist.
"""

from __future__ import annotations

import hmac

import argon2

from truenext.broker.users import (
    HASH_MEMORY_KIB_MIN,
    HASH_PASSES_MIN,
    HASHES_MAX,
    PASSWORD_BYTES_MAX,
    UserEntry,
    fault_of_password,
)

PASSWORD_HASHER = argon2.PasswordHasher(
    time_cost=HASH_PASSES_MIN,
    memory_cost=HASH_MEMORY_KIB_MIN,
    parallelism=1,
    hash_len=32,
    salt_len=16,
    type=argon2.Type.ID,
)
"""Hasher with the lowest costs that a users file allows; a hash takes about 30 ms."""

_DUMMY_HASH = (
    f"$argon2id$v=19$m={PASSWORD_HASHER.memory_cost},t={PASSWORD_HASHER.time_cost},p={PASSWORD_HASHER.parallelism}"
    # A salt of 16 bytes and a hash of 32 bytes, all zero: no password is known that has this hash.
    f"${'A' * 22}${'A' * 43}"
)


def hash_password(text: str) -> str:
    """Return a new Argon2id hash of a password.

    Raises: ValueError if the text cannot be a password
    """
    fault = fault_of_password(text)
    if fault is not None:
        raise ValueError(fault)
    return PASSWORD_HASHER.hash(text)


def find_credential(entry: UserEntry | None, passcode: str) -> str:
    """Return the hash or password of the user that matches the passcode; "" if none does, or the user is unknown
    (`entry` None)."""
    given = _to_bytes(passcode)
    if entry is not None and entry.password is not None and hmac.compare_digest(entry.password.encode(), given):
        return entry.password
    own = () if entry is None else entry.hashes
    hashes = [*own, *[_DUMMY_HASH] * (HASHES_MAX - len(own))]
    return next((each for each in hashes if _is_hash_of(each, given)), "")


def _to_bytes(passcode: str) -> bytes:
    """Return the passcode as bytes; b"", which matches no password, if the passcode is too long."""
    encoded = passcode.encode(errors="surrogatepass")
    return encoded if len(encoded) <= PASSWORD_BYTES_MAX else b""


def _is_hash_of(encoded: str, password: bytes) -> bool:
    try:
        return PASSWORD_HASHER.verify(encoded, password)
    except (argon2.exceptions.Argon2Error, argon2.exceptions.InvalidHashError):
        return False
