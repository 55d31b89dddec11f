"""`truenext user`: edits a broker's users file, and tells what a user may do. Source: docs/security.md

Each edit is checked as the broker checks the file. An edit replaces the whole file in one step, or fails and changes
nothing. Passwords come from the terminal or from standard input. No argument, error or log contains a password.
"""

import os
import secrets
import shlex
import stat
import sys
import tempfile
import tomllib
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import click
import tomlkit
from rich.table import Table
from tomlkit.exceptions import TOMLKitError

from truenext.broker.passwords import hash_password
from truenext.broker.regular_file import read_regular_file
from truenext.broker.users import (
    ADMIN,
    CLIENT_IDS,
    HASHES_MAX,
    MONITOR,
    PASSWORD_BYTES_MAX,
    PASSWORD_FILE,
    PASSWORDS,
    ROLE,
    ROLES,
    USER,
    UserEntry,
    Users,
    check_users,
    fault_of_client_id,
    fault_of_name,
    fault_of_password,
    read_users,
    suggest_name,
    table_header,
)
from truenext.cli import terminal
from truenext.cli.exit_status import CommandFailure
from truenext.cli.values import USERS_VARIABLE, CheckedTextParam, EnumParam, PathParam
from truenext.errors import TruenextError
from truenext.model.grants import QUEUE_PREFIX, Pattern, Right, User, parse_pattern
from truenext.store.folder import sync_folder


