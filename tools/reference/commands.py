"""Page of the commands, docs/reference/commands.md, from the commands of click: their help, arguments and options."""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator

import click

from tools.reference.markdown import fence, joined, paragraphs, table, wrapped
from truenext.cli.main import main
from truenext.cli.values import NUMBER_MAX

_HEAD = """\
# Commands

Look up each command of `truenext` here: its arguments, its options with their defaults, and its exit status.
`truenext COMMAND --help` prints the same. `truenext --version` prints the version, and `truenext --version --json` also
those of Python and of the libraries, and the numbers of the formats of files and tables; those of an extra only
where it is installed.

The commands that ask a running broker work when the broker is full, too: it keeps ten connections beyond its limit for
them. A program can send the same requests over STOMP: [control.md](control.md).

This page is made from the commands: `make reference`.
"""
_EXIT_STATUS = """\
## Exit status

| exit status | means |
|---|---|
| 0 | The command has done its work, or all is well. |
| 1 | The answer is no, the command failed, or it did a part of its work. The answer is no if the broker refuses the \
request (there is no such queue, or no queue can have that name), if a queue is stuck, or if a file or folder is \
damaged. The command failed if a disk fails, or standard input cannot be read. A part is missing if an `--id` was not \
found, or if fewer messages came than `receive --count` asked for. |
| 2 | There is no answer. The command line is invalid; or no broker answers (there is none, it closes the connection, \
or the peer is no broker; for `status` and `reload` also an ERROR); or another \
process uses the data folder; or standard output cannot be written to. |
| 3 | Of `serve`: another broker has taken over its messages in PostgreSQL. Started again, this one stands by. |
| 4 | Of `serve`: the database has lost messages that it had confirmed. A person must decide what to do. |
| 130 | Ctrl-C ended the command. |
| 141 | The reader of the command's output has gone. |

Messages that `redrive`, `move` and `purge` leave in the queue do not change the exit status, unless `--id` named them.
"""
_OUTPUT = """\
## Output

Tables fit the width of a terminal. In a pipe or a file no row is wrapped or cut, whatever `COLUMNS` is: each row is a
line. Trees are never wrapped. Programs read `--json`.

Control characters in texts of other programs are shown as `\\x1b` on a terminal. A body in a pipe or a file is written
unchanged. [Decision 41](../decisions/0041-the-command-line.md) has the reasons.
"""
_SHARED = """\
## Options that commands share

Several commands have these options. An environment variable that is empty or blank counts as unset. There is no option
for the password itself: other users of the machine could read it in the list of processes.
[security.md](../security.md) describes users and TLS.
"""
_SHARED_BY = 5
"""Number of commands with the same option, with the same text, from which on the option is described once."""
_EXAMPLES = {
    "receive": ("truenext receive orders --count 10 --json", "truenext receive orders --follow"),
    "send": (
        "truenext send orders '{\"number\": 1}'                # one message",
        "truenext send orders --file a.json --file b.json    # one message of each file",
        "truenext send orders --lines < orders.txt           # one message of each line",
    ),
    "user add": (
        "truenext user add shop --users users.toml --send 'orders.>' --generate   # prints the password",
        "truenext user add till --users users.toml --take orders.new < password   # one line",
    ),
    "user check": ("truenext user check shop send orders.new --users users.toml",),
    "user password": ("truenext user password shop --users users.toml --keep-old",),
}


def page() -> str:
    return joined(_parts())


def _parts() -> Iterator[str]:
    commands = dict(_walk(main))
    shared = _shared_options(commands)
    yield _HEAD
    leaves = {name: command for name, command in commands.items() if not isinstance(command, click.Group)}
    index = [(f"[`{name}`](#{name.replace(' ', '-')})", _first_sentence(command)) for name, command in leaves.items()]
    yield table(("command", "does"), index)
    yield _EXIT_STATUS
    yield _OUTPUT
    yield _SHARED
    yield table(("option", "means"), shared)
    for name, command in commands.items():
        yield from _command(name, command, shared)


def _walk(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands and groups in the order of their names, a group before its commands."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, "it is listed"
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from _walk(command, (*path, name))


def _shared_options(commands: dict[str, click.Command]) -> list[tuple[str, str]]:
    """Return names and text of the options that are the same in several commands."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for command in commands.values():
        for option in _options(command):
            counts[option] += 1
    return [option for option, count in counts.items() if count >= _SHARED_BY]


def _command(name: str, command: click.Command, shared: list[tuple[str, str]]) -> Iterator[str]:
    yield f"{'###' if ' ' in name else '##'} {name}"
    if not isinstance(command, click.Group):
        yield fence(f"truenext {name} {' '.join(command.collect_usage_pieces(click.Context(command)))}", "")
    yield from paragraphs(_marked_up(inspect.cleandoc(command.help or "")))
    if examples := _EXAMPLES.get(name):
        known = {each for parameter in command.params for each in parameter.opts}
        assert set(re.findall(r"(?<!\w)--[a-z-]+", " ".join(examples))) <= known, f"an example of {name} is wrong"
        yield fence("\n".join(examples), "")
    options = _options(command)
    if own := [option for option in options if option not in shared]:
        yield table(("option", "means"), own)
    if others := [f"`{names.split()[0].strip('`')}`" for names, text in options if (names, text) in shared]:
        start = "Also options" if own else "Options"
        yield wrapped(f"{start} that [commands share](#options-that-commands-share): {', '.join(others)}.")


def _options(command: click.Command) -> list[tuple[str, str]]:
    """Return names and text of each option."""
    context = click.Context(command)
    return [
        (_names(option, context), _marked_up(_text(option)))
        for option in command.params
        if isinstance(option, click.Option)
    ]


def _names(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{each}`" for each in (*option.opts, *option.secondary_opts))
    if option.is_flag:
        return names
    kind = option.type
    value = "NUMBER" if isinstance(kind, click.IntRange | type(click.INT)) else option.make_metavar(context).strip("[]")
    if isinstance(kind, click.DateTime):
        value = "TIME"
    return f"`{option.opts[-1]} {value}`"


def _text(option: click.Option) -> str:
    """Return the help of the option, with its range, default and environment variable."""
    parts = [option.help or ""]
    kind = option.type
    if isinstance(kind, click.IntRange):
        parts.append(f"At least {kind.min}." if kind.max == NUMBER_MAX else f"{kind.min:,} to {kind.max:,}.")
    if isinstance(kind, click.DateTime):
        parts.append(f"Formats: {', '.join(f'`{each}`' for each in kind.formats)}.")
    if option.show_default:
        default = option.show_default if isinstance(option.show_default, str) else option.default
        values = default if isinstance(default, list) else [default]
        parts.append(f"Default: {', '.join(f'`{each}`' for each in values)}.")
    if option.envvar:
        parts.append(f"Environment variable: `{option.envvar}`.")
    if option.required:
        parts.append("Required.")
    return " ".join(part for part in parts if part)


def _marked_up(text: str) -> str:
    """Return the text with options as code."""
    pieces = re.split(r"(`[^`]*`|```.*?```)", text, flags=re.DOTALL)
    for number in range(0, len(pieces), 2):
        pieces[number] = re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"`\1`", pieces[number])
    return "".join(pieces)


def _first_sentence(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "").split("\n\n")[0]
