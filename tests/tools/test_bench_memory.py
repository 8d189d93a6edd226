# SPDX-License-Identifier: Apache-2.0
"""What the sessions of the published model take: the formula, and pages that are really there."""

from __future__ import annotations

import pytest

from cecilia.arch import ling3
from cecilia.engine import memory as free_memory
from cecilia.engine.recipes import profiles_of
from tools.bench import memory
from tools.bench.memory import Taken
from tools.shapes import hyper

SPEC = ling3.spec_from(hyper("ling3", full=True, changes={}))
# Six MLA layers; 16 heads of 128 + 64 key and 128 value dimensions, or one latent vector of 512 and 64 shared
# ones. int8 has f32 scales: two a head; one for each of four parts of the latent vector, one for the rest.
BYTES_PER_TOKEN = {
    "f32": 122_880,
    "bf16": 61_440,
    "int8": 30_720 + 768,
    "latent-f32": 13_824,
    "latent-bf16": 6_912,
    "latent-int8": 3_456 + 120,
}


def test_the_formula_and_the_pages() -> None:
    recipes = profiles_of(ling3).values()
    assert {kv: memory.bytes_per_token(SPEC, kv) for kv in recipes} == BYTES_PER_TOKEN
    assert {kv: ling3.page_bytes(SPEC, kv) for kv in recipes} == {
        kv: 64 * nbytes for kv, nbytes in BYTES_PER_TOKEN.items()
    }


def test_256k_in_less_than_a_gibibyte() -> None:
    assert BYTES_PER_TOKEN["latent-int8"] * (256 << 10) < 1 << 30


@pytest.mark.parametrize("kv", ["bf16", "latent-int8"])
def test_a_filled_window_is_resident_and_an_empty_one_is_not(kv: str) -> None:
    tokens = 1000
    found = memory.take_apart(SPEC, kv, tokens)
    pages = 16 * 64 * BYTES_PER_TOKEN[kv]
    assert found.pool == pages
    assert found.empty < 1 << 20
    assert found.state == pytest.approx(ling3.state_bytes(SPEC), abs=1 << 20)
    assert found.full == pytest.approx(pages, abs=2 << 20)


def test_windows_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.measure(SPEC, "bf16-v1", "bf16", 128 << 10) == "not offered: bf16-v1 ends at 64K"
    monkeypatch.setattr(free_memory, "available", lambda: 6 << 30)
    found = memory.measure(SPEC, "f32", "f32", 64 << 10)
    assert found == "skipped: more than 1/2 of 6.000 GiB available"


def test_rows_of_the_table() -> None:
    assert memory.row("x", 64 << 10, 16_384, Taken(1 << 30, 1 << 19, 0, 3 << 29)) == (
        "| x | 64K | 16,384 | 1.000 GiB | 1.000 GiB | 0.5 MiB | 1.500 GiB |"
    )
    assert memory.row("x", 1 << 10, 1 << 20, "skipped") == "| x | 1K | 1,048,576 | 1.000 GiB | skipped | | |"
