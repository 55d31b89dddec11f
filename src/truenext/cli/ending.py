"""How a command ends: what it says then, in one line, and with which status.

0      it did what it was asked to, and whoever asked a question is told that all is well
1      it could not, or not all of it; or the answer to a question is no
2      nothing is known: what was asked for makes no sense, or cannot be, or there is no answer
130    Ctrl-C
141    whoever read its output has gone
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from truenext.cli import terminal
from truenext.errors import ConfigurationError

COMPLAINT_MAX = 4000
"""Characters: who hands over a wrong value of a megabyte need not see all of it again."""

NO_ANSWER = 2
INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE
"""As of a command that the signal ends; 1 would be an answer."""


class Failure(click.ClickException):
    """What went wrong, in one line, without a traceback."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self._error = error

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return NO_ANSWER if isinstance(self._error, ConfigurationError) else 1

    def show(self, file: object = None) -> None:
        _complain(self)


class Unasked(Failure):
    """There is no answer: 1 would say that it is a bad one."""

    exit_code = NO_ANSWER


class Commands(click.Group):
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
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            status = error.exit_code
        except click.ClickException as error:
            _complain(error)
            status = error.exit_code
        except click.Abort:
            status = INTERRUPTED
        except OSError as error:
            # Of --help: what a command has to say is looked after below.
            _complain(_unwritten(error))
            status = NO_ANSWER
        sys.exit(status if isinstance(status, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except BrokenPipeError as error:
            _forget_output()
            raise SystemExit(UNREAD) from error
        except OSError as error:
            raise _unwritten(error) from error


def _unwritten(error: OSError) -> Unasked:
    if error.filename is not None:
        return Unasked(OSError(f"{error.filename}: {error.strerror}"))
    _forget_output()
    return Unasked(OSError(f"cannot write to standard output: {error.strerror}"))


def _forget_output() -> None:
    """The interpreter would try once more at its end, and complain about it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _complain(error: click.ClickException) -> None:
    complaint = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        complaint = f"{complaint.removesuffix('.')}; see {error.ctx.command_path} --help"
    if len(complaint) > COMPLAINT_MAX:
        complaint = f"{complaint[:COMPLAINT_MAX]}..."
    terminal.say(f"truenext: {complaint}", err=True)
