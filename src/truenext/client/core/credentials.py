"""Credentials with which a client logs in."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

LOGIN_BYTES_EACH_MAX = 2048
"""Longest user, password and client id, in bytes. Together the three must fit into a CONNECT, which may have 8 KiB."""

_FORBIDDEN_IN_LOGIN = frozenset("\r\n\0")
"""Characters that no header of CONNECT can contain, because STOMP does not escape the headers of CONNECT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """User, password or password file, and the files for TLS."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    """Path of a file whose first line is the password. The file is read for each login."""
    ca: str | None = None
    """Path of a PEM file with certificates of authorities that sign brokers' certificates. None: the authorities that
    the system trusts."""
    certificate: str | None = None
    """Path of a PEM file with the client's own certificate. None: the client shows no certificate."""
    key: str | None = None
    """Path of a PEM file with the private key of `certificate`. None: the file of the certificate also has the key."""

    def __post_init__(self) -> None:
        """Check that CONNECT can carry the texts, and that no options exclude one another.

        Raises: ValueError otherwise; its text does not contain the password
        """
        check_login_text("user", self.user)
        check_login_text("password", self.password)
        if self.password is not None and self.password_file is not None:
            raise ValueError("password and password_file exclude each other: use one of them")
        if self.key is not None and self.certificate is None:
            raise ValueError("the option key needs the option certificate: the file with the client's certificate")

    def arguments(self) -> dict[str, Any]:
        """Return these credentials as arguments of `connect`."""
        return asdict(self)

    def headers(self, password: str | None) -> dict[str, str]:
        """Return the headers of a CONNECT with this `password`, which may come from the password file."""
        given = {"login": self.user, "passcode": password}
        return {name: value for name, value in given.items() if value is not None}


def check_login_text(name: str, value: str | None) -> None:
    """Check that CONNECT can carry a text.

    Raises: ValueError otherwise; its text does not contain the value, which may be a password
    """
    if value is None:
        return
    try:
        is_valid = _FORBIDDEN_IN_LOGIN.isdisjoint(value) and len(value.encode()) <= LOGIN_BYTES_EACH_MAX
    except UnicodeEncodeError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"{name} has a line feed, a carriage return or a NUL, is not UTF-8, or is too long")


CREDENTIAL_FILES = ("password_file", "ca", "certificate", "key")
"""Fields of `Credentials` that are paths."""

NO_CREDENTIALS = Credentials()
"""Credentials for a broker without users."""
