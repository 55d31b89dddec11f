"""HTTP application of the console: routes, forms of an answer, and logins.

Each page has one address and three forms: HTML, JSON with `Accept: application/json`, and with `Accept:
text/event-stream` a stream of the part of the page that changes. Only POST changes anything.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from truenext.console import doors, views
from truenext.console.doors import Address
from truenext.console.link import Link, LoggedOut, OlderBroker, Restricted
from truenext.console.logins import STREAMS_MAX, Attempts, Login, Logins
from truenext.console.pages import others
from truenext.console.pages.links import address
from truenext.console.rendering import TYPES, Renderer
from truenext.console.rights import Rights
from truenext.console.shared import Shared
from truenext.console.visit import InvalidRequest, NotAllowed, NotFound, Visit
from truenext.errors import Code, ConnectionLost, Refused, TruenextError
from truenext.version import VERSION

logger = logging.getLogger(__name__)

FORM_BYTES_MAX = 256 * 1024
CHUNK_BYTES = 64 * 1024
FIELDS_MAX = 5000
"""Largest number of parameters of an address, or of fields of a form."""
TIDY_S = 60.0
"""Seconds between two looks for logins that are over."""
LIVE_S, LIVE_S_MAX = 2.0, 15.0
"""Shortest and longest time between two states of a page in a stream."""
STREAM_BUSY_MAX = 0.005
"""Largest part of the time in which a stream asks the broker, unless LIVE_S_MAX is longer."""
HEART_BEAT_S = 15.0
"""Time after which a stream without news sends a comment, so that a closed browser is noticed."""

CLIENT_HAS_GONE = 499
"""Status of a response whose client has gone."""

Parameters = Mapping[str, list[str]]


class PageRoute(NamedTuple):
    path: str
    template: str
    title: str
    load: Callable[[Visit], Awaitable[msgspec.Struct]]
    navigation: str = ""
    """Text of the link to the page in the navigation; "" if there is none."""
    is_shown: Callable[[Rights], bool] = lambda rights: True
    """Whether a user with these rights gets the page."""


PAGES = (
    PageRoute("/", "overview", "Overview", views.overview, "Overview"),
    PageRoute("/queues", "queues", "Queues", views.queues, "Queues"),
    PageRoute("/queue", "queue", "Queue", views.queue),
    PageRoute("/message", "message", "Message", views.message),
    PageRoute("/dead-letters", "dead_letters", "Dead letters", views.dead_letters, "Dead letters"),
    PageRoute("/action", "action", "What would happen", views.action),
    PageRoute("/progress", "progress", "Progress", views.progress),
    PageRoute("/stages", "stages", "Stages", views.stages, "Stages"),
    PageRoute("/flows", "flows", "Flows", views.flows, "Flows"),
    PageRoute("/flow", "flow", "Flow", views.flow),
    PageRoute("/scheduled", "scheduled", "Scheduled sends", views.scheduled, "Scheduled"),
    PageRoute("/durable", "durable", "Durable subscriptions", views.durable, "Subscriptions"),
    PageRoute(
        "/connections", "connections", "Connections", views.connections, "Connections", lambda rights: rights.is_monitor
    ),
    PageRoute("/spark", "spark", "Spark's queries", views.spark, "Spark"),
    PageRoute("/security", "security", "Users and refusals", views.security, "Users"),
    PageRoute("/settings", "settings", "Settings", views.settings, "Settings"),
)

ACTIONS: Mapping[str, Callable[[Visit], Awaitable[str]]] = {
    "/pause": views.pause,
    "/resume": views.resume,
    "/work": views.begin_work,
    "/stop": views.stop_work,
    "/close": views.close,
    "/dismiss": views.dismiss,
}
"""Actions by path: each does something, and returns the address to show next."""


class Console:
    """State of the console: the broker, logins, and what all of them share."""

    def __init__(self, shared: Shared, public: Address, *, has_users: bool, renderer: Renderer) -> None:
        self.shared = shared
        self.broker = shared.broker
        self.public = public
        self.has_users = has_users
        self.renderer = renderer
        self.key = secrets.token_urlsafe(32)
        """Token of the address that opens a console without users."""
        self.secret = secrets.token_bytes(32)
        self.stopping = asyncio.Event()
        """Event that ends all streams."""
        self.logins = Logins(time.monotonic)
        self.attempts = Attempts(time.monotonic)
        self._logging_in = asyncio.Semaphore(4)
        self._tidying: asyncio.Task[None] | None = None
        self._shared_link: Link | None = None

    def start(self) -> None:
        """Start to read flows, and to end logins that are over."""
        self.shared.flows.start()
        self._tidying = asyncio.create_task(self._tidy())

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            await self._log_out_all(self.logins.over())

    # ---- Logins ----

    async def log_in(self, user: str, password: str) -> str:
        """Open a connection of a user, and return the cookie of the login.

        Raises: Refused if the broker refuses the login; TruenextError without a broker
        """
        async with self._logging_in:
            connection = await self.broker.connect(user, password)
        link = Link(self.broker, connection, user)
        try:
            rights = await link.rights()
            if rights.name != user:
                raise NotAllowed("the broker has no users any more: start the console again")
            await self._end_expired()
            return self.logins.open(link)
        except BaseException:
            await link.close()
            raise

    async def open_without_users(self) -> str:
        """Return the cookie of a login at a broker without users. All such logins share one connection."""
        if self._shared_link is None:
            self._shared_link = Link(self.broker, None, None)
        await self._end_expired()
        return self.logins.open(self._shared_link)

    async def log_out(self, login: Login) -> None:
        self.logins.end(login)
        for work in login.work.values():
            work.stop()
        if login.link is not self._shared_link:
            await login.link.close()

    async def _end_expired(self) -> None:
        await self._log_out_all(self.logins.expired())

    async def _log_out_all(self, logins: Sequence[Login]) -> None:
        """End logins, all at once: a broker may be slow to confirm each."""
        for result in await asyncio.gather(*map(self.log_out, logins), return_exceptions=True):
            if isinstance(result, Exception):
                logger.warning("a login has not ended in order", extra={"error": repr(result)})

    async def close(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.wait({self._tidying})
        await self._log_out_all(self.logins.all())
        if self._shared_link is not None:
            await self._shared_link.close()
        await self.shared.close()

    async def visit(self, login: Login, parameters: Parameters) -> Visit:
        rights = await login.link.rights()
        return Visit(self.shared, login, rights, parameters, round(time.time() * 1000), self.logins.is_open)

    # ---- What templates get ----

    def context(
        self, title: str, here: str, page: Any, *, cookie: str, rights: Rights | None, is_reachable: bool = True
    ) -> dict[str, Any]:
        """Return what a template gets. `rights` are None if nobody is logged in."""
        shown = [] if rights is None else [each for each in PAGES if each.navigation and each.is_shown(rights)]
        return {
            "page": page,
            "title": title,
            "here": here,
            "user": None if rights is None else rights.name,
            "is_logged_in": rights is not None,
            "token": doors.make_token(self.secret, cookie),
            "may": rights,
            "nav": [(each.path, each.navigation) for each in shown],
            "broker": {"name": self.broker.name, "reachable": is_reachable},
            "version": VERSION,
            "at": round(time.time() * 1000),
        }


def make_app(console: Console, pages: Sequence[PageRoute] = PAGES) -> ASGIApp:
    """Return the application, behind its doors."""
    requests = Requests(console)
    routes = [Route(each.path, requests.page(each), methods=["GET"]) for each in pages]
    routes += [Route(path, requests.action(act), methods=["POST"]) for path, act in ACTIONS.items()]
    routes += [
        Route("/body", requests.with_login(requests.body), methods=["GET"]),
        Route("/static/{name}", requests.static, methods=["GET"]),
        Route("/login", requests.login_page, methods=["GET"]),
        Route("/login", requests.log_in, methods=["POST"]),
        Route("/logout", requests.log_out, methods=["POST"]),
        Route("/open", requests.open, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={404: requests.no_such_page, 405: requests.wrong_method})
    app.router.redirect_slashes = False
    return Doors(app, console.public)


class Doors:
    """ASGI middleware: refuses requests by their Host, Origin and method, and adds headers to each answer."""

    def __init__(self, app: ASGIApp, public: Address) -> None:
        self._app = app
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                added = [(name.encode(), value.encode()) for name, value in doors.HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in added if each[0] not in own)]
            await send(message)

        refusal = self._refusal(scope)
        app = self._app if refusal is None else refusal
        await app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = Request(scope).headers
        hosts = headers.getlist("host")
        if reason := doors.host_refusal(self._public, hosts[0] if len(hosts) == 1 else None):
            return PlainTextResponse(f"{reason}\n", 421)
        if scope["method"] not in doors.METHODS:
            return PlainTextResponse("GET and POST are allowed\n", 405)
        if scope["method"] == "POST" and (reason := doors.post_refusal(self._public, headers)):
            return PlainTextResponse(f"{reason}\n", 403)
        return None


def failure_of(error: Exception) -> tuple[int, str]:
    """Return the HTTP status and the sentence of an error."""
    match error:
        case LoggedOut():
            return 401, str(error)
        case NotFound():
            return 404, str(error)
        case NotAllowed():
            return 403, str(error)
        case InvalidRequest():
            return 400, str(error)
        case OlderBroker():
            return 502, str(error)
        case Refused(code=Code.FORBIDDEN):
            return 403, str(error)
        case Refused(code=Code.NOT_FOUND):
            return 404, str(error)
        case Restricted():
            return 503, str(error)
        case Refused(code=Code.DRAINING | Code.BUSY | Code.LIMIT | Code.NO_SPACE | Code.TOO_SLOW):
            return 503, str(error)
        case Refused():
            return 400, str(error)
        case TimeoutError():
            return 504, "the broker does not answer in time: it may be busy or away, try again"
        case ConnectionLost():
            return 503, f"the broker does not answer: {error}; this page works again once it does"
        case TruenextError():
            return 502, str(error)
    raise error


class Entry:
    """Request of a login, until its answer is made."""

    def __init__(self, console: Console, login: Login) -> None:
        self._console = console
        self.login = login
        self.rights: Rights | None = None
        """Rights of the login; None as long as the broker has not told them."""

    async def visit(self, parameters: Parameters) -> Visit:
        visit = await self._console.visit(self.login, parameters)
        self.rights = visit.rights
        return visit


class Requests:
    """Handlers of HTTP requests."""

    def __init__(self, console: Console) -> None:
        self._console = console

    # ---- Pages ----

    def page(self, route: PageRoute) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request, entry: Entry) -> Response:
            parameters = _query(request)
            if _accepts(request, "text/event-stream"):
                return self._stream(request, entry.login, route, parameters)
            visit = await entry.visit(parameters)
            page = await load(route, visit)
            if _accepts(request, "application/json"):
                return Response(msgspec.json.encode(page), media_type="application/json")
            context = self._context(request, route.title, page, visit.rights)
            return Response(self._console.renderer.page(route.template, context), media_type="text/html")

        return self.with_login(show)

    def with_login(
        self, respond: Callable[[Request, Entry], Coroutine[Any, Any, Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that responds to requests with a login, and asks others to log in. Errors that `respond`
        raises are shown as a page. A GET ends once its client has gone."""

        async def handle(request: Request) -> Response:
            login = self._login(request)
            if login is None:
                return self._ask_to_log_in(request)
            entry = Entry(self._console, login)
            response = respond(request, entry)
            try:
                return await (_until_gone(request, response) if request.method == "GET" else response)
            except (TruenextError, TimeoutError) as error:
                return await self._fail(request, error, login, entry.rights)

        return handle

    def _stream(self, request: Request, login: Login, route: PageRoute, parameters: Parameters) -> Response:
        if not self._console.renderer.is_live(route.template):
            # This status tells a browser not to ask for the stream again.
            return Response(status_code=204)
        if login.streams >= STREAMS_MAX:
            return PlainTextResponse("too many pages are open: close some\n", 429)
        events = self._events(request, login, route, parameters)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(
        self, request: Request, login: Login, route: PageRoute, parameters: Parameters
    ) -> AsyncIterator[str]:
        """Yield the live part of a page each time that it differs from the one before."""
        console = self._console
        shown, quiet_since = "", time.monotonic()
        login.streams += 1
        try:
            while console.logins.is_open(login):
                started = time.monotonic()
                try:
                    visit = await console.visit(login, parameters)
                    page = await load(route, visit)
                    context = self._context(request, route.title, page, visit.rights)
                    html = console.renderer.live(route.template, context)
                    if html != shown:
                        yield _event(html)
                        shown, quiet_since = html, time.monotonic()
                except LoggedOut:
                    break
                except (TruenextError, TimeoutError) as error:
                    # The page stays as it is; its template may say that it is stale.
                    yield _event(failure_of(error)[1], "failed")
                    shown, quiet_since = "", time.monotonic()
                if time.monotonic() - quiet_since > HEART_BEAT_S:
                    yield ": nothing new\n\n"
                    quiet_since = time.monotonic()
                login.used_s = max(login.used_s, time.monotonic())
                busy_s = time.monotonic() - started
                if await self._is_stopping_within(min(max(LIVE_S, busy_s / STREAM_BUSY_MAX), LIVE_S_MAX)):
                    return
            yield _event("", "login")
        finally:
            login.streams -= 1

    async def _is_stopping_within(self, seconds: float) -> bool:
        """Wait for some time, and return whether the console is stopped meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._console.stopping.wait()
        return self._console.stopping.is_set()

    async def _fail(self, request: Request, error: Exception, login: Login | None, rights: Rights | None) -> Response:
        status, text = failure_of(error)
        if status == 401:
            if login is not None:
                # A broker without users may have got some.
                self._console.has_users = True
                await self._console.log_out(login)
            return self._ask_to_log_in(request, text)
        page = others.Failure(status=status, error=text)
        if _accepts(request, "application/json"):
            return Response(msgspec.json.encode(page), status, media_type="application/json")
        if rights is None and login is not None:
            rights = Rights.of_nothing(login.link.user)
        context = self._context(request, "This does not work", page, rights, is_reachable=status not in (503, 504))
        return Response(self._console.renderer.page("error", context), status, media_type="text/html")

    def _ask_to_log_in(self, request: Request, error: str = "") -> Response:
        here = _here(request)
        if _accepts(request, "application/json"):
            text = error or "log in first"
            return Response(
                msgspec.json.encode(others.Failure(status=401, error=text)), 401, media_type="application/json"
            )
        if _accepts(request, "text/event-stream"):
            return Response(_event("", "login"), media_type="text/event-stream")
        here = here if request.method == "GET" and here != "/" else ""
        target = address("/login", next=here, ended="1" if error else "")
        return RedirectResponse(target, 303)

    def _context(
        self, request: Request, title: str, page: Any, rights: Rights | None, *, is_reachable: bool = True
    ) -> dict[str, Any]:
        cookie = request.cookies.get(self._console.public.cookie_name, "")
        return self._console.context(
            title, _here(request), page, cookie=cookie, rights=rights, is_reachable=is_reachable
        )

    async def no_such_page(self, request: Request, error: Exception) -> Response:
        return await self._fail(request, NotFound("there is no such page: begin at the overview"), None, None)

    async def wrong_method(self, request: Request, error: Exception) -> Response:
        return PlainTextResponse("GET shows a page, POST does something; this address is for the other one\n", 405)

    # ---- Actions ----

    def action(self, act: Callable[[Visit], Awaitable[str]]) -> Callable[[Request], Awaitable[Response]]:
        async def do(request: Request, entry: Entry) -> Response:
            form = await self._form(request)
            return RedirectResponse(await act(await entry.visit(form)), 303)

        return self.with_login(do)

    async def _form(self, request: Request) -> Parameters:
        """Return the fields of a posted form, whose token is checked.

        Raises: InvalidRequest if the body is no form, or too large; NotAllowed if the token is not that of the cookie
        """
        if request.headers.get("content-type", "").partition(";")[0] != "application/x-www-form-urlencoded":
            raise InvalidRequest("the body of a POST must be a form, application/x-www-form-urlencoded")
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > FORM_BYTES_MAX:
                raise InvalidRequest(f"the form has more than {FORM_BYTES_MAX:,} bytes: choose fewer messages")
        try:
            form = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=FIELDS_MAX)
        except ValueError as error:
            raise InvalidRequest(f"the body is no form: {error}") from error
        cookie = request.cookies.get(self._console.public.cookie_name, "")
        tokens = form.pop(doors.TOKEN_FIELD, [""])
        if not cookie or len(tokens) != 1 or not doors.is_token(self._console.secret, cookie, tokens[0]):
            raise NotAllowed("the form is not of this login: open the page again, and use its buttons")
        return form

    # ---- Logins ----

    def _login(self, request: Request) -> Login | None:
        return self._console.logins.find(request.cookies.get(self._console.public.cookie_name, ""))

    async def login_page(self, request: Request) -> Response:
        query = request.query_params
        error = "this login has ended: log in again" if query.get("ended") else ""
        return self._show_login(request, error, query.get("next", ""))

    def _show_login(self, request: Request, error: str, next: str, user: str = "", status: int = 200) -> Response:
        console = self._console
        page = others.Login(next=_own_address(next), error=error, user=user, needs_token=not console.has_users)
        # The token of the form belongs to a cookie, so a browser gets one before it is logged in.
        name = console.public.cookie_name
        cookie = request.cookies.get(name) or secrets.token_urlsafe(32)
        context = console.context("Log in", _here(request), page, cookie=cookie, rights=None)
        response = Response(console.renderer.page("login", context), status, media_type="text/html")
        self._set_cookie(response, cookie)
        return response

    async def log_in(self, request: Request) -> Response:
        console = self._console
        peer = request.client.host if request.client else ""
        try:
            form = await self._form(request)
        except (InvalidRequest, NotAllowed) as error:
            return self._show_login(request, str(error), "", status=failure_of(error)[0])
        user, password = form.get("user", [""])[-1], form.get("password", [""])[-1]
        next = form.get("next", [""])[-1]
        if console.attempts.are_too_many(peer):
            return self._show_login(request, "too many failed logins: wait for a minute", next, user, 429)
        console.attempts.note(peer)
        try:
            cookie = await console.log_in(user, password)
        except Refused as error:
            if error.code != Code.LOGIN:
                console.attempts.forgive(peer)
            return self._show_login(request, str(error), next, user, 403)
        except (TruenextError, TimeoutError, ValueError) as error:
            console.attempts.forgive(peer)
            status, text = (400, str(error)) if isinstance(error, ValueError) else failure_of(error)
            return self._show_login(request, text, next, user, status)
        console.attempts.forgive(peer)
        former = self._login(request)
        if former is not None:
            await console.log_out(former)
        response = RedirectResponse(_own_address(next), 303)
        self._set_cookie(response, cookie)
        return response

    async def open(self, request: Request) -> Response:
        """Open a console without users by the address that the command has printed."""
        console = self._console
        key = request.query_params.get("key", "")
        if console.has_users or not hmac.compare_digest(key.encode(), console.key.encode()):
            return self._show_login(request, "this is not the address that the console has printed", "", status=403)
        response = RedirectResponse("/", 303)
        self._set_cookie(response, await console.open_without_users())
        return response

    async def log_out(self, request: Request) -> Response:
        login = self._login(request)
        try:
            await self._form(request)
        except (InvalidRequest, NotAllowed) as error:
            return await self._fail(request, error, login, None)
        if login is not None:
            await self._console.log_out(login)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(
            self._console.public.cookie_name, secure=self._console.public.has_tls, httponly=True, samesite="strict"
        )
        return response

    def _set_cookie(self, response: Response, cookie: str) -> None:
        public = self._console.public
        response.set_cookie(
            public.cookie_name, cookie, path="/", secure=public.has_tls, httponly=True, samesite="strict"
        )

    # ---- Files ----

    async def static(self, request: Request) -> Response:
        path = self._console.renderer.static.files.get(request.path_params["name"])
        kind = None if path is None else TYPES.get(path.suffix)
        if path is None or kind is None:
            return PlainTextResponse("there is no such file\n", 404)
        return FileResponse(path, media_type=kind, headers={"cache-control": "public, max-age=31536000, immutable"})

    async def body(self, request: Request, entry: Entry) -> Response:
        """Answer with the body of a message, as a file that no browser shows."""
        visit = await entry.visit(_query(request))
        chunks, size = _chunks(body := await views.body(visit)), len(body)
        del body
        headers = {
            "content-length": str(size),
            "content-disposition": f'attachment; filename="message-{visit.number("sequence", 0)}.bin"',
            "content-security-policy": f"{doors.CONTENT_SECURITY_POLICY}; sandbox",
        }
        return StreamingResponse(chunks, media_type="application/octet-stream", headers=headers)


async def load(route: PageRoute, visit: Visit) -> msgspec.Struct:
    """Return the data of a page. Raises: NotAllowed if the user may not see the page; other errors of the broker"""
    if not route.is_shown(visit.rights):
        raise NotAllowed(f"user {visit.rights.name!r} may not see this page: it needs the right monitor")
    return await route.load(visit)


async def _until_gone(request: Request, response: Coroutine[Any, Any, Response]) -> Response:
    """Return the response to a GET. Once the client has gone, the work for it is cancelled, and the response is empty.

    Raises: the errors of `response`
    """
    working, leaving = asyncio.create_task(response), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_HAS_GONE)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _accepts(request: Request, kind: str) -> bool:
    """Return whether a request asks for a kind of answer by name. Browsers that show a page name only HTML."""
    return kind in request.headers.get("accept", "")


def _query(request: Request) -> Parameters:
    """Return the parameters of an address. Raises: InvalidRequest if there are too many"""
    try:
        return parse_qs(request.url.query, keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError as error:
        raise InvalidRequest(f"the address has more than {FIELDS_MAX:,} parameters: choose fewer messages") from error


def _here(request: Request) -> str:
    return f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path


def _own_address(next: str) -> str:
    """Return an address of this console, for a redirection; "/" in place of one that leads elsewhere."""
    is_own = next.startswith("/") and not next.startswith(("//", "/\\")) and next.isprintable() and "\\" not in next
    return next if is_own else "/"


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    """Yield parts of a body. Meanwhile it is in a file: a slow browser keeps that, and no memory."""
    with tempfile.TemporaryFile() as file:
        file.write(body)
        del body
        file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _event(data: str, name: str = "") -> str:
    """Return an event of a stream. Source: WHATWG, "Server-sent events" """
    lines = "".join(f"data: {line}\n" for line in data.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    return f"event: {name}\n{lines}\n" if name else f"{lines}\n"
