"""Login: reads the headers of a CONNECT that only truenext defines. Source: docs/protocol.md, "Login" """

from collections.abc import Mapping

from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Login
from truenext.model.limits import PRODUCER_NUMBER_MAX
from truenext.wire.stomp.frame import Version
from truenext.wire.stomp.headers import OWN_PREFIX
from truenext.wire.stomp.values import read_number

_CLIENT, _SECRET = "truenext-client", "truenext-secret"
CONNECT_HEADERS = (_CLIENT, _SECRET)
_SECRET_DIGITS = 32
_HEXADECIMAL = frozenset("0123456789abcdef")


def read_login(headers: Mapping[str, str], version: Version) -> Login:
    """Read a login from the headers of a CONNECT.

    Raises: RemoteProtocolError if a header of truenext is invalid; the error repeats no text of the login
    """
    login = Login()
    if any(name.startswith(OWN_PREFIX) for name in headers):
        try:
            login = _login(headers)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(str(error), Code.LOGIN) from error
        if version is not Version.V1_2:
            raise RemoteProtocolError(
                f"a CONNECT with headers that begin with {OWN_PREFIX} needs STOMP 1.2", Code.LOGIN
            )
    login.user, login.passcode = headers.get("login", ""), headers.get("passcode", "")
    return login


def _login(headers: Mapping[str, str]) -> Login:
    for name in headers:
        if name.startswith(OWN_PREFIX) and name not in CONNECT_HEADERS:
            raise RemoteProtocolError(
                f"unknown header of CONNECT; those that begin with {OWN_PREFIX} are {', '.join(CONNECT_HEADERS)}"
            )
    if _CLIENT not in headers:
        raise RemoteProtocolError(f"{_SECRET} needs {_CLIENT}")
    number = _number(headers[_CLIENT])
    secret = headers.get(_SECRET, "")
    if _SECRET in headers and (len(secret) != _SECRET_DIGITS or not _HEXADECIMAL.issuperset(secret)):
        raise RemoteProtocolError(f"{_SECRET} is not {_SECRET_DIGITS} hexadecimal digits, as in CONNECTED")
    return Login(number, secret)


def _number(text: str) -> int:
    try:
        number = read_number(_CLIENT, text, PRODUCER_NUMBER_MAX)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"{_CLIENT} is not a number from 1 to {PRODUCER_NUMBER_MAX}") from error
    if not number:
        raise RemoteProtocolError(f"{_CLIENT} must be 1 or more")
    return number
