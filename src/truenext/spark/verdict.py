"""What an audit found, in words."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to: did the contract hold?"""

    held: bool
    findings: list[str] = field(default_factory=list)
    """One sentence each."""
    facts: list[str] = field(default_factory=list)
    """What was audited: events, messages, queues, time span."""
