"""Tests of logins: who is let in, what a reload of the users file does to connections, and what belongs to a user.

Source of what is expected: docs/security.md, "Passwords and logins"; docs/contract.md, C18.10; docs/protocol.md,
"Takeover".
"""

import contextlib
import itertools
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration import held_hashes
from tests.integration.broker_process import PATIENCE_SECONDS, BrokerProcess
from tests.integration.forked import Forked
from tests.integration.raw_client import RECEIVE_SECONDS, TRUENEXT_CLIENT, RawClient, bodies, numbered
from tests.integration.test_grants import RequestRefused, UserClient, UserText, passwords
from tests.integration.test_takeover import numbered as numbered_connection
from tests.integration.test_takeover import secret_of
from truenext.model.limits import FAILED_LOGINS_PER_USER
from truenext.wire.stomp.codec import Decoder
from truenext.wire.stomp.frame import Frame, Version, encode
from truenext.wire.stomp.shapes import FRAME_SHAPES

ADMIN = "anna"
ELSEWHERE = "127.0.0.2"
"""Another address of this machine: failed logins are counted by address."""
SECRET = "open sesame"
"""Part of all passwords."""
SHOP = ["send shop.>", "take shop.>", "browse shop.>"]
TILL = ["send shop.>", "take shop.>", "send till.>", "take till.>"]


def word_of(user: str) -> str:
    """Return the password of a user."""
    return f"{SECRET}, says {user}"


class GuardedBroker(BrokerProcess):
    """Broker with a users file, and clients that are closed with it."""

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        self.file = folder / "users.toml"
        self._hold_hashes = folder / "hold-hashes"
        super().__init__(folder, ["--users", str(self.file), "--log-level", "debug", *options])
        self.users = UserText()
        self.add("shop", SHOP)
        self.add("till", TILL)
        self.add(ADMIN, ["browse >", "admin", "monitor"])

    def _started(self, command: list[str]) -> Forked:
        held = [str(self._hold_hashes), *command]
        return Forked(held, stdout=self._out, stderr=self._log, run=held_hashes.main)

    def hold_hashes(self) -> None:
        """Let no password be checked until `resume_hashes`. Logins that were accepted before need no check."""
        self._hold_hashes.touch()

    def resume_hashes(self) -> None:
        self._hold_hashes.unlink()

    def add(self, user: str, has: Sequence[str], **options: Any) -> None:
        """Add a user to the file, before or after `write`."""
        options.setdefault("credentials", passwords(word_of(user)))
        self.users.add(user, has, **options)

    def write(self) -> None:
        self.users.write(self.file)

    def write_other(self, users: UserText) -> None:
        """Replace the file; `users` gets the administrator."""
        users.add(ADMIN, ["browse >", "admin", "monitor"], credentials=self.credentials_of(ADMIN))
        self.users = users
        self.write()

    def credentials_of(self, user: str) -> str:
        """Return the line with the credentials of a user in the file."""
        (table,) = (table for table in self.users.tables if table.startswith(f'[user."{user}"]'))
        return table.splitlines()[1]

    def check_secrets(self) -> None:
        """Check that no password is in the log, in a file of the data folder, or in the list of processes."""
        assert SECRET not in self.log
        files = [file for file in self.data.rglob("*") if file.is_file()]
        # A process may have ended meanwhile.
        with contextlib.suppress(OSError):
            files += Path("/proc").glob("[0-9]*/cmdline")
        for file in files:
            with contextlib.suppress(OSError):
                assert SECRET.encode() not in file.read_bytes(), file

    def login(self, user: str, *, password: str | None = None, **options: Any) -> UserClient:
        password = word_of(user) if password is None else password
        client = UserClient(self.port, user, user, password=password, **options)
        self._clients.append(client)
        return client


@pytest.fixture
def guarded_broker(tmp_path: Path) -> Iterator[GuardedBroker]:
    """Running broker with the users shop, till and the administrator."""
    broker = GuardedBroker(tmp_path)
    broker.write()
    try:
        broker.start()
        yield broker
        broker.check_log()
        broker.check_secrets()
    finally:
        broker.clean_up()


def connect_frame(headers: Mapping[str, str]) -> bytes:
    return encode(Frame("CONNECT", {"accept-version": "1.2", "host": "test", **headers}, b""), Version.V1_2)


def credentials(user: str | None, password: str | None) -> dict[str, str]:
    return ({} if user is None else {"login": user}) | ({} if password is None else {"passcode": password})


def send_frame(destination: str, body: bytes = b"x") -> bytes:
    return encode(Frame("SEND", {"destination": destination}, body), Version.V1_2)


def answer_to(broker: BrokerProcess, data: bytes, *, address: str = "127.0.0.1") -> Frame:
    """Return the first frame that answers `data`, which is written at once, from an address of this machine."""
    with socket.create_connection(("127.0.0.1", broker.port), RECEIVE_SECONDS, (address, 0)) as sock:
        sock.sendall(data)
        decoder = Decoder(FRAME_SHAPES)
        frames: list[Frame] = []
        while not frames:
            received = sock.recv(65536)
            assert received, "the broker closed the connection without an answer"
            frames.extend(decoder.receive(received))
        assert SECRET not in str(frames[0].headers) and SECRET.encode() not in frames[0].body
        if frames[0].command == "ERROR":
            with contextlib.suppress(ConnectionResetError):
                while received := sock.recv(65536):
                    assert not received.strip(b"\n"), f"after the ERROR came {received[:200]!r}"
    return frames[0]


def login_answer(
    broker: BrokerProcess, user: str | None, password: str | None, *, address: str = "127.0.0.1", then: bytes = b""
) -> Frame:
    return answer_to(broker, connect_frame(credentials(user, password)) + then, address=address)


