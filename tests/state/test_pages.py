# SPDX-License-Identifier: Apache-2.0
"""The page pool keeps its limit and its counts; a page table owns what it took and nothing else."""

from __future__ import annotations

import pytest

from cecilia._kernels.buffer import Fixed
from cecilia.errors import MemoryLimitError
from cecilia.state.pages import POSITIONS, Checkpoint, PagePool, PageTable


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


def test_shared_pages_return_with_their_last_owner() -> None:
    pool = PagePool(64, 64 * 8)
    first = PageTable(pool)
    first.reserve(256)
    second = first.share(130)
    assert (len(second), second.shared, first.shared, pool.in_use) == (3, 3, 3, 4)
    first.clear()
    assert (second.shared, pool.in_use) == (0, 3)
    del second
    assert pool.in_use == 0


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    pool = PagePool(64, 64 * 8)
    first = PageTable(pool)
    first.reserve(128)
    first.view(0)[:], first.view(1)[:] = b"a" * 64, b"b" * 64
    second = first.share(100)
    second.own(100)
    second.view(1)[:1] = b"c"
    assert bytes(first.view(1)) == b"b" * 64
    assert bytes(second.view(1)) == b"c" + b"b" * 63
    assert (first.shared, second.shared, pool.in_use) == (1, 1, 3)
    second.own(100)  # it is its own by now
    second.own(128)  # there is no such page
    assert pool.in_use == 3


def test_no_room_for_a_copy_leaves_the_page_shared() -> None:
    pool = PagePool(64, 64)
    first = PageTable(pool)
    first.reserve(1)
    second = first.share(1)
    with pytest.raises(MemoryLimitError):
        second.own(0)
    assert (first.shared, second.shared) == (1, 1)


@pytest.mark.parametrize("i", [-1, 1])
def test_a_page_that_is_not_there_has_no_view(i: int) -> None:
    table = PageTable(PagePool(64, 64))
    table.reserve(1)
    with pytest.raises(IndexError, match="of 1"):
        table.view(i)


def test_checkpoints_and_pages_have_one_budget() -> None:
    pool, state = PagePool(64, 64 * 3), Fixed(128)
    memoryview(state)[:] = b"x" * 128
    table = PageTable(pool)
    table.reserve(64 * 2)
    with pytest.raises(MemoryLimitError, match="2 pages of 64 bytes are held"):
        Checkpoint(pool, state)
    table.truncate(64)
    kept = Checkpoint(pool, state)  # the idle page makes room
    assert (pool.allocated, pool.charged, pool.used_bytes) == (1, 128, 192)
    with pytest.raises(MemoryLimitError, match="and 128 bytes of checkpoints"):
        table.reserve(128)
    state.clear()
    kept.restore(state)
    assert bytes(memoryview(state)) == bytes(kept.data) == b"x" * 128
    with pytest.raises(ValueError, match="128 bytes for a state of 64"):
        kept.restore(Fixed(64))
    del kept
    assert pool.charged == 0
    table.reserve(128)
