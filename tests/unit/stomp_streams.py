"""Streams of frames for tests of the codec: they repeat their header names and are nearly plain, cut anywhere."""

import random

from truenext.model.limits import HEADER_BYTES_MAX
from truenext.wire.stomp.frame import Version

VERSIONS = list(Version)
BODY_BYTES_MAX = 40
"""Small, so that bodies that are too large are met."""

NAMES = [
    *("destination", "content-length", "priority", "persistent", "expires", "receipt", "transaction", "reply-to"),
    *(
        "truenext-producer",
        "truenext-number",
        "truenext-gapless",
        "JMSXGroupID",
        "truenext-report-to",
        "truenext-report-id",
        "truenext-on-failure",
        "id",
        "message-id",
        "subscription",
        "x",
        "content-type",
    ),
    *("delivery-mode", "x-delay"),
    *("redelivered", "truenext-sequence", "AMQ_SCHEDULED_DELAY", "AMQ_SCHEDULED_DELEY", "colour", "a b", "n\u00e4me"),
]
VALUES = {
    "destination": [
        *("/queue/a", "/queue/a", "b", "/topic/t", "/temp-queue/r", "/queue/a,/topic/t", "/queue/>", "/control/x"),
        *("/queue/\u00e4", "/subscription/a,b", "", "/queue/a?b=c", "/remote-temp-queue/s/r", "/remote-temp-topic/s/r"),
    ],
    "content-length": ["4", "4", "4", "0", "04", "0000000004", "41", "5", "x", "99999999999", "\u0665"],
    "priority": [*"0123456789", "10", "-1", "04", "x", ""],
    "persistent": ["true", "false", "TRUE", "yes", ""],
    "expires": ["0", "-1", "1700000000000", "9" * 18, "9" * 19, "9" * 20, "x"],
    "receipt": ["r1", "r2", "r" * 255, "r" * 256, "\u00e4", ""],
    "transaction": ["t", "\u00e4", "", "t" * 300],
    "truenext-producer": ["p", "", "p" * 256, "\u00e4"],
    "truenext-number": ["1", "2", "9" * 18, str(2**63 - 1), str(2**63), str(2**63), "x"],
    "truenext-gapless": ["true", "false", "TRUE", "x", ""],
    "JMSXGroupID": ["g", "", "g" * 255, "g" * 256, "\u00e4"],
    "truenext-report-to": ["/queue/r", "/topic/r", "/queue/>", "/temp-queue/r", "/queue/a,/queue/b", "", "\u00e4"],
    "truenext-report-id": ["i", "", "i" * 64, "i" * 65, "\u00e4" * 64],
    "truenext-on-failure": ["/queue/f", "/queue/f /queue/g", "/queue/f ", "/topic/f", "/queue/DLQ.f", "f", ""],
    "id": [
        *("1@s", "22@s", "1.2@s", "1.@s", ".1@s", "1.2.3@s", "1." + "9" * 10 + "@s", "1." + "9" * 11 + "@s"),
        *("22@", "x@s", "1@s@s", "1@\u00e4", "9" * 19 + "@s", "9" * 20 + "@s", "1@" + "s" * 300),
    ],
    "truenext-started": ["2@s", "2.3@s", "x", "2.@s", "9" * 20 + "@s", "2@" + "s" * 300],
    "reply-to": ["/queue/r", "/temp-queue/r"],
    "AMQ_SCHEDULED_DELAY": ["0", "100"],
}
OTHERS = ["1", "v", "", " v ", "two words", "\u00e4\u20ac", "v:w", "v\\cw", "v\\n", "\\", "v\rw", "v\r"]
BETWEEN = ["", "", "", "\n", "\n", "\n\n", "\r\n", "\0", "\r", " "]
OFTEN = [
    ("SEND", ("destination", "content-length")),
    ("SEND", ("destination", "priority", "x", "content-length")),
    ("SEND", ("destination", "persistent", "receipt", "priority", "x", "content-length")),
    ("SEND", ("receipt", "destination", "transaction", "x", "content-length", "colour")),
    ("SEND", ("truenext-producer", "destination", "truenext-number", "content-length", "expires", "JMSXGroupID")),
    ("SEND", ("truenext-producer", "destination", "truenext-number", "truenext-gapless", "content-length")),
    ("SEND", ("destination", "delivery-mode", "persistent", "content-length")),
    ("SEND", ("destination", "truenext-report-to", "truenext-report-id", "persistent", "content-length")),
    ("SEND", ("destination", "receipt", "truenext-on-failure", "content-length", "x")),
    (
        "SEND",
        (
            "truenext-report-id",
            "destination",
            "transaction",
            "truenext-report-to",
            "truenext-on-failure",
            "content-length",
        ),
    ),
    ("SEND", ("x-delay", "destination", "delivery-mode")),
    ("SEND", ("destination", "x")),
    ("SEND", ("destination", "id")),
    ("SEND", ("id", "destination")),
    ("ACK", ("id",)),
    ("ACK", ("id", "receipt")),
    ("ACK", ("transaction", "id", "x")),
    ("ACK", ("id", "truenext-started")),
    ("ACK", ("truenext-started", "id", "receipt")),
    ("ACK", ("truenext-started", "id", "transaction")),
    ("ACK", ("message-id", "subscription")),
    ("MESSAGE", ("subscription", "message-id", "destination", "content-length")),
    ("MESSAGE", ("message-id", "x")),
]