def code_of(frame: Frame) -> str:
    return frame.headers["truenext-code"] if frame.command == "ERROR" else frame.command


def queue_names(broker: GuardedBroker) -> set[str]:
    return {queue["name"] for queue in broker.login(ADMIN).ask("queues")}


# ---- Who is let in ----

WRONG_LOGINS: dict[str, tuple[str | None, str | None]] = {
    "none": (None, None),
    "no password": ("shop", None),
    "no user": (None, word_of("shop")),
    "empty": ("", ""),
    "unknown user": ("shop-2", word_of("shop")),
    "wrong password": ("shop", word_of("shop") + "x"),
    "empty password": ("shop", ""),
    "password of another user": ("shop", word_of("till")),
    "another case of the user": ("Shop", word_of("shop")),
    "hash instead of a password": ("shop", "$argon2id$"),
}


@pytest.mark.parametrize("is_remembered", [False, True], ids=["not remembered", "remembered"])
def test_wrong_logins_get_the_same_answer(guarded_broker: GuardedBroker, is_remembered: bool) -> None:
    """Right logins of the same users, which are remembered, change nothing."""
    if is_remembered:
        guarded_broker.login("shop").barrier()
        guarded_broker.login("till").barrier()
    hash_of_shop = guarded_broker.credentials_of("shop").split('"')[1]
    logins = WRONG_LOGINS | {"hash instead of a password": ("shop", hash_of_shop)}
    answers = {name: login_answer(guarded_broker, *login) for name, login in logins.items()}
    assert {code_of(answer) for answer in answers.values()} == {"login"}
    assert len({(str(answer.headers), answer.body) for answer in answers.values()}) == 1, answers
    assert b"shop" not in answers["unknown user"].body


def test_logins_with_neither_user_nor_password_are_refused_and_count_as_no_failed_ones(
    guarded_broker: GuardedBroker,
) -> None:
    """Fixed: a console that learned so whether the broker has users caused a failed login, and clients without a login
    kept all others of their address out."""
    # C32.15
    for _ in range(FAILED_LOGINS_PER_USER + 2):
        assert code_of(login_answer(guarded_broker, None, None)) == "login"
    assert code_of(login_answer(guarded_broker, "", "")) == "login"
    assert "login missing " in guarded_broker.log and "login failed " not in guarded_broker.log
    assert guarded_broker.login(ADMIN).ask("security") == []


@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2"])
@pytest.mark.parametrize("command", ["CONNECT", "STOMP"])
def test_right_login_is_accepted_and_may_use_its_grants(
    guarded_broker: GuardedBroker, version: str, command: str
) -> None:
    for _ in range(2):
        client = guarded_broker.connect(sends_connect=False)
        headers = {"accept-version": version, "host": "test"} | credentials("shop", word_of("shop"))
        client.send_frame(command, headers)
        connected = client.await_connected()
        assert connected.headers.get("truenext-login") != "unchecked"
        client.send("shop.q", version.encode(), confirmed=True)
        client.subscribe("shop.q", prefetch=1)
        client.ack(client.message(), confirmed=True)
        client.disconnect()


def test_password_with_spaces_and_signs_is_accepted(guarded_broker: GuardedBroker) -> None:
    password = " päss:wörd \\ with \t'\"# = signs 🔑 "
    guarded_broker.add("odd", SHOP, credentials=passwords(password))
    guarded_broker.write()
    reload(guarded_broker)
    guarded_broker.login("odd", password=password).send_to("/queue/shop.q")
    assert code_of(login_answer(guarded_broker, "odd", password.strip())) == "login"


def test_refusal_before_login_is_logged_once_also_with_users(guarded_broker: GuardedBroker) -> None:
    frame = connect_frame({**credentials("shop", word_of("shop")), "receipt": "r"})
    assert code_of(answer_to(guarded_broker, frame)) == "login"
    assert "CONNECT cannot ask for a receipt" in guarded_broker.log
    assert code_of(login_answer(guarded_broker, "shop", "wrong")) == "login"
    assert guarded_broker.log.count("login failed ") == guarded_broker.log.count("client refused ") == 1


def test_frames_behind_a_wrong_connect_in_one_segment_are_not_executed(guarded_broker: GuardedBroker) -> None:
    right = connect_frame(credentials("shop", word_of("shop")))
    for name, behind in {
        "SEND": send_frame("/queue/shop.send"),
        "many": send_frame("/queue/shop.many", bytes(1000)) * 5,
        "right CONNECT": right + send_frame("/queue/shop.second"),
        "SUBSCRIBE": encode(Frame("SUBSCRIBE", {"id": "1", "destination": "/queue/shop.read"}, b""), Version.V1_2),
        "pause": encode(
            Frame("SEND", {"destination": "/control/pause", "reply-to": "/temp-queue/a"}, b'{"queue":"shop.pause"}'),
            Version.V1_2,
        ),
    }.items():
        for user in ("shop", "nobody"):
            assert code_of(login_answer(guarded_broker, user, "wrong", then=behind)) == "login", name
    assert queue_names(guarded_broker) == set()


def test_frames_behind_a_right_connect_in_one_segment_are_executed_in_order(guarded_broker: GuardedBroker) -> None:
    count = 500
    client = guarded_broker.connect(sends_connect=False)
    behind = b"".join(send_frame("/queue/shop.q", b"%d" % number) for number in range(count))
    client.write(connect_frame(credentials("shop", word_of("shop"))) + behind)
    client.await_connected()
    client.subscribe("shop.q")
    assert bodies(client.only(count)) == [str(number) for number in range(count)]


