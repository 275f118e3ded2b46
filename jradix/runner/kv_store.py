"""Page content on disk: KV pages to TensorStore arrays and back. It knows rows and page ids, no tree and no manifest.

A folder of pages has one Zarr array per layer for keys and one for values, `k.0` to `v.<L-1>`, each
[n, page_size, Hkv, D] in the type of the pool. Row r of every array belongs to the same page of tokens. Chunks are runs
of whole rows, uncompressed, each with its CRC-32C, so that altered bytes are found while they are read:

    rows      0 ........ R | R ........ 2R | 2R ..... n
    k.0       c.0.0.0.0    | c.1.0.0.0     | c.2.0.0.0      one file each
"""
from __future__ import annotations

import functools
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts
from jax import Array

from jradix.errors import SnapshotError
from jradix.ops.kv_cache import KVCache, write_rows

CHUNK_BYTES = 16 * 2**20         # of one chunk file
IN_FLIGHT_BYTES = 128 * 2**20    # host memory for chunks being written or read
_CONCURRENCY = 4                 # files written or read at a time
_NUM_SYNCS = 2                   # files synced to the disk at a time
_SCRATCH_PAGE = 0                # read for rows that only fill up
_NOWHERE = 2**31 - 1             # page id outside every pool, whose content is dropped
_ROW_STEP = 64                   # device programs take page ids in multiples of this: few sizes, few compilations

# Keys and values of pages on the host: (layer, int32[k] host page ids of its group) -> two arrays
# [k, page_size, Hkv, D], copies that nobody writes to afterwards.
HostReader = Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]


class PageBlock(NamedTuple):
    """Content of some pages in one array of the pool.

    Attributes:
      layer: of the array.
      is_value: keys or values.
      page_ids: int32[R] where each row goes; an id outside the pool: nowhere.
      values: [R, page_size, Hkv, D].
    """
    layer: int
    is_value: bool
    page_ids: np.ndarray
    values: np.ndarray


def write_pages(folder: Path, kv: KVCache, page_ids: np.ndarray, *, num_kv_heads: int, groups: Sequence[Sequence[int]],
                host_page_ids: np.ndarray | None = None, read_host: HostReader | None = None) -> None:
    """Writes pages as rows: first those on the device, then those on the host, each in the order given.

    The device is read by gathers that come after every step dispatched so far; at most `IN_FLIGHT_BYTES` of content is
    on the host at a time. When this returns, every file is on the disk.

    Args:
      folder: empty or not there yet.
      page_ids: int32[G, n] ids in the pools on the device.
      num_kv_heads: Hkv.
      groups: layers of each group.
      host_page_ids: int32[G, m] ids of the host tier, read with `read_host`.

    Raises:
      SnapshotError: the files cannot be written; some may be left in `folder`.
    """
    num_device = page_ids.shape[1]
    num_host = 0 if host_page_ids is None else host_page_ids.shape[1]
    if num_device + num_host == 0:
        return
    assert num_host == 0 or read_host is not None, f"{num_host} host pages and no way to read them"
    _, page_size, width = kv.k[0].shape
    shape = (num_device + num_host, page_size, num_kv_heads, width // num_kv_heads)
    chunk_rows = _chunk_rows(shape[0], kv.k[0][:1].nbytes)
    context = _context()
    writes: deque[tuple[ts.Future, Path, int]] = deque()
    syncs: list[Future[None]] = []
    num_waiting = 0

    def finish_oldest() -> int:
        future, file, num_bytes = writes[0]
        future.result()
        writes.popleft()
        syncs.append(disk.submit(_sync, file))
        return num_bytes

    with ThreadPoolExecutor(_NUM_SYNCS, thread_name_prefix="snapshot-sync") as disk:
        try:
            for layer, group in enumerate(_group_of_layer(groups)):
                names = [_array_name(layer, is_value) for is_value in (False, True)]
                stores = [_open(folder / name, shape, chunk_rows, kv.k[0].dtype, context) for name in names]
                for index, start in enumerate(range(0, shape[0], chunk_rows)):
                    stop = min(start + chunk_rows, shape[0])
                    parts = []
                    if start < num_device:
                        parts.append(_gather_rows(kv.k[layer], kv.v[layer], page_ids[group, start:stop]))
                    if stop > num_device:
                        host_ids = host_page_ids[group, max(start - num_device, 0):stop - num_device]
                        parts.append(read_host(layer, host_ids))
                    for name, store, rows in zip(names, stores, zip(*parts)):
                        rows = [part.reshape(-1, *shape[1:]) for part in rows]
                        content = rows[0] if len(rows) == 1 else np.concatenate(rows)
                        future = store[start:stop].write(content, can_reference_source_data_indefinitely=True).commit
                        writes.append((future, folder / name / _chunk_name(index), content.nbytes))
                        num_waiting += content.nbytes
                    while num_waiting > IN_FLIGHT_BYTES or writes and writes[0][0].done():
                        num_waiting -= finish_oldest()
            while writes:
                finish_oldest()
            syncs += [disk.submit(_sync, folder / _array_name(layer, is_value) / "zarr.json")
                      for layer in range(len(kv.k)) for is_value in (False, True)]
            for sync in syncs:
                sync.result()
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{folder}: the pages cannot be written: {error}. Free space there, or name another "
                                f"folder") from error
        finally:
            for future, _, _ in writes:        # after this nothing more appears in the folder
                future.exception()


