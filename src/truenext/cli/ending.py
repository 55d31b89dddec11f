"""How a command ends: what it says then, in one line, and with which status.

0      it did what it was asked to, and whoever asked a question is told that all is well
1      it could not, or not all that was named one by one; or the answer to a question is no, such as a broker's ERROR
2      nothing is known: what was asked for makes no sense, or cannot be; no broker answers, or not to the end; or
       standard output cannot be written to
130    Ctrl-C
141    whoever read its output has gone
"""

import errno
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from truenext.cli import terminal
from truenext.cli.lazy import LazyGroup
from truenext.errors import ConfigurationError, ConnectionLost, NoBroker, RemoteProtocolError

COMPLAINT_MAX = 4000
"""Characters: who hands over a wrong value of a megabyte need not see all of it again."""

NO_ANSWER = 2
INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE
"""As of a command that the signal ends; 1 would be an answer."""

UNANSWERED = (ConfigurationError, ConnectionLost, RemoteProtocolError)
"""Nobody was asked, nobody answered, or what answered is no broker."""


START_ONE = "start one with `truenext serve`, or say where it is with --url or TRUENEXT_URL"


class Failure(click.ClickException):
    """What went wrong, in one line, without a traceback."""

    def __init__(self, error: Exception) -> None:
        said = str(error)
        if isinstance(error, NoBroker):
            said = f"{error}; {START_ONE}"
        elif isinstance(error, OSError) and error.filename is not None:
            said = f"{error.filename}: {error.strerror}"
        super().__init__(said)
        self._error = error

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return NO_ANSWER if isinstance(self._error, UNANSWERED) else 1

    def show(self, file: object = None) -> None:
        _complain(self)


class Unasked(Failure):
    """There is no answer: 1 would say that it is a bad one."""

    exit_code = NO_ANSWER


class Commands(LazyGroup):
    """Says in one line what is wrong with a command line, and what came of writing to standard output."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        terminal.open_output()
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            terminal.say(error.format_message(), err=True)
            status = error.exit_code
        except click.ClickException as error:
            _complain(error)
            status = error.exit_code
        except click.Abort:
            status = INTERRUPTED
        terminal.flush_errors()
        sys.exit(status if isinstance(status, int) else 0)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        # This is where --help and --version are printed.
        with _written():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _written():
            return super().invoke(ctx)


@contextmanager
def _written() -> Iterator[None]:
    """What is printed within is written at the end, or the command ends as its standard output does.

    Raises: Unasked, SystemExit
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        terminal.forget(sys.stdout)
        raise SystemExit(UNREAD) from error
    except OSError as error:
        raise _unwritten(error) from error


def _unwritten(error: OSError) -> Unasked:
    if error.filename is not None:
        return Unasked(error)
    terminal.forget(sys.stdout)
    reason = "it is closed, or open for reading only" if error.errno == errno.EBADF else error.strerror
    return Unasked(OSError(f"cannot write to standard output: {reason}"))


def _complain(error: click.ClickException) -> None:
    complaint = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        join = " See" if complaint.endswith(("?", ")")) else "; see"
        complaint = f"{complaint.removesuffix('.')}{join} {error.ctx.command_path} --help"
    if len(complaint) > COMPLAINT_MAX:
        complaint = f"{complaint[:COMPLAINT_MAX]}..."
    terminal.say(f"truenext: {complaint}", err=True)
