"""What a client asks in JSON, read; what is wrong with it is the client's fault, whatever it is."""

from typing import TypeVar

import msgspec

from truenext.errors import Code, RemoteProtocolError

_Value = TypeVar("_Value")


def decode_client_json(what: str, body: bytes | str, shape: type[_Value], code: Code = Code.CONTROL_REQUEST) -> _Value:
    """`body` as one of these; `what` is named where it is none.

    Raises: RemoteProtocolError
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        # A text that is no UTF-8 is no error of msgspec's own, nor are lists in lists in lists.
        raise RemoteProtocolError(f"{what}: {error}", code) from error
