"""Damage to bytes of a protocol, for tests of decoders."""

from collections.abc import Sequence

from hypothesis import strategies as st


def damage(draw: st.DrawFn, data: bytearray, tokens: Sequence[bytes]) -> None:
    """Flip a bit of the data, or cut bytes out, repeat bytes, or put in a token or other bytes."""
    start = draw(st.integers(0, len(data)))
    end = min(len(data), start + draw(st.integers(0, 30)))
    match draw(st.integers(0, 3)):
        case 0 if start < len(data):
            data[start] ^= 1 << draw(st.integers(0, 7))
        case 1:
            del data[start:end]
        case 2:
            data[start:start] = data[start:end]
        case _:
            data[start:start] = draw(st.sampled_from(tokens) | st.binary(max_size=4))
