"""Values that selectors compare."""

Value = str | int | float | bool | None


class TypedText(str):
    """Text of a JMS property. It is not read as a number or a truth value, as the text of a STOMP header is."""

    __slots__ = ()
