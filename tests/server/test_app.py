# SPDX-License-Identifier: Apache-2.0
"""Routes, methods, and who may use them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator

import pytest

from server.gate import Phase
from server.origin import is_loopback
from tests.server.desk import CREATED, Desk, error_of
from tests.server.fake_engine import FakeEngine


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk(FakeEngine())
    yield await desk.ready()
    desk.close()


@pytest.fixture
async def loading() -> AsyncIterator[Desk]:
    desk = Desk(FakeEngine(), loads=False)
    yield desk
    desk.close()


MODEL = {"id": "tiny/model", "object": "model", "created": CREATED, "owned_by": "cecilia"}


async def test_models(desk: Desk) -> None:
    listed = json.loads((await desk.open().ask("GET", "/v1/models")).body)
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert {name: model[name] for name in MODEL} == MODEL
    assert model["status"] == {"value": "loaded"}
    assert model["meta"]["context"] == 256
    for path in ("/v1/models/tiny/model", "/v1/models/tiny%2Fmodel", "/v1/models/tiny%2fmodel?x=1"):
        assert json.loads((await desk.open().ask("GET", path)).body) == model


async def test_an_unknown_model(desk: Desk) -> None:
    answer = await desk.open().ask("GET", "/v1/models/other")
    assert answer.status == 404
    assert (error_of(answer)["type"], error_of(answer)["code"]) == ("not_found_error", "model_not_found")


async def test_while_loading(loading: Desk) -> None:
    loading.app.progress = 0.25
    health = await loading.open().ask("GET", "/health")
    assert (health.status, json.loads(health.body)) == (503, {"status": "loading", "progress": 0.25})
    models = json.loads((await loading.open().ask("GET", "/v1/models")).body)
    assert models["data"][0]["status"] == {"value": "loading"}
    chat = await loading.open().chat()
    assert (chat.status, error_of(chat)["code"]) == (503, "model_loading")
    assert int(chat.headers["retry-after"]) >= 1


async def test_health(desk: Desk) -> None:
    health = await desk.open().ask("GET", "/health")
    assert (health.status, json.loads(health.body)) == (200, {"status": "ok"})
    ticket = desk.gate.enter()
    ticket.prompt_left = 12
    health = await desk.open().ask("GET", "/health")
    assert json.loads(health.body)["generation"] == {"prompt_left": 12, "completion": 0, "seconds": 0.0}
    ticket.release()
    desk.gate.phase = Phase.CLOSING
    assert (await desk.open().ask("GET", "/health")).status == 503
    chat = await desk.open().chat()
    assert (chat.status, error_of(chat)["code"]) == (503, "shutting_down")


@pytest.mark.parametrize("path", ["/", "/chat", "/health", "/v1/models", "/v1/models/tiny/model"])
async def test_head_is_get_without_a_body(desk: Desk, path: str) -> None:
    get = await desk.open().ask("GET", path)
    head = await desk.open().ask("HEAD", path)
    assert (head.status, head.body) == (get.status, b"")
    assert head.headers["content-length"] == str(len(get.body))


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/models/tiny/model", "GET, HEAD, OPTIONS"),
        ("GET", "/v1/chat/completions", "OPTIONS, POST"),
        ("get", "/health", "GET, HEAD, OPTIONS"),
        ("BREW", "/", "GET, HEAD, OPTIONS"),
    ],
)
async def test_wrong_methods(desk: Desk, method: str, path: str, allow: str) -> None:
    answer = await desk.open().ask(method, path)
    assert (answer.status, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == allow
    options = await desk.open().ask("OPTIONS", path)
    assert (options.status, options.headers["allow"], options.body) == (204, allow, b"")


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v2/models", "/chat/", "/favicon.ico", "/v1/models/"])
async def test_unknown_paths(desk: Desk, path: str) -> None:
    answer = await desk.open().ask("GET", path)
    assert (answer.status, error_of(answer)["type"]) == (404, "not_found_error")


async def test_a_post_without_a_length(desk: Desk) -> None:
    answer = await desk.open().ask("POST", "/v1/chat/completions")
    assert (answer.status, error_of(answer)["code"]) == (411, "length_required")


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "application/json; charset=utf-8",
        "text/plain",
        "application/x-www-form-urlencoded",
    ],
)
async def test_the_content_type_of_a_request_does_not_matter(desk: Desk, kind: str) -> None:
    body = b'{"messages":[{"role":"user","content":"a"}]}'
    assert (await desk.open().ask("POST", "/v1/chat/completions", body, Content_Type=kind)).status == 200


async def test_authorization_is_ignored(desk: Desk) -> None:
    assert (await desk.open().ask("GET", "/v1/models", Authorization="not_required")).status == 200


# -- the page ---------------------------------------------------------------------------------------------


async def test_the_page_runs_its_own_script_and_nothing_else(desk: Desk) -> None:
    answer = await desk.open().ask("GET", "/chat")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = answer.body.decode("utf-8")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"https?://|\ssrc=|\shref=|\son[a-z]+=|\sstyle=", page)


# -- hosts and origins ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:9091",
        "LOCALHOST.",
        "a.localhost",
        "127.0.0.1:1",
        "127.9.9.9",
        "[::1]:9091",
        "board",
        "board.local",
    ],
)
async def test_local_hosts_pass(desk: Desk, host: str) -> None:
    assert (await desk.open().ask("GET", "/health", Host=host)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "0x7f.1",
        "[::2]",
        ":1",
        "[",
    ],
)
async def test_other_hosts_do_not(desk: Desk, host: str) -> None:
    answer = await desk.open().ask("GET", "/health", Host=host)
    assert (answer.status, error_of(answer)["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "origin", ["http://localhost:9091", "http://127.0.0.1:3000", "https://[::1]", "http://a.localhost"]
)
async def test_local_origins_pass(desk: Desk, origin: str) -> None:
    answer = await desk.open().ask("GET", "/v1/models", Origin=origin)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, origin)
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


async def test_the_origin_of_this_server_passes(desk: Desk) -> None:
    answer = await desk.open().ask(
        "GET", "/v1/models", Host="board.local:9091", Origin="http://board.local:9091"
    )
    assert answer.status == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example", "file://", "", "http://["]
)
async def test_foreign_origins_do_not(desk: Desk, origin: str) -> None:
    answer = await desk.open().ask("GET", "/v1/models", Origin=origin)
    assert (answer.status, error_of(answer)["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers


async def test_options_of_the_server_itself(desk: Desk) -> None:
    answer = await desk.open().ask("OPTIONS", "*")
    assert (answer.status, answer.headers["allow"]) == (204, "GET, HEAD, OPTIONS, POST")


async def test_preflight(desk: Desk) -> None:
    answer = await desk.open().ask(
        "OPTIONS",
        "/v1/chat/completions",
        Origin="http://localhost:3000",
        Access_Control_Request_Method="POST",
        Access_Control_Request_Private_Network="true",
    )
    assert answer.status == 204
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(
        answer.headers["access-control-allow-headers"].lower().split(", ")
    )
    assert answer.headers["access-control-allow-private-network"] == "true"


async def test_errors_are_readable_by_allowed_pages(desk: Desk) -> None:
    answer = await desk.open().ask("POST", "/v1/chat/completions", b"{}", Origin="http://localhost:3000")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (400, "http://localhost:3000")


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("::", False)]
)
def test_loopback_addresses(host: str, local: bool) -> None:
    assert is_loopback(host) == local
