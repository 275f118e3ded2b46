"""KV pages in the host's memory, and the copies that are still on their way to it from the device."""
from __future__ import annotations

from collections import deque
from typing import Sequence

import jax
import numpy as np
from jax import Array

from jradix.config import KVGroup

MAX_PENDING_BYTES = 128 * 2**20


class HostPages:
    """The store: for each KV group one array of pages in their canonical form, without padding of any device.

    A copy is pending from `defer` until it is written into the store, in the order of the `defer` calls; whoever reads
    pages waits for those pending copies that hold them, so a reader never sees the difference. Pages are not touched
    before they are written, and memory that was never touched costs nothing.

    Args:
      num_pages: of each group; ids are 1 to `num_pages`.
      groups: which layers share page ids.
      dtype: of the pages, a NumPy one.
      max_pending_bytes: device memory that pending copies may hold; one copy is always allowed.
    """

    def __init__(self, *, num_pages: int, groups: Sequence[KVGroup], page_size: int, num_kv_heads: int, head_dim: int,
                 dtype: np.dtype, max_pending_bytes: int = MAX_PENDING_BYTES):
        self.num_pages = num_pages
        self.is_intact = True    # False: a copy failed, and the store lacks pages that its owner counts on
        self._groups = tuple(groups)
        self._pages = tuple(np.empty((num_pages + 1, 2 * len(group.layers), page_size, num_kv_heads, head_dim), dtype)
                            for group in groups)
        self._width = num_kv_heads * head_dim
        self._max_pending_bytes = max_pending_bytes
        self._pending: deque[tuple[tuple[Array, ...], np.ndarray]] = deque()
        self._pending_bytes = 0

    @property
    def pending_bytes(self) -> int:
        """Device memory of the copies that are not in the store yet."""
        return self._pending_bytes

    def defer(self, contents: tuple[Array, ...], ids: np.ndarray) -> None:
        """Starts a copy to the host and remembers it. Waits only for the oldest one when too many are pending.

        Args:
          contents: for each group [K, 2 * layers, page_size, W], fresh arrays that nothing donates.
          ids: int32[G, n] with n <= K, where the first n pages of each belong.
        """
        for content in contents:
            content.copy_to_host_async()
        self._pending.append((contents, ids))
        self._pending_bytes += _num_bytes(contents)
        while self._pending_bytes > self._max_pending_bytes and len(self._pending) > 1:
            self._fetch_oldest()

    def fetch_ready(self) -> None:
        """Writes the oldest pending copy into the store if it has arrived: at most one, so that no step waits long."""
        if self._pending and all(content.is_ready() for content in self._pending[0][0]):
            self._fetch_oldest()

    def fetch_all(self) -> None:
        """Waits for every pending copy. Raises jax.errors.JaxRuntimeError when one failed on the device."""
        while self._pending:
            self._fetch_oldest()

    def read(self, ids: np.ndarray, num_rows: int) -> tuple[np.ndarray, ...]:
        """Pages as a device program takes them, in fresh arrays: on CPU it may read its arguments where they lie.

        Args:
          ids: int32[G, n].
          num_rows: K, at least n; what lies beyond the first n rows is arbitrary.

        Returns:
          For each group [K, 2 * layers, page_size, W].
        """
        while any(np.isin(pending, wanted).any() for _, held in self._pending for pending, wanted in zip(held, ids)):
            self._fetch_oldest()
        contents = []
        for pages, wanted in zip(self._pages, ids):
            content = np.empty((num_rows, *pages.shape[1:]), pages.dtype)
            # Unlike the default mode, "clip" writes straight into `out`; the ids were checked.
            np.take(pages, wanted, axis=0, out=content[:len(wanted)], mode="clip")
            contents.append(content.reshape(*content.shape[:-2], self._width))
        return tuple(contents)

    def layer(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one layer by page id, [num_pages + 1, page_size, Hkv, D], all pending copies written.

        Views of the store, for host code that reads or fills pages; never an argument of a device program.
        """
        self.fetch_all()
        for group, pages in zip(self._groups, self._pages):
            if layer in group.layers:
                row = group.layers.index(layer)
                return pages[:, row], pages[:, len(group.layers) + row]
        raise ValueError(f"layer={layer}: expected one of {sorted(sum((g.layers for g in self._groups), ()))}")

    def _fetch_oldest(self) -> None:
        contents, ids = self._pending[0]
        try:
            arrived = [np.asarray(content) for content in contents]
        except jax.errors.JaxRuntimeError:
            self.is_intact = False
            raise
        for pages, content, targets in zip(self._pages, arrived, ids):
            pages[targets] = content[:len(targets)].reshape(-1, *pages.shape[1:])
        self._pending.popleft()     # after the writing: an interrupt before it repeats the copy
        self._pending_bytes -= _num_bytes(contents)


def _num_bytes(contents: tuple[Array, ...]) -> int:
    return sum(content.nbytes for content in contents)
