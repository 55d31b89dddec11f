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

MESSAGE_LENGTH_MAX = 4000
"""Characters: who hands over a wrong value of a megabyte need not see all of it again."""

NO_ANSWER = 2
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE
"""As of a command that the signal ends; 1 would be an answer."""

NO_ANSWER_ERRORS = (ConfigurationError, ConnectionLost, RemoteProtocolError)
"""Nobody was asked, nobody answered, or what answered is no broker."""


START_HINT = "start one with `truenext serve`, or say where it is with --url or TRUENEXT_URL"


class CommandFailure(click.ClickException):
    """What went wrong, in one line, without a traceback."""

    def __init__(self, error: Exception) -> None:
        message = str(error)
        if isinstance(error, NoBroker):
            message = f"{error}; {START_HINT}"
        elif isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        super().__init__(message)
        self._error = error

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return NO_ANSWER if isinstance(self._error, NO_ANSWER_ERRORS) else 1

    def show(self, file: object = None) -> None:
        _print_error(self)


class NoAnswerFailure(CommandFailure):
    """There is no answer: 1 would say that it is a bad one."""

    exit_code = NO_ANSWER


class MainGroup(LazyGroup):
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
        terminal.ensure_stdout()
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            terminal.echo(error.format_message(), err=True)
            status = error.exit_code
        except click.ClickException as error:
            _print_error(error)
            status = error.exit_code
        except click.Abort:
            status = INTERRUPTED
        terminal.flush_errors()
        sys.exit(status if isinstance(status, int) else 0)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        # This is where --help and --version are printed.
        with _flushed_output():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _flushed_output():
            return super().invoke(ctx)


@contextmanager
def _flushed_output() -> Iterator[None]:
    """What is printed within is written at the end, or the command ends as its standard output does.

    Raises: NoAnswer, SystemExit
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        terminal.discard_output(sys.stdout)
        raise SystemExit(BROKEN_PIPE) from error
    except OSError as error:
        raise _output_error(error) from error


def _output_error(error: OSError) -> NoAnswerFailure:
    if error.filename is not None:
        return NoAnswerFailure(error)
    terminal.discard_output(sys.stdout)
    reason = "it is closed, or open for reading only" if error.errno == errno.EBADF else error.strerror
    return NoAnswerFailure(OSError(f"cannot write to standard output: {reason}"))


def _print_error(error: click.ClickException) -> None:
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        join = " See" if message.endswith(("?", ")")) else "; see"
        message = f"{message.removesuffix('.')}{join} {error.ctx.command_path} --help"
    if len(message) > MESSAGE_LENGTH_MAX:
        message = f"{message[:MESSAGE_LENGTH_MAX]}..."
    terminal.echo(f"truenext: {message}", err=True)
