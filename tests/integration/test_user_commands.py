"""Tests that `truenext user` edits a users file without losing anything of it, and shows no password."""

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import over_tls
from tests.integration.broker_process import PATIENCE_SECONDS, TRUENEXT, BrokerProcess, dying_with_us
from tests.integration.forked import completed
from truenext.broker.passwords import find_credential
from truenext.broker.users import Users, read_users
from truenext.model.grants import Right, parse_pattern

HASH = "$argon2id$v=19$m=19456,t=2,p=1$" + "A" * 22 + "$" + "A" * 43
OTHER_HASH = "$argon2id$v=19$m=19456,t=2,p=1$" + "A" * 22 + "$" + "B" * 42 + "A"
RELOAD = "; a running broker uses the file after SIGHUP, or `truenext reload` by an admin\n"

EXAMPLE = f"""# Users of the shop, all of them

[role.operators]  # both of us
manage = [">", "DLQ.>"]
monitor = true

# The shop
[user.shop]  # behind the counter
passwords = ["{HASH}"]  # since May
send = [
    "orders.>",  # new ones
]

# The till
[user.till]
passwords = ["{OTHER_HASH}"]
take = ["orders.*"]

[role.readers]
browse = [">"]

# Anna works here, too
[user.anna-b]
password_file = "anna"
roles = ["operators", "readers"]

# The end
"""

ANOTHER = f'[user.b]\npasswords = ["{OTHER_HASH}"]\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "users.toml"
    path.touch(0o600)
    path.write_text(EXAMPLE)
    secret = tmp_path / "anna"
    secret.touch(0o600)
    secret.write_text("secret of anna\n")
    return path


