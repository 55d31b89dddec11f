"""TLS for the brokers and clients of tests: with TRUENEXT_TLS=1 all that use RawClient and BrokerProcess run over TLS.

TRUENEXT_TLS=1 pytest tests/integration/test_acknowledgement.py -k "not hang"

Tests in which a command connects, or a client closes only its sending half, fail there: the commands do not know the
authority, and Python's socket cannot be read any more.
"""

import atexit
import os
import shutil
import ssl
import tempfile
from functools import cache
from pathlib import Path

import trustme

IS_ON = os.environ.get("TRUENEXT_TLS") == "1"
SCHEME = "stomp+ssl" if IS_ON else "stomp"


@cache
def authority() -> trustme.CA:
    return trustme.CA()


@cache
def folder() -> Path:
    """Return a folder with `ca.pem`, and `broker.pem` and `client.pem` with certificate and key."""
    made = Path(tempfile.mkdtemp(prefix="truenext-tls-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    authority().cert_pem.write_to_path(made / "ca.pem")
    authority().issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(made / "broker.pem")
    authority().issue_cert("client.example").private_key_and_cert_chain_pem.write_to_path(made / "client.pem")
    for file in made.iterdir():
        file.chmod(0o600)
    return made


@cache
def client_context() -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=folder() / "ca.pem")
    context.load_cert_chain(folder() / "client.pem")
    return context


@cache
def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder() / "broker.pem")
    return context


def serve_options() -> list[str]:
    """Return the options of `truenext serve` for a listener with TLS; none if TLS is off."""
    return ["--certificate", str(folder() / "broker.pem")] if IS_ON else []
