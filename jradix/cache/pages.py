"""The page pool of one KV group: which page ids are free. It does not know who holds the others."""
from __future__ import annotations

import numpy as np

from jradix.errors import OutOfPages

SCRATCH_PAGE = 0  # padding of a step writes here; outside every pool


class PagePool:
    """A stack of free page ids, 1 to `num_pages`.

    Invariant: `_is_free[p]` is true exactly for the ids in `_stack[:num_free]`.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.num_free = num_pages
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)  # page 1 on top
        self._is_free = np.ones(num_pages + 1, bool)
        self._is_free[SCRATCH_PAGE] = False

    def alloc(self, n: int) -> np.ndarray:
        """Takes n pages: int32[n]. Raises OutOfPages, and takes none, when fewer are free."""
        if n > self.num_free:
            raise OutOfPages(f"{n} pages wanted, {self.num_free} of {self.num_pages} free")
        self.num_free -= n
        pages = self._stack[self.num_free:self.num_free + n][::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Gives pages back: int32[n], each held by the caller until now."""
        n = len(pages)
        if n == 0:
            return
        ids = pages.tolist()
        assert min(ids) > SCRATCH_PAGE, f"not ids of this pool: {pages}"
        assert not self._is_free[pages].any() and len(set(ids)) == n, f"page freed twice: {pages}"
        self._stack[self.num_free:self.num_free + n] = pages
        self.num_free += n
        self._is_free[pages] = True

    def free_pages(self) -> np.ndarray:
        """Ids of the free pages, read from the stack itself: int32[num_free]."""
        return self._stack[:self.num_free].copy()

    def check_invariants(self) -> None:
        stack = self._stack[:self.num_free]
        assert len(np.unique(stack)) == self.num_free, "a page id is twice in the free list"
        assert np.array_equal(np.flatnonzero(self._is_free), np.sort(stack)), "free list and free flags differ"
        assert SCRATCH_PAGE not in stack, "the scratch page is in the free list"