def _check_named(fault_of: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Return a check that does the same as `fault_of`, but begins its error with the checked text."""

    def named(value: str) -> str | None:
        fault = fault_of(value)
        return fault and f"{value[:100]!r}: {fault}"

    return named


def _fault_of_pattern(value: str) -> str | None:
    try:
        parse_pattern(value)
    except ValueError as error:
        return f"{value[:100]!r} {error}"
    return None


NAME = CheckedTextParam("name", _check_named(fault_of_name))
CLIENT_ID = CheckedTextParam("text", _check_named(fault_of_client_id))
PATTERN = CheckedTextParam("pattern", _fault_of_pattern)

users_option = click.option(
    "--users",
    "file",
    type=PathParam(dir_okay=False),
    required=True,
    envvar=USERS_VARIABLE,
    show_envvar=True,
    help="The users file.",
)
name_argument = click.argument("name", metavar="NAME", type=NAME)
generate_option = click.option(
    "--generate", is_flag=True, help="Generate the password, and print it once, alone on standard output."
)


def _grant_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each kind of grant to a command. The command gets these options as the argument `grants`: keys
    and values, as in a user's table of the file."""

    @_right_option(Right.SEND, "Grant to send to these queues or topics.")
    @_right_option(Right.TAKE, "Grant to consume these queues, and to subscribe to these topics.")
    @_right_option(Right.BROWSE, "Grant to browse these queues: to read messages without consuming them.")
    @_right_option(Right.MANAGE, "Grant to pause, resume, purge, move, redrive and unschedule in these queues.")
    @click.option(
        "--role",
        ROLES,
        type=NAME,
        multiple=True,
        help="Give the user all grants of this role, a table [role.NAME] of the users file.",
    )
    @click.option(
        "--client-id",
        CLIENT_IDS,
        type=CLIENT_ID,
        multiple=True,
        help="Grant to use durable subscriptions of this client id.",
    )
    @click.option(
        "--monitor", is_flag=True, help="Grant to send the control requests `status`, and `queues` for all queues."
    )
    @click.option(
        "--admin",
        is_flag=True,
        help="Grant to send the control requests `reload`, `failover`, `backup` and `drain`, and `scheduled` and "
        "`unschedule` for all destinations.",
    )
    @wraps(command)
    def with_grants(**values: Any) -> None:
        lists = {key: list(dict.fromkeys(values.pop(key))) for key in _LISTS}
        flags = {key: values.pop(key) for key in (MONITOR, ADMIN)}
        command(grants={key: value for key, value in (lists | flags).items() if value}, **values)

    return with_grants


def _right_option(right: Right, help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(f"--{right.value}", type=PATTERN, multiple=True, metavar="PATTERN", help=help)


_LISTS = (ROLES, CLIENT_IDS, *(right.value for right in Right))
"""Keys of a user's table whose values are lists."""


@click.group()
def user() -> None:
    """Add, change and check the users of a broker.

    The users file is for `truenext serve --users`; see docs/security.md. A running broker uses a changed file after
    SIGHUP, or after `truenext reload` by an admin.

    A change is checked, and then replaces the whole file. Comments, order, mode and owner of the file stay. If the file
    has faults, the command changes nothing and prints all of them.
    """


@user.command()
@name_argument
@users_option
@_grant_options
@generate_option
def add(name: str, file: Path, grants: dict[str, Any], generate: bool) -> None:
    """Add a user.

    The options --send to --admin are the user's grants, and can be repeated. If there is no users file, it is made,
    with mode 0600. The password is asked for twice on a terminal; otherwise it is the first line of standard input.
    """
    edited = _UsersFile(file, may_be_missing=True)
    if name in edited.users:
        raise TruenextError(f"{file} has a user {name!r} already; `truenext user password` changes the password")
    password = _new_password(generate)
    edited.add(name, {PASSWORDS: [hash_password(password)], **grants})
    _finish(f"user {name!r} was added to {file}", password if generate else None)


@user.command()
@name_argument
@users_option
@click.option(
    "--keep-old", is_flag=True, help="Accept the old password, too, until the next change without this option."
)
@generate_option
def password(name: str, file: Path, keep_old: bool, generate: bool) -> None:
    """Replace the password of a user.

    The password is asked for twice on a terminal; otherwise it is the first line of standard input. With --keep-old the
    old password works, too: once all clients have the new one, remove the second hash from `passwords` in the file.
    """
    edited = _UsersFile(file)
    old = edited.entry(name)
    if old.password is not None:
        raise TruenextError(f"user {name!r} has its password in a {PASSWORD_FILE}: change it there")
    if keep_old and len(old.hashes) >= HASHES_MAX:
        raise TruenextError(
            f"user {name!r} has two passwords already: remove one of them from {PASSWORDS} in {file}, "
            "or leave --keep-old out, which replaces both"
        )
    new = _new_password(generate)
    edited.set_passwords(name, [hash_password(new), *(old.hashes if keep_old else ())])
    _finish(f"the password of user {name!r} was changed in {file}", new if generate else None)


@user.command()
@name_argument
@users_option
@_grant_options
def grant(name: str, file: Path, grants: dict[str, Any]) -> None:
    """Add grants to a user.

    The options can be repeated. A grant that the user's own table has already is not added again.
    """
    _check_any(grants)
    edited = _UsersFile(file)
    edited.entry(name)
    own = edited.table(name)
    missing = {
        key: _missing(key, value, own.get(key, [])) if key in _LISTS else not own.get(key)
        for key, value in grants.items()
    }
    added = {key: value for key, value in missing.items() if value}
    if not added:
        terminal.echo(f"user {name!r} has these grants already; {file} was not changed", err=True)
        return
    edited.add_grants(name, added)
    _finish(f"user {name!r} has more grants in {file}")


@user.command()
@name_argument
@users_option
@_grant_options
def revoke(name: str, file: Path, grants: dict[str, Any]) -> None:
    """Remove grants from a user.

    The options can be repeated. Each must be a grant in the user's own table, written as `truenext user grant` added
    it. Only a whole pattern can be removed, and the grants of roles stay. If another grant still allows the same, the
    command says so.
    """
    _check_any(grants)
    edited = _UsersFile(file)
    edited.entry(name)
    own = edited.table(name)
    for key, value in grants.items():
        missing = _missing(key, value, own.get(key, [])) if key in _LISTS else []
        if missing or not own.get(key):
            what = f"{missing[0]!r} in `{key}`" if missing else f"`{key}`"
            raise TruenextError(f"{table_header(USER, name)} of {file} does not have {what}; nothing was changed")
    edited.remove_grants(name, grants)
    _finish(f"user {name!r} has fewer grants in {file}")
    now = _UsersFile(file).entry(name).user
    for right in Right:
        for text in grants.get(right.value, ()):
            _warn_if_allowed(now, right, text)


def _check_any(grants: dict[str, Any]) -> None:
    if not grants:
        raise click.UsageError("name a grant, such as --send PATTERN")


def _missing(key: str, values: list[str], own: list[str]) -> list[str]:
    """Return the values that are not in a list of the file. The file may have the same pattern in another form."""
    present = {_comparable(key, each) for each in own}
    return [each for each in values if _comparable(key, each) not in present]


def _comparable(key: str, value: str) -> object:
    return value if key in (ROLES, CLIENT_IDS) else parse_pattern(value)


def _warn_if_allowed(now: User, right: Right, text: str) -> None:
    requested = parse_pattern(text)
    allowing = _granted_by(now, right, requested)
    if allowing:
        terminal.echo(
            f"note: user {now.name!r} may still {right.value} {requested}: granted by {', '.join(allowing)}", err=True
        )


def _granted_by(user: User, right: Right, requested: Pattern) -> list[str]:
    return sorted(str(pattern) for pattern in user.grants[right] if pattern.covers(requested))


@user.command()
@name_argument
@users_option
def remove(name: str, file: Path) -> None:
    """Remove a user."""
    edited = _UsersFile(file)
    edited.entry(name)
    edited.remove(name)
    _finish(f"user {name!r} was removed from {file}")


@user.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@users_option
def list_users(as_json: bool, file: Path) -> None:
    """List the users and what they may do, their roles included."""
    facts = [_facts(entry) for entry in _UsersFile(file).users.values()]
    if as_json:
        terminal.write_json(facts)
        return
    table = Table("user", "password", *(right.value for right in Right), "more", "client ids", box=None)
    for each in facts:
        more = [flag for flag in (MONITOR, ADMIN) if each[flag]]
        patterns = [[text.removeprefix(QUEUE_PREFIX) for text in each[right.value]] for right in Right]
        cells = [", ".join(texts) for texts in (*patterns, more, each[CLIENT_IDS])]
        kept = ("file", "1 hash", "2 hashes")[each[PASSWORDS]]
        table.add_row(*map(terminal.table_cell, (each["name"], kept, *cells)))
    terminal.print_drawn(table)


def _facts(entry: UserEntry) -> dict[str, Any]:
    user = entry.user
    patterns = {right.value: sorted(map(str, user.grants[right])) for right in Right}
    return {
        "name": user.name,
        # Their number only: a hash can be attacked.
        PASSWORDS: len(entry.hashes),
        **patterns,
        MONITOR: user.is_monitor,
        ADMIN: user.is_admin,
        CLIENT_IDS: sorted(user.client_ids),
    }


@user.command("hash")
def print_hash() -> None:
    """Print the `passwords` of a user, to be put into a users file.

    This is for a users file that other tools make, such as a template or a config map. The password is asked for twice
    on a terminal; otherwise it is the first line of standard input.
    """
    terminal.echo(tomlkit.dumps({PASSWORDS: [hash_password(_new_password(False))]}).rstrip("\n"))


@user.command()
@name_argument
@click.argument("right", metavar="RIGHT", type=EnumParam(Right))
@click.argument("destination", metavar="DESTINATION", type=PATTERN)
@users_option
def check(name: str, right: Right, destination: str, file: Path) -> None:
    """Print which grant allows a user to send, take, browse or manage.

    RIGHT is send, take, browse or manage. DESTINATION is a queue, topic or pattern: orders, /topic/news, 'orders.>'. A
    pattern is allowed only if one grant covers all of it.

    Exits 0 if a grant allows it, 1 if none does, 2 if the users file cannot be read or has faults.
    """
    user = _UsersFile(file).entry(name).user
    requested = parse_pattern(destination)
    allowing = _granted_by(user, right, requested)
    if allowing:
        terminal.echo(f"user {name!r} may {right.value} {requested}: granted by {', '.join(allowing)}")
        return
    missing = str(requested).removeprefix(QUEUE_PREFIX)
    terminal.echo(
        f"user {name!r} may not {right.value} {requested}: run `truenext user grant {name} --{right.value} "
        f"{shlex.quote(missing)}`, or add the pattern to one of its roles"
    )
    raise SystemExit(1)


# ---- Passwords ----


def _new_password(generate: bool) -> str:
    """Return a new password: a generated one, or one from the terminal or from standard input.

    Raises: click.UsageError if it cannot be a password
    """
    if generate:
        return secrets.token_urlsafe(24)
    if sys.stdin is None:
        raise click.UsageError("standard input is closed: give it a line with the password")
    if sys.stdin.isatty():
        given: str = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        line = sys.stdin.buffer.readline(PASSWORD_BYTES_MAX + 3)
        given = line.removesuffix(b"\n").removesuffix(b"\r").decode(errors="surrogateescape")
    if fault := fault_of_password(given):
        raise click.UsageError(f"standard input: {fault}")
    return given


def _finish(done: str, generated: str | None = None) -> None:
    if generated is not None:
        click.echo(generated)
    terminal.echo(f"{done}; a running broker uses the file after SIGHUP, or `truenext reload` by an admin", err=True)


# ---- The file ----


class _UsersFile:
    """Users file that a command shows or edits. Each edit replaces the whole file, or fails and changes nothing."""

    def __init__(self, file: Path, *, may_be_missing: bool = False) -> None:
        """Read and check the file.

        Raises: TruenextError if the file has faults; CommandFailure if it cannot be read
        """
        self._file = file
        self._before: bytes | None = None
        """Content of the file when it was read; None if there was no file."""
        self.users = Users()
        try:
            if not may_be_missing or file.exists():
                self.users = read_users(file)
                self._before = read_regular_file(file)
        except OSError as error:
            raise CommandFailure(error) from error
        for warning in self.users.warnings:
            terminal.echo(f"warning: {warning}", err=True)

    def entry(self, name: str) -> UserEntry:
        """Return the entry of a user.

        Raises: TruenextError if there is no such user
        """
        if name not in self.users:
            raise TruenextError(f"{self._file} has no user {name!r}{suggest_name(name, self.users)}")
        return self.users[name]

    def add(self, name: str, entry: dict[str, Any]) -> None:
        """Add a user's table at the end of the file. Raises: TruenextError if the file cannot be changed"""
        text = self._text()
        if text:
            text += "\n" if text.endswith("\n") else "\n\n"

        def edit(document: Any) -> None:
            document[USER][name] = entry

        self._replace(text + tomlkit.dumps({USER: {name: entry}}), edit)

    def set_passwords(self, name: str, hashes: list[str]) -> None:

        def edit(document: Any) -> None:
            document[USER][name][PASSWORDS] = hashes

        self._replace(self._edited(edit), edit)

    def table(self, name: str) -> dict[str, Any]:
        """Return the user's own table as the file has it. The grants of the user's roles are not in it."""
        found: dict[str, Any] = _content(self._text())[USER][name]
        return found

    def add_grants(self, name: str, added: dict[str, Any]) -> None:
        """Add grants to the user's table: to lists that it has, or as new keys after its last one. The table must not
        have these grants yet.

        Raises: TruenextError if the file cannot be changed
        """
        old = self.table(name)

        def edit_present(document: Any) -> None:
            for key in added.keys() & old.keys():
                if key in _LISTS:
                    document[USER][name][key].extend(added[key])
                else:
                    document[USER][name][key] = True

        def add_keys(document: Any) -> None:
            for key, value in added.items():
                if key not in old:
                    document[USER][name][key] = value

        def edit(document: Any) -> None:
            edit_present(document)
            add_keys(document)

        text = self._edited(edit_present)
        self._replace(_with_keys_before_comments(text, self._edited(add_keys, text)), edit)

    def remove_grants(self, name: str, removed: dict[str, Any]) -> None:
        """Remove grants from the user's table: values from lists, or keys that are flags.

        Raises: TruenextError if the file cannot be changed
        """

        def edit(document: Any) -> None:
            table = document[USER][name]
            for key, values in removed.items():
                if key not in _LISTS:
                    del table[key]
                    continue
                revoked = {_comparable(key, each) for each in values}
                for index in reversed(range(len(table[key]))):
                    if _comparable(key, table[key][index]) in revoked:
                        del table[key][index]

        self._replace(self._edited(edit), edit)

    def remove(self, name: str) -> None:
        """Remove a user's table. Comments between it and the next table stay. Raises: TruenextError if the file cannot
        be changed"""

        def edit(document: Any) -> None:
            del document[USER][name]

        self._replace(_with_comments_after(self._text(), self._edited(edit)), edit)

    def _text(self) -> str:
        return "" if self._before is None else self._before.decode()

    def _edited(self, edit: Callable[[Any], None], text: str | None = None) -> str:
        """Apply an edit to a text, by default to the text of the file, and return the new text. Raises: TruenextError
        if the edit is impossible"""
        try:
            document = tomlkit.parse(self._text() if text is None else text)
            edit(document)
            return tomlkit.dumps(document)
        except (TOMLKitError, LookupError, TypeError) as error:
            # tomlkit does not know all of TOML.
            self._raise_by_hand(error)

    def _raise_by_hand(self, cause: Exception | None = None) -> NoReturn:
        raise TruenextError(
            f"cannot change {self._file} without changing other parts of it: edit it by hand"
        ) from cause

    def _replace(self, text: str, edit: Callable[[Any], None]) -> None:
        """Replace the file by `text`. The text must mean exactly what the file means after `edit`.

        Raises: TruenextError if the text means something else or has faults, or if the file cannot be written
        """
        expected = _content(self._text())
        edit(expected)
        try:
            # tomlkit loses parts of some files.
            if _content(text) != expected:
                self._raise_by_hand()
        except ValueError as error:
            self._raise_by_hand(error)
        try:
            check_users(self._file, text.encode())
            self._write(text.encode())
            if self._before is None:
                terminal.echo(f"made {self._file}", err=True)
        except OSError as error:
            raise TruenextError(f"cannot write {self._file}: {error.strerror or error}") from error

    def _write(self, content: bytes) -> None:
        # A link to the file stays one.
        target = Path(os.path.realpath(self._file))
        # The new file can be read by its owner only until it has the mode of the old one.
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        new = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(content)
                opened.flush()
                if self._before is not None:
                    _copy_owner_and_mode(target, new)
                os.fsync(descriptor)
            if self._before != (read_regular_file(target) if target.exists() else None):
                raise TruenextError(f"{self._file} was changed by another program meanwhile: try again")
            new.replace(target)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        if sys.platform != "win32":
            sync_folder(target.parent)


def _content(text: str) -> dict[str, Any]:
    """Return the content of a users file as tables, with both sections, [user] and [role]. Raises: ValueError if the
    text is not TOML"""
    return {USER: {}, ROLE: {}} | tomllib.loads(text)


def _with_comments_after(before: str, after: str) -> str:
    """Put back the comments before the next table. tomlkit removes them together with the table that it removes.

    >>> _with_comments_after("[a]\\nx = 1\\n\\n# Second.\\n[b]\\n", "[b]\\n")
    '# Second.\\n[b]\\n'
    """
    size = len(before) - len(after)
    start = _first_changed_line(before, after)
    if size <= 0 or before[:start] + before[start + size :] != after:
        return after
    _, kept = _split_comments(before[start : start + size])
    if not before[:start] or before[:start].endswith(("\n\n", "\n\r\n")):
        kept = kept.lstrip("\r\n")
    return before[:start] + kept + before[start + size :]


def _with_keys_before_comments(before: str, after: str) -> str:
    """Move the keys that tomlkit has added to a table before the table's last comments, which describe the next table.

    >>> _with_keys_before_comments("[a]\\nx = 1\\n\\n# Second.\\n[b]\\n", "[a]\\nx = 1\\n\\n# Second.\\ny = 2\\n[b]\\n")
    '[a]\\nx = 1\\ny = 2\\n\\n# Second.\\n[b]\\n'
    """
    size = len(after) - len(before)
    start = _first_changed_line(after, before)
    if size <= 0 or after[:start] + after[start + size :] != before:
        return after
    content, comments = _split_comments(before[:start])
    return content + after[start : start + size] + comments + before[start:]


def _first_changed_line(longer: str, shorter: str) -> int:
    """Return the position at which the first line starts that differs between the texts."""
    pairs = enumerate(zip(longer, shorter, strict=False))
    equal = next((at for at, (one, other) in pairs if one != other), len(shorter))
    return longer.rfind("\n", 0, equal) + 1


def _split_comments(text: str) -> tuple[str, str]:
    """Split a text into its beginning, and the comments and blank lines at its end."""
    lines = text.splitlines(keepends=True)
    count = len(lines)
    while count and (not lines[count - 1].strip() or lines[count - 1].lstrip().startswith("#")):
        count -= 1
    return "".join(lines[:count]), "".join(lines[count:])


def _copy_owner_and_mode(old: Path, new: Path) -> None:
    """Give the new file the owner and mode of the old one.

    Raises: OSError if that fails; TruenextError if this user may not set the owner: the broker could then not read the
    file
    """
    expected = old.stat()
    if sys.platform != "win32":
        made = new.stat()
        if (made.st_uid, made.st_gid) != (expected.st_uid, expected.st_gid):
            try:
                os.chown(new, expected.st_uid, expected.st_gid)
            except PermissionError as error:
                raise TruenextError(
                    f"cannot keep the owner and group of {old}: run the command as its owner"
                ) from error
    new.chmod(stat.S_IMODE(expected.st_mode))
