"""Numbers as text: ASCII digits, sizes in bytes with a unit (256MiB, 50KB, 1.5 GB, 1000), and times (1.5s, 3d)."""

import re


def are_digits(text: str, most: int | None = None) -> bool:
    """Return whether a text consists of ASCII digits: at least one, and at most `most` (None: any number).

    >>> are_digits("007"), are_digits("1234", most=3), are_digits("²"), are_digits("")
    (True, False, False, False)
    """
    return text.isascii() and text.isdigit() and (most is None or len(text) <= most)


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(text: str) -> int | None:
    """Return the number of bytes that a text states; None if the text is no size.

    >>> parse_size("256MiB"), parse_size("1.5 KB"), parse_size("much")
    (268435456, 1500, None)
    """
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([a-z]*)", text.strip().lower(), re.ASCII)
    if found is None or found[2] not in _UNITS:
        return None
    number, unit = found[1], _UNITS[found[2]]
    # A float has only 53 bits.
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def format_size(size: int) -> str:
    """Return a number of bytes with the largest unit in which it is a whole number.

    >>> format_size(256 * 2**20), format_size(1000)
    ('256MiB', '1000')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size % _UNITS[unit.lower()] == 0 and size:
            return f"{size // _UNITS[unit.lower()]}{unit}"
    return str(size)


def short_size(size: int) -> str:
    """Return a size with three digits and a unit.

    >>> short_size(5), short_size(3 << 29), short_size(64 << 20), short_size(2 << 50)
    ('5B', '1.5GiB', '64MiB', '2,048TiB')
    """
    number, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1000 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.3g}{unit}" if number < 1000 else f"{number:,.0f}{unit}"


def count_noun(count: int, noun: str) -> str:
    """Return a number with a noun, in the plural unless the number is 1.

    >>> count_noun(1, "queue"), count_noun(2000, "process"), count_noun(3, "query")
    ('1 queue', '2,000 processes', '3 queries')
    """
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("s"):
        return f"{count:,} {noun}es"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{count:,} {noun}s"


_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_IS_TIME = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)(ms|s|m|h|d)", re.ASCII).fullmatch


def parse_delay(text: str) -> float | None:
    """Return the seconds that a text states; None if the text is no number with a unit.

    >>> parse_delay("1.5h"), parse_delay("3d"), parse_delay("3")
    (5400.0, 259200.0, None)
    """
    found = _IS_TIME(text.strip())
    return None if found is None else float(found[1]) * _UNITS_S[found[2]]
