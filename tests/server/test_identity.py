# SPDX-License-Identifier: Apache-2.0
"""The name a model goes by, and that weights nobody published are never passed off as theirs."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import Running, serving

LOOP = asyncio.new_event_loop


class Named(FakeEngine):
    """A model that has a name of its own."""

    weights = "official"

    @property
    def info(self) -> dict[str, Any]:
        return {**super().info, "id": "its-own-name", "weights": self.weights}


def models(server: Running) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
        data: list[dict[str, Any]] = json.load(answer)["data"]
    return data


@pytest.mark.parametrize(("chosen", "expected"), [(None, "its-own-name"), ("mine", "mine")])
def test_the_name_is_the_model_s_unless_one_was_chosen(chosen: str | None, expected: str) -> None:
    with serving(lambda *_: Named(), loop_factory=LOOP, model_id=chosen) as server:
        (model,) = models(server)
        assert (model["id"], model["meta"]["weights"]) == (expected, "official")
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a b"}]}'
        )
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["model"] == expected


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        ("official", " weights=official "),
        ("random", ' weights="random (not a trained model)" '),
        ("trained-here", ' weights="trained-here (not a published model)" '),
    ],
)
def test_the_first_line_says_what_the_weights_are(
    weights: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Named()
    engine.weights = weights
    with caplog.at_level(logging.INFO), serving(lambda *_: engine, loop_factory=LOOP):
        pass
    (ready,) = [text for text in caplog.messages if text.startswith("service_ready ")]
    assert line in ready
