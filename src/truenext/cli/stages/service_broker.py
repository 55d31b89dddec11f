"""Broker of a command that connects as a service: its address, and the credentials from the command line, the service
and the environment."""

from __future__ import annotations

from dataclasses import replace

import click

from truenext.cli.connection import URL_VARIABLE, USER_VARIABLE, BrokerOptions, split_by_source
from truenext.cli.values import URL, UrlOption
from truenext.client.core.credentials import Credentials
from truenext.stage.service import Service

urls_option = click.option(
    "--url",
    "urls",
    cls=UrlOption,
    type=URL,
    envvar=URL_VARIABLE,
    show_envvar=True,
    help="Address of the broker, instead of the service's own. May be repeated, and the variable may have several, "
    "with spaces between them: the first broker that answers is used.",
)


def broker_of(service: Service, urls: tuple[str, ...], credentials: Credentials, timeout_s: float) -> BrokerOptions:
    """Return the broker to which a command connects as the service. `urls` and `credentials` are those of the command
    line and the environment.

    Raises: click.UsageError if the environment's login is invalid
    """
    line, environment = split_by_source(credentials)
    merged, _ = merge_credentials(line, service.credentials, environment)
    return BrokerOptions(urls or service.broker, merged, timeout_s)


def merge_credentials(line: Credentials, own: Credentials, environment: Credentials) -> tuple[Credentials, str]:
    """Return the credentials with which a service logs in. Also return a note about the user, for the line that is
    printed at the start.

    User and password come together, from the first source that names a user: the command line, the service, the
    environment. A password without a user replaces the password of this source. Such a password comes from the command
    line, or else from the environment. A certificate is replaced together with its key.
    """
    sources = {"--user": line, "its code": own, USER_VARIABLE: environment}
    if own.certificate is not None:
        # The certificate names the user, unless the service names a user. A broker that gets a password ignores the
        # certificate.
        sources.pop(USER_VARIABLE)
    source, login = next((each for each in sources.items() if each[1].user is not None), ("", own))
    note = f" as user {login.user!r} (from {source})" if source else ""
    if environment.user not in (None, login.user):
        note += f"; {USER_VARIABLE} is unused"
    for each in (line, environment):
        if each.user is None and (each.password is not None or each.password_file is not None):
            login = replace(login, password=each.password, password_file=each.password_file)
            break
    pair = own if line.certificate is None else line
    ca = own.ca if line.ca is None else line.ca
    return replace(login, ca=ca, certificate=pair.certificate, key=pair.key), note
