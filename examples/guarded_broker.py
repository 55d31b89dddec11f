"""Broker of the demos with users and TLS: a certificate, and a password file for each user."""

import secrets
import shutil
import tomllib
from pathlib import Path

import trustme

from examples.broker import Broker
from truenext import blocking


class GuardedBroker(Broker):
    """Broker that knows the users of a file, and listens with TLS. All its files are in one folder."""

    def __init__(self, folder: Path, users: Path) -> None:
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.ca)
        certificate = folder / "broker.pem"
        certificate.touch(mode=0o600)
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)

        self._folder = folder
        copy = folder / "users.toml"
        copy.touch(mode=0o600)
        shutil.copyfile(users, copy)
        for user in tomllib.loads(copy.read_text())["user"]:
            self.password_file(user).touch(mode=0o600)
            self.password_file(user).write_text(secrets.token_urlsafe())
        options = ("--users", str(copy), "--certificate", str(certificate))
        super().__init__(folder / "data", *options, scheme="stomp+ssl")

    def password_file(self, user: str) -> Path:
        return self._folder / f"{user}.password"

    def connect(self, user: str) -> blocking.Connection:
        return blocking.connect(self.url, user=user, password_file=self.password_file(user), ca=self.ca)

    def environment(self, user: str) -> dict[str, str]:
        """Return the variables with which the commands of truenext log in as a user."""
        return {
            "TRUENEXT_URL": self.url,
            "TRUENEXT_USER": user,
            "TRUENEXT_PASSWORD_FILE": str(self.password_file(user)),
            "TRUENEXT_CA": str(self.ca),
        }
