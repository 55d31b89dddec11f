"""Ports for what a test starts later."""

import random
import socket

_BELOW_THOSE_THE_SYSTEM_GIVES = range(20_000, 32_000)


def free_port() -> int:
    """One that nobody gets by chance before it is used. A port that the system gave once it may give to the next who
    asks, such as another test, whose broker would then be taken for one's own."""
    while True:
        port = random.SystemRandom().choice(_BELOW_THOSE_THE_SYSTEM_GIVES)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
