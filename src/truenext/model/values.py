"""Values that selectors compare, and their names."""

Value = str | int | float | bool | None

HEADER_PROPERTIES = {"JMSCorrelationID": "correlation-id", "JMSType": "type"}
"""Name in the header lines, for each property that has another name in JMS."""


class TypedText(str):
    """Text of a JMS property. It is not read as a number or a truth value, as the text of a STOMP header is."""

    __slots__ = ()
