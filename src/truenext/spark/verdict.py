"""Did the contract hold, in plain words?"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FindingSummary:
    """One kind of trouble."""

    kind: str
    count: int
    """Dispatches, or messages, or times, as the sentence says."""
    sentence: str


@dataclass(frozen=True)
class Verdict:
    events: int
    findings: tuple[FindingSummary, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader should know and what breaks no promise: gaps, an incomplete history."""

    @property
    def has_contract_held(self) -> bool:
        """The contract held."""
        return not self.findings

    def __str__(self) -> str:
        first = f"The contract held: {self.events:,} events, no finding."
        if not self.has_contract_held:
            first = f"The contract was broken: {self.events:,} events."
        return "\n".join(
            [first, *(f"- {each.sentence}" for each in self.findings), *(f"  {note}" for note in self.notes)]
        )
