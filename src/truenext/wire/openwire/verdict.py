"""Verdict of the broker on a command of a JMS client."""


class Verdict:
    """Says whether the broker has refused the command that was yielded last. All parts of a session share one, and ask
    it after they have yielded a command on which more depends."""

    __slots__ = ("is_refused",)

    def __init__(self) -> None:
        self.is_refused = False
