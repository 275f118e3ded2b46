"""The page pool: every id is handed out once, nothing is lost, and misuse is caught where it happens."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jradix.cache.pages import SCRATCH_PAGE, PagePool
from jradix.errors import OutOfPages


def test_alloc_all_pages_gives_each_id_once_and_never_the_scratch_page() -> None:
    pool = PagePool(5)
    pages = pool.alloc(5)
    assert pages.dtype == np.int32 and sorted(pages.tolist()) == [1, 2, 3, 4, 5]
    assert SCRATCH_PAGE not in pages and pool.num_free == 0
    pool.check_invariants()


def test_alloc_fresh_pool_starts_at_page_one_in_order() -> None:
    assert PagePool(8).alloc(3).tolist() == [1, 2, 3]


def test_alloc_more_than_free_raises_and_takes_none() -> None:
    pool = PagePool(4)
    pool.alloc(3)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4"):
        pool.alloc(2)
    assert pool.num_free == 1
    pool.check_invariants()


def test_alloc_zero_pages_changes_nothing() -> None:
    pool = PagePool(2)
    assert pool.alloc(0).shape == (0,)
    pool.free(np.empty(0, np.int32))
    assert pool.num_free == 2
    pool.check_invariants()


def test_alloc_result_does_not_alias_the_free_list() -> None:
    pool = PagePool(4)
    pages = pool.alloc(2)
    kept = pages.copy()
    pages[:] = SCRATCH_PAGE
    pool.free(kept)
    assert sorted(pool.free_pages().tolist()) == [1, 2, 3, 4]
    pool.check_invariants()


def test_free_same_page_again_asserts() -> None:
    pool = PagePool(4)
    pages = pool.alloc(2)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(pages[:1])


def test_free_page_that_was_never_handed_out_asserts() -> None:
    pool = PagePool(4)
    pool.alloc(1)
    with pytest.raises(AssertionError):
        pool.free(np.array([3], np.int32))


@pytest.mark.parametrize("pages", [[SCRATCH_PAGE], [-1], [1, 1]], ids=["scratch", "negative", "doubled"])
def test_free_ids_that_no_caller_can_hold_asserts(pages: list[int]) -> None:
    pool = PagePool(4)
    pool.alloc(3)
    with pytest.raises(AssertionError):
        pool.free(np.array(pages, np.int32))
    assert pool.num_free == 1
    pool.check_invariants()


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(num_pages=st.integers(1, 12), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_pool_random_operations_agree_with_a_set(num_pages: int, steps: list[tuple[bool, int]]) -> None:
    pool, held = PagePool(num_pages), []
    for is_alloc, n in steps:
        if not is_alloc:
            pool.free(np.array(held[:n], np.int32))
            held = held[n:]
        elif n > pool.num_free:
            with pytest.raises(OutOfPages):
                pool.alloc(n)
        else:
            held += pool.alloc(n).tolist()
        assert sorted(held + pool.free_pages().tolist()) == list(range(1, num_pages + 1))
        assert pool.num_free == num_pages - len(held)
        pool.check_invariants()