def user(file: Path, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Run a command on the file, and return its exit status, standard output and standard error."""
    done = completed("user", *arguments, "--users", str(file), stdin_bytes=stdin)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def done(*arguments: str) -> tuple[int, str, str]:
    """Return the result of a command that has done what these words say, and printed nothing else."""
    return 0, "", "".join(arguments) + RELOAD


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def proves(users: Users, name: str, passcode: str) -> bool:
    return bool(find_credential(users[name], passcode))


# ---- add ----


def test_add_makes_a_file_that_only_its_owner_can_read_and_prints_the_generated_password(tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    options = ["--send", "orders.>", "--send", "/topic/news", "--client-id", "till 1", "--monitor", "--admin"]
    status, out, err = user(
        file, "add", "shop", *options, "--take", "a", "--browse", "b", "--manage", "c", "--generate"
    )
    assert (status, err) == (0, f"made {file}\nuser 'shop' was added to {file}{RELOAD}")
    password = out.removesuffix("\n")
    assert len(password) == 32 and password.isprintable()
    assert (mode(file), files(tmp_path)) == (0o600, ["users.toml"])
    text = file.read_text()
    assert password not in text
    entry = tomllib.loads(text)["user"]["shop"]
    assert proves(read_users(file), "shop", password)
    assert entry | {"passwords": []} == {
        "passwords": [],
        "client_ids": ["till 1"],
        "send": ["orders.>", "/topic/news"],
        "take": ["a"],
        "browse": ["b"],
        "manage": ["c"],
        "monitor": True,
        "admin": True,
    }


def test_add_appends_a_user_with_the_password_of_standard_input(file: Path) -> None:
    file.chmod(0o640)
    command = ["add", "eu-shop", "--role", "readers", "--role", "readers"]
    assert user(file, *command, stdin="pä ss\r\nmore\n".encode()) == done(f"user 'eu-shop' was added to {file}")
    text = file.read_text()
    assert text.startswith(EXAMPLE + '\n[user.eu-shop]\npasswords = ["$argon2id$')
    assert text.endswith('\nroles = ["readers"]\n')
    assert (mode(file), files(file.parent)) == (0o640, ["anna", "users.toml"])
    assert proves(read_users(file), "eu-shop", "pä ss")


def test_add_refuses_a_user_that_exists_and_a_role_that_does_not(file: Path) -> None:
    assert user(file, "add", "shop", "--generate") == (
        1,
        "",
        f"truenext: {file} has a user 'shop' already; `truenext user password` changes the password\n",
    )
    assert user(file, "add", "new", "--role", "reader", "--generate") == (
        2,
        "",
        f"truenext: {file}: [user.new] roles: there is no role 'reader'; is 'readers' meant?\n",
    )
    assert file.read_text() == EXAMPLE


@pytest.mark.parametrize(
    ("stdin", "fault"),
    [
        (b"", "a password must not be empty"),
        (b"\nsecret", "a password must not be empty"),
        (b"secret\xff", "a password must be UTF-8"),
        (b"secret" * 1000, "a password has at most 1024 bytes"),
    ],
)
def test_add_refuses_a_bad_password_without_repeating_it(file: Path, stdin: bytes, fault: str) -> None:
    status, out, err = user(file, "add", "new", stdin=stdin)
    assert (status, out) == (2, "")
    assert err.startswith(f"truenext: standard input: {fault}")
    assert "secret" not in err
    assert file.read_text() == EXAMPLE


def test_add_keeps_a_link_to_the_file(file: Path) -> None:
    link = file.parent / "link"
    link.symlink_to(file.name)
    assert user(link, "add", "new", "--generate")[0] == 0
    assert link.is_symlink()
    assert "new" in read_users(file)


def test_add_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "users.toml"
    assert user(file, "add", "new", "--generate") == (
        1,
        "",
        f"truenext: cannot write {file}: No such file or directory\n",
    )


# ---- password ----


def test_password_replaces_the_hash_and_nothing_else(file: Path) -> None:
    assert user(file, "password", "shop", stdin=b"new") == done(f"the password of user 'shop' was changed in {file}")
    users = read_users(file)
    (hashed,) = users["shop"].hashes
    assert file.read_text() == EXAMPLE.replace(HASH, hashed)
    assert proves(users, "shop", "new")


def test_password_with_keep_old_has_the_old_hash_as_the_second_one(file: Path) -> None:
    status, out, _ = user(file, "password", "shop", "--keep-old", "--generate")
    assert status == 0
    users = read_users(file)
    new, old = users["shop"].hashes
    assert old == HASH
    assert file.read_text() == EXAMPLE.replace(f'"{HASH}"', f'"{new}", "{HASH}"')
    assert proves(users, "shop", out.removesuffix("\n"))

    before = file.read_text()
    status, out, err = user(file, "password", "shop", "--keep-old", "--generate")
    assert (status, out, file.read_text()) == (1, "", before)
    assert err.startswith("truenext: user 'shop' has two passwords already: remove one of them")

    assert user(file, "password", "shop", "--generate")[0] == 0
    assert len(read_users(file)["shop"].hashes) == 1


def test_password_of_a_user_with_a_password_file_is_refused(file: Path) -> None:
    assert user(file, "password", "anna-b", "--generate") == (
        1,
        "",
        "truenext: user 'anna-b' has its password in a password_file: change it there\n",
    )


# ---- grant and revoke ----


def test_grant_adds_to_lists_and_new_keys_and_keeps_the_rest_of_the_file(file: Path) -> None:
    before = file.read_text()
    more = done("user 'shop' has more grants in ", str(file))
    assert user(file, "grant", "shop", "--send", "/topic/a", "--take", "b", "--take", "c", "--admin") == more
    expected = before.replace(
        "  # new ones\n]\n", '  # new ones\n    "/topic/a",\n]\ntake = ["b", "c"]\nadmin = true\n'
    )
    assert file.read_text() == expected
    assert (mode(file), files(file.parent)) == (0o600, ["anna", "users.toml"])
    read_users(file)


def test_revoke_removes_what_grant_has_added(file: Path) -> None:
    before = read_users(file)["till"].user
    grants = ["--send", "a", "--take", "orders.new", "--browse", ">", "--manage", "/topic/>", "--role", "operators"]
    grants += ["--client-id", "x 1", "--monitor", "--admin"]
    assert user(file, "grant", "till", *grants)[0] == 0
    now = read_users(file)["till"].user
    assert now.has_all_of(before) and not before.has_all_of(now)
    assert now.is_admin and now.client_ids == {"x 1"} and now.may(Right.MANAGE, parse_pattern("DLQ.a"))
    assert user(file, "revoke", "till", *grants) == (
        0,
        "",
        f"user 'till' has fewer grants in {file}{RELOAD}"
        "note: user 'till' may still take /queue/orders.new: granted by /queue/orders.*\n",
    )
    now = read_users(file)["till"].user
    assert now.has_all_of(before) and before.has_all_of(now)
    assert 'take = ["orders.*"]\n' in file.read_text() and "# Anna works here, too\n[user.anna-b]" in file.read_text()


def test_grant_that_the_user_has_changes_nothing(file: Path) -> None:
    before = file.stat()
    assert user(file, "grant", "shop", "--send", "/queue/orders.>") == (
        0,
        "",
        f"user 'shop' has these grants already; {file} was not changed\n",
    )
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_revoke_finds_a_pattern_that_is_written_in_another_form_and_keeps_comments(file: Path) -> None:
    assert user(file, "grant", "shop", "--send", "b")[0] == 0
    assert user(file, "revoke", "shop", "--send", "/queue/b") == done(f"user 'shop' has fewer grants in {file}")
    assert file.read_text() == EXAMPLE


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (("shop", "--send", "orders.>", "--send", "orders.new"), "'orders.new' in `send`"),
        (("shop", "--send", "orders.>", "--take", "a"), "'a' in `take`"),
        (("anna-b", "--role", "readers", "--monitor"), "`monitor`"),
        (("anna-b", "--client-id", "anna-b"), "'anna-b' in `client_ids`"),
    ],
)
def test_revoke_of_a_grant_that_is_not_the_users_own_changes_nothing(
    file: Path, arguments: tuple[str, ...], missing: str
) -> None:
    assert user(file, "revoke", *arguments) == (
        1,
        "",
        f"truenext: [user.{arguments[0]}] of {file} does not have {missing}; nothing was changed\n",
    )
    assert file.read_text() == EXAMPLE


@pytest.mark.parametrize("command", ["grant", "revoke"])
def test_command_without_a_grant_is_refused(file: Path, command: str) -> None:
    status, out, err = user(file, command, "shop")
    assert (status, out) == (2, "") and err.startswith("truenext: name a grant, such as --send PATTERN; see ")


def test_grant_of_a_role_that_does_not_exist_is_refused(file: Path) -> None:
    status, _, err = user(file, "grant", "shop", "--role", "reader")
    assert status == 2 and "[user.shop] roles: there is no role 'reader'; is 'readers' meant?" in err
    assert file.read_text() == EXAMPLE


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f'[user.a]\npasswords = ["{HASH}"]', f'[user.a]\npasswords = ["{HASH}"]\nsend = ["x"]\n'),
        (
            f'[user.a]\r\npasswords = ["{HASH}"]\r\n\r\n# x\r\n{ANOTHER}',
            f'[user.a]\r\npasswords = ["{HASH}"]\r\nsend = ["x"]\n\r\n# x\r\n{ANOTHER}',
        ),
        (f'[user]\na = {{passwords = ["{HASH}"]}}\n', None),
        (f'user.a.passwords = ["{HASH}"]\n', None),
    ],
)
def test_grant_in_a_file_of_any_form_adds_only_the_grant(tmp_path: Path, before: str, after: str | None) -> None:
    file = tmp_path / "users.toml"
    file.touch(0o600)
    file.write_bytes(before.encode())
    status, _, err = user(file, "grant", "a", "--send", "x")
    assert status == 0, err
    if after is None:
        expected = tomllib.loads(before)
        expected["user"]["a"]["send"] = ["x"]
        assert tomllib.loads(file.read_text()) == expected
    else:
        assert file.read_bytes() == after.encode()


def test_operator_carries_out_all_that_its_page_describes_at_a_real_broker(tmp_path: Path) -> None:
    file, secret = tmp_path / "users.toml", tmp_path / "ann"
    status, password, _ = user(file, "add", "ann", "--role", "operator", "--generate")
    assert status == 0
    secret.touch(0o600)
    secret.write_text(password)
    policy = {"attempts_max": 1}
    broker = BrokerProcess(tmp_path, ["--users", str(file)], policy=policy)
    broker.start()
    try:
        url = f"{over_tls.SCHEME}://127.0.0.1:{broker.port}"
        login = ["--url", url, "--user", "ann", "--password-file", str(secret)]

        def run(*command: str, status: int = 0) -> str:
            ended = completed(*command, *login)
            assert ended.returncode == status, ended.stderr
            return ended.stdout.decode()

        for queue in ("orders", "DLQ.orders", "Consumer.billing.VirtualTopic.orders", "Spark.a.b.c", "/topic/news"):
            run("send", queue, "x")
        assert "DLQ.orders" in run("queues") and "stuck" in run("status")
        assert run("browse", "DLQ.orders") == run("browse", "orders") == "x\n"
        run("redrive", "DLQ.orders", "--dry-run")
        run("move", "DLQ.orders", "orders")
        run("move", "orders", "Consumer.billing.VirtualTopic.orders", "--selector", "a = 'b'")
        for queue in ("orders", "Consumer.billing.VirtualTopic.orders", "Spark.a.b.c"):
            run("pause", queue)
            run("resume", queue)
            run("purge", queue)
        for queue in ("orders", "/topic/news"):
            run("scheduled", queue)
            run("unschedule", queue)
        run("scheduled")
        run("reload")
        assert "user 'ann' may not take from /queue/orders" in completed("receive", "orders", *login).stderr.decode()
    finally:
        broker.stop()


# ---- remove ----


def test_remove_keeps_the_comments_and_order_of_the_file(file: Path) -> None:
    for name, first, after in (
        ("shop", "[user.shop]", "\n# The till"),
        ("anna-b", "[user.anna-b]", "\n# The end"),
    ):
        before = file.read_text()
        assert user(file, "remove", name) == done(f"user {name!r} was removed from {file}")
        assert file.read_text() == before[: before.index(first)] + before[before.index(after) :]
    assert list(read_users(file)) == ["till"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f'[user.a]\npasswords = ["{HASH}"]\n{ANOTHER}', ANOTHER),
        (f'[user]\n[user.a]\npasswords = ["{HASH}"]\n{ANOTHER}', f"[user]\n{ANOTHER}"),
        (f'[user]\na = {{passwords = ["{HASH}"]}}\nb = {{passwords = ["{OTHER_HASH}"]}}\n', None),
        (f'user.a.passwords = ["{HASH}"]\nuser.b.passwords = ["{OTHER_HASH}"]\n', None),
        (f'[user.a]\r\npasswords = ["{HASH}"]\r\n\r\n# x\r\n{ANOTHER}', f"# x\r\n{ANOTHER}"),
    ],
)
def test_remove_from_a_file_of_any_form_removes_only_the_user(tmp_path: Path, before: str, after: str | None) -> None:
    file = tmp_path / "users.toml"
    file.touch(0o600)
    file.write_bytes(before.encode())
    status, _, err = user(file, "remove", "a")
    if after is None:
        expected = tomllib.loads(before)
        del expected["user"]["a"]
        assert tomllib.loads(file.read_text()) == expected
    else:
        assert file.read_bytes() == after.encode()
    assert status == 0, err


def test_remove_of_the_only_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    file.touch(0o600)
    file.write_text(ANOTHER)
    status, _, err = user(file, "remove", "b")
    assert status == 2 and "there are no users, and nobody could log in" in err
    assert file.read_text() == ANOTHER


# ---- list ----


def test_list_shows_users_with_the_grants_of_their_roles(file: Path) -> None:
    status, out, err = user(file, "list")
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["user", "password", "send", "take", "browse", "manage", "more", "client", "ids"],
        ["shop", "1", "hash", "orders.>"],
        ["till", "1", "hash", "orders.*"],
        ["anna-b", "file", ">", ">,", "DLQ.>", "monitor"],
    ]
    facts = json.loads(user(file, "list", "--json")[1])
    assert facts[2] == {
        "name": "anna-b",
        "passwords": 0,
        "send": [],
        "take": [],
        "browse": ["/queue/>"],
        "manage": ["/queue/>", "/queue/DLQ.>"],
        "monitor": True,
        "admin": False,
        "client_ids": [],
    }


def test_list_warns_of_a_file_that_others_can_read(file: Path) -> None:
    file.chmod(0o644)
    status, _, err = user(file, "list")
    assert (status, err) == (0, f"warning: {file}: all users of this machine can read it: run `chmod o-r {file}`\n")


# ---- hash ----


def test_hash_prints_an_entry_of_a_users_file(tmp_path: Path) -> None:
    done = completed("user", "hash", stdin_bytes=b"secret\n")
    assert (done.returncode, done.stderr) == (0, b"")
    file = tmp_path / "users.toml"
    file.touch(0o600)
    file.write_text(f"[user.shop]\n{done.stdout.decode()}")
    assert proves(read_users(file), "shop", "secret")


# ---- check ----


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (
            ("shop", "send", "/queue/orders.new"),
            0,
            "user 'shop' may send /queue/orders.new: granted by /queue/orders.>",
        ),
        (
            ("anna-b", "manage", "DLQ.a"),
            0,
            "user 'anna-b' may manage /queue/DLQ.a: granted by /queue/DLQ.>",
        ),
        (
            ("shop", "take", "orders.new"),
            1,
            "user 'shop' may not take /queue/orders.new: run `truenext user grant shop --take orders.new`, or add the "
            "pattern to one of its roles",
        ),
        (
            ("till", "take", "orders.>"),
            1,
            "user 'till' may not take /queue/orders.>: run `truenext user grant till --take 'orders.>'`, or add the "
            "pattern to one of its roles",
        ),
        (
            ("anna-b", "browse", "/topic/a"),
            1,
            "user 'anna-b' may not browse /topic/a: run `truenext user grant anna-b --browse /topic/a`, or add the "
            "pattern to one of its roles",
        ),
    ],
)
def test_check_names_the_grant_or_what_is_missing(
    file: Path, arguments: tuple[str, ...], status: int, expected: str
) -> None:
    assert user(file, "check", *arguments) == (status, f"{expected}\n", "")


# ---- All of them ----

COMMANDS = [
    ["password", "nobody"],
    ["remove", "nobody"],
    ["check", "nobody", "send", "a"],
    ["grant", "nobody", "--send", "a"],
    ["revoke", "nobody", "--send", "a"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_command_for_an_unknown_user_is_refused(file: Path, command: list[str]) -> None:
    assert user(file, *command) == (
        1,
        "",
        f"truenext: {file} has no user 'nobody'; known: shop, till, anna-b\n",
    )


@pytest.mark.parametrize("command", [["list"], *COMMANDS], ids=lambda command: command[0])
def test_command_without_a_users_file_cannot_be_answered(tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "none"
    assert user(file, *command) == (2, "", f"truenext: cannot read {file}: No such file or directory\n")


@pytest.mark.parametrize("command", [["list"], ["add", "new"], *COMMANDS], ids=lambda command: command[0])
def test_command_on_a_faulty_file_prints_its_faults(file: Path, command: list[str]) -> None:
    faulty = EXAMPLE.replace("take", "tkae").replace(HASH, "secret")
    file.write_text(faulty)
    assert user(file, *command, stdin=b"x\n") == (
        2,
        "",
        f"truenext: {file}: [user.shop] passwords: text 1 of the list is not an Argon2id hash: replace it by one of "
        f"`truenext user hash`\n{file}: [user.till]: there is no key 'tkae'; is 'take' meant?\n",
    )
    assert (file.read_text(), files(file.parent)) == (faulty, ["anna", "users.toml"])


def test_file_whose_form_does_not_allow_the_edit_is_left_to_an_editor(file: Path) -> None:
    text = f'user = {{a = {{passwords = ["{HASH}"]}}}}\n'
    file.write_text(text)
    assert user(file, "add", "b", "--generate") == (
        1,
        "",
        f"truenext: cannot change {file} without changing other parts of it: edit it by hand\n",
    )
    assert file.read_text() == text


# ---- On a terminal ----


class Terminal:
    """Command on a terminal."""

    def __init__(self, *command: str) -> None:
        spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
        self._process = subprocess.Popen(
            dying_with_us([sys.executable, "-c", spawn, TRUENEXT, *command]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.output = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while chunk := os.read(self._process.stdout.fileno(), 1000):
            self.output += chunk

    def answer(self, prompt: bytes, line: bytes) -> None:
        """Wait until the output ends with a prompt, and type a line."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.output.endswith(prompt):
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()

    def end(self) -> int:
        status = self._process.wait(PATIENCE_SECONDS)
        self._reader.join()
        return status

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def on_terminal(*command: str) -> Iterator[Terminal]:
    opened = Terminal(*command)
    try:
        yield opened
    finally:
        opened.close()


def test_password_is_asked_for_twice_on_a_terminal_and_not_shown(file: Path) -> None:
    with on_terminal("user", "password", "shop", "--users", str(file)) as terminal:
        for prompt, line in (
            (b"Password: ", b"hunter1"),
            (b"Repeat for confirmation: ", b"hunter2"),
            (b"Password: ", b"hunter2"),
            (b"Repeat for confirmation: ", b"hunter2"),
        ):
            terminal.answer(prompt, line)
        assert terminal.end() == 0
    assert b"hunter" not in terminal.output
    assert proves(read_users(file), "shop", "hunter2")


def test_file_that_changes_while_the_password_is_asked_for_is_kept(file: Path) -> None:
    with on_terminal("user", "password", "shop", "--users", str(file)) as terminal:
        terminal.answer(b"Password: ", b"hunter2")
        changed = EXAMPLE + "# More\n"
        file.write_text(changed)
        terminal.answer(b"Repeat for confirmation: ", b"hunter2")
        assert terminal.end() == 1
    assert b"was changed by another program meanwhile: try again" in terminal.output
    assert (file.read_text(), files(file.parent)) == (changed, ["anna", "users.toml"])
