"""Tests that the id of a JMS client's lost connection stays with its user (C26.20)."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.unit.test_engine import started
from truenext.broker import connection_ids
from truenext.broker.connection_ids import ConnectionIds
from truenext.broker.user_sessions import ID_REFUSAL_SECONDS, SessionUser, UserSessions
from truenext.broker.users import Users
from truenext.engine.state.consumer import ConnectionState
from truenext.errors import Code, RemoteProtocolError
from truenext.model.commands import Login
from truenext.model.grants import User


def test_oldest_lost_ids_of_a_user_are_forgotten_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_ids, "LOST_IDS_MAX", 2)
    ids = ConnectionIds()
    ids.keep("ID:b:1", "other")
    for number in (1, 2, 1, 3):
        ids.keep(f"ID:a:{number}", "shop")
    assert [ids.owner_of(f"ID:a:{number}") for number in (1, 2, 3)] == ["shop", "", "shop"]
    assert ids.owner_of("ID:b:1") == "other"


def test_ids_of_removed_users_are_forgotten() -> None:
    ids = ConnectionIds()
    ids.keep("ID:a:1", "shop")
    ids.keep("ID:b:1", "other")
    ids.keep_users(["other"])
    assert (ids.owner_of("ID:a:1"), ids.owner_of("ID:b:1")) == ("", "other")
    ids.keep("ID:a:1", "other")
    assert ids.owner_of("ID:a:1") == "other"


class Sessions:
    """Users of connections, at a broker with a clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.peers: dict[ConnectionState, Any] = {}
        loop = SimpleNamespace(time=lambda: self.seconds)
        self.users = UserSessions(Users(), started(), self.peers, cast(Any, loop), has_pending_answer=lambda _: False)

    def connect(self, user: str = "") -> ConnectionState:
        session = ConnectionState("1")
        session.is_jms_client = True
        self.peers[session] = SimpleNamespace(client_info=SimpleNamespace(address="here:1"))
        if user:
            self.users.log_in(session, SessionUser(User(user, {}), "password"))
        return session

    def check(self, user: str, former: ConnectionState | None = None) -> None:
        login = Login(user=user, is_jms_client=True, connection_id="ID:a:1")
        self.users.check_connection_id(self.connect(), login, former)

    def check_refused(self, user: str, former: ConnectionState | None = None) -> None:
        with pytest.raises(RemoteProtocolError, match="the connection id ID:a:1 is another user's") as caught:
            self.check(user, former)
        assert caught.value.code is Code.IN_USE


def test_login_with_the_id_of_another_users_connection_is_refused_while_it_is_open_and_after_it_was_lost() -> None:
    sessions = Sessions()
    sessions.check("other")
    former = sessions.connect("shop")
    former.id = "ID:a:1"
    sessions.check_refused("other", former)
    sessions.check("shop", former)
    sessions.check("other")
    sessions.users.note_lost(former)
    sessions.check_refused("other")
    sessions.check("shop")


def test_refused_ids_are_logged_once_a_minute_for_each_user(caplog: pytest.LogCaptureFixture) -> None:
    sessions = Sessions()
    former = sessions.connect("shop")
    for user in ("other", "other", "third"):
        sessions.check_refused(user, former)
    sessions.seconds += ID_REFUSAL_SECONDS
    sessions.check_refused("other", former)
    assert [(record.message, cast(Any, record).user) for record in caplog.records] == [
        ("login failed", "other"),
        ("login failed", "third"),
        ("login failed", "other"),
    ]
    assert sessions.users.has_logged_refusal(list(sessions.peers)[-1], Code.IN_USE)
