# SPDX-License-Identifier: Apache-2.0
"""Servers around a fake engine, on fake transports and a fake clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.server.desk import Desk, MakeDesk
from tests.server.fake_engine import FakeEngine


@pytest.fixture
async def make_desk() -> AsyncIterator[MakeDesk]:
    desks: list[Desk] = []

    async def make(**settings: Any) -> Desk:
        desks.append(Desk(FakeEngine(**settings)))
        return await desks[-1].ready()

    yield make
    for desk in desks:
        desk.close()
