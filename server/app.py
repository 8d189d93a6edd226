# SPDX-License-Identifier: Apache-2.0
"""The routes: which path answers to which methods, and what every answer has in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import unquote

from server.engine_v1.routes import EngineRoutes
from server.errors import ApiError
from server.gate import Phase
from server.http.exchange import Exchange
from server.http.responses import Response, json_response
from server.openai import objects
from server.openai.chat import ChatService, chat_completions
from server.origin import OriginPolicy
from server.pages import Page

Route = Callable[[Exchange], Awaitable[None]]


class App:
    """Answers exchanges. `progress` is the share of the model that is loaded, 0 to 1."""

    def __init__(
        self,
        service: ChatService,
        *,
        policy: OriginPolicy,
        chat_page: Page,
        session_dir: Path | None = None,
    ) -> None:
        self._service = service
        self._policy = policy
        self._chat_page = chat_page
        self._created = int(service.wall_clock())
        self.progress = 0.0
        self.engine_routes = EngineRoutes(service, session_dir)
        # Path -> method -> route. HEAD and OPTIONS follow from these.
        self._routes: dict[str, dict[str, Route]] = {
            "/": {"GET": self._page},
            "/chat": {"GET": self._page},
            "/health": {"GET": self._health},
            "/v1/models": {"GET": self._models},
            "/v1/chat/completions": {"POST": self._chat},
            **self.engine_routes.table(),
        }

    async def handle(self, exchange: Exchange) -> None:
        """Answer one exchange; raises ApiError for the connection to send."""
        request = exchange.request
        exchange.extra_headers = self._policy.check(request)
        methods = self._methods(request.path)
        allow = ", ".join(_allowed(methods))
        if request.method == "OPTIONS":
            exchange.send(Response(204, headers=self._policy.preflight(request, allow)))
            return
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            text = f"{request.path[:100]} answers to {allow}"
            raise ApiError(405, "method_not_allowed", text, headers=(("Allow", allow),))
        if request.method == "POST" and not request.framed:
            raise ApiError(411, "length_required", "a POST needs Content-Length or chunked framing")
        await route(exchange)

    def _methods(self, path: str) -> dict[str, Route]:
        if path == "*":
            return {"GET": self._health, "POST": self._chat}
        methods = self._routes.get(path)
        if methods is not None:
            return methods
        if path.startswith("/v1/models/"):
            return {"GET": self._model}
        raise ApiError(404, "unknown_url", f"there is nothing at {path[:100]}")

    # -- routes -------------------------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange) -> None:
        await chat_completions(self._service, exchange)

    async def _page(self, exchange: Exchange) -> None:
        exchange.send(Response(200, self._chat_page.body, self._chat_page.headers))

    async def _health(self, exchange: Exchange) -> None:
        phase = self._service.gate.phase
        if phase is Phase.OPEN:
            activity = self._service.gate.activity()
            running = {} if activity is None else {"generation": activity}
            exchange.send(json_response({"status": "ok", **running}))
        elif phase is Phase.LOADING:
            body = {"status": "loading", "progress": round(self.progress, 4)}
            exchange.send(json_response(body, status=503, headers=(("Retry-After", "1"),)))
        else:
            exchange.send(json_response({"status": "shutting_down"}, status=503))

    async def _models(self, exchange: Exchange) -> None:
        exchange.send(json_response(objects.model_list([self._model_object()])))

    async def _model(self, exchange: Exchange) -> None:
        wanted = unquote(exchange.request.path.removeprefix("/v1/models/"))
        if wanted != self._service.model_id:
            raise ApiError(404, "model_not_found", f"there is no model {wanted[:100]!r}", param="model")
        exchange.send(json_response(self._model_object()))

    def _model_object(self) -> objects.Object:
        loaded = self._service.worker.loaded
        ready = self._service.gate.phase is not Phase.LOADING and loaded.done()
        info = loaded.result().info if ready else {}
        status = "loaded" if ready else "loading"
        return objects.model(self._service.model_id, created=self._created, status=status, info=info)


def _allowed(methods: dict[str, Route]) -> list[str]:
    names = set(methods) | {"OPTIONS"}
    return sorted(names | {"HEAD"} if "GET" in names else names)
