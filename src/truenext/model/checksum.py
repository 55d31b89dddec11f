"""CRC-32 as zlib has it: isal's takes a quarter of the time for a message, a ninth for a batch, and gives the same.
Source: docs/decisions/0048-isal.md
"""

try:
    from isal.isal_zlib import crc32
except ImportError:
    # No wheel for this machine.
    from zlib import crc32

__all__ = ["crc32"]