@pytest.mark.parametrize("is_right", [True, False])
def test_frames_are_not_executed_while_the_password_is_hashed(guarded_broker: GuardedBroker, is_right: bool) -> None:
    admin = guarded_broker.login(ADMIN)
    client = guarded_broker.connect(sends_connect=False)
    password = word_of("shop") if is_right else "wrong"
    guarded_broker.hold_hashes()
    client.write(connect_frame(credentials("shop", password)) + send_frame("/queue/shop.early"))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.write(send_frame("/queue/shop.early") * 10)
    # The broker serves others meanwhile.
    assert admin.ask("queues") == []
    with pytest.raises(TimeoutError):
        client.read(0)
    guarded_broker.resume_hashes()
    if is_right:
        client.await_connected()
        client.send_frame("BEGIN", {"transaction": "t"}, confirmed=True)
        assert [queue["waiting"] for queue in admin.ask("queues")] == [11]
    else:
        assert code_of(client.next_frame()) == "login"
        client.await_silent_end()
        assert admin.ask("queues") == []


def test_client_that_leaves_while_its_password_is_hashed_has_done_nothing(guarded_broker: GuardedBroker) -> None:
    for end in (RawClient.crash, RawClient.close):
        client = guarded_broker.connect(sends_connect=False)
        client.write(connect_frame(credentials("shop", "wrong" + str(end))) + send_frame("/queue/shop.q"))
        end(client)
    assert queue_names(guarded_broker) == set()


def test_password_file_of_a_relative_path_has_the_password_in_its_first_line(
    guarded_broker: GuardedBroker, tmp_path: Path
) -> None:
    file = tmp_path / "secrets" / "pin"
    write_password(file, word_of("pin") + "\nthe second line means nothing\n")
    guarded_broker.add("pin", SHOP, credentials='password_file = "secrets/pin"')
    guarded_broker.write()
    reload(guarded_broker)
    guarded_broker.login("pin").send_to("/queue/shop.q")
    for wrong in (word_of("pin") + "\n", "the second line means nothing", "secrets/pin", ""):
        assert code_of(login_answer(guarded_broker, "pin", wrong)) == "login"


def test_new_content_of_a_password_file_holds_after_a_reload(guarded_broker: GuardedBroker, tmp_path: Path) -> None:
    file = tmp_path / "pin"
    write_password(file, word_of("pin"))
    guarded_broker.add("pin", SHOP, credentials='password_file = "pin"')
    guarded_broker.write()
    reload(guarded_broker)
    client, other = guarded_broker.login("pin"), guarded_broker.login("shop")
    write_password(file, "a new password")
    reload(guarded_broker)
    client.await_silent_end()
    other.barrier()
    assert code_of(login_answer(guarded_broker, "pin", word_of("pin"))) == "login"
    guarded_broker.login("pin", password="a new password").barrier()


def write_password(file: Path, text: str) -> None:
    """Replace a password file in one step."""
    file.parent.mkdir(exist_ok=True)
    new = file.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.rename(file)


# ---- Reload ----


def reload(broker: GuardedBroker) -> None:
    """Reload by a control request of the administrator."""
    answer = broker.login(ADMIN).ask("reload")
    assert answer["errors"] == [], answer


def reload_by_command(broker: GuardedBroker) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRUENEXT_USER", ADMIN)
        environment.setenv("TRUENEXT_PASSWORD", word_of(ADMIN))
        done = broker.truenext("reload")
    assert done.returncode == 0, done.stderr


def reload_by_signal(broker: GuardedBroker) -> None:
    await_log_after_signal(broker, "configuration reloaded")


def await_log_after_signal(broker: GuardedBroker, text: str) -> None:
    """Send SIGHUP, and wait until the log has `text` once more."""
    before = broker.log.count(text)
    broker.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while broker.log.count(text) == before:
        assert time.monotonic() < deadline, f"{text!r} is not in the log:\n{broker.log}"
        time.sleep(0.01)


def test_user_without_a_grant_to_send_or_take_uses_up_no_producer_names(guarded_broker: GuardedBroker) -> None:
    """Such a user once filled the places of all producers: nobody else could send with numbers for 7 days."""
    guarded_broker.add("idle", ["browse shop.>"])
    guarded_broker.write()
    reload(guarded_broker)
    resolved = json.dumps({"producer": "p", "commit": 1, "resolve": True}).encode()
    own_queue = {"destination": "/temp-queue/own", **numbered("p", 1)}
    for command, headers, body in (
        ("SEND", {"destination": "/control/producer", "reply-to": "/temp-queue/answers"}, resolved),
        ("SEND", own_queue, b""),
        ("COMMIT", {"transaction": "t", **numbered("p", 1)}, b""),
    ):
        idle = guarded_broker.login("idle")
        idle.subscribe_to("/temp-queue/answers")
        idle.send_frame("BEGIN", {"transaction": "t"}, confirmed=True)
        with pytest.raises(RequestRefused, match="user 'idle' may not use producer names"):
            idle.request(command, headers, body)
    assert not guarded_broker.login("shop").ask("producer", {"producer": "p"})["known"]


def test_producer_name_with_nul_is_refused(guarded_broker: GuardedBroker) -> None:
    """Without users it would be the name of a user's producer."""
    with pytest.raises(RequestRefused):
        guarded_broker.login("shop").ask("producer", {"producer": "till\0p"})


