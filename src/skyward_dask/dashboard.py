"""Dask's own status pages, served on request, behind a gate that lets no request through without the token.

The token is made by the scheduler, and told only over the pool's mutual TLS. Everything that listens passes the gate:
pages, static files, metrics, websockets.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import secrets
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode

import dask.config as dask_config
from distributed import Scheduler
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPMessageDelegate, HTTPServerRequest, parse_cookie
from tornado.iostream import IOStream
from tornado.netutil import bind_sockets
from tornado.routing import Router
from tornado.web import Application, RequestHandler

from skyward.base.waiting import wait_until
from skyward.errors import UnreachableError
from skyward_dask.dask_parts import RoutingApplication, dashboard_pages, page_routes

_REQUIREMENT = "bokeh>=3.1"
_HANG_UP_S = 5.0


class Dashboard:
    """A scheduler's pages: started when they are first asked for, ended with the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._token = secrets.token_urlsafe(32)
        self._opening = asyncio.Lock()
        self._server: _Server | None = None
        self._closed = False

    async def open(self) -> dict[str, str]:
        """Serve the pages at a free port of the scheduler's address, unless they are served already.

        Returns:
            ``address`` (``host:port``) and ``token``; or ``error``, which says why there are no pages, and what to do.
        """
        async with self._opening:
            if self._server is None:
                try:  # in a thread, as it takes a second
                    pages = await asyncio.to_thread(dashboard_pages)
                except ImportError as error:
                    return {"error": _no_bokeh(error)}
                if self._closed:
                    return {"error": "The scheduler is closing, and its dashboard with it."}
                self._server = self._serve(pages)
            return {"address": f"{self._scheduler.ip}:{self._server.port}", "token": self._token}

    async def close(self) -> None:
        """End the server and every connection to it. Idempotent."""
        self._closed = True
        if (server := self._server) is None:
            return
        self._server = None
        server.stop()
        await server.close_all_connections()
        server.hang_up()
        application: Any = self._scheduler.http_application
        for pages in application.applications:
            await _end_pages(pages)
        # Distributed would stop them once more: before 2026.8.0 with a call that bokeh 3.10 refuses on a running loop.
        application.applications.clear()

    def _serve(self, pages: Any) -> _Server:
        scheduler: Any = self._scheduler
        modules = dask_config.get("distributed.scheduler.http.routes")
        scheduler.http_application = RoutingApplication(page_routes(scheduler, modules))
        scheduler.http_server = server = _Server(Gate(scheduler.http_application, self._token))
        server.take_port(scheduler.ip)
        try:
            pages.connect(scheduler.http_application, server, scheduler)
        except BaseException:
            server.stop()
            raise
        return server


def _no_bokeh(error: ImportError) -> str:
    return (
        f"Dask's dashboard needs {_REQUIREMENT} on the node where the scheduler runs, and it cannot be imported there: "
        f"{error}. Install it on the nodes, pip=['{_REQUIREMENT}'] for example, and open the pool again."
    )


async def _end_pages(pages: Any) -> None:
    """Stop the periodic work of the pages once no browser shows them."""
    sessions = [session for path in pages.app_paths for session in pages.get_sessions(path)]
    unused_probes = 0

    async def unused() -> Literal[True] | None:
        # Twice: bokeh 3.10 uses a session once more, a turn of the loop after its last connection is gone.
        nonlocal unused_probes
        used = any(session.connection_count or session.expiration_blocked for session in sessions)
        unused_probes = 0 if used else unused_probes + 1
        return True if unused_probes > 1 else None

    with suppress(UnreachableError):
        await wait_until(unused, deadline_s=_HANG_UP_S, interval_s=0.001, what="the browsers' connections to end")
    if hasattr(pages, "stop_async"):  # since bokeh 3.10, which needs Python 3.12; it ends its sessions, too
        await pages.stop_async()
        return
    for session in sessions:
        session.destroy()
    pages.stop()


class _Server(HTTPServer):
    """An HTTP server that has its port, and can close connections to websockets, which tornado leaves open."""

    port = 0

    def take_port(self, host: str) -> None:
        """Listen at a free port."""
        sockets = bind_sockets(0, host)
        self.add_sockets(sockets)
        self.port = sockets[0].getsockname()[1]
        self._streams: weakref.WeakSet[IOStream] = weakref.WeakSet()

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        """See tornado's ``TCPServer``."""
        self._streams.add(stream)
        super().handle_stream(stream, address)

    def hang_up(self) -> None:
        """Close every connection that is still open."""
        for stream in list(self._streams):
            stream.close()


