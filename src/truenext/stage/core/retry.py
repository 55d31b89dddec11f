"""Retry rules of a stage: whether a failed message is tried again, and after which delay.

    retry={PricesDown: "2s, 10s, 1m", BadCard: "never"}

The first delay follows the first failure of a message, and so on; the last delay follows all further failures. The
broker counts the failures. An exception without a rule follows the policy of the queue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from truenext.model.limits import DELAY_MS_MAX
from truenext.stage.core.errors import DefinitionError, FlowError, NotDecoded, Reject
from truenext.stage.core.failure import ungrouped_errors

NEVER = "never"
"""Text of a rule that allows no retry: the message becomes a dead letter at once."""
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_IS_DELAY = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)").fullmatch
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
        """Decide about a failed message. `failures` includes the current failure; `attempts_max` is the stage's own
        limit, None without one.

        For an exception group, a rule for the group's own class counts first. Without such a rule, the message is
        rejected if an error in the group has the rule "never"; else the longest delay of the errors counts.
        """
        if attempts_max is not None and failures >= attempts_max:
            return REJECTED
        group_classes = [each for each in type(error).__mro__ if issubclass(each, BaseExceptionGroup)]
        errors = [error] if any(each in self._delays_s for each in group_classes) else ungrouped_errors(error)
        retries = [self._retry_for(each, failures) for each in errors]
        if REJECTED in retries:
            return REJECTED
        return RetryDecision(max((each.delay_s for each in retries if each.delay_s is not None), default=None))

    def _retry_for(self, error: BaseException, failures: int) -> RetryDecision:
        if isinstance(error, Reject | NotDecoded | FlowError):
            return REJECTED
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
    is_rejected: bool = False


REJECTED = RetryDecision(None, is_rejected=True)
QUEUE_POLICY = RetryDecision(None)


def _delays_s(text: str, subject: str) -> tuple[float, ...]:
    """Parse the delays of a rule, in seconds; the result is empty for "never"."""
    if not isinstance(text, str):
        raise DefinitionError(f"retry of {subject} is {text!r}: {_EXAMPLE}")
    if text.strip() == NEVER:
        return ()
    delays_s = []
    for word in text.split(","):
        found = _IS_DELAY(word.strip())
        if found is None:
            raise DefinitionError(f"retry of {subject}: {word.strip()!r} is not a delay: {_EXAMPLE}")
        delay_s = float(found[1]) * _UNITS_S[found[2]]
        if delay_s * 1000 > DELAY_MS_MAX:
            raise DefinitionError(f"retry of {subject}: {word.strip()} is more than 7 days")
        delays_s.append(delay_s)
    return tuple(delays_s)
