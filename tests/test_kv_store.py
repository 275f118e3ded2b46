"""Page content on disk: what is written comes back bit for bit, in place, in bounded memory; damage is named."""
from __future__ import annotations

import os
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jradix.cache.packed_tree import pack, unpack
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.snapshot import SnapshotIdentity, new_snapshot, open_snapshot
from jradix.errors import SnapshotError
from jradix.ops.kv_cache import KVCache
from jradix.runner import kv_store
from jradix.runner.kv_store import fill_pages, read_pages, write_pages

LAYERS, PAGE, HEADS, DIM, POOL = 3, 4, 2, 8, 40
ONE_GROUP = ((0, 1, 2),)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of up to 8 rows of float32, so that arrays have several."""
    monkeypatch.setattr(kv_store, "CHUNK_BYTES", 8 * PAGE * HEADS * DIM * 4)
    monkeypatch.setattr(kv_store, "_ROW_STEP", 4)


def make_kv(seed: int, dtype: str = "float32", pool: int = POOL) -> KVCache:
    keys = jax.random.split(jax.random.key(seed), 2 * LAYERS)
    arrays = [jax.random.normal(key, (pool + 1, PAGE, HEADS * DIM)).astype(dtype) for key in keys]
    return KVCache(tuple(arrays[:LAYERS]), tuple(arrays[LAYERS:]))


def copies(kv: KVCache) -> list[np.ndarray]:
    return [np.array(jnp.copy(array)) for array in (*kv.k, *kv.v)]


def read(folder: Path, kv: KVCache, rows: np.ndarray, ids: np.ndarray, num_rows: int, groups: tuple = ONE_GROUP
         ) -> KVCache:
    for block in read_pages(folder, kv, rows, ids, num_rows=num_rows, num_kv_heads=HEADS, groups=groups):
        kv = fill_pages(kv, block)
    return kv


def page_ids(seed: int, n: int, num_groups: int = 1) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.stack([random.permutation(np.arange(1, POOL + 1))[:n] for _ in range(num_groups)]).astype(np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n", [1, 8, 9, 29])
def test_pages_written_and_read_are_the_same_bits_in_other_pages(tmp_path: Path, dtype: str, n: int) -> None:
    source, target = make_kv(1, dtype), make_kv(2, dtype)
    old, expected = copies(source), copies(target)
    ids, new_ids = page_ids(3, n), page_ids(4, n)
    write_pages(tmp_path, source, ids, num_kv_heads=HEADS, groups=ONE_GROUP)
    target = read(tmp_path, target, np.arange(n), new_ids, n)
    for ours, theirs, right in zip(copies(target), old, expected):
        right[new_ids[0]] = theirs[ids[0]]
        assert ours.dtype == right.dtype and ours.tobytes() == right.tobytes()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(copies(source), old))


def test_pages_of_two_groups_keep_their_own_ids(tmp_path: Path) -> None:
    groups, n = ((0, 2), (1,)), 11
    source, target = make_kv(1), make_kv(2)
    old, expected = copies(source), copies(target)
    ids, new_ids = page_ids(3, n, 2), page_ids(4, n, 2)
    write_pages(tmp_path, source, ids, num_kv_heads=HEADS, groups=groups)
    target = read(tmp_path, target, np.arange(n), new_ids, n, groups)
    for layer in range(LAYERS):
        group = 1 if layer == 1 else 0
        for array in (layer, LAYERS + layer):
            expected[array][new_ids[group]] = old[array][ids[group]]
            assert np.array_equal(copies(target)[array], expected[array])


@pytest.mark.parametrize("num_device, num_host", [(0, 5), (5, 9), (8, 8), (13, 1)])
def test_host_pages_follow_the_device_rows(tmp_path: Path, num_device: int, num_host: int) -> None:
    source, target, n = make_kv(1), make_kv(2), num_device + num_host
    random = np.random.default_rng(0)
    host = random.standard_normal((2, LAYERS, 20, PAGE, HEADS, DIM)).astype(np.float32)
    host_ids = random.permutation(20)[:num_host].astype(np.int32)[None]
    ids, new_ids = page_ids(3, num_device), page_ids(4, n)
    old = copies(source)
    write_pages(tmp_path, source, ids, num_kv_heads=HEADS, groups=ONE_GROUP, host_page_ids=host_ids,
                read_host=lambda layer, wanted: (host[0, layer, wanted], host[1, layer, wanted]))
    target = copies(read(tmp_path, target, np.arange(n), new_ids, n))
    for array, content in enumerate(target):
        theirs = host[array // LAYERS, array % LAYERS, host_ids[0]].reshape(num_host, PAGE, HEADS * DIM)
        assert np.array_equal(content[new_ids[0]], np.concatenate([old[array][ids[0]], theirs]))


def test_read_some_rows_leaves_the_other_chunks_alone(tmp_path: Path) -> None:
    """Rows 2 and 20 of 29: the chunk between theirs may be missing."""
    source, target = make_kv(1), make_kv(2)
    old, expected = copies(source), copies(target)
    ids, rows, new_ids = page_ids(3, 29), np.array([20, 2]), page_ids(4, 2)
    write_pages(tmp_path, source, ids, num_kv_heads=HEADS, groups=ONE_GROUP)
    (tmp_path / "k.0" / "c.1.0.0.0").unlink()
    target = read(tmp_path, target, rows, new_ids, 29)
    for ours, theirs, right in zip(copies(target), old, expected):
        right[new_ids[0]] = theirs[ids[0][rows]]
        assert np.array_equal(ours, right)


def test_pages_that_are_all_zero_are_written_too(tmp_path: Path) -> None:
    """An array store may leave out chunks of its fill value; then a missing file could not be told from zeros."""
    kv = jax.tree.map(jnp.zeros_like, make_kv(1))
    write_pages(tmp_path, kv, page_ids(3, 9), num_kv_heads=HEADS, groups=ONE_GROUP)
    assert sorted(file.name for file in (tmp_path / "v.2").iterdir()) == ["c.0.0.0.0", "c.1.0.0.0", "zarr.json"]


def test_stored_arrays_are_canonical(tmp_path: Path) -> None:
    """Another program reads the arrays as [n, page_size, Hkv, D] with a Zarr library."""
    import tensorstore as ts
    source, ids = make_kv(1), page_ids(3, 9)
    write_pages(tmp_path, source, ids, num_kv_heads=HEADS, groups=ONE_GROUP)
    array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path / 'v.1'}/"}}).result()
    right = copies(source)[LAYERS + 1][ids[0]].reshape(9, PAGE, HEADS, DIM)
    assert np.array_equal(array.read().result(), right)
    assert [codec["name"] for codec in array.spec().to_json()["metadata"]["codecs"]] == ["bytes", "crc32c"]


def test_fill_pages_writes_in_place(tmp_path: Path) -> None:
    kv = make_kv(1)
    write_pages(tmp_path, kv, page_ids(3, 9), num_kv_heads=HEADS, groups=ONE_GROUP)
    places = [array.unsafe_buffer_pointer() for array in (*kv.k, *kv.v)]
    kv = read(tmp_path, kv, np.arange(9), page_ids(5, 9), 9)
    assert [array.unsafe_buffer_pointer() for array in (*kv.k, *kv.v)] == places


def test_no_rows_write_and_read_nothing(tmp_path: Path) -> None:
    kv, none = make_kv(1), np.empty((1, 0), np.int32)
    write_pages(tmp_path / "pages", kv, none, num_kv_heads=HEADS, groups=ONE_GROUP)
    assert not (tmp_path / "pages").exists()
    assert read(tmp_path / "pages", kv, np.arange(0), none, 0) is kv


@pytest.mark.parametrize("in_flight", [1, 4])
def test_host_memory_is_bounded_at_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_flight: int) -> None:
    """64 chunks of 64 KiB in each of 6 arrays, 24 MiB in all, with `in_flight` chunks allowed."""
    monkeypatch.setattr(kv_store, "CHUNK_BYTES", 2**16)
    monkeypatch.setattr(kv_store, "IN_FLIGHT_BYTES", in_flight * 2**16)
    pool = 64 * 2**16 // (PAGE * HEADS * DIM * 4)
    kv, ids = make_kv(1, pool=pool), np.arange(1, pool + 1, dtype=np.int32)[None]
    write_pages(tmp_path, kv, ids, num_kv_heads=HEADS, groups=ONE_GROUP)
    tracemalloc.start()
    kv = read(tmp_path, kv, np.arange(pool), ids, pool)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < in_flight * 2**16 + 2**20


# -- damage

@pytest.mark.parametrize("damage", ["first byte", "last byte", "cut", "missing", "swapped"])
def test_damaged_chunk_is_refused_with_its_name_and_the_pool_survives(tmp_path: Path, damage: str) -> None:
    kv, ids = make_kv(1), page_ids(3, 24)
    write_pages(tmp_path, kv, ids, num_kv_heads=HEADS, groups=ONE_GROUP)
    file = tmp_path / "v.1" / "c.1.0.0.0"
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes({"first byte": bytes([data[0] ^ 1]) + data[1:],
                          "last byte": data[:-1] + bytes([data[-1] ^ 128]), "cut": data[:-1],
                          "swapped": data[4:] + data[:4]}[damage])
    target, filled = make_kv(2), []
    before, free = copies(target), page_ids(4, 24)
    with pytest.raises(SnapshotError, match="v.1/c.1.0.0.0"):
        for block in read_pages(tmp_path, target, np.arange(24), free, num_rows=24, num_kv_heads=HEADS,
                                groups=ONE_GROUP):
            target = fill_pages(target, block)
            filled.append(block.layer)
    others = np.setdiff1d(np.arange(POOL + 1), free)
    assert filled and all(np.array_equal(a[others], b[others]) for a, b in zip(copies(target), before))


@pytest.mark.parametrize("change", [dict(num_rows=23), dict(num_kv_heads=1), dict(dtype="bfloat16")])
def test_arrays_of_another_kind_are_refused(tmp_path: Path, change: dict) -> None:
    write_pages(tmp_path, make_kv(1), page_ids(3, 24), num_kv_heads=HEADS, groups=ONE_GROUP)
    wanted = dict(num_rows=24, num_kv_heads=HEADS, dtype="float32") | change
    kv = make_kv(2, wanted.pop("dtype"))
    with pytest.raises(SnapshotError, match="cannot be read"):
        list(read_pages(tmp_path, kv, np.arange(8), page_ids(4, 8), groups=ONE_GROUP, **wanted))


# -- whole snapshots

IDENTITY = SnapshotIdentity("w", "c", "t", "float32", "float32", PAGE, LAYERS, HEADS, DIM, ONE_GROUP)


def make_cache(num_prompts: int) -> PrefixCache:
    cache = PrefixCache.create(page_size=PAGE, num_pages=POOL, max_pages=POOL)
    for number in range(num_prompts):
        tokens = np.array([1] * 8 + [number] * 6, np.int32)
        lease = cache.acquire(tokens)
        cache.extend(lease, len(tokens))
        cache.take_moves()
        cache.release(lease, tokens)
    return cache


def save(path: Path, cache: PrefixCache, kv: KVCache) -> None:
    packed, ids, host_ids = pack(cache)
    with new_snapshot(path, IDENTITY, packed) as pages_folder:
        write_pages(pages_folder, kv, ids, num_kv_heads=HEADS, groups=ONE_GROUP, host_page_ids=host_ids)


def load(path: Path, cache: PrefixCache, kv: KVCache) -> KVCache:
    snapshot, filled = open_snapshot(path, IDENTITY), [kv]

    def fill(rows: np.ndarray, ids: np.ndarray) -> None:
        filled[0] = read(snapshot.pages_folder, filled[0], rows, ids, snapshot.tree.num_rows)
    unpack(cache, snapshot.tree, fill)
    return filled[0]


def kv_of(cache: PrefixCache, kv: KVCache, tokens: np.ndarray) -> list[np.ndarray]:
    """Content of the whole pages cached of a prompt."""
    pages = cache.tree.match(tokens, touch=False).pages[0]
    return [array[pages] for array in copies(kv)]


def test_snapshot_loaded_into_a_new_pool_gives_every_prompt_its_kv(tmp_path: Path) -> None:
    old, old_kv = make_cache(7), make_kv(1)
    new, new_kv = PrefixCache.create(page_size=PAGE, num_pages=POOL, max_pages=POOL), make_kv(2)
    save(tmp_path / "s", old, old_kv)
    new_kv = load(tmp_path / "s", new, new_kv)
    new.check_invariants()
    for number in range(7):
        tokens = np.array([1] * 8 + [number] * 6, np.int32)
        assert new.num_matching_tokens(np.append(tokens, 0), next(iter(old.tree.roots))) == 14
        assert all(map(np.array_equal, kv_of(new, new_kv, tokens), kv_of(old, old_kv, tokens)))


def test_save_has_everything_on_the_disk_before_the_manifest_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                        ) -> None:
    synced, unsynced = set(), []
    fsync, replace = os.fsync, os.replace

    def note(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    def check(source: Path, target: Path) -> None:
        unsynced.extend(path for path in (tmp_path / "s").rglob("*")
                        if path.name != ".lock" and path.stat().st_ino not in synced)
        replace(source, target)
    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    save(tmp_path / "s", make_cache(7), make_kv(1))
    assert not unsynced and len(synced) > 2 * LAYERS * 2


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """Writing beyond a file size fails, as on a full disk or over a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_save_that_the_disk_refuses_keeps_the_old_snapshot(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kv = make_kv(1)
    save(tmp_path / "s", make_cache(1), kv)
    before = {file: file.read_bytes() for file in (tmp_path / "s").rglob("*") if file.is_file()}
    packed, ids, _ = pack(make_cache(7))
    with pytest.raises(SnapshotError, match="cannot be written"):
        with new_snapshot(tmp_path / "s", IDENTITY, packed) as pages_folder:
            request.getfixturevalue("file_size_limit")
            write_pages(pages_folder, kv, ids, num_kv_heads=HEADS, groups=ONE_GROUP)
    assert {file: file.read_bytes() for file in (tmp_path / "s").rglob("*") if file.is_file()} == before
    load(tmp_path / "s", make_cache(0), make_kv(2))


def test_save_whose_pages_folder_cannot_be_made_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SnapshotError, match="file/pages"):
        write_pages(tmp_path / "file" / "pages", make_kv(1), page_ids(3, 9), num_kv_heads=HEADS, groups=ONE_GROUP)


def test_save_with_an_altered_page_file_is_found_before_the_tree_changes(tmp_path: Path) -> None:
    save(tmp_path / "s", make_cache(7), make_kv(1))
    file = next((tmp_path / "s").rglob("k.2/c.0.0.0.0"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    cache = make_cache(0)
    with pytest.raises(SnapshotError, match="k.2/c.0.0.0.0"):
        load(tmp_path / "s", cache, make_kv(2))
    cache.check_invariants()
    assert cache.num_free_pages == POOL and not list(cache.tree.nodes())
