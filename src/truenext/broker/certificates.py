"""TLS context of a broker, from the files that its settings name. Source: docs/security.md, "TLS" """

from __future__ import annotations

import ssl
import stat
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from truenext.broker.regular_file import read_regular_file
from truenext.broker.settings import BrokerSettings, ClientCertificates
from truenext.errors import ConfigurationError
from truenext.tls import fault_of_files, reason_of

_VERIFY = {
    ClientCertificates.NONE: ssl.CERT_NONE,
    ClientCertificates.ASKED: ssl.CERT_OPTIONAL,
    ClientCertificates.REQUIRED: ssl.CERT_REQUIRED,
}


class Certificates(NamedTuple):
    context: ssl.SSLContext
    """TLS context for listeners."""
    fingerprint: str
    """Digest of the files: it changes when a file changes."""
    fault: str | None
    """Reason why clients will refuse the certificate, for example because it has expired; None if there is no such
    reason."""


def read_certificates(settings: BrokerSettings) -> Certificates | None:
    """Read the certificate, key and client certificates' signers for listeners with TLS. Returns None if the settings
    name no certificate.

    Raises: ConfigurationError, with file and setting, if a file cannot be read or used, or settings contradict each
    other"""
    if settings.certificate is None:
        for name in ("key", "client_ca"):
            if getattr(settings, name) is not None:
                raise ConfigurationError(
                    f"{name} needs the setting certificate: the file with the broker's certificate"
                )
        if settings.client_certificates is not ClientCertificates.NONE:
            raise ConfigurationError(
                "client_certificates needs the setting certificate: the file with the broker's certificate"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    key = settings.key or settings.certificate
    digest = sha256(settings.client_certificates.value.encode())
    for name, file in (("certificate", settings.certificate), ("key", key), ("client_ca", settings.client_ca)):
        if file is not None:
            digest.update(_read(name, file))
    if stat.S_IMODE(key.stat().st_mode) & 0o022:
        raise ConfigurationError(f"key: other users of this machine can write to {key}: chmod go-w {key}")
    try:
        # Without a callback OpenSSL would ask for the password of a key at the terminal.
        context.load_cert_chain(settings.certificate, key, password=_no_password)
    except ssl.SSLError as error:
        named = f"certificate {settings.certificate}" + ("" if settings.key is None else f" and key {key}")
        reason = fault_of_files(error, has_key=settings.key is not None)
        raise ConfigurationError(f"{named} cannot be used: {reason}") from error
    if settings.client_ca is not None:
        try:
            context.load_verify_locations(settings.client_ca)
        except ssl.SSLError as error:
            # Of a file that is not PEM at all OpenSSL gives no reason.
            reason = reason_of(error) if error.reason else "it is not in PEM"
            raise ConfigurationError(f"client_ca {settings.client_ca} has no certificates: {reason}") from error
        if settings.client_certificates is ClientCertificates.NONE:
            raise ConfigurationError('client_ca needs client_certificates = "asked" or "required"')
    elif settings.client_certificates is not ClientCertificates.NONE:
        raise ConfigurationError(
            f'client_certificates = "{settings.client_certificates.value}" needs client_ca, the file with the '
            "certificates that sign those of clients"
        )
    context.verify_mode = _VERIFY[settings.client_certificates]
    return Certificates(context, digest.hexdigest(), _find_fault(settings.certificate, context))


def is_key_readable_by_others(settings: BrokerSettings) -> bool:
    """Return whether other users of this machine can read the private key."""
    key = settings.key or settings.certificate
    return key is not None and bool(key.stat().st_mode & stat.S_IROTH)


def _find_fault(certificate: Path, context: ssl.SSLContext) -> str | None:
    """Try a handshake in memory. Return why a client that trusts the certificate still refuses it; None if the client
    accepts it."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_context.load_verify_locations(certificate)
    to_client, to_broker = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_broker)
    broker = context.wrap_bio(to_broker, to_client, server_side=True)
    try:
        for end in (client, broker, client):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        return reason_of(error)
    return None


def _read(name: str, file: Path) -> bytes:
    try:
        return read_regular_file(file)
    except OSError as error:
        raise ConfigurationError(f"{name}: cannot read {file}: {error.strerror or error}") from error


def _no_password() -> str:
    raise ConfigurationError(
        "key: the private key has a password; write it without one (openssl pkey -in KEY -out NEW)"
    )