def test_reload_that_narrows_its_own_user_is_answered_before_the_connection_ends(
    guarded_broker: GuardedBroker,
) -> None:
    admin = guarded_broker.login(ADMIN)
    after = UserText()
    for user, has in (("shop", SHOP), ("till", TILL)):
        after.add(user, has, credentials=guarded_broker.credentials_of(user))
    after.add(ADMIN, ["admin"], credentials=guarded_broker.credentials_of(ADMIN))
    after.write(guarded_broker.file)
    answer = admin.ask("reload")
    assert answer["changed"] == [f"user {ADMIN}: grants changed"]
    end = admin.next_frame()
    assert (end.command, code_of(end)) == ("ERROR", "forbidden")


RELOADS: dict[str, Callable[[GuardedBroker], None]] = {
    "control request": reload,
    "truenext reload": reload_by_command,
    "SIGHUP": reload_by_signal,
}


@pytest.mark.parametrize("how", RELOADS)
def test_reload_ends_connections_of_users_that_have_lost_something_and_no_others(tmp_path: Path, how: str) -> None:
    """Each user has two connections, one of a truenext client."""
    lost = {
        "removed": (["send a"], None),
        "without a right": (["send a", "take a"], ["send a"]),
        "without a pattern": (["take a.>", "take b"], ["take a.>"]),
        "narrowed": (["take a.>"], ["take a.*", "take a.*.>"]),
        "of another kind": (["send a"], ["send /topic/a"]),
        "without monitor": (["send a", "monitor"], ["send a"]),
        "without admin": (["send a", "admin"], ["send a", "monitor"]),
        "without anything": (["browse a"], []),
    }
    kept = {
        "same": (["send a"], ["send a"]),
        "with more": (["send a"], ["send a", "manage >", "admin"]),
        "widened": (["take a.*", "take a.b.>"], ["take a.>"]),
        "spelled otherwise": (["send a", "send /queue/b"], ["send b", "send /queue/a"]),
        "without a covered pattern": (["send a.>", "send a.b"], ["send a.>"]),
        "with nothing": ([], []),
    }
    broker = GuardedBroker(tmp_path)
    name_of = {text: text.replace(" ", "-") for text in (*lost, *kept)}
    every = {name_of[text]: pair for text, pair in (lost | kept).items()}
    for name, (before, _) in every.items():
        broker.add(name, before)
    broker.users.add_role("r", ["send a", "take a"])
    broker.users.add_role("s", ["send a"])
    for name in ("role-narrowed", "role-left", "role-moved"):
        broker.add(name, [], roles=["r"])
    broker.add("other-password", ["send a"])
    after = UserText()
    for name, (_, now) in every.items():
        if now is not None:
            after.add(name, now, credentials=broker.credentials_of(name))
    after.add_role("r", ["send a"])
    after.add_role("t", ["send a", "take a"])
    after.add("role-narrowed", [], roles=["r"], credentials=broker.credentials_of("role-narrowed"))
    after.add("role-left", [], credentials=broker.credentials_of("role-left"))
    after.add("role-moved", [], roles=["t"], credentials=broker.credentials_of("role-moved"))
    after.add("other-password", ["send a"], credentials=passwords("another password"))
    ended = {name_of[text] for text in lost} | {"role-narrowed", "role-left", "other-password"}
    goes_on = {name_of[text] for text in kept} | {"role-moved"}
    broker.write()
    try:
        broker.start()
        clients = {
            (name, is_truenext): broker.login(name, headers=TRUENEXT_CLIENT if is_truenext else {})
            for name in sorted(ended | goes_on)
            for is_truenext in (True, False)
        }
        broker.write_other(after)
        RELOADS[how](broker)
        for (name, is_truenext), client in clients.items():
            if name in ended:
                client.await_silent_end()
            else:
                assert client.arrived() == [], (name, is_truenext)
        for name in sorted(ended - {"removed", "other-password"} | goes_on):
            broker.login(name).barrier()
        assert code_of(login_answer(broker, "removed", word_of("removed"))) == "login"
        assert code_of(login_answer(broker, "other-password", word_of("other-password"))) == "login"
        broker.login("other-password", password="another password").barrier()
        broker.check_log()
    finally:
        broker.clean_up()


def test_reload_does_not_touch_messages_and_transactions_of_other_connections(guarded_broker: GuardedBroker) -> None:
    guarded_broker.add("gone", SHOP)
    guarded_broker.write()
    reload(guarded_broker)
    gone, till = guarded_broker.login("gone"), guarded_broker.login("till")
    for number in range(2):
        till.send_to("/queue/shop.q", b"%d" % number)
    till.subscribe_to("/queue/shop.q", {"activemq.prefetchSize": "1"})
    held = till.message()
    gone.request("SUBSCRIBE", {"id": "g", "destination": "/queue/shop.q", "ack": "client-individual"})
    assert gone.message().body == b"1"
    till.begin("t")
    till.send_to("/queue/till.q", headers={"transaction": "t"})
    after = UserText()
    for user, has in (("shop", SHOP), ("till", TILL)):
        after.add(user, has, credentials=guarded_broker.credentials_of(user))
    guarded_broker.write_other(after)
    reload(guarded_broker)
    gone.await_silent_end()
    till.ack(held, transaction="t")
    till.commit("t")
    # What the ended connection held comes back.
    assert till.message().body == b"1"
    assert {queue["name"]: queue["waiting"] for queue in guarded_broker.login(ADMIN).ask("queues")} == {
        "shop.q": 0,
        "till.q": 1,
    }


def test_new_grant_holds_for_a_login_after_the_reload(guarded_broker: GuardedBroker) -> None:
    with pytest.raises(RequestRefused):
        guarded_broker.login("shop").send_to("/queue/news")
    after = UserText()
    after.add("shop", [*SHOP, "send news"], credentials=guarded_broker.credentials_of("shop"))
    after.add("new", ["take news"], credentials=passwords(word_of("new")))
    guarded_broker.write_other(after)
    assert code_of(login_answer(guarded_broker, "new", word_of("new"))) == "login"
    reload(guarded_broker)
    guarded_broker.login("shop").send_to("/queue/news")
    reader = guarded_broker.login("new")
    reader.subscribe_to("/queue/news")
    assert reader.message().body == b"x"


