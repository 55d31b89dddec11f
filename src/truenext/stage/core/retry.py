"""What follows when a stage has failed: tried again when, or not at all.

    retry={PricesDown: "2s, 10s, 1m", BadCard: "never"}

The delay after the nth failure of a message is the nth of its list, the last one for all that follow; which failure it
is, says the broker, which counts attempts. What no class names is left to the policy of the queue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from truenext.model.limits import DELAY_MS_MAX
from truenext.stage.core.errors import DefinitionError, FlowError, NotDecoded, Reject
from truenext.stage.core.failure import ungrouped_errors

NEVER = "never"
"""It is not tried again: a dead letter at once."""
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_IS_DELAY = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)").fullmatch
_EXAMPLE = 'say "2s, 10s, 1m", or "never"'


class RetryRules:
    """When what raised an exception of which class is tried again."""

    __slots__ = ("_delays_s",)

    def __init__(self, rules: Mapping[type[BaseException], str], subject: str) -> None:
        """`subject` names the stage or service. Raises: DefinitionError"""
        self._delays_s: dict[type[BaseException], tuple[float, ...]] = {}
        if not isinstance(rules, Mapping):
            raise DefinitionError(
                f'retry of {subject} is {rules!r}: say delays by classes of exceptions, {{Busy: "2s"}}'
            )
        for kind, delays in rules.items():
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise DefinitionError(f"retry of {subject}: {kind!r} is no class of exceptions")
            self._delays_s[kind] = _delays_s(delays, subject)

    def with_defaults(self, defaults: RetryRules) -> RetryRules:
        """These, and of the others what these do not name."""
        merged = RetryRules({}, "")
        merged._delays_s = defaults._delays_s | self._delays_s
        return merged

    def decide(self, error: BaseException, failures: int, attempts_max: int | None) -> RetryDecision:
        """`failures` counts this one, too; `attempts_max` is the stage's own, if it has one.

        Of a group decides what is in it, unless a rule names a class of groups: one that is never tried again suffices,
        else the longest delay counts.
        """
        if attempts_max is not None and failures >= attempts_max:
            return REJECTED
        if isinstance(error, BaseExceptionGroup) and not any(
            kind in self._delays_s for kind in _exception_group_classes(error)
        ):
            retries = [self._retry_for(each, failures) for each in ungrouped_errors(error)]
        else:
            retries = [self._retry_for(error, failures)]
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
    """It is tried again after so many seconds; None is what the policy of the queue says."""

    delay_s: float | None
    is_rejected: bool = False
    """It is not tried again."""


def _exception_group_classes(group: BaseException) -> list[type]:
    return [each for each in type(group).__mro__ if issubclass(each, BaseExceptionGroup)]


REJECTED = RetryDecision(None, is_rejected=True)
QUEUE_POLICY = RetryDecision(None)


def _delays_s(text: str, subject: str) -> tuple[float, ...]:
    """Empty is never."""
    if not isinstance(text, str):
        raise DefinitionError(f"retry of {subject} is {text!r}: {_EXAMPLE}")
    if text.strip() == NEVER:
        return ()
    delays_s = []
    for word in text.split(","):
        found = _IS_DELAY(word.strip())
        if found is None:
            raise DefinitionError(f"retry of {subject}: {word.strip()!r} is no delay: {_EXAMPLE}")
        delay_s = float(found[1]) * _UNITS_S[found[2]]
        if delay_s * 1000 > DELAY_MS_MAX:
            raise DefinitionError(f"retry of {subject}: {word.strip()} is more than 7 days")
        delays_s.append(delay_s)
    return tuple(delays_s)
