"""How many messages a subscription that pulls has asked for and not got. Source: docs/contract.md, "Pulling" """


class PullRequest:
    """One for each subscription that pulls, whether it has asked for anything or not."""

    __slots__ = ("correlation", "remaining", "waits_for_messages")

    def __init__(self) -> None:
        self.remaining = 0
        """Messages that were asked for and have not come."""
        self.waits_for_messages = True
        """It stays until all have come; else it ends when none is ready."""
        self.correlation: str | None = None
        """What the client calls the last of what it has asked for."""