class Gate(Router):
    """Access control of a web application that decides about every request from its headers alone.

    A token is accepted as ``?token=`` in the URL, as the cookie that this leads to, and as the password of HTTP Basic
    authentication, with any user name. The application sees none of them: bokeh writes cookies and headers into its
    pages.
    """

    def __init__(self, application: Application, token: str) -> None:
        self._application = application
        self._token = token
        # Cookies have no ports: the name separates the pools that a browser sees on one address.
        self._cookie = "skyward-dashboard-" + hashlib.sha256(token.encode()).hexdigest()[:8]
        self._desk = Application(log_function=_log_nothing)

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> HTTPMessageDelegate | None:
        """See tornado's ``Router``."""
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower().partition("://")[2] != request.host.lower():
            # The browser adds its credentials by itself to what a page of another site sends.
            return self._answer(request, 403, text="A page of another site may not use this dashboard.\n")
        if given := request.query_arguments.get("token"):
            return self._lead_to_page(request) if self._is_token(given[-1]) else self._ask_for_token(request)
        cookies = parse_cookie(request.headers.get("Cookie", ""))
        password = _password(request.headers.get("Authorization", ""))
        if not self._is_token(cookies.get(self._cookie, "").encode()) | self._is_token(password):
            return self._ask_for_token(request)
        for name in ("Authorization", "Cookie"):
            request.headers.pop(name, None)
        return self._application.find_handler(request, **kwargs)

    def _lead_to_page(self, request: HTTPServerRequest) -> HTTPMessageDelegate:
        """Answer the right token in a URL with a cookie, and the way to the same URL without the token."""
        url, cookie = _without_token(request), (self._cookie, self._token)
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            # Redirected from another site's link, the browser would keep the cookie to itself: not so from this page.
            return self._answer(request, 200, {"Refresh": f"0; url={url}"}, cookie=cookie)
        return self._answer(request, 303, {"Location": url}, cookie=cookie)

    def _ask_for_token(self, request: HTTPServerRequest) -> HTTPMessageDelegate:
        """Answer no token, or a wrong one, such that the browser requests it."""
        realm = {"WWW-Authenticate": 'Basic realm="The dashboard of a pool: its token is the password"'}
        text = "Open this dashboard by its link, which holds the token, or give the token as password.\n"
        return self._answer(request, 401, realm, text=text)

    def _answer(
        self,
        request: HTTPServerRequest,
        status: int,
        headers: Mapping[str, str] | None = None,
        *,
        text: str = "",
        cookie: tuple[str, str] | None = None,
    ) -> HTTPMessageDelegate:
        answer: dict[str, Any] = {"status": status, "headers": headers or {}, "text": text, "cookie": cookie}
        return self._desk.get_handler_delegate(request, _GateAnswer, answer)

    def _is_token(self, given: bytes) -> bool:
        return secrets.compare_digest(given, self._token.encode())


def _log_nothing(handler: RequestHandler) -> None:
    """Tornado would log URLs, and those may hold the token."""


def _password(authorization: str) -> bytes:
    """Return the password of HTTP Basic authentication; empty if there is none."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


class _GateAnswer(RequestHandler):
    """Answer of the gate itself, to any method."""

    def initialize(self, status: int, headers: Mapping[str, str], text: str, cookie: tuple[str, str] | None) -> None:
        self.set_status(status)
        fixed = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}
        for name, value in {**fixed, "Referrer-Policy": "no-referrer", **headers}.items():
            self.set_header(name, value)
        if cookie is not None:
            self.set_cookie(*cookie, httponly=True, samesite="Strict")
        self._text = text

    def prepare(self) -> None:
        self.finish(self._text)


def _without_token(request: HTTPServerRequest) -> str:
    left = [(name, value) for name, value in parse_qsl(request.query, keep_blank_values=True) if name != "token"]
    path = "/" + request.path.lstrip("/")
    return f"{request.protocol}://{request.host}{path}" + ("?" + urlencode(left) if left else "")
