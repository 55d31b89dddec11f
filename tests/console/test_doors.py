"""Tests of the console's doors: which requests are let in, and which headers each answer has. Browser tests are in
tests/console/browser."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import product

import pytest

from tests.console.conftest import PASSWORD
from tests.console.here import HERE, HOST, JSON, ConsoleHere, console_here
from tests.drawing import each_one_of
from tests.integration.broker_process import BrokerProcess
from truenext.console.app import ACTIONS, PAGES
from truenext.console.doors import Address, host_refusal, is_token, make_token, post_refusal
from truenext.console.serving import Listen, public_address

POSTS = sorted({*ACTIONS, "/login", "/logout"})


def run(broker: BrokerProcess, test: Callable[[ConsoleHere], Awaitable[None]], public: Address = HERE) -> None:
    async def main() -> None:
        async with console_here(broker.url, public=public) as console:
            await test(console)

    asyncio.run(main())


# ---- Host ----


HOSTS = ["evil.example", "evil.example:8161", "127.0.0.1", "127.0.0.1:80", f"{HOST}.evil.example", "", f"a@{HOST}"]


def test_request_with_another_host_opens_nothing(open_broker: BrokerProcess) -> None:
    # C35.4
    async def test(console: ConsoleHere) -> None:
        browser = await console.opened()
        for host, path in product(HOSTS, ("/", "/queues", "/login", f"/open?key={console.console.key}", "/static/x")):
            rebound = console.browser(host=host or "x")
            rebound.cookies = browser.cookies
            answer = await rebound.get(path, {"host": host or None})
            assert answer.status == 421 and b"queue" not in answer.body, (host, path)
        assert (await browser.get("/queues")).status == 200

    run(open_broker, test)


def test_host_is_compared_without_case_and_several_are_refused() -> None:
    assert host_refusal(HERE, "LOCALHOST:8161") is None
    assert host_refusal(HERE, None) is not None


# ---- POST ----

FORGED: list[dict[str, str | None]] = [
    {"origin": "https://evil.example"},
    {"origin": None},
    {"origin": "null"},
    {"origin": f"https://{HOST}"},
    {"origin": "http://127.0.0.1:9999"},
    {"origin": f"http://{HOST}.evil.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "none"},
    {"sec-fetch-site": None},
]


def test_forged_post_is_refused(open_broker: BrokerProcess) -> None:
    # C35.5
    async def test(console: ConsoleHere) -> None:
        browser = await console.opened()
        for path, headers in product(POSTS, FORGED):
            answer = await browser.post(path, {"token": browser.token, "queue": "a"}, headers)
            assert answer.status == 403, (path, headers)
        # It is still logged in, and nothing has happened.
        assert (await browser.get("/queues")).status == 200

    run(open_broker, test)


def test_post_without_the_token_of_its_own_cookie_is_refused(open_broker: BrokerProcess) -> None:
    # C35.5
    async def test(console: ConsoleHere) -> None:
        browser, other = await console.opened(), await console.opened()
        right = browser.token
        for path, token in product(POSTS, ("", "0" * 64, other.token, right[:-1], [right, right])):
            assert (await browser.post(path, {"token": token, "queue": "a"})).status == 403, (path, token)
        for path in POSTS:
            assert (await browser.post(path, {"queue": "a"})).status == 403
        browser.cookies.clear()
        for path in POSTS:
            assert (await browser.post(path, {"token": right, "queue": "a"})).status in (303, 403)

    run(open_broker, test)


def test_post_of_another_type_than_a_form_is_refused(open_broker: BrokerProcess) -> None:
    async def test(console: ConsoleHere) -> None:
        browser = await console.opened()
        for kind in ("text/plain", "multipart/form-data; boundary=x", "application/json", None):
            assert (await browser.post("/pause", {"token": browser.token}, {"content-type": kind})).status == 400

    run(open_broker, test)


def test_post_of_a_large_form_is_refused(open_broker: BrokerProcess) -> None:
    async def test(console: ConsoleHere) -> None:
        browser = await console.opened()
        token = browser.token
        assert (await browser.post("/pause", {"token": token, "queue": "x" * 300_000})).status == 400
        assert (await browser.post("/pause", {"token": token, "sequence": list(range(6000))})).status == 400

    run(open_broker, test)


def test_get_changes_nothing(open_broker: BrokerProcess) -> None:
    # C35.5
    async def test(console: ConsoleHere) -> None:
        browser = await console.opened()
        for path in (*ACTIONS, "/logout"):
            assert (await browser.get(f"{path}?queue=a&verb=purge")).status == 405
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
            assert (await browser.request(method, "/queues", {})).status == 405
        for page in PAGES:
            assert (await browser.post(page.path, {})).status == 405

    run(open_broker, test)


def test_missing_sec_fetch_site_is_let_in_only_where_browsers_send_none() -> None:
    far, headers = Listen("http", "console.example", 80), {"origin": "http://console.example"}
    assert post_refusal(public_address(far, []), headers) is None
    refusal = post_refusal(public_address(far, [])._replace(is_loopback=True), headers)
    assert refusal is not None and "no header Sec-Fetch-Site" in refusal
    secure = {"origin": "https://console.example"}
    assert post_refusal(public_address(Listen("https", "console.example", 443), []), secure) is not None
    assert post_refusal(public_address(far, []), headers | {"sec-fetch-site": "cross-site"})


# ---- A proxy with TLS ----

PROXY = public_address(Listen("http", "127.0.0.1", 8161), ["https://console.example"])


def test_console_behind_a_proxy_with_tls_is_used(users_broker: BrokerProcess) -> None:
    # C35.4
    async def test(console: ConsoleHere) -> None:
        # The proxy passes Host on, or has its own; Origin stays.
        for host in ("console.example", "console.example:443", HOST):
            browser = console.browser(scheme="https", host="console.example", passed_host=host)
            assert (await browser.log_in("rita", PASSWORD)).status == 303
            assert (await browser.get("/queues")).status == 200
            assert list(browser.cookies) == ["__Host-truenext-8161"]
            for origin in ("http://console.example", "https://evil.example"):
                assert (await browser.post("/logout", {"token": browser.token}, {"origin": origin})).status == 403

    run(users_broker, test, PROXY)


def test_token_belongs_to_one_cookie_and_one_console() -> None:
    token = make_token(b"secret", "cookie")
    assert is_token(b"secret", "cookie", token)
    assert not is_token(b"secret", "cookie2", token)
    assert not is_token(b"secret2", "cookie", token)


# ---- Answers ----


def test_each_answer_forbids_framing_sniffing_and_foreign_content(open_broker: BrokerProcess) -> None:
    # C35.6
    async def test(console: ConsoleHere) -> None:
        browser = await console.opened()
        with_body = {"queue": "a", "priority": 4, "sequence": 1}
        paths = [*(page.path for page in PAGES), "/login", "/nothing", "/static/nothing", "/open?key=x", "/body"]
        answers = [await browser.get(path) for path in paths]
        answers += [await browser.get("/", JSON), await browser.post("/pause", with_body)]
        answers += [await browser.get("/", {"host": "evil.example"}), await browser.request("PUT", "/", {})]
        for answer in answers:
            policy = answer.header("content-security-policy")
            assert policy.startswith("default-src 'none';") and "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy and "*" not in policy and "http" not in policy
            assert answer.header("x-frame-options") == "DENY"
            assert answer.header("x-content-type-options") == "nosniff"
            assert answer.header("cross-origin-resource-policy") == "same-origin"
            assert answer.header("cache-control") == "no-store"
            assert not answer.header("server") and not answer.header("access-control-allow-origin")

    run(open_broker, test)


def test_static_files_have_names_that_change_with_their_content(open_broker: BrokerProcess) -> None:
    async def test(console: ConsoleHere) -> None:
        browser = console.browser()
        files = console.console.renderer.static.files
        served = [name for name in files if not name.startswith(("htmx-LICENSE", "uPlot-LICENSE"))]
        assert any(name.endswith(".css") for name in served) and any(name.endswith(".js") for name in served)
        for name in served:
            answer = await browser.get(f"/static/{name}")
            assert answer.status == 200 and "immutable" in answer.header("cache-control")
        for path in ("/static/console.css", "/static/..%2Fapp.py", "/static/../app.py", "/static/", "/static"):
            assert (await browser.get(path)).status == 404

    run(open_broker, test)


# ---- Cookies and logins ----


def test_without_the_printed_address_nothing_is_shown(open_broker: BrokerProcess) -> None:
    # C35.2
    async def test(console: ConsoleHere) -> None:
        browser = console.browser()
        for page in PAGES:
            answer = await browser.get(page.path)
            assert answer.status == 303 and answer.header("location").startswith("/login")
            assert (await browser.get(page.path, JSON)).status == 401
        assert (await browser.get("/open?key=wrong")).status == 403
        assert (await browser.get("/open")).status == 403
        for cookie in ("", "x", console.console.key):
            browser.cookies = {HERE.cookie_name: cookie}
            assert (await browser.get("/queues")).status == 303

    run(open_broker, test)


@pytest.mark.parametrize("has_tls", each_one_of([False, True], ["plain", "tls"]))
def test_cookie_is_for_this_site_and_no_script(open_broker: BrokerProcess, has_tls: bool) -> None:
    # C35.6
    async def test(console: ConsoleHere) -> None:
        browser = console.browser()
        answer = await browser.get(f"/open?key={console.console.key}")
        cookie = answer.header("set-cookie")
        assert cookie.startswith("__Host-truenext-8161=" if has_tls else "truenext-8161=")
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie
        assert ("Secure" in cookie) is has_tls and "Domain" not in cookie
        assert (await browser.get("/queues")).status == 200

    run(open_broker, test, HERE._replace(has_tls=has_tls))


def test_wrong_password_is_refused_and_many_are_not_tried(users_broker: BrokerProcess) -> None:
    # C35.3
    async def test(console: ConsoleHere) -> None:
        browser = console.browser(peer="10.0.0.1")
        for _ in range(5):
            answer = await browser.log_in("rita", "wrong")
            assert (answer.status == 403 and "wrong user or password" in answer.text) or "login" in answer.text
        assert (await browser.log_in("rita", PASSWORD)).status == 429
        other = console.browser(peer="10.0.0.2")
        assert (await other.log_in("rita", PASSWORD)).status == 303
        for number in range(15):
            await console.browser(peer=f"10.0.1.{number}").log_in(f"user{number}", "wrong")
        assert (await console.browser(peer="10.0.0.3").log_in("rita", PASSWORD)).status == 429

    run(users_broker, test)


def test_odd_login_is_answered_with_a_sentence(users_broker: BrokerProcess) -> None:
    async def test(console: ConsoleHere) -> None:
        for user, password in (("", ""), ("a\nb", "c"), ("x" * 3000, "y"), ("a", "b\0"), ("é", "ü")):
            answer = await console.browser(peer=f"10.2.0.{len(user)}").log_in(user, password)
            assert answer.status in (400, 403) and "Traceback" not in answer.text, user

    run(users_broker, test)


def test_login_leads_only_to_pages_of_this_console(users_broker: BrokerProcess) -> None:
    async def test(console: ConsoleHere) -> None:
        for next, target in (
            ("/queues?name=a", "/queues?name=a"),
            ("//evil.example", "/"),
            ("https://evil.example", "/"),
            ("/\\evil.example", "/"),
            ("/\t/evil.example", "/"),
            ("javascript:alert(1)", "/"),
            ("", "/"),
        ):
            browser = console.browser()
            token = (await browser.get("/login")).token
            fields = {"token": token, "user": "rita", "password": PASSWORD, "next": next}
            answer = await browser.post("/login", fields)
            assert (answer.status, answer.header("location")) == (303, target)

    run(users_broker, test)


def test_cookie_changes_with_a_login_and_ends_with_a_logout(users_broker: BrokerProcess) -> None:
    async def test(console: ConsoleHere) -> None:
        browser = console.browser()
        await browser.get("/login")
        before = dict(browser.cookies)
        assert (await browser.log_in("rita", PASSWORD)).status == 303
        kept = dict(browser.cookies)
        assert kept != before
        assert (await browser.act("/logout")).status == 303
        browser.cookies = kept
        assert (await browser.get("/queues")).status == 303

    run(users_broker, test)