def test_lost_grant_does_not_hold_for_a_login_after_the_reload(guarded_broker: GuardedBroker) -> None:
    guarded_broker.login("shop").send_to("/queue/shop.q")
    after = UserText()
    after.add("shop", ["take shop.>"], credentials=guarded_broker.credentials_of("shop"))
    guarded_broker.write_other(after)
    reload(guarded_broker)
    with pytest.raises(RequestRefused) as refused:
        guarded_broker.login("shop").send_to("/queue/shop.q")
    assert refused.value.code == "forbidden"


def test_both_passwords_hold_while_one_is_being_replaced(guarded_broker: GuardedBroker) -> None:
    old, new = guarded_broker.credentials_of("shop"), passwords("the new one")
    both = old.removesuffix("]") + ", " + new.removeprefix("passwords = [")
    by_old = guarded_broker.login("shop")
    after = UserText()
    after.add("shop", SHOP, credentials=both)
    guarded_broker.write_other(after)
    reload(guarded_broker)
    by_old.barrier()
    also_by_old = guarded_broker.login("shop")
    by_new = guarded_broker.login("shop", password="the new one")
    last = UserText()
    last.add("shop", SHOP, credentials=new)
    guarded_broker.write_other(last)
    reload(guarded_broker)
    by_old.await_silent_end()
    also_by_old.await_silent_end()
    by_new.barrier()
    assert code_of(login_answer(guarded_broker, "shop", word_of("shop"))) == "login"
    guarded_broker.login("shop", password="the new one").barrier()


def test_reload_without_admin_is_refused_and_reads_nothing(guarded_broker: GuardedBroker) -> None:
    till = guarded_broker.login("till")
    after = UserText()
    after.add("shop", SHOP, credentials=guarded_broker.credentials_of("shop"))
    guarded_broker.write_other(after)
    with pytest.raises(RequestRefused) as refused:
        guarded_broker.login("shop").ask("reload")
    assert refused.value.code == "forbidden"
    till.barrier()
    guarded_broker.login("till").barrier()


def _two_faults(text: str) -> str:
    return text + '\n[user.bad]\npasswords = ["no hash"]\nsend = ["a..*"]\n'


