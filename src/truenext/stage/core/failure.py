"""Cause of a stage's failure, as a text that the broker stores with the message, and the failure of a request, as the
broker describes it."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from truenext.model.limits import CAUSE_BYTES_MAX
from truenext.stage.core.errors import NoAttemptsLeft

FAILURE: Final = "truenext-failure"
"""Header of a message that describes a failure. Its value says whether the message is a report, or a failed message for
its handler. Source: docs/contract.md, C11.7 and C11.8"""
REPORT: Final = "report"
HANDLED: Final = "handled"

SHOWN_MAX = 65536
"""Longest text of an error, in characters, that is logged with a traceback. If the text is longer, only its beginning
is logged."""
_PACKAGE_DIR = __file__.rpartition("/stage/")[0] + "/"
_LIBRARY_PREFIXES = (_PACKAGE_DIR, f"{sysconfig.get_path('stdlib')}/", "<frozen ")
"""First parts of the paths of truenext's and of Python's own files. Other files are the program's."""


class Failure(msgspec.Struct, frozen=True):
    """Failure of a request, for the function that `on_failure` decorates: a message of the requested flow could not be
    processed."""

    stage: str
    """Queue of the stage that failed, such as stock.reserve."""
    reason: str
    """Reason why the broker gave up the message."""
    attempts: int
    """Number of attempts of the message."""
    first_cause: str
    """Cause of the first attempt that had a cause: the exception, its line, the stage and its process; "" if no attempt
    had one."""
    last_cause: str
    """Cause of the last attempt that had a cause; "" if no attempt had one."""


def failure_of(headers: Mapping[str, str]) -> Failure:
    """Return the failure that the headers describe. `headers` are those of a report, or of a failed message that the
    broker has moved to its handler."""
    attempts = headers.get("truenext-original-attempts", "0")
    return Failure(
        stage=headers.get("truenext-original-destination", "").removeprefix("/queue/"),
        reason=headers.get("truenext-dead-letter-cause", ""),
        attempts=int(attempts) if attempts.isdecimal() else 0,
        first_cause=headers.get("truenext-original-first-cause", ""),
        last_cause=headers.get("truenext-original-last-cause", ""),
    )


def cause_of(error: BaseException, stage: str, instance: str) -> str:
    """Return the cause as text: the error, its place in the code, the errors that caused it, and the stage and its
    process. For an exception group, it has the errors in the group, too. Example:

        PricesDown: no answer from prices.example
        at reserve in shop.py:42
        because TimeoutError: timed out
        in stage order.place.stage.reserve, by shop web-1 pid 4711
    """
    end = f"in stage {stage}, by {instance}"
    size_max = CAUSE_BYTES_MAX - len(end.encode(errors="replace")) - 1
    text = ""
    for line in _lines(error):
        text += f"\n{line}" if text else line
        if len(text) >= size_max:
            break
    return f"{text.encode(errors='replace')[:size_max].decode(errors='ignore')}\n{end}"


def describe_error(error: BaseException) -> str:
    """Return the class of an error and the beginning of its text."""
    text = _text(error)[:CAUSE_BYTES_MAX]
    name = type(error).__qualname__
    return f"{name}: {text}" if text else name


def is_text_too_long(error: BaseException) -> bool:
    """Return whether the text of the error, or of an error that caused it, is so long that logging it would block the
    event loop."""
    return any(len(_text(each)) > SHOWN_MAX for each in _chain(error))


def ungrouped_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in an exception group, such as that of a TaskGroup, and in groups within it. If the error is not
    a group, yield the error itself."""
    rest = [error]
    while rest:
        each = rest.pop()
        if isinstance(each, BaseExceptionGroup):
            rest.extend(reversed(each.exceptions))
        else:
            yield each


def _lines(error: BaseException) -> Iterator[str]:
    if isinstance(error, NoAttemptsLeft) and error.last_cause:
        # Dead letters are selected by how their cause begins: keep the error that the program raised.
        yield error.last_cause
    because = ""
    for cause in _chain(error):
        yield f"{because}{describe_error(cause)}"
        if cause is error:
            yield from _location(cause)
        if isinstance(cause, BaseExceptionGroup):
            for each in ungrouped_errors(cause):
                yield f"in it {describe_error(each)}"
                yield from _location(each)
        because = "because "


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, the error that caused it, and so on."""
    cause: BaseException | None = error
    seen = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be read)"


def _location(error: BaseException) -> Iterator[str]:
    """Yield the location of the error: the innermost line of the program's own code in the traceback. Yield nothing if
    there is no such line."""
    location = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith(_LIBRARY_PREFIXES):
            location = f"at {frame.f_code.co_name} in {file.rpartition('/')[2]}:{line}"
    if location:
        yield location