def read_pages(folder: Path, kv: KVCache, rows: np.ndarray, page_ids: np.ndarray, *, num_rows: int, num_kv_heads: int,
               groups: Sequence[Sequence[int]]) -> Iterator[PageBlock]:
    """Reads rows for `fill_pages`, a chunk at a time, the next ones being read meanwhile.

    Chunks without a wanted row are not read. A block is good until the next one is asked for: its memory is used again.

    Args:
      folder: what `write_pages` wrote.
      kv: pool to be filled; only its shapes are used.
      rows: int[k] distinct rows.
      page_ids: int32[G, k] where row `rows[i]` goes in each group's pool.
      num_rows: rows in each array, n.

    Raises:
      SnapshotError: a file is missing or altered, or is not of this shape; named in the message.
    """
    if len(rows) == 0:
        return
    _, page_size, width = kv.k[0].shape
    shape = (num_rows, page_size, num_kv_heads, width // num_kv_heads)
    targets = np.full((len(groups), num_rows), _NOWHERE, np.int32)
    targets[:, rows] = page_ids
    context = _context()

    spare: list[np.ndarray] = []        # memory of blocks that were used up

    def reads() -> Iterator[tuple[ts.Future, PageBlock]]:
        for layer, group in enumerate(_group_of_layer(groups)):
            for is_value in (False, True):
                store = _open(folder / _array_name(layer, is_value), shape, None, kv.k[0].dtype, context)
                chunk_rows = store.chunk_layout.write_chunk.shape[0]
                for start in (np.unique(rows // chunk_rows) * chunk_rows).tolist():
                    stop = min(start + chunk_rows, num_rows)
                    ids = _padded(targets[group, start:stop], _NOWHERE)
                    fitting = next((i for i, array in enumerate(spare) if len(array) == len(ids)), None)
                    values = (_aligned_empty((len(ids), *shape[1:]), kv.k[0].dtype) if fitting is None
                              else spare.pop(fitting))
                    future = ts.array(values)[:stop - start].write(store[start:stop].translate_to[0]).commit
                    yield future, PageBlock(layer, is_value, ids, values)

    waiting: deque[tuple[ts.Future, PageBlock]] = deque()
    num_waiting = 0
    try:
        for future, block in itertools.chain(reads(), [(None, None)]):
            if block is not None:
                waiting.append((future, block))
                num_waiting += block.values.nbytes
            while waiting and (block is None or num_waiting > IN_FLIGHT_BYTES):
                future, ready = waiting.popleft()
                num_waiting -= ready.values.nbytes
                future.result()
                yield ready
                spare.append(ready.values)
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{folder}: the pages cannot be read: {error}. The snapshot is damaged; delete it and save "
                            f"the cache again") from error


def fill_pages(kv: KVCache, block: PageBlock) -> KVCache:
    """Writes a block into its pages, in place: `kv` is used up, the result takes its place. Waits for it."""
    arrays = kv.v if block.is_value else kv.k
    array = _fill(arrays[block.layer], block.page_ids, block.values)
    array.block_until_ready()
    arrays = (*arrays[:block.layer], array, *arrays[block.layer + 1:])
    return kv._replace(v=arrays) if block.is_value else kv._replace(k=arrays)


def _group_of_layer(groups: Sequence[Sequence[int]]) -> list[int]:
    of_layer = {layer: group for group, layers in enumerate(groups) for layer in layers}
    return [of_layer[layer] for layer in range(len(of_layer))]


def _array_name(layer: int, is_value: bool) -> str:
    return f"{'v' if is_value else 'k'}.{layer}"


def _chunk_name(index: int) -> str:
    """File of the chunk that holds the rows from `index` times its length on."""
    return f"c.{index}.0.0.0"


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _chunk_rows(num_rows: int, row_bytes: int) -> int:
    """Rows of a chunk: about `CHUNK_BYTES`, in equal shares, because the last chunk is stored as long as the others."""
    num_chunks = -(-num_rows // max(CHUNK_BYTES // row_bytes, 1))
    return -(-num_rows // num_chunks)


def _padded(ids: np.ndarray, padding: int) -> np.ndarray:
    """Page ids, int32, as many as a device program takes."""
    padded = np.full(-(-len(ids) // _ROW_STEP) * _ROW_STEP, padding, np.int32)
    padded[:len(ids)] = ids
    return padded


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that begins at a multiple of 64 bytes: on CPU jit then reads it where it lies, without a copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start:start + num_bytes].view(dtype).reshape(shape)


def _gather_rows(k: Array, v: Array, page_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fresh copies of pages of one layer, on the host."""
    ids = _padded(page_ids, _SCRATCH_PAGE)
    gathered = [_gather(array, ids) for array in (k, v)]
    for rows in gathered:
        rows.copy_to_host_async()
    keys, values = (np.asarray(rows)[:len(page_ids)] for rows in gathered)
    return keys, values


@jax.jit
def _gather(array: Array, page_ids: Array) -> Array:
    return array.at[page_ids].get(mode="clip")


@functools.partial(jax.jit, donate_argnums=0)
def _fill(array: Array, page_ids: Array, values: Array) -> Array:
    return write_rows(array, values.reshape(-1, *array.shape[1:]), page_ids)


def _context() -> ts.Context:
    """Of one call: no locks (the folder is the caller's), no cache of chunks (each is used once), and no syncing to the
    disk in the threads that write, which would wait there: we do it beside them, half the number of times."""
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": _CONCURRENCY},
                       "data_copy_concurrency": {"limit": _CONCURRENCY}, "file_io_locking": {"mode": "none"},
                       "file_io_sync": False})


def _open(folder: Path, shape: tuple[int, ...], chunk_rows: int | None, dtype: np.dtype, context: ts.Context
          ) -> ts.TensorStore:
    """Creates an array with chunks of `chunk_rows` rows, or with None opens one that must be of this kind."""
    metadata: dict[str, Any] = {
        "shape": shape,
        "data_type": dtype.name,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }
    if chunk_rows is not None:
        metadata |= {"fill_value": 0,
                     "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": (chunk_rows, *shape[1:])}}}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder.absolute()}/"}, "metadata": metadata,
            "store_data_equal_to_fill_value": True, "fill_missing_data_reads": False}
    return ts.open(spec, open=chunk_rows is None, create=chunk_rows is not None, context=context).result()
