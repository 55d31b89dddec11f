"""Retry rules of a stage: whether a failed message is tried again, and after which delay.

    retry={PricesDown: "2s, 10s, 1m", BadCard: "never"}

The first delay follows the first failure of a message, and so on; the last delay follows all further failures. The
broker counts the failures. An exception without a rule follows the policy of the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from truenext.flows.envelope import NotDecoded
from truenext.flows.events import GiveUpReason
from truenext.model.limits import DELAY_MS_MAX
from truenext.model.numerals import parse_delay
from truenext.model.policy import delay_before_jitter_ms
from truenext.stage.core.errors import DefinitionError, FlowError, NoAttemptsLeft, Reject
from truenext.stage.core.failure import ungrouped_errors

NEVER = "never"
"""Text of a rule that allows no retry: the message becomes a dead letter at once."""
_EXAMPLE = 'use "2s, 10s, 1m", or "never"'


class RetryRules:
    """Delays before retries, by the class of the exception."""

    __slots__ = ("_delays_s",)

    def __init__(self, rules: Mapping[type[BaseException], str], subject: str) -> None:
        """Parse the rules. `subject` names the stage or service in errors. Raises: DefinitionError if a rule is
        invalid"""
        self._delays_s: dict[type[BaseException], tuple[float, ...]] = {}
        if not isinstance(rules, Mapping):
            raise DefinitionError(
                f'retry of {subject} is {rules!r}: use delays by classes of exceptions, {{Busy: "2s"}}'
            )
        for kind, delays in rules.items():
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise DefinitionError(f"retry of {subject}: {kind!r} is not a class of exceptions")
            self._delays_s[kind] = _delays_s(delays, subject)

    def with_defaults(self, defaults: RetryRules) -> RetryRules:
        """Return these rules, and in addition the rules of `defaults` for classes that have no rule here."""
        merged = RetryRules({}, "")
        merged._delays_s = defaults._delays_s | self._delays_s
        return merged

    def decide(self, error: BaseException, failures: int, attempts_max: int | None) -> RetryDecision:
        """Decide whether a failed message is retried or rejected. `failures` includes the current failure.
        `attempts_max` is the stage's own limit, None without one.

        For an exception group, a rule for the group's own class counts first. Without such a rule, the message is
        rejected if an error in the group has the rule "never"; else the longest delay of the errors counts.
        """
        group_classes = [each for each in type(error).__mro__ if issubclass(each, BaseExceptionGroup)]
        errors = [error] if any(each in self._delays_s for each in group_classes) else ungrouped_errors(error)
        retries = [self._retry_for(each, failures) for each in errors]
        for each in retries:
            if each.is_rejected:
                return each
        if attempts_max is not None and failures >= attempts_max:
            return EXHAUSTED
        return RetryDecision(max((each.delay_s for each in retries if each.delay_s is not None), default=None))

    def _retry_for(self, error: BaseException, failures: int) -> RetryDecision:
        if isinstance(error, NoAttemptsLeft):
            return EXHAUSTED
        if isinstance(error, Reject):
            return REJECTED
        if isinstance(error, NotDecoded):
            return UNREADABLE
        if isinstance(error, FlowError):
            return WRONG_CALL
        for kind in type(error).__mro__:
            delays_s = self._delays_s.get(kind)
            if delays_s is not None:
                return RetryDecision(delays_s[min(failures, len(delays_s)) - 1]) if delays_s else REJECTED
        return QUEUE_POLICY


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """Decision about a failed message: reject it, or retry it after `delay_s` seconds. If `delay_s` is None, the policy
    of the queue decides."""

    delay_s: float | None
    rejected_for: GiveUpReason | None = None
    """Reason why the message is rejected; None if it is not."""

    @property
    def is_rejected(self) -> bool:
        return self.rejected_for is not None


REJECTED = RetryDecision(None, "rejected")
EXHAUSTED = RetryDecision(None, "attempts exhausted")
UNREADABLE = RetryDecision(None, "unreadable")
WRONG_CALL = RetryDecision(None, "wrong call")
QUEUE_POLICY = RetryDecision(None)


class RedeliveryPolicy(msgspec.Struct, frozen=True):
    """Policy of a queue for failed messages. Source: docs/reference/control.md, `connection`"""

    attempts_max: int | None
    """Failures after which the broker gives up a message; None if it never does."""
    first_delay_ms: int
    delay_ms: int
    backoff: float
    delay_max_ms: int
    dead_letters: str | None = None
    """Name of the queue that gets the dead letters; None if the queue keeps failed messages, or if the broker does not
    report the name."""

    def is_last(self, failures: int) -> bool:
        """Return whether the broker gives up a message after this number of failures."""
        return self.attempts_max is not None and failures >= self.attempts_max

    def delay_s(self, failures: int) -> float:
        """Return the seconds from a message's last failure to its next try, without the jitter. `failures` includes
        that failure."""
        delay_ms = delay_before_jitter_ms(failures, self.first_delay_ms, self.delay_ms, self.backoff, self.delay_max_ms)
        return delay_ms / 1000


def _delays_s(text: str, subject: str) -> tuple[float, ...]:
    """Parse the delays of a rule, in seconds; the result is empty for "never"."""
    if not isinstance(text, str):
        raise DefinitionError(f"retry of {subject} is {text!r}: {_EXAMPLE}")
    if text.strip() == NEVER:
        return ()
    delays_s = []
    for word in text.split(","):
        delay_s = parse_delay(word)
        if delay_s is None:
            raise DefinitionError(f"retry of {subject}: {word.strip()!r} is not a delay: {_EXAMPLE}")
        if delay_s * 1000 > DELAY_MS_MAX:
            raise DefinitionError(f"retry of {subject}: {word.strip()} is more than 7 days")
        delays_s.append(delay_s)
    return tuple(delays_s)
