"""Speedups: chooses, once, whether the codec's inner loops run in C (_speed.c) or in Python.

Both make the same commands and bytes (docs/decisions/0046-shapes-of-frames.md).
"""

import os
from importlib import import_module
from typing import Any

from truenext.model.message import SentMessage


def _load() -> Any:
    """Return the module in C; None if it was not built, cannot read messages, or is switched off."""
    if os.environ.get("TRUENEXT_SPEEDUPS") == "0":
        return None
    try:
        module = import_module("truenext.wire.stomp._speed")
        module.MessageEncoder(SentMessage, b"", b"")
    except (ImportError, TypeError):
        return None
    return module


SPEEDUPS = _load()
CODEC_LANGUAGE = "Python" if SPEEDUPS is None else "C"
"""Language of the codec's inner loops: C or Python."""
