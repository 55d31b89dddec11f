"""Verdict of an audit: whether the contract held, in plain words."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FindingSummary:
    """Number of findings of one kind, and a sentence about them."""

    kind: str
    count: int
    """Number of dispatches, messages or times. The sentence says which of these is counted."""
    sentence: str


@dataclass(frozen=True)
class Verdict:
    events: int
    findings: tuple[FindingSummary, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences for the reader about anything that is no violation, such as gaps or an incomplete history."""

    @property
    def has_contract_held(self) -> bool:
        """True if there is no finding."""
        return not self.findings

    def __str__(self) -> str:
        first = f"The contract held: {self.events:,} events, no finding."
        if not self.has_contract_held:
            first = f"The contract was broken: {self.events:,} events."
        return "\n".join(
            [first, *(f"- {each.sentence}" for each in self.findings), *(f"  {note}" for note in self.notes)]
        )