def stream(dice: random.Random) -> bytes:
    """Frames of a few shapes; some have a value that is not plain, some are wrong in another way."""
    used = dice.choices(OFTEN, k=dice.choice([1, 1, 2, 3]))
    if dice.random() < 0.3:
        names = tuple(dice.choices(NAMES, k=dice.randint(0, 6)))
        used.append((dice.choice(["SEND", "ACK", "MESSAGE", "NACK", "FOO"]), names))
    oddity = dice.choice([0.0, 0.1, 0.3])
    made = b""
    for _ in range(dice.randint(1, 12)):
        made += frame(dice, *dice.choice(used), oddity) + dice.choice(BETWEEN[:5] if oddity == 0 else BETWEEN).encode()
        if dice.random() < 0.02:
            made += b"DISCONNECT\n\n\0"
    return made


def frame(dice: random.Random, command: str, names: tuple[str, ...], oddity: float) -> bytes:
    values = {name: VALUES[name][0] if name in VALUES else dice.choice("abc") for name in names}
    if "priority" in values:
        values["priority"] = dice.choice("0123456789")
    if "persistent" in values:
        values["persistent"] = dice.choice(["true", "true", "false"])
    if set(names) == {"destination", "id"}:
        values |= {"destination": "/control/started", "id": dice.choice(["1@s", "1.2@s"])}
    body = b"" if command == "ACK" or "id" in names else dice.choice([b"body", b"body", b"bo\0y", b"\n\0\n\0"])
    again = b""
    behind = b""
    blank = b"\n"
    # Rarely two things at once: the one would hide the other.
    while names and dice.random() < oddity:
        name = dice.choice(names)
        match dice.randint(0, 9):
            case 0 | 1 | 2:
                values[name] = dice.choice(VALUES.get(name, OTHERS))
            case 3 | 4:
                values[name] = dice.choice(OTHERS)
            case 5:
                body = dice.choice([b"", b"some", b"longer than it says", b"v" * BODY_BYTES_MAX])
            case 6:
                body = dice.choice([b"v" * BODY_BYTES_MAX, b"v" * (BODY_BYTES_MAX + 1), b"ACK\nid:7@s\n\n\0"])
                if "content-length" in values:
                    values["content-length"] = str(len(body))
            case 7:
                again = dice.choice([f"{name}:again\n".encode(), b"x:9\n", b"nothing\n"])
            case 8:
                behind = b"\xff"
            case _:
                values[name] += "v" * (HEADER_BYTES_MAX - dice.choice([0, 20, 100]))
                blank = dice.choice([b"\n", b"\n", b"\r\n\r\n"])
    if "content-length" not in names:
        body = body.replace(b"\0", b"x")
    lines = [f"{each}:{values[each]}".encode() + (behind if each == names[-1] else b"") + b"\n" for each in names]
    lines.insert(dice.randint(0, len(lines)), again)
    return command.encode() + b"\n" + b"".join(lines) + blank + body + b"\0"


def pieces_of(dice: random.Random, data: bytes) -> list[bytes]:
    match dice.randint(0, 3):
        case 0:
            return [data]
        case 1:
            at = dice.randint(0, len(data))
            return [data[:at], data[at:]]
        case 2 if len(data) < 2000:
            return [data[at : at + 1] for at in range(len(data))]
        case _:
            cuts = sorted(dice.randint(0, len(data)) for _ in range(dice.randint(1, 6)))
            return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
