"""The page of runs from a server on this machine's loopback. It follows runs that train, and reads samples
when they are viewed.

It answers GET only, to a browser at 127.0.0.1 or localhost. A name that an attacker points here (DNS
rebinding) is refused by its Host header, and no other origin may read an answer. Addresses are numbers of
runs, steps and groups, never paths.
"""

import getpass
import hashlib
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from megatron_ibpo.basics.rendezvous import listen
from megatron_ibpo.report.page.directories import NotThere, Source
from megatron_ibpo.report.page.html import comparison, embedded, page, policy

ADDRESS = "127.0.0.1"
_HOSTS = [ADDRESS, "localhost"]
_LONGEST_STEP = 10**9
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def serve(sources: Sequence[Source], port: int, say: Callable[[str], None] = print) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Args:
        port: port on 127.0.0.1; a free one if it is taken.
        say: called with the address, and with how to reach it from another machine.
    """
    try:
        listening = listen(ADDRESS, port)
    except OSError:
        listening = listen(ADDRESS)
    got = listening.getsockname()[1]
    if port not in (0, got):
        say(f"port {port} is taken")
    say(f"http://{ADDRESS}:{got}/    (Ctrl-C ends it)")
    say(f"from another machine: ssh -L {got}:{ADDRESS}:{got} {getpass.getuser()}@{socket.gethostname()}")
    server = uvicorn.Server(uvicorn.Config(application(sources), log_level="warning", server_header=False))
    # in a daemon thread, as are the threads it starts: nothing is written, so none is awaited at the end
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        say("stopped")


def application(sources: Sequence[Source]) -> Starlette:
    """Return the server as an ASGI application."""

    def endpoint_of(content: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Return an endpoint that answers with the result of `content`, computed outside the event loop."""

        async def endpoint(request: Request) -> Response:
            return await run_in_threadpool(_answer, content, request)

        return endpoint

    def source(request: Request) -> Source:
        number = request.path_params["run"]
        if number >= len(sources):
            raise NotThere(f"there are {len(sources)} runs")
        return sources[number]

    def key(request: Request) -> int:
        return request.path_params["key"]

    async def index(request: Request) -> Response:
        title = ", ".join(source.name for source in sources)
        return HTMLResponse(page(title), headers=_HEADERS | {"Content-Security-Policy": policy(live=True)})

    def runs(request: Request) -> dict[str, Any]:
        version = hashlib.sha256("|".join(s.version() for s in sources).encode()).hexdigest()[:16]
        if request.query_params.get("version") == version:
            return {"version": version}
        overviews = [source.overview() for source in sources]
        return {"version": version, "runs": overviews, "comparison": comparison(overviews)}

    endpoints = {
        "/api/runs": runs,
        "/api/runs/{run:int}/series": lambda r: source(r).series(_step(r, "first"), _step(r, "last")),
        "/api/runs/{run:int}/sections/{key:int}": lambda r: source(r).section(key(r)),
        "/api/runs/{run:int}/sections/{key:int}/groups/{group:int}": lambda r: source(r).group(
            key(r), r.path_params["group"]
        ),
        "/api/runs/{run:int}/sections/{key:int}/search": lambda r: source(r).search(
            key(r), r.query_params.get("text", "")
        ),
    }
    routes = [Route("/", index), *(Route(path, endpoint_of(content)) for path, content in endpoints.items())]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS, www_redirect=False),
            Middleware(GZipMiddleware, minimum_size=10_000, compresslevel=1),
        ],
    )


def _answer(content: Callable[[Request], Any], request: Request) -> Response:
    try:
        status, reply = 200, content(request)
    except NotThere as error:
        status, reply = 404, {"problem": str(error)}
    except (ValueError, OSError) as error:
        status, reply = 500, {"problem": str(error)}
    return Response(embedded(reply), status, _HEADERS, "application/json")


def _step(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) < _LONGEST_STEP):
        raise NotThere(f"{name} must be a step")
    return int(text)
