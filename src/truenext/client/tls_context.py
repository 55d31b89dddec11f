"""TLS context of a client, made from the files that its options name."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable

from truenext.client.core.credentials import NO_CREDENTIALS, Credentials
from truenext.errors import ConfigurationError
from truenext.model.url import Address
from truenext.tls import KEY_HINT, NO_PEM

_REASONS = {
    "WRONG_VERSION_NUMBER": "the port does not speak TLS: connect to stomp://, not to stomp+ssl://",
    # A port of truenext without TLS sends this alert. So does a broker that has only older versions of TLS.
    "TLSV1_ALERT_PROTOCOL_VERSION": "the port does not speak TLS 1.2 or later: perhaps the port is for stomp://",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the broker requires a certificate of the client: set certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "the broker does not accept the client's certificate: it must be signed by a certificate "
    "in the broker's --client-ca",
    "NO_CERTIFICATE_OR_CRL_FOUND": "it has no certificate in PEM",
    "KEY_VALUES_MISMATCH": "the private key is not that of the certificate",
}
_PEM_FAULT = "[SSL] PEM lib"
"""Text of OpenSSL's error for an unusable file of a certificate or key. The error names no reason."""
_UNKNOWN_AUTHORITY = frozenset({18, 19, 20, 21})
"""OpenSSL's verification errors for a certificate that no trusted authority has signed."""


def check_files(files: Credentials, addresses: Iterable[Address]) -> None:
    """Check that the files can be used, if an address has TLS.

    Raises: ConfigurationError if a file cannot be used; its text names the file
    """
    if any(address.has_tls for address in addresses):
        make_context(files)


def make_context(files: Credentials) -> ssl.SSLContext:
    """Return a context that checks the broker's certificate and host name.

    Raises: ConfigurationError if a file cannot be used; its text names the file
    """
    try:
        context = ssl.create_default_context(cafile=files.ca)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"ca {files.ca!r} cannot be used: {reason_of(error)}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Otherwise a broker could make writes wait for reads.
    context.options |= ssl.OP_NO_RENEGOTIATION
    if files.certificate is not None:
        try:
            # Without a callback OpenSSL would ask for the password of a key at the terminal.
            context.load_cert_chain(files.certificate, files.key, password=_no_password)
        except (OSError, ValueError) as error:
            named = f"certificate {files.certificate!r}" + ("" if files.key is None else f" and key {files.key!r}")
            reason = reason_of(error)
            if reason == NO_PEM and files.key is None:
                reason += KEY_HINT
            raise ConfigurationError(f"{named} cannot be used: {reason}") from error
    return context


def reason_of(error: Exception, files: Credentials = NO_CREDENTIALS) -> str:
    """Return the reason for which TLS has failed with these files, in words. Positions in OpenSSL's source code are
    left out."""
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = ""
        if error.verify_code in _UNKNOWN_AUTHORITY and files.ca is None:
            hint = "; set ca (--ca, TRUENEXT_CA) to a file with the certificate that signed it"
        elif error.verify_code in _UNKNOWN_AUTHORITY:
            hint = f"; ca {files.ca!r} (--ca, TRUENEXT_CA) does not have the certificate that signed it"
        return f"the broker's certificate is not accepted: {error.verify_message.rstrip('.')}{hint}"
    if isinstance(error, ssl.SSLError):
        return _tls_reason(error)
    return str(getattr(error, "strerror", None) or error)


def _tls_reason(error: ssl.SSLError) -> str:
    reason = error.reason or ""
    if reason in _REASONS:
        return _REASONS[reason]
    text = str(error)
    if _PEM_FAULT in text:
        return NO_PEM
    alert = reason.partition("_ALERT_")[2]
    if alert:
        return f"the broker has ended TLS with the alert {alert.replace('_', ' ').lower()!r}"
    # Omit the name of the library before the reason, and the position in its source code after it.
    return f"TLS: {reason.replace('_', ' ').lower() or re.sub(r'^[[].*?[]] | [(]_ssl[.]c:[0-9]+[)]$', '', text)}"


def _no_password() -> str:
    raise ValueError("the private key has a password: write it without one (openssl pkey -in KEY -out NEW)")