FAULTS: dict[str, tuple[Callable[[str], str | None], tuple[str, ...]]] = {
    "no TOML": (lambda text: text + "\n[user", ()),
    "no file": (lambda text: None, ()),
    "two faults": (_two_faults, ("passwords", "send")),
    "unknown key": (lambda text: text + '\n[user."x"]\npurge = ["a"]\n', ("purge",)),
    "unknown role": (
        lambda text: text + f'\n[user."x"]\n{passwords("p")}\nroles = ["nobodys"]\n',
        ("roles", "nobodys"),
    ),
    "missing password file": (lambda text: text + '\n[user."x"]\npassword_file = "nowhere"\n', ("password_file",)),
    "wrong pattern": (lambda text: text + '\n[role."x"]\ntake = ["a.>.b"]\n', ("take", "a.>.b")),
    "wrong name": (lambda text: text + f'\n[user."x y"]\n{passwords("p")}\n', ("x y",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_users_file_at_a_reload_is_refused_and_changes_nothing(
    guarded_broker: GuardedBroker, fault: str
) -> None:
    """The faulty file lacks a user, and has a new one: neither takes effect."""
    till, shop = guarded_broker.login("till"), guarded_broker.login("shop")
    after = UserText()
    after.add("shop", ["take shop.>"], credentials=guarded_broker.credentials_of("shop"))
    after.add("new", SHOP, credentials=passwords(word_of("new")))
    guarded_broker.write_other(after)
    spoil, named = FAULTS[fault]
    spoiled = spoil(guarded_broker.file.read_text())
    guarded_broker.file.unlink() if spoiled is None else guarded_broker.file.write_text(spoiled)
    check_refused_reload(guarded_broker, named)
    till.barrier()
    shop.send_to("/queue/shop.q")
    guarded_broker.login("till").barrier()
    assert code_of(login_answer(guarded_broker, "new", word_of("new"))) == "login"
    guarded_broker.write()
    reload(guarded_broker)
    till.await_silent_end()
    guarded_broker.login("new").barrier()


def check_refused_reload(broker: GuardedBroker, named: Sequence[str]) -> None:
    answer = broker.login(ADMIN).ask("reload")
    text = "\n".join(answer["errors"])
    assert answer["errors"] and answer["changed"] == []
    assert str(broker.file) in text
    for each in named:
        assert each in text
    await_log_after_signal(broker, "configuration not reloaded")


def test_users_file_that_others_can_write_to_is_refused(guarded_broker: GuardedBroker) -> None:
    guarded_broker.file.chmod(0o622)
    till = guarded_broker.login("till")
    check_refused_reload(guarded_broker, ())
    till.barrier()
    guarded_broker.file.chmod(0o600)
    reload(guarded_broker)


def test_password_file_that_others_can_write_to_is_refused(guarded_broker: GuardedBroker, tmp_path: Path) -> None:
    file = tmp_path / "pin"
    write_password(file, word_of("pin"))
    file.chmod(0o602)
    guarded_broker.add("pin", SHOP, credentials='password_file = "pin"')
    guarded_broker.write()
    check_refused_reload(guarded_broker, ("password_file",))
    assert code_of(login_answer(guarded_broker, "pin", word_of("pin"))) == "login"


def test_numbered_send_is_a_repeat_also_if_its_queues_were_found_ahead(guarded_broker: GuardedBroker) -> None:
    """The user's name came twice before that of the producer if the queues of a message were found ahead."""
    guarded_broker.add("fan", ["send /topic/t", "take /topic/t"])
    guarded_broker.write()
    reload(guarded_broker)
    reader, sender = guarded_broker.login("fan"), guarded_broker.login("fan")
    for number in range(40):
        pattern = f"%{'_' * 200}y{number}%"
        headers = {"id": f"{number}", "destination": "/topic/t", "selector": f"a LIKE '{pattern}'"}
        reader.request("SUBSCRIBE", headers)
    numbered = {"destination": "/topic/t", "a": "x" * 60_000, "truenext-producer": "p", "truenext-number": "1"}
    sender.send_to("/topic/t", headers=numbered)
    # Without subscriptions nothing is found ahead.
    reader.disconnect()
    sender.send_frame("SEND", numbered | {"receipt": "r"}, b"x")
    assert sender.await_receipt("r").headers.get("truenext-repeat") == "true"


# ---- Takeover ----


def test_connection_is_taken_over_by_its_own_user_alone(guarded_broker: GuardedBroker) -> None:
    # C22.9
    shop = guarded_broker.login("shop", headers=numbered_connection(1))
    shop.send_to("/queue/shop.q", b"held")
    shop.subscribe_to("/queue/shop.q")
    held = shop.message()
    secret = secret_of(shop)
    frames = connect_frame(credentials("till", word_of("till")) | numbered_connection(2, secret))
    thief = guarded_broker.connect(sends_connect=False)
    thief.write(frames)
    answer = thief.next_frame()
    # As with a secret that the broker does not know.
    assert answer.command == "CONNECTED" and answer.headers["truenext-taken-over"] == "false"
    shop.ack(held, confirmed=True)
    shop.send_to("/queue/shop.q", b"held again")
    assert shop.message().body == b"held again"
    back = guarded_broker.login("shop", headers=numbered_connection(2, secret))
    assert back.connected.headers["truenext-taken-over"] == "true"
    shop.await_silent_end()
    back.subscribe_to("/queue/shop.q")
    message = back.message()
    assert (message.body, message.headers["truenext-attempts"]) == (b"held again", "0")


def test_wrong_login_with_a_secret_takes_nothing_over(guarded_broker: GuardedBroker) -> None:
    shop = guarded_broker.login("shop", headers=numbered_connection(1))
    for user, password in (("shop", "wrong"), (None, None)):
        frames = connect_frame(credentials(user, password) | numbered_connection(9, secret_of(shop)))
        assert code_of(answer_to(guarded_broker, frames)) == "login"
    shop.barrier()
    # Their numbers are not used either.
    back = guarded_broker.login("shop", headers=numbered_connection(2, secret_of(shop)))
    assert back.connected.headers["truenext-taken-over"] == "true"


# ---- Producer names ----


def repeats(client: UserClient, number: int, *, producer: str = "p", is_gapless: bool = False) -> bool:
    """Send a numbered message, and return whether it was a repeat."""
    headers = {"destination": "/queue/shop.q", "persistent": "true"} | numbered(producer, number)
    receipt = client.new_receipt()
    gapless = {"truenext-gapless": "true"} if is_gapless else {}
    client.send_frame("SEND", headers | gapless | {"receipt": receipt}, f"{client.prefix} {number}".encode())
    return client.await_receipt(receipt).headers.get("truenext-repeat") == "true"


def test_numbered_sends_of_two_users_with_one_producer_name_do_not_interfere(guarded_broker: GuardedBroker) -> None:
    # C18.10
    shop, till = guarded_broker.login("shop"), guarded_broker.login("till")
    assert [repeats(client, number) for number in (1, 3) for client in (shop, till)] == [False] * 4
    assert not repeats(till, 7)
    assert [repeats(client, number) for client in (shop, till) for number in (1, 2, 3)] == [True] * 6
    assert [shop.ask("producer", {"producer": "p"})["sends"], till.ask("producer", {"producer": "p"})["sends"]] == [
        3,
        7,
    ]
    shop.subscribe_to("/queue/shop.q")
    assert bodies(shop.only(5)) == ["shop 1", "till 1", "shop 3", "till 3", "till 7"]


def test_gapless_numbers_of_two_users_have_their_own_next_number(guarded_broker: GuardedBroker) -> None:
    shop, till = guarded_broker.login("shop"), guarded_broker.login("till", headers=TRUENEXT_CLIENT)
    for number in (1, 2):
        assert not repeats(shop, number, is_gapless=True)
    gap = numbered("p", 3) | {"truenext-gapless": "true"}
    with pytest.raises(RequestRefused) as refused:
        till.send_to("/queue/shop.q", headers=gap)
    assert refused.value.code == "gap"
    assert "\0" not in refused.value.text and "shop" not in refused.value.text
    # A name without gaps is not one of the other user's.
    assert not repeats(till, 5)


def test_outcome_of_a_commit_is_told_and_resolved_for_its_user_alone(guarded_broker: GuardedBroker) -> None:
    # C18.10
    shop, till = guarded_broker.login("shop"), guarded_broker.login("till")
    gapless = {"truenext-gapless": "true"}
    shop.begin("t")
    shop.send_to("/queue/shop.q", headers={"transaction": "t"})
    till.begin("t")
    till.send_to("/queue/shop.q", headers={"transaction": "t"})
    resolved = till.ask("producer", {"producer": "p", "commit": 1, "resolve": True})
    assert resolved["outcome"] == "rolled back"
    shop.commit("t", headers=numbered("p", 1) | gapless)
    known = shop.ask("producer", {"producer": "p", "commit": 1})
    assert (known["outcome"], known["commits"]) == ("committed", 1)
    assert till.ask("producer", {"producer": "p", "commit": 1})["outcome"] == "rolled back"
    with pytest.raises(RequestRefused) as refused:
        till.request("COMMIT", {"transaction": "t"} | numbered("p", 1) | gapless)
    assert refused.value.code == "rolled-back"


def test_forgotten_producer_is_the_users_own(guarded_broker: GuardedBroker) -> None:
    for user in ("shop", "till"):
        assert not repeats(guarded_broker.login(user), 4)
    forgetful = guarded_broker.login("till")
    forgetful.send_frame("DISCONNECT", {"truenext-forget": '["p"]'}, confirmed=True)
    forgetful.await_end()
    shop, till = guarded_broker.login("shop"), guarded_broker.login("till")
    assert shop.ask("producer", {"producer": "p"})["sends"] == 4
    assert till.ask("producer", {"producer": "p"})["known"] is False
    assert (repeats(shop, 4), repeats(till, 4)) == (True, False)


@pytest.mark.parametrize("is_clean", [True, False])
def test_producer_names_stay_apart_over_a_restart(guarded_broker: GuardedBroker, is_clean: bool) -> None:
    assert not repeats(guarded_broker.login("shop"), 3)
    assert not repeats(guarded_broker.login("till"), 5)
    guarded_broker.restart(is_clean=is_clean)
    shop, till = guarded_broker.login("shop"), guarded_broker.login("till")
    assert [client.ask("producer", {"producer": "p"})["sends"] for client in (shop, till)] == [3, 5]
    assert (repeats(shop, 5), repeats(till, 5)) == (False, True)


def test_producer_of_the_time_before_users_is_copied_for_each_user(tmp_path: Path) -> None:
    # C18.10
    folder = tmp_path / "data"
    before = BrokerProcess(tmp_path)
    assert before.data == folder
    try:
        before.start()
        anonymous = before.connect()
        anonymous.send("shop.q", b"x", persistent=True, confirmed=True, headers=numbered("p", 5))
        anonymous.disconnect()
        before.stop()
    finally:
        before.clean_up()
    broker = GuardedBroker(tmp_path)
    broker.write()
    try:
        broker.start()
        shop, till = broker.login("shop"), broker.login("till")
        assert (repeats(shop, 5), repeats(till, 5)) == (True, True)
        assert (repeats(shop, 6), repeats(till, 6)) == (False, False)
        assert not repeats(shop, 9)
        assert not repeats(till, 8)
        assert shop.ask("producer", {"producer": "p"})["sends"] == 9
        shop.send_frame("DISCONNECT", {"truenext-forget": '["p"]'}, confirmed=True)
        shop.await_end()
        broker.restart(is_clean=True)
        assert not repeats(broker.login("shop"), 1)
        assert repeats(broker.login("till"), 8)
        broker.close_clients()
        broker.stop()
    finally:
        broker.clean_up()


# ---- Guesses ----


def guess(broker: BrokerProcess, user: str, *, count: int, code: str = "login") -> list[float]:
    """Try `count` wrong passwords, one after the other, and return the seconds that each took to get `code`."""
    seconds = []
    for number in range(count):
        started = time.monotonic()
        answer = login_answer(broker, user, f"guess {number}")
        seconds.append(time.monotonic() - started)
        assert code_of(answer) == code
    return seconds


def test_eleventh_failed_login_of_a_user_is_refused_without_a_hash(guarded_broker: GuardedBroker) -> None:
    remembered = guarded_broker.login("shop")
    hashed = guess(guarded_broker, "till", count=10)
    refused = guess(guarded_broker, "till", count=3, code="busy")
    assert min(refused) < min(hashed) / 2, (hashed, refused)
    # A right password is not hashed either, but from another address it is.
    assert code_of(login_answer(guarded_broker, "till", word_of("till"))) == "busy"
    assert login_answer(guarded_broker, "till", word_of("till"), address=ELSEWHERE).command == "CONNECTED"
    # A login that was right before needs no hash, from whatever address.
    assert login_answer(guarded_broker, "till", word_of("till")).command == "CONNECTED"
    remembered.barrier()


def test_guesses_end_no_connection_of_the_user_and_do_not_refuse_its_remembered_login(
    guarded_broker: GuardedBroker,
) -> None:
    client = guarded_broker.login("shop")
    guess(guarded_broker, "shop", count=10)
    guess(guarded_broker, "shop", count=2, code="busy")
    client.barrier()
    guarded_broker.login("shop").barrier()


def test_200_wrong_guesses_do_not_lock_out_another_user(guarded_broker: GuardedBroker) -> None:
    guess(guarded_broker, "shop", count=10)
    guess(guarded_broker, "shop", count=190, code="busy")
    assert login_answer(guarded_broker, "till", word_of("till")).command == "CONNECTED"
    assert login_answer(guarded_broker, "shop", word_of("shop"), address=ELSEWHERE).command == "CONNECTED"


def test_failed_logins_of_users_do_not_count_for_a_login_without_a_user(guarded_broker: GuardedBroker) -> None:
    first = login_answer(guarded_broker, None, None)
    for user in ("shop", "till"):
        guess(guarded_broker, user, count=6)
    assert login_answer(guarded_broker, None, None) == first


@pytest.mark.alternates("many logins")
def test_hundred_failed_logins_of_many_users_refuse_new_logins_of_that_address_alone(
    guarded_broker: GuardedBroker,
) -> None:
    guarded_broker.login("shop")
    for number in range(100):
        assert code_of(login_answer(guarded_broker, f"user-{number % 30}", f"guess {number}")) == "login"
    assert code_of(login_answer(guarded_broker, "till", word_of("till"))) == "busy"
    assert login_answer(guarded_broker, "shop", word_of("shop")).command == "CONNECTED"
    assert login_answer(guarded_broker, "till", word_of("till"), address=ELSEWHERE).command == "CONNECTED"


def test_reload_forgets_the_remembered_login_of_a_changed_user_alone(guarded_broker: GuardedBroker) -> None:
    for user in ("shop", "till"):
        guarded_broker.login(user)
    after = UserText()
    after.add("shop", SHOP, credentials=passwords("another password"))
    after.add("till", TILL, credentials=guarded_broker.credentials_of("till"))
    guarded_broker.write_other(after)
    reload(guarded_broker)
    for user in ("shop", "till"):
        guess(guarded_broker, user, count=10)
    assert code_of(login_answer(guarded_broker, "shop", word_of("shop"))) == "busy"
    # "The broker remembers a correct login in memory while the password holds."
    assert login_answer(guarded_broker, "till", word_of("till")).command == "CONNECTED"


# ---- The log ----


def test_log_and_answers_have_no_password_and_no_hash(guarded_broker: GuardedBroker, tmp_path: Path) -> None:
    """The log has its most verbose level. It has no name that is no user's either: that may be a password."""
    write_password(tmp_path / "pin", word_of("pin"))
    guarded_broker.add("pin", SHOP, credentials='password_file = "pin"')
    guarded_broker.write()
    reload(guarded_broker)
    for user in ("shop", "till", "pin", ADMIN):
        guarded_broker.login(user).barrier()
    answers = [str(login_answer(guarded_broker, *login)) for login in WRONG_LOGINS.values()]
    answers += [str(login_answer(guarded_broker, user, "wrong guess")) for user in ("shop", "pin", "nobody")]
    for faulty in ({"heart-beat": "x"}, {"truenext-secret": "x"}, {"truenext-nothing": "x"}, {"accept-version": "9"}):
        answers.append(str(answer_to(guarded_broker, connect_frame(credentials("shop", word_of("shop")) | faulty))))
    no_frame = b"CONNECT\nlogin:shop\npasscode:%b\nno header\n\n\0" % word_of("shop").encode()
    twice = b"CONNECT\naccept-version:1.2\nlogin:till\nlogin:shop\npasscode:%b\n\n\0" % word_of("shop").encode()
    answers += [str(answer_to(guarded_broker, no_frame)), str(answer_to(guarded_broker, twice))]
    forbidden = guarded_broker.login("shop")
    with pytest.raises(RequestRefused) as refused:
        forbidden.send_to("/queue/till.q")
    answers.append(refused.value.text)
    after = UserText()
    after.add("shop", [], credentials=passwords("another password"))
    guarded_broker.write_other(after)
    text = guarded_broker.file.read_text()
    guarded_broker.file.write_text(text + f'\n[user.x]\npasswords = ["{"$argon2id$broken"}", "plain text"]\n')
    answers.append(str(guarded_broker.login(ADMIN).ask("reload")))
    await_log_after_signal(guarded_broker, "configuration not reloaded")
    guarded_broker.file.write_text(text)
    answers.append(str(guarded_broker.login(ADMIN).ask("reload")))
    await_log_after_signal(guarded_broker, "configuration reloaded")
    answers.append(str(guarded_broker.login(ADMIN).ask("status")))
    guarded_broker.close_clients()
    guarded_broker.stop()
    log = guarded_broker.log
    assert "configuration reloaded" in log and "login failed" in log
    assert "shop-2" not in log and "nobody" not in log
    secrets = ["open sesame", "another password", "wrong guess", "plain text", "$argon2", "passcode:"]
    assert {secret: secret in log for secret in secrets} == dict.fromkeys(secrets, False)
    shown = "\n".join(answers)
    assert {secret: secret in shown for secret in secrets[:-1]} == dict.fromkeys(secrets[:-1], False)
    files = [path for path in guarded_broker.data.rglob("*") if path.is_file()]
    stored = [
        (path, secret) for path, secret in itertools.product(files, secrets) if secret.encode() in path.read_bytes()
    ]
    assert files and stored == []


def test_header_without_effect_is_warned_of_once_for_each_user(guarded_broker: GuardedBroker) -> None:
    def warned() -> list[tuple[str, str]]:
        lines = [line for line in guarded_broker.log.splitlines() if "a header of another broker has no effect" in line]
        return [(line.partition(" user='")[2].partition("'")[0], line.partition(" header='")[2]) for line in lines]

    def users() -> list[str]:
        assert all(header.startswith("delivery-mode'") for _, header in warned())
        return [user for user, _ in warned()]

    def send(user: str) -> None:
        client = guarded_broker.login(user)
        for _ in range(3):
            client.send(f"{user}.q", b"x", headers={"delivery-mode": "2"}, confirmed=True)

    for user in ("shop", "till", "shop", "till"):
        send(user)
    assert users() == ["shop", "till"]
    reload_by_signal(guarded_broker)
    send("shop")
    assert users() == ["shop", "till"]
    # A user that is removed is forgotten: what the broker keeps is bounded by the users of the file.
    credentials_of_till = guarded_broker.credentials_of("till")
    others = UserText()
    others.add("shop", SHOP, credentials=guarded_broker.credentials_of("shop"))
    guarded_broker.write_other(others)
    reload_by_signal(guarded_broker)
    guarded_broker.add("till", TILL, credentials=credentials_of_till)
    guarded_broker.write()
    reload_by_signal(guarded_broker)
    for user in ("shop", "till"):
        send(user)
    assert users() == ["shop", "till", "till"]
