# SPDX-License-Identifier: Apache-2.0
"""The page pool keeps its limit and its counts; a page table owns what it took and nothing else."""

from __future__ import annotations

import pytest

from cecilia.errors import MemoryLimitError
from cecilia.state.pages import POSITIONS, PagePool, PageTable


def test_a_page_holds_64_positions() -> None:
    assert POSITIONS == 64


def test_page_sizes_are_rounded_to_cache_lines() -> None:
    assert PagePool(1, 0).page_bytes == 64
    assert PagePool(64, 0).page_bytes == 64
    assert PagePool(65, 0).page_bytes == 128


@pytest.mark.parametrize(("page_bytes", "limit"), [(0, 64), (-1, 64), (64, -1)])
def test_senseless_sizes_are_refused(page_bytes: int, limit: int) -> None:
    with pytest.raises(ValueError, match="pages of"):
        PagePool(page_bytes, limit)


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (640, 10)])
def test_reserve_takes_whole_pages_once(positions: int, pages: int) -> None:
    pool = PagePool(64, 64 * 10)
    table = PageTable(pool)
    table.reserve(positions)
    table.reserve(positions)
    assert len(table) == len(table.pages) == pool.in_use == pool.allocated == pages


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (256, 4), (9999, 4)])
def test_truncate_keeps_pages_that_hold_kept_positions(positions: int, pages: int) -> None:
    pool = PagePool(64, 64 * 4)
    table = PageTable(pool)
    table.reserve(256)
    table.truncate(positions)
    assert len(table) == pool.in_use == pages
    assert pool.allocated == 4


def test_the_limit_is_kept_and_a_refusal_takes_nothing() -> None:
    pool = PagePool(64, 64 * 3 + 63)
    table = PageTable(pool)
    table.reserve(64)
    with pytest.raises(MemoryLimitError) as refusal:
        table.reserve(64 * 4)
    assert refusal.value.code == "insufficient_memory"
    assert "3 pages of 64 bytes" in refusal.value.message
    assert len(table) == pool.in_use == 1
    table.reserve(64 * 3)
    assert pool.in_use == 3


def test_an_allocation_the_system_refuses_is_the_same_error() -> None:
    pool = PagePool(1 << 60, 1 << 62)
    table = PageTable(pool)
    with pytest.raises(MemoryLimitError) as refusal:
        table.reserve(1)
    assert refusal.value.code == "insufficient_memory"
    assert (pool.in_use, pool.allocated, len(table)) == (0, 0, 0)


def test_tables_share_the_pool_and_reuse_its_pages() -> None:
    pool = PagePool(4096, 4096 * 4)
    first, second = PageTable(pool), PageTable(pool)
    first.reserve(128)
    second.reserve(128)
    assert pool.in_use == 4
    first.clear()
    second.reserve(256)
    assert (pool.in_use, pool.allocated) == (4, 4)
    with pytest.raises(MemoryLimitError):
        first.reserve(1)


def test_a_dropped_table_returns_its_pages() -> None:
    pool = PagePool(64, 64 * 4)
    for _ in range(100):
        table = PageTable(pool)
        table.reserve(256)
        assert pool.in_use == 4
        del table
        assert (pool.in_use, pool.allocated) == (0, 4)


def test_any_prefix_of_keys_and_values_is_reusable() -> None:
    table = PageTable(PagePool(64, 64))
    assert [table.reusable(common, 9) for common in (0, 1, 9)] == [0, 1, 9]
