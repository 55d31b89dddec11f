"""Doors: decide which HTTP requests the console lets in, and which headers each answer has.

    Host             one of a list, so that another site's name that leads here (DNS rebinding) opens nothing
    POST             Origin is one of its own, Sec-Fetch-Site is same-origin, the form has the token of the cookie
    each answer      no framing, no guessed types, no script or style but own files, no copy in a cache

A browser sends no Sec-Fetch-Site to a host that it does not trust: one without TLS that is not the same machine. There
Origin and token decide.
Source: OWASP, "Cross-Site Request Forgery Prevention"; W3C, "Fetch Metadata Request Headers", "Content Security Policy"
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import NamedTuple

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # With `no-referrer` a browser would send "Origin: null" with own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of each answer; an answer may have its own `cache-control`."""

METHODS = ("GET", "HEAD", "POST")

TOKEN_FIELD = "token"
"""Field of each posted form with the token of the cookie."""


class Address(NamedTuple):
    """Address of the console, as browsers see it."""

    hosts: frozenset[str]
    """Values of Host that are let in, in lower case, with the port where it is not the default one."""
    origins: frozenset[str]
    """Values of Origin that pages of the console have, in lower case."""
    has_tls: bool
    """True if browsers use TLS: to the console, or to a proxy before it."""
    is_loopback: bool
    port: int

    @property
    def cookie_name(self) -> str:
        """Name of the cookie of a login. A browser accepts `__Host-` only over TLS, for this host alone. Cookies know
        no port, and another console may listen on another port of the host."""
        return f"{'__Host-' if self.has_tls else ''}truenext-{self.port}"


def host_refusal(address: Address, host: str | None) -> str | None:
    """Return why a request with this Host is refused; None if it is let in."""
    if host is not None and host.lower() in address.hosts:
        return None
    return (
        "this console is not called by that name: use the address that `truenext console` has printed, or add the name "
        "with --host"
    )


def post_refusal(address: Address, headers: Mapping[str, str]) -> str | None:
    """Return why a POST with these headers is refused; None if it comes from a page of this console."""
    origin = headers.get("origin")
    if origin is None or origin.lower() not in address.origins:
        return "this request does not come from a page of this console: open the page again, and use its buttons"
    site = headers.get("sec-fetch-site")
    if site is None and not address.has_tls and not address.is_loopback:
        return None
    if site is None:
        return (
            "this request has no header Sec-Fetch-Site, by which browsers tell where it comes from: use a newer browser"
        )
    if site != "same-origin":
        return "this request does not come from a page of this console: open the page again, and use its buttons"
    return None


def make_token(secret: bytes, cookie: str) -> str:
    """Return the token that forms have which are shown to the browser with this cookie."""
    return hmac.digest(secret, cookie.encode(), "sha256").hex()


def is_token(secret: bytes, cookie: str, token: str) -> bool:
    return hmac.compare_digest(make_token(secret, cookie).encode(), token.encode())
