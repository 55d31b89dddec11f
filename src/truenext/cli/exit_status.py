"""Exit status of a command, and its error in one line.

0      the command is done, or the answer to its question is yes
1      the command failed, or did only a part of what was named; or the answer is no, such as a broker's ERROR
2      there is no answer: the command line is invalid, no broker answers, an answer is cut off, another process uses
       the data folder, or standard output cannot be written to
3      `serve` has ended because another broker has taken over its log, or was named by `failover` to do so
4      `serve` has ended because its database has lost rows that it had confirmed, and that no broker can put back
130    Ctrl-C
141    the reader of standard output has gone
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
from truenext.errors import (
    ConfigurationError,
    ConnectionLost,
    NoBroker,
    RemoteProtocolError,
    StoreFencedError,
    StoreForgottenError,
    StoreInUseError,
    TruenextError,
)

MESSAGE_LENGTH_MAX = 4000
"""Largest number of characters of an error. A wrong value of a megabyte is not repeated completely."""

NO_ANSWER = 2
FENCED = 3
FORGOTTEN = 4
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit status of a command whose reader has gone. The status is that of a process ended by SIGPIPE. It differs from 1,
which would be an answer."""

NO_ANSWER_ERRORS = (ConfigurationError, ConnectionLost, RemoteProtocolError, StoreInUseError)
"""Errors that mean that there is no answer: no request could be sent, no request was answered, the peer is no broker,
or another process uses the data folder."""


START_HINT = (
    "start one with `truenext serve`, set its address with --url or TRUENEXT_URL, or see `truenext store status` if "
    "one stands by"
)

ADDRESS_HINT = "check the address, which --url or TRUENEXT_URL sets"
"""Advice where the host is not known, or has not answered, so that a broker may well run."""


class CommandFailure(click.ClickException):
    """Error of a command. It is printed in one line, without a traceback."""

    def __init__(self, error: Exception, url_option: str = "--url") -> None:
        """Word an error. `url_option` is the command's option for addresses of brokers."""
        message = str(error)
        if isinstance(error, NoBroker) and not error.is_listening:
            hint = START_HINT if error.is_refused else ADDRESS_HINT
            message = f"{error}; {hint.replace('--url', url_option)}"
        elif isinstance(error, OSError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}"
        super().__init__(message)
        self._error = error

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        match self._error:
            case StoreFencedError():
                return FENCED
            case StoreForgottenError():
                return FORGOTTEN
        return NO_ANSWER if isinstance(self._error, NO_ANSWER_ERRORS) else 1

    def show(self, file: object = None) -> None:
        _print_error(self)


class NoAnswerFailure(CommandFailure):
    """Error that means that there is no answer, with exit status 2. Status 1 would say that the answer is no."""

    exit_code = NO_ANSWER


class MainGroup(LazyGroup):
    """Command group that prints each error in one line: errors of the command line, of truenext, and of standard
    output."""

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
        except (click.ClickException, TruenextError) as error:
            failure = CommandFailure(error) if isinstance(error, TruenextError) else error
            _print_error(failure)
            status = failure.exit_code
        except click.Abort:
            status = INTERRUPTED
        terminal.flush_errors()
        sys.exit(status if isinstance(status, int) else 0)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        # --help and --version are printed here.
        with _flushed_output():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _flushed_output():
            return super().invoke(ctx)


@contextmanager
def _flushed_output() -> Iterator[None]:
    """Flush standard output at the end of the block. If standard output fails, the command ends.

    Raises: SystemExit if the reader of standard output has gone; NoAnswerFailure if it cannot be written to
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
        join = " See" if message.endswith("?") else "; see"
        message = f"{message.removesuffix('.')}{join} {error.ctx.command_path} --help"
    if len(message) > MESSAGE_LENGTH_MAX:
        message = f"{message[:MESSAGE_LENGTH_MAX]}..."
    terminal.echo(f"truenext: {message}", err=True)
