"""Is a text a whole number in ASCII digits? `isdigit` alone says so of others, too, which `int` takes or refuses."""


def are_digits(text: str, most: int | None = None) -> bool:
    """At least one of them, `most` at the most; None is any number of them.

    >>> are_digits("007"), are_digits("1234", most=3), are_digits("²"), are_digits("")
    (True, False, False, False)
    """
    return text.isascii() and text.isdigit() and (most is None or len(text) <= most)
