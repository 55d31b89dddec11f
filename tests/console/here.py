"""Console in the process of the test, and a browser without a window: requests go straight to the application."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.types import ASGIApp, Message

from truenext.client.core.credentials import NO_CREDENTIALS
from truenext.console.app import Console, make_app
from truenext.console.doors import Address, make_token
from truenext.console.link import Broker
from truenext.console.rendering import Renderer
from truenext.console.serving import Listen, ask_whether_users, public_address
from truenext.console.shared import Shared

HOST = "127.0.0.1:8161"
HERE = public_address(Listen("http", "127.0.0.1", 8161), [])
JSON = {"accept": "application/json"}
GONE_S = 5.0
"""Seconds in which the console ends a request whose browser has gone."""
_TOKEN = re.compile(r'name="token"\s+value="([0-9a-f]*)"')


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        assert self.header("content-type") == "application/json", self.text
        return json.loads(self.body)

    def header(self, name: str) -> str:
        return next((value for each, value in self.headers if each == name), "")

    @property
    def token(self) -> str:
        found = _TOKEN.search(self.text)
        assert found is not None, self.text
        return found[1]


class Browser:
    """Browser with its cookies. It sends what a browser sends with a page's own forms, unless a test says otherwise."""

    def __init__(
        self,
        console: Console,
        app: ASGIApp,
        *,
        scheme: str = "http",
        host: str = HOST,
        passed_host: str = "",
        peer: str = "127.0.0.1",
    ) -> None:
        """`passed_host` is the Host that a proxy passes on."""
        self._console = console
        self._app = app
        self._origin = f"{scheme}://{host}"
        self._host = passed_host or host
        self._peer = peer
        self.cookies: dict[str, str] = {}

    async def get(self, path: str, headers: Mapping[str, str | None] | None = None) -> Answer:
        return await self.request("GET", path, headers or {})

    async def page(self, path: str) -> Any:
        """Return the data of a page, which must be there."""
        answer = await self.get(path, JSON)
        assert answer.status == 200, (path, answer.text)
        return answer.json()

    async def post(
        self, path: str, fields: Mapping[str, object], headers: Mapping[str, str | None] | None = None
    ) -> Answer:
        """Post a form. A header that is None is left out."""
        form = {
            "content-type": "application/x-www-form-urlencoded",
            "origin": self._origin,
            "sec-fetch-site": "same-origin",
            **(headers or {}),
        }
        return await self.request("POST", path, form, urlencode(fields, doseq=True).encode())

    @property
    def token(self) -> str:
        """Token of the forms that this browser is shown."""
        return make_token(self._console.secret, self.cookies[self._console.public.cookie_name])

    async def act(self, path: str, **fields: object) -> Answer:
        """Post a form with the token of this browser."""
        return await self.post(path, {"token": self.token, **fields})

    async def log_in(self, user: str, password: str) -> Answer:
        token = (await self.get("/login")).token
        return await self.post("/login", {"token": token, "user": user, "password": password})

    async def request(self, method: str, path: str, headers: Mapping[str, str | None], body: bytes = b"") -> Answer:
        sent = [message async for message in self.messages(method, path, headers, body)]
        start = next(each for each in sent if each["type"] == "http.response.start")
        received = [(name.decode(), value.decode("latin-1")) for name, value in start["headers"]]
        for name, value in received:
            if name == "set-cookie":
                self.cookies |= {each.key: each.value for each in SimpleCookie(value).values()}
        content = b"".join(each.get("body", b"") for each in sent if each["type"] == "http.response.body")
        return Answer(start["status"], received, content)

    async def messages(
        self, method: str, path: str, headers: Mapping[str, str | None], body: bytes = b""
    ) -> AsyncGenerator[Message, None]:
        """Yield the messages of ASGI that answer a request, as they come."""
        own = {"host": self._host, "cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        all_headers = {name: value for name, value in (own | dict(headers)).items() if value}
        target, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": self._origin.partition(":")[0],
            "path": target,
            "raw_path": target.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in all_headers.items()],
            "client": (self._peer, 40_000),
            "server": ("127.0.0.1", 8161),
        }
        queue: asyncio.Queue[Message | None] = asyncio.Queue()
        requests = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, queue.put)
            finally:
                await queue.put(None)

        task = asyncio.create_task(run())
        try:
            while (message := await queue.get()) is not None:
                yield message
            await task
        finally:
            # A server only says that the browser has gone.
            gone.set()
            await asyncio.wait({task}, timeout=GONE_S)
            task.cancel()
            await asyncio.wait({task})


@dataclass(frozen=True)
class ConsoleHere:
    console: Console
    app: ASGIApp

    def browser(self, **options: str) -> Browser:
        return Browser(self.console, self.app, **options)

    async def opened(self) -> Browser:
        """Return a browser that has opened a console without users."""
        browser = self.browser()
        assert (await browser.get(f"/open?key={self.console.key}")).status == 303
        return browser

    async def logged_in(self, user: str, password: str) -> Browser:
        browser = self.browser()
        answer = await browser.log_in(user, password)
        assert answer.status == 303, answer.text
        return browser


@asynccontextmanager
async def console_here(url: str, *, events: Sequence[Path] = (), public: Address = HERE) -> AsyncIterator[ConsoleHere]:
    """Run a console for a broker until the end of the block."""
    broker = Broker((url,), NO_CREDENTIALS)
    shared = Shared(broker, events, {"broker": url})
    console = Console(shared, public, has_users=await ask_whether_users(broker), renderer=Renderer())
    console.start()
    try:
        yield ConsoleHere(console, make_app(console))
    finally:
        await console.close()
