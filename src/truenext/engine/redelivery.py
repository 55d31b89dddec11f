"""When a failed message is tried again, and when it is given up."""

from truenext.destination import Destination, Kind, dead_letter_name
from truenext.envelope import read_header, write_header
from truenext.message import Message
from truenext.policy import Policy


def is_exhausted(policy: Policy, attempts: int) -> bool:
    """`attempts` counts failures, the one just seen included."""
    return attempts >= policy.attempts_max


EXHAUSTED, EXPIRED = "attempts exhausted", "expired"
"""Why a message is dead-lettered."""


def dead_letter(message: Message, origin: str, attempts: int, cause: str) -> tuple[Destination, Message]:
    """What becomes of a message that is given up in queue `origin`, and where it goes.

    A new arrival: persistent whatever it was, and without expiry, for nobody could look into it otherwise.
    """
    destination = Destination(Kind.QUEUE, dead_letter_name(origin))
    headers = read_header(message.header)
    headers.pop("expires", None)
    headers |= {
        "destination": destination.address,
        "persistent": "true",
        "truenext-dead-letter-cause": cause,
        "truenext-original-attempts": str(attempts),
        "truenext-original-destination": Destination(Kind.QUEUE, origin).address,
        "truenext-original-expires": str(message.expires_ms),
        "truenext-original-persistent": "true" if message.persistent else "false",
    }
    return destination, Message(
        priority=message.priority,
        persistent=True,
        expires_ms=0,
        header=write_header(headers),
        body=message.body,
    )
